"""The witness on a device: checksums, samples and generators are computed there, and a run with bf16 weights
passes every step."""

from __future__ import annotations

import json

import pytest
import torch

from tests.gpu.conftest import DEVICE, IS_SMALL, Train, readback
from tests.gpu.models import DRY, gpt2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU"),
]

STEPS = 4


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_witness_compares_every_step(train: Train, dtype: str) -> None:
    run = train(
        model={"from_config": gpt2(small=IS_SMALL) | DRY, "dtype": dtype, "freeze": ["transformer.wpe.*"]},
        training={"max_steps": STEPS, "witness": 1, "gradient_accumulation_steps": 2},
    )
    events = [json.loads(line) for line in run.metrics_jsonl.read_text().splitlines()]
    assert [event["step"] for event in events if event.get("event") == "witnessed"] == list(
        range(1, STEPS + 1)
    )
    assert set(readback(run)["witness"]["generators"][0]) == ({"CPU"} if DEVICE == "cpu" else {"CPU", DEVICE})
