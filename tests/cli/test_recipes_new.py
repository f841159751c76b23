"""`recipes new`: a recipe for a model, rows and GPUs, which loads, fits and trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError, usage_error
from fsdp_tune.jobs import make_recipe as job
from fsdp_tune.jobs.recipe_options import NewRecipeOptions
from fsdp_tune.recipe.read.loader import load_recipe
from tests.cli.conftest import Cli, document
from tests.cli.fake_tracing import FakeTracing, replaced_tracing  # noqa: F401  a fixture
from tests.cli.in_process import answer, errors

OFFLOAD = "fsdp.offload_params"


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Method → what the plan of it finds: changes of the best recipe, or None if nothing fits."""
    found: dict[str, Any] = {"full": {}, "lora": {}, "qlora": {}}

    def plan(loaded: Any, *, write: Path, **_: Any) -> Any:
        recipe = loaded.recipe
        changes = found["full" if recipe.lora is None else "lora" if recipe.quantization is None else "qlora"]
        if changes is None:
            raise usage_error("nothing-fits", "no recipe fits 1 × T4, so there is none to write")
        write.write_text(loaded.text)
        return SimpleNamespace(alternatives=(SimpleNamespace(recipe_changes=changes),))

    monkeypatch.setattr(job, "plan", plan)
    return found


@pytest.mark.parametrize(
    ("full", "lora", "qlora", "method"),
    [
        ({}, {}, {}, "full"),
        (None, {}, {}, "lora"),
        ({OFFLOAD: True}, {}, {}, "lora"),
        (None, {OFFLOAD: True}, {}, "qlora"),
        (None, None, {}, "qlora"),
    ],
)
def test_first_training_that_fits_the_gpus_alone_is_taken(
    full: Any, lora: Any, qlora: Any, method: str, plans: Any, tmp_path: Path
) -> None:
    plans |= {"full": full, "lora": lora, "qlora": qlora}
    made = job.new_recipe(
        "gpt2", "builtin:arithmetic", NewRecipeOptions(gpu="T4", output=tmp_path / "new.yaml")
    )
    assert made.method == method
    assert list(made.refused) == ["full", "lora", "qlora"][: ["full", "lora", "qlora"].index(method)]
    recipe = load_recipe(made.path).recipe
    assert (recipe.lora is None, recipe.quantization is None) == (method == "full", method != "qlora")
    assert recipe.training.learning_rate == (1e-5 if method == "full" else 2e-4)


@pytest.mark.parametrize(("full", "hint"), [(None, "larger GPUs"), ({OFFLOAD: True}, "--method full")])
def test_nothing_is_written_if_nothing_fits(full: Any, hint: str, plans: Any, tmp_path: Path) -> None:
    plans |= {"full": full, "lora": None, "qlora": None}
    target = tmp_path / "new.yaml"
    with pytest.raises(FsdpTuneError) as caught:
        job.new_recipe("gpt2", "builtin:arithmetic", NewRecipeOptions(gpu="T4", output=target))
    assert caught.value.problems[0].code == "nothing-fits"
    assert hint in str(caught.value.problems[0].hint)
    assert not target.exists()
    plans["full"] = {OFFLOAD: True}
    given = NewRecipeOptions(gpu="T4", output=target, method="full")
    assert job.new_recipe("gpt2", "builtin:arithmetic", given).method == "full"
    with pytest.raises(FsdpTuneError, match="already exists"):
        job.new_recipe("gpt2", "builtin:arithmetic", replace(given, output=target))


def test_missing_rows_are_named(tmp_path: Path) -> None:
    with pytest.raises(FsdpTuneError, match=r"no\.jsonl` does not exist"):
        job.new_recipe("gpt2", str(tmp_path / "no.jsonl"), NewRecipeOptions(output=tmp_path / "new.yaml"))


WORDS = [
    "recipes",
    "new",
    "openai-community/gpt2",
    "rows.jsonl",
    "--gpu",
    "RTX4090",
    "--num-gpus",
    "2",
    "--max-length",
    "128",
]


def check(answer: dict[str, Any], folder: Path) -> None:
    """Check the document of `WORDS`, and the recipe that it has written."""
    assert (answer["method"], answer["refused"]) == ("full", {})
    text = (folder / "recipe.yaml").read_text()
    assert answer["text"] == text
    assert "Predicted:" in text
    assert "packing: true  # examples share rows, and no token sees another example" in text
    recipe = load_recipe(folder / "recipe.yaml").recipe
    assert (recipe.launch.num_processes, recipe.data.max_length) == (2, 128)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "completion": " 2"}\n' * 200)
    return tmp_path


def test_command_writes_a_recipe_that_loads(
    rows: Path, fake: type[FakeTracing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rows)
    monkeypatch.setattr(fake, "state_gib", 4)
    check(answer(*WORDS), rows)
    (error,) = errors(*WORDS)
    assert "already exists" in error["message"]


@pytest.mark.slow
@pytest.mark.e2e
def test_command_traces_the_steps_of_the_model(rows: Path, cli: Cli) -> None:
    made = cli(*WORDS, "--json")
    assert made.returncode == 0, made.stderr
    check(document(made), rows)
