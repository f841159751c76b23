"""Resolve `kernels:` for a model, with a reason for each choice, and install what was chosen."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from fsdp_tune.core.errors import usage_error
from fsdp_tune.core.units import format_bytes
from fsdp_tune.model.experts import require_known_balance
from fsdp_tune.model.kernels.attention import live_attention
from fsdp_tune.model.kernels.class_kernels import choose_class_kernels
from fsdp_tune.model.kernels.compiled import choose_compile
from fsdp_tune.model.kernels.expert_kernels import choose_experts
from fsdp_tune.model.kernels.head import SLICE_ELEMENTS, slice_tokens, summed_linear_loss
from fsdp_tune.model.kernels.liger import apply_liger, choose_liger, liger_summed_loss, require_liger
from fsdp_tune.model.kernels.loss_in_head import OpaqueHead, install_loss_in_head, logits_of
from fsdp_tune.model.kernels.mlp_slices import choose_mlp_slices, find_mlps, install_mlp_slices
from fsdp_tune.model.model_files import WRITTEN, KernelChoice
from fsdp_tune.model.packed_mixers import choose_packing, separate_packed
from fsdp_tune.model.query_scale import scale_queries_by_position
from fsdp_tune.model.sequence_parallel import require_shareable_rows
from fsdp_tune.model.shard.expert_biases import sum_biases_in_fp32
from fsdp_tune.model.shard.expert_parallel import require_divisible_experts
from fsdp_tune.recipe.schema.recipe import Recipe


def choose_loss(recipe: Recipe, model: PreTrainedModel) -> KernelChoice:
    """Choose `kernels.loss` for both training and evaluation: auto is chunked if the larger batch of the two
    needs it.

    Raises: usage error if the recipe sets a chunked loss that the model's forward does not allow.
    """
    requested = recipe.kernels.loss
    if requested == "full":
        return KernelChoice("full", WRITTEN)
    if requested == "liger":
        require_liger("kernels.loss: liger")
    training = recipe.training
    rows = training.per_device_train_batch_size
    of_evaluation = training.per_device_eval_batch_size if recipe.evaluates else None
    what = "tokens of an evaluation" if of_evaluation is not None and of_evaluation > rows else "tokens"
    tokens = max(rows, of_evaluation or 0) * recipe.data.max_length // recipe.topology.row_parts
    vocabulary = _head_rows(model)
    if requested == "auto" and tokens * vocabulary <= SLICE_ELEMENTS:
        size, limit = format_bytes(4 * tokens * vocabulary), format_bytes(4 * SLICE_ELEMENTS)
        return KernelChoice(
            "full", f"{tokens:,} {what} × {vocabulary:,} logits are {size} in fp32, {limit} are one slice"
        )
    try:
        logits_of(model)
    except OpaqueHead as opaque:
        if requested == "auto":
            return KernelChoice("full", str(opaque))
        raise usage_error(
            "loss-not-chunkable",
            f"`kernels.loss: {requested}`: {opaque}",
            hint="leave `kernels.loss` at auto, or write `full`",
        ) from opaque
    if requested == "auto":
        part = slice_tokens(tokens, vocabulary)
        size = format_bytes(4 * tokens * vocabulary)
        return KernelChoice(
            "chunked",
            f"{tokens:,} {what} × {vocabulary:,} logits would be {size} in fp32; {part:,} tokens at a time",
        )
    return KernelChoice(requested, WRITTEN)


def _head_rows(model: PreTrainedModel) -> int:
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    return int((embedding if head is None else head).weight.shape[0])


def choose_kernels(recipe: Recipe, model: PreTrainedModel, device_type: str) -> dict[str, KernelChoice]:
    """Return the choices by recipe key or optional package, for the bare model and the device that it will
    run on."""
    require_known_balance(model)
    require_shareable_rows(recipe, model)
    require_divisible_experts(recipe, model)
    return {
        "model.attn_implementation": live_attention(recipe, model),
        "kernels.loss": choose_loss(recipe, model),
        "kernels.liger": choose_liger(recipe, model, device_type),
        "kernels.compile": choose_compile(recipe),
        "kernels.mlp_slice_tokens": choose_mlp_slices(recipe, model),
        **choose_experts(recipe, model, device_type),
        **choose_packing(recipe, model),
        **choose_class_kernels(model, device_type),
    }


_LOSSES = {"chunked": summed_linear_loss, "liger": liger_summed_loss}


def install_kernels(recipe: Recipe, model: PreTrainedModel, device_type: str) -> dict[str, KernelChoice]:
    """Install the chosen kernels in the bare model, and return the choices."""
    chosen = choose_kernels(recipe, model, device_type)
    # before Liger's kernels: narrow copies of the MLPs run on the CPU, where those cannot
    mlps = {} if recipe.kernels.mlp_slice_tokens is None else find_mlps(recipe, model)
    if chosen["kernels.liger"].value == "true":
        apply_liger(model, rotary=recipe.fsdp.activation_checkpointing != "selective")
    if recipe.kernels.mlp_slice_tokens is not None:
        install_mlp_slices(mlps.values(), recipe.kernels.mlp_slice_tokens)
    separate_packed(recipe, model)
    sum_biases_in_fp32(model)
    scale_queries_by_position(model)
    loss = chosen["kernels.loss"].value
    if loss != "full":
        install_loss_in_head(model, logits_of(model), _LOSSES[loss], loss)
    return chosen
