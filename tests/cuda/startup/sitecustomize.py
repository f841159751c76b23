"""Install the emulated device as soon as a process imports torch. Python runs this file when its folder is on
PYTHONPATH."""

import ctypes
import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path

LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so")


def _module(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class _WithDevice(Loader):
    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        # Before torch._C: torch asks once for the hooks of CUDA, while it is imported.
        folder = Path(module.__spec__.origin).parent / "lib"
        for name in LIBRARIES:
            ctypes.CDLL(folder / name, mode=ctypes.RTLD_GLOBAL)
        library = os.environ["EMULATED_CUDA"]
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        self.loader.exec_module(module)
        folder = Path(__file__).parent.parent
        emulation, kernels = (
            _module(f"emulated_cuda_{name}", folder / f"{name}.py") for name in ("emulation", "kernels")
        )
        emulation.install(_module("emulated_cuda", library), kernels)


class _Finder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None:
            spec.loader = _WithDevice(spec.loader)
        return spec


if "EMULATED_CUDA" in os.environ:
    sys.meta_path.insert(0, _Finder())
