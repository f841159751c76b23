"""One rank, from the run directory to its outcome. Reads top to bottom: join the group, load, train, save,
write the outcome."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_tune.core.clocks import seconds_since_boot
from fsdp_tune.core.devices import lost_devices
from fsdp_tune.core.errors import EXIT_CODE_OF_REASON, ExitCode, ExitReason, FsdpTuneError, Problem
from fsdp_tune.core.gpu_failures import device_failure, device_fault
from fsdp_tune.core.library_errors import PEER_LOST, as_os_error, typed_line
from fsdp_tune.core.refused_variables import find_refusal
from fsdp_tune.core.units import parse_seconds
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.held_directory import HeldDirectory
from fsdp_tune.run.launch_files import LaunchRecord
from fsdp_tune.run.rank_files import LAUNCH_VARIABLE, Outcome
from fsdp_tune.worker.observe.flight_recorder import dump
from fsdp_tune.worker.observe.heartbeat import HeartbeatWriter
from fsdp_tune.worker.observe.tracker_ids import continue_tracker_runs
from fsdp_tune.worker.rank import Rank, configure_accelerate, start_process_group
from fsdp_tune.worker.stop_request import (
    StoppedEarly,
    StopRequest,
    end_loader_processes,
    forget_loader_processes,
)

if TYPE_CHECKING:
    from fsdp_tune.worker.trainer import FsdpTrainer

OUTCOME_SECONDS = 5.0
"""Time for which a rank tries to write its outcome to a disk that refuses it."""


def run_rank(
    run: RunDir,
    recipe: Recipe,
    rank: Rank,
    say: Callable[[str], None],
    started: float,
    waited: Mapping[str, float] | None = None,
) -> Outcome:
    """Train, and turn any end into an outcome. Writes the outcome file, and a traceback into the log of the
    rank.

    `waited`: seconds of each phase before the run directory was complete, of a rank that started early.
    """
    run = RunDir(run.path, HeldDirectory(run.path))  # open until this process ends
    heartbeat = _heartbeat(run, recipe, rank)
    heartbeat.count_before(waited or {})
    stop_request = StopRequest(_deadline(run, recipe, started))
    holder: list[FsdpTrainer] = []
    trained: Outcome | None = None
    try:
        try:
            stop_request.install()
            heartbeat.start()
            heartbeat.beat("starting", 0)
            outcome = trained = _train(run, recipe, rank, heartbeat, stop_request, say, started, holder)
        finally:
            forget_loader_processes()
    except StoppedEarly as stop:
        outcome = Outcome(EXIT_CODE_OF_REASON[stop.reason], stop.reason)
    except BaseException as error:  # noqa: BLE001  the outcome file reports any end of this process
        # one that has trained to its end has failed by nothing that came after it
        outcome = trained or _outcome_of(error, recipe, heartbeat, holder[0] if holder else None)
        with contextlib.suppress(OSError):  # the log may be on a full disk; the outcome has the traceback too
            sys.stderr.write(outcome.traceback or "")
    outcome = replace(
        outcome,
        rank=rank.index,
        step=heartbeat.step,
        time=time.time(),
        launch=os.environ.get(LAUNCH_VARIABLE, ""),
    )
    stop_request.end()
    end_loader_processes()
    heartbeat.close()
    # before the last beat, which would replace that of the rank that has taken its place
    if heartbeat.is_superseded():
        return outcome
    with contextlib.suppress(OSError, FsdpTuneError):
        heartbeat.beat("finished" if outcome.exit_code == 0 else "failed")
    _write_outcome(run, outcome)
    return outcome


def _write_outcome(run: RunDir, outcome: Outcome) -> None:
    """Write the outcome file. A disk that refuses it may be full for a moment only, and the launcher knows no
    other reason of the end.

    Without the file, also where the run directory is gone, the launcher only has the exit code.
    """
    deadline = time.monotonic() + OUTCOME_SECONDS
    while run.logs.is_dir():
        try:
            outcome.write(run.rank_outcome(outcome.rank))
            return
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.2)


def _heartbeat(run: RunDir, recipe: Recipe, rank: Rank) -> HeartbeatWriter:
    limit_seconds = parse_seconds(recipe.launch.hang_timeout)

    def on_silence() -> None:
        """Write the stacks to the rank's log. The supervisor requests them too, but a run started manually
        has none."""
        sys.stderr.write(
            f"no progress for {recipe.launch.hang_timeout}, at step {heartbeat.step}, `{heartbeat.phase}`\n"
        )
        sys.stderr.flush()
        faulthandler.dump_traceback(all_threads=True)
        heartbeat.collective = dump(run, rank.index, recipe.launch.device)

    heartbeat = HeartbeatWriter(
        run, rank.index, world_size=rank.world_size, silence_seconds=limit_seconds, on_silence=on_silence
    )
    return heartbeat


def _deadline(run: RunDir, recipe: Recipe, started: float) -> float | None:
    """Return the monotonic time at which `launch.max_runtime` ends, counted from the start of the
    launcher."""
    if recipe.launch.max_runtime is None:
        return None
    launched = LaunchRecord.read(run.launch_json) or LaunchRecord()
    boot, boot_seconds = seconds_since_boot()
    is_same_boot = boot != "" and boot == launched.boot
    gone_seconds = (
        boot_seconds - launched.boot_seconds
        if is_same_boot
        else time.time() - (launched.started_at or started)
    )
    return time.monotonic() + parse_seconds(recipe.launch.max_runtime) - gone_seconds


def _train(
    run: RunDir,
    recipe: Recipe,
    rank: Rank,
    heartbeat: HeartbeatWriter,
    stop_request: StopRequest,
    say: Callable[[str], None],
    started: float,
    holder: list[FsdpTrainer],
) -> Outcome:
    """`holder` gets the trainer as soon as it exists: when memory runs out, its tensors are counted."""
    if rank.is_first:
        continue_tracker_runs(run, recipe.training.report_to, os.environ, say)
    device_type = start_process_group(recipe, rank)
    heartbeat.beat("importing")
    from fsdp_tune.worker.rank_identity import check_same
    from fsdp_tune.worker.setup import build_trainer, close, is_at_end, results, user_callbacks

    check_same(run)
    configure_accelerate(recipe)
    trainer, callback, resume = build_trainer(run, recipe, rank, heartbeat, stop_request, say, device_type)
    holder.append(trainer)
    for callback_of_user in user_callbacks(recipe):
        trainer.add_callback(callback_of_user)
    if resume is None or not is_at_end(trainer, resume, say):
        trainer.train(resume_from_checkpoint=str(resume.path) if resume else None)
    close(trainer, is_finished=callback.stopped is None)
    reason = callback.stopped or ExitReason.FINISHED
    return Outcome(EXIT_CODE_OF_REASON[reason], reason, facts=results(trainer, started))


def _outcome_of(
    error: BaseException, recipe: Recipe, heartbeat: HeartbeatWriter, trainer: FsdpTrainer | None
) -> Outcome:
    from fsdp_tune.model.allocation_errors import is_device_out_of_memory, is_host_out_of_memory
    from fsdp_tune.worker.agreement import RemoteError
    from fsdp_tune.worker.observe import out_of_memory as memory
    from fsdp_tune.worker.observe.memory_problems import device_problem

    trace = "".join(traceback.format_exception(error))
    error = as_os_error(error)
    if isinstance(error, FsdpTuneError):
        reason = ExitReason.NON_FINITE if error.exit_code == ExitCode.NON_FINITE else ExitReason.FAILED
        return Outcome(
            error.exit_code,
            reason,
            error.problems[0],
            trace,
            {"echo": True} if isinstance(error, RemoteError) else {},
        )
    if is_device_out_of_memory(error):
        moment = memory.device_moment(error, heartbeat, trainer)
        problem, facts = device_problem(recipe, moment), {"memory": moment.as_dict()}
        return Outcome(ExitCode.OUT_OF_MEMORY, ExitReason.OUT_OF_MEMORY, problem, trace, facts)
    if is_host_out_of_memory(error):
        return Outcome(
            ExitCode.FAILED, ExitReason.FAILED, memory.host_out_of_memory(recipe, heartbeat, error), trace
        )
    if isinstance(error, RuntimeError) and (fault := device_fault(str(error))) is not None:
        gpu = f"{recipe.launch.device}:{os.environ['LOCAL_RANK']} (in `{heartbeat.phase}`)"
        return Outcome(ExitCode.FAILED, ExitReason.FAILED, device_failure(gpu, fault, lost_devices()), trace)
    lost = next((words for words in PEER_LOST if words in str(error)), None)
    if isinstance(error, RuntimeError) and lost is not None:
        return Outcome(
            ExitCode.LOST_RANK,
            ExitReason.LOST_RANK,
            Problem("lost-rank", f"another rank is gone ({lost})"),
            trace,
        )
    if (
        trainer is not None
        and (problem := trainer.parts.rows.problem_of(error, trainer.state.global_step)) is not None
    ):
        return Outcome(ExitCode.FAILED, ExitReason.FAILED, problem, trace)
    if (refused := find_refusal(trace)) is not None:
        return Outcome(ExitCode.USAGE, ExitReason.FAILED, refused, trace)
    return Outcome(
        ExitCode.FAILED,
        ExitReason.FAILED,
        Problem("worker-failed", typed_line(error), hint="the traceback is in the rank's log"),
        trace,
    )


def read_recipe(run: RunDir) -> Recipe:
    return Recipe.model_validate_json(run.recipe_json.read_bytes())


def run_directory(argument: str) -> RunDir:
    return RunDir(Path(argument).resolve())
