"""The report of a GPU day: Markdown of what day.json has. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_parts import Part

Row = dict[str, Any]
COMPARED = ("allocated_gib", "reserved_gib", "step_seconds")
NOT_BEGUN = "Not begun: the next call continues with it."


def markdown(day: dict[str, Any], parts: Sequence[Part]) -> str:
    found: dict[str, dict[str, Any]] = {
        name: part | {"rows": list(map(with_errors, part["rows"]))} for name, part in day["parts"].items()
    }
    lines = ["# A day on a GPU", "", *_heading(day)]
    rows = [_part_row(part, found.get(part.name)) for part in parts]
    lines += [
        "",
        *table(
            rows,
            (("name", "part", ""), ("rows", "rows", "d"), ("seconds", "s", ".0f"), ("ended", "ended", "")),
        ),
    ]
    if told := summary(day, found):
        lines += ["", *(f"- {sentence}" for sentence in told)]
    for part in parts:
        lines += ["", f"## {part.name}", "", part.what, "", *section(found.get(part.name), part)]
    return "\n".join(lines) + "\n"


def _heading(day: dict[str, Any]) -> list[str]:
    planned = f"Plans are for {day['planned_for']}." if "planned_for" in day else ""
    if (setting := day.get("setting")) is None:
        return [f"Nothing is measured yet. {planned}"]
    device = setting["device"]
    facts = ", ".join(f"{name} {value}" for name, value in device.items() if name not in ("name", "emulated"))
    versions = ", ".join(f"{name} {version}" for name, version in setting["versions"].items())
    name = f"{device['name']}, emulated on the CPU" if device["emulated"] else device["name"]
    calls = [
        f"{each['began']}: {each.get('seconds', 0):.0f} s, {each['start_seconds']:.0f} s before the "
        "first part"
        for each in day["calls"]
    ]
    toys = (
        ["", "**Toys: no figure here says anything about a GPU or about `plan`.**"] if setting["tiny"] else []
    )
    return [
        f"{name} ({facts}); commit {setting['commit']}; {versions}. {planned}",
        "",
        f"Calls: {'; '.join(calls)}.",
        *toys,
    ]


def _part_row(part: Part, found: dict[str, Any] | None) -> Row:
    if found is None or not (found["seconds"] or found["ended"]):
        return {"name": part.name, "ended": "not begun"}
    state = found["ended"] or "complete"
    return {"name": part.name, "rows": len(found["rows"]), "seconds": found["seconds"], "ended": state}


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
    shown = [
        column
        for column in columns
        if column[0] == "name" or any(row.get(column[0]) is not None for row in rows)
    ]
    has_reasons = any(row.get("reason") for row in rows)
    heads = [heading for _, heading, _ in shown] + ([""] if has_reasons else [])
    lines = [_line(heads), _line(["---"] * len(heads))]
    for row in rows:
        cells = [cell(row.get(key), form) for key, _, form in shown]
        lines.append(_line([*cells, *([row.get("reason") or ""] if has_reasons else [])]))
    return lines


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in cells) + " |"


def section(found: dict[str, Any] | None, part: Part) -> list[str]:
    if found is None or not (found["rows"] or found["ended"]):
        return [NOT_BEGUN]
    lines = [f"{found['seconds']:.0f} s; {found['ended'] or 'complete'}."]
    if found["rows"]:
        lines += ["", *table(found["rows"], part.columns)]
    lines += [f"\n{row['name']}: {row['because']}." for row in found["rows"] if row.get("because")]
    for name, message in [
        *((row["name"], row.get("message")) for row in found["rows"]),
        (part.name, found.get("message")),
    ]:
        lines += ["", f"{name}:", "", "```text", message, "```"] if message else []
    return lines


def summary(day: dict[str, Any], found: dict[str, dict[str, Any]]) -> list[str]:
    """What is asked of a GPU, each with what was found; nothing of toys."""
    if day.get("setting", {}).get("tiny", True):
        return []
    rows = {name: part["rows"] for name, part in found.items()}
    told: list[str] = []
    for row in rows.get("recipe", []):
        if row.get("mfu") is not None:
            told.append(
                f"{row['name']}: MFU {row['mfu']:.1%} (asked: 50 %, aim 55 %), "
                f"{row['tokens_per_second']:,.0f} tokens/s"
            )
    told += [
        f"ours runs at {row['speed_over_bare']:.3f} of the loop by hand (asked: 0.98)"
        for row in rows.get("bare", [])
        if row["name"] == "ours" and row.get("speed_over_bare")
    ]
    planned = [row for part in rows.values() for row in part]
    for figure, what in zip(COMPARED, ("allocated memory", "reserved memory", "step time"), strict=True):
        off = [abs(row[f"error_{figure}"]) for row in planned if row.get(f"error_{figure}") is not None]
        if off:
            told.append(
                f"plan's {what}: median {statistics.median(off):.1%} off, at most {max(off):.1%}, "
                f"{len(off)} runs"
            )
    wrong = [row["name"] for row in planned if row.get("fits") == "no" and row.get("allocated_gib")]
    if wrong:
        told.append(f"plan said that these do not fit, and they ran: {'; '.join(wrong)}")
    return told
