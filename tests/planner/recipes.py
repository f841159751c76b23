"""A resolved recipe for tests of the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdp_tune.core.devices import Machine
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.recipe.schema.recipe import Recipe


def resolved(
    *, gpus: int = 8, machines: int = 1, micro_batch: int = 1, global_batch: int = 64, **sections: Any
) -> Recipe:
    data: dict[str, Any] = {
        "name": "test",
        "model": {"from_config": {"model_type": "llama"}, "tokenizer": "builtin:arithmetic"},
        "data": {"train": [{"path": "builtin:arithmetic"}], "max_length": 128},
        "training": {
            "global_batch_size": global_batch,
            "per_device_train_batch_size": micro_batch,
            "max_steps": 10,
        },
        "launch": {"num_processes": gpus, "num_machines": machines, "device": "cuda"},
    }
    for section, values in sections.items():
        data[section] = {**data.get(section, {}), **values}
    return resolve(
        Recipe.model_validate(data), Machine("cuda", gpus, 8, None), cwd=Path("/"), assume="cuda"
    ).recipe
