"""Keys that are declared without effect on numbers have none, and those that choose the delivered model are
declared."""

from __future__ import annotations

import inspect
import re

import pytest

from fsdp_tune.merge import best_checkpoint
from fsdp_tune.recipe.schema.key_effects import NUMBERS, RESULT
from fsdp_tune.recipe.schema.keys import effect_of
from fsdp_tune.recipe.schema.recipe import Training
from fsdp_tune.recipe.schema.training_fields import CHOOSING, PASSED_EFFECTS

OF_FILES = {
    "output_dir",
    "hub_strategy",
    "push_to_hub",
    "save_total_limit",
    "hub_model_id",
    "hub_token",
    "hub_always_push",
}
"""Where checkpoints are, and which are kept: the best one is never deleted."""
OF_LOGS = {"logging_steps", "logging_strategy", "logging_first_step"}


def test_every_argument_that_the_trainer_reads_to_choose_a_checkpoint_affects_the_result() -> None:
    """By the source of the installed transformers, so that a new argument of it is noticed."""
    from transformers import Trainer
    from transformers.trainer_callback import DefaultFlowCallback, EarlyStoppingCallback

    choosing = (
        Trainer._determine_best_metric,
        Trainer._load_best_model,
        EarlyStoppingCallback,
        DefaultFlowCallback,
    )
    text = "".join(inspect.getsource(each) for each in choosing)
    read = (
        set(re.findall(r"\bargs\.(\w+)", text))
        & (set(PASSED_EFFECTS) | set(Training.model_fields)) - OF_FILES - OF_LOGS
    )
    assert {
        "metric_for_best_model",
        "greater_is_better",
        "load_best_model_at_end",
        "eval_strategy",
        "save_strategy",
    } <= read
    assert {name for name in read if not effect_of(f"training.{name}").affects & (RESULT | NUMBERS)} == set()


def test_every_key_that_a_merge_reads_to_choose_a_checkpoint_affects_the_result() -> None:
    read = re.findall(r"training, \"(\w+)\"", inspect.getsource(best_checkpoint._best_metric))
    assert read == ["metric_for_best_model", "greater_is_better"]
    assert all(effect_of(f"training.{name}").affects & RESULT for name in read)


@pytest.mark.parametrize("key", CHOOSING)
def test_key_of_the_schedule_of_evaluations_and_saves_affects_the_result(key: str) -> None:
    assert effect_of(key).affects & RESULT
