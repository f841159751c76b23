"""Send the complete checkpoints and models of a run to its mirror, in a process of its own.

    python -m fsdp_tune.cluster.mirror.send RUN URL MACHINE MACHINES KEEP START CLAIM DIRECTORY

follows the run directory until its standard input ends, then sends what is left and ends: with 0 if the
mirror has everything, else with 1. One such process runs on each machine. That of the first writes the
manifests and rotates; the others send the files that the first does not have, which is none on a shared disk.
KEEP is `training.save_total_limit` or `all`, START the step from which the run continues, or `unknown`.
CLAIM is the command's claim on the mirror (`Writer.key`), or `none` if it has not tried. DIRECTORY is `own`
if each machine has its own run directory, else `shared`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fsdp_tune.cluster.mirror.remote_run import RemoteRun
from fsdp_tune.cluster.mirror.sender import POLL_SECONDS, Sender
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.mirror_state import state_path
from fsdp_tune.run.remote_requests import ContentError, UrlError

REMOTE_POLL_SECONDS = 10.0
"""Between two looks of another machine at what the first one misses."""
RETRY_SECONDS = (5.0, 15.0, 30.0, 60.0)
"""Pauses after a folder could not be sent; the last one repeats."""


def follow(
    sender: Sender, is_ending: Callable[[], bool], start_step: int | None, wait: Callable[[float], object]
) -> bool:
    """Send folders as they are completed, until `is_ending` and nothing is left. Returns whether everything
    was sent."""
    failures, is_open = 0, False
    while True:
        is_last = is_ending()  # before looking: what was complete then is sent
        waiting = sender.waiting()
        try:
            if not is_open:
                sender.open(start_step)
                is_open = True
            sender.note_progress(waiting)
            if waiting:
                sender.send(waiting[0])
                waiting = sender.waiting()
                sender.note_progress(waiting)
            sender.succeeded()
            failures = 0
        except (UrlError, OSError, ContentError) as error:
            sender.failed(error)
            if is_last and failures:
                return False
            wait(0.0 if is_last else RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])
            failures += 1
            continue
        if not waiting:
            if is_last:
                return not sender.refused()
            wait(POLL_SECONDS)


def follow_first_machine(
    sender: Sender,
    run: RunDir,
    is_ending: Callable[[], bool],
    wait: Callable[[float], object],
    *,
    has_own_directory: bool = False,
) -> None:
    """Send what the first machine misses, until `is_ending`; from an own directory, until the mirror has its
    newest checkpoint.

    Ends at once on a disk that the first machine shares. The caller ends a process that makes no progress.
    """
    while True:
        is_last = is_ending()
        if not has_own_directory and (is_last or state_path(run, 0).exists()):
            return
        try:
            sender.send_missing()
            sender.succeeded()
            if is_last and sender.has_newest():
                return
        except (UrlError, OSError, ContentError, ValueError) as error:
            sender.failed(error)
        if is_last:
            time.sleep(POLL_SECONDS)
        else:
            wait(POLL_SECONDS if has_own_directory else REMOTE_POLL_SECONDS)


def main(arguments: list[str]) -> int:
    path, url, machine, machines, keep, start, claim, directory = arguments
    run, ending = RunDir(Path(path)), threading.Event()
    with suppress(OSError):
        os.nice(10)

    def listen() -> None:
        sys.stdin.read()
        ending.set()

    threading.Thread(target=listen, daemon=True).start()
    remote = RemoteRun(url, run.name)
    sender = Sender(
        run,
        remote,
        machine=int(machine),
        has_others=int(machines) > 1,
        keep=None if keep == "all" else int(keep),
        claim=None if claim == "none" else claim,
    )
    if int(machine) > 0:
        follow_first_machine(sender, run, ending.is_set, ending.wait, has_own_directory=directory == "own")
        return 0
    try:
        return (
            0 if follow(sender, ending.is_set, None if start == "unknown" else int(start), ending.wait) else 1
        )
    finally:
        sender.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
