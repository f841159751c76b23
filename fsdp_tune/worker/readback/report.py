"""Read wrapping, dtypes and mesh from the live objects of every rank and compare them with the recipe.

`recipe.fsdp_arguments.expected` returns the live state that the recipe requires, independently of the code that makes the settings.
Any difference from it, or between ranks, stops the run before step 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_tune.core.errors import FailedError, Problem
from fsdp_tune.core.units import MIB
from fsdp_tune.model.internals import torch_internals as internals
from fsdp_tune.model.internals.transformers_internals import attention_of
from fsdp_tune.model.kernels.compiled import is_compiled
from fsdp_tune.model.kernels.expert_kernels import live_experts
from fsdp_tune.model.kernels.liger import modules_of_liger
from fsdp_tune.model.kernels.linear_layers import mlp_slices_of
from fsdp_tune.model.kernels.loss_in_head import loss_kernel_of
from fsdp_tune.model.loading.assemble import Loaded
from fsdp_tune.model.loading.construct import frozen_by_its_code
from fsdp_tune.model.optim.adamw_in_blocks import blocks_fit, kept_as, parts_of
from fsdp_tune.model.optim.muon import ORTHOGONAL
from fsdp_tune.model.sequence_parallel import sequence_group_of
from fsdp_tune.model.shard.expert_parallel import divided_experts, exchange_group
from fsdp_tune.model.shard.local import TORCH_DTYPE, kept_in_fp32, local_part, offset_of, plain_name
from fsdp_tune.model.shard.wrap import fsdp_groups, process_groups, shard_dim
from fsdp_tune.recipe.fsdp_arguments import expected
from fsdp_tune.recipe.schema.optimizers import BLOCK, DEFAULT_BLOCK, optimizer_arguments, state_bits, state_dtype
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.records import ChosenKernel, GroupState, LiveState, OneOrAll, PluginState, ReadBack, UnitState
from fsdp_tune.worker.agreement import gather
from fsdp_tune.worker.rank import time_limits_seconds
from fsdp_tune.worker.readback.quantised import quantised_differences, read_quantised
from fsdp_tune.worker.readback.structure import structure_differences
from fsdp_tune.worker.readback.trained import fp8_differences, read_fp8, read_trained

if TYPE_CHECKING:
    from fsdp_tune.worker.trainer import FsdpTrainer

T = TypeVar("T")

# Below this, the interpreter's own noise is larger than the model.
_MIN_BYTES_FOR_RESIDENT_CHECK = 256 * MIB


def read_live(recipe: Recipe, loaded: Loaded, trainer: FsdpTrainer) -> LiveState:
    """The report of this rank."""
    wrapped = loaded.wrapped
    kind = _wrapper(wrapped)
    parameters = list(wrapped.named_parameters())
    groups = [dist.group.WORLD, *process_groups(loaded.model, loaded.mesh)]
    exchanging = _exchanging_ranks(loaded.model)
    sharding = _ddp(recipe, loaded) if kind == "ddp" else {"fsdp2": _fsdp2, "fsdp1": _fsdp1}[kind](loaded)
    return LiveState(
        wrapper=kind,
        world_size=dist.get_world_size(),
        mesh=list(loaded.mesh.shape) if loaded.mesh is not None else [],
        sequence_group=1 if (group := sequence_group_of(wrapped)) is None else group.size(),
        expert_group=_group_size(exchanging),
        exchanging_ranks=exchanging,
        own_experts=_own_experts(loaded.model),
        parameter_dtype=_only({_name(p.dtype) for p in _cast_parameters(loaded)}),
        kept_in_fp32=_kept_dtypes(loaded),
        offload_params=_offloads(wrapped, kind),
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
        frozen_dtypes=sorted({str(_name(p.dtype)) for _, p in parameters if not p.requires_grad}),
        tokens_per_step_at_most=trainer.parts.rows.global_batch * recipe.data.max_length,
        data_order_digest=trainer.parts.rows.digest(),
        optimizer=type(trainer.optimizer).__name__ if trainer.optimizer is not None else None,
        parameter_groups=_parameter_groups(wrapped, trainer.optimizer) if trainer.optimizer is not None else [],
        plugin=_plugin(trainer),
        activation_checkpointing=_recomputed(loaded.model),
        recomputed_layers=len([m for m in loaded.model.modules() if _recomputes(m)]),
        frozen_by_its_code=sorted(frozen_by_its_code(loaded.model)),
        tied=_tied(loaded.model),
        kernels={key: ChosenKernel(value=choice.value, reason=choice.reason) for key, choice in loaded.kernels.items()},
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


def _exchanging_ranks(model: nn.Module) -> dict[str, list[int]]:
    """Return the ranks among which each module of experts exchanges tokens in its live forward, by name of the module."""
    groups = {name: exchange_group(module) for name, module in model.named_modules()}
    return {name: dist.get_process_group_ranks(group) for name, group in groups.items() if group is not None}


def _group_size(exchanging: dict[str, list[int]]) -> int | list[str]:
    """Return the number of ranks among which experts exchange tokens (1: none do); all numbers, if they differ between modules."""
    return _only({len(ranks) for ranks in exchanging.values()} or {1})


def _own_experts(model: nn.Module) -> dict[str, list[int]]:
    """Return the part of each stack that this rank holds, in its first dimension, of modules that exchange tokens."""
    stacks = {
        f"{name}.{key}": stack
        for name, module in model.named_modules()
        if exchange_group(module) is not None
        for key, stack in module.named_parameters(recurse=False)
    }
    return {name: [offset_of(stack)[0], offset_of(stack)[0] + local_part(stack).shape[0]] for name, stack in stacks.items()}


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


def _wrapper(wrapped: nn.Module) -> str:
    if isinstance(wrapped, FSDPModule):
        return "fsdp2"
    if isinstance(wrapped, FullyShardedDataParallel):
        return "fsdp1"
    return "ddp" if isinstance(wrapped, DistributedDataParallel) else type(wrapped).__name__


def _cast_parameters(loaded: Loaded) -> list[nn.Parameter]:
    """Return the trained parameters whose dtype is that of the recipe: all but those that the model's class keeps in fp32."""
    kept = kept_in_fp32(loaded.model)
    return [p for name, p in loaded.wrapped.named_parameters() if p.requires_grad and plain_name(name) not in kept]


def _kept_dtypes(loaded: Loaded) -> dict[str, int]:
    """Return the number of parameters and buffers that the model's class keeps in fp32, by their dtype on this rank."""
    kept = kept_in_fp32(loaded.model)
    named = [*loaded.wrapped.named_parameters(), *loaded.wrapped.named_buffers()]
    return dict(Counter(str(_name(tensor.dtype)) for name, tensor in named if plain_name(name) in kept))


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _only(values: set[T]) -> T | list[str]:
    """Return the single value, or all of them, sorted, if there are several."""
    return next(iter(values)) if len(values) == 1 else sorted(map(str, values))


def _of_all(values: Iterable[OneOrAll]) -> OneOrAll:
    """Return `_only` of values that may be several themselves."""
    return _only({each for value in values for each in (value if isinstance(value, list) else [value])})


def _offloads(wrapped: nn.Module, kind: str) -> bool:
    policies = [wrapped.cpu_offload] if kind == "fsdp1" else [group.offload_policy for group in fsdp_groups(wrapped)]
    return any(map(_goes_to_host, policies))


def _goes_to_host(policy: object) -> bool:
    """FSDP2 encodes it in the class of the policy, FSDP1 in a field."""
    return isinstance(policy, CPUOffloadPolicy) or bool(getattr(policy, "offload_params", False))


def _fsdp2(loaded: Loaded) -> dict[str, Any]:
    names = {id(module): name or "(root)" for name, module in loaded.model.named_modules()}
    units: list[UnitState] = []
    placements: Counter[str] = Counter()
    for group in fsdp_groups(loaded.model):
        tensors = [parameter.sharded_param for parameter in group.fsdp_params]
        placements.update(str([str(p) for p in tensor.placements]) for tensor in tensors if not _is_inside(tensor))
        policies = [parameter.mp_policy for parameter in group.fsdp_params]
        state: Any = internals.FSDP_STATE.of(group.modules[0])()
        units.append(
            UnitState(
                modules=[names.get(id(m), "?") for m in group.modules],
                parameters=sum(tensor.numel() for tensor in tensors),
                is_trained=any(tensor.requires_grad for tensor in tensors),
                reshard_after_forward=_reshard(group),
                param_dtype=_only({_name(policy.param_dtype) for policy in policies}),
                reduce_dtype=_only({_name(policy.reduce_dtype) for policy in policies}),
                output_dtype=_only({_name(policy.output_dtype) for policy in policies}),
                forward_prefetch=len(internals.FORWARD_PREFETCH.of(state)),
                # A list of the unit itself ends the prefetching: no unit before it has a backward.
                backward_prefetch=sum(other is not state for other in internals.BACKWARD_PREFETCH.of(state)),
            )
        )
    as_stored = [unit for unit in units if tuple(unit.modules) in loaded.units.of_precision]
    cast = [unit for unit in units if unit not in as_stored]
    holder = (loaded.units.holder,)
    stays_gathered = {("(root)",), holder} | loaded.units.keeps_gathered
    layers = [unit for unit in units if tuple(unit.modules) not in stays_gathered]
    first_trained = next((index for index, unit in enumerate(layers) if unit.is_trained), 0)
    plain = [name for name, p in loaded.model.named_parameters() if not isinstance(p, DTensor)]
    storage = _only({_name(p.dtype) for p in _cast_parameters(loaded)})
    return {
        "placements": _parsed(placements),
        "reshard_after_forward": _only({unit.reshard_after_forward for unit in layers}) if layers else None,
        "reshard_after_backward": _only({group.reshard_after_backward for group in fsdp_groups(loaded.model)}),
        "compute_dtype": _of_all(unit.param_dtype or storage for unit in cast),
        "cast_although_kept": [unit.modules[0] for unit in as_stored if unit.param_dtype is not None],
        "reduce_dtype": _of_all(unit.reduce_dtype for unit in units),
        "forward_prefetch": max((unit.forward_prefetch for unit in layers), default=0),
        "backward_prefetch": max((unit.backward_prefetch for unit in layers[first_trained:]), default=0) or "implicit",
        "prefetching_units": len(layers),
        # Frozen units before the first trained one have no backward, and are not gathered ahead of it.
        "prefetching_units_of_backward": len(layers) - first_trained,
        "output_dtype": _of_all(unit.output_dtype for unit in units),
        "units": units,
        "sharded_inside": [name for name, p in loaded.model.named_parameters() if isinstance(p, DTensor) and _is_inside(p)],
        "not_sharded": plain,
        "sharded": sum(isinstance(p, DTensor) for p in loaded.model.parameters()),
    }


def _is_inside(tensor: DTensor) -> bool:
    """Return whether a stack of experts is sharded inside of each expert."""
    return any(isinstance(placement, Shard) and placement.dim != 0 for placement in tensor.placements)


def _stacks_to_divide(recipe: Recipe, model: nn.Module) -> dict[str, int]:
    """Return the number of experts in each stack that the recipe divides, by name of the parameter."""
    modules = {name: model.get_submodule(name) for name in divided_experts(recipe, model)}
    return {f"{name}.{key}": len(stack) for name, module in modules.items() for key, stack in module.named_parameters(recurse=False)}


def _inside_differences(recipe: Recipe, loaded: Loaded, report: LiveState) -> list[str]:
    if report.sharded_inside is None:
        return []
    ranks = report.mesh[-1]
    sharded = [(name, p.shape) for name, p in loaded.model.named_parameters() if isinstance(p, DTensor)]
    divided = _stacks_to_divide(recipe, loaded.model)
    wanted = [name for name, shape in sharded if name in divided or shard_dim(recipe, shape, ranks)]
    wrong = sorted(set(wanted) ^ set(report.sharded_inside))
    return [f"sharded_inside: the recipe means {wanted!r}, the run has {report.sharded_inside!r}"] if wrong else []


def _expert_differences(recipe: Recipe, loaded: Loaded, reports: list[LiveState]) -> list[str]:
    """Return a sentence for each rank that does not hold its experts, or exchanges tokens with others than the ranks of its group.

    Neighbouring ranks are a group, and hold neighbouring experts of every stack.
    """
    size, found = recipe.fsdp.ep_size, list[str]()
    modules, counts = divided_experts(recipe, loaded.model), _stacks_to_divide(recipe, loaded.model)
    if size > 1 and not modules:
        return ["experts: the recipe divides them, and the run has no divided stack"]
    for rank, report in enumerate(reports):
        place, group = rank % size, list(range(rank - rank % size, rank - rank % size + size))
        parts = {name: [count // size * place, count // size * (place + 1)] for name, count in counts.items()}
        groups, live = dict.fromkeys(modules, group), report.exchanging_ranks
        if (other := next((name for name in sorted({*groups, *live}) if live.get(name) != groups.get(name)), None)) is not None:
            found.append(
                f"experts of `{other}`: rank {rank} exchanges tokens with ranks {live.get(other)}, and its group is {groups.get(other)}"
            )
        elif (wrong := next((name for name in parts if report.own_experts.get(name) != parts[name]), None)) is not None:
            found.append(f"experts of `{wrong}`: rank {rank} holds {report.own_experts.get(wrong)}, and its part is {parts[wrong]}")
    return found


def _reshard(group: Any) -> bool | int:
    after = group.post_forward_mesh_info
    if after is None:
        return False
    return True if after is group.mesh_info or after.shard_mesh_size == group.mesh_info.shard_mesh_size else int(after.shard_mesh_size)


def _parsed(placements: Counter[str]) -> list[str]:
    """`Shard(dim=0)` for torch's `S(0)`, so that the report does not change with torch's way of printing."""
    text = _only(set(placements)) if placements else "[]"
    words = str(text).replace("S(0)", "Shard(dim=0)").replace("'R'", "'Replicate()'")
    return [word.strip(" '\"") for word in words.strip("[]").split(",")] if words != "[]" else []


def _fsdp1(loaded: Loaded) -> dict[str, Any]:
    units = [module for module in loaded.wrapped.modules() if isinstance(module, FullyShardedDataParallel)]
    strategy = _only({unit.sharding_strategy.name for unit in units})
    precision = units[0].mixed_precision
    storage = _only({_name(p.dtype) for p in _cast_parameters(loaded)})
    # torch answers any strategy with NO_SHARD on one rank; the root alone is freed by no one between forward and backward.
    return {
        "placements": [] if strategy == "NO_SHARD" else [*(["Replicate()"] if "HYBRID" in strategy else []), "Shard(dim=0)"],
        "reshard_after_forward": None if strategy == "NO_SHARD" or len(units) == 1 else strategy in {"FULL_SHARD", "HYBRID_SHARD"},
        "compute_dtype": _name(precision.param_dtype) or storage,
        "reduce_dtype": _name(precision.reduce_dtype),
        "units": [UnitState(modules=[type(unit.module).__name__], strategy=unit.sharding_strategy.name) for unit in units],
        "sharded": len(units),
    }


def _ddp(recipe: Recipe, loaded: Loaded) -> dict[str, Any]:
    from fsdp_tune.model.step import compute_context

    storage = _only({_name(p.dtype) for p in _cast_parameters(loaded)})
    with compute_context(recipe, recipe.launch.device):
        enabled = torch.is_autocast_enabled(recipe.launch.device)
        compute = _name(torch.get_autocast_dtype(recipe.launch.device)) if enabled else storage
    return {"placements": [], "reshard_after_forward": None, "compute_dtype": compute, "reduce_dtype": storage, "units": [], "sharded": 0}


def _recomputed(model: nn.Module) -> OneOrAll:
    kinds = {_recomputes(module) for module in model.modules()} - {None}
    return _only(kinds) if kinds else "none"


def _recomputes(module: nn.Module) -> str | None:
    """Return the mark that `model.shard.recompute` sets on a layer, ignoring attributes that FSDP1's wrapper forwards."""
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
        cpu_offload=_goes_to_host(plugin.cpu_offload),
    )


_OF_EACH_RANK = {"local_bytes", "largest_tensor_bytes", "peak_growth_bytes", "own_experts", "exchanging_ranks"}


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
        if (rank := next((rank for rank, other in enumerate(others, start=1) if other != first), None)) is not None:
            found.append(f"{key} differs between ranks: rank 0 has {first!r}, rank {rank} has {others[rank - 1]!r}")
    if reports[0].wrapper == "fsdp2" and reports[0].not_sharded and recipe.fsdp.ignored_modules is None:
        found.append(f"not sharded: {reports[0].not_sharded[0]} and {len(reports[0].not_sharded) - 1} more parameters")
    tied = bool(getattr(loaded.model.config, "tie_word_embeddings", False))
    if reports[0].tied != tied:
        found.append(f"tied embeddings: the config has {tied}, the live model {reports[0].tied}")
    if len(limits := reports[0].collective_limits_seconds) > 1:
        found.append(f"process groups have different time limits: {', '.join(f'{limit:g} s' for limit in limits)}")
    found += _inside_differences(recipe, loaded, reports[0])
    found += _expert_differences(recipe, loaded, reports)
    found += _kept_differences(reports[0])
    found += fp8_differences(recipe, loaded, reports[0].fp8)
    found += quantised_differences(recipe, loaded, reports[0].quantised_training)
    on_host = excessive_growth(recipe, reports) if recipe.launch.device == "cpu" else []
    return found + structure_differences(recipe, loaded, reports[0]) + on_host


def _kept_differences(report: LiveState) -> list[str]:
    """Return a sentence if what the model's class keeps in fp32 is stored or gathered in another dtype."""
    others = {dtype: count for dtype, count in report.kept_in_fp32.items() if dtype != "float32"}
    found = [
        f"kept_in_fp32: the model's class keeps them in fp32, the run has {count} of them in {dtype}" for dtype, count in others.items()
    ]
    return found + [f"kept_in_fp32: the unit {name} is cast when it is gathered" for name in report.cast_although_kept]


def _within_units(wanted: dict[str, Any], report: LiveState) -> dict[str, Any]:
    """Return the prefetch depths of a model that has fewer units than the recipe gathers ahead."""
    if "forward_prefetch" not in wanted or report.prefetching_units is None or report.prefetching_units_of_backward is None:
        return {}  # not FSDP2, or not expected by the recipe
    others = max(0, report.prefetching_units - 1)
    others_of_backward = max(0, report.prefetching_units_of_backward - 1)
    forward, backward = wanted["forward_prefetch"], wanted["backward_prefetch"]
    return {
        "forward_prefetch": min(forward, others),
        "backward_prefetch": (min(backward, others_of_backward) or "implicit") if isinstance(backward, int) else backward,
    }


def excessive_growth(recipe: Recipe, reports: list[LiveState]) -> list[str]:
    """Return a sentence for each rank that should hold a shard and held the full model while loading (ms-swift#9980).

    On CPU ranks the growth of peak resident memory is the model's. On an accelerator it also has the pages of CUDA and NCCL, several
    hundred MiB that no counter of Linux tells apart, and the shard is on the device: there only growth by the full model is reported.
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
            grown, shard, model = (size / MIB for size in (report.peak_growth_bytes, report.local_bytes, model_bytes))
            found.append(f"rank {rank} grew by {grown:.0f} MiB while loading; its shard is {shard:.0f} MiB of {model:.0f} MiB")
    return found


def read_back(recipe: Recipe, loaded: Loaded, trainer: FsdpTrainer) -> ReadBack:
    """Gather and compare the reports of all ranks. Raises: FailedError with each difference."""
    reports = gather(read_live(recipe, loaded, trainer))
    found = differences(recipe, loaded, reports)
    ranks = [{"local_bytes": r.local_bytes, "peak_growth_bytes": r.peak_growth_bytes} for r in reports]
    document = ReadBack(ranks, found, [] if recipe.launch.device == "cpu" else excessive_growth(recipe, reports), facts=reports[0])
    if found:
        problems = [
            Problem("readback-differs", sentence, hint="the run was stopped before step 1; readback.json has the full report")
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
    in_blocks, block = state_bits(recipe.training), optimizer_arguments(recipe.training).get(BLOCK, DEFAULT_BLOCK)
    for parameter, state in optimizer.state.items():
        wide = in_blocks and not blocks_fit(parameter, block)
        # Under `model.dtype: bf16` the parameters that the model's class keeps in fp32 have moments in fp32.
        by_dtype = of_fp32 if parameter.dtype == torch.float32 and not in_blocks else meaning["optimizer_state_dtype"]
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
