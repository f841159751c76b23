#include "operators.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <unordered_set>

namespace emulated {
namespace {
constexpr c10::DispatchKeySet CUDA_KEYS(c10::DispatchKey::CUDA);
std::atomic<int64_t> operation_count{0};
thread_local const char* running = "";

at::Tensor with_storage(c10::Storage storage, c10::DispatchKeySet keys, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sym_sizes(), like.sym_strides(), like.sym_storage_offset());
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

// ---------------------------------------------------------------- tensors
at::Tensor empty_memory_format(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<c10::Device> device,
                               std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_allocator(), CUDA_KEYS, c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), device_allocator(), CUDA_KEYS, c10::dtype_or_default(dtype));
}
at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto begin = offset.has_value() ? std::make_optional(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), begin);
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  auto bytes = static_cast<int64_t>((c10::multiply_integers(sizes) + self.storage_offset()) * self.dtype().itemsize());
  if (c10::multiply_integers(sizes) > 0 && static_cast<int64_t>(self.storage().nbytes()) < bytes) resize_storage(self, bytes);
  if (self.sizes() != sizes) impl->set_sizes_contiguous(sizes);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}
at::Tensor& set_storage(at::Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(sizes, strides, offset);
  return self;
}
at::Tensor& set_source_and_sizes(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return set_storage(self, std::move(source), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor& set_source(at::Tensor& self, at::Storage source) {
  int64_t count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {count}, {1});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Tensor& set_empty(at::Tensor& self) {
  c10::DeviceGuard guard(self.device());
  return set_storage(self, {c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true}, 0, {0}, {1});
}
void record_stream(at::Tensor& self, c10::Stream stream) { use_on_stream(self.storage().data(), index_of(stream)); }

// ---------------------------------------------------------------- copies
// To pinned memory without waiting: the values arrive when the host has waited for them. Until then it reads NaN.
void copy_later(const at::Tensor& to, const at::Tensor& from, const Kernel& kernel) {
  auto values = at::empty(to.sizes(), to.options());
  values.copy_(on_cpu(from));
  if (to.is_non_overlapping_and_dense()) std::memset(to.mutable_data_ptr(), 0xff, to.numel() * to.element_size());
  auto target = to;
  when_seen(kernel.stream(), kernel.tick(), to.storage().data(), [target, values]() mutable {
    at::NoGradGuard no_grad;
    target.copy_(values);
  });
}

// From pinned memory without waiting: what the host writes before the copy has ended may be what arrives.
void watch_source(const at::Tensor& from, const Kernel& kernel) {
  if (!watch.orders) return;
  auto values = from.clone();
  auto source = from;
  auto where = site();
  when_seen(kernel.stream(), kernel.tick(), nullptr, [source, values, where] {
    auto same = source.is_contiguous() && std::memcmp(source.const_data_ptr(), values.const_data_ptr(), source.numel() * source.element_size()) == 0;
    if (source.is_contiguous() && !same) report_race("pinned memory was changed before its copy to the device, begun at " + where + ", had ended");
  });
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  if (self.sym_numel() == 0) return self;
  at::NoGradGuard no_grad;
  auto device = (self.is_cuda() ? self : from).device();
  Kernel kernel(device.index());
  kernel.reads(from);
  kernel.writes(self);
  if (self.is_cuda() == from.is_cuda()) {
    if (self.device() != from.device()) {  // peer to peer: each device's stream waits for the other's
      wait(kernel.stream(), clock_of(index_of(current_stream(from.device().index()))));
    }
    on_cpu(self).copy_(on_cpu(from));
    return self;
  }
  const auto& on_host = self.is_cuda() ? from : self;
  bool waits = !non_blocking || (!self.is_cuda() && !is_pinned(on_host.storage().data()));
  if (waits) host_synchronises(self.is_cuda() ? Wait::copy_to_device : Wait::copy_to_host, "");
  if (!waits && !self.is_cuda()) {
    copy_later(self, from, kernel);
    return self;
  }
  if (self.is_cuda()) settle(kernel.stream(), from.storage().data());
  on_cpu(self).copy_(on_cpu(from));
  if (waits) host_waits_for(clock_of(kernel.stream()));
  else if (is_pinned(on_host.storage().data())) watch_source(from, kernel);
  return self;
}
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto target = to;
  copy_(target, from, non_blocking);
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Scalar local_scalar_dense(const at::Tensor& self) {
  host_synchronises(Wait::item, "");
  Kernel kernel(self.device().index());
  kernel.reads(self);
  host_waits_for(clock_of(kernel.stream()));
  return at::native::_local_scalar_dense_cpu(on_cpu(self));
}

// ---------------------------------------------------------------- everything else
template <typename Visit>
void visit_tensors(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const auto& each : value.toTensorVector()) visit(each);
  } else if (value.isOptionalTensorList()) {
    for (const auto& each : value.toOptionalTensorVector())
      if (each.has_value()) visit(*each);
  }
}

bool is_moved_scalar(const at::Tensor& tensor) { return !tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0); }

// CUDA refuses operands of several devices, zero-dimensional tensors of the CPU and its indices aside.
c10::Device device_of(const c10::FunctionSchema& schema, const c10::IValue* arguments) {
  std::optional<c10::Device> seen, named;
  bool takes_indices = schema.name().find("index") != std::string::npos;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    if (arguments[i].isDevice()) named = arguments[i].toDevice();
    visit_tensors(arguments[i], [&](const at::Tensor& tensor) {
      if (is_moved_scalar(tensor)) return;
      bool is_index = takes_indices && (tensor.is_cpu() || (seen.has_value() && seen->is_cpu()));
      TORCH_CHECK(!seen.has_value() || *seen == tensor.device() || is_index, "Expected all tensors to be on the same device, but found at least two devices, ", *seen,
                  " and ", tensor.device(), "! (when checking argument for argument ", schema.arguments()[i].name(), " in method wrapper_CUDA_", schema.name(), ")");
      if (!seen.has_value() || !seen->is_cuda()) seen = tensor.device();
    });
  }
  if (seen.has_value() && seen->is_cuda()) return *seen;
  if (named.has_value() && named->is_cuda() && named->index() >= 0) return *named;
  return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(current_device())};
}

// Operations whose result has a size that the host must know, and those that read a value of the device.
bool synchronises(const c10::FunctionSchema& schema, const c10::IValue* arguments) {
  static const std::unordered_set<std::string> always = {"aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
                                                         "aten::unique_consecutive", "aten::equal", "aten::bincount"};
  const auto& name = schema.name();
  if (schema.overload_name().find("out") != std::string::npos) return false;  // inside another operation
  if (always.count(name) > 0) return true;
  if (name == "aten::repeat_interleave") return arguments[schema.arguments().size() - 1].isNone();
  if (name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put_impl", 0) == 0) {
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      if (!arguments[i].isOptionalTensorList()) continue;
      for (const auto& each : arguments[i].toOptionalTensorVector())
        if (each.has_value() && each->defined() && each->is_cuda() && (each->scalar_type() == at::kBool || each->scalar_type() == at::kByte)) return true;
    }
  }
  return false;
}

// One call of an operation: its tensors as the program sees them, and as the CPU's kernel does.
struct Call {
  const c10::FunctionSchema& schema;
  c10::Device device;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // of the device, of the CPU
  std::vector<at::Tensor> originals;                     // of each argument, undefined for others

  at::Tensor argument(const at::Tensor& tensor, bool is_written, bool is_out, const Kernel& kernel) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    is_written ? kernel.writes(tensor) : kernel.reads(tensor);
    auto made = is_out && tensor.numel() == 0 ? at::empty({0}, tensor.options().device(at::kCPU)) : on_cpu(tensor);
    pairs.emplace_back(tensor, made);
    return made;
  }

  at::Tensor result(const at::Tensor& made) const {
    if (!made.defined() || made.is_cuda()) return made;
    if (made.numel() > 0 || made.has_storage())
      for (const auto& [original, alias] : pairs)
        if (made.has_storage() && made.storage().data() != nullptr && made.storage().data() == alias.storage().data() && alias.storage().data() == original.storage().data())
          return with_storage(original.storage(), CUDA_KEYS, made);
    return to_device(made, device);
  }

  // What the CPU's kernel wrote into a tensor that it may have resized.
  void write_back() const {
    for (const auto& [original, alias] : pairs) {
      bool moved = alias.has_storage() && alias.storage().data() != original.storage().data();
      if (!moved && alias.sizes() == original.sizes()) continue;
      original.resize_(alias.sizes());
      if (moved && alias.numel() > 0) on_cpu(original).copy_(alias);
    }
  }
};

at::Tensor written_argument(const Call& call, const c10::Argument& returned) {
  for (size_t i = 0; i < call.schema.arguments().size(); ++i) {
    const auto* alias = call.schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite() && alias->beforeSets() == returned.alias_info()->beforeSets()) return call.originals[i];
  }
  return {};
}

void convert_arguments(Call& call, c10::IValue* arguments, const Kernel& kernel) {
  for (size_t i = 0; i < call.schema.arguments().size(); ++i) {
    auto& value = arguments[i];
    const auto& argument = call.schema.arguments()[i];
    bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    auto converted = [&](const at::Tensor& tensor) { return call.argument(tensor, is_written, is_written && argument.is_out(), kernel); };
    call.originals.push_back(value.isTensor() ? value.toTensor() : at::Tensor());
    if (value.isTensor()) {
      value = converted(value.toTensor());
    } else if (value.isTensorList()) {
      auto all = value.toTensorVector();
      for (auto& each : all) each = converted(each);
      value = c10::IValue(std::move(all));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> all;
      for (const auto& each : value.toOptionalTensorVector()) all.push_back(each.has_value() ? std::make_optional(converted(*each)) : std::nullopt);
      value = c10::IValue(std::move(all));
    } else if (value.isDevice()) {
      value = c10::Device(at::kCPU);
    } else if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
      value = static_cast<Generator*>(value.toGenerator().unsafeGetGeneratorImpl())->on_cpu;
    } else if (value.isNone() && argument.name() == "generator") {
      value = static_cast<Generator*>(default_generator(call.device.index()).unsafeGetGeneratorImpl())->on_cpu;
    }
  }
}

// A kernel that draws numbers without an argument for the generator (dropout) takes the CPU's, which has the state of the device's until it ends.
class DrawsOnDevice {
 public:
  DrawsOnDevice(const c10::OperatorHandle& op, c10::Device device) {
    const auto& arguments = op.schema().arguments();
    if (!op.hasTag(at::Tag::nondeterministic_seeded)) return;
    if (std::any_of(arguments.begin(), arguments.end(), [](const auto& each) { return each.name() == "generator"; })) return;
    of_device_ = static_cast<Generator*>(default_generator(device.index()).unsafeGetGeneratorImpl())->on_cpu;
    of_host_ = at::detail::getDefaultCPUGenerator();
    kept_ = of_host_.get_state();
    of_host_.set_state(of_device_.get_state());
  }
  DrawsOnDevice(const DrawsOnDevice&) = delete;
  DrawsOnDevice& operator=(const DrawsOnDevice&) = delete;
  ~DrawsOnDevice() {
    if (!of_device_.defined()) return;
    of_device_.set_state(of_host_.get_state());
    of_host_.set_state(kept_);
  }

 private:
  at::Generator of_device_, of_host_;
  at::Tensor kept_;
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  auto* arguments = stack->data() + (stack->size() - count);
  Call call{schema, device_of(schema, arguments), {}, {}};
  c10::DeviceGuard guard(call.device);
  ++operation_count;
  Running named(schema.name().c_str());
  bool waits = synchronises(schema, arguments);
  if (waits) host_synchronises(Wait::operation, schema.name().c_str());
  Kernel kernel(call.device.index());
  convert_arguments(call, arguments, kernel);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    DrawsOnDevice draws(op, call.device);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  call.write_back();
  auto* results = stack->data() + (stack->size() - schema.returns().size());
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto& returned = schema.returns()[i];
    bool is_written = returned.alias_info() != nullptr && returned.alias_info()->isWrite();
    if (results[i].isTensor()) {
      auto original = is_written ? written_argument(call, returned) : at::Tensor();
      results[i] = original.defined() ? original : call.result(results[i].toTensor());
      if (!is_written) kernel.writes(results[i].toTensor());
    } else if (results[i].isTensorList()) {
      auto all = results[i].toTensorVector();
      for (auto& each : all) each = call.result(each);
      results[i] = c10::IValue(std::move(all));
    }
  }
  if (waits) host_waits_for(clock_of(kernel.stream()));
}
}  // namespace

Kernel::Kernel(int device) : Kernel(current_stream(device)) {}
Kernel::Kernel(const c10::Stream& stream) : stream_(index_of(stream)), tick_(launch(stream_)), site_(site()) {}
void Kernel::touches(const at::Tensor& tensor, bool is_write) const {
  if (watch.orders && tensor.defined() && tensor.is_cuda() && tensor.has_storage()) touch(tensor.storage().data(), stream_, is_write, site_);
}
int64_t operations() { return operation_count; }
Running::Running(const char* name) : outer_(running) { running = name; }
Running::~Running() { running = outer_; }
const char* Running::name() { return running; }

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  auto storage = tensor.storage();
  c10::DataPtr same(storage.mutable_data(), new c10::Storage(storage), [](void* held) { delete static_cast<c10::Storage*>(held); }, c10::Device(at::kCPU));
  return with_storage({c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(same), c10::GetCPUAllocator(), false}, c10::DispatchKeySet(c10::DispatchKey::CPU), tensor);
}
at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, c10::Device device) {
  c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(), CUDA_KEYS, dtype);
}
at::Tensor to_device(const at::Tensor& made, c10::Device device) {
  auto dense = made.is_non_overlapping_and_dense() ? made : made.contiguous();
  auto fresh = empty_on_device(dense.sizes(), dense.strides(), dense.scalar_type(), device);
  if (dense.numel() > 0) std::memcpy(fresh.mutable_data_ptr(), dense.const_data_ptr(), dense.numel() * dense.element_size());
  return fresh;
}
void resize_storage(const at::Tensor& holder, int64_t bytes) {
  auto storage = holder.storage();
  c10::DeviceGuard guard(holder.device());
  auto fresh = device_allocator()->allocate(bytes);
  auto kept = std::min<size_t>(bytes, storage.nbytes());
  if (kept > 0) std::memcpy(fresh.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(bytes);
}
}  // namespace emulated

// CUDA has kernels of its own for operations that torch else composes of others, whose temporaries would take memory of the device:
// native_functions.yaml, `CUDA` next to `CompositeExplicitAutograd`. Those on lists of tensors copy between devices one by one there too.
namespace {
const std::vector<std::string> WHOLE = {"addr", "addr.out", "all.dims_out", "any.dims_out", "convolution_backward", "native_group_norm", "native_layer_norm",
                                        "_chunk_cat", "_chunk_cat.out", "_grouped_mm", "linalg__powsum", "split_with_sizes_copy.out"};

bool is_whole(const c10::OperatorName& name) {
  bool is_out = name.overload_name.size() >= 3 && name.overload_name.rfind("out") == name.overload_name.size() - 3;
  return name.name.rfind("aten::_foreach_", 0) == 0 && name.name != "aten::_foreach_copy_" && name.name != "aten::_foreach_copy" && !is_out;
}
}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&emulated::run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  using namespace emulated;
  for (const auto& name : WHOLE) m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames())
    if (is_whole(name)) m.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &emulated::as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_", &set_empty);
  m.impl("set_.source_Storage", &set_source);
  m.impl("set_.source_Storage_storage_offset", &set_source_and_sizes);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("record_stream", &emulated::record_stream);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
}
