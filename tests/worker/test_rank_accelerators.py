"""Code that only runs with an accelerator, tested with stand-ins that are late, absent or wrong."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_tune.core.devices import Machine
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.units import GIB, MIB
from fsdp_tune.model.shard.process_groups import destroy_group, make_mesh, untimed_group
from fsdp_tune.model.shard.wrap import offload_policy
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.rank_files import Collective
from fsdp_tune.run.records import LiveState
from fsdp_tune.worker import step_checks
from fsdp_tune.worker.checkpoint.state import rng_state, set_rng_state
from fsdp_tune.worker.observe import flight_recorder
from fsdp_tune.worker.observe.step_shares import StepShares, Stopwatch
from fsdp_tune.worker.rank import (
    Rank,
    flight_recorder_variables,
    share_time_limit,
    start_process_group,
    time_limits_seconds,
)
from fsdp_tune.worker.readback.report import excessive_growth
from fsdp_tune.worker.step_checks import AsyncScalar
from fsdp_tune.worker.step_observer import LoggedStep
from tests.model.families import FAMILIES
from tests.ranks import Ranks
from tests.worker.accelerator import BACKENDS, devices, late_cuda
from tests.worker.test_trainer_gradients import Bench

CUDA = torch.device("cuda", 0)


def recipe_on(device: str, ranks: int = 1, **fsdp: Any) -> Recipe:
    document = {
        "model": {"from_config": FAMILIES["llama"], "tokenizer": "builtin:arithmetic"},
        "data": {"train": [{"path": "builtin:arithmetic"}]},
        "precision": {"mixed_precision": "no"},
        "fsdp": fsdp,
        "launch": {"device": device, "num_processes": ranks, "hang_timeout": "20m"},
    }
    return resolve(Recipe.model_validate(document), Machine(device, ranks, 2, None), cwd=Path("/")).recipe


# Process groups


def start(device_type: str, folder: str, rank: Rank, recipe: Recipe) -> dict[str, Any]:
    """Start a rank as `worker.main` does, up to the groups that loading and saving use; returns what came of
    it."""
    make = dist.init_process_group

    def meet_at_file(backend: str, **options: Any) -> None:
        make(backend, f"file://{folder}", rank=rank.index, world_size=rank.world_size, **options)

    with (
        devices(device_type, rank.world_size) as chosen,
        mock.patch.object(dist, "init_process_group", meet_at_file),
    ):
        assert start_process_group(recipe, rank) == device_type
        try:
            world = dist.group.WORLD
            bound = torch.device(device_type, rank.local_index)
            found: dict[str, Any] = {
                "device_set": chosen,
                "bound": str(world.bound_device_id),
                "default": str(dist.get_backend_config()),
            }
            found["connected_to"] = str(world._get_backend(bound).connected_to)
            waiting = untimed_group()
            dist.all_reduce(torch.zeros(()), group=waiting)
            found["waiting"] = sorted(time_limits_seconds(waiting))
            mesh = make_mesh(recipe, device_type) if device_type == "cuda" else None
            groups = [] if mesh is None else [world, *mesh.get_all_groups()]
            found["limits_of_torch"] = sorted(
                {limit for group in groups for limit in time_limits_seconds(group)}
            )
            share_time_limit(groups)
            found["limits"] = sorted({limit for group in groups for limit in time_limits_seconds(group)})
            destroy_group(waiting)
            return found
        finally:
            dist.destroy_process_group()


def _start_on_each(folder: str) -> dict[str, dict[str, Any]]:
    dist.destroy_process_group()
    try:
        return {kind: start(kind, f"{folder}/{kind}", Rank(0, 0, 1), recipe_on(kind)) for kind in BACKENDS}
    finally:
        dist.init_process_group("gloo", f"file://{folder}/after", rank=0, world_size=1)


@pytest.mark.ranks
def test_rank_starts_on_every_kind_of_accelerator(on_ranks: Ranks, tmp_path: Path) -> None:
    """In a process of its own, since `npu` cannot be taken back."""
    [found] = on_ranks.run(1, _start_on_each, str(tmp_path))
    assert found.keys() == BACKENDS.keys()
    for kind, backend in BACKENDS.items():
        assert found[kind]["device_set"] == [0]
        assert found[kind]["bound"] == found[kind]["connected_to"] == f"{kind}:0"
        assert found[kind]["default"] == f"cpu:gloo,{kind}:{backend}"
        assert min(found[kind]["waiting"]) == 7 * 24 * 3600


def _start_on_cuda(folder: str, recipe: Recipe) -> dict[str, Any]:
    rank = Rank(dist.get_rank(), dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
    try:
        return start("cuda", folder, rank, recipe)
    finally:
        dist.init_process_group("gloo", f"file://{folder}-after", rank=rank.index, world_size=rank.world_size)


@pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="torch 2.11 copies the options of the parent, and those of the stand-in are gloo's",
)
@pytest.mark.ranks
def test_groups_of_a_hybrid_mesh_get_the_limit_of_the_run_on_cuda(on_ranks: Ranks, tmp_path: Path) -> None:
    recipe = recipe_on("cuda", 4, sharding_strategy="HYBRID_SHARD")
    for rank, found in enumerate(on_ranks.run(4, _start_on_cuda, str(tmp_path / "meeting"), recipe)):
        assert found["bound"] == f"cuda:{rank}"
        assert found["limits_of_torch"] == [1500.0, 1800.0], "torch ignores the limit of the run for a mesh"
        assert found["limits"] == [1500.0]


@pytest.mark.parametrize(
    ("count", "machines", "ways"),
    [(0, 1, []), (2, 1, ["--set launch.num_processes=2"]), (3, 2, ["--set launch.num_processes=6"])],
)
def test_rank_without_a_device_names_what_torch_sees(count: int, machines: int, ways: list[str]) -> None:
    """The number is that of all machines; without any device, none would help."""
    recipe = recipe_on("cuda", 4 * machines)
    launch = recipe.launch.model_copy(update={"num_machines": machines})
    with devices("cuda", count), pytest.raises(FsdpTuneError) as caught:
        start_process_group(recipe.model_copy(update={"launch": launch}), Rank(3, 3, 4 * machines))
    (problem,) = caught.value.problems
    assert problem.message == f"rank 3 needs cuda:3, and torch sees {count} of them"
    assert list(problem.ways_out[1:]) == ways
    assert not dist.is_initialized()


# Numbers on their way to the host


def test_async_scalar_waits_only_for_its_own_copy() -> None:
    with late_cuda() as queue:
        landing = AsyncScalar(CUDA)
        landing.send(torch.tensor(3.0))
        queue.compute(1.0)
        assert landing.read() == 3.0
        assert queue.done == queue.issued - 1
        landing.send(torch.tensor(float("inf")))
        assert landing.read() == float("inf")


def test_late_nonfinite_step_is_reported_once_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    with late_cuda():
        monkeypatch.setattr(step_checks, "AsyncScalar", lambda _: AsyncScalar(CUDA))
        bench = Bench()
        bench.step()
        before = bench.everything()
        bench.step(float("nan"))
        assert bench.events == [], "the host has not waited for the device"
        assert all(map(torch.equal, bench.everything(), before))
        bench.step()
        bench.gate.check_pending()
        assert bench.events == [("step_skipped", 2)]


# Times


def test_step_shares_use_device_time() -> None:
    with late_cuda() as queue:
        watch = Stopwatch(CUDA)
        begin = watch.now()
        queue.compute(0.25)
        end = watch.now()
        with pytest.raises(RuntimeError, match="must be completed"):
            watch.seconds(begin, end)
        queue.run_until(queue.issued)
        assert watch.seconds(begin, end) == pytest.approx(0.25)


def test_shares_of_a_step_add_no_wait_for_the_device() -> None:
    args: Any = SimpleNamespace(logging_steps=1, logging_first_step=False)
    before, after = SimpleNamespace(global_step=0, max_steps=1), SimpleNamespace(global_step=1, max_steps=1)
    control: Any = None
    with late_cuda() as queue:
        shares = StepShares(nn.Identity(), CUDA)
        shares.on_step_begin(args, before, control)  # type: ignore[arg-type]
        queue.compute(0.5)
        shares.on_pre_optimizer_step(args, after, control)  # type: ignore[arg-type]
        queue.compute(0.125)
        shares.on_optimizer_step(args, after, control)  # type: ignore[arg-type]
        assert queue.done == 0
        queue.run_until(queue.issued)  # the totals of a line are read first, which waits
        assert shares.facts(LoggedStep(1)) == {
            "last_step_seconds": 0.625,
            "optimizer_seconds": 0.125,
            "exposed_communication_seconds": None,
        }


# Generators


def test_device_dropout_continues_from_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.Generator().manual_seed(7)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: device.get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", device.set_state)
    saved = rng_state("cuda")
    continued = [torch.rand(3, generator=device), torch.rand(3)]
    device.manual_seed(8)
    set_rng_state(saved, "cuda")
    assert all(map(torch.equal, continued, [torch.rand(3, generator=device), torch.rand(3)]))


@pytest.mark.parametrize(("wrote", "reads"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_checkpoint_of_another_device_leaves_the_device_generator_alone(
    wrote: str, reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.zeros(16, dtype=torch.uint8))
    saved = rng_state(wrote)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda _: pytest.fail("the state is of another device"))
    expected = torch.rand(3)
    set_rng_state(saved, reads)
    assert torch.equal(torch.rand(3), expected)


# The flight recorder


def entry(number: int, name: str, *, retired: bool, group: str = "0", is_p2p: bool = False) -> dict[str, Any]:
    """As `FlightRecorder::getCollectiveTraceJson` writes it (torch 2.11 to 2.13)."""
    return {
        "record_id": number,
        "pg_id": int(group),
        "process_group": [group, "default_pg"],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{name}",
        "state": "completed" if retired else "scheduled",
        "is_p2p": is_p2p,
        "retired": retired,
    }


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """NCCL's recorder with its content; gloo's raises if it is read."""
    import torch._C._distributed_c10d as c10d

    content: dict[str, Any] = {"version": "2.10"}
    monkeypatch.setattr(c10d, "_dump_nccl_trace", lambda: b"pickle", raising=False)
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda: json.dumps(content).encode(), raising=False)
    monkeypatch.setattr(
        c10d,
        "_dump_fr_trace",
        lambda: pytest.fail("gloo's recorder knows the CPU's collectives alone"),
        raising=False,
    )
    return content


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    flight_recorder_variables(RunDir(tmp_path))
    return RunDir(tmp_path)


def test_unfinished_collective_of_nccl_is_named(recorder: dict[str, Any], run: RunDir) -> None:
    recorder["entries"] = [
        entry(7, "_all_gather_base", retired=True),
        entry(8, "_reduce_scatter_base", retired=False),
        entry(3, "all_reduce", retired=True, group="2"),
        entry(9, "send", retired=False, is_p2p=True),
    ]
    found = flight_recorder.dump(run, 5, "cuda")
    assert found == Collective("nccl:_reduce_scatter_base", 8, "0", ended=False, entered={"0": 8, "2": 3})
    assert (run.flight_recorder / "rank_5").read_bytes() == b"pickle"


def test_collective_is_named_where_the_recorder_cannot_be_written(
    recorder: dict[str, Any], run: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    recorder["entries"] = [entry(8, "all_reduce", retired=False)]
    run.flight_recorder.rmdir()
    found = flight_recorder.dump(run, 5, "cuda")
    assert found is not None
    assert found.name == "nccl:all_reduce"
    assert "the flight recorder was not written: " in capfd.readouterr().err


def test_last_collective_of_nccl_is_named_where_all_have_ended(recorder: dict[str, Any], run: RunDir) -> None:
    recorder["entries"] = [entry(7, "_all_gather_base", retired=True), entry(8, "all_reduce", retired=True)]
    found = flight_recorder.dump(run, 0, "cuda")
    assert found is not None
    assert (found.name, found.ended) == ("nccl:all_reduce", True)


def test_empty_recorder_of_nccl_names_nothing(recorder: dict[str, Any], run: RunDir) -> None:
    assert flight_recorder.dump(run, 0, "cuda") is None


@pytest.mark.parametrize("device", ["xpu", "npu"])
def test_device_without_flight_recorder_reports_none(
    device: str, recorder: dict[str, Any], run: RunDir
) -> None:
    assert flight_recorder.dump(run, 0, device) is None


# Memory


@pytest.mark.parametrize(("device", "pins"), [("cuda", True), ("cpu", False)])
def test_offloaded_parameters_are_page_locked_on_cuda(device: str, pins: bool) -> None:
    policy = offload_policy(recipe_on(device, 2, offload_params=True), device)
    assert policy.pin_memory is pins  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("device", "growth_mib", "reported"), [("cpu", 720, True), ("cuda", 720, False), ("cuda", 1100, True)]
)
def test_growth_of_host_memory_counts_the_pages_of_cuda_and_nccl(
    device: str, growth_mib: int, reported: bool
) -> None:
    """A model of 1 GiB on four ranks: half of it is too much on CPU ranks, and what CUDA and NCCL take alone
    on GPUs."""
    recipe = recipe_on(device, 4)
    report = LiveState(model_bytes=GIB, local_bytes=GIB // 4, peak_growth_bytes=growth_mib * MIB)
    found = excessive_growth(recipe, [report] * 4)
    expected = [
        f"rank {rank} grew by {growth_mib} MiB while loading; its shard is 256 MiB of 1024 MiB"
        for rank in (1, 2, 3)
    ]
    assert found == (expected if reported else [])


@pytest.mark.parametrize(("growth_mib", "reported"), [(960, False), (1300, True)])
def test_full_embedding_in_flight_is_no_excessive_growth(growth_mib: int, reported: bool) -> None:
    """Gemma 3 270M in fp32 on two ranks: the embedding has 640 of 1,023 MiB, and each rank receives it in
    full before keeping half."""
    report = LiveState(
        model_bytes=1023 * MIB,
        largest_tensor_bytes=640 * MIB,
        local_bytes=511 * MIB,
        peak_growth_bytes=growth_mib * MIB,
    )
    assert bool(excessive_growth(recipe_on("cpu", 2), [report] * 2)) == reported
