"""Run directories as `train` writes them, without training."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fsdp_tune.core.devices import Machine
from fsdp_tune.data.preparation import Prepared
from fsdp_tune.data.report import DataReport
from fsdp_tune.launch.command.accelerate import launch_plan
from fsdp_tune.launch.command.resume import Start
from fsdp_tune.launch.command.run_files import RunFiles, write_run
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.records import Environment

SOURCE = {
    "set": "train",
    "path": "chat.jsonl",
    "label": "chat",
    "format": "messages",
    "loss_on": "assistant",
    "rows": 889,
    "repeats": 1.5,
    "tokens": 6686,
    "supervised_tokens": 2492,
    "share": 0.75,
}


def written(
    folder: Path,
    lines: Iterable[dict[str, Any]] = (),
    *,
    torch: str = "2.13",
    text: str = "name: written\n",
    data_key: str = "k1",
    model: dict[str, Any] | None = None,
    base: str | None = None,
    **training: Any,
) -> RunDir:
    """Return a new run in `folder` whose metrics.jsonl has `lines`; further arguments are keys of
    `training`."""
    run = RunDir(folder)
    raw: dict[str, Any] = {
        "name": folder.name,
        "model": model or {"from_config": {"model_type": "gpt2"}, "tokenizer": "builtin:arithmetic"},
        "data": {"train": [{"path": "builtin:arithmetic"}], "max_length": 32},
        "training": {"global_batch_size": 8, "per_device_train_batch_size": 4, "max_steps": 100} | training,
        "launch": {"num_processes": 2, "device": "cpu"},
        "output_dir": str(folder),
    }
    resolution = resolve(Recipe.model_validate(raw), Machine("cpu", 0, 8, None), cwd=folder.parent)
    recipe = resolution.recipe
    files = RunFiles(
        recipe_text=text,
        overrides=(),
        recipe=recipe,
        reasons=resolution.reasons,
        plan=launch_plan(recipe, run),
        environment=Environment(
            versions={"torch": torch}, host={"name": "node", "memory_bytes": 64 << 30}, base=base
        ),
        data=Prepared(
            data_key,
            "cache",
            "cache/train",
            {},
            889,
            325,
            319,
            DataReport.model_validate({"inputs": [SOURCE]}),
            [],
        ),
        start=Start(),
        save_model=lambda directory: (directory / "config.json").write_text("{}"),
        command=("train", f"{folder.name}.yaml", "--set", "launch.env.API_KEY=hf_" + "a" * 30),
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_run(run, files)
    run.metrics_jsonl.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def training_line(step: int, loss: float | str | None = None, **fields: Any) -> dict[str, Any]:
    """Return a line of metrics.jsonl with the fields that every training line has."""
    return {
        "step": step,
        "epoch": step / 10,
        "time": 1795398078.0 + step,
        "loss": 5.0 / step if loss is None else loss,
        "grad_norm": 1.0 + 1 / step,
        "learning_rate": 1e-3 / step,
        "tokens": 1000 * step,
        "supervised_tokens": 500,
        "tokens_per_second_per_device": 900.0,
        "step_seconds": 0.5,
        "data_wait_seconds": 0.01,
        "last_step_seconds": 0.4,
        "exposed_communication_seconds": 0.1,
        "optimizer_seconds": 0.05,
        "checkpoint_stall_seconds": 0.0,
        "mfu": None,
        "peak_allocated_gib": None,
        "peak_reserved_gib": None,
        "peak_host_gib": 0.5,
        **fields,
    }
