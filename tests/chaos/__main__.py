"""Disturb real runs at random for a while, and check what must hold after each end. `scripts/test-chaos` calls it."""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_tune.run_dir import RunDir
from tests.chaos import page
from tests.chaos.draw import MOST_IN_A_ROW, PHASES, Disturbance, draw
from tests.chaos.invariants import Attempt, judge, leftovers, listening, lost_checkpoints, merged_differences, step_differences
from tests.chaos.play import HANG_SECONDS, KEEP, LAST_STEP, Play, Stage, compile_shim, port_of

MINUTES_FOR_ALL_PHASES = 30.0
LEAST_ENDS = 4
"""After so many starts a run must have finished: none after the last disturbance is disturbed."""


@dataclass
class Chaos:
    """All runs of one seed. `violations` are printed as they are found."""

    folder: Path
    dice: random.Random
    machines: int
    hits: Counter[tuple[str, str]] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    """Phases that were drawn and did not come, because the run ended before or the process was not there."""
    violations: list[str] = field(default_factory=list)
    attempts: int = 0
    stories: int = 0
    reference: RunDir | None = None

    def __post_init__(self) -> None:
        self.shim = compile_shim(self.folder)

    def undisturbed(self) -> None:
        """Run the reference, which every other run must equal."""
        stage = self._stage("reference")
        attempt = Play(stage, None, self.dice).run(resume=False)
        if set(attempt.codes) != {0}:
            raise SystemExit(f"the undisturbed run failed: {attempt.codes}\n{attempt.text}")
        self.reference = stage.run

    def story(self, disturbances: list[Disturbance] | None = None) -> None:
        """One run from its start to its end, with up to three disturbances on the way; the given ones or drawn ones."""
        self.stories += 1
        planned = list(disturbances) if disturbances is not None else None
        total = self.dice.randint(1, MOST_IN_A_ROW) if planned is None else len(planned)
        stage = self._stage(f"run-{self.stories}")
        before = len(self.violations)
        for number in range(total + LEAST_ENDS):
            disturbance = None
            if number < total:
                disturbance = planned[number] if planned is not None else self._drawn()
            attempt = self._attempt(stage, disturbance, resume=number > 0)
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
        return Stage(folder, self.shim, self.machines, max_restarts=self.dice.choice((0, 0, 2)) if name != "reference" else 0)

    def _drawn(self) -> Disturbance:
        by_name: Counter[str] = Counter(self.missed)
        for (kind, phase), count in self.hits.items():
            by_name[kind] += count
            by_name[phase] += count
        return draw(self.dice, by_name, machines=self.machines, hang_seconds=HANG_SECONDS, last_step=LAST_STEP)

    def _attempt(self, stage: Stage, disturbance: Disturbance | None, *, resume: bool) -> Attempt:
        self.attempts += 1
        started = time.monotonic()
        play = Play(stage, disturbance, self.dice)
        attempt = play.run(resume=resume)
        if disturbance is not None and play.hit:
            self.hits[disturbance.kind, disturbance.phase] += 1
        elif disturbance is not None:
            self.missed[disturbance.phase] += 1
        what = "undisturbed" if disturbance is None else str(disturbance) if play.hit else f"{disturbance}: it did not come"
        target = f" → {attempt.target}" if attempt.target is not None else ""
        how = f"exit {', '.join(map(str, attempt.codes))}" + (f", {attempt.restarts} restarts" if attempt.restarts else "")
        problems = f": {'; '.join(attempt.problems)}" if attempt.problems else ""
        print(f"{stage.folder.parent.name}: {what}{target}: {how} after {time.monotonic() - started:.0f} s{problems}", flush=True)
        found = judge(disturbance, attempt, hang_seconds=HANG_SECONDS, has_restarts=stage.max_restarts > 0)
        if stage.run.path.is_dir():
            found += lost_checkpoints(stage.run, attempt.saved, KEEP)
            found += leftovers(stage.run, is_finished=set(attempt.codes) == {0}, seen=stage.pids)
            found += listening(port) if (port := port_of(stage.run)) is not None else []
        for each in found:
            self._violated(stage, each, attempt)
        return attempt

    def _check_finished(self, stage: Stage) -> None:
        assert self.reference is not None
        for each in [*step_differences(stage.run, self.reference), *merged_differences(stage.run, self.reference)]:
            self._violated(stage, each)

    def _violated(self, stage: Stage, what: str, attempt: Attempt | None = None) -> None:
        self.violations.append(f"{stage.folder.parent.name}: {what}")
        print(f"    VIOLATED {what}", flush=True)
        if attempt is not None:
            (stage.folder / f"attempt-{self.attempts}.log").write_text(attempt.text, encoding="utf-8")

    def summary(self) -> str:
        """Return what was done, in one sentence."""
        machines = "one machine" if self.machines == 1 else f"{self.machines} commands that play machines"
        return (
            f"{self.stories} runs on {machines}, {self.attempts} starts, {sum(self.hits.values())} disturbances, "
            f"{len(self.violations)} violations."
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/test-chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="start no other run after so long (10)")
    parser.add_argument("--seed", type=int, default=0, help="of the disturbances (0)")
    parser.add_argument("--machines", type=int, choices=(1, 2), default=1, help="2: two commands play two machines with one rank each")
    parser.add_argument("--write", action="store_true", help="write the counts into docs/faults.md")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    chaos = Chaos(folder, random.Random(options.seed), options.machines)
    deadline = time.monotonic() + 60 * options.minutes
    chaos.undisturbed()
    while time.monotonic() < deadline:
        chaos.story()
    print(f"\nseed {options.seed}: {chaos.summary()}\n\n{page.table(chaos.hits)}\n")
    never = [phase for phase in PHASES if not any(hit == phase for _, hit in chaos.hits)]
    if never:
        print(f"phases that were never hit: {', '.join(never)}")
    if options.write:
        text = page.DOCUMENT.read_text(encoding="utf-8")
        summary = f"Seed {options.seed}, {options.minutes:.0f} minutes: {chaos.summary()}"
        page.DOCUMENT.write_text(page.with_section(text, page.section(summary, chaos.hits)), encoding="utf-8")
    if chaos.violations:
        print(f"violations ({folder} has the runs):", *chaos.violations, sep="\n  ")
    else:
        shutil.rmtree(folder)
    return 1 if chaos.violations or (never and options.minutes >= MINUTES_FOR_ALL_PHASES) else 0


if __name__ == "__main__":
    raise SystemExit(main())
