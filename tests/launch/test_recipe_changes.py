"""Which keys of a recipe may change when a run is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.launch.command.recipe_changes import check, compare
from fsdp_tune.recipe.schema.key_effects import OnResume
from fsdp_tune.recipe.schema.keys import effect_of
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import TRAINING_FIELDS, owned_names
from tests.launch import recipes

FREE = (
    "training.logging_steps=3",
    "training.save_steps=7",
    "training.eval_steps=9",
    "launch.hang_timeout=5m",
    "fsdp.sharding_strategy=SHARD_GRAD_OP",
    "kernels.compile=false",
    "checkpoint.verify=size",
    "merge.dtype=fp32",
    "fsdp.offload_params=true",
    "training.save_total_limit=5",
    "training.dataloader_num_workers=2",
    "training.report_to=[]",
    "output_dir=elsewhere",
    "name=other",
    "data.cache_dir=/tmp/x",
)
OF_LATER_STEPS = (
    "training.learning_rate=1e-3",
    "training.lr_scheduler_type=cosine",
    "training.max_steps=200",
    "training.weight_decay=0.1",
    "training.max_grad_norm=0.5",
    "training.warmup_steps=10",
    "training.global_batch_size=16",
)
OF_COMPLETED_STEPS = (
    "model.from_config={model_type: llama, hidden_size: 32}",
    "model.tokenizer=builtin:digits",
    "model.dtype=bf16",
    "data.max_length=32",
    "data.packing=true",
    "training.seed=1",
    "training.data_seed=1",
    "training.optim=sgd",
    "training.adam_beta2=0.95",
    "precision.mixed_precision=no",
    "data.shuffle=false",
    "data.eval={rows: 5}",
)
TEXT = recipes.BASE.replace(
    "{max_steps: 100}", "{per_device_train_batch_size: 2, global_batch_size: 8, max_steps: 100}"
)
EVAL_SETS = 'data.eval=[{path: "builtin:arithmetic", split: test}]'


def resolved(tmp_path: Path, *overrides: str) -> Recipe:
    return recipes.resolved(tmp_path, *overrides, text=TEXT)


def changes(tmp_path: Path, *overrides: str) -> dict[str, OnResume]:
    return {change.key: change.kind for change in compare(resolved(tmp_path), resolved(tmp_path, *overrides))}


def test_execution_and_logging_keys_may_change_on_resume(tmp_path: Path) -> None:
    assert changes(tmp_path, "training.weight_decay=0.0", "training.max_grad_norm=1.0") == {}, "the defaults"
    for override in FREE:
        assert set(changes(tmp_path, override).values()) <= {OnResume.FREE}, override


def test_changed_keys_of_later_steps_are_accepted_and_reported(tmp_path: Path) -> None:
    for override in OF_LATER_STEPS:
        found = compare(resolved(tmp_path), resolved(tmp_path, override))
        assert [change.key for change in check(found)] == [override.partition("=")[0]]
        assert OnResume.TRAJECTORY in {change.kind for change in found}


def test_changed_keys_of_completed_steps_are_refused(tmp_path: Path) -> None:
    for override in OF_COMPLETED_STEPS:
        with pytest.raises(FsdpTuneError, match="cannot change on resume") as caught:
            check(compare(resolved(tmp_path), resolved(tmp_path, override)))
        assert caught.value.exit_code == 2
        assert override.partition("=")[0].split(".")[1] in str(caught.value)


def test_global_batch_cannot_change_under_a_curriculum(tmp_path: Path) -> None:
    stream = ("data.streaming=true", "data.curriculum=[{until_step: 9, weights: [1.0]}]")
    found = compare(resolved(tmp_path, *stream), resolved(tmp_path, *stream, "training.global_batch_size=16"))
    with pytest.raises(FsdpTuneError, match=r"global_batch_size.* cannot change on resume"):
        check(found)


def test_all_refused_keys_are_reported_at_once(tmp_path: Path) -> None:
    changed = resolved(
        tmp_path, "training.seed=1", "training.data_seed=42", "data.packing=true", "data.eval_packing=false"
    )
    with pytest.raises(FsdpTuneError) as caught:
        check(compare(resolved(tmp_path), changed))
    assert len(caught.value.problems) == 2


def test_same_global_batch_may_be_split_differently_on_resume(tmp_path: Path) -> None:
    found = changes(tmp_path, "training.per_device_train_batch_size=1", "launch.num_processes=4")
    assert found
    assert set(found.values()) == {OnResume.FREE}


def test_token_budget_may_change_on_resume(tmp_path: Path) -> None:
    found = changes(tmp_path, "training.per_device_train_batch_tokens=4096", "data.max_length=2048")
    assert {kind for key, kind in found.items() if key.startswith("training.")} <= {OnResume.FREE}


def test_optimizer_and_seeds_are_the_training_fields_that_cannot_change() -> None:
    passed = set(TRAINING_FIELDS.fields) - owned_names()
    refused = {name for name in passed if effect_of(f"training.{name}").on_resume is OnResume.REFUSED}
    assert refused == {
        "seed",
        "data_seed",
        "optim",
        "optim_args",
        "optim_target_modules",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
    }


def test_separate_eval_sets_may_change_on_resume(tmp_path: Path) -> None:
    without, with_sets = resolved(tmp_path), resolved(tmp_path, EVAL_SETS)
    assert check(compare(without, with_sets)) == []
    assert check(compare(with_sets, without)) == []


def test_held_out_rows_may_not_change_on_resume(tmp_path: Path) -> None:
    with pytest.raises(FsdpTuneError, match=r"data\.eval"):
        check(compare(resolved(tmp_path, "data.eval={rows: 5}"), resolved(tmp_path, EVAL_SETS)))
