"""The ranking of runs, the first thing on a page about several: a row for each run, with the recipe keys that differ and what it reached.

It is computed once, for the page and for the terminal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_tune.pages.run_record import RunRecord

KEYS = 6
"""Differing keys that the ranking shows; all of them are in the table of recipes."""
VALUE_CHARACTERS = 28
LAST_SECTIONS = ("launch.", "checkpoint.", "merge.")
"""Sections whose keys are shown only if there is room: most of them do not change what is learned."""


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    order: float | str | None
    """By which the column is sorted; None: unknown, at the end."""
    full: str = ""
    """The complete text, if it is shortened."""
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    is_number: bool = True
    full: str = ""
    """The complete name, if the title is shortened."""


@dataclass(frozen=True, slots=True)
class RankedRun:
    index: int
    """Of the run in the report, which decides its colour."""
    label: str
    path: str
    cells: Sequence[Cell]


@dataclass(frozen=True, slots=True)
class RunRanking:
    """Columns, and the runs sorted by `sorted_by`, the best first."""

    columns: Sequence[Column]
    runs: Sequence[RankedRun]
    sorted_by: int
    """Index of a column; -1: nothing was measured yet."""
    hidden_keys: int
    """Keys that differ and have no column."""


def ranking_of(runs: Sequence[RunRecord], recipe_differences: Mapping[str, Sequence[str | None]]) -> RunRanking:
    """Return the ranking by the best evaluation loss, or else by the last loss. Figures that no run has are left out."""
    keys = sorted(recipe_differences, key=lambda key: key.startswith(LAST_SECTIONS))[:KEYS]
    found = [run.summary() for run in runs]
    columns = [Column("state", is_number=False)]
    cells = [[Cell(str(each["state"]), str(each["state"])) for each in found]]
    for key, title in zip(keys, _short_names(keys), strict=True):
        values = [_value(text) for text in recipe_differences[key]]
        columns.append(Column(title, is_number=all(not isinstance(value.order, str) for value in values), full=key))
        cells.append(values)
    figures = [
        (Column("best evaluation loss"), [_best_loss(each["eval_loss"]) for each in found], min),
        (Column("last evaluation loss"), [_last_loss(each["eval_loss"]) for each in found], min),
        (Column("loss"), [_last_loss(each["loss"]) for each in found], min),
        (Column("tokens/s/device"), [_number(each["tokens_per_second_per_device"], "{:,.0f}") for each in found], max),
        (Column("memory (GiB)"), [_number(each["peak_reserved_gib"] or each["peak_host_gib"], "{:.2f}") for each in found], None),
        (Column("done"), [_number(_share(each), "{:.0%}") for each in found], None),
    ]
    sorted_by = -1
    for column, own, better in figures:
        if all(cell.order is None for cell in own):
            continue
        if sorted_by < 0 and better is min and column.title != "last evaluation loss":
            sorted_by = len(columns)
        columns.append(column)
        cells.append(_with_best(own, better))
    ranked = [RankedRun(at, run.label, str(run.run.path), [own[at] for own in cells]) for at, run in enumerate(runs)]
    if sorted_by >= 0:
        ranked.sort(key=lambda run: _order(run.cells[sorted_by]))
    return RunRanking(columns, ranked, sorted_by, len(recipe_differences) - len(keys))


def _short_names(keys: Sequence[str]) -> list[str]:
    """Return the last part of each key, with the one before it where two would be the same."""
    last = [key.rpartition(".")[2] for key in keys]
    return [name if last.count(name) == 1 else ".".join(key.split(".")[-2:]) for key, name in zip(keys, last, strict=True)]


def _value(text: str | None) -> Cell:
    """Return the cell of a recipe's value, which is JSON or a text."""
    if text is None or text == "null":
        return Cell("–", None)
    try:
        value: Any = json.loads(text)
    except ValueError:
        value = text
    order = float(value) if isinstance(value, int | float) and math.isfinite(value) else text
    shown = str(value) if isinstance(value, str) else text
    return Cell(shown, order) if len(shown) <= VALUE_CHARACTERS else Cell(f"{shown[:VALUE_CHARACTERS]}…", order, shown)


def _best_loss(ends: Mapping[str, Any] | None) -> Cell:
    if ends is None or ends["best"] is None:
        return Cell("–" if ends is None else "not finite", None)
    return Cell(f"{ends['best']:.4f}", ends["best"], f"{ends['best']:.6g} at step {ends['best_step']:,}")


def _last_loss(ends: Mapping[str, Any] | None) -> Cell:
    if ends is None or ends["last"] is None:
        return Cell("–" if ends is None else "not finite", None)
    return Cell(f"{ends['last']:.4f}", ends["last"])


def _number(value: float | None, form: str) -> Cell:
    return Cell("–", None) if value is None else Cell(form.format(value), value)


def _share(figures: Mapping[str, Any]) -> float | None:
    return min(1.0, figures["steps"] / figures["total_steps"]) if figures["total_steps"] else None


def _with_best(cells: Sequence[Cell], better: Any) -> list[Cell]:
    """Return the cells with the best one marked, where two or more differ."""
    known = {cell.order for cell in cells if isinstance(cell.order, float | int)}
    if better is None or len(known) < 2:
        return list(cells)
    best = better(known)
    return [Cell(cell.text, cell.order, cell.full, is_best=cell.order == best) for cell in cells]


def _order(cell: Cell) -> tuple[bool, float]:
    return cell.order is None, float(cell.order) if isinstance(cell.order, float | int) else 0.0
