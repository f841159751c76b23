"""The dtypes of a run's live and merged tensors are those of a model that transformers loads in bf16 and saves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architectures.tiny import known

FAMILIES = (
    *("afmoe", "deepseek_v3", "deepseek_v4", "ernie4_5_moe", "glm4_moe_lite", "hunyuan_v1_moe", "hy_v4", "kimi_linear", "nemotron_h"),
    "olmo_hybrid",
)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("family", FAMILIES)
def test_dtypes_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    from tests.architectures.precision import try_precision
    from tests.parity.store import make_store
    from tests.ranks import shared_ranks

    if family not in known(family):
        pytest.skip("not in this transformers")
    found = try_precision(family, tmp_path / family, make_store(tmp_path / "rows"), shared_ranks(), ["full"])
    assert found is not None
    assert found.kept
    assert found.differences["live"] == {}
    assert found.differences["merged full"] == {}
    assert found.gathered in (True, None)
