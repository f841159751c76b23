"""The rules of GPTQ and AWQ, whose files store the transpose of a weight in words of 32 bits: `qweight`,
`qzeros`, `scales`, and of GPTQ `g_idx`, the group of each input. Pure.

GPTQ (AutoGPTQ, GPTQModel, transformers): 2, 4 or 8 bits, packed along the inputs. The first format stores
each zero point less one, and `gptq_v2` as it is. AWQ (AutoAWQ's `gemm`): 4 bits, packed along the outputs in
an order of its own. Formats for one kernel (`marlin`, `gemv`) are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from fsdp_tune.core.tensors.dtypes import Shape
from fsdp_tune.core.tensors.quantised_weight import FLOATS, Encoded, StoredType, Unread

Method = Literal["gptq", "awq"]
GPTQ: Final = "gptq"
AWQ: Final = "awq"
_FORMATS: dict[Method, tuple[str, ...]] = {GPTQ: ("gptq", "gptq_v2"), AWQ: ("gemm",)}
_BITS: dict[Method, tuple[int, ...]] = {GPTQ: (2, 4, 8), AWQ: (4,)}
_FORMAT_KEYS = ("checkpoint_format", "version", "format")


def format_of(method: Method, settings: Mapping[str, Any]) -> str | None:
    """Return the format of files of GPTQ or AWQ if no rule reads it."""
    named = next(
        (str(settings[key]).lower() for key in _FORMAT_KEYS if settings.get(key)), _FORMATS[method][0]
    )
    if settings.get("is_marlin_format"):
        named = "marlin"
    if str(settings.get("backend")).lower() == "llm-awq":
        named = "llm-awq"
    return None if named in _FORMATS[method] else named


def of_gptq(tensors: Mapping[str, StoredType], settings: Mapping[str, Any]) -> Iterator[Encoded | Unread]:
    is_first_format = str(settings.get("checkpoint_format") or settings.get("format")).lower() != "gptq_v2"
    for owner in _owners(tensors):
        yield _of_layer(tensors, owner, GPTQ, settings, adds_one=is_first_format)


def of_awq(tensors: Mapping[str, StoredType], settings: Mapping[str, Any]) -> Iterator[Encoded | Unread]:
    owners = dict.fromkeys(_owners(tensors))
    for owner in owners:
        yield _of_layer(tensors, owner, AWQ, settings, adds_one=False)
    for name in tensors:
        owner, _, part = name.rpartition(".")
        if part == "scales" and f"{owner}." not in owners:  # `ScaledActivation` of AutoAWQ
            yield Unread(name, "divides what a layer computes, and no rule reads it")


def _owners(tensors: Mapping[str, StoredType]) -> list[str]:
    return [name.removesuffix("qweight") for name in tensors if name.endswith(".qweight")]


def _of_layer(
    tensors: Mapping[str, StoredType],
    owner: str,
    method: Method,
    settings: Mapping[str, Any],
    *,
    adds_one: bool,
) -> Encoded | Unread:
    """Return the weight of a layer, `owner` with its dot. Bits are those of the shapes: layers may differ
    (`dynamic` of GPTQModel)."""
    codes, zeros, scales, index = (f"{owner}{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
    if zeros not in tensors or scales not in tensors:
        return Unread(codes, f"has no `{scales if zeros in tensors else zeros}` next to it")
    words, of_zeros, of_scales, of_index = tensors[codes], tensors[zeros], tensors[scales], tensors.get(index)
    shapes = words.shape, of_zeros.shape, of_scales.shape
    bits = _bits_of(*shapes) if words.dtype == of_zeros.dtype == "I32" and of_scales.dtype in FLOATS else 0
    if bits not in _BITS[method]:
        return Unread(
            codes,
            f"({words.dtype} {list(words.shape)}) is not a matrix of {_listed(method)} bits with its "
            "zero points and scales",
        )
    per_word, (groups, outputs) = 32 // bits, of_scales.shape
    inputs = words.shape[0] * (per_word if method == GPTQ else 1)
    packed = words.shape[1] * (1 if method == GPTQ else per_word)
    if packed != outputs or (of_index is not None and of_index != StoredType("I32", (inputs,))):
        return Unread(
            codes,
            f"{list(words.shape)} does not fit its scales {list(of_scales.shape)} in {bits} bits, or "
            "its `g_idx`",
        )
    size = _group_size(inputs, groups, settings.get("group_size", settings.get("q_group_size")))
    if of_index is None and size is None:
        return Unread(codes, f"has {groups} groups of {inputs} inputs, which are not of one size")
    return Encoded(
        *(f"{owner}weight", (outputs, inputs), method, codes, words.shape, "I32", scales, zeros),
        groups=index if of_index is not None else None,
        block=(1, size or 1),
        bits=bits,
        adds_one=adds_one,
        rounds_to_scales=True,
    )


def _bits_of(words: Shape, zeros: Shape, scales: Shape) -> int:
    """Return the bits of a value, of which a word of the zero points has those of 32 / bits outputs; 0 if the
    shapes do not fit."""
    if not len(words) == len(zeros) == len(scales) == 2 or zeros[0] != scales[0] or not scales[1]:
        return 0
    bits, rest = divmod(32 * zeros[1], scales[1])
    return bits if rest == 0 else 0


def _group_size(inputs: int, groups: int, configured: Any) -> int | None:
    """Return the number of consecutive inputs that share a scale; the last group may be shorter."""
    if isinstance(configured, int) and configured > 0 and groups == -(-inputs // configured):
        return configured
    return inputs // groups if groups and inputs % groups == 0 else None


def _listed(method: Method) -> str:
    return " or ".join(map(str, _BITS[method]))
