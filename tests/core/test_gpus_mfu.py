from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_tune.core.gpus import ModelDimensions, attended_length, flops_per_token, mfu


def test_mfu_follows_palm_formula() -> None:
    model = ModelDimensions(
        active_parameters=7_000_000_000, trained_parameters=7_000_000_000, layers=32, heads=32, head_dim=128
    )
    assert flops_per_token(model, 4096) == 6 * 7e9 + 12 * 32 * 32 * 128 * 4096
    frozen = replace(model, trained_parameters=1_000_000_000)
    assert flops_per_token(frozen, 4096) == (4 * 6e9 + 6 * 1e9) + 12 * 32 * 32 * 128 * 4096
    assert mfu(model, 4096, 3000, None) is None
    assert mfu(model, 4096, 3000, 312e12) == pytest.approx(flops_per_token(model, 4096) * 3000 / 312e12)


def test_packed_examples_attend_each_to_itself() -> None:
    assert attended_length([4096]) == 4096
    assert attended_length([1024] * 4) == 1024
    assert attended_length([3072, 1024]) == (3072**2 + 1024**2) / 4096
    assert attended_length([]) == 0
