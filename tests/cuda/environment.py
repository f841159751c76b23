"""The environment of a command that shall find emulated GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cuda.build import built

STARTUP = Path(__file__).parent / "startup"


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a GPU says of itself. `memory_gib` is what CUDA reports."""

    name: str
    capability: tuple[int, int]
    memory_gib: float
    multiprocessors: int
    hip: str = ""
    """Version of ROCm's torch, which calls an AMD GPU `cuda`. Its driver is not emulated: torch alone knows
    of the GPU."""


GPUS = {
    "T4": Gpu("Tesla T4", (7, 5), 14.56, 40),
    "A100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 79.15, 108),
    "H100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 79.19, 132),
    "B200": Gpu("NVIDIA B200", (10, 0), 178.36, 148),
    "MI300X": Gpu("AMD Instinct MI300X", (9, 4), 191.98, 304, hip="7.1.25424"),
}


def with_gpus(
    count: int = 2,
    gpu: str = "H100",
    *,
    base: Mapping[str, str] | None = None,
    report: Path | None = None,
    races: bool = False,
    **other: str,
) -> dict[str, str]:
    """Return an environment in which torch finds `count` GPUs.

    `report`: a folder to which each process writes what it counted (`emulation.Report`); `races`: look for
    them too. `other` are further variables of the emulation without their prefix: `memory_gib="2"`;
    `fresh="zero"`; `pinned_gib="0"`, what the system lets processes pin each; `fault="1:3:719"`, after 3
    steps each operation of device 1 raises this error of CUDA (`hangs`: never ends; `aborts`: the process
    ends as ROCm's do); `lost=FILE`, with the indices of devices that fell off the bus, to which a fault adds;
    `nccl_seconds="5"`, the limit of a collective.
    """
    device, model = built(), GPUS[gpu]
    environment = dict(os.environ if base is None else base)
    paths = [str(STARTUP), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "EMULATED_CUDA": str(device.device)}
    if not model.hip:
        libraries = [str(device.nvml), *filter(None, [environment.get("LD_LIBRARY_PATH")])]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
    emulated = {
        "devices": count,
        "name": model.name,
        "capability": f"{model.capability[0]}.{model.capability[1]}",
    }
    emulated |= {"memory_gib": model.memory_gib, "multiprocessors": model.multiprocessors}
    emulated |= {"hip": model.hip} if model.hip else {}
    emulated |= {"report": report} if report is not None else {}
    emulated |= ({"races": 1} if races else {}) | other
    return environment | {f"EMULATED_CUDA_{name.upper()}": str(value) for name, value in emulated.items()}


def environment_on(device: str, base: Mapping[str, str] | None = None, *, gpus: int = 2) -> dict[str, str]:
    """Return the environment of a command that computes on a device: on `cuda` it finds the GPUs of this
    process, or else emulated ones."""
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            return with_gpus(gpus, base=base)
    return dict(os.environ if base is None else base)
