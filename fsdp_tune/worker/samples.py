"""Generate text with the model in training every `training.sample.every` steps, on all ranks together."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from transformers import TrainerControl, TrainerState, TrainingArguments

from fsdp_tune.data.tokenise.sample_prompts import sample_prompts
from fsdp_tune.data.tokenise.tokenizer import load_encoder
from fsdp_tune.model.generate import end_ids_of, generate
from fsdp_tune.model.shard.gathered import outside_step
from fsdp_tune.model.step import compute_context
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.event_parts import GeneratedSample
from fsdp_tune.run.events import SamplesGenerated
from fsdp_tune.worker.agreement import gather
from fsdp_tune.worker.observe.step_phases import AttachedCallback


class Samples(AttachedCallback):
    """Generate after each N-th step and the last one, and write the event `samples`.

    The prompts are split over the ranks. Every rank runs as many forwards as the one that generates longest,
    since each forward gathers the units. Generators are restored, so training continues as if nothing had
    been generated.
    """

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.training.sample is not None
        self._recipe, self._sample = recipe, recipe.training.sample
        self._encoder = load_encoder(recipe)
        self._prompts = sample_prompts(recipe, self._encoder)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        step, is_last = state.global_step, state.global_step >= state.max_steps
        if not is_last and (step % self._sample.every or control.should_training_stop):
            return  # after a stop signal there may be no time
        parts = self.trainer.parts
        started = time.monotonic()
        with parts.heartbeat.during("sampling", step):
            answers = self._generate(args.device)
        seconds = time.monotonic() - started
        self.trainer.lines.leave_out(seconds)
        samples = [
            GeneratedSample(self._encoder.decode(prompt), text)
            for prompt, text in zip(self._prompts, answers, strict=True)
        ]
        parts.metrics.event(SamplesGenerated(step, seconds, samples))

    def _generate(self, device: torch.device) -> list[str]:
        """Return the text that follows each prompt."""
        wrapped, topology = self.trainer.wrapped, self._recipe.topology
        rank, size = topology.data_rank(dist.get_rank()), topology.data_size
        own = {index: self._prompts[index] for index in range(rank, len(self._prompts), size)}
        # a rank without a prompt takes part in the forwards
        prompts = list(own.values()) or self._prompts[:1]
        model = self.trainer.parts.loaded.model
        ends = {self._encoder.eos_id, *end_ids_of(model)}
        wrapped.eval()
        with outside_step(wrapped, device), compute_context(self._recipe, device.type), self._uncompiled():
            new = generate(
                wrapped,
                prompts,
                max_new_tokens=self._sample.max_new_tokens,
                end_ids=ends,
                pad_id=self._encoder.pad_id,
                device=device,
                all_finished=_all_ranks,
            )
        wrapped.train()
        found = {
            index: tokens
            for ranks in gather(dict(zip(own, new, strict=False)))
            for index, tokens in ranks.items()
        }
        return [
            self._encoder.decode([token for token in found[index] if token not in ends])
            for index in sorted(found)
        ]

    def _uncompiled(self) -> AbstractContextManager[None]:
        """Run compiled layers uncompiled: each length of the cache would be compiled again."""
        return torch.compiler.set_stance("force_eager") if self._recipe.kernels.compile else nullcontext()


def _all_ranks(is_finished: bool) -> bool:  # noqa: FBT001  a callback of `generate`
    unfinished = torch.tensor(int(not is_finished))
    dist.all_reduce(unfinished, op=dist.ReduceOp.MAX)
    return not unfinished.item()
