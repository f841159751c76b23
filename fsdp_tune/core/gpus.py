"""GPUs: vendor data, looked up by name or by the driver's device name, or read from a user's file; and model
FLOPs utilisation.

The vendor data are in `hardware.yaml`. Utilisation is by the convention of PaLM (arXiv:2204.02311, appendix
B).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fsdp_tune.core.errors import Where, usage_error
from fsdp_tune.core.units import GIB

TABLE = Path(__file__).with_name("hardware.yaml")


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU, in the units of `hardware.yaml`; None = unknown or unsupported."""

    name: str
    memory_gb: float
    bandwidth_gb_s: float
    usable_gib: float | None = None
    bf16_tflops: float | None = None
    fp16_tflops: float | None = None
    fp8_tflops: float | None = None
    tf32_tflops: float | None = None
    fp32_tflops: float | None = None
    nvlink_gb_s: float | None = None
    """Both directions; 0 = none."""
    pcie_gb_s: float | None = None
    """Both directions."""
    network_gb_s: float | None = None
    """To another machine, one direction, per GPU: that of the vendor's own machine, or of a user's file."""
    devices_per_machine: int | None = None
    compute_capability: float | None = None
    """CUDA's version of the GPU, as NVIDIA writes it; None for other vendors."""
    matmul_tflops: float | None = None
    dollars_per_hour: float | None = None
    """Price of one GPU. Prices change daily, so only a user's file has one."""
    device_names: tuple[str, ...] = ()
    source: str = ""

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability as torch reports it."""
        return (
            None
            if self.compute_capability is None
            else (int(self.compute_capability), round(self.compute_capability % 1 * 10))
        )

    @property
    def usable_bytes(self) -> int:
        """Memory that one process can use; if unknown, 10⁹ bytes per GB of the name, its smallest meaning."""
        return int(self.usable_gib * GIB if self.usable_gib is not None else self.memory_gb * 1e9)

    @property
    def bandwidth_bytes_per_second(self) -> float:
        return self.bandwidth_gb_s * 1e9

    def peak_flops(self, dtype: str) -> float | None:
        """Return dense operations per second in `dtype`; None if unsupported or not published."""
        tflops: float | None = getattr(self, f"{dtype}_tflops", None)
        return None if tflops is None else tflops * 1e12

    @property
    def machine_link_bytes_per_second(self) -> float | None:
        """One direction, to another GPU of the machine: NVLink if present, else PCIe."""
        both = self.nvlink_gb_s or self.pcie_gb_s
        return None if both is None else both / 2 * 1e9

    @property
    def host_link_bytes_per_second(self) -> float | None:
        """One direction, to the memory of the machine."""
        return None if self.pcie_gb_s is None else self.pcie_gb_s / 2 * 1e9


CPU = "CPU rank"


def cpu_rank(usable_bytes: int) -> Hardware:
    """Return a rank on the CPU, with its share of the host's memory. Its speed is unknown."""
    return Hardware(
        CPU,
        memory_gb=usable_bytes / 1e9,
        bandwidth_gb_s=1.0,
        usable_gib=usable_bytes / GIB,
        devices_per_machine=None,
    )


def squeezed(name: str) -> str:
    """Normalise a name: `a100 80gb`, `A100-80GB` and `A100_80GB` are equal."""
    return re.sub(r"[\s_-]+", "", name).casefold()


@cache
def known_hardware() -> Mapping[str, Hardware]:
    """Return every GPU of the table by name."""
    table: dict[str, dict[str, object]] = yaml.load(
        TABLE.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
    return {name: hardware_of(name, fields) for name, fields in table.items()}


def find_hardware(name: str) -> Hardware:
    """Return a GPU by name (ignoring case, spaces and hyphens), or by the driver's device name.

    Raises: usage error `unknown-gpu` with the known names.
    """
    table = known_hardware()
    by_squeezed = {squeezed(known): known for known in table}
    if (exact := by_squeezed.get(squeezed(name))) is not None:
        return table[exact]
    if (detected := detect(name)) is not None:
        return detected
    family = squeezed(name.split("-")[0])
    beginnings = [
        [known for short, known in by_squeezed.items() if start and short.startswith(start)]
        for start in (squeezed(name), family)
    ]
    close = next(filter(None, beginnings), None) or [
        by_squeezed[short]
        for short in difflib.get_close_matches(squeezed(name), by_squeezed, n=3, cutoff=0.6)
    ]
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    hint = f"{meant}Known: {', '.join(table)}; or a YAML file with memory_gb, bandwidth_gb_s, bf16_tflops …"
    raise usage_error("unknown-gpu", f"`{name}` is not a known GPU", hint=hint, where=Where("--gpu"))


def detect(device_name: str | None) -> Hardware | None:
    """Return the GPU with this device name; None if it is not in the table (an A10G is not an A10)."""
    wanted = squeezed(device_name or "")
    return next((gpu for gpu in known_hardware().values() if wanted in map(squeezed, gpu.device_names)), None)


def hardware_of(name: str, fields: Mapping[str, object]) -> Hardware:
    """Return a GPU from keys of `hardware.yaml` and their values."""
    values: dict[str, Any] = dict(fields)
    values["device_names"] = tuple(values.get("device_names") or ())
    return Hardware(name=name, **values)


@dataclass(frozen=True, slots=True)
class ModelDimensions:
    active_parameters: int
    """Parameters that process a token: all of them, except in a mixture of experts."""
    trained_parameters: int
    """Of all parameters; a frozen one takes part in two of the three multiplications of a training step."""
    layers: int
    heads: int
    head_dim: int


def attended_length(lengths: Iterable[int]) -> float:
    """Tokens that a token attends to, over examples of these lengths: Σ length² / Σ length; 0 for none.

    A packed row counts as its examples, since no token attends across them; padding does not count.
    """
    total = squares = 0
    for length in lengths:
        total, squares = total + length, squares + length * length
    return squares / total if total else 0.0


def flops_per_token(model: ModelDimensions, length: float) -> float:
    """Return 6 N + 12 L H Q T: forward and backward with attention, not halved for causal masks, without
    recomputation.

    N is the number of active parameters; `length` is T: the length of the sequences, or `attended_length` if
    it varies. A frozen
    parameter counts 4: forward and the gradient of its input, but no gradient of its own.
    """
    frozen = max(0, model.active_parameters - model.trained_parameters)
    return (
        6.0 * model.active_parameters
        - 2.0 * frozen
        + 12.0 * model.layers * model.heads * model.head_dim * length
    )


def mfu(
    model: ModelDimensions, length: float, tokens_per_second_per_device: float, peak_flops: float | None
) -> float | None:
    """Return the share of one device's dense bf16 peak; None if the peak is unknown."""
    return (
        None
        if peak_flops is None
        else flops_per_token(model, length) * tokens_per_second_per_device / peak_flops
    )
