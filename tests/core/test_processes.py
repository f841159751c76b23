"""Children of a command that ends by an exception."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from fsdp_tune.core import processes as children
from fsdp_tune.core import signals
from fsdp_tune.core.parent_death import LAUNCHER_PID, ends_with_parent

SLEEP = (sys.executable, "-c", "import time; time.sleep(30)")


def test_thread_starts_no_child_after_the_block_has_failed() -> None:
    is_started = threading.Event()

    def try_again() -> None:
        for _ in range(2):  # as an inspection that another process did not answer
            child = children.start(SLEEP, os.environ)
            is_started.set()
            child.wait()

    waiting: list[Future[None]] = []

    def interrupt() -> None:
        with children.threads(1) as pool:
            waiting.append(pool.submit(try_again))
            assert is_started.wait(10)
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert time.monotonic() - began < 10
    assert isinstance(waiting[0].exception(), InterruptedError)


def test_children_can_be_started_after_a_failed_block() -> None:
    with pytest.raises(KeyboardInterrupt), children.threads(1):
        raise KeyboardInterrupt
    child = children.start((sys.executable, "-c", ""), os.environ)
    children.release(child)
    assert child.wait(30) == 0


def test_failed_block_ends_no_child_of_another_thread() -> None:
    """Two jobs of a script, in threads: one has an error in its recipe while the other inspects a model."""
    started, other_failed = threading.Event(), threading.Event()

    def inspect() -> int:
        child = children.start(
            (sys.executable, "-c", "import sys; sys.stdin.read()"), os.environ, stdin=subprocess.PIPE
        )
        started.set()
        assert other_failed.wait(30)
        child.communicate("", timeout=30)
        return child.returncode

    results: list[int] = []

    def sound_job() -> None:
        with children.threads(1) as pool:
            results.append(pool.submit(inspect).result())

    job = threading.Thread(target=sound_job)
    job.start()
    assert started.wait(30)

    def failing_job() -> None:
        with children.threads(1) as pool:
            own.append(pool.submit(children.start, SLEEP, os.environ).result())
            raise ZeroDivisionError

    own: list[subprocess.Popen[str]] = []
    with pytest.raises(ZeroDivisionError):
        failing_job()
    assert own[0].poll() is not None, "its own child is ended"
    other_failed.set()
    job.join(60)
    assert results == [0]


@pytest.mark.slow
@pytest.mark.e2e
def test_no_child_writes_compiled_code_to_the_directory_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user can create TMPDIR/torchinductor_USER first, and Inductor executes what it finds there."""
    import torch._inductor.config

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    code = "import torch; print(torch.compile(lambda x: (x.sin() + 1).sum(0))(torch.ones(8, 8)).shape)"
    # torch 2.11: only `compile_layers` sets it
    if "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS" not in inspect.getsource(torch._inductor.config):
        code = f"import torch._inductor.config as c; c.cpp_cache_precompile_headers = False; {code}"
    environment = {
        **os.environ,
        "TMPDIR": str(temporary),
        "TORCHINDUCTOR_CACHE_DIR": str(temporary / "torchinductor_inherited"),
    }
    child = children.start((sys.executable, "-c", code), environment, stdout=subprocess.PIPE)
    assert child.communicate(timeout=300)[0].strip() == "torch.Size([8])"
    children.end(child)
    assert list(temporary.glob("torchinductor_*")) == []
    assert list((tmp_path / "cache" / "fsdp-tune" / "compiled").rglob("*.so"))


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
@pytest.mark.parametrize("is_alive", [True, False])
def test_rank_whose_launcher_died_before_its_first_line_ends(is_alive: bool) -> None:
    # a process that is not above the rank, and is not reused
    with subprocess.Popen(SLEEP if not is_alive else ["true"]) as other:
        launcher = os.getpid() if is_alive else other.pid
        code = (
            "from fsdp_tune.core.parent_death import die_with_launcher\ndie_with_launcher()\nprint('lives')"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, LAUNCHER_PID: str(launcher)},
            capture_output=True,
            text=True,
            check=False,
        )
        other.kill()
    assert (done.returncode, done.stdout) == ((0, "lives\n") if is_alive else (-signal.SIGKILL, ""))


def test_command_that_ends_with_its_parent_names_itself_to_its_children() -> None:
    code = (
        f"import os, subprocess; print(os.getpid()); subprocess.run(['printenv', '{LAUNCHER_PID}'], "
        "check=True)"
    )
    done = subprocess.run(
        ends_with_parent([sys.executable, "-uc", code]), capture_output=True, text=True, check=True
    )
    own, told = done.stdout.split()
    assert own == told


SQUARES = (
    sys.executable,
    "-c",
    "import json, sys\nfor line in sys.stdin: print(json.dumps({'square': int(line) ** 2}), "
    "flush=True)\nsys.exit('no more')",
)


def test_json_child_answers_lines_until_its_input_ends() -> None:
    with children.JsonChild(SQUARES, os.environ) as child:
        child.send("3")
        assert child.receive() == {"square": 9}
        child.send("4", is_last=True)
        assert [child.receive(), child.receive()] == [{"square": 16}, None]
        assert (child.wait(), child.failure()) == (1, "no more")


def test_json_child_that_has_ended_takes_requests_and_has_a_failure() -> None:
    with children.JsonChild(
        (sys.executable, "-c", "import sys; sys.stderr.buffer.write(b'lost \\xff')"), os.environ
    ) as child:
        child.wait()
        child.send("3")
        assert child.receive() is None
        assert child.failure() == "lost \ufffd"


ONE_LINE = (sys.executable, "-c", "print('{}', flush=True); import time; time.sleep(30)")


def test_json_child_is_interrupted_or_killed_with_its_block() -> None:
    with children.JsonChild(ONE_LINE, os.environ) as child:
        assert child.receive() == {}
        child.interrupt()
        assert child.failure() == "its process was killed by SIGINT"
    with children.JsonChild(ONE_LINE, os.environ) as child:
        assert child.receive() == {}
        child.send("unread")
    assert child.wait() == -signal.SIGKILL


INHERITS = """
import os, signal, subprocess, sys
from fsdp_tune.core.inherited_state import reset_inherited
reset_inherited()
print(subprocess.run(["false"]).returncode, signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set(), sys.argv[1:], sys.flags.optimize)
"""  # noqa: E501


def test_command_does_not_inherit_what_its_caller_did_to_signals(tmp_path: Path) -> None:
    """Under an ignored SIGCHLD the exit code of a child is lost; under PYTHONINSPECT Python waits for someone
    to type.

    Under PYTHONOPTIMIZE=2 there are no docstrings, and "transformers rejects this model".
    """
    (tmp_path / "program.py").write_text(INHERITS)

    def spoil() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

    environment = os.environ | {"PYTHONINSPECT": "1", "PYTHONOPTIMIZE": "2"}
    command = [sys.executable, "-u", str(tmp_path / "program.py"), "a b"]
    done = subprocess.run(
        command, preexec_fn=spoil, capture_output=True, text=True, env=environment, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 True ['a b'] 0\n", "")


@pytest.mark.parametrize(("mask", "kept"), [(0o777, 0o077), (0o027, 0o027), (0o700, 0o000)])
def test_umask_leaves_the_owner_their_files_and_children_speak_utf8(mask: int, kept: int) -> None:
    code = (
        "import os, subprocess, sys\nfrom fsdp_tune.core.inherited_state import "
        "reset_inherited\nreset_inherited()\n"
        "child = [sys.executable, '-c', 'import sys; print(sys.stdin.encoding, sys.stdout.encoding)']\n"
        "print(os.umask(0), subprocess.run(child, stdin=subprocess.PIPE, capture_output=True, "
        "text=True).stdout.strip())\n"
    )
    environment = os.environ | {"PYTHONIOENCODING": "utf-16", "PYTHONUTF8": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        umask=mask,
        capture_output=True,
        env=environment,
        timeout=30,
        check=False,
    )
    assert done.stdout.decode("utf-16").split() == [str(kept), "utf-8", "utf-8"], done.stderr


def test_child_survives_what_a_scheduler_sends_to_the_whole_job() -> None:
    """The launcher would die of it, and its ranks with it."""
    code = (
        "import os, signal\nfor each in (signal.SIGUSR2, signal.SIGXCPU, signal.SIGPWR): "
        "os.kill(os.getpid(), each)\nprint('lives')"
    )
    command = ends_with_parent([sys.executable, "-ISc", code])
    assert (
        subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout == "lives\n"
    )


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGXCPU, signal.SIGQUIT])
def test_stop_signal_outside_of_the_ranks_is_raised(number: int) -> None:
    with (
        pytest.raises(signals.StoppedBySignal, match="stopped by SIG") as stopped,
        signals.stop_signals_raise(),
    ):
        os.kill(os.getpid(), number)
    assert (stopped.value.number, stopped.value.exit_code) == (number, 143)
    assert signal.getsignal(number) is not signal.SIG_IGN


def test_nothing_that_handles_errors_takes_a_stop_signal_for_one() -> None:
    """Of libraries too, such as `except Exception` around a chat template."""
    with pytest.raises(signals.StoppedBySignal), signals.stop_signals_raise(), contextlib.suppress(Exception):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("ends_itself", [False, True])
def test_nothing_below_a_child_is_left_when_it_has_been_ended(ends_itself: bool, tmp_path: Path) -> None:
    """A process in a session of its own gets no signal of the group, and would still hold the memory of a
    GPU."""
    file = tmp_path / "pid"
    inner = (
        f"import os, signal, time; signal.signal(15, 1); open({str(file)!r}, 'w').write(str(os.getpid())); "
        "time.sleep(30)"
    )
    outer = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-ISc', {inner!r}], "
        "start_new_session=True); time.sleep(30)"
    )
    child = children.start([sys.executable, "-ISc", outer], os.environ)
    limit = time.monotonic() + 20
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < limit
        time.sleep(0.01)
    below = children.descendants(child) if ends_itself else []
    if ends_itself:
        child.send_signal(signal.SIGKILL)
        while not children.has_ended(child):
            time.sleep(0.01)
    children.end(child, below)
    status = Path(f"/proc/{file.read_text()}/status")
    assert not status.exists() or "State:\tZ" in status.read_text(), "gone, or waited for by nobody"


def test_failure_of_a_child_names_each_signal() -> None:
    assert children.describe_failure(-signal.SIGKILL, "") == "its process was killed by SIGKILL"
    unnamed = int(signal.SIGRTMIN) + 1
    assert children.describe_failure(-unnamed, "") == f"its process was killed by signal {unnamed}"
