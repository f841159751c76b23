"""Write `model.rope_scaling` into the model's configuration before the model is built.

The fields are those of transformers (`modeling_rope_utils.py`), so that a checkpoint's and a merged model's
config.json load with the same frequencies elsewhere. `max_position_embeddings` becomes the number of
positions after scaling, except for `dynamic`, whose formula reads the number before scaling from there.
"""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from fsdp_tune.core.errors import Where, usage_error
from fsdp_tune.core.families import ORIGINAL_POSITIONS, max_positions
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.sections import RopeScaling

_WHERE = Where(key="model.rope_scaling")


_REPLACEABLE = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
"""Types whose frequencies cover the same dimensions as those of each other type."""


_OTHER_FIELDS = ("type", "short_factor", "long_factor")
"""Fields of a scaling that is replaced which `RopeScaling` does not have."""


def scale_positions(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Write the recipe's scaling into `config`. Raises: usage error if it contradicts the configuration or
    `data.max_length`."""
    scaling = recipe.model.rope_scaling
    if scaling is None:
        return
    text = config.get_text_config()
    own = _parameters_by_layer_type(scaling, text)
    positions = max_positions(text)
    original = scaling.original_max_position_embeddings or _original_positions(scaling, own, positions)
    new = {layer_type: _scaled(scaling, parameters, original) for layer_type, parameters in own.items()}
    _check_lengths(recipe, scaling, original, positions, is_own=new == own)
    if new == own:
        return
    text.rope_parameters = new[None] if None in new else text.rope_parameters | new
    text.max_position_embeddings = (
        original if scaling.rope_type == "dynamic" else int(scaling.factor * original)
    )
    if hasattr(text, ORIGINAL_POSITIONS):
        setattr(text, ORIGINAL_POSITIONS, original)


def _parameters_by_layer_type(
    scaling: RopeScaling, config: PreTrainedConfig
) -> dict[str | None, dict[str, object]]:
    """Return the parameters that the recipe scales: by layer type, or under None if all layers share them.
    Raises: usage error."""
    parameters: dict[str, object] = getattr(config, "rope_parameters", None) or {}
    if not parameters or getattr(config, "alibi", False):
        raise usage_error(
            "rope-scaling-without-rope",
            f"{type(config).__name__} has no rotary positions to scale",
            where=_WHERE,
            hint="leave it out",
        )
    by_type = {name: value for name, value in parameters.items() if isinstance(value, dict)}
    if not by_type:
        if scaling.layer_types is not None:
            message = f"{type(config).__name__} has the same rotary frequencies in all layers"
            raise usage_error(
                "rope-scaling-layer-types", message, where=_WHERE, hint="leave `layer_types` out"
            )
        return {None: parameters}
    names = scaling.layer_types or ["full_attention"]
    if missing := next((name for name in names if name not in by_type), None):
        message = f"`{missing}` is not a layer type of {type(config).__name__} with rotary frequencies"
        raise usage_error(
            "rope-scaling-layer-types",
            message,
            where=_WHERE,
            hint=f"`layer_types` takes {', '.join(f'`{name}`' for name in by_type)}",
        )
    return {name: by_type[name] for name in names}


def _original_positions(
    scaling: RopeScaling, own: dict[str | None, dict[str, Any]], positions: int | None
) -> int:
    """Return the positions before scaling that the configuration declares. Raises: usage error if it declares
    none.

    Next to `rope_type: linear`, `max_position_embeddings` is their number in some models (Vicuna), that after
    scaling in others (Gemma 3).
    """
    parameters = next(iter(own.values()))
    found, message = (
        parameters.get("original_max_position_embeddings") or positions,
        "the model's configuration does not declare its",
    )
    is_replaced = scaling.replace_existing and (scaling.rope_type, scaling.factor) != (
        "linear",
        parameters.get("factor"),
    )
    if parameters.get("rope_type") == "linear" and is_replaced:
        found, message = (
            None,
            "the model's configuration, which has `rope_type: linear`, does not declare its original",
        )
    if found is None:
        message += " number of positions"
        raise usage_error(
            "rope-scaling-contradicts", message, where=_WHERE, hint="write `original_max_position_embeddings`"
        )
    return int(found)


def _scaled(scaling: RopeScaling, own: dict[str, object], original: int) -> dict[str, object]:
    """Return `own` with the recipe's scaling; unchanged if it has the same already. Raises: usage error if it
    has another."""
    fields = scaling.parameters(original)
    if all(own.get(name) == value for name, value in fields.items()):
        return own
    kind = own.get("rope_type", "default")
    if kind not in _REPLACEABLE:
        raise usage_error(
            "rope-scaling-exists",
            f"the model's rotary positions (`rope_type: {kind}`) cannot be scaled",
            where=_WHERE,
            hint="leave it out",
        )
    if kind != "default" and not scaling.replace_existing:
        message = (
            f"the model's configuration has another scaling: `rope_type: {kind}`, factor {own.get('factor')}"
        )
        raise usage_error(
            "rope-scaling-exists",
            message,
            where=_WHERE,
            hint="leave `model.rope_scaling` out, or replace it: `--set "
            "model.rope_scaling.replace_existing=true`",
        )
    replaced = {*RopeScaling.model_fields, *_OTHER_FIELDS}
    return {name: value for name, value in own.items() if name not in replaced} | fields


def _check_lengths(
    recipe: Recipe, scaling: RopeScaling, original: int, positions: int | None, *, is_own: bool
) -> None:
    stretched, longest = int(scaling.factor * original), recipe.data.max_length
    product = f"factor {scaling.factor:g} × {original:,} positions is {stretched:,}"
    if positions is not None and original > positions:
        message = (
            f"`original_max_position_embeddings` is {original:,}, and the model has {positions:,} positions"
        )
        raise usage_error(
            "rope-scaling-contradicts", message, where=_WHERE, hint="leave it out: it is then the model's"
        )
    if positions is not None and stretched < positions and not is_own:
        message = f"{product}, fewer than the model's {positions:,}"
        raise usage_error(
            "rope-scaling-contradicts",
            message,
            where=_WHERE,
            hint=f"write `factor: {_factor(positions, original)}` or more",
        )
    if longest > (max(stretched, positions or 0) if is_own else stretched):
        message = f"{product}, and data.max_length is {longest:,}"
        hint = f"`--set model.rope_scaling.factor={_factor(longest, original)}`, or lower data.max_length"
        raise usage_error("rope-scaling-too-short", message, where=_WHERE, hint=hint)


def _factor(length: int, original: int) -> float:
    return float(math.ceil(length / original))


def require_rotary_scaling(recipe: Recipe, model: PreTrainedModel) -> None:
    """Raises: usage error if no rotary embedding of the model was built with the recipe's `rope_type`.

    Some classes declare `rope_parameters` and compute their frequencies themselves. Call it before
    `fix_rotary_frequencies`.
    """
    scaling = recipe.model.rope_scaling
    if scaling is None:
        return
    found = [getattr(module, "rope_type", None) for module in model.modules()]
    kinds = {kind for each in found for kind in (each.values() if isinstance(each, dict) else [each])}
    if scaling.rope_type not in kinds:
        message = f"{type(model).__name__} does not compute its rotary frequencies from `rope_parameters`"
        raise usage_error("rope-scaling-without-rope", message, where=_WHERE, hint="leave it out")
