"""The ranking: recipes that fit first, then by speed; offload only if nothing else fits; the reason for the
first."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from fsdp_tune.core.command import Target
from fsdp_tune.core.gpus import Hardware, find_hardware
from fsdp_tune.core.units import GIB
from fsdp_tune.planner.search.alternatives import MLP_SLICES
from fsdp_tune.planner.search.auto_recomputation import with_resharding
from fsdp_tune.planner.search.candidates import PlannedRecipe, Search
from fsdp_tune.planner.search.other_trainings import other_trainings
from fsdp_tune.planner.search.scaling import scaling_table
from fsdp_tune.planner.search.search import KEPT_LAYOUTS, Ranking, fastest, rank_recipes, with_places
from fsdp_tune.planner.search.smallest_hardware import smallest_hardware
from fsdp_tune.planner.search.why_first import why_first
from fsdp_tune.planner.trace_format import Trace, TraceFacts
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.planner.hand_trace import Hand
from tests.planner.recipes import resolved

A100 = find_hardware("A100-40GB")
KEPT = {"none": 8, "selective": 4, "full": 1, "inputs on the host": 1 / 8}
"""GiB of activations a sequence of 128 tokens."""
RECOMPUTED = {"none": 0.0, "selective": 0.1, "full": 1 / 3}


class ModelTracer:
    """Traces of a model with `state_gib` GiB of state, all sharded or all on the host."""

    def __init__(self, state_gib: int) -> None:
        self.state_bytes = state_gib * GIB
        self.seen: list[Recipe] = []

    def __call__(self, recipes: Sequence[Recipe]) -> Iterator[Trace | None]:
        self.seen += recipes
        return (self.trace(recipe) for recipe in recipes)

    def trace(self, recipe: Recipe) -> Trace:
        fsdp, micro = recipe.fsdp, recipe.training.per_device_train_batch_size
        accumulation = recipe.training.gradient_accumulation_steps or 1
        hand = Hand()
        hand.hold(
            0,
            self.state_bytes // (recipe.topology.copy_size if recipe.is_sharded else 1),
            kind="parameters",
            host=fsdp.offload_params,
        )
        gib = KEPT[
            "inputs on the host" if fsdp.activation_checkpointing_offload else fsdp.activation_checkpointing
        ]
        sequence, sliced = recipe.parallelism.sp_size, recipe.kernels.mlp_slice_tokens is not None
        kept = int(gib * micro * GIB) * recipe.data.max_length // 128 // sequence // (2 if sliced else 1)
        stays_gathered = fsdp.reshard_after_backward is False and accumulation > 1
        # the parameters, of a state with gradients and two moments
        kept += self.state_bytes // 4 if stays_gathered else 0
        hand.hold(1, kept)
        traced = min(3 if stays_gathered else 2, accumulation)
        for index in range(traced):
            attention = (recipe.data.max_length / 128) ** 2
            hand.op(
                "mm",
                flops=1e13
                * micro
                / sequence
                * attention
                * (1.1 if sliced else 1)
                * (1 + RECOMPUTED[fsdp.activation_checkpointing]),
                micro=index,
            )
            if fsdp.offload_params:
                hand.op("copy_to_device", moved=10**10, micro=index)
            talk = {"FULL_SHARD": 2, "HYBRID_SHARD": 2}.get(fsdp.sharding_strategy, 1)
            group = "shard" if recipe.is_sharded else "replicate"
            talk = talk - 1 if stays_gathered and index else talk
            hand.collective("all_reduce", talk * GIB, group=group, micro=index).wait(0, 1)
        hand.hold(1, -kept)
        return hand.trace(
            micro_batch=micro,
            tokens=recipe.data.max_length,
            accumulation=accumulation,
            traced_micro_batches=traced,
            topology=recipe.topology,
            is_sharded=recipe.is_sharded,
        )


@functools.cache
def ranked(
    state_gib: int, target: Target = "fastest", gpus: int = 8, hardware: Hardware = A100
) -> tuple[Ranking, ModelTracer]:
    """A ranking, and the tracer that it queried; tests only read them."""
    recipe, tracer = resolved(gpus=gpus), ModelTracer(state_gib)
    return rank_recipes(Search(hardware, tracer), recipe, tracer.trace(recipe), target), tracer


def test_recipes_that_fit_are_ranked_by_time_and_others_come_last() -> None:
    ranking, _ = ranked(80)
    answers = [each.plan.fits for each in ranking.ranked]
    assert answers == sorted(answers, key=["yes", "tight", "no"].index)
    first = ranking.ranked[0]
    assert first.recipe.fsdp.activation_checkpointing == "none"
    assert first.recipe.global_batch_size == 64
    assert first.plan.fits == "yes"


@pytest.mark.parametrize("target", ["fastest", "largest-context"])
def test_recipes_whose_times_differ_by_less_than_the_error_are_equal_and_ordered_by_memory(
    target: Target,
) -> None:
    ranking, _ = ranked(80, target)
    fitting = [each for each in ranking.ranked if each.plan.fits == "yes"]
    groups: dict[tuple[int, int], list[PlannedRecipe]] = {}
    for each in fitting:
        groups.setdefault(
            (-each.recipe.data.max_length, each.plan.equal_from or each.plan.place or 0), []
        ).append(each)
    error = fitting[0].plan.accuracy["step_seconds"].median_percent
    assert error is not None
    last: tuple[int, float] = (-fitting[0].recipe.data.max_length, 0.0)
    for (length, _place), group in groups.items():
        times = [
            (each.plan.step_seconds or 0) * each.plan.num_processes / each.plan.tokens_per_step
            for each in group
        ]
        assert max(times) <= min(times) * (1 + error / 100)
        assert (length, min(times)) > last, "the fastest of the group before is faster by more than the error"
        last = length, min(times) * (1 + error / 100)
        memory = [each.plan.device_gib for each in group]
        assert memory == sorted(memory)
    first = ranking.ranked[0].plan
    others = [each for each in fitting if each.plan.equal_from == first.equal_from]
    assert (first.equal_from is not None) == (
        "equal within the median error of such times" in str(ranking.because)
    )
    if target == "fastest":
        assert len(others) > 1, "else this shows nothing"


def test_recipes_on_as_many_gpus_are_equal_with_others_between_them() -> None:
    first = ranked(80)[0].ranked[0]
    error = first.plan.accuracy["step_seconds"].median_percent
    assert error is not None

    def taking(percent: float, gpus: int, gib: float) -> PlannedRecipe:
        seconds = first.plan.tokens_per_step / gpus * (1 + percent / 100)
        return replace(
            first, plan=replace(first.plan, step_seconds=seconds, num_processes=gpus, device_gib=gib)
        )

    found = with_places(
        [taking(0, 8, 9.0), taking(error / 4, 4, 9.0), taking(error / 2, 8, 5.0), taking(2 * error, 8, 1.0)]
    )
    shown = [
        (each.plan.num_processes, each.plan.device_gib, each.plan.place, each.plan.equal_from)
        for each in found
    ]
    assert shown == [(8, 5.0, 1, 1), (8, 9.0, 2, 1), (4, 9.0, 3, None), (8, 1.0, 4, None)]


def test_fastest_predicted_recipes_are_measured_whatever_memory_they_need() -> None:
    ranking, _ = ranked(80)

    def seconds(each: PlannedRecipe) -> float:
        return (each.plan.step_seconds or float("inf")) / each.plan.tokens_per_step

    fitting = sorted((each for each in ranking.placed if each.plan.fits == "yes"), key=seconds)
    assert len(ranking.placed) > len(ranking.ranked), "recipes that are not shown are measured too"
    assert seconds(ranking.ranked[0]) > seconds(fitting[0]), "else this shows nothing"
    chosen = ranking.to_measure(3)
    assert [seconds(each) for each in chosen[:3]] == [seconds(each) for each in fitting[:3]]
    assert [each.plan.recipe_changes for each in chosen[3:]] in ([], [{}])


def test_recomputation_is_taken_where_nothing_fits_without_it() -> None:
    ranking, _ = ranked(260)  # 32.5 GiB a GPU: no room for 8 GiB of activations
    first = ranking.ranked[0]
    assert first.recipe.fsdp.activation_checkpointing != "none"
    assert first.plan.fits == "yes"
    assert ranking.because is not None
    assert "with activation checkpointing `selective` it is tight at best (SHARD_GRAD_OP, " in ranking.because


def test_reason_of_first_agrees_with_ranking() -> None:
    ranking, _ = ranked(80, hardware=replace(A100, bf16_tflops=None))
    assert ranking.because is not None
    assert "the smallest (the speed of A100-40GB is unknown) of" in ranking.because
    for state_gib in (80, 230, 260):
        ranking, _ = ranked(state_gib)
        for each in ranking.ranked:
            denied = {"yes": "", "tight": "no recipe fits"}.get(each.plan.fits, "not even that")
            assert (
                f"with activation checkpointing `{each.recipe.fsdp.activation_checkpointing}` {denied}"
                not in (ranking.because or "")
            )


def test_reason_compares_gpu_time_where_the_number_of_gpus_differs() -> None:
    """Seven times the time per token on one GPU is less time of all GPUs together."""
    fitting = [each for each in ranked(80)[0].ranked if each.plan.fits == "yes"]
    other = next(
        each
        for each in fitting
        if each.recipe.fsdp.sharding_strategy != fitting[0].recipe.fsdp.sharding_strategy
    )

    def taking(found: PlannedRecipe, seconds: float, gpus: int) -> PlannedRecipe:
        plan = replace(
            found.plan, step_seconds=seconds, num_processes=gpus, tokens_per_step=1000, equal_from=None
        )
        return replace(found, plan=plan)

    because = why_first([taking(fitting[0], 100.0, 1), taking(other, 14.0, 8)], "cheapest") or ""
    assert "11% less GPU time per token than the next layout, " in because
    assert ", on 8 GPUs instead of 1" in because
    assert "% less time per token than the next layout" in (
        why_first([taking(fitting[0], 13.0, 8), taking(other, 14.0, 8)], "fastest") or ""
    )


def test_offload_is_tried_only_where_nothing_fits_without() -> None:
    _, tracer = ranked(80)
    assert not any(recipe.fsdp.offload_params for recipe in tracer.seen)
    ranking, tracer = ranked(1000)
    assert ranking.ranked[0].recipe.fsdp.offload_params
    assert ranking.ranked[0].plan.recipe_changes["fsdp.offload_params"] is True


def test_activations_are_offloaded_before_state() -> None:
    """At 35 GiB of state a GPU one sequence is too many with everything recomputed; without its inputs there
    is room."""
    ranking, tracer = ranked(280)
    first = ranking.ranked[0]
    assert first.plan.fits == "yes"
    assert first.recipe.fsdp.activation_checkpointing_offload
    assert first.plan.recipe_changes["fsdp.activation_checkpointing_offload"] is True
    assert not any(recipe.fsdp.offload_params for recipe in tracer.seen)
    assert "activation checkpointing full, inputs on the host" in (ranking.because or "")
    _, tracer = ranked(80)
    assert not any(recipe.fsdp.activation_checkpointing_offload for recipe in tracer.seen)


def test_micro_batches_end_with_the_first_that_does_not_fit() -> None:
    ranking, _ = ranked(80)
    shown = [
        each
        for each in ranking.ranked
        if each.recipe.fsdp.activation_checkpointing == "none" and each.plan.fits == "no"
    ]
    assert len({each.recipe.fsdp.sharding_strategy for each in shown}) == len(shown)


def test_layout_is_traced_once_for_all_micro_batches() -> None:
    ranking, tracer = ranked(8)
    kept = [recipe for recipe in tracer.seen if recipe.fsdp.reshard_after_backward is False]
    assert len(tracer.seen) == 9 * 2 + len(kept), "with whole logits and in slices"
    assert len({recipe.training.per_device_train_batch_size for recipe in tracer.seen}) == 1
    assert len({each.recipe.training.per_device_train_batch_size for each in ranking.ranked}) > 1


def test_fastest_layouts_that_accumulate_are_planned_with_fewer_gathers() -> None:
    """Only two of them, since each is another trace, and no micro-batch of a step without accumulation."""
    recipe, tracer = resolved(), ModelTracer(80)
    found = fastest(Search(A100, tracer), recipe, tracer.trace(recipe))
    traced = [each for each in tracer.seen if each.fsdp.reshard_after_backward is False]
    assert len(traced) == KEPT_LAYOUTS
    assert {each.training.gradient_accumulation_steps for each in traced} == {3}, (
        "the first, the last and one between"
    )
    kept = [each for each in found if each.recipe.fsdp.reshard_after_backward is False]
    assert kept
    for each in kept:
        assert each.plan.recipe_changes["fsdp.reshard_after_backward"] is False
        assert each.recipe.training.gradient_accumulation_steps != 1
        assert each.recipe.is_sharded
        (freed,) = (
            other for other in found if other.recipe == with_resharding(each.recipe, after_backward=True)
        )
        assert each.plan.device_gib > freed.plan.device_gib
        assert (each.plan.step_seconds or 0) < (freed.plan.step_seconds or 0)


def test_undecided_loss_is_tried_with_full_logits_and_in_slices() -> None:
    recipe, tracer = resolved(kernels={"loss": "auto"}), ModelTracer(8)
    recipe = recipe.model_copy(update={"kernels": recipe.kernels.model_copy(update={"loss": "auto"})})
    rank_recipes(Search(A100, tracer), recipe, tracer.trace(recipe), "fastest")
    assert {each.kernels.loss for each in tracer.seen} == {"full", "chunked"}


@pytest.mark.parametrize(
    ("state_gib", "loss", "target"),
    [
        (8, "auto", "fastest"),
        (1000, "full", "fastest"),
        (8, "full", "largest-context"),
        (1000, "auto", "largest-context"),
        (8, "full", "cheapest"),
        pytest.param(1000, "auto", "cheapest", marks=pytest.mark.slow),
    ],
)
def test_requested_recipe_is_in_every_ranking_once_at_its_rank(
    target: Target, loss: str, state_gib: int
) -> None:
    recipe, tracer = resolved(kernels={"loss": loss}), ModelTracer(state_gib)
    ranking = rank_recipes(Search(A100, tracer), recipe, tracer.trace(recipe), target)
    own = [each for each in ranking.ranked if each.recipe == recipe]
    assert len(own) == 1
    assert own[0].plan.recipe_changes == {}
    places = [each.plan.place for each in ranking.ranked]
    assert places == sorted(places)  # type: ignore[type-var]
    assert places[:-1] == list(range(1, len(places)))
    if loss == "auto":  # its own loss is tried once, the other as well
        twins = [
            each.plan.recipe_changes
            for each in ranking.ranked
            if each.plan.recipe_changes.keys() <= {"kernels.loss"}
        ]
        assert twins in ([{}], [{}, {"kernels.loss": "chunked"}], [{"kernels.loss": "chunked"}, {}])


def test_cheapest_takes_fewer_gpus_where_communication_costs() -> None:
    ranking, _ = ranked(16, "cheapest")
    first = ranking.ranked[0]
    assert first.recipe.world_size < 8
    assert first.recipe.global_batch_size == 64
    assert first.plan.recipe_changes["launch.num_processes"] == first.recipe.world_size


def test_largest_context_doubles_the_rows_while_they_fit() -> None:
    """24 GiB are free. 128 tokens keep a GiB, an eighth of it with the inputs on the host, and half of that
    with the MLP in slices."""
    ranking, tracer = ranked(80, "largest-context")
    first = ranking.ranked[0]
    assert first.recipe.data.max_length == 128 * 256 * 4
    assert first.recipe.fsdp.activation_checkpointing_offload
    assert first.plan.recipe_changes["data.max_length"] == 128 * 256 * 4
    assert first.plan.recipe_changes["parallelism.sp_size"] == 4, "the hand-written trace has four heads"
    assert first.plan.recipe_changes["kernels.mlp_slice_tokens"] in MLP_SLICES
    assert first.recipe.global_batch_size == 64
    assert "more time per token than the next layout" in (ranking.because or ""), (
        "longer rows, more attention"
    )
    assert ", MLP in slices of 4,096, 1 for 2 GPUs" in (ranking.because or "")
    sizes = {each.parallelism.sp_size for each in tracer.seen}
    lengths = {
        size: max(each.data.max_length for each in tracer.seen if each.parallelism.sp_size == size)
        for size in sizes
    }
    assert lengths == {1: 128 * 512, 2: 128 * 1024, 4: 128 * 2048}, "one more than fits"
    assert len(tracer.seen) < 30, "a trace takes seconds"


def test_largest_context_slices_no_mlp_that_cannot_be_sliced() -> None:
    class Unsliceable(ModelTracer):
        def __call__(self, recipes: Sequence[Recipe]) -> Iterator[Trace | None]:
            self.seen += recipes
            return (None if recipe.kernels.mlp_slice_tokens else self.trace(recipe) for recipe in recipes)

    recipe, tracer = resolved(), Unsliceable(80)
    first = rank_recipes(Search(A100, tracer), recipe, tracer.trace(recipe), "largest-context").ranked[0]
    assert first.recipe.data.max_length == 128 * 128 * 4
    assert first.recipe.kernels.mlp_slice_tokens is None
    assert sum(each.kernels.mlp_slice_tokens is not None for each in tracer.seen) <= len(MLP_SLICES)


@pytest.mark.parametrize(
    ("sections", "length"),
    [({"kernels": {"compile": True}}, 128 * 128), ({"fsdp": {"version": 1}}, 128 * 16)],
)
def test_largest_context_does_not_try_what_a_rule_refuses(
    sections: dict[str, dict[str, object]], length: int
) -> None:
    recipe, tracer = resolved(**sections), ModelTracer(80)
    ranking = rank_recipes(Search(A100, tracer), recipe, tracer.trace(recipe), "largest-context")
    assert ranking.ranked[0].plan.fits == "yes"
    assert ranking.ranked[0].plan.recipe_changes["data.max_length"] == length, (
        "FSDP1 refuses inputs on the host too"
    )
    changed = {key for each in ranking.ranked for key in each.plan.recipe_changes}
    assert not changed & {"parallelism.sp_size", "kernels.mlp_slice_tokens"}


def test_short_rows_are_not_shared() -> None:
    """Nothing is recomputed, so that sharing rows could only add traffic."""
    ranking, tracer = ranked(16, "cheapest")
    assert ranking.ranked[0].recipe.fsdp.activation_checkpointing == "none"
    assert {recipe.parallelism.sp_size for recipe in tracer.seen} == {1}


def test_cheapest_shares_rows_that_would_be_recomputed() -> None:
    """A row of 1,024 tokens keeps 64 GiB, or 8 with everything recomputed; each of four GPUs that share it
    keeps 16."""
    recipe, tracer = resolved(data={"max_length": 128 * 8}), ModelTracer(80)
    ranking = rank_recipes(Search(A100, tracer), recipe, tracer.trace(recipe), "cheapest")
    first = ranking.ranked[0]
    assert first.plan.fits == "yes"
    assert first.recipe.parallelism.sp_size > 1
    assert first.recipe.fsdp.activation_checkpointing == "none"
    assert first.recipe.global_batch_size == 64
    assert first.plan.recipe_changes["parallelism.sp_size"] == first.recipe.parallelism.sp_size


def test_where_nothing_fits_the_smallest_sufficient_hardware_is_found() -> None:
    recipe, tracer = resolved(gpus=2), ModelTracer(150)
    search = Search(find_hardware("RTX4090"), tracer)
    ranking = rank_recipes(search, recipe, tracer.trace(recipe), "fastest")
    found = smallest_hardware(
        search, recipe, [each for each in ranking.ranked if not each.recipe.fsdp.offload_params]
    )
    assert found is not None
    assert (found.gpu, found.num_processes) == ("GH200", 2), (
        "76 GiB a GPU: less than 80 GB with something to spare is not enough"
    )


def test_more_gpus_are_proposed_if_no_gpu_is_large_enough() -> None:
    recipe, tracer = resolved(gpus=2), ModelTracer(1500)
    found = smallest_hardware(Search(find_hardware("H200"), tracer), recipe, ())
    assert found is not None
    assert (found.gpu, found.num_processes) == ("H200", 16)


def test_more_gpus_keep_the_global_batch() -> None:
    recipe, tracer = resolved(gpus=2), ModelTracer(1500)
    found = smallest_hardware(Search(find_hardware("H200"), tracer), recipe, ())
    assert found is not None
    assert found.recipe_changes["training.gradient_accumulation_steps"] == 64 // 16


def test_proposed_gpu_for_fp8_supports_fp8() -> None:
    recipe, tracer = resolved(gpus=2, precision={"mixed_precision": "fp8"}), ModelTracer(55)
    found = smallest_hardware(Search(find_hardware("L4"), tracer), recipe, ())
    assert found is not None
    assert found.gpu == "L40S", "an A100-40GB would be large enough"


HUB_MODEL = {"from_config": None, "name_or_path": "meta-llama/Llama-3.1-8B"}


class AdapterTracer(ModelTracer):
    """Adapters hold an eighth of the state of full fine-tuning, and in 4 bits a quarter of that."""

    def trace(self, recipe: Recipe) -> Trace:
        share = 1 if recipe.lora is None else 8 if recipe.quantization is None else 32
        return ModelTracer(int(self.state_bytes / share / GIB)).trace(recipe)


@pytest.mark.parametrize(
    ("state_gib", "answers", "offloads"),
    [(160, ["yes", "yes"], False), (800, ["no", "yes"], False), (3200, ["yes", "yes"], True)],
)
def test_adapters_are_planned_for_a_recipe_that_does_not_fit(
    state_gib: int, answers: list[str], offloads: bool
) -> None:
    found = other_trainings(Search(A100, AdapterTracer(state_gib)), resolved(gpus=2, model=HUB_MODEL))
    assert [each.plan.fits for each in found] == answers
    assert [each.recipe.fsdp.offload_params for each in found] == [offloads] * 2
    lora, qlora = (each.plan.recipe_changes for each in found)
    assert lora["lora.target_modules"] == qlora["lora.target_modules"] == "all-linear"
    assert ("quantization.load" in lora, qlora["quantization.load"]) == (False, "nf4")
    assert lora["fsdp.activation_checkpointing"] == "full"


def test_only_qlora_is_planned_for_a_recipe_with_adapters() -> None:
    (found,) = other_trainings(
        Search(A100, AdapterTracer(640)), resolved(gpus=2, model=HUB_MODEL, lora={"r": 4})
    )
    assert (found.recipe.lora and found.recipe.lora.r, found.plan.fits) == (4, "yes")
    assert "lora.target_modules" not in found.plan.recipe_changes
    assert (
        other_trainings(
            Search(A100, AdapterTracer(640)), resolved(gpus=2, model=HUB_MODEL, lora={}, quantization={})
        )
        == []
    )


def test_scaling_table_has_full_machines_and_the_recipe_itself() -> None:
    tracer = ModelTracer(30)
    rows = scaling_table(Search(A100, tracer), resolved(gpus=12, machines=2, global_batch=60))
    assert [(row.num_processes, row.num_machines) for row in rows] == [(1, 1), (2, 1), (4, 1), (12, 2)]
    rows = scaling_table(Search(A100, tracer), resolved(gpus=16))
    assert next(row.num_machines for row in rows if row.num_processes == 16) == 1, (
        "sixteen on one machine, as the recipe says"
    )


def test_scaling_of_many_ranks_is_interpolated() -> None:
    tracer = ModelTracer(300)
    scaling_table(Search(A100, tracer), resolved(gpus=512, machines=64, global_batch=512))
    assert {recipe.world_size for recipe in tracer.seen} == {2, 512}


class MixtureTracer(ModelTracer):
    """Eight experts, stacked in one parameter."""

    def trace(self, recipe: Recipe) -> Trace:
        return replace(super().trace(recipe), facts=TraceFacts(config={"num_local_experts": 8}))


def test_shards_of_experts_are_traced_at_every_size() -> None:
    """The number of ranks decides in which dimension experts are sharded, which no line through two sizes
    shows."""
    tracer = MixtureTracer(30)
    rows = scaling_table(Search(A100, tracer), resolved())
    assert (
        {recipe.world_size for recipe in tracer.seen}
        == {row.num_processes for row in rows}
        == {1 << power for power in range(11)}
    )


def test_unknown_time_still_ranks_what_fits() -> None:
    volta = find_hardware("V100-32GB")
    ranking, _ = ranked(80, hardware=volta)
    assert ranking.ranked[0].plan.step_seconds is None
    assert ranking.ranked[0].plan.fits == "yes"
    assert any("no known peak in bf16" in text for text in ranking.ranked[0].plan.unknown)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_scaling_table_goes_to_1024_and_loses_efficiency_only(strategy: str) -> None:
    tracer = ModelTracer(30)
    rows = scaling_table(Search(A100, tracer), resolved(fsdp={"sharding_strategy": strategy}))
    assert [row.num_processes for row in rows] == [1 << power for power in range(11)]
    assert [row.num_machines for row in rows][-1] == 128
    speeds = [row.efficiency for row in rows]
    assert speeds[0] == 1.0
    assert speeds[-1] <= speeds[3] + 1e-9
    shards = [row.peak_reserved_gib for row in rows]
    assert (shards[0] > shards[-1]) == (strategy == "FULL_SHARD")


@pytest.mark.parametrize(("positions", "longest"), [(512, 512), (None, 128 * 256 * 4)])
def test_largest_context_ends_at_the_positions_that_the_model_declares(
    positions: int | None, longest: int
) -> None:
    class Limited(ModelTracer):
        def trace(self, recipe: Recipe) -> Trace:
            return replace(
                super().trace(recipe),
                facts=TraceFacts(config={"max_position_embeddings": -1}, max_positions=positions),
            )

    tracer, recipe = Limited(80), resolved()
    ranking = rank_recipes(Search(A100, tracer), recipe, tracer.trace(recipe), "largest-context")
    assert max(each.recipe.data.max_length for each in ranking.ranked) == longest
