"""Run the training step of a recipe under fake tensors and record it, each operation with its module, phase
and decoder layer.

It runs the same modules as the worker (`model.loading`, `model.shard`, `model.step`, `model.optim`). Only the
loop around them is repeated here, as in the Trainer.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AttentionMaskInterface, PreTrainedModel

from fsdp_tune.model import packed_mixers
from fsdp_tune.model.internals.torch_internals import FAKE_TENSOR_MODE
from fsdp_tune.model.kernels.attention import has_variable_lengths
from fsdp_tune.model.kernels.fake_quantised import prepare_quantised
from fsdp_tune.model.kernels.linear_layers import convert_to_fp8
from fsdp_tune.model.kernels.varlen import varlen_rows
from fsdp_tune.model.loading.assemble import Loaded, wrap_whole
from fsdp_tune.model.optim.optimizer import build_optimizer
from fsdp_tune.model.sequence_parallel import rows_known
from fsdp_tune.model.shard.local import parts_of, plain_name
from fsdp_tune.model.shard.process_groups import join_groups, make_groups, make_mesh
from fsdp_tune.model.shard.wrap import begin_micro_batch
from fsdp_tune.model.step import (
    auxiliary_loss_weight,
    clip_factor,
    compute_context,
    flat_shard_group,
    forward_backward,
    loss_options,
    micro_batch_loss,
    scale_gradients,
    total_norm,
)
from fsdp_tune.planner.trace import fake_gpu
from fsdp_tune.planner.trace.cuda_kernels import CudaAttention, Rows, packed_rows
from fsdp_tune.planner.trace.fake_gpu import nothing, replaced, values_of_host
from fsdp_tune.planner.trace.loss_slices import one_slice
from fsdp_tune.planner.trace.module_hooks import Names, scopes
from fsdp_tune.planner.trace.recorder import PHASE, Recorder
from fsdp_tune.planner.trace.traced_ddp import wrap_traceable
from fsdp_tune.planner.trace.traced_model import attention_windows, on_fake_device
from fsdp_tune.planner.trace_format import GROUPS
from fsdp_tune.recipe.schema.attention_kernels import TORCH_VARLEN
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value

STEPS = 2
"""The first step creates the optimizer state and runs only the last micro-batch; the second is like every
later one."""
FAKE_FP16_SCALE = 65536.0


@dataclass
class Run:
    """A recorded run."""

    recorder: Recorder
    loaded: Loaded
    attention: set[str]
    micro_batches: int
    layers: int


def traced_micro_batches(recipe: Recipe) -> int:
    """Return the number of traced micro-batches: the first, the last, and one in place of those between if it
    differs from the last.

    It differs where ranks sum gradients in the last one alone, so that those between hold all gradients of
    the model until their end, and where only the last one frees gathered parameters.
    """
    of_step = recipe.training.gradient_accumulation_steps or 1
    is_like_last = (
        _sums_each(recipe) and not recipe.is_hybrid and recipe.fsdp.reshard_after_backward is not False
    )
    return min(2 if is_like_last else 3, of_step)


def _sums_each(recipe: Recipe) -> bool:
    """Whether ranks sum gradients in every micro-batch. For one rank, Accelerate leaves `no_sync` of DDP and
    FSDP1 out."""
    is_fsdp2 = recipe.is_sharded and recipe.fsdp.version == 2
    return (recipe.is_sharded and recipe.fsdp.sync_each_batch) or (recipe.world_size == 1 and not is_fsdp2)


def run_step(recipe: Recipe, model: PreTrainedModel, *, kernel: str | None) -> Run:
    """Run the training step of a model on the meta device, with all or some of its layers. Call inside
    `fake_world`.

    `kernel`: the attention of the run, in whose place sdpa is traced.
    """
    where = torch.device(fake_gpu.DEVICE, 0)
    attention = CudaAttention(_rows_of(kernel, is_packed=recipe.data.packing))
    has_masks = not has_variable_lengths(kernel)
    # Outside of the fake mode, since a mesh stores its ranks in a tensor.
    mesh, groups = make_mesh(recipe, fake_gpu.DEVICE), make_groups(recipe, fake_gpu.DEVICE)
    join_groups(model, groups)
    fake, masks = FAKE_TENSOR_MODE.get()(allow_non_fake_inputs=True), _masks(has_masks=has_masks)
    # Fake position ids have no documents, so mixers are traced with complete rows: as many operations for as
    # many tokens.
    complete_rows = replaced(packed_mixers, "known_documents", nothing)
    with values_of_host(), fake, masks, complete_rows, _no_garbage(), attention.installed():
        micro_batch = recipe.training.per_device_train_batch_size
        recorder = Recorder(
            fake, fake_gpu.restart(), _groups(mesh, groups), micro_batch, compiles=recipe.kernels.compile
        )
        on_fake_device(model, where)
        convert_to_fp8(recipe, model, fake_gpu.DEVICE)  # before `Names.of`, since they replace modules
        prepare_quantised(recipe, model)
        bare = Names.of(recipe, model)
        recorder.windows = () if has_masks else attention_windows(recipe, model)
        sharded = wrap_whole(recipe, model, mesh, where) if recipe.is_sharded else None
        # torch runs the backward of an accelerator in one thread for each device; the fake device has none.
        with recorder.recording(), torch.autograd.set_multithreading_enabled(False):
            _loaded(recorder, model if sharded is None else sharded.wrapped, bare)
            loaded = sharded or wrap_traceable(recipe, model, where, recorder, bare)
            with scopes(bare, recorder):
                with one_slice(recorder):
                    _train(recipe, loaded, recorder, where)
                if recipe.evaluates:
                    _evaluate(recipe, loaded, recorder, where)
        return Run(recorder, loaded, attention.used, traced_micro_batches(recipe), len(bare.layers))


def _groups(mesh: Any, sharing_rows: dict[str, dist.ProcessGroup]) -> dict[str, int]:
    """Map names of process groups to indices in GROUPS: the last dimension of a mesh shards, one before it
    replicates."""
    found: dict[str, int] = {}
    if mesh is not None:
        names = mesh.mesh_dim_names
        found = {
            mesh.get_group(name).group_name: GROUPS.index("shard" if name == names[-1] else "replicate")
            for name in names
        }
    return found | {str(group.group_name): GROUPS.index(name) for name, group in sharing_rows.items()}


def _rows_of(kernel: str | None, *, is_packed: bool) -> Rows | None:
    """Return how a kernel flattens its operands: torch's always, and flash-attn those of packed rows."""
    if kernel == TORCH_VARLEN:
        return varlen_rows
    return packed_rows if is_packed and has_variable_lengths(kernel) else None


@contextlib.contextmanager
def _masks(*, has_masks: bool) -> Iterator[None]:
    """Make no masks for packed examples and sliding windows if the kernel has none. The model is traced with
    sdpa in its place."""
    kept = AttentionMaskInterface()["sdpa"]
    if not has_masks:
        AttentionMaskInterface.register("sdpa", nothing)
    try:
        yield
    finally:
        AttentionMaskInterface.register("sdpa", kept)


def _use_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Make one of torch's optimizers use its foreach implementation for fake tensors, as it does by default
    for CUDA tensors."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """Disable Python's garbage collector during a step, so that memory is freed only by reference
    counting."""
    enabled = gc.isenabled()
    gc.freeze()  # existing objects are not part of the step, and scanning them takes as long as a layer
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def _loaded(recorder: Recorder, wrapped: nn.Module, bare: Names) -> None:
    """Record the parameters and buffers, which exist before the first step, with their layers."""
    recorder.place.phase = PHASE["load"]
    for name, tensor in (*wrapped.named_parameters(), *wrapped.named_buffers()):
        plain = plain_name(name)
        recorder.place.module = plain
        layer = bare.layer_of(plain)
        recorder.place.layer = layer
        recorder.mark(tensor, "parameters", layer)
    recorder.place.layer, recorder.place.module = -1, ""


def _train(recipe: Recipe, loaded: Loaded, recorder: Recorder, where: torch.device) -> None:
    recorder.place.phase = PHASE["optimizer"]  # some optimizers create their state in the constructor
    optimizer = build_optimizer(recipe, loaded.wrapped, loaded.size.decayed)
    _use_foreach(optimizer)
    micro_batches = traced_micro_batches(recipe)
    place = recorder.place
    loaded.wrapped.train()
    for step in range(STEPS):
        for micro in range(0 if step else micro_batches - 1, micro_batches):
            place.step, place.micro, place.phase = step, micro, PHASE["forward"]
            _micro_batch(recipe, loaded, recorder, where, last=micro == micro_batches - 1)
        place.micro = -1
        _update(recipe, loaded, recorder, optimizer)


def _evaluate(recipe: Recipe, loaded: Loaded, recorder: Recorder, where: torch.device) -> None:
    """Run one batch of an evaluation, as `worker.eval_sets` does, with all slices of the loss."""
    place = recorder.place
    place.step, place.micro, place.phase = STEPS, -1, PHASE["evaluation"]
    place.layer, place.module, place.in_head = -1, "", False
    loaded.wrapped.eval()
    rows = recipe.training.per_device_eval_batch_size or recipe.training.per_device_train_batch_size
    batch = _batch(recipe, where, rows, is_packed=bool(recipe.data.eval_packing))
    for tensor in batch.values():
        recorder.mark(tensor, "inputs")
    with torch.no_grad(), rows_known(loaded.wrapped, batch), compute_context(recipe, fake_gpu.DEVICE):
        loss, auxiliary = micro_batch_loss(loaded.wrapped, batch)
    del loss, auxiliary, batch
    fake_gpu.forget_weights()


def _micro_batch(
    recipe: Recipe, loaded: Loaded, recorder: Recorder, where: torch.device, *, last: bool
) -> None:
    wrapped = loaded.wrapped
    synchronise = last or _sums_each(recipe)
    if isinstance(wrapped, FSDPModule):
        wrapped.set_requires_gradient_sync(synchronise)
        begin_micro_batch(recipe, wrapped, is_last=last)
    batch = _batch(recipe, where, recipe.training.per_device_train_batch_size, is_packed=recipe.data.packing)
    for tensor in batch.values():
        recorder.mark(tensor, "inputs")
    no_sync = (
        contextlib.nullcontext() if synchronise or isinstance(wrapped, FSDPModule) else _no_sync(wrapped)
    )
    scale = FAKE_FP16_SCALE if recipe.precision.mixed_precision == "fp16" else None
    weight = auxiliary_loss_weight(loaded.model)
    with no_sync:
        options = loss_options(recipe)
        loss, loss_sum = forward_backward(
            recipe, wrapped, batch, 1.0, auxiliary=weight, loss_scale=scale, **options
        )
    del loss, loss_sum, batch
    fake_gpu.forget_weights()
    recorder.place.layer, recorder.place.module, recorder.place.in_head = -1, "", False
    for parameter in wrapped.parameters():
        if parameter.grad is not None:
            recorder.mark(parameter.grad, "gradients")


def _no_sync(wrapped: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return the `no_sync` context of DDP or FSDP1, which keep unsharded gradients between micro-batches."""
    context: Any = wrapped.no_sync  # type: ignore[union-attr]
    return context()


def _batch(recipe: Recipe, where: torch.device, rows: int, *, is_packed: bool) -> dict[str, torch.Tensor]:
    """Return a batch as the worker sends it to the device: rows as long as `data.max_length` allows."""
    shape = (rows, recipe.data.max_length)
    names = ["input_ids", "labels", *(["position_ids"] if is_packed else [])]
    return {name: torch.empty(shape, dtype=torch.int64, device=where) for name in names}


def _update(recipe: Recipe, loaded: Loaded, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
    place = recorder.place
    place.phase = PHASE["clip"]
    parameters = [p for p in loaded.wrapped.parameters() if p.grad is not None]
    norm = total_norm(parameters, flat_shard_group(loaded.wrapped))
    max_norm = training_value(recipe.training, "max_grad_norm")
    if max_norm:
        scale_gradients(parameters, clip_factor(norm, max_norm))
    del norm
    del parameters
    place.phase, place.layer = PHASE["optimizer"], -1
    # torchao compiles its step, which would hide its operations
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    for state in optimizer.state.values():
        for value in state.values():
            for part in parts_of(value):
                recorder.mark(part, "optimizer state")
    place.phase, place.layer = PHASE["zero_grad"], -1
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
