from __future__ import annotations

from fsdp_tune.core.units import sparkline


def test_sparkline_draws_least_to_greatest() -> None:
    assert sparkline([4.0, 2.0, 1.0, 0.5]) == "█▄▂▁"
    assert sparkline([1.0, float("nan"), 1.0]) == "▁×▁"
    assert sparkline([]) == ""
