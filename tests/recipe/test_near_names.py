"""Hints for unknown keys name a key only if it counts the same unit in the same scope."""

from __future__ import annotations

import re

import pytest

from fsdp_tune.recipe.schema.keys import unknown_key_hint
from fsdp_tune.recipe.schema.near_names import agree


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("num_train_steps", "max_steps"),
        ("max_train_steps", "max_steps"),
        ("max_epochs", "num_train_epochs"),
        ("local_batch_size", "per_device_train_batch_size"),
        ("global_train_batch_size", "global_batch_size"),
        ("max_stpes", "max_steps"),
        ("num_train_epoch", "num_train_epochs"),
        ("eval_step", "eval_steps"),
        ("save_step", "save_steps"),
        ("warmup_step", "warmup_steps"),
        ("learning_rat", "learning_rate"),
        ("gradient_acumulation_steps", "gradient_accumulation_steps"),
        ("per_device_train_batchsize", "per_device_train_batch_size"),
    ],
)
def test_hint_names_the_key_of_the_same_unit_and_scope(name: str, key: str) -> None:
    hint = unknown_key_hint(("training", name), 3)
    assert hint is not None
    assert re.search(rf"\b{key}\b", hint), hint


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("num_train_steps", "num_train_epochs"),
        ("max_epochs", "max_steps"),
        ("local_batch_size", "global_batch_size"),
        ("save_epochs", "save_steps"),
        ("eval_epochs", "eval_steps"),
        ("logging_seconds", "logging_steps"),
        ("warmup_tokens", "warmup_steps"),
        ("eval_max_steps", "max_steps"),
        ("global_train_size", "per_device_train_batch_size"),
        ("per_device_val_batch_size", "per_device_train_batch_size"),
    ],
)
def test_hint_names_no_key_of_another_unit_or_scope(name: str, wrong: str) -> None:
    assert not agree(name, wrong)
    assert not re.search(rf"\b{wrong}\b", unknown_key_hint(("training", name), 3) or "")


def test_scope_that_only_the_key_has_may_have_been_left_out() -> None:
    assert agree("per_device_batch", "per_device_eval_batch_size")
    assert agree("accumulation_steps", "gradient_accumulation_steps")
