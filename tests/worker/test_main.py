"""What a rank reports about an error, by the words of the libraries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed

from fsdp_tune.core.errors import ExitCode
from fsdp_tune.core.library_errors import PEER_LOST
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.worker.main import _outcome_of

STORE_GONE = (
    "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"
)


@pytest.mark.parametrize("words", [*PEER_LOST, STORE_GONE])
def test_error_of_a_rank_whose_peer_is_gone_is_no_failure_of_its_own(words: str) -> None:
    """The machine that caused the end then decides the exit code of all."""
    heartbeat: Any = SimpleNamespace(phase="loading the model")
    error = torch.distributed.DistNetworkError(words)
    outcome = _outcome_of(error, Recipe(), heartbeat, None)
    assert outcome.problem is not None
    assert (outcome.exit_code, outcome.problem.code) == (ExitCode.LOST_RANK, "lost-rank")
