// The matrix product of fp8, as CUDA has it on compute capability 8.9 and later: its conditions, and sums in fp32.
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <cstdlib>
#include <tuple>

#include "operators.hpp"

namespace emulated {
namespace {
bool has_tensor_cores_for_fp8() {
  const char* capability = std::getenv("EMULATED_CUDA_CAPABILITY");
  return capability == nullptr || std::atof(capability) >= 8.85;
}

bool is_of_rows(const at::Tensor& scale_a, const at::Tensor& scale_b, int64_t rows, int64_t columns) {
  return scale_a.sizes() == at::IntArrayRef({rows, 1}) && scale_b.sizes() == at::IntArrayRef({1, columns}) && scale_a.is_contiguous() && scale_b.is_contiguous();
}

// aten/src/ATen/native/cuda/ScaledBlas.cpp, of scales for a tensor or for its rows.
void check_scaled(const at::Tensor& a, const at::Tensor& b, const at::Tensor& scale_a, const at::Tensor& scale_b, const std::optional<at::Tensor>& bias,
                  at::ScalarType dtype) {
  TORCH_CHECK(has_tensor_cores_for_fp8(), "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm MI300+");
  TORCH_CHECK(a.dim() == 2, "mat1 must be a matrix");
  TORCH_CHECK(b.dim() == 2, "mat2 must be a matrix");
  TORCH_CHECK(a.size(1) == b.size(0), "mat1 and mat2 shapes cannot be multiplied (", a.size(0), "x", a.size(1), " and ", b.size(0), "x", b.size(1), ")");
  TORCH_CHECK(c10::isFloat8Type(a.scalar_type()), "Expected mat1 to be Float8 matrix got ", a.scalar_type());
  TORCH_CHECK(c10::isFloat8Type(b.scalar_type()), "Expected mat2 to be Float8 matrix got ", b.scalar_type());
  TORCH_CHECK(a.scalar_type() != at::kFloat8_e5m2 || b.scalar_type() != at::kFloat8_e5m2, "Multiplication of two Float8_e5m2 matrices is not supported");
  TORCH_CHECK(a.stride(1) == 1 && a.stride(0) >= a.size(1), "self must be row_major, got stride ", a.strides());
  TORCH_CHECK(b.stride(0) == 1 && b.stride(1) >= b.size(0), "mat2 must be col_major, got stride ", b.strides());
  TORCH_CHECK(a.size(1) % 16 == 0, "Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: (", a.size(0), "x", a.size(1), ").");
  TORCH_CHECK(b.size(0) % 16 == 0 && b.size(1) % 16 == 0, "mat2 shape (", b.size(0), "x", b.size(1), ") must be divisible by 16");
  TORCH_CHECK(scale_a.scalar_type() == at::kFloat && scale_b.scalar_type() == at::kFloat, "Both scale_a and scale_b must be float (fp32) tensors.");
  bool is_tensorwise = scale_a.numel() == 1 && scale_b.numel() == 1;
  TORCH_CHECK(is_tensorwise || is_of_rows(scale_a, scale_b, a.size(0), b.size(1)), "Invalid scaling configuration: got scale_a.size()=", scale_a.sizes(),
              " and scale_b.size()=", scale_b.sizes());
  TORCH_CHECK(is_tensorwise || dtype == at::kBFloat16, "Only bf16 high precision output types are supported for row-wise scaling.");
  if (!bias.has_value()) return;
  TORCH_CHECK(bias->numel() == b.size(1), "Bias must be size ", b.size(1), " but got ", bias->numel());
  TORCH_CHECK(dtype != at::kFloat, "Bias is not supported when out_dtype is set to Float32");
  auto wanted = dtype == at::kHalf ? at::kHalf : at::kBFloat16;
  TORCH_CHECK(bias->scalar_type() == wanted, "Bias must be ", wanted, " to compute ", dtype, " output, but got ", bias->scalar_type());
}

at::Tensor scaled_mm(const at::Tensor& a, const at::Tensor& b, const at::Tensor& scale_a, const at::Tensor& scale_b, const std::optional<at::Tensor>& bias,
                     const std::optional<at::Tensor>& scale_result, std::optional<at::ScalarType> out_dtype, bool) {
  auto dtype = out_dtype.value_or(a.scalar_type());
  check_scaled(a, b, scale_a, scale_b, bias, dtype);
  Kernel kernel(a.device().index());
  for (const auto& each : {a, b, scale_a, scale_b, bias.value_or(at::Tensor()), scale_result.value_or(at::Tensor())}) {
    TORCH_CHECK(!each.defined() || each.device() == a.device(), "Expected all tensors to be on the same device, but found at least two devices, ", a.device(), " and ",
                each.device(), "!");
    kernel.reads(each);
  }
  bool is_tensorwise = scale_a.numel() == 1 && scale_b.numel() == 1;
  auto factor = [&](const at::Tensor& scale) { return is_tensorwise ? on_cpu(scale).reshape({}) : on_cpu(scale); };
  auto product = at::mm(on_cpu(a).to(at::kFloat), on_cpu(b).to(at::kFloat)).mul_(factor(scale_a)).mul_(factor(scale_b));
  if (bias.has_value()) product.add_(on_cpu(*bias).to(at::kFloat));
  if (c10::isFloat8Type(dtype)) {
    if (scale_result.has_value()) product.mul_(on_cpu(*scale_result).reshape({}));
    double largest = dtype == at::kFloat8_e5m2 ? 57344 : 448;  // where the kernels saturate
    product.clamp_(-largest, largest);
  }
  auto result = to_device(product.to(dtype), a.device());
  kernel.writes(result);
  return result;
}
}  // namespace
}  // namespace emulated

TORCH_LIBRARY_IMPL(aten, CUDA, m) { m.impl("_scaled_mm", &emulated::scaled_mm); }
