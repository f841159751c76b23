"""Runs of the real worker on forked ranks, compared with the uninterrupted run bit for bit."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fsdp_tune.run.directory import RunDir, latest_checkpoint
from tests.faults import ranks
from tests.faults.checks import half_files, stages
from tests.faults.disk import Fault
from tests.faults.ranks import Happening
from tests.parity import runs
from tests.parity.bench import shared_bench
from tests.parity.cases import Case
from tests.parity.store import VOCABULARY
from tests.ranks import End, Ranks
from tests.session import made_once

STEPS = 12
CASE = Case("gpt2-dropout", accumulation=2)
CHANGES: dict[str, Any] = {"training": {"max_steps": STEPS, "save_steps": 3, "eval_steps": 5}}
"""An epoch ends at step 6, with a short batch."""
NOTHING_LOST = ("step", "epoch", "loss", "grad_norm", "learning_rate", "tokens", "supervised_tokens")


class Training:
    """One recipe, its uninterrupted run, and runs of it that are interrupted."""

    def __init__(
        self,
        on_ranks: Ranks,
        case: Case = CASE,
        changes: dict[str, Any] | None = None,
        *,
        vocabulary: int = VOCABULARY,
    ) -> None:
        self.on_ranks, self.case, self.vocabulary = on_ranks, case, vocabulary
        self.changes = runs.merged(CHANGES, changes or {})
        self.steps: int = self.changes["training"]["max_steps"]
        digest = hashlib.sha256(repr((case, self.changes, vocabulary)).encode()).hexdigest()[:16]
        self.whole = RunDir(
            made_once(
                f"whole-{on_ranks.device}-{digest}", lambda folder: self.finish(self.new(folder=folder))
            )
        )

    def new(
        self, case: Case | None = None, changes: dict[str, Any] | None = None, folder: Path | None = None
    ) -> RunDir:
        """`changes`: of what changes no number."""
        case, bench = case or self.case, shared_bench(self.on_ranks.device)
        model = bench.model(case.architecture, None if self.vocabulary == VOCABULARY else self.vocabulary)
        recipe = runs.merged(runs.merged(case.recipe(str(model)), self.changes), changes or {})
        return bench.written_run(recipe, folder=folder, vocabulary=self.vocabulary)

    def attempt(
        self,
        run: RunDir,
        happenings: Sequence[Happening] = (),
        faults: Sequence[tuple[int, Fault]] = (),
        sabotage: Sequence[tuple[str, int, int]] = (),
    ) -> list[End]:
        """One launch, from the newest checkpoint that verifies."""
        newest, _ = latest_checkpoint(run, digests=True)
        (run.path / "resume.json").write_text(
            json.dumps({"resume_from": str(newest.path) if newest else None})
        )
        ends = self.on_ranks.ends(
            self.case.ranks, ranks.train, str(run.path), tuple(happenings), tuple(faults), tuple(sabotage)
        )
        assert not any(end.stuck for end in ends), "nothing hangs"
        assert half_files(run.path) == []
        return ends

    def finish(self, run: RunDir) -> None:
        for end in self.attempt(run):
            assert end.code == 0, end.text
            assert end.value["exit_reason"] == "finished", end.value["traceback"]
        assert stages(run.path) == []

    def is_whole(self, run: RunDir) -> None:
        """Loss, norm, rate and counts of every step once, and every weight, bit for bit those of the
        uninterrupted run."""
        assert numbers(run) == numbers(self.whole)
        one, other = (runs.saved_parameters(each, self.steps) for each in (run, self.whole))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in other)


def numbers(run: RunDir) -> list[tuple[Any, ...]]:
    return [tuple(line.get(key) for key in NOTHING_LOST) for line in runs.loss_lines(run)]


def outcomes(ends: Sequence[End]) -> list[tuple[int, str]]:
    return [(end.value["exit_code"], end.value["exit_reason"]) for end in ends]


@functools.cache
def shared_training(device: str = "cpu") -> Training:
    from tests.ranks import shared_ranks

    return Training(shared_ranks(device))
