"""Runs of a few steps, each made once for the session, for tests that read what a run has written."""

from __future__ import annotations

import hashlib
from typing import Any

from fsdp_tune.run.directory import RunDir
from tests.parity import runs
from tests.parity.bench import Bench, Worker
from tests.parity.cases import Case
from tests.session import made_once

STEPS = 3
"""The first update is that of step 2, since the learning rate warms up; the last step has a checkpoint."""
SHORT: dict[str, Any] = {
    "training": {"max_steps": STEPS, "save_steps": STEPS, "eval_strategy": "no", "witness": "first"}
}
COMPARED: dict[str, Any] = {
    "training": {
        "max_steps": 6,
        "save_steps": 6,
        "eval_strategy": "steps",
        "eval_steps": 6,
        "witness": "first",
    }
}
"""Changes of a run whose trajectory is compared with `bench.reference(…, steps=6)`."""


def short_recipe(bench: Bench, case: Case, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    return runs.merged(runs.merged(case.recipe(str(bench.model(case.architecture))), SHORT), changes or {})


def new_run(bench: Bench, case: Case = Case(), changes: dict[str, Any] | None = None) -> RunDir:  # noqa: B008  it is frozen
    """Return the directory of a run that has not started."""
    return bench.written_run(short_recipe(bench, case, changes), packed=case.packed)


def trained(
    bench: Bench,
    case: Case = Case(),  # noqa: B008
    changes: dict[str, Any] | None = None,
    worker: Worker | None = None,
) -> RunDir:
    """Return a new run that has finished."""
    run = new_run(bench, case, changes)
    runs.train(bench.on_ranks, run, case.ranks, worker or (runs.run_with_kernels if case.kernels else None))
    return run


def short_run(bench: Bench, case: Case = Case(), changes: dict[str, Any] | None = None) -> RunDir:  # noqa: B008
    """Return the finished run of a case with changes, which is made once. Do not write into it."""
    digest = hashlib.sha256(repr((case, changes)).encode()).hexdigest()[:16]

    def make(folder: Any) -> None:
        run = bench.written_run(short_recipe(bench, case, changes), packed=case.packed, folder=folder)
        runs.train(bench.on_ranks, run, case.ranks, runs.run_with_kernels if case.kernels else None)

    return RunDir(made_once(f"{bench.folder.name}/short-{digest}", make))
