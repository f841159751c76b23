"""What a rehearsal plays: train; kill a rank, resume, compare; merge; reload. Each scene ends in one line of the checklist.

Torch-free: the scenes are commands, run as a user runs them, and the files that they leave.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from fsdp_tune.core import processes as children
from fsdp_tune.core.errors import ExitCode
from fsdp_tune.run.directory import RunDir, complete_checkpoints, latest_checkpoint
from fsdp_tune.run.metrics_file import read_metrics
from fsdp_tune.run.rank_files import read_heartbeat
from fsdp_tune.verify.rehearsal.commands import Answer, finish, fsdp_tune, start_training, torch_script

POLL_SECONDS = 0.002
WAIT_SECONDS = 600.0
LINGER_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    passed: bool
    detail: str
    seconds: float = 0.0


class _Failed(Exception):
    """Ends a scene, with what was found instead."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    recipe: Path
    """The small recipe."""
    folder: Path
    ranks: int
    steps: int
    allowed: tuple[str, ...] = ()
    """Options by which the command line lets the recipe run code; every `train` of the rehearsal gets them."""

    @property
    def whole(self) -> RunDir:
        """The run that nobody disturbs."""
        return RunDir(self.folder / "uninterrupted")

    @property
    def killed(self) -> RunDir:
        """The run that loses a rank, and is resumed."""
        return RunDir(self.folder / "killed")

    def checks(self) -> Iterator[Check]:
        """Ends at the first scene that fails: those after it stand on what it left."""
        scenes: tuple[tuple[str, Callable[[], str]], ...] = (
            ("train", self.train),
            ("kill a rank", self.kill_a_rank),
            ("resume", self.resume),
            ("same curve as uninterrupted", self.compare_curves),
            ("same model as uninterrupted", self.compare_models),
            ("merge-checkpoint", self.merge),
            ("reload with transformers", self.reload),
        )
        for name, scene in scenes:
            began = time.monotonic()
            try:
                passed, detail = True, scene()
            except _Failed as error:
                passed, detail = False, str(error)
            yield Check(name, passed, detail, time.monotonic() - began)
            if not passed:
                return

    def train(self) -> str:
        answer = fsdp_tune("train", "--config", str(self.recipe), "--set", f"output_dir={self.whole.path}", *self.allowed)
        _demand(answer)
        losses = [line["loss"] for line in _loss_lines(self.whole)]
        if len(losses) != self.steps:
            raise _Failed(f"{len(losses)} of {self.steps} steps are in metrics.jsonl")
        return f"{self.steps} steps on {self.ranks} ranks, loss {losses[0]:.3f} → {losses[-1]:.3f}; read back as the recipe says"

    def kill_a_rank(self) -> str:
        """SIGKILL to the last rank, once a checkpoint is complete."""
        child = start_training(self.recipe, self.killed.path, self.allowed)
        try:
            victim = self._wait_for_checkpoint(child.poll)
            if victim is not None:
                with contextlib.suppress(ProcessLookupError):  # the run ended meanwhile, and its exit code says so
                    os.kill(victim, signal.SIGKILL)
            answer = finish(child)
        finally:
            children.end(child)
        if victim is None or answer.exit_code not in (ExitCode.FAILED, ExitCode.LOST_RANK):
            raise _Failed(f"the run ended before a rank could be killed; {answer.why}")
        left = self._processes_left()
        if left:
            raise _Failed(f"processes of the run are still there: {', '.join(map(str, left))}")
        checkpoint, _ = latest_checkpoint(self.killed, digests=True)
        if checkpoint is None:
            raise _Failed("no complete checkpoint is left")
        return f"{answer.why}; no process left; {checkpoint.path.name} is complete"

    def _wait_for_checkpoint(self, ended: Callable[[], int | None]) -> int | None:
        """The process to kill; None where the run ended by itself."""
        until = time.monotonic() + WAIT_SECONDS
        while ended() is None and time.monotonic() < until:
            beat = read_heartbeat(self.killed, self.ranks - 1)
            if beat is not None and complete_checkpoints(self.killed)[0]:
                return beat.pid
            time.sleep(POLL_SECONDS)
        return None

    def _processes_left(self) -> list[int]:
        path, until = str(self.killed.path), time.monotonic() + LINGER_SECONDS
        while True:
            left = [process.pid for process in psutil.process_iter() if path in _command_line(process)]
            if not left or time.monotonic() > until:
                return left
            time.sleep(0.1)

    def resume(self) -> str:
        answer = fsdp_tune(
            "train", "--config", str(self.recipe), "--set", f"output_dir={self.killed.path}", "--resume", "auto", *self.allowed
        )
        _demand(answer)
        return f"finished at step {answer.document.get('steps')}"

    def compare_curves(self) -> str:
        keys = ("step", "loss", "grad_norm", "learning_rate", "tokens")
        one, other = ([{key: line[key] for key in keys} for line in _loss_lines(run)] for run in (self.whole, self.killed))
        for mine, theirs in zip(one, other, strict=False):
            if mine != theirs:
                key = next(key for key in keys if mine[key] != theirs[key])
                raise _Failed(f"step {mine['step']}: {key} is {theirs[key]!r} after the resume, and {mine[key]!r} without")
        if len(one) != len(other):
            raise _Failed(f"{len(other)} lines after the resume, and {len(one)} without")
        return f"loss, gradient norm, learning rate and tokens of all {len(one)} steps are bitwise the same"

    def compare_models(self) -> str:
        one, other = (_digests(run.merged) for run in (self.whole, self.killed))
        if one != other or not one:
            raise _Failed(
                f"the merged weights differ: {sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))}"
            )
        return "the merged weights are the same bytes"

    def merge(self) -> str:
        """An earlier checkpoint, by the command."""
        checkpoints, _ = complete_checkpoints(self.killed)
        output = self.folder / "merged-by-hand"
        step = checkpoints[-1].step
        answer = fsdp_tune("merge-checkpoint", str(self.killed.path), "--step", str(step), "--output", str(output), "--verify", "full")
        _demand(answer)
        return f"checkpoint-{step} merged and verified"

    def reload(self) -> str:
        answer = torch_script("reload", {"run": str(self.killed.path), "step": self.steps})
        _demand(answer)
        found = answer.document
        if not found["logits_equal"]:
            raise _Failed(f"logits of the merged model are off those of the checkpoint by {found['logits_difference']:.1e}")
        words = f"logits on {found['rows']} rows are those of checkpoint-{self.steps}"
        if found["eval_loss"] is None:
            return words
        off = abs(found["eval_loss"] - found["run_eval_loss"]) / abs(found["run_eval_loss"])
        if off > found["tolerance"]:
            raise _Failed(f"{words}, but its eval loss is {found['eval_loss']:.6f}, and the run's was {found['run_eval_loss']:.6f}")
        return f"{words}; eval loss {found['eval_loss']:.6f}, in the run {found['run_eval_loss']:.6f}"


def _demand(answer: Answer) -> None:
    if answer.exit_code != 0:
        raise _Failed(answer.why)


def _loss_lines(run: RunDir) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run) if "loss" in line]


def _digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.glob("*.safetensors")}


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
