"""torch's own variable-length attention on a GPU: numbers, memory, recomputation and compilation of packed
rows without a mask.

With `GPU_TEST_DEVICE=cpu` the numbers are those of the kernels of `tests/model/varlen.py`.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_tune.data.store import RowStore
from fsdp_tune.model.sequence_parallel import rows_known
from fsdp_tune.model.step import micro_batch_loss
from fsdp_tune.recipe.schema.attention_kernels import TORCH_VARLEN
from fsdp_tune.worker.rows.batches import Collator
from tests.gpu.conftest import DEVICE, ON_CPU, Train, loss_lines, readback
from tests.gpu.models import LLAMA
from tests.model.test_attention_varlen import TESTED, model_of
from tests.parity.store import make_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU"),
]


def packed_batch(folder: Path) -> dict[str, torch.Tensor]:
    rows = RowStore(make_store(folder / "store") / "train-packed")
    tensors = Collator(pad_token_id=0, multiple_of=8, variable_lengths=True)(
        [rows[0], rows[5], rows[9]]
    ).tensors
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()}


def gradients(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    model.zero_grad()
    with rows_known(model, batch):
        loss, _ = micro_batch_loss(model, batch)
    loss.backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", TESTED)
def test_gradients_in_bf16_are_as_close_to_fp32_as_with_the_mask(family: str, tmp_path: Path) -> None:
    """Grouped queries, windows, heads of 8 and 12: what differs from fp32 is rounding, and masked attention
    rounds as much."""
    batch = packed_batch(tmp_path)
    exact = model_of(TESTED[family], "sdpa").to(DEVICE)
    expected = gradients(exact, batch)
    masked = copy.deepcopy(exact).to(torch.bfloat16)
    found = model_of(TESTED[family]).to(DEVICE)
    found.load_state_dict(exact.state_dict())
    errors = [
        float((gradients(model, batch) - expected).norm() / expected.norm())
        for model in (masked, found.to(torch.bfloat16))
    ]
    assert errors[1] <= 1.5 * errors[0]
    assert errors[0] <= 0.1


@pytest.mark.skipif(ON_CPU, reason="it needs CUDA")
def test_packed_rows_without_a_mask_take_less_memory(train: Train) -> None:
    """The data are one row of 6,686 tokens: the bool mask is 43 MiB, and each of four layers saves a copy of
    85 MiB in bf16."""
    peaks = []
    for kernel in ("sdpa", TORCH_VARLEN):
        run = train(
            model={"from_config": LLAMA, "attn_implementation": kernel},
            data={"packing": True, "max_length": 8192},
            precision={"mixed_precision": "bf16"},
        )
        assert readback(run)["attention"] == kernel
        peaks.append(max(line["peak_allocated_gib"] for line in loss_lines(run)))
    assert peaks[0] - peaks[1] > 0.3


@pytest.mark.skipif(ON_CPU, reason="it needs CUDA")
@pytest.mark.parametrize("recomputed", ["none", "selective"])
def test_compiled_and_recomputed_layers_keep_losses(recomputed: str, train: Train) -> None:
    settings = {
        "model": {"from_config": LLAMA, "attn_implementation": TORCH_VARLEN},
        "data": {"packing": True, "max_length": 1024},
        "precision": {"mixed_precision": "bf16"},
        "training": {"max_steps": 8, "per_device_train_batch_size": 2},
    }
    plain = train(**settings)
    compiled = train(**settings, fsdp={"activation_checkpointing": recomputed}, kernels={"compile": True})
    assert readback(compiled)["attention"] == TORCH_VARLEN
    assert readback(compiled)["packing_deviation"] <= 2e-2
    events = [json.loads(line) for line in compiled.metrics_jsonl.read_text().splitlines()]
    assert [event for event in events if event.get("event") == "compile_fallback"] == []
    for one, other in zip(loss_lines(plain), loss_lines(compiled), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-2)
