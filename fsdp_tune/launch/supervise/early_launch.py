"""Start the launcher of a run while the command still checks its inputs, so that the ranks import the
libraries meanwhile.

The command, the inspection of the model and the ranks all need seconds of imports. Here the ranks import once
and side by side with the checks, and the first of them also inspects the model (`worker.__main__`). If the
checks fail, everything is killed and nothing is written.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import psutil
import yaml

from fsdp_tune.core import processes as children
from fsdp_tune.core.atomic import DISK, write_file
from fsdp_tune.core.clocks import LIVED
from fsdp_tune.core.files import LOG_BYTES, PIECE_BYTES
from fsdp_tune.core.ownership import temporary_directory
from fsdp_tune.launch.command.accelerate import LaunchPlan
from fsdp_tune.launch.supervise.rank_watch import kill_for_good
from fsdp_tune.recipe.fsdp_arguments import accelerate_config
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.early_start import EarlyStart

EARLY_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class EarlyLaunch:
    """A launcher whose ranks wait until `open` is called."""

    files: EarlyStart
    process: subprocess.Popen[str]
    output: FileIO
    """The launcher's log. It stays readable when the directory is removed, as a clean-up of /tmp does in a
    long run."""

    @property
    def is_waiting(self) -> bool:
        """Whether the launcher still runs. One that has ended has trained nothing, so that another one can
        take its place."""
        return self.process.poll() is None

    def inspection(self, limit_seconds: float) -> str:
        """Wait for the document of the first rank's inspection of the model. Empty if the rank did not make
        it within the limit."""
        deadline = LIVED.now() + limit_seconds
        while self.is_waiting and not self.files.inspection_json.exists() and LIVED.now() < deadline:
            time.sleep(EARLY_POLL_SECONDS)
        with contextlib.suppress(OSError):
            return self.files.inspection_json.read_text(encoding="utf-8")
        return ""

    def open(self) -> subprocess.Popen[str]:
        """Let the ranks start: the run directory is complete. The caller watches and ends the launcher from
        here on."""
        children.release(self.process)
        DISK.mkdir(self.files.opened)
        return self.process

    def copy_log(self, log: Path) -> None:
        """Append the launcher's new output to a log file. What is refused is left to the next call. Raises:
        OSError."""
        start = self.output.tell()
        while new := self.output.read(PIECE_BYTES):
            try:
                with DISK.open_private(log, "ab") as target:
                    target.write(new)
            except (OSError, MemoryError):
                self.output.seek(start)
                raise
            start += len(new)

    def end_of_log(self) -> str:
        """Return the end of the launcher's output, whether or not it could be copied. Raises: OSError."""
        start = max(0, os.fstat(self.output.fileno()).st_size - LOG_BYTES)
        return os.pread(self.output.fileno(), LOG_BYTES, start).decode("utf-8", "replace")

    def remove_files(self) -> None:
        """Remove the temporary directory. Ranks that have started need nothing of it."""
        shutil.rmtree(self.files.path, ignore_errors=True)

    def end(self) -> None:
        """Kill what is left of the launcher and its ranks."""
        children.release(self.process)
        if self.is_waiting:
            kill_for_good([psutil.Process(self.process.pid)])
            self.process.wait()
        self.output.close()
        self.remove_files()


@contextlib.contextmanager
def start_early(plan: LaunchPlan, recipe: Recipe) -> Iterator[EarlyLaunch | None]:
    """Start the launcher of all ranks. Leaving the block kills what is left of it. None if the system refuses
    its files or its process; the launch itself then says so.

    Call it in the main thread: the kernel kills the launcher with the thread that started it.
    """
    with contextlib.ExitStack() as stack:
        try:
            early = _start(plan, recipe, EarlyStart(stack.enter_context(temporary_directory())))
        except OSError:
            early = None
            stack.close()
        try:
            yield early
        finally:
            if early is not None:
                early.end()


def _start(plan: LaunchPlan, recipe: Recipe, files: EarlyStart) -> EarlyLaunch:
    write_file(files.accelerate_yaml, yaml.safe_dump(accelerate_config(recipe), sort_keys=False))
    write_file(files.recipe_json, recipe.model_dump_json(by_alias=True), private=True)
    with DISK.open_private(files.launcher_log, "ab") as log:
        output = FileIO(str(files.launcher_log))
        process = children.start(
            plan.early_argv(files), plan.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    return EarlyLaunch(files, process, output)
