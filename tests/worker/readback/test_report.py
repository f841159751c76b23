"""A run whose live state differs from its recipe stops before it trains and names the wrong value."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from fsdp_tune.recipe import resolve as resolving
from fsdp_tune.recipe.fsdp_arguments import expected
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.cuda.devices import on_devices
from tests.model.recipes import recipe_of
from tests.parity import runs
from tests.parity.bench import Bench
from tests.parity.cases import Case
from tests.parity.compare import deviation
from tests.worker.sabotage import SABOTAGE, run_sabotaged

# By hand, from the papers' definitions (ZeRO, arXiv:1910.02054; FSDP, arXiv:2304.11277): wrapper, mesh of four ranks,
# placements, freed after the forward.
MEANING: dict[str, tuple[str, list[int], list[str], bool | None]] = {
    "FULL_SHARD": ("fsdp2", [4], ["Shard(dim=0)"], True),
    "SHARD_GRAD_OP": ("fsdp2", [4], ["Shard(dim=0)"], False),
    "HYBRID_SHARD": ("fsdp2", [2, 2], ["Replicate()", "Shard(dim=0)"], True),
    "HYBRID_SHARD_ZERO2": ("fsdp2", [2, 2], ["Replicate()", "Shard(dim=0)"], False),
    "NO_SHARD": ("ddp", [], [], None),
}


def meaning_of(document: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(document[key] for key in ("wrapper", "mesh", "placements", "reshard_after_forward"))


@pytest.mark.parametrize("strategy", MEANING)
def test_expected_state_matches_strategy(strategy: str) -> None:
    recipe = recipe_of(ranks=4, fsdp={"sharding_strategy": strategy})
    assert meaning_of(expected(recipe)) == MEANING[strategy]


@on_devices
@pytest.mark.ranks
@pytest.mark.parametrize("strategy", MEANING)
def test_live_state_matches_strategy(strategy: str, bench: Bench) -> None:
    document = json.loads(bench.run(Case(strategy=strategy, ranks=4)).readback_json.read_text())
    assert meaning_of(document) == MEANING[strategy]
    assert document["differences"] == []
    units = [tuple(unit["modules"]) for unit in document["units"]]
    assert len(units) == len(set(units)), "norm and head are one unit, told once"


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "reshards"), [("HYBRID_SHARD", True), ("HYBRID_SHARD_ZERO2", False)])
def test_hybrid_fsdp1_has_two_replicas_and_follows_the_plain_loop(strategy: str, reshards: bool, bench: Bench) -> None:
    case = Case(version=1, strategy=strategy, ranks=4)
    run = bench.run(case)
    assert meaning_of(json.loads(run.readback_json.read_text())) == ("fsdp1", [2, 2], ["Replicate()", "Shard(dim=0)"], reshards)
    found = deviation(run, bench.reference(case.architecture))
    assert found.is_within_fp32, f"{found}; worst is {found.worst_name}"


@on_devices
@pytest.mark.ranks
def test_prefetch_is_capped_at_unit_count(bench: Bench) -> None:
    document = json.loads(bench.run(Case(fsdp=(("forward_prefetch", 9), ("backward_prefetch", 9)))).readback_json.read_text())
    units = document["prefetching_units"]
    assert (document["forward_prefetch"], document["backward_prefetch"]) == (units - 1, units - 1)


@on_devices
@pytest.mark.ranks
@pytest.mark.parametrize("frozen", [1, 2, 3])
def test_prefetch_of_the_backward_is_capped_at_units_with_a_backward(frozen: int, bench: Bench) -> None:
    """The embedding and the first layers are frozen: what is gathered ahead in the backward ends at the first trained unit."""
    changes = {"model": {"freeze": ["model.embed_tokens.*", *(f"model.layers.{layer}.*" for layer in range(frozen - 1))]}}
    case = Case(fsdp=(("backward_prefetch", 9),))
    run = bench.written_run(runs.merged(case.recipe(str(bench.model("llama"))), changes))
    runs.train(bench.on_ranks, run, case.ranks)
    document = json.loads(run.readback_json.read_text())
    assert document["differences"] == []
    assert document["prefetching_units_of_backward"] < document["prefetching_units"] or frozen == 1


@on_devices
@pytest.mark.ranks
def test_fsdp1_trains_next_to_frozen_parameters_of_the_same_unit_in_bf16(bench: Bench) -> None:
    case = Case(version=1, precision="bf16")
    changes = runs.merged(case.recipe(str(bench.model("llama"))), {"model": {"freeze": ["*.mlp.*"]}})
    run = bench.written_run(changes)
    runs.train(bench.on_ranks, run, case.ranks)
    assert json.loads(run.readback_json.read_text())["frozen_dtypes"] == ["float32"]


@on_devices
@pytest.mark.ranks
@pytest.mark.parametrize(("version", "offload"), [(2, False), (2, True), (1, False)])  # FSDP1 offloads from a GPU alone
def test_readback_reports_the_plugins_actual_fields(version: int, offload: bool, bench: Bench) -> None:
    document = json.loads(bench.run(Case(version=version, offload=offload)).readback_json.read_text())
    assert document["plugin"]["fsdp_version"] == version
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
    [("no", "fp32", "float32"), ("bf16", "fp32", "bfloat16"), ("fp16", "fp32", "float16"), ("no", "bf16", "bfloat16")],
)
def test_dtypes_follow_from_precision_and_storage(mixed: str, stored: str, compute: str) -> None:
    model = {"from_config": {"model_type": "llama"}, "dtype": stored}
    document = expected(recipe_of(model, precision={"mixed_precision": mixed}))
    storage = {"fp32": "float32", "bf16": "bfloat16"}[stored]
    found = [document[f"{what}_dtype"] for what in ("parameter", "compute", "reduce", "optimizer_state")]
    assert found == [storage, compute, "float32", storage]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # what is sabotaged → (fields of the case, further keys of the recipe, what the message must name)
    "units are not resharded": ({}, {}, "reshard_after_forward: the recipe means True, the run has False"),
    "sums in bf16": ({}, {}, "reduce_dtype: the recipe means 'float32', the run has 'bfloat16'"),
    "computes in bf16": ({}, {}, "compute_dtype: the recipe means 'float32', the run has 'bfloat16'"),
    "output in bf16": ({"precision": "bf16"}, {}, "output_dtype"),
    "sums in bf16 on one rank": ({}, {}, "reduce_dtype differs between ranks: rank 0 has 'float32', rank 1 has 'bfloat16'"),
    "not offloaded": ({"offload": True}, {}, "offload_params: the recipe means True, the run has False"),
    "offloaded": ({}, {}, "offload_params: the recipe means False, the run has True"),
    "one mesh instead of two copies": ({"ranks": 4, "strategy": "HYBRID_SHARD"}, {}, "placements"),
    "no units": ({}, {}, "reshard_after_forward: the recipe means True, the run has None"),
    "one layer is no unit": ({}, {}, "model.layers.0"),
    "no recomputation": ({"recomputation": "full"}, {}, "activation_checkpointing: the recipe means 'full', the run has 'none'"),
    "every layer recomputed instead of every second": (
        {"recomputation": "full", "fsdp": (("activation_checkpointing_every", 2),)},
        {},
        "recomputed_layers",
    ),
    "no prefetch": ({"fsdp": (("forward_prefetch", 2), ("backward_prefetch", 2))}, {}, "forward_prefetch"),
    "another attention kernel": ({}, {"model": {"attn_implementation": "eager"}}, "attention"),
    "stored in bf16": ({}, {}, "parameter_dtype: the recipe means 'float32', the run has 'bfloat16'"),
    "nothing is frozen": ({}, {"model": {"freeze": ["model.embed_tokens.*"]}}, "frozen"),
    "plain DDP": ({"fsdp": (("cpu_ram_efficient_loading", False),)}, {}, "wrapper: the recipe means 'fsdp2', the run has 'ddp'"),
    "another order of the rows on one rank": ({}, {}, "data_order_digest differs between ranks"),
    "optimizer state in bf16": ({}, {}, "optimizer_state_dtype: the recipe means 'float32', the run has 'bfloat16'"),
}


@on_devices
@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_run_with_wrong_live_state_is_stopped(name: str, bench: Bench) -> None:
    fields, keys, message = CASES[name]
    case = Case(**fields)
    run = bench.written_run(runs.merged(case.recipe(str(bench.model("llama"))), keys))
    outcomes = bench.on_ranks.run(case.ranks, functools.partial(run_sabotaged, str(run.path), name))
    assert {outcome["exit_reason"] for outcome in outcomes} == {"failed"}
    document = json.loads(run.readback_json.read_text())
    found = " ".join([*document["differences"], *(outcome["problem"]["message"] for outcome in outcomes)])
    assert message in found
    steps = 1 if name == "optimizer state in bf16" else 0
    assert all(outcome["step"] <= steps for outcome in outcomes)
    assert not list(run.path.glob("checkpoint-*"))


def test_every_sabotage_is_tested() -> None:
    assert CASES.keys() == SABOTAGE.keys()


EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


@on_devices
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "is_inside"),
    [
        (Case("mixtral", ranks=4, training=(("optim_args", "state_dtype=bf16"),)), True),
        (Case("mixtral", strategy="HYBRID_SHARD", ranks=4), True),
        (Case("mixtral", training=(("optim", "adamw_torch_8bit"),)), False),
        (Case("mixtral", ranks=4, fsdp=(("reshard_after_forward", 2),)), False),
        (Case("mixtral", strategy="NO_SHARD"), False),
        (Case("llama"), False),
    ],
    ids=lambda value: str(value),
)
def test_experts_that_ranks_do_not_divide_are_sharded_inside(case: Case, is_inside: bool, bench: Bench) -> None:
    """Three experts on two and four ranks: each rank has the same number of rows of every expert."""
    document = json.loads(bench.run(case).readback_json.read_text())
    found = document.get("sharded_inside", [])
    assert len(found) == (6 if is_inside else 0)
    assert all(name.endswith(EXPERTS) for name in found)
    assert document["placements"] == MEANING[case.strategy][2], "of all other parameters"
