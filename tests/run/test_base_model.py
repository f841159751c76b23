"""The identity of a base changes with its weights and with nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp_tune.run.base_model import SAMPLE_BYTES, SAMPLES, BaseModel, describe_base


def weights(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return folder


def test_identity_follows_the_weights(tmp_path: Path) -> None:
    content = os.urandom(SAMPLES * SAMPLE_BYTES * 2)
    one = describe_base(str(weights(tmp_path / "a", content)), "main")
    copy = describe_base(str(weights(tmp_path / "b", content)), None)
    (tmp_path / "a" / "config.json").write_text("{}")
    assert not one.differs_from(copy)
    assert not one.differs_from(describe_base(str(tmp_path / "a"), None))
    assert one.differs_from(describe_base(str(weights(tmp_path / "b", os.urandom(len(content)))), None))
    assert one.differs_from(describe_base(str(weights(tmp_path / "b", content[:-1])), None))
    assert one.differs_from(describe_base(str(weights(tmp_path / "b", content[:-1] + bytes([content[-1] ^ 1]))), None))


@pytest.mark.parametrize("size", [0, 10, SAMPLE_BYTES, SAMPLE_BYTES + 1])
def test_small_files_are_read_whole(size: int, tmp_path: Path) -> None:
    content = bytes(size)
    one = describe_base(str(weights(tmp_path / "a", content)), None)
    for at in range(0, size, max(1, size // 7)):
        changed = content[:at] + b"x" + content[at + 1 :]
        assert one.differs_from(describe_base(str(weights(tmp_path / "b", changed)), None))


def test_repositories_are_compared_by_commit_and_not_with_directories(tmp_path: Path) -> None:
    hub = describe_base("org/model", "abc")
    assert hub == BaseModel("org/model", "abc")
    assert hub.differs_from(describe_base("org/model", "def"))
    assert not hub.differs_from(describe_base(str(weights(tmp_path / "a", b"x")), None))


def test_identity_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = describe_base(str(weights(tmp_path / "a", b"x")), None)
    written.write(tmp_path / "base.json")
    assert BaseModel.read(tmp_path / "base.json") == written
