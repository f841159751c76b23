"""What works with `lora:` and `quantization:`.

The limits of the model itself are in `model.adapters.lora`.
"""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_tune.recipe.rules.limits import PRECISION_KEY, computes_in_fp8
from fsdp_tune.recipe.schema.keys import Finding, Rule
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.sections import Lora


def lora_limits(recipe: Recipe) -> Iterator[Finding]:
    if recipe.lora is None:
        return
    if recipe.model.from_config is not None:
        message = (
            "`lora:` trains a small change of a trained model, and `model.from_config` starts from "
            "random weights, which nothing keeps"
        )
        yield Finding(
            "contradiction",
            ("model.from_config", "lora"),
            message,
            "write `model.name_or_path`, or leave `lora:` out",
        )
    if recipe.model.freeze:
        message = "`model.freeze` has no effect with `lora:`, which freezes every parameter of the model"
        yield Finding(
            "contradiction",
            ("model.freeze", "lora"),
            message,
            "leave it out; `lora.modules_to_save` names modules to train in full",
        )
    if recipe.fsdp.version == 1 and recipe.is_sharded:
        message = (
            "`lora:` needs FSDP2: `fsdp.version: 1` joins frozen and trained parameters of a unit in one "
            "flat tensor of one dtype"
        )
        yield Finding("contradiction", ("fsdp.version", "lora"), message, "use `fsdp.version: 2`")
    start = recipe.lora.init_lora_weights
    if isinstance(start, str) and start != "gaussian":
        message = (
            f"`lora.init_lora_weights: {start}` is not supported: initialisations from the weights "
            "(PiSSA, OLoRA, EVA …) change the base"
        )
        yield Finding(
            "wrong-value",
            ("lora.init_lora_weights",),
            message,
            "write true (A uniform, B zero) or gaussian (A normal, B zero)",
        )
    if recipe.lora.use_dora and recipe.lora.init_lora_weights is False:
        message = (
            "`lora.use_dora: true` with `init_lora_weights: false` is not supported: the lengths of the "
            "rows are those of the base"
        )
        yield Finding(
            "contradiction",
            ("lora.init_lora_weights", "lora.use_dora"),
            message,
            "leave `init_lora_weights` out",
        )
    if recipe.lora.target_parameters:
        yield from _of_parameters(recipe, recipe.lora)
    if computes_in_fp8(recipe):
        message = (
            "`precision.mixed_precision: fp8` with `lora:` is not supported: the adapted layers "
            "compute in bf16"
        )
        yield Finding("contradiction", ("precision.mixed_precision", "lora"), message, "write `bf16`")


def _of_parameters(recipe: Recipe, lora: Lora) -> Iterator[Finding]:
    key, why = (
        "lora.target_parameters",
        "an adapter of stacked matrices is added to them before they multiply",
    )
    if lora.lora_dropout:
        yield Finding(
            "contradiction",
            ("lora.lora_dropout", key),
            f"`lora.lora_dropout` with `{key}` is not supported: {why}",
            "write 0",
        )
    if lora.use_dora:
        message = f"`lora.use_dora: true` with `{key}` is not supported"
        yield Finding("contradiction", ("lora.use_dora", key), message, "write `use_dora: false`")
    if recipe.kernels.compile:
        message = (
            f"`kernels.compile: true` with `{key}` is not supported: layers would be recompiled in every step"
        )
        yield Finding("contradiction", ("kernels.compile", key), message, "write `kernels: {compile: false}`")
    if recipe.kernels.liger is True:
        message = (
            f"`kernels.liger: true` with `{key}` is not supported: Liger would replace the forward of "
            "the adapted experts"
        )
        yield Finding("contradiction", ("kernels.liger", key), message, "write `kernels: {liger: auto}`")


_TRAIN = "quantization.train"


def quantization_limits(recipe: Recipe) -> Iterator[Finding]:
    if (
        recipe.quantization is not None
        and recipe.quantization.load is None
        and recipe.quantization.train is None
    ):
        message = "`quantization: {load: null}` without `train` quantises nothing"
        yield Finding(
            "missing-key",
            ("quantization.load", "quantization"),
            message,
            "leave `quantization` out, or write `train: int4`",
        )
    if recipe.nf4 is None:
        return
    if recipe.lora is None:
        message = (
            "`quantization:` holds frozen weights in 4 bits, which cannot be trained: `lora:` is missing"
        )
        keys = ("quantization.load", "quantization", _TRAIN)  # with `train`, `load` has another default
        yield Finding("contradiction", keys, message, "add `lora: {}`, or leave `quantization` out")
    if recipe.merge.dtype == "keep" and recipe.merge.base == "trained" and recipe.merge.adapter != "adapter":
        message = (
            "`merge.dtype: keep` cannot keep the trained weights of `quantization.load`, which are in 4 bits"
        )
        yield Finding(
            "contradiction",
            ("merge.dtype", "quantization", _TRAIN),
            message,
            "leave `merge.dtype` out, or write `merge: {base: original}`",
        )


def quantised_training_limits(recipe: Recipe) -> Iterator[Finding]:
    """Refuse what `quantization.train` would train otherwise than the converted model computes."""
    section = recipe.quantised_training
    if section is None:
        return
    what = f"`{_TRAIN}: {section.train}`"
    if section.load is not None:
        message = (
            f"{what} trains the weights, and `quantization.load: {section.load}` holds frozen ones in 4 bits"
        )
        yield Finding("contradiction", (_TRAIN, "quantization.load"), message, "leave one of them out")
    elif recipe.lora is not None:
        message = (
            f"{what} with `lora:` is not supported: PEFT adds the adapter to the product of rounded "
            "weights, torchao has no layer that "
        )
        message += "rounds their sum, and the merged and converted model would compute with the rounded sum"
        hint = "leave `lora:` out, or train an adapter on a quantised base: `quantization: {load: nf4}`"
        yield Finding("contradiction", (_TRAIN, "lora"), message, hint)
    if section.group_size == 1:
        yield Finding(
            "wrong-value",
            ("quantization.group_size",),
            "`quantization.group_size: 1` is a scale for each weight",
            "write 32",
        )
    if recipe.merge.quantise and recipe.merge.dtype not in ("auto", "keep", "fp32", recipe.compute_dtype):
        message = (
            f"`merge.quantise: true` rounds weights of {recipe.compute_dtype}, and `merge.dtype: "
            f"{recipe.merge.dtype}` has others"
        )
        yield Finding("contradiction", ("merge.dtype", "merge.quantise"), message, "leave `merge.dtype` out")
    if computes_in_fp8(recipe):
        message = f"{what} with `{PRECISION_KEY}: fp8` is not supported: both replace the linear layers"
        yield Finding("contradiction", (PRECISION_KEY, _TRAIN), message, "write `bf16`")
    if recipe.kernels.compile and recipe.compute_dtype != "fp32":
        message = (
            f"{what} with `kernels.compile: true` in {recipe.compute_dtype} is not supported: a compiled "
            "graph computes scales in fp32"
        )
        message += ", so that weights near an edge are rounded to another value than in the converted model"
        yield Finding("contradiction", ("kernels.compile", _TRAIN), message, "leave `kernels.compile` out")
    if recipe.kernels.mlp_slice_tokens is not None:
        message = (
            f"{what} with `kernels.mlp_slice_tokens` is not supported: the weights would be quantised "
            "again for each slice"
        )
        yield Finding(
            "contradiction", ("kernels.mlp_slice_tokens", _TRAIN), message, "leave `mlp_slice_tokens` out"
        )


ADAPTER_RULES: tuple[Rule, ...] = (lora_limits, quantization_limits, quantised_training_limits)
