"""Read wrapping, dtypes and mesh from the live objects of every rank and compare them with the recipe.

`recipe.fsdp_arguments.expected` returns the live state that the recipe requires, independently of the code
that makes the settings. Any difference from it, or between ranks, stops the run before its first step.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_tune.core.errors import FailedError, Problem
from fsdp_tune.core.units import MIB
from fsdp_tune.model.internals.transformers_internals import attention_of
from fsdp_tune.model.kernels.compiled import is_compiled
from fsdp_tune.model.kernels.expert_kernels import live_experts
from fsdp_tune.model.kernels.liger import modules_of_liger
from fsdp_tune.model.kernels.loss_in_head import loss_kernel_of
from fsdp_tune.model.kernels.mlp_slices import mlp_slices_of
from fsdp_tune.model.loading.assemble import Loaded
from fsdp_tune.model.loading.construct import frozen_by_its_code
from fsdp_tune.model.optim.adamw_in_blocks import blocks_fit, kept_as
from fsdp_tune.model.optim.muon import ORTHOGONAL
from fsdp_tune.model.sequence_parallel import sequence_group_of
from fsdp_tune.model.shard.local import TORCH_DTYPE, kept_in_fp32, local_part, parts_of, plain_name
from fsdp_tune.model.shard.wrap import process_groups
from fsdp_tune.recipe.fsdp_arguments import expected
from fsdp_tune.recipe.schema.optimizers import (
    BLOCK,
    DEFAULT_BLOCK,
    optimizer_arguments,
    state_bits,
    state_dtype,
)
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.records import ChosenKernel, GroupState, LiveState, OneOrAll, PluginState, ReadBack
from fsdp_tune.worker.agreement import gather
from fsdp_tune.worker.rank import time_limits_seconds
from fsdp_tune.worker.readback.experts import (
    exchanging_ranks,
    expert_differences,
    group_size,
    inside_differences,
    own_experts,
)
from fsdp_tune.worker.readback.one_or_all import only
from fsdp_tune.worker.readback.quantised import quantised_differences, read_quantised
from fsdp_tune.worker.readback.sharding import (
    cast_parameters,
    dtype_name,
    goes_to_host,
    offloads,
    read_sharding,
    wrapper_of,
)
from fsdp_tune.worker.readback.structure import structure_differences
from fsdp_tune.worker.readback.trained import fp8_differences, read_fp8, read_trained

if TYPE_CHECKING:
    from fsdp_tune.worker.trainer import FsdpTrainer


# Below this, the interpreter's own noise is larger than the model.
_MIN_BYTES_FOR_RESIDENT_CHECK = 256 * MIB


def read_live(recipe: Recipe, loaded: Loaded, trainer: FsdpTrainer) -> LiveState:
    """The report of this rank."""
    wrapped = loaded.wrapped
    kind = wrapper_of(wrapped)
    parameters = list(wrapped.named_parameters())
    groups = [dist.group.WORLD, *process_groups(loaded.model, loaded.mesh)]
    exchanging = exchanging_ranks(loaded.model)
    sharding = read_sharding(kind, recipe, loaded)
    return LiveState(
        wrapper=kind,
        world_size=dist.get_world_size(),
        mesh=list(loaded.mesh.shape) if loaded.mesh is not None else [],
        sequence_group=1 if (group := sequence_group_of(wrapped)) is None else group.size(),
        expert_group=group_size(exchanging),
        exchanging_ranks=exchanging,
        own_experts=own_experts(loaded.model),
        parameter_dtype=only({dtype_name(p.dtype) for p in cast_parameters(loaded)}),
        kept_in_fp32=_kept_dtypes(loaded),
        offload_params=offloads(wrapped, kind),
        global_batch_size=trainer.parts.rows.global_batch,
        gradient_accumulation_steps=trainer.args.gradient_accumulation_steps,
        micro_batch=trainer.parts.rows.micro_batch,
        attention=attention_of(loaded.model.config),
        experts=sorted(live_experts(loaded.model)),
        parameters=loaded.size.parameters,
        trained_parameters=loaded.size.trained_parameters,
        model_bytes=loaded.size.parameter_bytes,
        largest_tensor_bytes=max((p.numel() * p.element_size() for _, p in parameters), default=0),
        local_bytes=sum(local_part(p).numel() * p.element_size() for _, p in parameters),
        peak_growth_bytes=loaded.peak_growth_bytes,
        trained=read_trained(loaded.model),
        frozen_dtypes=sorted({str(dtype_name(p.dtype)) for _, p in parameters if not p.requires_grad}),
        tokens_per_step_at_most=trainer.parts.rows.global_batch * recipe.data.max_length,
        data_order_digest=trainer.parts.rows.digest(),
        optimizer=type(trainer.optimizer).__name__ if trainer.optimizer is not None else None,
        parameter_groups=_parameter_groups(wrapped, trainer.optimizer)
        if trainer.optimizer is not None
        else [],
        plugin=_plugin(trainer),
        activation_checkpointing=_recomputed(loaded.model),
        recomputed_layers=len([m for m in loaded.model.modules() if _recomputes(m)]),
        frozen_by_its_code=sorted(frozen_by_its_code(loaded.model)),
        tied=_tied(loaded.model),
        kernels={
            key: ChosenKernel(value=choice.value, reason=choice.reason)
            for key, choice in loaded.kernels.items()
        },
        loss_kernel=loss_kernel_of(wrapped),
        liger_modules=modules_of_liger(loaded.model),
        mlp_slice_tokens=sorted(set(mlp_slices_of(loaded.model).values())),
        compiled_layers=sum(is_compiled(module) for module in loaded.model.modules()),
        fp8=read_fp8(loaded),
        quantised_training=read_quantised(loaded),
        weights_loaded_by=loaded.way,
        process_groups=len(groups),
        collective_limits_seconds=sorted({limit for group in groups for limit in time_limits_seconds(group)}),
        **sharding,
    )


def _parameter_groups(wrapped: nn.Module, optimizer: torch.optim.Optimizer) -> list[GroupState]:
    names = {parameter: plain_name(name) for name, parameter in wrapped.named_parameters()}
    return [
        GroupState(
            learning_rate=group.get("initial_lr", group["lr"]),
            weight_decay=group["weight_decay"],
            **({"update": "muon" if group[ORTHOGONAL] else "adamw"} if ORTHOGONAL in group else {}),
            tensors=len(group["params"]),
            # The witness looks for tensors that are not the model's, and names them.
            first=next((names[parameter] for parameter in group["params"] if parameter in names), None),
        )
        for group in optimizer.param_groups
    ]


def _kept_dtypes(loaded: Loaded) -> dict[str, int]:
    """Return the number of parameters and buffers that the model's class keeps in fp32, by their dtype on
    this rank."""
    kept = kept_in_fp32(loaded.model)
    named = [*loaded.wrapped.named_parameters(), *loaded.wrapped.named_buffers()]
    return dict(Counter(str(dtype_name(tensor.dtype)) for name, tensor in named if plain_name(name) in kept))


def _recomputed(model: nn.Module) -> OneOrAll:
    kinds = {_recomputes(module) for module in model.modules()} - {None}
    return only(kinds) if kinds else "none"


def _recomputes(module: nn.Module) -> str | None:
    """Return the mark that `model.shard.recompute` sets on a layer, ignoring attributes that FSDP1's wrapper
    forwards."""
    return vars(module).get("recomputes")


def _tied(model: Any) -> bool:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and embedding is not None and head.weight is embedding.weight


def _plugin(trainer: FsdpTrainer) -> PluginState | None:
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        return None
    return PluginState(
        fsdp_version=plugin.fsdp_version,
        reshard_after_forward=str(plugin.reshard_after_forward),
        state_dict_type=str(plugin.state_dict_type).rsplit(".", 1)[-1],
        cpu_offload=goes_to_host(plugin.cpu_offload),
    )


_OF_EACH_RANK = {
    "local_bytes",
    "largest_tensor_bytes",
    "peak_growth_bytes",
    "own_experts",
    "exchanging_ranks",
}


def differences(recipe: Recipe, loaded: Loaded, reports: list[LiveState]) -> list[str]:
    """Return one sentence for each value that differs from the recipe or between ranks."""
    found: list[str] = []
    wanted = expected(recipe)
    wanted.pop("optimizer_state_dtype")  # there is no state before the first step; checked after it
    wanted |= _within_units(wanted, reports[0])
    for key, value in wanted.items():
        if (live := getattr(reports[0], key)) != value:
            found.append(f"{key}: the recipe means {value!r}, the run has {live!r}")
    for key in sorted(LiveState.model_fields.keys() - _OF_EACH_RANK):
        first, *others = (getattr(report, key) for report in reports)
        if (
            rank := next((rank for rank, other in enumerate(others, start=1) if other != first), None)
        ) is not None:
            found.append(
                f"{key} differs between ranks: rank 0 has {first!r}, rank {rank} has {others[rank - 1]!r}"
            )
    if reports[0].wrapper == "fsdp2" and reports[0].not_sharded and recipe.fsdp.ignored_modules is None:
        first, *more = reports[0].not_sharded
        found.append(f"not sharded: {first}{f' and {len(more)} more parameters' if more else ''}")
    tied = bool(getattr(loaded.model.config, "tie_word_embeddings", False))
    if reports[0].tied != tied:
        found.append(f"tied embeddings: the config has {tied}, the live model {reports[0].tied}")
    if len(limits := reports[0].collective_limits_seconds) > 1:
        found.append(
            f"process groups have different time limits: {', '.join(f'{limit:g} s' for limit in limits)}"
        )
    found += inside_differences(recipe, loaded, reports[0])
    found += expert_differences(recipe, loaded, reports)
    found += _kept_differences(reports[0])
    found += fp8_differences(recipe, loaded, reports[0].fp8)
    found += quantised_differences(recipe, loaded, reports[0].quantised_training)
    on_host = excessive_growth(recipe, reports) if recipe.launch.device == "cpu" else []
    return found + structure_differences(recipe, loaded, reports[0]) + on_host


def _kept_differences(report: LiveState) -> list[str]:
    """Return a sentence if what the model's class keeps in fp32 is stored or gathered in another dtype."""
    others = {dtype: count for dtype, count in report.kept_in_fp32.items() if dtype != "float32"}
    found = [
        f"kept_in_fp32: the model's class keeps them in fp32, the run has {count} of them in {dtype}"
        for dtype, count in others.items()
    ]
    return found + [
        f"kept_in_fp32: the unit {name} is cast when it is gathered" for name in report.cast_although_kept
    ]


def _within_units(wanted: dict[str, Any], report: LiveState) -> dict[str, Any]:
    """Return the prefetch depths of a model that has fewer units than the recipe gathers ahead."""
    if (
        "forward_prefetch" not in wanted
        or report.prefetching_units is None
        or report.prefetching_units_of_backward is None
    ):
        return {}  # not FSDP2, or not expected by the recipe
    others = max(0, report.prefetching_units - 1)
    others_of_backward = max(0, report.prefetching_units_of_backward - 1)
    forward, backward = wanted["forward_prefetch"], wanted["backward_prefetch"]
    return {
        "forward_prefetch": min(forward, others),
        "backward_prefetch": (min(backward, others_of_backward) or "implicit")
        if isinstance(backward, int)
        else backward,
    }


def excessive_growth(recipe: Recipe, reports: list[LiveState]) -> list[str]:
    """Return a sentence for each rank that should hold a shard and held the full model while loading
    (ms-swift#9980).

    On CPU ranks the growth of peak resident memory is the model's. On an accelerator it also has the pages of
    CUDA and NCCL, several hundred MiB that no counter of Linux tells apart, and the shard is on the device:
    there only growth by the full model is reported.
    """
    on_host = recipe.launch.device == "cpu"
    model_bytes = reports[0].model_bytes
    one_reader = recipe.fsdp.cpu_ram_efficient_loading and recipe.fsdp.version == 2 and recipe.is_sharded
    if not one_reader or model_bytes < _MIN_BYTES_FOR_RESIDENT_CHECK:
        return []
    found: list[str] = []
    for rank, report in enumerate(reports[1:], start=1):
        # One shard, the full tensor in flight (`assemble._receive`), and slack for the allocator.
        in_flight = max(0.5 * (model_bytes - report.local_bytes), report.largest_tensor_bytes)
        allowed = report.local_bytes + in_flight + 64 * MIB if on_host else model_bytes
        if report.peak_growth_bytes > allowed:
            grown, shard, model = (
                size / MIB for size in (report.peak_growth_bytes, report.local_bytes, model_bytes)
            )
            found.append(
                f"rank {rank} grew by {grown:.0f} MiB while loading; its shard is {shard:.0f} MiB of "
                f"{model:.0f} MiB"
            )
    return found


def read_back(recipe: Recipe, loaded: Loaded, trainer: FsdpTrainer) -> ReadBack:
    """Gather and compare the reports of all ranks. Raises: FailedError with each difference."""
    reports = gather(read_live(recipe, loaded, trainer))
    found = differences(recipe, loaded, reports)
    ranks = [{"local_bytes": r.local_bytes, "peak_growth_bytes": r.peak_growth_bytes} for r in reports]
    document = ReadBack(
        ranks,
        found,
        [] if recipe.launch.device == "cpu" else excessive_growth(recipe, reports),
        facts=reports[0],
    )
    if found:
        problems = [
            Problem(
                "readback-differs",
                sentence,
                hint="the run was stopped before its first step; readback.json has the full report",
            )
            for sentence in found
        ]
        raise ReadBackError(document, *problems)
    return document


class ReadBackError(FailedError):
    """Carries the report, so that it can be written although the run stops."""

    def __init__(self, document: ReadBack, *problems: Problem) -> None:
        super().__init__(*problems)
        self.document = document


def optimizer_state_difference(recipe: Recipe, optimizer: torch.optim.Optimizer) -> str | None:
    """Compare, after step 1, the dtype of the optimizer's moments with the recipe."""
    meaning = expected(recipe)
    of_fp32 = str(TORCH_DTYPE[state_dtype(recipe.training, "fp32")]).removeprefix("torch.")
    in_blocks, block = (
        state_bits(recipe.training),
        optimizer_arguments(recipe.training).get(BLOCK, DEFAULT_BLOCK),
    )
    for parameter, state in optimizer.state.items():
        wide = in_blocks and not blocks_fit(parameter, block)
        # Under `model.dtype: bf16` the parameters that the model's class keeps in fp32 have moments in fp32.
        by_dtype = (
            of_fp32
            if parameter.dtype == torch.float32 and not in_blocks
            else meaning["optimizer_state_dtype"]
        )
        wanted = "float32" if wide else by_dtype
        for kind, value in state.items():
            if isinstance(value, torch.Tensor) and kind != "step" and kept_as(value) != wanted:
                return f"optimizer_state_dtype: the recipe means {wanted!r}, the run has {kept_as(value)!r}"
    return None


def optimizer_state_kinds(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """What moments are kept as on this rank → bytes."""
    found: Counter[str] = Counter()
    for state in optimizer.state.values():
        for kind, value in state.items():
            if isinstance(value, torch.Tensor) and kind != "step":
                found[kept_as(value)] += sum(part.numel() * part.element_size() for part in parts_of(value))
    return dict(sorted(found.items()))
