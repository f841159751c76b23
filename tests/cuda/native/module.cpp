// What Python sees of the emulation.
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "failure.hpp"
#include "nccl.hpp"
#include "operators.hpp"

namespace py = pybind11;

namespace emulated {
namespace {
py::dict as_dict(const Counts& counts) {
  py::dict out;
  out["current"] = counts.current, out["peak"] = counts.peak, out["allocated"] = counts.gained, out["freed"] = counts.lost;
  return out;
}

py::dict memory_stats(int device) {
  py::dict out;
  const char* pools[] = {"small_pool", "large_pool"};
  for (int pool = 0; pool < 2; ++pool) {
    auto found = stats(device, pool);
    py::dict one;
    one["allocated_bytes"] = as_dict(found.allocated), one["requested_bytes"] = as_dict(found.requested), one["reserved_bytes"] = as_dict(found.reserved);
    one["active_bytes"] = as_dict(found.active), one["inactive_split_bytes"] = as_dict(found.inactive_split);
    one["allocation"] = as_dict(found.allocations), one["segment"] = as_dict(found.segments);
    out[pools[pool]] = one;
  }
  out["peaks"] = py::dict();
  auto peaks = peaks_of_both(device);
  const char* kinds[] = {"allocated_bytes", "requested_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "allocation", "segment"};
  for (size_t kind = 0; kind < peaks.size(); ++kind) out["peaks"][kinds[kind]] = peaks[kind];
  auto large = stats(device, 1);
  out["num_alloc_retries"] = large.retries, out["num_ooms"] = large.out_of_memory;
  return out;
}

py::list memory_segments() {
  py::list out;
  for (const auto& segment : segments()) {
    py::list blocks;
    int64_t allocated = 0;
    for (const auto& block : segment.blocks) {
      py::dict one;
      one["address"] = block.address, one["size"] = block.size, one["requested_size"] = block.requested;
      one["state"] = block.is_allocated ? "active_allocated" : "inactive";
      if (block.is_allocated) allocated += block.size;
      blocks.append(one);
    }
    py::dict one;
    one["device"] = segment.device, one["address"] = segment.address, one["total_size"] = segment.size, one["allocated_size"] = allocated;
    one["active_size"] = allocated, one["stream"] = segment.stream, one["segment_type"] = segment.is_large ? "large" : "small", one["blocks"] = blocks;
    out.append(one);
  }
  return out;
}

// Python's part of the emulation is called under its lock, and never while the interpreter ends.
template <typename Return, typename... Arguments>
std::function<Return(Arguments...)> guarded(const py::object& callback) {
  if (callback.is_none()) return nullptr;
  auto* held = new py::object(callback);  // outlives the interpreter
  return [held](Arguments... arguments) -> Return {
    if (!Py_IsInitialized()) return Return();
    py::gil_scoped_acquire acquire;
    py::object result = (*held)(arguments...);
    if constexpr (!std::is_void_v<Return>) return result.template cast<Return>();
  };
}
}  // namespace
}  // namespace emulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace emulated;
  c10::SetAllocator(c10::DeviceType::CUDA, device_allocator());
  m.def("initialise", [] { at::globalContext().lazyInitDevice(c10::DeviceType::CUDA); });  // until then torch says that nothing is pinned
  m.def("device_count", [] { return devices; });
  m.def("current_device", &current_device);
  m.def("set_device", &set_current_device);
  m.def("exchange_device", [](int index) {
    int before = current_device();
    set_current_device(index);
    return before;
  });
  m.def("synchronize", &synchronise_device, py::call_guard<py::gil_scoped_release>());
  m.def("fail_device", &fail_device);
  m.def("default_generator", [](int device) { return default_generator(device); });

  m.def("memory_stats", &memory_stats);
  m.def("segments", &memory_segments);
  m.def("reset_peaks", &reset_peaks);
  m.def("empty_cache", &empty_cache);
  m.def("total_memory", &memory_of_a_device);
  m.def("set_memory_limit", &set_memory_limit);
  m.def("resize_storage", &resize_storage);
  m.def("on_cpu", &on_cpu);
  m.def("to_device", [](const at::Tensor& made, int device) { return to_device(made, c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device))); });
  m.def("can_pin", &can_pin);
  m.def("pin", [](uintptr_t address, size_t bytes) { pin(reinterpret_cast<void*>(address), bytes); });
  m.def("unpin", [](uintptr_t address) { unpin(reinterpret_cast<void*>(address)); });

  m.def("operations", &operations);
  m.def("running_operation", &Running::name);  // of this thread
  m.def("races", &races);
  m.def("watch_orders", [](const py::object& site) {
    watch.site = guarded<std::string>(site);
    watch.orders = !site.is_none();
  });
  m.def("on_synchronise", [](const py::object& callback) { watch.synchronised = guarded<void, const char*, const char*>(callback); });
  m.def("on_memory_change", [](const py::object& callback) { on_change = guarded<void, int, uintptr_t, int64_t, int64_t>(callback); });
  m.def("bind_nccl", [m]() mutable { bind_nccl(m); });
}
