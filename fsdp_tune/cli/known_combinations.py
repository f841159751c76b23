"""Combinations that are known to fail, hang or be slow, each with its remedy and its source."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_tune.core.units import GIB

Facts = Mapping[str, Any]
"""The document of `fsdp-tune env`: versions, host, devices, torch, variables …"""


TESTED = {"torch": ((2, 11), (2, 15)), "transformers": ((5, 17), (5, 24)), "accelerate": ((1, 15), (1, 15))}


SMALL_SHARED_MEMORY_BYTES = GIB


FEW_OPEN_FILES = 1024


OLD_KERNEL = (5, 5)


P2P_DRIVER = (550, 40)


TIMEOUT_TORCH = (2, 12)


@dataclass(frozen=True, slots=True)
class KnownBad:
    code: str
    applies: Callable[[Facts], bool]
    problem: str
    remedy: str
    source: str

    def as_dict(self) -> dict[str, str]:
        return {"code": self.code, "problem": self.problem, "remedy": self.remedy, "source": self.source}


def version_tuple(text: str | None) -> tuple[int, ...]:
    """`2.13.0+cpu` → (2, 13, 0); () for None."""
    return tuple(int(number) for number in re.findall(r"\d+", (text or "").partition("+")[0])[:3])


def _outside_tested(name: str) -> Callable[[Facts], bool]:
    low, high = TESTED[name]

    def applies(facts: Facts) -> bool:
        version = version_tuple(facts["versions"].get(name))
        return bool(version) and not low <= version[:2] <= high

    return applies


def _kernel(facts: Facts) -> tuple[int, ...]:
    return (
        version_tuple(str(facts["host"]["system"]).removeprefix("Linux "))
        if str(facts["host"]["system"]).startswith("Linux")
        else ()
    )


def _device_names(facts: Facts) -> list[str]:
    return [str(device["name"]) for device in facts["devices"]]


def _has_cuda(facts: Facts) -> bool:
    return any(device["kind"] == "cuda" for device in facts["devices"])


def _variable(facts: Facts, name: str) -> str | None:
    return facts["variables"]["inherited"].get(name)


def _range(name: str) -> str:
    low, high = (".".join(map(str, bound)) for bound in TESTED[name])
    return low if low == high else f"{low} to {high}"


KNOWN_BAD: tuple[KnownBad, ...] = (
    *(
        KnownBad(
            f"untested-{name}",
            _outside_tested(name),
            f"this version of {name} has not been tested with this release (tested: {_range(name)})",
            "in the repository: `pip install -c constraints.txt .`, or `scripts/test-against` with "
            "your versions",
            "docs/evidence/measurements.md, Other versions of the stack",
        )
        for name in TESTED
    ),
    KnownBad(
        "short-grace",
        lambda facts: () < version_tuple(facts["versions"].get("torch"))[:2] < TIMEOUT_TORCH,
        "torch before 2.12: torchrun kills ranks 30 s after a signal, even during a save",
        "use torch 2.12 or newer if a checkpoint takes longer to write",
        "torch 2.11: distributed/elastic/agent/server/api.py, run; 2.12 added TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    ),
    KnownBad(
        "old-kernel",
        lambda facts: bool(_kernel(facts)) and _kernel(facts)[:2] < OLD_KERNEL,
        "Linux before 5.5: barriers of several ranks have been seen to hang",
        "use a newer kernel, or try NCCL_SHM_DISABLE=1",
        "https://github.com/huggingface/accelerate/issues/1929",
    ),
    KnownBad(
        "consumer-p2p",
        lambda facts: (
            len(facts["devices"]) > 1
            and any("RTX 40" in name for name in _device_names(facts))
            and () < version_tuple(facts.get("driver"))[:2] < P2P_DRIVER
        ),
        "several RTX 40 GPUs with a driver before 550.40.07: P2P transfers hang or corrupt data",
        "update the driver (accelerate sets NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 until then)",
        "accelerate: utils/environment.py, check_cuda_p2p_ib_support",
    ),
    KnownBad(
        "no-bf16",
        lambda facts: facts["torch"].get("bf16") is False,
        "the device computes bf16 slowly or not at all",
        "--set precision.mixed_precision=fp16",
        "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#compute-capabilities",
    ),
    KnownBad(
        "gpu-lost",
        lambda facts: bool(facts["lost_devices"]),
        "a GPU that the driver lists does not respond (`lost_devices` of `env --json`): runs do without it",
        "`dmesg` has its XID error; a reset (`nvidia-smi --gpu-reset`) or a reboot may recover it",
        "https://docs.nvidia.com/deploy/xid-errors/index.html",
    ),
    KnownBad(
        "devices-hidden",
        lambda facts: facts["hidden_by"] is not None,
        "a variable (`hidden_by` of `env --json`) hides every GPU of this machine: it is empty, or its first "
        "entry names none of them",
        "unset it, or name GPUs as `nvidia-smi -L` (AMD: `rocm-smi`) lists them",
        "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables",
    ),
    KnownBad(
        "cpu-only-torch",
        lambda facts: (
            _has_cuda(facts) and facts["torch"].get("device") is None and "error" not in facts["torch"]
        ),
        "the machine has NVIDIA devices, but torch finds none: torch is a CPU build, or the driver "
        "is too old for it",
        "install the torch build that fits the driver: https://pytorch.org/get-started/locally",
        "torch.version.cuda against NVML",
    ),
    KnownBad(
        "small-shared-memory",
        lambda facts: (
            (facts["host"].get("shared_memory_bytes") or GIB) < SMALL_SHARED_MEMORY_BYTES and _has_cuda(facts)
        ),
        "/dev/shm is smaller than 1 GiB (Docker's default is 64 MiB): NCCL crashes at start-up, and "
        "data loaders crash",
        "docker run --ipc=host, or --shm-size=16g",
        "https://github.com/pytorch/tutorials/pull/2475",
    ),
    KnownBad(
        "few-open-files",
        lambda facts: facts["host"]["open_files_limit"] < FEW_OPEN_FILES,
        "the limit of open files is low: data loaders and checkpoints of many shards fail with EMFILE",
        "ulimit -n 65536",
        "https://pytorch.org/docs/stable/multiprocessing.html#file-descriptor-file-descriptor",
    ),
    KnownBad(
        "launch-blocking",
        lambda facts: _variable(facts, "CUDA_LAUNCH_BLOCKING") == "1",
        "CUDA_LAUNCH_BLOCKING=1 runs kernels one by one: several times slower",
        "unset CUDA_LAUNCH_BLOCKING",
        "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables",
    ),
    KnownBad(
        "p2p-disabled",
        lambda facts: _variable(facts, "NCCL_P2P_DISABLE") == "1" and len(facts["devices"]) > 1,
        "NCCL_P2P_DISABLE=1: devices of one machine communicate through host memory, several times "
        "slower than over NVLink",
        "unset NCCL_P2P_DISABLE",
        "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-p2p-disable",
    ),
    KnownBad(
        "foreign-accelerate-config",
        lambda facts: facts["accelerate_default_config"] is not None,
        "a default Accelerate config exists; a bare `accelerate launch` uses it, `fsdp-tune train` does not",
        "nothing to do; pass `--config_file RUN/accelerate.yaml` if you start a run manually",
        "accelerate: commands/launch.py, _validate_launch_command",
    ),
)


def known_bad(facts: Facts) -> list[KnownBad]:
    """Return the rows that apply to these facts."""
    return [row for row in KNOWN_BAD if row.applies(facts)]
