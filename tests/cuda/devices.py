"""Run a test on CPU ranks and on GPUs, emulated where there are none: `on_devices` parametrises the fixture
`device`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.cuda.build import why_not

DEVICES = ["cpu", "cuda"]
on_devices = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.slow)], indirect=True
)
"""Run a test on both; on emulated GPUs with the slow tests."""


def require(device: str) -> None:
    """Skip the test if there is no such device here, and it cannot be emulated."""
    if device == "cpu":
        return
    import torch  # not by every process that collects tests

    if not torch.cuda.is_available() and (reason := why_not()) is not None:
        pytest.skip(reason)


def leave_to_slow_tests(items: Iterable[pytest.Item]) -> None:
    """Mark tests on an emulated GPU as slow."""
    for item in items:
        _, _, identifier = item.name.removesuffix("]").partition("[")
        if "cuda" in identifier.split("-") and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.slow)
