"""Start the launcher of a run while the command still checks its inputs, so that the ranks import the libraries meanwhile.

The command, the inspection of the model and the ranks all need seconds of imports. Here the ranks import once and side by side with the
checks, and the first of them also inspects the model (`worker.__main__`). If the checks fail, everything is killed and nothing is written.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from fsdp_tune.core import processes as children
from fsdp_tune.core.atomic import DISK, write_file
from fsdp_tune.launch.command.accelerate import LaunchPlan
from fsdp_tune.launch.supervise.process_tree import kill_for_good
from fsdp_tune.recipe.fsdp_arguments import accelerate_config
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.run.early_start import EarlyStart

POLL_SECONDS = 0.02


@dataclass(slots=True)
class EarlyLaunch:
    """A launcher whose ranks wait until `open` is called."""

    files: EarlyStart
    process: subprocess.Popen[str]
    _copied_bytes: int = field(default=0, init=False)

    def inspection(self, limit_seconds: float) -> str:
        """Wait for the document of the first rank's inspection of the model. Empty if the rank did not make it within the limit."""
        deadline = time.monotonic() + limit_seconds
        while self.process.poll() is None and not self.files.inspection_json.exists() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        with contextlib.suppress(OSError):
            return self.files.inspection_json.read_text(encoding="utf-8")
        return ""

    def open(self) -> subprocess.Popen[str]:
        """Let the ranks start: the run directory is complete. The caller watches and ends the launcher from here on."""
        children.release(self.process)
        DISK.mkdir(self.files.opened)
        return self.process

    def copy_log(self, log: Path) -> None:
        """Append the launcher's new output to a log file."""
        with open(self.files.launcher_log, "rb") as source:
            source.seek(self._copied_bytes)
            new = source.read()
        if new:
            with DISK.open_private(log, "ab") as target:
                target.write(new)
            self._copied_bytes += len(new)


@contextlib.contextmanager
def start_early(plan: LaunchPlan, recipe: Recipe) -> Iterator[EarlyLaunch | None]:
    """Start the launcher of all ranks. Leaving the block kills what is left of it. None without a directory for temporary files.

    Call it in the main thread: the kernel kills the launcher with the thread that started it.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="fsdp-tune-"))
    except OSError:
        yield None
        return
    files = EarlyStart(folder)
    try:
        write_file(files.accelerate_yaml, yaml.safe_dump(accelerate_config(recipe), sort_keys=False))
        write_file(files.recipe_json, recipe.model_dump_json(by_alias=True), private=True)
        with DISK.open_private(files.launcher_log, "ab") as log:
            process = children.start(plan.early_argv(files), plan.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield EarlyLaunch(files, process)
        finally:
            children.release(process)
            if process.poll() is None:
                kill_for_good([psutil.Process(process.pid)])
                process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
