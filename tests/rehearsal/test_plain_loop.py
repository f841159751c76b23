"""The reference of every run computes losses and updates as torch does, one example and one matrix at a
time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_tune.data.store import RowStore
from fsdp_tune.rehearsal.parity import plain_loop
from fsdp_tune.rehearsal.parity.plain_loop import LoopSettings
from tests.data.support import prepared, write_jsonl

SETTINGS = LoopSettings(steps=2, global_batch_size=2, learning_rate=0.1, weight_decay=0.01)
ROWS = [{"text": "one or two"}, {"text": "three"}, {"text": "a"}, {"text": "four and five"}]


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


class Parameters(nn.Module):
    """Parameters of each kind that an optimizer tells from the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(4, 3)
        self.hidden = nn.Linear(3, 5)
        self.experts = nn.ParameterDict({"up": nn.Parameter(torch.randn(2, 3, 5))})
        self.frozen = nn.Linear(3, 3).requires_grad_(requires_grad=False)

    def draw_gradients(self) -> None:
        torch.manual_seed(1)
        for parameter in self.parameters():
            parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None


def names_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    names = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
    return [names[group["params"][0].data_ptr()] for group in optimizer.param_groups]


def example(*ids: int, untrained: int) -> plain_loop.Example:
    labels = torch.tensor(ids)
    labels[:untrained] = -100
    return torch.tensor([ids]), labels


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_the_sum_over_trained_tokens_smoothed_as_in_torch(model: Any, smoothing: float) -> None:
    ids, labels = example(5, 6, 7, 8, 9, untrained=2)
    loss, balance = plain_loop._losses(model, torch.float32, (ids, labels), smoothing)
    expected = functional.cross_entropy(
        model(input_ids=ids).logits[0, :-1], labels[1:], label_smoothing=smoothing, reduction="sum"
    )
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert balance == 0.0, "of a dense model"


def test_gradient_of_dft_is_that_of_the_loss_times_the_probability(model: Any) -> None:
    one = example(5, 6, untrained=1)
    plain, _ = plain_loop._losses(model, torch.float32, one)
    dft, _ = plain_loop._losses(model, torch.float32, one, dft=True)
    weight = model.lm_head.weight
    of_plain, of_dft = (torch.autograd.grad(each, weight)[0] for each in (plain, dft))
    assert torch.allclose(of_dft, of_plain * torch.exp(-plain.detach()), rtol=1e-5)


def test_muon_updates_hidden_matrices_and_adamw_the_others() -> None:
    model = Parameters()
    adamw, muon = plain_loop._optimizers(replace(SETTINGS, optimizer="muon"), model)
    assert isinstance(adamw, torch.optim.AdamW)
    assert isinstance(muon, torch.optim.Muon)
    assert names_of(adamw, model) == ["embed.weight", "hidden.bias"]
    assert names_of(muon, model) == ["hidden.weight", "experts.up"]
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.01, 0.0], "matrices decay"


def test_matrices_of_a_stack_are_updated_each_alone() -> None:
    """Muon makes a matrix orthogonal; a stack of them is none."""
    model, alone = Parameters(), Parameters()
    for each in (model, alone):
        each.draw_gradients()
    _, muon = plain_loop._optimizers(replace(SETTINGS, optimizer="muon"), model)
    muon.step()
    stack = alone.experts["up"]
    matrices = [nn.Parameter(matrix.detach().clone()) for matrix in stack]
    for matrix, gradient in zip(matrices, stack.grad, strict=True):
        matrix.grad = gradient
    torch.optim.Muon(matrices, lr=0.1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw").step()
    assert torch.equal(model.experts["up"], torch.stack([matrix.detach() for matrix in matrices]))
    before = model.experts["up"].detach().clone()
    model.experts["up"].grad = None
    muon.step()
    assert torch.equal(model.experts["up"], before), "the stack has no gradient in this step"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sgd", torch.optim.SGD),
        ("adagrad", torch.optim.Adagrad),
        ("rmsprop", torch.optim.RMSprop),
        ("adafactor", plain_loop.Adafactor),
        ("adamw", torch.optim.AdamW),
    ],
)
def test_optimizer_has_each_trained_parameter_with_its_rate_and_decay(name: str, kind: type) -> None:
    groups = (("hidden.*", 0.5, None), ("*.weight", None, 0.0))
    model = Parameters()
    (optimizer,) = plain_loop._optimizers(replace(SETTINGS, optimizer=name, groups=groups), model)
    assert type(optimizer) is kind
    assert names_of(optimizer, model) == ["embed.weight", "hidden.weight", "hidden.bias", "experts.up"]
    assert [group["peak"] for group in optimizer.param_groups] == [0.1, 0.5, 0.5, 0.1]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.01, 0.0, 0.01]


def rows_of(folder: Path) -> RowStore:
    return RowStore(prepared(folder, write_jsonl(folder / "rows.jsonl", ROWS)).train)


def test_step_of_sgd_is_the_mean_gradient_of_its_trained_tokens(model: Any, tmp_path: Path) -> None:
    """Computed here in one batch of a single pass."""
    model.save_pretrained(tmp_path / "model")
    rows = rows_of(tmp_path)
    settings = LoopSettings(
        steps=1, global_batch_size=4, learning_rate=0.5, optimizer="sgd", max_grad_norm=0.0, shuffle=False
    )
    found = plain_loop.train(settings, tmp_path / "model", rows)
    examples = list(plain_loop._examples([rows[index] for index in range(4)]))
    losses = [
        functional.cross_entropy(model(input_ids=ids).logits[0, :-1], labels[1:], reduction="sum")
        for ids, labels in examples
    ]
    tokens = sum(int((labels[1:] != -100).sum()) for _, labels in examples)
    mean = torch.stack(losses).sum() / tokens
    mean.backward()
    assert found.losses == pytest.approx([float(mean.detach())], rel=1e-6)
    assert found.supervised_tokens == [tokens]
    for name, parameter in model.named_parameters():
        assert torch.allclose(found.final[name], parameter - 0.5 * parameter.grad, atol=1e-6), name


def test_frozen_parameters_and_skipped_steps_change_nothing(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    rows = rows_of(tmp_path)
    frozen = plain_loop.train(replace(SETTINGS, frozen=("model.*",)), tmp_path / "model", rows, rows)
    changed = {name for name, value in frozen.final.items() if not torch.equal(value, frozen.initial[name])}
    assert changed == {"lm_head.weight"}
    skipped = plain_loop.train(replace(SETTINGS, skipped=frozenset({1, 2})), tmp_path / "model", rows, rows)
    assert all(torch.equal(value, skipped.initial[name]) for name, value in skipped.final.items())
    assert skipped.losses[0] == frozen.losses[0]
    assert skipped.eval_loss == pytest.approx(plain_loop.evaluate(model, torch.float32, [rows]), rel=1e-6)


@pytest.mark.parametrize("values", ["int4", "int8-int4"])
def test_every_linear_layer_but_the_head_computes_with_rounded_weights(model: Any, values: str) -> None:
    before = dict(model.named_modules())
    logits = model(input_ids=torch.tensor([[5, 6, 7]])).logits
    plain_loop.emulate(model, values, 32)
    replaced = {name for name, module in model.named_modules() if module is not before.get(name)}
    linear = {name for name, module in before.items() if isinstance(module, nn.Linear)}
    assert {name for name in replaced if name in before} == linear - {"lm_head"}
    after = model(input_ids=torch.tensor([[5, 6, 7]])).logits
    assert not torch.equal(after, logits)
    assert float(((after - logits).norm() / logits.norm()).detach()) < 0.2, "they are close"
    projection = model.model.layers[0].mlp.up_proj
    inputs = torch.randn(1, 32)
    is_rounded = not torch.equal(
        functional.linear(inputs, projection.weight_fake_quantizer(projection.weight)), projection(inputs)
    )
    assert is_rounded is (values == "int8-int4"), "inputs are rounded too"
