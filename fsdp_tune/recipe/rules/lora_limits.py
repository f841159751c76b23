"""Where `lora:` and `quantization:` work. Part of `rules.RULES`; the limits of the model itself are in `model.adapters.lora`."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_tune.recipe.findings import Finding, Rule
from fsdp_tune.recipe.rules.precision import computes_in_fp8
from fsdp_tune.recipe.schema import Lora, Recipe


def lora_limits(recipe: Recipe) -> Iterator[Finding]:
    if recipe.lora is None:
        return
    if recipe.model.from_config is not None:
        message = (
            "`lora:` trains a small change of a trained model, and `model.from_config` starts from random weights, which nothing keeps"
        )
        yield Finding("contradiction", ("model.from_config", "lora"), message, "write `model.name_or_path`, or leave `lora:` out")
    if recipe.model.freeze:
        message = "`model.freeze` has no effect with `lora:`, which freezes every parameter of the model"
        yield Finding(
            "contradiction", ("model.freeze", "lora"), message, "leave it out; `lora.modules_to_save` names modules to train in full"
        )
    if recipe.fsdp.version == 1 and recipe.is_sharded:
        message = "`lora:` needs FSDP2: `fsdp.version: 1` joins frozen and trained parameters of a unit in one flat tensor of one dtype"
        yield Finding("contradiction", ("fsdp.version", "lora"), message, "use `fsdp.version: 2`")
    start = recipe.lora.init_lora_weights
    if isinstance(start, str) and start != "gaussian":
        message = (
            f"`lora.init_lora_weights: {start}` is not supported: initialisations from the weights (PiSSA, OLoRA, EVA …) change the base"
        )
        yield Finding("wrong-value", ("lora.init_lora_weights",), message, "write true (A uniform, B zero) or gaussian (A normal, B zero)")
    if recipe.lora.use_dora and recipe.lora.init_lora_weights is False:
        message = "`lora.use_dora: true` with `init_lora_weights: false` is not supported: the lengths of the rows are those of the base"
        yield Finding("contradiction", ("lora.init_lora_weights", "lora.use_dora"), message, "leave `init_lora_weights` out")
    if recipe.lora.target_parameters:
        yield from _of_parameters(recipe, recipe.lora)
    if computes_in_fp8(recipe):
        message = "`precision.mixed_precision: fp8` with `lora:` is not supported: the adapted layers compute in bf16"
        yield Finding("contradiction", ("precision.mixed_precision", "lora"), message, "write `bf16`")


def _of_parameters(recipe: Recipe, lora: Lora) -> Iterator[Finding]:
    key, why = "lora.target_parameters", "an adapter of stacked matrices is added to them before they multiply"
    if lora.lora_dropout:
        yield Finding("contradiction", ("lora.lora_dropout", key), f"`lora.lora_dropout` with `{key}` is not supported: {why}", "write 0")
    if lora.use_dora:
        message = f"`lora.use_dora: true` with `{key}` is not supported"
        yield Finding("contradiction", ("lora.use_dora", key), message, "write `use_dora: false`")
    if recipe.kernels.compile:
        message = f"`kernels.compile: true` with `{key}` is not supported: layers would be recompiled in every step"
        yield Finding("contradiction", ("kernels.compile", key), message, "write `kernels: {compile: false}`")
    if recipe.kernels.liger is True:
        message = f"`kernels.liger: true` with `{key}` is not supported: Liger would replace the forward of the adapted experts"
        yield Finding("contradiction", ("kernels.liger", key), message, "write `kernels: {liger: auto}`")


def quantization_limits(recipe: Recipe) -> Iterator[Finding]:
    if recipe.quantization is None:
        return
    if recipe.lora is None:
        message = "`quantization:` holds frozen weights in 4 bits, which cannot be trained: `lora:` is missing"
        yield Finding("contradiction", ("quantization.load", "quantization"), message, "add `lora: {}`, or leave `quantization` out")
    if recipe.merge.dtype == "keep" and recipe.merge.base == "trained" and recipe.merge.adapter != "adapter":
        message = "`merge.dtype: keep` cannot keep the trained weights of `quantization.load`, which are in 4 bits"
        yield Finding(
            "contradiction", ("merge.dtype", "quantization"), message, "leave `merge.dtype` out, or write `merge: {base: original}`"
        )


ADAPTER_RULES: tuple[Rule, ...] = (lora_limits, quantization_limits)
