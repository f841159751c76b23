"""Work between the Trainer's steps: the read-back before the first, the vote on stopping, the probe, samples
of text, the last save."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from transformers import TrainerControl, TrainerState, TrainingArguments

from fsdp_tune.core.errors import ExitReason, failed_error
from fsdp_tune.model.shard.local import bare_class
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.events import CheckpointProbed, FirstStep, Stopping, TrainStarted
from fsdp_tune.run.records import LiveState, ReadBack
from fsdp_tune.worker.agreement import StopVote, gather
from fsdp_tune.worker.checkpoint.restore import trainer_state_json
from fsdp_tune.worker.observe.startup_phases import startup_seconds
from fsdp_tune.worker.observe.step_phases import AttachedCallback
from fsdp_tune.worker.readback.isolation import (
    Deviations,
    allowed_deviation,
    deviations,
    not_causal,
    not_isolated,
    not_shareable,
    packed_row,
    rows_to_check,
)
from fsdp_tune.worker.readback.report import (
    ReadBackError,
    optimizer_state_difference,
    optimizer_state_kinds,
    read_back,
)
from fsdp_tune.worker.readback.trained import gathered_difference
from fsdp_tune.worker.readback.witness import Witness
from fsdp_tune.worker.stop_request import SAVE_AND_FAIL, STOP_REASONS, StopRequest, seconds_to_stop

RECENT_STEPS = 50
"""The slowest of these is the time that a step may take."""


class RunCallback(AttachedCallback):
    """`say` prints a plain line on rank 0."""

    def __init__(
        self,
        run: RunDir,
        stop_request: StopRequest,
        say: Callable[[str], None],
        witness: Witness,
        *,
        is_first: bool,
        saves: bool,
    ) -> None:
        self._run, self._stop_request, self._say, self._witness, self._is_first = (
            run,
            stop_request,
            say,
            witness,
            is_first,
        )
        self._saves = saves
        self._vote = StopVote()
        self._step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._evaluation_seconds = 0.0
        self._step_began = time.monotonic()
        self._first_step = True
        self.stopped: ExitReason | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        trainer = self.trainer
        trainer.parts.heartbeat.beat("reading back", state.global_step)
        try:
            document = read_back(trainer.parts.recipe, trainer.parts.loaded, trainer)
        except ReadBackError as error:
            if self._is_first:
                error.document.write(self._run.readback_json)
            raise
        found = self._check_what_tokens_see()
        document = replace(
            document, causality_deviation=found and found.later, packing_deviation=found and found.packed
        )
        if self._is_first:
            document.write(self._run.readback_json)
        for line in [
            *_table(document.facts),
            *(f"WARNING: host memory: {warning}" for warning in document.warnings),
        ]:
            self._say(line)
        trainer.parts.metrics.event(TrainStarted(state.global_step, state.max_steps))
        self._stop_request.training = True
        trainer.parts.heartbeat.mark("training")
        self._step_began = time.monotonic()

    def _check_what_tokens_see(self) -> Deviations | None:
        """Return None if no row has two tokens. Raises: FailedError if tokens see later ones, other packed
        examples, or fewer tokens of a row that ranks share."""
        parts = self.trainer.parts
        recipe, model = parts.recipe, parts.loaded.model
        if not (rows := rows_to_check(parts.rows.sample, parts.rows.micro_batch)):
            return None
        device, complete = self.trainer.args.device, packed_row(parts.rows.sample)
        found = deviations(recipe, self.trainer.wrapped, rows, parts.collator, device, complete)
        every, allowed, name = gather(found), allowed_deviation(recipe), bare_class(model).__name__
        if (later := max(each.later for each in every)) > allowed:
            raise not_causal(later, name, model.config)
        if (packed := max(each.packed or 0.0 for each in every)) > allowed:
            raise not_isolated(packed, name, model.config)
        errors = [error for each in every if (error := not_shareable(each, recipe, model)) is not None]
        if errors:
            raise errors[0]
        return found

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        trainer = self.trainer
        seconds = time.monotonic() - self._step_began
        if self._first_step:  # it compiles and allocates, so its time counts only until there is another
            self._first_step = False
            self._after_first_step()
        else:
            self._step_seconds.append(seconds)
        trainer.checkpointer.poll()
        slowest = max(self._step_seconds, default=seconds)
        self._stop_request.reserve_seconds = seconds_to_stop(
            slowest, self._evaluation_seconds, trainer.checkpointer.longest_seconds
        )
        code = self._vote.exchange(
            self._stop_request.code() if trainer.parts.metrics.failure is None else SAVE_AND_FAIL
        )
        last = state.global_step >= state.max_steps
        if code and not last:
            self.stopped = STOP_REASONS[code]
            control.should_training_stop = True
            control.should_save = True
            # No line but a regular one: the sums are in the checkpoint, so the resumed run writes the lines
            # of an uninterrupted one. No evaluation: the sender of the signal may not wait for it, and the
            # resumed run makes it up.
            control.should_evaluate = False
            trainer.parts.metrics.event(Stopping(state.global_step, self.stopped.value))
            self._say(f"stopping after step {state.global_step} ({self.stopped.value}): saving first")
        if last:
            control.should_save = control.should_log = True
            control.should_evaluate = bool(trainer.parts.evals) and args.eval_strategy != "no"
        control.should_save = control.should_save and self._saves
        self._step_began = time.monotonic()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Cancel the requests of a stopped or finished run: the Trainer also calls this when it leaves an
        epoch early."""
        if control.should_training_stop or state.global_step >= state.max_steps:
            control.should_log = control.should_evaluate = control.should_save = False
        control.should_save = control.should_save and self._saves

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        now = time.monotonic()
        self._evaluation_seconds, self._step_began = (
            max(self._evaluation_seconds, now - self._step_began),
            now,
        )

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._step_began = time.monotonic()

    def _after_first_step(self) -> None:
        trainer = self.trainer
        recipe, loaded = trainer.parts.recipe, trainer.parts.loaded
        optimizer = trainer.live_optimizer
        difference = optimizer_state_difference(recipe, optimizer) or gathered_difference(recipe, loaded)
        if difference is not None:
            hint = f"the run was stopped after step {trainer.state.global_step}"
            raise failed_error("readback-differs", difference, hint=hint)
        if self._is_first:
            moments = optimizer_state_kinds(optimizer)
            ReadBack.complete(
                self._run.readback_json, optimizer_state_bytes=moments, witness=self._witness.report
            )
        heartbeat = trainer.parts.heartbeat
        heartbeat.beat("training", trainer.state.global_step)
        trainer.parts.metrics.event(FirstStep(trainer.state.global_step, startup_seconds(heartbeat)))
        if trainer.parts.recipe.checkpoint.probe:
            with heartbeat.during("probing a save", trainer.state.global_step):
                seconds = trainer.checkpointer.probe(trainer_state_json(trainer), trainer.own_state())
            trainer.parts.metrics.event(CheckpointProbed(trainer.state.global_step, seconds))
            trainer.lines.leave_out(seconds)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        logs = logs or {}
        if "loss" in logs:
            rate = f"{logs['tokens_per_second_per_device']:.0f} tokens/s/device"
            norm = logs.get("grad_norm")
            norm_text = f"grad norm {norm:.3f}" if norm is not None else "grad norm -"
            self._say(
                f"step {state.global_step}/{state.max_steps}  loss {logs['loss']:.4f}  {norm_text}  "
                f"lr {logs['learning_rate']:.2e}  {rate}"
            )
        elif "eval_loss" in logs:
            self._say(f"step {state.global_step}/{state.max_steps}  eval loss {logs['eval_loss']:.4f}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._vote.finish()


def _table(live: LiveState) -> list[str]:
    """Format the facts of the read-back as a few plain lines."""
    placement = ", ".join(live.placements) or "replicated"
    mesh = "×".join(map(str, live.mesh)) or "no mesh"
    kinds = f"activation checkpointing {live.activation_checkpointing} ({live.recomputed_layers} layers)"
    dtypes = f"parameters {live.parameter_dtype}, compute {live.compute_dtype}, reduce {live.reduce_dtype}"
    fp8 = live.fp8
    how = f"{', '.join(fp8.scales)} scales{', emulated' if fp8.emulated == [True] else ''}"
    in_fp8 = [
        f"read back: {fp8.linears} Linears compute in fp8 ({how}), {fp8.gathered} weights are gathered in it"
    ]
    emulated = [
        *live.quantised_training.weights,
        *(f"inputs {each}" for each in live.quantised_training.inputs),
    ]
    return [
        f"read back: {live.wrapper}, {live.sharded} sharded tensors in {len(live.units)} units, "
        f"{placement} over {mesh}, {dtypes}",
        f"read back: {live.trained_parameters:,} of {live.parameters:,} parameters trained, "
        f"attention {live.attention}, {kinds}, global batch {live.global_batch_size}",
        *(
            [f"read back: {live.expert_group} ranks divide the experts of each layer"]
            if live.expert_group != 1
            else []
        ),
        *(in_fp8 if fp8.linears else []),
        *(
            [
                f"read back: {sum(live.quantised_training.weights.values())} linear layers emulate "
                f"{', '.join(emulated)}"
            ]
            if emulated
            else []
        ),
    ]
