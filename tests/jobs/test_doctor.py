"""The checks of `doctor` that `train` makes before its ranks start."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from fsdp_tune.cluster.health_facts import HealthCheck, State
from fsdp_tune.core.devices import GpuState
from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem
from fsdp_tune.core.units import GIB
from fsdp_tune.jobs import doctor
from fsdp_tune.jobs.inspection import Inspection
from fsdp_tune.launch.command.accelerate import LaunchPlan
from fsdp_tune.model.model_files import KernelChoice, ModelFacts
from fsdp_tune.planner.trace_format import COLLECTIVES, DTYPES, Trace
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.health_files import HealthFiles, HealthRequest, MessageSize
from tests.launch.test_accelerate import plan, resolved

IDLE = GpuState(300 << 20, 0, 1980, 0, 700.0, 700.0, ())
TWO_MACHINES = ("launch.num_machines=2", "launch.main_process_ip=10.0.0.1", "launch.num_processes=4")


def machine(tmp_path: Path, *overrides: str, machine_rank: int = 0) -> tuple[Recipe, LaunchPlan]:
    return resolved(tmp_path, *overrides), plan(tmp_path, *overrides, machine_rank=machine_rank)


def test_healthy_machine_has_no_findings_within_three_seconds(tmp_path: Path) -> None:
    began = time.monotonic()
    assert doctor.notices_of_machine(*machine(tmp_path)) == []
    assert time.monotonic() - began < 3.0


def test_name_that_resolves_to_loopback_is_a_finding_unless_the_launch_chose_an_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostbyname", lambda _: "127.0.1.1")
    recipe, launched = machine(tmp_path, *TWO_MACHINES)
    unset = {name: value for name, value in launched.env.items() if name != "GLOO_SOCKET_IFNAME"}
    (notice,) = doctor.notices_of_machine(recipe, replace(launched, env=unset))
    assert "resolves to 127.0.1.1" in notice.message
    assert notice.hint is not None
    assert "GLOO_SOCKET_IFNAME" in notice.hint
    assert (
        doctor.notices_of_machine(recipe, replace(launched, env=unset | {"GLOO_SOCKET_IFNAME": "eth0"})) == []
    )


def test_gpu_in_use_is_named_with_the_rank_that_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "gpu_states", lambda _: [IDLE, replace(IDLE, used_bytes=20 * GIB)])
    monkeypatch.setattr(doctor, "shared_memory", lambda *_: 0)
    recipe, launched = machine(tmp_path)
    recipe = recipe.model_copy(update={"launch": recipe.launch.model_copy(update={"device": "cuda"})})
    (notice,) = doctor.notices_of_machine(recipe, launched)
    assert notice.message.startswith("GPUs: the GPU of rank 1 on ")
    assert "20.00 GiB of its memory in use" in notice.message


@pytest.mark.parametrize(
    ("changes", "free_checkpoints", "words"),
    [
        (["training.save_total_limit=2"], 1.5, "3 checkpoints need"),
        (["training.save_total_limit=2"], 3.5, None),
        (["training.save_total_limit=0"], 2.5, "10 checkpoints need"),
        (["training.save_total_limit=5"], 2.5, "6 checkpoints need"),
        (["training.save_total_limit=5", "training.save_steps=60"], 2.5, None),
        (["training.save_strategy=no"], 1.5, None),
    ],
)
def test_space_is_compared_with_all_checkpoints(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: list[str],
    free_checkpoints: float,
    words: str | None,
) -> None:
    assert [
        each.message.partition("; ")[2].startswith(words or "")
        for each in space(tmp_path, monkeypatch, changes, free_checkpoints)
    ] == ([True] if words else [])


def space(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: list[str],
    free_checkpoints: float,
    *,
    is_new: bool = True,
    refuses: bool = True,
) -> list[Notice]:
    recipe = resolved(
        folder,
        *changes,
        *([] if any("save_steps" in each for each in changes) else ["training.save_steps=10"]),
    )
    one_bytes = 1000 * (4 + 8)  # fp32 and the two moments of AdamW
    usage = doctor.shutil.disk_usage(folder)._replace(free=int(free_checkpoints * one_bytes))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    return doctor.check_space(
        recipe, parameters=1000, trained_parameters=1000, is_new=is_new, steps=100, refuses=refuses
    )


def test_missing_space_is_a_notice_if_the_plan_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FsdpTuneError, match="space"):
        space(tmp_path, monkeypatch, [], 0.5)
    (notice,) = space(tmp_path, monkeypatch, [], 0.5, refuses=False)
    assert notice.code == "machine-unfit"


def test_checkpoints_of_a_resumed_run_have_their_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "complete_checkpoints", lambda _: ([1, 2], []))
    keeps_two = ["training.save_total_limit=2"]
    assert space(tmp_path, monkeypatch, keeps_two, 1.5, is_new=False) == []
    assert len(space(tmp_path, monkeypatch, keeps_two, 1.5, is_new=True)) == 1, (
        "the run that --overwrite moves aside keeps its checkpoints"
    )


def test_failure_of_a_rank_with_another_number_is_reported_before_lost_peers(tmp_path: Path) -> None:
    files, log = HealthFiles(tmp_path), tmp_path / "launcher.log"
    log.write_text("")
    for rank, problem in (
        (1, Problem("lost-rank", "another rank is gone")),
        (2, Problem("world-size-mismatch", "3 ranks", hint="do this")),
    ):
        files.problem(rank).write_text(json.dumps(problem.as_dict()))
    check = doctor._failed(range(3, 5), files, 1, log)
    assert (check.name, check.state, check.finding, check.fix) == (
        "ranks",
        "fail",
        "rank 2: 3 ranks",
        "do this",
    )


def test_packages_that_a_model_lacks_on_gpus_are_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = resolved(tmp_path)
    assert doctor._packages(recipe) == [], "they are for GPUs"
    on_gpus = recipe.model_copy(update={"launch": recipe.launch.model_copy(update={"device": "cuda"})})
    found = Inspection(
        notices=[
            Notice("positions-never-trained", ""),
            Notice("slow-kernels", "fla is not installed here", hint="pip"),
        ]
    )
    monkeypatch.setattr(doctor, "inspect_model", lambda _: found)
    assert doctor._packages(on_gpus) == [HealthCheck("packages", "warn", "fla is not installed here", "pip")]
    kernels = {
        "kernels.loss": KernelChoice("full", ""),
        "fla": KernelChoice("installed", ""),
        "conv": KernelChoice("installed", ""),
    }
    found.notices, found.model = [], ModelFacts.model_construct(kernels=kernels)
    assert doctor._packages(on_gpus) == [HealthCheck("packages", "ok", "conv and fla installed")]
    found.model = ModelFacts.model_construct(kernels={"kernels.loss": KernelChoice("full", "")})
    assert doctor._packages(on_gpus) == [], "a dense model names no package"


@pytest.mark.parametrize(("inputs", "shown"), [("ok", ["sizes"]), ("fail", [])])
def test_step_that_cannot_be_traced_is_reported_unless_the_model_is_missing(
    inputs: State, shown: list[str]
) -> None:
    assert [each.name for each in doctor._traced(None, [HealthCheck("inputs", inputs, "")])] == shown


PHASE = "open(sys.argv[1] + '/phase-0', 'w').write('connecting'); "


@pytest.mark.parametrize(
    ("program", "finding"),
    [
        (
            f"import sys, time; {PHASE} time.sleep(60)",
            "not ready after 0 s: rank 0 is connecting, rank 1 is starting",
        ),
        (
            f"import sys; {PHASE} sys.exit('no such device')",
            "the ranks ended before they had measured (rank 0 is connecting, rank 1 is starting): ",
        ),
        ("pass", "the ranks ended before they had measured (rank 0 is starting, rank 1 is starting): "),
        ("import sys; open(sys.argv[1] + '/facts.json', 'w').write('[]')", None),
    ],
)
def test_ranks_that_measure_nothing_in_time_are_a_failed_check_with_their_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, finding: str | None
) -> None:
    """What they have left in the output directory is removed in any case."""
    recipe, launched = machine(tmp_path)
    files, probe = HealthFiles(launched.run.path), tmp_path / "probe"
    files.path.mkdir()
    probe.mkdir()
    files.probe.write_text(str(probe))
    launched = replace(launched, argv=(sys.executable, "-I", "-S", "-c", program, str(files.path)))
    monkeypatch.setattr(doctor, "LIMIT_SECONDS", 0.4 if "sleep" in program else 60.0)
    monkeypatch.setattr(doctor, "POLL_SECONDS", 0.02)
    check = doctor._run_ranks(launched, recipe, HealthRequest([], None, []), files)
    assert not probe.exists()
    assert Recipe.model_validate_json(launched.run.recipe_json.read_bytes()) == recipe
    if finding is None:
        assert check is None
        return
    assert check is not None
    assert (check.name, check.state) == ("ranks", "fail")
    assert check.finding.startswith(finding)
    assert ("no such device" in check.finding) is ("no such device" in program)


@pytest.mark.parametrize(
    ("address", "state", "finding"), [("10.0.0.7", "ok", "10.0.0.7"), (None, "fail", "nothing (unknown)")]
)
def test_other_machines_connect_to_the_address_of_the_host_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str | None, state: State, finding: str
) -> None:
    def resolve(_: str) -> str:
        if address is None:
            raise OSError(2, "unknown")
        return address

    monkeypatch.setattr("socket.gethostbyname", resolve)
    recipe, launched = machine(tmp_path, *TWO_MACHINES)
    launched.env.pop("GLOO_SOCKET_IFNAME", None)
    check = doctor._host_name(recipe, launched)
    assert (check.state, finding in check.finding) == (state, True)


def test_largest_message_of_each_collective_is_measured() -> None:
    kinds, dtypes = COLLECTIVES.index, DTYPES.index
    rows = [
        (kinds("all_gather"), 10, dtypes("bf16")),
        (kinds("all_gather"), 30, dtypes("fp32")),
        (kinds("all_gather"), 20, dtypes("bf16")),
        (kinds("all_reduce"), 5, dtypes("fp32")),
    ]
    table = np.array(rows, [("kind", "i4"), ("bytes", "i8"), ("dtype", "i4")])
    trace = cast(Trace, SimpleNamespace(collectives=table, steady=lambda found: found))
    assert doctor._messages(trace) == [
        MessageSize("all_gather", 30, "fp32"),
        MessageSize("all_reduce", 5, "fp32"),
    ]
    assert doctor._messages(None) == []
