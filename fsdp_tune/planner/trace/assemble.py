"""Convert a recorded run to a trace of the planner."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fsdp_tune.core.families import HIDDEN_SIZE, mean_heads
from fsdp_tune.model.active_parameters import active_parameters
from fsdp_tune.model.internals.transformers_internals import has_experts_kernel
from fsdp_tune.model.kernels.linear_layers import plan_fp8
from fsdp_tune.model.loading.positions import positions_of_run
from fsdp_tune.model.shard.fsdp_units import UnitPlan, decoder_layers
from fsdp_tune.model.shard.local import TORCH_DTYPE, count_elements, kept_in_fp32
from fsdp_tune.model.shard.wrap import shard_dim
from fsdp_tune.planner.predict.depth import Repeated
from fsdp_tune.planner.trace.fake_gpu import STREAMS
from fsdp_tune.planner.trace.loss_slices import most_tokens
from fsdp_tune.planner.trace.recorder import Recorder
from fsdp_tune.planner.trace.traced_step import STEPS, Run
from fsdp_tune.planner.trace_format import (
    COLLECTIVE,
    EVENT,
    OP,
    WAIT,
    Counts,
    Shapes,
    Trace,
    TraceFacts,
    Unit,
    fuse,
)
from fsdp_tune.recipe.rules.limits import gathers_in_fp8
from fsdp_tune.recipe.schema.recipe import Recipe


def assemble(
    recipe: Recipe,
    config: PreTrainedConfig,
    run: Run,
    counts: Counts,
    units: tuple[Unit, ...],
    repeated: Repeated | None,
) -> Trace:
    """Return the trace of a run. `config`, `counts` and `units` are those of the full model."""
    recorder = run.recorder
    events = np.array(recorder.events, EVENT)
    events["kind"] = np.array(recorder.kinds, np.int8)[events["block"]]
    topology = recipe.topology
    clock = recorder.clock
    return Trace(
        events=events,
        ops=_ops(recorder, events),
        collectives=np.array(recorder.collectives, COLLECTIVE),
        waits=_waits(clock.waits, events),
        streams=STREAMS,
        modules=tuple(recorder.modules),
        op_names=tuple(recorder.op_names),
        units=units,
        counts=counts,
        shapes=Shapes(
            micro_batch=recipe.training.per_device_train_batch_size,
            tokens=recipe.data.max_length,
            accumulation=recipe.training.gradient_accumulation_steps or 1,
            traced_micro_batches=run.micro_batches,
            traced_steps=STEPS,
            topology=topology,
            is_sharded=recipe.is_sharded,
        ),
        traced_layers=run.layers,
        period=repeated.period if repeated else 1,
        first_repeated=repeated.first if repeated else 0,
        facts=TraceFacts(
            attention=sorted(run.attention),
            slice_tokens=most_tokens(counts.vocabulary)
            if run.loaded.kernels["kernels.loss"].value == "chunked"
            else None,
            torch=metadata.version("torch"),
            transformers=metadata.version("transformers"),
            python=platform.python_version(),
            config=config.to_diff_dict(),
            max_positions=positions_of_run(recipe, config),
            experts_inside=recipe.is_sharded
            and any(
                shard_dim(recipe, each.shape, topology.copy_size) for each in run.loaded.model.parameters()
            ),
            expert_shapes=_expert_shapes(run.loaded.model),
        ),
    )


def _expert_shapes(model: nn.Module) -> list[list[int]]:
    stacks = (
        stack
        for module in model.modules()
        if has_experts_kernel(module)
        for stack in module.parameters(recurse=False)
    )
    return [list(shape) for shape in sorted({tuple(stack.shape) for stack in stacks})]


def _ops(recorder: Recorder, events: Any) -> Any:
    """Return the table of operations, with those of compiled layers fused."""
    ops = np.array(recorder.ops, OP)
    if not recorder.compiles:
        return ops
    allocated = events[events["bytes"] > 0]
    sizes = dict(zip(allocated["block"].tolist(), allocated["bytes"].tolist(), strict=True))
    return fuse(ops, recorder.calls, sizes, recorder.micro_batch, recorder.slice_tokens)


def _waits(waits: list[tuple[int, int, int, int]], events: Any) -> Any:
    """Return the table of waits; each has step, phase and layer of the last allocation before it."""
    table = np.zeros(len(waits), WAIT)
    if waits:
        for column, values in zip(("at", "stream", "source", "until"), zip(*waits, strict=True), strict=True):
            table[column] = values
        before = np.maximum(np.searchsorted(events["at"], table["at"]) - 1, 0)
        for column in ("step", "micro", "phase", "layer", "module"):
            table[column] = events[column][before]
    return table


def count(recipe: Recipe, config: PreTrainedConfig, model: PreTrainedModel) -> Counts:
    """Return the counts of the full model, which is on the meta device."""
    parameters = list(model.parameters())
    heads, width = mean_heads(config)
    head = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    return Counts(
        parameters=count_elements(model.named_parameters()),
        active_parameters=active_parameters(config, model.named_parameters()),
        trained_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        layers=len(decoder_layers(model, recipe.layer_classes)),
        hidden_size=HIDDEN_SIZE.of(config) or 0,
        attention_heads=heads,
        head_dim=width,
        vocabulary=int(embedding.weight.shape[0]),
        tied_embeddings=head is not None and head.weight is embedding.weight,
    )


def unit_list(recipe: Recipe, model: PreTrainedModel, plan: UnitPlan) -> tuple[Unit, ...]:
    """Return the units of the full model in the order of wrapping, the root last; one 'unit' for plain
    DDP."""
    layer_of = {name: index for index, (name, _) in enumerate(decoder_layers(model, recipe.layer_classes))}
    in_fp8 = _ids_gathered_in_fp8(recipe, model)
    held = {name: model.get_parameter(name) for name in plan.held}
    taken = {id(parameter) for parameter in held.values()}
    units = [_unit(recipe, model, group, layer_of.get(group[0], -1), taken, in_fp8) for group in plan.groups]
    if plan.holder is not None:
        size_bytes = sum(p.numel() * p.element_size() for p in held.values())
        units.append(Unit(plan.holder, -1, count_elements(held.items()), size_bytes, size_bytes))
    return (*units, _unit(recipe, model, ("",), -1, taken, in_fp8))


def _ids_gathered_in_fp8(recipe: Recipe, model: PreTrainedModel) -> set[int]:
    """Return the ids of the weights that are gathered in fp8."""
    names = plan_fp8(recipe, model).gathered if gathers_in_fp8(recipe) else ()
    return {id(model.get_submodule(name).weight) for name in names}


def _unit(
    recipe: Recipe, model: nn.Module, group: tuple[str, ...], layer: int, taken: set[int], in_fp8: set[int]
) -> Unit:
    named: dict[str, nn.Parameter] = {}
    for name in group:
        for own_name, parameter in model.get_submodule(name).named_parameters(prefix=name):
            if id(parameter) not in taken:
                taken.add(id(parameter))
                named[own_name] = parameter
    own = named.values()
    width = TORCH_DTYPE[recipe.compute_dtype].itemsize
    kept = kept_in_fp32(model)
    sizes = {
        own_name: 1 if id(p) in in_fp8 or p.dtype == torch.uint8 else width for own_name, p in named.items()
    }
    gathered = sum(
        p.numel() * (p.element_size() if own_name in kept else sizes[own_name])
        for own_name, p in named.items()
    )
    stored = sum(p.numel() * p.element_size() for p in own)
    return Unit(
        name=", ".join(group) or "(root)",
        layer=layer,
        parameters=count_elements(named.items()),
        parameter_bytes=stored,
        gathered_bytes=gathered,
    )
