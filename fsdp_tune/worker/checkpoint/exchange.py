"""Read a checkpoint whose files are on several machines: each has its own run directory
(`launch.shared_directory: false`).

The first rank of each machine finds out which files its directory has. Small files that every rank reads are
copied to each machine as files; of the shards a rank gets the byte ranges that its read plan needs, in a
sparse file next to the checkpoint. The bytes travel between ranks over gloo, in rounds of bounded size in
which all ranks take part.
"""

from __future__ import annotations

import fnmatch
import os
import secrets
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdp_tune.core.atomic import DISK, STAGE_MARK, write_file
from fsdp_tune.core.errors import FsdpTuneError, failed_error
from fsdp_tune.core.tensors.dcp_metadata import METADATA_NAME
from fsdp_tune.run.directory import TRAINER_STATE, Checkpoint, inspect_checkpoint, is_of_weights, name_aside
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest, damage, digest_file, mark_damaged, read_manifest
from fsdp_tune.worker.agreement import all_or_none, from_rank0, gather

ROUND_BYTES = 64 << 20
"""What a rank sends in one round at most, and what it receives."""
RANK_FILES = "rng_state_*.pth"


def rank_file(rank: int) -> str:
    """Return the name of a rank's own file: generators, sums since the last line, loss scale."""
    return f"rng_state_{rank}.pth"


def leads_machine(*, is_scattered: bool) -> bool:
    """Return whether this rank works in the run directory for the others: the first of the run, or of each
    machine with its own."""
    return os.environ.get("LOCAL_RANK", "0") == "0" if is_scattered else dist.get_rank() == 0


def refuse_one_directory(directory: Path, group: dist.ProcessGroup | None = None) -> None:
    """Refuse a run directory that several machines see, which would replace each other's files in it.
    Collective. Raises: FailedError."""
    is_leader = leads_machine(is_scattered=True)
    own = directory / f".checkpoint-probe{STAGE_MARK}{secrets.token_hex(8)}"

    def look(names: Collection[str]) -> None:
        if any((directory / name).exists() for name in names):
            message = (
                f"several machines see {directory}, and with `launch.shared_directory: false` each "
                "needs its own"
            )
            raise failed_error(
                "run-in-use",
                message,
                hint="set `launch.shared_directory: true`, or give each machine another `output_dir`",
            )

    try:
        all_or_none(lambda: DISK.mkdir(own) if is_leader else None, "marking the run directory", group)
        others = [
            name for name in gather(own.name if is_leader else None, group) if name not in (None, own.name)
        ]
        all_or_none(lambda: look(others) if is_leader else None, "looking for marks of other machines", group)
    finally:
        if is_leader:
            shutil.rmtree(own, ignore_errors=True)


class ByteRange(NamedTuple):
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class ScatteredFiles:
    """The files of a checkpoint on all machines, as one rank sees them."""

    folder: Path
    """The checkpoint in this machine's run directory."""
    held: Sequence[frozenset[str]]
    """By rank, the names of the files that its machine has."""

    @property
    def here(self) -> frozenset[str]:
        return self.held[dist.get_rank()]

    def fetch(self, ranges: Collection[ByteRange], target: Path) -> None:
        """Get ranges of files that this machine lacks, each at its position in a file of that name below
        `target`. Collective.

        Raises: FailedError on every rank if a range is on no machine. If one cannot be read or written,
        OSError on that rank and RemoteError on the others.
        """
        wanted = gather(_joined(ranges))
        mine, plan = dist.get_rank(), defaultdict[tuple[int, int], list[ByteRange]](list)
        for rank, each in ((rank, each) for rank, every in enumerate(wanted) for each in every):
            owners = [owner for owner, names in enumerate(self.held) if each.file in names]
            if not owners:
                raise failed_error("checkpoint-incomplete", f"{self.folder}: no machine has {each.file}")
            plan[owners[rank % len(owners)], rank].append(each)
        limit = max(1, ROUND_BYTES // dist.get_world_size())
        rounds = max((-(-sum(each.length for each in pair) // limit) for pair in plan.values()), default=0)
        sent = {rank: _in_rounds(pair, limit) for (owner, rank), pair in plan.items() if owner == mine}
        got = {owner: _in_rounds(pair, limit) for (owner, rank), pair in plan.items() if rank == mine}
        failures: list[OSError] = []
        for number in range(rounds):
            self._exchange(
                {rank: parts[number] for rank, parts in sent.items() if number < len(parts)},
                {rank: parts[number] for rank, parts in got.items() if number < len(parts)},
                target,
                failures,
            )
        all_or_none(
            lambda: _raise_first(failures), f"reading files of {self.folder.name} from other machines"
        )

    def _exchange(
        self,
        sent: dict[int, list[ByteRange]],
        got: dict[int, list[ByteRange]],
        target: Path,
        failures: list[OSError],
    ) -> None:
        """Send and get the ranges of one round, by rank. After an error of the disk the other ranks still get
        as many bytes."""
        world = range(dist.get_world_size())
        sizes = [
            [sum(each.length for each in ranges.get(rank, ())) for rank in world] for ranges in (sent, got)
        ]
        outgoing, incoming = (torch.zeros(sum(each), dtype=torch.uint8) for each in sizes)
        buffer, at = _bytes_of(outgoing), 0
        for each in (each for rank in world for each in sent.get(rank, ())):
            try:
                _read_into(self.folder / each.file, each.start, buffer[at : at + each.length])
            except OSError as error:
                failures.append(error)
            at += each.length
        dist.all_to_all_single(incoming, outgoing, sizes[1], sizes[0])
        buffer, at = _bytes_of(incoming), 0
        for each in (each for rank in world for each in got.get(rank, ())):
            try:
                _write_at(target / each.file, each.start, buffer[at : at + each.length])
            except OSError as error:
                failures.append(error)
            at += each.length

    def with_files(self, manifest: Manifest, names: Collection[str]) -> ScatteredFiles:
        """Copy whole files to this machine, as `names` of its first rank lists them, and check their digests.
        Collective."""
        lacking = sorted(set(names) - self.here) if leads_machine(is_scattered=True) else []
        stage = self.folder.with_name(f".{self.folder.name}{STAGE_MARK}files")
        with _stage(stage):
            self.fetch([ByteRange(name, 0, manifest.files[name].size_bytes) for name in lacking], stage)
            all_or_none(
                lambda: _move_in(stage, self.folder, manifest, lacking), "copying files of other machines"
            )
        return replace(
            self, held=_by_rank(self.here | set(lacking) if leads_machine(is_scattered=True) else None)
        )

    @contextmanager
    def ranges_of(self, folder: str, ranges: Collection[ByteRange]) -> Iterator[Path]:
        """Get ranges of files of a folder of the checkpoint that are not here, and yield where they are;
        collective."""
        stage = self.folder.with_name(f".{self.folder.name}{STAGE_MARK}ranges")
        with _stage(stage):
            lacking = [ByteRange(f"{folder}/{each.file}", each.start, each.length) for each in ranges]
            self.fetch([each for each in lacking if each.file not in self.here], stage)
            yield stage / folder


def scattered_checkpoint(path: Path, *, digests: bool) -> tuple[Checkpoint, ScatteredFiles]:
    """Return the checkpoint that rank 0 has been given, with the files that machines have of it. Collective.

    A machine without it gets the manifest and the small files. Digests are compared by the ranks of the
    machine that has a file. Raises: FailedError on every rank if files are missing on all machines, or are
    damaged.
    """

    def choose() -> Manifest:
        verdict = inspect_checkpoint(path, digests=False, elsewhere=None)
        if not isinstance(verdict, Checkpoint):
            raise failed_error("checkpoint-unusable", f"{path}: {verdict.reason}", ways_out=WAYS_OUT)
        return verdict.manifest

    manifest = from_rank0(choose, "choosing the checkpoint")
    files = _found(path, manifest)
    if absent := sorted(manifest.files.keys() - frozenset[str]().union(*files.held)):
        raise incomplete_error(path, manifest, absent)
    if digests:
        _compare_digests(files, manifest)
    files = files.with_files(manifest, [name for found in gather(_needed(manifest)) for name in found])
    return Checkpoint(path, int(manifest.facts["step"]), manifest), files


WAYS_OUT = ("--resume auto uses the newest complete checkpoint", "--resume PATH uses another one")


def incomplete_error(path: Path, manifest: Manifest, absent: Collection[str]) -> FsdpTuneError:
    """Return the error for a checkpoint of which no machine has some files."""
    message = f"{path.name}: {manifest.absence(absent)}"
    return failed_error(
        "checkpoint-incomplete",
        message,
        ways_out=("bring that machine back", f"copy its {path.name} to {path}"),
    )


def weights_to_first_machine(path: Path) -> None:
    """Copy the weights of a complete checkpoint to the first machine, which merges. Does nothing if there is
    none. Collective."""
    manifest = from_rank0(lambda: read_manifest(path), "reading the manifest")
    if manifest is not None:
        files = _found(path, manifest)
        files.with_files(
            manifest, [name for name in manifest.files if is_of_weights(name)] if dist.get_rank() == 0 else []
        )


def _found(path: Path, manifest: Manifest) -> ScatteredFiles:
    own = all_or_none(
        lambda: _own_files(path, manifest) if leads_machine(is_scattered=True) else None,
        "finding the files of the checkpoint",
    )
    return ScatteredFiles(path, _by_rank(own))


def shared_small_files(rank_zero: Collection[str]) -> list[str]:
    """Return those of rank 0's files that each machine gets a copy of when a checkpoint is saved."""
    return [name for name in rank_zero if name == TRAINER_STATE or name.endswith(f"/{METADATA_NAME}")]


def _own_files(path: Path, manifest: Manifest) -> frozenset[str]:
    """Return the files that this machine has. A directory of another checkpoint of the same step is moved
    aside."""
    try:
        here = read_manifest(path)
    except (OSError, ValueError):
        here = None
    if here != manifest:
        if path.exists():
            DISK.rename(path, name_aside(path))
        DISK.mkdir(path)
        write_file(path / MANIFEST_NAME, manifest.to_json())
    return frozenset(manifest.files.keys() - {each.name for each in damage(path, manifest, digests=False)})


def _compare_digests(files: ScatteredFiles, manifest: Manifest) -> None:
    local, size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    mine = sorted(files.here)[local::size]
    bad = damage(
        files.folder, replace(manifest, files={name: manifest.files[name] for name in mine}), digests=True
    )
    found = gather(bad)
    if damaged := [(rank, each) for rank, part in enumerate(found) for each in part]:
        if leads_machine(is_scattered=True):
            names = [
                each.name
                for part in found
                for each in part
                if each.is_of_contents and each.name in files.here
            ]
            mark_damaged(files.folder, names)
        rank, first = damaged[0]
        message = f"{files.folder} on the machine of rank {rank}: {first}"
        raise failed_error("checkpoint-damaged", message, ways_out=WAYS_OUT)


def _needed(manifest: Manifest) -> list[str]:
    """Return the files that this rank reads in full: all but shards, and of the ranks' own files those that
    apply to its number."""
    of_ranks = sorted(fnmatch.filter(manifest.files, RANK_FILES))
    same = len(of_ranks) == dist.get_world_size()
    own = [rank_file(dist.get_rank())] if same else of_ranks if dist.get_rank() == 0 else of_ranks[:1]
    return [*own, *(name for name in manifest.files if name not in of_ranks and not name.endswith(".distcp"))]


def _by_rank(own: frozenset[str] | None) -> list[frozenset[str]]:
    """Return, by rank, what its machine has. `own`: that of this machine on its first rank, None on others.
    Collective."""
    found: list[frozenset[str]] = []
    for each in gather(own):
        found.append(each if each is not None else found[-1])
    return found


@contextmanager
def _stage(stage: Path) -> Iterator[None]:
    """Remove what an earlier start left at `stage` on each machine, and what the block has written there when
    all ranks have left it. Collective."""

    def clear() -> None:
        if leads_machine(is_scattered=True):
            shutil.rmtree(stage, ignore_errors=True)

    all_or_none(clear, "clearing the directory for files of other machines")
    try:
        yield
    finally:  # also of a rank that cannot read: the others wait for it here
        gather(None)
        clear()


def _move_in(stage: Path, folder: Path, manifest: Manifest, names: Sequence[str]) -> None:
    for name in names:
        if not (stage / name).exists():  # an empty file
            _write_at(stage / name, 0, memoryview(b""))
        if digest_file(stage / name) != manifest.files[name]:
            raise failed_error(
                "checkpoint-damaged",
                f"{folder.name}: {name} of another machine is not what was written (digest differs)",
            )
        DISK.mkdir((folder / name).parent)
        with open(stage / name, "rb") as file:
            DISK.fsync(file)
        DISK.replace(stage / name, folder / name)


def _joined(ranges: Collection[ByteRange]) -> list[ByteRange]:
    """Return the same bytes in as few ranges as possible, sorted."""
    found: list[ByteRange] = []
    for each in sorted(ranges):
        last = found[-1] if found else None
        if last is not None and last.file == each.file and each.start <= last.start + last.length:
            end = max(last.start + last.length, each.start + each.length)
            found[-1] = ByteRange(last.file, last.start, end - last.start)
        else:
            found.append(each)
    return [each for each in found if each.length]


def _in_rounds(ranges: Sequence[ByteRange], limit: int) -> list[list[ByteRange]]:
    """Cut ranges into rounds of `limit` bytes."""
    rounds: list[list[ByteRange]] = []
    room = 0
    for each in ranges:
        start, left = each.start, each.length
        while left:
            if room == 0:
                rounds.append([])
                room = limit
            length = min(left, room)
            rounds[-1].append(ByteRange(each.file, start, length))
            start, left, room = start + length, left - length, room - length
    return rounds


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.numpy().data


def _read_into(path: Path, start: int, buffer: memoryview) -> None:
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        done = 0
        while done < len(buffer):
            count = file.readinto(buffer[done:])
            if not count:
                raise OSError(f"{path} ends before byte {start + len(buffer):,}")
            done += count


def _write_at(path: Path, start: int, data: memoryview) -> None:
    """Write into a file that other ranks of this machine may be writing, too: ranges that overlap have the
    same bytes."""
    DISK.mkdir(path.parent)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        done = 0
        while done < len(data):
            done += os.pwrite(descriptor, data[done:], start + done)
    finally:
        os.close(descriptor)


def _raise_first(failures: list[OSError]) -> None:
    if failures:
        raise failures[0]
