"""The optimizer that ranks and planner share is the one that transformers' Trainer would make of the same arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from fsdp_tune.model.optim.optimizer import build_optimizer, optimizer_of
from fsdp_tune.recipe.schema import optimizers
from tests.model.recipes import recipe_of

OPTIMIZERS = (None, *optimizers.OPTIMIZERS)
ARGUMENTS = {
    "sgd": "momentum=0.9,nesterov=true",
    "adagrad": "lr_decay=0.1,eps=1e-5",
    "rmsprop": "alpha=0.9, centered=yes",
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_equals_that_of_trainer(name: str | None, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"learning_rate": 3e-4, "adam_beta1": 0.8, "adam_epsilon": 1e-6}
    fields |= {"optim": name, "optim_args": ARGUMENTS.get(name)} if name else {}
    recipe = recipe_of(training=fields)
    theirs = Trainer.get_optimizer_cls_and_kwargs(TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **fields))
    assert optimizer_of(recipe.training) == theirs


def test_weight_decay_acts_on_the_decayed_names_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    optimizer = build_optimizer(recipe_of(training={"weight_decay": 0.1}), model, frozenset({"0.weight"}))
    assert [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups] == [(0.1, 1), (0.0, 3)]
