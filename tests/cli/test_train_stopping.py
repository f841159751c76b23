"""A command stopped while a child inspects the model, or during a merge, ends at once and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdp_tune.cli import app
from fsdp_tune.core.atomic import staged_directory
from fsdp_tune.core.processes import StoppedBySignal, stop_signals_raise
from fsdp_tune.jobs import validate as checks
from fsdp_tune.merge import merging
from tests.cli.forked import Fork, command, ended
from tests.recipe.loading import MINIMAL


class Finalised:
    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143)])
def test_signal_during_a_finaliser_is_not_lost(number: signal.Signals, exit_code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def app_of_minutes() -> None:
        with stop_signals_raise():
            Finalised(number)
            try:
                time.sleep(30)
            except KeyboardInterrupt:
                sys.exit(130)
            except StoppedBySignal as stopped:
                sys.exit(143 if stopped.number == number else 1)

    monkeypatch.setattr(app, "app", app_of_minutes)
    monkeypatch.setattr(app, "INTERRUPT_AGAIN_SECONDS", 0.3)  # on a busy machine the finaliser may take longer than 10 ms
    done = ended(command())
    assert (done.code, done.err) == (exit_code, "")


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_signal_ends_the_inspection_of_the_model(
    number: signal.Signals, exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, started = tmp_path / "recipe.yaml", tmp_path / "started"
    recipe.write_text(MINIMAL)
    for_minutes = f"import os, time; open({str(started)!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(99)"
    monkeypatch.setattr(checks, "INSPECT", (sys.executable, "-c", for_minutes))
    validating = Fork(command("validate", recipe))
    child = psutil.Process(int(validating.wait_for(started, r"\d+\n")[0]))
    os.kill(validating.pid, number)  # to it alone, as a scheduler does: a terminal would tell the child too
    done = validating.end()
    assert (done.code, "Traceback" in done.err) == (exit_code, False), done.err
    assert psutil.wait_procs([child], timeout=60)[1] == []


def test_stopped_merge_removes_its_partial_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, output = tmp_path / "started", tmp_path / "merged"

    def merge_for_minutes(_source: Path, options: Any, *_: object, **__: object) -> None:
        with staged_directory(options.output):
            started.write_text("x")
            time.sleep(99)

    monkeypatch.setattr(merging, "merge_checkpoint", merge_for_minutes)
    merge = Fork(command("merge-checkpoint", "source", "-o", output, "--json"))
    merge.wait_for(started)
    os.kill(merge.pid, signal.SIGTERM)
    done = merge.end()
    assert (done.code, [error["code"] for error in json.loads(done.out)["errors"]]) == (143, ["stopped"])
    assert list(tmp_path.iterdir()) == [started]
