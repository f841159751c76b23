"""The loss inside a model's head: same numbers, no full logits, and models with other transformations are
unchanged."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.kernels import head
from fsdp_tune.model.kernels.head import Logits
from fsdp_tune.model.kernels.install import choose_loss, install_kernels
from fsdp_tune.model.kernels.loss_in_head import OpaqueHead, logits_of, loss_kernel_of
from fsdp_tune.model.loading.construct import build_empty, build_full
from fsdp_tune.model.step import micro_batch_loss
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of

_LLAMA = {key: value for key, value in FAMILIES["llama"].items() if key != "model_type"}
_LLAMA_SIZES = {
    key: _LLAMA[key]
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
}
SHAPED: dict[str, tuple[dict[str, Any], Logits]] = {
    "gemma2": ({**_LLAMA, "head_dim": 8, "final_logit_softcapping": 30.0}, Logits(softcap=30.0)),
    "cohere": ({**_LLAMA, "logit_scale": 0.0625}, Logits(scale=0.0625)),
    "granite": ({**_LLAMA, "logits_scaling": 8.0}, Logits(scale=0.125)),
    "nanochat": ({**_LLAMA}, Logits(softcap=15.0)),
}


def chunked(family: str | dict[str, Any], **sections: Any) -> Recipe:
    model = family if isinstance(family, str) else {"from_config": family}
    return recipe_of(model, kernels={"loss": "chunked"}, **sections)


def with_and_without(recipe: Recipe) -> tuple[nn.Module, nn.Module]:
    plain = build_full(recipe).train()
    other = copy.deepcopy(plain)
    install_kernels(recipe, other, "cpu")
    return plain, other


def batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(60).mul(7).remainder(257).view(3, 20)
    labels = ids.clone()
    labels[:, :5] = -100
    return {"input_ids": ids, "labels": labels}


def loss_and_gradients(
    model: nn.Module, smoothing: float = 0.0
) -> tuple[float, float, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    with patch.object(head, "SLICE_ELEMENTS", 7 * 257):
        loss, auxiliary = micro_batch_loss(model, batch(), smoothing, 0.02)
    (loss * 0.02 + auxiliary).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), float(auxiliary.detach()), gradients


def assert_same(one: nn.Module, other: nn.Module, smoothing: float = 0.0) -> None:
    (loss, auxiliary, true), (found_loss, found_auxiliary, found) = (
        loss_and_gradients(model, smoothing) for model in (one, other)
    )
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert found_auxiliary == auxiliary
    assert found.keys() == true.keys()
    norm = torch.cat([gradient.flatten() for gradient in true.values()]).norm()
    assert all(float((found[name] - true[name]).norm() / norm) <= 1e-6 for name in true)


@pytest.mark.parametrize("family", FAMILIES)
def test_head_loss_equals_loss_of_logits(family: str) -> None:
    assert_same(*with_and_without(chunked(family)), smoothing=0.1)


@pytest.mark.parametrize("family", SHAPED)
def test_transformations_of_logits_are_applied(family: str) -> None:
    fields, logits = SHAPED[family]
    recipe = chunked({"model_type": family, **fields})
    assert logits_of(build_empty(recipe)) == logits
    assert_same(*with_and_without(recipe))


def test_router_balance_of_a_mixture_of_experts_is_kept() -> None:
    plain, other = with_and_without(chunked({**FAMILIES["mixtral"], "output_router_logits": True}))
    assert loss_and_gradients(plain)[1] > 0
    plain.zero_grad()
    assert_same(plain, other)


def test_head_with_bias_and_resized_vocabulary() -> None:
    phi = with_and_without(chunked("phi"))
    assert phi[0].lm_head.bias is not None
    assert_same(*phi)
    recipe = recipe_of(
        {"from_config": FAMILIES["qwen3"], "resize_embeddings": True}, kernels={"loss": "chunked"}
    )
    plain = build_full(recipe, vocabulary=300).train()
    other = copy.deepcopy(plain)
    install_kernels(recipe, other, "cpu")
    assert other.get_output_embeddings().weight is other.get_input_embeddings().weight
    assert_same(plain, other)


def test_forward_without_labels_returns_logits() -> None:
    plain, other = with_and_without(chunked("gemma"))
    with torch.no_grad():
        assert torch.equal(plain(batch()["input_ids"]).logits, other(batch()["input_ids"]).logits)
        loss, _ = micro_batch_loss(other, batch())
        assert float(loss) == pytest.approx(float(micro_batch_loss(plain, batch())[0]), rel=1e-6)


def test_outputs_are_not_views_so_hooks_can_keep_them() -> None:
    _, other = with_and_without(chunked("llama"))
    seen: list[torch.Tensor] = []
    other.lm_head.register_forward_hook(lambda _module, _args, output: seen.append(output))
    seen.append(micro_batch_loss(other, batch())[0])
    assert [tensor._is_view() for tensor in seen] == [False, False]


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements = max(
            [self.elements, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))]
        )
        return out


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma"])
def test_no_tensor_of_a_step_is_as_large_as_the_logits(family: str) -> None:
    tokens, vocabulary = 3 * 100, 2000
    ids = torch.arange(tokens).view(3, 100)

    def largest(model: nn.Module) -> int:
        with Largest() as seen, patch.object(head, "SLICE_ELEMENTS", tokens * vocabulary // 8):
            loss, _ = micro_batch_loss(model, {"input_ids": ids, "labels": ids})
            loss.backward()
        return seen.elements

    plain, other = with_and_without(chunked({**FAMILIES[family], "vocab_size": vocabulary}))
    assert largest(plain) >= tokens * vocabulary
    assert largest(other) < tokens * vocabulary / 4


def strange(change: Any) -> Any:
    """A llama whose forward does something of its own to its logits."""
    model = build_empty(recipe_of("llama"))
    original = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs = original(*args, **kwargs)
        outputs.logits = change(outputs.logits)
        return outputs

    model.forward = forward
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits - logits.mean(-1, keepdim=True),
        lambda logits: logits.roll(1, dims=1),
        lambda logits: logits.clamp(-1, 1),
        lambda logits: logits + 1,
        lambda logits: logits[:, -1:],
        lambda logits: torch.nn.functional.pad(logits, (0, 1)),
    ],
    ids=["centred", "moved", "clamped", "shifted", "last only", "padded"],
)
def test_model_with_custom_forward_is_unchanged(change: Any) -> None:
    model = strange(change)
    with pytest.raises(OpaqueHead):
        logits_of(model)
    assert "forward" not in vars(model.model)
    assert "forward" not in vars(model.lm_head)


def test_non_linear_head_is_unchanged() -> None:
    class Other(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    model: Any = build_empty(recipe_of("llama"))
    model.lm_head = Other(32, 257, bias=False)
    with pytest.raises(OpaqueHead, match="not a plain linear layer"):
        logits_of(model)


def test_layer_between_body_and_head_is_named_in_the_refusal() -> None:
    tokens = dict.fromkeys(
        ("pad_token_id", "eos_token_id", "bos_token_id", "cls_token_id", "sep_token_id"), 0
    )
    section = {"model_type": "modernbert-decoder", **_LLAMA_SIZES, **tokens}
    recipe = recipe_of({"from_config": section}, kernels={"loss": "chunked"})
    with pytest.raises(FsdpTuneError) as caught:
        choose_loss(recipe, build_empty(recipe))
    [problem] = caught.value.problems
    assert problem.code == "loss-not-chunkable"
    assert problem.message == (
        "`kernels.loss: chunked`: ModernBertDecoderForCausalLM computes its logits with `lm_head`, "
        "in addition to its body and its output embedding"
    )


def test_auto_selects_slices_if_logits_exceed_one_slice() -> None:
    def choice(max_length: int, **kernels: str) -> Any:
        recipe = recipe_of(
            "llama", data={"train": [{"path": "x"}], "max_length": max_length}, kernels=kernels
        )
        return choose_loss(recipe, build_empty(recipe))

    most = head.SLICE_ELEMENTS // 257
    assert choice(most).value == "full"
    assert "one slice" in choice(most).reason
    assert choice(most + 1).value == "chunked"
    assert "at a time" in choice(most + 1).reason
    assert choice(most + 1, loss="full").value == "full"
    assert choice(8, loss="chunked").value == "chunked"


def test_auto_keeps_logits_of_unknown_models_and_reports_why() -> None:
    long = {"train": [{"path": "x"}], "max_length": 1 << 20}
    model = strange(lambda logits: logits + 1)
    auto = choose_loss(recipe_of("llama", data=long), model)
    assert auto.value == "full"
    assert "LlamaForCausalLM" in auto.reason
    with pytest.raises(FsdpTuneError, match=r"kernels\.loss: chunked"):
        choose_loss(chunked("llama", data=long), model)


def test_reported_loss_kernel_is_live() -> None:
    recipe = chunked("gpt2")
    model = build_full(recipe)
    assert loss_kernel_of(model) == "full"
    chosen = install_kernels(recipe, model, "cpu")
    assert loss_kernel_of(model) == chosen["kernels.loss"].value == "chunked"


class ZerosMade(TorchDispatchMode):
    """Shapes of the tensors that were filled with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.zeros.default:
            self.shapes.append(result.shape)
        return result


def test_evaluation_computes_no_gradient_of_the_head() -> None:
    model = build_full(chunked("llama")).train()
    install_kernels(chunked("llama"), model, "cpu")
    head = model.get_output_embeddings().weight
    with ZerosMade() as training:
        micro_batch_loss(model, batch())
    with torch.no_grad(), ZerosMade() as evaluation:
        micro_batch_loss(model, batch())
    assert head.shape in training.shapes
    assert head.shape not in evaluation.shapes
