"""Rotary frequencies that do not depend on the batch.

For `rope_type` dynamic and longrope, transformers computes frequencies from the longest row of each batch
(`dynamic_rope_update`), so a row's loss depends on the rows next to it. Here they are computed once, for
`data.max_length`.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fsdp_tune.core.families import ORIGINAL_POSITIONS, ROW_SCALES


def fix_rotary_frequencies(model: PreTrainedModel, max_length: int) -> None:
    """Compute the frequencies of every rotary embedding for rows of `max_length` tokens, and stop their
    updates."""
    found: dict[str, int] = {}
    for module in model.modules():
        rope_type: object = getattr(module, "rope_type", None)
        if isinstance(rope_type, str) and _depends_on_batch(rope_type):
            found[rope_type] = _fix(module, None, rope_type, max_length)
            module.rope_type = "default"  # type: ignore[assignment]  # `dynamic_rope_update` does not change this one
        elif isinstance(rope_type, dict):
            changing = {layer_type: kind for layer_type, kind in rope_type.items() if _depends_on_batch(kind)}
            found |= {
                kind: _fix(module, layer_type, kind, max_length) for layer_type, kind in changing.items()
            }
            module.rope_type = rope_type | dict.fromkeys(changing, "default")  # type: ignore[assignment]
    model.fixed_rotary = found  # type: ignore[assignment]


def fixed_rotary(model: PreTrainedModel) -> dict[str, int]:
    """Return the rope types whose frequencies were fixed, each with the length up to which transformers uses
    the original ones."""
    found: dict[str, int] = vars(model).get("fixed_rotary", {})
    return found


def _depends_on_batch(rope_type: str) -> bool:
    """Return whether frequencies depend on the batch, as in `dynamic_rope_update`."""
    return "dynamic" in rope_type or rope_type == "longrope"


def _fix(module: Any, layer_type: str | None, rope_type: str, max_length: int) -> int:
    """Fix the frequencies of one type of layers. Return the length up to which the original frequencies
    apply."""
    parameters = (
        module.config.rope_parameters if layer_type is None else module.config.rope_parameters[layer_type]
    )
    original = int(
        parameters[ORIGINAL_POSITIONS] if rope_type == "longrope" else module.config.max_position_embeddings
    )
    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    buffer = getattr(module, name)
    frequencies, _ = ROPE_INIT_FUNCTIONS[rope_type](
        module.config, buffer.device, seq_len=max_length, layer_type=layer_type
    )
    setattr(module, name, frequencies.to(buffer.dtype))
    if ROW_SCALES[True] in parameters:
        scale = parameters[ROW_SCALES[max_length > original]]
        module.config = copy.deepcopy(module.config)
        module.config.rope_parameters |= dict.fromkeys(ROW_SCALES, scale)
    return original
