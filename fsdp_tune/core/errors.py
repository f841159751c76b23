"""Problems as data: code, message, position and hint; the documented exit codes; and the errors of libraries that become problems.

Every error that a user can cause is raised as `FsdpTuneError` with one or more `Problem`s. Any other exception is a bug of
this package. Only the command line (`cli/`) prints problems.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

from fsdp_tune.core.units import without_long_words


class ExitCode(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    OUT_OF_MEMORY = 3
    NON_FINITE = 4
    LOST_RANK = 5
    NOT_COMPARABLE = 6
    INTERRUPTED = 130
    PREEMPTED = 143


class ExitReason(StrEnum):
    FINISHED = "finished"
    PREEMPTED = "preempted"
    INTERRUPTED = "interrupted"
    MAX_RUNTIME = "max_runtime"
    OUT_OF_MEMORY = "out_of_memory"
    NON_FINITE = "non_finite"
    LOST_RANK = "lost_rank"
    FAILED = "failed"


EXIT_CODE_OF_REASON: dict[ExitReason, ExitCode] = {
    ExitReason.FINISHED: ExitCode.OK,
    ExitReason.PREEMPTED: ExitCode.PREEMPTED,
    ExitReason.INTERRUPTED: ExitCode.INTERRUPTED,
    ExitReason.MAX_RUNTIME: ExitCode.PREEMPTED,
    ExitReason.OUT_OF_MEMORY: ExitCode.OUT_OF_MEMORY,
    ExitReason.NON_FINITE: ExitCode.NON_FINITE,
    ExitReason.LOST_RANK: ExitCode.LOST_RANK,
    ExitReason.FAILED: ExitCode.FAILED,
}


@dataclass(frozen=True, slots=True)
class Where:
    """A position in the user's input. `line` and `column` count from 1; `source` is a path or `--set #2`."""

    source: str | None = None
    line: int | None = None
    column: int | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        if self.source is not None:
            object.__setattr__(self, "source", without_long_words(self.source))

    def __str__(self) -> str:
        parts = [str(part) for part in (self.source, self.line, self.column) if part is not None]
        return ":".join(parts)


NOWHERE = Where()


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. `code` is a stable kebab-case name, listed in docs/reference/messages.tsv."""

    code: str
    message: str
    where: Where = NOWHERE
    hint: str | None = None
    ways_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Truncate words of thousands of characters, which a message may quote from a recipe, an argument or a library."""
        set_field = object.__setattr__
        set_field(self, "message", without_long_words(self.message))
        set_field(self, "hint", None if self.hint is None else without_long_words(self.hint))
        set_field(self, "ways_out", tuple(map(without_long_words, self.ways_out)))

    def as_dict(self) -> dict[str, Any]:
        hints = [*([self.hint] if self.hint else []), *self.ways_out]
        return {
            "code": self.code,
            "file": self.where.source,
            "line": self.where.line,
            "column": self.where.column,
            "key": self.where.key,
            "message": self.message,
            "hint": "; ".join(hints) or None,
        }

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Problem:
        """Create a problem from its `as_dict`, or from a rank's outcome, which stores the ways out separately."""
        where = Where(raw.get("file"), raw.get("line"), raw.get("column"), raw.get("key"))
        return cls(str(raw["code"]), str(raw["message"]), where, raw.get("hint"), tuple(map(str, raw.get("ways_out", ()))))

    def at(self, where: Where) -> Problem:
        return replace(self, where=where)


@dataclass(frozen=True, slots=True)
class Notice:
    """A message that does not stop the command (a translated spelling, an inactive key)."""

    code: str
    message: str
    where: Where = NOWHERE
    hint: str | None = None
    strict: bool = field(default=False)
    """Whether `validate --strict` treats the notice as an error."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", without_long_words(self.message))
        object.__setattr__(self, "hint", None if self.hint is None else without_long_words(self.hint))

    def as_dict(self) -> dict[str, Any]:
        return Problem(self.code, self.message, self.where, self.hint).as_dict()


class FsdpTuneError(Exception):
    """All problems found, with the exit code of the command."""

    def __init__(self, *problems: Problem, exit_code: ExitCode = ExitCode.USAGE) -> None:
        assert problems, "an error needs at least one problem"
        self.problems = problems
        self.exit_code = exit_code
        super().__init__("; ".join(problem.message for problem in problems))


class FailedError(FsdpTuneError):
    """The run or the check failed (exit 1), as opposed to an error in the user's input (exit 2)."""

    def __init__(self, *problems: Problem, exit_code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(*problems, exit_code=exit_code)


@contextmanager
def collected(problems: list[Problem]) -> Iterator[None]:
    """Add the problems of an error in the block to a list, so that later checks still run. Raises: the error of a stop signal."""
    try:
        yield
    except FsdpTuneError as error:
        if error.exit_code is ExitCode.PREEMPTED:
            raise
        problems.extend(error.problems)


def usage_error(
    code: str, message: str, *, hint: str | None = None, where: Where = NOWHERE, ways_out: tuple[str, ...] = ()
) -> FsdpTuneError:
    """Return an error with one problem and exit code 2."""
    return FsdpTuneError(Problem(code, message, where, hint, ways_out))


def failed_error(
    code: str, message: str, *, hint: str | None = None, where: Where = NOWHERE, ways_out: tuple[str, ...] = ()
) -> FailedError:
    """Return an error with one problem and exit code 1."""
    return FailedError(Problem(code, message, where, hint, ways_out))


# ---- Errors of libraries that only a text distinguishes
#
# The texts are those of torch 2.11 and 2.13 (with the bundled gloo), torchao 0.18 and PyYAML 6.0.3. If a new version changes one, the
# original error is reported instead of the more specific one.

PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "remote process exited",
    "NCCL communicator was aborted",
)
"""torch.distributed, gloo and NCCL, on the surviving ranks when another rank has ended; all are RuntimeErrors."""

HOST_ALLOCATION_FAILED = ("can't allocate memory", "not enough memory: you tried to allocate")
"""RuntimeErrors of torch's CPU allocator (c10/core/impl/alloc_cpu.cpp), which raises no MemoryError."""

DEVICE_ALLOCATION_FAILED = ("CUBLAS_STATUS_ALLOC_FAILED",)
"""RuntimeError of torch (aten/src/ATen/cuda/CUDABlas.cpp); its own allocator raises OutOfMemoryError."""

CUDA_ALLOCATION_FAILED = re.compile(r"(CUDA|HIP) error: out of memory|(Cuda|HIP) failure (\d+ )?'out of memory'")
"""cudaErrorMemoryAllocation, which CUDA returns for device memory and for page-locked host memory (cudaHostAlloc) alike: by torch outside
its caching allocator, and by NCCL, whose older versions omit the number."""

DEVICE_FAILED = re.compile(r"(?:CUDA|HIP) error: ([^\n]+)|(?:Cuda|HIP) failure (?:\d+ )?'([^']+)'|(Memory access fault by GPU [^\n]+)")
"""An error of the CUDA or HIP runtime, as torch and NCCL format it, and what ROCm's runtime prints before it calls abort()."""

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
"""Texts of cudaGetErrorString, and of ROCm's runtime, after which no work of the process can succeed on the device."""

NATIVE_ENDS = (
    re.compile(r"Watchdog caught collective operation timeout: .+"),
    re.compile(r"Memory access fault by GPU .+"),
    re.compile(r"HSA_STATUS_ERROR\w*: .+"),
    re.compile(r"what\(\):\s+(?:\[.*?\] )?(.+)"),
)
"""Why a process called abort(): NCCL's watchdog (ProcessGroupNCCL.cpp), ROCm's runtime (runtime.cpp of ROCR, rocdevice.cpp of CLR), and
what C++ prints of an exception that nothing catches."""

PINS_MEMORY = re.compile(r"pin.memory")
"""In the message of torch's DataLoader, which quotes the failing line."""

_RUST_IO = re.compile(r"\(os error (\d+)\)")
"""How Rust's standard library prints an I/O error (std::io::Error). tokenizers, safetensors and hf_xet pass the text on in an Exception of
their own, so that a full disk would look like a bug."""


_LINK_LOOP = re.compile(r"Symlink loop from '(.+)'")
"""The RuntimeError of `Path.resolve` before Python 3.13."""


def as_os_error(error: BaseException, path: Path | None = None) -> BaseException:
    """Return the OSError that a Rust library or pathlib reports as a text, with the error as its cause; any other error as it is."""
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
    """Raise an I/O error of a Rust library in the block as the OSError that it is, with the path that was written or read."""
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
"""Sizes in the message of torch.OutOfMemoryError (c10/cuda/CUDACachingAllocator.cpp), which has no attributes."""

BLOCKS_CUT = "block boundary"
"""torchao (optim/subclass_8bit.py, subclass_4bit.py): a ValueError for a slice of quantized state that cuts a block."""

YAML_SYNTAX = (
    ("cannot start any token", "this character cannot begin a value", "put the value in double quotes"),
    ("mapping values are not allowed here", "a `: ` where no key is allowed", "check the indentation, or quote a text that holds `: `"),
    ("could not find expected ':'", "this line is neither `key: value` nor a list item", "write `key: value`"),
    ("expected <block end>", "the indentation does not fit the lines above", "align the line with the other keys of its section"),
    ("expected '<document start>'", "there is text after the end of the value", "check the brackets and the indentation"),
)
"""`problem` of PyYAML's MarkedYAMLError (scanner.py, parser.py), its meaning in a recipe, and the hint."""


# ---- Failures of a GPU: a fault of the device, of the program, or of the build of torch

_HINTS = {
    FAULTS_OF_A_DEVICE: "`dmesg` names the cause (an XID error for NVIDIA); a reset of the GPU or a reboot may recover it, and "
    "CUDA_VISIBLE_DEVICES (AMD: HIP_VISIBLE_DEVICES) leaves it out",
    FAULTS_OF_A_PROGRAM: "a kernel read or wrote where it must not, mostly by an index beyond its table; `CUDA_LAUNCH_BLOCKING=1` "
    "(AMD: `AMD_SERIALIZE_KERNEL=3`) in the environment of the command shows the line in the rank's log",
    FAULTS_OF_A_BUILD: "this build of torch has no code for the GPU: install one that does (https://pytorch.org/get-started/locally)",
}


def device_fault(text: str) -> str | None:
    """Return CUDA's or HIP's text of a fault after which a device cannot be used, from an error or a log; None if there is none."""
    found = DEVICE_FAILED.search(text)
    fault = next(filter(None, found.groups()), "") if found is not None else ""
    return next((fault for faults in _HINTS if fault.startswith(faults)), None) if fault else None


def device_failure(what: str, fault: str, lost: Sequence[str] = ()) -> Problem:
    """Describe the failure of `what`, a GPU. `lost`: the GPUs that no longer respond to the driver."""
    reports = f"; the driver reports {', '.join(lost)}" if lost else ""
    hint = next(hint for faults, hint in _HINTS.items() if fault.startswith(faults))
    return Problem("device-failed", f"{what} failed: {fault}{reports}", hint=hint)
