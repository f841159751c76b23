// Operations on tensors of the emulated device, computed on the CPU.
#pragma once
#include <ATen/core/Tensor.h>

#include "device.hpp"

namespace emulated {
at::Tensor on_cpu(const at::Tensor& tensor);  // a tensor of the CPU on the same memory
at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, c10::Device device);
at::Tensor to_device(const at::Tensor& made, c10::Device device);  // what a kernel computed on the CPU
void resize_storage(const at::Tensor& holder, int64_t bytes);

// A kernel of the program: its launch on the current stream of a device, and the accesses of its operands.
class Kernel {
 public:
  explicit Kernel(int device);
  explicit Kernel(const c10::Stream& stream);
  void reads(const at::Tensor& tensor) const { touches(tensor, false); }
  void writes(const at::Tensor& tensor) const { touches(tensor, true); }
  int stream() const { return stream_; }
  int64_t tick() const { return tick_; }

 private:
  void touches(const at::Tensor& tensor, bool is_write) const;
  int stream_;
  int64_t tick_;
  std::string site_;
};
int64_t operations();

// Names the operation of this thread while it lives; the innermost counts.
class Running {
 public:
  explicit Running(const char* name);
  ~Running();
  static const char* name();  // empty between operations

 private:
  const char* outer_;
};
}  // namespace emulated
