"""`rehearse --parity`: each switch changes alone, and a wrong number fails its check."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.recipe.rules.experts import EXPERT_PARALLEL_RULES
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.world import WORLD_RULES, World
from fsdp_tune.rehearsal.parity_checks import STEPS, _compared, make_comparable, switches
from fsdp_tune.rehearsal.scaled_recipe import ScaledRecipe
from fsdp_tune.run.directory import RunDir

WRITTEN: dict[str, Any] = {
    "model": {"from_config": {"model_type": "gpt2", "resid_pdrop": 0.1, "n_layer": 2}, "freeze": ["wte*"]},
    "data": {"train": [{"path": "builtin:arithmetic"}], "shuffle": False},
    "fsdp": {
        "sharding_strategy": "SHARD_GRAD_OP",
        "activation_checkpointing": "full",
        "offload_params": True,
    },
    "training": {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "optim": "sgd",
        "max_steps": 24,
        "weight_decay": 0.1,
    },
    "launch": {"num_processes": 2, "device": "cpu"},
}
REFERENCE = {"loss": [5.0, 4.0], "grad_norm": [1.0, 2.0], "supervised_tokens": [10, 12], "eval_loss": 3.0}


def test_each_switch_changes_one_setting() -> None:
    names = [switch.name for switch in switches(make_comparable(ScaledRecipe(WRITTEN)).document)]
    assert names == [
        "as written, in fp32",
        "sharding_strategy FULL_SHARD",
        "sharding_strategy NO_SHARD",
        "activation_checkpointing none",
        "activation_checkpointing selective",
        "offload_params false",
        "auto_wrap_policy NO_WRAP",
        "1 × 2 ranks × 4 accumulation",
        "2 × 1 rank × 4 accumulation",
        "as written, in bf16",
    ]


def test_shared_rows_are_compared_with_one_rank_that_shares_none() -> None:
    shared = WRITTEN | {"parallelism": {"sp_size": 2}, "launch": {"num_processes": 4, "device": "cpu"}}
    found = {
        switch.name: switch.changes for switch in switches(make_comparable(ScaledRecipe(shared)).document)
    }
    assert found["1 × 2 groups of 2 ranks × 4 accumulation"]["training"]["gradient_accumulation_steps"] == 4
    alone = found["2 × 1 rank × 4 accumulation"]
    assert (alone["parallelism"], alone["launch"]) == ({"sp_size": 1}, {"num_processes": 1})


def test_switches_leave_out_recomputation_that_slices_of_the_mlp_exclude() -> None:
    names = [switch.name for switch in switches(WRITTEN | {"kernels": {"mlp_slice_tokens": 5}})]
    assert "activation_checkpointing selective" not in names
    assert "activation_checkpointing none" in names


@pytest.mark.parametrize(
    ("ranks", "ep_size", "undivided"),
    [
        (
            2,
            2,
            {"sharding_strategy NO_SHARD", "activation_checkpointing selective", "auto_wrap_policy NO_WRAP"},
        ),
        (
            4,
            4,
            {
                "sharding_strategy NO_SHARD",
                "sharding_strategy HYBRID_SHARD",
                "offload_params true",
                "2 × 1 rank × 8 accumulation",
            },
        ),
    ],
)
def test_experts_are_undivided_where_a_switch_excludes_it(
    ranks: int, ep_size: int, undivided: set[str]
) -> None:
    """Every switch is a recipe that is trained, and the division of experts is a switch of its own."""
    fsdp = {"sharding_strategy": "FULL_SHARD", "ep_size": ep_size}
    base = make_comparable(
        ScaledRecipe(WRITTEN | {"fsdp": fsdp, "launch": {"num_processes": ranks, "device": "cpu"}})
    ).document
    found = switches(base)
    names = {switch.name for switch in found}
    assert {f"{name}, ep_size 1" for name in undivided} | {
        "as written, in fp32",
        "ep_size 1",
        "as written, in bf16",
    } <= names
    for switch in found:
        document = base | {"fsdp": fsdp | switch.changes.get("fsdp", {})}
        launch = {"num_processes": ranks, "device": "cpu"} | switch.changes.get("launch", {})
        recipe = Recipe.model_validate(document | {"launch": launch})
        world = World(launch["num_processes"], 1)
        assert [each for rule in EXPERT_PARALLEL_RULES for each in rule(recipe)] == []
        assert [
            each for rule in WORLD_RULES for each in rule(recipe, world) if "fsdp.ep_size" in each.keys
        ] == []
    (alone,) = (switch for switch in found if switch.name == "ep_size 1")
    assert alone.changes == {"fsdp": {"ep_size": 1}}


def test_incomparable_settings_are_replaced_and_listed() -> None:
    small = make_comparable(ScaledRecipe(WRITTEN))
    assert small.document["model"] == {
        "from_config": {"model_type": "gpt2", "resid_pdrop": 0.0, "n_layer": 2}
    }
    assert small.document["training"]["max_steps"] == STEPS
    assert small.document["training"]["weight_decay"] == 0.1
    assert small.document["data"]["shuffle"] is True
    assert any("resid_pdrop" in line for line in small.changes)
    assert WRITTEN["model"]["freeze"], "the recipe itself stays"


def run_with(tmp_path: Path, **changes: Any) -> RunDir:
    columns = {
        "loss": REFERENCE["loss"],
        "grad_norm": REFERENCE["grad_norm"],
        "supervised_tokens": [10, 12],
    } | changes
    lines = [
        {"step": at + 1, **{key: columns[key][at] for key in ("loss", "grad_norm", "supervised_tokens")}}
        for at in range(2)
    ]
    lines.append({"step": 2, "eval_loss": columns.get("eval_loss", 3.0)})
    tmp_path.joinpath("metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunDir(tmp_path)


def test_equal_values_pass(tmp_path: Path) -> None:
    assert _compared(run_with(tmp_path, loss=[5.0, 4.0 * (1 + 1e-7)]), REFERENCE)[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": [5.0, 4.001]},
        {"loss": [5.0, math.nan]},
        {"grad_norm": [1.0, None]},
        {"grad_norm": [1.0, 2.0 * 8]},
        {"supervised_tokens": [12, 10]},
        {"eval_loss": 3.01},
        {"eval_loss": "nan"},
    ],
    ids=str,
)
def test_one_wrong_value_fails(changes: dict[str, Any], tmp_path: Path) -> None:
    assert not _compared(run_with(tmp_path, **changes), REFERENCE)[0]


def test_reference_that_is_no_number_is_no_agreement(tmp_path: Path) -> None:
    found = REFERENCE | {"loss": [REFERENCE["loss"][0], math.nan]}
    assert not _compared(run_with(tmp_path), found)[0]
