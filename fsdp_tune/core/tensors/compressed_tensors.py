"""The rules of compressed-tensors, whose weights are scaled, packed in words of 32 bits, or in NVFP4 by the
groups of their settings. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from fsdp_tune.core.tensors.activation_scales import unused_parts
from fsdp_tune.core.tensors.dtypes import Shape
from fsdp_tune.core.tensors.quantised_weight import FLOATS, Encoded, StoredType, Unread, blocks_of
from fsdp_tune.core.tensors.scaled_weights import of_nvfp4, scaled
from fsdp_tune.core.values import as_list, as_mapping

_COMPRESSED_FORMATS = (
    *("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized"),
    *("mixed-precision", "dense"),
)


def of_compressed(
    tensors: Mapping[str, StoredType], settings: Mapping[str, Any]
) -> Iterable[Encoded | Unread]:
    groups = [as_mapping(each) for each in as_mapping(settings.get("config_groups")).values()]
    weights = [as_mapping(group.get("weights")) for group in groups]
    formats = {
        str(each) for each in (settings.get("format"), *(group.get("format") for group in groups)) if each
    }
    structures = [as_list(each.get("block_structure")) for each in weights]
    structure = cast("list[int]", next((each for each in structures if each), list[object]()))
    is_known = formats <= {*_COMPRESSED_FORMATS}
    has_zeros = any(name.endswith("weight_zero_point") for name in tensors)
    for scales in [name for name in tensors if name.endswith("weight_scale")]:
        owner = scales.removesuffix("weight_scale")
        parts = {
            part: f"{owner}weight{part}"
            for part in ("_packed", "_zero_point", "_g_idx", "_global_scale", "_shape")
        }
        present = {part: name for part, name in parts.items() if name in tensors}
        if is_known and {"_packed", "_global_scale"} <= present.keys():
            yield of_nvfp4(tensors, owner, present["_packed"], present["_global_scale"], divides=True)
        elif not is_known or "_global_scale" in present:
            yield Unread(
                scales,
                f"belongs to a weight in the format {', '.join(sorted(formats)) or 'unknown'}, which "
                "no rule reads",
            )
        elif "_packed" in present:
            yield _with_groups(
                tensors, _packed(tensors, owner, present, groups, has_zeros=has_zeros), present
            )
        elif f"{owner}weight" in tensors:
            found = scaled(
                tensors, f"{owner}weight", scales, structure, rounds=True, zeros=present.get("_zero_point")
            )
            yield _with_groups(tensors, found, present)


def _packed(
    tensors: Mapping[str, StoredType],
    owner: str,
    present: Mapping[str, str],
    groups: Sequence[Mapping[str, Any]],
    *,
    has_zeros: bool,
) -> Encoded | Unread:
    codes, scales, zeros = present["_packed"], f"{owner}weight_scale", present.get("_zero_point")
    words, of_scales = tensors[codes], tensors[scales]
    is_matrix = words.dtype == "I32" and len(words.shape) == 2 and of_scales.dtype in FLOATS
    settings = (
        _settings_of(groups, owner.removesuffix("."), words.shape[-1], of_scales.shape) if is_matrix else []
    )
    widths = {each["num_bits"] for each in settings}
    width = next(iter(widths)) if len(widths) == 1 else None
    if width not in (2, 4, 8):
        found = (
            f"{' or '.join(sorted(map(str, widths))) or 'an unknown number of'} bits with scales in "
            f"{of_scales.dtype}"
        )
        return Unread(
            codes,
            f"({words.dtype} {list(words.shape)}) holds integers of {found}, and matrices of 2, 4 or "
            "8 are read",
        )
    shape = (words.shape[0], words.shape[1] * 32 // width)
    blocks = blocks_of(shape, of_scales.shape, ())
    if blocks is None:
        return Unread(
            codes, f"holds {list(shape)} values, and its scales {list(of_scales.shape)} fit no groups of them"
        )
    if zeros is not None and not _fits_scales(tensors[zeros], of_scales, width):
        return Unread(
            codes,
            f"has zero points {tensors[zeros].dtype} {list(tensors[zeros].shape)} for scales "
            f"{list(of_scales.shape)}",
        )
    if not has_zeros and all(map(_has_zero_points, settings)):
        return Unread(
            codes, "has no zero points, nor has any other weight, and config.json says `symmetric: false`"
        )
    unused = (present["_shape"],) if "_shape" in present else ()
    unused += unused_parts(tensors, owner)
    name = f"{owner}weight"
    return Encoded(
        name,
        shape,
        "packed",
        codes,
        words.shape,
        "I32",
        scales,
        zeros,
        block=blocks,
        bits=width,
        rounds_to_scales=True,
        unused=unused,
    )


def _fits_scales(zeros: StoredType, scales: StoredType, width: int) -> bool:
    """Return whether zero points are one for each scale, as they are or packed."""
    forms = [StoredType("I8", scales.shape)]
    if len(scales.shape) == 2:
        # since compressed-tensors 0.10
        forms.append(StoredType("I32", (-(-scales.shape[0] * width // 32), scales.shape[1])))
    return zeros in forms


def _has_zero_points(weights: Mapping[str, Any]) -> bool:
    """Return whether weights are stored with zero points, which old versions leave out where all of a weight
    are zero."""
    return weights.get("symmetric") is False and weights.get("strategy") != "tensor"


def _settings_of(
    groups: Sequence[Mapping[str, Any]], module: str, words: int, scales: Shape
) -> list[Mapping[str, Any]]:
    """Return the settings that a packed weight can have: those of all groups of config.json that store
    integers, if these are of one width, and else those whose `group_size` fits its scales; of several such
    widths, those whose `targets` name its module."""
    of_integers = [
        group
        for group in groups
        if group.get("format") in (None, "pack-quantized") and _stores_integers(group)
    ]
    if _number_of_widths(of_integers) > 1:
        of_integers = [
            group for group in of_integers if _fits_groups(as_mapping(group.get("weights")), words, scales)
        ]
    if _number_of_widths(of_integers) > 1:
        of_integers = _named(of_integers, module)
    return [as_mapping(group.get("weights")) for group in of_integers]


def _stores_integers(group: Mapping[str, Any]) -> bool:
    weights = as_mapping(group.get("weights"))
    return bool(weights.get("num_bits")) and (weights.get("type") or "int") == "int"


def _number_of_widths(groups: Sequence[Mapping[str, Any]]) -> int:
    return len({as_mapping(group.get("weights"))["num_bits"] for group in groups})


def _named(groups: Sequence[Mapping[str, Any]], module: str) -> list[Mapping[str, Any]]:
    """Return the groups whose `targets` name a module, or a class if none does (`match_targets` of
    compressed-tensors)."""
    targets = [(group, [str(each) for each in as_list(group.get("targets"))]) for group in groups]
    found = [group for group, names in targets if any(_is_target(name, module) for name in names)]
    return found or [
        group for group, names in targets if not all(name.startswith("re:") or "." in name for name in names)
    ]


def _is_target(name: str, module: str) -> bool:
    try:
        return name == module or (
            name.startswith("re:") and re.match(name.removeprefix("re:"), module) is not None
        )
    except re.error:
        return False


def _fits_groups(weights: Mapping[str, Any], words: int, scales: Shape) -> bool:
    bits: Any = weights["num_bits"]
    size: Any = weights.get("group_size")
    columns = words * 32 // bits
    if not isinstance(size, int) or size <= 0:
        size = columns
    return len(scales) == 2 and scales[-1] * size == columns


def _with_groups(
    tensors: Mapping[str, StoredType], found: Encoded | Unread, present: Mapping[str, str]
) -> Encoded | Unread:
    """Return a weight of compressed-tensors with its `weight_g_idx`, the group of each input
    (`actorder: group`)."""
    index = present.get("_g_idx")
    if isinstance(found, Unread) or index is None:
        return found
    if tensors[index] != StoredType("I32", found.shape[1:]) or len(found.block) != 2 or found.block[0] != 1:
        return Unread(
            index,
            f"({tensors[index].dtype} {list(tensors[index].shape)}) orders no groups of {list(found.shape)}",
        )
    return replace(found, groups=index)
