"""Let the files of a model decide whether its output head is tied to the input embedding, whatever its
config.json states.

transformers compares the two tensors too (`tie_weights`, modeling_utils.py, 5.23) and loads them untied, but
its config still ties them, so that a model without weights, a later `tie_weights` and the size of a plan
would follow the flag. Merging has the same rule (`merge/copy/ties.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from fsdp_tune.core.errors import FsdpTuneError, Notice, Where, usage_error
from fsdp_tune.core.hub import cached_model_file
from fsdp_tune.core.model_parts import TIE_KEY, is_embedding, is_head, tied_candidates
from fsdp_tune.model.loading.pickled_files import read_state
from fsdp_tune.model.loading.stored_tensors import Find, Stored, list_weights, locate, read_elements
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import run_of

BLOCK_ELEMENTS = 1 << 22


def untie(recipe: Recipe, config: PreTrainedConfig) -> Notice | None:
    """Set `tie_word_embeddings: false` in a config whose files decide so, and return the notice about it.

    Only files on this machine are read. Raises: usage error if the recipe itself ties what the files store
    apart.
    """
    stated = recipe.model.config_overrides.get(TIE_KEY)
    places = [place for place in (config, config.get_text_config()) if getattr(place, TIE_KEY, False)]
    if stated is False or not places or (apart := _stored_apart(recipe)) is None:
        return None
    both = f"{recipe.model.name_or_path} stores `{apart.head}` and `{apart.embedding}` with different values"
    if stated is True:
        raise usage_error(
            "tie-contradicts-weights",
            f"model.config_overrides: `{TIE_KEY}: true` would drop the output head: {both}",
            where=Where(key="model.config_overrides"),
            hint=f"leave `{TIE_KEY}` out of model.config_overrides",
        )
    for place in places:
        setattr(place, TIE_KEY, False)
    message = (
        f"{both}, so the head is a weight of its own, although the model's configuration has "
        f"`{TIE_KEY}: true`"
    )
    return Notice(
        "weights-untied", message, hint=f"`--set model.config_overrides.{TIE_KEY}=false` states the same"
    )


def tie_text(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Tie the text of a model of several modalities whose own class ties it, by the outer configuration, and
    whose files have no head.

    The class that is trained reads the inner configuration, which may state nothing. Only files on this
    machine are read.
    """
    text = config.get_text_config()
    is_stated = TIE_KEY in recipe.model.config_overrides
    if text is config or is_stated or not getattr(config, TIE_KEY, False) or getattr(text, TIE_KEY, False):
        return
    files = _weight_files(recipe)
    shapes = (
        {name: tuple(tensor.shape) for name, tensor in _tensors(files).items()} if files is not None else {}
    )
    if any(map(is_embedding, shapes)) and not tied_candidates(shapes):
        setattr(text, TIE_KEY, True)


@dataclass(frozen=True, slots=True)
class StoredPair:
    """An output head and an input embedding of one shape, by their names in the files."""

    head: str
    embedding: str


def _stored_apart(recipe: Recipe) -> StoredPair | None:
    """Return the first head of the model's files that differs from an embedding, or None."""
    files = _weight_files(recipe)
    return _first_apart(files) if files is not None else None


@dataclass(frozen=True, slots=True)
class _Files:
    """Files of a model that may hold heads and embeddings, with the size and time of each, under which an
    answer is kept."""

    states: tuple[tuple[Path, int, int], ...]
    is_pickled: bool
    find: Find = field(compare=False)


def _weight_files(recipe: Recipe) -> _Files | None:
    """Return the model's files; None for a run or a configuration, and for those whose index is unusable,
    which the loader reports."""
    name = recipe.model.name_or_path
    if name is None or recipe.model.from_config is not None or run_of(Path(name)) is not None:
        return None

    def local(file: str) -> Path | None:
        if Path(name).is_dir():
            return path if (path := Path(name) / file).is_file() else None
        return cached_model_file(name, recipe.model.revision, file)

    try:
        listed = list_weights(local)
    except FsdpTuneError:
        return None
    if listed is None:
        return None
    names = listed.files
    if listed.is_pickled and listed.has_index:  # of safetensors the headers alone are read
        names = sorted(
            {file for name, file in listed.weight_map.items() if is_head(name) or is_embedding(name)}
        )
    paths = [path for path in map(local, (listed.first, *names)) if path is not None]
    states = {path: (path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths}
    return _Files(tuple(states.values()), listed.is_pickled, local)


@functools.lru_cache(maxsize=8)
def _first_apart(files: _Files) -> StoredPair | None:
    """Compare heads with embeddings."""
    tensors = _tensors(files)
    pairs = tied_candidates({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    pairs = {
        head: embedding
        for head, embedding in pairs.items()
        if not _are_one(tensors[head], tensors[embedding])
    }
    tensors = _tensors(files, values=True) if pairs and files.is_pickled else tensors
    for head, embedding in pairs.items():
        if not _are_equal(tensors[head], tensors[embedding]):
            return StoredPair(head, embedding)
    return None


def _tensors(files: _Files, *, values: bool = False) -> dict[str, Stored | torch.Tensor]:
    """Return the tensors of the files, which hold heads and embeddings. `values`: of `read_state`."""
    try:
        if not files.is_pickled:
            return {**locate(files.find).stored()}
        tensors: dict[str, Stored | torch.Tensor] = {}
        for path, _, _ in files.states:
            tensors.update(read_state(path, values=values) if path.suffix != ".json" else {})
    except FsdpTuneError:
        return {}  # the loader reports it
    return {name: value for name, value in tensors.items() if is_head(name) or is_embedding(name)}


def _are_one(one: Stored | torch.Tensor, other: Stored | torch.Tensor) -> bool:
    """Return whether two names of a pickled file have the same elements of its memory."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False  # safetensors files have no tensors that share elements
    return (one.data_ptr(), one.dtype, one.stride()) == (other.data_ptr(), other.dtype, other.stride())


def _are_equal(one: Stored | torch.Tensor, other: Stored | torch.Tensor) -> bool:
    """Return whether two tensors of one shape have equal values; of one dtype, equal bytes. Stops at the
    first block that differs."""
    return all(_same(left, right) for left, right in zip(_blocks(one), _blocks(other), strict=True))


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype == right.dtype:
        return torch.equal(left.view(torch.uint8), right.view(torch.uint8))
    return torch.equal(left.double(), right.double())


def _blocks(tensor: Stored | torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements in order, BLOCK_ELEMENTS at a time."""
    total = math.prod(tensor.shape)
    starts = range(0, total, BLOCK_ELEMENTS)
    if isinstance(tensor, torch.Tensor):
        yield from (tensor.reshape(-1)[start : start + BLOCK_ELEMENTS] for start in starts)
        return
    with open(tensor.file, "rb", buffering=0) as file:
        for start in starts:
            count = min(BLOCK_ELEMENTS, total - start)
            yield read_elements(
                file, tensor, tensor.start + start * tensor.dtype.itemsize, count, bytearray(0)
            )
