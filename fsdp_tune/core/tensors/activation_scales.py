"""Tensors that quantise what layers compute: inputs, outputs and the cache of keys and values. A model
that is not quantised does without them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fsdp_tune.core.errors import Notice, Where
from fsdp_tune.core.tensors.quantised_weight import StoredType

UNUSED = (
    *("activation_scale", "qscale_act"),
    *(f"{side}_{part}" for side in ("input", "output") for part in ("scale", "zero_point", "global_scale")),
)
"""Parts next to a weight that quantise its input or output: training computes with these as they are."""
_OF_CACHE = tuple(
    f"{part}_{end}" for part in ("k", "v", "q", "kv") for end in ("scale", "zero_point", "global_scale")
)
_OF_ACTIVATIONS = frozenset({*UNUSED, *_OF_CACHE, "prob_scale", "prob_output_scale"})
"""Last parts of names of tensors that quantise what layers compute: inputs, outputs, queries and the cache of
keys and values."""


def dropped_notices(dropped: Iterable[str], where: Where) -> list[Notice]:
    """Return the notice about those tensors that quantise what layers of a base compute."""
    if not (dropped := [*filter(is_of_activations, dropped)]):
        return []
    message = (
        f"{len(dropped):,} tensors of the base that quantise a cache or activations, such as "
        f"`{dropped[0]}`, are not written"
    )
    hint = (
        "they belong to the weights before training: measure them again with the tool that serves the "
        "merged model"
    )
    return [Notice("base-calibration-dropped", message, where, hint)]


def is_of_activations(name: str) -> bool:
    """Return whether a tensor has a name of those that quantise what layers compute (`k_scale`)."""
    return name.rpartition(".")[2] in _OF_ACTIVATIONS


def unused_parts(tensors: Mapping[str, StoredType], owner: str) -> tuple[str, ...]:
    """Return the tensors next to the weight of a module, `owner` with its dot, that quantise its input, its
    output or the cache of keys."""
    cached = {
        end: owner.removesuffix(f"{end}_proj.") + f"{end}_scale"
        for end in ("k", "v")
        if owner.endswith(f".{end}_proj.")
    }
    names = (*(f"{owner}{part}" for part in (*UNUSED, "k_scale", "v_scale")), *cached.values())
    return tuple(name for name in names if name in tensors)
