"""One rank, from the run directory to its outcome. Reads top to bottom: who am I, join, load, train, save, say how it ended."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_tune.atomic import write_json
from fsdp_tune.errors import EXIT_CODE_OF_REASON, ExitCode, ExitReason, FsdpTuneError, Problem
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.run_dir import RunDir
from fsdp_tune.units import parse_seconds
from fsdp_tune.worker.heartbeat import Heartbeat
from fsdp_tune.worker.rank import Rank, configure_accelerate, start_process_group
from fsdp_tune.worker.signals import StoppedEarly, StopWish


@dataclass(slots=True)
class Outcome:
    """What a rank leaves behind for the launcher, in its outcome file."""

    exit_code: int
    exit_reason: ExitReason
    problem: Problem | None = None
    traceback: str | None = None
    results: dict[str, Any] = field(default_factory=dict[str, Any])


def run_rank(run: RunDir, recipe: Recipe, rank: Rank, say: Callable[[str], None], started: float) -> Outcome:
    """Trains, and turns whatever happens into an outcome; writes the outcome file."""
    heartbeat = Heartbeat(run, rank.index)
    wish = StopWish(_deadline(run, recipe, started))
    try:
        wish.install()
        heartbeat.beat("starting", 0)
        outcome = _train(run, recipe, rank, heartbeat, wish, say, started)
    except StoppedEarly as stop:
        outcome = Outcome(EXIT_CODE_OF_REASON[stop.reason], stop.reason)
    except BaseException as error:  # noqa: BLE001  the outcome file is the last word of this process, whatever ended it
        outcome = _outcome_of(error)
    heartbeat.beat("finished" if outcome.exit_code == 0 else "failed")
    write_json(
        run.rank_outcome(rank.index),
        {
            "rank": rank.index,
            "exit_code": int(outcome.exit_code),
            "exit_reason": outcome.exit_reason.value,
            "step": heartbeat.step,
            "time": time.time(),
            "problem": outcome.problem.as_dict() if outcome.problem else None,
            "traceback": outcome.traceback,
            **outcome.results,
        },
    )
    return outcome


def _deadline(run: RunDir, recipe: Recipe, started: float) -> float | None:
    """When `launch.max_runtime` ends, counted from the start of the launcher."""
    if recipe.launch.max_runtime is None:
        return None
    launch: dict[str, Any] = json.loads(run.launch_json.read_text(encoding="utf-8")) if run.launch_json.exists() else {}
    return float(launch.get("started_at", started)) + parse_seconds(recipe.launch.max_runtime)


def _train(
    run: RunDir, recipe: Recipe, rank: Rank, heartbeat: Heartbeat, wish: StopWish, say: Callable[[str], None], started: float
) -> Outcome:
    device_type = start_process_group(recipe, rank)
    heartbeat.beat("importing")
    from fsdp_tune.worker.setup import build_trainer, close, results

    configure_accelerate(recipe)
    trainer, callback, resume = build_trainer(run, recipe, rank, heartbeat, wish, say, device_type)
    trainer.train(resume_from_checkpoint=str(resume.path) if resume else None)
    close(trainer)
    reason = callback.stopped or ExitReason.FINISHED
    return Outcome(EXIT_CODE_OF_REASON[reason], reason, results=results(trainer, started))


# Raised on the surviving ranks when another one is gone; the error that matters is the other rank's.
_PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "remote process exited",
    "NCCL communicator was aborted",
)


def _outcome_of(error: BaseException) -> Outcome:
    import torch

    trace = "".join(traceback.format_exception(error))
    if isinstance(error, FsdpTuneError):
        reason = ExitReason.NON_FINITE if error.exit_code == ExitCode.NON_FINITE else ExitReason.FAILED
        return Outcome(error.exit_code, reason, error.problems[0], trace)
    if isinstance(error, torch.OutOfMemoryError):
        hint = "halve training.per_device_train_batch_size (global_batch_size stays), or set fsdp.activation_checkpointing: full"
        problem = Problem("device-out-of-memory", str(error).split("\n")[0], hint=hint)
        return Outcome(ExitCode.OUT_OF_MEMORY, ExitReason.OUT_OF_MEMORY, problem, trace)
    if isinstance(error, MemoryError):
        return Outcome(
            ExitCode.FAILED, ExitReason.FAILED, Problem("host-out-of-memory", "the host has no memory left for this rank"), trace
        )
    lost = next((words for words in _PEER_LOST if words in str(error)), None)
    if isinstance(error, RuntimeError) and lost is not None:
        return Outcome(ExitCode.LOST_RANK, ExitReason.LOST_RANK, Problem("lost-rank", f"another rank is gone ({lost})"), trace)
    message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    return Outcome(ExitCode.FAILED, ExitReason.FAILED, Problem("worker-failed", message, hint="the traceback is in the rank's log"), trace)


def read_recipe(run: RunDir) -> Recipe:
    return Recipe.model_validate_json(run.recipe_json.read_bytes())


def run_directory(argument: str) -> RunDir:
    return RunDir(Path(argument).resolve())
