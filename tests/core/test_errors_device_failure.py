"""Faults of a GPU: which texts of CUDA, HIP and NCCL are one, and what the user is told to do."""

from __future__ import annotations

import pytest

from fsdp_tune.core.gpu_failures import device_failure, device_fault

HINTS = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace "
    "below might be incorrect."
)


@pytest.mark.parametrize(
    ("text", "fault", "remedy"),
    [
        ("CUDA error: unspecified launch failure" + HINTS, "unspecified launch failure", "dmesg"),
        ("HIP error: unspecified launch failure", "unspecified launch failure", "dmesg"),
        (
            "CUDA error: uncorrectable ECC error encountered" + HINTS,
            "uncorrectable ECC error encountered",
            "dmesg",
        ),
        (
            "NCCL error: unhandled cuda error\nLast error:\nCuda failure 719 'unspecified launch failure'",
            "unspecified launch failure",
            "dmesg",
        ),
        (
            "CUDA error: device-side assert triggered" + HINTS,
            "device-side assert triggered",
            "CUDA_LAUNCH_BLOCKING",
        ),
        (
            "Memory access fault by GPU node-1 on address (nil).\n",
            "Memory access fault by GPU node-1 on address (nil).",
            "AMD_SERIALIZE",
        ),
        (
            "Caught AcceleratorError in pin memory thread\ntorch.AcceleratorError: CUDA error: "
            "misaligned address",
            "misaligned address",
            "index",
        ),
        (
            "CUDA error: no kernel image is available for execution on the device" + HINTS,
            "no kernel image is available for execution on the device",
            "install",
        ),
    ],
)
def test_fault_is_found_and_has_its_remedy(text: str, fault: str, remedy: str) -> None:
    assert device_fault(text) == fault
    problem = device_failure("cuda:1", fault)
    assert (problem.code, problem.message) == ("device-failed", f"cuda:1 failed: {fault}")
    assert problem.hint is not None
    assert remedy in problem.hint


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory",
        "CUDA error: invalid device ordinal",
        "Cuda failure 1 'invalid argument'",
        "unknown error",
        "",
    ],
)
def test_other_errors_leave_the_device_usable(text: str) -> None:
    assert device_fault(text) is None


def test_lost_gpus_are_named() -> None:
    problem = device_failure("cuda:1", "unknown error", ["GPU 1 (GPU is lost)"])
    assert problem.message == "cuda:1 failed: unknown error; the driver reports GPU 1 (GPU is lost)"
