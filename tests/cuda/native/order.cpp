#include "order.hpp"

#include <algorithm>
#include <chrono>
#include <map>

#include "failure.hpp"

namespace emulated {

std::recursive_mutex lock;
Watch watch;

namespace {
using Guard = std::lock_guard<std::recursive_mutex>;
struct Waiting {
  int stream;
  int64_t tick;
  const void* memory;
  std::function<void()> act;
};
std::map<std::pair<int, int64_t>, int> numbers;
std::vector<Clock> clocks;
Clock host;
std::vector<Waiting> waiting;
std::vector<std::string> found;

int add_stream() {
  clocks.emplace_back();
  return static_cast<int>(clocks.size()) - 1;
}

bool happened_before(const Access& earlier, int stream) { return earlier.stream < 0 || earlier.stream == stream || clocks[stream].at(earlier.stream) >= earlier.tick; }

std::string described(const Access& earlier) { return "stream " + std::to_string(earlier.stream) + " at " + earlier.site; }
}  // namespace

void Clock::join(const Clock& other) {
  if (ticks.size() < other.ticks.size()) ticks.resize(other.ticks.size());
  for (size_t i = 0; i < other.ticks.size(); ++i) ticks[i] = std::max(ticks[i], other.ticks[i]);
}

void History::forget(int stream) {
  if (write.stream == stream) write = Access();
  reads.erase(std::remove_if(reads.begin(), reads.end(), [&](const Access& each) { return each.stream == stream; }), reads.end());
}

int index_of(int device, int64_t id) {
  Guard guard(lock);
  auto [at, is_new] = numbers.try_emplace({device, id}, 0);
  if (is_new) at->second = add_stream();
  return at->second;
}
int index_of(const c10::Stream& stream) { return index_of(stream.device_index(), stream.id()); }
int streams_so_far() {
  Guard guard(lock);
  return static_cast<int>(clocks.size());
}

int64_t launch(int stream) {
  check_device();
  Guard guard(lock);
  auto& clock = clocks[stream];
  clock.join(host);
  if (clock.ticks.size() <= static_cast<size_t>(stream)) clock.ticks.resize(stream + 1);
  return ++clock.ticks[stream];
}

void access(History& history, int stream, bool is_write, const std::string& where) {
  Guard guard(lock);
  if (!happened_before(history.write, stream))
    report_race((is_write ? "written" : "read") + (" on stream " + std::to_string(stream)) + " at " + where + " while it may still be written on " + described(history.write));
  if (is_write)
    for (const auto& read : history.reads)
      if (!happened_before(read, stream)) report_race("written on stream " + std::to_string(stream) + " at " + where + " while it may still be read on " + described(read));
  Access now{stream, clocks[stream].at(stream), where};
  if (is_write) {
    history.write = now;
    history.reads.clear();
    return;
  }
  for (auto& read : history.reads)
    if (read.stream == stream) {
      read = now;
      return;
    }
  history.reads.push_back(now);
}

void reuse(History& history, int stream, const std::string& where) {
  Guard guard(lock);
  auto& clock = clocks[stream];
  clock.join(host);
  auto check = [&](const Access& earlier, const char* what) {
    if (!happened_before(earlier, stream))
      report_race("memory is given to a tensor of stream " + std::to_string(stream) + " at " + where + " while a freed tensor may still be " + what + " on " + described(earlier) +
                  " (record_stream, or an event, has to come between)");
  };
  check(history.write, "written");
  for (const auto& read : history.reads) check(read, "read");
  history = History();
}

void record(Event& event, int stream) {
  Guard guard(lock);
  launch(stream);
  event.clock = clocks[stream];
  event.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
void wait(int stream, const Clock& clock) {
  Guard guard(lock);
  clocks[stream].join(clock);
}
Clock clock_of(int stream) {
  Guard guard(lock);
  return clocks[stream];
}

// One thread at a time: a second one that waits for the same copy must find it done, not begun.
std::recursive_mutex acting;

template <typename Is>
void run_waiting(const Is& is_due) {
  Guard one_at_a_time(acting);
  std::vector<std::function<void()>> due;
  {
    Guard guard(lock);
    for (auto at = waiting.begin(); at != waiting.end();) {
      if (!is_due(*at)) {
        ++at;
        continue;
      }
      due.push_back(std::move(at->act));
      at = waiting.erase(at);
    }
  }
  for (auto& act : due) act();
}

void host_waits_for(const Clock& clock) {
  {
    Guard guard(lock);
    host.join(clock);
  }
  run_waiting([](const Waiting& each) { return host.at(each.stream) >= each.tick; });
}
void settle(int stream, const void* memory) {
  run_waiting([&](const Waiting& each) { return each.memory == memory && (each.stream == stream || clocks[stream].at(each.stream) >= each.tick); });
}
void when_seen(int stream, int64_t tick, const void* memory, std::function<void()> act) {
  Guard guard(lock);
  waiting.push_back({stream, tick, memory, std::move(act)});
}

void host_synchronises(Wait kind, const char* what) {
  static const char* names[] = {"item", "copy to the host", "copy to the device", "stream", "event", "device", "operation"};
  if (watch.synchronised) watch.synchronised(names[static_cast<int>(kind)], what);
  check_device();
}

std::string site() { return watch.orders && watch.site ? watch.site() : std::string(); }

std::vector<std::string> races() {
  Guard guard(lock);
  return found;
}
void report_race(const std::string& text) {
  Guard guard(lock);
  if (watch.orders && std::find(found.begin(), found.end(), text) == found.end()) found.push_back(text);
}
}  // namespace emulated
