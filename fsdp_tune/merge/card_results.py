"""Results of `evaluate` in the model card of a merged model or an adapter."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_tune.core.atomic import write_file
from fsdp_tune.merge.output_directory import card_cell, without_folders


@dataclass(frozen=True, slots=True)
class CardResult:
    """A metric on one set, as a model card has it."""

    name: str
    """Of the set: its label, or that of its data."""
    data: str
    """Where its rows come from: a hub id, a file, `builtin:NAME`."""
    split: str
    metric: str
    value: float
    interval: tuple[float, float]
    """At 95 %."""
    rows: int
    base: tuple[str, float] | None = None
    """Another model on the same rows, and its value."""
    config: str | None = None
    """Configuration of a hub data set."""


EVALUATION = "## Evaluation"
_SECTION = re.compile(rf"^{EVALUATION}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def add_results(path: Path, results: Sequence[CardResult]) -> None:
    """Write results into the metadata of a card, which the hub shows, and as a table; those of the same metric and rows are replaced.

    Raises: ValueError or YAMLError for a card whose metadata cannot be read, OSError.
    """
    from huggingface_hub import EvalResult, ModelCard

    found: Any = ModelCard(path.read_text(encoding="utf-8"))
    new = [
        EvalResult(
            task_type="text-generation",
            dataset_type=str(without_folders(each.data)),
            dataset_name=str(without_folders(each.name)),
            dataset_config=each.config,
            dataset_split=each.split,
            metric_type=each.metric,
            metric_value=_rounded(each.value),
            metric_args={
                "interval": [_rounded(edge) for edge in each.interval],
                "rows": each.rows,
                **({"base": without_folders(each.base[0]), "base_value": _rounded(each.base[1])} if each.base is not None else {}),
            },
        )
        for each in results
    ]
    replaced = {_identity(each) for each in new}
    every = [*(each for each in found.data.eval_results or [] if _identity(each) not in replaced), *new]
    _keep_apart(every)
    found.data.eval_results = every
    found.data.model_name = found.data.model_name or _title(found.text)
    columns = {name: cell for name, cell in _COLUMNS.items() if any(cell(each) for each in every)}
    lines = [EVALUATION, "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(card_cell(cell(each)) for cell in columns.values())} |" for each in every]
    section = "\n".join(lines) + "\n\n"
    text = _SECTION.sub("", found.text)
    head, recipe, tail = text.partition("## Recipe\n")
    found.text = f"{head.rstrip()}\n\n{section}{recipe}{tail}" if recipe else f"{text.rstrip()}\n\n{section}"
    write_file(path, str(found))


def _keep_apart(results: Sequence[Any]) -> None:
    """Give sets of the same data and split their names as configurations: the metadata has one entry for the three."""
    names: dict[Any, str] = {}
    for each in results:
        if names.setdefault(each.unique_identifier, each.dataset_name) != each.dataset_name:
            each.dataset_config = each.dataset_name


def _base(result: Any) -> str:
    more = result.metric_args or {}
    return f"{more['base_value']} ({more['base']})" if "base" in more else ""


_COLUMNS: dict[str, Callable[[Any], str]] = {
    "set": lambda each: each.dataset_name if each.dataset_name != each.dataset_type else "",
    "data": lambda each: each.dataset_type,
    "split": lambda each: each.dataset_split or "",
    "metric": lambda each: each.metric_type,
    "value": lambda each: str(each.metric_value),
    "95 % interval": lambda each: " to ".join(map(str, (each.metric_args or {}).get("interval", ()))),
    "rows": lambda each: str((each.metric_args or {}).get("rows", "")),
    "base": _base,
}
"""Of the table; those that are empty for all results are left out."""


def _identity(result: Any) -> tuple[str, str, str | None, str]:
    return result.dataset_type, result.dataset_name, result.dataset_split, result.metric_type


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _title(text: str) -> str:
    return next((line.removeprefix("# ").strip() for line in text.splitlines() if line.startswith("# ")), "model")
