"""`--best` chooses by a score of `evaluation:` if the recipe's metric is one, and never falls back to another checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.core.errors import FailedError
from fsdp_tune.merge.source import _best
from fsdp_tune.run.directory import RunDir
from tests.run.test_checkpoint_scores import complete, recipe_by, save, score


def test_best_checkpoint_is_by_the_score_or_an_error(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.recipe_json.write_text(recipe_by("text/perplexity", is_greater=False).model_dump_json(by_alias=True))
    for step in (10, 20, 30):
        save(run, step)
    with pytest.raises(FailedError, match="so none is the best; none of them has scores"):
        _best(run, complete(run))
    score(run, 10, text__loss=3.0)
    with pytest.raises(FailedError, match="their scores are text/loss"):
        _best(run, complete(run))
    score(run, 10, text__perplexity=3.0)
    score(run, 20, text__perplexity=2.0)
    chosen, reason = _best(run, complete(run))
    assert (chosen.step, reason) == (20, "the lowest text/perplexity (2) among 3 complete checkpoints")
