"""Commands without the seconds of their imports: `python -m fsdp_tune …` is a fork of a process that has
imported the stack.

`install()` patches `subprocess.Popen` in a process of pytest. A child that would run a module of the package,
and each process of xdist, is then forked by the server of ranks (`tests/ranks.py`), with the same arguments,
environment, directory, descriptors and session. In such a command the children that it starts, such as the
launcher and its ranks, are forks of itself. Parents, process groups, signals and exit codes are those of real
processes; command lines in /proc are not, and libraries have been imported before.
Where that matters a process is started for real: with the mark `cold`, and where the environment differs in a
variable that libraries read when they are imported.

When a warm command has ended, the process that forked it adopts its orphans, ends them, and reports them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import inspect
import io
import os
import pickle
import random
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from execnet.gateway_io import popen_bootstrapline

from tests import times

MODULES = ("fsdp_tune", "accelerate", "tests.warm_child")
"""Packages and modules that may run warm."""
CODE = "-c"
"""In place of a module: the argument is the code. Only what starts a process of xdist."""
PARENT_DEATH = "core/parent_death.py"
READ_AT_IMPORT = (
    "HF_",
    "HUGGINGFACE_",
    "TRANSFORMERS_",
    "LD_",
    "PYTHON",
    "EMULATED_CUDA",
    "TORCH_",
    "PYTORCH_",
    "OMP_",
)
"""First letters of variables that libraries read when they are imported."""
HARMLESS = {
    "PYTHONSAFEPATH",
    "PYTHONUNBUFFERED",
    "PYTHONDONTWRITEBYTECODE",
    "HF_HUB_DISABLE_TELEMETRY",
    "HF_HUB_DISABLE_PROGRESS_BARS",
    "PYTHONPATH",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TRANSFORMERS_VERBOSITY",
}
"""Of these, what is read later or changes nothing that a test looks at. The server's PYTHONPATH begins with
the repository."""
at_import: dict[str, str] = {}
"""The environment in which the server has imported the stack."""
GRACE_SECONDS = 3.0
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass(frozen=True)
class Command:
    """What a child shall run, and in which surroundings."""

    module: str
    """Or `CODE`."""
    arguments: tuple[str, ...]
    is_safe_path: bool
    is_bound: bool
    """`core/parent_death.py` executes it: it is killed when its parent ends."""
    environment: dict[str, str]
    folder: str | None
    new_session: bool
    process_group: int
    kept: tuple[int, ...] = ()
    """Descriptors beyond 2 that stay open under their numbers."""


def command_of(args: Sequence[Any], environment: Mapping[str, str] | None, **how: Any) -> Command | None:
    """Return what `subprocess` was given as a warm command; None for what has to be executed."""
    words = [os.fsdecode(word) for word in args]
    is_bound = words[1:3] == ["-I", "-S"] and len(words) > 5 and words[3].endswith(PARENT_DEATH)
    if is_bound:
        words = words[5:]
    if not words or words[0] != sys.executable:
        return None
    flags: list[str] = []
    rest = words[1:]
    while rest and rest[0] in ("-u", "-P", "-I", "-s", "-E"):
        flags.append(rest.pop(0))
    if rest == [CODE, popen_bootstrapline]:
        rest = ["-m", *rest]
    elif (
        len(rest) < 2 or rest[0] != "-m" or not any(f"{rest[1]}.".startswith(f"{name}.") for name in MODULES)
    ):
        return None
    environment = dict(os.environ if environment is None else environment)
    is_safe_path = bool({"-P", "-I"} & {*flags}) or bool(environment.get("PYTHONSAFEPATH"))
    return Command(rest[1], tuple(rest[2:]), is_safe_path, is_bound, environment, **how)


def differing(environment: Mapping[str, str]) -> list[str]:
    """Return the variables that libraries have read with another value when they were imported."""
    names = {name for name in {*environment, *at_import} if name.startswith(READ_AT_IMPORT)} - HARMLESS
    return sorted(name for name in names if environment.get(name) != at_import.get(name))


# In a process of pytest

_real_execute = subprocess.Popen._execute_child
_real_poll = subprocess.Popen._internal_poll
_real_wait = subprocess.Popen._wait
connect: Callable[[], Connection] | None = None
"""Connects to the server; None while the tests that run need real processes."""
started: list[subprocess.Popen[Any]] = []
"""Warm commands of the present test."""


def install(connect_to_server: Callable[[], Connection]) -> None:
    """Patch `subprocess` in a process of pytest, whose environment is now that of the server."""
    global connect
    connect = connect_to_server
    at_import.update(os.environ)
    subprocess.Popen._execute_child = _execute_child  # type: ignore[method-assign]
    subprocess.Popen._internal_poll = _internal_poll  # type: ignore[method-assign]
    subprocess.Popen._wait = _wait  # type: ignore[method-assign]


def _execute_child(self: Any, *arguments: Any) -> None:
    given = dict(zip(_EXECUTE_PARAMETERS, arguments, strict=True))
    command = None
    if (
        connect is not None
        and _is_plain(given)
        and isinstance(given["args"], list | tuple)
        and given["executable"] is None
    ):
        folder = os.fsdecode(given["cwd"] if given["cwd"] is not None else Path.cwd())
        command = command_of(
            given["args"],
            given["env"],
            folder=folder,
            new_session=bool(given["start_new_session"]),
            process_group=given["process_group"],
            kept=tuple(sorted(given["pass_fds"])),
        )
    if command is None or not Path(command.folder or "").is_dir() or differing(command.environment):
        _real_execute(self, *arguments)
        return
    assert connect is not None
    self._warm = connect()
    with socket.socket(fileno=os.dup(self._warm.fileno())) as direct:
        socket.send_fds(direct, [b"C"], [*_standard(given), *command.kept])
    self._warm.send_bytes(pickle.dumps(command))
    self.pid = self._warm.recv()
    self._child_created = True
    self._close_pipe_fds(*(given[name] for name in _PIPES))
    started.append(self)


_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_EXECUTE_PARAMETERS = tuple(inspect.signature(_real_execute).parameters)[1:]


def _is_plain(given: Mapping[str, Any]) -> bool:
    """Return whether a child gets nothing that a fork of this module does not give it."""
    ids = (given["gid"], given["gids"], given["uid"])
    is_shell = bool(given.get("shell"))
    return (
        not is_shell
        and given["preexec_fn"] is None
        and given["umask"] == -1
        and ids == (None, None, None)
        and bool(given["close_fds"])
    )


def _standard(given: Mapping[str, Any]) -> list[int]:
    """Return the descriptors that become a child's 0, 1 and 2."""
    return [
        given[name] if given[name] != -1 else number
        for number, name in enumerate(("p2cread", "c2pwrite", "errwrite"))
    ]


def _internal_poll(self: Any, *arguments: Any, **named: Any) -> int | None:
    if not hasattr(self, "_warm"):
        return _real_poll(self, *arguments, **named)
    if self.returncode is None and self._warm.poll():
        _take_status(self)
    return self.returncode


def _wait(self: Any, timeout: float | None) -> int:
    if not hasattr(self, "_warm"):
        return _real_wait(self, timeout)
    if self.returncode is None:
        if not self._warm.poll(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        _take_status(self)
    return self.returncode


def _take_status(process: Any) -> None:
    try:
        process.returncode, cpu_seconds = process._warm.recv()
    except EOFError:  # the server was killed, and its forks with it
        process.returncode, cpu_seconds = -signal.SIGKILL, 0.0
    times.add_elsewhere(cpu_seconds)


def left_processes() -> list[str]:
    """Wait for the warm commands of a test, and return those that run still and the orphans that they left,
    which are then ended."""
    found: list[str] = []
    for process in started:
        try:
            if process.poll() is None:
                found.append(f"{process.pid} {' '.join(map(str, process.args))[:200]}")
            elif process._warm.poll(GRACE_SECONDS + 5):
                found += process._warm.recv()
        except EOFError:
            pass
        process._warm.close()
    started.clear()
    return found


# In a process of the server, for one command


def serve_command(connection: Connection, descriptors: list[int]) -> None:
    """Fork a command, report its pid, its end and its orphans. It is killed if the process that asked for it
    ends."""
    command: Command = pickle.loads(connection.recv_bytes())
    # tests of a process of pytest expect that what they orphan is waited for by process 1
    if command.module != CODE:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    own = os.getpid()
    child = os.fork()
    if child == 0:
        die_with(own)
        os.close(connection.fileno())
        become(command, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    connection.send(child)
    ended = os.pidfd_open(child)
    if ended not in select.select([ended, connection], [], [])[0]:
        os.kill(child, signal.SIGKILL)  # the process that asked for it has ended
    _, status = os.waitpid(child, 0)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    with contextlib.suppress(OSError):
        connection.send((os.waitstatus_to_exitcode(status), spent.ru_utime + spent.ru_stime))
        connection.send(_orphans())


def die_with(parent: int) -> None:
    """Be killed when the process that forked this one ends."""
    from fsdp_tune.core.parent_death import die_with_parent

    die_with_parent(parent)


def _orphans() -> list[str]:
    """Wait for what the command has left running, end it after a grace, and describe it."""
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.02)
        except ChildProcessError:
            return []
    pids = [
        int(pid) for pid in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    ]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [f"{pid}, an orphan of it" for pid in pids]


# In the command, and in its children


def become(command: Command, descriptors: Sequence[int]) -> NoReturn:
    """Turn this fork into a process that runs a command from its start. `descriptors`: what becomes 0, 1, 2
    and `command.kept`."""
    code = 1
    try:
        gc.freeze()
        _take_descriptors(descriptors, command.kept)
        _reset_signals()
        if command.new_session:
            os.setsid()
        elif command.process_group != -1:
            os.setpgid(0, command.process_group)
        if command.folder is not None:
            os.chdir(command.folder)
        _reset_python(command)
        code = _run(command)
    except BaseException:  # noqa: BLE001
        with contextlib.suppress(OSError):
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _take_descriptors(given: Sequence[int], kept: Sequence[int]) -> None:
    """Give `given` the numbers 0, 1, 2 and those of `kept`. All other numbers lead nowhere.

    They stay in use, since objects of the process that was forked close them some day.
    """
    import fcntl

    moved = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 1000) for number in given]
    nowhere = os.open(os.devnull, os.O_RDWR)
    numbers = [0, 1, 2, *kept]
    for path in list(Path("/proc/self/fd").iterdir()):
        number = int(path.name)
        if number > 2 and number not in moved and number not in numbers and number != nowhere:
            with contextlib.suppress(OSError):  # that of the listing
                os.fstat(number)
                os.dup2(nowhere, number, inheritable=False)
    for source, number in zip(moved, numbers, strict=True):
        os.dup2(source, number, inheritable=True)
        os.close(source)


def _reset_signals() -> None:
    """As after `exec` and the start of Python: handlers are gone, what is ignored stays ignored."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _reset_python(command: Command) -> None:
    from multiprocessing import util

    atexit._clear()
    util._finalizer_registry.clear()
    random.seed()
    if "torch" in sys.modules:
        # as in `tests.ranks`: a fork has to replace the pool of threads
        sys.modules["torch"].set_num_threads(1)
    os.environ.clear()
    os.environ.update(command.environment)
    if command.is_bound:
        from fsdp_tune.core.parent_death import LAUNCHER_PID

        die_with(os.getppid())
        os.environ[LAUNCHER_PID] = str(os.getpid())
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        is_errors = name == "stderr"
        raw = open(number, "rb" if number == 0 else "wb", buffering=0 if is_errors else -1, closefd=False)  # noqa: SIM115  for good
        how = {"line_buffering": is_errors or raw.isatty(), "write_through": is_errors}
        stream = io.TextIOWrapper(
            raw, encoding="utf-8", errors="backslashreplace" if is_errors else "strict", **how
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = [CODE] if command.module == CODE else ["-m", *command.arguments]
    paths = [
        path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path
    ]
    sys.path[:0] = paths if command.is_safe_path else [str(Path.cwd()), *paths]
    warnings.resetwarnings()
    if command.module != CODE:  # a process of pytest asks the server
        subprocess._fork_exec = _fork_exec


def _run(command: Command) -> int:
    """Run the module as `python -m` does. Returns the exit code."""
    if command.module not in ("fsdp_tune", "fsdp_tune.worker"):  # these two run their `__main__`
        sys.modules.pop(command.module, None)
    code = 0
    try:
        if command.module == CODE:
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(command.arguments[0], main.__dict__)
        else:
            runpy.run_module(command.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if code == 1 and end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001
        sys.excepthook(*sys.exc_info())
        code = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    return code & 0xFF


_real_fork_exec = subprocess._fork_exec
_FORK_EXEC_PARAMETERS = (
    *("args", "executables", "close_fds", "keep", "cwd", "env", *_PIPES, "errpipe_read", "errpipe_write"),
    *("restore_signals", "start_new_session", "process_group", "gid", "gids", "uid", "umask", "preexec_fn"),
)
"""Of `_posixsubprocess.fork_exec`; some versions of Python have more."""


def _fork_exec(*arguments: Any) -> int:
    """Fork a child that runs warm instead of executing Python again."""
    given = dict(zip(_FORK_EXEC_PARAMETERS, arguments, strict=False))
    command = None
    if _is_plain(given):
        env, cwd = given["env"], given["cwd"]
        command = command_of(
            given["args"],
            None if env is None else dict(os.fsdecode(pair).split("=", 1) for pair in env),
            folder=None if cwd is None else os.fsdecode(cwd),
            new_session=bool(given["start_new_session"]),
            process_group=given["process_group"],
            kept=tuple(number for number in given["keep"] if number != given["errpipe_write"]),
        )
    if command is None or differing(command.environment):
        return _real_fork_exec(*arguments)
    for stream in (sys.stdout, sys.stderr):  # what is buffered would be written twice
        with contextlib.suppress(Exception):
            stream.flush()
    child = os.fork()
    if child == 0:
        become(command, [*_standard(given), *command.kept])
    return child
