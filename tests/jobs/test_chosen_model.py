"""Which model answers: of a run, of one of its checkpoints, or another, with or without its base."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem
from fsdp_tune.jobs import chosen_model
from fsdp_tune.jobs.chosen_model import ChosenModel, choose_model
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import GenerateOptions
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from tests.run.test_checkpoint_scores import save, write_recipe

BASE = GenerateOptions(base=True)


class Noted(Observer):
    def __init__(self) -> None:
        self.codes: list[str] = []

    def notices(self, notices: Any) -> None:
        self.codes += [notice.code for notice in notices]


class Choice:
    """A run and a base next to it, from which a model is chosen."""

    def __init__(self, folder: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.base = RunDir(folder / "run"), folder / "base"
        self.noted, self._stack = Noted(), stack
        self.merges: list[MergeOptions] = []
        self.model(self.base)
        monkeypatch.setattr(chosen_model.merging, "merge_checkpoint", self._merge)

    def started(self, *, lora: bool, name: str | None = "base") -> None:
        """Write the recipe of the run."""
        self.run.model.mkdir(parents=True)
        start: dict[str, Any] = {"name_or_path": str(self.base) if name == "base" else name}
        start |= {} if name else {"from_config": {"model_type": "llama"}}
        write_recipe(self.run, Recipe.model_validate({"model": start} | ({"lora": {}} if lora else {})))

    def model(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")

    def adapter(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = {"peft_type": "LORA", "base_model_name_or_path": str(self.base)}
        (folder / "adapter_config.json").write_text(json.dumps(config))

    def _merge(self, source: Path, options: MergeOptions, *_: Any) -> SimpleNamespace:
        self.merges.append(options)
        assert options.output is not None
        self.adapter(options.output)
        step = options.step or 8
        return SimpleNamespace(notices=(Notice("merged", ""),), source=source / f"checkpoint-{step}")

    def choose(self, name: Path | None = None, options: GenerateOptions = GenerateOptions()) -> ChosenModel:
        return choose_model(str(name or self.run.path), options, self.noted, self._stack)

    def refused(self, name: Path | None = None, options: GenerateOptions = GenerateOptions()) -> Problem:
        with pytest.raises(FsdpTuneError) as caught:
            self.choose(name, options)
        (problem,) = caught.value.problems
        return problem


@pytest.fixture
def choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Choice]:
    with ExitStack() as stack:
        yield Choice(tmp_path, stack, monkeypatch)


def test_run_answers_by_its_merged_model_and_its_base_on_request(choice: Choice) -> None:
    choice.started(lora=False)
    choice.model(choice.run.merged)
    found = choice.choose()
    assert (found.names, found.run) == ((str(choice.run.path),), choice.run)
    assert found.models[0].weights == str(choice.run.merged)
    found = choice.choose(options=BASE)
    assert found.names == (str(choice.run.path), str(choice.base))
    assert [model.weights for model in found.models] == [str(choice.run.merged), str(choice.base)]
    assert not found.adapter_off
    assert choice.merges == []


def test_run_from_random_weights_and_a_model_alone_have_no_base(choice: Choice) -> None:
    choice.started(lora=False, name=None)
    choice.model(choice.run.merged)
    assert choice.refused(options=BASE).message.endswith("was trained from random weights, so it has no base")
    assert choice.refused(choice.base, BASE).message.endswith(
        "is neither a run nor an adapter, so it has no base"
    )


def test_adapter_answers_with_its_base_from_the_same_weights(choice: Choice) -> None:
    """Without `--base`, the merged model needs none."""
    choice.started(lora=True)
    choice.model(choice.run.merged)
    choice.adapter(choice.run.adapter)
    assert choice.choose().models[0].weights == str(choice.run.merged)
    found = choice.choose(options=BASE)
    (model,) = found.models
    assert (model.weights, model.adapter) == (str(choice.base), str(choice.run.adapter))
    assert found.names[1] == f"{choice.base} (without the adapter)"
    assert found.adapter_off
    assert choice.merges == []


@pytest.mark.parametrize(
    ("exported", "options", "step"),
    [
        ("", GenerateOptions(), None),
        ("merged", BASE, None),
        ("merged", GenerateOptions(checkpoint="5"), 5),
        ("merged", GenerateOptions(checkpoint="runs/x/checkpoint-5/"), 5),
    ],
)
def test_adapter_of_a_checkpoint_is_written_into_a_directory_that_ends_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exported: str, options: GenerateOptions, step: int | None
) -> None:
    with ExitStack() as stack:
        choice = Choice(tmp_path, stack, monkeypatch)
        choice.started(lora=True)
        if exported:
            choice.model(choice.run.merged)
        found = choice.choose(options=options)
        (merge,) = choice.merges
        assert (merge.step, merge.adapter) == (step, True)
        (model,) = found.models
        assert model.adapter == str(merge.output)
        assert found.names[0] == str(choice.run.path / f"checkpoint-{step or 8}")
        assert choice.noted.codes == ["merged"]
    assert merge.output is not None
    assert not merge.output.parent.exists()


def test_checkpoint_that_is_named_as_the_model_is_chosen(choice: Choice) -> None:
    choice.started(lora=True)
    choice.choose(save(choice.run, 20))
    assert [merge.step for merge in choice.merges] == [20]


def test_sharded_run_is_refused_with_the_command_that_merges_it(choice: Choice) -> None:
    choice.started(lora=False)
    problem = choice.refused()
    assert problem.message.endswith("has neither a merged model nor a complete checkpoint")
    assert problem.hint == f"`fsdp-tune status {choice.run.path}` shows what it has"
    save(choice.run, 20)
    problem = choice.refused()
    assert "holds sharded checkpoints, and no merged model" in problem.message
    assert problem.hint == f"`fsdp-tune merge-checkpoint {choice.run.path}` writes one"
    problem = choice.refused(choice.run.checkpoint(20))
    assert problem.message == f"checkpoint-20 of `{choice.run.path}` is sharded, and has to be merged first"
    assert problem.ways_out == (
        f"fsdp-tune merge-checkpoint {choice.run.path} --step 20 --output {choice.run.path}/merged-20",
        f"fsdp-tune chat {choice.run.path}/merged-20",
    )


def test_checkpoint_is_a_step_of_a_run(choice: Choice) -> None:
    choice.started(lora=True)
    problem = choice.refused(options=GenerateOptions(checkpoint="newest"))
    assert (problem.code, problem.hint) == ("wrong-value", "--checkpoint 500")
    problem = choice.refused(choice.base, GenerateOptions(checkpoint="5"))
    assert problem.message == f"`--checkpoint` chooses a checkpoint of a run, and `{choice.base}` is none"


def test_model_of_a_run_that_is_named_by_its_directory_is_known_to_be_out_of_date(
    choice: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts have the format of the run."""
    choice.started(lora=True)
    choice.adapter(choice.run.adapter)
    asked: list[tuple[RunDir, Path]] = []
    monkeypatch.setattr(
        chosen_model,
        "newer_checkpoint",
        lambda run, folder: asked.append((run, folder)) or (Notice("merge-out-of-date", ""),),
    )
    assert choice.choose(choice.run.adapter).run == choice.run
    assert asked == [(choice.run, choice.run.adapter)]
    assert choice.noted.codes == ["merge-out-of-date"]
    assert choice.choose(choice.base).run is None
