"""`--best` chooses by a score of `evaluation:` if the recipe's metric is one, and never falls back to another
checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.core.errors import FailedError
from fsdp_tune.merge.best_checkpoint import best_checkpoint
from fsdp_tune.run.directory import RunDir
from tests.run.test_checkpoint_scores import complete, recipe_by, save, score


def test_best_checkpoint_is_by_the_score_or_an_error(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    recipe = recipe_by("text/perplexity", is_greater=False)
    for step in (10, 20, 30):
        save(run, step)
    with pytest.raises(FailedError, match="so none is the best; none of them has scores"):
        best_checkpoint(run, recipe, complete(run))
    score(run, 10, text__loss=3.0)
    with pytest.raises(FailedError, match="their scores are text/loss"):
        best_checkpoint(run, recipe, complete(run))
    score(run, 10, text__perplexity=3.0)
    score(run, 20, text__perplexity=2.0)
    chosen, reason = best_checkpoint(run, recipe, complete(run))
    assert (chosen.step, reason) == (20, "the lowest text/perplexity (2) among 3 complete checkpoints")
