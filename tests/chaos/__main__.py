"""Disturb real runs at random for a while, and check what must hold after each end.
`scripts/test --suite chaos` calls it."""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.rank_files import read_outcome
from tests.chaos import page
from tests.chaos.draw import MOST_IN_A_ROW, PHASES, Disturbance, Setting, Tally, draw_start, kinds_on
from tests.chaos.ends import Attempt, judge
from tests.chaos.invariants import (
    leftovers,
    listening,
    lost_checkpoints,
    merged_differences,
    step_differences,
)
from tests.chaos.play import HANG_SECONDS, KEEP, LAST_STEP, Play, Stage, compile_shim, port_of
from tests.cuda.devices import DEVICES
from tests.faults.checks import verified_steps
from tests.faults.scoreboard import record_chaos
from tests.launch.namespaces import Wire, two_namespaces

MINUTES_FOR_ALL = 30.0
"""A test this long fails if it has not hit every phase and every kind."""
LEAST_ENDS = 4
"""After so many starts a run must have finished: none after the last disturbance is disturbed."""


@dataclass
class Chaos:
    """All runs of one seed. `violations` are printed as they are found."""

    folder: Path
    dice: random.Random
    machines: int
    device: str = "cpu"
    wire: Wire | None = None
    tally: Tally = field(default_factory=Tally)
    violations: list[str] = field(default_factory=list)
    attempts: int = 0
    stories: int = 0
    reference: RunDir | None = None
    lengths: dict[str, float] = field(default_factory=dict)
    """The shortest time that each phase has taken, in seconds: the machine may become faster at any time."""

    def __post_init__(self) -> None:
        self.shim = compile_shim(self.folder)

    def undisturbed(self) -> None:
        """Run the reference, which every other run must equal."""
        stage = self._stage("reference")
        play = Play(stage, (), self.dice, self.lengths)
        attempt = play.run(resume=False)
        if set(attempt.codes) != {0}:
            raise SystemExit(f"the undisturbed run failed: {attempt.codes}\n{attempt.text}")
        self.reference = stage.run
        self._note_lengths(play)

    def _note_lengths(self, play: Play) -> None:
        """Of phases that came to their end."""
        for phase, seconds in play.lengths().items():
            self.lengths[phase] = min(seconds, self.lengths.get(phase, seconds))

    def story(self, planned: list[list[Disturbance]] | None = None) -> None:
        """One run from its start to its end, of which up to `MOST_IN_A_ROW` starts are disturbed; as planned
        by start, or as drawn."""
        self.stories += 1
        total = self.dice.randint(1, MOST_IN_A_ROW) if planned is None else len(planned)
        stage = self._stage(f"run-{self.stories}")
        before = len(self.violations)
        for number in range(total + LEAST_ENDS):
            disturbances: list[Disturbance] = []
            if number < total:
                disturbances = planned[number] if planned is not None else self._drawn(stage.run)
            attempt = self._attempt(stage, disturbances, resume=number > 0)
            if set(attempt.codes) == {0}:
                self._check_finished(stage)
                break
        else:
            self._violated(stage, "the run does not finish")
        if len(self.violations) == before:
            shutil.rmtree(stage.folder)

    def _stage(self, name: str) -> Stage:
        folder = self.folder / name / "place"
        folder.mkdir(parents=True)
        if name == "reference":
            return Stage(folder, self.shim, self.machines, self.device, wire=self.wire)
        restarts, verify = self.dice.choice((0, 0, 2)), self.dice.choice(("quick", "quick", "full"))
        return Stage(folder, self.shim, self.machines, self.device, restarts, verify, self.wire)

    def _drawn(self, run: RunDir) -> list[Disturbance]:
        first_step = max(verified_steps(run), default=0) if run.path.is_dir() else 0
        outcome = read_outcome(run, 0)
        is_trained = outcome is not None and outcome.exit_code == 0
        return draw_start(
            self.dice, self.tally, Setting(self.machines, HANG_SECONDS, first_step, LAST_STEP, is_trained)
        )

    def _attempt(self, stage: Stage, disturbances: list[Disturbance], *, resume: bool) -> Attempt:
        self.attempts += 1
        started = time.monotonic()
        play = Play(stage, disturbances, self.dice, self.lengths)
        attempt = play.run(resume=resume)
        self._note_lengths(play)
        for each in play.done:
            self.tally.add(each, is_hit=True)
        for each in play.pending:
            self.tally.add(each, is_hit=False)
        what = [*map(str, play.done), *(f"{each}: it did not come" for each in play.pending)]
        target = f" → {attempt.target}" if attempt.target is not None else ""
        at = (
            f" at step {attempt.situation.step}"
            if attempt.situation is not None and attempt.situation.step
            else ""
        )
        how = f"exit {', '.join(map(str, attempt.codes))}" + (
            f", {attempt.restarts} restarts" if attempt.restarts else ""
        )
        problems = f": {'; '.join(attempt.problems)}" if attempt.problems else ""
        story = f"{stage.folder.parent.name}: {'; '.join(what) or 'undisturbed'}{target}{at}"
        print(f"{story}: {how} after {time.monotonic() - started:.0f} s{problems}", flush=True)
        found = judge(
            play.done[-1] if play.done else None, attempt, hang_seconds=HANG_SECONDS, last_step=LAST_STEP
        )
        if stage.run.path.is_dir():
            found += lost_checkpoints(stage.run, attempt.saved, KEEP)
            found += leftovers(stage.run, is_finished=set(attempt.codes) == {0}, seen=stage.pids)
            found += listening(port) if (port := port_of(stage.run)) is not None else []
        for each in found:
            self._violated(stage, each, attempt)
        return attempt

    def _check_finished(self, stage: Stage) -> None:
        assert self.reference is not None
        for each in [
            *step_differences(stage.run, self.reference),
            *merged_differences(stage.run, self.reference),
        ]:
            self._violated(stage, each)

    def _violated(self, stage: Stage, what: str, attempt: Attempt | None = None) -> None:
        self.violations.append(f"{stage.folder.parent.name}: {what}")
        print(f"    VIOLATED {what}", flush=True)
        if attempt is not None:
            (stage.folder / f"attempt-{self.attempts}.log").write_text(attempt.text, encoding="utf-8")

    def summary(self) -> str:
        """Return what was done, in one sentence."""
        machines = "one machine" if self.machines == 1 else f"{self.machines} machines (network namespaces)"
        gpus = " with emulated GPUs" if self.device == "cuda" else ""
        return (
            f"{self.stories} runs on {machines}{gpus}, {self.attempts} starts, {self.tally.count()} "
            f"disturbances, {len(self.violations)} violations."
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/test --suite chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="start no other run after so long (10)")
    parser.add_argument("--seed", type=int, default=0, help="of the disturbances (0)")
    parser.add_argument(
        "--machines",
        type=int,
        choices=(1, 2),
        default=1,
        help="2: network namespaces with one rank each; needs root",
    )
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="cuda: emulated GPUs")
    parser.add_argument(
        "--write",
        action="store_true",
        help="keep the counts in docs/evidence/data/faults.json, and write docs/evidence/faults.md",
    )
    options = parser.parse_args()
    if options.write and options.device != "cpu":
        parser.error("--write: the page holds runs on the CPU")
    # By way of the clean-up that ends the run in progress. Handlers are not inherited as ignored signals are,
    # by `nohup` or a shell's `&`: runs would ignore them too.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    with two_namespaces() if options.machines > 1 else contextlib.nullcontext() as wire:
        chaos = Chaos(folder, random.Random(options.seed), options.machines, options.device, wire)
        deadline = time.monotonic() + 60 * options.minutes
        chaos.undisturbed()
        while time.monotonic() < deadline:
            chaos.story()
    print(f"\nseed {options.seed}: {chaos.summary()}\n\n{page.table(chaos.tally)}\n")
    never = [phase for phase in PHASES if not chaos.tally.count(phase=phase)] + [
        kind for kind in kinds_on(options.machines) if not chaos.tally.count(kind)
    ]
    if never:
        print(f"never hit: {', '.join(never)}")
    if options.write:
        summary = f"Seed {options.seed}, {options.minutes:.0f} minutes: {chaos.summary()}"
        record_chaos(page.part(options.machines, summary, chaos.tally))
    if chaos.violations:
        print(f"violations ({folder} has the runs):", *chaos.violations, sep="\n  ")
    else:
        shutil.rmtree(folder)
    return 1 if chaos.violations or (never and options.minutes >= MINUTES_FOR_ALL) else 0


if __name__ == "__main__":
    raise SystemExit(main())
