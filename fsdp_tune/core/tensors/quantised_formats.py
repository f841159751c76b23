"""Weights that files store quantised: the rule that decodes each (`core.tensors.quantised_weight`), found by
names, types and shapes alone, and the settings of a config.json that say how they are to be read. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from fsdp_tune.core.tensors.activation_scales import is_of_activations
from fsdp_tune.core.tensors.compressed_tensors import of_compressed
from fsdp_tune.core.tensors.dtypes import OF_SAFETENSORS
from fsdp_tune.core.tensors.gptq import AWQ, GPTQ, format_of, of_awq, of_gptq
from fsdp_tune.core.tensors.quantised_weight import FLOATS, Encoded, StoredType, Unread
from fsdp_tune.core.tensors.scaled_weights import of_fp8, of_modelopt, of_mxfp4
from fsdp_tune.core.values import as_mapping

FP8, MXFP8, COMPRESSED, MXFP4, BITSANDBYTES = "fp8", "mxfp8", "compressed-tensors", "mxfp4", "bitsandbytes"
MODELOPT = "modelopt"
METHODS = (FP8, MXFP8, COMPRESSED, MXFP4, MODELOPT, GPTQ, AWQ)
"""Values of `quant_method` whose weights are decoded while they are read."""
MODELOPT_FILE = "hf_quant_config.json"
"""Settings of ModelOpt, under the key `quantization`."""
_MARKS = ("_scale_inv", "_scale", "_packed", "_zero_point", "_global_scale", "_g_idx", "_scale_2")
_CODES_OF_OTHERS = ("I8", "U8", "I16", "U16", "I32", "U32")
_PLAIN = (*FLOATS, "C64", "I64", "U64", "BOOL")
"""Types of a model that is not quantised: weights, masks and indices."""
_SIGNS = ("scale", "absmax", "SCB", "codebook", "centroids", "zero")
"""In the last part of a name: a tensor that turns integers next to it into values."""


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
            # older compressed-tensors nested them once more
            return {
                **settings,
                **as_mapping(settings.get(SETTINGS[0])),
            }
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
        FP8: of_fp8,
        MXFP8: of_fp8,
        COMPRESSED: of_compressed,
        MXFP4: of_mxfp4,
        MODELOPT: of_modelopt,
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
