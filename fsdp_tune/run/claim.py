"""The claim of the command that owns a run directory.

A command that starts or replaces a run owns RUN/run.lock (`fsdp_tune.core.ownership`), so one command at a
time works in a run directory. The id of its claim identifies one lifetime of the run: from this start to the
end of the command, restarts included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from fsdp_tune.core.atomic import separate
from fsdp_tune.core.errors import FsdpTuneError, Notice, usage_error
from fsdp_tune.core.ownership import HeldError, Owner, live_owner, owned
from fsdp_tune.run.directory import RunDir


def refuse_when_held(run: RunDir) -> None:
    """Raise a usage error if another command owns the directory. Claims nothing: a command may claim it right
    after."""
    owner = live_owner(run.lock)
    if owner is not None:
        raise in_use(run, owner)


def in_use(run: RunDir, by: Owner | str, *ways_out: str) -> FsdpTuneError:
    ways = (f"fsdp-tune status {run.path}", "--set output_dir=… for another directory", *ways_out)
    return usage_error("run-in-use", f"{run.path} is in use by {by}", ways_out=ways)


@contextmanager
def locked(run: RunDir) -> Iterator[list[Notice]]:
    """Own the run directory and yield notices. Raises: usage error if another command owns it.

    Files that are appended to are separated from those of a copy by `cp -al`; all others are replaced as they
    are written.
    """
    with ExitStack() as stack:
        try:
            claim = stack.enter_context(owned(run.lock))
        except HeldError as error:
            ways_out = () if error.is_certain else (f"remove {run.lock} if that process has certainly ended",)
            raise in_use(run, error.owner or "another command", *ways_out) from None
        for appended in (run.metrics_jsonl, *run.logs.glob("*.log"), *run.path.glob("bad_rows-*.jsonl")):
            separate(appended)
        notices: list[Notice] = []
        if not claim.has_flock:
            message = (
                f"the file system of {run.path} has no file locks; the existence of {run.lock.name} is "
                "used instead"
            )
            notices.append(Notice("no-file-locks", message))
        if claim.previous is not None:
            notices.append(
                Notice("stale-lock", f"the lock of {claim.previous}, which has ended, was taken over")
            )
        yield notices
