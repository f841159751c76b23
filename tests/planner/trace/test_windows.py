"""The work of flash attention: causal, within the window of a layer."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MistralConfig, PreTrainedConfig

from fsdp_tune.planner.trace.cuda_kernels import TILE_TOKENS, flash_share
from fsdp_tune.planner.trace.fake_model import attention_windows
from tests.planner.recipes import resolved

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 32,
    "num_hidden_layers": 2,
}


def test_flash_attention_computes_half_of_the_square_and_a_tile() -> None:
    assert flash_share(4096, None) == pytest.approx(0.5 + TILE_TOKENS / 4096)
    assert flash_share(64, None) == 1.0, "a short row is one tile"


def test_flash_attention_skips_what_is_outside_of_the_window() -> None:
    assert flash_share(4096, 4096) == flash_share(4096, None) == flash_share(4096, 8192)
    assert flash_share(131_072, 1024) == pytest.approx((1024 + TILE_TOKENS) / 131_072, rel=0.01)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Gemma3TextConfig(**SIZES, sliding_window=8, layer_types=["sliding_attention", "full_attention"]), [8, None]),
        (MistralConfig(**SIZES, sliding_window=8), [8, 8]),
        (MistralConfig(**SIZES, sliding_window=None), [None, None]),
    ],
)
def test_windows_are_those_of_each_layer(config: PreTrainedConfig, expected: list[int | None]) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert attention_windows(resolved(), model) == expected
