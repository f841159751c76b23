#include "failure.hpp"

#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

namespace emulated {
namespace {
std::atomic<int> failed_with{0};

struct Text {
  int code;
  const char *text, *name;
};
constexpr Text TEXTS[] = {  // cudaGetErrorString, cudaGetErrorName without "cuda"; HIP's are the same
    {214, "uncorrectable ECC error encountered", "ErrorECCUncorrectable"},
    {700, "an illegal memory access was encountered", "ErrorIllegalAddress"},
    {710, "device-side assert triggered", "ErrorAssert"},
    {719, "unspecified launch failure", "ErrorLaunchFailure"},
    {999, "unknown error", "ErrorUnknown"},
};
// c10/cuda/CUDAException.cpp and CUDAMiscFunctions.cpp, and what hipify makes of them
const char* OF_CUDA[] = {"cuda", "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html", "CUDA_LAUNCH_BLOCKING=1"};
const char* OF_HIP[] = {"hip", "https://rocm.docs.amd.com/projects/HIP/en/latest/index.html", "AMD_SERIALIZE_KERNEL=3"};
}  // namespace

const std::string& runtime() {
  static const std::string name = std::getenv("EMULATED_CUDA_HIP") == nullptr ? "CUDA" : "HIP";
  return name;
}

void fail_device(int code) { failed_with = code; }

// c10_cuda_check_implementation
void check_device() {
  int code = failed_with;
  if (code == 0) return;
  while (code == HANGS) std::this_thread::sleep_for(std::chrono::seconds(1));
  for (const auto& each : TEXTS)
    if (each.code == code) {
      const auto& name = runtime();
      const auto& [prefix, page, variable] = name == "HIP" ? OF_HIP : OF_CUDA;
      auto text = name + " error: " + each.text + "\nSearch for `" + prefix + each.name + "' in " + page + " for more information.\n" + name +
                  " kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect."
                  "\nFor debugging consider passing " + variable + "\nCompile with `TORCH_USE_" + name + "_DSA` to enable device-side assertions.\n";
      throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, code, text);
    }
  TORCH_CHECK(false, "the emulation has no text for the error ", code);
}
}  // namespace emulated
