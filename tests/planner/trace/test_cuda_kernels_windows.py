"""The work of flash attention: causal, within the window of a layer."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MistralConfig, PreTrainedConfig

from fsdp_tune.planner.predict.roofline import TILE_TOKENS
from fsdp_tune.planner.trace.cuda_kernels import flash_flops, flash_share
from fsdp_tune.planner.trace.traced_model import attention_windows
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


@pytest.mark.parametrize("tokens", [96, 1001, 8192, 99_991, 1_000_003])
@pytest.mark.parametrize("window", [None, 1000, 4096])
def test_flops_of_flash_attention_follow_the_micro_batch(tokens: int, window: int | None) -> None:
    """At a prime micro-batch they stay its multiple, which `at_micro_batch` recognises."""
    square = 4.0 * 56 * 128 * tokens * tokens
    at_prime = flash_flops(7919 * square, 7919, tokens, window)
    assert at_prime % 7919 == 0
    assert (
        at_prime / 7919
        == flash_flops(square, 1, tokens, window)
        == pytest.approx(square * flash_share(tokens, window), rel=1e-6)
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            Gemma3TextConfig(**SIZES, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
            [8, None],
        ),
        (MistralConfig(**SIZES, sliding_window=8), [8, 8]),
        (MistralConfig(**SIZES, sliding_window=None), [None, None]),
    ],
)
def test_windows_are_those_of_each_layer(config: PreTrainedConfig, expected: list[int | None]) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert attention_windows(resolved(), model) == expected
