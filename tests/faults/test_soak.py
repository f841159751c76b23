"""A seeded sequence of faults on one run, also during recovery: it ends like an undisturbed run."""

from __future__ import annotations

import errno
import random
import signal

import pytest

from fsdp_tune.run.directory import RunDir
from tests.faults.checks import stages, verified_steps
from tests.faults.disk import Fault
from tests.faults.ranks import PHASES, Happening
from tests.faults.training import STEPS, Training

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
SEEDS = range(14)
Accident = tuple[tuple[Happening, ...], tuple[tuple[int, Fault], ...], str]
"""What ranks do to themselves, what the disk does, and what is damaged after the processes are gone."""


def draw(seed: int) -> list[Accident]:
    dice = random.Random(seed)
    accidents: list[Accident] = []
    for _ in range(dice.randint(2, 5)):
        happenings: list[Happening] = []
        faults: list[tuple[int, Fault]] = []
        kind = dice.choice(["kill", "kill", "signal", "disk kill", "disk error", "both"])
        rank, step = dice.randrange(2), dice.randrange(STEPS)
        if kind in ("kill", "both"):
            happenings.append(Happening(rank, dice.choice(list(PHASES)), step))
        if kind == "signal":
            number = dice.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
            happenings.append(
                Happening(
                    rank, dice.choice(["fetch", "forward", "log"]), step, number, times=dice.randint(1, 3)
                )
            )
        if kind in ("disk kill", "both"):
            faults.append(
                (
                    1 - rank,
                    Fault(
                        dice.randrange(1, 1500),
                        dice.choice(["before", "torn", "after"]),
                        inside=".checkpoint-",
                    ),
                )
            )
        if kind == "disk error":
            error = dice.choice([errno.ENOSPC, errno.EIO, errno.EROFS])
            faults.append((rank, Fault(dice.randrange(1, 1500), "error", error, inside=".checkpoint-")))
        accidents.append(
            (tuple(happenings), tuple(faults), dice.choice(["", "", "newest checkpoint", "metrics"]))
        )
    return accidents


def damage(run: RunDir, what: str, dice: random.Random) -> None:
    if what == "newest checkpoint" and (steps := verified_steps(run)):
        path = dice.choice(sorted(path for path in run.checkpoint(steps[-1]).rglob("*") if path.is_file()))
        raw = bytearray(path.read_bytes())
        raw[dice.randrange(len(raw))] ^= 0x11
        path.write_bytes(raw)
    elif what == "metrics" and run.metrics_jsonl.exists():
        raw = run.metrics_jsonl.read_bytes()
        run.metrics_jsonl.write_bytes(raw[: len(raw) - dice.randrange(min(40, len(raw) + 1))])


@pytest.mark.parametrize("seed", SEEDS)
def test_random_sequence_of_faults_loses_nothing(seed: int, training: Training) -> None:
    accidents, dice = draw(seed), random.Random(seed)
    print(f"seed {seed}: {accidents}")
    run = training.new()
    for happenings, faults, damaged in accidents:
        before = verified_steps(run)
        training.attempt(run, happenings, faults)
        after = verified_steps(run)
        assert not before or after[-1] >= before[-1], "the newest checkpoint that verifies never falls back"
        damage(run, damaged, dice)
        if before := verified_steps(run):
            # What was damaged is replaced by the next save of its step; until then it is there, and refused.
            for checkpoint in run.path.glob("checkpoint-*"):
                if int(checkpoint.name.split("-")[1]) not in before:
                    checkpoint.rename(run.path / f"damaged-{checkpoint.name}-{len(list(run.path.iterdir()))}")
    training.finish(run)
    assert stages(run.path) == []
    found, wanted = _tail(training, run)
    assert found == wanted


def _tail(training: Training, run: RunDir) -> tuple[object, object]:
    """All steps, but those whose lines a damaged metrics file has lost."""
    from tests.faults.training import numbers

    found, wanted = numbers(run), numbers(training.whole)
    kept = {line[0] for line in found}
    return found, [line for line in wanted if line[0] in kept]
