"""Write the quantised model next to the merged one, for a run that trained with `quantization.train`.

A child process converts and compares it (`model.loading.quantised_files`): its logits must be those of the trained model, up to rounding.
Its directory has the files of the merged model, but for the weights, and `quantised.json`, without which it counts as absent.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_tune.core import processes as children
from fsdp_tune.core.atomic import occupants, staged_directory, write_json
from fsdp_tune.core.errors import FsdpTuneError, Where, failed_error, usage_error
from fsdp_tune.core.version import __version__
from fsdp_tune.merge.merge_options import QuantisedAnswer
from fsdp_tune.merge.output_directory import CARD_NAME, writing_to
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import MERGE_RECORD

CONVERT = (sys.executable, "-P", "-m", "fsdp_tune.model.loading.quantised_files")
RECORD_NAME = "quantised.json"
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
_ALLOWED = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2}
"""Distance of the logits, by compute dtype. Measured: 0."""


@dataclass(frozen=True, slots=True)
class QuantisedModel:
    path: Path
    layers: int
    difference: float
    """Norm of the difference between its logits and those of the trained model, over their norm."""
    size_bytes: int
    seconds: float

    def as_answer(self) -> QuantisedAnswer:
        return QuantisedAnswer(str(self.path), self.layers, self.difference, self.size_bytes, round(self.seconds, 3))


def quantised_directory(merged: Path) -> Path:
    return merged.with_name(f"{merged.name}-quantised")


def check_quantised(recipe: Recipe | None, merged: Path, dtype: str, *, overwrite: bool) -> None:
    """Raises: usage error unless a quantised model can be written of weights that are merged in `dtype`."""
    if recipe is None or recipe.quantised_training is None:
        message = "`--quantise` writes the model that `quantization.train` emulates, and the run has no such key"
        raise usage_error("merge-not-quantised", message, hint="leave it out, and quantise the merged model by a tool of your choice")
    if dtype not in ("keep", "fp32", recipe.compute_dtype):
        message = f"the run rounded weights of {recipe.compute_dtype} to int4, and merged weights would be in {dtype}"
        raise usage_error("merge-not-quantised", message, hint=f"write `--dtype {recipe.compute_dtype}`")
    target = quantised_directory(merged)
    if occupants(target) and not (overwrite and (target / RECORD_NAME).is_file()):
        ways_out = ("--overwrite",) if (target / RECORD_NAME).is_file() else ("remove it", "--output ANOTHER")
        raise usage_error("merge-output-exists", "the output exists", where=Where(str(target)), ways_out=ways_out)


def quantise_merged(merged: Path, recipe: Recipe, max_shard_bytes: int) -> QuantisedModel:
    """Write the quantised model of a merged one, completely or not at all; an earlier one is replaced. Raises: FsdpTuneError."""
    started, target = time.monotonic(), quantised_directory(merged)
    with writing_to(target), staged_directory(target, replace=target.exists(), last=RECORD_NAME) as stage:
        request = {"recipe": recipe.model_dump(mode="json", by_alias=True), "merged": str(merged.absolute())}
        found = _converted(request | {"output": str(stage.absolute()), "max_shard_bytes": max_shard_bytes})
        if not found["difference"] <= _ALLOWED[recipe.compute_dtype]:  # also NaN
            message = f"the logits of the quantised model differ from those of the trained one by {found['difference']:.1e} of their norm"
            raise failed_error("merge-quantised-differs", message, hint="nothing was published; the merged model is complete")
        for path in sorted(merged.iterdir()):
            if path.suffix != ".safetensors" and path.name not in (MERGE_RECORD, CARD_NAME, "model.safetensors.index.json"):
                copy = shutil.copytree if path.is_dir() else shutil.copy
                if not (stage / path.name).exists():
                    copy(path, stage / path.name)
        if (merged / CARD_NAME).is_file():
            (stage / CARD_NAME).write_text(_card((merged / CARD_NAME).read_text(encoding="utf-8"), recipe, found), encoding="utf-8")
        write_json(stage / RECORD_NAME, {"kind": "quantised", "fsdp_tune": __version__, "merged": merged.name, **found})
    return QuantisedModel(target, found["layers"], found["difference"], found["size_bytes"], time.monotonic() - started)


def _converted(request: dict[str, Any]) -> dict[str, Any]:
    """Return what the child found. Raises: FailedError with its last line."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    child = children.start(CONVERT, {**os.environ, **_ENVIRONMENT}, errors="replace", **pipes)
    try:
        output, errors = child.communicate(json.dumps(request))
    finally:
        children.end(child)
    if child.returncode != 0 or not output.strip():
        raise _failed(children.describe_failure(child.returncode, errors))
    return json.loads(output.splitlines()[-1])


def _failed(why: str) -> FsdpTuneError:
    return failed_error("merge-quantise-failed", f"the merged model could not be quantised: {why}", hint="the merged model is complete")


def _card(merged: str, recipe: Recipe, found: dict[str, Any]) -> str:
    """Return the card of the merged model with what was quantised in place of how it was merged."""
    section = recipe.quantised_training
    assert section is not None
    what = f"{section.train}, in groups of {section.group_size}: {found['layers']} linear layers, as they were trained"
    left = ", ".join(f"`{name}`" for name in found["left"])
    words = f"Quantised by torchao {found['torchao']} and fsdp-tune {__version__} to {what}. In {recipe.compute_dtype}: {left}."
    kept = [words if line.startswith("Merged with fsdp-tune") else line for line in merged.splitlines()]
    return "\n".join(kept) + "\n"
