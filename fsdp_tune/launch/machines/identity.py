"""What must be equal on all machines of a run, and which of it differs on one."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_tune.core.devices import visible_devices
from fsdp_tune.core.errors import Problem
from fsdp_tune.core.host import interconnect
from fsdp_tune.core.package_versions import installed_versions, versions
from fsdp_tune.core.secrets import masked
from fsdp_tune.core.units import format_seconds
from fsdp_tune.launch.machines.route import INTERFACE_VARIABLES
from fsdp_tune.recipe.rules.launch import is_plain_setting
from fsdp_tune.recipe.schema.key_effects import OnResume
from fsdp_tune.recipe.schema.keys import effect_of, values_by_key
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.records import Document

CLOCK_SECONDS = 60.0
"""Largest difference of two clocks: `launch.max_runtime` and the times in the logs are wall-clock times."""


_PACKAGES = (
    "python",
    "fsdp-tune",
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "tokenizers",
    "numpy",
    "triton",
)


_COMMUNICATION = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")


_VARIABLES = ("NCCL_", "GLOO_", "TORCH_NCCL_")


# Variables that may differ: names of devices, and what is printed.
_OWN_VARIABLES = (*INTERFACE_VARIABLES, "NCCL_IB_HCA", "NCCL_DEBUG", "NCCL_HOSTID")


_TRANSPORTS = ("NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET")
"""Variables that choose what NCCL uses. Where one is set, the ports that are there need not be equal."""


_KEYS_OF_LAUNCH = (
    *(
        "launch.num_machines",
        "launch.num_processes",
        "launch.device",
        "launch.hang_timeout",
        "launch.max_runtime",
    ),
    "launch.shared_directory",
)


_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Identity(Document):
    """What one machine is, as it publishes it. Values of the recipe are digests: any process that reaches the
    port can read them."""

    host: str
    versions: dict[str, str | None]
    code: str
    """Digest of this package's source."""
    recipe: dict[str, str]
    """By key that must be equal, a digest of the value."""
    device: str
    devices: list[str]
    """Names of the visible accelerators."""
    variables: dict[str, str] = field(default_factory=dict[str, str])
    """Of NCCL and gloo; digests of those that are not known to be plain settings."""
    ports: list[str] = field(default_factory=list[str])
    """Active ports of InfiniBand and RoCE, by layer and rate."""


def identity_of(recipe: Recipe, environment: Mapping[str, str], extensions: Sequence[str] = ()) -> Identity:
    """Return the identity of this machine. `environment`: that of the ranks; `extensions`: those of the
    recipe, with their versions."""
    device = str(recipe.launch.device)
    found = versions() | installed_versions(_COMMUNICATION)
    keys = {
        key: value
        for key, value in values_by_key(recipe).items()
        if key in _KEYS_OF_LAUNCH or _is_equal_everywhere(key)
    }
    names = [
        name
        for name in sorted(environment)
        if name.startswith(_VARIABLES) and not name.startswith(_OWN_VARIABLES)
    ]
    names += [name for name in _TRANSPORTS if name in environment and name not in names]
    ports: list[dict[str, str | None]] = [*interconnect()["infiniband"].values()] if device == "cuda" else []
    return Identity(
        host=socket.gethostname(),
        versions={name: found[name] for name in (*_PACKAGES, *_COMMUNICATION) if name in found}
        | dict.fromkeys(extensions, "used"),
        code=_code_digest(),
        recipe={key: _digest(json.dumps(value, sort_keys=True)) for key, value in keys.items()},
        device=device,
        devices=[each.name for each in visible_devices(environment)] if device != "cpu" else [],
        variables={name: _shown(name, environment[name]) for name in names},
        ports=sorted(f"{port['layer']} {port['rate']}" for port in ports if "ACTIVE" in str(port["state"])),
    )


def _is_equal_everywhere(key: str) -> bool:
    return effect_of(key).on_resume is not OnResume.FREE


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _shown(name: str, value: str) -> str:
    return masked(name, value) if is_plain_setting(name) else f"(digest {_digest(value)})"


def _code_digest() -> str:
    """Return a digest of the source of this package: two checkouts of one version may differ."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def difference(machine: int, mine: Identity, first: Identity, clock_seconds: float) -> Problem | None:
    """Return how this machine differs from the first, with every difference; None if it does not.

    `clock_seconds`: how far the clock of the first machine is ahead.
    """
    found = [
        *_of_software(mine, first),
        *_of_devices(mine, first),
        *_of_recipe(mine, first),
        *_of_network(mine, first),
    ]
    if abs(clock_seconds) > CLOCK_SECONDS:
        way = "behind" if clock_seconds > 0 else "ahead of"
        found.append(
            (
                "a clock that is",
                f"{format_seconds(abs(clock_seconds))} {way} the other",
                "",
                "set both by NTP",
            )
        )
    if not found:
        return None
    listed = [
        f"{what} {here}" + (f" instead of {there}" if there else "")
        for what, here, there, _ in found[:_SHOWN]
    ]
    more = f" (and {len(found) - _SHOWN} more differences)" if len(found) > _SHOWN else ""
    message = (
        f"machine {machine} ({mine.host}) differs from machine 0 ({first.host}): {'; '.join(listed)}{more}"
    )
    return Problem("machines-differ", message, hint="; ".join(dict.fromkeys(hint for *_, hint in found)))


_Difference = tuple[str, str, str, str]
"""What differs, here, on the first machine, and the hint."""


def _of_software(mine: Identity, first: Identity) -> Iterator[_Difference]:
    for name in sorted(mine.versions.keys() | first.versions.keys()):
        here, there = mine.versions.get(name), first.versions.get(name)
        if here != there:
            yield (
                f"{name}",
                here or "(not installed)",
                there or "(not installed)",
                "install the same packages on all machines",
            )
    if mine.code != first.code and mine.versions.get("fsdp-tune") == first.versions.get("fsdp-tune"):
        yield "fsdp-tune's source", mine.code, first.code, "install the same fsdp-tune on all machines"


def _of_devices(mine: Identity, first: Identity) -> Iterator[_Difference]:
    if len(mine.devices) != len(first.devices):
        hint = "let CUDA_VISIBLE_DEVICES show as many GPUs on each machine"
        yield "visible devices:", str(len(mine.devices)), str(len(first.devices)), hint


def _of_recipe(mine: Identity, first: Identity) -> Iterator[_Difference]:
    differing = [
        key
        for key in sorted(mine.recipe.keys() | first.recipe.keys())
        if mine.recipe.get(key) != first.recipe.get(key)
    ]
    if differing:
        names = ", ".join(f"`{key}`" for key in differing[:_SHOWN]) + (
            " …" if len(differing) > _SHOWN else ""
        )
        yield "another value of", names, "", "pass the same recipe and `--set` on all machines"


def _of_network(mine: Identity, first: Identity) -> Iterator[_Difference]:
    for name in sorted(mine.variables.keys() | first.variables.keys()):
        here, there = mine.variables.get(name), first.variables.get(name)
        if here != there:
            hint = "set the variable in `launch.env`, so that it is equal on all machines"
            yield name, here or "(unset)", there or "(unset)", hint
    is_chosen = any(name in each.variables for name in _TRANSPORTS for each in (mine, first))
    if mine.ports != first.ports and not is_chosen:
        hint = (
            "check the ports (`fsdp-tune env`), or choose what NCCL uses by NCCL_IB_HCA or "
            "NCCL_IB_DISABLE in `launch.env`"
        )
        yield "active InfiniBand ports:", _counted(mine.ports), _counted(first.ports), hint


def _counted(ports: Sequence[str]) -> str:
    return ", ".join(f"{ports.count(port)} × {port}" for port in dict.fromkeys(ports)) or "none"
