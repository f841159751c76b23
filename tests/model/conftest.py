from __future__ import annotations

import pytest

from tests.ranks import Ranks, shared_ranks


@pytest.fixture(scope="session")
def on_ranks() -> Ranks:
    return shared_ranks()
