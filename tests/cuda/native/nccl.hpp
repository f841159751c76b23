#pragma once
#include <torch/csrc/utils/pybind.h>

namespace emulated {
void bind_nccl(pybind11::module_& module);
}
