#include "device.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

namespace emulated {
namespace {
constexpr auto CUDA = c10::DeviceType::CUDA;
thread_local std::map<int, int64_t> chosen;  // ids of current streams
std::atomic<int64_t> next_id{1};

int resolved(c10::Device device) { return device.index() < 0 ? current_device() : device.index(); }
c10::Stream stream_of(int device, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(CUDA, static_cast<c10::DeviceIndex>(device)), id); }

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceGuard() = default;
  explicit DeviceGuard(c10::DeviceType type) { TORCH_INTERNAL_ASSERT(type == CUDA); }
  c10::DeviceType type() const override { return CUDA; }
  c10::Device getDevice() const override { return {CUDA, static_cast<c10::DeviceIndex>(current_device())}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.is_cuda(), "expected a CUDA device");
    set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() < devices) set_current_device(device.index());
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(devices); }

  c10::Stream getStream(c10::Device device) const override { return current_stream(resolved(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(resolved(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(resolved(device)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return set_stream(stream); }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream& stream) const override {
    host_waits_for(clock_of(index_of(stream)));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_synchronises(Wait::stream, "");
    host_waits_for(clock_of(index_of(stream)));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronise_device(device); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override { use_on_stream(data.get(), index_of(stream)); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    emulated::record(*static_cast<Event*>(*event), index_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) wait(index_of(stream), static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    if (event != nullptr) host_waits_for(static_cast<Event*>(event)->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    host_synchronises(Wait::event, "");
    host_waits_for(static_cast<Event*>(event)->clock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(begin != nullptr && end != nullptr, "Both events must be recorded before calculating elapsed time.");
    return 1000 * (static_cast<Event*>(end)->seconds - static_cast<Event*>(begin)->seconds);
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, DeviceGuard)

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  int getNumGPUs() const override { return devices; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(devices); }
  c10::DeviceIndex current_device() const override { return getCurrentDevice(); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(emulated::current_device()); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto before = getCurrentDevice();
    set_current_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? getCurrentDevice() : index);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  c10::Device getDeviceFromPtr(void*) const override { return {CUDA, getCurrentDevice()}; }
  long versionCUDART() const override { return 13000; }
  std::string showConfig() const override { return "an emulated CUDA device"; }
  void deviceSynchronize(c10::DeviceIndex index) const override { synchronise_device(index); }
};
}  // namespace

Generator::Generator(c10::DeviceIndex index)
    : c10::GeneratorImpl(c10::Device(CUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)), on_cpu(at::detail::createCPUGenerator()) {}
uint64_t Generator::seed() {
  auto value = c10::detail::getNonDeterministicRandom(false);
  set_current_seed(value);
  return value;
}
Generator* Generator::clone_impl() const {
  auto* copy = new Generator(device().index());
  copy->set_state(*get_state());
  return copy;
}
const at::Generator& default_generator(int device) {
  static const std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int index = 0; index < devices; ++index) made.push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(index)));
    return made;
  }();
  return all.at(device < 0 ? emulated::current_device() : device);
}

c10::Stream current_stream(int device) {
  auto found = chosen.find(device);
  return stream_of(device, found == chosen.end() ? 0 : found->second);
}
c10::Stream new_stream(int device) { return stream_of(device, next_id++); }
c10::Stream set_stream(const c10::Stream& stream) {
  auto before = current_stream(stream.device_index());
  chosen[stream.device_index()] = stream.id();
  return before;
}
void synchronise_device(int) {
  host_synchronises(Wait::device, "");
  Clock all;
  for (int stream = 0, count = streams_so_far(); stream < count; ++stream) all.join(clock_of(stream));
  host_waits_for(all);
}
}  // namespace emulated

namespace at {
using CUDAHooks = emulated::Hooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
