"""Train the recipe of a finished run by the plain loop, on its rows and from its initial weights.

    python -m fsdp_tune.rehearsal.parity.run_trajectory < {"run": RUN, "compute_dtype": "fp32", "skipped": []}

prints losses, gradient norms, supervised tokens of each step and the eval loss as one JSON document.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from fsdp_tune.core.ownership import temporary_directory
from fsdp_tune.data.store import RowStore
from fsdp_tune.model.loading.construct import build_full
from fsdp_tune.model.shard.local import TORCH_DTYPE
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value
from fsdp_tune.rehearsal.parity.plain_loop import LoopSettings, train
from fsdp_tune.run.directory import RunDir


def settings_of(recipe: Recipe, compute_dtype: torch.dtype, skipped: frozenset[int]) -> LoopSettings:
    """Return the settings of the plain loop for a resolved recipe with AdamW and a cosine schedule."""
    training, quantised = recipe.training, recipe.quantised_training
    assert training.data_seed is not None, "the recipe is resolved"
    return LoopSettings(
        steps=training_value(training, "max_steps"),
        global_batch_size=recipe.global_batch_size,
        learning_rate=training.learning_rate,
        warmup_steps=int(training.warmup_steps),
        weight_decay=training_value(training, "weight_decay"),
        betas=(training_value(training, "adam_beta1"), training_value(training, "adam_beta2")),
        epsilon=training_value(training, "adam_epsilon"),
        max_grad_norm=training_value(training, "max_grad_norm"),
        dft=training.loss == "dft",
        seed=training.data_seed,
        packed=recipe.data.packing,
        quantised=None if quantised is None else (str(quantised.train), quantised.group_size),
        compute_dtype=compute_dtype,
        skipped=skipped,
    )


def trajectory(run: RunDir, compute_dtype: torch.dtype, skipped: frozenset[int]) -> dict[str, Any]:
    recipe = Recipe.model_validate_json(run.recipe_json.read_bytes())
    data = json.loads(run.data_json.read_text(encoding="utf-8"))
    with temporary_directory("parity-") as folder:
        build_full(recipe).save_pretrained(folder)
        stores = [RowStore(Path(path)) for path in data["evals"].values()]
        found = train(
            settings_of(recipe, compute_dtype, skipped), folder, RowStore(Path(data["train"])), *stores
        )
    return {
        "loss": found.losses,
        "grad_norm": found.grad_norms,
        "supervised_tokens": found.supervised_tokens,
        "eval_loss": None if math.isnan(found.eval_loss) else found.eval_loss,
    }


def main() -> None:
    request = json.load(sys.stdin)
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):  # libraries print; stdout must hold only the document
        document = trajectory(
            RunDir(Path(request["run"])), TORCH_DTYPE[request["compute_dtype"]], frozenset(request["skipped"])
        )
    json.dump(document, sys.stdout)


if __name__ == "__main__":
    main()
