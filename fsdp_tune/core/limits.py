"""Errors of the operating system that a limit explains: processes, threads, memory, open files. Each is named
with the limit's value."""

from __future__ import annotations

import errno
import re
import resource
from collections.abc import Callable

from fsdp_tune.core.cgroups import GroupLimit, memory_limit, process_limit
from fsdp_tune.core.errors import Problem
from fsdp_tune.core.library_errors import as_os_error
from fsdp_tune.core.units import format_bytes

_NO_THREAD = re.compile(
    r"can't start new thread|failed to spawn thread|Resource temporarily unavailable|pthread_create",
    re.IGNORECASE,
)
_NO_MEMORY = re.compile(
    r"Cannot allocate memory|not enough memory|bad_alloc|memory allocation of \d+ bytes failed", re.IGNORECASE
)


def is_panic(error: BaseException) -> bool:
    """Return whether a Rust library panicked. The exception of PyO3 is no `Exception`, and each library has a
    class of its own."""
    return type(error).__name__ == "PanicException"


def limit_problem(error: BaseException) -> Problem | None:
    """Return the problem of an error by which the system refused a process, a thread, memory or a file; None
    for any other error."""
    found = as_os_error(error)
    number, text = (found.errno if isinstance(found, OSError) else None), str(error)
    if (
        isinstance(found, OSError)
        and found.filename is not None
        and number not in (errno.EMFILE, errno.ENFILE)
    ):
        return None  # of a file, which names it better
    if number == errno.EAGAIN or (number is None and _NO_THREAD.search(text)):
        limits = _limits("`ulimit -u`", resource.RLIMIT_NPROC, str, process_limit())
        return _problem(
            "no further process or thread can be started",
            limits,
            "raise it, or end other processes of this user",
        )
    if (
        number == errno.ENOMEM
        or isinstance(error, MemoryError)
        or (number is None and _NO_MEMORY.search(text))
    ):
        limits = _limits("`ulimit -v`", resource.RLIMIT_AS, format_bytes, memory_limit())
        return _problem(
            "the system has no memory left for this command", limits, "raise it, or end what else uses memory"
        )
    if number in (errno.EMFILE, errno.ENFILE):
        limits = _limits("`ulimit -n`", resource.RLIMIT_NOFILE, str)
        return _problem("no further file or connection can be opened", limits, "raise it")
    return None


def _problem(what: str, limits: str, remedy: str) -> Problem:
    return Problem("system-limit", f"{what} ({limits})", hint=f"{remedy}, then run the command again")


def _limits(name: str, number: int, shown: Callable[[int], str], of_cgroup: GroupLimit | None = None) -> str:
    """Describe the limit of this process, and that of its control groups if there is one."""
    value, _ = resource.getrlimit(number)
    own = f"{name}: {'unlimited' if value == resource.RLIM_INFINITY else shown(value)}"
    return own if of_cgroup is None else f"{own}, {of_cgroup.file} of the cgroup: {shown(of_cgroup.value)}"
