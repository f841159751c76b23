from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.core.devices import Machine
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.launch.command.resume import check, compare
from fsdp_tune.recipe.read.loader import parse_recipe
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.recipe.schema.keys import effect_of
from fsdp_tune.recipe.schema.kinds import OnResume
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import TRAINING_FIELDS, owned_names

BASE = """
model: {from_config: {model_type: llama, hidden_size: 64}, tokenizer: "builtin:words"}
data: {train: [{path: "builtin:arithmetic"}], max_length: 64}
training: {per_device_train_batch_size: 2, global_batch_size: 8, max_steps: 100}
launch: {device: cpu, num_processes: 2}
"""


def resolved(tmp_path: Path, *overrides: str) -> Recipe:
    loaded = parse_recipe(BASE, tmp_path / "base.yaml", overrides)
    return resolve(loaded.recipe, Machine(None, 0, 4, None), cwd=tmp_path).recipe


def changes(tmp_path: Path, *overrides: str) -> dict[str, OnResume]:
    return {change.key: change.kind for change in compare(resolved(tmp_path), resolved(tmp_path, *overrides))}


def test_same_recipe_has_no_change(tmp_path: Path) -> None:
    assert changes(tmp_path) == {}


@pytest.mark.parametrize(
    "override",
    [
        *(
            "training.logging_steps=3",
            "training.save_steps=7",
            "training.eval_steps=9",
            "launch.hang_timeout=5m",
            "fsdp.sharding_strategy=SHARD_GRAD_OP",
        ),
        *("kernels.compile=false", "checkpoint.verify=size", "merge.dtype=fp32", "fsdp.offload_params=true", "training.save_total_limit=5"),
        *("training.dataloader_num_workers=2", "training.report_to=[]", "output_dir=elsewhere", "name=other", "data.cache_dir=/tmp/x"),
    ],
)
def test_execution_and_logging_keys_may_change_on_resume(tmp_path: Path, override: str) -> None:
    assert set(changes(tmp_path, override).values()) <= {OnResume.FREE}


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("training.learning_rate=1e-3", "training.learning_rate"),
        ("training.lr_scheduler_type=cosine", "training.lr_scheduler_type"),
        ("training.max_steps=200", "training.max_steps"),
        ("training.weight_decay=0.1", "training.weight_decay"),
        ("training.max_grad_norm=0.5", "training.max_grad_norm"),
        ("training.warmup_steps=10", "training.warmup_steps"),
        ("training.global_batch_size=16", "training.global_batch_size"),
    ],
)
def test_changed_keys_of_later_steps_are_accepted_and_reported(tmp_path: Path, override: str, key: str) -> None:
    found = compare(resolved(tmp_path), resolved(tmp_path, override))
    assert [change.key for change in check(found)] == [key]
    assert {change.key: change.kind for change in found}[key] is OnResume.TRAJECTORY


@pytest.mark.parametrize(
    "override",
    [
        *(
            "model.from_config={model_type: llama, hidden_size: 32}",
            "model.tokenizer=builtin:digits",
            "model.dtype=bf16",
            "data.max_length=32",
        ),
        *("data.packing=true", "training.seed=1", "training.data_seed=1", "training.optim=sgd", "training.adam_beta2=0.95"),
        *("precision.mixed_precision=no", "data.shuffle=false", "data.eval={rows: 5}"),
    ],
)
def test_changed_keys_of_completed_steps_are_refused(tmp_path: Path, override: str) -> None:
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
    with pytest.raises(FsdpTuneError) as caught:
        check(
            compare(
                resolved(tmp_path),
                resolved(tmp_path, "training.seed=1", "training.data_seed=42", "data.packing=true", "data.eval_packing=false"),
            )
        )
    assert len(caught.value.problems) == 2


def test_same_global_batch_may_be_split_differently_on_resume(tmp_path: Path) -> None:
    found = changes(tmp_path, "training.per_device_train_batch_size=1", "launch.num_processes=4")
    assert found
    assert set(found.values()) == {OnResume.FREE}


def test_token_budget_may_change_on_resume(tmp_path: Path) -> None:
    keys = ("training.per_device_train_batch_tokens=4096", "data.max_length=2048")
    found = changes(tmp_path, *keys)
    assert {kind for key, kind in found.items() if key.startswith("training.")} <= {OnResume.FREE}


def test_explicit_default_is_not_a_change(tmp_path: Path) -> None:
    assert changes(tmp_path, "training.weight_decay=0.0", "training.max_grad_norm=1.0") == {}


def test_optimizer_and_seeds_are_the_training_fields_that_cannot_change() -> None:
    passed = set(TRAINING_FIELDS.fields) - owned_names()
    refused = {name for name in passed if effect_of(f"training.{name}").on_resume is OnResume.REFUSED}
    assert refused == {"seed", "data_seed", "optim", "optim_args", "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon"}


EVAL_SETS = 'data.eval=[{path: "builtin:arithmetic", split: test}]'


def test_separate_eval_sets_may_change_on_resume(tmp_path: Path) -> None:
    without, with_sets = resolved(tmp_path), resolved(tmp_path, EVAL_SETS)
    assert check(compare(without, with_sets)) == []
    assert check(compare(with_sets, without)) == []


def test_held_out_rows_may_not_change_on_resume(tmp_path: Path) -> None:
    with pytest.raises(FsdpTuneError, match=r"data\.eval"):
        check(compare(resolved(tmp_path, "data.eval={rows: 5}"), resolved(tmp_path, EVAL_SETS)))
