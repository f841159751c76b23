// A device that fails in the middle of its work.
#pragma once

#include <string>

namespace emulated {
// "CUDA", or "HIP" for a device of AMD.
const std::string& runtime();
constexpr int HANGS = -1;
// From now on all work of this process on a device, and every wait for it, raises the error of this code (cudaError_t), or never ends.
void fail_device(int code);
void check_device();
}  // namespace emulated
