"""The base of an adapter is identified by the content of its weight files, or by the commit of its
repository."""

from __future__ import annotations

import json
import os
from pathlib import Path

import huggingface_hub
import pytest

from fsdp_tune.run.base_model import SAMPLE_BYTES, SAMPLES, BaseModel, describe_base, identify_weights


def weights(folder: Path, content: bytes, name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
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
    assert one.differs_from(
        describe_base(str(weights(tmp_path / "b", content[:-1] + bytes([content[-1] ^ 1]))), None)
    )


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
    local = describe_base(str(weights(tmp_path / "a", b"x")), None)
    assert not hub.differs_from(local)
    assert not local.differs_from(hub)


def test_identity_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = describe_base(str(weights(tmp_path / "a", b"x")), None)
    written.write(tmp_path / "base.json")
    assert BaseModel.read(tmp_path / "base.json") == written


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_other_weights_of_the_same_size_differ(name: str, tmp_path: Path) -> None:
    before = describe_base(str(weights(tmp_path / "base", b"a" * 5000, name)), None)
    assert before.differs_from(describe_base(str(weights(tmp_path / "base", b"b" * 5000, name)), None))


@pytest.mark.parametrize("at", [0, SAMPLES * SAMPLE_BYTES * 3 - 1], ids=["first byte", "last byte"])
def test_change_at_either_end_of_a_large_file_is_noticed(at: int, tmp_path: Path) -> None:
    content = bytearray(SAMPLES * SAMPLE_BYTES * 3)
    before = describe_base(str(weights(tmp_path / "base", content)), None)
    content[at] = 1
    assert before.differs_from(describe_base(str(weights(tmp_path / "base", content)), None))


def test_renamed_or_added_weight_files_differ(tmp_path: Path) -> None:
    before = describe_base(str(weights(tmp_path / "base", b"weights")), None)
    weights(tmp_path / "base", b"more", "model-2.safetensors")
    assert before.differs_from(describe_base(str(tmp_path / "base"), None))


def test_branch_that_moved_is_another_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = iter(["a" * 40, "a" * 40, "b" * 40])
    monkeypatch.setattr(
        huggingface_hub,
        "try_to_load_from_cache",
        lambda *_, **__: str(tmp_path / next(commits) / "config.json"),
    )
    before, same, moved = (describe_base("org/model", "main") for _ in range(3))
    assert before.revision == "a" * 40
    assert not before.differs_from(same)
    assert before.differs_from(moved)


def test_shards_below_the_directory_are_part_of_its_identity(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "sub/a.safetensors"}})
    )
    found = []
    for content in (b"one", b"two"):
        weights(tmp_path / "sub", content, "a.safetensors")
        found.append(identify_weights(str(tmp_path), None))
    assert None not in found
    assert found[0] != found[1]
