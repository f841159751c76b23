"""Rules about the kernels of a step: the one of attention, Liger's, and the MLP in slices."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_tune.core.units import shown
from fsdp_tune.recipe.schema.attention_kernels import SDPA_OR_EAGER, TORCH_VARLEN, needs_cuda
from fsdp_tune.recipe.schema.keys import Finding, closest
from fsdp_tune.recipe.schema.recipe import Recipe

_OWN_KERNELS = (TORCH_VARLEN, SDPA_OR_EAGER)


KERNELS = (
    "auto",
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
    *_OWN_KERNELS,
)


def attention_kernel(recipe: Recipe) -> Iterator[Finding]:
    """A name that transformers does not list may be the model's own; one that is close to a listed name is a
    typing error."""
    kernel = recipe.model.attn_implementation
    if near := None if kernel in KERNELS or "/" in kernel else closest(kernel, KERNELS):
        message = f"`model.attn_implementation` is `{shown(kernel)}`, which is not a kernel of transformers"
        yield Finding("wrong-value", ("model.attn_implementation",), message, f"did you mean `{near}`?")
    elif recipe.launch.device == "cpu" and (needs_cuda(kernel) or kernel == "flex_attention"):
        # FlashAttention is CUDA code; torch has no backward pass of FlexAttention on the CPU.
        message = f"`model.attn_implementation: {kernel}` cannot train on the CPU"
        yield Finding(
            "contradiction",
            ("model.attn_implementation", "launch.device"),
            message,
            "leave it at auto, or write `sdpa`",
        )


def kernels(recipe: Recipe) -> Iterator[Finding]:
    """Liger is Triton code, and its loss rounds the gradients of the logits before fp16's loss scale is
    applied."""
    kernels, fsdp = recipe.kernels, recipe.fsdp
    liger = [
        (key, value)
        for key, value in (("kernels.liger", kernels.liger), ("kernels.loss", kernels.loss))
        if value in (True, "liger")
    ]
    device = recipe.launch.device
    if liger and (device == "cpu" or (kernels.liger is True and device not in ("auto", "cuda"))):
        key, value = liger[0]
        message = (
            f"`{key}: {str(value).lower()}` cannot run on `launch.device: {device}`: Liger's kernels are for "
            "CUDA GPUs here"
        )
        hint = (
            "leave it at auto" if key == "kernels.liger" else "write `chunked`, which holds no logits either"
        )
        yield Finding("contradiction", (key, "launch.device"), message, hint)
    elif kernels.loss == "liger" and recipe.precision.mixed_precision == "fp16":
        message = (
            "`kernels.loss: liger` rounds gradients before fp16's loss scale is applied, most of them to zero"
        )
        yield Finding(
            "contradiction",
            ("kernels.loss", "precision.mixed_precision"),
            message,
            "write `chunked`, or train in bf16",
        )
    # Offloaded inputs are saved outside the compiled part of a layer; a policy for its operators would have
    # to see inside.
    if (
        kernels.compile
        and fsdp.activation_checkpointing_offload
        and fsdp.activation_checkpointing == "selective"
    ):
        message = (
            "`kernels.compile: true` with `fsdp.activation_checkpointing_offload: true` compiles a "
            "recomputed layer as one piece, in which `fsdp.activation_checkpointing: selective` cannot "
            "select operators"
        )
        keys = ("fsdp.activation_checkpointing", "fsdp.activation_checkpointing_offload", "kernels.compile")
        yield Finding(
            "contradiction", keys, message, "write `full`, or leave `activation_checkpointing_offload` out"
        )


def mlp_slices(recipe: Recipe) -> Iterator[Finding]:
    if recipe.kernels.mlp_slice_tokens is None:
        return
    refused = (
        (
            "kernels.compile",
            recipe.kernels.compile,
            True,
            "the compiler would put all slices into one graph",
            "false",
        ),
        (
            "precision.mixed_precision",
            recipe.precision.mixed_precision,
            "fp8",
            "weights' gradients have one scale for all tokens",
            "bf16",
        ),
        (
            "fsdp.activation_checkpointing",
            recipe.fsdp.activation_checkpointing,
            "selective",
            "it keeps products of all slices",
            "full",
        ),
    )
    for key, value, without, why, instead in refused:
        if value == without:
            message = f"`{key}: {str(value).lower()}` contradicts `kernels.mlp_slice_tokens`: {why}"
            yield Finding(
                "contradiction",
                (key, "kernels.mlp_slice_tokens"),
                message,
                f"write `{instead}`, or leave `mlp_slice_tokens` out",
            )
