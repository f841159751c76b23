"""Recognise a failed allocation, on the device or on the host, by the error that a library raises for it."""

from __future__ import annotations

import traceback

import torch

from fsdp_tune.core.library_errors import (
    CUDA_ALLOCATION_FAILED,
    DEVICE_ALLOCATION_FAILED,
    HOST_ALLOCATION_FAILED,
    PINS_MEMORY,
)
from fsdp_tune.core.units import GIB

_FULL_DEVICE_BYTES = GIB
"""With more free device memory than this, a failed allocation outside torch's allocator was not on the
device: NCCL's buffers and CUDA's own are smaller."""


def is_device_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation on the device failed, in torch's allocator or in a library that bypasses
    it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    is_cublas = isinstance(error, RuntimeError) and any(
        words in str(error) for words in DEVICE_ALLOCATION_FAILED
    )
    return is_cublas or (is_of_cuda(error) and not _is_page_locked(error))


def is_host_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation on the host failed, page-locked memory included."""
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in HOST_ALLOCATION_FAILED)
    ):
        return True
    return is_of_cuda(error) and _is_page_locked(error)


def is_of_cuda(error: BaseException) -> bool:
    """Return whether the CUDA or HIP runtime refused an allocation outside torch's allocator: of device
    memory or of page-locked host memory."""
    is_known = isinstance(error, torch.OutOfMemoryError)
    return (
        isinstance(error, RuntimeError)
        and not is_known
        and CUDA_ALLOCATION_FAILED.search(str(error)) is not None
    )


def _is_page_locked(error: BaseException) -> bool:
    """Return whether cudaErrorMemoryAllocation came from page-locked host memory.

    The message does not tell. Either the failing line pins memory (the DataLoader quotes it in its message),
    or the device has room.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if PINS_MEMORY.search(str(error)) or (frames and PINS_MEMORY.search(frames[-1].line or "")):
        return True
    free_bytes = _free_device_bytes()
    return free_bytes is not None and free_bytes > _FULL_DEVICE_BYTES


def _free_device_bytes() -> int | None:
    """Return the free memory of this rank's GPU as reported by the driver; None without a GPU or if the
    driver fails."""
    if not torch.cuda.is_initialized():
        return None
    try:
        return torch.cuda.mem_get_info()[0]
    except RuntimeError:
        return None
