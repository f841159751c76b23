#include "memory.hpp"

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iomanip>
#include <memory>
#include <set>
#include <sstream>

#include "failure.hpp"

namespace emulated {
namespace {
using Guard = std::lock_guard<std::recursive_mutex>;
constexpr int64_t KIB = 1024, MIB = 1024 * KIB, GIB = 1024 * MIB;

// c10/cuda/CUDACachingAllocator.cpp
constexpr int64_t MIN_BLOCK = 512, SMALL_SIZE = MIB, SMALL_SEGMENT = 2 * MIB, LARGE_SEGMENT = 20 * MIB, MIN_LARGE = 10 * MIB, ROUND_LARGE = 2 * MIB;

const char* environment(const char* name, const char* otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == 0 ? otherwise : text;
}

// The driver no longer shows devices that fell off the bus: EMULATED_CUDA_LOST names a file with their indices.
int working_devices() {
  int lost = 0, index;
  for (std::ifstream file(environment("EMULATED_CUDA_LOST", "")); file >> index;) ++lost;
  return std::max(0, std::atoi(environment("EMULATED_CUDA_DEVICES", "1")) - lost);
}

// By a number, or the beginning of a UUID of `nvml.c`; -1: there is none, or more than one.
int index_of_device(const std::string& word, int all) {
  if (word.empty()) return -1;
  if (word.find_first_not_of("0123456789") == std::string::npos) return std::atoi(word.c_str()) < all ? std::atoi(word.c_str()) : -1;
  int found = -1;
  for (int index = 0; index < all; ++index) {
    char uuid[64];
    std::snprintf(uuid, sizeof uuid, "GPU-00000000-0000-0000-0000-%012d", index + 1);
    if (std::string(uuid).rfind(word, 0) != 0) continue;
    if (found >= 0) return -1;
    found = index;
  }
  return found;
}

int count_devices() {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  int all = working_devices();
  if (visible == nullptr) return all;
  // As the driver: devices up to the first that does not exist, and none if one is named twice.
  std::stringstream words(visible);
  std::set<int> seen;
  for (std::string word; std::getline(words, word, ',');) {
    int index = index_of_device(word, all);
    if (index < 0) break;
    if (!seen.insert(index).second) return 0;
  }
  return static_cast<int>(seen.size());
}

struct Segment;
struct Block {
  char* pointer;
  int64_t size, requested = 0;
  bool is_allocated = false;
  Segment* segment;
  Block *previous = nullptr, *next = nullptr;
  std::vector<int> other_streams;
  History history;
};
struct BySize {
  bool operator()(const Block* a, const Block* b) const { return a->size != b->size ? a->size < b->size : a->pointer < b->pointer; }
};
struct Segment {
  char* pointer;
  int64_t size;
  int device, stream;
  bool is_large;
};
struct PoolKey {
  int device, stream;
  bool is_large;
  bool operator<(const PoolKey& o) const { return std::tie(device, stream, is_large) < std::tie(o.device, o.stream, o.is_large); }
};

std::map<PoolKey, std::set<Block*, BySize>> unused;
std::map<uintptr_t, Block*> allocated_at;  // by first address
std::set<Block*> first_blocks;             // of each segment
std::map<int, std::array<Stats, 3>> counted;  // of the small pool, the large one, both
std::map<uintptr_t, size_t> pinned;
thread_local int current = 0;
std::atomic<int64_t> limit{0};

int64_t rounded(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }
int64_t segment_size(int64_t size) { return size <= SMALL_SIZE ? SMALL_SEGMENT : size < MIN_LARGE ? LARGE_SEGMENT : rounded(size, ROUND_LARGE); }
PoolKey pool_of(const Block& block) { return {block.segment->device, block.segment->stream, block.segment->is_large}; }
void add(const Block& block, Counts Stats::*kind, int64_t amount) {
  auto& of = counted[block.segment->device];
  (of[block.segment->is_large ? 1 : 0].*kind).add(amount);
  (of[2].*kind).add(amount);
}

int64_t total(int device, Counts Stats::*kind) { return (counted[device][2].*kind).current; }

std::string amount(int64_t bytes) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(2);
  if (bytes <= 1024) out << bytes << " bytes";
  else if (bytes <= MIB) out << bytes / 1024.0 << " KiB";
  else if (bytes <= GIB) out << bytes / 1048576.0 << " MiB";
  else out << bytes / 1073741824.0 << " GiB";
  return out.str();
}

void release(std::set<Block*, BySize>& pool, Block* block) {
  add(*block, &Stats::reserved, -block->segment->size);
  add(*block, &Stats::segments, -1);
  pool.erase(block);
  first_blocks.erase(block);
  std::free(block->segment->pointer);
  delete block->segment;
  delete block;
}

void release_cached(int device) {
  for (auto& [key, pool] : unused) {
    if (key.device != device) continue;
    std::vector<Block*> whole;
    for (auto* block : pool)
      if (block->previous == nullptr && block->next == nullptr) whole.push_back(block);
    for (auto* block : whole) release(pool, block);
  }
}

[[noreturn]] void raise_out_of_memory(int device, int64_t wanted) {
  ++counted[device][1].out_of_memory;
  auto all = memory_of_a_device();
  auto reserved = total(device, &Stats::reserved), allocated = total(device, &Stats::allocated);
  std::ostringstream text;
  text << runtime() << " out of memory. Tried to allocate " << amount(wanted) << ". GPU " << device << " has a total capacity of " << amount(all) << " of which "
       << amount(std::max<int64_t>(0, all - reserved)) << " is free. Of the allocated memory " << amount(allocated) << " is allocated by PyTorch, and "
       << amount(reserved - allocated) << " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
       << "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  "
       << "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)";
  throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text.str());
}

Block* new_segment(const PoolKey& key, int64_t size) {
  auto bytes = segment_size(size);
  if (total(key.device, &Stats::reserved) + bytes > memory_of_a_device()) {
    ++counted[key.device][1].retries;
    release_cached(key.device);
    if (total(key.device, &Stats::reserved) + bytes > memory_of_a_device()) raise_out_of_memory(key.device, bytes);
  }
  auto* pointer = static_cast<char*>(std::aligned_alloc(512, bytes));
  TORCH_CHECK(pointer != nullptr, "the machine has no memory for the emulated device");
  auto* block = new Block{pointer, bytes};
  block->segment = new Segment{pointer, bytes, key.device, key.stream, key.is_large};
  first_blocks.insert(block);
  add(*block, &Stats::reserved, bytes);
  add(*block, &Stats::segments, 1);
  return block;
}

Block* find(const PoolKey& key, int64_t size) {
  auto& pool = unused[key];
  Block wanted{nullptr, size};
  auto at = pool.lower_bound(&wanted);
  if (at == pool.end()) return nullptr;
  auto* block = *at;
  pool.erase(at);
  if (block->previous != nullptr || block->next != nullptr) add(*block, &Stats::inactive_split, -block->size);
  return block;
}

void split(Block* block, int64_t size) {
  auto left = block->size - size;
  if (!(block->segment->is_large ? left > SMALL_SIZE : left >= MIN_BLOCK)) return;
  auto* rest = new Block{block->pointer + size, left};
  rest->segment = block->segment;
  rest->history = block->history;
  rest->previous = block;
  rest->next = block->next;
  if (rest->next != nullptr) rest->next->previous = rest;
  block->next = rest;
  block->size = size;
  unused[pool_of(*rest)].insert(rest);
  add(*rest, &Stats::inactive_split, left);
}

// The joined block keeps the younger accesses of both: what may still use either part may use the whole.
void join_histories(History& into, const History& other) {
  into.reads.insert(into.reads.end(), other.reads.begin(), other.reads.end());
  if (other.write.stream >= 0) into.reads.push_back(other.write);
}

void merge(Block* block, Block* other) {
  if (other == nullptr || other->is_allocated) return;
  unused[pool_of(*other)].erase(other);
  add(*other, &Stats::inactive_split, -other->size);
  if (other == block->previous) {
    block->pointer = other->pointer;
    block->previous = other->previous;
    if (block->previous != nullptr) block->previous->next = block;
    if (first_blocks.erase(other) > 0) first_blocks.insert(block);
  } else {
    block->next = other->next;
    if (block->next != nullptr) block->next->previous = block;
  }
  block->size += other->size;
  join_histories(block->history, other->history);
  delete other;
}

void count(Block& block, int sign) {
  add(block, &Stats::allocated, sign * block.size);
  add(block, &Stats::active, sign * block.size);
  add(block, &Stats::requested, sign * block.requested);
  add(block, &Stats::allocations, sign);
}

void free_block(void* context) {
  int device;
  uintptr_t address;
  int64_t size, requested;
  {
    Guard guard(lock);
    auto* block = static_cast<Block*>(context);
    device = block->segment->device, address = reinterpret_cast<uintptr_t>(block->pointer), size = block->size, requested = block->requested;
    allocated_at.erase(address);
    count(*block, -1);
    block->is_allocated = false;
    // The allocator waits for the streams that record_stream named before it gives the memory out again.
    for (int stream : block->other_streams) block->history.forget(stream);
    block->other_streams.clear();
    merge(block, block->previous);
    merge(block, block->next);
    if (block->previous != nullptr || block->next != nullptr) add(*block, &Stats::inactive_split, block->size);
    unused[pool_of(*block)].insert(block);
  }
  if (on_change) on_change(device, address, -size, -requested);
}

// 0xff: NaN in every floating-point type. Whoever reads memory that nobody wrote shall notice.
int fresh_byte() {
  static const int byte = std::strcmp(environment("EMULATED_CUDA_FRESH", "nan"), "zero") == 0 ? 0 : 0xff;
  return byte;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(current));
    if (bytes == 0) return {nullptr, nullptr, &free_block_or_nothing, device};
    auto where = site();
    int64_t size = rounded(static_cast<int64_t>(bytes), MIN_BLOCK);
    Block* block;
    {
      Guard guard(lock);
      int stream = index_of(current_stream(current));
      PoolKey key{current, stream, size > SMALL_SIZE};
      block = find(key, size);
      if (block == nullptr) block = new_segment(key, size);
      split(block, size);
      reuse(block->history, stream, where);
      block->is_allocated = true;
      block->requested = static_cast<int64_t>(bytes);
      allocated_at[reinterpret_cast<uintptr_t>(block->pointer)] = block;
      count(*block, 1);
    }
    std::memset(block->pointer, fresh_byte(), block->size);
    if (on_change) on_change(current, reinterpret_cast<uintptr_t>(block->pointer), block->size, block->requested);
    return {block->pointer, block, &free_block_or_nothing, device};
  }
  static void free_block_or_nothing(void* context) {
    if (context != nullptr) free_block(context);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

void free_pinned(void* pointer) {
  if (pointer == nullptr) return;
  unpin(pointer);
  std::free(pointer);
}
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_pinned, c10::Device(c10::DeviceType::CPU)};
    // Not torch's own allocator: the text of cudaErrorMemoryAllocation, for memory of the host.
    TORCH_CHECK(can_pin(bytes), runtime(), " error: out of memory\n", runtime(), " kernel errors might be asynchronously reported at some other API call");
    auto size = static_cast<size_t>(rounded(static_cast<int64_t>(bytes), 512));
    void* pointer = std::aligned_alloc(512, size);
    std::memset(pointer, fresh_byte(), size);
    pin(pointer, size);
    return {pointer, pointer, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

Block* block_of(const void* pointer) {
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto after = allocated_at.upper_bound(address);
  if (after == allocated_at.begin()) return nullptr;
  auto* block = (--after)->second;
  return address < reinterpret_cast<uintptr_t>(block->pointer) + block->size ? block : nullptr;
}
}  // namespace

const int devices = count_devices();
std::function<void(int, uintptr_t, int64_t, int64_t)> on_change;

int current_device() { return current; }
void set_current_device(int index) {
  TORCH_CHECK(index < devices, runtime(), " error: invalid device ordinal");
  if (index >= 0) current = index;
}
int64_t memory_of_a_device() {
  static const auto all = static_cast<int64_t>(std::atof(environment("EMULATED_CUDA_MEMORY_GIB", "79.2")) * GIB);
  return limit > 0 ? limit.load() : all;
}
void set_memory_limit(int64_t bytes) { limit = bytes; }

c10::Allocator* device_allocator() {
  static DeviceAllocator it;
  return &it;
}
c10::Allocator* pinned_allocator() {
  static PinnedAllocator it;
  return &it;
}

void touch(const void* pointer, int stream, bool is_write, const std::string& where) {
  Guard guard(lock);
  if (auto* block = block_of(pointer); block != nullptr) access(block->history, stream, is_write, where);
}
void use_on_stream(const void* pointer, int stream) {
  Guard guard(lock);
  auto* block = block_of(pointer);
  if (block != nullptr && block->segment->stream != stream) block->other_streams.push_back(stream);
}

bool can_pin(size_t bytes) {
  static const auto all = static_cast<size_t>(std::atof(environment("EMULATED_CUDA_PINNED_GIB", "1024")) * GIB);
  Guard guard(lock);
  size_t used = 0;
  for (const auto& [_, size] : pinned) used += size;
  return used + bytes <= all;
}
bool is_pinned(const void* pointer) {
  Guard guard(lock);
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto after = pinned.upper_bound(address);
  if (after == pinned.begin()) return false;
  --after;
  return address < after->first + after->second;
}
// The machine gives out memory that overlaps with what is locked only if that was freed first. A device would keep the mapping of the
// freed memory: is_pinned() would change its answer in the middle of a tensor's life.
void pin(const void* pointer, size_t bytes) {
  Guard guard(lock);
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto next = pinned.lower_bound(address);
  bool overlaps = next != pinned.end() && next->first < address + bytes;
  if (next != pinned.begin()) overlaps = overlaps || std::prev(next)->first + std::prev(next)->second > address;
  TORCH_CHECK(!overlaps, "CUDA error: part or all of the requested memory range is already mapped (memory was freed before cudaHostUnregister)");
  pinned[address] = bytes;
}
void unpin(const void* pointer) {
  Guard guard(lock);
  pinned.erase(reinterpret_cast<uintptr_t>(pointer));
}

void Counts::add(int64_t bytes) {
  current += bytes;
  peak = std::max(peak, current);
  (bytes > 0 ? gained : lost) += std::abs(bytes);
}
Stats stats(int device, int pool) {
  Guard guard(lock);
  return counted[device][pool];
}
namespace {
constexpr Counts Stats::*KINDS[] = {&Stats::allocated, &Stats::requested, &Stats::reserved, &Stats::active, &Stats::inactive_split, &Stats::allocations, &Stats::segments};
}
std::vector<int64_t> peaks_of_both(int device) {
  Guard guard(lock);
  std::vector<int64_t> out;
  for (auto kind : KINDS) out.push_back((counted[device][2].*kind).peak);
  return out;
}
void reset_peaks(int device) {
  Guard guard(lock);
  for (auto& of : counted[device])
    for (auto kind : KINDS) (of.*kind).peak = (of.*kind).current;
}
void empty_cache(int device) {
  Guard guard(lock);
  release_cached(device);
}
std::vector<SegmentView> segments() {
  Guard guard(lock);
  std::vector<SegmentView> out;
  for (const auto* first : first_blocks) {
    auto& of = *first->segment;
    SegmentView view{reinterpret_cast<uintptr_t>(of.pointer), of.size, of.device, of.stream, of.is_large, {}};
    for (const auto* each = first; each != nullptr; each = each->next)
      view.blocks.push_back({reinterpret_cast<uintptr_t>(each->pointer), each->size, each->requested, each->is_allocated});
    out.push_back(std::move(view));
  }
  return out;
}
}  // namespace emulated
