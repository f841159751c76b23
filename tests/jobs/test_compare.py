"""A planted difference is found at the first stage that shows it, with its key as the cause."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import fsdp_tune
from fsdp_tune.comparison.side_processes import ObservingChild
from fsdp_tune.comparison.stages import Observation
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.jobs import compared_runs
from fsdp_tune.jobs.compare_answer import CompareAnswer
from fsdp_tune.jobs.options import CompareOptions
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.records import Environment
from tests.jobs.confusion import PAGE, names
from tests.jobs.pairs import (
    ADAPTERS,
    EQUAL_RUNS,
    MORE,
    NOT_COMPARABLE,
    RECIPE,
    RECIPES,
    RUNS,
    SPELLINGS,
    UNSEEN,
    RunPair,
    compare_recipes,
    compare_run_pair,
    write_sides,
)
from tests.jobs.sides import LLAMA, in_process
from tests.pages.written import training_line, written


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, its rows, and the configuration of its model."""
    folder = tmp_path_factory.mktemp("sides")
    write_sides(folder)
    return folder


@pytest.fixture(scope="module")
def known() -> dict[Any, Observation]:
    """What has been computed in `files`, whose files never change: most tests have the same side A."""
    return {}


@pytest.fixture(autouse=True)
def one_thread(files: Path, known: dict[Any, Observation], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def computed(child: ObservingChild, recipe: Recipe, until: str) -> Observation:
        if Path.cwd() != files:
            return in_process(child, recipe, until)
        key = (
            recipe.model_dump_json(),
            until,
            *(value for name, value in child.settings.items() if name != "folder"),
        )
        if key not in known:
            known[key] = in_process(child, recipe, until)
        return known[key]

    monkeypatch.chdir(files)
    monkeypatch.setattr(ObservingChild, "computed", computed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def here(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files that a test may change."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(files, tmp_path, dirs_exist_ok=True))


def compared(*overrides: str, a: str = "a.yaml", b: str | None = None, **options: Any) -> CompareAnswer:
    return fsdp_tune.compare(a, b or a, CompareOptions(**options), overrides=overrides)


def first(found: CompareAnswer) -> tuple[str, list[str]]:
    assert found.first is not None
    assert found.cause is not None
    assert not found.equal
    return found.first.stage, [key.key for key in found.cause.keys]


FIRST_OF_STAGE = {stage: (override, stage, key) for override, stage, key in reversed(RECIPES)}.values()


@pytest.mark.parametrize(
    ("override", "stage", "key"),
    [
        each if each in FIRST_OF_STAGE else pytest.param(*each, marks=pytest.mark.slow)
        for each in (*RECIPES, *MORE)
    ],
)
def test_planted_key_is_found_at_the_first_stage_that_shows_it(override: str, stage: str, key: str) -> None:
    found = compared(override)
    assert first(found) == (stage, [key])
    assert found.cause is not None
    assert found.cause.is_shown
    assert found.later == []


@pytest.mark.parametrize(
    ("override", "stage"),
    [*ADAPTERS[:3], *(pytest.param(*each, marks=pytest.mark.slow) for each in ADAPTERS[3:])],
)
def test_planted_key_of_an_adapter_is_found(override: str, stage: str) -> None:
    assert first(compared(override, a="lora.yaml")) == (stage, [override.partition("=")[0]])


@pytest.mark.slow  # tests/comparison/test_verdicts.py holds the law of each key
@pytest.mark.parametrize(("recipe", "overrides"), UNSEEN, ids=[overrides[0] for _, overrides in UNSEEN])
def test_key_that_changes_the_result_and_that_no_stage_shows_forbids_equal(
    recipe: str, overrides: tuple[str, ...]
) -> None:
    found = compare_recipes(recipe, *overrides)
    key = overrides[0].partition("=")[0]
    assert (found.verdict, found.first) == ("different", None)
    assert any(each.startswith(key) for each in found.unsettled)


FAST = {
    "four ranks with half the micro-batch",
    "the same rows with other white space",
    "warm-up as a share of the steps",
    "a copy of the model",
    "Adam's update without the fused kernel",
}


@pytest.mark.parametrize(
    ("name", "recipe", "overrides"),
    [
        pytest.param(*each, id=each[0], marks=[] if each[0] in FAST else pytest.mark.slow)
        for each in SPELLINGS
    ],
)
def test_other_spelling_of_the_same_training_is_equal(
    name: str, recipe: str, overrides: tuple[str, ...]
) -> None:
    found = compare_recipes(recipe, *overrides)
    assert (found.verdict, found.first, found.unsettled) == ("equal", None, [])
    assert bool(found.keys) == ("defaults" not in name), "a default that is written out changes no value"


FAST |= {
    "a rate that is 0.05 % off",
    "an evaluation at one step",
    "other weights of the base at one path",
    "logging every two steps",
    "no lines",
}
"""The others are slow: `tests/comparison/test_runs.py` holds the limit of each field."""


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, id=pair.name, marks=[] if pair.name in FAST else pytest.mark.slow)
        for pair in (*RUNS, *EQUAL_RUNS, *NOT_COMPARABLE)
    ],
)
def test_pair_of_runs_gets_its_verdict_with_evidence(pair: RunPair, tmp_path: Path) -> None:
    found = compare_run_pair(pair, tmp_path)
    assert (found.verdict, found.equal) == (pair.expected, pair.expected == "equal")
    assert (found.first and found.first.stage) == pair.stage
    assert found.cause is None or pair.cause in found.cause.text
    if found.equal:
        assert any("of A and" in line for line in found.compared)


def test_page_lists_every_pair_and_no_wrong_answer() -> None:
    text = PAGE.read_text()
    rows = [
        line.split(" | ")[0].removeprefix("| ").replace("\\|", "|")
        for line in text.splitlines()
        if line.endswith((" right |", " WRONG |"))
    ]
    assert rows == [name for _, name in names()], "python -m tests.jobs.confusion"
    assert "WRONG" not in text


def test_place_of_an_update_is_that_of_the_first_step() -> None:
    """In step 2 every parameter moves otherwise, as a consequence."""
    found = compared("training.parameter_groups=[{match: ['*norm*'], weight_decay: 0.1}]")
    assert found.first is not None
    assert "norm" in found.first.place
    assert found.first.place.endswith("step 1")


def test_verdict_names_what_it_rests_on() -> None:
    found = compared("output_dir=elsewhere", rows=8)
    assert found.verdict == "equal"
    assert "tokens of the first rows: 8 compared" in found.compared
    assert any("rows after the first 8" in line for line in found.not_compared)
    beyond = compare_recipes("a.yaml", "data.train=[{path: spaced.jsonl}]", rows=8)
    assert (beyond.verdict, beyond.unsettled) == ("not_comparable", ["data.train[0].path"])


def test_equal_recipes_are_equal_and_what_was_not_compared_is_listed() -> None:
    found = compared("output_dir=elsewhere", "training.logging_steps=1")
    assert found.equal
    assert (found.first, found.cause, found.keys[0].changes_numbers) == (None, None, False)
    assert {stage.status for stage in found.stages} == {"equal"}
    assert [stage.detail for stage in found.stages if stage.detail] == []
    assert any("random weights" in line for line in found.not_compared)
    assert any("sharding" in line for line in found.not_compared)


def test_every_cause_is_found_one_after_another() -> None:
    found = compared(
        "training.weight_decay=0.1", "data.loss_on=last_assistant", "training.learning_rate=2e-3"
    )
    assert first(found) == ("labels", ["data.loss_on"])
    later = [
        (each.difference.stage, [key.key for key in each.cause.keys] if each.cause else None)
        for each in found.later
    ]
    assert later == [("rate", ["training.learning_rate"]), ("update", ["training.weight_decay"])]
    assert found.cause is not None
    assert found.cause.hint is not None
    assert "--set data.loss_on=auto" in found.cause.hint


def test_keys_that_only_together_make_the_difference_vanish_are_both_named(here: Path) -> None:
    two = {
        "learning_rate": 2e-3,
        "parameter_groups": [{"match": ["*norm*"], "learning_rate": 1e-3}],
        "optim": "sgd",
    }
    (here / "a.yaml").write_text(
        yaml.safe_dump(RECIPE | {"data": RECIPE["data"] | {"packing": True, "max_length": 128}})
    )
    changed = {"data": RECIPE["data"] | {"max_length": 32}, "training": RECIPE["training"] | two}
    (here / "b.yaml").write_text(yaml.safe_dump(RECIPE | changed))
    found = compared(b="b.yaml")
    stage, keys = first(found)
    assert (stage, sorted(keys)) == ("rows", ["data.max_length", "data.packing"])
    assert next(each.difference.stage for each in found.later) == "rate"


def test_key_that_no_stage_shows_makes_recipes_different_and_is_listed() -> None:
    found = compared("training.on_nonfinite=skip")
    assert (found.equal, found.first) == (False, None)
    assert "`training.on_nonfinite`: no stage shows an effect" in found.not_compared
    assert (found.a.overrides, found.b.overrides[-1].partition("=")[0]) == ([], "training.on_nonfinite")


def test_order_of_a_stream_is_not_called_equal() -> None:
    found = compared("data.streaming=true", "training.max_steps=30")
    status = {stage.name: stage.status for stage in found.stages}
    assert (status["tokens"], status["order"], status["items"]) == ("equal", "not_compared", "not_compared")
    (line,) = [line for line in found.not_compared if ": B: a stream" in line]
    assert line.startswith("order of the rows in the first steps, ")


def test_hint_sets_a_default_or_leaves_an_unset_key_out() -> None:
    found = compared("data.train=[{path: chat.jsonl, max_rows: 20}]")
    assert found.cause is not None
    assert (
        found.cause.hint == "a recipe without `data.train[0].max_rows` gives B the numbers of A at this stage"
    )
    found = compared("training.weight_decay=0.1")
    assert found.cause is not None
    assert (found.cause.keys[0].a, found.cause.keys[0].b) == (0.0, 0.1)
    assert found.cause.hint == "`--set training.weight_decay=0.0` gives B the numbers of A at this stage"


def test_hint_of_an_entry_of_a_list_sets_the_list(here: Path) -> None:
    (here / "b.yaml").write_text((here / "a.yaml").read_text().replace("chat.jsonl", "more.jsonl"))
    rows = (here / "chat.jsonl").read_text().replace("very", "less")
    (here / "more.jsonl").write_text(rows)
    found = compared(b="b.yaml")
    assert found.cause is not None
    assert found.cause.keys[0].key == "data.train[0].path"
    assert found.cause.hint is not None
    option = shlex.split(found.cause.hint.split("`")[1])
    assert compared(option[1], b="b.yaml").equal


@pytest.mark.parametrize("tolerance", [-1.0, math.nan, math.inf])
def test_tolerance_is_a_number(tolerance: float) -> None:
    with pytest.raises(FsdpTuneError, match="is not a number of 0 or more"):
        compared(tolerance=tolerance)


def test_rows_of_one_side_are_not_compared_with_drawn_ones(here: Path) -> None:
    found = compared("data.train=[{path: missing.jsonl}]")
    status = {stage.name: stage.status for stage in found.stages}
    assert {status[name] for name in ("tokens", "logits", "row_losses", "loss", "gradients", "update")} == {
        "not_compared"
    }
    assert not found.equal
    assert found.first is None


def test_random_weights_say_nothing_about_two_models(here: Path) -> None:
    shutil.copytree(here / "base", here / "other")
    found = compared("model.name_or_path=other")
    assert {stage.name: stage.status for stage in found.stages}["weights"] == "not_compared"
    assert not found.equal


def test_derived_keys_are_not_listed_as_without_effect() -> None:
    found = compared("precision.mixed_precision=bf16", "training.optim=sgd")
    assert [each.difference.stage for each in found.later] == ["update"]
    assert "model.frozen_dtype" in [key.key for key in found.keys]
    assert not any("model.frozen_dtype" in line for line in found.not_compared)


def test_data_that_cannot_be_read_is_not_compared_and_the_model_still_is(here: Path) -> None:
    (here / "chat.jsonl").unlink()
    found = compared("training.weight_decay=0.1")
    status = {stage.name: stage.status for stage in found.stages}
    assert {status[name] for name in ("tokens", "labels", "rows", "order", "items")} == {"not_compared"}
    assert first(found) == ("update", ["training.weight_decay"])
    assert any("drawn ids" in line for line in found.not_compared)
    (line,) = [line for line in found.not_compared if "chat.jsonl" in line]  # one reason of five stages
    assert line.startswith("tokens of the first rows, which of them are trained, ")


def test_model_that_cannot_be_built_is_not_compared_and_the_data_still_are(here: Path) -> None:
    (here / "base" / "config.json").unlink()
    found = compared("data.loss_on=last_assistant")
    assert first(found) == ("labels", ["data.loss_on"])
    status = {stage.name: stage.status for stage in found.stages}
    assert status["logits"] == status["update"] == "not_compared"


def test_rows_beyond_the_first_are_compared_with_more_rows(here: Path) -> None:
    rows = (here / "chat.jsonl").read_text().splitlines(keepends=True)
    (here / "other.jsonl").write_text("".join([*rows[:20], rows[20].replace("what", "which"), *rows[21:]]))
    (here / "b.yaml").write_text(
        yaml.safe_dump(RECIPE | {"data": RECIPE["data"] | {"train": [{"path": "other.jsonl"}]}})
    )
    few = compared(b="b.yaml", rows=10)
    assert (few.equal, few.first) == (False, None)  # the path of the data is a key
    assert any("rows after the first 10" in line for line in few.not_compared)
    more = compared(b="b.yaml", rows=24)
    assert first(more) == ("tokens", ["data.train[0].path"])
    assert more.first is not None
    assert "other.jsonl" not in more.first.place
    assert "chat.jsonl:21" in more.first.place


AXOLOTL = """\
base_model: base
tokenizer_config: "builtin:arithmetic"
datasets:
  - {path: chat.jsonl, ds_type: json, type: chat_template}
sequence_len: 128
micro_batch_size: 2
gradient_accumulation_steps: 1
num_epochs: 1
learning_rate: 0.001
weight_decay: 0.0
some_new_option: 3
"""


def test_foreign_file_and_its_imported_recipe_are_equal_but_for_what_was_not_carried(here: Path) -> None:
    (here / "axolotl.yaml").write_text(AXOLOTL)
    fsdp_tune.import_recipe("axolotl.yaml", output="imported.yaml", num_gpus=2)
    found = compared(a="axolotl.yaml", b="imported.yaml", num_gpus=2, tools="import")
    assert (found.a.kind, found.b.kind) == ("axolotl", "recipe")
    assert [stage.name for stage in found.stages if stage.status == "different"] == []
    assert found.equal
    assert [key.key for key in found.a.not_carried] == ["datasets[0].ds_type", "some_new_option"]
    assert any("some_new_option" in line for line in found.not_compared)
    changed = (here / "imported.yaml").read_text().replace("learning_rate: 0.001", "learning_rate: 0.01")
    (here / "imported.yaml").write_text(changed)
    assert first(compared(a="axolotl.yaml", b="imported.yaml", num_gpus=2, tools="import")) == (
        "rate",
        ["training.learning_rate"],
    )


def runs(here: Path, losses: Sequence[float], other: Sequence[float], **training: Any) -> CompareAnswer:
    written(here / "one", [training_line(step, loss) for step, loss in enumerate(losses, 1)])
    written(here / "two", [training_line(step, loss) for step, loss in enumerate(other, 1)], **training)
    return compared(a="one", b="two")


def test_two_runs_are_compared_by_their_lines(here: Path) -> None:
    found = runs(here, [3.0, 2.0, 1.0], [3.0, 2.0, 1.5])
    assert found.first is not None
    assert (found.first.stage, found.first.place) == ("steps", "step 3, loss")
    assert found.first_step is not None
    assert (found.first_step.step, found.first_step.a, found.first_step.b) == (3, 1.0, 1.5)
    assert found.cause is not None
    assert not found.cause.is_shown
    assert found.a.python is None  # nothing was computed
    assert any("the rows of step 3" in line for line in found.not_compared)


@pytest.mark.parametrize(
    ("steps", "evaluation", "rows", "left_out"),
    [
        ([1, 2, 3], None, "3", False),
        ([1, 3], None, None, True),  # step 2 may be the first that differs
        ([1, 2, 3], 2, None, False),  # an earlier evaluation differs first
    ],
    ids=["every step", "step 2 has no line", "evaluation first"],
)
def test_rows_are_named_only_of_the_step_that_differs_first(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: list[int],
    evaluation: int | None,
    rows: str | None,
    left_out: bool,
) -> None:
    monkeypatch.setattr(compared_runs, "rows_of_step", lambda _file, _recipe, step: str(step))
    for name, last in (("one", 1.0), ("two", 1.5)):
        lines = [training_line(step, last if step == 3 else 3.0) for step in steps]
        evaluations = [{"step": evaluation, "epoch": 0.2, "eval_loss": last}] if evaluation else []
        written(here / name, sorted([*lines, *evaluations], key=lambda line: line["step"]))
    found = compared(a="one", b="two")
    assert found.first_step is not None
    assert found.first_step.step == (evaluation or 3)
    assert found.rows_of_step == rows
    assert any("the rows of step 3: step 2 has no line" in line for line in found.not_compared) == left_out


def test_runs_of_one_curve_are_equal_with_the_digests_that_are_missing_listed(here: Path) -> None:
    found = runs(here, [3.0, 2.0], [3.0, 2.0])
    assert found.equal
    assert found.first_bits is None
    assert any(line.startswith("order of the rows of an epoch:") for line in found.not_compared)


def test_free_memory_of_a_machine_is_no_cause(here: Path) -> None:
    """It differs at each start, and rounds nothing."""
    for name, free, last in (("one", 60 << 30, 1.0), ("two", 50 << 30, 1.5)):
        run = written(here / name, [training_line(step, loss) for step, loss in enumerate([3.0, last], 1)])
        recorded = Environment.read(run.environment_json)
        assert recorded is not None
        host = recorded.host | {"memory_available_bytes": free}
        replace(recorded, host=host).write(run.environment_json)
    found = compared(a="one", b="two")
    assert found.cause is not None
    assert found.cause.versions == {}
    assert found.cause.text.startswith("not found: recipes and environments are equal")


def test_runs_whose_recipes_differ_get_the_cause_from_their_recipes(here: Path) -> None:
    found = runs(here, [3.0, 2.0], [3.0, 1.0], weight_decay=0.1)
    assert first(found) == ("update", ["training.weight_decay"])
    assert found.first_step is not None
    assert found.first_step.step == 2


def test_runs_of_other_data_under_one_recipe_have_other_files(here: Path) -> None:
    written(here / "one", [training_line(1)])
    written(here / "two", [training_line(1)], data_key="k2")
    found = compared(a="one", b="two")
    assert found.first is not None
    assert found.cause is not None
    assert (found.first.stage, found.cause.is_shown) == ("data", False)
    assert "the files of the data" in found.cause.text


def test_tolerance_of_zero_counts_every_bit(here: Path) -> None:
    written(here / "one", [training_line(1, 3.0)])
    written(here / "two", [training_line(1, 3.0 + 1e-9)])
    assert compared(a="one", b="two").equal
    assert not compared(a="one", b="two", tolerance=0.0).equal


def test_nothing_compared_is_not_equal(here: Path) -> None:
    for name in ("one", "two"):
        written(here / name).data_json.unlink()
    found = compared(a="one", b="two")
    assert {stage.status for stage in found.stages} == {"not_compared"}
    assert (found.verdict, found.first, len(found.not_compared)) == ("not_comparable", None, 3)


def test_code_of_a_model_is_refused_of_a_run_too(here: Path) -> None:
    run = written(here / "one")
    raw = json.loads(run.recipe_json.read_text())
    raw["model"] |= {"trust_remote_code": True, "name_or_path": "base", "from_config": None}
    run.recipe_json.write_text(json.dumps(raw))
    run.launch_json.unlink()  # it has the digest of the recipe
    with pytest.raises(FsdpTuneError) as refused:
        compared(a="one", b="a.yaml")
    assert refused.value.problems[0].code == "remote-code-not-trusted"


def test_full_model_has_its_own_weights(here: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    for seed, name in ((0, "base"), (1, "other")):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(**LLAMA)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(here / name)
    (here / "b.yaml").write_text(
        yaml.safe_dump(RECIPE | {"model": RECIPE["model"] | {"name_or_path": "other"}})
    )
    small, full = compared(b="b.yaml"), compared(b="b.yaml", model="full")
    assert (small.equal, small.first) == (False, None)
    assert first(full) == ("weights", ["model.name_or_path"])
    assert not any("random weights" in line for line in full.not_compared)


def test_run_and_a_recipe_are_compared_by_their_recipes(here: Path) -> None:
    run = written(here / "one")
    recipe = json.loads(run.recipe_json.read_text())
    same = {
        "model": recipe["model"],
        "data": recipe["data"],
        "output_dir": "x",
        "launch": {"num_processes": 2, "device": "cpu"},
    }
    training = {
        "global_batch_size": 8,
        "per_device_train_batch_size": 4,
        "max_steps": 100,
        "label_smoothing_factor": 0.1,
    }
    same["model"] = {"from_config": {"model_type": "gpt2"}, "tokenizer": "builtin:arithmetic"}
    same["data"] = {"train": [{"path": "builtin:arithmetic"}], "max_length": 32}
    (here / "b.yaml").write_text(yaml.safe_dump(same | {"training": training}))
    assert first(compared(a="one", b="b.yaml")) == ("row_losses", ["training.label_smoothing_factor"])
    with pytest.raises(FsdpTuneError) as refused:
        compared("training.seed=1", a="b.yaml", b="one")
    assert refused.value.problems[0].code == "compare-override"


def test_arithmetic_of_another_interpreter_is_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other interpreter, played by this process, has a cross-entropy that is a thousandth larger."""
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    own = torch.nn.functional.cross_entropy

    def computed(child: Any, *request: Any) -> Any:
        scale = 1.0 if child._python == sys.executable else 1.001
        monkeypatch.setattr(
            "torch.nn.functional.cross_entropy", lambda *given, **named: own(*given, **named) * scale
        )
        return in_process(child, *request)

    monkeypatch.setattr(ObservingChild, "computed", computed)
    found = compared(python=str(python))
    assert (found.a.python, found.b.python) == (sys.executable, str(python))
    assert first(found) == ("row_losses", [])
    assert found.cause is not None
    assert found.cause.is_shown
    assert "with A's interpreter B gives the same" in found.cause.text
