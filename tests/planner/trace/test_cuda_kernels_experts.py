"""Stacked experts are planned in every precision: their matrix products, and the memory of the results."""

from __future__ import annotations

import functools
from importlib import metadata
from typing import Any

import pytest
import torch
from torch.nn import functional

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.gpus import find_hardware
from fsdp_tune.model.loading.model_config import model_config
from fsdp_tune.planner.predict.derive import alike, at_micro_batch, prime_for
from fsdp_tune.planner.predict.divided_memory import divided_memory
from fsdp_tune.planner.predict.divided_step import step_work
from fsdp_tune.planner.predict.efficiency import efficiency_of
from fsdp_tune.planner.trace.cuda_kernels import grouped_flops, grouped_product
from fsdp_tune.planner.trace.traced_model import build_traced
from fsdp_tune.planner.trace_format import DTYPES, KINDS, Trace
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of
from tests.planner.trace.tracing import alive, before, trace_of

TOKENS, HIDDEN, INNER, EXPERTS, CHOSEN, LAYERS = 64, 32, 48, 4, 2, 2


@functools.cache
def mixture(precision: str, rows: int = 3, **model: Any) -> Trace:
    return trace_of(
        recipe_of(
            {"from_config": FAMILIES["mixtral"] | model},
            precision={"mixed_precision": precision},
            data={"train": [{"path": "x"}], "max_length": TOKENS},
            training={"per_device_train_batch_size": rows},
        )
    )


@pytest.mark.parametrize(
    ("precision", "dtype", "kernels"),
    [
        ("bf16", "bf16", 1),
        *(
            pytest.param(*each, EXPERTS, marks=pytest.mark.slow)
            for each in (("no", "fp32"), ("fp16", "fp16"))
        ),
    ],
)
def test_products_of_experts_are_planned_in_the_dtype_of_the_recipe(
    precision: str, dtype: str, kernels: int
) -> None:
    """CUDA has one kernel for all experts in bf16 alone; else each expert's product is one."""
    trace = mixture(precision)
    steady = trace.steady(trace.ops)
    products = steady[steady["name"] == trace.op_names.index("_grouped_mm")]
    assert len(products) == LAYERS * 2 * 3, "up and down; forward, and the gradients of input and weight"
    routed = 3 * TOKENS * CHOSEN
    assert products["flops"].sum() == LAYERS * 3 * 2 * routed * (HIDDEN * 2 * INNER + INNER * HIDDEN)
    assert {DTYPES[index] for index in products["dtype"]} == {dtype}
    assert set(products["kernels"].tolist()) == {kernels}
    width = 4 if dtype == "fp32" else 2
    results = alive(trace, "activations", until=before(trace, "loss", step=1))
    assert results[routed * 2 * INNER * width] >= LAYERS, "the result of the first product is kept"


def test_every_micro_batch_of_a_mixture_in_fp32_follows_from_one_trace_at_a_prime() -> None:
    three = mixture("no")
    family = mixture("no", prime_for(three))
    made = at_micro_batch(family, 3, 1)
    assert alike(three, made)
    assert three.ops["flops"].tolist() == made.ops["flops"].tolist()
    assert three.events["bytes"].tolist() == made.events["bytes"].tolist()


def test_experts_whose_rows_cuda_refuses_are_planned_one_by_one() -> None:
    trace = mixture("no", intermediate_size=47)
    steady = trace.steady(trace.ops)
    assert "_grouped_mm" not in trace.op_names
    products = {
        name: steady[steady["name"] == trace.op_names.index(name)]
        for name in trace.op_names
        if name.startswith("grouped_mm_")
    }
    assert [len(each) for each in products.values()] == [LAYERS * 2, LAYERS * 2], (
        "up and down; forward, and backward"
    )
    assert [set(each["kernels"].tolist()) for each in products.values()] == [{EXPERTS}, {2 * EXPERTS}]
    routed = 3 * TOKENS * CHOSEN
    flops = LAYERS * 3 * 2 * routed * (HIDDEN * 2 * 47 + 47 * HIDDEN)
    assert sum(each["flops"].sum() for each in products.values()) == flops


@pytest.mark.parametrize("kernel", ["eager", "sonicmoe"])
def test_kernels_of_experts_that_fake_tensors_cannot_run_are_refused_by_name(kernel: str) -> None:
    recipe = recipe_of({"from_config": FAMILIES["mixtral"]}, kernels={"experts": kernel})
    with pytest.raises(FsdpTuneError, match=f"`kernels.experts: {kernel}` .*, which is not traced") as caught:
        build_traced(recipe, model_config(recipe), None)
    assert "grouped_mm" in str(caught.value.problems[0].hint)


@pytest.mark.slow
def test_products_of_experts_in_a_batch_are_planned_with_the_weights_of_each_token() -> None:
    """`batched_mm` copies the matrices of its expert for each token and choice."""
    recipe = recipe_of(
        {"from_config": FAMILIES["mixtral"]},
        precision={"mixed_precision": "bf16"},
        data={"train": [{"path": "x"}], "max_length": TOKENS},
        kernels={"experts": "batched_mm"},
    )
    trace = trace_of(recipe)
    assert "_grouped_mm" not in trace.op_names
    results = alive(trace, "activations", until=before(trace, "loss", step=1))
    assert results[TOKENS * CHOSEN * HIDDEN * 2 * INNER * 2] >= LAYERS


ENDS = torch.tensor([2, 2, 7], dtype=torch.int32)
SHAPES = [((7, 8), (3, 8, 5)), ((3, 8, 8), (8, 7)), ((8, 7), (7, 5)), ((3, 6, 8), (3, 8, 5))]
"""Of a product whose rows, columns, inner dimension or none of these is divided by the groups."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_result_and_flops_of_a_grouped_product_are_those_of_torch(
    shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype
) -> None:
    padded = [
        torch.zeros(*shape[:-1], -(-shape[-1] // 8) * 8, dtype=dtype)[..., : shape[-1]] for shape in shapes
    ]
    ends = None if len(shapes[0]) == len(shapes[1]) == 3 else ENDS
    real = functional.grouped_mm(*padded, offs=ends)
    found = grouped_product(*map(_meta, padded), ends)
    assert (found.shape, found.stride(), found.dtype) == (real.shape, real.stride(), real.dtype)
    parts = [1, 1, 1] if ends is None else [2, 0, 5]
    rows, inner, columns = shapes[0][-2], shapes[0][-1], shapes[1][-1]
    by_hand = {
        (2, 3): lambda part: 2 * part * inner * columns,
        (3, 2): lambda part: 2 * rows * inner * part,
        (2, 2): lambda part: 2 * rows * part * columns,
        (3, 3): lambda _: 2 * rows * inner * columns,
    }[len(shapes[0]), len(shapes[1])]
    assert grouped_flops(*padded) == sum(map(by_hand, parts))


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def test_torch_before_2_15_knows_the_result_in_bf16_alone() -> None:
    """Where the oldest supported torch has the others too, `cuda_kernels.install` can go."""
    inputs = torch.empty(7, 8, device="meta"), torch.empty(3, 8, 4, device="meta"), ENDS.to("meta")
    if tuple(map(int, metadata.version("torch").split(".")[:2])) < (2, 15):
        with pytest.raises(RuntimeError, match="Expected inputs of BF16 type"):
            functional.grouped_mm(*inputs[:2], offs=inputs[2])
    else:
        assert functional.grouped_mm(*inputs[:2], offs=inputs[2]).shape == (7, 4)


def test_divided_experts_are_traced_undivided_with_their_number_of_ranks() -> None:
    model = {"from_config": FAMILIES["mixtral"]}
    options: dict[str, Any] = {
        "data": {"train": [{"path": "x"}], "max_length": TOKENS},
        "precision": {"mixed_precision": "bf16"},
    }
    divided = trace_of(recipe_of(model, 4, fsdp={"ep_size": 2}, **options))
    assert divided.shapes.ep_size == 2
    assert divided.facts.expert_shapes == [[EXPERTS, HIDDEN, INNER], [EXPERTS, 2 * INNER, HIDDEN]]
    held, all_held = gathered(divided_memory(divided)), gathered(divided)
    half = EXPERTS * 3 * HIDDEN * INNER * 2 // 2
    buffers = [size for size in all_held if size > half]
    assert len(buffers) == 2 * LAYERS * 2, "of each layer, in the forwards and the backwards of two steps"
    assert held.count(buffers[0] - half) == held.count(half) == len(buffers), "with a temporary for each"


@pytest.mark.slow
@pytest.mark.parametrize(("recomputation", "passes"), [("none", 4), ("full", 5)])
def test_passes_through_experts_are_those_of_a_traced_step(recomputation: str, passes: int) -> None:
    """Tokens are exchanged before and after the products of a forward and of its gradients, and before those
    of a recomputation."""
    options: dict[str, Any] = {
        "data": {"train": [{"path": "x"}], "max_length": TOKENS},
        "precision": {"mixed_precision": "bf16"},
    }
    fsdp = {"ep_size": 2, "activation_checkpointing": recomputation}
    trace = trace_of(recipe_of({"from_config": FAMILIES["mixtral"]}, 4, fsdp=fsdp, **options))
    exchanges = step_work(
        trace, find_hardware("H100-SXM"), 1, efficiency_of(find_hardware("H100-SXM"))
    ).exchanges
    assert exchanges is not None
    assert len(exchanges.at) == passes * LAYERS


def gathered(trace: Trace) -> list[int]:
    events = trace.events[
        (trace.events["kind"] == KINDS.index("all-gather buffers")) & (trace.events["bytes"] > 0)
    ]
    return events["bytes"].tolist()


def test_ranks_that_do_not_divide_the_experts_are_refused_before_the_trace() -> None:
    recipe = recipe_of({"from_config": FAMILIES["mixtral"]}, 6, fsdp={"ep_size": 3})
    with pytest.raises(FsdpTuneError, match="has 4 experts, which do not divide by 3"):
        build_traced(recipe, model_config(recipe), None)
