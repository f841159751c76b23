"""Commands about machines: `env` shows this one, `doctor` checks those of a recipe before its run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsdp_tune.cli.known_combinations import known_bad
from fsdp_tune.cli.screen import Screen
from fsdp_tune.cli.verbs import NamedRecipe, verb
from fsdp_tune.core.command import Option
from fsdp_tune.core.errors import usage_error
from fsdp_tune.core.units import format_age, format_bytes, parse_seconds
from fsdp_tune.jobs.options import DoctorOptions

if TYPE_CHECKING:
    from fsdp_tune.data.cache_entries import CacheEntry


@verb
def env(screen: Screen) -> None:
    """Show versions, devices, interconnect, limits, and combinations of versions with known problems.

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
    from fsdp_tune.core.devices import hidden_by, lost_devices, nvidia_driver, torch_facts, visible_devices
    from fsdp_tune.core.host import host, interconnect
    from fsdp_tune.core.package_versions import versions
    from fsdp_tune.launch.command.default_config import accelerate_default_config
    from fsdp_tune.launch.command.inherited import relevant_variables

    devices = [
        {"kind": each.kind, "name": each.name, "memory_bytes": each.memory_bytes}
        for each in visible_devices(os.environ)
    ]
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
    """Print the document of `gather` as tables."""
    screen.table(
        "versions",
        ["package", "version"],
        [[name, version or "not installed"] for name, version in facts["versions"].items()],
    )
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
            torch.get("error")
            or f"{torch['device_count']} {torch['device'] or 'accelerators'}, {_build(torch)}",
        ],
        ["backends", ", ".join(torch.get("backends", [])) or "unknown"],
        ["infiniband", _ports(facts["interconnect"]["infiniband"])],
        ["interfaces", ", ".join(facts["interconnect"]["interfaces"]) or "none"],
    ]
    screen.table("machine", ["what", "value"], rows)
    variables = facts["variables"]
    if variables["inherited"]:
        inherited = [
            [name, "set (not listed)" if value is None else value]
            for name, value in variables["inherited"].items()
        ]
        screen.table("variables that ranks inherit", ["name", "value"], inherited)
    if variables["removed_at_launch"]:
        screen.message(
            f"variables of another job, removed at launch: {', '.join(variables['removed_at_launch'])}"
        )


def _size(size_bytes: int | None, none: str = "unknown") -> str:
    return none if size_bytes is None else format_bytes(size_bytes)


def _build(torch: dict[str, object]) -> str:
    return f"ROCm {torch['hip']}" if torch["hip"] else f"CUDA {torch['cuda'] or 'no'}"


def _devices(devices: list[dict[str, Any]]) -> str:
    if not devices:
        return "none visible"
    names = {f"{each['name']} {_size(each['memory_bytes'])}" for each in devices}
    return f"{len(devices)} × {' / '.join(sorted(names))}"


def _ports(ports: dict[str, Any]) -> str:
    return ", ".join(f"{name} {port['state']} {port['rate']}" for name, port in ports.items()) or "none"


CacheDir = Annotated[
    Path | None,
    Option("`data.cache_dir` of the recipes [default: $XDG_CACHE_HOME/fsdp-tune].", metavar="DIR"),
]


cache = typer.Typer(name="cache", help="List and clean the cache of prepared data.", no_args_is_help=True)


@cache.command("list")
@verb
def list_cache(screen: Screen, cache_dir: CacheDir = None) -> None:
    """List the entries of the cache with size, content and last use.

    \b
    Example:
        fsdp-tune cache list
    """
    from fsdp_tune.data.cache_entries import list_entries
    from fsdp_tune.jobs.answers import CacheEntryAnswer, CacheListAnswer

    folder = _folder(cache_dir)
    entries = list_entries(folder)
    screen.document(CacheListAnswer(str(folder), [CacheEntryAnswer(**_facts(entry)) for entry in entries]))
    screen.table(
        f"{folder}: {format_bytes(sum(entry.size_bytes for entry in entries))}",
        COLUMNS,
        [_row(entry) for entry in entries],
    )


@cache.command("clean")
@verb
def clean_cache(
    screen: Screen,
    older_than: Annotated[
        str | None, Option("Keep entries used within this time: 30d, 12h.", metavar="TIME")
    ] = None,
    dry_run: Annotated[bool, Option("Show what would be removed, without removing it.")] = False,
    cache_dir: CacheDir = None,
) -> None:
    """Remove the entries that no live run uses. They are built again when a recipe needs them.

    \b
    Examples:
        fsdp-tune cache clean --dry-run
        fsdp-tune cache clean --older-than 30d
    """
    from fsdp_tune.data.cache_entries import clean
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
    screen.table(
        f"{'would remove' if dry_run else 'removed'}: {freed}", COLUMNS, [_row(entry) for entry in removed]
    )
    for entry, reason in kept:
        screen.message(f"kept {entry.path}: {reason}")


COLUMNS = ["entry", "size", "holds", "last used", "by"]


def _row(entry: CacheEntry) -> list[str]:
    by = str(entry.uses[0]) if entry.uses else ""
    live = " (live)" if entry.live and entry.uses else ""
    return [
        entry.path.name,
        format_bytes(entry.size_bytes),
        entry.what,
        f"{format_age(time.time() - entry.last_used)} ago",
        by + live,
    ]


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
    from fsdp_tune.core.user_cache import default_cache_directory

    if cache_dir is not None and not cache_dir.is_dir():
        raise usage_error(
            "no-cache",
            f"the directory `{cache_dir}` does not exist",
            hint="`data.cache_dir` of the recipe names it",
        )
    return (cache_dir or default_cache_directory()).absolute()


def _seconds(older_than: str | None) -> float:
    try:
        return parse_seconds(older_than) if older_than is not None else 0.0
    except ValueError as error:
        raise usage_error(
            "usage", f"`--older-than`: {error}", hint="for example `--older-than 30d`"
        ) from error


@verb
def doctor(screen: Screen, recipe: NamedRecipe, options: DoctorOptions) -> None:
    """Start the ranks of a recipe for a few seconds and check the machines: disk, inputs, limits, clocks,
    devices, links.

    Trains nothing and leaves nothing on disk. With several machines, run it on each of them, as with `train`.
    The exit code is 1 if a check fails; warnings do not change it.

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
            screen.message(
                f"{each.state:4}  {each.name}: {each.finding}"
                + (f"\n      hint: {each.fix}" if each.fix else ""),
                indent=6,
            )
    refuse_failed(answer)
