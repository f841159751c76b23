"""Training with emulated quantisation (`quantization.train`), against a plain loop on one device with
torchao's own prepare step."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdp_tune.data.store import RowStore
from fsdp_tune.rehearsal.parity import plain_loop
from tests.parity import runs
from tests.parity.bench import Bench, bits
from tests.parity.cases import SHORT, Case
from tests.parity.compare import LOSS_TOLERANCE, spread

INT4 = Case("llama-16", quantised=("int4", 16))
INT8_INT4 = Case("llama-16", quantised=("int8-int4", 8))
SHORT_INT4, SHORT_INT8_INT4 = (replace(case, steps=SHORT) for case in (INT4, INT8_INT4))


def slow(case: Case) -> object:
    return pytest.param(case, marks=[pytest.mark.slow])


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [
        slow(SHORT_INT8_INT4),
        slow(SHORT_INT4),
        slow(replace(SHORT_INT4, ranks=1)),
        slow(replace(SHORT_INT8_INT4, ranks=1)),
        slow(replace(SHORT_INT4, strategy="NO_SHARD", accumulation=4)),
        slow(replace(SHORT_INT4, ranks=4, strategy="HYBRID_SHARD")),
        slow(replace(SHORT_INT4, version=1)),
        slow(replace(SHORT_INT4, offload=True, recomputation="full", packed=True)),
        slow(replace(SHORT_INT4, recomputation="selective", wrap="none")),
        slow(replace(SHORT_INT4, wrap="size", fsdp=(("cpu_ram_efficient_loading", False),))),
        slow(replace(SHORT_INT4, recomputation="full", kernels=(("compile", True), ("loss", "chunked")))),
        slow(replace(SHORT_INT8_INT4, recomputation="selective", packed=True, kernels=(("compile", True),))),
        slow(replace(SHORT_INT4, resumed="other")),
        slow(replace(SHORT_INT8_INT4, sequence=2)),
    ],
    ids=str,
)
def test_quantised_training_follows_one_device(case: Case, bench: Bench, record_property) -> None:
    """Steps from the same weights are those of one device: the first two, as the first has a learning rate of
    0, and the last evaluation.

    In between, trajectories drift apart: a difference of fp32's rounding moves a weight near an edge to the
    next of its 16 values. The measured spread of the loss is 4e-4, on one rank as on two.
    """
    run, true = bench.run(case), bench.reference_of(case)
    found = runs.trajectory(run)
    for values, expected in ((found.losses, true.losses), (found.grad_norms, true.grad_norms)):
        assert values[:2] == pytest.approx(expected[:2], rel=LOSS_TOLERANCE)
    emulated, plain = (eval_loss(case, bench, quantised=quantised) for quantised in (case.quantised, None))
    assert found.eval_loss == pytest.approx(emulated, rel=LOSS_TOLERANCE)
    assert found.eval_loss != pytest.approx(plain, rel=LOSS_TOLERANCE)
    limit = bench.reference_of(replace(case, quantised=None))
    distance = spread(found, true)
    record_property("parity", distance.row("quantised training", case, spread(true, limit)))
    assert distance.loss <= 2e-3, distance
    assert distance.parameters <= 0.2, distance


def eval_loss(case: Case, bench: Bench, *, quantised: tuple[str, int] | None) -> float:
    """The loss of the last checkpoint's weights in transformers' model, by torchao's own prepare step."""
    model: Any = AutoModelForCausalLM.from_pretrained(bench.model(case.architecture), dtype=torch.float32)
    model.load_state_dict(runs.saved_parameters(bench.run(case), case.steps), strict=True)
    if quantised is not None:
        plain_loop.emulate(model, *quantised)
    return plain_loop.evaluate(
        model, torch.float32, [RowStore(bench.store / f"eval{'-packed' if case.packed else ''}")]
    )


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("case", [SHORT_INT4, SHORT_INT8_INT4], ids=str)
def test_resumed_run_is_bitwise_equal_to_uninterrupted_run(case: Case, bench: Bench) -> None:
    assert bits(replace(case, resumed="same"), bench) == bits(case, bench)


@pytest.mark.ranks
@pytest.mark.slow
def test_readback_reports_emulated_values(bench: Bench) -> None:
    """Seven linear layers in each of three decoder layers."""
    found = json.loads(bench.run(SHORT_INT8_INT4).readback_json.read_text())["quantised_training"]
    assert found == {"weights": {"int4 by 8": 21}, "inputs": {"int8 by token": 21}}
