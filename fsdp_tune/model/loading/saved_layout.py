"""Find the names and shapes under which files store a model's parameters, from the conversions of the
installed transformers.

`revert_weight_conversion`, which `save_pretrained` calls, runs on meta tensors. Each result is a view of a
parameter, so that its offset and strides tell which elements it has; nothing is read or copied.
"""

from __future__ import annotations

import copy
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import dot_natural_key, revert_weight_conversion

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.model_parts import is_head
from fsdp_tune.model.adapters.lora import adapters_of
from fsdp_tune.model.loading.exported_config import base_folder
from fsdp_tune.model.loading.stored_tensors import list_weights
from fsdp_tune.model.loading.tensor_account import BaseTensors, names_in_model, parameters_of
from fsdp_tune.model.loading.weight_slices import read_headers
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.base_model import BaseLayout, FileTensor, Piece, Published, common_prefixes
from fsdp_tune.run.directory import run_of

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def base_layout(
    recipe: Recipe, model: PreTrainedModel, base: BaseTensors | None = None, *, text_alone: bool = False
) -> BaseLayout:
    """Return the layout of the files of a recipe's base, as far as it differs from that of the model's
    parameters.

    `base`: the tensors of `local_tensors`. Without such files, or if the language model is all that is left
    of them, the layout is that of `save_pretrained`.
    """
    folder = base_folder(recipe)
    if text_alone:
        return saved_layout(model)
    if folder is not None and (run := run_of(Path(str(recipe.model.name_or_path)))) is not None:
        return BaseLayout.read(run.base_layout_json) or saved_layout(model)
    if base is not None:
        return saved_layout(model, base.plain_shapes())
    return saved_layout(model, _stored_shapes(folder) if folder is not None else {})


def published_names(config: PreTrainedConfig, model: PreTrainedModel, layout: BaseLayout) -> Published | None:
    """Return the names of the model's modules in the class that the base's config.json names, if it is
    another one: PEFT and vLLM load an adapter into that. `config`: that of the base."""
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if type(config) is type(model.config) or not layout.renamed or kind is None:
        return None
    with torch.device("meta"):
        full = kind(copy.deepcopy(config))
    state = parameters_of(full)
    names = names_in_model(full, layout.renamed.values(), state, legacy=False)
    theirs = {
        ours: names[stored].name for ours, stored in layout.renamed.items() if names[stored].name in state
    }
    prefixes = common_prefixes({ours: name for ours, name in theirs.items() if ours != name})
    if prefixes is None:
        return None
    ends = {name.removeprefix(prefixes[0]) for name in adapters_of(model)}
    others = [name.split(".") for name, _ in full.named_modules() if not name.startswith(prefixes[1])]
    return Published(
        *prefixes, any(".".join(parts[at:]) in ends for parts in others for at in range(1, len(parts)))
    )


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...] | None]:
    """Return {name: shape} of the tensors in a model directory; None for the shapes of files that are not
    there, or are pickled."""

    def find(name: str) -> Path | None:
        return path if (path := folder / name).is_file() else None

    try:
        listed = list_weights(find)
    except FsdpTuneError:
        return {}  # the loader reports the index
    base = read_headers(find)
    return (
        dict.fromkeys(listed.weight_map.keys() - base.types.keys() if listed is not None else ())
        | base.plain_shapes()
    )


def saved_layout(
    model: PreTrainedModel, stored: Mapping[str, tuple[int, ...] | None] | None = None
) -> BaseLayout:
    """Return the layout of a model's files where it differs from that of its parameters.

    `stored`: {name: shape, None if unknown} of the tensors in the files of the base, {} if they are unknown.
    A parameter that these hold as the model does keeps its shape, and the name that it has there; so does
    every parameter if transformers converts in a way that is not a view.
    """
    stored = stored or {}
    state = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in parameters_of(model).items()
    }
    origins = _origins(model, stored, state)
    tensors = _file_tensors(model, state)
    saved = {tensor.pieces[0].parameter: tensor.name for tensor in tensors or () if _is_whole(tensor, state)}
    renames_head = any(
        is_head(parameter) and found[0].name != parameter for parameter, found in origins.items()
    )
    plain = {
        parameter: _stored_name(
            model, found[0].name, parameter, saved.get(parameter, parameter), renames_head=renames_head
        )
        for parameter, found in origins.items()
        if len(found) == 1 and found[0].is_plain
    }
    if tensors is None or not _is_reversible(model, tensors, state):
        return BaseLayout({name: new for name, new in plain.items() if name != new})
    renamed: dict[str, str] = {}
    others: list[FileTensor] = []
    for group in _groups(tensors):
        parameters = {piece.parameter for tensor in group for piece in tensor.pieces}
        if parameters <= plain.keys():
            renamed |= {parameter: plain[parameter] for parameter in parameters}
            continue
        names = {each.name for parameter in parameters for each in origins.get(parameter, ())}
        named = _named_as_stored(group, sorted(names), stored)
        renamed |= {tensor.pieces[0].parameter: tensor.name for tensor in named if _is_whole(tensor, state)}
        others += [tensor for tensor in named if not _is_whole(tensor, state)]
    return BaseLayout({name: new for name, new in renamed.items() if name != new}, tuple(_numbered(others)))


@dataclass(frozen=True, slots=True)
class _Origin:
    """A tensor of the files that a parameter is made of. `is_plain`: it is the parameter as it is."""

    name: str
    is_plain: bool


def _origins(
    model: PreTrainedModel, stored: Mapping[str, tuple[int, ...] | None], state: Mapping[str, torch.Tensor]
) -> dict[str, list[_Origin]]:
    """Return the tensors of the files by parameter."""
    found: dict[str, list[_Origin]] = defaultdict(list)
    for name, in_model in names_in_model(model, stored, state, legacy=False).items():
        parameter = in_model.name
        if parameter in state:
            is_plain = not in_model.is_converted and stored[name] in (None, tuple(state[parameter].shape))
            found[parameter].append(_Origin(name, is_plain))
    return found


def _stored_name(model: PreTrainedModel, name: str, parameter: str, saved: str, *, renames_head: bool) -> str:
    """Return the name under which a merge stores a parameter that the base has as `name`, and
    `save_pretrained` would have as `saved`.

    It is that of the base. But files of GPT-2 lack the prefix of the bare model, which transformers adds
    where it is missing: version 4 would add it to the name of an untied head too, where the base has no other
    name for the head (DeepSeek V4: `head.weight`).
    `renames_head`: whether the base has such a name.
    """
    head, prefix = model.get_output_embeddings(), f"{model.base_model_prefix}."
    is_tied = head is None or getattr(head, "weight", None) is getattr(
        model.get_input_embeddings(), "weight", None
    )
    if is_tied or renames_head:
        return name
    differs_by_prefix = name.removeprefix(prefix) == parameter or parameter.removeprefix(prefix) == name
    return parameter if saved == parameter and differs_by_prefix else name


def _named_as_stored(
    group: Sequence[FileTensor], names: Sequence[str], stored: Mapping[str, tuple[int, ...] | None]
) -> list[FileTensor]:
    """Return the tensors of a group by the names that files have for them, if these are as many, of the same
    shapes in the same order."""
    ordered = sorted(group, key=lambda tensor: dot_natural_key(tensor.name))
    pairs = list(zip(ordered, sorted(names, key=dot_natural_key), strict=False))
    if len(names) != len(ordered) or any(
        stored.get(name) not in (None, tensor.shape) for tensor, name in pairs
    ):
        return list(group)
    return [replace(tensor, name=name) for tensor, name in pairs]


class _Views(TorchFunctionMode):
    """Leaves views as they are where a conversion asks for contiguous memory, and records what is
    concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.joined: dict[int, tuple[torch.Tensor, int, Sequence[torch.Tensor]]] = {}
        """{storage: (tensor, dimension, its parts)}"""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.__name__ == "contiguous":
            return args[0]
        result = func(*args, **kwargs)
        if func.__name__ in ("cat", "concat"):
            dimension = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            self.joined[_storage(result)] = (result, dimension % result.ndim, args[0])
        return result


def _storage(tensor: torch.Tensor) -> int:
    # the address of the data is 0 on the meta device; the object lives as long as the storage
    return id(tensor.untyped_storage())


def _file_tensors(model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> list[FileTensor] | None:
    """Return the tensors that `save_pretrained` writes; None if they are not made of boxes of the parameters,
    each element once."""
    owners = {_storage(tensor): name for name, tensor in state.items()}
    with _Views() as views:
        try:
            saved = revert_weight_conversion(model, dict(state))
        except (ValueError, RuntimeError, AttributeError, KeyError, TypeError):
            return None  # a conversion of a model that is not complete here
    found: list[FileTensor] = []
    for name, tensor in saved.items():
        pieces = _pieces(tensor, state, owners, views)
        if pieces is None:
            return None
        found.append(FileTensor(name, tuple(tensor.shape), tuple(pieces)))
    elements: dict[str, int] = defaultdict(int)
    for tensor in found:
        for piece in tensor.pieces:
            elements[piece.parameter] += math.prod(piece.sizes)
    return found if all(elements[name] == tensor.numel() for name, tensor in state.items()) else None


def _pieces(
    tensor: torch.Tensor, state: Mapping[str, torch.Tensor], owners: Mapping[int, str], views: _Views
) -> list[Piece] | None:
    owner = owners.get(_storage(tensor))
    if owner is not None:
        piece = _box(owner, tensor, state[owner])
        return None if piece is None else [piece]
    whole, dimension, parts = views.joined.get(_storage(tensor), (None, 0, ()))
    if whole is None or tensor.shape != whole.shape or tensor.stride() != whole.stride():
        return None
    found: list[Piece] = []
    at = 0
    for part in parts:
        inner = _pieces(part, state, owners, views)
        if inner is None:
            return None
        found += [
            replace(
                piece,
                position=(
                    *piece.position[:dimension],
                    piece.position[dimension] + at,
                    *piece.position[dimension + 1 :],
                ),
            )
            for piece in inner
        ]
        at += part.shape[dimension]
    return found


def _box(name: str, view: torch.Tensor, parameter: torch.Tensor) -> Piece | None:
    """Return the box of a parameter that a view shows; None if it is not one, as of a strided view."""
    steps = parameter.stride()
    rest, start = view.storage_offset(), list[int]()
    for size, step in zip(parameter.shape, steps, strict=True):
        start.append(min(rest // step, size - 1))
        rest -= start[-1] * step
    axes: list[int] = []
    for size, step in zip(reversed(view.shape), reversed(view.stride()), strict=True):
        free = [axis for axis in reversed(range(parameter.ndim)) if axis not in axes]
        fitting = [
            axis
            for axis in free
            if (steps[axis] == step or size == 1) and start[axis] + size <= parameter.shape[axis]
        ]
        if not fitting:
            return None
        axes.append(fitting[0])
    sizes = tuple(view.shape)
    return Piece(name, tuple(start), tuple(reversed(axes)), sizes, (0,) * len(sizes)) if rest == 0 else None


def _is_whole(tensor: FileTensor, state: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a tensor is one parameter as it is."""
    first = tensor.pieces[0]
    return (
        len(tensor.pieces) == 1
        and first.sizes == tuple(state[first.parameter].shape)
        and first.axes == tuple(range(len(first.axes)))
    )


def _is_reversible(
    model: PreTrainedModel, tensors: Sequence[FileTensor], state: dict[str, torch.Tensor]
) -> bool:
    """Return whether transformers finds the parameters under the names of the tensors, and no name twice.

    Of names that differ in numbers alone (layers, experts) one is looked up.
    """
    kinds = {
        (_NUMBER.sub("", each.name), _NUMBER.sub("", each.pieces[0].parameter)): each
        for each in reversed(tensors)
    }
    found = names_in_model(model, [each.name for each in kinds.values()], state)
    if any(
        found[each.name].name not in {piece.parameter for piece in each.pieces} for each in kinds.values()
    ):
        return False
    return len({tensor.name for tensor in tensors}) == len(tensors)


def _groups(tensors: Sequence[FileTensor]) -> Iterator[list[FileTensor]]:
    """Yield the tensors that have parameters in common, which can only be stored in the one way or in the
    other."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while (above := parent.setdefault(name, name)) != name:
            name = above
        return name

    for tensor in tensors:
        for piece in tensor.pieces[1:]:
            parent[root(piece.parameter)] = root(tensor.pieces[0].parameter)
    groups: dict[str, list[FileTensor]] = defaultdict(list)
    for tensor in tensors:
        groups[root(tensor.pieces[0].parameter)].append(tensor)
    yield from groups.values()


def _numbered(tensors: Sequence[FileTensor]) -> Iterator[FileTensor]:
    """Yield the tensors, those of all experts of a parameter as one with a `count`."""
    series: dict[tuple[str, tuple[int, ...], tuple[Piece, ...]], list[FileTensor]] = defaultdict(list)
    for tensor in tensors:
        number = _last_number(tensor.name)
        template = (
            tensor.name
            if number is None
            else tensor.name[: number.start()] + "{}" + tensor.name[number.end() :]
        )
        same = tuple(replace(piece, start=piece.start[1:]) for piece in tensor.pieces)
        series[(template, tensor.shape, same)].append(tensor)
    for (template, shape, _), members in series.items():
        if len(members) > 1 and all(_is_numbered(each, index) for index, each in enumerate(members)):
            yield FileTensor(template, shape, members[0].pieces, len(members))
        else:
            yield from members


def _last_number(name: str) -> re.Match[str] | None:
    return max(_NUMBER.finditer(name), key=lambda match: match.start(), default=None)


def _is_numbered(tensor: FileTensor, index: int) -> bool:
    number = _last_number(tensor.name)
    return (
        number is not None
        and int(number[0]) == index
        and all(piece.start[0] == index for piece in tensor.pieces)
    )
