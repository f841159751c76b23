"""Runs as a report meets them, with the lines that real ones have: a sweep, a spike, NaN, a resume, a
failure, a long run."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fsdp_tune.core.errors import ExitCode, ExitReason, Problem
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.rank_files import Heartbeat, Verdict
from fsdp_tune.run.records import Prediction
from tests.pages.written import training_line, written

BEGAN = 1795398078.0
MODEL = {"from_config": {"model_type": "llama"}, "tokenizer": "builtin:arithmetic"}


def lines_of(
    steps: int,
    *,
    rate: float = 2e-5,
    every: int = 10,
    seed: int = 0,
    floor: float = 1.1,
    total: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run up to a step: warmup and cosine decay to `total`, scattered losses, an
    evaluation every tenth line."""
    drawn, total = random.Random(seed), total or steps
    yield {"event": "train_started", "step": 0, "total_steps": total, "time": BEGAN}
    for number, step in enumerate(range(every, steps + 1, every), 1):
        share, time = step / total, BEGAN + 1.9 * step
        warm = min(1.0, share / 0.03)
        loss = floor + 1.4 * math.exp(-6e4 * rate * share) + drawn.gauss(0, 0.03)
        yield training_line(
            step,
            loss,
            time=time,
            epoch=3 * share,
            grad_norm=0.8 + 3 * math.exp(-30 * share) + abs(drawn.gauss(0, 0.1)),
            learning_rate=rate * warm * (0.5 + 0.5 * math.cos(math.pi * share)),
            tokens=step * 524_288,
            supervised_tokens=every * 301_000,
            tokens_per_second_per_device=(4_180 + drawn.gauss(0, 25)) * (0.4 if number == 1 else 1),
            step_seconds=(1.9 + drawn.gauss(0, 0.01)) * (2.5 if number == 1 else 1),
            last_step_seconds=1.86 + drawn.gauss(0, 0.01),
            data_wait_seconds=0.003 + abs(drawn.gauss(0, 0.001)),
            exposed_communication_seconds=0.21 + abs(drawn.gauss(0, 0.01)),
            optimizer_seconds=0.031 + abs(drawn.gauss(0, 0.001)),
            mfu=0.47 + drawn.gauss(0, 0.003),
            peak_allocated_gib=61.2,
            peak_reserved_gib=66.9,
            peak_host_gib=31.4 + 0.4 * share,
        )
        if number % 10 == 0:
            evaluation = loss + 0.05 + 0.25 * share * share
            yield {
                "step": step,
                "epoch": 3 * share,
                "time": time,
                "eval_loss": evaluation,
                "eval_seconds": 41.0,
            }
        if number % 25 == 0:
            saved = {"seconds": 9.2, "stall_seconds": 0.7, "size_bytes": 80_000_000_000}
            yield {"event": "checkpoint_saved", "step": step, "time": time, **saved}


def finished(run: RunDir, step: int) -> RunDir:
    Verdict(ExitCode.OK, ExitReason.FINISHED, step).write(run.outcome_json)
    return run


def planned(run: RunDir) -> RunDir:
    Prediction(peak_allocated_gib=60.4, peak_reserved_gib=68.0, step_seconds=1.8).write(run.plan_json)
    return run


def one_run(folder: Path) -> list[RunDir]:
    """A finished run with a plan, a spike with its rows, generated samples."""
    return [
        planned(
            finished(
                written(folder / "llama8b-lr2e-5", with_spike(lines_of(3000)), learning_rate=2e-5, seed=1),
                3000,
            )
        )
    ]


def with_spike(lines: Iterator[dict[str, Any]], step: int = 1500) -> Iterator[dict[str, Any]]:
    """Yield the lines with a loss spike, which is named, and with samples."""
    for line in lines:
        if line.get("step") == step and "loss" in line:
            row = {
                "file": "data/chat.jsonl",
                "row": 81_231,
                "tokens": 4_096,
                "step": step,
                "rank": 3,
                "micro_batch": 2,
                "sequence": 1,
            }
            rows = [row | {"loss": 31.0}, row | {"row": 90_112, "loss": 4.2}]
            yield line | {"loss": 14.2, "grad_norm": 88.0}
            message = "loss 14.2 is 41 standard deviations above the mean of the last 50 lines, 1.31"
            yield {
                "event": "loss_spike",
                "step": step,
                "time": line["time"],
                "message": message,
                "rows": rows,
                "rows_total": 64,
            }
        else:
            yield line
        if "eval_loss" in line:
            text = (
                "Boil the eggs for seven minutes, then put them into cold water."
                if line["step"] > 500
                else "eggs eggs eggs eggs"
            )
            samples = [{"prompt": "How do I boil an egg?", "text": text}]
            yield {
                "event": "samples",
                "step": line["step"],
                "time": line["time"],
                "seconds": 2.0,
                "samples": samples,
            }


def sweep(folder: Path, count: int, steps: int = 2000) -> list[RunDir]:
    """Runs that differ in learning rate, batch and seed. The last but one died at a half; the last has not
    started."""
    rates, batches = (1e-5, 2e-5, 5e-5, 1e-4), (8, 16, 32)
    runs = list[RunDir]()
    for at, (seed, batch, rate) in enumerate(
        itertools.islice(itertools.product(range(2), batches, rates), count)
    ):
        end = {count - 1: 0, count - 2: steps // 2}.get(at, steps) if count > 3 else steps
        lines = (
            lines_of(end, total=steps, rate=rate, seed=at, floor=1.1 + 0.02 * batches.index(batch))
            if end
            else ()
        )
        name = f"qwen3-8b-tulu3-bs{batch}-lr{rate:.0e}".replace("e-0", "e-") + f"-seed{seed}"
        run = written(folder / name, lines, learning_rate=rate, global_batch_size=batch, seed=seed)
        if 0 < end < steps:  # its processes are gone
            for rank in (0, 1):
                Heartbeat(rank, 2**22 + rank, end, "train", BEGAN, 0.0, 0.0).write(run.rank_heartbeat(rank))
        runs.append(finished(run, end) if end == steps else run)
    return runs


def troubled(folder: Path) -> list[RunDir]:
    """NaN in the middle, a failure, a resume, early stopping with the best model, a run that diverges."""
    nan = [
        line
        | ({"loss": "nan", "grad_norm": "nan"} if line.get("step") in (1000, 1010) and "loss" in line else {})
        for line in lines_of(2000)
    ]
    skipped = {
        "event": "step_skipped",
        "step": 1000,
        "time": BEGAN + 1900,
        "reason": "the gradient norm is NaN",
    }
    with_nan = written(folder / "fix-nan", [*nan[:101], skipped, *nan[101:]], seed=1)
    dead = written(folder / "fix-dead", lines_of(700, total=2000, seed=2), seed=2)
    problem = Problem(
        "device-out-of-memory",
        "rank 5 ran out of GPU memory at step 704: 1.12 GiB were requested, 0.34 GiB are free of 79.11 GiB",
    )
    Verdict(ExitCode.OUT_OF_MEMORY, ExitReason.OUT_OF_MEMORY, 704, problem).write(dead.outcome_json)
    killed = written(folder / "fix-killed", lines_of(400, total=2000, seed=5), seed=5)
    for rank in (0, 1):
        Heartbeat(rank, 2**22 + rank, 404, "train", BEGAN, 0.0, 0.0).write(killed.rank_heartbeat(rank))
    return [finished(with_nan, 2000), dead, killed, resumed(folder), stopped_early(folder), diverged(folder)]


def resumed(folder: Path) -> RunDir:
    """A run that was restarted once by the command, and once by its user with another learning rate."""
    lines = list(lines_of(2000, seed=3))
    at = [next(index for index, line in enumerate(lines) if line.get("step") == step) for step in (610, 1210)]
    restarted = {
        "event": "restarted", "step": 600, "time": BEGAN + 1200, "restart": 1, "max_restarts": 3, "failed_after_step": 640,  # noqa: E501
        "code": "lost-rank", "message": "rank 2 was killed by signal 9",
    }  # fmt: skip
    started = {"event": "train_started", "total_steps": 2000, "time": BEGAN + 1300}
    changes = [{"key": "training.learning_rate", "old": "1e-5", "new": "2e-5", "class": "numerics"}]
    changed = {"event": "recipe_changed", "step": 1200, "time": BEGAN + 2500, "changes": changes}
    parts = [
        *lines[: at[0]],
        restarted,
        started | {"step": 600},
        *lines[at[0] : at[1]],
        changed,
        started | {"step": 1200},
        *lines[at[1] :],
    ]
    return finished(written(folder / "fix-resumed", parts, seed=3), 2000)


def stopped_early(folder: Path) -> RunDir:
    """A run whose evaluation loss has its least at step 500; that model is kept."""
    lines = list(lines_of(1000, total=2000, seed=4))
    lines = [
        line | ({"eval_loss": 1.4 + 0.0000012 * (line["step"] - 500) ** 2} if "eval_loss" in line else {})
        for line in lines
    ]
    message = "the evaluation loss has not improved since step 500"
    stop = {"event": "early_stopped", "step": 1000, "time": BEGAN + 1900, "message": message}
    return finished(written(folder / "fix-early-stop", [*lines, stop], seed=4), 1000)


def diverged(folder: Path) -> RunDir:
    """A run whose loss rises from step 1200."""
    lines = [
        line
        | (
            {"loss": line["loss"] + 1.01 ** ((line["step"] - 1200) / 3)}
            if "loss" in line and line["step"] > 1200
            else {}
        )
        for line in lines_of(1800, total=2000, seed=6)
    ]
    run = written(folder / "fix-diverged", lines, seed=6)
    Verdict(ExitCode.INTERRUPTED, ExitReason.INTERRUPTED, 1800).write(run.outcome_json)
    return run


SITUATIONS: dict[str, Callable[[Path], Sequence[RunDir]]] = {
    "1-run": one_run,
    "3-runs": lambda folder: sweep(folder, 3),
    "12-runs": lambda folder: sweep(folder, 12),
    "24-runs": lambda folder: sweep(folder, 24),
    "troubled": troubled,
    "not-started": lambda folder: [written(folder / "new-run")],
    "long": lambda folder: [finished(written(folder / "long", lines_of(100_000, every=1)), 100_000)],
}
