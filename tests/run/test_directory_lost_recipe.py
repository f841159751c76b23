"""A run directory without its recipe.json."""

from __future__ import annotations

from pathlib import Path

from fsdp_tune.run.directory import CHECKPOINT_KIND, RunDir, lost_recipe
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest


def test_directory_with_checkpoints_and_without_a_recipe_has_lost_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert lost_recipe(run) is None
    run.checkpoint(7).mkdir(parents=True)
    assert lost_recipe(run) is None, "no checkpoint of a run"
    (run.checkpoint(7) / MANIFEST_NAME).write_text(Manifest(CHECKPOINT_KIND, {}, {"step": 7}).to_json())
    what, hint = lost_recipe(run) or ("", "")
    assert what == f"{run.path} has checkpoints of a run, and its recipe.json is missing"
    assert f"--resume {run.checkpoint(7)} " in hint
    run.recipe_json.write_text("{}")
    assert lost_recipe(run) is None
