"""A failed allocation is recognised as one of the device or of the host by the texts of the libraries."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdp_tune.core.units import GIB, MIB
from fsdp_tune.model.allocation_errors import is_device_out_of_memory, is_host_out_of_memory

HINTS = (
    "\nSearch for `cudaErrorMemoryAllocation' in "
    "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more "
    "information.\nCUDA kernel errors might be asynchronously reported at some other API call, so "
    "the stacktrace below might be incorrect."
    "\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to "
    "enable device-side assertions.\n"
)
# torch/csrc/distributed/c10d/NCCLUtils.cpp; the last line is NCCL's own, before 2.21 without the number
# (NVIDIA/nccl#1235).
OF_NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled cuda error (run "
    "with NCCL_DEBUG=INFO for details), "
    "NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)
OF_ALLOCATOR = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB of which 12.56 "
    "MiB is free. Including non-PyTorch memory, this process has 79.08 GiB memory in use. Of the allocated "
    "memory 77.51 GiB is allocated by PyTorch, and 605.91 MiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
    "to avoid fragmentation."
)
OF_PIN_THREAD = (
    "Caught AcceleratorError in pin memory thread for device 0.\nOriginal Traceback (most recent "
    "call last):\n  File "
    '"…/torch/utils/data/_utils/pin_memory.py", line 41, in do_one_step\n    data = pin_memory(data, '
    "device)\ntorch.AcceleratorError: " + "CUDA error: out of memory" + HINTS
)
FULL, ROOMY = 12 * MIB, 30 * GIB


@pytest.mark.parametrize(
    ("error", "free_bytes", "where"),
    [
        (torch.OutOfMemoryError(OF_ALLOCATOR), ROOMY, "device"),
        (torch.AcceleratorError("CUDA error: out of memory" + HINTS), FULL, "device"),
        (torch.AcceleratorError("CUDA error: out of memory" + HINTS), None, "device"),
        (torch.AcceleratorError("CUDA error: out of memory" + HINTS), ROOMY, "host"),
        (RuntimeError("HIP error: out of memory"), FULL, "device"),
        (torch.AcceleratorError(OF_PIN_THREAD), FULL, "host"),
        (dist.DistBackendError(OF_NCCL + "Cuda failure 2 'out of memory'"), FULL, "device"),
        (dist.DistBackendError(OF_NCCL + "Cuda failure 'out of memory'"), FULL, "device"),
        (dist.DistBackendError(OF_NCCL + "Cuda failure 2 'out of memory'"), ROOMY, "host"),
        (dist.DistBackendError(OF_NCCL + "Cuda failure 1 'invalid argument'"), FULL, None),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            ROOMY,
            "device",
        ),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered" + HINTS), ROOMY, None),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate "
                "memory: you tried"
            ),
            FULL,
            "host",
        ),
        (MemoryError(), FULL, "host"),
        (ValueError("CUDA error: out of memory"), FULL, None),
    ],
)
def test_failed_allocation_is_classified_as_device_or_host(
    error: BaseException, free_bytes: int | None, where: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: free_bytes is not None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_bytes, 80 * GIB))
    assert is_device_out_of_memory(error) is (where == "device")
    assert is_host_out_of_memory(error) is (where == "host")


def test_pinned_allocation_failure_is_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `padded_sharded_param.pin_memory()` of FSDP2's offload: the innermost line of Python shows which
    memory was refused."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (FULL, 80 * GIB))
    error = torch.AcceleratorError("CUDA error: out of memory" + HINTS)
    with pytest.raises(RuntimeError) as pinning:
        torch.empty(1, device="meta").pin_memory()
    assert is_host_out_of_memory(error.with_traceback(pinning.tb))
    with pytest.raises(RuntimeError) as allocating:
        torch.empty(-1)
    assert is_device_out_of_memory(error.with_traceback(allocating.tb))


def test_failing_driver_query_classifies_as_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    assert is_device_out_of_memory(RuntimeError("CUDA error: out of memory"))
