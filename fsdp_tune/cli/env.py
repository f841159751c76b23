"""Commands about machines: `env` shows this one, `doctor` checks those of a recipe before its run."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsdp_tune.cli.verbs import NamedRecipe, Screen, verb
from fsdp_tune.core.command import Option
from fsdp_tune.core.errors import usage_error
from fsdp_tune.core.units import GIB, format_age, format_bytes, parse_seconds
from fsdp_tune.jobs.options import DoctorOptions

if TYPE_CHECKING:
    from fsdp_tune.data.cache import CacheEntry


@verb
def env(screen: Screen) -> None:
    """Show versions, devices, interconnect, limits, and known-bad combinations.

    Queries torch in a child process; changes nothing.

    \b
    Example:
        fsdp-tune env --json > env.json
    """
    from fsdp_tune.jobs.answers import EnvironmentAnswer, KnownBadAnswer

    facts = gather()
    bad = known_bad(facts)
    screen.document(EnvironmentAnswer(**facts, known_bad=[KnownBadAnswer(**row.as_dict()) for row in bad]))
    show(screen, facts)
    for row in bad:
        screen.message(f"! {row.problem}\n  remedy: {row.remedy}\n  source: {row.source}")
    if not bad:
        screen.message("no known-bad combination")


def gather() -> dict[str, Any]:
    """Collect the complete document, including what torch reports."""
    from fsdp_tune.core.devices import (
        accelerate_default_config,
        hidden_by,
        host,
        interconnect,
        lost_devices,
        nvidia_driver,
        torch_facts,
        versions,
        visible_devices,
    )
    from fsdp_tune.launch.command.accelerate import relevant_variables

    devices = [{"kind": each.kind, "name": each.name, "memory_bytes": each.memory_bytes} for each in visible_devices(os.environ)]
    return {
        "versions": versions(),
        "host": host(),
        "devices": devices,
        "lost_devices": lost_devices(),
        "hidden_by": hidden_by(os.environ),
        "driver": nvidia_driver(),
        "torch": torch_facts(),
        "interconnect": interconnect(),
        "variables": relevant_variables(os.environ),
        "accelerate_default_config": accelerate_default_config(os.environ),
    }


def show(screen: Screen, facts: dict[str, Any]) -> None:
    screen.table("versions", ["package", "version"], [[name, version or "not installed"] for name, version in facts["versions"].items()])
    host, torch = facts["host"], facts["torch"]
    rows = [
        ["system", f"{host['system']} {host['architecture']}"],
        ["python", host["executable"]],
        ["cores", f"{host['usable_cores']} usable of {host['cores']}"],
        ["memory", f"{_size(host['memory_available_bytes'])} free of {_size(host['memory_bytes'])}"],
        ["memory limit", _size(host["memory_limit_bytes"], "none")],
        ["/dev/shm", _size(host["shared_memory_bytes"])],
        ["open files", str(host["open_files_limit"])],
        ["devices", _devices(facts["devices"])],
        ["driver", facts["driver"] or "no NVIDIA driver"],
        [
            "torch reports",
            torch.get("error") or f"{torch['device_count']} {torch['device'] or 'accelerators'}, {_build(torch)}",
        ],
        ["backends", ", ".join(torch.get("backends", [])) or "unknown"],
        ["infiniband", _ports(facts["interconnect"]["infiniband"])],
        ["interfaces", ", ".join(facts["interconnect"]["interfaces"]) or "none"],
    ]
    screen.table("machine", ["what", "value"], rows)
    variables = facts["variables"]
    if variables["inherited"]:
        inherited = [[name, "set (not listed)" if value is None else value] for name, value in variables["inherited"].items()]
        screen.table("variables that ranks inherit", ["name", "value"], inherited)
    if variables["removed_at_launch"]:
        screen.message(f"variables of another job, removed at launch: {', '.join(variables['removed_at_launch'])}")


def _size(size_bytes: int | None, none: str = "unknown") -> str:
    return none if size_bytes is None else format_bytes(size_bytes)


def _build(torch: dict[str, Any]) -> str:
    return f"ROCm {torch['hip']}" if torch["hip"] else f"CUDA {torch['cuda'] or 'no'}"


def _devices(devices: list[dict[str, Any]]) -> str:
    if not devices:
        return "none visible"
    names = {f"{each['name']} {_size(each['memory_bytes'])}" for each in devices}
    return f"{len(devices)} × {' / '.join(sorted(names))}"


def _ports(ports: dict[str, Any]) -> str:
    return ", ".join(f"{name} {port['state']} {port['rate']}" for name, port in ports.items()) or "none"


CacheDir = Annotated[Path | None, Option("`data.cache_dir` of the recipes [default: $XDG_CACHE_HOME/fsdp-tune].", metavar="DIR")]

cache = typer.Typer(name="cache", help="List and clean the cache of prepared data.", no_args_is_help=True)


@cache.command("list")
@verb
def list_cache(screen: Screen, cache_dir: CacheDir = None) -> None:
    """List the entries of the cache with size, content and last use.

    \b
    Example:
        fsdp-tune cache list
    """
    from fsdp_tune.data.cache import list_entries
    from fsdp_tune.jobs.answers import CacheEntryAnswer, CacheListAnswer

    folder = _folder(cache_dir)
    entries = list_entries(folder)
    screen.document(CacheListAnswer(str(folder), [CacheEntryAnswer(**_facts(entry)) for entry in entries]))
    screen.table(f"{folder}: {format_bytes(sum(entry.size_bytes for entry in entries))}", COLUMNS, [_row(entry) for entry in entries])


@cache.command("clean")
@verb
def clean_cache(
    screen: Screen,
    older_than: Annotated[str | None, Option("Keep entries used within this time: 30d, 12h.", metavar="TIME")] = None,
    dry_run: Annotated[bool, Option("Show what would be removed, without removing it.")] = False,
    cache_dir: CacheDir = None,
) -> None:
    """Remove the entries that no live run uses. They are built again when a recipe needs them.

    \b
    Examples:
        fsdp-tune cache clean --dry-run
        fsdp-tune cache clean --older-than 30d
    """
    from fsdp_tune.data.cache import clean
    from fsdp_tune.jobs.answers import CacheCleanAnswer, CacheEntryAnswer, KeptEntryAnswer

    folder = _folder(cache_dir)
    removed, kept = clean(folder, unused_seconds=_seconds(older_than), dry_run=dry_run)
    screen.document(
        CacheCleanAnswer(
            cache_dir=str(folder),
            removed=[CacheEntryAnswer(**_facts(entry)) for entry in removed],
            kept=[KeptEntryAnswer(**_facts(entry), reason=reason) for entry, reason in kept],
            dry_run=dry_run,
        )
    )
    freed = format_bytes(sum(entry.size_bytes for entry in removed))
    screen.table(f"{'would remove' if dry_run else 'removed'}: {freed}", COLUMNS, [_row(entry) for entry in removed])
    for entry, reason in kept:
        screen.message(f"kept {entry.path}: {reason}")


COLUMNS = ["entry", "size", "holds", "last used", "by"]


def _row(entry: CacheEntry) -> list[str]:
    by = str(entry.uses[0]) if entry.uses else ""
    live = " (live)" if entry.live and entry.uses else ""
    return [entry.path.name, format_bytes(entry.size_bytes), entry.what, f"{format_age(time.time() - entry.last_used)} ago", by + live]


def _facts(entry: CacheEntry) -> dict[str, Any]:
    from fsdp_tune.jobs.answers import CacheUseAnswer

    return {
        "path": str(entry.path),
        "holds": entry.what,
        "size_bytes": entry.size_bytes,
        "last_used": entry.last_used,
        "uses": [CacheUseAnswer(use.time, use.recipe, use.run, live=use in entry.live) for use in entry.uses],
    }


def _folder(cache_dir: Path | None) -> Path:
    from fsdp_tune.core.processes import default_cache_directory

    if cache_dir is not None and not cache_dir.is_dir():
        raise usage_error("no-cache", f"the directory `{cache_dir}` does not exist", hint="`data.cache_dir` of the recipe names it")
    return (cache_dir or default_cache_directory()).absolute()


def _seconds(older_than: str | None) -> float:
    try:
        return parse_seconds(older_than) if older_than is not None else 0.0
    except ValueError as error:
        raise usage_error("usage", f"`--older-than`: {error}", hint="for example `--older-than 30d`") from error


@verb
def doctor(screen: Screen, recipe: NamedRecipe, options: DoctorOptions) -> None:
    """Start the ranks of a recipe for some seconds and check their machines: disk, inputs, limits, clocks, devices, links.

    Trains nothing and leaves nothing on disk. With several machines, start it on each of them, as `train`. Ends with exit code 1 if a
    check fails, not for warnings.

    \b
    Examples:
        fsdp-tune doctor --config my.yaml
        fsdp-tune doctor --config my.yaml --machine-rank 1
    """
    from fsdp_tune.jobs.doctor import doctor as check
    from fsdp_tune.jobs.doctor import refuse_failed

    screen.phase("reading the recipe")
    answer = check(recipe.load(), options, observer=screen)
    screen.end_phase()
    screen.document(answer)
    for each in answer.checks:
        if each.state != "fail":  # failures follow as errors, with their hints
            screen.message(f"{each.state:4}  {each.name}: {each.finding}" + (f"\n      hint: {each.fix}" if each.fix else ""), indent=6)
    refuse_failed(answer)


# ---- Combinations that are known to fail, hang or be slow, each with its remedy and its source

Facts = Mapping[str, Any]
"""The document of `fsdp-tune env`: versions, host, devices, torch, variables …"""

TESTED = {"torch": ((2, 11), (2, 15)), "transformers": ((5, 17), (5, 23)), "accelerate": ((1, 15), (1, 15))}
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
    return version_tuple(str(facts["host"]["system"]).removeprefix("Linux ")) if str(facts["host"]["system"]).startswith("Linux") else ()


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
            "in the repository: `pip install -c constraints.txt .`, or `scripts/test-against` with your versions",
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
        "CUDA_VISIBLE_DEVICES hides every GPU of this machine: it is empty, or its first entry names none of them",
        "unset it, or name GPUs as `nvidia-smi -L` lists them",
        "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables",
    ),
    KnownBad(
        "cpu-only-torch",
        lambda facts: _has_cuda(facts) and facts["torch"].get("device") is None and "error" not in facts["torch"],
        "the machine has NVIDIA devices, but torch finds none: torch is a CPU build, or the driver is too old for it",
        "install the torch build that fits the driver: https://pytorch.org/get-started/locally",
        "torch.version.cuda against NVML",
    ),
    KnownBad(
        "small-shared-memory",
        lambda facts: (facts["host"].get("shared_memory_bytes") or GIB) < SMALL_SHARED_MEMORY_BYTES and _has_cuda(facts),
        "/dev/shm is smaller than 1 GiB (Docker's default is 64 MiB): NCCL crashes at start-up, and data loaders crash",
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
        "NCCL_P2P_DISABLE=1: devices of one machine communicate through host memory, several times slower than over NVLink",
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
