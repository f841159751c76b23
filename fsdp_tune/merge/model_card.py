"""The model card of a merged model or exported adapter."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.version import __version__
from fsdp_tune.data.report import DataReport
from fsdp_tune.merge.card_metadata import base_metadata, data_metadata
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.metrics_file import read_metrics
from fsdp_tune.run.records import Environment, read_object

_ABSOLUTE_PATH = re.compile(r"/[^\n]+")
CARD_NAME = "README.md"
DTYPE_ROW = "dtype"
QUANTISED_ROW = "Quantisation emulated in training"
"""Label of the card's row for a run with `quantization.train`."""
MERGED_WITH = "Merged with fsdp-tune"
"""Beginning of the card's sentence about the merge; the version follows."""


def model_card(
    name: str,
    recipe: Recipe | None,
    run: RunDir | None,
    steps: Sequence[int],
    facts: Sequence[tuple[str, str]],
    *,
    base: str | None = None,
    is_adapter: bool = False,
) -> str:
    """Return the card as Markdown. `facts` are (label, value) rows. `base` names the base model where no
    recipe does."""
    library = "peft" if is_adapter else "transformers"
    front: dict[str, object] = {
        "library_name": library,
        "pipeline_tag": "text-generation",
        "tags": ["fsdp-tune", *(["lora"] if is_adapter else [])],
    }
    rows = list(facts)
    base = base or (recipe.model.name_or_path if recipe is not None else None)
    if base:
        rows.append(("Base model", without_folders(base)))
    front |= base_metadata(base, is_adapter=is_adapter, is_resolved=recipe is not None)
    if recipe is not None and recipe.data.train:
        front |= data_metadata(recipe.data.train)
        rows.append(("Data", ", ".join(without_folders(source.path) for source in recipe.data.train)))
    if run is not None and steps:
        rows.extend([*_data_values(run), *_last_values(run, max(steps)), *_versions(run)])
    lines = [
        "---",
        *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items()),
        "---",
        "",
        f"# {escape(name)}",
        "",
    ]
    lines += ["| | |", "|---|---|", *(f"| {label} | {card_cell(value)} |" for label, value in rows), ""]
    lines += [f"{MERGED_WITH} {__version__}; `merge.json` lists every tensor with its digest.", ""]
    if recipe is not None:
        lines += ["## Recipe", "", "```yaml", _published(recipe).replace("```", "'''").rstrip(), "```", ""]
    return "\n".join(lines)


def _published(recipe: Recipe) -> str:
    """Return the resolved recipe without defaults as YAML.

    Settings of a machine, above all `launch.env`, folders of its files, and the comments of recipe.yaml are
    left out: only the owner can read that file, and a card is published.
    """
    left_out = {"launch": True, "output_dir": True, "data": {"cache_dir", "num_proc"}}
    settings = recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude=left_out)
    return yaml.safe_dump(without_folders(settings), sort_keys=False, allow_unicode=True)


def without_folders(value: object) -> Any:
    """Return a value in which each absolute path, also in lists and mappings, is only its last part: folders
    name people and projects."""
    if isinstance(value, dict):
        return {key: without_folders(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_folders(each) for each in value]
    return Path(value).name if isinstance(value, str) and _ABSOLUTE_PATH.fullmatch(value) else value


def _data_values(run: RunDir) -> list[tuple[str, str]]:
    """Return size and digest of the training data; nothing if their account cannot be read."""
    try:
        data = read_object(run.data_json)
        report = DataReport.model_validate(data["report"])
        if report.stream_sample_rows is not None:  # the account is of the first rows of each source
            return [("Size of the data", "a stream"), ("Digest of data and settings", str(data["key"]))]
        account = report.sets["train"]
        size = f"{account.rows:,} rows of {account.examples:,} examples, {account.tokens:,} tokens an epoch"
        size += f"; {account.repeated} repeated an earlier one" if account.repeated.rows else ""
        size += (
            f"; {account.dropped_duplicates} left out as duplicates"
            if account.dropped_duplicates.rows
            else ""
        )
        return [("Size of the data", size), ("Digest of data and settings", str(data["key"]))]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _versions(run: RunDir) -> list[tuple[str, str]]:
    try:
        found = Environment.read(run.environment_json)
    except FsdpTuneError:
        return []
    versions = found.versions if found is not None else {}
    named = [
        f"{name} {versions[name]}"
        for name in ("fsdp-tune", "torch", "transformers", "accelerate")
        if versions.get(name)
    ]
    return [("Trained with", ", ".join(named))] if named else []


def _last_values(run: RunDir, step: int) -> list[tuple[str, str]]:
    """Return rows of the card with the last metrics at or before the merged step. A value of an earlier step
    says which it is."""
    lines = [line for line in read_metrics(run) if isinstance(line.get("step"), int) and line["step"] <= step]
    rows: list[tuple[str, str]] = []
    for key, label in (
        ("loss", "Training loss"),
        ("eval_loss", "Evaluation loss"),
        ("tokens", "Tokens trained on"),
    ):
        values = [(line["step"], line[key]) for line in lines if isinstance(line.get(key), (int, float))]
        if values:
            of_step, value = values[-1]
            shown = label if of_step == step else f"{label} (step {of_step})"
            rows.append((shown, f"{value:,}" if key == "tokens" else f"{value:.4f}"))
    return rows


def card_cell(value: str) -> str:
    """Return a value as plain text: a name of data that is HTML or a link must not be one on a published
    page."""
    return re.sub(r"([\\`\[\]|])", r"\\\1", escape(value, quote=False)).replace("\n", " ")
