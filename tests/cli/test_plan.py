"""`plan` as a command: the recipe's own plan, the ranking, and the effect of each option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.planner.predict.mixture import with_ep_size
from fsdp_tune.recipe.read.loader import load_recipe
from tests.cli.fake_tracing import STATE_GIB, FakeTracing, replaced_tracing  # noqa: F401  a fixture
from tests.cli.in_process import answer, errors, invoke, settings
from tests.planner.test_experts import mixture
from tests.planner.test_search import AdapterTracer

pytestmark = pytest.mark.usefixtures("fake")


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    data: dict[str, Any] = {
        "model": {"from_config": {"model_type": "llama"}, "tokenizer": "builtin:arithmetic"},
        "data": {
            "train": [{"path": "builtin:arithmetic"}],
            "max_length": 128,
            "cache_dir": str(tmp_path / "cache"),
        },
        "training": {"global_batch_size": 64, "per_device_train_batch_size": 1, "max_steps": 10},
    }
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(data))
    return str(file)


def words(recipe: object, *options: object, gpus: int = 8) -> list[object]:
    return ["plan", recipe, "--gpu", "A100-40GB", "--num-gpus", gpus, *options]


def printed(recipe: object, *options: object, gpus: int = 8) -> str:
    done = invoke(*words(recipe, *options, gpus=gpus))
    assert done.exit_code == 0, done.output
    return done.stdout


def planned(recipe: object, *options: object, gpus: int = 8) -> dict[str, Any]:
    return answer(*words(recipe, *options, gpus=gpus))


def test_plan_is_printed_before_the_ranking_and_tracing_is_closed(
    recipe: str, fake: type[FakeTracing]
) -> None:
    lines = printed(recipe).splitlines()
    first = {
        word: next(index for index, line in enumerate(lines) if word in line)
        for word in ("fits: yes", "ranked recipes", "more GPUs")
    }
    assert first["fits: yes"] == 0
    assert first["ranked recipes"] < first["more GPUs"]
    assert (
        sum("→" in line and "your recipe, unchanged" in line for line in lines[first["ranked recipes"] :])
        == 1
    )
    assert [each.is_closed for each in fake.made] == [True]


@pytest.mark.parametrize("state_gib", [STATE_GIB, 1000])
def test_tables_fit_120_columns_without_a_terminal(
    recipe: str, fake: type[FakeTracing], state_gib: int
) -> None:
    data = json.loads(Path(recipe).read_text())
    data["model"] = {"name_or_path": "meta-llama/Llama-3.1-8B", "tokenizer": "builtin:arithmetic"}
    Path(recipe).write_text(json.dumps(data))
    fake.state_gib = state_gib
    lines = printed(recipe, "--target", "largest-context").splitlines()
    fake.state_gib = STATE_GIB
    tables = [line for line in lines if line.startswith("  ")]
    assert len(tables) > 20
    assert max(map(len, tables)) <= 120


def test_json_is_one_document_with_the_ranking(recipe: str) -> None:
    document = planned(recipe)
    assert document["fits"] == "yes"
    assert len(document["alternatives"]) > 1
    assert document["scaling"]
    assert document["best_because"]
    yours = [each for each in document["alternatives"] if each["is_yours"]]
    assert [(each["recipe_changes"], each["step_seconds"]) for each in yours] == [
        ({}, document["step_seconds"])
    ]
    assert yours[0]["place"] >= 1


def test_no_search_needs_one_trace(recipe: str, fake: type[FakeTracing]) -> None:
    document = planned(recipe, "--no-search")
    assert document["alternatives"] == []
    assert len(fake.made[0].asked) == 1


def test_mixture_of_experts_is_planned_with_expert_parallelism(
    recipe: str, fake: type[FakeTracing], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert planned(recipe, "--no-search")["experts"] == []
    monkeypatch.setattr(fake, "result", lambda *_: mixture())
    document, lines = planned(recipe, "--no-search"), printed(recipe, "--no-search").splitlines()
    assert [row["ep_size"] for row in document["experts"]] == [1, 2, 4, 8]
    assert document["experts"][0]["step_seconds"] == document["step_seconds"]
    assert f"experts: {document['experts_because']}" in lines
    table = lines[next(index for index, line in enumerate(lines) if "rows of an expert" in line) :]
    assert [line.split()[0] for line in table[2:6]] == ["1", "2", "4", "8"]
    assert max(map(len, table[:6])) <= 120
    assert [line.split()[1] == "(yours)" for line in table[2:6]] == [True, False, False, False]


def test_recipe_with_divided_experts_is_planned_with_them(
    recipe: str, fake: type[FakeTracing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fake, "result", lambda self, key: with_ep_size(mixture(), self.asked[key].fsdp.ep_size)
    )
    alone = planned(recipe, "--no-search")
    document = planned(recipe, "--no-search", *settings("fsdp.ep_size=8"))
    (row,) = (row for row in document["experts"] if row["is_yours"])
    assert row["ep_size"] == 8
    assert (
        document["step_seconds"]
        == row["step_seconds"]
        == alone["experts"][-1]["step_seconds"]
        < alone["step_seconds"]
    )
    assert document["peak_allocated_gib"] == row["peak_allocated_gib"] < alone["peak_allocated_gib"]
    assert [each["ep_size"] for each in document["experts"]] == [1, 2, 4, 8]


def test_number_of_gpus_changes_the_batch_and_reports_it(recipe: str) -> None:
    document = planned(recipe, "--no-search", gpus=3)
    assert document["num_processes"] == 3
    assert "= 66 sequences a step" in document["batch"]
    assert document["decided"] == {"training.global_batch_size": "66 instead of 64, for `--num-gpus 3`"}
    assert "training.global_batch_size: 66 instead of 64" in printed(recipe, "--no-search", gpus=3)


def test_set_values_are_not_changed_for_the_number_of_gpus(recipe: str) -> None:
    (refused,) = errors(*words(recipe, *settings("training.global_batch_size=64"), gpus=3))
    assert "is not divisible by" in refused["message"]
    assert (
        "set twice: --num-gpus 3 and --set #1"
        in invoke(*words(recipe, *settings("launch.num_processes=4"), gpus=3)).output
    )


def test_cpu_recipe_is_planned_for_the_memory_of_the_host(recipe: str) -> None:
    cpu = settings("launch.device=cpu", "launch.num_processes=2")
    document = answer("plan", recipe, *cpu)
    assert (document["gpu"], document["num_processes"], document["step_seconds"]) == ("CPU rank", 2, None)
    assert document["usable_gib"] > 0
    assert "process" in document["components"]
    assert (document["alternatives"], document["scaling"]) == ([], [])
    (refused,) = errors("plan", recipe, "--target", "cheapest", *cpu)
    assert "--gpu" in f"{refused['message']} {refused['hint']}"


def test_recipe_without_tokenizer_and_data_is_planned_and_ranked(tmp_path: Path) -> None:
    file = tmp_path / "bare.yaml"
    file.write_text("model: {from_config: {model_type: llama}}\ndata: {max_length: 128}\n")
    document = planned(str(file))
    assert len(document["alternatives"]) > 1
    assert any(text.startswith("run.steps") for text in document["unknown"])


def test_recipe_written_by_search_loads(tmp_path: Path, recipe: str, fake: type[FakeTracing]) -> None:
    """Keys that belong to the user's strategy and batch must not stay next to another strategy and batch."""
    data = json.loads(Path(recipe).read_text())
    data["fsdp"] = {"sharding_strategy": "FULL_SHARD", "reshard_after_forward": True}
    data["training"] |= {"gradient_accumulation_steps": 8}
    data["launch"] = {"device": "cpu", "num_processes": 8}
    Path(recipe).write_text(json.dumps(data))
    best = tmp_path / "best.yaml"
    document = planned(recipe, "--write", str(best))
    assert "fsdp.sharding_strategy" in document["alternatives"][0]["recipe_changes"], (
        "else this shows nothing"
    )
    loaded = load_recipe(str(best), ["launch.device=cuda"]).recipe
    assert (
        loaded.fsdp.sharding_strategy
        == document["alternatives"][0]["recipe_changes"]["fsdp.sharding_strategy"]
    )
    assert loaded.fsdp.reshard_after_forward is None
    assert "device: cuda" in best.read_text()
    again = planned(str(best), "--no-search")
    assert again["step_seconds"] == pytest.approx(document["alternatives"][0]["step_seconds"])


@pytest.mark.parametrize("options", [(), ("--exact",)])
def test_exact_option_is_passed_to_the_trace(
    recipe: str, fake: type[FakeTracing], options: tuple[str, ...]
) -> None:
    planned(recipe, "--no-search", *options)
    assert fake.made[0].exact is bool(options)


@pytest.mark.parametrize(
    ("target", "key"), [("cheapest", "launch.num_processes"), ("largest-context", "data.max_length")]
)
def test_target_changes_the_first_recipe(
    recipe: str, tmp_path: Path, target: str, key: str, fake: type[FakeTracing]
) -> None:
    fake.state_gib = 16
    best = tmp_path / "best.yaml"
    first = planned(recipe, "--target", target, "--write", str(best))["alternatives"][0]
    fake.state_gib = STATE_GIB
    assert key in first["recipe_changes"]
    assert f"{key.split('.')[1]}: {first['recipe_changes'][key]}" in best.read_text()


def test_written_recipe_of_long_shared_rows_validates(recipe: str, tmp_path: Path) -> None:
    data = json.loads(Path(recipe).read_text())
    data["data"]["pad_to_multiple_of"] = 2  # contradicts rows that four ranks share
    Path(recipe).write_text(json.dumps(data))
    best = tmp_path / "best.yaml"
    first = planned(recipe, "--target", "largest-context", "--write", str(best))["alternatives"][0]
    loaded = load_recipe(str(best), []).recipe
    assert loaded.parallelism.sp_size == first["recipe_changes"]["parallelism.sp_size"] == 4
    assert loaded.kernels.mlp_slice_tokens == first["recipe_changes"]["kernels.mlp_slice_tokens"]
    assert loaded.data.max_length == first["recipe_changes"]["data.max_length"]
    again = planned(str(best), "--no-search")
    assert again["step_seconds"] == pytest.approx(first["step_seconds"])


def test_plan_names_the_smallest_hardware_if_nothing_fits(
    recipe: str, fake: type[FakeTracing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even offload helps: the activations of one sequence are too many."""
    monkeypatch.setattr(
        "tests.planner.test_search.KEPT", {"none": 80, "selective": 70, "full": 60, "inputs on the host": 50}
    )
    document = planned(recipe)
    assert {each["fits"] for each in document["alternatives"]} == {"no"}
    assert document["best_because"] is None
    assert document["scaling"] == []
    assert (document["smallest_hardware"]["gpu"], document["smallest_hardware"]["num_processes"]) == (
        "H100-SXM",
        8,
    )


def test_plan_shows_adapters_apart_from_the_ranking_if_nothing_fits(
    recipe: str, fake: type[FakeTracing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTracing, "trace", AdapterTracer.trace)
    monkeypatch.setattr(
        "tests.planner.test_search.KEPT", {"none": 80, "selective": 70, "full": 60, "inputs on the host": 50}
    )
    own = json.loads(Path(recipe).read_text())
    own["model"] = {"name_or_path": "meta-llama/Llama-3.1-8B"}
    Path(recipe).write_text(json.dumps(own))
    shown = printed(recipe)
    assert "adapters: another training, not another layout" in shown
    assert "quantization: {load: nf4}" in shown
    document = planned(recipe)
    assert not any("lora.target_modules" in each["recipe_changes"] for each in document["alternatives"])
    assert [each["recipe_changes"].get("quantization.load") for each in document["other_trainings"]] == [
        None,
        "nf4",
    ]


def test_price_of_a_gpu_gives_the_cost_of_the_run(recipe: str) -> None:
    document = planned(recipe, "--no-search", "--dollars-per-hour", "2.5")
    run = document["run"]
    assert run["dollars"] == pytest.approx(run["seconds"] / 3600 * 8 * 2.5)
    assert "dollars" in printed(recipe, "--no-search", "--dollars-per-hour", "2.5")
    unknown = planned(recipe, "--no-search")
    assert unknown["run"]["dollars"] is None
    [hint] = [each for each in unknown["unknown"] if "dollars" in each]
    assert "`--dollars-per-hour PRICE`" in hint
    (refused,) = errors(*words(recipe, "--dollars-per-hour", "nan"))
    assert refused["hint"] == "--dollars-per-hour 2.5"
