"""Resolved recipes of a tiny model, and launches of them as pure data."""

from __future__ import annotations

from pathlib import Path

from fsdp_tune.core.devices import Machine
from fsdp_tune.launch.command.accelerate import LaunchPlan, launch_plan
from fsdp_tune.recipe.read.loader import parse_recipe
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir

BASE = """
model: {from_config: {model_type: llama, hidden_size: 64}, tokenizer: "builtin:words"}
data: {train: [{path: "builtin:arithmetic"}], max_length: 64}
training: {max_steps: 100}
launch: {device: cpu, num_processes: 2}
"""


def resolved(tmp_path: Path, *overrides: str, assume: str | None = "cuda", text: str = BASE) -> Recipe:
    recipe = parse_recipe(text, tmp_path / "base.yaml", overrides).recipe
    return resolve(recipe, Machine(None, 0, 4, None), cwd=tmp_path, assume=assume).recipe


def plan(
    tmp_path: Path,
    *overrides: str,
    inherited: dict[str, str] | None = None,
    machine_rank: int = 0,
    extra: tuple[str, ...] = (),
) -> LaunchPlan:
    run = RunDir(tmp_path / "run")
    return launch_plan(
        resolved(tmp_path, *overrides), run, inherited=inherited or {}, machine_rank=machine_rank, extra=extra
    )
