"""Save checkpoints: staged, hashed while written, published by rank 0 when all ranks have finished,
optionally in the background.

Order: every rank writes its files into one hidden stage directory; all agree that all succeeded; rank 0
writes the manifest and renames. Until the rename there is no `checkpoint-N`. Old checkpoints and the
leftovers of crashed saves are deleted.

With `launch.shared_directory: false` each machine has such a directory, and its first rank takes the part of
rank 0: all write the same manifest, and rename when all have written it. If a machine is killed before its
rename, its files stay under the hidden name, and the checkpoint of the other machines is not complete without
them.
"""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_tune.core.atomic import DISK, STAGE_MARK, publish
from fsdp_tune.core.errors import FsdpTuneError, failed_error
from fsdp_tune.core.version import __version__
from fsdp_tune.model.shard.process_groups import untimed_group
from fsdp_tune.run.directory import (
    CHECKPOINT_KIND,
    FULL_MODEL_FILE,
    SHARD_FOLDER,
    TRAINER_STATE,
    RunDir,
    complete_checkpoints,
)
from fsdp_tune.run.manifest import MACHINES_FACT, MANIFEST_NAME, FileEntry, MachineFiles, Manifest, damage
from fsdp_tune.run.rotation import make_way, rotate
from fsdp_tune.worker.agreement import all_or_none, from_rank0, gather
from fsdp_tune.worker.checkpoint import state as live_state
from fsdp_tune.worker.checkpoint.exchange import (
    leads_machine,
    rank_file,
    refuse_one_directory,
    shared_small_files,
)
from fsdp_tune.worker.checkpoint.snapshot import HostArena, Snapshot
from fsdp_tune.worker.checkpoint.state import Live, OwnState, RankFile
from fsdp_tune.worker.checkpoint.storage import (
    HashingStream,
    hashing_writer,
    reason_of,
    with_free_space,
    write_safetensors,
    write_torch,
)
from fsdp_tune.worker.observe.heartbeat import HeartbeatWriter

SAVE_HINT = "free space, or fix the file system of `output_dir`; completed checkpoints are kept"


@dataclass(slots=True)
class Saved:
    """Outcome of one save, for metrics.jsonl."""

    step: int
    stall_seconds: float
    """Time during which training waited."""
    seconds: float = 0.0
    """Wall time from the request, with the wait for the save before, to the complete checkpoint: what is lost
    if the run ends earlier."""
    requested_at: float = 0.0
    """On the monotonic clock."""
    size_bytes: int = 0
    error: FsdpTuneError | None = None
    left: str | None = None
    """Why old checkpoints could not be removed afterwards; the save itself is complete."""
    moved: str | None = None
    """What else had the name of the checkpoint, and its new name."""


@dataclass
class Checkpointer:
    """Saves and rotates the checkpoints of one run. `report` is called with each finished save, on the
    training thread."""

    run: RunDir
    live: Live
    device_type: str
    asynchronous: bool
    keep: int | None
    facts: dict[str, object]
    report: Callable[[Saved], None]
    heartbeat: HeartbeatWriter
    last_step: int | None = None
    is_scattered: bool = False
    """Whether each machine has its own run directory."""
    kept: Callable[[], set[int]] = set
    """Returns further steps that a rotation must keep; called on the rank that leads."""
    written_seconds: float = 0.0
    """Time that this rank has spent writing its own files of sharded checkpoints."""
    longest_seconds: float = 0.0
    """Duration of the slowest save of this launch, including the probe."""
    _group: dist.ProcessGroup | None = None
    _arena: HostArena = field(default_factory=HostArena)
    _thread: threading.Thread | None = None
    _pending: Saved | None = None
    _size_bytes: int = 0
    """Size of the last complete checkpoint, including the probe; known on rank 0."""

    def __post_init__(self) -> None:
        # Saves in the background must not share a group with the collectives of the step.
        self._group = untimed_group()

    def _lead(self, act: Callable[[], object], what: str) -> None:
        """Act on the rank that works in this run directory for the others; a failure is raised on every
        rank."""
        all_or_none(
            lambda: act() if leads_machine(is_scattered=self.is_scattered) else None, what, self._group
        )

    def save(self, step: int, trainer: str, own: OwnState, *, best_step: int | None) -> None:
        """Save `step` after the previous save has ended. Failures are passed to `report`. `best_step` is
        protected from rotation."""
        with self.heartbeat.during("saving", step):
            self._save(step, trainer, own, best_step)

    def _save(self, step: int, trainer: str, own: OwnState, best_step: int | None) -> None:
        started = time.monotonic()
        self.wait()
        snapshot = self._snapshot(step, trainer, own, best_step)
        self._pending = Saved(step, 0.0, requested_at=started)
        if self.asynchronous:
            if not self.live.full:  # the tensors gathered on rank 0 are already copies
                # the save before has ended, so its copy may be overwritten
                snapshot = self._arena.copy(snapshot)
            self._write_in_background(snapshot, self._pending)
            self._pending.stall_seconds = time.monotonic() - started
        else:
            self._write_reporting(snapshot, self._pending)
            self._pending.stall_seconds = time.monotonic() - started
            self.wait()

    @property
    def newest_step(self) -> int | None:
        """Step of the last save, even if it is still being written; the same on every rank at the same
        step."""
        return self._pending.step if self._pending is not None else self.last_step

    def _snapshot(self, step: int, trainer: str, own: OwnState, best_step: int | None = None) -> Snapshot:
        rank: RankFile = {"rng": live_state.rng_state(self.device_type), "own": own}
        facts = {**self.facts, "step": step}
        return Snapshot(
            step,
            live_state.model_state(self.live),
            live_state.optimizer_state(self.live),
            rank,
            trainer,
            facts,
            best_step,
        )

    def poll(self) -> None:
        """Report a background save that has succeeded. A failed one is reported by `wait`, which all ranks
        call."""
        if (
            self._thread is not None
            and not self._thread.is_alive()
            and self._pending is not None
            and self._pending.error is None
        ):
            self.wait()

    def wait(self) -> None:
        """Wait for the save in flight, if any, and report it. Written bytes count as progress in the
        heartbeat."""
        if self._thread is not None:
            with self.heartbeat.during("saving"):
                self._thread.join()
            self._thread = None
        if self._pending is not None:
            saved, self._pending = self._pending, None
            if saved.error is None:
                self.last_step = saved.step
                self.longest_seconds = max(self.longest_seconds, saved.seconds)
            self.report(saved)

    def _write_in_background(self, snapshot: Snapshot, saved: Saved) -> None:
        """Write in a new thread, with the device of this rank as its current device.

        A thread starts with the first device of the machine, and DCP synchronises with the current device's
        stream: every rank of the machine would allocate memory there.
        """
        module = getattr(torch, self.device_type)
        index = None if self.device_type == "cpu" else module.current_device()

        def write() -> None:
            if index is not None:
                module.set_device(index)
            self._write_reporting(snapshot, saved)

        self._thread = threading.Thread(target=write, name=f"save-{snapshot.step}")
        self._thread.start()

    def _write_reporting(self, snapshot: Snapshot, saved: Saved) -> None:
        try:
            self._size_bytes, saved.moved = self._write(snapshot, self.run.checkpoint(snapshot.step))
            saved.size_bytes = self._size_bytes
            saved.left = self._rotate(snapshot)
        except Exception as error:  # noqa: BLE001  any error of disk or torch is the outcome of the save
            message = f"checkpoint-{snapshot.step} could not be written: {reason_of(error)}"
            failure = (
                error
                if isinstance(error, FsdpTuneError)
                else failed_error("save-failed", message, hint=SAVE_HINT)
            )
            saved.error = with_free_space(failure, self.run.path, self._size_bytes)
        saved.seconds = time.monotonic() - saved.requested_at

    def probe(self, trainer: str, own: OwnState) -> float:
        """Save once under a stage name, verify the files by digest and remove them, so that a save that
        cannot work fails early.

        Return its duration in seconds.
        """
        started = time.monotonic()
        snapshot = self._snapshot(0, trainer, own)
        stage = self.run.path / f".checkpoint-probe{STAGE_MARK}0"
        if self.is_scattered:
            refuse_one_directory(self.run.path, self._group)
        try:
            manifest = self._fill_stage(snapshot, stage)
            self._size_bytes = manifest.size_bytes if manifest else 0
            bad = all_or_none(
                lambda: damage(stage, manifest, digests=True) if manifest else [],
                "reading the probe back",
                self._group,
            )
            if bad := [each for part in gather(bad, self._group) for each in part]:
                raise failed_error(
                    "probe-read-back",
                    f"the test checkpoint cannot be read back: {bad[0]}",
                    hint=f"check the file system of {self.run.path}",
                )
        finally:
            dist.barrier(group=self._group)
            if leads_machine(is_scattered=self.is_scattered):
                shutil.rmtree(stage, ignore_errors=True)
        seconds = time.monotonic() - started
        self.longest_seconds = max(self.longest_seconds, seconds)
        return seconds

    def _write(self, snapshot: Snapshot, final: Path) -> tuple[int, str | None]:
        """Return the size of the checkpoint, and a sentence about files of others that had its name."""
        moved: list[str | None] = []

        def show() -> None:
            moved.append(make_way(final))
            publish(stage, final, replace=final.exists())

        stage = final.with_name(f".{final.name}{STAGE_MARK}{snapshot.step}")
        try:
            manifest = self._fill_stage(snapshot, stage)
            self._lead(show, f"publishing {final.name}")
        except BaseException:
            if leads_machine(is_scattered=self.is_scattered):
                shutil.rmtree(stage, ignore_errors=True)
            raise
        size_bytes = manifest.size_bytes if manifest else 0
        here = (size_bytes, next(iter(moved), None))
        every = gather(here, self._group) if self.is_scattered else [here]
        return sum(size for size, _ in every), next((sentence for _, sentence in every if sentence), None)

    def _rotate(self, snapshot: Snapshot) -> str | None:
        """Remove old checkpoints. Return the error message if that fails, else None."""
        protected = {snapshot.step, snapshot.best_step or -1}
        try:
            counted = self._complete_everywhere()
            self._lead(
                lambda: rotate(self.run, self.keep, protected=protected | self.kept(), counted=counted),
                "removing old checkpoints",
            )
        except FsdpTuneError as error:
            return error.problems[0].message
        except OSError as error:
            return str(error)
        return None

    def _complete_everywhere(self) -> set[int] | None:
        """Return the steps of the checkpoints that all machines have; None if they share the directory."""
        if not self.is_scattered:
            return None
        steps = (
            {each.step for each in complete_checkpoints(self.run, elsewhere=None)[0]}
            if leads_machine(is_scattered=True)
            else None
        )
        return set[int].intersection(*(each for each in gather(steps, self._group) if each is not None))

    def _fill_stage(self, snapshot: Snapshot, stage: Path) -> Manifest | None:
        """Write all files of a checkpoint, then the manifest. Return what of it is in this directory on the
        rank that leads, else None."""
        self._lead(lambda: _empty_stage(stage), "making the stage directory")
        entries = all_or_none(
            lambda: self._write_files(snapshot, stage), f"writing checkpoint-{snapshot.step}", self._group
        )
        parts = gather(entries, self._group)
        manifest = Manifest(
            CHECKPOINT_KIND, {name: entry for part in parts for name, entry in part.items()}, snapshot.facts
        )
        here = manifest.files
        if self.is_scattered:
            manifest, here = self._scattered(manifest, parts, stage)

        def finish() -> None:
            with DISK.open(stage / MANIFEST_NAME) as file:
                DISK.write(file, manifest.to_json().encode())
                DISK.fsync(file)
            for directory in {stage, *((stage / name).parent for name in here)}:
                DISK.fsync_dir(directory)

        self._lead(finish, "writing the manifest")
        return replace(manifest, files=here) if leads_machine(is_scattered=self.is_scattered) else None

    def _scattered(
        self, manifest: Manifest, parts: list[dict[str, FileEntry]], stage: Path
    ) -> tuple[Manifest, dict[str, FileEntry]]:
        """Give each machine a copy of the small files of rank 0. Return the manifest with what each machine
        has, and this one's files."""
        small = shared_small_files(parts[0])

        def read() -> tuple[dict[str, bytes], dict[str, object]]:
            return {name: (stage / name).read_bytes() for name in small}, manifest.facts

        copies, facts = from_rank0(read, "reading the small files", self._group)

        def copy() -> None:
            for name, raw in copies.items() if dist.get_rank() > 0 else ():
                _write_bytes(stage / name, raw)

        self._lead(copy, "copying the small files")
        machines: list[MachineFiles] = []
        mine = 0
        for rank, found in enumerate(
            gather((leads_machine(is_scattered=True), socket.gethostname(), str(self.run.path)), self._group)
        ):
            is_leader, host, directory = found
            if is_leader:
                machines.append(MachineFiles(host, directory, list(small)))
            machines[-1].files.extend(name for name in parts[rank] if name not in small)
            mine = len(machines) - 1 if rank == dist.get_rank() else mine
        whole = replace(manifest, facts={**facts, MACHINES_FACT: [asdict(each) for each in machines]})
        return whole, {name: manifest.files[name] for name in machines[mine].files}

    def _write_files(self, snapshot: Snapshot, stage: Path) -> dict[str, FileEntry]:
        rank = dist.get_rank()
        entries: dict[str, FileEntry] = {}
        if self.live.full:
            if rank == 0:
                entries[FULL_MODEL_FILE] = write_safetensors(
                    stage / FULL_MODEL_FILE, snapshot.model, {"format": "pt"}
                )
                moments = live_state.flat(snapshot.optimizer)
                entries[live_state.FULL_OPTIMIZER_FILE] = write_safetensors(
                    stage / live_state.FULL_OPTIMIZER_FILE, moments, {"format": "pt"}
                )
        else:
            entries |= self._write_sharded({"model": snapshot.model}, stage, SHARD_FOLDER)
            entries |= self._write_sharded(
                {"optimizer": {"state": snapshot.optimizer}}, stage, live_state.OPTIMIZER_DIRECTORY
            )
        started = time.perf_counter()
        name = rank_file(rank)
        entries[name] = write_torch(stage / name, snapshot.rank)
        if rank == 0:
            raw = snapshot.trainer.encode()
            entries[TRAINER_STATE] = _write_bytes(stage / TRAINER_STATE, raw)
        self.written_seconds += time.perf_counter() - started
        return entries

    def _write_sharded(self, state: dict[str, object], stage: Path, directory: str) -> dict[str, FileEntry]:
        writer, files = hashing_writer(stage / directory)
        try:
            dcp.save(state, storage_writer=writer, process_group=self._group)
        except CheckpointException as error:  # a BaseException, which no `except Exception` would catch
            rank, (cause, _) = next(iter(error.failures.items()))
            message = f"rank {rank} could not write its part of {directory}: {reason_of(cause)}"
            raise failed_error("save-failed", message, hint=SAVE_HINT) from error
        finally:
            self.written_seconds += files.seconds  # without the waits of DCP for other ranks
        return {f"{directory}/{name}": entry for name, entry in files.entries.items()}


def _write_bytes(path: Path, raw: bytes) -> FileEntry:
    stream = HashingStream(path)
    try:
        stream.write(raw)
    finally:
        stream.close()
    return stream.entry()


def _empty_stage(stage: Path) -> None:
    if not stage.parent.is_dir():
        raise failed_error(
            "run-directory-gone",
            f"{stage.parent} no longer exists: the run directory was removed, renamed or replaced",
            hint="restore it, and start again with `--resume auto`",
        )
    if stage.exists():
        DISK.rmtree(stage)
    DISK.mkdir(stage)


def trainer_state_facts(world_size: int, mesh: list[int], recipe_digest: str | None) -> dict[str, object]:
    """Return the facts of every manifest of a run, without its step."""
    return {
        "world_size": world_size,
        "mesh": mesh,
        "recipe_digest": recipe_digest,
        "versions": {"fsdp_tune": __version__, "torch": torch.__version__},
    }
