"""Invariants that every run checks on itself (`training.witness`): before step 1, at the first update, and every N steps on request.

Exact are: which parameters the optimizer holds, generators, rows, recipe and learning rates of all ranks, gathered units, and checksums of
frozen parameters, replicas and buffers. A sample is: whether the update changed what it must change (`update_sample.py`). A difference
stops the run on every rank and names the parameter and the ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import TrainerControl, TrainerState, TrainingArguments

from fsdp_tune.core.topology import Topology
from fsdp_tune.model.internals.torch_internals import NON_PERSISTENT
from fsdp_tune.model.optim.optimizer import sums_need_fp32
from fsdp_tune.model.shard.gathered import gathered_units, units_of
from fsdp_tune.model.shard.local import local_part, plain_name
from fsdp_tune.recipe.schema.optimizers import STOCHASTIC, optimizer_arguments
from fsdp_tune.run.events import WitnessCost, Witnessed
from fsdp_tune.run.manifest import digest
from fsdp_tune.run.records import ReadBack
from fsdp_tune.worker.agreement import gather, stop_on
from fsdp_tune.worker.observe.step_phases import AttachedCallback
from fsdp_tune.worker.readback.trained import UpdateSample, adapter_gradients, adapters_without_gradient, parameters_without_gradient

GATHERED_STEPS = 3
"""The first steps of a run, at whose beginning no unit may be gathered."""
COST_STEPS = 100
"""After as many steps the witness's CPU time is written next to that of training."""


CHECKSUM_PIECE = 1021
"""Values that are hashed together: odd, and no multiple of the sizes at which values of buffers repeat (prime)."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a rank sends to the others before the first step or after the first update."""

    generators: dict[str, str] = field(default_factory=dict[str, str])
    """A digest of the state of each generator."""
    weights_seed: int | None = None
    """Of the initial weights; None where they were read."""
    rows: list[int] = field(default_factory=list[int])
    """Of the step, in the order of reading."""
    found: list[str] = field(default_factory=list[str])
    """Differences that the rank sees alone."""
    recipe: str = ""
    """A digest, as `parameter_names`."""
    parameter_names: str = ""
    rates: list[float] = field(default_factory=list[float])
    copies: dict[str, str] = field(default_factory=dict[str, str])
    """A digest of the tensors that some ranks must have alike, by these ranks."""


class Witness(AttachedCallback):
    """`when`: the value of `training.witness`. Generators are always compared. `say` prints a plain line on rank 0."""

    def __init__(self, when: Literal["first", "off"] | int, say: Callable[[str], None]) -> None:
        self._say = say
        self._is_on = self._is_due = when != "off"
        self._every_steps = when if isinstance(when, int) else None
        self._steps_begun = 0
        self._has_checked_gradients = False
        self._started_at_seconds = 0.0
        self._sample: UpdateSample | None = None
        self._frozen: dict[str, int] = {}
        self.cpu_seconds = 0.0
        self.report: dict[str, object] = {}

    # ---- Callbacks

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._steps_begun += 1
        if self._steps_begun > GATHERED_STEPS and not self._is_requested(state.global_step + 1):
            return
        with self._timed():
            if self._steps_begun == 1:
                self._started_at_seconds = time.thread_time()
                self._compare_start(state.global_step)
            elif self._is_on and (gathered := gathered_units(self._units)):
                self._stop([f"rank {dist.get_rank()}: {sentence}" for sentence in _of_gathered(gathered)], state.global_step)

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        checks_gradients = self._is_on and not self._has_checked_gradients
        takes_sample = self._is_due or self._is_requested(state.global_step + 1)
        norm = self.trainer.gate.norm
        if not (checks_gradients or takes_sample) or norm is None or not bool(torch.isfinite(norm)):
            return  # of a step that is left out, the gate may have removed all gradients (fp16)
        if checks_gradients:
            self._has_checked_gradients = True
            self._check_gradients()
        with self._timed():
            optimizer = self.trainer.live_optimizer
            if takes_sample and any(group["lr"] > 0 for group in optimizer.param_groups):
                stochastic = bool(optimizer_arguments(self.trainer.parts.recipe.training).get(STOCHASTIC, False))
                names = {parameter: name for name, parameter in self._parameters()}
                self._sample = UpdateSample(names, optimizer, stochastic=stochastic)

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if self._sample is None:
            return
        with self._timed():
            sample, self._sample, self._is_due = self._sample, None, False
            self._compare_update(sample, state.global_step)
        self.trainer.parts.metrics.event(Witnessed(state.global_step + 1, self.cpu_seconds))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if self._steps_begun == COST_STEPS and self._is_on:
            training = time.thread_time() - self._started_at_seconds
            self.trainer.parts.metrics.event(
                WitnessCost(state.global_step, cpu_seconds=self.cpu_seconds, training_cpu_seconds=training, steps=COST_STEPS)
            )

    # ---- What is compared

    def _compare_start(self, step: int) -> None:
        trainer = self.trainer
        facts = RankFacts(_generators(trainer.args.device), trainer.parts.loaded.weights_seed)
        if self._is_on:
            self._units = units_of(trainer.wrapped)
            self._frozen = self._checksums_of_frozen()
            facts = replace(
                facts,
                rows=[row for batch in trainer.batches for row in batch.row_ids],
                found=[*_of_gathered(gathered_units(self._units)), *self._unknown_to_optimizer()],
                recipe=digest(trainer.parts.recipe.on_all_machines.model_dump_json()),
                parameter_names=self._digest_of_names(),
                copies=self._copies(all_buffers=True),
            )
        every = gather(facts)
        self.report = {"generators": [each.generators for each in every]}
        found = generator_differences(every)
        if self._is_on:
            found += self._common_differences(every) + row_differences(
                every, trainer.parts.rows.rows_of_all_ranks(step), trainer.parts.recipe.topology
            )
        self._stop(found, step)

    def _check_gradients(self) -> None:
        """Warn of trained parameters without a gradient, such as sinks that a flash kernel does not differentiate, or of adapters.

        Raises: usage error if the adapters of a kind of module have none.
        """
        with self._timed():
            if self.trainer.parts.recipe.lora is None:
                own = [name for name, parameter in self._parameters() if parameter.requires_grad and parameter.grad is None]
                warning = parameters_without_gradient(gather(own))
            else:
                warning = adapters_without_gradient(gather(adapter_gradients(self.trainer.parts.loaded.model)))
        if warning is not None:
            self._say(f"WARNING: {warning}")
            if dist.get_rank() == 0:
                ReadBack.complete(self.trainer.parts.run.readback_json, warnings=[warning])

    def _compare_update(self, sample: UpdateSample, step: int) -> None:
        found = self._unknown_to_optimizer()
        found += [f"`{name}` has a gradient, and the optimizer did not change it" for name in sample.unchanged()]
        found += [f"`{name}` is frozen, and changed" for name, value in self._checksums_of_frozen().items() if self._frozen[name] != value]
        if sums_need_fp32(self.trainer.parts.recipe) and (narrow := sample.gradient_dtypes - {torch.float32}):
            found.append(f"gradients of micro-batches were added in {', '.join(map(str, narrow))}")
        rates = [float(group["lr"]) for group in self.trainer.live_optimizer.param_groups]
        copies = self._copies(all_buffers=False)
        every = gather(RankFacts(found=found, rates=rates, parameter_names=self._digest_of_names(), copies=copies))
        self._stop(self._common_differences(every), step)

    def _common_differences(self, every: list[RankFacts]) -> list[str]:
        """Collective if replicas differ: only then is the checksum of every tensor sent."""
        by_sentence: dict[str, list[int]] = defaultdict(list)
        for rank, facts in enumerate(every):
            for sentence in facts.found:
                by_sentence[sentence].append(rank)
        found = [f"{_ranks(ranks)}: {sentence}" for sentence, ranks in by_sentence.items()]
        for meaning, values in (
            ("recipe", [facts.recipe for facts in every]),
            ("learning rates", [facts.rates for facts in every]),
            ("parameters", [facts.parameter_names for facts in every]),
        ):
            found += [f"the {meaning} of {_ranks(ranks)} differ from those of rank 0" for ranks in _other_than_first(values)]
        if _copies_differ(every):
            found += copy_differences(gather(self._checksums))
        return found

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((plain_name(name), parameter) for name, parameter in self.trainer.wrapped.named_parameters())

    def _unknown_to_optimizer(self) -> list[str]:
        known = {id(parameter) for group in self.trainer.live_optimizer.param_groups for parameter in group["params"]}
        trained = {id(parameter): name for name, parameter in self._parameters() if parameter.requires_grad}
        found = [f"the optimizer does not hold `{name}`" for each, name in trained.items() if each not in known]
        stale = len(known - trained.keys())
        return found + ([f"the optimizer holds {stale} tensors that are not parameters of the model"] if stale else [])

    def _checksums_of_frozen(self) -> dict[str, int]:
        return checksums({name: parameter for name, parameter in self._parameters() if not parameter.requires_grad})

    def _digest_of_names(self) -> str:
        return digest(repr([name for name, _ in self._parameters()]))

    def _copies(self, *, all_buffers: bool) -> dict[str, str]:
        """Return digests of replicated tensors; `_checksums` keeps their parts, by the ranks that must have equal copies.

        Buffers that are in no checkpoint may follow the length of a rank's rows (dynamic RoPE), so that after a step they may differ.
        """
        wrapped = self.trainer.wrapped
        same: dict[str, dict[str, torch.Tensor]] = {"all": {}}
        mesh = self.trainer.parts.loaded.mesh
        replicas = f"shard {mesh.get_local_rank(mesh.ndim - 1)}" if mesh is not None and mesh.ndim > 1 else None
        for name, parameter in self._parameters():
            if isinstance(parameter, DTensor):
                if replicas is not None:
                    same.setdefault(replicas, {})[name] = parameter
            elif not isinstance(wrapped, FullyShardedDataParallel):
                same["all"][name] = parameter
        kept = _persistent_buffers(wrapped)
        same["all"] |= {plain_name(name): buffer for name, buffer in wrapped.named_buffers() if all_buffers or name in kept}
        self._checksums = {ranks: checksums(tensors) for ranks, tensors in same.items()} if dist.get_world_size() > 1 else {}
        return {ranks: digest(repr(sorted(sums.items()))) for ranks, sums in self._checksums.items()}

    # ---- How

    def _is_requested(self, step: int) -> bool:
        return self._every_steps is not None and step % self._every_steps == 0

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.thread_time()
        try:
            yield
        finally:
            self.cpu_seconds += time.thread_time() - started

    def _stop(self, found: list[str], step: int) -> None:
        stop_on(found, step, self.trainer.parts.run, self.report)


# ---- Comparisons, from the facts of all ranks


def generator_differences(every: list[RankFacts]) -> list[str]:
    """Compare the generators of ranks: dropout masks must differ, and the seed of the initial weights must not."""
    found: list[str] = []
    for kind in every[0].generators:
        by_state: dict[str, list[int]] = defaultdict(list)
        for rank, facts in enumerate(every):
            by_state[facts.generators[kind]].append(rank)
        found += [f"the {kind} generators of {_ranks(ranks)} are in the same state" for ranks in by_state.values() if len(ranks) > 1]
    seeds = {facts.weights_seed for facts in every if facts.weights_seed is not None}
    if len(seeds) > 1:
        found.append(f"initial weights were drawn from different seeds: {', '.join(map(str, sorted(seeds)))}")
    return found


def row_differences(every: list[RankFacts], expected: Iterable[int], topology: Topology) -> list[str]:
    """Check that the ranks together read the rows of the step's global batch, each once, or once on each rank of a group that shares it."""
    wanted, first = sorted(expected), 0
    owners: dict[int, list[int]] = defaultdict(list)
    for rank, facts in enumerate(every):
        if topology.counts_rows(rank):
            first = rank
            for row in facts.rows:
                owners[row].append(rank)
        elif facts.rows != every[first].rows:
            return [f"rank {rank} reads other rows than rank {first}, and they share their rows"]
    if sorted(row for row, ranks in owners.items() for _ in ranks) == wanted:
        return []
    for row, ranks in owners.items():
        if row not in wanted:
            return [f"row {row} of {_ranks(ranks)} is not in the global batch"]
        if len(ranks) > 1:
            return [f"row {row} is read {len(ranks)} times, by {_ranks(ranks)}"]
    return [f"row {next(row for row in wanted if row not in owners)} of the global batch is read by no rank"]


def copy_differences(every: list[dict[str, dict[str, int]]]) -> list[str]:
    """Return a message for each tensor that differs between ranks that must have equal copies, from each rank's checksums."""
    found: list[str] = []
    for key in dict.fromkeys(key for sums in every for key in sums):
        holders = [(rank, sums[key]) for rank, sums in enumerate(every) if key in sums]
        first_rank, first = holders[0]
        for name in first:
            others = [rank for rank, sums in holders if sums.get(name) != first[name]]
            if others:
                found.append(f"`{name}` of {_ranks(others)} differs from that of rank {first_rank}, which must be equal")
    return found


def _copies_differ(every: list[RankFacts]) -> bool:
    digests: dict[str, set[str]] = defaultdict(set)
    for facts in every:
        for key, checksum in facts.copies.items():
            digests[key].add(checksum)
    return any(len(found) > 1 for found in digests.values())


def _other_than_first(values: Iterable[object]) -> list[list[int]]:
    first, *rest = values
    others = [rank for rank, value in enumerate(rest, start=1) if value != first]
    return [others] if others else []


def _of_gathered(names: Sequence[str]) -> list[str]:
    more = f" and {len(names) - 1} more units" if len(names) > 1 else ""
    return [f"`{names[0]}`{more} gathered at the start of the step"] if names else []


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


# ---- Digests


def checksums(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return name → a checksum over the local values of this rank, computed on their device without a copy."""
    names, values = [], []
    for name, tensor in tensors.items():
        local = local_part(tensor.detach())
        if local.numel():
            names.append(name)
            values.append(_checksum(local.reshape(-1)))
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for index, value in enumerate(values):
        by_device[value.device].append(index)
    numbers = [0] * len(values)
    for indices in by_device.values():
        for index, number in zip(indices, torch.stack([values[index] for index in indices]).tolist(), strict=True):
            numbers[index] = number
    return dict(zip(names, numbers, strict=True))


def _checksum(flat: torch.Tensor) -> torch.Tensor:
    """Return a scalar int64 that depends on each value and, beyond `CHECKSUM_PIECE` values, on its position.

    `torch.hash_tensor` is the XOR of all values: of an even number of equal ones (a norm's weights, a bias) it is always zero. So it is
    taken over pieces of an odd length, which are then added with a weight each.
    """
    values = flat.view(torch.uint8) if flat.element_size() == 1 else flat
    whole = values.numel() // CHECKSUM_PIECE * CHECKSUM_PIECE
    rest = values[whole:]
    pieces = [torch.hash_tensor(values[:whole].view(-1, CHECKSUM_PIECE), 1)]
    pieces += [torch.hash_tensor(piece).reshape(1) for piece in (rest[:-1], rest[-1:]) if piece.numel()]
    hashes = torch.cat([piece.view(torch.int64) for piece in pieces])
    return (hashes * torch.arange(1, 2 * len(hashes), 2, device=hashes.device)).sum()


def _generators(device: torch.device) -> dict[str, str]:
    states = {"CPU": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = getattr(torch, device.type).get_rng_state(device)
    return {kind: digest(state.numpy().tobytes()) for kind, state in states.items()}


def _persistent_buffers(model: nn.Module) -> set[str]:
    """Return the names of the buffers that a checkpoint contains."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, _ in module.named_buffers(recurse=False)
        if name not in NON_PERSISTENT.of(module)
    }
