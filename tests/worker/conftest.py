from __future__ import annotations

import pytest

from tests.parity.bench import Bench, shared_bench
from tests.ranks import Ranks, shared_ranks


@pytest.fixture(scope="session")
def on_ranks(device: str) -> Ranks:
    return shared_ranks(device)


@pytest.fixture(scope="session")
def bench(device: str) -> Bench:
    """Runs of the parity matrix, so that a run which is there already is not run again."""
    return shared_bench(device)
