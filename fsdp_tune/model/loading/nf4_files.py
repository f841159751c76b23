"""Read model files that bitsandbytes quantised to NF4, whose codes are those of `model.adapters.nf4`.

`X.weight` holds the codes [out * in / 2, 1]; beside it are `X.weight.absmax`, the scale of each block in fp32
or, with double quantisation, in 8 bits with tables of their own, and
`X.weight.quant_state.bitsandbytes__nf4`, a JSON text (bitsandbytes 0.50, `QuantState.as_dict`).
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.core.tensors.dtypes import NF4_BLOCK
from fsdp_tune.core.tensors.quantised_formats import (
    BITSANDBYTES,
    METHODS,
    SETTINGS,
    method_of,
    quantisation_of,
)
from fsdp_tune.model.loading.stored_tensors import NestedScales, Stored, read_whole
from fsdp_tune.model.loading.tensor_account import IN_16_BITS
from fsdp_tune.model.shard.local import NF4_PACKED, NF4_SCALES
from fsdp_tune.recipe.schema.recipe import Recipe

_STATE = ".quant_state.bitsandbytes__"


def is_of_bitsandbytes(config: PreTrainedConfig) -> bool:
    return method_of(_settings(config)) == BITSANDBYTES


def _settings(config: PreTrainedConfig) -> dict[str, object]:
    return quantisation_of(config.to_dict())


def without_quantisation(config: PreTrainedConfig) -> None:
    """Remove the settings of quantised weights that are decoded while they are read: the model in memory is a
    plain one."""
    for key in SETTINGS:
        if hasattr(config, key) and not is_of_bitsandbytes(config):
            delattr(config, key)
    for nested in vars(config).values():
        if isinstance(nested, PreTrainedConfig):
            without_quantisation(nested)


def refuse_other_quantisation(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Refuse stored weights that are quantised otherwise than the recipe loads them. Raises: usage error."""
    settings = _settings(config)
    if not settings or (recipe.nf4 is None and method_of(settings) in METHODS):
        return
    method = str(method_of(settings))
    name = recipe.model.name_or_path
    if not settings.get("load_in_4bit") or settings.get("bnb_4bit_quant_type", "fp4") != "nf4":
        kind = (
            "int8"
            if settings.get("load_in_8bit")
            else settings.get("bnb_4bit_quant_type", "fp4")
            if method == "bitsandbytes"
            else method
        )
        raise _refused("model.name_or_path", f"the weights of {name} are quantised ({kind})", IN_16_BITS)
    if recipe.nf4 is None:
        raise _refused(
            "model.name_or_path",
            f"the weights of {name} are in 4 bits (bitsandbytes)",
            "write `lora: {}` and `quantization: {}`",
        )
    if recipe.nf4.scales != "fp32":
        raise _refused(
            "quantization.scales",
            f"the weights of {name} have scales in fp32, which bf16 would round",
            "write `scales: fp32`",
        )
    for key, is_set in (
        ("fsdp.version", recipe.fsdp.version == 1),
        ("fsdp.cpu_ram_efficient_loading", not recipe.fsdp.cpu_ram_efficient_loading),
    ):
        if is_set:
            raise _refused(
                key,
                f"the weights of {name} are in 4 bits, and each rank reads its part of them",
                f"leave `{key}` out",
            )
    if recipe.merge.at_end and recipe.merge.adapter != "adapter":
        message = (
            f"an adapter cannot be merged into the weights of {name}, which are in 4 bits (bitsandbytes)"
        )
        raise _refused("merge.adapter", message, "write `merge: {adapter: adapter}`, or " + IN_16_BITS)


def refuse_unread(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Refuse files in 4 bits that do not have the parameters of the model. Raises: usage error."""
    if is_of_bitsandbytes(config):
        message = (
            f"the files of {recipe.model.name_or_path} (bitsandbytes) hold other layers in 4 bits than "
            "the recipe does"
        )
        raise _refused("model.name_or_path", message, IN_16_BITS)


def _refused(key: str, message: str, hint: str) -> FsdpTuneError:
    return usage_error("model-quantised", message, where=Where(key=key), hint=hint)


def by_layer(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Return the tensors with the codes and scales of each quantised weight under the names of `Nf4Linear`'s
    parameters.

    Raises: usage error for blocks that are not parts of rows, and for a state that cannot be read.
    """
    found = dict(tensors)
    for key in [name for name in tensors if _STATE in name]:
        weight = key.partition(_STATE)[0]
        try:
            codes, scales = _of_layer(tensors, weight, json.loads(bytes(read_whole(tensors[key]).tolist())))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _refused(
                "model.name_or_path",
                f"the quantisation state of `{weight}` is damaged: {error!r}",
                IN_16_BITS,
            ) from error
        layer = weight.removesuffix("weight")
        found |= {f"{layer}{NF4_PACKED}": codes, f"{layer}{NF4_SCALES}": scales}
        found.pop(weight, None)
    return found


def _of_layer(tensors: dict[str, Stored], weight: str, state: dict[str, Any]) -> tuple[Stored, Stored]:
    rows, columns = state["shape"]
    _refuse_if(
        f"the shape {state['shape']}", differs=not (isinstance(rows, int) and isinstance(columns, int))
    )
    if state["quant_type"] != "nf4" or state["blocksize"] != NF4_BLOCK or columns % NF4_BLOCK:
        message = (
            f"`{weight}` is in blocks of {state['blocksize']} ({state['quant_type']}) that are not parts "
            f"of its rows of {columns}"
        )
        raise _refused("model.name_or_path", message, IN_16_BITS)
    codes, absmax, blocks = tensors[weight], tensors[f"{weight}.absmax"], rows * columns // NF4_BLOCK
    # The bytes of the codes may be stored as another dtype (`bnb_4bit_quant_storage`, bfloat16 for FSDP1).
    _refuse_if(
        f"{codes.size_bytes:,} bytes of codes for {rows} x {columns} weights",
        differs=codes.size_bytes != rows * columns // 2,
    )
    is_nested = f"{weight}.nested_absmax" in tensors
    wanted = torch.uint8 if is_nested else torch.float32
    _refuse_if(f"scales in {absmax.dtype} instead of {wanted}", differs=absmax.dtype != wanted)
    _refuse_if(
        f"{absmax.size_bytes:,} bytes of scales for {blocks} blocks",
        differs=absmax.size_bytes != blocks * wanted.itemsize,
    )
    nested = _nested(tensors, weight, state, blocks, columns // NF4_BLOCK) if is_nested else None
    scales = replace(absmax, dtype=torch.uint8, shape=(rows, columns // NF4_BLOCK * 4), nested=nested)
    return replace(codes, dtype=torch.uint8, shape=(rows, columns // 2)), scales


def _nested(
    tensors: dict[str, Stored], weight: str, state: dict[str, Any], blocks: int, columns: int
) -> NestedScales:
    values, of_blocks = (
        read_whole(tensors[f"{weight}.{part}"]).float() for part in ("nested_quant_map", "nested_absmax")
    )
    blocksize = state["nested_blocksize"]
    _refuse_if(
        f"{len(values)} values of scales, in blocks of {blocksize}",
        differs=not isinstance(blocksize, int) or blocksize <= 0 or len(values) != 256,
    )
    groups = -(-blocks // blocksize)
    _refuse_if(
        f"{len(of_blocks)} scales for {groups} groups of {blocksize} blocks", differs=len(of_blocks) != groups
    )
    return NestedScales(columns, values, of_blocks, blocksize, float(state["nested_offset"]))


def _refuse_if(found: str, *, differs: bool) -> None:
    if differs:
        raise ValueError(f"it has {found}")
