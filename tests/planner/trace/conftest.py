from __future__ import annotations

import pytest

from tests.parity.bench import Bench, shared_bench


@pytest.fixture(scope="session")
def bench() -> Bench:
    return shared_bench()
