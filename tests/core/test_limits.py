"""What the system refuses is named with the limit and its value."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_tune.core.limits import limit_problem


class PanicException(BaseException):
    """As PyO3's."""


PROCESSES = "no further process or thread can be started (`ulimit -u`: "
MEMORY = "the system has no memory left for this command (`ulimit -v`: "
FILES = "no further file or connection can be opened (`ulimit -n`: "
UNWRAPPED = (
    'called `Result::unwrap()` on an `Err` value: Os { code: 11, message: "Resource temporarily '
    'unavailable" }'
)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), PROCESSES),
        (RuntimeError("can't start new thread"), PROCESSES),
        (PanicException(UNWRAPPED), PROCESSES),
        (Exception("I/O error: Resource temporarily unavailable (os error 11)"), PROCESSES),
        (MemoryError(), MEMORY),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), MEMORY),
        (RuntimeError("std::bad_alloc"), MEMORY),
        (PanicException("memory allocation of 4096 bytes failed"), MEMORY),
        (OSError(errno.EMFILE, "Too many open files", "/dev/null"), FILES),
    ],
)
def test_limit_is_named_with_its_value(error: BaseException, message: str) -> None:
    problem = limit_problem(error)
    assert problem is not None
    assert problem.message.startswith(message)
    assert problem.message[len(message)] in "u0123456789"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        OSError(errno.ENOSPC, "No space left on device", "/x"),
        OSError(errno.ENOMEM, "Cannot allocate memory", "/x"),
    ],
)
def test_any_other_error_is_left_to_others(error: BaseException) -> None:
    assert limit_problem(error) is None


@pytest.mark.cold
@pytest.mark.e2e
def test_command_that_may_open_no_file_says_so(tmp_path: Path) -> None:
    lower = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))"
    program = f"{lower}; from fsdp_tune.jobs import validate; from fsdp_tune.cli.app import main; main()"
    command = [sys.executable, "-c", program, "validate", "--config", "gpt2_smoke", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 1, done.stderr
    [error] = json.loads(done.stdout)["errors"]
    assert (error["code"], error["message"]) == ("system-limit", f"{FILES}8)")
