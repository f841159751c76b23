"""The report of `gpu_day.py`. Pure, but that it reads the documents that `gpu.py` left."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_report

if TYPE_CHECKING:
    from gpu_day import Result, Task

NOT_BEGUN = "not begun: no time was left, or the call was ended; the same command continues"
EMULATED = {True: "Emulated: not a measurement.", False: "Emulated: the kernels are the CPU's."}


def markdown(setting: dict[str, Any], tasks: Sequence[Task], found: Mapping[str, Result], output: Path) -> str:
    device, versions = setting["device"], ", ".join(f"{name} {version}" for name, version in setting["versions"].items())
    facts = ", ".join(f"{name} {value}" for name, value in device.items() if name not in ("name", "emulated"))
    lines = ["# A day on a GPU", "", f"{gpu_report.device_name(device)} ({facts}); commit {setting['commit']}; {versions}.", ""]
    rows = [
        {"name": task.name, "ended": found[task.name].ended if task.name in found else NOT_BEGUN, "seconds": seconds_of(found, task)}
        for task in tasks
    ]
    lines += gpu_report.table(rows, (("name", "part", ""), ("ended", "result", ""), ("seconds", "s", ".0f")))
    documents = {task.name: document for task in tasks if (document := read_document(output, task)) is not None}
    together: dict[str, Any] = {
        "tiny": device["emulated"],
        "parts": {name: part for each in documents.values() for name, part in each["parts"].items()},
    }
    if told := gpu_report.summary(together):
        lines += ["", *(f"- {sentence}" for sentence in told)]
    for task in tasks:
        lines += ["", f"## {task.name}", "", task.what]
        if device["emulated"]:
            lines += ["", EMULATED[task.measures]]
        if task.name in found:
            lines += ["", *section(found[task.name]), *tables(documents.get(task.name))]
    return "\n".join(lines) + "\n"


def seconds_of(found: Mapping[str, Result], task: Task) -> float | None:
    return found[task.name].seconds if task.name in found else None


def read_document(output: Path, task: Task) -> dict[str, Any] | None:
    """What `gpu.py` wrote for this part; None of another kind of part."""
    file = output / task.name.replace(" ", "-") / gpu_report.JSON_NAME
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def section(result: Result) -> list[str]:
    lines = [f"`{result.command}`", "", f"{result.ended}; {result.seconds:.0f} s of {result.limit_seconds:.0f}."]
    told = of_passed(result.tail) if result.ended == "passed" else result.tail
    return [*lines, *(["", "```text", *told, "```"] if told else [])]


def of_passed(tail: list[str]) -> list[str]:
    """What pytest printed at its end: the summary of parity rows, where there is one, and how many tests passed."""
    headings = [index for index, line in enumerate(tail) if line.startswith("=====")]
    summaries = [index for index in headings if tail[index].strip("= ") == "parity"]
    return tail[(summaries or headings)[-1] :] if headings else []


def tables(document: dict[str, Any] | None) -> list[str]:
    from gpu_parts import PARTS

    if document is None:
        return []
    return [
        line
        for part in PARTS
        if part.name in document["parts"]
        for line in ("", *gpu_report.section(document["parts"][part.name], part)[1:])
    ]
