"""A run whose live state differs from its recipe stops before it trains and names the wrong value."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fsdp_tune.model.shard.wrap import shard_dim
from fsdp_tune.recipe import resolve as resolving
from fsdp_tune.recipe.fsdp_arguments import expected
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.records import ChosenKernel, LiveState
from fsdp_tune.worker.readback.structure import experts_differences
from tests.cuda.devices import on_devices
from tests.model.recipes import recipe_of
from tests.parity.bench import Bench
from tests.parity.cases import FAST, Case
from tests.parity.compare import deviation
from tests.worker.sabotage import SABOTAGE, run_sabotaged
from tests.worker.short_runs import COMPARED, new_run, short_run

# By hand, from the papers' definitions (ZeRO, arXiv:1910.02054; FSDP, arXiv:2304.11277): wrapper, mesh of
# four ranks, placements, freed after the forward.
MEANING: dict[str, tuple[str, list[int], list[str], bool | None]] = {
    "FULL_SHARD": ("fsdp2", [4], ["Shard(dim=0)"], True),
    "SHARD_GRAD_OP": ("fsdp2", [4], ["Shard(dim=0)"], False),
    "HYBRID_SHARD": ("fsdp2", [2, 2], ["Replicate()", "Shard(dim=0)"], True),
    "HYBRID_SHARD_ZERO2": ("fsdp2", [2, 2], ["Replicate()", "Shard(dim=0)"], False),
    "NO_SHARD": ("ddp", [], [], None),
}
SHARED = {case.strategy: case for case in FAST if case.strategy != "FULL_SHARD"}
"""Runs of the parity matrix, which others need too."""


def meaning_of(document: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(document[key] for key in ("wrapper", "mesh", "placements", "reshard_after_forward"))


def document_of(run: RunDir) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run.readback_json.read_text())
    assert document["differences"] == []
    return document


@pytest.mark.parametrize("strategy", MEANING)
def test_expected_state_matches_strategy(strategy: str) -> None:
    recipe = recipe_of(ranks=4, fsdp={"sharding_strategy": strategy})
    assert meaning_of(expected(recipe)) == MEANING[strategy]


@on_devices
@pytest.mark.ranks
@pytest.mark.parametrize(
    "strategy", ["FULL_SHARD", *SHARED, pytest.param("HYBRID_SHARD_ZERO2", marks=pytest.mark.slow)]
)
def test_live_state_matches_strategy(strategy: str, bench: Bench) -> None:
    ranks = 4 if strategy.startswith("HYBRID") else 2
    run = (
        bench.run(SHARED[strategy])
        if strategy in SHARED
        else short_run(bench, Case(strategy=strategy, ranks=ranks))
    )
    document = document_of(run)
    wrapper, mesh, placements, reshards = MEANING[strategy]
    assert meaning_of(document) == (wrapper, [ranks] if mesh == [4] else mesh, placements, reshards)
    units = [tuple(unit["modules"]) for unit in document["units"]]
    assert len(units) == len(set(units)), "norm and head are one unit, told once"


@pytest.mark.slow  # the parity matrix has it
@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "reshards"), [("HYBRID_SHARD", True), ("HYBRID_SHARD_ZERO2", False)])
def test_hybrid_fsdp1_has_two_replicas_and_follows_the_plain_loop(
    strategy: str, reshards: bool, bench: Bench
) -> None:
    run = short_run(bench, Case(version=1, strategy=strategy, ranks=4), COMPARED)
    assert meaning_of(document_of(run)) == ("fsdp1", [2, 2], ["Replicate()", "Shard(dim=0)"], reshards)
    found = deviation(run, bench.reference("llama", steps=6))
    assert found.is_within_fp32, f"{found}; worst is {found.worst_name}"


@on_devices
@pytest.mark.ranks
def test_prefetch_is_capped_at_unit_count(bench: Bench) -> None:
    document = document_of(
        short_run(bench, Case(ranks=1, fsdp=(("forward_prefetch", 9), ("backward_prefetch", 9))))
    )
    units = document["prefetching_units"]
    assert (document["forward_prefetch"], document["backward_prefetch"]) == (units - 1, units - 1)


@on_devices
@pytest.mark.ranks
@pytest.mark.parametrize("frozen", [3, *(pytest.param(frozen, marks=pytest.mark.slow) for frozen in (1, 2))])
def test_prefetch_of_the_backward_is_capped_at_units_with_a_backward(frozen: int, bench: Bench) -> None:
    """The embedding and the first layers are frozen: what is gathered ahead in the backward ends at the first
    trained unit."""
    changes = {
        "model": {
            "freeze": ["model.embed_tokens.*", *(f"model.layers.{layer}.*" for layer in range(frozen - 1))]
        }
    }
    document = document_of(short_run(bench, Case(fsdp=(("backward_prefetch", 9),)), changes))
    assert document["prefetching_units_of_backward"] < document["prefetching_units"] or frozen == 1


@on_devices
@pytest.mark.ranks
def test_fsdp1_trains_next_to_frozen_parameters_of_the_same_unit_in_bf16(bench: Bench) -> None:
    document = document_of(
        short_run(bench, Case(version=1, precision="bf16"), {"model": {"freeze": ["*.mlp.*"]}})
    )
    assert document["frozen_dtypes"] == ["float32"]
    assert (document["plugin"]["fsdp_version"], document["plugin"]["cpu_offload"]) == (1, False)
    assert document["offload_params"] is False


@on_devices
@pytest.mark.ranks
@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_readback_reports_the_plugins_actual_fields(offload: bool, bench: Bench) -> None:
    document = document_of(short_run(bench, Case(offload=offload)))
    assert document["plugin"]["fsdp_version"] == 2
    assert document["plugin"]["cpu_offload"] is offload
    assert document["offload_params"] is offload


def test_expected_state_does_not_use_settings_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong table in the resolver must not be able to cancel itself in the read-back."""
    original = Recipe.reshards_after_forward
    monkeypatch.setattr(Recipe, "reshards_after_forward", property(lambda recipe: not original.fget(recipe)))  # type: ignore[attr-defined]
    assert resolving is not None
    assert meaning_of(expected(recipe_of(ranks=4))) == MEANING["FULL_SHARD"]


@pytest.mark.parametrize(
    ("mixed", "stored", "compute"),
    [
        ("no", "fp32", "float32"),
        ("bf16", "fp32", "bfloat16"),
        ("fp16", "fp32", "float16"),
        ("no", "bf16", "bfloat16"),
    ],
)
def test_dtypes_follow_from_precision_and_storage(mixed: str, stored: str, compute: str) -> None:
    model = {"from_config": {"model_type": "llama"}, "dtype": stored}
    document = expected(recipe_of(model, precision={"mixed_precision": mixed}))
    storage = {"fp32": "float32", "bf16": "bfloat16"}[stored]
    found = [document[f"{what}_dtype"] for what in ("parameter", "compute", "reduce", "optimizer_state")]
    assert found == [storage, compute, "float32", storage]


@dataclass(frozen=True)
class Sabotaged:
    """A run in which several settings are wrong, each of which changes other fields of the read-back."""

    messages: dict[str, str]
    """What is sabotaged, and what the message must name."""
    case: Case = field(default_factory=Case)
    keys: dict[str, Any] = field(default_factory=dict)
    """Further keys of the recipe."""


CASES = {
    "units and dtypes": Sabotaged(
        {
            "units are freed after every micro-batch": "reshard_after_backward: the recipe means False, "
            "the run has True",
            "units are not resharded": "reshard_after_forward: the recipe means True, the run has False",
            "sums in bf16": "reduce_dtype: the recipe means 'float32', the run has 'bfloat16'",
            "computes in bf16": "compute_dtype: the recipe means 'float32', the run has 'bfloat16'",
            "offloaded": "offload_params: the recipe means False, the run has True",
            "no recomputation": "activation_checkpointing: the recipe means 'full', the run has 'none'",
            "no prefetch": "forward_prefetch",
            "another attention kernel": "attention",
            "stored in bf16": "parameter_dtype: the recipe means 'float32', the run has 'bfloat16'",
            "nothing is frozen": "frozen",
        },
        Case(
            ranks=1,
            recomputation="full",
            fsdp=(("forward_prefetch", 2), ("backward_prefetch", 2), ("reshard_after_backward", False)),
        ),
        {"model": {"attn_implementation": "eager", "freeze": ["model.embed_tokens.*"]}},
    ),
    "output and layers": Sabotaged(
        {
            "output in bf16": "output_dtype",
            "not offloaded": "offload_params: the recipe means True, the run has False",
            "one layer is no unit": "model.layers.0",
            "every layer recomputed instead of every second": "recomputed_layers",
        },
        Case(
            ranks=1,
            precision="bf16",
            offload=True,
            recomputation="full",
            fsdp=(("activation_checkpointing_every", 2),),
        ),
    ),
    "one rank, no units": Sabotaged(
        {
            "no units": "reshard_after_forward: the recipe means True, the run has None",
            "sums in bf16 on one rank": "reduce_dtype differs between ranks: rank 0 has 'float32', rank 1 "
            "has 'bfloat16'",
            "another order of the rows on one rank": "data_order_digest differs between ranks",
        }
    ),
    "mesh": Sabotaged(
        {"one mesh instead of two copies": "placements"}, Case(ranks=4, strategy="HYBRID_SHARD")
    ),
    "wrapper": Sabotaged(
        {"plain DDP": "wrapper: the recipe means 'fsdp2', the run has 'ddp'"},
        Case(fsdp=(("cpu_ram_efficient_loading", False),)),
    ),
    "optimizer": Sabotaged(
        {
            "optimizer state in bf16": "optimizer_state_dtype: the recipe means 'float32', the run has "
            "'bfloat16'"
        },
        Case(ranks=1),
    ),
}


@on_devices
@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_run_with_wrong_live_state_is_stopped(name: str, bench: Bench) -> None:
    sabotaged = CASES[name]
    run = new_run(bench, sabotaged.case, sabotaged.keys)
    worker = functools.partial(run_sabotaged, str(run.path), list(sabotaged.messages))
    outcomes = bench.on_ranks.run(sabotaged.case.ranks, worker)
    assert {outcome["exit_reason"] for outcome in outcomes} == {"failed"}
    document = json.loads(run.readback_json.read_text())
    found = [*document["differences"], *(outcome["problem"]["message"] for outcome in outcomes)]
    assert {
        what: message for what, message in sabotaged.messages.items() if message not in " ".join(found)
    } == {}
    steps = 1 if name == "optimizer" else 0
    assert all(outcome["step"] <= steps for outcome in outcomes)
    assert not list(run.path.glob("checkpoint-*"))


def test_every_sabotage_is_tested() -> None:
    assert {what for case in CASES.values() for what in case.messages} == SABOTAGE.keys()


@pytest.mark.parametrize(
    ("wanted", "live", "is_right"),
    [
        ("eager", ["eager"], True),
        ("eager", ["grouped_mm"], False),
        ("auto", ["grouped_mm"], True),
        ("auto", ["deepgemm"], False),
        ("auto", [], False),
    ],
)
def test_kernel_of_experts_is_that_of_the_recipe_or_of_the_choice(
    wanted: str, live: list[str], is_right: bool
) -> None:
    recipe = recipe_of({"from_config": {"model_type": "mixtral"}}, kernels={"experts": wanted})
    chosen = {"kernels.experts": ChosenKernel(value="grouped_mm" if wanted == "auto" else wanted, reason="")}
    found = experts_differences(recipe, LiveState(experts=live, kernels=chosen))
    assert bool(found) is not is_right
    assert experts_differences(recipe_of(), LiveState()) == [], "a dense model has none"


@pytest.mark.slow
@pytest.mark.ranks
def test_readback_has_the_kernel_that_experts_run(bench: Bench) -> None:
    document = document_of(short_run(bench, Case(architecture="mixtral"), {"kernels": {"experts": "eager"}}))
    assert (document["experts"], document["kernels"]["kernels.experts"]["value"]) == (["eager"], "eager")


EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


@pytest.mark.parametrize(
    ("shape", "sections", "dim"),
    [
        ((3, 8, 5), {}, 1),
        ((3, 8, 5), {"training": {"optim_args": "state_dtype=bf16"}}, 1),
        ((3, 8, 5), {"training": {"optim": "adamw_torch_8bit"}}, 0),
        ((3, 8, 5), {"fsdp": {"reshard_after_forward": 2}}, 0),
        ((4, 8, 5), {}, 0),
        ((3, 7, 5), {}, 0),
        ((3, 8), {}, 0),
    ],
    ids=[
        "3 experts",
        "state in bf16",
        "state in blocks",
        "resharded to fewer",
        "4 experts",
        "odd rows",
        "no stack",
    ],
)
def test_stack_of_experts_is_sharded_inside_if_only_that_divides(
    shape: tuple[int, ...], sections: dict[str, Any], dim: int
) -> None:
    assert shard_dim(recipe_of(ranks=4, **sections), torch.Size(shape), 2) == dim


slow = pytest.mark.slow


@on_devices
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "is_inside"),
    [
        (Case("mixtral"), True),
        pytest.param(
            Case("mixtral", ranks=4, training=(("optim_args", "state_dtype=bf16"),)), True, marks=slow
        ),
        pytest.param(Case("mixtral", strategy="HYBRID_SHARD", ranks=4), True, marks=slow),
        pytest.param(Case("mixtral", training=(("optim", "adamw_torch_8bit"),)), False, marks=slow),
        pytest.param(Case("mixtral", ranks=4, fsdp=(("reshard_after_forward", 2),)), False, marks=slow),
        pytest.param(Case("mixtral", strategy="NO_SHARD"), False, marks=slow),
        (Case("llama"), False),
    ],
    ids=lambda value: str(value),
)
def test_experts_that_ranks_do_not_divide_are_sharded_inside(
    case: Case, is_inside: bool, bench: Bench
) -> None:
    """Three experts on two and four ranks: each rank has the same number of rows of every expert."""
    document = document_of(short_run(bench, case))
    found = document.get("sharded_inside", [])
    assert len(found) == (6 if is_inside else 0)
    assert all(name.endswith(EXPERTS) for name in found)
    assert document["placements"] == MEANING[case.strategy][2], "of all other parameters"
