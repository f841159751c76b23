// Memory of the emulated devices as torch's caching allocator gives it out, and pinned memory of the host.
#pragma once
#include <c10/core/Allocator.h>

#include <map>
#include <string>
#include <vector>

#include "order.hpp"

namespace emulated {

extern const int devices;
int current_device();
void set_current_device(int index);
int64_t memory_of_a_device();  // bytes

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

// Device memory is read or written by work of a stream, for the races; nothing for other memory.
void touch(const void* pointer, int stream, bool is_write, const std::string& site);
void use_on_stream(const void* pointer, int stream);  // Tensor.record_stream

bool can_pin(size_t bytes);  // the system allows EMULATED_CUDA_PINNED_GIB of pinned memory
bool is_pinned(const void* pointer);
void pin(const void* pointer, size_t bytes);
void unpin(const void* pointer);

struct Counts {  // bytes of a kind, as `torch.cuda.memory_stats` has them
  int64_t current = 0, peak = 0, gained = 0, lost = 0;
  void add(int64_t bytes);
};
struct Stats {
  Counts allocated, requested, reserved, active, inactive_split, allocations, segments;
  int64_t retries = 0, out_of_memory = 0;
};
Stats stats(int device, int pool);  // pool: 0 small, 1 large
std::vector<int64_t> peaks_of_both(int device);  // of the kinds of Stats in their order, both pools together
void reset_peaks(int device);
void empty_cache(int device);
void set_memory_limit(int64_t bytes);

struct BlockView {
  uintptr_t address;
  int64_t size, requested;
  bool is_allocated;
};
struct SegmentView {
  uintptr_t address;
  int64_t size;
  int device, stream;
  bool is_large;
  std::vector<BlockView> blocks;
};
std::vector<SegmentView> segments();

// What is live and how much of it: called after each allocation (+bytes) and each free (-bytes) of a device.
extern std::function<void(int device, uintptr_t address, int64_t bytes, int64_t requested)> on_change;
}  // namespace emulated
