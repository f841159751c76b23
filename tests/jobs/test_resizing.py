"""The recipe of a run that continues on fewer machines is written as the plan for these machines allows
it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.core.devices import Machine
from fsdp_tune.core.errors import Notice
from fsdp_tune.jobs import resizing as jobs
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import TrainOptions
from fsdp_tune.jobs.resizing import Resizing
from fsdp_tune.recipe.read.loader import load_recipe
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir

TWO_MACHINES = """
model: {name_or_path: gpt2}
data: {train: [{path: rows.jsonl}]}
evaluation: {sets: [{path: rows.jsonl}], when: between_steps}
training: {global_batch_size: 16, per_device_train_batch_size: 1, max_steps: 4}
precision: {mixed_precision: bf16}
launch: {device: cuda, num_machines: 2, num_processes: 8, min_machines: 1, max_restarts: 1, main_process_ip: 127.0.0.1}
"""  # noqa: E501
SHARDS = {"parameters": 15.0, "optimizer state": 30.0}
"""GiB of a rank when two machines share a copy."""


@pytest.mark.parametrize(("ignore_plan", "when"), [(False, "at_end"), (True, "between_steps")])
def test_run_on_fewer_machines_without_room_between_steps_scores_after_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignore_plan: bool, when: str
) -> None:
    """Shards of twice the size take the memory in which two machines scored. A larger number of machines
    scores between steps again."""
    (tmp_path / "recipe.yaml").write_text(TWO_MACHINES)
    loaded = load_recipe(tmp_path / "recipe.yaml")
    written: list[Recipe] = []
    said: list[Notice] = []

    def resolved(sized: Any, *_: Any, **__: Any) -> Any:
        return resolve(sized.recipe, Machine("cuda", 4, 8, "H100"), cwd=tmp_path, assume="cuda")

    def planned(recipe: Recipe) -> Any:
        components = {name: gib * 2 / recipe.launch.num_machines for name, gib in SHARDS.items()}
        plan = SimpleNamespace(
            components=components, usable_gib=79.0, device_gib=80.9, peak_reserved_gib=80.0, fits="tight"
        )
        return SimpleNamespace(recipe=recipe, reasons={}), plan, []

    monkeypatch.setattr(jobs, "resolve_recipe", resolved)
    monkeypatch.setattr(jobs, "plan_here", planned)

    def write(_run: RunDir, recipe: Recipe, *_: object) -> None:
        written.append(recipe)

    monkeypatch.setattr(jobs, "write_resized", write)
    monkeypatch.setattr(jobs, "keep_prediction", print)
    observer: Any = Observer()
    monkeypatch.setattr(observer, "notices", said.extend)
    model: Any = SimpleNamespace(parameters=10 * 10**9)
    options = TrainOptions(ignore_plan=ignore_plan)
    sizes = Resizing.of(
        loaded, resolved(loaded).recipe, RunDir(tmp_path / "run"), 0, options, observer, model
    )
    assert sizes is not None
    sizes.resize([0])
    sizes.resize([0, 1])
    assert [each.evaluation.when for each in written] == [when, "between_steps"]
    assert [each.code for each in said] == (["evaluation-at-end"] if when == "at_end" else [])
