"""A pool of gloo ranks that live for the whole session: importing the stack costs ten seconds a process, a case a second or two.

`pool.run(world_size, function, *arguments)` calls a top-level function on ranks 0 … world_size - 1, each in a process
of its own with a fresh process group (rendezvous by file, no ports), and returns the values by rank. What one case
leaves behind (process group, Accelerate's singletons, seeds, environment, signal handlers) is put back before the next.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import itertools
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.environment import with_gpus

REPOSITORY = Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS = 300.0
# A rank that fails closes its connections, and gloo tells the others at once; who is silent for longer hangs.
GRACE_SECONDS = 20.0


class RanksFailed(AssertionError):
    """What each rank that failed raised."""


class Leaves(Exception):
    """Raised by a function to answer `value` and leave at once, without waiting for the others, as a process that ends would."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.value = value


@dataclass
class RankPool:
    """`folder` holds the rendezvous files and what the ranks print; `environment` is theirs, by default that of this process.

    On `cuda` each rank has the GPU of its number.
    """

    folder: Path
    size: int = 4
    device: str = "cpu"
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    restarts: int = 0
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _pipes: list[Connection] = field(default_factory=list)
    _calls: Iterator[int] = field(default_factory=itertools.count)

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any, timeout_seconds: float = TIMEOUT_SECONDS) -> list[Any]:
        """The function's value on every rank; RanksFailed with the tracebacks when it raises on any, or in time on none.

        On a machine with fewer GPUs than ranks the test is skipped.
        """
        if world_size > self.size:
            assert self.device == "cuda"
            pytest.skip(f"{world_size} ranks need as many GPUs, and here are {self.size}")
        if not self._processes:
            self._start()
        rendezvous = self.folder / f"rendezvous-{next(self._calls)}"
        task = pickle.dumps((function, arguments))
        for rank in range(world_size):
            self._pipes[rank].send((rank, world_size, str(rendezvous), task))
        answers = self._collect(world_size, time.monotonic() + timeout_seconds)
        rendezvous.unlink(missing_ok=True)
        failures = [f"--- rank {rank}\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            raise RanksFailed("\n".join(failures))
        return [pickle.loads(value) for _, value in answers]

    def _collect(self, world_size: int, deadline: float) -> list[tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        lost = False
        while len(answers) < world_size:
            waiting = {self._pipes[rank]: rank for rank in range(world_size) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                stuck = self._stop(waiting.values())
                return [answers.get(rank) or (False, f"no answer in time\n{stuck[rank]}") for rank in range(world_size)]
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting[pipe]
                try:
                    ok, value, stays = pipe.recv()
                    answers[rank] = (ok, value)
                except EOFError:
                    self._processes[rank].wait()
                    answers[rank] = (False, f"the process ended with {self._processes[rank].returncode}\n{self._log(rank)}")
                    stays = False
                lost = lost or not stays
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if lost:
            self.close()
        return [answers[rank] for rank in range(world_size)]

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for rank in range(self.size):
            ours, theirs = Pipe()
            with open(self._log_path(rank), "wb") as log:
                command = [sys.executable, "-m", "tests.ranks", str(theirs.fileno()), str(os.getpid()), self.device]
                paths = filter(None, [self.environment.get("PYTHONPATH"), str(REPOSITORY)])
                environment = {**self.environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
                process = subprocess.Popen(
                    command, cwd=REPOSITORY, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _stop(self, stuck: Any) -> dict[int, str]:
        """Ends the pool; the next call starts another. Returns where the stuck ranks stood (faulthandler's stacks)."""
        stuck = list(stuck)
        for rank in stuck:
            self._processes[rank].send_signal(signal.SIGABRT)
        for rank in stuck:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._processes[rank].wait(timeout=5)
        stacks = {rank: self._log(rank) for rank in stuck}
        self.close()
        self.restarts += 1
        return stacks

    def close(self) -> None:
        for process in self._processes:
            process.terminate()  # `scripts/coverage` has a rank write its data at this signal
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            pipe.close()
        self._processes, self._pipes = [], []

    def _log_path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def _log(self, rank: int) -> str:
        return self._log_path(rank).read_text(errors="replace")[-6000:]


@functools.cache
def shared_pool(device: str = "cpu") -> RankPool:
    """The pool of this session for a device, whichever tests ask for it.

    Ranks on `cuda` have the GPUs that this process finds, and where it finds none each has an emulated one.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    pool = RankPool(folder) if device == "cpu" else _pool_on_gpus(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(pool.close)
    return pool


def _pool_on_gpus(folder: Path) -> RankPool:
    import torch

    if found := torch.cuda.device_count():
        return RankPool(folder, min(found, RankPool.size), "cuda")
    return RankPool(folder, device="cuda", environment=with_gpus(RankPool.size))


def _serve(pipe: Connection, device: str) -> None:
    """The life of a rank: waits for a task, runs it in a fresh world, answers."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    environment = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)}
    while True:
        try:
            rank, world_size, rendezvous, task = pipe.recv()
        except EOFError:
            return
        try:
            _seed()
            enter_world(rank, world_size, rendezvous, device, timeout_seconds=120)
            function, arguments = pickle.loads(task)
            answer = (True, pickle.dumps(function(*arguments)))
            # Who leaves closes its connections, and others may still be in the last collective. If one failed, this fails too.
            with contextlib.suppress(RuntimeError):
                dist.barrier()
        except Leaves as leaving:
            answer = (True, pickle.dumps(leaving.value))
        except BaseException:  # noqa: BLE001  whatever it was, the test gets the traceback
            answer = (False, traceback.format_exc())
        if not dist.is_initialized():
            # A group that did not come about leaves torch's counters out of step with the other ranks': start anew.
            pipe.send((*answer, False))
            return
        _leave_world(environment, handlers)
        pipe.send((*answer, True))


def _seed() -> None:
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def rank_device() -> str:
    """Return where a rank of a test computes."""
    return os.environ["RANK_DEVICE"]


def enter_world(rank: int, world_size: int, rendezvous: str, device: str, *, timeout_seconds: float) -> None:
    """Make this process a rank, with what a launcher exports: Accelerate reads it although the group exists."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK_DEVICE": device}
    backends = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        backends = "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(backends, f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timeout)
    dist.barrier()  # else a rank that fails at once closes connections that others are still opening


def _leave_world(environment: dict[str, str], handlers: dict[signal.Signals, Any]) -> None:
    import gc

    import torch
    import torch.distributed as dist

    dist.destroy_process_group()
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    os.environ.clear()
    os.environ.update(environment)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)
    gc.collect()  # a trainer holds itself in cycles; its tensors must not wait for the collector
    gc.freeze()  # spares later collections the imported stack, half a million objects: a fifth of a rank's CPU time


if __name__ == "__main__":
    from fsdp_tune.core.parent_death import die_with_parent
    from tests import ranks  # the module that others import: `Leaves` must be one class

    die_with_parent(int(sys.argv[2]))
    faulthandler.enable()
    ranks._serve(Connection(int(sys.argv[1])), sys.argv[3])
