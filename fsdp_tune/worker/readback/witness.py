"""Invariants that every run checks on itself (`training.witness`): before step 1, at the first update, and
every N steps on request.

Exact are: which parameters the optimizer holds, generators, rows, recipe and learning rates of all ranks,
gathered units, and checksums of frozen parameters, replicas and buffers. A sample is: whether the update
changed what it must change (`updates.py`). A difference stops the run on every rank and names the
parameter and the ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import TrainerControl, TrainerState, TrainingArguments

from fsdp_tune.model.internals.torch_internals import NON_PERSISTENT
from fsdp_tune.model.optim.optimizer import sums_need_fp32
from fsdp_tune.model.shard.gathered import gathered_units, units_of
from fsdp_tune.model.shard.local import plain_name
from fsdp_tune.recipe.schema.optimizers import STOCHASTIC, optimizer_arguments
from fsdp_tune.run.events import WitnessCost, Witnessed
from fsdp_tune.run.manifest import digest
from fsdp_tune.run.records import ReadBack
from fsdp_tune.worker.agreement import gather, stop_on
from fsdp_tune.worker.observe.step_phases import AttachedCallback
from fsdp_tune.worker.readback.checksums import checksums
from fsdp_tune.worker.readback.missing_gradients import (
    adapter_gradients,
    adapters_without_gradient,
    parameters_without_gradient,
)
from fsdp_tune.worker.readback.rank_facts import (
    RankFacts,
    copies_differ,
    copy_differences,
    generator_differences,
    named_ranks,
    other_than_first,
    row_differences,
)
from fsdp_tune.worker.readback.updates import UpdateSample

GATHERED_STEPS = 3
"""The first steps of a run, at whose beginning no unit may be gathered."""
COST_STEPS = 100
"""After as many steps the witness's CPU time is written next to that of training."""


class Witness(AttachedCallback):
    """`when`: the value of `training.witness`. Generators are always compared. `say` prints a plain line on
    rank 0."""

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

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._steps_begun += 1
        if self._steps_begun > GATHERED_STEPS and not self._is_requested(state.global_step + 1):
            return
        with self._timed():
            if self._steps_begun == 1:
                self._started_at_seconds = time.thread_time()
                self._compare_start(state.global_step)
            elif self._is_on and (gathered := gathered_units(self._units)):
                self._stop(
                    [f"rank {dist.get_rank()}: {sentence}" for sentence in _of_gathered(gathered)],
                    state.global_step,
                )

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
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
                stochastic = bool(
                    optimizer_arguments(self.trainer.parts.recipe.training).get(STOCHASTIC, False)
                )
                names = {parameter: name for name, parameter in self._parameters()}
                self._sample = UpdateSample(names, optimizer, stochastic=stochastic)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self._sample is None:
            return
        with self._timed():
            sample, self._sample, self._is_due = self._sample, None, False
            self._compare_update(sample, state.global_step)
        self.trainer.parts.metrics.event(Witnessed(state.global_step + 1, self.cpu_seconds))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self._steps_begun == COST_STEPS and self._is_on:
            training = time.thread_time() - self._started_at_seconds
            self.trainer.parts.metrics.event(
                WitnessCost(
                    state.global_step,
                    cpu_seconds=self.cpu_seconds,
                    training_cpu_seconds=training,
                    steps=COST_STEPS,
                )
            )

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
        """Warn of trained parameters without a gradient, such as sinks that a flash kernel does not
        differentiate, or of adapters.

        Raises: usage error if the adapters of a kind of module have none.
        """
        with self._timed():
            if self.trainer.parts.recipe.lora is None:
                own = [
                    name
                    for name, parameter in self._parameters()
                    if parameter.requires_grad and parameter.grad is None
                ]
                warning = parameters_without_gradient(gather(own))
            else:
                warning = adapters_without_gradient(
                    gather(adapter_gradients(self.trainer.parts.loaded.model))
                )
        if warning is not None:
            self._say(f"WARNING: {warning}")
            if dist.get_rank() == 0:
                ReadBack.complete(self.trainer.parts.run.readback_json, warnings=[warning])

    def _compare_update(self, sample: UpdateSample, step: int) -> None:
        found = self._unknown_to_optimizer()
        found += [
            f"`{name}` has a gradient, and the optimizer did not change it" for name in sample.unchanged()
        ]
        found += [
            f"`{name}` is frozen, and changed"
            for name, value in self._checksums_of_frozen().items()
            if self._frozen[name] != value
        ]
        if sums_need_fp32(self.trainer.parts.recipe) and (narrow := sample.gradient_dtypes - {torch.float32}):
            found.append(f"gradients of micro-batches were added in {', '.join(map(str, narrow))}")
        rates = [float(group["lr"]) for group in self.trainer.live_optimizer.param_groups]
        copies = self._copies(all_buffers=False)
        every = gather(
            RankFacts(found=found, rates=rates, parameter_names=self._digest_of_names(), copies=copies)
        )
        self._stop(self._common_differences(every), step)

    def _common_differences(self, every: list[RankFacts]) -> list[str]:
        """Collective if replicas differ: only then is the checksum of every tensor sent."""
        by_sentence: dict[str, list[int]] = defaultdict(list)
        for rank, facts in enumerate(every):
            for sentence in facts.found:
                by_sentence[sentence].append(rank)
        found = [f"{named_ranks(ranks)}: {sentence}" for sentence, ranks in by_sentence.items()]
        for meaning, values in (
            ("recipe", [facts.recipe for facts in every]),
            ("learning rates", [facts.rates for facts in every]),
            ("parameters", [facts.parameter_names for facts in every]),
        ):
            found += [
                f"the {meaning} of {named_ranks(ranks)} differ from those of rank 0"
                for ranks in other_than_first(values)
            ]
        if copies_differ(every):
            found += copy_differences(gather(self._checksums))
        return found

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((plain_name(name), parameter) for name, parameter in self.trainer.wrapped.named_parameters())

    def _unknown_to_optimizer(self) -> list[str]:
        known = {
            id(parameter)
            for group in self.trainer.live_optimizer.param_groups
            for parameter in group["params"]
        }
        trained = {id(parameter): name for name, parameter in self._parameters() if parameter.requires_grad}
        found = [
            f"the optimizer does not hold `{name}`" for each, name in trained.items() if each not in known
        ]
        stale = len(known - trained.keys())
        return found + (
            [f"the optimizer holds {stale} tensors that are not parameters of the model"] if stale else []
        )

    def _checksums_of_frozen(self) -> dict[str, int]:
        return checksums(
            {name: parameter for name, parameter in self._parameters() if not parameter.requires_grad}
        )

    def _digest_of_names(self) -> str:
        return digest(repr([name for name, _ in self._parameters()]))

    def _copies(self, *, all_buffers: bool) -> dict[str, str]:
        """Return digests of replicated tensors; `_checksums` keeps their parts, by the ranks that must have
        equal copies.

        Buffers that are in no checkpoint may follow the length of a rank's rows (dynamic RoPE), so that after
        a step they may differ.
        """
        wrapped = self.trainer.wrapped
        same: dict[str, dict[str, torch.Tensor]] = {"all": {}}
        mesh = self.trainer.parts.loaded.mesh
        replicas = (
            f"shard {mesh.get_local_rank(mesh.ndim - 1)}" if mesh is not None and mesh.ndim > 1 else None
        )
        for name, parameter in self._parameters():
            if isinstance(parameter, DTensor):
                if replicas is not None:
                    same.setdefault(replicas, {})[name] = parameter
            elif not isinstance(wrapped, FullyShardedDataParallel):
                same["all"][name] = parameter
        kept = _persistent_buffers(wrapped)
        same["all"] |= {
            plain_name(name): buffer
            for name, buffer in wrapped.named_buffers()
            if all_buffers or name in kept
        }
        self._checksums = (
            {ranks: checksums(tensors) for ranks, tensors in same.items()}
            if dist.get_world_size() > 1
            else {}
        )
        return {ranks: digest(repr(sorted(sums.items()))) for ranks, sums in self._checksums.items()}

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


def _of_gathered(names: Sequence[str]) -> list[str]:
    more = f" and {len(names) - 1} more units" if len(names) > 1 else ""
    return [f"`{names[0]}`{more} gathered at the start of the step"] if names else []


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
