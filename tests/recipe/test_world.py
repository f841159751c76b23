"""Values that depend on the number of ranks: mesh, batch, and the arithmetic line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.core.devices import Machine
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.recipe.rules.contradictions import RULES
from fsdp_tune.recipe.world import batch_arithmetic
from tests.recipe.loading import load_with, one_problem, problems_with

EIGHT_GPUS = Machine("cuda", 8, 64, "H100")


@pytest.mark.parametrize(
    ("strategy", "ranks", "machines", "sizes"),
    [
        ("FULL_SHARD", 8, 1, (1, 8)),
        ("SHARD_GRAD_OP", 8, 1, (1, 8)),
        ("NO_SHARD", 8, 1, (8, 1)),
        ("HYBRID_SHARD", 8, 1, (2, 4)),
        ("HYBRID_SHARD", 4, 1, (2, 2)),
        ("HYBRID_SHARD_ZERO2", 32, 4, (4, 8)),
        ("FULL_SHARD", 1, 1, (1, 1)),
    ],
)
def test_mesh_follows_from_strategy_and_machines(
    strategy: str, ranks: int, machines: int, sizes: tuple[int, int]
) -> None:
    text = (
        f"fsdp: {{sharding_strategy: {strategy}}}\nlaunch: {{num_processes: {ranks}, num_machines: "
        f"{machines}, device: cpu}}"
    )
    parallelism = resolve(load_with(text).recipe, EIGHT_GPUS, cwd=Path("/")).recipe.parallelism
    assert (parallelism.dp_replicate_size, parallelism.dp_shard_size) == sizes


@pytest.mark.parametrize(
    ("given", "sizes"),
    [("dp_replicate_size: 4", (4, 2)), ("dp_shard_size: 2", (4, 2)), ("dp_shard_size: 4", (2, 4))],
)
def test_one_size_gives_the_other(given: str, sizes: tuple[int, int]) -> None:
    text = (
        f"parallelism: {{{given}}}\nfsdp: {{sharding_strategy: HYBRID_SHARD}}\nlaunch: {{num_processes: "
        f"8, device: cpu}}"
    )
    parallelism = resolve(load_with(text).recipe, EIGHT_GPUS, cwd=Path("/")).recipe.parallelism
    assert (parallelism.dp_replicate_size, parallelism.dp_shard_size) == sizes


@pytest.mark.parametrize(
    ("strategy", "sequence", "ranks", "machines", "sizes"),
    [
        ("FULL_SHARD", 2, 8, 1, (1, 4)),
        ("FULL_SHARD", 16, 32, 4, (1, 2)),
        ("NO_SHARD", 4, 8, 1, (2, 1)),
        ("HYBRID_SHARD", 2, 8, 1, (2, 2)),
        ("HYBRID_SHARD", 8, 32, 4, (4, 1)),
    ],
)
def test_ranks_that_share_rows_divide_the_mesh(
    strategy: str, sequence: int, ranks: int, machines: int, sizes: tuple[int, int]
) -> None:
    text = (
        f"parallelism: {{sp_size: {sequence}}}\nfsdp: {{sharding_strategy: {strategy}}}\ntraining: "
        f"{{global_batch_size: 16}}\n"
        f"launch: {{num_processes: {ranks}, num_machines: {machines}, device: cpu}}"
    )
    recipe = resolve(load_with(text).recipe, EIGHT_GPUS, cwd=Path("/")).recipe
    assert (recipe.parallelism.dp_replicate_size, recipe.parallelism.dp_shard_size) == sizes
    assert recipe.topology.world_size == ranks
    assert recipe.training.gradient_accumulation_steps == 16 * sequence // ranks
    assert recipe.data.pad_to_multiple_of % sequence == 0
    assert f"1 sequence × {ranks // sequence} group" in batch_arithmetic(recipe)


def test_replicas_on_one_machine_give_a_notice() -> None:
    loaded = load_with("fsdp: {sharding_strategy: HYBRID_SHARD}\nlaunch: {num_processes: 4, device: cpu}")
    notice = one_problem(
        resolve(loaded.recipe, EIGHT_GPUS, cwd=Path("/"), positions=loaded.positions).notices
    )  # type: ignore[arg-type]
    assert (notice.code, notice.where.line) == ("hybrid-on-one-machine", 3)


@pytest.mark.parametrize(
    ("extra", "code", "words"),
    [
        ("launch: {num_processes: 9, num_machines: 2}", "indivisible", "line 3"),
        (
            "fsdp: {sharding_strategy: HYBRID_SHARD}\nlaunch: {num_processes: 2}",
            "mesh-does-not-fit",
            "2 ranks",
        ),
        ("fsdp: {sharding_strategy: HYBRID_SHARD}\nlaunch: {num_processes: 7}", "mesh-does-not-fit", "odd"),
        (
            "fsdp: {sharding_strategy: HYBRID_SHARD}\nlaunch: {num_processes: 2, num_machines: 2}",
            "mesh-does-not-fit",
            "over 2 machines",
        ),
        (
            "parallelism: {dp_replicate_size: 2, dp_shard_size: 2}\nfsdp: {sharding_strategy: "
            "HYBRID_SHARD}\nlaunch: {num_processes: 8}",
            "mesh-does-not-fit",
            "2 copies × 2 shards = 4 ranks, and there are 8",
        ),
        (
            "parallelism: {dp_shard_size: 3}\nfsdp: {sharding_strategy: HYBRID_SHARD}\nlaunch: "
            "{num_processes: 8}",
            "mesh-does-not-fit",
            "does not divide 8 ranks",
        ),
        (
            "parallelism: {dp_shard_size: 8}\nfsdp: {sharding_strategy: HYBRID_SHARD}\nlaunch: "
            "{num_processes: 8}",
            "mesh-does-not-fit",
            "one copy",
        ),
        (
            "parallelism: {sp_size: 16}\nlaunch: {num_processes: 8}",
            "mesh-does-not-fit",
            "does not divide 8 ranks",
        ),
        (
            "parallelism: {sp_size: 4}\nlaunch: {num_processes: 12, num_machines: 2}",
            "mesh-does-not-fit",
            "machines of 6 ranks",
        ),
        (
            "parallelism: {sp_size: 4}\nfsdp: {sharding_strategy: HYBRID_SHARD}\nlaunch: "
            "{num_processes: 8, num_machines: 4}",
            *("mesh-does-not-fit", "there are 8 ranks, and 4 share each row"),
        ),
        (
            "parallelism: {sp_size: 2, dp_replicate_size: 2, dp_shard_size: 4}\nfsdp: "
            "{sharding_strategy: HYBRID_SHARD}\n"
            "launch: {num_processes: 8}",
            *("mesh-does-not-fit", "2 copies × 4 shards × 2 ranks a row = 16 ranks"),
        ),
        (
            "parallelism: {sp_size: 2}\ntraining: {global_batch_size: 3}\nlaunch: {num_processes: 4}",
            "indivisible",
            "2 groups of 2 ranks",
        ),
        (
            "parallelism: {dp_replicate_size: 2}\nlaunch: {num_processes: 8}",
            "contradiction",
            "over all 8 ranks",
        ),
        ("parallelism: {dp_shard_size: 4}\nlaunch: {num_processes: 8}", "contradiction", "over all 8 ranks"),
        (
            "training: {gradient_accumulation_steps: 9}\nfsdp: {version: 1, sync_each_batch: "
            "false}\nlaunch: {num_processes: 4}",
            *("sums-in-16-bits", "`fsdp.version: 1` adds the gradients of 9"),
        ),
        (
            "training: {gradient_accumulation_steps: 9}\nfsdp: {sync_each_batch: false}\nprecision: "
            "{reduce_dtype: bf16}\n"
            "launch: {num_processes: 4}",
            *("sums-in-16-bits", "`FULL_SHARD` adds the gradients of 9"),
        ),
        (
            "fsdp: {ep_size: 3}\nlaunch: {num_processes: 8}",
            "mesh-does-not-fit",
            "does not divide the 8 ranks that share one copy",
        ),
        (
            "fsdp: {reshard_after_forward: 3}\nlaunch: {num_processes: 8}",
            "mesh-does-not-fit",
            "does not divide the 8 ranks",
        ),
        (
            "fsdp: {reshard_after_forward: 8}\nlaunch: {num_processes: 8}",
            "mesh-does-not-fit",
            "does not divide the 8 ranks",
        ),
        (
            "training: {global_batch_size: 10}\nlaunch: {num_processes: 4}",
            "indivisible",
            "(`launch.num_processes` on line 4)",
        ),
        (
            "training: {global_batch_size: 16, gradient_accumulation_steps: 3}\nlaunch: {num_processes: 4}",
            "contradiction",
            "1 sequences × 4 ranks × 3",
        ),
        (
            "training: {global_batch_size: 16, per_device_train_batch_tokens: 2048, "
            "gradient_accumulation_steps: 3}\n"
            "launch: {num_processes: 4}",
            *("contradiction", "varies from step to step: 4 at most"),
        ),
        (
            "training: {global_batch_size: 16, per_device_train_batch_tokens: 1024}\nlaunch: "
            "{num_processes: 4}",
            *("indivisible", "the longest row would not fit"),
        ),
    ],
)
def test_recipe_that_does_not_fit_the_world_is_refused(extra: str, code: str, words: str) -> None:
    problem = one_problem(problems_with(extra))
    assert problem.code == code
    assert words in problem.message
    assert problem.hint


def test_ddp_with_bf16_weights_adds_few_micro_batches() -> None:
    text = (
        "training: {{global_batch_size: {}}}\nfsdp: {{sharding_strategy: NO_SHARD}}\nlaunch: "
        "{{num_processes: 4}}"
    )
    problem = one_problem(problems_with(text.format(36), "model.dtype=bf16"))
    assert problem.code == "sums-in-16-bits"
    assert "`NO_SHARD` adds the gradients of 9 micro-batches in 16 bits" in problem.message
    load_with(text.format(32), "model.dtype=bf16")


@pytest.mark.parametrize(
    "extra",
    [
        "fsdp: {sharding_strategy: NO_SHARD}",
        "fsdp: {sync_each_batch: false}",
        "fsdp: {sharding_strategy: HYBRID_SHARD}",
        "precision: {reduce_dtype: bf16}",
        "precision: {mixed_precision: 'no'}",
    ],
)
def test_sums_in_fp32_may_have_any_number_of_micro_batches(extra: str) -> None:
    load_with(f"training: {{gradient_accumulation_steps: 64}}\n{extra}\nlaunch: {{num_processes: 4}}")


def test_reshard_after_forward_accepts_a_group_size() -> None:
    assert (
        load_with(
            "fsdp: {reshard_after_forward: 8}\nlaunch: {num_processes: 16}"
        ).recipe.fsdp.reshard_after_forward
        == 8
    )


def test_indivisible_batch_names_sizes_that_work() -> None:
    text = "training: {global_batch_size: 12, per_device_train_batch_size: 2}\nlaunch: {num_processes: 4}"
    assert (
        one_problem(problems_with(text)).hint
        == "use a global batch of 8 or 16, or `per_device_train_batch_size: 1`"
    )
    huge = (
        "training: {global_batch_size: 3, per_device_train_batch_size: 1000000000}\nlaunch: "
        "{num_processes: 4}"
    )
    assert "a global batch of 4000000000" in str(one_problem(problems_with(huge)).hint)


def test_batch_arithmetic_is_one_line() -> None:
    text = (
        "data: {train: [{path: a}], max_length: 4096}\ntraining: {global_batch_size: 128, "
        "per_device_train_batch_size: 2}\n"
    )
    from tests.recipe.loading import load

    recipe = load("model: {name_or_path: m}\n" + text + "launch: {num_processes: 8, device: cpu}").recipe
    resolved = resolve(recipe, EIGHT_GPUS, cwd=Path("/")).recipe
    assert batch_arithmetic(resolved) == (
        "2 sequences × 8 ranks × 8 accumulation = 128 sequences a step; × 4,096 = 524,288 tokens at most"
    )
    assert (resolved.global_batch_size, resolved.training.gradient_accumulation_steps) == (128, 8)


BUDGET = (
    "training: {global_batch_size: 30, per_device_train_batch_tokens: 8192}\nlaunch: {num_processes: 4, "
    "device: cpu}"
)


def test_token_budget_cuts_the_global_batch_on_any_number_of_ranks() -> None:
    recipe = resolve(load_with(BUDGET).recipe, EIGHT_GPUS, cwd=Path("/")).recipe
    assert recipe.global_batch_size == 30, "it need not divide by the ranks"
    assert batch_arithmetic(recipe) == (
        "up to 8,192 token slots × 4 ranks × 2 accumulation hold 30 sequences a step; × 2,048 = "
        "61,440 tokens at most"
    )


def test_resolved_token_budget_resolves_to_itself() -> None:
    """The ranks, `plan` and `rehearse` read it again, with everything written."""
    once = resolve(load_with(BUDGET).recipe, EIGHT_GPUS, cwd=Path("/")).recipe
    assert resolve(once, EIGHT_GPUS, cwd=Path("/")).recipe == once
    assert [finding for rule in RULES for finding in rule(once)] == []


def test_token_budget_may_be_given_with_the_rows_that_it_holds() -> None:
    extra = (
        "training: {global_batch_size: 30, per_device_train_batch_tokens: 8192, "
        "per_device_train_batch_size: 4}"
    )
    assert load_with(extra).recipe.training.per_device_train_batch_size == 4
