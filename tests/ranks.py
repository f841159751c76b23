"""Ranks of tests: forks of a server that has imported the stack and computed nothing, each in a new process
group over gloo.

`ranks.run(world_size, function, *arguments)` calls a top-level function on ranks 0 … world_size - 1 and
returns the values by rank; `ranks.ends(…)` also reports ranks that raise, are killed, kill themselves or
hang. A world of two takes 0.2 s, where importing the stack takes ten. There is one server for each device,
for all processes of a session (`tests/session.py`): it forks a process for each client, which forks a process
for each rank, so no state passes from one world to the next.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import os
import pickle
import pkgutil
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests import leaks, session, times, warm
from tests.cuda.environment import with_gpus

REPOSITORY = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 300.0
GRACE_SECONDS = 30.0
"""A rank that fails closes its connections, and gloo notifies the others at once. A rank that is silent for
longer than this hangs."""
MOST_RANKS = 4
KILLED = 77
"""Exit code of a rank that an injected kill ended: `os._exit`, so that nothing is flushed and no `finally`
runs."""


class RanksFailed(AssertionError):
    """What each rank that failed raised."""


class Leaves(Exception):
    """Raised by a function to return `value` and leave at once, without waiting for the others, as a process
    that ends would."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.value = value


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

    @property
    def succeeded(self) -> bool:
        return self.code == 0 and not self.stuck


class Ranks:
    """A client of the server of a device. On `cuda` each rank has the GPU of its number."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._connection: Connection | None = None

    @functools.cached_property
    def most(self) -> int:
        """Largest world: as many ranks as GPUs; emulated GPUs are enough for any."""
        if self.device == "cpu":
            return MOST_RANKS
        import torch

        return min(torch.cuda.device_count() or MOST_RANKS, MOST_RANKS)

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *arguments: Any,
        limit_seconds: float = LIMIT_SECONDS,
    ) -> list[Any]:
        """The function's value on every rank. Raises: RanksFailed with the tracebacks if a rank raises, dies
        or does not end in time."""
        ends = self.ends(world_size, function, *arguments, limit_seconds=limit_seconds)
        failures = [
            f"--- rank {rank}: {_described(end)}\n{end.text}"
            for rank, end in enumerate(ends)
            if not end.succeeded
        ]
        if failures:
            raise RanksFailed("\n".join(failures))
        return [end.value for end in ends]

    def ends(
        self,
        world_size: int,
        function: Callable[..., Any],
        *arguments: Any,
        limit_seconds: float = LIMIT_SECONDS,
    ) -> list[End]:
        """How every rank ended. On a machine with fewer GPUs than ranks the test is skipped."""
        if world_size > self.most:
            pytest.skip(f"{world_size} ranks need as many GPUs, and this machine has {self.most}")
        if self._connection is None:
            self._connection = connect(self.device)
            os.write(self._connection.fileno(), b"R")
        try:
            send(self._connection, (world_size, pickle.dumps((function, arguments)), limit_seconds))
            assert self._connection.poll(limit_seconds + GRACE_SECONDS + 60), (
                "the server of ranks does not answer"
            )
            ends, cpu_seconds = receive(self._connection)
            times.add_elsewhere(cpu_seconds)
        except (EOFError, OSError) as error:
            log = session.folder() / f"ranks-{self.device}.log"
            raise AssertionError(
                f"the server of ranks has ended\n{log.read_text(errors='replace')[-6000:]}"
            ) from error
        finally:
            if sys.exc_info()[0] is not None:
                self.close()
        return ends

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _described(end: End) -> str:
    return "no end in time" if end.stuck else f"the process ended with {end.code}"


@functools.cache
def shared_ranks(device: str = "cpu") -> Ranks:
    """The ranks of this process for a device. Where there is no GPU, each rank on `cuda` has an emulated
    one."""
    return Ranks(device)


def rank_device() -> str:
    """Return where a rank of a test computes."""
    return os.environ["RANK_DEVICE"]


def send(connection: Connection, value: Any) -> None:
    """Send a value as it is: `Connection.send` would put tensors into shared memory once torch has been
    imported."""
    connection.send_bytes(pickle.dumps(value))


def receive(connection: Connection) -> Any:
    """Raises: EOFError if the other process has ended."""
    return pickle.loads(connection.recv_bytes())


def connect(device: str) -> Connection:
    """Connect to the session's server, which the first caller starts."""
    address = str(session.folder() / f"ranks-{device}")
    client = socket.socket(socket.AF_UNIX)
    with session.alone(f"ranks-{device}"):
        try:
            client.connect(address)
        except OSError:
            Path(address).unlink(missing_ok=True)
            _start(address, device)
            client.connect(address)
    return Connection(client.detach())


def _start(address: str, device: str) -> None:
    """Start a server on a socket that accepts connections from now on: clients wait while it imports."""
    environment = dict(os.environ)
    if device == "cuda":
        import torch

        environment = environment if torch.cuda.is_available() else with_gpus(MOST_RANKS)
    paths = filter(None, [str(REPOSITORY), environment.get("PYTHONPATH")])
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    for name in ("PYTEST_CURRENT_TEST", leaks.MARK):  # of the test that happens to be the first
        environment.pop(name, None)
    with socket.socket(socket.AF_UNIX) as listening, open(f"{address}.log", "wb") as log:
        listening.bind(address)
        listening.listen()
        descriptor = listening.fileno()
        subprocess.run(
            [sys.executable, "-m", "tests.ranks", str(descriptor), device],
            cwd=REPOSITORY,
            env=environment,
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            check=True,
        )


# In the server


def _import_stack() -> None:
    """Import what ranks would import, once for all."""
    # ruff: noqa: F401  a rank or a command uses them
    import gc

    import accelerate.commands.launch
    import datasets
    import hypothesis
    import peft
    import torch
    import torch._inductor.codegen.wrapper
    import torch._inductor.compile_fx
    import torch.distributed.run
    import torch.utils.serialization
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous
    from torch.utils import tensorboard
    from transformers import conversion_mapping

    import fsdp_tune.cli.app
    import fsdp_tune.worker.main
    import fsdp_tune.worker.setup
    from fsdp_tune.core import package_versions
    from fsdp_tune.run import records

    for found in pkgutil.walk_packages(fsdp_tune.__path__, "fsdp_tune."):
        if not found.name.endswith(".__main__"):
            importlib.import_module(found.name)
    torch.set_num_threads(1)
    # its first call compiles a thousand regular expressions
    conversion_mapping.get_checkpoint_conversion_mapping("llama")
    package_versions.versions()  # reads the metadata of twenty packages
    for kind in records.Document.__subclasses__():
        records._validator(kind)
    # The rendezvous describes its callers for a log, which takes seconds with as many modules as these.
    dynamic_rendezvous.construct_and_record_rdzv_event = lambda **facts: None
    dynamic_rendezvous.get_method_name = lambda depth=2: "not looked up"
    gc.collect()
    gc.freeze()  # half a million objects that collections in forks would visit, copying their pages


def _serve(listening: socket.socket, device: str) -> None:
    """Accept clients until the session has ended."""
    _import_stack()
    owner = int(os.environ[session.OWNER])
    warm.at_import.update(os.environ)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes of clients
    server = os.getpid()
    while _is_alive(owner):
        if not select.select([listening], [], [], 1.0)[0]:
            continue
        accepted, _ = listening.accept()
        if os.fork() == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listening.close()
                warm.die_with(server)
                kind, descriptors, _, _ = socket.recv_fds(accepted, 1, 300)
                connection = Connection(accepted.detach())
                _serve_client(connection, device) if kind == b"R" else warm.serve_command(
                    connection, descriptors
                )
            finally:
                os._exit(0)
        accepted.close()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _serve_client(connection: Connection, device: str) -> None:
    """Make one world after the other. What a task imports is imported here, before its ranks are forked."""
    place = Path(tempfile.mkdtemp(prefix="world-", dir=session.folder()))
    client = os.getpid()
    while True:
        try:
            world_size, task, limit_seconds = receive(connection)
        except EOFError:
            break
        place.mkdir(exist_ok=True)
        try:
            function, arguments = pickle.loads(task)
        except Exception:  # noqa: BLE001  the test gets the traceback
            send(connection, ([End(1, None, traceback.format_exc(), stuck=False)] * world_size, 0.0))
            continue
        children = [
            _fork(place, rank, world_size, functools.partial(function, *arguments), client, device)
            for rank in range(world_size)
        ]
        before = times.cpu_seconds()
        ends = _wait(children, time.monotonic() + limit_seconds)
        answer = [_end(place, rank, code, stuck) for rank, (code, stuck) in enumerate(ends)]
        shutil.rmtree(place, ignore_errors=True)
        send(connection, (answer, times.cpu_seconds() - before))
    shutil.rmtree(place, ignore_errors=True)


def _fork(
    place: Path, rank: int, world_size: int, action: Callable[[], Any], parent: int, device: str
) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        warm.die_with(parent)
        _be_rank(place, rank, world_size, action, device)
        code = 0
    except BaseException:  # noqa: BLE001  whatever it was, the test gets the traceback
        (place / f"text-{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _be_rank(place: Path, rank: int, world_size: int, action: Callable[[], Any], device: str) -> None:
    import torch
    import torch.distributed as dist

    # A fork has to replace torch's pool of threads, and the threads that autograd starts for several devices
    # would do it at the same time: "Invalid thread pool!" (caffe2::pthreadpool).
    torch.set_num_threads(1)
    log = os.open(place / f"log-{rank}", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()  # a rank that hangs is ended by SIGABRT, which prints its stacks
    _seed()
    enter_world(rank, world_size, f"{place}/rendezvous", device, timeout_seconds=120)
    try:
        value, stays = action(), True
    except Leaves as leaving:
        value, stays = leaving.value, False
    (place / f"value-{rank}").write_bytes(pickle.dumps(value))
    for (
        thread
    ) in threading.enumerate():  # as the interpreter does when a process ends: a save in flight is finished
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join(timeout=GRACE_SECONDS)
    if stays:  # others may still be in the last collective. If one failed, this fails too
        with contextlib.suppress(RuntimeError):
            dist.barrier()


def _seed() -> None:
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def enter_world(rank: int, world_size: int, rendezvous: str, device: str, *, timeout_seconds: float) -> None:
    """Make this process a rank, with what a launcher exports: Accelerate reads it although the group
    exists."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK_DEVICE": device}
    backends = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        backends = "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(
        backends, f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timeout
    )
    dist.barrier()  # else a rank that fails at once closes connections that others are still opening


def _wait(children: list[int], deadline: float) -> list[tuple[int, bool]]:
    """Exit codes by rank, and whether a rank had to be ended."""
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
                ended[child] = (_stop(child), True)
        time.sleep(0.005)
    return [ended[child] for child in children]


def _stop(child: int) -> int:
    """End a rank that hangs, with its stacks in its log if it can still print them. Returns its exit code."""
    os.kill(child, signal.SIGABRT)
    for _ in range(100):
        found, status = os.waitpid(child, os.WNOHANG)
        if found == child:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)  # a stopped process
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _end(place: Path, rank: int, code: int, stuck: bool) -> End:
    value, text, log = (place / f"{name}-{rank}" for name in ("value", "text", "log"))
    printed = (
        text.read_text()
        if text.exists()
        else _ends_of(log.read_text(errors="replace"))
        if log.exists()
        else ""
    )
    return End(code, pickle.loads(value.read_bytes()) if value.exists() else None, printed, stuck)


def _ends_of(text: str) -> str:
    return text if len(text) < 8000 else f"{text[:4000]}\n…\n{text[-4000:]}"


if __name__ == "__main__":
    from tests import ranks  # the module that others import: `Leaves` must be one class

    if os.fork():
        os._exit(0)  # the server must not be a child of the test that happened to need it first
    ranks._serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
