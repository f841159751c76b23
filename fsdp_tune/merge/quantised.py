"""Write the quantised model next to the merged one, for a run that trained with `quantization.train`.

A child process converts and compares it (`model.loading.quantised_files`): its logits must be those of the
trained model, up to rounding. Its directory has the files of the merged model, but for the weights, and a
merge.json of its own, so that what takes the output of a merge (push, mirrors, `evaluate`, the check for
changed files) takes it too.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdp_tune.core.atomic import occupants, staged_directory, write_json
from fsdp_tune.core.errors import FsdpTuneError, Notice, Where, failed_error, usage_error
from fsdp_tune.core.processes import JsonChild
from fsdp_tune.core.version import __version__
from fsdp_tune.merge.load_check import CHILD_ENVIRONMENT
from fsdp_tune.merge.merge_options import QuantisedAnswer
from fsdp_tune.merge.model_card import CARD_NAME, DTYPE_ROW, MERGED_WITH, QUANTISED_ROW
from fsdp_tune.merge.output_directory import writing_to
from fsdp_tune.merge.publish import without_results
from fsdp_tune.merge.weight_formats import INDEX_NAME
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import MERGE_RECORD, RunDir
from fsdp_tune.run.manifest import digest_file, list_files
from fsdp_tune.run.written_files import merge_record, seal_record

CONVERT = (sys.executable, "-P", "-m", "fsdp_tune.model.loading.quantised_files")
RECORD_KIND = "fsdp-tune quantised model"
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
        return QuantisedAnswer(
            str(self.path), self.layers, self.difference, self.size_bytes, round(self.seconds, 3)
        )


_ENDING = "-quantised"


def quantised_directory(merged: Path) -> Path:
    return merged.with_name(f"{merged.name}{_ENDING}")


def is_quantised_model(folder: Path) -> bool:
    """Return whether a directory is the complete output of `quantise_merged`."""
    return merge_record(folder).get("kind") == RECORD_KIND


def check_quantised(recipe: Recipe | None, dtype: str) -> None:
    """Raises: usage error unless a quantised model can be written of weights that are merged in `dtype`."""
    if recipe is None or recipe.quantised_training is None:
        message = (
            "`--quantise` writes the model that `quantization.train` emulates, and the run has no such key"
        )
        raise usage_error(
            "merge-not-quantised",
            message,
            hint="leave it out, and quantise the merged model by a tool of your choice",
        )
    if dtype not in ("keep", "fp32", recipe.compute_dtype):
        message = (
            f"the run rounded weights of {recipe.compute_dtype} to int4, and merged weights would be "
            f"in {dtype}"
        )
        raise usage_error("merge-not-quantised", message, hint=f"write `--dtype {recipe.compute_dtype}`")


def check_quantised_target(merged: Path, *, overwrite: bool) -> None:
    """Raises: usage error if the directory of the quantised model exists and may not be replaced."""
    target = quantised_directory(merged)
    if occupants(target) and not (overwrite and is_quantised_model(target)):
        ways_out = ("--overwrite",) if is_quantised_model(target) else ("remove it", "--output ANOTHER")
        raise usage_error(
            "merge-output-exists", "the output exists", where=Where(str(target)), ways_out=ways_out
        )


def rounding_notices(recipe: Recipe | None, merged: Path, run: RunDir | None) -> list[Notice]:
    """Return a notice if the weights of `merged` were trained rounded and are not, and one if its quantised
    model is of another merge."""
    if recipe is None or recipe.quantised_training is None:
        return []
    if merged.name.endswith(_ENDING) and is_quantised_model(merged):
        return _outdated(merged, merged.with_name(merged.name.removesuffix(_ENDING)))
    target, source = quantised_directory(merged), shlex.quote(str(run.path)) if run is not None else "RUN"
    message = (
        f"the run computed with rounded weights (`quantization.train: {recipe.quantised_training.train}`), "
        "also for its `eval_loss`"
    )
    message += "; these weights are not rounded, and give another loss"
    outdated = _outdated(target, merged)
    command = (
        f"`fsdp-tune merge-checkpoint {source} --quantise{' --overwrite' if outdated else ''}` writes "
        "the rounded model"
    )
    hint = f"the rounded model is in {target}" if is_quantised_model(target) and not outdated else command
    return [Notice("merge-not-rounded", message, Where(str(merged)), hint), *outdated]


def _outdated(target: Path, merged: Path) -> list[Notice]:
    """Return a notice if the quantised model `target` was not made of the merge that `merged` has now."""
    source = merge_record(target).get("merged_record") if is_quantised_model(target) else None
    if (
        source is None
        or not (merged / MERGE_RECORD).is_file()
        or source == digest_file(merged / MERGE_RECORD).digest
    ):
        return []
    message = f"it was made of an earlier {merged.name}/, whose weights may be others"
    hint = "`fsdp-tune merge-checkpoint RUN --quantise --overwrite` writes both again"
    return [Notice("merge-quantised-outdated", message, Where(str(target)), hint)]


def quantise_merged(merged: Path, recipe: Recipe, max_shard_bytes: int) -> QuantisedModel:
    """Write the quantised model of a merged one, completely or not at all; an earlier one is replaced.
    Raises: FsdpTuneError."""
    started, target = time.monotonic(), quantised_directory(merged)
    if occupants(target) and not is_quantised_model(target):
        raise _failed(
            f"{target} exists and is not an earlier quantised model",
            "remove it, then `fsdp-tune merge-checkpoint RUN --quantise`",
        )
    with writing_to(target), staged_directory(target, replace=target.exists(), last=MERGE_RECORD) as stage:
        request = {"recipe": recipe.model_dump(mode="json", by_alias=True), "merged": str(merged.absolute())}
        found = _converted(request | {"output": str(stage.absolute()), "max_shard_bytes": max_shard_bytes})
        if not found["difference"] <= _ALLOWED[recipe.compute_dtype]:  # also NaN
            message = (
                "the logits of the quantised model differ from those of the trained one by "
                f"{found['difference']:.1e} of their norm"
            )
            raise failed_error(
                "merge-quantised-differs", message, hint="nothing was published; the merged model is complete"
            )
        for path in sorted(merged.iterdir()):
            if path.suffix != ".safetensors" and path.name not in (MERGE_RECORD, CARD_NAME, INDEX_NAME):
                copy = shutil.copytree if path.is_dir() else shutil.copy
                if not (stage / path.name).exists():
                    copy(path, stage / path.name)
        if (merged / CARD_NAME).is_file():
            (stage / CARD_NAME).write_text(
                _card((merged / CARD_NAME).read_text(encoding="utf-8"), recipe, found), encoding="utf-8"
            )
        write_json(stage / MERGE_RECORD, _new_record(stage, merged, found))
    return QuantisedModel(
        target, found["layers"], found["difference"], found["size_bytes"], time.monotonic() - started
    )


def _new_record(stage: Path, merged: Path, found: dict[str, object]) -> dict[str, object]:
    """Return the merge.json: steps and reason of the merge, its digest, what the conversion found, and the
    digest of each file."""
    of_merge, files = merge_record(merged), {*list_files(stage), MERGE_RECORD, CARD_NAME}
    contents = {name: asdict(digest_file(stage / name)) for name in sorted(files - {MERGE_RECORD, CARD_NAME})}
    return seal_record(
        {
            "kind": RECORD_KIND,
            "format_version": 1,
            "fsdp_tune": __version__,
            "source": [str(merged.absolute())],
            "merged_record": digest_file(merged / MERGE_RECORD).digest if of_merge else None,
            **{name: of_merge[name] for name in ("steps", "reason", "recipe_digest") if name in of_merge},
            **found,
            "files": sorted(files),
            "contents": contents,
            "headers": {},
            "tensors": {},
        }
    )


def _converted(request: Mapping[str, object]) -> dict[str, Any]:
    """Return what the child found. Raises: FailedError with its last line."""
    with JsonChild(CONVERT, {**os.environ, **CHILD_ENVIRONMENT}) as child:
        child.send(json.dumps(request), is_last=True)
        found = child.receive()
        if found is None or child.wait() != 0:
            raise _failed(child.failure())
    return found


def _failed(
    why: str,
    hint: str = "the merged model is complete; `fsdp-tune merge-checkpoint RUN --quantise` tries again",
) -> FsdpTuneError:
    return failed_error("merge-quantise-failed", f"the merged model could not be quantised: {why}", hint=hint)


def _card(merged: str, recipe: Recipe, found: dict[str, Any]) -> str:
    """Return the card of the merged model with what was quantised in place of how it was merged, without
    results of other weights.

    A card that was edited may lack the sentence about the merge; the one about the quantisation is then
    appended.
    """
    section = recipe.quantised_training
    assert section is not None
    what = f"{section.train}, in groups of {section.group_size}: {found['layers']} linear layers"
    left = ", ".join(f"`{name}`" for name in found["left"])
    words = f"Quantised by torchao {found['torchao']} and fsdp-tune {__version__} to {what}."
    words += f" In {recipe.compute_dtype}: {left}." if left else ""
    replaced = {
        MERGED_WITH: words,
        f"| {QUANTISED_ROW} |": f"| {QUANTISED_ROW} | {section.train} |",
        f"| {DTYPE_ROW} |": f"| {DTYPE_ROW} | int4, and {recipe.compute_dtype} where it is not quantised |",
    }
    lines = [
        next((new for start, new in replaced.items() if line.startswith(start)), line)
        for line in without_results(merged).splitlines()
    ]
    return "\n".join(lines if words in lines else [*lines, "", words]) + "\n"
