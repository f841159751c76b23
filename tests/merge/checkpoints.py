"""Checkpoints by the real writers, and readers of merged output."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import CHECKPOINT_KIND
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest, digest_file, list_files
from tests.merge.ranks import run_ranks

SHARDS = "pytorch_model_fsdp_0"


def save_dcp(state: Mapping[str, Any], folder: Path, **writer: Any) -> Path:
    """One process, real `torch.distributed.checkpoint`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(folder, **writer))
    return folder


def save_on_ranks(world_size: int, folder: Path, state_of: Callable[[int], Mapping[str, Any]]) -> Path:
    """`state_of(rank)` is what that rank saves, DTensors included."""

    def rank_main(rank: int) -> None:
        dcp.save(dict(state_of(rank)), storage_writer=dcp.FileSystemWriter(folder, sync_files=False))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_ranks(world_size, rank_main)
    return folder


def finish_checkpoint(folder: Path, step: int) -> None:
    """Writes the manifest that makes a checkpoint of ours complete."""
    files = {name: digest_file(folder / name) for name in list_files(folder)}
    (folder / MANIFEST_NAME).write_text(
        Manifest(CHECKPOINT_KIND, files, {"step": step, "world_size": 1}).to_json()
    )


def make_run(
    path: Path,
    states: Mapping[int, Mapping[str, torch.Tensor]],
    *,
    model: Path | None = None,
    recipe: Recipe | None = None,
) -> Path:
    """A run directory with one complete checkpoint per step."""
    path.mkdir(parents=True)
    (path / "recipe.json").write_text((recipe or Recipe()).model_dump_json(by_alias=True))
    (path / "recipe.yaml").write_text("# a recipe\n")
    if model is not None:
        model.rename(path / "model")
    for step, state in states.items():
        save_dcp({"model": dict(state)}, path / f"checkpoint-{step}" / SHARDS)
        (path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        finish_checkpoint(path / f"checkpoint-{step}", step)
    return path


def merged_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model directory, read by the safetensors library."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Same dtype, shape and bytes; NaNs included."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    left, right = (
        tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
        for tensor in (one, other)
    )
    return torch.equal(left, right)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under `folder` with its bytes."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
