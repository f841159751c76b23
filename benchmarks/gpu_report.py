"""What `gpu.py` found, as one JSON document and as Markdown. Pure, but for `write`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_parts import Part

Row = dict[str, Any]
JSON_NAME, MARKDOWN_NAME = "gpu.json", "gpu.md"
COMPARED = ("allocated_gib", "reserved_gib", "step_seconds")


def write(document: dict[str, Any], parts: Sequence[Part], output: Path) -> None:
    """Both files, each whole at any time."""
    from fsdp_tune.core.atomic import write_file, write_json

    output.mkdir(parents=True, exist_ok=True)
    write_json(output / JSON_NAME, document)
    write_file(output / MARKDOWN_NAME, markdown(document, parts))


def with_errors(row: Row) -> Row:
    """The row with what the plan was off by, (predicted / measured − 1)."""
    off = {}
    for figure in COMPARED:
        guess, real = row.get(f"predicted_{figure}"), row.get(figure)
        if guess is not None and real:
            off[f"error_{figure}"] = guess / real - 1
    return row | off


def cell(value: Any, form: str) -> str:
    """`form` is a format specification; "" is the value as it is. Nothing where there is none."""
    return "" if value is None else format(value, form) if form else str(value)


def table(rows: Sequence[Row], columns: Iterable[tuple[str, str, str]]) -> list[str]:
    """Columns that no row has are left out; a row without figures ends with its reason."""
    shown = [column for column in columns if column[0] == "name" or any(row.get(column[0]) is not None for row in rows)]
    has_reasons = any(row.get("reason") for row in rows)
    heads = [heading for _, heading, _ in shown] + ([""] if has_reasons else [])
    lines = [_line(heads), _line(["---"] * len(heads))]
    for row in rows:
        cells = [cell(row.get(key), form) for key, _, form in shown]
        lines.append(_line([*cells, *([row.get("reason") or ""] if has_reasons else [])]))
    return lines


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in cells) + " |"


def markdown(document: dict[str, Any], parts: Sequence[Part]) -> str:
    device = document["device"]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    lines = ["# One GPU, as measured", "", f"`{document['command']}` at commit {document['commit']}, on {device_name(device)}; {versions}."]
    if document["tiny"]:
        lines += [
            "",
            "**Played small, to see that every part can run: no figure here says anything about a GPU or about `plan`.**",
        ]
    lines += ["", f"{document['seconds']:.0f} s of {document['limit_seconds']:.0f}. Plans are for {document['planned_for']}."]
    if told := summary(document):
        lines += ["", *(f"- {sentence}" for sentence in told)]
    for part in parts:
        lines += ["", f"## {part.name}", "", *section(document["parts"].get(part.name), part)]
    return "\n".join(lines) + "\n"


def device_name(device: dict[str, Any]) -> str:
    return f"{device['name']}, emulated on the CPU" if device.get("emulated") else device["name"]


def section(found: dict[str, Any] | None, part: Part) -> list[str]:
    if found is None:
        return [part.what, "", "Not run."]
    lines = [part.what, "", f"{found['seconds']:.0f} s of {part.budget_seconds:.0f}."]
    if found["rows"]:
        lines += ["", *table(found["rows"], part.columns)]
    lines += [f"\n{row['name']}: {row['because']}." for row in found["rows"] if row.get("because")]
    return [*lines, *([f"\nThe part ended early: {found['reason']}"] if found["reason"] else [])]


def summary(document: dict[str, Any]) -> list[str]:
    """What was asked of a GPU, each with what was found; nothing of toys."""
    if document["tiny"]:
        return []
    rows = {name: found["rows"] for name, found in document["parts"].items()}
    told: list[str] = []
    for row in rows.get("recipe", []):
        if row.get("mfu") is not None:
            told.append(f"{row['name']}: MFU {row['mfu']:.1%} (asked: 50 %, aim 55 %), {row['tokens_per_second']:,.0f} tokens/s")
    told += [
        f"ours runs at {row['speed_over_bare']:.3f} of the loop by hand (asked: 0.98)"
        for row in rows.get("bare", [])
        if row["name"] == "ours" and row.get("speed_over_bare")
    ]
    planned = [row for name in ("memory", "recipe", "switches", "offload") for row in rows.get(name, [])]
    for figure, what in zip(COMPARED, ("allocated memory", "reserved memory", "step time"), strict=True):
        off = [abs(row[f"error_{figure}"]) for row in planned if row.get(f"error_{figure}") is not None]
        if off:
            told.append(f"plan's {what}: median {statistics.median(off):.1%} off, at most {max(off):.1%}, {len(off)} runs")
    wrong = [row["name"] for row in planned if row.get("fits") == "no" and row.get("allocated_gib")]
    if wrong:
        told.append(f"plan said that these do not fit, and they ran: {'; '.join(wrong)}")
    return told
