"""Bytes that are counted while a file is sent and fetched."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.core.atomic import DISK
from fsdp_tune.run import remote_requests
from fsdp_tune.run.manifest import DIGEST_CHUNK_BYTES, Digester
from fsdp_tune.run.remote_files import RemoteDirectory

SIZE_BYTES = 6 * DIGEST_CHUNK_BYTES


@pytest.fixture
def failing_second_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second chunk that is written fails, once."""
    write, calls = DISK.write, []

    def fails(*args: object) -> object:
        calls.append(None)
        if len(calls) == 2:
            raise TimeoutError("slow")
        return write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(DISK, "write", fails)
    monkeypatch.setattr(remote_requests, "WAITS", (0.0,))


@pytest.mark.usefixtures("failing_second_write")
@pytest.mark.parametrize("is_sent", [True, False])
def test_progress_after_a_failed_attempt_is_that_of_the_bytes_that_count(
    tmp_path: Path, *, is_sent: bool
) -> None:
    data, digester, counted = bytes(SIZE_BYTES), Digester(), [0]
    digester.update(data)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a").write_bytes(data)
    directory = RemoteDirectory(f"file://{tmp_path}/{'new' if is_sent else 'there'}")

    def advance(size_bytes: int) -> None:
        counted.append(counted[-1] + size_bytes)

    if is_sent:
        directory.send(tmp_path / "there" / "a", "a", digester.entry(), advance)
    else:
        with pytest.raises(TimeoutError):
            directory.fetch("a", tmp_path / "b", digester.entry(), advance)
    assert min(counted) == 0
    assert max(counted) == (SIZE_BYTES if is_sent else 4 * DIGEST_CHUNK_BYTES)
    assert counted[-1] == (SIZE_BYTES if is_sent else 0)
