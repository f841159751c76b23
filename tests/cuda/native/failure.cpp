#include "failure.hpp"

#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

namespace emulated {
namespace {
std::atomic<int> failed_with{0};

struct Text {
  int code;
  const char *text, *name;
};
constexpr Text TEXTS[] = {  // cudaGetErrorString, cudaGetErrorName
    {214, "uncorrectable ECC error encountered", "cudaErrorECCUncorrectable"},
    {700, "an illegal memory access was encountered", "cudaErrorIllegalAddress"},
    {710, "device-side assert triggered", "cudaErrorAssert"},
    {719, "unspecified launch failure", "cudaErrorLaunchFailure"},
    {999, "unknown error", "cudaErrorUnknown"},
};
}  // namespace

void fail_device(int code) { failed_with = code; }

// c10/cuda/CUDAException.cpp, c10_cuda_check_implementation
void check_device() {
  int code = failed_with;
  if (code == 0) return;
  while (code == HANGS) std::this_thread::sleep_for(std::chrono::seconds(1));
  for (const auto& each : TEXTS)
    if (each.code == code) {
      auto text = std::string("CUDA error: ") + each.text + "\nSearch for `" + each.name +
                  "' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information."
                  "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect."
                  "\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n";
      throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, code, text);
    }
  TORCH_CHECK(false, "the emulation has no text for the error ", code);
}
}  // namespace emulated
