// Events of torch's profiler on a device. Work has ended when the call that launches it returns, so its clock is that of the host.
#include <c10/util/ApproximateClock.h>
#include <torch/csrc/profiler/stubs/base.h>

#include "memory.hpp"

namespace emulated {
namespace {
using Stamp = torch::profiler::impl::ProfilerVoidEventStub;

struct Profiler final : torch::profiler::impl::ProfilerStubs {
  void record(c10::DeviceIndex* device, Stamp* event, int64_t* host_nanoseconds) const override {
    auto now = c10::getTime();
    if (device != nullptr) *device = static_cast<c10::DeviceIndex>(current_device());
    *event = std::make_shared<int64_t>(now);
    if (host_nanoseconds != nullptr) *host_nanoseconds = now;
  }
  float elapsed(const Stamp* begin, const Stamp* end) const override {  // microseconds
    return static_cast<float>(*static_cast<int64_t*>(end->get()) - *static_cast<int64_t*>(begin->get())) / 1000.0f;
  }
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> work) const override {
    int before = current_device();
    for (int device = 0; device < devices; ++device) {
      set_current_device(device);
      work(device);
    }
    set_current_device(before);
  }
  void synchronize() const override {}
};

Profiler profiler;
[[maybe_unused]] const bool is_registered = [] {
  torch::profiler::impl::registerCUDAMethods(&profiler);
  return true;
}();
}  // namespace
}  // namespace emulated
