"""Numbers on a GPU: bf16 compared with fp32, recomputation with dropout, packed examples in GPU kernels."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch

from tests.gpu.conftest import DEVICE, IS_SMALL, ON_CPU, Train, loss_lines, readback
from tests.gpu.models import DRY, IN_HALF_PRECISION, KERNELS, LLAMA, gpt2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU"),
]

STEPS = 20 if IS_SMALL else 200
GPT2 = gpt2(small=IS_SMALL)


def curve(train: Train, precision: str, record_property) -> list[float]:
    run = train(
        model={"from_config": GPT2 | DRY},
        precision={"mixed_precision": precision},
        training={
            "max_steps": STEPS,
            "per_device_train_batch_size": 16,
            "warmup_steps": 10,
            "learning_rate": 3e-4,
        },
    )
    record_property("parameters", readback(run)["parameters"])
    return [line["loss"] for line in loss_lines(run)]


def test_loss_curve_in_bf16_stays_close_to_fp32(train: Train, record_property) -> None:
    """A model of more than 100M parameters (small on the CPU): bf16 scatters around fp32 and does not drift
    away."""
    full, half = curve(train, "no", record_property), curve(train, "bf16", record_property)
    off = [b / a - 1.0 for a, b in zip(full, half, strict=True)]
    scatter, drift = math.sqrt(sum(x * x for x in off) / len(off)), sum(off) / len(off)
    record_property("scatter", scatter)
    record_property("drift", drift)
    print(
        f"{STEPS} steps: bf16 around fp32: root mean square {scatter:.1e}, mean {drift:+.1e}; last "
        f"losses {full[-1]:.4f}, {half[-1]:.4f}"
    )
    assert scatter < 2e-2
    assert abs(drift) < 5e-3


@pytest.mark.parametrize(
    "recomputed",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "full", "activation_checkpointing_offload": True},
    ],
    ids=["full", "selective", "inputs on the host"],
)
def test_recomputation_with_dropout_has_the_same_gradients(recomputed: dict[str, Any], train: Train) -> None:
    """Four layers and two micro-batches: an input that is overwritten while it is copied, or used before it
    is back, shows."""
    settings = {
        "training": {
            "max_steps": 4,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "full_determinism": True,
        }
    }
    plain, found = (
        train(model={"from_config": GPT2 | {"n_layer": 4}}, fsdp=fsdp, **settings)
        for fsdp in ({}, recomputed)
    )
    numbers = [[(line["loss"], line["grad_norm"]) for line in loss_lines(run)] for run in (plain, found)]
    for one, other in zip(*numbers, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_packed_examples_are_isolated(kernel: str, train: Train) -> None:
    """The run changes the first example of a packed row and compares the second, in its training kernel."""
    if kernel == "flex_attention" and ON_CPU:
        pytest.skip("torch has no backward pass of it on the CPU")
    if kernel in IN_HALF_PRECISION and ON_CPU:
        pytest.skip("it needs CUDA")
    if kernel == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn is not installed")
    precision = "bf16" if kernel in IN_HALF_PRECISION else "no"
    run = train(
        model={"from_config": LLAMA, "attn_implementation": kernel},
        data={"packing": True},
        precision={"mixed_precision": precision},
    )
    found = readback(run)
    assert found["attention"] == kernel
    assert found["packing_deviation"] <= (2e-2 if precision == "bf16" else 1e-5)
