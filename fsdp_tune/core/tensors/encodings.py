"""Weights that files store quantised: the rule that decodes each of them (`core.tensors.encoded`), found by
names, types and shapes alone, and the settings of a config.json that say how they are to be read. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from fsdp_tune.core.errors import Notice, Where
from fsdp_tune.core.tensors.dtypes import OF_SAFETENSORS, Shape
from fsdp_tune.core.tensors.encoded import FLOATS, MXFP4_BLOCK, Encoded, StoredType, Unread, blocks_of
from fsdp_tune.core.tensors.gptq import AWQ, GPTQ, format_of, of_awq, of_gptq
from fsdp_tune.core.values import as_list, as_mapping

FP8, MXFP8, COMPRESSED, MXFP4, BITSANDBYTES = "fp8", "mxfp8", "compressed-tensors", "mxfp4", "bitsandbytes"
MODELOPT = "modelopt"
METHODS = (FP8, MXFP8, COMPRESSED, MXFP4, MODELOPT, GPTQ, AWQ)
"""Values of `quant_method` whose weights are decoded while they are read."""
MODELOPT_FILE = "hf_quant_config.json"
"""Settings of ModelOpt, under the key `quantization`."""
_CODES = ("F8_E4M3", "F8_E5M2", "I8")
_SCALES = (*FLOATS, "F8_E8M0", "U8")
_FP8_SCALES = ("{}_scale_inv", "{}scale", "{}qscale_weight")
"""Names of the scales of a weight `X.weight`, of which the last two replace the last part (DeepSeek V4,
Mistral Large 4)."""
_UNUSED = (
    *("activation_scale", "qscale_act"),
    *(f"{side}_{part}" for side in ("input", "output") for part in ("scale", "zero_point", "global_scale")),
)
"""Parts next to a weight that quantise its input or output: training computes with these as they are."""
_OF_CACHE = tuple(
    f"{part}_{end}" for part in ("k", "v", "q", "kv") for end in ("scale", "zero_point", "global_scale")
)
_OF_ACTIVATIONS = frozenset({*_UNUSED, *_OF_CACHE, "prob_scale", "prob_output_scale"})
"""Last parts of names of tensors that quantise what layers compute: inputs, outputs, queries and the cache of
keys and values."""
_MARKS = ("_scale_inv", "_scale", "_packed", "_zero_point", "_global_scale", "_g_idx", "_scale_2")
_CODES_OF_OTHERS = ("I8", "U8", "I16", "U16", "I32", "U32")
_PLAIN = (*FLOATS, "C64", "I64", "U64", "BOOL")
"""Types of a model that is not quantised: weights, masks and indices."""
_SIGNS = ("scale", "absmax", "SCB", "codebook", "centroids", "zero")
"""In the last part of a name: a tensor that turns integers next to it into values."""
_NVFP4_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Encodings:
    """`weights`: the decoded weights by name; `unread`: tensors of an encoding that no rule covers.

    `of_activations`: tensors that quantise what layers compute and belong to no quantised weight. A plain
    model does without them: config.json loses the settings that use them, and they were measured before the
    training.
    """

    weights: dict[str, Encoded] = field(default_factory=dict[str, Encoded])
    unread: tuple[Unread, ...] = ()
    of_activations: tuple[str, ...] = ()

    @property
    def parts(self) -> set[str]:
        """Names of the tensors of the files that a plain model does not have."""
        return {*self.of_activations, *self.of_weights}

    @property
    def of_weights(self) -> set[str]:
        return {part for weight in self.weights.values() for part in weight.parts}


SETTINGS = ("quantization_config", "compression_config")
"""Keys of a config.json, or of a configuration nested in it, under which its weights are quantised."""


def quantisation_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a config.json under which its weights are quantised, of any nested
    configuration; {} if it has none."""
    for key in SETTINGS:
        found = config.get(key)
        if isinstance(found, dict) and found:
            settings = cast("dict[str, Any]", found)
            return {
                **settings,
                **as_mapping(settings.get(SETTINGS[0])),
            }  # older compressed-tensors nested them once more
    nested = (quantisation_of(as_mapping(value)) for key, value in config.items() if key.endswith("_config"))
    return next(filter(None, nested), dict[str, Any]())


def without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without the settings under which weights are quantised, also in nested
    configurations."""
    kept = {key: value for key, value in config.items() if key not in SETTINGS}
    return {
        key: without_quantisation(cast("dict[str, Any]", value)) if isinstance(value, dict) else value
        for key, value in kept.items()
    }


def needs_settings(tensors: Mapping[str, str]) -> bool:
    """Return whether files are read only with the settings of a config.json: they have codes, or scales of
    what layers compute.

    `tensors`: {name: type by safetensors' name}.
    """
    return any(dtype not in _PLAIN or is_of_activations(name) for name, dtype in tensors.items())


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


def scales_among(names: Iterable[str]) -> list[str]:
    """Return the names of scales, sorted. Those that transformers does not expect belong to weights that it
    leaves as codes."""
    return sorted(name for name in names if "scale" in name.rpartition(".")[2])


def settings_of_files(
    read: Callable[[str], Mapping[str, Any] | None], tensors: Iterable[str]
) -> dict[str, Any]:
    """Return the settings under which the weights of a model directory are quantised; {} if it has none.

    `read`: returns a JSON file of the directory, None if it has none. `tensors`: names of its tensors.
    ModelOpt writes its settings to a file of their own, and in older versions to no other.
    """
    found = quantisation_of(read("config.json") or {})
    if found or not any(name.endswith(".weight_scale") or is_of_activations(name) for name in tensors):
        return found
    written = as_mapping(as_mapping(read(MODELOPT_FILE)).get("quantization"))
    return {"quant_method": MODELOPT, **written} if written else {}


def method_of(settings: Mapping[str, Any]) -> str | None:
    """Return the `quant_method` of a config's settings, with an option under which codes mean other values;
    None for a plain model."""
    if not settings:
        return None
    is_bitsandbytes = bool(settings.get("load_in_4bit") or settings.get("load_in_8bit"))
    is_compressed = "config_groups" in settings
    method = str(
        settings.get("quant_method")
        or (BITSANDBYTES if is_bitsandbytes else COMPRESSED if is_compressed else "unknown")
    )
    if method.startswith(f"{MODELOPT}_"):
        method = MODELOPT  # `modelopt_fp4`, `modelopt_mixed`: the tensors of each layer decide
    if method in (GPTQ, AWQ) and (form := format_of(method, settings)) is not None:
        return f"{method}, {form}"
    sparsity = as_mapping(settings.get("sparsity_config")).get("format") or "dense"
    if method == COMPRESSED and settings.get("transform_config"):
        return f"{method} with transform_config"  # weights are rotated, and layers rotate their input
    return f"{method}, {sparsity}" if method == COMPRESSED and sparsity != "dense" else method


def find_encodings(tensors: Mapping[str, StoredType], settings: Mapping[str, Any]) -> Encodings:
    """Return the weights of a model's files that are decoded, and the tensors that are encoded in a way that
    no rule reads.

    `settings`: those of `quantisation_of`. Files in 4 bits (bitsandbytes) have a reader of their own, and
    nothing is found in them.
    """
    method = method_of(settings)
    if method == BITSANDBYTES:
        return Encodings()
    rules = {
        FP8: _of_fp8,
        MXFP8: _of_fp8,
        COMPRESSED: _of_compressed,
        MXFP4: _of_mxfp4,
        MODELOPT: _of_modelopt,
        GPTQ: of_gptq,
        AWQ: of_awq,
    }
    found = rules[method](tensors, settings) if method in METHODS else ()
    weights: dict[str, Encoded] = {}
    unread: dict[str, str] = {}
    for each in found:
        if isinstance(each, Unread):
            unread[each.name] = each.why
        else:
            weights[each.name] = each
    of_weights = {part for weight in weights.values() for part in weight.parts}
    of_activations = [
        name
        for name in tensors
        if settings and is_of_activations(name) and name not in of_weights and name not in unread
    ]
    taken = {*of_weights, *of_activations}
    owners = {
        owner
        for name in tensors
        if name not in taken
        for owner, _, part in [name.rpartition(".")]
        if any(map(part.count, _SIGNS))
    }
    for name, stored in tensors.items():
        if (
            name not in taken
            and name not in unread
            and (why := _why_unread(name, stored, owners)) is not None
        ):
            unread[name] = why
    return Encodings(
        weights,
        tuple(Unread(name, why) for name, why in sorted(unread.items())),
        tuple(sorted(of_activations)),
    )


def is_of_activations(name: str) -> bool:
    """Return whether a tensor has a name of those that quantise what layers compute (`k_scale`)."""
    return name.rpartition(".")[2] in _OF_ACTIVATIONS


def _why_unread(name: str, stored: StoredType, owners: set[str]) -> str | None:
    """Return why a tensor that no rule has read cannot be taken as it is: its type, or that it is a part of
    another one's encoding.

    `owners`: modules, or weights, with a tensor that scales the integers of others. This covers names that no
    list has, also of tensors that a merge would write unchanged into a model that is not quantised.
    """
    if stored.dtype.startswith(("F8", "F6_", "F4")) or stored.dtype not in OF_SAFETENSORS:
        return f"is of the type {stored.dtype}, and no rule gives its scales"
    mark = next(
        (
            mark
            for mark in _MARKS
            if name.endswith(f"weight{mark}") or (mark == "_scale_inv" and name.endswith(mark))
        ),
        None,
    )
    if mark is not None:
        return f"({stored.dtype}) belongs to a quantised weight, and no rule reads it"
    if (
        stored.dtype in _CODES_OF_OTHERS
        and stored.shape
        and (name in owners or name.rpartition(".")[0] in owners)
    ):
        return f"({stored.dtype}) holds codes of a quantised weight, and no rule reads it"
    return None


def _of_fp8(tensors: Mapping[str, StoredType], settings: Mapping[str, Any]) -> Iterable[Encoded | Unread]:
    block: Any = settings.get("weight_block_size") or ()
    for name, stored in tensors.items():
        is_fp8 = stored.dtype.startswith("F8") and stored.dtype != "F8_E8M0"
        if not is_fp8 and stored.dtype != "I8":
            continue
        owner = name.removesuffix("weight")
        names = [form.format(name if "_inv" in form else owner) for form in _FP8_SCALES]
        scales = next((each for each in names if each in tensors), None)
        if is_fp8:
            yield _scaled(tensors, name, scales, block, rounds=False)
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
        unused=_unused(tensors, name.removesuffix("weight")),
    )


def _scaled(
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
    unused = _unused(tensors, owner) if owner != name else ()
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


def _unused(tensors: Mapping[str, StoredType], owner: str) -> tuple[str, ...]:
    """Return the tensors next to the weight of a module, `owner` with its dot, that quantise its input, its
    output or the cache of keys."""
    cached = {
        end: owner.removesuffix(f"{end}_proj.") + f"{end}_scale"
        for end in ("k", "v")
        if owner.endswith(f".{end}_proj.")
    }
    names = (*(f"{owner}{part}" for part in (*_UNUSED, "k_scale", "v_scale")), *cached.values())
    return tuple(name for name in names if name in tensors)


_COMPRESSED_FORMATS = (
    *("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized"),
    *("mixed-precision", "dense"),
)


def _of_compressed(
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
            yield _of_nvfp4(tensors, owner, present["_packed"], present["_global_scale"], divides=True)
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
            found = _scaled(
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
    forms = [StoredType("I8", of_scales.shape)]
    if len(of_scales.shape) == 2:
        forms.append(
            StoredType("I32", (-(-of_scales.shape[0] * width // 32), of_scales.shape[1]))
        )  # since compressed-tensors 0.10
    if zeros is not None and tensors[zeros] not in forms:
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
    unused += _unused(tensors, owner)
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


def _of_nvfp4(
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
    block, unused = (1, _NVFP4_BLOCK), _unused(tensors, owner)
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


_OF_MODELOPT = ("weight", "bias", "weight_scale", "weight_scale_2", *_UNUSED, "k_scale", "v_scale")
"""Tensors of a quantised module of ModelOpt. Others change what its layer computes: `pre_quant_scale` (AWQ),
`svdquant_lora_a`."""


_MODELOPT_BLOCK = 128
"""Rows and columns of a block of FP8_PB_WO; ModelOpt pads the weight to whole ones before it computes their
scales."""


def _of_modelopt(
    tensors: Mapping[str, StoredType], settings: Mapping[str, Any]
) -> Iterable[Encoded | Unread]:
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
            yield _of_nvfp4(tensors, owner, codes, tensor_scale, divides=False)
        elif tensors[codes].dtype.startswith("F8"):
            found, shape = tensors[scales].shape, tensors[codes].shape
            blocks = (block,) * len(shape) if len(found) == 2 * len(shape) else ()
            if blocks and found[::2] != tuple(-(-size // block) for size in shape):
                yield Unread(
                    codes,
                    f"is {list(shape)}, and its scales {list(found)} are not those of blocks of {block}",
                )
            else:
                yield _scaled(tensors, codes, scales, blocks, rounds=False)


def _of_mxfp4(tensors: Mapping[str, StoredType], settings: Mapping[str, Any]) -> Iterable[Encoded | Unread]:  # noqa: ARG001  one type
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
