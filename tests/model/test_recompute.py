"""Recomputation in every mode gives the gradients of the original forward pass, dropout included."""

from __future__ import annotations

import copy
from collections import Counter
from math import nan
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from fsdp_tune.model.loading.construct import build_full
from fsdp_tune.model.shard.recomputation_check import RecomputationCheck, _Sample
from fsdp_tune.model.shard.recompute import checkpointed_layers, recompute_activations
from fsdp_tune.model.shard.selective_recompute import _SaveAttentionAndEverySecondMatmul
from fsdp_tune.model.step import micro_batch_loss
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of

WAYS: list[dict[str, Any]] = [
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "full", "activation_checkpointing_every": 2},
    {"activation_checkpointing": "selective", "activation_checkpointing_every": 2},
    {"activation_checkpointing": "full", "activation_checkpointing_offload": True},
]


def batch_of(vocabulary: int = 257) -> dict[str, torch.Tensor]:
    ids = torch.arange(60).remainder(vocabulary).view(3, 20)
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "position_ids": torch.arange(20).remainder(11).expand(3, 20),
    }


def gradients(model: nn.Module) -> tuple[float, list[torch.Tensor]]:
    torch.manual_seed(3)
    model.train()
    model.zero_grad()
    loss, _ = micro_batch_loss(model, batch_of())
    loss.backward()
    return float(loss.detach()), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "gemma", "mixtral", "gpt_neox"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_recomputation_keeps_gradients(family: str, way: dict[str, Any]) -> None:
    dropout = {"attention_dropout": 0.1} if family in ("llama", "qwen3", "gemma", "mixtral") else {}
    recipe = recipe_of({"from_config": FAMILIES[family], "config_overrides": dropout}, fsdp=way)
    plain = build_full(recipe)
    recomputed = copy.deepcopy(plain)
    recompute_activations(recipe, recomputed)
    loss, expected = gradients(plain)
    again, found = gradients(recomputed)
    assert again == loss
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("way", "forwards"), [("none", [1, 1, 1]), ("full", [2, 2, 2]), ("every", [2, 1, 2])], ids=str
)
def test_only_selected_layers_are_recomputed(way: str, forwards: list[int]) -> None:
    fsdp = {
        "activation_checkpointing": "none" if way == "none" else "full",
        "activation_checkpointing_every": 2 if way == "every" else 1,
    }
    recipe = recipe_of({"from_config": {**FAMILIES["llama"], "num_hidden_layers": 3}}, fsdp=fsdp)
    model = build_full(recipe)
    counts = [0, 0, 0]

    def counting(index: int) -> Any:
        def hook(*_: Any) -> None:
            counts[index] += 1

        return hook

    for index, layer in enumerate(model.model.layers):
        # Inside the layer, since a hook on the layer runs once; before it, since torch stops when it has all
        # it needs.
        layer.mlp.register_forward_pre_hook(counting(index))
    recompute_activations(recipe, model)
    gradients(model)
    assert counts == forwards


class Operators(TorchDispatchMode):
    """Counts what really runs: a value that selective recomputation kept does not come this far."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dropout", "policy"), [(0.0, CheckpointPolicy.MUST_SAVE), (0.1, CheckpointPolicy.PREFER_RECOMPUTE)]
)
def test_attention_that_draws_a_dropout_mask_is_recomputed(dropout: float, policy: CheckpointPolicy) -> None:
    """A kernel of CUDA draws it inside. If its result were kept, the generator would be behind for all later
    masks of the layer."""
    decide = _SaveAttentionAndEverySecondMatmul()
    context = SelectiveCheckpointContext(is_recompute=False)
    states = [torch.empty(1, 2, 8, 8)] * 3
    aten = torch.ops.aten
    assert decide(context, aten._scaled_dot_product_flash_attention.default, *states, dropout) == policy
    assert (
        decide(context, aten._scaled_dot_product_efficient_attention.default, *states, None, True, dropout)
        == policy
    )
    assert (
        decide(
            context, aten._scaled_dot_product_cudnn_attention.default, *states, None, True, dropout_p=dropout
        )
        == policy
    )


def test_selective_recomputation_saves_attention_and_every_second_matmul() -> None:
    """Full recomputation runs every matrix product of the forward again, the selective one every second, and
    no attention."""

    def operators(way: str) -> dict[str, int]:
        recipe = recipe_of("llama", fsdp={"activation_checkpointing": way})
        model = build_full(recipe)
        recompute_activations(recipe, model)
        torch.manual_seed(0)
        loss, _ = micro_batch_loss(
            model.train(), {name: value for name, value in batch_of().items() if name != "position_ids"}
        )
        with Operators() as seen:
            loss.backward()
        return {
            "products": seen.counts["mm"],
            "attention": seen.counts["_scaled_dot_product_flash_attention_for_cpu"],
        }

    none, selective, full = (operators(way) for way in ("none", "selective", "full"))
    assert (none["attention"], selective["attention"], full["attention"]) == (0, 0, 2)
    again_full, again_selective = (found["products"] - none["products"] for found in (full, selective))
    assert again_full == 2 * 6, "seven products a layer, of which the backward does not need the last"
    assert again_selective == again_full // 2


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("flash_attn::_flash_attn_varlen_forward", True),
        ("flash_attn_3::fwd", True),
        ("flash_attn::_flash_attn_backward", False),
        ("aten::_flash_attention_forward", True),
        ("aten::topk", False),
        ("aten::silu", False),
    ],
)
def test_selective_recomputation_supports_flash_packages(name: str, kept: bool) -> None:
    namespace, _, operator = name.partition("::")
    packages = torch.library.Library(namespace, "FRAGMENT")
    if namespace != "aten":  # the packages are not installed
        packages.define(f"{operator}(Tensor states) -> Tensor")
    op: Any = getattr(getattr(torch.ops, namespace), operator).default
    decision = _SaveAttentionAndEverySecondMatmul()(SimpleNamespace(is_recompute=False), op)
    assert (decision == CheckpointPolicy.MUST_SAVE) == kept


def test_recomputation_saves_memory() -> None:
    def saved_bytes(way: str) -> int:
        recipe = recipe_of("llama", fsdp={"activation_checkpointing": way})
        model = build_full(recipe)
        recompute_activations(recipe, model)
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            micro_batch_loss(model.train(), batch_of())
        return sum(kept.values())

    none, full = saved_bytes("none"), saved_bytes("full")
    assert full < none / 2


def test_evaluation_does_not_recompute() -> None:
    recipe = recipe_of("gpt2", fsdp={"activation_checkpointing": "full"})
    model = build_full(recipe)
    recompute_activations(recipe, model)
    plain = build_full(recipe)
    with torch.no_grad():
        assert torch.equal(
            model.eval()(batch_of()["input_ids"]).logits, plain.eval()(batch_of()["input_ids"]).logits
        )


@pytest.mark.parametrize("policy", ["TRANSFORMER_BASED_WRAP", "NO_WRAP", "SIZE_BASED_WRAP"])
def test_recomputation_does_not_depend_on_wrapping(policy: str) -> None:
    recipe = recipe_of("gpt_neox", fsdp={"auto_wrap_policy": policy, "activation_checkpointing": "full"})
    layers = checkpointed_layers(recipe, build_full(recipe))
    assert [name for name, _ in layers] == ["gpt_neox.layers.0", "gpt_neox.layers.1"]


@pytest.mark.parametrize("recomputed", ["full", "selective"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma", "mixtral", "gpt_oss"])
def test_layers_recompute_what_their_forward_computed(family: str, recomputed: str) -> None:
    recipe = recipe_of(family, fsdp={"activation_checkpointing": recomputed})
    model = build_full(recipe).train()
    recompute_activations(recipe, model)
    ids = torch.arange(64).view(2, 32)
    with RecomputationCheck() as check:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(len(again) >= 5 for _, _, again in check._layers)
    assert check.differences() == []
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert len(check._layers) == 2, "nothing is compared any more"


@pytest.mark.parametrize(
    ("first", "again", "off"),
    [(1.0, 1.002, "0.2%"), (1.0, nan, "100.0%"), (nan, 1.0, "100.0%"), (1.0, 1.0001, None), (nan, nan, None)],
)
def test_recomputed_value_that_is_not_finite_is_a_difference(
    first: float, again: float, off: str | None
) -> None:
    """A buffer that is overwritten may hold anything."""
    check = RecomputationCheck()
    samples = ([_Sample("mm", torch.full((2, 2), value), 1e-3)] for value in (first, again))
    check._layers.append(("layers.0", *samples))
    told = [] if off is None else [f"`layers.0`: `mm` is {off} off when the layer is recomputed"]
    assert check.differences() == told
