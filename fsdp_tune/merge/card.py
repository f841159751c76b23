"""The model card: the origin of the weights, as front matter for the hub and as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from fsdp_tune import __version__
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.metrics_file import read_metrics

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
        rows.append(("Base model", base))
        if not Path(base).exists() and base.count("/") == 1:
            front["base_model"] = base
    if recipe is not None:
        sources = [source.path for source in recipe.data.train]
        hub = [path for path in sources if not Path(path).exists() and path.count("/") == 1 and not path.startswith(("builtin:", "/", "."))]
        if hub:
            front["datasets"] = hub
        if sources:
            rows.append(("Data", ", ".join(sources)))
    if run is not None and steps:
        rows.extend(_last_values(run, max(steps)))
    lines = ["---", *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items()), "---", "", f"# {name}", ""]
    lines += ["| | |", "|---|---|", *(f"| {label} | {_cell(value)} |" for label, value in rows), ""]
    lines += [f"Merged with fsdp-tune {__version__}; `merge.json` lists every tensor with its digest.", ""]
    if recipe is not None:
        lines += ["## Recipe", "", "```yaml", _published(recipe).replace("```", "'''").rstrip(), "```", ""]
    return "\n".join(lines)


def _published(recipe: Recipe) -> str:
    """Return the resolved recipe without defaults as YAML.

    Settings of a machine, above all `launch.env`, and the comments of recipe.yaml are left out: only the owner can read that file,
    and a card is published.
    """
    left_out = {"launch": True, "output_dir": True, "data": {"cache_dir", "num_proc"}}
    settings = recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude=left_out)
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


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
    return value.replace("|", "\\|").replace("\n", " ")
