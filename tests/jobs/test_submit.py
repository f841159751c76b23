"""One command at a time submits a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.ownership import HeldError
from fsdp_tune.jobs import submit


@pytest.mark.parametrize("is_certain", [True, False])
def test_lock_of_a_live_process_is_not_to_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_certain: bool) -> None:
    @contextmanager
    def held(_: Path) -> Iterator[None]:
        raise HeldError(None, is_certain=is_certain)
        yield

    monkeypatch.setattr(submit, "owned", held)
    monkeypatch.setattr(submit, "LOCK_SECONDS", -1.0)
    files: Any = SimpleNamespace(lock=tmp_path / "lock")
    with pytest.raises(FsdpTuneError) as caught, submit._alone(files):
        pass
    [problem] = caught.value.problems
    assert problem.code == "submit-in-progress"
    assert any("remove" in way for way in problem.ways_out) != is_certain


def test_error_while_the_lock_is_held_is_not_taken_for_the_locks(tmp_path: Path) -> None:
    files: Any = SimpleNamespace(lock=tmp_path / "lock")
    with pytest.raises(HeldError), submit._alone(files):
        raise HeldError(None, is_certain=True)
