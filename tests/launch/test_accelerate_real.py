"""The supervisor with the real `accelerate launch` and torchrun agent: the behaviour that the launch relies
on.

The ranks are fakes without torch, so that a launch costs the launcher's own import, some two seconds. One
launch shows most of it: among variables, files and a configuration that are not for it, with a signal in the
end.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from fsdp_tune.launch.command.accelerate import launch_plan
from fsdp_tune.launch.supervise.launch_events import Event, Logged
from fsdp_tune.launch.supervise.supervisor import Supervisor
from fsdp_tune.recipe.fsdp_arguments import accelerate_config
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.rank_files import Verdict
from tests.launch.fake_ranks import SAVES_ON_SIGNAL, Parts, end_of, write_parts_of_ranks
from tests.launch.recipes import resolved
from tests.session import made_once

pytestmark = [pytest.mark.e2e, pytest.mark.ranks]
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
STALE_VARIABLES = {
    "RANK": "3",
    "WORLD_SIZE": "9",
    "MASTER_PORT": "1",
    "PET_NNODES": "2",
    "FSDP_VERSION": "1",
    "ACCELERATE_USE_DEEPSPEED": "true",
}


def launch(folder: Path, repository: Path, parts: Parts, send: int | None = None) -> Verdict:
    """Launch two fake ranks, and send a signal once every rank has its handlers."""
    recipe, run = resolved(folder, "fsdp.sharding_strategy=NO_SHARD"), RunDir(folder / "run")
    run.path.mkdir()
    write_parts_of_ranks(run, parts)
    run.accelerate_yaml.write_text(yaml.safe_dump(accelerate_config(recipe)))
    plan = launch_plan(
        recipe,
        run,
        worker_module="tests.launch.fake_worker",
        inherited={**os.environ, "PYTHONPATH": str(repository)},
    )
    logged = 0

    def on_event(event: Event) -> None:
        nonlocal logged
        logged += isinstance(event, Logged)
        if isinstance(event, Logged) and logged == len(parts) and send is not None:
            os.kill(os.getpid(), send)

    return end_of(Supervisor(plan, hang_timeout_seconds=60).events(), on_event)[0]


@dataclass(frozen=True)
class Launched:
    ended: Verdict
    environments: list[dict[str, str]]
    """Of the ranks."""
    log: str


@pytest.fixture
def launched(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Launched:
    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "torch.py").write_text("raise SystemExit('shadowed')")
        for name, value in (STALE_VARIABLES | {"HF_HOME": str(folder)}).items():
            monkeypatch.setenv(name, value)
        config = folder / "accelerate" / "default_config.yaml"
        config.parent.mkdir()
        config.write_text(yaml.safe_dump(HOSTILE_CONFIG))
        monkeypatch.chdir(folder)
        part = [["environment"], *SAVES_ON_SIGNAL]
        launch(folder, repository, {"0": part, "1": part}, signal.SIGUSR1)

    run = RunDir(made_once("launched-by-accelerate", make) / "run")
    verdict = Verdict.read(run.outcome_json)
    assert verdict is not None
    environments = [json.loads((run.path / f"environment-{rank}.json").read_text()) for rank in range(2)]
    return Launched(verdict, environments, run.launcher_log.read_text())


def test_ranks_are_spawned_on_the_cpu_with_their_environment(launched: Launched) -> None:
    found = launched.environments
    assert [environment["RANK"] for environment in found] == ["0", "1"]
    assert {environment["WORLD_SIZE"] for environment in found} == {"2"}
    assert {environment["MASTER_ADDR"] for environment in found} == {"127.0.0.1"}
    assert {environment["OMP_NUM_THREADS"] for environment in found} == {"2"}
    assert not any("ACCELERATE_USE_DEEPSPEED" in environment for environment in found)


def test_conflicting_default_config_is_ignored(launched: Launched) -> None:
    assert {environment["WORLD_SIZE"] for environment in launched.environments} == {"2"}
    assert {environment["ACCELERATE_MIXED_PRECISION"] for environment in launched.environments} == {"no"}
    assert {environment.get("FSDP_OFFLOAD_PARAMS", "false") for environment in launched.environments} == {
        "false"
    }


def test_agent_passes_signals_on_and_waits_for_the_save(launched: Launched) -> None:
    assert (launched.ended.exit_code, launched.ended.problem, launched.ended.step) == (143, None, 7)


def test_module_in_the_working_directory_does_not_shadow_a_library(launched: Launched) -> None:
    assert len(launched.environments) == 2, "the ranks were started"
    assert "shadowed" not in launched.log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGTERM, 143, id="TERM"), pytest.param(signal.SIGINT, 130, id="INT")],
)
def test_agent_passes_other_signals_on(tmp_path: Path, repository: Path, number: int, code: int) -> None:
    ended = launch(tmp_path, repository, {"0": SAVES_ON_SIGNAL, "1": SAVES_ON_SIGNAL}, number)
    assert (ended.exit_code, ended.problem, ended.step) == (code, None, 7)


@pytest.mark.slow
def test_torchrun_report_of_killed_rank_is_parsed(tmp_path: Path, repository: Path) -> None:
    stuck = [["ignore-signals"], ["beat", "training", 3], ["sleep", 60]]
    dies = [["beat", "training", 3], ["sleep", 0.5], ["die", int(signal.SIGKILL)]]
    ended = launch(tmp_path, repository, {"0": stuck, "1": dies})
    assert ended.exit_code == 5
    assert ended.problem is not None
    assert ended.problem.message == "rank 1 was killed by SIGKILL at step 3"
