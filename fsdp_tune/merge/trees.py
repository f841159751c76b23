"""Find the weights in a tree of folders that another tool wrote, such as {model, optimizer}: by the names of what each folder holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.merge.formats.contents import read_tensors
from fsdp_tune.merge.formats.reader import SourceFiles
from fsdp_tune.merge.weights import find_weights
from fsdp_tune.run.directory import RunDir, checkpoint_step

_DEPTH, _MOST_FOLDERS, _SHOWN = 3, 200, 5


def weights_below(source: Path) -> Path:
    """Return the only folder with weights below a directory that has none itself; else the directory.

    Raises: usage error if several folders hold weights.
    """
    if not source.is_dir() or find_weights(source) is not None or RunDir(source).is_used:
        return source
    found = [folder for folder in _folders(source, _DEPTH) if _holds_weights(folder)]
    if len(found) > 1:
        found.sort(key=_step)
        raise usage_error(
            "merge-several-weights",
            f"{len(found)} folders hold weights: {', '.join(str(folder.relative_to(source)) for folder in found[:_SHOWN])}",
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


def _folders(source: Path, depth: int) -> Iterator[Path]:
    """Yield the folders below that a merge could read, not those inside of them."""
    for count, folder in enumerate(sorted(path for path in source.iterdir() if path.is_dir() and not path.name.startswith("."))):
        if count == _MOST_FOLDERS:
            return
        if find_weights(folder) is not None:
            yield folder
        elif depth > 1:
            yield from _folders(folder, depth - 1)


def _holds_weights(folder: Path) -> bool:
    """Return whether a folder holds anything but the state of an optimizer. A damaged one does: merging it reports the damage."""
    weights = find_weights(folder)
    assert weights is not None
    try:
        with SourceFiles(weights.root) as files:
            return bool(read_tensors(files, weights.format, weights.file)[0])
    except FsdpTuneError as error:
        return error.problems[0].code != "merge-optimizer-state"
