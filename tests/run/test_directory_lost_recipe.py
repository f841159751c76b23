"""A run directory without its recipe.json."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.run.directory import CHECKPOINT_KIND, RunDir, refuse_lost_recipe
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest


def test_directory_with_checkpoints_and_without_a_recipe_has_lost_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    refuse_lost_recipe(run)
    run.checkpoint(7).mkdir(parents=True)
    refuse_lost_recipe(run)  # no checkpoint of a run
    (run.checkpoint(7) / MANIFEST_NAME).write_text(Manifest(CHECKPOINT_KIND, {}, {"step": 7}).to_json())
    with pytest.raises(
        FsdpTuneError, match=r"has checkpoints of a run, and its recipe\.json is missing"
    ) as caught:
        refuse_lost_recipe(run)
    assert f"--resume {run.checkpoint(7)} " in caught.value.problems[0].ways_out[1]
    run.recipe_json.write_text("{}")
    refuse_lost_recipe(run)
