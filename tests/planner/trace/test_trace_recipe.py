"""The trace follows the shared step: removed work is missing from the prediction; few layers represent
all."""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fsdp_tune.core.gpus import find_hardware
from fsdp_tune.planner.predict.allocator import rounded
from fsdp_tune.planner.predict.collectives import in_buckets
from fsdp_tune.planner.predict.depth import full_depth
from fsdp_tune.planner.predict.derive import alike, at_micro_batch, prime_for
from fsdp_tune.planner.predict.divided_step import step_time
from fsdp_tune.planner.predict.efficiency import Efficiency
from fsdp_tune.planner.predict.memory import disk, peak_memory
from fsdp_tune.planner.trace.traced_step import traced_micro_batches
from fsdp_tune.planner.trace_format import COLLECTIVES, DTYPES, EVALUATION, GROUPS, KINDS, PHASES, Trace
from fsdp_tune.recipe.schema.optimizers import state_bytes
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of
from tests.planner.trace.tracing import alive, before, trace_of


def deep(layers: int = 7, **sections: Any) -> Recipe:
    model = {"from_config": FAMILIES["llama"] | {"num_hidden_layers": layers}}
    return recipe_of(
        model,
        precision={"mixed_precision": "bf16"},
        **({"data": {"train": [{"path": "x"}], "max_length": 64}} | sections),
    )


def wide() -> Recipe:
    """So many tokens that the peak is where activations, logits and optimizer state are."""
    return recipe_of(
        "llama",
        training={"per_device_train_batch_size": 8},
        data={"train": [{"path": "x"}], "max_length": 128},
    )


@functools.cache
def whole() -> Trace:
    return trace_of(wide())


def peak(trace: Trace) -> int:
    return peak_memory(trace).peak_allocated_bytes


def no_loss() -> None:
    """The step without its cross-entropy."""
    from fsdp_tune.model import step

    step.summed_token_loss = lambda logits, *_, **__: logits.sum()  # type: ignore[assignment]


def no_layer() -> None:
    """A model that loses its last decoder layer when it is built."""
    from fsdp_tune.model.loading import construct as build

    original = build._finish

    def shortened(recipe: Any, model: Any, vocabulary: Any) -> None:
        original(recipe, model, vocabulary)
        del model.model.layers[-1]

    build._finish = shortened


def no_optimizer() -> None:
    """SGD in the place of AdamW."""
    import torch

    from fsdp_tune.model.optim import optimizer

    optimizer.optimizer_of = lambda training: (torch.optim.SGD, {"lr": 0.1})  # type: ignore[assignment]


@pytest.mark.parametrize(
    "change", [no_loss, *(pytest.param(each, marks=pytest.mark.slow) for each in (no_layer, no_optimizer))]
)
def test_work_removed_from_the_step_is_missing_from_the_prediction(change: Any) -> None:
    assert peak(trace_of(wide(), change=change)) < peak(whole())


def size(sizes: Counter[int]) -> int:
    return sum(bytes_ * count for bytes_, count in sizes.items())


def test_traced_optimizer_state_equals_the_optimizer() -> None:
    recipe = recipe_of("llama", training={"optim": "rmsprop", "optim_args": "momentum=0.9, centered=true"})
    trace = trace_of(recipe)
    after = before(trace, "zero_grad")
    moments = size(alive(trace, "parameters", until=after)) * state_bytes(recipe.training, 4) / 4
    # Beside them a step count for each tensor, on the device or on the host; and the model has a buffer or
    # two.
    assert size(alive(trace, "optimizer state", until=after)) == pytest.approx(moments, rel=0.005)


@pytest.mark.parametrize(
    ("optim", "optim_args"),
    [
        ("adamw_torch_fused", None),
        ("adamw_torch", None),
        ("sgd", None),
        ("sgd", "momentum=0.9"),
        ("adagrad", None),
        ("rmsprop", None),
        ("rmsprop", "momentum=0.9, centered=true"),
    ],
)
def test_state_of_a_parameter_has_the_bytes_that_the_schema_states(
    optim: str, optim_args: str | None
) -> None:
    import torch

    from fsdp_tune.model.optim.optimizer import optimizer_of

    training = recipe_of("llama", training={"optim": optim, "optim_args": optim_args}).training
    weight = torch.nn.Parameter(torch.ones(64, 64))
    weight.grad = torch.ones_like(weight)
    kind, settings = optimizer_of(training)
    optimizer = kind([weight], **settings)
    optimizer.step()
    held = sum(
        value.nbytes
        for value in optimizer.state[weight].values()
        if torch.is_tensor(value) and value.shape == weight.shape
    )
    assert held == weight.numel() * state_bytes(training, 4)


def test_trace_of_muon_has_its_state_products_and_collectives() -> None:
    """Llama with 2 layers: 7 matrices each, of which a rank of two orthogonalises 7; AdamW has two moments of
    everything else."""
    recipe = recipe_of("llama", training={"optim": "muon"})
    trace = trace_of(recipe)
    after = before(trace, "zero_grad")
    predicted = disk(recipe, trace, None).checkpoint_bytes - trace.counts.parameter_bytes
    assert 2 * size(alive(trace, "optimizer state", until=after)) == pytest.approx(predicted, rel=0.02)
    is_update = (trace.collectives["phase"] == PHASES.index("optimizer")) & (trace.collectives["step"] == 1)
    kinds = Counter(COLLECTIVES[kind] for kind in trace.collectives[is_update]["kind"].tolist())
    assert kinds == {"all_to_all": 2 * math.ceil(7 * trace.layers / 2)}


@pytest.mark.parametrize(
    ("layers", "sections"),
    [
        pytest.param(7, {"fsdp": {"activation_checkpointing": "selective"}}, id="selective"),
        pytest.param(
            13,
            {
                "fsdp": {
                    "activation_checkpointing": "full",
                    "activation_checkpointing_every": 2,
                    "offload_params": True,
                }
            },
            id="every second layer, offloaded",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            13,
            {"fsdp": {"activation_checkpointing": "full", "activation_checkpointing_every": 4}},
            id="every fourth layer, with margins shorter than the period",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            9,
            {"fsdp": {"activation_checkpointing": "full", "activation_checkpointing_offload": True}},
            id="inputs on the host",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            9,
            {"fsdp": {"reshard_after_backward": False}, "training": {"gradient_accumulation_steps": 3}},
            id="gathered between micro-batches",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            9,
            {
                "fsdp": {"sharding_strategy": "SHARD_GRAD_OP", "sync_each_batch": False},
                "training": {"gradient_accumulation_steps": 3},
            },
            id="accumulated",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_few_layers_represent_all(layers: int, sections: dict[str, Any]) -> None:
    """Every allocation of the spliced trace is that of the run with all layers: same order, sizes, kinds,
    streams and lifetimes."""
    recipe = deep(layers, **sections)
    exact, shallow = trace_of(recipe, exact=True), trace_of(recipe)
    spliced = full_depth(shallow)
    assert shallow.traced_layers < exact.traced_layers
    for column in ("kind", "layer", "stream", "phase"):
        assert np.array_equal(spliced.events[column], exact.events[column]), column
    # The norms of all gradients are put into one tensor, which has four bytes for each: its size is the one
    # that differs.
    assert _rounded(spliced) == _rounded(exact)
    assert _lifetimes(spliced) == _lifetimes(exact)
    assert len(spliced.ops) == len(exact.ops)
    assert spliced.ops["flops"].sum() == exact.ops["flops"].sum()
    assert np.array_equal(spliced.collectives["bytes"], exact.collectives["bytes"])
    assert (spliced.counts, [u.parameters for u in spliced.units]) == (
        exact.counts,
        [u.parameters for u in exact.units],
    )
    _same_peaks(spliced, exact)


@pytest.mark.parametrize(("ranks", "sets"), [pytest.param(1, 1, marks=pytest.mark.slow), (2, 2)])
def test_micro_batches_under_ddp_add_up_in_the_buckets_of_a_single_rank(ranks: int, sets: int) -> None:
    """Several ranks skip the sum of all but the last micro-batch (`no_sync`), whose gradients then lie beside
    the buckets."""
    training = {"gradient_accumulation_steps": 2}
    trace = trace_of(recipe_of("llama", ranks, fsdp={"sharding_strategy": "NO_SHARD"}, training=training))
    gradients = np.where(trace.events["kind"] == KINDS.index("gradients"), trace.events["bytes"], 0)
    assert np.cumsum(gradients).max() == sets * trace.counts.parameter_bytes
    assert ranks == 1 or {GROUPS[group] for group in trace.collectives["group"]} == {"world"}


@pytest.mark.parametrize(
    ("strategy", "gathers_again"),
    [("FULL_SHARD", True), pytest.param("SHARD_GRAD_OP", False, marks=pytest.mark.slow)],
)
def test_parameters_that_stay_gathered_cost_memory_and_save_gathers(
    strategy: str, gathers_again: bool
) -> None:
    """A micro-batch after the first gathers nothing, or under FULL_SHARD what its forward freed; nothing is
    gathered after the step."""
    fsdp = {"sharding_strategy": strategy, "reshard_after_backward": False}
    recipe = recipe_of("llama", fsdp=fsdp, training={"gradient_accumulation_steps": 8})
    trace = trace_of(recipe)
    assert trace.shapes.traced_micro_batches == traced_micro_batches(recipe) == 3, (
        "one between differs from the last"
    )
    events, collectives = trace.events, trace.steady(trace.collectives)
    is_gather = collectives["kind"] == COLLECTIVES.index("all_gather")
    first, *others = (
        int(collectives["bytes"][is_gather & (collectives["micro"] == micro)].sum()) for micro in range(3)
    )
    gathered = np.cumsum(np.where(events["kind"] == KINDS.index("gathered units"), events["bytes"], 0))
    starts = [
        int(gathered[np.flatnonzero((events["step"] == 1) & (events["micro"] == micro))[0] - 1])
        for micro in range(3)
    ]
    everything = first - others[0]
    assert starts == [0, everything, everything]
    assert everything >= trace.counts.parameter_bytes
    assert others[0] == others[1]
    assert (others[0] > 0) == gathers_again
    assert gathered[-1] == 0


@pytest.mark.parametrize(
    ("strategy", "ranks", "each", "traced"),
    [
        ("NO_SHARD", 2, True, 3),
        ("NO_SHARD", 1, True, 2),
        ("FULL_SHARD", 2, True, 2),
        ("FULL_SHARD", 2, False, 3),
        ("HYBRID_SHARD", 4, True, 3),
    ],
)
def test_micro_batch_between_is_traced_where_it_differs_from_the_last(
    strategy: str, ranks: int, each: bool, traced: int
) -> None:
    """Without sums over ranks it holds all gradients until its end, when those of a tied embedding meet."""
    fsdp = {"sharding_strategy": strategy, "sync_each_batch": each}
    recipe = recipe_of("llama", ranks, fsdp=fsdp, training={"gradient_accumulation_steps": 8})
    assert traced_micro_batches(recipe) == traced


def test_softmax_with_a_dtype_is_traced_under_autocast() -> None:
    """As routers of experts have it. Autocast computes a softmax in fp32 only if no dtype is given."""
    recipe = recipe_of(
        "gpt_oss", fsdp={"sharding_strategy": "NO_SHARD"}, precision={"mixed_precision": "bf16"}
    )
    trace = trace_of(recipe)
    softmax = trace.ops[trace.ops["name"] == trace.op_names.index("_softmax")]
    assert DTYPES.index("bf16") in softmax["dtype"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 3])
def test_few_layers_represent_all_under_ddp(accumulation: int) -> None:
    """Everything that is sent, bucket by bucket, and the peaks."""
    training = {"gradient_accumulation_steps": accumulation}
    recipe = deep(fsdp={"sharding_strategy": "NO_SHARD"}, training=training)
    exact, shallow = trace_of(recipe, exact=True), trace_of(recipe)
    spliced = full_depth(shallow)
    assert shallow.traced_layers < exact.traced_layers
    for each in (exact, spliced):
        sums = each.steady(each.collectives)
        sums = sums[
            (sums["kind"] == COLLECTIVES.index("all_reduce")) & (sums["phase"] == PHASES.index("backward"))
        ]
        assert sums["bytes"].sum() == exact.counts.parameter_bytes, (
            "each gradient is summed over the ranks, once a step"
        )
        assert set(sums["micro"].tolist()) == {accumulation - 1}, "in the last micro-batch"
    sent = [in_buckets(each, each.steady(each.collectives))["bytes"].tolist() for each in (exact, spliced)]
    assert sent[0] == sent[1]
    _same_peaks(spliced, exact)


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(
            {
                "fsdp": {"activation_checkpointing": "selective"},
                "data": {"train": [{"path": "x"}], "max_length": 1001},
                "kernels": {"loss": "full"},
            },
            id="selective, long rows",
        ),
        pytest.param(
            {"fsdp": {"activation_checkpointing": "selective"}}, id="selective", marks=pytest.mark.slow
        ),
        pytest.param({"fsdp": {"sharding_strategy": "NO_SHARD"}}, id="DDP", marks=pytest.mark.slow),
        pytest.param({"fsdp": {"offload_params": True}}, id="offloaded", marks=pytest.mark.slow),
        pytest.param(
            {"fsdp": {"activation_checkpointing": "full", "activation_checkpointing_offload": True}},
            id="inputs on the host",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {
                "data": {"train": [{"path": "x"}], "max_length": 96, "packing": True},
                "kernels": {"loss": "full"},
            },
            id="packed",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_micro_batch_follows_from_one_trace_at_a_prime(sections: dict[str, Any]) -> None:
    """Byte for byte from two sequences on; one alone is a program of its own, with the same peaks."""
    one = trace_of(deep(2, training=_batches(1), **sections))
    family = trace_of(deep(2, training=_batches(prime_for(one)), **sections))
    three, made = trace_of(deep(2, training=_batches(3), **sections)), at_micro_batch(family, 3, 2)
    assert alike(three, made)
    for table, columns in {
        "events": ["bytes"],
        "ops": ["flops", "moved_bytes"],
        "collectives": ["bytes"],
    }.items():
        for column in columns:
            assert np.array_equal(getattr(three, table)[column], getattr(made, table)[column]), (
                f"{table}.{column}"
            )
    _same_peaks(one, at_micro_batch(family, 1, 2))


@pytest.mark.slow
def test_shared_rows_divide_activations_and_exchange_heads() -> None:
    def traced(size: int, micro_batch: int = 3) -> Trace:
        sections: dict[str, Any] = {
            "fsdp": {"activation_checkpointing": "full"},
            "kernels": {"loss": "chunked"},
        }
        return trace_of(deep(2, parallelism={"sp_size": size}, training=_batches(micro_batch), **sections))

    alone, shared = traced(1), traced(2)
    exchanges = shared.collectives[shared.collectives["kind"] == COLLECTIVES.index("all_to_all")]
    of_step = exchanges[(exchanges["step"] == 1) & (exchanges["micro"] == 0)]
    counts = {
        phase: int((of_step["phase"] == PHASES.index(phase)).sum()) for phase in ("forward", "backward")
    }
    assert counts == {"forward": 2 * 2, "backward": 2 * (2 + 2)}, (
        "two a layer, and two more when it is recomputed"
    )
    assert {GROUPS[group] for group in exchanges["group"]} == {"sequence"}
    kept = [size(alive(trace, "activations", until=before(trace, "loss"))) for trace in (alone, shared)]
    assert kept[1] == pytest.approx(kept[0] / 2, rel=0.05)
    _same_peaks(shared, at_micro_batch(traced(2, prime_for(shared)), 3, 2))


@pytest.mark.slow
def test_mlp_in_slices_has_a_lower_peak_and_follows_from_one_trace_at_a_prime() -> None:
    model = {"from_config": FAMILIES["llama"] | {"intermediate_size": 4096}}

    def sliced(micro_batch: int, slice_tokens: int | None = 16) -> Trace:
        fsdp, data = {"activation_checkpointing": "full"}, {"train": [{"path": "x"}], "max_length": 96}
        return trace_of(
            recipe_of(
                model,
                training=_batches(micro_batch),
                data=data,
                fsdp=fsdp,
                kernels={"mlp_slice_tokens": slice_tokens},
            )
        )

    three = sliced(3)
    _same_peaks(three, at_micro_batch(sliced(prime_for(three)), 3, 2))
    assert peak(three) < peak(sliced(3, slice_tokens=None)) - 3 * 96 * 4096 * 4, (
        "less by an inner activation, at the least"
    )


def short_slices() -> None:
    """So that a few sequences make several slices."""
    from fsdp_tune.model.kernels import head

    head.SLICE_ELEMENTS = 1 << 15


def test_loss_in_slices_at_every_micro_batch_follows_from_one_slice() -> None:
    """The same peaks, multiplications and kernels as that of a step with all its slices; what is moved but
    for the last, shorter one."""
    sections = {"kernels": {"loss": "chunked"}}
    one = trace_of(deep(2, training=_batches(1), **sections), change=short_slices)
    family = trace_of(deep(2, training=_batches(prime_for(one)), **sections), change=short_slices)
    four, made = (
        trace_of(deep(2, training=_batches(4), **sections), change=short_slices),
        at_micro_batch(family, 4, 2),
    )
    assert len(made.ops) < len(four.ops), "one slice stands for four"
    _same_peaks(four, made)
    for column, near in (("flops", 1e-9), ("kernels", 1e-9), ("moved_bytes", 0.05)):
        assert made.ops[column].sum() == pytest.approx(four.ops[column].sum(), rel=near), column


def _batches(micro_batch: int) -> dict[str, int]:
    return {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": 2}


def _same_peaks(one: Trace, other: Trace) -> None:
    for segments in ("plain", "expandable"):
        first, second = peak_memory(one, segments=segments), peak_memory(other, segments=segments)
        assert first.peak_reserved_bytes == second.peak_reserved_bytes
        assert first.peak_allocated_bytes == second.peak_allocated_bytes


def _rounded(trace: Trace) -> list[int]:
    return [rounded(size) if size > 0 else -rounded(-size) for size in trace.events["bytes"].tolist()]


def _lifetimes(trace: Trace) -> list[tuple[int, int]]:
    begun: dict[int, int] = {}
    lives: list[tuple[int, int]] = []
    for place, (block, size) in enumerate(
        zip(trace.events["block"].tolist(), trace.events["bytes"].tolist(), strict=True)
    ):
        if size > 0:
            begun[block] = place
        else:
            lives.append((begun.pop(block), place))
    return sorted(lives)


@pytest.mark.slow
def test_packed_rows_of_a_hybrid_are_traced_complete() -> None:
    """Fake position ids have no examples. The convolution is computed for all tokens of the row."""
    config = FAMILIES["lfm2"] | {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    data = {"train": [{"path": "x"}], "max_length": 64, "packing": True}
    packed, plain = (
        trace_of(recipe_of({"from_config": config}, data=data | {"packing": packing}))
        for packing in (True, False)
    )
    flops = [int(trace.ops["flops"].sum()) for trace in (packed, plain)]
    assert flops[1] <= flops[0] <= 1.02 * flops[1]  # the mask


def test_trace_round_trips_through_file() -> None:
    again = Trace.from_bytes(whole().to_bytes())
    assert np.array_equal(again.events, whole().events)
    assert (again.units, again.counts, again.shapes, again.facts) == (
        whole().units,
        whole().counts,
        whole().shapes,
        whole().facts,
    )


def test_recipe_without_eval_rows_traces_no_evaluation() -> None:
    assert not (whole().events["phase"] == EVALUATION).any()


def test_compiled_layers_multiply_the_same_and_move_less_in_fewer_kernels() -> None:
    eager, compiled = (
        whole(),
        trace_of(wide().model_copy(update={"kernels": wide().kernels.model_copy(update={"compile": True})})),
    )
    before, after = (trace.steady(trace.ops) for trace in (eager, compiled))
    assert np.array_equal(before["flops"], after["flops"])
    in_layers = (before["layer"] >= 0) & np.isin(
        before["phase"], [PHASES.index("forward"), PHASES.index("backward")]
    )
    assert np.array_equal(before[~in_layers], after[~in_layers])
    assert after[in_layers]["kernels"].sum() < 0.6 * before[in_layers]["kernels"].sum()
    loops = in_layers & (before["flops"] == 0) & (before["stream"] == 0)
    assert after[loops]["moved_bytes"].sum() < 0.6 * before[loops]["moved_bytes"].sum()
    assert np.array_equal(eager.events, compiled.events), "memory is that of eager layers"


def test_components_add_up_to_the_peak() -> None:
    memory = peak_memory(whole())
    assert sum(memory.components.values()) == memory.peak_allocated_bytes
    assert set(memory.components) <= {*KINDS, "rounding"}


def test_too_small_gpu_runs_out_of_memory_at_its_peak() -> None:
    memory = peak_memory(whole())
    assert memory.out_of_memory is None
    full = peak_memory(whole(), capacity_bytes=memory.peak_reserved_bytes - 1, segments="plain")
    assert full.out_of_memory is not None or full.retries


def test_activation_offload_overlaps_with_a_fast_link() -> None:
    """Nothing waits where a layer computes longer than its input travels; where it does not, all that travels
    is waited for."""
    model = {
        "from_config": FAMILIES["llama"]
        | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3}
    }
    data = {"train": [{"path": "x"}], "max_length": 2048}

    def of(**fsdp: Any) -> Trace:
        return trace_of(
            recipe_of(
                model,
                precision={"mixed_precision": "bf16"},
                data=data,
                fsdp={"activation_checkpointing": "full"} | fsdp,
            )
        )

    kept, moved = of(), of(activation_checkpointing_offload=True)
    card, quick = find_hardware("A100-80GB"), Efficiency(1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    input_bytes = recipe_of(model).training.per_device_train_batch_size * 2048 * 1024 * 2
    assert step_time(moved, card, 1, quick).step_seconds == pytest.approx(
        step_time(kept, card, 1, quick).step_seconds, rel=0.01
    )
    slow = replace(card, pcie_gb_s=0.1)
    waited = (
        step_time(moved, slow, 1, quick).exposed_seconds - step_time(kept, slow, 1, quick).exposed_seconds
    )
    travelled = 2 * 2 * input_bytes / slow.host_link_bytes_per_second  # type: ignore[operator]  # out and back, of all but the uppermost
    assert waited == pytest.approx(travelled, rel=0.1)
    assert peak_memory(moved).host_bytes == 2 * input_bytes
