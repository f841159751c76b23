"""Ranks by fork: a server that has imported the stack and computed nothing makes a world of two in 0.2 s instead of ten.

`server.run(world_size, function, *arguments)` calls a top-level function on every rank, each a process of its own over gloo,
and tells how each ended. A rank may be killed, kill itself or hang; the others are given a few seconds, then they are killed,
and who had to be is told as stuck.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from tests.cuda.environment import environment_on

REPOSITORY = Path(__file__).resolve().parent.parent.parent
LIMIT_SECONDS = 120.0
# A rank that dies closes its connections, and gloo tells the others at once; who is silent for longer hangs.
GRACE_SECONDS = 30.0
KILLED = 77
"""Exit code of a rank that an injected kill ended: `os._exit`, so that nothing is flushed and no `finally` runs."""


@dataclass(frozen=True)
class End:
    """How one rank ended."""

    code: int
    """As `os.waitstatus_to_exitcode`: negative for a signal."""
    value: Any
    """What the function returned; None where it did not."""
    text: str
    """Traceback, or what it printed."""
    stuck: bool
    """It neither ended nor noticed that others had."""


class ForkServer:
    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.folder = Path(tempfile.mkdtemp(prefix="forks-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any, limit_seconds: float = LIMIT_SECONDS) -> list[End]:
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._pipe is not None
        self._pipe.send((world_size, pickle.dumps((function, arguments)), limit_seconds))
        if not self._pipe.poll(limit_seconds + GRACE_SECONDS + 60):
            raise AssertionError("the fork server does not answer")
        ends: list[End] = self._pipe.recv()
        return ends

    def values(self, world_size: int, function: Callable[..., Any], *arguments: Any, limit_seconds: float = LIMIT_SECONDS) -> list[Any]:
        """The function's value on every rank; AssertionError where one did not return."""
        ends = self.run(world_size, function, *arguments, limit_seconds=limit_seconds)
        for rank, end in enumerate(ends):
            assert end.code == 0, f"rank {rank} ended with {end.code}{' (stuck)' if end.stuck else ''}\n{end.text}"
        return [end.value for end in ends]

    def _start(self) -> None:
        self.close()
        ours, theirs = Pipe()
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
        environment = environment_on(self.device, os.environ | own, gpus=4)
        command = [sys.executable, "-m", "tests.faults.forks", str(theirs.fileno()), str(os.getpid()), str(self.folder), self.device]
        with open(self.folder / "server.log", "wb") as log:
            self._process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        theirs.close()
        self._pipe = ours

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None


@functools.cache
def shared_forks(device: str = "cpu") -> ForkServer:
    server = ForkServer(device)
    atexit.register(shutil.rmtree, server.folder, ignore_errors=True)
    atexit.register(server.close)
    return server


# ------------------------------------------------------------------------------------------------ in the server's process


def _serve(pipe: Connection, folder: Path, device: str) -> None:
    import datasets  # noqa: F401  what the ranks would import: once, here
    import torch
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401

    import fsdp_tune.worker.setup  # noqa: F401
    import tests.faults.ranks  # noqa: F401

    torch.set_num_threads(1)
    count = 0
    while True:
        try:
            world_size, task, limit_seconds = pipe.recv()
        except EOFError:
            return
        count += 1
        place = folder / f"call-{count}"
        place.mkdir()
        children = [_fork(place, rank, world_size, task, device) for rank in range(world_size)]
        ends = _wait(children, time.monotonic() + limit_seconds)
        answer = [_end(place, rank, code, stuck) for rank, (code, stuck) in enumerate(ends)]
        shutil.rmtree(place, ignore_errors=True)
        pipe.send(answer)


def _fork(place: Path, rank: int, world_size: int, task: bytes, device: str) -> int:
    server = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 3
    try:
        _be_rank(place, rank, world_size, task, server, device)
        code = 0
    except BaseException:  # noqa: BLE001  whatever it was, the test gets the traceback
        (place / f"text-{rank}").write_text(traceback.format_exc())
        code = 1
    finally:
        os._exit(code)


def _be_rank(place: Path, rank: int, world_size: int, task: bytes, server: int, device: str) -> None:
    import torch.distributed as dist

    from fsdp_tune.core.parent_death import die_with_parent
    from tests.ranks import Leaves, enter_world

    die_with_parent(server)
    log = os.open(place / f"log-{rank}", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    enter_world(rank, world_size, f"{place}/rendezvous", device, timeout_seconds=60)
    function, arguments = pickle.loads(task)
    try:
        value, stays = function(*arguments), True
    except Leaves as leaving:
        value, stays = leaving.value, False
    (place / f"value-{rank}").write_bytes(pickle.dumps(value))
    for thread in threading.enumerate():  # as the interpreter does when a process ends: a save in flight is finished
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join(timeout=GRACE_SECONDS)
    if stays:
        with contextlib.suppress(RuntimeError):
            dist.barrier()


def _wait(children: list[int], deadline: float) -> list[tuple[int, bool]]:
    """Exit codes by rank, and whether a rank had to be killed."""
    ended: dict[int, tuple[int, bool]] = {}
    while len(ended) < len(children):
        for child in children:
            if child not in ended and (found := os.waitpid(child, os.WNOHANG))[0] == child:
                code = os.waitstatus_to_exitcode(found[1])
                ended[child] = (code, False)
                if code != 0:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            for child in [child for child in children if child not in ended]:
                os.kill(child, signal.SIGKILL)
                ended[child] = (os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), True)
        time.sleep(0.005)
    return [ended[child] for child in children]


def _end(place: Path, rank: int, code: int, stuck: bool) -> End:
    value, text, log = (place / f"{name}-{rank}" for name in ("value", "text", "log"))
    said = text.read_text() if text.exists() else log.read_text(errors="replace")[-4000:] if log.exists() else ""
    return End(code, pickle.loads(value.read_bytes()) if value.exists() else None, said, stuck)


if __name__ == "__main__":
    from fsdp_tune.core.parent_death import die_with_parent
    from tests.faults import forks

    die_with_parent(int(sys.argv[2]))
    forks._serve(Connection(int(sys.argv[1])), Path(sys.argv[3]), sys.argv[4])
