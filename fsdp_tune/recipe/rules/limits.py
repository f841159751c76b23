"""Where features work: fp8 and bf16, kernels of experts and attention, and `parallelism.sp_size`.

The rules are part of `rules.contradictions.RULES`. `recipe.world` checks the ranks of sequence parallelism;
the limits of the model itself are in `model.kernels.linear_layers` and `model.sequence_parallel`.
"""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_tune.core.expert_kernels import EXPERTS_KERNELS
from fsdp_tune.core.flash_kernels import flash_version
from fsdp_tune.recipe.schema.keys import Finding, Rule, given
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value

FP8_MULTIPLE = 16
"""cuBLAS needs the inner and last sizes of fp8 matrices, widths and tokens, to be multiples of this (torch's
`_scaled_mm`)."""
OLDEST_FP8_GPU = (8, 9)
"""Compute capability of Ada; also Hopper and Blackwell. torch has kernels for one scale and for a scale per
row on all of them."""
OLDEST_BF16_GPU = (8, 0)
"""Compute capability of Ampere, the first GPUs with tensor cores for bf16 and the oldest with
FlashAttention."""
PRECISION_KEY, _RECIPE, _KERNEL = (
    "precision.mixed_precision",
    "precision.fp8_recipe",
    "model.attn_implementation",
)
_EXPERTS = "kernels.experts"


def computes_in_fp8(recipe: Recipe) -> bool:
    return recipe.precision.mixed_precision == "fp8"


def gathers_in_fp8(recipe: Recipe) -> bool:
    """Return whether weights are gathered in fp8: every rank has the scale of a full weight before the
    gather, but not one per column."""
    return computes_in_fp8(recipe) and recipe.precision.fp8_recipe == "tensorwise" and recipe.is_sharded


def fp8_limits(recipe: Recipe) -> Iterator[Finding]:
    fsdp = recipe.fsdp
    if computes_in_fp8(recipe) and fsdp.version == 1 and recipe.is_sharded:
        message = (
            f"`{PRECISION_KEY}: fp8` needs FSDP2: `fsdp.version: 1` concatenates weights into flat vectors, "
            "which have no scale for each weight"
        )
        yield Finding(
            "contradiction",
            (PRECISION_KEY, "fsdp.version"),
            message,
            "use `fsdp.version: 2`, or write `bf16`",
        )
    if not gathers_in_fp8(recipe):
        return
    # torch copies an offloaded shard to the device first, and torchao's scale is lost in that copy
    if fsdp.offload_params:
        message = (
            f"`{_RECIPE}: tensorwise` gathers in fp8, and `fsdp.offload_params: true` keeps weights on "
            "the host, where the scale is lost"
        )
        yield Finding(
            "contradiction",
            (_RECIPE, "fsdp.offload_params"),
            message,
            "write `fp8_recipe: rowwise`, which gathers in bf16",
        )
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
    message = (
        f"`{PRECISION_KEY}: fp8` needs compute capability {wanted} (Ada, Hopper, Blackwell); {name} has {has}"
    )
    older = "bf16" if capability >= OLDEST_BF16_GPU else "fp16"
    return Finding("fp8-gpu-too-old", (PRECISION_KEY,), message, f"write `{PRECISION_KEY}: {older}`")


def flash_gpu_problem(recipe: Recipe, name: str, capability: tuple[int, int]) -> Finding | None:
    """Return the problem of a FlashAttention that has no kernels for a GPU: the first step would fail with
    "no kernel image"."""
    kernel = recipe.model.attn_implementation
    flash = flash_version(kernel)
    if flash is None or (reason := flash.against(name, capability)) is None:
        return None
    return Finding(
        "flash-gpu-unsupported", (_KERNEL,), f"`{_KERNEL}: {kernel}`: {reason}", f"write `{_KERNEL}: auto`"
    )


def experts_gpu_problem(recipe: Recipe, name: str, capability: tuple[int, int]) -> Finding | None:
    """Return the problem of a kernel for experts that has none for a GPU."""
    requested = recipe.kernels.experts
    if requested == "auto" or (reason := EXPERTS_KERNELS[requested].against(name, capability)) is None:
        return None
    return Finding(
        "experts-gpu-unsupported",
        (_EXPERTS,),
        f"`{_EXPERTS}: {requested}`: {reason}",
        f"write `{_EXPERTS}: auto`",
    )


def experts_kernel(recipe: Recipe) -> Iterator[Finding]:
    """Refuse kernels for experts on devices, in dtypes and under a compiler that do not have them."""
    requested = recipe.kernels.experts
    if requested == "auto":
        return
    kernel, written = EXPERTS_KERNELS[requested], f"`{_EXPERTS}: {requested}`"
    if kernel.generations and recipe.launch.device not in ("auto", "cuda"):
        message = f"{written} has kernels for CUDA, and `launch.device` is {recipe.launch.device}"
        yield Finding("contradiction", (_EXPERTS, "launch.device"), message, "leave `experts` at auto")
    if kernel.generations and recipe.compute_dtype == "fp32":
        message = f"{written} computes in 16 bits, and this recipe computes in fp32"
        yield Finding(
            "contradiction",
            (_EXPERTS, PRECISION_KEY),
            message,
            "leave `experts` at auto, or write `mixed_precision: bf16`",
        )
    elif kernel.generations and not recipe.is_sharded and recipe.model.dtype == "fp32":
        # Autocast casts nothing that is given to a kernel of another package; under FSDP the weights
        # themselves are in 16 bits.
        message = (
            f"{written} computes in 16 bits, and without sharding the weights that it is given are in "
            "fp32 (`model.dtype`)"
        )
        hint = f"leave `experts` at auto, or write `dtype: {recipe.compute_dtype}`"
        yield Finding("contradiction", (_EXPERTS, "model.dtype"), message, hint)
    if recipe.kernels.compile and not kernel.compiles:
        message = (
            f"{written} loops over the experts that were chosen, which `kernels.compile: true` would "
            "compile for each set of them"
        )
        yield Finding("contradiction", (_EXPERTS, "kernels.compile"), message, "leave `experts` at auto")


EXPERTS_RULES: tuple[Rule, ...] = (experts_kernel,)


def slow_bf16(recipe: Recipe, name: str, capability: tuple[int, int]) -> Finding | None:
    """Return what to know about bf16 on a GPU whose tensor cores lack it: libraries compute it there all the
    same, slowly."""
    if computes_in_fp8(recipe) or recipe.compute_dtype != "bf16" or capability >= OLDEST_BF16_GPU:
        return None
    has = ".".join(map(str, capability))
    message = (
        f"{name} (compute capability {has}) has no tensor cores for bf16, which it emulates several "
        "times slower than it computes fp16"
    )
    if recipe.precision.mixed_precision == "bf16":
        return Finding("bf16-gpu-too-old", (PRECISION_KEY,), message, f"write `{PRECISION_KEY}: fp16`")
    return Finding(
        "bf16-gpu-too-old",
        ("model.dtype",),
        message,
        f"write `model.dtype: fp32` and `{PRECISION_KEY}: fp16`",
    )


def slow_bf16_cpu(recipe: Recipe) -> Finding | None:
    """Return what bf16 costs on CPU ranks whose CPU has no instructions for it."""
    if recipe.compute_dtype != "bf16":
        return None
    keys = (PRECISION_KEY,) if recipe.model.dtype == "fp32" else ("model.dtype", PRECISION_KEY)
    message = (
        "this CPU has no instructions for bf16 (AMX, AVX512_BF16): linear layers take 5 to 26 times as "
        "long as in fp32"
    )
    return Finding(
        "bf16-cpu-slow",
        keys,
        message,
        " ".join(f"--set {key}={'fp32' if key == 'model.dtype' else 'no'}" for key in keys),
    )


FP8_RULES: tuple[Rule, ...] = (fp8_limits,)


_SP_KEY = "parallelism.sp_size"


def rows_divide(recipe: Recipe) -> Iterator[Finding]:
    """Require that `sp_size` divides every row: those of `max_length` tokens, and shorter ones with their
    padding."""
    size, longest, padding = (
        recipe.parallelism.of_row.sequence,
        recipe.data.max_length,
        recipe.data.pad_to_multiple_of,
    )
    what = f"`{_SP_KEY}: {size}` divides each row over as many ranks"
    if longest % size:
        message = f"{what}, and `data.max_length: {longest}` is not a multiple of {size}"
        below, above = longest // size * size, -(-longest // size) * size
        yield Finding(
            "indivisible",
            ("data.max_length", _SP_KEY),
            message,
            f"write {f'{below} or ' if below else ''}{above}",
        )
    if padding % size and given(recipe, "data.pad_to_multiple_of"):
        message = f"{what}, and `data.pad_to_multiple_of: {padding}` is not a multiple of {size}"
        yield Finding(
            "indivisible", ("data.pad_to_multiple_of", _SP_KEY), message, "leave `pad_to_multiple_of` out"
        )


def sequence_limits(recipe: Recipe) -> Iterator[Finding]:
    """Refuse what was not shown to train as it does with `sp_size: 1`."""
    size, fsdp = recipe.parallelism.of_row.sequence, recipe.fsdp
    if size == 1:
        return
    dropout = recipe.lora.lora_dropout if recipe.lora is not None else 0.0
    kernel, noise = recipe.model.attn_implementation, training_value(recipe.training, "neftune_noise_alpha")
    refused = {
        "fsdp.version": (
            fsdp.version == 1 and recipe.is_sharded and "`fsdp.version: 1`",
            "use `fsdp.version: 2`",
        ),
        "kernels.compile": (
            recipe.kernels.compile
            and "`kernels.compile: true` (layers would be compiled with the exchange of tokens inside)",
            "leave `compile` out",
        ),
        _RECIPE: (
            computes_in_fp8(recipe)
            and recipe.precision.fp8_recipe == "tensorwise"
            and f"`{_RECIPE}: tensorwise` (the scale of a token would depend on the other tokens of "
            "its rank)",
            "write `fp8_recipe: rowwise`, which has a scale for each token in the forward pass and "
            "in the gradient of the input",
        ),
        "lora.lora_dropout": (
            dropout
            and f"`lora.lora_dropout: {dropout}` (a token's mask would depend on the rank that holds "
            "the token)",
            "write `lora_dropout: 0`",
        ),
        "training.neftune_noise_alpha": (
            noise
            and f"`training.neftune_noise_alpha: {noise:g}` (the noise is scaled by the length of the row)",
            "leave `neftune_noise_alpha` out",
        ),
        "extensions.metrics": (
            recipe.extensions.metrics
            and "`extensions.metrics` (a rank has the logits of its part of a row only)",
            "leave `metrics` out",
        ),
        "model.attn_implementation": (
            kernel == "flex_attention" and f"`model.attn_implementation: {kernel}`",
            "leave it at auto",
        ),
    }
    for key, (what, hint) in refused.items():
        if what:
            yield Finding(
                "contradiction", (key, _SP_KEY), f"`{_SP_KEY}: {size}` does not support {what}", hint
            )


SEQUENCE_RULES: tuple[Rule, ...] = (rows_divide, sequence_limits)
