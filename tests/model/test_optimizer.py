"""The optimizer that ranks and planner share is the one that transformers' Trainer would make of the same arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from fsdp_tune.model.loading.construct import build_full
from fsdp_tune.model.optim.optimizer import build_optimizer, optimizer_of
from fsdp_tune.model.step import decayed_names
from fsdp_tune.recipe.schema import optimizers
from tests.model.recipes import recipe_of
from tests.parity.architectures import make_model

OPTIMIZERS = (None, *(name for name in optimizers.OPTIMIZERS if name != "muon"))
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


def test_factor_b_has_its_own_rate(tmp_path: Path) -> None:
    """LoRA+ (arXiv:2402.12354): the schedule multiplies the rate of every group."""
    folder = make_model("llama", tmp_path)
    recipe = recipe_of({"name_or_path": str(folder)}, lora={"r": 4, "lr_ratio": 16}, training={"learning_rate": 1e-3, "weight_decay": 0.1})
    model = build_full(recipe)
    optimizer = build_optimizer(recipe, model, decayed_names(model))
    rates = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {id(parameter) for parameter in trained.values()} == rates.keys()
    for name, parameter in trained.items():
        assert rates[id(parameter)] == pytest.approx(16e-3 if "lora_B" in name else 1e-3), name
    assert optimizer.param_groups[0]["lr"] == 1e-3, "the rate that metrics.jsonl reports"
