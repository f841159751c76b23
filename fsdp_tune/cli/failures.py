"""The problem that is reported for an uncaught exception, and the file with its traceback."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import traceback
from pathlib import Path

from fsdp_tune.cli.terminal import write_text
from fsdp_tune.cli.terminal_text import printable
from fsdp_tune.core.errors import ExitCode, Problem
from fsdp_tune.core.library_errors import as_os_error
from fsdp_tune.core.limits import limit_problem
from fsdp_tune.core.refused_variables import find_refusal
from fsdp_tune.core.units import shown

_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space there, then run the command again"),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS), "change the permission, or name a place where you may write"
    ),
    errno.EFBIG: "raise the limit of the size of files (`ulimit -f`), or use a file system that takes "
    "larger ones",
    errno.ELOOP: "the link leads to itself; name the file or directory that is meant",
    errno.ENAMETOOLONG: "no file or directory can have so long a name; write a shorter one",
}


_MISTYPED = (errno.ENAMETOOLONG, errno.ELOOP)


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code for an exception that nothing has caught: that of usage for a path or a variable
    that cannot be right."""
    if _refusal(error) is not None:
        return ExitCode.USAGE
    found = as_os_error(error)
    return ExitCode.USAGE if isinstance(found, OSError) and found.errno in _MISTYPED else ExitCode.FAILED


def _refusal(error: BaseException) -> Problem | None:
    return find_refusal("".join(traceback.format_exception(error)))


def _file_system_problem(error: OSError, log: str | None) -> Problem:
    # what os.getcwd raises; a library's own FileNotFoundError("…") has no errno
    is_of_system = error.errno == errno.ENOENT and error.filename is None and error.__cause__ is None
    if is_of_system and isinstance(error, FileNotFoundError):
        return Problem(
            "file-system", "the current directory has been removed", hint="change to one that exists"
        )
    what = error.strerror or type(error).__name__
    given = [str(name) for name in (error.filename, error.filename2) if name is not None]
    names = " → ".join(map(shown, given) if error.errno == errno.ENAMETOOLONG else given)
    remedy = _REMEDIES.get(error.errno or 0)
    hint = "; ".join(filter(None, (remedy, f"the traceback is in {log}" if log else None)))
    return Problem("file-system", f"{names}: {what}" if names else str(error), hint=hint)


def problem_of(error: BaseException, directory: Path | None) -> Problem:
    """Return the problem of an exception that nothing has caught: a variable, a limit of the system, a file,
    or a bug.

    `directory`: of the run's logs, where the traceback is written; None: there is none.
    """
    if (known := limit_problem(error) or _refusal(error)) is not None:
        return known
    found = as_os_error(error)
    if isinstance(found, OSError) and found.errno in _MISTYPED:
        return _file_system_problem(found, None)
    log = _log_traceback(directory)
    if isinstance(found, OSError):
        return _file_system_problem(found, log)
    return Problem(
        "bug",
        f"this is a bug in fsdp-tune: {type(error).__name__}: {error}",
        hint=f"please report it with the traceback in {log}",
    )


def _log_traceback(directory: Path | None) -> str:
    """Write the traceback of the current exception into the run's logs, or else to a temporary file, or else
    to stderr."""
    text = traceback.format_exc()
    for parent in (directory, None):
        try:
            handle, name = tempfile.mkstemp(prefix="fsdp-tune-traceback-", suffix=".log", dir=parent)
            with os.fdopen(handle, "w") as file:
                file.write(text)
            return name
        except OSError:
            continue
    write_text(sys.stderr, printable(text))
    return "the lines above (no log file could be written)"
