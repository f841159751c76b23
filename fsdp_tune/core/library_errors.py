"""Errors of libraries that only a text distinguishes.

The texts are those of torch 2.11 and 2.13 (with the bundled gloo), torchao 0.18 and PyYAML 6.0.3. If a new
version changes one, the original error is reported instead of the more specific one.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdp_tune.core.errors import FsdpTuneError

PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "remote process exited",
    "NCCL communicator was aborted",
    "Connection was likely closed",  # by the host of the store (c10d/Utils.hpp)
)
"""torch.distributed, gloo and NCCL, on the surviving ranks when another rank has ended; all are
RuntimeErrors."""


HOST_ALLOCATION_FAILED = ("can't allocate memory", "not enough memory: you tried to allocate")
"""RuntimeErrors of torch's CPU allocator (c10/core/impl/alloc_cpu.cpp), which raises no MemoryError."""


DEVICE_ALLOCATION_FAILED = ("CUBLAS_STATUS_ALLOC_FAILED",)
"""RuntimeError of torch (aten/src/ATen/cuda/CUDABlas.cpp); its own allocator raises OutOfMemoryError."""


CUDA_ALLOCATION_FAILED = re.compile(
    r"(CUDA|HIP) error: out of memory|(Cuda|HIP) failure (\d+ )?'out of memory'"
)
"""cudaErrorMemoryAllocation, which CUDA returns for device memory and for page-locked host memory
(cudaHostAlloc) alike: by torch outside its caching allocator, and by NCCL, whose older versions omit the
number."""


DEVICE_FAILED = re.compile(
    r"(?:CUDA|HIP) error: ([^\n]+)|(?:Cuda|HIP) failure (?:\d+ )?'([^']+)'|(Memory access fault by "
    r"GPU [^\n]+)"
)
"""An error of the CUDA or HIP runtime, as torch and NCCL format it, and what ROCm's runtime prints before it
calls abort()."""


FAULTS_OF_A_DEVICE = (
    "unspecified launch failure",
    "unknown error",
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error detected",
    "hardware stack error",
    "the launch timed out and was terminated",
    "CUDA-capable device(s) is/are busy or unavailable",
    "no CUDA-capable device is detected",
)


FAULTS_OF_A_PROGRAM = (
    "device-side assert triggered",
    "an illegal memory access was encountered",
    "misaligned address",
    "an illegal instruction was encountered",
    "Memory access fault by GPU",
)


FAULTS_OF_A_BUILD = ("no kernel image is available for execution on the device",)
"""Texts of cudaGetErrorString, and of ROCm's runtime, after which no work of the process can succeed on the
device."""


NATIVE_ENDS = (
    re.compile(r"Watchdog caught collective operation timeout: .+"),
    re.compile(r"Memory access fault by GPU .+"),
    re.compile(r"HSA_STATUS_ERROR\w*: .+"),
    re.compile(r"what\(\):\s+(?:\[.*?\] )?(.+)"),
)
"""Why a process called abort(): NCCL's watchdog (ProcessGroupNCCL.cpp), ROCm's runtime (runtime.cpp of ROCR,
rocdevice.cpp of CLR), and what C++ prints of an exception that nothing catches."""


PINS_MEMORY = re.compile(r"pin.memory")
"""In the message of torch's DataLoader, which quotes the failing line."""


PORT_TAKEN = re.compile(r"port: (\d+),[^\n]*\bEADDRINUSE\b")
"""torch's DistNetworkError where another process listens on the port of a store (c10d/socket.cpp). Port 0: no
free one is left."""


_RUST_IO = re.compile(r"\(os error (\d+)\)")
"""How Rust's standard library prints an I/O error (std::io::Error). tokenizers, safetensors and hf_xet pass
the text on in an Exception of their own, so that a full disk would look like a bug."""


_LINK_LOOP = re.compile(r"Symlink loop from '(.+)'")
"""The RuntimeError of `Path.resolve` before Python 3.13."""


def refusal_words(error: BaseException) -> str:
    """Return why the system refused a file: its words, without the path, or that there is no memory."""
    if isinstance(error, MemoryError):
        return "this command has no memory left"
    return getattr(error, "strerror", None) or str(error)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def typed_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error) if str(error).strip() else 'no message'}"


def as_os_error(error: BaseException, path: Path | None = None) -> BaseException:
    """Return the OSError that a Rust library or pathlib reports as a text, with the error as its cause; any
    other error as it is. `path`: the file or directory of an error that names none."""
    if isinstance(error, FsdpTuneError):
        return error  # it may quote such a text, and has a place and a hint
    if isinstance(error, RuntimeError) and (loop := _LINK_LOOP.search(str(error))) is not None:
        looped = OSError(errno.ELOOP, os.strerror(errno.ELOOP), loop[1])
        looped.__cause__ = error
        return looped
    number = _RUST_IO.search(str(error))
    if number is None or (isinstance(error, OSError) and error.errno is not None):
        return error
    found = OSError(int(number[1]), os.strerror(int(number[1])), *([] if path is None else [str(path)]))
    found.__cause__ = error
    return found


@contextmanager
def rust_errors_as_os_errors(path: Path) -> Iterator[None]:
    """Raise an error of the block that `as_os_error` converts as that OSError, with the path that was written
    or read."""
    try:
        yield
    except Exception as error:
        found = as_os_error(error, path)
        if found is error:
            raise
        raise found from error


_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"


OUT_OF_MEMORY_SIZES = {
    "requested": re.compile(rf"Tried to allocate {_SIZE}"),
    "capacity": re.compile(rf"total capacity of {_SIZE}"),
    "free": re.compile(rf"of which {_SIZE} is free"),
    "allocated": re.compile(rf"{_SIZE} is allocated by PyTorch"),
    "unused": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
}
"""Sizes in the message of torch.OutOfMemoryError (c10/cuda/CUDACachingAllocator.cpp), which has no
attributes."""


BLOCKS_CUT = "block boundary"
"""torchao (optim/subclass_8bit.py, subclass_4bit.py): a ValueError for a slice of quantized state that cuts a
block."""


YAML_SYNTAX = (
    ("cannot start any token", "this character cannot begin a value", "put the value in double quotes"),
    (
        "mapping values are not allowed here",
        "a `: ` where no key is allowed",
        "check the indentation, or quote a text that holds `: `",
    ),
    (
        "could not find expected ':'",
        "this line is neither `key: value` nor a list item",
        "write `key: value`",
    ),
    (
        "expected <block end>",
        "the indentation does not fit the lines above",
        "align the line with the other keys of its section",
    ),
    (
        "expected '<document start>'",
        "there is text after the end of the value",
        "check the brackets and the indentation",
    ),
)
"""`problem` of PyYAML's MarkedYAMLError (scanner.py, parser.py), its meaning in a recipe, and the hint."""
