"""The breakdown of a profiled step has no gap or overlap, on the host and on a device."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.command import ProfiledSteps, parse_profile
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.launch_files import LaunchRecord
from fsdp_tune.worker.observe.trace_breakdown import Share, breakdown, difference, intersection, length, union
from tests.cuda.devices import on_devices
from tests.parity import runs
from tests.parity.bench import Bench
from tests.parity.cases import Case


def event(category: str, name: str, begin: float, end: float, thread: int = 1) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": begin,
        "dur": end - begin,
        "tid": thread,
        "pid": 7,
    }


def seconds(share: Share) -> list[float]:
    return [
        round(value * 1e6)
        for value in (
            share.total,
            share.compute,
            share.all_gather,
            share.reduce_scatter,
            share.all_reduce,
            share.idle,
        )
    ]


def test_collective_time_counts_only_if_not_overlapped() -> None:
    """Streams 7 (compute) and 20 (NCCL); the backward's kernels lie under no annotation of ours."""
    trace = [
        event("gpu_user_annotation", "fsdp-tune::forward", 0, 100, 7),
        event("kernel", "ncclDevKernel_AllGather_RING_LL", 0, 30, 20),
        event("kernel", "ampere_gemm", 20, 60, 7),
        event("kernel", "ncclDevKernel_AllGather_RING_LL", 40, 80, 20),
        event("gpu_memcpy", "Memcpy DtoD", 80, 90, 7),
        event("kernel", "flash_bwd", 110, 160, 7),
        event("kernel", "ncclDevKernel_ReduceScatter_Sum_f32", 150, 190, 20),
        event("gpu_user_annotation", "fsdp-tune::optimizer", 200, 230, 7),
        event("kernel", "fused_adamw", 205, 230, 7),
        event("cpu_op", "aten::mm", 0, 500, 1),
        event("user_annotation", "fsdp-tune::forward", 0, 5, 1),
    ]
    found = breakdown(trace)
    assert seconds(found["forward"]) == [100, 50, 40, 0, 0, 10]
    assert seconds(found["backward"]) == [100, 50, 0, 30, 0, 20]
    assert seconds(found["optimizer"]) == [30, 25, 0, 0, 0, 5]
    assert seconds(found["rest"]) == [0, 0, 0, 0, 0, 0]


def test_host_waits_exclude_work_inside_them() -> None:
    trace = [
        event("user_annotation", "fsdp-tune::step", 0, 200),
        event("user_annotation", "fsdp-tune::forward", 0, 80),
        event("user_annotation", "FSDP::all_gather (layers.0)", 0, 30),
        event("cpu_op", "fsdp::all_gather_copy_in", 0, 5),
        event("user_annotation", "FSDP::all_gather_copy_out (layers.0)", 30, 35),
        event("cpu_op", "aten::mm", 40, 70),
        event("user_annotation", "gloo:all_gather", 2, 90, thread=2),
        event("user_annotation", "fsdp-tune::backward", 80, 150),
        event("cpu_op", "MmBackward0", 80, 140),
        event("user_annotation", "FSDP::post_backward_reduce (layers.0)", 100, 120),
        event("cpu_op", "c10d::allreduce_", 155, 165),
        event("user_annotation", "fsdp-tune::optimizer", 170, 190),
        event("cpu_op", "aten::_fused_adamw_", 170, 185),
    ]
    found = breakdown(trace)
    assert seconds(found["forward"]) == [80, 30, 30, 0, 0, 20]
    assert seconds(found["backward"]) == [70, 40, 0, 20, 0, 10]
    assert seconds(found["optimizer"]) == [20, 15, 0, 0, 0, 5]
    assert seconds(found["rest"]) == [30, 0, 0, 0, 10, 20]


def test_exchange_of_tokens_is_a_collective_on_the_host_and_on_a_device() -> None:
    host = [
        event("user_annotation", "fsdp-tune::forward", 0, 80),
        event("cpu_op", "c10d::alltoall_base_", 10, 30),
        event("cpu_op", "aten::mm", 40, 70),
    ]
    assert seconds(breakdown(host)["forward"]) == [80, 30, 0, 0, 20, 30]
    device = [
        event("gpu_user_annotation", "fsdp-tune::forward", 0, 80, 7),
        event("kernel", "ncclDevKernel_SendRecv", 10, 30, 20),
        event("kernel", "ampere_gemm", 40, 70, 7),
    ]
    assert seconds(breakdown(device)["forward"]) == [80, 30, 0, 0, 20, 30]


def test_interval_operations_follow_set_laws() -> None:
    luck = random.Random(0)
    for _ in range(300):
        one, other = (
            union((at, at + luck.randint(1, 9)) for at in luck.choices(range(60), k=luck.randint(0, 8)))
            for _ in range(2)
        )
        points = [
            {at for begin, end in intervals for at in range(int(begin), int(end))}
            for intervals in (one, other)
        ]
        for made, wanted in (
            (intersection(one, other), points[0] & points[1]),
            (difference(one, other), points[0] - points[1]),
            (union([*one, *other]), points[0] | points[1]),
        ):
            assert {at for begin, end in made for at in range(int(begin), int(end))} == wanted
            assert length(made) == len(wanted)


def run_profiled(path: str) -> dict[str, Any]:
    run = RunDir(Path(path))
    run.launch_json.write_text(json.dumps({"profile": [3, 4]}))
    return runs.run_worker(path)


@on_devices
@pytest.mark.ranks
@pytest.mark.slow
def test_profile_records_requested_steps_without_changing_numbers(bench: Bench) -> None:
    run = bench.fresh_run(Case(accumulation=4), run_profiled)
    folder = run.path / "profile" / "steps-3-4"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"rank-000{rank}.{kind}.json{packed}"
        for rank in (0, 1)
        for kind, packed in (("breakdown", ""), ("trace", ".gz"))
    ]
    [told] = [line for line in runs.lines(run) if line.get("event") == "profiled"]
    assert (told["step"], told["steps"]) == (4, 2)
    parts = told["seconds"]
    assert parts["forward"]["all_gather"] > 0
    assert parts["backward"]["reduce_scatter"] > 0
    assert parts["optimizer"]["total"] > 0
    for share in parts.values():
        assert share["total"] == pytest.approx(sum(value for name, value in share.items() if name != "total"))
    plain = bench.run(Case(accumulation=4))
    assert [line["loss"] for line in runs.lines(run) if "loss" in line] == [
        line["loss"] for line in runs.lines(plain) if "loss" in line
    ]


def test_profile_steps_round_trip(tmp_path: Path) -> None:
    assert parse_profile("steps=10:13") == ProfiledSteps(10, 13)
    assert parse_profile("steps=7") == ProfiledSteps(7, 7)
    run = RunDir(tmp_path)
    assert LaunchRecord.read(run.launch_json) is None
    run.launch_json.write_text('{"profile": null}')
    assert LaunchRecord.read(run.launch_json) == LaunchRecord()
    run.launch_json.write_text('{"profile": [10, 13]}')
    assert LaunchRecord.read(run.launch_json) == LaunchRecord(profile=ProfiledSteps(10, 13))
