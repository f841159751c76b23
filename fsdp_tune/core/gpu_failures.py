"""Failures of a GPU: a fault of the device, of the program, or of the build of torch."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_tune.core.errors import Problem
from fsdp_tune.core.library_errors import (
    DEVICE_FAILED,
    FAULTS_OF_A_BUILD,
    FAULTS_OF_A_DEVICE,
    FAULTS_OF_A_PROGRAM,
)

_HINTS = {
    FAULTS_OF_A_DEVICE: "`dmesg` names the cause (an XID error for NVIDIA); a reset of the GPU or a reboot "
    "may recover "
    "it, and "
    "CUDA_VISIBLE_DEVICES (AMD: HIP_VISIBLE_DEVICES) leaves it out",
    FAULTS_OF_A_PROGRAM: "a kernel read or wrote where it must not, mostly by an index beyond its table; "
    "`CUDA_LAUNCH_BLOCKING=1` "
    "(AMD: `AMD_SERIALIZE_KERNEL=3`) in the environment of the command shows the line in the rank's log",
    FAULTS_OF_A_BUILD: "this build of torch has no code for the GPU: install one that does "
    "(https://pytorch.org/get-started/locally)",
}


def device_fault(text: str) -> str | None:
    """Return CUDA's or HIP's text of a fault after which a device cannot be used, from an error or a log;
    None if there is none."""
    found = DEVICE_FAILED.search(text)
    fault = next(filter(None, found.groups()), "") if found is not None else ""
    return next((fault for faults in _HINTS if fault.startswith(faults)), None) if fault else None


def device_failure(what: str, fault: str, lost: Sequence[str] = ()) -> Problem:
    """Describe the failure of `what`, a GPU. `lost`: the GPUs that no longer respond to the driver."""
    reports = f"; the driver reports {', '.join(lost)}" if lost else ""
    hint = next(hint for faults, hint in _HINTS.items() if fault.startswith(faults))
    return Problem("device-failed", f"{what} failed: {fault}{reports}", hint=hint)
