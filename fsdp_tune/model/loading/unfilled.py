"""Parameters of a model that the files of its base do not fill: no tensor has them, or one of another shape
has their name.

transformers draws such parameters at random with a warning, so a truncated base, or one that is quantised
under names that no rule knows (`W_q`, `codes`, `bitmask`), would train as a partly random model. The law does
not depend on names: whatever the files hold, each parameter has the elements that it needs, or the run does
not start. So has each persistent buffer: biases and tables of routers and scales of layers are learned, and
of a missing constant (`act_fn.eps` of Apertus) transformers 5.24 leaves memory that nothing has written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from transformers import PreTrainedModel

from fsdp_tune.core.errors import ExitCode, FsdpTuneError, Problem, Where, usage_error
from fsdp_tune.core.model_parts import TIE_KEY
from fsdp_tune.model.adapters.lora import name_in_base
from fsdp_tune.model.internals.transformers_internals import MAY_BE_MISSING
from fsdp_tune.recipe.schema.recipe import Recipe

_SHOWN = 3
_INCOMPLETE = (
    "download or copy the model again, or name another one: a quantised model in 16 bits, one with the "
    "head of a causal LM"
)

_OTHER = (
    "the files are quantised or belong to another configuration: name another model, or compare "
    "config.json and `model.config_overrides`"
)


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor of the files: the parameters that are made of it, and its shape (of a quantised weight,
    decoded). `shape` is None for tensors whose reader checks them. `is_converted`: transformers joins, splits
    or transposes it."""

    targets: tuple[str, ...]
    shape: tuple[int, ...] | None
    is_converted: bool


def unfilled_problems(
    recipe: Recipe,
    model: PreTrainedModel,
    state: Mapping[str, torch.Tensor],
    sources: Mapping[str, TensorSource],
    files: Mapping[str, Path],
) -> list[Problem]:
    """Return the problems of parameters that `sources` {tensor of the files: source} do not fill. `state`:
    {name: tensor} of the model."""
    plain = {
        target: name
        for name, source in sources.items()
        if not source.is_converted
        for target in source.targets
    }
    joined: dict[tuple[str, ...], int | None] = {}
    for source in sources.values():
        if source.is_converted:
            before = joined.get(source.targets, 0)
            joined[source.targets] = (
                None if source.shape is None or before is None else before + math.prod(source.shape)
            )
    filled = set(plain)
    for targets, elements in joined.items():
        if elements is None or elements >= sum(state[name].numel() for name in targets if name in state):
            filled.update(targets)
    others = {
        name: stored
        for name, stored in plain.items()
        if (shape := sources[stored].shape) is not None and not _fits(recipe, model, state[name], shape)
    }
    folder = next((str(path.parent) for path in files.values()), None)
    missing = unfilled_names(recipe, model, state, filled)
    problems = _missing_problems(model, missing, Where(folder, key="model.name_or_path"))
    if others:
        file = next((str(path) for name in others.values() if (path := files.get(name)) is not None), None)
        found = [(stored, sources[stored].shape or (), name) for name, stored in others.items()]
        problems.append(_shapes_problem(found, state, Where(file, key="model.name_or_path")))
    return problems


def unfilled_names(
    recipe: Recipe, model: PreTrainedModel, state: Mapping[str, torch.Tensor], filled: Collection[str]
) -> list[str]:
    """Return the names of the parameters and persistent buffers of a model, `state`, that have no value.

    Those in `filled`, and those tied to one of them, have the value of the files. The others need none if the
    class lists them as optional, or if they are a head that `model.config_overrides` unties: it starts as a
    copy of the embedding.
    """
    tied = {id(state[name]) for name in filled if name in state}
    head = model.get_output_embeddings()
    if head is not None and recipe.model.config_overrides.get(TIE_KEY) is False:
        tied.add(id(head.weight))
    optional = [re.compile(pattern) for pattern in MAY_BE_MISSING.of(model) or ()]
    left = [name for name, tensor in state.items() if name not in filled and id(tensor) not in tied]
    return [name for name in left if not any(pattern.search(name) for pattern in optional)]


class LoadingInfo(TypedDict):
    """What transformers returns with `output_loading_info`; the fields that are read."""

    missing_keys: set[str]
    """Parameters that no file has."""
    mismatched_keys: Collection[tuple[str, Sequence[int], Sequence[int]]]
    """(parameter, shape in the file, shape in the model)"""


def require_filled(recipe: Recipe, model: PreTrainedModel, loading: LoadingInfo) -> None:
    """Refuse a loaded model of which transformers drew parameters at random, whatever the format of its
    files. Raises: usage error."""
    where = Where(key="model.name_or_path")
    persistent = model.state_dict().keys()
    state = {name: tensor for name, tensor in _named_tensors(model).items() if name in persistent}
    shapes = {name: stored for name, stored, _ in loading["mismatched_keys"]}
    missing = unfilled_names(recipe, model, state, state.keys() - loading["missing_keys"])
    problems = _missing_problems(model, missing, where)
    problems += (
        [_shapes_problem([(name, tuple(shape), name) for name, shape in shapes.items()], state, where)]
        if shapes
        else []
    )
    if problems:
        raise FsdpTuneError(*problems, exit_code=ExitCode.USAGE)


def not_converted() -> FsdpTuneError:
    """Return the error for files of which transformers cannot make a parameter; it has printed the names."""
    message = (
        "transformers cannot join tensors of the weights, such as those of experts, to parameters: some "
        "are missing or have other shapes"
    )
    return usage_error(
        "model-weights-missing", message, where=Where(key="model.name_or_path"), hint=_INCOMPLETE
    )


def _named_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return dict(
        [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    )


def _missing_problems(model: PreTrainedModel, missing: Collection[str], where: Where) -> list[Problem]:
    """Return the problems of parameters and of buffers for which the files have no tensor, with the names of
    the first ones."""
    buffers = {name_in_base(name) for name, _ in model.named_buffers(remove_duplicate=False)}
    problems: list[Problem] = []
    for kind, otherwise, of_kind in (
        ("parameter", "be drawn at random", False),
        ("buffer", "have no value", True),
    ):
        names = [name for name in missing if (name in buffers) == of_kind]
        if names:
            counted = f"1 {kind}" if len(names) == 1 else f"{len(names):,} {kind}s"
            more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
            shown = ", ".join(f"`{name}`" for name in names[:_SHOWN])
            message = f"the weights lack {counted} of the model, which would {otherwise}: {shown}{more}"
            problems.append(Problem("model-weights-missing", message, where, _INCOMPLETE))
    return problems


def _fits(recipe: Recipe, model: PreTrainedModel, parameter: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether a stored shape is that of a parameter; an embedding of the model may have grown by new
    tokens."""
    if tuple(parameter.shape) == shape:
        return True
    modules: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    can_grow = recipe.model.grows_embedding and any(
        parameter.shape[0] == len(module.weight) for module in modules if module is not None
    )
    return can_grow and tuple(parameter.shape[1:]) == shape[1:] and shape[0] <= parameter.shape[0]


def _shapes_problem(
    found: Sequence[tuple[str, tuple[int, ...], str]], state: Mapping[str, torch.Tensor], where: Where
) -> Problem:
    """Return the problem of tensors (name in the files, shape, parameter) with the name of a parameter and
    another shape."""
    shown = [
        f"`{stored}` is {list(shape)}, and the model's "
        f"{'' if stored == name else f'`{name}` '}{list(state[name].shape)}"
        for stored, shape, name in found[:_SHOWN]
    ]
    more = [f"{len(found) - _SHOWN:,} more such tensors"] if len(found) > _SHOWN else []
    return Problem("model-weights-shapes", "; ".join([*shown, *more]), where, _OTHER)
