"""The directory that a merge writes: checks that protect existing files, recovery after a killed merge, and
its small files.

These are the config, the tokenizer, the model card, and `merge.json` with the origin of every tensor.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import platform
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import yaml

from fsdp_tune.core.atomic import (
    DISK,
    STAGE_MARK,
    needs_filling,
    occupants,
    stage_lock,
    stages_inside,
    staging_path,
    undo_fill,
)
from fsdp_tune.core.errors import FsdpTuneError, Notice, Where, failed_error, usage_error
from fsdp_tune.core.files import read_regular
from fsdp_tune.core.ownership import announced, is_abandoned
from fsdp_tune.core.tensors.encodings import needs_settings
from fsdp_tune.core.tensors.file_formats import CONFIG_FILE
from fsdp_tune.core.units import format_bytes
from fsdp_tune.core.version import __version__
from fsdp_tune.data.report import DataReport
from fsdp_tune.merge.card_metadata import base_metadata, data_metadata
from fsdp_tune.merge.companions import CONFIG_NAME, Companions, output_config
from fsdp_tune.merge.copy.layout import Layout
from fsdp_tune.merge.copy.write import Written
from fsdp_tune.merge.lora.adapt import Adapter
from fsdp_tune.merge.source import Format, MergeSettings, Selection, Weights
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.base_model import BaseRecord
from fsdp_tune.run.directory import MERGE_RECORD as RECORD_NAME
from fsdp_tune.run.directory import RunDir, enclosing_checkpoint
from fsdp_tune.run.manifest import digest_data, digest_file
from fsdp_tune.run.metrics_file import read_metrics
from fsdp_tune.run.records import Environment, read_object
from fsdp_tune.run.written_files import seal_record

_RECORD_BYTES, _RECORD_BYTES_OF_TENSOR = 256 << 10, 1 << 10
"""Upper bounds of what the files that are made for the output take: config, index, card, and merge.json with
a line for each tensor."""
_MADE_FILES = 8
_CANNOT_WRITE = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
}


def check_output(output: Path, selection: Selection, base: Path | None = None) -> Path:
    """Return the absolute output path.

    Raises: usage error if it contains an input (`base` included) or the run, or is inside an input or a
    checkpoint.
    """
    target = output.parent.resolve() / output.name
    if output.name in ("", ".", ".."):
        target = output.resolve()
    inputs = [path for weights in selection.weights for path in _read_paths(weights)]
    if base is not None:
        inputs.append(base.resolve())
    if selection.run is not None:
        inputs.append(selection.run.model.resolve())
        protected = [selection.run.path.resolve()]
    else:
        protected = []
    where, hint = Where(str(output)), "give another `--output`"
    for folder in (*inputs, *protected):
        if folder.is_relative_to(target) or folder.is_relative_to(target.resolve()):
            raise usage_error(
                "merge-output-is-input",
                f"the output would replace `{folder}`, which is read",
                where=where,
                hint=hint,
            )
    for folder in inputs:
        if target.is_relative_to(folder) or target.resolve().is_relative_to(folder):
            raise usage_error(
                "merge-output-is-input",
                f"the output would lie inside `{folder}`, which is read",
                where=where,
                hint=hint,
            )
    if (checkpoint := enclosing_checkpoint(target)) is not None:
        message = (
            f"the output would be inside the checkpoint `{checkpoint}`, and would be removed together with it"
        )
        raise usage_error("output-in-checkpoint", message, where=where, hint=hint)
    return target


def _read_paths(weights: Weights) -> list[Path]:
    """Return the directories that weights are read from, or the file where they are one file of another
    tool."""
    if weights.format is Format.PICKLE and weights.manifest is None:
        return [weights.root / weights.file]
    return [weights.checkpoint.resolve(), weights.root]


def check_target(target: Path, *, overwrite: bool) -> None:
    """Raises: usage error if the output exists and may not be replaced; FailedError if it cannot be
    written."""
    _check_existing(target, overwrite=overwrite)
    _check_writable(target)


def _check_existing(target: Path, *, overwrite: bool) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise usage_error(
            "merge-output-exists",
            "the output exists and is not a directory",
            where=Where(str(target)),
            hint="give another `--output`",
        )
    if not occupants(target):
        return
    if not overwrite:
        raise usage_error(
            "merge-output-exists",
            "the output exists",
            where=Where(str(target)),
            ways_out=("--output ANOTHER", "--overwrite"),
        )
    if not (target / RECORD_NAME).is_file():
        raise usage_error(
            "merge-output-not-ours",
            "`--overwrite` replaces only what an earlier merge wrote, and this directory has no "
            f"{RECORD_NAME}",
            where=Where(str(target)),
            hint="give another `--output`, or remove the directory yourself",
        )


def _check_writable(target: Path) -> None:
    folder = _nearest(target)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise failed_error(
            "merge-cannot-write",
            "the output cannot be written: the directory is read-only, or belongs to another user",
            where=Where(str(folder)),
            hint="pass an `--output` that you can write to",
        )


def _nearest(target: Path) -> Path:
    """Return the existing directory under which the output is written."""
    folder = target if needs_filling(target) else target.parent
    while not folder.exists():
        folder = folder.parent
    return folder


def check_space(target: Path, layout: Layout, companions: Companions) -> None:
    """Raises: FailedError if the disk has no room for the output, in bytes or in files."""
    folder = _nearest(target)
    disk = os.statvfs(folder)
    free_bytes, free_files = disk.f_bavail * disk.f_frsize, disk.f_favail
    copied = [path.stat().st_size for path in companions.files.values() if path.exists()]
    beside_bytes = sum(copied) + _RECORD_BYTES + _RECORD_BYTES_OF_TENSOR * len(layout.tensors)
    files = len(layout.files) + len(copied) + _MADE_FILES
    message = None
    if free_bytes < layout.size_bytes + beside_bytes:
        parts = (
            f"{format_bytes(layout.size_bytes)}, and {format_bytes(beside_bytes)} for the files next to it"
        )
        message = f"the merged model needs {parts}; {format_bytes(free_bytes)} are free"
    elif disk.f_files > 0 and free_files < files:  # some file systems count none
        message = (
            f"the merged model has {files} files, and the disk has room for {free_files} more files (`df -i`)"
        )
    if message is not None:
        hint = "free space, or merge to another disk: `fsdp-tune merge-checkpoint SRC --output DIR`"
        raise failed_error("merge-disk-full", message, where=Where(str(folder)), hint=hint)


def bring_back(target: Path) -> list[Notice]:
    """Undo a replacement that was killed between its two renames by restoring the old output."""
    asides = [path for path in _siblings(target, f".old{STAGE_MARK}") if is_abandoned(_lock_of(path, target))]
    if not asides or target.exists():
        return []
    DISK.rename(asides[-1], target)
    return [
        Notice(
            "merge-recovered",
            "the old output was restored; a merge was killed while it replaced it",
            Where(str(target)),
        )
    ]


def clear_leftovers(target: Path) -> list[Notice]:
    """Remove the stages of merges that were killed, and old outputs that were replaced.

    Each merge holds a lock file next to its stage (see `stage_owned`). One on another machine counts as
    killed 300 s after its last update.
    """
    notices: list[Notice] = []
    for path in _siblings(target, f".old{STAGE_MARK}"):
        if is_abandoned(_lock_of(path, target)):
            DISK.rmtree(path)
    for stage in stages_inside(target):
        if is_abandoned(stage_lock(stage)):
            undo_fill(target, stage)
            notices.append(
                Notice(
                    "merge-leftover",
                    "the unfinished output of a merge that was killed was removed",
                    Where(str(target)),
                )
            )
    for path in _siblings(target, STAGE_MARK):
        if path.is_dir() and is_abandoned(stage_lock(path)):
            DISK.rmtree(path)
            notices.append(
                Notice(
                    "merge-leftover",
                    "the unfinished output of a merge that was killed was removed",
                    Where(str(path)),
                )
            )
    for folder in (target.parent, target):
        for lock in folder.glob(f".{glob.escape(target.name)}{STAGE_MARK}*.lock"):
            if is_abandoned(lock):
                DISK.unlink(lock)
    return notices


def _siblings(target: Path, mark: str) -> list[Path]:
    """Return the stage directories next to `target` that are named after it, sorted."""
    if not target.parent.is_dir():
        return []
    prefix = f".{target.name}{mark}"
    return sorted(
        path
        for path in target.parent.iterdir()
        if path.name.startswith(prefix) and path.name[len(prefix) :].isdecimal()
    )


def _lock_of(aside: Path, target: Path) -> Path:
    """Return the lock file of the merge that moved an old output aside; both names have the same suffix."""
    suffix = aside.name.rpartition(STAGE_MARK)[2]
    return stage_lock(target.with_name(f".{target.name}{STAGE_MARK}{suffix}"))


@contextmanager
def stage_owned(target: Path) -> Iterator[None]:
    """Show other merges that the stage of this one is in use, until its output is in place."""
    lock = stage_lock(staging_path(target, last=RECORD_NAME))
    DISK.mkdir(lock.parent)
    with announced(lock):
        yield


@contextmanager
def writing_to(target: Path) -> Iterator[None]:
    """Turn errors of the file system into one problem that names the path and a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise usage_error(
                "merge-output-exists",
                "the output appeared while it was being merged",
                where=Where(str(target)),
            ) from error
        if error.errno not in _CANNOT_WRITE:
            raise
        raise failed_error(
            "merge-cannot-write",
            f"the output cannot be written: {error.strerror}; nothing was left behind",
            where=Where(str(target)),
            hint="free space, raise the limit (`ulimit -f`), or pass an `--output` that you can write to",
        ) from error


def put(path: Path, data: bytes) -> None:
    """Write one small file of the stage, which is synced when it is published."""
    DISK.mkdir(path.parent)
    with DISK.open(path) as file:
        DISK.write(file, data)


# ---- The small files


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
    base_tensors: BaseRecord
    adapter: Adapter | None = None
    origin: str | None = None
    """The URL that the checkpoint was downloaded from."""

    @property
    def steps(self) -> list[int]:
        return [weights.step for weights in self.selection.weights if weights.step is not None]


def write_companions(
    stage: Path,
    companions: Companions,
    layout: Layout,
    config_changes: Mapping[str, object],
    adapter: Adapter | None = None,
) -> None:
    """Write the config with the dtype of the weights, and copy the tokenizer's files. An exported `adapter`
    gets PEFT's config."""
    if adapter is not None and adapter.is_exported:
        put(
            stage / CONFIG_FILE,
            (json.dumps(adapter.config_json(), indent=2, ensure_ascii=False) + "\n").encode(),
        )
    if companions.config is not None:
        dtype = layout.main_dtype
        is_quantised = needs_settings(
            {name: placed.dtype.safetensors for name, placed in layout.tensors.items()}
        )
        config = output_config(
            companions.config, dtype if dtype.converts else None, config_changes, is_quantised=is_quantised
        )
        put(stage / CONFIG_NAME, (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())
    for name, path in companions.files.items():
        put(stage / name, read_regular(path))


def write_record(stage: Path, output_name: str, facts: Facts) -> None:
    """Write merge.json and the model card, the last files of the stage."""
    files = {path.relative_to(stage).as_posix() for path in stage.rglob("*") if path.is_file()} | {
        RECORD_NAME,
        CARD_NAME,
    }
    record = seal_record(
        _record(facts) | {"files": sorted(files), **_digests_of_files(stage, files, facts.layout)}
    )
    put(
        stage / RECORD_NAME,
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
    others = sorted(set(files) - headers.keys() - {RECORD_NAME, CARD_NAME})
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
