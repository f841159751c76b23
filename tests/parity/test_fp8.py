"""fp8 in the decoder layers, compared with one device in fp32, next to the deviation of bf16. Emulated:
rounded as on a GPU.

What is measured is the spread (root mean square over the steps, `compare.Spread`).
"""

from __future__ import annotations

import functools
import inspect
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.parity import runs
from tests.parity.bench import Bench, bits, of_bf16, spread_of
from tests.parity.cases import SHORT, Case

ROWWISE = Case("llama-16", precision="fp8 rowwise")
TENSORWISE = Case("llama-16", precision="fp8 tensorwise")
SHORT_ROWWISE, SHORT_TENSORWISE = (replace(case, steps=SHORT) for case in (ROWWISE, TENSORWISE))


def slow(case: Case, *more: object) -> object:
    return pytest.param(case, *more, marks=[pytest.mark.slow])


def readback(case: Case, bench: Bench) -> dict[str, Any]:
    return json.loads(bench.run(case).readback_json.read_text())


ALL_KERNELS = (("compile", True), ("loss", "chunked"))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "times"),
    [
        slow(SHORT_ROWWISE, 20),
        (SHORT_TENSORWISE, 30),
        slow(ROWWISE, 20),
        slow(TENSORWISE, 30),
        slow(replace(ROWWISE, strategy="NO_SHARD", accumulation=4), 20),
        slow(replace(ROWWISE, offload=True, recomputation="selective", accumulation=4), 20),
        slow(replace(ROWWISE, recomputation="selective", packed=True, kernels=ALL_KERNELS), 20),
        slow(replace(ROWWISE, architecture="llama-64", ranks=4, strategy="HYBRID_SHARD"), 20),
        slow(replace(ROWWISE, sequence=2, packed=True), 20),
        slow(replace(ROWWISE, ranks=4, sequence=2, recomputation="full", resumed="other"), 20),
        slow(replace(ROWWISE, resumed="other"), 20),
        slow(replace(ROWWISE, ranks=1), 20),
        slow(replace(TENSORWISE, strategy="NO_SHARD"), 30),
        slow(replace(TENSORWISE, ranks=4, strategy="HYBRID_SHARD", accumulation=4), 30),
        slow(replace(TENSORWISE, recomputation="full", packed=True, kernels=ALL_KERNELS), 30),
        slow(replace(TENSORWISE, strategy="SHARD_GRAD_OP", recomputation="selective"), 30),
        slow(replace(TENSORWISE, wrap="none", fsdp=(("state_dict_type", "FULL_STATE_DICT"),)), 30),
        slow(
            replace(
                TENSORWISE,
                wrap="size",
                stored="bf16",
                training=(("optim_args", "bf16_stochastic_round=true"),),
            ),
            30,
        ),
        slow(
            replace(TENSORWISE, training=(("optim", "adamw_torch_8bit"), ("optim_args", "block_size=64"))), 30
        ),
        slow(replace(TENSORWISE, fsdp=(("cpu_ram_efficient_loading", False),)), 30),
        slow(replace(TENSORWISE, resumed="other"), 30),
        slow(replace(TENSORWISE, ranks=4, resumed="other"), 30),
        slow(replace(TENSORWISE, ranks=1, resumed="other"), 30),
        slow(replace(TENSORWISE, ranks=1, packed=True), 30),
    ],
    ids=str,
)
def test_fp8_follows_fp32(case: Case, times: float, bench: Bench, record_property) -> None:
    """Measured: seven times the loss's spread of computing in bf16 with a scale for each row, fourteen times
    with one for all."""
    found, limit = spread_of(case, bench), of_bf16(case, bench)
    record_property("parity", found.row(case.precision, case, limit))
    # nearer, and nothing would be in fp8
    assert 2 * limit.loss < found.loss <= times * limit.loss, (
        found,
        limit,
    )
    assert found.grad_norm <= times * limit.grad_norm, (found, limit)
    assert found.parameters <= 0.4, found


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [replace(ROWWISE, architecture="mixtral-16"), replace(TENSORWISE, architecture="mixtral-16")],
    ids=str,
)
def test_stacked_experts_stay_in_bf16(case: Case, bench: Bench) -> None:
    found = spread_of(case, bench)
    assert found.loss <= 30 * of_bf16(case, bench).loss, found
    assert readback(case, bench)["fp8"]["linears"] == 3 * 4, "of attention alone"


@pytest.mark.slow
@pytest.mark.ranks
def test_frozen_weights_are_gathered_in_fp8_and_unchanged(bench: Bench) -> None:
    """They are stored in bf16, next to trained ones in fp32."""
    changes = runs.merged(
        TENSORWISE.recipe(str(bench.model("llama-16"))), {"model": {"freeze": ["model.layers.0.*"]}}
    )
    run = bench.written_run(changes)
    runs.train(bench.on_ranks, run, 2)
    assert json.loads(run.readback_json.read_text())["fp8"]["gathered"] == 21
    saved, initial = runs.saved_parameters(run, runs.STEPS), runs.trajectory(bench.run(TENSORWISE)).initial
    for name, tensor in saved.items():
        frozen = name.startswith("model.layers.0.")
        assert (
            torch.equal(tensor.float(), initial[name].to(torch.bfloat16).float() if frozen else initial[name])
            is frozen
        ), name


@pytest.mark.ranks
@pytest.mark.parametrize("case", [slow(SHORT_TENSORWISE), slow(TENSORWISE), slow(ROWWISE)], ids=str)
def test_resumed_run_is_bitwise_equal_to_uninterrupted_run(case: Case, bench: Bench) -> None:
    assert bits(replace(case, resumed="same"), bench) == bits(case, bench)


# Three layers, forward and backward, in bytes beside their norms; embedding, head and root as ever.
RAN_IN = {
    SHORT_ROWWISE: ("axiswise", 0, {"float8_e4m3fn": 63}, {"bfloat16": 9}),
    SHORT_TENSORWISE: (
        "tensorwise",
        21,
        {"float8_e4m3fn": 21, "float8_e5m2": 42},
        {"bfloat16": 3, "uint8": 6},
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("case", [slow(SHORT_ROWWISE), SHORT_TENSORWISE], ids=str)
def test_readback_reports_fp8_compute_and_communication(case: Case, bench: Bench) -> None:
    """Seven Linears in each of three layers; three multiplications of each, of which two take a gradient
    (e5m2, one scale)."""
    found, (scales, gathered, products, gathers) = readback(case, bench), RAN_IN[case]
    assert found["fp8"] == {
        "linears": 21,
        "scales": [scales],
        "emulated": [bench.device == "cpu"],
        "gathered": gathered,
    }, "a GPU has the product"
    # transformers 5.17 makes the angles of the rotary embedding by a multiplication, in fp32.
    angles = {"float32": 1} if "inv_freq_expanded @" in inspect.getsource(LlamaRotaryEmbedding) else {}
    assert found["ran_in"]["matmul"] == {"bfloat16": 3, **products, **angles}, "the head is not in fp8"
    assert found["ran_in"]["gather"] == gathers


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [SHORT_TENSORWISE, slow(replace(TENSORWISE, fsdp=(("state_dict_type", "FULL_STATE_DICT"),)))],
    ids=str,
)
def test_fp8_checkpoint_equals_that_of_a_plain_model(case: Case, bench: Bench) -> None:
    """Names, shapes and fp32 values; `merge-checkpoint` and any other run read them."""
    saved = runs.saved_parameters(bench.run(case), case.steps)
    initial = runs.trajectory(bench.run(case)).initial
    assert {name: (tensor.dtype, tensor.shape, type(tensor)) for name, tensor in saved.items()} == {
        name: (torch.float32, tensor.shape, torch.Tensor) for name, tensor in initial.items()
    }


SABOTAGE = {
    "head": "lm_head computes in fp8",
    "one scale": "fp8 scales: the recipe means ['axiswise']",
    "bf16": "the recipe means it, and no Linear computes in it",
    "not gathered": "fp8 gathered: the recipe means 21, the run has 0",
    "on one rank": "fp8 differs between ranks",
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", ["head", *(pytest.param(name, marks=pytest.mark.slow) for name in list(SABOTAGE)[1:])]
)
def test_fp8_state_that_differs_from_the_recipe_stops_the_run(name: str, bench: Bench) -> None:
    case = SHORT_TENSORWISE if name == "not gathered" else SHORT_ROWWISE
    with pytest.raises(AssertionError, match="fp8") as caught:
        bench.fresh_run(case, functools.partial(run_sabotaged, name=name))
    assert SABOTAGE[name] in str(caught.value)


def run_sabotaged(path: str, *, name: str) -> dict[str, Any]:
    """On a rank: the worker, its conversion broken."""
    from unittest.mock import patch

    import torch.distributed as dist

    from fsdp_tune.model.kernels import linear_layers
    from fsdp_tune.model.loading import assemble as load

    real_config, real_plan, real_convert = linear_layers._config, linear_layers.plan_fp8, load.convert_to_fp8

    def with_head(recipe: Any, model: Any) -> Any:
        plan = real_plan(recipe, model)
        return replace(plan, converted=(*plan.converted, "lm_head"))

    def one_scale(recipe: Any, **how: Any) -> Any:
        precision = recipe.precision.model_copy(update={"fp8_recipe": "tensorwise"})
        return real_config(recipe.model_copy(update={"precision": precision}), **how)

    broken: dict[str, Any] = {
        "head": patch.object(linear_layers, "plan_fp8", with_head),
        "one scale": patch.object(linear_layers, "_config", one_scale),
        "bf16": patch.object(
            load, "convert_to_fp8", lambda recipe, model, device: linear_layers.choose_fp8(recipe, model)
        ),
        "not gathered": patch.object(
            linear_layers, "plan_fp8", lambda *given: replace(real_plan(*given), gathered=frozenset())
        ),
        "on one rank": patch.object(
            load,
            "convert_to_fp8",
            lambda *given: (
                real_convert(*given) if dist.get_rank() == 0 else linear_layers.choose_fp8(*given[:2])
            ),
        ),
    }
    with broken[name]:
        return runs.run_worker(path)
