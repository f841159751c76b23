"""Power cuts at any operation: unsynced writes are dropped or torn, unsynced renames lost; the old or the new
state remains."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fsdp_tune.core.atomic import staged_directory, write_file
from fsdp_tune.run.directory import RunDir
from tests.faults import ranks
from tests.faults.checks import half_files, verified_steps
from tests.faults.conftest import Count
from tests.faults.disk import Operation, injected
from tests.ranks import Ranks

SECTOR_BYTES = 512
DATA = ("all", "torn", "synced")
NAMES = ("all", "synced")


@dataclass
class File:
    content: bytes = b""
    synced: bytes = b""


@dataclass
class Folder:
    entries: dict[str, File | Folder] = field(default_factory=dict)


def read_tree(path: Path) -> Folder:
    folder = Folder()
    for child in path.iterdir():
        folder.entries[child.name] = (
            read_tree(child) if child.is_dir() else File(child.read_bytes(), child.read_bytes())
        )
    return folder


class CrashedDisk:
    """What a disk holds when the power goes after `done` operations. `names` synced: an entry made, renamed
    or removed since the last fsync of its directory is as it was before; all: it got there by itself."""

    def __init__(self, root: Path, before: Folder, done: list[Operation], *, names: str, data: str) -> None:
        self.root, self.tree, self.data = root, before, data
        self.files: dict[Path, File] = {}
        """By the name that the process uses, which a lost rename does not change."""
        for index, operation in enumerate(done):
            self.do(operation, names == "all" or self.is_synced(operation, done[index + 1 :]))

    @staticmethod
    def is_synced(operation: Operation, later: list[Operation]) -> bool:
        parents = {operation.path.parent} | ({operation.target.parent} if operation.target else set())
        return parents <= {other.path for other in later if other.name == "fsync_dir"}

    def folder(self, path: Path) -> Folder:
        found = self.tree
        for part in path.relative_to(self.root).parts:
            entry = found.entries.setdefault(part, Folder())
            assert isinstance(entry, Folder)
            found = entry
        return found

    def do(self, operation: Operation, durable: bool) -> None:
        name, path = operation.name, operation.path
        if name == "open":
            self.files[path] = File()
            if durable:
                self.folder(path.parent).entries[path.name] = self.files[path]
        elif name == "write":
            self.files[path].content += operation.data
        elif name == "fsync" and path in self.files:
            self.files[path].synced = self.files[path].content
        elif name in ("rename", "replace"):
            assert operation.target is not None
            for known in [known for known in self.files if known == path or path in known.parents]:
                self.files[operation.target / known.relative_to(path)] = self.files[known]
            source = self.folder(path.parent)
            if durable and path.name in source.entries:
                self.folder(operation.target.parent).entries[operation.target.name] = source.entries.pop(
                    path.name
                )
        elif name in ("rmtree", "unlink"):
            self.remove(path, durable)

    def remove(self, path: Path, durable: bool) -> None:
        """A removal that was not synced may still have taken half of the files."""
        parent = self.folder(path.parent)
        entry = parent.entries.get(path.name)
        if durable:
            parent.entries.pop(path.name, None)
        elif isinstance(entry, Folder):
            for name in sorted(entry.entries)[::2]:
                del entry.entries[name]

    def write(self, path: Path, folder: Folder | None = None) -> None:
        path.mkdir()
        for name, entry in (self.tree if folder is None else folder).entries.items():
            if isinstance(entry, Folder):
                self.write(path / name, entry)
            else:
                (path / name).write_bytes(self.left_of(entry))

    def left_of(self, file: File) -> bytes:
        if self.data == "all" or file.content == file.synced:
            return file.content
        if self.data == "synced":
            return file.synced
        reached = len(file.synced) + (len(file.content) - len(file.synced)) // 2
        return file.content[: max(len(file.synced), reached - reached % SECTOR_BYTES)]


def every_crash(
    root: Path,
    read: Callable[[], Folder],
    log: list[Operation],
    place: Path,
    check: Callable[[Path, bool], None],
) -> int:
    """`check(directory, finished)` for each moment and each thing that a disk may have left; gives their
    number."""
    cases = 0
    for count, names, data in itertools.product(range(len(log) + 1), NAMES, DATA):
        CrashedDisk(root, read(), log[:count], names=names, data=data).write(place)
        try:
            check(place, count == len(log))
        except AssertionError as error:
            last = log[count - 1] if count else None
            raise AssertionError(
                f"after {count} operations ({last and (last.name, last.path.name)}), {names=} "
                f"{data=}: {error}"
            ) from error
        shutil.rmtree(place)
        cases += 1
    return cases


def thinned(log: list[Operation]) -> list[Operation]:
    """The many small writes of a file as a few."""
    short: list[Operation] = []
    for operation in log:
        last = short[-1] if short else None
        if (
            last is not None
            and operation.name == last.name == "write"
            and operation.path == last.path
            and len(last.data) < 8192
        ):
            short[-1] = Operation("write", last.path, None, last.data + operation.data)
        else:
            short.append(operation)
    return short


@pytest.mark.ranks
def test_power_cut_during_a_save_and_its_rotation_leaves_old_or_new(
    tmp_path: Path, on_ranks: Ranks, count: Count
) -> None:
    root = tmp_path / "run"
    root.mkdir()
    on_ranks.run(2, ranks.save, root, ranks.FIRST)
    before = shutil.copytree(root, tmp_path / "before")
    first, second = on_ranks.run(2, ranks.save_logged, root, ranks.SECOND)
    # The ranks meet before the manifest is written, so all of the other's writes come before it.
    start = next(index for index, operation in enumerate(first) if operation.path.name == "manifest.json")
    log = thinned(first[:start]) + thinned(second) + thinned(first[start:])

    def check(path: Path, finished: bool) -> None:
        assert half_files(path) == []
        steps = verified_steps(RunDir(path))
        assert steps == [ranks.SECOND] if finished else steps, steps
        assert steps, "a checkpoint is left at every moment"

    cases = every_crash(root, lambda: read_tree(before), log, tmp_path / "crashed", check)
    count(power_cuts=cases)


def test_power_cut_while_replacing_a_file_leaves_old_or_new(tmp_path: Path, count: Count) -> None:
    root = tmp_path / "folder"
    root.mkdir()
    (root / "file.json").write_text('"old"')
    before = shutil.copytree(root, tmp_path / "before")
    with injected(None) as log:
        write_file(root / "file.json", '"new"' * 1000)

    def check(path: Path, finished: bool) -> None:
        text = (path / "file.json").read_text()
        assert text == '"new"' * 1000 or (text == '"old"' and not finished)

    count(power_cuts=every_crash(root, lambda: read_tree(before), log, tmp_path / "crashed", check))


def test_power_cut_while_publishing_a_directory_is_atomic(tmp_path: Path, count: Count) -> None:
    root = tmp_path / "folder"
    root.mkdir()
    with injected(None) as log, staged_directory(root / "made") as stage:
        (stage / "inner").mkdir()
        for name in ("a", "inner/b"):
            _through_the_disk(stage / name)

    def check(path: Path, finished: bool) -> None:
        assert (path / "made").exists() or not finished
        if (path / "made").exists():
            assert {name: (path / "made" / name).read_bytes() for name in ("a", "inner/b")} == {
                "a": b"x" * 2000,
                "inner/b": b"x" * 2000,
            }

    count(power_cuts=every_crash(root, Folder, log, tmp_path / "crashed", check))


def _through_the_disk(path: Path) -> None:
    from fsdp_tune.core.atomic import DISK

    with DISK.open(path) as file:
        DISK.write(file, b"x" * 2000)
