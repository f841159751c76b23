"""Recipes of a run that continues on fewer machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.core.devices import Machine
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.recipe.fewer_machines import recipe_for_machines, smaller_sizes
from fsdp_tune.recipe.resolve import Resolution, resolve
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.recipe.loading import load, load_with, one_problem, problems_with

FOUR_GPUS = Machine("cuda", 4, 64, "H100")


def written(machines: int, fewest: int | None, *, training: str, more: str = "", restarts: int = 2) -> str:
    fewest_key = "" if fewest is None else f", min_machines: {fewest}"
    launch = (
        f"num_machines: {machines}, num_processes: {4 * machines}, device: cpu, max_restarts: "
        f"{restarts}{fewest_key}"
    )
    return f"{more}training: {{{training}}}\nlaunch: {{{launch}}}"


def resolved(text: str) -> tuple[Recipe, Resolution]:
    recipe = load_with(text).recipe
    return recipe, resolve(recipe, FOUR_GPUS, cwd=Path("/"))


def on(text: str, machines: int) -> Recipe:
    """The recipe on another number of machines, resolved."""
    recipe, resolution = resolved(text)
    return resolve(recipe_for_machines(recipe, resolution.recipe, machines), FOUR_GPUS, cwd=Path("/")).recipe


@pytest.mark.parametrize(
    ("training", "accumulation"),
    [
        ("global_batch_size: 48, per_device_train_batch_size: 2", 3),
        ("gradient_accumulation_steps: 2, per_device_train_batch_size: 2", 3),
        ("global_batch_size: 48, gradient_accumulation_steps: 2, per_device_train_batch_size: 2", 3),
    ],
)
def test_fewer_machines_keep_the_global_batch(training: str, accumulation: int) -> None:
    text = written(3, 1, training=training)
    whole, smaller = resolved(text)[1].recipe, on(text, 2)
    assert (whole.world_size, smaller.world_size, smaller.launch.num_machines) == (12, 8, 2)
    assert whole.global_batch_size == smaller.global_batch_size == 48
    assert smaller.training.gradient_accumulation_steps == accumulation


def test_stream_keeps_its_lanes() -> None:
    """Four ranks a machine: three machines read 24 lanes, which two read too; five machines read 20, which
    four of them cannot."""
    streamed = "data: {train: [{path: some/set}], streaming: true}\nmodel: {name_or_path: gpt2}\n"
    text = streamed + written(3, 2, training="global_batch_size: 48, max_steps: 5")
    recipe = load(text).recipe
    whole = resolve(recipe, FOUR_GPUS, cwd=Path("/")).recipe
    smaller = resolve(recipe_for_machines(recipe, whole, 2), FOUR_GPUS, cwd=Path("/")).recipe
    assert whole.data.stream_lanes == smaller.data.stream_lanes == 24
    recipe = load(streamed + written(5, 3, training="global_batch_size: 240, max_steps: 5")).recipe
    with pytest.raises(FsdpTuneError) as caught:
        resolve(recipe, FOUR_GPUS, cwd=Path("/"))
    assert (
        "not on 4: `data.stream_lanes: 20` is not divisible by 16 ranks"
        in one_problem(caught.value.problems).message
    )


@pytest.mark.parametrize(
    ("strategy", "machines", "found"),
    [
        ("HYBRID_SHARD", 2, ("HYBRID_SHARD", 2, 4)),
        ("HYBRID_SHARD", 1, ("FULL_SHARD", 1, 4)),
        ("HYBRID_SHARD_ZERO2", 1, ("SHARD_GRAD_OP", 1, 4)),
        ("FULL_SHARD", 1, ("FULL_SHARD", 1, 4)),
    ],
)
def test_mesh_follows_the_machines(strategy: str, machines: int, found: tuple[str, int, int]) -> None:
    smaller = on(
        written(3, 1, training="global_batch_size: 24", more=f"fsdp: {{sharding_strategy: {strategy}}}\n"),
        machines,
    )
    assert (
        smaller.fsdp.sharding_strategy,
        smaller.parallelism.dp_replicate_size,
        smaller.parallelism.dp_shard_size,
    ) == found


def test_numbers_that_do_not_divide_are_skipped_and_reported() -> None:
    recipe, resolution = resolved(written(4, 1, training="global_batch_size: 16"))
    sizes = smaller_sizes(recipe, resolution.recipe)
    assert [machines for machines, reason in sizes.items() if reason is None] == [2, 1]
    (notice,) = [each for each in resolution.notices if each.code == "fewer-machines"]
    assert notice.message == (
        "if a machine is lost and not replaced, the run continues on 2 or 1 machines; "
        "not on 3: `training.global_batch_size: 16` is not divisible by 1 sequences × 12 ranks = 12"
    )
    assert notice.where.key == "launch.min_machines"


@pytest.mark.parametrize(
    ("fsdp", "allowed"),
    [
        ("ep_size: 4", [2, 1]),
        ("ep_size: 1", [3, 2, 1]),
        ("ep_size: 2, sharding_strategy: HYBRID_SHARD", [3, 2, 1]),
    ],
    ids=["one copy", "undivided", "a copy on each machine"],
)
def test_experts_are_sharded_over_a_divisor_of_their_ranks(fsdp: str, allowed: list[int]) -> None:
    """Their widths are known to divide by the ranks of all machines, and may not divide by 3. The run would
    end after a machine is lost."""
    recipe, resolution = resolved(written(4, 1, training="global_batch_size: 48", more=f"fsdp: {{{fsdp}}}\n"))
    sizes = smaller_sizes(recipe, resolution.recipe)
    assert [machines for machines, reason in sizes.items() if reason is None] == allowed
    (notice,) = [each for each in resolution.notices if each.code == "fewer-machines"]
    reason = (
        "not on 3: with `fsdp.ep_size: 4`, 3 ranks would shard each expert, and 3 is not a divisor of "
        "the 4 on all machines"
    )
    assert (reason in notice.message) is (3 not in allowed)


def test_no_smaller_number_is_an_error() -> None:
    with pytest.raises(FsdpTuneError) as caught:
        resolved(written(4, 3, training="global_batch_size: 16"))
    problem = one_problem(caught.value.problems)
    assert problem.code == "indivisible"
    assert problem.message.startswith(
        "`launch.min_machines: 3` allows no smaller number of machines; not on 3: "
    )


def test_more_than_all_machines_is_an_error() -> None:
    problem = one_problem(problems_with(written(2, 3, training="global_batch_size: 8")))
    assert (problem.code, problem.where.key) == ("contradiction", "launch.min_machines")


@pytest.mark.parametrize(("machines", "restarts"), [(2, 0), (1, 2)])
def test_key_without_effect_is_reported(machines: int, restarts: int) -> None:
    text = written(machines, 1, training="global_batch_size: 8", restarts=restarts)
    recipe, resolution = resolved(text)
    assert [each.where.key for each in load_with(text).notices] == ["launch.min_machines"]
    assert smaller_sizes(recipe, resolution.recipe) == {}


def test_run_without_the_key_needs_all_machines() -> None:
    recipe, resolution = resolved(written(3, None, training="global_batch_size: 24"))
    assert smaller_sizes(recipe, resolution.recipe) == {}
