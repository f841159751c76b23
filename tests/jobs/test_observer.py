"""What a job raises for a stop signal."""

from __future__ import annotations

import os
import signal

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.signals import StoppedBySignal, stop_signals_raise
from fsdp_tune.jobs.observer import session


def test_stop_signal_is_an_error_for_a_program_that_calls_a_job() -> None:
    """As docs/reference/python.md says."""
    with pytest.raises(FsdpTuneError, match="stopped by SIGTERM") as stopped, session():
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.exit_code == 143


def test_no_handler_of_errors_takes_a_stop_signal_inside_a_command_or_another_job() -> None:
    with stop_signals_raise(), pytest.raises(StoppedBySignal), session():
        os.kill(os.getpid(), signal.SIGTERM)
    with session(), pytest.raises(StoppedBySignal), session():
        os.kill(os.getpid(), signal.SIGTERM)
