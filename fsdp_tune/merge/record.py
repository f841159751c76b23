"""Write the small files of the output: config, tokenizer, model card, and `merge.json` with the origin of every tensor."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import yaml

from fsdp_tune.core.atomic import write_file
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.tensors.peft_fields import CONFIG_FILE
from fsdp_tune.core.version import __version__
from fsdp_tune.data.report import DataReport
from fsdp_tune.merge.companions import CONFIG_NAME, Companions, output_config
from fsdp_tune.merge.copy.write import Layout, Written
from fsdp_tune.merge.destination import RECORD_NAME, put
from fsdp_tune.merge.lora.adapt import Adapter
from fsdp_tune.merge.source import MergeSettings, Selection
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.metrics_file import read_metrics
from fsdp_tune.run.records import Environment

RECORD_KIND = "fsdp-tune merged model"
_ABSOLUTE_PATH = re.compile(r"/[^\n]+")


@dataclass(frozen=True, slots=True)
class Facts:
    """The contents of merge.json and of the model card."""

    selection: Selection
    settings: MergeSettings
    companions: Companions
    layout: Layout
    written: Written
    tied: Mapping[str, str]
    left_out: dict[str, str]
    adapter: Adapter | None = None

    @property
    def steps(self) -> list[int]:
        return [weights.step for weights in self.selection.weights if weights.step is not None]


def write_companions(
    stage: Path, companions: Companions, layout: Layout, config_changes: Mapping[str, Any], adapter: Adapter | None = None
) -> None:
    """Write the config with the dtype of the weights, and copy the tokenizer's files. An exported `adapter` gets PEFT's config."""
    if adapter is not None and adapter.is_exported:
        put(stage / CONFIG_FILE, (json.dumps(adapter.config_json(), indent=2, ensure_ascii=False) + "\n").encode())
    if companions.config is not None:
        dtype = layout.main_dtype
        config = output_config(companions.config, dtype if dtype.converts else None, config_changes)
        put(stage / CONFIG_NAME, (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())
    for name, path in companions.files.items():
        put(stage / name, path.read_bytes())


def write_record(stage: Path, output_name: str, facts: Facts) -> None:
    """Write merge.json and the model card, the last files of the stage."""
    files = {path.relative_to(stage).as_posix() for path in stage.rglob("*") if path.is_file()} | {RECORD_NAME, CARD_NAME}
    record = _record(facts) | {"files": sorted(files)}
    put(stage / RECORD_NAME, (json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())
    rows = [
        ("Checkpoint", ", ".join(weights.checkpoint.name for weights in facts.selection.weights)),
        ("Step", ", ".join(map(str, facts.steps)) or "unknown"),
        ("Parameters", f"{facts.layout.total_parameters:,}"),
        ("dtype", facts.layout.main_dtype.name),
    ]
    run = facts.selection.run
    name = (facts.settings.recipe.name if facts.settings.recipe else None) or (run.name if run is not None else output_name)
    base, is_adapter = (facts.adapter.base_name, facts.adapter.is_exported) if facts.adapter is not None else (None, False)
    card = model_card(name, facts.settings.recipe, facts.selection.run, facts.steps, rows, base=base, is_adapter=is_adapter)
    put(stage / CARD_NAME, card.encode())


def _record(facts: Facts) -> dict[str, Any]:
    run = facts.selection.run
    return {
        "kind": RECORD_KIND,
        "format_version": 1,
        "source": [str(weights.checkpoint) for weights in facts.selection.weights],
        "steps": facts.steps,
        "reason": facts.selection.reason,
        "recipe_digest": run.recipe_digest() if run is not None else None,
        "companions": facts.companions.origin,
        "dtype_option": facts.settings.dtype,
        "verified": facts.settings.verify,
        "tied": dict(facts.tied),
        "left_out": facts.left_out,
        "adapter": facts.adapter.as_dict() if facts.adapter is not None else None,
        "non_finite": {name: str(counts) for name, counts in sorted(facts.written.non_finite.items())},
        "versions": {
            "fsdp_tune": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "ml_dtypes": ml_dtypes.__version__,
        },
        "digest": "xxh3_128 of the tensor's bytes, hexadecimal",
        "tensors": {
            placed.name: {
                "file": placed.file,
                "dtype": placed.dtype.name,
                "shape": list(placed.shape),
                "digest": facts.written.digests[placed.name],
            }
            for file in facts.layout.files
            for placed in file.tensors
        },
    }


CARD_NAME = "README.md"


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
    """Return the card as Markdown. `facts` are (label, value) rows. `base` names the base model where no recipe does."""
    library = "peft" if is_adapter else "transformers"
    front: dict[str, Any] = {
        "library_name": library,
        "pipeline_tag": "text-generation",
        "tags": ["fsdp-tune", *(["lora"] if is_adapter else [])],
    }
    rows = list(facts)
    base = base or (recipe.model.name_or_path if recipe is not None else None)
    if base:
        rows.append(("Base model", without_folders(base)))
        if not Path(base).exists() and base.count("/") == 1:
            front["base_model"] = base
    if recipe is not None:
        sources = [source.path for source in recipe.data.train]
        hub = [path for path in sources if not Path(path).exists() and path.count("/") == 1 and not path.startswith(("builtin:", "/", "."))]
        if hub:
            front["datasets"] = hub
        if sources:
            rows.append(("Data", ", ".join(map(without_folders, sources))))
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
    lines += ["| | |", "|---|---|", *(f"| {label} | {_cell(value)} |" for label, value in rows), ""]
    lines += [f"Merged with fsdp-tune {__version__}; `merge.json` lists every tensor with its digest.", ""]
    if recipe is not None:
        lines += ["## Recipe", "", "```yaml", _published(recipe).replace("```", "'''").rstrip(), "```", ""]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class CardResult:
    """A metric on one set, as a model card has it."""

    data: str
    split: str | None
    metric: str
    value: float
    interval: tuple[float, float]
    """At 95 %."""
    rows: int
    base: tuple[str, float] | None = None
    """Another model on the same rows, and its value."""


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
            dataset_name=str(without_folders(each.data)),
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
    found.data.eval_results = every
    found.data.model_name = found.data.model_name or _title(found.text)
    lines = [EVALUATION, "", "| data | split | metric | value | 95 % interval | rows | base |", "|---|---|---|---|---|---|---|"]
    lines += [_result_line(each) for each in every]
    section = "\n".join(lines) + "\n\n"
    text = _SECTION.sub("", found.text)
    head, recipe, tail = text.partition("## Recipe\n")
    found.text = f"{head.rstrip()}\n\n{section}{recipe}{tail}" if recipe else f"{text.rstrip()}\n\n{section}"
    write_file(path, str(found))


def _result_line(result: Any) -> str:
    more = result.metric_args or {}
    interval = " to ".join(map(str, more.get("interval", ())))
    base = f"{more['base_value']} ({more['base']})" if "base" in more else ""
    cells = [result.dataset_name, result.dataset_split or "", result.metric_type, result.metric_value, interval, more.get("rows", ""), base]
    return f"| {' | '.join(_cell(str(cell)) for cell in cells)} |"


def _identity(result: Any) -> tuple[str, str | None, str]:
    return result.dataset_name, result.dataset_split, result.metric_type


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _title(text: str) -> str:
    return next((line.removeprefix("# ").strip() for line in text.splitlines() if line.startswith("# ")), "model")


def _published(recipe: Recipe) -> str:
    """Return the resolved recipe without defaults as YAML.

    Settings of a machine, above all `launch.env`, folders of its files, and the comments of recipe.yaml are left out: only the owner can
    read that file, and a card is published.
    """
    left_out = {"launch": True, "output_dir": True, "data": {"cache_dir", "num_proc"}}
    settings = recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude=left_out)
    return yaml.safe_dump(without_folders(settings), sort_keys=False, allow_unicode=True)


def without_folders(value: Any) -> Any:
    """Return a value in which each absolute path, also in lists and mappings, is only its last part: folders name people and projects."""
    if isinstance(value, dict):
        return {key: without_folders(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_folders(each) for each in value]
    return Path(value).name if isinstance(value, str) and _ABSOLUTE_PATH.fullmatch(value) else value


def _data_values(run: RunDir) -> list[tuple[str, str]]:
    """Return size and digest of the training data; nothing if their account cannot be read."""
    try:
        data = json.loads(run.data_json.read_bytes())
        report = DataReport.model_validate(data["report"])
        if report.stream_sample_rows is not None:  # the account is of the first rows of each source
            return [("Size of the data", "a stream"), ("Digest of data and settings", str(data["key"]))]
        account = report.sets["train"]
        size = f"{account.rows:,} rows of {account.examples:,} examples, {account.tokens:,} tokens an epoch"
        return [("Size of the data", size), ("Digest of data and settings", str(data["key"]))]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _versions(run: RunDir) -> list[tuple[str, str]]:
    try:
        found = Environment.read(run.environment_json)
    except FsdpTuneError:
        return []
    versions = found.versions if found is not None else {}
    named = [f"{name} {versions[name]}" for name in ("fsdp-tune", "torch", "transformers", "accelerate") if versions.get(name)]
    return [("Trained with", ", ".join(named))] if named else []


def _last_values(run: RunDir, step: int) -> list[tuple[str, str]]:
    """Return the last metrics at or before the merged step."""
    lines = [line for line in read_metrics(run) if isinstance(line.get("step"), int) and line["step"] <= step]
    rows: list[tuple[str, str]] = []
    for key, label in (("loss", "Training loss"), ("eval_loss", "Evaluation loss"), ("tokens", "Tokens trained on")):
        values = [line[key] for line in lines if isinstance(line.get(key), (int, float))]
        if values:
            rows.append((label, f"{values[-1]:,}" if key == "tokens" else f"{values[-1]:.4f}"))
    return rows


def _cell(value: str) -> str:
    """Return a value as plain text: a name of data that is HTML or a link must not be one on a published page."""
    return re.sub(r"([\\`\[\]|])", r"\\\1", escape(value, quote=False)).replace("\n", " ")
