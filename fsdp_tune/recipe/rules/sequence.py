"""Where `parallelism.sp_size` works. Part of `rules.RULES`; `recipe.world` checks the ranks, `model.sequence_limits` the model."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_tune.recipe.findings import Finding, Rule, given
from fsdp_tune.recipe.rules.precision import computes_in_fp8
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value

_KEY = "parallelism.sp_size"


def rows_divide(recipe: Recipe) -> Iterator[Finding]:
    """Require that `sp_size` divides every row: those of `max_length` tokens, and shorter ones with their padding."""
    size, longest, padding = recipe.parallelism.sp_size, recipe.data.max_length, recipe.data.pad_to_multiple_of
    what = f"`{_KEY}: {size}` divides each row over as many ranks"
    if longest % size:
        message = f"{what}, and `data.max_length: {longest}` is not a multiple of {size}"
        below, above = longest // size * size, -(-longest // size) * size
        yield Finding("indivisible", ("data.max_length", _KEY), message, f"write {f'{below} or ' if below else ''}{above}")
    if padding % size and given(recipe, "data.pad_to_multiple_of"):
        message = f"{what}, and `data.pad_to_multiple_of: {padding}` is not a multiple of {size}"
        yield Finding("indivisible", ("data.pad_to_multiple_of", _KEY), message, "leave `pad_to_multiple_of` out")


def sequence_limits(recipe: Recipe) -> Iterator[Finding]:
    """Refuse what was not shown to train as it does with `sp_size: 1`."""
    size, fsdp = recipe.parallelism.sp_size, recipe.fsdp
    if size == 1:
        return
    dropout = recipe.lora.lora_dropout if recipe.lora is not None else 0.0
    kernel, noise = recipe.model.attn_implementation, training_value(recipe.training, "neftune_noise_alpha")
    refused = {
        "fsdp.version": (fsdp.version == 1 and recipe.is_sharded and "`fsdp.version: 1`", "use `fsdp.version: 2`"),
        "kernels.compile": (
            recipe.kernels.compile and "`kernels.compile: true` (layers would be compiled with the exchange of tokens inside)",
            "leave `compile` out",
        ),
        "precision.mixed_precision": (computes_in_fp8(recipe) and "`precision.mixed_precision: fp8`", "write `bf16`"),
        "lora.lora_dropout": (
            dropout and f"`lora.lora_dropout: {dropout}` (a token's mask would depend on the rank that holds the token)",
            "write `lora_dropout: 0`",
        ),
        "training.neftune_noise_alpha": (
            noise and f"`training.neftune_noise_alpha: {noise:g}` (the noise is scaled by the length of the row)",
            "leave `neftune_noise_alpha` out",
        ),
        "extensions.metrics": (
            recipe.extensions.metrics and "`extensions.metrics` (a rank has the logits of its part of a row only)",
            "leave `metrics` out",
        ),
        "model.attn_implementation": (kernel == "flex_attention" and f"`model.attn_implementation: {kernel}`", "leave it at auto"),
    }
    for key, (what, hint) in refused.items():
        if what:
            yield Finding("contradiction", (key, _KEY), f"`{_KEY}: {size}` does not support {what}", hint)


SEQUENCE_RULES: tuple[Rule, ...] = (rows_divide, sequence_limits)
