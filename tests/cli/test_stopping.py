"""A command that is stopped while another process looks at the model ends at once, and so does that process."""

from __future__ import annotations

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
from fsdp_tune.cli import checks
checks.INSPECT = (sys.executable, "-c", "import os, sys, time; open(sys.argv[1], 'w').write(f'{os.getpid()}'); time.sleep(99)", sys.argv[1])
from fsdp_tune.cli.app import app
app(sys.argv[2:])
"""


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_nobody_waits_for_what_looks_at_the_model(number: signal.Signals, exit_code: int, tmp_path: Path) -> None:
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
