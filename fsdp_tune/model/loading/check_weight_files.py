"""Check that the weight files of a model directory are there and are weights: a stat and eight bytes of each,
before ranks load them."""

from __future__ import annotations

import struct
from pathlib import Path

from fsdp_tune.core.errors import Problem, Where
from fsdp_tune.core.tensors.peft_config import WEIGHTS_FILE
from fsdp_tune.core.tensors.safetensors_header import MAX_HEADER_BYTES
from fsdp_tune.core.tensors.weight_files import CONFIG, NAMED_KEY, UnusableIndexError, list_directory
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import run_of

_POINTER = b"version "
"""The first eight bytes of a git-lfs pointer: `version https://git-lfs.github.com/spec/v1`."""


def check_weight_files(recipe: Recipe) -> list[Problem]:
    """Return the problems of the files that the ranks would load: of a local model directory and of
    `lora.adapter`.

    Files of the hub's cache are complete: they are renamed into place when their download has ended.
    """
    name = recipe.model.name_or_path
    problems: list[Problem] = []
    if (
        name is not None
        and recipe.model.from_config is None
        and Path(name).is_dir()
        and run_of(Path(name)) is None
    ):
        problems += _check_model(Path(name))
    adapter = recipe.lora.adapter if recipe.lora is not None else None
    if adapter is not None and (file := Path(adapter) / WEIGHTS_FILE).is_file():
        problems += _check_file(file)
    return problems


def _check_model(folder: Path) -> list[Problem]:
    try:
        listed = list_directory(folder)
    except UnusableIndexError as error:
        file = folder / error.file
        message = f"the files of the weights cannot be found: {error}"
        return _check_pointer(file) or [
            Problem("model-weights-damaged", message, Where(str(file)), "download or copy the file again")
        ]
    if listed is None:
        return []  # a configuration alone can be planned
    if not listed.has_index and not (folder / listed.first).is_file():
        message = f"its `{NAMED_KEY}` names `{listed.first}`, which is not there"
        return [
            Problem(
                "model-weights-missing", message, Where(str(folder / CONFIG)), "download or copy this file"
            )
        ]
    missing = [name for name in listed.files if not (folder / name).is_file()]
    problems = [
        problem for name in listed.files if name not in missing for problem in _check_file(folder / name)
    ]
    if missing:
        shown = ", ".join(f"`{name}`" for name in missing[:3]) + (", …" if len(missing) > 3 else "")
        message = (
            f"the index names {len(listed.files)} files of weights, and {len(missing)} are not there: {shown}"
        )
        problems.append(
            Problem(
                "model-weights-missing",
                message,
                Where(str(folder / listed.first)),
                "download or copy these files",
            )
        )
    return problems


def _check_file(file: Path) -> list[Problem]:
    if problems := _check_pointer(file):
        return problems
    if file.suffix != ".safetensors":
        return []
    size_bytes, first = file.stat().st_size, _first_bytes(file)
    header_bytes = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
    if len(first) == 8 and 0 < header_bytes <= min(size_bytes - 8, MAX_HEADER_BYTES):
        return []
    message = (
        f"it is not a complete safetensors file: {size_bytes:,} bytes, with a header of {header_bytes:,}"
    )
    return [Problem("model-weights-damaged", message, Where(str(file)), "download or copy the file again")]


def _check_pointer(file: Path) -> list[Problem]:
    """Return the problem of a git-lfs pointer, or of a file that cannot be read."""
    try:
        first = _first_bytes(file)
    except OSError as error:
        message = f"it cannot be read: {error.strerror or error}"
        hint = "check who may read it, and its file system"
        return [Problem("model-weights-unreadable", message, Where(str(file)), hint)]
    if first != _POINTER:
        return []
    message = "it is a git-lfs pointer of the file, which was not downloaded"
    hint = f"`git lfs pull` in {file.parent}, or `hf download` the model"
    return [Problem("model-weights-pointer", message, Where(str(file)), hint)]


def _first_bytes(file: Path) -> bytes:
    with open(file, "rb") as opened:
        return opened.read(8)
