"""`prepare`, `validate` and `rehearse` around the inspections, preparations and runs that they start."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem
from fsdp_tune.jobs import validate as jobs
from fsdp_tune.jobs.inspection import Inspection
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.model.model_files import ModelFacts
from fsdp_tune.recipe.read.loader import LoadedRecipe, parse_recipe
from fsdp_tune.recipe.resolve import Resolution
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.rehearsal.lifecycle_checks import Check
from fsdp_tune.rehearsal.scaled_recipe import ScaledRecipe
from tests.data.support import ByteEncoder, write_jsonl
from tests.launch.recipes import BASE, resolved

CONFIG = {"model_type": "llama", "hidden_size": 64}


class Said(Observer):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture
def said() -> Said:
    return Said()


class Rehearsed:
    """What `rehearse` starts: checks that are played, for a recipe that is kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checks = [Check("train", passed=True, detail="4 steps", seconds=1.26)]
        self.scaled: list[dict[str, Any]] = []
        self.started: list[tuple[str, int]] = []
        self.folder = Path()
        scale = jobs.scale_down_recipe

        def scale_down(recipe: Recipe, config: Any, folder: Path, **more: Any) -> ScaledRecipe:
            self.scaled.append(more | {"lora": recipe.lora})
            self.folder = folder
            (folder / "written").touch()
            return scale(recipe, config, folder, **more | {"device": "cpu"})

        class Played:
            def __init__(self, *words: Any) -> None:
                self.words = words

            def checks(played: Any) -> Iterator[Check]:
                self.started.append(("rehearsal", played.words[2]))
                yield from self.checks

        def parity_checks(small: ScaledRecipe, *_: Any) -> Iterator[Check]:
            self.started.append(("parity", small.document["launch"]["num_processes"]))
            yield from self.checks

        found = Inspection(cast(ModelFacts, SimpleNamespace(config=CONFIG)), is_data_reachable=False)
        monkeypatch.setattr(jobs, "inspect", lambda _: found)
        monkeypatch.setattr(jobs, "scale_down_recipe", scale_down)
        monkeypatch.setattr(jobs, "Rehearsal", Played)
        monkeypatch.setattr(jobs, "parity_checks", parity_checks)


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> Rehearsed:
    return Rehearsed(monkeypatch)


Load = Callable[..., LoadedRecipe]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def make(*overrides: str, text: str = BASE) -> LoadedRecipe:
        own = (f"output_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}")
        return parse_recipe(text, tmp_path / "base.yaml", (*own, *overrides))

    return make


def test_rehearsal_that_passes_reports_its_changes_and_leaves_nothing(
    rehearsed: Rehearsed, load: Load, said: Said
) -> None:
    result = jobs.rehearse(load(), observer=said)
    assert (result.failed, result.folder, rehearsed.folder.exists()) == (None, None, False)
    assert result.changes[0].startswith("model: random weights, ")
    assert said.messages[0] == f"  {result.changes[0]}"
    assert said.messages[-1] == "ok    train: 4 steps  (1 s)"
    assert result.as_dict()["checks"] == [
        {"name": "train", "passed": True, "detail": "4 steps", "seconds": 1.3}
    ]
    assert (result.as_dict()["passed"], result.as_dict()["folder"]) == (True, None)


def test_rehearsal_that_fails_keeps_its_files_and_names_the_check(
    rehearsed: Rehearsed, load: Load, said: Said
) -> None:
    rehearsed.checks.append(Check("kill a rank", passed=False, detail="no complete checkpoint is left"))
    result = jobs.rehearse(load(), observer=said)
    assert result.failed is rehearsed.checks[1]
    assert result.folder == rehearsed.folder
    assert (rehearsed.folder / "written").exists()
    assert said.messages[-1] == "FAIL  kill a rank: no complete checkpoint is left  (0 s)"
    assert result.as_dict()["folder"] == str(rehearsed.folder)


@pytest.mark.parametrize(
    ("overrides", "given", "ranks"),
    [
        ([], None, 2),
        ([], 3, 3),
        (["launch.num_processes=4", "fsdp.sharding_strategy=HYBRID_SHARD"], None, 4),
        (["launch.num_processes=4", "parallelism.sp_size=2", "data.packing=true"], None, 4),
    ],
)
def test_ranks_of_a_rehearsal_are_as_few_as_the_recipe_lets(
    rehearsed: Rehearsed, load: Load, overrides: list[str], given: int | None, ranks: int
) -> None:
    jobs.rehearse(load(*overrides), num_processes=given)
    assert rehearsed.started == [("rehearsal", ranks)]


def test_rehearsal_is_on_the_cpu_unless_the_command_line_names_a_device(
    rehearsed: Rehearsed, load: Load
) -> None:
    on_gpus = BASE.replace("device: cpu", "device: cuda")
    jobs.rehearse(load(text=on_gpus))
    jobs.rehearse(load("launch.device=cuda"))
    assert [each["device"] for each in rehearsed.scaled] == ["cpu", "cuda"]


def test_parity_trains_all_parameters_and_says_so(rehearsed: Rehearsed, load: Load) -> None:
    adapters = ("lora={r: 4}", "model={name_or_path: gpt2, tokenizer: 'builtin:words'}")
    result = jobs.rehearse(load(*adapters), parity=True)
    assert rehearsed.scaled[0]["lora"] is None
    assert rehearsed.started == [("parity", 2)]
    assert "lora: none, since the reference trains all parameters" in result.changes
    assert (
        "lora: none, since the reference trains all parameters"
        not in jobs.rehearse(load(), parity=True).changes
    )


def test_data_are_prepared_after_the_weights_of_a_model_were_downloaded(
    tmp_path: Path, load: Load, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(jobs, "load_encoder", lambda _: SpokenEncoder())
    monkeypatch.setattr(jobs, "download_model", lambda *named: asked.append(named) or "the cache")
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": f"row {number}"} for number in range(9)])
    source = f"data.train=[{{path: {rows}}}]"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    models = ("{name_or_path: gpt2, revision: v1}", f"{{name_or_path: {tmp_path / 'model'}}}")
    for model in models:
        found = jobs.prepare(load(source, f"model={model}"), show=2, samples=1, download=True, observer=said)
        assert len(found.rows) == 2
        assert [len(each.examples) for each in found.samples] == [1]
    assert asked == [("gpt2", "v1")]
    assert said.messages == [
        "the model is in the cache",
        "the model is local: there are no weights to download",
    ]


class SpokenEncoder(ByteEncoder):
    notices: tuple[Notice, ...] = ()


@pytest.mark.parametrize("offline", [True, False])
def test_hub_is_not_asked_about_a_recipe_with_mistakes_if_it_is_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    """huggingface_hub reads the variable when it is imported, by the inspection."""
    seen: list[str | None] = []

    def inspect_remaining(*_: object, **__: object) -> Inspection:
        seen.append(os.environ.get("HF_HUB_OFFLINE"))
        return Inspection()

    monkeypatch.setattr(jobs, "inspect_remaining", inspect_remaining)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    (tmp_path / "recipe.yaml").write_text(f"{BASE}\nunknown: 1\n")
    with pytest.raises(jobs.InvalidRecipeError, match="unknown"):
        jobs.validate_file(str(tmp_path / "recipe.yaml"), [], offline=offline)
    assert seen == ["1" if offline else ""]


def test_open_key_is_decided_by_a_plan_where_the_memory_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = resolved(tmp_path, "fsdp.activation_checkpointing=auto")
    resolution = Resolution(recipe, {"launch.device": "written"}, ())
    decided = SimpleNamespace(
        recipe=resolved(tmp_path),
        reasons={"fsdp.activation_checkpointing": "it fits"},
        notices=[Notice("a", "")],
    )
    budgets: list[object] = [None, 80.0]
    monkeypatch.setattr(jobs, "visible_gpu", lambda _: None)
    monkeypatch.setattr(jobs, "budget_of", lambda *_: budgets.pop(0))
    monkeypatch.setattr(jobs, "decide_open_keys", lambda *_, **__: decided)
    model = cast(ModelFacts, SimpleNamespace())
    broken = Inspection(model, problems=[Problem("a", "b")])
    for found in (broken, Inspection()):
        assert jobs._decide(resolution, found, offline=True) is resolution
        assert found.unchecked == []
    unknown, known = Inspection(model), Inspection(model)
    assert jobs._decide(resolution, unknown, offline=True) is resolution
    (left,) = unknown.unchecked
    assert left.startswith("`fsdp.activation_checkpointing: auto`: this machine does not have")
    found = jobs._decide(resolution, known, offline=True)
    assert found.recipe is decided.recipe
    assert found.reasons == resolution.reasons | decided.reasons
    assert [each.code for each in known.notices] == ["a"]
    assert budgets == []


def test_model_with_mistakes_is_not_rehearsed(
    rehearsed: Rehearsed, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "inspect", lambda _: Inspection(problems=[Problem("a", "no such layer")]))
    with pytest.raises(FsdpTuneError, match="no such layer"):
        jobs.rehearse(load())
    monkeypatch.setattr(jobs, "inspect", lambda _: Inspection(unchecked=["the model `x`: unreachable"]))
    with pytest.raises(FsdpTuneError, match="unreachable, and the package does not have its shape"):
        jobs.rehearse(load())
    assert rehearsed.started == []


def test_row_length_of_a_rehearsal_keeps_trained_tokens_where_the_data_can_be_read(
    rehearsed: Rehearsed, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.rehearse(load())
    model = cast(ModelFacts, SimpleNamespace(config=CONFIG))
    monkeypatch.setattr(jobs, "inspect", lambda _: Inspection(model, vocabulary_size=300))
    monkeypatch.setattr(jobs, "load_encoder", lambda _: ByteEncoder())
    monkeypatch.setattr(jobs, "length_with_targets", lambda *_, **__: 333)
    jobs.rehearse(load())
    assert [(each["inputs"].data, each["inputs"].tokens) for each in rehearsed.scaled] == [
        (False, 0),
        (True, 333),
    ]
