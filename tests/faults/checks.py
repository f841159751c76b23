"""Invariants after every case."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.run.directory import Checkpoint, RunDir, checkpoint_step, inspect_checkpoint


def half_files(folder: Path) -> list[str]:
    """Whatever is visible and not whole: a checkpoint that does not verify, a JSON file that does not parse.
    [] is good."""
    found: list[str] = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if checkpoint_step(path) is not None:
            verdict = inspect_checkpoint(path, digests=True)
            if not isinstance(verdict, Checkpoint):
                found.append(f"{path.name}: {verdict.reason}")
        elif path.suffix == ".json":
            try:
                json.loads(path.read_bytes())
            except ValueError as error:
                found.append(f"{path.name}: {error}")
    return found


def verified_steps(run: RunDir) -> list[int]:
    """Steps of the checkpoints that every byte vouches for, oldest first."""
    verdicts = [
        inspect_checkpoint(path, digests=True)
        for path in run.path.iterdir()
        if checkpoint_step(path) is not None
    ]
    return sorted(verdict.step for verdict in verdicts if isinstance(verdict, Checkpoint))


def stages(folder: Path) -> list[str]:
    """Hidden leftovers of a save, a rotation, a merge."""
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def in_child(action: Callable[[], object]) -> int:
    """Runs `action` in a forked process; its exit code: 0, 1 for an error of ours, 2 for any other, or what a
    kill left."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 2
        try:
            action()
            code = 0
        except FsdpTuneError:
            code = 1
        except Exception:  # noqa: BLE001  its code says it, and the log has the reason
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
