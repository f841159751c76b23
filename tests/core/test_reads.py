"""What a process has read is recorded, and any later change of it is seen."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_tune.core import reads as module
from fsdp_tune.core.reads import Reads, digest_of


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a test has just written are old enough to be compared by their times."""
    now = time.time_ns
    monkeypatch.setattr(module.time, "time_ns", lambda: now() + 10**10)


def same_size_and_time(folder: Path) -> None:
    path = folder / "opened"
    before = path.stat()
    path.write_text("TEXT")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (before.st_size, before.st_mtime_ns, before.st_ino) == (
        after.st_size,
        after.st_mtime_ns,
        after.st_ino,
    )


def replaced(folder: Path) -> None:
    """Another file takes the name, with the same content and time, as `rsync --times` does it."""
    shutil.copy2(folder / "opened", folder / "copy")
    (folder / "copy").replace(folder / "opened")


def retargeted(folder: Path) -> None:
    (folder / "link").unlink()
    (folder / "link").symlink_to(folder / "listed" / "entry")


CHANGES: list[Callable[[Path], object]] = [
    same_size_and_time,
    replaced,
    retargeted,
    lambda folder: (folder / "opened").unlink(),
    lambda folder: (folder / "opened").chmod(0),
    lambda folder: (folder / "missing").touch(),
    lambda folder: (folder / "listed" / "another").touch(),
    lambda folder: (folder / "tree" / "deep" / "unseen").write_text("TEXT"),
    lambda folder: (folder / "tree" / "deep" / "another").touch(),
]


def test_each_change_of_what_was_read_is_seen(tmp_path: Path, later: None) -> None:
    folders = [tmp_path / str(number) for number in range(len(CHANGES) + 1)]
    for folder in folders:
        for path in (
            folder / "opened",
            folder / "linked",
            folder / "listed" / "entry",
            folder / "tree" / "deep" / "unseen",
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("text")
        (folder / "link").symlink_to(folder / "linked")
    with Reads() as reads:
        for folder in folders:
            assert (folder / "opened").read_text() == "text"
            assert not (folder / "missing").exists()
            assert len(list((folder / "listed").iterdir())) == 1
            assert (folder / "link").is_file()
            (folder / "written").write_text("an output is not an input")
            reads.include(str(folder / "tree"))
    assert reads.is_reusable
    assert digest_of(reads.states) == reads.digest()
    assert not any(path.endswith("written") for path in reads.states)
    (folders[-1] / "unrelated").touch()
    (folders[-1] / "listed" / "entry").write_text("its directory was listed, and it was not read")
    paths = {folder: [path for path in reads.states if path.startswith(f"{folder}/")] for folder in folders}
    before = {folder: digest_of(of) for folder, of in paths.items()}
    for change, folder in zip(CHANGES, folders, strict=False):
        change(folder)
    assert [folder for folder, of in paths.items() if digest_of(of) == before[folder]] == [folders[-1]]
    assert digest_of(reads.states) != reads.digest()


def test_what_cannot_be_compared_is_not_reusable(tmp_path: Path, later: None) -> None:
    with Reads() as reads:
        pass
    assert reads.is_reusable
    assert {str(pytest.__file__), f"{Path(str(pytest.__file__)).parent}/"} <= set(reads.states), (
        "imported code is read"
    )
    with Reads() as reads:
        subprocess.run(["true"], check=True)
    assert not reads.is_reusable
    with Reads() as reads:
        (tmp_path / "file").touch()
        os.utime(tmp_path / "file", ns=(0, time.time_ns()))  # the time of `later`: after the start
        (tmp_path / "file").read_bytes()
    assert not reads.is_reusable


def test_libraries_of_a_process_read_what_another_process_finds_unchanged() -> None:
    program = (
        "import json, sys; from fsdp_tune.core.reads import Reads\n"
        "with Reads() as reads:\n import psutil, numpy, yaml, pydantic\n"
        "json.dump([sorted(reads.states), reads.digest()], sys.stdout)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    paths, states = json.loads(done.stdout)
    assert any("psutil" in path for path in paths)
    assert digest_of(paths) == states
