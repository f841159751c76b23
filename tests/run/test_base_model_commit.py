"""The base of an adapter is identified by the content of its weight files, or by the commit of its repository."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from fsdp_tune.run.base_model import SAMPLE_BYTES, SAMPLES, BaseModel, describe_base


def write_weights(folder: Path, content: bytes, name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return folder


def test_copy_of_the_weights_is_the_same_base(tmp_path: Path) -> None:
    one, other = (write_weights(tmp_path / name, b"weights" * 1000) for name in ("one", "other"))
    assert not describe_base(str(one), None).differs_from(describe_base(str(other), None))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_other_weights_of_the_same_size_differ(name: str, tmp_path: Path) -> None:
    before = describe_base(str(write_weights(tmp_path / "base", b"a" * 5000, name)), None)
    assert before.differs_from(describe_base(str(write_weights(tmp_path / "base", b"b" * 5000, name)), None))


@pytest.mark.parametrize("at", [0, SAMPLES * SAMPLE_BYTES * 3 - 1], ids=["first byte", "last byte"])
def test_change_at_either_end_of_a_large_file_is_noticed(at: int, tmp_path: Path) -> None:
    content = bytearray(SAMPLES * SAMPLE_BYTES * 3)
    before = describe_base(str(write_weights(tmp_path / "base", content)), None)
    content[at] = 1
    assert before.differs_from(describe_base(str(write_weights(tmp_path / "base", content)), None))


def test_renamed_or_added_weight_files_differ(tmp_path: Path) -> None:
    before = describe_base(str(write_weights(tmp_path / "base", b"weights")), None)
    write_weights(tmp_path / "base", b"more", "model-2.safetensors")
    assert before.differs_from(describe_base(str(tmp_path / "base"), None))


def test_other_files_of_the_directory_do_not_matter(tmp_path: Path) -> None:
    before = describe_base(str(write_weights(tmp_path / "base", b"weights")), None)
    write_weights(tmp_path / "base", b"{}", "config.json")
    assert not before.differs_from(describe_base(str(tmp_path / "base"), None))


def test_branch_that_moved_is_another_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = iter(["a" * 40, "a" * 40, "b" * 40])
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: str(tmp_path / next(commits) / "config.json"))
    before, same, moved = (describe_base("org/model", "main") for _ in range(3))
    assert before.revision == "a" * 40
    assert not before.differs_from(same)
    assert before.differs_from(moved)


def test_repository_without_cached_files_is_known_by_its_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    assert describe_base("org/model", "main") == BaseModel("org/model", "main")


def test_local_copy_of_a_repository_cannot_be_compared(tmp_path: Path) -> None:
    local = describe_base(str(write_weights(tmp_path / "base", b"weights")), None)
    assert not BaseModel("org/model", "main").differs_from(local)
    assert not local.differs_from(BaseModel("org/model", "main"))
