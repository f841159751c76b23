"""Report the error that ends a process which runs models, as the last JSON line of its output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fsdp_tune.core.errors import ExitCode, FailedError, FsdpTuneError, Problem
from fsdp_tune.model.allocation_errors import is_device_out_of_memory, is_host_out_of_memory

Emit = Callable[[dict[str, object]], None]
"""Prints an object as a line of JSON."""


@contextmanager
def reporting_errors(emit: Emit, *, device_hint: str, host_hint: str) -> Iterator[None]:
    """Emit `{"problems": […], "exit_code": 2}` for an FsdpTuneError in the block, and for a failed allocation
    of device or host memory, whose hint is given. Raises: any other error."""
    try:
        yield
    except Exception as error:
        known = _as_known(error, device_hint, host_hint)
        if known is None:
            raise
        emit(
            {
                "problems": [problem.as_dict() for problem in known.problems],
                "exit_code": int(known.exit_code),
            }
        )


def _as_known(error: Exception, device_hint: str, host_hint: str) -> FsdpTuneError | None:
    if isinstance(error, FsdpTuneError):
        return error
    why = str(error).partition("\n")[0] or type(error).__name__
    if is_device_out_of_memory(error):
        problem = Problem("device-out-of-memory", f"the device is out of memory: {why}", hint=device_hint)
        return FailedError(problem, exit_code=ExitCode.OUT_OF_MEMORY)
    if is_host_out_of_memory(error):
        return FailedError(
            Problem("host-out-of-memory", f"the machine is out of memory: {why}", hint=host_hint)
        )
    return None
