from __future__ import annotations

import pytest

from tests.ranks import RankPool, shared_pool


@pytest.fixture(scope="session")
def pool() -> RankPool:
    return shared_pool()
