"""`env`: versions, devices and limits for a bug report, and known-bad combinations."""

from __future__ import annotations

import os
from typing import Any

from fsdp_tune.cli.output import Screen
from fsdp_tune.cli.verbs import verb
from fsdp_tune.core.units import format_bytes


@verb
def env(screen: Screen) -> None:
    """Show versions, devices, interconnect, limits, and known-bad combinations.

    Queries torch in a child process; changes nothing.

    \b
    Example:
        fsdp-tune env --json > env.json
    """
    from fsdp_tune.cli.known_bad import known_bad
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
    from fsdp_tune.core.environment import accelerate_default_config, host, interconnect, versions
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
