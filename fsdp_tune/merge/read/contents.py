"""Read the tables of contents of the checkpoints to merge, and compare them with the files and with each
other.

In a tree of folders that another tool wrote, such as {model, optimizer}, the weights are found by the names
of what each folder holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from fsdp_tune.core.errors import (
    FailedError,
    FsdpTuneError,
    Notice,
    Problem,
    Where,
    failed_error,
    usage_error,
)
from fsdp_tune.core.files import folders_in
from fsdp_tune.merge.read.dcp import only_optimizer_state, read_dcp
from fsdp_tune.merge.read.hf_shards import read_hf_shards
from fsdp_tune.merge.read.pickled_files import read_pickled
from fsdp_tune.merge.read.reader import (
    NAMES_SHOWN,
    ArchiveExtent,
    SourceFiles,
    SourceTensor,
    is_peft,
    optimizer_state,
)
from fsdp_tune.merge.read.safetensors_files import read_safetensors
from fsdp_tune.merge.source import Selection
from fsdp_tune.merge.weight_formats import Format, Weights, find_weights
from fsdp_tune.run.directory import RunDir, checkpoint_step, refuse_lost_recipe


@dataclass(frozen=True, slots=True)
class CheckpointTensors:
    """The tensors of one checkpoint by name. `is_vouched`: its manifest has digests of all files."""

    tensors: dict[str, SourceTensor]
    is_vouched: bool = False


@dataclass(frozen=True, slots=True)
class Contents:
    """`ordered`: the tensors to write, in the order of the newest checkpoint. `left_out`: {tensor: why it
    cannot be read}."""

    sources: tuple[CheckpointTensors, ...]
    ordered: tuple[SourceTensor, ...]
    left_out: dict[str, str]
    notices: tuple[Notice, ...]


def read_contents(stack: ExitStack, selection: Selection, *, allow_incomplete: bool) -> Contents:
    """Open every checkpoint of the selection; `stack` closes their files."""
    sources: list[CheckpointTensors] = []
    left_out: dict[str, str] = {}
    notices: list[Notice] = []
    for weights in selection.weights:
        files = stack.enter_context(SourceFiles(weights.root, is_vouched=weights.manifest is not None))
        tensors, others = read_tensors(files, weights.format, weights.file)
        if others:
            names = ", ".join(others[:NAMES_SHOWN])
            notices.append(
                Notice(
                    "merge-not-tensors",
                    f"{len(others)} entries are not tensors and are left out: {names}",
                    Where(str(weights.root)),
                )
            )
        missing = missing_parts(files, tensors)
        # An incomplete LoRA adapter is refused: the missing part would be lost without a trace in the merged
        # weights.
        if missing and (not allow_incomplete or is_peft(tensor.name for tensor in tensors)):
            raise as_error(missing)
        left_out |= {name: problem.message for name, problem in missing.items()}
        kept = {tensor.name: tensor for tensor in tensors if tensor.name not in missing}
        sources.append(CheckpointTensors(kept, is_vouched=files.is_vouched))
    if left_out:
        names = ", ".join(sorted(left_out)[:NAMES_SHOWN]) + (", …" if len(left_out) > NAMES_SHOWN else "")
        notices.append(
            Notice(
                "merge-incomplete",
                f"{len(left_out)} tensors are missing from the output, since parts of them are "
                f"missing: {names}",
            )
        )
    must_agree(sources, selection.weights)
    ordered = tuple(tensor for tensor in sources[0].tensors.values() if tensor.name not in left_out)
    if not ordered:
        raise failed_error(
            "merge-nothing-found", "no tensor is complete", where=Where(str(selection.weights[0].root))
        )
    return Contents(tuple(sources), ordered, left_out, tuple(notices))


def read_tensors(
    files: SourceFiles, kind: Format, file: str, *, may_lack: bool = False
) -> tuple[list[SourceTensor], list[str]]:
    """Return (tensors, names of other entries) of one set of weights, without the state of an optimizer.

    `may_lack`: whether an index of safetensors files may list tensors that no file holds; the caller reports
    those that it needs. Raises: FailedError for files that are missing or damaged; usage error if they hold
    several models, or nothing but the state of an optimizer.
    """
    if kind is Format.DCP:
        tensors, others = read_dcp(files)
    elif kind in (Format.PICKLE, Format.PEFT_PICKLE):
        tensors, others = read_pickled(files, file)
    elif kind is Format.HF_SHARDS:
        tensors, others = read_hf_shards(files), []
    else:
        tensors, others = read_safetensors(files, file, may_lack=may_lack), []
    optimizer = optimizer_state([tensor.name for tensor in tensors])
    kept = [tensor for tensor in tensors if tensor.name not in optimizer]
    if tensors and not kept:
        raise only_optimizer_state(files.root)
    left_out = optimizer_state(others)
    return kept, [name for name in others if name not in left_out]


def missing_parts(files: SourceFiles, tensors: Sequence[SourceTensor]) -> dict[str, Problem]:
    """Return {tensor: problem} for files that are missing or too short."""
    missing: dict[str, Problem] = {}
    broken: dict[str, Problem] = {}
    for tensor in tensors:
        for chunk in tensor.chunks:
            place = chunk.place
            if not isinstance(place, ArchiveExtent):
                continue
            problem = broken.get(place.file) or _problem_of(files, place)
            if problem is not None:
                broken[place.file] = problem
                missing[tensor.name] = problem
                break
    return missing


def _problem_of(files: SourceFiles, place: ArchiveExtent) -> Problem | None:
    try:
        size_bytes = files.size_bytes(place.file)
    except FsdpTuneError as error:
        if error.problems[0].code != "merge-shard-missing":
            raise
        return error.problems[0]
    if place.offset + place.length_bytes <= size_bytes:
        return None
    return Problem(
        "merge-shard-truncated",
        f"`{place.file}` is {size_bytes:,} bytes long, and the checkpoint needs its bytes up to "
        f"{place.offset + place.length_bytes:,}",
        Where(str(files.root / place.file)),
        "copy the file again from where it was written, or merge another checkpoint with `--step N`",
    )


def as_error(missing: dict[str, Problem]) -> FailedError:
    """Return an error with one problem for each file."""
    return FailedError(*{problem.where: problem for problem in missing.values()}.values())


def must_agree(sources: Sequence[CheckpointTensors], weights: Sequence[Weights]) -> None:
    """Raises: FailedError unless all checkpoints have the same tensors, as an average needs."""
    first = {name: (tensor.shape, tensor.dtype) for name, tensor in sources[0].tensors.items()}
    for source, place in zip(sources[1:], weights[1:], strict=True):
        other = {name: (tensor.shape, tensor.dtype) for name, tensor in source.tensors.items()}
        if odd := sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name)):
            raise failed_error(
                "merge-average-differs",
                f"the checkpoints cannot be averaged: `{odd[0]}` is not the same tensor in both "
                f"({len(odd)} differ)",
                where=Where(str(place.root)),
                hint="merge one of them: `--step N`",
            )


_DEPTH, _MOST_FOLDERS = 3, 5_000


def weights_below(source: Path) -> Path:
    """Return the only folder with weights below a directory that has none itself; else the directory.

    Raises: usage error if several folders hold weights, or if there are too many folders to search.
    """
    if not source.is_dir() or find_weights(source) is not None or RunDir(source).is_used:
        return source
    found: list[Path] = []
    for count, (folder, is_candidate) in enumerate(_folders(source, _DEPTH)):
        if count == _MOST_FOLDERS:
            raise usage_error(
                "merge-several-weights",
                f"it has more than {_MOST_FOLDERS:,} folders, several of which may hold weights",
                where=Where(str(source)),
                hint="give the folder that holds the weights",
            )
        if is_candidate and _holds_weights(folder):
            found.append(folder)
    if len(found) > 1:
        refuse_lost_recipe(RunDir(source))
        found.sort(key=_step)
        raise usage_error(
            "merge-several-weights",
            f"{len(found)} folders hold weights: "
            f"{', '.join(str(folder.relative_to(source)) for folder in found[:NAMES_SHOWN])}",
            where=Where(str(source)),
            hint=f"give one of them: `{found[-1]}`",
        )
    return found[0] if found else source


def _step(folder: Path) -> tuple[int, str]:
    """Sort by the step in the folder's name or in those above it."""
    steps = [checkpoint_step(each) or _number(each.name) for each in (folder, *folder.parents)]
    return next((step for step in steps if step is not None), 0), str(folder)


def _number(name: str) -> int | None:
    last = name.replace("-", "_").rpartition("_")[2]
    return int(last) if last.isdecimal() else None


def _folders(source: Path, depth: int) -> Iterator[tuple[Path, bool]]:
    """Yield each folder below, and whether a merge could read it; not the folders inside of those that it
    could."""
    for folder in folders_in(source):
        if folder.name.startswith("."):
            continue
        has_weights = False
        with contextlib.suppress(PermissionError, FileNotFoundError):  # closed, or gone, as in /proc
            has_weights = find_weights(folder) is not None
        yield folder, has_weights
        if not has_weights and depth > 1:
            yield from _folders(folder, depth - 1)


def _holds_weights(folder: Path) -> bool:
    """Return whether a folder holds anything but the state of an optimizer. A damaged one does: merging it
    reports the damage."""
    weights = find_weights(folder)
    assert weights is not None
    try:
        with SourceFiles(weights.root) as files:
            return bool(read_tensors(files, weights.format, weights.file)[0])
    except FsdpTuneError as error:
        return error.problems[0].code != "merge-optimizer-state"
