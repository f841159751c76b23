"""Run directories with checkpoints, without ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fsdp_tune.launch.command.accelerate import launch_plan
from fsdp_tune.launch.command.resume import Start
from fsdp_tune.launch.command.run_files import RunFiles, write_run
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import CHECKPOINT_KIND, RunDir
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest, digest_file
from fsdp_tune.run.records import Document, Environment
from tests.launch.recipes import BASE, resolved


@dataclass(frozen=True, slots=True)
class Data(Document):
    key: str


def files_of(
    run: RunDir,
    recipe: Recipe,
    start: Start | None = None,
    *,
    text: str = BASE,
    overrides: tuple[str, ...] = (),
    key: str = "k1",
) -> RunFiles:
    return RunFiles(
        recipe_text=text,
        overrides=overrides,
        recipe=recipe,
        reasons={"launch.device": "written"},
        plan=launch_plan(recipe, run),
        environment=Environment(versions={"torch": "2.13"}),
        data=Data(key),
        start=start or Start(),
        save_model=lambda directory: (directory / "config.json").write_text("{}"),
    )


def used(run: RunDir, tmp_path: Path, *overrides: str) -> Recipe:
    """Write the files of a run."""
    recipe = resolved(tmp_path, *overrides)
    write_run(run, files_of(run, recipe))
    return recipe


def checkpoint(run: RunDir, step: int, *, damaged: bool = False) -> Path:
    path = run.checkpoint(step)
    path.mkdir()
    (path / "weights").write_bytes(b"12345")
    manifest = Manifest(CHECKPOINT_KIND, {"weights": digest_file(path / "weights")}, {"step": step})
    (path / MANIFEST_NAME).write_text(manifest.to_json())
    if damaged:
        (path / "weights").write_bytes(b"12346")
    return path


NAMES = ("weights-0", "weights-1", "state.json")


def write_parts(runs: list[RunDir], step: int, *, on: tuple[int, ...] = (0, 1)) -> None:
    """Write a checkpoint of which each machine has its part, on some of the machines."""
    files = {name: f"{name} of {step}".encode() for name in NAMES}
    parts = [("weights-0", "state.json"), ("weights-1", "state.json")]
    facts = [
        {"host": f"host-{at}", "directory": str(run.path), "files": list(parts[at])}
        for at, run in enumerate(runs)
    ]
    scratch = runs[0].path.with_name("scratch")
    scratch.mkdir(exist_ok=True)
    for name, raw in files.items():
        (scratch / name).write_bytes(raw)
    manifest = Manifest(
        CHECKPOINT_KIND,
        {name: digest_file(scratch / name) for name in files},
        {"step": step, "machines": facts},
    )
    for at in on:
        folder = runs[at].checkpoint(step)
        folder.mkdir(parents=True)
        for name in parts[at]:
            (folder / name).write_bytes(files[name])
        (folder / MANIFEST_NAME).write_text(manifest.to_json())


def finish(run: RunDir, step: int) -> None:
    """Write the outcomes of ranks that have finished."""
    run.logs.mkdir(exist_ok=True)
    for rank in range(2):
        outcome = {
            "rank": rank,
            "exit_code": 0,
            "exit_reason": "finished",
            "step": step,
            "time": 1.0,
            "problem": None,
            "loss": 1.5,
        }
        run.rank_outcome(rank).write_text(json.dumps(outcome))


def write_heartbeat(run: RunDir, rank: int, pid: int) -> None:
    beat = {
        "rank": rank,
        "pid": pid,
        "step": 3,
        "phase": "training",
        "time": 0.0,
        "progressed_at": 0.0,
        "silent_seconds": 0.0,
    }
    run.rank_heartbeat(rank).write_text(json.dumps(beat))
