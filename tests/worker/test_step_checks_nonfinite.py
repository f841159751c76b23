"""The report of a step that is not finite needs no more memory than the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_tune.model.kernels.install import install_kernels
from fsdp_tune.model.loading.construct import build_full
from fsdp_tune.worker.observe.metrics import first_bad_module
from fsdp_tune.worker.rows.batches import Batch
from tests.model.recipes import recipe_of


def test_nonfinite_search_respects_chunked_loss() -> None:
    recipe = recipe_of("llama", kernels={"loss": "chunked"})
    model = build_full(recipe)
    install_kernels(recipe, model, "cpu")
    seen: list[int] = []

    def note(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        seen.append(output.numel())

    model.get_output_embeddings().register_forward_hook(note)
    loaded: Any = type("Loaded", (), {"model": model, "wrapped": model})
    ids = torch.arange(8).reshape(1, 8)
    batch = Batch({"input_ids": ids, "labels": ids}, (0,), 8, 7)
    assert first_bad_module(recipe, loaded, batch, torch.device("cpu")) is None
    with torch.no_grad():
        model.get_submodule("model.layers.1.mlp.up_proj").weight.fill_(torch.inf)
    assert first_bad_module(recipe, loaded, batch, torch.device("cpu")) == "model.layers.1.mlp.up_proj"
    assert seen == [1, 1]
