from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.training import Training, shared_training
from tests.ranks import Ranks, shared_ranks

Count = Callable[..., None]


@pytest.fixture
def on_ranks(device: str) -> Ranks:
    return shared_ranks(device)


@pytest.fixture
def training(device: str) -> Training:
    return shared_training(device)


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Count:
    """`count(kill_points=240)` tells the scoreboard how many cases a test held; pytest's report shows it
    too."""

    def tell(**cases: int) -> None:
        for kind, number in cases.items():
            request.node.user_properties.append((kind, number))
            print(f"{kind}: {number}")

    return tell
