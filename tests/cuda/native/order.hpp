// What happens before what: streams, events and the host as vector clocks, and the races that follow from them.
//
// Work of the emulation is done at once, so no race changes a number here. On a device it would: each access of a block of memory is
// recorded with the clock of its stream, and an access that another stream's last one does not happen before is a race. All threads
// of the host share one clock: what one of them waited for is done for the others (locks between threads are not seen here).
#pragma once
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace emulated {

extern std::recursive_mutex lock;  // of all state of the emulation; Python is never called while it is held

struct Clock {
  std::vector<int64_t> ticks;
  int64_t at(size_t stream) const { return stream < ticks.size() ? ticks[stream] : 0; }
  void join(const Clock& other);
};

struct Access {
  int stream = -1;  // none yet
  int64_t tick = 0;
  std::string site;
};

// The accesses of a block since its last write that was ordered after all others.
struct History {
  Access write;
  std::vector<Access> reads;
  void forget(int stream);
};

struct Event {
  Clock clock;
  double seconds = 0;
};

int index_of(const c10::Stream& stream);  // dense numbers of (device, id)
int index_of(int device, int64_t id);
int streams_so_far();
c10::Stream current_stream(int device);
c10::Stream new_stream(int device);

int64_t launch(int stream);  // a kernel or copy begins: returns its tick
void access(History& history, int stream, bool is_write, const std::string& site);
void reuse(History& history, int stream, const std::string& site);

void record(Event& event, int stream);
void wait(int stream, const Clock& clock);
Clock clock_of(int stream);

// The host waits, or sees that something ended.
void host_waits_for(const Clock& clock);

// Runs in the wait that covers a copy, or before another copy that follows it on the device reads the same memory of the host.
void when_seen(int stream, int64_t tick, const void* memory, std::function<void()> act);
void settle(int stream, const void* memory);

// Counted and listed with the place in the program.
enum class Wait { item, copy_to_host, copy_to_device, stream, event, device, operation };
void host_synchronises(Wait kind, const char* what);
std::string site();  // of the running Python code; empty unless asked for

struct Watch {
  bool orders = false;  // races are looked for
  std::function<std::string()> site;
  std::function<void(const char* kind, const char* what)> synchronised;
};
extern Watch watch;
std::vector<std::string> races();
void report_race(const std::string& text);
}  // namespace emulated
