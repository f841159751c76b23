"""What `plan` refuses, and for which GPU it plans."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.devices import Machine
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.jobs import plan as planning
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import Allowed
from fsdp_tune.jobs.plan import plan, planned_here
from fsdp_tune.recipe.read.loader import LoadedRecipe, load_recipe
from tests.cli.fake_tracing import FakeTracing, replaced_tracing  # noqa: F401  a fixture


@pytest.fixture
def recipe(tmp_path: Path, fake: type[FakeTracing]) -> Any:
    """Return a loaded recipe with these overrides."""
    data: dict[str, Any] = {
        "model": {"from_config": {"model_type": "llama"}, "tokenizer": "builtin:arithmetic"},
        "data": {"train": [{"path": "builtin:arithmetic"}], "max_length": 128, "cache_dir": str(tmp_path)},
        "training": {"global_batch_size": 8, "per_device_train_batch_size": 1, "max_steps": 10},
    }
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(data))

    def load(*overrides: str) -> LoadedRecipe:
        return load_recipe(file, overrides)

    return load


def refused(loaded: LoadedRecipe, **options: Any) -> tuple[str, str]:
    """Code and text of the error of a plan."""
    with pytest.raises(FsdpTuneError) as caught:
        plan(loaded, **options)
    (problem,) = caught.value.problems
    return problem.code, f"{problem.message}; {problem.hint}"


ON_CPU = ("launch.device=cpu", "launch.num_processes=1")


@pytest.mark.parametrize(
    ("overrides", "options", "words"),
    [
        ((), {"search": False, "target": "fastest"}, "`--no-search` ranks nothing"),
        ((), {"search": False, "write": Path("best.yaml")}, "`--no-search` ranks nothing"),
        ((), {"dollars_per_hour": -1.0}, "`--dollars-per-hour -1.0` is not a price"),
        ((), {"dollars_per_hour": math.inf}, "`--dollars-per-hour inf` is not a price"),
        ((), {"dollars_per_hour": math.nan}, "`--dollars-per-hour nan` is not a price"),
        (ON_CPU, {"target": "cheapest"}, "recipes are ranked for GPUs, and this one runs on the CPU"),
        (ON_CPU, {"write": Path("best.yaml")}, "recipes are ranked for GPUs, and this one runs on the CPU"),
    ],
)
def test_options_that_contradict_each_other_are_refused_before_a_trace(
    recipe: Any,
    fake: type[FakeTracing],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    options: dict[str, Any],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = refused(recipe(*overrides), **options)
    assert (code, words in text) == ("usage", True)
    assert fake.made == []


def test_recipe_that_fits_nowhere_is_not_written(
    recipe: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not even offload helps: the activations of one sequence are too many."""
    kept = {"none": 80, "selective": 70, "full": 60, "inputs on the host": 50}
    monkeypatch.setattr("tests.planner.test_search.KEPT", kept)
    best = tmp_path / "best.yaml"
    options: dict[str, Any] = {"gpu": "A100-40GB", "num_gpus": 8, "write": best}
    code, text = refused(recipe(), **options)
    assert code == "nothing-fits"
    assert text.startswith("no recipe fits 8 × A100-40GB, so there is none to write")
    assert not best.exists()


def test_memory_of_the_cpu_must_be_known(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "budget_of", lambda *_: None)
    code, text = refused(recipe(*ON_CPU))
    assert code == "no-gpu-named"
    assert text.startswith("the memory of this machine is not known")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA T1000", "this machine's NVIDIA T1000 is not in the table"),
        (None, "this machine shows no GPU"),
    ],
)
def test_plan_without_a_name_is_for_this_machines_gpu(
    recipe: Any, monkeypatch: pytest.MonkeyPatch, name: str | None, found: str
) -> None:
    machine = Machine("cuda" if name else None, 8 if name else 0, 8, name)
    monkeypatch.setattr(planning, "this_machine", lambda _kind: machine)
    if found == "A100-40GB":
        made = planned_here(recipe(), None, 8, Allowed(), Observer())
        assert (made.hardware.name, made.recipe.world_size) == (found, 8)
        return
    code, text = refused(recipe())
    assert (code, text.startswith(f"{found}; name one by `--gpu`: ")) == ("no-gpu-named", True)


def test_price_of_the_options_is_that_of_the_plan(recipe: Any) -> None:
    options: dict[str, Any] = {"gpu": "A100-40GB", "num_gpus": 8, "search": False}
    free, dear = (plan(recipe(), dollars_per_hour=price, **options) for price in (None, 2.5))
    assert (free.run.dollars, dear.run.dollars is not None) == (None, True)
