"""`merge.json`: the origin of every tensor of a merge, and the last files of its stage."""

from __future__ import annotations

import json
import platform
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from fsdp_tune.core.version import __version__
from fsdp_tune.merge.config_and_tokenizer import Companions
from fsdp_tune.merge.copy.layout import Layout
from fsdp_tune.merge.copy.write import Written
from fsdp_tune.merge.lora.adapt import Adapter
from fsdp_tune.merge.merge_settings import MergeSettings
from fsdp_tune.merge.model_card import CARD_NAME, DTYPE_ROW, QUANTISED_ROW, model_card
from fsdp_tune.merge.output_directory import put
from fsdp_tune.merge.source import Selection
from fsdp_tune.run.base_model import BaseRecord
from fsdp_tune.run.directory import MERGE_RECORD
from fsdp_tune.run.manifest import digest_data, digest_file
from fsdp_tune.run.written_files import seal_record

RECORD_KIND = "fsdp-tune merged model"


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
    base_tensors: BaseRecord
    adapter: Adapter | None = None
    origin: str | None = None
    """The URL that the checkpoint was downloaded from."""

    @property
    def steps(self) -> list[int]:
        return [weights.step for weights in self.selection.weights if weights.step is not None]

    @property
    def identities(self) -> list[str]:
        """Return those of the checkpoints (`Manifest.identity`): a step that is trained again has another."""
        manifests = [weights.manifest for weights in self.selection.weights]
        return [manifest.identity for manifest in manifests if manifest is not None]


def write_record(stage: Path, output_name: str, facts: Facts) -> None:
    """Write merge.json and the model card, the last files of the stage."""
    files = {path.relative_to(stage).as_posix() for path in stage.rglob("*") if path.is_file()} | {
        MERGE_RECORD,
        CARD_NAME,
    }
    record = seal_record(
        _record(facts) | {"files": sorted(files), **_digests_of_files(stage, files, facts.layout)}
    )
    put(
        stage / MERGE_RECORD,
        (json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode(),
    )
    rows = [
        ("Checkpoint", ", ".join(weights.checkpoint.name for weights in facts.selection.weights)),
        ("Step", ", ".join(map(str, facts.steps)) or "unknown"),
        ("Parameters", f"{facts.layout.total_parameters:,}"),
        (DTYPE_ROW, facts.layout.main_dtype.name),
        *([("Tensors of the base", shown)] if (shown := facts.base_tensors.describe()) else []),
    ]
    if (
        facts.settings.recipe is not None
        and (section := facts.settings.recipe.quantised_training) is not None
    ):
        rows.append(
            (
                QUANTISED_ROW,
                f"{section.train}; the losses below are of rounded weights, and these are not rounded",
            )
        )
    run = facts.selection.run
    name = (facts.settings.recipe.name if facts.settings.recipe else None) or (
        run.name if run is not None else output_name
    )
    base, is_adapter = (
        (facts.adapter.base_name, facts.adapter.is_exported) if facts.adapter is not None else (None, False)
    )
    card = model_card(
        name, facts.settings.recipe, facts.selection.run, facts.steps, rows, base=base, is_adapter=is_adapter
    )
    put(stage / CARD_NAME, card.encode())


def _digests_of_files(stage: Path, files: Collection[str], layout: Layout) -> dict[str, object]:
    """Return size and digest of each file but the card, which others change: of weights, the digest of the
    header."""
    headers = {
        file.name: {"size_bytes": file.size_bytes, "digest": digest_data(file.header).digest}
        for file in layout.files
    }
    others = sorted(set(files) - headers.keys() - {MERGE_RECORD, CARD_NAME})
    return {"headers": headers, "contents": {name: asdict(digest_file(stage / name)) for name in others}}


def _record(facts: Facts) -> dict[str, object]:
    run = facts.selection.run
    return {
        "kind": RECORD_KIND,
        "format_version": 1,
        "source": [facts.origin]
        if facts.origin
        else [str(weights.checkpoint) for weights in facts.selection.weights],
        "steps": facts.steps,
        "checkpoints": [] if facts.origin else facts.identities,
        "reason": facts.selection.reason,
        "recipe_digest": run.recipe_digest() if run is not None else None,
        "companions": f"{facts.origin}.run/model"
        if facts.origin and facts.companions.is_of_run
        else facts.companions.origin,
        "dtype_option": facts.settings.dtype,
        "verified": facts.settings.verify,
        "tied": dict(facts.tied),
        "left_out": facts.left_out,
        "base_tensors": {
            "counts": facts.base_tensors.counts,
            "decoded_by": facts.base_tensors.rules,
            "carried": list(facts.base_tensors.carried),
            "left_out": list(facts.base_tensors.left_out),
        },
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
