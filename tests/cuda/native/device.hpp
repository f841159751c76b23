// Streams, generators and the hooks by which torch finds the emulated device.
#pragma once
#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

#include "memory.hpp"

namespace emulated {

// A generator of a device draws what the CPU's draws from the same seed.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index);
  void set_current_seed(uint64_t seed) override { on_cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return on_cpu.current_seed(); }
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override { on_cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return on_cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override;
  at::Generator on_cpu;
};

const at::Generator& default_generator(int device);  // below zero: of the current device
void synchronise_device(int device);
c10::Stream set_stream(const c10::Stream& stream);
}  // namespace emulated
