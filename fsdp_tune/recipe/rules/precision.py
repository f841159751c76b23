"""Where `precision.mixed_precision: fp8` works. Part of `rules.RULES`; what the model itself allows is `model.kernels.float8`'s to say."""

from __future__ import annotations

from fsdp_tune.recipe.findings import Finding, Rule
from fsdp_tune.recipe.schema import Recipe

FP8_MULTIPLE = 16
"""cuBLAS multiplies fp8 matrices whose inner and last sizes are multiples of it (torch's `_scaled_mm`): widths, and tokens."""
_KEY, _RECIPE = "precision.mixed_precision", "precision.fp8_recipe"


def computes_in_fp8(recipe: Recipe) -> bool:
    return recipe.precision.mixed_precision == "fp8"


def gathers_in_fp8(recipe: Recipe) -> bool:
    """One scale for a whole weight is known to every rank before it gathers; a scale for each column is not."""
    return computes_in_fp8(recipe) and recipe.precision.fp8_recipe == "tensorwise" and recipe.is_sharded


def fp8_needs_fsdp_2(recipe: Recipe) -> Finding | None:
    if not computes_in_fp8(recipe) or recipe.fsdp.version == 2 or not recipe.is_sharded:
        return None
    message = "`precision.mixed_precision: fp8` needs FSDP2: `fsdp.version: 1` makes flat vectors of the weights, which have no scale each"
    return Finding("contradiction", (_KEY, "fsdp.version"), message, "use `fsdp.version: 2`, or write `bf16`")


def fp8_gathers_from_the_device(recipe: Recipe) -> Finding | None:
    """torch copies an offloaded shard to the device first, and torchao's scale is lost on that way: a collective for each weight."""
    if not gathers_in_fp8(recipe) or not recipe.fsdp.offload_params:
        return None
    message = (
        "`precision.fp8_recipe: tensorwise` gathers in fp8 what `fsdp.offload_params: true` keeps on the host, where its scale is lost"
    )
    return Finding("contradiction", (_RECIPE, "fsdp.offload_params"), message, "write `fp8_recipe: rowwise`, which gathers in bf16")


def fp8_is_gathered_from_all(recipe: Recipe) -> Finding | None:
    ranks = recipe.fsdp.reshard_after_forward
    if not gathers_in_fp8(recipe) or type(ranks) is not int:
        return None
    message = f"`fsdp.reshard_after_forward: {ranks}` (ranks) keeps a part of what was gathered, which FSDP2 cannot do with fp8"
    hint = "write `fp8_recipe: rowwise`, or leave `reshard_after_forward` out"
    return Finding("contradiction", (_RECIPE, "fsdp.reshard_after_forward"), message, hint)


FP8_RULES: tuple[Rule, ...] = (fp8_needs_fsdp_2, fp8_gathers_from_the_device, fp8_is_gathered_from_all)
