"""The MLP in slices on a GPU: dropout masks of the device are drawn again in the backward, and a step needs
less memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fsdp_tune.model.kernels.install import install_kernels
from fsdp_tune.model.loading.construct import build_full
from tests.gpu.conftest import DEVICE, IS_SMALL, ON_CPU
from tests.model.dropout_slices import check_masks
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU"),
]
TOKENS = 512 if IS_SMALL else 16384
RECIPE = recipe_of(
    {
        "from_config": FAMILIES["llama"]
        | {"hidden_size": 64, "intermediate_size": 8192, "max_position_embeddings": TOKENS}
    },
    kernels={"mlp_slice_tokens": TOKENS // 16},
)


def gradients(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(TOKENS, device=DEVICE)[None] % 257
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def pair() -> tuple[nn.Module, nn.Module]:
    plain = build_full(RECIPE).train()
    sliced = copy.deepcopy(plain)
    install_kernels(RECIPE, sliced, DEVICE)
    return plain.to(DEVICE), sliced.to(DEVICE)


def test_gradients_are_those_of_all_tokens_at_once() -> None:
    plain, sliced = pair()
    expected = gradients(plain)
    assert float((gradients(sliced) - expected).norm()) <= 1e-4 * float(expected.norm())


def test_masks_of_dropout_are_drawn_again_in_the_backward() -> None:
    check_masks(DEVICE, tokens=TOKENS, slice_tokens=TOKENS // 16)


@pytest.mark.skipif(ON_CPU, reason="it needs CUDA")
def test_step_needs_less_memory() -> None:
    peaks = []
    for model in pair():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients(model)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    inner = TOKENS * 8192 * 4
    assert peaks[1] < peaks[0] - 2 * inner
