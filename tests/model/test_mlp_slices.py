"""The MLP in slices of the tokens: same loss and gradients, less memory, and modules that mix tokens are left
alone."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.kernels.install import choose_kernels, install_kernels
from fsdp_tune.model.kernels.mlp_slices import choose_mlp_slices, find_mlps, mlp_slices_of
from fsdp_tune.model.loading.construct import build_empty, build_full
from fsdp_tune.model.shard.recompute import recompute_activations
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.cuda.devices import require
from tests.model.dropout_slices import check_masks
from tests.model.families import FAMILIES
from tests.model.recipes import lora_recipe, recipe_of
from tests.ranks import shared_ranks

TOKENS = 7
SLICED: dict[str, Any] = {"mlp_slice_tokens": TOKENS}
DENSE = {
    "gpt2": "mlp",
    "llama": "mlp",
    "mistral": "mlp",
    "qwen3": "mlp",
    "gemma": "mlp",
    "phi": "mlp",
    "gpt_neox": "mlp",
    "gemma3_text": "mlp",
}


def gradients(
    model: nn.Module, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    ids = torch.arange(60).mul(7).remainder(257).view(3, 20)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(recipe: Recipe, *, dtype: torch.dtype | None = None, tolerance: float = 1e-5) -> None:
    plain = build_full(recipe).train()
    model = copy.deepcopy(plain)
    install_kernels(recipe, model, "cpu")
    recompute_activations(recipe, model)
    assert set(mlp_slices_of(model).values()) == {TOKENS}
    (expected, of_plain), (loss, of_sliced) = gradients(plain, dtype), gradients(model, dtype)
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0.0)
    assert of_sliced.keys() == of_plain.keys()
    for name, gradient in of_plain.items():
        assert (of_sliced[name] - gradient).norm() <= tolerance * gradient.norm() + 1e-9, name


NO_DROPOUT = {"gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}


@pytest.mark.parametrize("family", DENSE)
def test_loss_and_gradients_are_those_of_all_tokens_at_once(family: str) -> None:
    section = {"from_config": FAMILIES[family], "config_overrides": NO_DROPOUT.get(family, {})}
    assert_same(recipe_of(section, kernels=SLICED))


def test_sliced_mlp_may_be_called_by_the_name_of_its_argument() -> None:
    recipe = recipe_of("llama", kernels=SLICED)
    model = build_full(recipe)
    install_kernels(recipe, model, "cpu")
    mlp, hidden = model.model.layers[0].mlp, torch.randn(1, 2 * TOKENS, model.config.hidden_size)
    assert torch.equal(mlp(x=hidden), mlp(hidden))


def test_slices_inside_recomputed_layers_have_the_same_gradients() -> None:
    assert_same(recipe_of("llama", kernels=SLICED, fsdp={"activation_checkpointing": "full"}))


def test_weight_gradients_of_slices_are_summed_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """With bf16 weights and many slices, sums in bf16 would be off by several roundings."""
    recipe = recipe_of({"from_config": FAMILIES["llama"], "dtype": "bf16"}, kernels={"mlp_slice_tokens": 1})
    plain = build_full(recipe).train()
    model = copy.deepcopy(plain)
    install_kernels(recipe, model, "cpu")
    (_, expected), (_, sliced) = gradients(plain), gradients(model)
    # the gradient that reaches the last layer is the same
    names = [name for name in expected if ".1.mlp." in name]
    worst = max(
        float((sliced[name] - expected[name]).float().norm() / expected[name].float().norm())
        for name in names
    )
    assert worst < 2**-8


def test_autocast_of_the_forward_holds_in_the_backward() -> None:
    assert_same(recipe_of("llama", kernels=SLICED), dtype=torch.bfloat16, tolerance=2e-2)


@pytest.mark.parametrize("quantised", [False, True])
def test_adapters_have_the_same_gradients(tmp_path: Path, quantised: bool) -> None:
    wide = FAMILIES["llama"] | {"hidden_size": 64, "intermediate_size": 128}
    sections: dict[str, Any] = (
        {"quantization": {}, "precision": {"mixed_precision": "bf16"}} if quantised else {}
    )
    recipe = lora_recipe(tmp_path, {"r": 4}, wide, kernels=SLICED, **sections)
    model = build_empty(recipe)
    found = find_mlps(recipe, model)
    assert len(found) == 2
    if quantised:
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)
    assert_same(recipe)


def test_dropout_masks_of_a_slice_are_drawn_again_in_the_backward() -> None:
    """A finite difference along the gradient, with the masks of one seed, confirms the gradient."""
    config = FAMILIES["gpt2"] | {"resid_pdrop": 0.3, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    recipe = recipe_of({"from_config": config}, kernels=SLICED)
    model = build_full(recipe).train().double()
    install_kernels(recipe, model, "cpu")
    loss, found = gradients(model)
    weight, gradient = (
        model.transformer.h[1].mlp.c_fc.weight,
        found["transformer.h.1.mlp.c_fc.weight"].clone(),
    )
    step = 1e-2
    with torch.no_grad():
        weight += step * gradient / gradient.norm()
    after, _ = gradients(model)
    assert float(after - loss) / step == pytest.approx(float(gradient.norm()), rel=0.03)


@pytest.mark.ranks
def test_dropout_masks_are_drawn_from_the_generator_of_the_own_gpu() -> None:
    """On two GPUs: each rank restores the generator of its own."""
    require("cuda")
    shared_ranks("cuda").run(2, functools.partial(check_masks, "cuda", tokens=512, slice_tokens=100))


class _Largest(torch.utils._python_dispatch.TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.largest = max(self.largest, output.numel() if isinstance(output, torch.Tensor) else 0)
        return output


def test_inner_activations_exist_for_one_slice_only() -> None:
    config = FAMILIES["llama"] | {"intermediate_size": 4096, "vocab_size": 257}
    tokens, largest = 60, {}
    for size in (None, TOKENS):
        recipe = recipe_of(
            {"from_config": config}, kernels={} if size is None else {"mlp_slice_tokens": size}
        )
        model = build_full(recipe).train()
        install_kernels(recipe, model, "cpu")
        with _Largest() as seen:
            gradients(model)
        largest[size] = seen.largest
    assert largest[None] == tokens * 4096
    assert largest[TOKENS] < tokens * 4096


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "opt", "bloom"])
def test_model_without_a_dense_mlp_module_is_refused(family: str) -> None:
    recipe = recipe_of(family, kernels=SLICED)
    with pytest.raises(FsdpTuneError) as caught:
        choose_kernels(recipe, build_empty(recipe), "cpu")
    [problem] = caught.value.problems
    assert (problem.code, problem.where.key) == ("mlp-not-sliceable", "kernels.mlp_slice_tokens")


def test_module_that_mixes_tokens_is_left_alone() -> None:
    recipe = recipe_of("llama", kernels=SLICED)
    model = build_full(recipe)
    mlp = model.model.layers[1].mlp
    plain = type(mlp).forward

    class Shifted(type(mlp)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return plain(self, torch.roll(x, 1, dims=1))

    mlp.__class__ = Shifted
    assert list(find_mlps(recipe, model)) == ["model.layers.0.mlp"]
    assert choose_kernels(recipe, model, "cpu")["kernels.mlp_slice_tokens"].reason.startswith(
        "the dense MLPs of 1 of 2 layers"
    )


def test_unit_inside_an_mlp_is_refused() -> None:
    recipe = recipe_of(
        "llama",
        kernels=SLICED,
        fsdp={"auto_wrap_policy": "MODULE_NAMES_WRAP", "modules_to_wrap": ["model.layers.*.mlp.up_proj"]},
    )
    with pytest.raises(FsdpTuneError, match="is an FSDP unit of its own"):
        choose_kernels(recipe, build_empty(recipe), "cpu")


def test_unit_whose_name_begins_with_that_of_an_mlp_is_not_inside_it() -> None:
    recipe = recipe_of(
        "llama",
        kernels=SLICED,
        fsdp={"auto_wrap_policy": "MODULE_NAMES_WRAP", "modules_to_wrap": ["model.layers.*.mlp_gate"]},
    )
    model = build_empty(recipe)
    for layer in model.model.layers:
        layer.mlp_gate = nn.Linear(32, 32, device="meta")
    assert choose_mlp_slices(recipe, model).reason.startswith("the MLPs of all layers")


def test_probe_of_a_large_model_is_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    randn = torch.randn
    monkeypatch.setattr(
        torch,
        "randn",
        lambda *size, **options: drawn.append(randn(*size, **options).numel()) or randn(*size, **options),
    )
    config = FAMILIES["llama"] | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    recipe = recipe_of({"from_config": config}, kernels=SLICED)
    assert len(find_mlps(recipe, build_empty(recipe))) == 2
    assert max(drawn) < 100_000
