"""Where fp8 and bf16 work. `FP8_RULES` are part of `rules.RULES`; the limits of the model itself are in `model.kernels.float8`."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_tune.recipe.findings import Finding, Rule
from fsdp_tune.recipe.schema import Recipe

FP8_MULTIPLE = 16
"""cuBLAS needs the inner and last sizes of fp8 matrices, widths and tokens, to be multiples of this (torch's `_scaled_mm`)."""
OLDEST_FP8_GPU = (8, 9)
"""Compute capability of Ada; also Hopper and Blackwell. torch has kernels for one scale and for a scale per row on all of them."""
OLDEST_BF16_GPU = (8, 0)
"""Compute capability of Ampere, the first GPUs with tensor cores for bf16 and the oldest with FlashAttention."""
_KEY, _RECIPE = "precision.mixed_precision", "precision.fp8_recipe"


def computes_in_fp8(recipe: Recipe) -> bool:
    return recipe.precision.mixed_precision == "fp8"


def gathers_in_fp8(recipe: Recipe) -> bool:
    """Return whether weights are gathered in fp8: every rank has the scale of a full weight before the gather, but not one per column."""
    return computes_in_fp8(recipe) and recipe.precision.fp8_recipe == "tensorwise" and recipe.is_sharded


def fp8_limits(recipe: Recipe) -> Iterator[Finding]:
    fsdp = recipe.fsdp
    if computes_in_fp8(recipe) and fsdp.version == 1 and recipe.is_sharded:
        message = (
            f"`{_KEY}: fp8` needs FSDP2: `fsdp.version: 1` concatenates weights into flat vectors, which have no scale for each weight"
        )
        yield Finding("contradiction", (_KEY, "fsdp.version"), message, "use `fsdp.version: 2`, or write `bf16`")
    if not gathers_in_fp8(recipe):
        return
    if fsdp.offload_params:  # torch copies an offloaded shard to the device first, and torchao's scale is lost in that copy
        message = (
            f"`{_RECIPE}: tensorwise` gathers in fp8, and `fsdp.offload_params: true` keeps weights on the host, where the scale is lost"
        )
        yield Finding("contradiction", (_RECIPE, "fsdp.offload_params"), message, "write `fp8_recipe: rowwise`, which gathers in bf16")
    if type(fsdp.reshard_after_forward) is int:
        value = f"`fsdp.reshard_after_forward: {fsdp.reshard_after_forward}` (ranks)"
        hint = "write `fp8_recipe: rowwise`, or leave `reshard_after_forward` out"
        message = f"{value} keeps a part of the gathered weights, which FSDP2 cannot do with fp8"
        yield Finding("contradiction", (_RECIPE, "fsdp.reshard_after_forward"), message, hint)


def fp8_gpu_problem(name: str, capability: tuple[int, int]) -> Finding | None:
    """Return the problem of computing in fp8 on a GPU that has no units for it."""
    if capability >= OLDEST_FP8_GPU:
        return None
    wanted, has = ".".join(map(str, OLDEST_FP8_GPU)), ".".join(map(str, capability))
    message = f"`{_KEY}: fp8` needs compute capability {wanted} (Ada, Hopper, Blackwell); {name} has {has}"
    older = "bf16" if capability >= OLDEST_BF16_GPU else "fp16"
    return Finding("fp8-gpu-too-old", (_KEY,), message, f"write `{_KEY}: {older}`")


def slow_bf16(recipe: Recipe, name: str, capability: tuple[int, int]) -> Finding | None:
    """Return what to know about bf16 on a GPU whose tensor cores lack it: libraries compute it there all the same, slowly."""
    if computes_in_fp8(recipe) or recipe.compute_dtype != "bf16" or capability >= OLDEST_BF16_GPU:
        return None
    has = ".".join(map(str, capability))
    message = (
        f"{name} (compute capability {has}) has no tensor cores for bf16, which it emulates several times slower than it computes fp16"
    )
    if recipe.precision.mixed_precision == "bf16":
        return Finding("bf16-gpu-too-old", (_KEY,), message, f"write `{_KEY}: fp16`")
    return Finding("bf16-gpu-too-old", ("model.dtype",), message, f"write `model.dtype: fp32` and `{_KEY}: fp16`")


FP8_RULES: tuple[Rule, ...] = (fp8_limits,)
