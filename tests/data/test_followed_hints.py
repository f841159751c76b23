"""Each hint about the shape of rows leads to a trained step when it is followed to the letter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.followed_hints import train_as_hinted
from tests.data.public_rows import PUBLIC


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
def test_hint_of_each_refusal_leads_to_a_trained_step(tmp_path: Path, name: str) -> None:
    found = train_as_hinted(tmp_path, name)
    assert (found.exit_code, found.steps) == (0, 1), found
