"""The checks of a rehearsal: train; kill a rank, resume and compare; merge; reload.

Torch-free: the checks run `fsdp-tune` itself, as a user would, and the two scripts in `rehearsal/parity/`
that need torch, as child processes, and read the files that these write.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil

from fsdp_tune.core import processes as children
from fsdp_tune.core.errors import ExitCode
from fsdp_tune.launch.command.inherited import SLURM_PREFIX
from fsdp_tune.run.directory import RunDir, complete_checkpoints, latest_checkpoint
from fsdp_tune.run.metrics_file import read_metrics
from fsdp_tune.run.rank_files import read_heartbeat

CHILD_SECONDS = 900.0
TIMED_OUT = 124
"""The exit code of a child that was killed since it took too long, as of `timeout`; no command has it."""
FSDP_TUNE = (sys.executable, "-P", "-m", "fsdp_tune")


@dataclass(frozen=True, slots=True)
class ChildResult:
    """The result of a child that prints one JSON document."""

    exit_code: int
    document: dict[str, Any]
    stderr: str

    @property
    def error(self) -> str:
        """The exit code with the first error of the document, or the last line of stderr if the document has
        none."""
        errors: list[dict[str, str]] = self.document.get("errors") or []
        lines = self.stderr.strip().splitlines() or ["no output"]
        return f"exit code {self.exit_code}: {errors[0]['message'] if errors else lines[-1]}"


def run_fsdp_tune(*arguments: str) -> ChildResult:
    return run_child((*FSDP_TUNE, *arguments, "--json"))


def run_torch_script(module: str, request: Mapping[str, object]) -> ChildResult:
    """Run `python -m fsdp_tune.rehearsal.parity.MODULE` with the request on its stdin."""
    return run_child(
        (sys.executable, "-P", "-m", f"fsdp_tune.rehearsal.parity.{module}"), json.dumps(request)
    )


def run_child(argv: Sequence[str], text: str = "") -> ChildResult:
    return finish(_start(argv, subprocess.PIPE), text)


def start_training(recipe: Path, output: Path, options: Sequence[str]) -> subprocess.Popen[str]:
    command = (
        *FSDP_TUNE,
        "train",
        "--config",
        str(recipe),
        "--set",
        f"output_dir={output}",
        *options,
        "--json",
    )
    return _start(command, subprocess.DEVNULL)


def _start(argv: Sequence[str], stdin: int) -> subprocess.Popen[str]:
    return children.start(argv, environment(), stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(child: subprocess.Popen[str], text: str | None = None) -> ChildResult:
    """Wait for a child. The child is killed on a timeout, and if the rehearsal is interrupted."""
    try:
        stdout, stderr = child.communicate(text, timeout=CHILD_SECONDS)
    except subprocess.TimeoutExpired:
        return ChildResult(TIMED_OUT, {}, f"it took more than {CHILD_SECONDS:.0f} s")
    finally:
        children.end(child)
    return ChildResult(child.returncode, _document(stdout), stderr)


def environment() -> dict[str, str]:
    """Return the environment of children: offline, because everything they need was downloaded before, and
    outside of a Slurm step, whose nodes are those of the real run."""
    return {name: value for name, value in os.environ.items() if not name.startswith(SLURM_PREFIX)} | {
        "HF_HUB_OFFLINE": "1"
    }


def _document(text: str) -> dict[str, object]:
    try:
        document: object = json.loads(text)
    except ValueError:
        return {}
    return cast("dict[str, object]", document) if isinstance(document, dict) else {}


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
    """A check failed; the message is its detail."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    recipe: Path
    """The scaled-down recipe."""
    folder: Path
    ranks: int
    steps: int
    allowed: tuple[str, ...] = ()
    """Options that allow the recipe to run code, such as `--trust-remote-code`; passed to every `train`."""

    @property
    def uninterrupted(self) -> RunDir:
        """The run that is not interrupted."""
        return RunDir(self.folder / "uninterrupted")

    @property
    def killed(self) -> RunDir:
        """The run that loses a rank and is resumed."""
        return RunDir(self.folder / "killed")

    def checks(self) -> Iterator[Check]:
        """Yield the checks in order, up to the first that fails: later ones need the files of earlier
        ones."""
        checks: tuple[tuple[str, Callable[[], str]], ...] = (
            ("train", self.train),
            ("kill a rank", self.kill_a_rank),
            ("resume", self.resume),
            ("same curve as uninterrupted", self.compare_curves),
            ("same model as uninterrupted", self.compare_models),
            ("merge-checkpoint", self.merge),
            ("reload with transformers", self.reload),
        )
        for name, check in checks:
            started = time.monotonic()
            try:
                passed, detail = True, check()
            except _Failed as error:
                passed, detail = False, str(error)
            yield Check(name, passed, detail, time.monotonic() - started)
            if not passed:
                return

    def train(self) -> str:
        result = run_fsdp_tune(
            "train",
            "--config",
            str(self.recipe),
            "--set",
            f"output_dir={self.uninterrupted.path}",
            *self.allowed,
        )
        _require_success(result)
        losses = [line["loss"] for line in _loss_lines(self.uninterrupted)]
        if len(losses) != self.steps:
            raise _Failed(f"{len(losses)} of {self.steps} steps are in metrics.jsonl")
        return (
            f"{self.steps} steps on {self.ranks} ranks, loss {losses[0]:.3f} → {losses[-1]:.3f}; the "
            "live state matches the recipe"
        )

    def kill_a_rank(self) -> str:
        """Send SIGKILL to the last rank once a checkpoint is complete."""
        child = start_training(self.recipe, self.killed.path, self.allowed)
        try:
            victim = self._wait_for_checkpoint(child.poll)
            if victim is None and child.poll() is None:
                raise _Failed(f"no checkpoint was complete after {WAIT_SECONDS:.0f} s")
            if victim is not None:
                # the run has just ended; its exit code is checked below
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
            result = finish(child)
        finally:
            children.end(child)
        if victim is None or result.exit_code == ExitCode.OK:
            raise _Failed(f"the run ended before a rank could be killed; {result.error}")
        if result.exit_code not in (ExitCode.FAILED, ExitCode.LOST_RANK):
            raise _Failed(f"the run did not end as one that has lost a rank: {result.error}")
        left = self._processes_left()
        if left:
            raise _Failed(f"processes of the run are still alive: {', '.join(map(str, left))}")
        checkpoint, _ = latest_checkpoint(self.killed, digests=True)
        if checkpoint is None:
            raise _Failed("no complete checkpoint is left")
        return f"{result.error}; no process left; {checkpoint.path.name} is complete"

    def _wait_for_checkpoint(self, ended: Callable[[], int | None]) -> int | None:
        """Return the pid of the rank to kill; None if the run ended first, or has no checkpoint in time."""
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
        result = run_fsdp_tune(
            "train",
            "--config",
            str(self.recipe),
            "--set",
            f"output_dir={self.killed.path}",
            "--resume",
            "auto",
            *self.allowed,
        )
        _require_success(result)
        return f"finished at step {result.document.get('steps')}"

    def compare_curves(self) -> str:
        keys = ("step", "loss", "grad_norm", "learning_rate", "tokens")
        expected, resumed = (
            [{key: line[key] for key in keys} for line in _loss_lines(run)]
            for run in (self.uninterrupted, self.killed)
        )
        for wanted, found in zip(expected, resumed, strict=False):
            if wanted != found:
                key = next(key for key in keys if wanted[key] != found[key])
                raise _Failed(
                    f"step {wanted['step']}: {key} is {found[key]!r} in the resumed run, "
                    f"{wanted[key]!r} in the uninterrupted one"
                )
        if len(expected) != len(resumed):
            raise _Failed(
                f"metrics.jsonl has {len(resumed)} steps in the resumed run, {len(expected)} without "
                "interruption"
            )
        return f"loss, gradient norm, learning rate and tokens of all {len(expected)} steps are bitwise equal"

    def compare_models(self) -> str:
        one, other = (_digests(run.merged) for run in (self.uninterrupted, self.killed))
        if one != other or not one:
            raise _Failed(
                "the merged weights differ: "
                f"{sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))}"
            )
        return "the merged weights are bitwise equal"

    def merge(self) -> str:
        """Merge an earlier checkpoint with `merge-checkpoint`."""
        checkpoints, _ = complete_checkpoints(self.killed)
        output = self.folder / "merged-manually"
        step = checkpoints[-1].step
        result = run_fsdp_tune(
            "merge-checkpoint",
            str(self.killed.path),
            "--step",
            str(step),
            "--output",
            str(output),
            "--verify",
            "full",
        )
        _require_success(result)
        return f"checkpoint-{step} merged and verified"

    def reload(self) -> str:
        result = run_torch_script("model_directories", {"run": str(self.killed.path), "step": self.steps})
        _require_success(result)
        found = result.document
        if not found["logits_equal"]:
            raise _Failed(
                "logits of the merged model differ from those of the checkpoint by "
                f"{found['logits_difference']:.1e}"
            )
        detail = f"logits on {found['rows']} rows equal those of checkpoint-{self.steps}"
        if found["eval_loss"] is None:
            return detail
        off = abs(found["eval_loss"] - found["run_eval_loss"]) / abs(found["run_eval_loss"])
        if not off <= found["tolerance"]:  # NaN is no small difference
            raise _Failed(
                f"{detail}, but the eval loss is {found['eval_loss']:.6f} instead of the run's "
                f"{found['run_eval_loss']:.6f}"
            )
        return f"{detail}; eval loss {found['eval_loss']:.6f}, in the run {found['run_eval_loss']:.6f}"


def _require_success(result: ChildResult) -> None:
    if result.exit_code != 0:
        raise _Failed(result.error)


def _loss_lines(run: RunDir) -> list[dict[str, object]]:
    return [line for line in read_metrics(run) if "loss" in line]


def _digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.glob("*.safetensors")
    }


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
