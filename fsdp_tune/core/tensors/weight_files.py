"""Which files of a model directory hold its weights, and which of them holds which tensor.

The order is that of transformers (`_get_resolved_checkpoint_files`, modeling_utils.py, 5.24): the file that
config.json names (`transformers_weights`), `model.safetensors`, the index of its parts, and the same two of
`torch.save`. The first one that is there is read, whatever else the directory holds. Of an index all files
are read with all their tensors, also those that it does not list.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_tune.core.files import is_inside, read_regular
from fsdp_tune.core.tensors.safetensors_header import without_duplicates
from fsdp_tune.core.values import as_mapping, is_mapping

CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
NAMED_KEY = "transformers_weights"
"""Of config.json: the file, or the index, that comes before all others."""
MAX_INDEX_BYTES = 100_000_000
_INDEX_ENDING = ".index.json"


class UnusableIndexError(ValueError):
    """An index, or the name of the weights in config.json, is invalid; the message is the reason. `file`: the
    one that it is in."""

    def __init__(self, file: str, why: str, *, leaves_directory: bool = False) -> None:
        super().__init__(why)
        self.file, self.leaves_directory = file, leaves_directory


@dataclass(frozen=True, slots=True)
class HeldTwice:
    """A tensor that several files hold. `listed`: the one of them that the index names, None if it names none
    of them.

    transformers takes the tensor from the last of the files in the order of their names, whatever the index
    says.
    """

    name: str
    files: tuple[str, ...]
    listed: str | None


@dataclass(frozen=True, slots=True)
class Holders:
    """`files`: the file of each tensor; `twice`: the tensors that several files hold; `absent`: those that an
    index lists and none has."""

    files: dict[str, str]
    twice: tuple[HeldTwice, ...]
    absent: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WeightList:
    """The files with the weights of a model. `first`: the one that is opened first, which is the only one or
    the index of the others."""

    first: str
    weight_map: Mapping[str, str] = field(default_factory=dict[str, str])
    """{tensor: file} of the index."""

    @property
    def is_pickled(self) -> bool:
        return is_pickled(self.first)

    @property
    def has_index(self) -> bool:
        return is_index(self.first)

    @property
    def files(self) -> tuple[str, ...]:
        """Paths in the directory, sorted as transformers reads them."""
        return tuple(sorted(set(self.weight_map.values()))) if self.has_index else (self.first,)

    def holders(self, names: Mapping[str, Collection[str]]) -> Holders:
        """Return the file of each tensor: of several that hold it, the one that the index names. `names`: the
        tensors of each file."""
        found: dict[str, list[str]] = {}
        for file in sorted(names):
            for name in names[file]:
                found.setdefault(name, []).append(file)
        several = {name: tuple(files) for name, files in found.items() if len(files) > 1}
        listed = {
            name: file if (file := self.weight_map.get(name)) in files else None
            for name, files in several.items()
        }
        twice = tuple(HeldTwice(name, files, listed[name]) for name, files in several.items())
        chosen = {name: listed.get(name) or files[-1] for name, files in found.items()}
        return Holders(chosen, twice, tuple(name for name in self.weight_map if name not in found))


def is_index(file: str) -> bool:
    return file.endswith(_INDEX_ENDING)


def is_pickled(file: str) -> bool:
    return not file.removesuffix(_INDEX_ENDING).endswith(".safetensors")


def find_weight_list(
    has: Callable[[str], bool], read: Callable[[str], bytes | None], *, pickled: bool = True
) -> WeightList | None:
    """Return the files of a model's weights; None if it has none. `has`, `read`: of the files of the model;
    None for one that it lacks.

    `pickled`: look for files of `torch.save` too. Raises: UnusableIndexError.
    """
    first = first_file(has, read(CONFIG), pickled=pickled)
    if first is None or not is_index(first):
        return None if first is None else WeightList(first)
    if (index := read(first)) is None:
        raise UnusableIndexError(CONFIG, f"its `{NAMED_KEY}` is `{first}`, which is not there")
    return WeightList(first, read_index(index, first))


def list_directory(folder: Path) -> WeightList | None:
    """Return the files of the weights in a local directory. Raises: UnusableIndexError; usage error for an
    index that is too large."""

    def read(file: str) -> bytes | None:
        return read_regular(path, most_bytes=MAX_INDEX_BYTES) if (path := folder / file).is_file() else None

    return find_weight_list(lambda file: (folder / file).is_file(), read)


def first_file(has: Callable[[str], bool], config: bytes | None, *, pickled: bool = True) -> str | None:
    """Return the file of a model's weights that is opened first, or None. `config`: its config.json. Raises:
    UnusableIndexError."""
    named = _named(config)
    if named is not None:
        return named
    return next(filter(has, (SINGLE, INDEX, PICKLED, PICKLED_INDEX) if pickled else (SINGLE, INDEX)), None)


def _named(config: bytes | None) -> str | None:
    try:
        named = as_mapping(json.loads(config or b"{}")).get(NAMED_KEY)
    except (ValueError, RecursionError):
        return None  # whoever reads the configuration reports it
    if named is None:
        return None
    if (
        not isinstance(named, str)
        or not named.endswith((".safetensors", f".safetensors{_INDEX_ENDING}"))
        or not named.isprintable()
    ):
        raise UnusableIndexError(
            CONFIG,
            f"its `{NAMED_KEY}` is {named!r}, which is neither a safetensors file nor an index of such",
        )
    if not is_inside(named):
        why = f"its `{NAMED_KEY}` is `{named}`, which is not a file in this directory"
        raise UnusableIndexError(CONFIG, why, leaves_directory=True)
    return named


def read_index(raw: bytes, index: str = INDEX) -> dict[str, str]:
    """Return {tensor: file} of an index. Raises: UnusableIndexError, also for a file that is not in the
    directory of the index."""
    try:
        weight_map: object = json.loads(raw, object_pairs_hook=without_duplicates)["weight_map"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UnusableIndexError(index, f"it is not an index ({type(error).__name__}: {error})") from error
    if not is_mapping(weight_map):
        raise UnusableIndexError(
            index, f"it is not an index (its `weight_map` is a {type(weight_map).__name__})"
        )
    found: dict[str, str] = {}
    for name, file in weight_map.items():
        if not f"{name}{file}".isprintable():
            raise UnusableIndexError(index, f"it has a name that cannot be printed: {name!r} in {file!r}")
        if not isinstance(file, str) or not is_inside(file):
            why = f"it puts `{name}` into `{file}`, which is not a file in this directory"
            raise UnusableIndexError(index, why, leaves_directory=True)
        found[name] = file
    if not found:
        raise UnusableIndexError(index, "it lists no tensor")
    return found
