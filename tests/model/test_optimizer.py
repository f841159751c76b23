"""The optimizer that ranks and planner share is the one that transformers' Trainer would make of the same
arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from fsdp_tune.model.loading.construct import build_full
from fsdp_tune.model.optim.lean_adamw import LeanAdamW
from fsdp_tune.model.optim.muon import orthogonalised_names
from fsdp_tune.model.optim.optimizer import build_optimizer, optimizer_of
from fsdp_tune.model.shard.local import decayed_names
from fsdp_tune.recipe.schema import optimizers
from tests.model.families import FAMILIES
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
    theirs = Trainer.get_optimizer_cls_and_kwargs(
        TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **fields)
    )
    assert optimizer_of(recipe.training) == theirs


VALUES = {
    optimizers.STATE_DTYPE: ("bf16", torch.bfloat16),
    optimizers.STOCHASTIC: ("true", True),
    optimizers.BLOCK: ("64", 64),
    "momentum": ("0.7", 0.7),
    "dampening": ("0.3", 0.3),
    "nesterov": ("true", True),
    "lr_decay": ("0.2", 0.2),
    "eps": ("1e-3", 1e-3),
    "alpha": ("0.6", 0.6),
    "centered": ("true", True),
    "ns_steps": ("3", 3),
    "ns_coefficients": ("3/-4/2", (3.0, -4.0, 2.0)),
    "adjust_lr_fn": ("original", "original"),
}
"""A value of each argument that is not its default, as text and as the optimizer has it."""


@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, each) for name, row in optimizers.OPTIMIZERS.items() for each in row.arguments],
)
def test_argument_reaches_every_group_of_the_optimizer(name: str, argument: str) -> None:
    text, wanted = VALUES[argument]
    if (name, argument) == ("muon", "nesterov"):  # its default is true
        text, wanted = "false", False
    given = f"{argument}={text}" + (",momentum=0.5" if (name, argument) == ("sgd", "nesterov") else "")
    dtype = "bf16" if argument == optimizers.STOCHASTIC else "fp32"

    def found(optim_args: str | None) -> list[Any]:
        recipe = recipe_of(
            {"from_config": FAMILIES["llama"], "dtype": dtype},
            training={"optim": name, "optim_args": optim_args, "weight_decay": 0.1},
        )
        model = build_full(recipe)
        optimizer = build_optimizer(recipe, model, decayed_names(model))
        groups = [group for group in optimizer.param_groups if name != "muon" or group["orthogonal"]]
        assert groups
        attribute = (
            "rounds_parameters"
            if isinstance(optimizer, LeanAdamW) and argument == optimizers.STOCHASTIC
            else argument
        )
        return [
            group[argument] if argument in group else getattr(optimizer, attribute, None) for group in groups
        ]

    with_argument, without = found(given), found(None)
    assert all(value == wanted for value in with_argument)
    assert all(value != wanted for value in without)


def test_weight_decay_acts_on_the_decayed_names_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    optimizer = build_optimizer(recipe_of(training={"weight_decay": 0.1}), model, frozenset({"0.weight"}))
    assert [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups] == [
        (0.1, 1),
        (0.0, 3),
    ]


def test_first_matching_group_sets_rate_and_decay() -> None:
    groups = [
        {"match": ["*.layers.0.*norm*", "lm_head.*"], "weight_decay": 0.5},
        {"match": ["*.layers.0.*"], "learning_rate": 1e-5},
    ]
    recipe = recipe_of(
        "llama", training={"learning_rate": 1e-3, "weight_decay": 0.1, "parameter_groups": groups}
    )
    model = build_full(recipe)
    optimizer = build_optimizer(recipe, model, decayed_names(model))
    found = {
        id(p): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    of = {name: found[id(parameter)] for name, parameter in model.named_parameters()}
    assert of["model.layers.0.input_layernorm.weight"] == of["lm_head.weight"] == (1e-3, 0.5)
    assert of["model.layers.0.mlp.up_proj.weight"] == (1e-5, 0.1)
    assert of["model.layers.1.mlp.up_proj.weight"] == (1e-3, 0.1)
    assert of["model.layers.1.input_layernorm.weight"] == (1e-3, 0.0)
    assert optimizer.param_groups[0]["lr"] == 1e-3, "the rate that metrics.jsonl reports"


HIDDEN = {
    "llama": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "gpt2": {"c_attn", "c_proj", "c_fc"},
    "mixtral": {"q_proj", "k_proj", "v_proj", "o_proj", "gate", "gate_up_proj", "down_proj"},
}


@pytest.mark.parametrize("family", HIDDEN)
def test_muon_updates_hidden_matrices_alone(family: str) -> None:
    recipe = recipe_of(family, training={"optim": "muon"})
    model = build_full(recipe)
    optimizer = build_optimizer(recipe, model, decayed_names(model))
    muon = {id(p) for group in optimizer.param_groups if group["orthogonal"] for p in group["params"]}
    names = {
        name.removesuffix(".weight").rpartition(".")[2]
        for name, parameter in model.named_parameters()
        if id(parameter) in muon
    }
    assert names == HIDDEN[family]


def test_muon_leaves_decay_rates_of_state_space_layers_to_adamw() -> None:
    """They have two dimensions in Mamba, and are not operands of a matrix product."""
    sizes = {
        "vocab_size": 50,
        "hidden_size": 16,
        "state_size": 4,
        "num_hidden_layers": 1,
        "time_step_rank": 2,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **sizes))
    layer = "backbone.layers.0.mixer"
    assert model.get_parameter(f"{layer}.A_log").ndim == 2
    names = {f"{layer}.{each}.weight" for each in ("in_proj", "x_proj", "dt_proj", "out_proj")}
    assert orthogonalised_names(model, decayed_names(model)) == names


def test_muon_updates_both_factors_of_an_adapter_and_not_those_of_an_embedding(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path)
    lora = {"r": 4, "loraplus_lr_ratio": 16, "target_modules": ["q_proj", "embed_tokens"]}
    recipe = recipe_of(
        {"name_or_path": str(folder)}, lora=lora, training={"optim": "muon", "learning_rate": 1e-3}
    )
    model = build_full(recipe)
    optimizer = build_optimizer(recipe, model, decayed_names(model))
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    of = {name: group_of[id(p)] for name, p in model.named_parameters() if p.requires_grad}
    assert {"lora_embedding" in name for name in of} == {True, False}
    assert all(group["orthogonal"] == ("lora_embedding" not in name) for name, group in of.items())
    assert all(group["lr"] == pytest.approx(16e-3 if "B" in name else 1e-3) for name, group in of.items())


def test_factor_b_has_its_own_rate(tmp_path: Path) -> None:
    """LoRA+ (arXiv:2402.12354): the schedule multiplies the rate of every group."""
    folder = make_model("llama", tmp_path)
    recipe = recipe_of(
        {"name_or_path": str(folder)},
        lora={"r": 4, "loraplus_lr_ratio": 16},
        training={"learning_rate": 1e-3, "weight_decay": 0.1},
    )
    model = build_full(recipe)
    optimizer = build_optimizer(recipe, model, decayed_names(model))
    rates = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {id(parameter) for parameter in trained.values()} == rates.keys()
    for name, parameter in trained.items():
        assert rates[id(parameter)] == pytest.approx(16e-3 if "lora_B" in name else 1e-3), name
    assert optimizer.param_groups[0]["lr"] == 1e-3, "the rate that metrics.jsonl reports"
