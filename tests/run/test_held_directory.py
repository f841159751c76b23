"""A directory that is held open is found again, and no other one is taken for it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.held_directory import HeldDirectory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds moved directories in /proc")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path.resolve() / "run"
    path.mkdir()
    return path


def test_place_is_left_when_its_path_leads_elsewhere(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    with HeldDirectory(path) as place:
        assert not place.is_left()
        path.rename(elsewhere)
        assert place.is_left()
        path.mkdir()
        assert place.is_left(), "another one of the same name"
        path.rmdir()
        path.touch()
        assert place.is_left()
        path.unlink()
        elsewhere.rename(path)
        assert not place.is_left()


def test_paths_of_a_run_follow_its_directory(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    with HeldDirectory(path) as place:
        run = RunDir(path, place)
        assert run.logs == path / "logs"
        path.rename(elsewhere)
        assert run.logs == elsewhere / "logs"
        path.mkdir()
        assert run.checkpoint(3) == elsewhere / "checkpoint-3"
        path.rmdir()
        elsewhere.rename(path)
        assert run.path == path
        path.rename(elsewhere)
    assert run.path == path, "not followed any more"


@pytest.mark.parametrize("error", [PermissionError(), MemoryError()])
@pytest.mark.parametrize("refused", ["stat", "readlink", "lstat"])
def test_path_is_known_while_nothing_can_be_looked_at(
    refused: str, error: Exception, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HeldDirectory(path) as place:
        (path / "mine").touch()
        path.rename(path.with_name("elsewhere"))
        with monkeypatch.context() as patched:
            patched.setattr(os, refused, Mock(side_effect=error))
            found = place.path
        assert found == path or (found / "mine").exists()
        path.mkdir()  # another one
        with monkeypatch.context() as patched:
            patched.setattr(os, refused, Mock(side_effect=error))
            found = place.path
        assert (found / "mine").exists() or refused == "stat", "where it is, or as long as it is not known"


@pytest.mark.parametrize("in_place", ["nothing", "a directory", "a file", "a link"])
def test_nothing_is_written_in_the_place_of_a_removed_directory(in_place: str, path: Path) -> None:
    other = path.with_name("other")
    other.mkdir()
    with HeldDirectory(path) as place:
        shutil.rmtree(path)
        acts = {
            "nothing": lambda: None,
            "a directory": path.mkdir,
            "a file": path.touch,
            "a link": lambda: path.symlink_to(other),
        }
        acts[in_place]()
        run = RunDir(path, place)
        assert place.moved_to() is None
        with pytest.raises(OSError, match="No such file or directory"):
            (run.path / "file").write_text("x")
    assert list(other.iterdir()) == []


def test_closed_place_follows_no_other_file(path: Path) -> None:
    """The number of its descriptor is given to the next file that is opened."""
    place = HeldDirectory(path)
    place.close()
    path.rename(path.with_name("elsewhere"))
    with HeldDirectory(path.parent):
        assert place.moved_to() is None
        assert place.path == path


def test_run_directories_of_one_path_are_equal(path: Path) -> None:
    with HeldDirectory(path) as place:
        assert RunDir(path, place) == RunDir(path)
        assert hash(RunDir(path, place)) == hash(RunDir(path))
    assert RunDir(path) != RunDir(path / "b")
    assert RunDir(path) != path
