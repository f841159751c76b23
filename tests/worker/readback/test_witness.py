"""Runs with wrong ranks, weights or optimizer state stop within the first update, naming parameter and
ranks."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fsdp_tune.core.topology import Topology
from fsdp_tune.run.directory import RunDir
from fsdp_tune.worker.readback.checksums import checksums
from fsdp_tune.worker.readback.rank_facts import (
    RankFacts,
    copy_differences,
    generator_differences,
    row_differences,
)
from tests.conftest import REPOSITORY
from tests.cuda.devices import on_devices
from tests.parity import runs
from tests.parity.bench import Bench
from tests.parity.cases import Case
from tests.worker.short_runs import STEPS, new_run, short_run


def facts(**changes: Any) -> RankFacts:
    return RankFacts(**{"generators": {"CPU": "a", "cuda": "c"}} | changes)


def test_generators_are_compared_on_host_and_device() -> None:
    other = facts(generators={"CPU": "b", "cuda": "d"})
    assert generator_differences([facts(), other]) == []
    assert generator_differences([facts()]) == []
    assert generator_differences([facts(), other, facts(generators={"CPU": "e", "cuda": "d"})]) == [
        "the cuda generators of ranks 1 and 2 are in the same state"
    ]
    assert generator_differences([facts(weights_seed=1), replace(other, weights_seed=2)]) == [
        "initial weights were drawn from different seeds: 1, 2"
    ]
    assert generator_differences([facts(weights_seed=1), other]) == [], "rank 0 alone draws"


def test_ranks_read_each_row_of_global_batch_once() -> None:
    def found(*rows: list[int]) -> list[str]:
        return row_differences([facts(rows=each) for each in rows], [4, 7, 2, 9], Topology(shard=2))

    assert found([9, 2], [7, 4]) == found([4, 7, 2, 9], []) == []
    assert found([9, 2], [2, 4]) == ["row 2 is read 2 times, by ranks 0 and 1"]
    assert found([9, 2], [7, 5]) == ["row 5 of rank 1 is not in the global batch"]
    assert found([9, 2], [4]) == ["row 7 of the global batch is read by no rank"]


def test_ranks_of_sequence_group_read_the_same_rows() -> None:
    def found(*rows: list[int]) -> list[str]:
        return row_differences([facts(rows=each) for each in rows], [4, 7], Topology(shard=2, sequence=2))

    assert found([7], [7], [4], [4]) == []
    assert found([7], [4], [4], [7]) == ["rank 1 reads other rows than rank 0, and they share their rows"]
    assert found([7], [7], [7], [7]) == ["row 7 is read 2 times, by ranks 0 and 2"]


def test_replicas_are_compared_among_their_ranks() -> None:
    sums = [{"all": {"b": 1}, f"shard {rank % 2}": {"w": rank % 2, "v": 5}} for rank in range(4)]
    assert copy_differences(sums) == []
    sums[3]["shard 1"]["w"] = 7
    sums[2]["all"]["b"] = 0
    assert copy_differences(sums) == [
        "`b` of rank 2 differs from that of rank 0, which must be equal",
        "`w` of rank 3 differs from that of rank 1, which must be equal",
    ]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]
)
def test_checksum_detects_one_changed_value(dtype: torch.dtype) -> None:
    values = torch.zeros(1000).to(dtype)
    [before] = checksums({"x": values, "empty": torch.zeros(0, 3)}).values()
    values[817] = True if dtype == torch.bool else torch.tensor(2.0).to(dtype)
    assert checksums({"x": values}) != {"x": before}


@pytest.mark.parametrize("count", [64, 1021, 4096])
def test_checksum_detects_equal_changes(count: int) -> None:
    """The weights of a norm, which weight decay shrinks alike."""
    assert checksums({"x": torch.ones(count)}) != checksums({"x": torch.full((count,), 0.9)})
    assert checksums({"x": torch.zeros(count // 64, 64)}) != checksums(
        {"x": torch.full((count // 64, 64), 0.5)}
    )


def test_checksum_detects_reordered_pieces() -> None:
    rows = torch.arange(4096.0).view(4, 1024)
    assert checksums({"x": rows}) != checksums({"x": rows[[1, 0, 2, 3]]})


def same_dropout_streams() -> AbstractContextManager[Any]:
    return patch("fsdp_tune.worker.prepared_trainer.seed_for_rank", lambda seed, step: seed)


def another_seed_for_weights() -> AbstractContextManager[Any]:
    import torch.distributed as dist

    from fsdp_tune.model.loading import assemble as load

    original = load.build_full

    def build_full(*arguments: Any, **options: Any) -> Any:
        model = original(*arguments, **options)
        torch.manual_seed(dist.get_rank())
        return model

    return patch.object(load, "build_full", build_full)


def stale_parameter_on_one_rank() -> AbstractContextManager[Any]:
    """The optimizer holds an older tensor of one parameter."""
    import torch.distributed as dist

    from fsdp_tune.worker import prepared_trainer

    original = prepared_trainer.build_optimizer

    def build_optimizer(*arguments: Any) -> Any:
        optimizer = original(*arguments)
        if dist.get_rank() == 1:
            held = optimizer.param_groups[0]["params"]
            held[1] = torch.nn.Parameter(held[1].detach().clone())
        return optimizer

    return patch.object(prepared_trainer, "build_optimizer", build_optimizer)


def _after_step(change: Any) -> AbstractContextManager[Any]:
    """Call `change(parameter, its values before)` on the last rank after each optimizer step."""
    import torch.distributed as dist

    from fsdp_tune.model.optim.adamw import AdamW

    original = AdamW.step

    def step(self: Any, *arguments: Any, **options: Any) -> Any:
        held = self.param_groups[0]["params"][1]
        before = held.detach().clone()
        value = original(self, *arguments, **options)
        if dist.get_rank() == dist.get_world_size() - 1:
            change(held, before)
        return value

    return patch.object(AdamW, "step", step)


@torch.no_grad()
def _put_back(parameter: Any, before: Any) -> None:
    parameter.copy_(before)


@torch.no_grad()
def _move(parameter: Any, before: Any) -> None:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    local.view(-1)[3] += 1e-6


def parameter_not_updated_on_one_rank() -> AbstractContextManager[Any]:
    return _after_step(_put_back)


def replicas_that_diverge() -> AbstractContextManager[Any]:
    return _after_step(_move)


def frozen_parameter_that_moves() -> AbstractContextManager[Any]:
    from fsdp_tune.worker.trainer import FsdpTrainer

    original = FsdpTrainer._clip_grad_norm

    def clip(self: Any, model: Any) -> Any:
        with torch.no_grad():
            frozen = next(parameter for parameter in model.parameters() if not parameter.requires_grad)
            frozen.mul_(1.001)
        return original(self, model)

    return patch.object(FsdpTrainer, "_clip_grad_norm", clip)


def rows_of_another_rank() -> AbstractContextManager[Any]:
    from fsdp_tune.worker.rows import batches

    original = batches.rank_micro_batches

    def cut(rows: Any, *, dp_rank: int, **sizes: Any) -> Any:
        return original(rows, dp_rank=0, **sizes)

    return patch.object(batches, "rank_micro_batches", cut)


def gathered_units_at_step_begin() -> AbstractContextManager[Any]:
    from fsdp_tune.worker.trainer import FsdpTrainer

    original = FsdpTrainer.get_batch_samples

    def get_batch_samples(self: Any, *arguments: Any) -> Any:
        self.wrapped.get_submodule("model.layers.0").unshard()
        return original(self, *arguments)

    return patch.object(FsdpTrainer, "get_batch_samples", get_batch_samples)


def mesh_groups_with_torchs_limit() -> AbstractContextManager[Any]:
    return patch("fsdp_tune.worker.setup.share_time_limit", lambda groups: None)


def gradients_added_in_bf16() -> AbstractContextManager[Any]:
    return patch("fsdp_tune.model.optim.optimizer.sums_need_fp32", lambda recipe: False)


def rotary_kernel_that_overwrites_its_inputs() -> AbstractContextManager[Any]:
    """Unseen by autograd, as Liger's does."""
    from transformers.models.llama import modeling_llama

    original = modeling_llama.apply_rotary_pos_emb

    class Rotary(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
        ) -> Any:
            for states, rotated in zip((query, key), original(query, key, cos, sin), strict=True):
                states.data.copy_(rotated)
            ctx.save_for_backward(cos, sin)
            return query, key

        @staticmethod
        def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
            cos, sin = ctx.saved_tensors
            return *original(*upstream, cos, -sin), None, None

    def rotate(*states: torch.Tensor, **_: Any) -> Any:
        return Rotary.apply(*states)

    return patch.object(modeling_llama, "apply_rotary_pos_emb", rotate)


def other_dropout_masks_when_recomputing() -> AbstractContextManager[Any]:
    from fsdp_tune.model.shard import recompute

    original = recompute.checkpoint

    def checkpoint(*arguments: Any, **options: Any) -> Any:
        return original(*arguments, **options | {"preserve_rng_state": False})

    return patch.object(recompute, "checkpoint", checkpoint)


FIRST_UPDATE = 2
"""The learning rate of step 1 is 0: it warms up."""
HYBRID = Case(ranks=4, strategy="HYBRID_SHARD")


@dataclass(frozen=True)
class Planted:
    bugs: tuple[Callable[[], AbstractContextManager[Any]], ...]
    messages: tuple[str, ...]
    """What the read-back must name."""
    step: int = 1
    """Of the message; 0 where the run stops before it trains."""
    case: Case = field(default_factory=Case)
    keys: dict[str, Any] = field(default_factory=dict)
    """Further keys of the recipe."""
    is_fast: bool = False


PLANTS = {
    "streams and optimizer": Planted(
        (same_dropout_streams, stale_parameter_on_one_rank),
        (
            "the CPU generators of ranks 0 and 1 are in the same state",
            "rank 1: the optimizer does not hold `model.layers.0.self_attn.q_proj.weight`",
        ),
        is_fast=True,
    ),
    "overwritten product": Planted(
        (rotary_kernel_that_overwrites_its_inputs,),
        ("rank 0: `model.layers.0`: `mm` is ",),
        case=Case(recomputation="selective"),
        is_fast=True,
    ),
    "another seed for weights": Planted(
        (another_seed_for_weights,),
        ("initial weights were drawn from different seeds: 0, 1",),
        case=Case(fsdp=(("cpu_ram_efficient_loading", False),)),
    ),
    "rows of another rank": Planted((rows_of_another_rank,), ("times, by ranks 0 and 1",)),
    "gathered units": Planted((gathered_units_at_step_begin,), ("ranks 0 and 1: `model.layers.0` gathered",)),
    "not updated": Planted(
        (parameter_not_updated_on_one_rank,),
        (
            "rank 1: `model.layers.0.self_attn.q_proj.weight` has a gradient, and the optimizer did "
            "not change it",
            "`model.layers.0.self_attn.q_proj.weight` of rank 1 differs from that of rank 0, which "
            "must be equal",
        ),
        step=FIRST_UPDATE,
        case=Case(strategy="NO_SHARD"),
        is_fast=True,
    ),
    "frozen parameter": Planted(
        (frozen_parameter_that_moves,),
        ("`model.embed_tokens.weight` is frozen, and changed",),
        step=FIRST_UPDATE,
        keys={"model": {"freeze": ["model.embed_tokens.*"]}},
    ),
    "diverging replicas, DDP": Planted(
        (replicas_that_diverge,),
        (
            "`model.layers.0.self_attn.q_proj.weight` of rank 1 differs from that of rank 0, which "
            "must be equal",
        ),
        step=FIRST_UPDATE,
        case=Case(strategy="NO_SHARD"),
    ),
    "diverging replicas, HSDP": Planted(
        (replicas_that_diverge,),
        (
            "`model.layers.0.self_attn.q_proj.weight` of rank 3 differs from that of rank 1, which "
            "must be equal",
        ),
        step=FIRST_UPDATE,
        case=HYBRID,
    ),
    "gradients added in bf16": Planted(
        (gradients_added_in_bf16,),
        ("gradients of micro-batches were added in torch.bfloat16",),
        step=FIRST_UPDATE,
        case=Case(stored="bf16", accumulation=4),
    ),
    "other dropout masks": Planted(
        (other_dropout_masks_when_recomputing,),
        ("rank 0: `transformer.h.0`: `",),
        case=Case("gpt2-dropout", recomputation="full"),
        is_fast=True,
    ),
    "time limits of mesh groups": Planted(
        (mesh_groups_with_torchs_limit,),
        ("process groups have different time limits: 120 s, 1800 s",),
        step=0,
        case=HYBRID,
        is_fast=True,
    ),
}


def run_planted(path: str, name: str) -> dict[str, Any]:
    with ExitStack() as stack:
        for bug in PLANTS[name].bugs:
            stack.enter_context(bug())
        return runs.run_worker(path)


@on_devices
@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if one.is_fast else pytest.mark.slow) for name, one in PLANTS.items()],
)
def test_planted_bug_stops_the_run(name: str, bench: Bench) -> None:
    planted = PLANTS[name]
    run = new_run(bench, planted.case, planted.keys)
    outcomes = bench.on_ranks.run(planted.case.ranks, functools.partial(run_planted, str(run.path)), name)
    assert {outcome["exit_reason"] for outcome in outcomes} == {"failed"}
    problem = outcomes[0]["problem"]
    assert any(message in problem["message"] for message in planted.messages)
    document = json.loads(run.readback_json.read_text())
    if planted.step:
        assert problem["code"] == "invariant-broken"
        assert problem["message"].startswith(f"step {planted.step}: ")
        found = document["witness"]["differences"]
        assert [
            message for message in planted.messages if not any(message in sentence for sentence in found)
        ] == []


def resumed(bench: Bench, donor: Case) -> RunDir:
    """One step on two ranks after the checkpoint of a short run."""
    run = new_run(bench, changes={"training": {"max_steps": STEPS + 1}})
    runs.resume_from(run, short_run(bench, donor), STEPS)
    runs.train(bench.on_ranks, run, 2)
    return run


@on_devices
@pytest.mark.ranks
@pytest.mark.parametrize(
    "donor",
    [None, pytest.param(Case(), marks=pytest.mark.slow), HYBRID],
    ids=["fresh", "resumed", "resumed from other ranks"],
)
def test_generators_of_ranks_differ_on_a_fresh_start_and_on_resume(donor: Case | None, bench: Bench) -> None:
    run = short_run(bench) if donor is None else resumed(bench, donor)
    generators = json.loads(run.readback_json.read_text())["witness"]["generators"]
    assert [set(rank) for rank in generators] == [{"CPU"} if bench.device == "cpu" else {"CPU", "cuda"}] * 2
    assert all(one != other for one, other in zip(*(rank.values() for rank in generators), strict=True))


@on_devices
@pytest.mark.ranks
def test_first_update_is_compared_once_after_warmup(bench: Bench) -> None:
    assert [line["step"] for line in runs.lines(short_run(bench)) if line.get("event") == "witnessed"] == [
        FIRST_UPDATE
    ]


@pytest.mark.slow
def test_witness_costs_less_than_half_a_percent_of_the_demo(tmp_path: Path) -> None:
    output = tmp_path / "run"
    changes = (
        "training.max_steps=100",
        "training.eval_strategy=no",
        f"output_dir={output}",
        "merge.at_end=false",
    )
    command = [
        sys.executable,
        "-m",
        "fsdp_tune",
        "train",
        "--config",
        "gpt2_smoke",
        *(word for each in changes for word in ("--set", each)),
    ]
    subprocess.run(command, check=True, cwd=REPOSITORY, capture_output=True, timeout=280)
    [cost] = [line for line in runs.lines(RunDir(output)) if line.get("event") == "witness_cost"]
    assert cost["cpu_seconds"] < 0.005 * cost["training_cpu_seconds"]


@on_devices
@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "meshes"), [("FULL_SHARD", 0), ("HYBRID_SHARD", 2)])
def test_every_process_group_has_the_same_time_limit(strategy: str, meshes: int, bench: Bench) -> None:
    ranks = 4 if meshes else 2
    document = json.loads(short_run(bench, Case(strategy=strategy, ranks=ranks)).readback_json.read_text())
    assert len(document["collective_limits_seconds"]) == 1
    assert document["process_groups"] >= 1 + meshes
