"""The verdict: what it rests on, which keys forbid *equal*, and what settles one that differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.comparison.causes import changes_numbers, different_paths, with_passed_defaults
from fsdp_tune.comparison.stages import DATA_STAGES, STAGES, ComparedStage, Observation, StageFacts
from fsdp_tune.comparison.verdicts import unsettled_keys, verdict
from fsdp_tune.data.read.file_access import FileDigests
from fsdp_tune.recipe.key_paths import KeyPath

WEIGHTS: KeyPath = ("training", "weight_decay")
ROWS: KeyPath = ("data", "append_eos")


def stages(*names: str, **status: Any) -> list[ComparedStage]:
    return [ComparedStage(name, name, status.get(name, "equal")) for name in (*names, *status)]


@pytest.mark.parametrize(
    ("found", "unsettled", "expected"),
    [
        (stages("tokens", "update"), (), "equal"),
        (stages("tokens", update="not_compared"), (), "not_comparable"),
        (stages("update", tokens="not_compared"), (), "not_comparable"),
        (stages("data", "data_order", steps="not_compared"), (), "not_comparable"),
        (stages("data", "steps", evaluations="different"), (), "different"),
        (stages("prompt_counts", answers="not_compared"), (), "not_comparable"),
        (stages("answers"), (), "equal"),
        (stages("tokens", "update"), [WEIGHTS], "different"),
        (stages("tokens", "update"), [ROWS], "not_comparable"),
        ([], (), "not_comparable"),
    ],
)
def test_equal_rests_on_rows_and_on_what_depends_on_the_weights(
    found: Any, unsettled: Any, expected: str
) -> None:
    assert verdict(found, unsettled) == expected
    if expected == "equal":
        assert verdict(found, unsettled, failed=True) == "not_comparable"


RESULT = [
    *(
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        "eval_steps",
        "save_steps",
        "eval_strategy",
        "tf32",
    ),
    *("on_nonfinite", "weight_decay", "early_stopping"),
]


@pytest.mark.parametrize(
    "path",
    [
        *(("training", name) for name in RESULT),
        ("merge", "dtype"),
        ("merge", "base"),
        ("launch", "env", "NVIDIA_TF32_OVERRIDE"),
    ],
)
def test_key_that_changes_the_result_forbids_equal(path: KeyPath) -> None:
    assert changes_numbers(path)
    assert verdict(stages("tokens", "update"), [path]) == "different"


@pytest.mark.parametrize("name", ["eval_steps", "eval_strategy", "save_steps", "save_strategy", "eval_delay"])
def test_evaluations_that_choose_nothing_change_nothing(name: str) -> None:
    assert not changes_numbers(("training", name), chooses_by_evaluation=False)
    assert changes_numbers(("training", "load_best_model_at_end"), chooses_by_evaluation=False)


def test_scores_of_checkpoints_change_a_run_only_if_evaluations_choose_its_model() -> None:
    for path in (("evaluation", "sets"), ("evaluation", "sets", 0, "path"), ("evaluation", "every")):
        assert changes_numbers(path)
        assert not changes_numbers(path, chooses_by_evaluation=False)


def test_transport_of_the_ranks_changes_no_number() -> None:
    assert not changes_numbers(("launch", "env", "NCCL_ALGO"))


COMPLETE = ("rows", "order", "rate", "eval_rows")


def open_keys(
    path: KeyPath,
    *,
    complete: tuple[str, ...] = COMPLETE,
    different: str = "",
    recipes: Any = ({}, {}),
    chosen: Any = ({}, {}),
) -> list[KeyPath]:
    both = [ComparedStage(name, name, "different" if name == different else "equal") for name in STAGES]
    one, other = (
        Observation(
            {name: StageFacts() for name in DATA_STAGES}, {}, {}, {}, (), complete=complete, chosen=each
        )
        for each in chosen
    )
    return unsettled_keys([path], recipes, both, (one, other), FileDigests(Path("none")))


CHOSEN = {"a.weight": {"weight_decay": 0.1}}


@pytest.mark.parametrize(
    "path", [("model", "freeze", 0), ("lora", "target_modules"), ("training", "parameter_groups")]
)
def test_pattern_is_settled_if_it_chooses_the_same_parameters_of_the_model_in_its_own_size(
    path: KeyPath,
) -> None:
    assert open_keys(path, chosen=(CHOSEN, CHOSEN)) == []
    assert open_keys(path, chosen=(CHOSEN, {"a.weight": {"weight_decay": 0.0}})) == [path]
    assert open_keys(path, chosen=({}, {})) == [path], "they were not computed"
    assert open_keys(path, chosen=(CHOSEN, CHOSEN), different="update") == [path]


@pytest.mark.parametrize(
    ("a", "b", "is_settled"),
    [
        ({"optim": "adamw_torch"}, {}, True),
        ({"optim": "adamw_torch"}, {"optim_args": "state_dtype=bf16"}, False),
        ({"optim": "adafactor"}, {}, False),
    ],
)
def test_optimizer_is_settled_if_both_compute_the_same_update(
    a: dict[str, str], b: dict[str, str], *, is_settled: bool
) -> None:
    path = ("training", "optim")
    assert open_keys(path, recipes=({"training": a}, {"training": b})) == ([] if is_settled else [path])


def test_default_that_is_written_out_is_no_difference() -> None:
    a, b = {"training": {"weight_decay": 0.0, "adam_beta1": 0.9}}, {"training": {"adam_beta2": 0.95}}
    assert list(different_paths(with_passed_defaults(a), with_passed_defaults(b))) == [
        ("training", "adam_beta2")
    ]


@pytest.mark.parametrize(
    ("path", "needed"),
    [
        (("training", "warmup_steps"), "rate"),
        (("training", "max_steps"), "rate"),
        (("data", "append_eos"), "rows"),
        (("data", "max_length"), "order"),
        (("training", "data_seed"), "order"),
        (("data", "eval_packing"), "eval_rows"),
    ],
)
def test_key_is_settled_by_equal_stages_that_cover_the_run(path: KeyPath, needed: str) -> None:
    assert open_keys(path) == []
    assert open_keys(path, complete=tuple(name for name in COMPLETE if name != needed)) == [path]
    assert open_keys(path, different=needed) == [path]


@pytest.mark.parametrize(
    "path", [WEIGHTS, ("training", "seed"), ("model", "dtype"), ("training", "load_best_model_at_end")]
)
def test_two_steps_settle_no_key_that_changes_numbers(path: KeyPath) -> None:
    assert open_keys(path) == [path]


def test_other_path_of_the_same_bytes_is_settled(tmp_path: Path) -> None:
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}))
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(text)
        (tmp_path / name / "config.json").write_text("{}")

    def settled(path: KeyPath, *names: str) -> bool:
        paths = [str(tmp_path / name) for name in names]
        recipes = tuple(
            {"data": {"train": [{"path": f"{each}.jsonl"}]}, "model": {"name_or_path": each}}
            for each in paths
        )
        found = unsettled_keys([path], recipes, [], None, FileDigests(tmp_path / "cache"))  # type: ignore[arg-type]
        return not found

    for key in (("data", "train", 0, "path"), ("model", "name_or_path")):
        assert settled(key, "a", "b")
        assert not settled(key, "a", "c")
        assert not settled(key, "a", "missing")
    (tmp_path / "b" / "config.json").write_text('{"hidden_size": 2}')
    assert not settled(("model", "name_or_path"), "a", "b")
