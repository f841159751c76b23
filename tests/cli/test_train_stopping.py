"""A command stopped while a child inspects the model, or during a merge, ends at once and leaves nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.recipe.loading import MINIMAL

WITH_A_MODEL_THAT_TAKES_MINUTES = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it, and so do its children
from fsdp_tune.jobs import validate as checks
checks.INSPECT = (sys.executable, "-c", "import os, sys, time; open(sys.argv[1], 'w').write(f'{os.getpid()}'); time.sleep(99)", sys.argv[1])
from fsdp_tune.cli.app import main
sys.argv[1:] = sys.argv[2:]
main()
"""

WITH_A_FINALISER_THAT_IS_INTERRUPTED = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from fsdp_tune.cli import app
from fsdp_tune.core.processes import StoppedBySignal, stop_signals_raise

number = int(sys.argv[1])

class Finalised:
    def __del__(self):
        signal.raise_signal(number)

def app_of_minutes():
    with stop_signals_raise():
        Finalised()
        try:
            time.sleep(30)
        except KeyboardInterrupt:
            sys.exit(130)
        except StoppedBySignal as stopped:
            assert stopped.number == number
            sys.exit(143)

app.app = app_of_minutes
app.main()
"""


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143)])
def test_signal_during_a_finaliser_is_not_lost(number: signal.Signals, exit_code: int) -> None:
    command = [sys.executable, "-c", WITH_A_FINALISER_THAT_IS_INTERRUPTED, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (exit_code, "")


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_signal_ends_the_inspection_of_the_model(number: signal.Signals, exit_code: int, tmp_path: Path) -> None:
    recipe, started = tmp_path / "recipe.yaml", tmp_path / "started"
    recipe.write_text(MINIMAL)
    command = [sys.executable, "-c", WITH_A_MODEL_THAT_TAKES_MINUTES, str(started), "validate", str(recipe)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not (started.exists() and started.read_text()):
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        child = psutil.Process(int(started.read_text()))
        process.send_signal(number)  # to it alone, as a scheduler does: a terminal would tell the child too
        _, errors = process.communicate(timeout=120)
    assert process.returncode == exit_code, errors
    assert "Traceback" not in errors
    assert psutil.wait_procs([child], timeout=60)[1] == []


MERGING_FOR_MINUTES = """
import sys, time
from pathlib import Path
from fsdp_tune.core.atomic import staged_directory
from fsdp_tune.merge import merging as run

def merge(source, options, progress, **more):
    with staged_directory(options.output):
        Path(sys.argv[1]).write_text("x")
        time.sleep(99)

run.merge_checkpoint = merge
from fsdp_tune.cli.app import app
app(sys.argv[2:])
"""


def test_stopped_merge_removes_its_partial_output(tmp_path: Path) -> None:
    started, output = tmp_path / "started", tmp_path / "merged"
    command = [sys.executable, "-c", MERGING_FOR_MINUTES, str(started), "merge-checkpoint", "source", "-o", str(output), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while not started.exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.terminate()
        said, _ = process.communicate(timeout=120)
    assert (process.returncode, [error["code"] for error in json.loads(said)["errors"]]) == (143, ["stopped"])
    assert list(tmp_path.iterdir()) == [started]
