"""Runs and merged models in directories that no rename can replace: mount points, links, parents that cannot
be written."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from fsdp_tune.core import atomic
from fsdp_tune.core.atomic import (
    Disk,
    is_mount_point,
    needs_filling,
    occupants,
    staged_directory,
    stages_inside,
    undo_fill,
)
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.launch.command.resume import decide_start
from fsdp_tune.launch.command.run_files import write_run
from fsdp_tune.run.directory import RunDir
from tests.launch.recipes import resolved
from tests.launch.written_runs import files_of


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no file system may be mounted here: {done.stderr.decode().strip()}")


@pytest.fixture(params=["tmpfs", "bind", "link"])
def volume(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory that is a container's volume, a bind mount within the file system, or a link."""
    path = tmp_path / "a volume"
    if request.param == "link":
        yield linked(path)
        return
    source = tmp_path / "source"
    source.mkdir()
    path.mkdir()
    mount(
        *(("-t", "tmpfs", "-o", "mode=755", "none") if request.param == "tmpfs" else ("--bind", str(source))),
        str(path),
    )
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def linked(path: Path) -> Path:
    """Make a directory and a link to it: no rename can replace what is there."""
    target = path.with_name("real")
    target.mkdir()
    path.symlink_to(target)
    return path


@pytest.fixture
def link(tmp_path: Path) -> Path:
    return linked(tmp_path / "a volume")


def fill(final: Path, *, replace: bool = False, content: str = "new") -> None:
    with staged_directory(final, replace=replace, last="last") as stage:
        (stage / "sub").mkdir()
        for name in ("last", "first", "sub/second"):
            (stage / name).write_text(content)


def tree(path: Path) -> dict[str, str]:
    return {
        file.relative_to(path).as_posix(): file.read_text()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


WHOLE = {"first": "new", "last": "new", "sub/second": "new"}


def test_mount_point_is_filled_and_replaced_in_place(volume: Path) -> None:
    assert needs_filling(volume)
    fill(volume, content="old")
    with pytest.raises(FileExistsError):
        fill(volume)
    assert set(tree(volume).values()) == {"old"}
    (volume / "of the old one").write_text("x")
    fill(volume, replace=True)
    assert tree(volume) == WHOLE
    assert stages_inside(volume) == []


def test_bind_mount_is_recognised_by_its_name_with_a_space(tmp_path: Path) -> None:
    source, path = tmp_path / "one", tmp_path / "two words"
    source.mkdir()
    path.mkdir()
    assert not is_mount_point(path)
    mount("--bind", str(source), str(path))
    try:
        assert is_mount_point(path)
        assert not os.path.ismount(path), "the standard library does not see it"
    finally:
        subprocess.run(["umount", str(path)], check=True)


def killed_at(number: int, action: Callable[[], None]) -> int:
    """Exit code of a child that runs `action` and is killed at its `number`-th operation of the disk; 0: it
    had fewer."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    countdown = iter(range(number - 1))
    for name in ("open", "write", "fsync", "mkdir", "rename", "unlink", "rmtree", "fsync_dir"):
        original = getattr(Disk, name)

        def counted(
            self: Disk, *arguments: object, _original: Callable[..., object] = original, **options: object
        ) -> object:
            if next(countdown, None) is None:
                os._exit(77)
            return _original(self, *arguments, **options)

        setattr(Disk, name, counted)
    action()
    os._exit(0)


@pytest.mark.parametrize("replace", [False, True])
def test_killed_fill_is_complete_or_marked_unfinished(tmp_path: Path, *, replace: bool) -> None:
    for number in range(1, 60):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        volume = linked(folder / "volume")
        if replace:
            fill(volume, content="old")
        code = killed_at(number, partial(fill, volume, replace=replace))
        for stage in stages_inside(volume):
            undo_fill(volume, stage)
        allowed = [WHOLE, dict.fromkeys(WHOLE, "old")] if replace else [WHOLE]
        assert tree(volume) in allowed if (volume / "last").exists() else occupants(volume) == [], (
            f"killed at {number}"
        )
        if code == 0:
            break
    assert code == 0, "more operations than were tried"
    assert number > 10


def test_failed_fill_leaves_the_volume_empty(link: Path) -> None:
    renames = iter(range(2))

    def rename_twice(source: Path, target: Path) -> None:
        if next(renames, None) is None:
            raise OSError(28, "No space left on device")
        source.rename(target)

    with patch.object(atomic.DISK, "rename", rename_twice), pytest.raises(OSError, match="No space"):
        fill(link)
    assert list(link.iterdir()) == []


def test_run_is_written_into_a_volume(volume: Path, tmp_path: Path) -> None:
    run, recipe = RunDir(volume), resolved(tmp_path)
    (volume / "lost+found").mkdir()
    assert decide_start(run, recipe, None, overwrite=False).is_new
    write_run(run, files_of(run, recipe))
    assert {"recipe.json", "launch.json", "model", "logs"} <= {path.name for path in volume.iterdir()}
    assert stages_inside(volume) == []
    with pytest.raises(FsdpTuneError, match="cannot be moved aside") as caught:
        decide_start(run, recipe, None, overwrite=True)
    assert caught.value.exit_code == 2
    assert not decide_start(run, recipe, "auto", overwrite=False).is_new


def test_world_writable_volume_is_refused_before_anything_is_written(link: Path, tmp_path: Path) -> None:
    link.chmod(0o777)
    with pytest.raises(FsdpTuneError, match="is writable by every user"):
        decide_start(RunDir(link), resolved(tmp_path), None, overwrite=False)


def test_volume_with_foreign_files_is_refused(link: Path, tmp_path: Path) -> None:
    (link / "thesis.tex").write_text("x")
    with pytest.raises(FsdpTuneError, match=r"not empty \(thesis.tex\)"):
        decide_start(RunDir(link), resolved(tmp_path), None, overwrite=False)


def test_run_killed_while_written_into_a_volume_starts_again(link: Path, tmp_path: Path) -> None:
    run, recipe = RunDir(link), resolved(tmp_path)

    def write_half() -> None:
        with staged_directory(link, last="recipe.json") as stage:
            (stage / "recipe.json").write_text("x")
            (stage / "launch.json").write_text("half")
            atomic.DISK.rename = lambda source, target: (source.rename(target), os._exit(77))  # type: ignore[method-assign,return-value]

    assert killed_at(1000, write_half) == 77
    assert (link / "launch.json").read_text() == "half"
    assert decide_start(run, recipe, None, overwrite=False).is_new
    write_run(run, files_of(run, recipe))
    assert (link / "launch.json").read_text() != "half"
    assert stages_inside(link) == []
