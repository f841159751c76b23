// The fused kernels of scaled_dot_product_attention: what CUDA's return, computed by the kernel of the CPU.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <torch/library.h>

#include "device.hpp"
#include "operators.hpp"

namespace emulated {
namespace {
using sdp::SDPBackend;

bool is_half(const at::Tensor& tensor) { return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16; }

// aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: flash before memory-efficient before math. Nested tensors fall to math.
int64_t choose(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask, double, bool,
               std::optional<double>, bool has_groups) {
  auto& context = at::globalContext();
  // `size` of a traced tensor makes numbers of all its symbols, and each length would be compiled anew.
  bool fits = query.dim() == 4 && !query.is_nested() && query.sym_size(-1) == value.sym_size(-1) && query.sym_size(-1) <= 256 && query.sym_size(-1) % 8 == 0;
  bool has_equal_heads = query.dim() == 4 && key.dim() == 4 && query.sym_size(1) == key.sym_size(1);
  bool is_flash = fits && (has_equal_heads || has_groups) && is_half(query) && !mask.has_value();
  if (is_flash && context.userEnabledFlashSDP()) return static_cast<int64_t>(SDPBackend::flash_attention);
  if (fits && has_equal_heads && context.userEnabledMemEfficientSDP()) return static_cast<int64_t>(SDPBackend::efficient_attention);
  TORCH_CHECK(context.userEnabledMathSDP(), "No available kernel. Aborting execution.");
  return static_cast<int64_t>(SDPBackend::math);
}

struct Heads {  // keys and values repeated for the heads that share them
  at::Tensor key, value;
  int64_t shared;
  Heads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) : key(k), value(v), shared(q.size(1) / k.size(1)) {
    if (shared == 1) return;
    key = k.repeat_interleave(shared, 1);
    value = v.repeat_interleave(shared, 1);
  }
  at::Tensor summed(const at::Tensor& gradient) const {
    return shared == 1 ? gradient : gradient.unflatten(1, {gradient.size(1) / shared, shared}).sum(2);
  }
};

// A result in the layout that CUDA's kernel gives it: flash that of its operand, memory-efficient with the heads of a token together.
at::Tensor laid_out(const at::Tensor& made, const at::Tensor& operand, bool is_flash) {
  auto heads = operand.size(1), tokens = operand.size(2), width = operand.size(3);
  std::vector<int64_t> by_token{tokens * heads * width, width, heads * width, 1};
  auto fresh = empty_on_device(operand.sizes(), is_flash && operand.is_non_overlapping_and_dense() ? operand.strides() : at::IntArrayRef(by_token), made.scalar_type(), operand.device());
  on_cpu(fresh).copy_(made);
  return fresh;
}

at::Tensor nothing(c10::Device device) { return empty_on_device({0}, {1}, at::kLong, device); }
std::optional<at::Tensor> mask_on_cpu(const std::optional<at::Tensor>& mask) { return mask.has_value() && mask->defined() ? std::make_optional(on_cpu(*mask)) : std::nullopt; }

// Dropout, which the CPU's kernel has not. The seed is drawn from the device's generator, and draws the mask again in the backward.
struct Dropout {
  double share;
  int64_t seed;
  Dropout(double share, c10::Device device) : share(share), seed(0) {
    if (share == 0) return;
    auto& generator = static_cast<Generator*>(default_generator(device.index()).unsafeGetGeneratorImpl())->on_cpu;
    seed = at::empty({1}, at::kLong).random_(generator).item<int64_t>();
  }
  Dropout(double share, int64_t seed) : share(share), seed(seed) {}
  at::Tensor factors(at::IntArrayRef sizes) const {
    return at::empty(sizes, at::kFloat).bernoulli_(1 - share, at::detail::createCPUGenerator(seed)).div_(1 - share);
  }
};

struct Weights {  // [batch, heads, queries, keys] in fp32, before dropout
  at::Tensor values, lse;
  double scale;
  Weights(const at::Tensor& q, const at::Tensor& k, const std::optional<at::Tensor>& mask, bool is_causal, std::optional<double> given)
      : scale(given.value_or(1 / std::sqrt(static_cast<double>(q.size(-1))))) {
    auto scores = at::matmul(q.to(at::kFloat), k.to(at::kFloat).transpose(-2, -1)) * scale;
    auto none = -std::numeric_limits<float>::infinity();
    if (is_causal) scores.masked_fill_(at::ones({q.size(2), k.size(2)}, at::kBool).triu(1), none);
    if (mask.has_value()) scores = mask->scalar_type() == at::kBool ? scores.masked_fill(mask->logical_not(), none) : scores + *mask;
    lse = at::logsumexp(scores, {-1});
    values = at::exp(scores - lse.unsqueeze(-1)).nan_to_num_(0);
  }
};

std::pair<at::Tensor, at::Tensor> with_dropout(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask, const Dropout& dropout,
                                               bool is_causal, std::optional<double> scale) {
  Weights weights(q, k, mask, is_causal, scale);
  return {at::matmul(weights.values * dropout.factors(weights.values.sizes()), v.to(at::kFloat)).to(q.scalar_type()), weights.lse};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> with_dropout_backward(const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                                     const std::optional<at::Tensor>& mask, const Dropout& dropout, bool is_causal,
                                                                     std::optional<double> scale) {
  Weights weights(q, k, mask, is_causal, scale);
  auto factors = dropout.factors(weights.values.sizes());
  auto upstream = gradient.to(at::kFloat);
  auto of_weights = at::matmul(upstream, v.to(at::kFloat).transpose(-2, -1)) * factors;
  auto of_scores = weights.values * (of_weights - (of_weights * weights.values).sum(-1, true)) * weights.scale;
  auto dtype = q.scalar_type();
  return {at::matmul(of_scores, k.to(at::kFloat)).to(dtype), at::matmul(of_scores.transpose(-2, -1), q.to(at::kFloat)).to(dtype),
          at::matmul((weights.values * factors).transpose(-2, -1), upstream).to(dtype)};
}

std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask, const Dropout& dropout,
                                          bool is_causal, std::optional<double> scale, bool is_flash) {
  Running named("attention");
  Kernel kernel(q.device().index());
  for (const auto& each : {q, k, v}) kernel.reads(each);
  Heads heads(q, on_cpu(k), on_cpu(v));
  auto [out, lse] = dropout.share == 0
                        ? at::_scaled_dot_product_flash_attention_for_cpu(on_cpu(q), heads.key, heads.value, 0.0, is_causal, mask_on_cpu(mask), scale)
                        : with_dropout(on_cpu(q), heads.key, heads.value, mask_on_cpu(mask), dropout, is_causal, scale);
  auto results = std::make_pair(laid_out(out, q, is_flash), to_device(lse.contiguous(), q.device()));
  kernel.writes(results.first);
  return results;
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                                                        const at::Tensor& lse, const std::optional<at::Tensor>& mask, const Dropout& dropout, bool is_causal,
                                                        std::optional<double> scale, bool is_flash) {
  Running named("attention_backward");
  Kernel kernel(q.device().index());
  for (const auto& each : {gradient, q, k, v, out, lse}) kernel.reads(each);
  Heads heads(q, on_cpu(k), on_cpu(v));
  auto [dq, dk, dv] =
      dropout.share == 0 ? at::_scaled_dot_product_flash_attention_for_cpu_backward(on_cpu(gradient), on_cpu(q), heads.key, heads.value, on_cpu(out), on_cpu(lse), 0.0,
                                                                                   is_causal, mask_on_cpu(mask), scale)
                         : with_dropout_backward(on_cpu(gradient), on_cpu(q), heads.key, heads.value, mask_on_cpu(mask), dropout, is_causal, scale);
  return {laid_out(dq, q, is_flash), laid_out(heads.summed(dk), k, is_flash), laid_out(heads.summed(dv), v, is_flash)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor> flash(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double share, bool is_causal, bool, std::optional<double> scale) {
  auto device = q.device();
  Dropout dropout(share, device);
  auto [out, lse] = forward(q, k, v, std::nullopt, dropout, is_causal, scale, true);
  auto state = empty_on_device({2}, {1}, at::kUInt64, device);
  if (share != 0) on_cpu(state).view(at::kLong).fill_(dropout.seed);
  return {out, lse, at::Tensor(), at::Tensor(), q.sym_size(2), k.sym_size(2), state, empty_on_device({}, {}, at::kUInt64, device), nothing(device)};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                                                              const at::Tensor& lse, const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt, double share, bool is_causal,
                                                              const at::Tensor& state, const at::Tensor&, std::optional<double> scale) {
  Dropout dropout(share, share == 0 ? int64_t{0} : on_cpu(state).view(at::kLong)[0].item<int64_t>());
  return backward(gradient, q, k, v, out, lse, std::nullopt, dropout, is_causal, scale, true);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& bias,
                                                                     bool, double share, bool is_causal, std::optional<double> scale) {
  Dropout dropout(share, q.device());
  auto [out, lse] = forward(q, k, v, bias, dropout, is_causal, scale, false);
  auto padded = (q.size(2) + 31) / 32 * 32;  // as the kernel of CUDA aligns it
  auto wide = empty_on_device({q.size(0), q.size(1), padded}, {q.size(1) * padded, padded, 1}, at::kFloat, q.device());
  on_cpu(wide).zero_().narrow(2, 0, q.size(2)).copy_(on_cpu(lse));
  auto number = [&] { return empty_on_device({}, {}, at::kLong, q.device()); };
  auto seed = number();
  if (share != 0) on_cpu(seed).fill_(dropout.seed);
  return {out, wide, seed, number()};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient_backward(const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                                              const at::Tensor& bias, const at::Tensor& out, const at::Tensor& lse, const at::Tensor& seed,
                                                                              const at::Tensor&, double share, std::array<bool, 4> wanted, bool is_causal,
                                                                              std::optional<double> scale) {
  TORCH_CHECK(!wanted[3], "the emulated device has no gradient of an attention bias");
  auto mask = bias.defined() ? std::make_optional(bias) : std::nullopt;
  auto narrow = on_cpu(lse).narrow(2, 0, q.size(2)).contiguous();
  Dropout dropout(share, share == 0 ? int64_t{0} : on_cpu(seed).item<int64_t>());
  auto [dq, dk, dv] = backward(gradient, q, k, v, out, narrow, mask, dropout, is_causal, scale, false);
  return {dq, dk, dv, at::Tensor()};
}
}  // namespace
}  // namespace emulated

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("_scaled_dot_product_flash_attention", &emulated::flash);
  m.impl("_scaled_dot_product_flash_attention_backward", &emulated::flash_backward);
  m.impl("_scaled_dot_product_efficient_attention", &emulated::efficient);
  m.impl("_scaled_dot_product_efficient_attention_backward", &emulated::efficient_backward);
}

namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &emulated::choose)
}
