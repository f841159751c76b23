"""Functions in a fork of the test, which has imported everything: on a terminal of a given width, or with
files for streams."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import tempfile
import termios
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO

from fsdp_tune.cli.app import main


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


class Fork:
    """A fork of this process that calls a function and whose streams are files."""

    def __init__(self, program: Callable[[], object], **variables: str) -> None:
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  closed by `end`
        self.pid = _start(program, self._out.fileno(), self._err, os.environ | variables)

    def end(self) -> Ended:
        """Wait until it has ended."""
        with self._out, self._err:
            code = _exit_code(self.pid)
            return Ended(code, _content(self._out), _content(self._err))

    def wait_for(self, path: Path, pattern: str = ".") -> re.Match[str]:
        """Wait until a file has a text. Fails if the fork ends before."""
        while (found := re.search(pattern, path.read_text() if path.exists() else "")) is None:
            assert os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None, self.end()
            time.sleep(0.02)
        return found


def ended(program: Callable[[], object], **variables: str) -> Ended:
    return Fork(program, **variables).end()


def written_to_a_terminal(program: Callable[[], object], columns: int = 0, **variables: str) -> str:
    """Return what a function writes to its terminal, which does not report its width if `columns` is 0."""
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40 if columns else 0, columns, 0, 0))
    # Parallel test runners set COLUMNS, which goes before the size of the terminal.
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
    }
    with tempfile.TemporaryFile() as err:
        child = _start(program, terminal, err, inherited | {"TERM": "xterm"} | variables)
        os.close(terminal)
        raw = _read_to_the_end(main)
        _exit_code(child)
        assert _content(err) == ""
    return raw.decode()


def shown_on_a_terminal(program: Callable[[], object], columns: int = 0) -> str:
    """Return what a function shows on its terminal, without colours and movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written_to_a_terminal(program, columns))


def lines_on_a_terminal(program: Callable[[], object], columns: int = 0) -> list[str]:
    """Return the lines that remain on a terminal, for a function that redraws none."""
    return shown_on_a_terminal(program, columns).replace("\r", "").splitlines()


def frames_on_a_terminal(program: Callable[[], object], columns: int = 0) -> list[str]:
    """Return each line that was visible at some time, once."""
    return list(
        dict.fromkeys(
            line.rstrip()
            for line in re.split(r"[\r\n]+", shown_on_a_terminal(program, columns))
            if line.strip()
        )
    )


def command(*words: object) -> Callable[[], object]:
    """Return what runs `fsdp-tune WORDS`."""

    def run() -> None:
        sys.modules["__main__"] = ModuleType("__main__")  # names the program, and is pytest's here
        sys.argv = ["fsdp-tune", *map(str, words)]
        main()

    return run


def _start(program: Callable[[], object], out: int, err: IO[bytes], environment: dict[str, str]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks while other threads run
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.dup2(out, 1)
        os.dup2(err.fileno(), 2)
        os.environ.clear()
        os.environ.update(environment)
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
        code = _executed(program)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _executed(program: Callable[[], object]) -> int:
    try:
        program()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001  the test shows it
        traceback.print_exc()
        return 1
    return 0


def _exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _read_to_the_end(main: int) -> bytes:
    raw = b""
    try:
        while data := os.read(main, 65536):
            raw += data
    except OSError:  # EIO: the other end is closed
        pass
    finally:
        os.close(main)
    return raw


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()
