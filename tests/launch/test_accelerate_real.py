"""The supervisor with the real `accelerate launch` and torchrun agent: the behaviour that the launch relies on.

The ranks are fakes without torch, so that a case costs the launcher's own import, some two seconds.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import yaml

from fsdp_tune.launch.command.accelerate import launch_plan
from fsdp_tune.launch.supervise.supervisor import Event, Logged, Supervisor
from fsdp_tune.recipe.fsdp_arguments import accelerate_config
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.launch_files import Verdict
from tests.launch.conftest import Parts
from tests.launch.orphans import children, left_over
from tests.launch.test_accelerate import resolved

pytestmark = [pytest.mark.e2e, pytest.mark.ranks]
FINISHED = {"exit_code": 0, "exit_reason": "finished"}
SAVES_SLOWLY = [["beat", "training", 7], ["listen"], ["log", {"step": 7}], ["wait-for-signal"]]
HOSTILE_CONFIG = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "num_processes": 8,
    "mixed_precision": "fp8",
    "deepspeed_config": {"zero_stage": 3},
    "machine_rank": 0,
    "num_machines": 4,
    "main_process_ip": "10.0.0.1",
    "main_process_port": 1,
    "fsdp_config": {"fsdp_offload_params": True, "fsdp_sync_module_states": False},
}


def launch(
    tmp_path: Path, run: RunDir, repository: Path, parts: Parts, *overrides: str, send: int | None = None
) -> tuple[Verdict, list[Event]]:
    recipe = resolved(tmp_path, f"launch.num_processes={len(parts)}", *overrides)
    (run.path / "fake.json").write_text(json.dumps(parts))
    run.accelerate_yaml.write_text(yaml.safe_dump(accelerate_config(recipe)))
    inherited = {**os.environ, "PYTHONPATH": str(repository)}
    plan = launch_plan(recipe, run, worker_module="tests.launch.fake_worker", inherited=inherited)
    events: list[Event] = []
    logged = 0
    before = children()  # of other tests: multiprocessing keeps helpers of its own
    for event in Supervisor(plan, hang_timeout_seconds=60).events():
        events.append(event)
        logged += isinstance(event, Logged)
        if logged == len(parts) and send is not None:  # every rank has its handlers
            os.kill(os.getpid(), send)
            send = None
    assert isinstance(events[-1], Verdict)
    assert left_over(before) == []
    return events[-1], events


def environments(run: RunDir, world_size: int) -> list[dict[str, str]]:
    return [json.loads((run.path / f"environment-{rank}.json").read_text()) for rank in range(world_size)]


@pytest.mark.parametrize("strategy", [pytest.param("FULL_SHARD", marks=pytest.mark.slow), "NO_SHARD"])
def test_ranks_are_spawned_on_the_cpu_with_their_environment(
    tmp_path: Path, run: RunDir, repository: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = {"RANK": "3", "WORLD_SIZE": "9", "MASTER_PORT": "1", "PET_NNODES": "2", "FSDP_VERSION": "1", "ACCELERATE_USE_DEEPSPEED": "true"}
    for name, value in stale.items():
        monkeypatch.setenv(name, value)
    part = [["environment"], ["outcome", FINISHED]]
    ended, _ = launch(tmp_path, run, repository, {"0": part, "1": part}, f"fsdp.sharding_strategy={strategy}")
    assert ended.exit_code == 0
    found = environments(run, 2)
    assert [environment["RANK"] for environment in found] == ["0", "1"]
    assert {environment["WORLD_SIZE"] for environment in found} == {"2"}
    assert {environment["MASTER_ADDR"] for environment in found} == {"127.0.0.1"}
    assert {environment["OMP_NUM_THREADS"] for environment in found} == {"2"}
    assert not any("ACCELERATE_USE_DEEPSPEED" in environment for environment in found)


def test_conflicting_default_config_is_ignored(tmp_path: Path, run: RunDir, repository: Path) -> None:
    folder = Path(os.environ["HF_HOME"]) / "accelerate"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "default_config.yaml").write_text(yaml.safe_dump(HOSTILE_CONFIG))
    try:
        part = [["environment"], ["outcome", FINISHED]]
        ended, _ = launch(tmp_path, run, repository, {"0": part, "1": part})
    finally:
        (folder / "default_config.yaml").unlink()
    assert ended.exit_code == 0
    assert {environment["WORLD_SIZE"] for environment in environments(run, 2)} == {"2"}
    assert {environment["ACCELERATE_MIXED_PRECISION"] for environment in environments(run, 2)} == {"no"}
    assert {environment.get("FSDP_OFFLOAD_PARAMS", "false") for environment in environments(run, 2)} == {"false"}


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGUSR1, 143, id="USR1"),
        pytest.param(signal.SIGTERM, 143, id="TERM", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, id="INT", marks=pytest.mark.slow),
    ],
)
def test_agent_passes_signals_on_and_waits_for_the_save(tmp_path: Path, run: RunDir, repository: Path, number: int, code: int) -> None:
    ended, _ = launch(tmp_path, run, repository, {"0": SAVES_SLOWLY, "1": SAVES_SLOWLY}, send=number)
    assert (ended.exit_code, ended.problem, ended.step) == (code, None, 7)


@pytest.mark.slow
def test_torchrun_report_of_killed_rank_is_parsed(tmp_path: Path, run: RunDir, repository: Path) -> None:
    stuck = [["ignore-signals"], ["beat", "training", 3], ["sleep", 60]]
    dies = [["beat", "training", 3], ["sleep", 0.5], ["die", int(signal.SIGKILL)]]
    ended, _ = launch(tmp_path, run, repository, {"0": stuck, "1": dies})
    assert ended.exit_code == 5
    assert ended.problem is not None
    assert ended.problem.message == "rank 1 was killed by SIGKILL at step 3"


def test_import_error_of_a_rank_replaces_torchrun_report(tmp_path: Path, run: RunDir, repository: Path) -> None:
    ended, _ = launch(tmp_path, run, repository, {"0": [["sleep", 60]], "1": [["raise", "no such library"]]})
    assert ended.exit_code == 1
    assert ended.problem is not None
    assert "rank 1 ended with exit code 1" in ended.problem.message
    assert "RuntimeError: no such library" in ended.problem.message


def test_module_in_the_working_directory_does_not_shadow_a_library(
    tmp_path: Path, run: RunDir, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    ended, _ = launch(tmp_path, run, repository, {"0": [["outcome", FINISHED]]})
    assert ended.exit_code == 0
