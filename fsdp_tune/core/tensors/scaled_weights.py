"""The rules of weights with one scale for each tensor, row or block: fp8, mxfp8, mxfp4, NVFP4 and the files
of ModelOpt. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsdp_tune.core.tensors.activation_scales import UNUSED, unused_parts
from fsdp_tune.core.tensors.quantised_weight import (
    FLOATS,
    MXFP4_BLOCK,
    Encoded,
    StoredType,
    Unread,
    blocks_of,
)

_CODES = ("F8_E4M3", "F8_E5M2", "I8")
_SCALES = (*FLOATS, "F8_E8M0", "U8")
_FP8_SCALES = ("{}_scale_inv", "{}scale", "{}qscale_weight")
"""Names of the scales of a weight `X.weight`, of which the last two replace the last part (DeepSeek V4,
Mistral Large 4)."""
_NVFP4_BLOCK = 16


def of_fp8(tensors: Mapping[str, StoredType], settings: Mapping[str, Any]) -> Iterable[Encoded | Unread]:
    block: Any = settings.get("weight_block_size") or ()
    for name, stored in tensors.items():
        is_fp8 = stored.dtype.startswith("F8") and stored.dtype != "F8_E8M0"
        if not is_fp8 and stored.dtype != "I8":
            continue
        owner = name.removesuffix("weight")
        names = [form.format(name if "_inv" in form else owner) for form in _FP8_SCALES]
        scales = next((each for each in names if each in tensors), None)
        if is_fp8:
            yield scaled(tensors, name, scales, block, rounds=False)
        elif scales is not None:
            yield _of_fp4(tensors, name, scales)


def _of_fp4(tensors: Mapping[str, StoredType], name: str, scales: str) -> Encoded | Unread:
    """Return the weight whose values are in halves of bytes: `Fp8Dequantize` of transformers takes I8 for
    these."""
    stored, found = tensors[name], tensors[scales]
    shape = (*stored.shape[:-1], *(2 * size for size in stored.shape[-1:]))
    blocks = blocks_of(shape, found.shape, ()) if shape else None
    if blocks is None or found.dtype not in _SCALES:
        return Unread(
            name,
            f"holds {list(shape)} values of 4 bits, and its scales {found.dtype} {list(found.shape)} "
            "fit no groups of them",
        )
    return Encoded(
        name,
        shape,
        "fp4",
        name,
        stored.shape,
        "I8",
        scales,
        block=blocks,
        bits=4,
        unused=unused_parts(tensors, name.removesuffix("weight")),
    )


def scaled(
    tensors: Mapping[str, StoredType],
    name: str,
    scales: str | None,
    block: Sequence[int],
    *,
    rounds: bool,
    zeros: str | None = None,
) -> Encoded | Unread:
    stored = tensors[name]
    if scales is None:
        return Unread(name, f"is of the type {stored.dtype} without scales")
    if stored.dtype not in _CODES or tensors[scales].dtype not in _SCALES or not stored.shape:
        return Unread(
            name, f"is of the type {stored.dtype} with scales in {tensors[scales].dtype}, which no rule reads"
        )
    blocks = blocks_of(stored.shape, tensors[scales].shape, block)
    if blocks is None:
        return Unread(
            name, f"is {list(stored.shape)}, and its scales {list(tensors[scales].shape)} fit no blocks of it"
        )
    if zeros is not None and (
        tensors[zeros].dtype not in (*_CODES, *FLOATS) or tensors[zeros].shape != tensors[scales].shape
    ):
        return Unread(
            zeros,
            f"({tensors[zeros].dtype} {list(tensors[zeros].shape)}) does not fit scales "
            f"{list(tensors[scales].shape)}",
        )
    owner = name.removesuffix("weight")
    unused = unused_parts(tensors, owner) if owner != name else ()
    unused += tuple(
        f"{name}{end}" for end in ("_activation_scale", "_input_scale") if f"{name}{end}" in tensors
    )
    return Encoded(
        name,
        stored.shape,
        "scaled",
        name,
        stored.shape,
        stored.dtype,
        scales,
        zeros,
        block=blocks,
        rounds_to_scales=rounds,
        unused=unused,
    )


def of_nvfp4(
    tensors: Mapping[str, StoredType], owner: str, codes: str, tensor_scale: str, *, divides: bool
) -> Encoded | Unread:
    """Return the weight of a module, `owner` with its dot, whose bytes hold two values: 16 of a row share a
    scale in fp8, and all of these one in fp32 (`NVFP4QTensor.dequantize` of ModelOpt,
    `NVFP4PackedCompressor.decompress` of compressed-tensors)."""
    scales, stored, found = f"{owner}weight_scale", tensors[codes], tensors[tensor_scale]
    shape = (*stored.shape[:-1], *(2 * size for size in stored.shape[-1:]))
    wanted = StoredType("F8_E4M3", (*shape[:-1], *(size // _NVFP4_BLOCK for size in shape[-1:])))
    is_one = found.dtype == "F32" and math.prod(found.shape) == 1
    if (
        stored.dtype != "U8"
        or len(shape) != 2
        or shape[-1] % _NVFP4_BLOCK
        or tensors[scales] != wanted
        or not is_one
    ):
        of_scales = (
            f"{tensors[scales].dtype} {list(tensors[scales].shape)}, {found.dtype} {list(found.shape)}"
        )
        return Unread(
            codes, f"({stored.dtype} {list(stored.shape)}) with scales {of_scales} is not a weight in NVFP4"
        )
    block, unused = (1, _NVFP4_BLOCK), unused_parts(tensors, owner)
    return Encoded(
        f"{owner}weight",
        shape,
        "nvfp4",
        codes,
        stored.shape,
        "U8",
        scales,
        None,
        tensor_scale,
        divides,
        block,
        4,
        unused=unused,
    )


_OF_MODELOPT = ("weight", "bias", "weight_scale", "weight_scale_2", *UNUSED, "k_scale", "v_scale")
"""Tensors of a quantised module of ModelOpt. Others change what its layer computes: `pre_quant_scale` (AWQ),
`svdquant_lora_a`."""


_MODELOPT_BLOCK = 128
"""Rows and columns of a block of FP8_PB_WO; ModelOpt pads the weight to whole ones before it computes their
scales."""


def of_modelopt(tensors: Mapping[str, StoredType], settings: Mapping[str, Any]) -> Iterable[Encoded | Unread]:
    size: Any = settings.get("group_size")
    block = size if isinstance(size, int) and size > 0 else _MODELOPT_BLOCK
    owners = [name.removesuffix("weight_scale") for name in tensors if name.endswith(".weight_scale")]
    others: dict[str, list[str]] = {owner: [] for owner in owners}
    for name in tensors:
        owner, _, part = name.rpartition(".")
        if part not in _OF_MODELOPT and f"{owner}." in others:
            others[f"{owner}."].append(name)
        elif part == "pre_quant_scale":
            yield Unread(name, "scales the input of a layer, and no rule reads it")
    for owner in owners:
        codes, scales, tensor_scale = f"{owner}weight", f"{owner}weight_scale", f"{owner}weight_scale_2"
        if others[owner]:
            yield Unread(others[owner][0], "changes what a quantised layer computes, and no rule reads it")
        elif codes not in tensors:
            yield Unread(scales, "belongs to a quantised weight that the files do not have")
        elif tensor_scale in tensors:
            yield of_nvfp4(tensors, owner, codes, tensor_scale, divides=False)
        elif tensors[codes].dtype.startswith("F8"):
            found, shape = tensors[scales].shape, tensors[codes].shape
            blocks = (block,) * len(shape) if len(found) == 2 * len(shape) else ()
            if blocks and found[::2] != tuple(-(-size // block) for size in shape):
                yield Unread(
                    codes,
                    f"is {list(shape)}, and its scales {list(found)} are not those of blocks of {block}",
                )
            else:
                yield scaled(tensors, codes, scales, blocks, rounds=False)


def of_mxfp4(tensors: Mapping[str, StoredType], settings: Mapping[str, Any]) -> Iterable[Encoded | Unread]:  # noqa: ARG001  one type
    for codes in [name for name in tensors if name.endswith("_blocks")]:
        name = codes.removesuffix("_blocks")
        scales, stored = f"{name}_scales", tensors[codes]
        found = tensors.get(scales)
        fits = found is not None and found.dtype == stored.dtype == "U8" and found.shape == stored.shape[:-1]
        if not fits or len(stored.shape) != 4 or stored.shape[-1] != MXFP4_BLOCK // 2:
            yield Unread(
                codes,
                f"is {stored.dtype} {list(stored.shape)}, not the blocks [experts, rows, blocks, 16] "
                "of mxfp4 with scales",
            )
            continue
        experts, rows, blocks, _ = stored.shape
        yield Encoded(name, (experts, blocks * MXFP4_BLOCK, rows), "mxfp4", codes, stored.shape, "U8", scales)
