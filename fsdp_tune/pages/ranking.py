"""The ranking of runs, the first thing on a page about several: a row for each run, with the recipe keys that
differ and what it reached.

It is computed once, for the page and for the terminal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_tune.core.errors import ExitReason
from fsdp_tune.core.units import format_short
from fsdp_tune.pages.run_record import RunRecord
from fsdp_tune.run.rank_files import STOPPED

KEYS = 6
"""Differing keys that the ranking shows; all of them are in the table of recipes."""
VALUE_CHARACTERS = 28
LAST_SECTIONS = ("launch.", "checkpoint.", "merge.")
"""Sections whose keys are shown only if there is room: most of them do not change what is learned."""
GOOD_ENDS = {ExitReason.FINISHED.value, *(reason.value for reason in STOPPED)}
SPEED_NOISE = 0.01
"""Of a throughput: runs of one recipe differ by this share."""


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    order: float | str | None
    """By which the column is sorted; None: unknown, at the end."""
    full: str = ""
    """The complete text, if it is shortened."""
    is_best: bool = False
    is_bad: bool = False
    """A state in which the run did not do what it should."""


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


def ranking_of(
    runs: Sequence[RunRecord], recipe_differences: Mapping[str, Sequence[str | None]]
) -> RunRanking:
    """Return the ranking by the best evaluation loss, or else by the last loss. Figures that no run has are
    left out."""
    keys = _shown_keys(runs, recipe_differences)
    found = [run.summary() for run in runs]
    columns = [
        (Column("best evaluation loss"), _with_best([_best_loss(each["eval_loss"]) for each in found], min)),
        (Column("last evaluation loss"), _with_best([_last_loss(each["eval_loss"]) for each in found], min)),
        (Column("loss"), _with_best([_last_loss(each["loss"]) for each in found], min)),
        *(
            (_key_column(key, title, recipe_differences[key]))
            for key, title in zip(keys, _short_names(keys), strict=True)
        ),
        (
            Column("tokens/s/device"),
            _with_best([_speed(each["tokens_per_second_per_device"]) for each in found], max, SPEED_NOISE),
        ),
        (
            Column("memory (GiB)"),
            [_number(each["peak_reserved_gib"] or each["peak_host_gib"], "{:.2f}") for each in found],
        ),
        (Column("done"), [_number(_share(each), "{:.0%}") for each in found]),
        (Column("state", is_number=False), [_state(run) for run in runs]),
    ]
    kept = [
        (column, cells)
        for column, cells in columns
        if column.full or any(cell.order is not None for cell in cells)
    ]
    titles = [column.title for column, _ in kept]
    sorted_by = next(
        (titles.index(title) for title in ("best evaluation loss", "loss") if title in titles), -1
    )
    ranked = [
        RankedRun(at, run.label, str(run.run.path), [cells[at] for _, cells in kept])
        for at, run in enumerate(runs)
    ]
    if sorted_by >= 0:
        ranked.sort(key=lambda run: _order(run.cells[sorted_by]))
    return RunRanking([column for column, _ in kept], ranked, sorted_by, len(recipe_differences) - len(keys))


def _shown_keys(
    runs: Sequence[RunRecord], recipe_differences: Mapping[str, Sequence[str | None]]
) -> list[str]:
    """Return the keys that have a column: written ones; if none of them differs, those that were derived from
    other values."""
    written = [key for key in recipe_differences if not all(key in run.reasons for run in runs)]
    return sorted(written or recipe_differences, key=lambda key: key.startswith(LAST_SECTIONS))[:KEYS]


def _key_column(key: str, title: str, texts: Sequence[str | None]) -> tuple[Column, list[Cell]]:
    cells = [_value(text) for text in texts]
    return Column(title, is_number=all(not isinstance(cell.order, str) for cell in cells), full=key), cells


def _short_names(keys: Sequence[str]) -> list[str]:
    """Return the last part of each key, with the one before it where two would be the same."""
    last = [key.rpartition(".")[2] for key in keys]
    return [
        name if last.count(name) == 1 else ".".join(key.split(".")[-2:])
        for key, name in zip(keys, last, strict=True)
    ]


def _value(text: str | None) -> Cell:
    """Return the cell of a recipe's value, which is JSON or a text."""
    if text is None or text == "null":
        return Cell("–", None)
    try:
        value: object = json.loads(text)
    except ValueError:
        value = text
    order = float(value) if isinstance(value, int | float) and math.isfinite(value) else text
    shown = value if isinstance(value, str) else format_short(value) if isinstance(value, float) else text
    return (
        Cell(shown, order)
        if len(shown) <= VALUE_CHARACTERS
        else Cell(f"{shown[:VALUE_CHARACTERS]}…", order, shown)
    )


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


def _speed(value: float | None) -> Cell:
    return _number(value, "{:,.0f}")


def _state(run: RunRecord) -> Cell:
    """Return the state in words. It is bad if the run has a problem, or ended without an outcome of its
    own."""
    status = run.status
    is_bad = status.problem is not None or (status.has_ended and status.state not in GOOD_ENDS)
    return Cell(status.state.replace("_", " "), status.state, status.problem or "", is_bad=is_bad)


def _with_best(
    cells: Sequence[Cell], better: Callable[[Iterable[float]], float], noise: float = 0.0
) -> list[Cell]:
    """Return the cells with the best marked, and those that show the same or are within `noise` of it; none
    if this is true of all."""
    known = [cell.order for cell in cells if isinstance(cell.order, float | int)]
    if not known:
        return list(cells)
    best = better(known)
    (shown, *_) = [cell.text for cell in cells if cell.order == best]
    is_best = [
        isinstance(cell.order, float | int)
        and (cell.text == shown or abs(cell.order - best) <= noise * abs(best))
        for cell in cells
    ]
    return [
        replace(cell, is_best=found and sum(is_best) < len(known))
        for cell, found in zip(cells, is_best, strict=True)
    ]


def _order(cell: Cell) -> tuple[bool, float]:
    return cell.order is None, float(cell.order) if isinstance(cell.order, float | int) else 0.0
