"""Run directories as `fsdp-tune train` would write them, and the real worker on them."""

from __future__ import annotations

import copy
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from fsdp_tune.core.devices import Machine
from fsdp_tune.data.preparation import Prepared
from fsdp_tune.data.report import DataReport
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.rehearsal.parity.model_directories import checkpoint_tensors
from fsdp_tune.rehearsal.parity.plain_loop import Trajectory
from fsdp_tune.run.directory import RunDir
from tests.parity.cases import SAVED_STEP, STEPS
from tests.parity.store import TRAIN_ROWS, VOCABULARY
from tests.ranks import Leaves, Ranks

BASE: dict[str, Any] = {
    "data": {"train": [{"path": "hand-made"}], "eval": {"rows": 7}},
    "model": {"tokenizer": "builtin:arithmetic"},
    "precision": {"mixed_precision": "no"},
    "training": {
        "learning_rate": 3e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "weight_decay": 0.1,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_steps": SAVED_STEP,
        "save_total_limit": None,
        "eval_strategy": "steps",
        "eval_steps": STEPS,
        "report_to": [],
        "witness": 1,
    },
    "checkpoint": {"probe": False},
    "launch": {"device": "cpu"},
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(base)
    for key, value in changes.items():
        inner = result.get(key)
        result[key] = (
            merged(inner, value)
            if isinstance(inner, dict) and isinstance(value, dict) and key != "from_config"
            else value
        )
    return result


def write_run(
    folder: Path, changes: dict[str, Any], store: Path, *, packed: bool = False, vocabulary: int = VOCABULARY
) -> RunDir:
    """A run directory as `train --no-start` leaves it, for a recipe that is BASE with `changes`."""
    run = RunDir(folder)
    run.logs.mkdir(parents=True)
    recipe = Recipe.model_validate(merged(BASE, changes | {"output_dir": str(folder)}))
    device = recipe.launch.device
    machine = Machine(None, 0, 2, None) if device == "cpu" else Machine(device, 4, 2, None)
    resolved = resolve(recipe, machine, cwd=folder).recipe
    run.recipe_json.write_text(resolved.model_dump_json(by_alias=True))
    suffix = "-packed" if packed else ""
    prepared = Prepared(
        key="hand-made",
        path=str(store),
        train=str(store / f"train{suffix}"),
        evals={"eval": str(store / f"eval{suffix}")},
        train_rows=TRAIN_ROWS,
        vocabulary_size=vocabulary,
        pad_token_id=0,
        report=DataReport(),
        notices=[],
    )
    prepared.write(run.data_json)
    return run


def resume_from(run: RunDir, donor: RunDir, step: int = SAVED_STEP) -> None:
    """Gives a run the donor's checkpoint and its metrics, as if it had been the donor until then."""
    shutil.copytree(donor.checkpoint(step), run.checkpoint(step))
    shutil.copy(donor.metrics_jsonl, run.metrics_jsonl)
    (run.path / "resume.json").write_text(json.dumps({"resume_from": str(run.checkpoint(step))}))


def train(
    on_ranks: Ranks, run: RunDir, world_size: int, worker: Callable[..., dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Trains with the real worker and returns every rank's outcome; AssertionError with its traceback if a
    rank failed."""
    outcomes = on_ranks.run(world_size, worker or run_worker, str(run.path))
    for outcome in outcomes:
        assert outcome["exit_reason"] == "finished", outcome["traceback"]
    return outcomes


def run_worker(path: str) -> dict[str, Any]:
    """On a rank of a test: `python -m fsdp_tune.worker RUN_DIR`, but for the process group, which is there
    already."""
    import torch.distributed as dist

    from fsdp_tune.worker import main, rank

    run = main.run_directory(path)
    recipe = main.read_recipe(run)
    me = rank.read_rank(recipe, run)
    rank.set_environment(recipe, run)
    assert dist.is_initialized()
    main.start_process_group = lambda recipe, rank: recipe.launch.device
    main.run_rank(run, recipe, me, lambda line: None, time.time())
    outcome = json.loads(run.rank_outcome(me.index).read_text())
    if outcome["exit_code"] != 0:
        raise Leaves(outcome)  # the other ranks must see the connection close
    return outcome


def run_with_kernels(path: str, *, backend: str = "aot_eager") -> dict[str, Any]:
    """On a rank: the worker, its chunked loss a few tokens at a time (the models are so small that one slice
    would do), and compiled layers without the minute that the C++ compiler takes."""
    from unittest.mock import patch

    import fsdp_tune.model.kernels.install  # noqa: F401  it copies the size of a slice as it is imported, which must be the true one

    torch._dynamo.reset()  # ranks live on from case to case, and with them what was compiled
    slices = patch("fsdp_tune.model.kernels.head.SLICE_ELEMENTS", 13 * VOCABULARY)
    with slices, patch("fsdp_tune.model.kernels.compiled.BACKEND", backend):
        return run_worker(path)


def lines(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics_jsonl.read_text().splitlines()]


def loss_lines(run: RunDir) -> list[dict[str, Any]]:
    return [line for line in lines(run) if "loss" in line]


def trajectory(run: RunDir) -> Trajectory:
    """A finished run in the reference's terms, so that runs can be compared with each other."""
    recorded = loss_lines(run)
    document = json.loads(run.recipe_json.read_text())
    initial = AutoModelForCausalLM.from_pretrained(document["model"]["name_or_path"], dtype=torch.float32)
    return Trajectory(
        losses=[float(line["loss"]) for line in recorded],
        grad_norms=[float(line["grad_norm"]) for line in recorded],
        learning_rates=[line["learning_rate"] for line in recorded],
        supervised_tokens=[line["supervised_tokens"] for line in recorded],
        eval_loss=[line["eval_loss"] for line in lines(run) if "eval_loss" in line][-1],
        initial={name: parameter.detach() for name, parameter in initial.named_parameters()},
        final=saved_parameters(run, len(recorded)),
    )


def saved_parameters(run: RunDir, step: int) -> dict[str, torch.Tensor]:
    return checkpoint_tensors(run.checkpoint(step))
