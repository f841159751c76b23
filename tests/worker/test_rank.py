"""Environment, log and limits of a rank."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.topology import Topology
from fsdp_tune.run.directory import RunDir
from fsdp_tune.worker.rank import (
    LAZY_GLOO_RANKS,
    Rank,
    connect_lazily,
    raise_open_file_limit,
    read_rank,
    redirect_output,
)
from tests.conftest import REPOSITORY
from tests.launch.test_accelerate import resolved


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_settings_of_the_launcher_are_kept(launched: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert read_rank(resolved(tmp_path), RunDir(tmp_path)) == Rank(1, 1, 2)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("RANK", "", "not-launched"),
        ("WORLD_SIZE", "3", "world-size-mismatch"),
        ("TORCHELASTIC_RESTART_COUNT", "1", "restarted-by-torchrun"),
    ],
)
def test_environment_that_does_not_fit_the_run_is_refused_with_alternatives(
    launched: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str, code: str
) -> None:
    launched.setenv(name, value)
    with pytest.raises(FsdpTuneError) as caught:
        read_rank(resolved(tmp_path), RunDir(tmp_path))
    (problem,) = caught.value.problems
    assert (problem.code, caught.value.exit_code) == (code, 2)
    assert problem.ways_out


def test_linked_log_file_is_not_written(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.logs.mkdir(parents=True)
    (tmp_path / "theirs").write_text("untouched")
    run.rank_log(0).symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match="symbolic links"):
        redirect_output(run, 0)
    assert (tmp_path / "theirs").read_text() == "untouched"


WRITES_LINES = """
import os, resource, sys
from pathlib import Path
from fsdp_tune.run.directory import RunDir
from fsdp_tune.worker.rank import redirect_output

screen = redirect_output(RunDir(Path(sys.argv[1])), 0)
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
for limit, line in ((limits[0], "before"), (0, "refused" * 4000), (limits[0], "after")):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    for stream in (screen, sys.stdout, sys.stderr):
        print(line, file=stream)
        stream.flush()
"""


def test_line_that_the_disk_refuses_does_not_end_the_rank(tmp_path: Path) -> None:
    run, log = RunDir(tmp_path / "run"), tmp_path / "launcher.log"
    with open(log, "wb") as launcher:
        command = [sys.executable, "-c", WRITES_LINES, str(run.path)]
        subprocess.run(command, stdout=launcher, stderr=launcher, cwd=REPOSITORY, check=True, timeout=60)
    for written in (log, run.rank_log(0)):
        text = written.read_text()
        assert text.startswith("before\n")
        assert text.endswith("after\n")


RECORDS = """
import json, os, sys
from dataclasses import asdict
from pathlib import Path
from fsdp_tune.run.directory import RunDir
from fsdp_tune.worker.observe import heartbeat as flight
from fsdp_tune.worker.observe import flight_recorder
from fsdp_tune.worker.rank import flight_recorder_variables
run = RunDir(Path(sys.argv[1]))
os.environ.update(flight_recorder_variables(run))
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1] + "/meeting", rank=0, world_size=1)
before = flight_recorder.dump(run, 0, "cpu")
dist.all_reduce(torch.ones(3))
dist.barrier()
dist.all_reduce(torch.ones(3))
print(json.dumps([before, asdict(flight_recorder.dump(run, 0, "cpu"))]))
"""


@pytest.mark.slow
def test_flight_recorder_is_on_and_has_the_last_collective(tmp_path: Path) -> None:
    """Fails when torch renames its variables or its recorder."""
    done = subprocess.run(
        [sys.executable, "-c", RECORDS, str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout.splitlines()[-1])
    assert before is None
    assert after["name"] == "gloo:all_reduce"
    assert after["entered"][after["group"]] == after["number"] >= 3
    assert (RunDir(tmp_path).flight_recorder / "rank_0").stat().st_size > 0


def test_open_file_limit_is_raised_for_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    for limits in ((1024, 1 << 20), (1024, 2048), (1024, resource.RLIM_INFINITY), (1 << 19, 1 << 20)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        raise_open_file_limit(Topology(shard=256, sequence=2).open_files_needed())
    assert asked == [(7680, 1 << 20), (2048, 2048), (7680, resource.RLIM_INFINITY)]


CONNECTIONS = """
import datetime, os, sys, threading
import torch, torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

ranks, made, ended = 24, threading.Barrier(25), threading.Barrier(25)
store = dist.HashStore()

def run(rank):
    group = ProcessGroupGloo(store, rank, ranks, datetime.timedelta(seconds=60))
    value, every = torch.full((4,), float(rank)), [torch.empty(4) for _ in range(ranks)]
    group.allgather([every], [value]).wait()
    assert [int(one[0]) for one in every] == list(range(ranks))
    group.allreduce([value]).wait()
    assert value[0] == sum(range(ranks))
    made.wait()
    ended.wait()

before = len(os.listdir("/proc/self/fd"))
for rank in range(ranks):
    threading.Thread(target=run, args=(rank,), daemon=True).start()
made.wait()
print(len(os.listdir("/proc/self/fd")) - before)
ended.wait()
os._exit(0)
"""


@pytest.mark.slow
def test_ranks_that_connect_when_they_exchange_something_open_few_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fails when torch renames the variable."""
    open_files: list[int] = []
    for value in ("0", "1"):
        monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", value)
        done = subprocess.run(
            [sys.executable, "-u", "-c", CONNECTIONS],
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        open_files.append(int(done.stdout))
    assert open_files[0] > 24 * 23
    assert open_files[1] < open_files[0] / 2


def test_many_ranks_connect_when_they_exchange_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    connect_lazily(LAZY_GLOO_RANKS - 1)
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ
    connect_lazily(LAZY_GLOO_RANKS)
    assert os.environ["TORCH_GLOO_LAZY_INIT"] == "1"
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    connect_lazily(4096)
    assert os.environ["TORCH_GLOO_LAZY_INIT"] == "0", "a value of the user is kept"
