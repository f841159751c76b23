"""When Liger's kernels are selected, and their numbers.

The package needs a GPU; with `TRITON_INTERPRET=1`, and liger-kernel and triton importable, its kernels run
here, slowly.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.kernels import liger
from fsdp_tune.model.kernels.head import Logits, LossOptions, summed_linear_loss
from fsdp_tune.model.kernels.install import choose_kernels, choose_loss, install_kernels
from fsdp_tune.model.kernels.liger import apply_liger, choose_liger, liger_summed_loss, modules_of_liger
from fsdp_tune.model.kernels.mlp_slices import mlp_slices_of
from fsdp_tune.model.loading.construct import build_empty, build_full
from fsdp_tune.model.model_files import KernelChoice
from fsdp_tune.model.shard.recompute import recompute_activations
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.model.recipes import lora_recipe, recipe_of

INTERPRETED = pytest.mark.skipif(
    not (liger.has_liger() and os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs liger-kernel, triton and TRITON_INTERPRET=1",
)


@pytest.fixture(autouse=True)
def interpreter_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes Python floats, which have no `.to`, to a kernel, and has no functions of CUDA's libdevice."""
    if INTERPRETED.args[0]:
        return
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import cross_entropy, geglu, rms_norm
    from triton.runtime import interpreter

    original = interpreter._implicit_cvt

    def convert(argument: Any) -> Any:
        if not isinstance(argument, float):
            return original(argument)
        return tl.tensor(
            interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32
        )

    monkeypatch.setattr(interpreter, "_implicit_cvt", convert)
    # looked up when called: the interpreter replaces it
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: tl.rsqrt(x))
    for module in (cross_entropy, geglu):
        monkeypatch.setattr(module, "tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1)


def recipe_with(family: str = "llama", **kernels: Any) -> Recipe:
    base = recipe_of(family)
    return base.model_copy(update={"kernels": base.kernels.model_copy(update=kernels)})


@pytest.mark.parametrize(
    ("asked", "device", "installed", "family", "value", "reason"),
    [
        ("auto", "cuda", True, "llama", "true", "supports this model"),
        (True, "cuda", True, "llama", "true", "set in the recipe"),
        (False, "cuda", True, "llama", "false", "set in the recipe"),
        ("auto", "cpu", True, "llama", "false", "the device is cpu"),
        ("auto", "cuda", False, "llama", "false", "pip install liger-kernel"),
        ("auto", "cuda", True, "gpt2", "false", "no kernels for models of type `gpt2`"),
    ],
)
def test_auto_selects_liger_where_supported(
    asked: Any, device: str, installed: bool, family: str, value: str, reason: str
) -> None:
    model = build_empty(recipe_of(family))
    with (
        patch.object(liger, "has_liger", lambda: installed),
        patch.object(liger, "_liger_functions", lambda: {"llama": None}),
    ):
        found = choose_liger(recipe_with(family, liger=asked), model, device)
    assert found.value == value
    assert reason in found.reason


@pytest.mark.parametrize(
    ("installed", "family", "kernels", "code"),
    [
        (False, "llama", {"liger": True}, "liger-not-installed"),
        (True, "gpt2", {"liger": True}, "liger-lacks-model"),
        (False, "llama", {"loss": "liger"}, "liger-not-installed"),
    ],
)
def test_unavailable_models_and_data_are_refused(
    installed: bool, family: str, kernels: dict[str, Any], code: str
) -> None:
    model = build_empty(recipe_of(family))
    with (
        patch.object(liger, "has_liger", lambda: installed),
        patch.object(liger, "_liger_functions", lambda: {"llama": None}),
        pytest.raises(FsdpTuneError) as raised,
    ):
        choose_kernels(recipe_with(family, **kernels), model, "cuda")
    assert raised.value.problems[0].code == code
    assert raised.value.problems[0].hint


def test_auto_leaves_fusing_to_the_compiler() -> None:
    model = build_empty(recipe_of("llama"))
    with (
        patch.object(liger, "has_liger", lambda: True),
        patch.object(liger, "_liger_functions", lambda: {"llama": None}),
    ):
        found = [
            choose_liger(recipe_with(compile=True, liger=asked), model, "cuda").value
            for asked in ("auto", True)
        ]
    assert found == ["false", "true"]


def test_kernel_choices_have_reasons() -> None:
    chosen = choose_kernels(recipe_with(loss="full"), build_empty(recipe_of("llama")), "cpu")
    assert {key: choice.value for key, choice in chosen.items()} == {
        "model.attn_implementation": "sdpa",
        "kernels.loss": "full",
        "kernels.liger": "false",
        "kernels.compile": "false",
        "kernels.mlp_slice_tokens": "null",
    }
    assert chosen["kernels.loss"].reason == "set in the recipe"
    assert chosen["kernels.liger"].reason == "Liger's kernels are for CUDA GPUs here, and the device is cpu"
    assert all(choice.reason for choice in chosen.values())


@INTERPRETED
@pytest.mark.parametrize(
    "options",
    [LossOptions(), LossOptions(Logits(0.25, softcap=5.0), label_smoothing=0.1, gradient_scale=0.01)],
    ids=str,
)
@pytest.mark.parametrize("bias", [True, False])
def test_liger_loss_equals_own_loss(options: LossOptions, bias: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(*shape, generator=draw).requires_grad_()
        for shape in ((40, 16), (53, 16), *([(53,)] if bias else []))
    ]
    targets = torch.randint(0, 53, (40,), generator=draw)
    targets[::5] = -100
    losses = [
        function(*leaves, *([] if bias else [None]), targets, options)
        for function in (summed_linear_loss, liger_summed_loss)
    ]  # type: ignore[arg-type]
    ours, theirs = (torch.autograd.grad(loss * options.gradient_scale, leaves) for loss in losses)
    assert losses[1].dtype == torch.float32
    assert float(losses[1].detach()) == pytest.approx(float(losses[0].detach()), rel=1e-6)
    assert all(
        float((one - other).norm() / one.norm()) <= 1e-5 for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize(("recomputed", "rotary"), [("none", True), ("full", True), ("selective", False)])
def test_rotary_kernel_is_left_out_where_products_are_kept(recomputed: str, rotary: bool) -> None:
    """It overwrites them. On an H100, gradients of queries and keys were 100 % off."""
    given: dict[str, bool] = {}

    def apply(
        *, model: Any, rope: bool = True, cross_entropy: bool = True, fused_linear_cross_entropy: bool = True
    ) -> None:
        given.update(rope=rope, losses=cross_entropy or fused_linear_cross_entropy)

    recipe = recipe_of("llama", fsdp={"activation_checkpointing": recomputed})
    with (
        patch.object(liger, "has_liger", lambda: True),
        patch.object(liger, "_liger_functions", lambda: {"llama": apply}),
    ):
        install_kernels(recipe, build_full(recipe), "cuda")
    assert given == {"rope": rotary, "losses": False}


def test_own_rotary_function_is_back_for_a_model_without_the_kernel() -> None:
    recipe = recipe_of("llama")
    model = build_full(recipe)
    module = sys.modules[type(model).__module__]
    own = module.apply_rotary_pos_emb

    def apply(*, model: Any, rope: bool = True) -> None:
        if rope:
            module.apply_rotary_pos_emb = lambda *_: None

    with patch.object(liger, "_liger_functions", lambda: {"llama": apply}):
        apply_liger(model, rotary=True)
        assert module.apply_rotary_pos_emb is not own
        apply_liger(model, rotary=False)
    assert module.apply_rotary_pos_emb is own


def test_mlps_are_sliced_although_their_kernels_cannot_run_on_the_cpu() -> None:
    """The probe for MLPs runs on the CPU, so it must come before Liger's kernels."""

    def apply(*, model: Any) -> None:
        for layer in model.model.layers:
            layer.mlp.forward = lambda _: pytest.fail("a kernel of Triton ran on the CPU")

    recipe = recipe_of("llama", kernels={"mlp_slice_tokens": 4})
    model = build_full(recipe)
    with (
        patch.object(liger, "has_liger", lambda: True),
        patch.object(liger, "_liger_functions", lambda: {"llama": apply}),
    ):
        install_kernels(recipe, model, "cuda")
    assert list(mlp_slices_of(model).values()) == [4, 4]


@INTERPRETED
@pytest.mark.parametrize("recomputed", ["none", "full", "selective"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_liger_keeps_gradients_and_does_not_affect_next_model(family: str, recomputed: str) -> None:
    recipe = recipe_of(family, fsdp={"activation_checkpointing": recomputed})
    plain = build_full(recipe).train()
    other = copy.deepcopy(plain)
    module = sys.modules[type(plain).__module__]
    rotary = module.apply_rotary_pos_emb
    ids = torch.arange(32).view(2, 16)

    def run(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(input_ids=ids, position_ids=torch.arange(16).expand(2, 16), use_cache=False).logits
        logits.square().mean().backward()
        return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    true = run(plain)
    try:
        with patch("fsdp_tune.model.kernels.liger.choose_liger", lambda *_: KernelChoice("true", "tested")):
            install_kernels(recipe, other, "cpu")
        recompute_activations(recipe, other)
        assert modules_of_liger(other) == 3 * 2 + 1 + (2 * 2 if family == "qwen3" else 0), (
            "two norms and a gated MLP a layer, and the last norm"
        )
        found = run(other)
        assert modules_of_liger(build_empty(recipe)) == 0
    finally:
        module.apply_rotary_pos_emb = rotary
    assert all(float((one - two).norm() / one.norm()) <= 1e-5 for one, two in zip(true, found, strict=True))


def test_liger_leaves_adapted_experts_alone(tmp_path: Path) -> None:
    lora = {"r": 4, "target_parameters": ["down_proj"]}
    recipe = lora_recipe(tmp_path, lora, "mixtral")
    with (
        patch.object(liger, "has_liger", return_value=True),
        patch.object(liger, "_liger_functions", return_value={"mixtral": None}),
    ):
        assert (
            choose_liger(lora_recipe(tmp_path, {"r": 4}, "mixtral"), build_empty(recipe), "cuda").value
            == "true"
        )
        choice = choose_liger(recipe, build_empty(recipe), "cuda")
    assert (choice.value, "`lora.target_parameters`" in choice.reason) == ("false", True)


def test_loss_choice_does_not_import_liger() -> None:
    """`auto` stays with the loss that is tested on every device."""
    recipe = recipe_of("llama", data={"train": [{"path": "x"}], "max_length": 1 << 20})
    with patch.object(liger, "has_liger", lambda: True):
        assert choose_loss(recipe, build_empty(recipe)).value == "chunked"
