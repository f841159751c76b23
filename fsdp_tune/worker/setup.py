"""Puts the parts of a run together: data, model, trainer, checkpoints. Imported after the process group
exists."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState

from fsdp_tune.core.errors import failed_error
from fsdp_tune.core.units import parse_seconds
from fsdp_tune.data.account import mean_tokens
from fsdp_tune.data.preparation import Prepared
from fsdp_tune.data.row_order import RowOrder
from fsdp_tune.data.row_record import ROWS_FACT, RowRecord, record_of
from fsdp_tune.data.store import RowStore, evaluation_hashes
from fsdp_tune.data.stream.row_stream import open_stream
from fsdp_tune.data.stream.units import refuse_changed_files
from fsdp_tune.data.token_budget import budget_of
from fsdp_tune.data.tokenise.tokenizer import load_encoder
from fsdp_tune.model.internals.transformers_internals import attention_of
from fsdp_tune.model.kernels.attention import has_variable_lengths
from fsdp_tune.model.kernels.loss_in_head import loss_kernel_of
from fsdp_tune.model.loading.assemble import Loaded, load
from fsdp_tune.model.loading.model_config import model_config
from fsdp_tune.model.packed_mixers import packs
from fsdp_tune.model.shard.wrap import process_groups
from fsdp_tune.model.step import LossScale, auxiliary_loss_weight
from fsdp_tune.recipe.continued_adapter import without_adapter
from fsdp_tune.recipe.extensions import find_extension
from fsdp_tune.recipe.references import from_run
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value
from fsdp_tune.run.checkpoint_scores import kept_for_scores
from fsdp_tune.run.directory import TRAINER_STATE, Checkpoint, RunDir, checkpoint_to_start_from, run_of
from fsdp_tune.run.events import (
    CheckpointFailed,
    CheckpointSaved,
    FilesMoved,
    RotationFailed,
    TrackerFailed,
    TrainFinished,
)
from fsdp_tune.run.launch_files import LaunchRecord, ResumeRequest
from fsdp_tune.run.metrics_file import MetricsFile
from fsdp_tune.run.rotation import remove_leftovers
from fsdp_tune.worker.agreement import all_or_none, from_rank0
from fsdp_tune.worker.between_steps import ScoresBetweenSteps
from fsdp_tune.worker.callbacks import RunCallback
from fsdp_tune.worker.checkpoint import state as live_state
from fsdp_tune.worker.checkpoint.exchange import (
    ScatteredFiles,
    leads_machine,
    scattered_checkpoint,
    weights_to_first_machine,
)
from fsdp_tune.worker.checkpoint.restore import VISIBLE_SECONDS, agreed_checkpoint
from fsdp_tune.worker.checkpoint.save import Checkpointer, Saved, trainer_state_facts
from fsdp_tune.worker.checkpoint.state import Live
from fsdp_tune.worker.compile_events import CompileReport
from fsdp_tune.worker.observe import trackers
from fsdp_tune.worker.observe.expert_loads import ExpertLoads
from fsdp_tune.worker.observe.heartbeat import HeartbeatWriter
from fsdp_tune.worker.observe.profile import Profile
from fsdp_tune.worker.observe.step_phases import StepProgress
from fsdp_tune.worker.observe.step_shares import StepShares
from fsdp_tune.worker.observe.stragglers import Stragglers
from fsdp_tune.worker.observe.tracked_scores import SendScores
from fsdp_tune.worker.observe.tracker_ids import keep_id
from fsdp_tune.worker.prepared_trainer import Parts
from fsdp_tune.worker.rank import Rank, share_time_limit
from fsdp_tune.worker.readback.witness import Witness
from fsdp_tune.worker.rows.batches import ByTokens, Collator, MicroBatches
from fsdp_tune.worker.rows.streamed_rows import StreamedRows
from fsdp_tune.worker.rows.training_rows import PreparedRows, SourceTokens, TrainingRows
from fsdp_tune.worker.samples import Samples
from fsdp_tune.worker.step_observer import StepObserver
from fsdp_tune.worker.stop_request import StopRequest
from fsdp_tune.worker.trainer import FsdpTrainer
from fsdp_tune.worker.training_arguments import training_arguments


def build_trainer(
    run: RunDir,
    recipe: Recipe,
    rank: Rank,
    heartbeat: HeartbeatWriter,
    stop: StopRequest,
    say: Callable[[str], None],
    device_type: str,
) -> tuple[FsdpTrainer, RunCallback, Checkpoint | None]:
    """The trainer of this rank, its callback, and the checkpoint to resume from."""
    arguments = training_arguments(recipe, run)
    if leads_machine(is_scattered=recipe.has_own_directories):
        remove_leftovers(run)
    resume, request, scattered = _resume(run, recipe)
    prepared = Prepared.read(run.data_json)
    assert prepared is not None, "a run directory has it before its recipe.json"
    record = from_rank0(lambda: record_of(resume), "reading which rows were trained")
    prepared = prepared.continued(recipe.global_batch_size, resume.step if resume else 0, record)
    heartbeat.beat("loading the model")
    device = torch.device(device_type, rank.local_index) if device_type != "cpu" else torch.device("cpu")
    start = recipe
    if resume is not None:  # run and checkpoint have what only a start reads, and its files may be gone
        start = without_adapter(from_run(recipe, resume.path.parent, request.from_run))
    loaded = load(
        start, model_config(start), device, vocabulary=prepared.vocabulary_size, local_rank=rank.local_index
    )
    share_time_limit(process_groups(loaded.model, loaded.mesh))
    _start_from_checkpoint(recipe, loaded)
    collator = _collator(recipe, prepared, loaded)
    parts = Parts(
        recipe=recipe,
        loaded=loaded,
        rows=_training_rows(start, prepared, collator, rank, run),
        evals={label: prepared.store(path) for label, path in prepared.evals.items()},
        collator=collator,
        metrics=MetricsFile(run, resume_step=resume.step if resume else None, enabled=rank.is_first),
        heartbeat=heartbeat,
        scale=LossScale() if recipe.precision.mixed_precision == "fp16" else None,
        run=run,
        user_metrics={name: find_extension("metrics", name).load() for name in recipe.extensions.metrics},
    )
    witness = Witness(recipe.training.witness, say)
    callback = RunCallback(run, stop, say, witness, is_first=rank.is_first, saves=request.saves)
    observers = _observers(parts, witness, callback, device, rank, start, say)
    if recipe.evaluation.is_on and recipe.evaluation.when == "between_steps":
        # before the callback that times the steps
        observers.insert(observers.index(callback), ScoresBetweenSteps(stop, say))
    trainer = FsdpTrainer(parts, arguments, _early_stopping(recipe), observers)
    _set_up_trackers(trainer, run, recipe, say)
    trainer.create_optimizer()
    live = replace(_live(recipe, trainer), scattered=scattered)
    rows_so_far = prepared.record(recipe)
    trainer.checkpointer = _checkpointer(trainer, live, rows_so_far, rank, resume, device_type, say)
    return trainer, callback, resume


def _checkpointer(
    trainer: FsdpTrainer,
    live: Live,
    record: RowRecord,
    rank: Rank,
    resume: Checkpoint | None,
    device_type: str,
    say: Callable[[str], None],
) -> Checkpointer:
    parts = trainer.parts
    run, recipe, mesh = parts.run, parts.recipe, parts.loaded.mesh
    facts = trainer_state_facts(rank.world_size, list(mesh.shape) if mesh else [], run.recipe_digest())
    return Checkpointer(
        run=run,
        live=live,
        device_type=device_type,
        asynchronous=recipe.checkpoint.async_,
        keep=recipe.training.save_total_limit,
        facts=facts | {ROWS_FACT: record.as_dict()},
        report=_reporter(trainer, recipe, say),
        heartbeat=parts.heartbeat,
        last_step=resume.step if resume else None,
        is_scattered=recipe.has_own_directories,
        kept=partial(kept_for_scores, run, recipe),
    )


def _observers(
    parts: Parts,
    witness: Witness,
    callback: RunCallback,
    device: torch.device,
    rank: Rank,
    start: Recipe,
    say: Callable[[str], None],
) -> list[StepObserver]:
    """Return the observers of the steps in the order in which they add to a line. `start`: the recipe with
    the run's own inputs."""
    recipe, loaded, run = parts.recipe, parts.loaded, parts.run
    profiled = (LaunchRecord.read(run.launch_json) or LaunchRecord()).profile
    shares = StepShares(loaded.wrapped, device)
    return [
        shares,
        # hooks inside compiled layers are not called
        *([] if recipe.kernels.compile else [ExpertLoads(loaded.model, device)]),
        *([Profile(run, profiled, rank.index)] if profiled else []),
        *([CompileReport(say)] if recipe.kernels.compile else []),
        witness,
        callback,
        *([Samples(start)] if recipe.training.sample is not None else []),
        *([SendScores(run)] if recipe.evaluation.is_on and recipe.training.report_to else []),
        StepProgress(parts.heartbeat),
        Stragglers(shares, parts.metrics),
    ]


def _collator(recipe: Recipe, prepared: Prepared, loaded: Loaded) -> Collator:
    # A single source has the loss of the run, and Liger's kernel returns only the sum of the token losses.
    has_source_losses = len(recipe.data.train) > 1 and loss_kernel_of(loaded.wrapped) != "liger"
    return Collator(
        prepared.pad_token_id,
        recipe.data.pad_to_multiple_of,
        recipe.data.max_length,
        variable_lengths=packs(recipe) and has_variable_lengths(attention_of(loaded.model.config)),
        names_examples=auxiliary_loss_weight(loaded.model) > 0,
        sources=len(recipe.data.train) if has_source_losses else 0,
    )


def _live(recipe: Recipe, trainer: FsdpTrainer) -> Live:
    is_full = recipe.fsdp.state_dict_type == "FULL_STATE_DICT"
    return Live(trainer.wrapped, trainer.optimizer, full=is_full, trained_only=recipe.lora is not None)


def user_callbacks(recipe: Recipe) -> list[TrainerCallback]:
    """Make the callbacks that the recipe names: each entry point is a TrainerCallback class or a function
    that returns one."""
    made: list[TrainerCallback] = []
    for name in recipe.extensions.callbacks:
        extension = find_extension("callbacks", name)
        callback = extension.load()()
        if not isinstance(callback, TrainerCallback):
            raise failed_error(
                "extension-failed",
                f"{extension} returned {type(callback).__name__}, which is not a TrainerCallback",
            )
        made.append(callback)
    return made


def _start_from_checkpoint(recipe: Recipe, loaded: Loaded) -> None:
    """`model.name_or_path: RUN` or `RUN/checkpoint-N`: load weights only, resharded; optimizer and data start
    from the beginning."""
    start = recipe.model.name_or_path
    if start is None or run_of(Path(start)) is None:
        return

    def choose() -> Checkpoint:
        found = checkpoint_to_start_from(Path(start))
        if found is None:
            raise failed_error(
                "run-without-checkpoint",
                f"model.name_or_path: {start} has no complete checkpoint to start from",
            )
        return found

    chosen = from_rank0(choose, "choosing the weights to start from")
    live_state.load_model(Live(loaded.wrapped, None, full=False), chosen.path)


def _resume(run: RunDir, recipe: Recipe) -> tuple[Checkpoint | None, ResumeRequest, ScatteredFiles | None]:
    """The launcher's choice, agreed by all ranks; hashed here unless the launcher has just done so."""
    request = ResumeRequest.read(run.resume_json) or ResumeRequest()
    digests = recipe.checkpoint.verify == "digest" and not request.digests_checked
    if recipe.has_own_directories and request.resume_from is not None:
        checkpoint, files = scattered_checkpoint(Path(request.resume_from), digests=digests)
        return checkpoint, request, files
    wait_seconds = VISIBLE_SECONDS if recipe.launch.num_machines > 1 else 0.0
    return agreed_checkpoint(request.resume_from, digests=digests, wait_seconds=wait_seconds), request, None


def _training_rows(
    recipe: Recipe, prepared: Prepared, collator: Collator, rank: Rank, run: RunDir
) -> TrainingRows:
    store = prepared.training_store()
    if not recipe.data.streaming:
        sampler = _sampler(recipe, prepared.order(recipe, store), store, rank)
        return PreparedRows(store, sampler, collator, SourceTokens.of(prepared.report.inputs))
    hashes, means = evaluation_hashes(prepared.train), mean_tokens(prepared.report)
    stream = open_stream(recipe, load_encoder(recipe), prepared.unit_rows, hashes, means)
    stream = replace(stream, skipped=frozenset(each.origin for each in prepared.skipped))
    refuse_changed_files(prepared.stamps, stream.stamps())
    return StreamedRows(
        stream=stream,
        sample=store,
        collator=collator,
        data_rank=recipe.topology.data_rank(rank.index),
        data_size=recipe.data_size,
        counts=recipe.topology.counts_rows(rank.index),
        micro_batch=recipe.training.per_device_train_batch_size,
        accumulation=recipe.training.gradient_accumulation_steps or 1,
        max_steps=int(training_value(recipe.training, "max_steps")),
        bad_rows=run.path / f"bad_rows-{rank.index}.jsonl",
    )


def _sampler(recipe: Recipe, order: RowOrder, store: RowStore, rank: Rank) -> MicroBatches:
    budget = budget_of(recipe)
    return MicroBatches(
        order,
        data_rank=recipe.topology.data_rank(rank.index),
        data_size=recipe.data_size,
        micro_batch=recipe.training.per_device_train_batch_size,
        accumulation=recipe.training.gradient_accumulation_steps or 1,
        by_tokens=ByTokens(budget, store.lengths) if budget else None,
    )


def _early_stopping(recipe: Recipe) -> list[TrainerCallback]:
    stopping = recipe.training.early_stopping
    return [EarlyStoppingCallback(stopping.patience, stopping.threshold)] if stopping else []


def _set_up_trackers(trainer: FsdpTrainer, run: RunDir, recipe: Recipe, say: Callable[[str], None]) -> None:
    trackers.keep_mlflow_run(trainer, partial(keep_id, run, "mlflow", say=say))
    # A hanging tracker must be cut off before the supervisor considers the rank to hang.
    limit_seconds = min(trackers.LIMIT_SECONDS, parse_seconds(recipe.launch.hang_timeout) / 2)
    trackers.guard_trackers(trainer, _tracker_reporter(trainer, say), limit_seconds)


def _tracker_reporter(trainer: FsdpTrainer, say: Callable[[str], None]) -> Callable[[str], None]:
    def report(sentence: str) -> None:
        trainer.parts.metrics.event(TrackerFailed(trainer.state.global_step, sentence))
        say(f"WARNING: {sentence}")

    return report


def _reporter(trainer: FsdpTrainer, recipe: Recipe, say: Callable[[str], None]) -> Callable[[Saved], None]:
    def report(saved: Saved) -> None:
        if saved.error is None:
            trainer.lines.checkpoint_stall_seconds += saved.stall_seconds
            trainer.parts.metrics.event(
                CheckpointSaved(
                    saved.step,
                    seconds=saved.seconds,
                    stall_seconds=saved.stall_seconds,
                    size_bytes=saved.size_bytes,
                )
            )
            if saved.moved is not None:
                trainer.parts.metrics.event(FilesMoved(saved.step, saved.moved))
                say(f"WARNING: {saved.moved}")
            if saved.left is not None:
                trainer.parts.metrics.event(RotationFailed(saved.step, saved.left))
                say(f"WARNING: old checkpoints were not removed: {saved.left}")
            return
        message = saved.error.problems[0].message
        trainer.parts.metrics.event(CheckpointFailed(saved.step, message))
        say(f"WARNING: checkpoint-{saved.step} was NOT saved: {message}")
        if recipe.checkpoint.save_failure == "stop":
            raise saved.error

    return report


def is_at_end(trainer: FsdpTrainer, resume: Checkpoint, say: Callable[[str], None]) -> bool:
    """Return whether the run ended at this checkpoint (`ResumeRequest.ends_at`). The trainer then gets its
    state, and need not train."""
    request = ResumeRequest.read(trainer.parts.run.resume_json)
    if request is None or request.ends_at != resume.step:
        return False
    trainer.state = TrainerState.load_from_json(str(resume.path / TRAINER_STATE))
    trainer.parts.heartbeat.beat("saving", resume.step)
    say(f"the run has ended at step {resume.step}: its weights are brought to the first machine")
    return True


def close(trainer: FsdpTrainer, *, is_finished: bool) -> None:
    """Makes sure that the last step of a run that saves has a complete checkpoint; FailedError when it cannot
    be written.

    `is_finished`: whether the run ends here, and is merged next. With early stopping that is before its last
    step.
    """
    checkpointer = trainer.checkpointer
    checkpointer.wait()
    request = ResumeRequest.read(trainer.parts.run.resume_json)
    if request is not None and not request.saves:
        return
    if checkpointer.last_step != trainer.state.global_step:
        from fsdp_tune.worker.checkpoint.restore import trainer_state_json

        outcomes, report = list[Saved](), checkpointer.report

        def note(saved: Saved) -> None:
            outcomes.append(saved)
            if saved.error is None:  # one that fails ends the run here
                report(saved)

        checkpointer.report = note
        checkpointer.asynchronous = False
        state = trainer.state
        checkpointer.save(
            state.global_step,
            trainer_state_json(trainer),
            trainer.own_state(),
            best_step=state.best_global_step,
        )
        if outcomes[-1].error is not None:
            raise outcomes[-1].error
    if checkpointer.is_scattered and is_finished:
        _bring_weights(trainer)
    metrics = trainer.parts.metrics
    metrics.event(TrainFinished(trainer.state.global_step))
    metrics.close()
    all_or_none(lambda: _check_metrics(metrics, trainer.state.global_step), "writing metrics.jsonl")


def _bring_weights(trainer: FsdpTrainer) -> None:
    """Copy what a merge reads to the first machine: the weights of the last checkpoint, or of the best."""
    steps = {
        trainer.state.global_step,
        trainer.state.best_global_step if trainer.args.load_best_model_at_end else None,
    }
    with trainer.checkpointer.heartbeat.during("saving"):
        for step in sorted(step for step in steps if step is not None):
            weights_to_first_machine(trainer.checkpointer.run.checkpoint(step))


def _check_metrics(metrics: MetricsFile, step: int) -> None:
    if metrics.failure is not None:
        raise failed_error(
            "metrics-unwritable",
            f"metrics.jsonl cannot be written: {metrics.failure.strerror}; stopped after step "
            f"{step}, which is saved",
            hint="free space, or fix the disk; `--resume auto` continues from that step and writes the "
            "missing lines",
        )


def results(trainer: FsdpTrainer, started: float) -> dict[str, object]:
    """Return the facts of the outcome of a run. `started`: seconds since the epoch."""
    step = trainer.checkpointer.last_step
    return {
        "steps": trainer.state.global_step,
        "loss": trainer.lines.last_loss,
        "eval_loss": trainer.last_eval_loss,
        "tokens": trainer.lines.tokens,
        "checkpoint": str(trainer.checkpointer.run.checkpoint(step)) if step is not None else None,
        "seconds": time.time() - started,
    }
