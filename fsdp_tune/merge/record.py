"""The small files of the output: config, tokenizer, model card, and `merge.json` with the origin of every tensor."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from fsdp_tune import __version__
from fsdp_tune.merge.card import CARD_NAME, model_card
from fsdp_tune.merge.companions import CONFIG_NAME, Companions, output_config
from fsdp_tune.merge.copy.layout import Layout
from fsdp_tune.merge.copy.write import Written
from fsdp_tune.merge.destination import RECORD_NAME, put
from fsdp_tune.merge.lora.adapt import Adapter
from fsdp_tune.merge.lora.adapter_config import CONFIG_NAME as ADAPTER_CONFIG_NAME
from fsdp_tune.merge.settings import Settings
from fsdp_tune.merge.source import Selection

RECORD_KIND = "fsdp-tune merged model"


@dataclass(frozen=True, slots=True)
class Facts:
    """The contents of merge.json and of the model card."""

    selection: Selection
    settings: Settings
    companions: Companions
    layout: Layout
    written: Written
    tied: dict[str, str]
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
        put(stage / ADAPTER_CONFIG_NAME, (json.dumps(adapter.config_json(), indent=2, ensure_ascii=False) + "\n").encode())
    if companions.config is not None:
        dtype = layout.main_dtype
        config = output_config(companions.config, dtype if dtype.converts else None, config_changes)
        put(stage / CONFIG_NAME, (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())
    for name, path in companions.files.items():
        put(stage / name, path.read_bytes())


def write_record(stage: Path, output_name: str, facts: Facts) -> None:
    """Write merge.json and the model card, the last files of the stage."""
    put(stage / RECORD_NAME, (json.dumps(_record(facts), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())
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
        "tied": facts.tied,
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
