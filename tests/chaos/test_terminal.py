"""A run in a real terminal with a shell: Ctrl-Z and fg, Ctrl-S and Ctrl-Q, a signal from elsewhere, and
Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import pty
import shlex
import signal
import struct
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.chaos.draw import COMMAND
from tests.chaos.surroundings import HANG_SECONDS, Started, started_as, steps_of, words_of

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.ranks]
CTRL_C, CTRL_Q, CTRL_S, CTRL_Z = b"\x03", b"\x11", b"\x13", b"\x1a"


class Typist:
    """Types into a terminal, and keeps what it shows in the log of the run."""

    def __init__(self, run: Started, terminal: int) -> None:
        self.run, self._terminal = run, terminal
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with self.run.log.open("ab", buffering=0) as log:
            while True:
                try:
                    log.write(os.read(self._terminal, 4096))
                except OSError:  # the shell has ended
                    return

    def type(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    @property
    def command(self) -> psutil.Process:
        return psutil.Process(self.run.process(COMMAND).pid)


@contextmanager
def typed_train(folder: Path) -> Iterator[Typist]:
    """`train`, typed into a shell."""
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    shell = {
        "stdin": terminal,
        "stdout": terminal,
        "stderr": terminal,
        "preexec_fn": lambda: os.login_tty(terminal),
    }
    with started_as(folder, lambda run: ["bash", "--norc", "-i"], **shell) as run:
        os.close(terminal)
        typist = Typist(run, main)
        typist.type(
            f"{shlex.join(words_of(run.run, {'training.save_steps': 90_000}))}; echo ended with $?\n".encode()
        )
        run.until_step(20)
        yield typist
    os.close(main)


def test_suspended_command_continues_and_its_ranks_train_meanwhile(tmp_path: Path) -> None:
    with typed_train(tmp_path) as typist:
        run = typist.run
        typist.type(CTRL_Z)
        run.until(lambda: typist.command.status() == psutil.STATUS_STOPPED, 20)
        before = run.steps[-1]
        time.sleep(2 * HANG_SECONDS)
        assert run.steps[-1] > before
        typist.type(b"fg; echo ended with $?\n")
        run.until(lambda: "this command was stopped or suspended for" in run.text, 30)
        typist.type(CTRL_C)
        run.until(lambda: "ended with 130" in run.text)
        assert len(steps_of(run.run)) == 1


def test_signal_saves_while_the_terminal_is_stopped(tmp_path: Path) -> None:
    with typed_train(tmp_path) as typist:
        run = typist.run
        typist.type(CTRL_S)
        time.sleep(1)
        shown = run.log.stat().st_size
        run.signalled_at = time.monotonic()
        typist.command.send_signal(signal.SIGTERM)
        run.until(lambda: steps_of(run.run), 60)
        assert run.seconds_to_save() < 20
        assert run.log.stat().st_size == shown
        typist.type(CTRL_Q)
        run.until(lambda: "ended with 143" in run.text, 60)
        assert "SIGTERM: " in run.text


def test_pager_that_stops_reading_delays_no_save(tmp_path: Path) -> None:
    """`train | less`, whose first page is full."""
    with typed_train(tmp_path) as typist:
        typist.type(CTRL_C)
        typist.run.until(lambda: "ended with 130" in typist.run.text)
        words = shlex.join(words_of(typist.run.run, {"training.save_steps": 90_000}, "--resume", "auto"))
        begun = steps_of(typist.run.run)
        typist.type(f"{words} 2>&1 | less; echo codes ${{PIPESTATUS[*]}}\n".encode())
        typist.run.until(lambda: typist.run.steps[-1] > begun[0] + 300)
        typist.run.signalled_at = time.monotonic()
        typist.command.send_signal(signal.SIGTERM)
        typist.run.until(lambda: len(steps_of(typist.run.run)) > 1, 60)
        assert typist.run.seconds_to_save() < 20
        typist.type(b"Gq")
        typist.run.until(lambda: "codes 143 0" in typist.run.text, 90)
