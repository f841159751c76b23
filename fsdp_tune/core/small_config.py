"""Scale a model's `config.json` down: the same architecture class with fewer and narrower layers, for tests
that a real size would slow.

Pure. A rehearsal trains such a model on CPU ranks; the inspection of a model looks at what its layers do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from fsdp_tune.core import families

LAYERS = 2
HEADS = 4
HEAD_SIZE = 16
HIDDEN_SIZE = HEADS * HEAD_SIZE
LATENT_RANK = 32
EXPERTS = 4

NOT_COPIED = {"architectures", "_name_or_path", "dtype"}


def scale_down_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config.json` with `LAYERS` layers of `HIDDEN_SIZE`. Ratios (grouped queries, inner size) and
    all other fields are kept.

    The vocabulary is also kept, so that the recipe's tokenizer fits. Of alternating layer types, one layer
    each is kept.
    """
    small = {name: value for name, value in config.items() if name not in NOT_COPIED}
    hidden, heads = families.HIDDEN_SIZE.of(config), families.HEADS.of(config)
    layers = _kept_layers(config)
    _change(small, families.LAYERS, lambda _: len(layers))
    _change(small, families.HIDDEN_SIZE, lambda _: HIDDEN_SIZE)
    _change(small, families.HEADS, lambda _: HEADS)
    _change(small, families.KV_HEADS, lambda value: max(1, HEADS * value // heads) if heads else value)
    _change(small, families.HEAD_WIDTH, lambda _: HEAD_SIZE)
    _change(
        small,
        families.INNER_SIZE,
        lambda value: max(8, HIDDEN_SIZE * value // hidden // 8 * 8) if hidden else value,
    )
    _change(small, families.EXPERTS, lambda value: min(value, EXPERTS))
    _change(small, families.CHOSEN_EXPERTS, lambda value: min(value, 2))
    _change(small, families.EXPERT_GROUPS, lambda _: 1)
    _change(small, families.DENSE_FIRST, lambda value: min(value, 1))
    if config.get(families.DENSE_LAYERS):
        small[families.DENSE_LAYERS] = [0]  # the dense layers; the other kept one has experts
    _change(small, families.LATENT_RANK, lambda _: LATENT_RANK)
    _change(small, families.LATENT_WIDTH, lambda _: HEAD_SIZE // 2)
    _change(small, families.ROTARY_WIDTH, lambda value: min(value, HEAD_SIZE))
    if families.LATENT_POSITIONS in small and config.get("head_dim") == config[families.LATENT_POSITIONS]:
        small["head_dim"] = small[families.LATENT_POSITIONS]
    for names in families.STATE_SPACE:
        count, size, expand = (config.get(name) for name in names)
        if (
            isinstance(count, int)
            and isinstance(size, int)
            and isinstance(expand, int)
            and count * size == (hidden or 0) * expand
        ):
            small |= {names[0]: HIDDEN_SIZE * expand // HEAD_SIZE, names[1]: HEAD_SIZE}
    if (by_layer := config.get("per_layer_config")) is not None:
        # Each kept layer overrides the same fields as in the full model, with the sizes of the other layers.
        given = {int(index): fields for index, fields in by_layer.items()}
        kept = {str(at): given[index] for at, index in enumerate(layers) if index in given}
        small["per_layer_config"] = {
            at: {name: small.get(name, value) for name, value in fields.items()}
            for at, fields in kept.items()
        }
    for name, value in config.items():
        per_layer = cast("list[Any]", value) if isinstance(value, list) else []
        if per_layer and len(per_layer) == families.LAYERS.of(config):
            small[name] = [per_layer[index] for index in layers]
    return small


def _change(config: dict[str, object], fields: families.Fields, new: Callable[[int], int]) -> None:
    """Replace the number under each of its names. A null field stays null: the model class derives its
    value."""
    for name in fields.names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            config[name] = new(value)


def _kept_layers(config: Mapping[str, object]) -> list[int]:
    """Return the indexes of the first layer of each type, filled up to `LAYERS`, in the model's order."""
    types = families.layer_types(config)
    count = families.LAYERS.of(config) or LAYERS
    firsts = [types.index(kind) for kind in dict.fromkeys(types)]
    others = [index for index in range(count) if index not in firsts]
    return sorted(firsts + others[: max(0, LAYERS - len(firsts))])
