"""`checkpoint.mirror` through the command: a run whose disk is gone continues from its mirror, and nothing
starts over by accident."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.metrics_file import read_metrics
from fsdp_tune.run.rank_files import read_heartbeat
from tests.cli.conftest import Done
from tests.cli.in_process import invoke, settings_of
from tests.cli.inspection import fake_model  # noqa: F401  a fixture
from tests.cli.small_runs import losses

SETTINGS = {
    "training.max_steps": 40,
    "training.save_steps": 10,
    "training.logging_steps": 1,
    "training.eval_strategy": "no",
    "training.report_to": "[]",
    "launch.num_processes": 2,
    "checkpoint.probe": "false",
}


def words(folder: Path, name: str, mirror: str | None, **more: object) -> list[str]:
    values = (
        SETTINGS | {"output_dir": folder / name} | ({"checkpoint.mirror": mirror} if mirror else {}) | more
    )
    return ["train", "--config", "gpt2_smoke", *settings_of(values)]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.ranks
def test_killed_run_whose_disk_is_gone_ends_bitwise_the_same_from_the_mirror(
    tmp_path: Path, cli: Callable[..., Done]
) -> None:
    mirror = f"file://{tmp_path}/mirror"
    (tmp_path / "mirror").mkdir()
    whole, cut = RunDir(tmp_path / "whole"), RunDir(tmp_path / "cut")
    done = cli(*words(tmp_path, "whole", None))
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-m", "fsdp_tune", *words(tmp_path, "cut", mirror)]
    child = subprocess.Popen(
        command, env=dict(os.environ), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 300
    while not (tmp_path / "mirror/cut/checkpoint-20/manifest.json").exists():
        assert child.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    time.sleep(1)
    shutil.rmtree(cut.path)
    done = cli(*words(tmp_path, "cut", mirror), "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert "downloading checkpoint-" in done.stderr + done.stdout
    assert losses(cut.path) == losses(whole.path)
    name = "merged/model.safetensors"
    assert (cut.path / name).read_bytes() == (whole.path / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "mirror/cut").glob("checkpoint-*")) == sorted(
        f"checkpoint-{step}{end}" for step in (30, 40) for end in ("", ".run")
    ), "rotated like the local disk"
    assert (tmp_path / "mirror/cut/merged/manifest.json").exists()
    status = json.loads(cli("status", str(cut.path), "--json").stdout)
    assert status["mirror"]["newest_step"] == 40
    assert status["mirror"]["behind"] == []
    assert not [line for line in read_metrics(cut) if line.get("event") == "mirror_failed"]
    done = cli(*words(tmp_path, "again/cut", mirror))
    assert done.returncode == 2
    assert "has the checkpoints of another run" in done.stderr


@contextmanager
def training(*arguments: str, until: Callable[[], bool]) -> Iterator[subprocess.Popen[str]]:
    """A command that trains, once something is true of it. It is killed at the end."""
    command = [sys.executable, "-m", "fsdp_tune", *arguments]
    child = subprocess.Popen(
        command, env=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        deadline = time.monotonic() + 300
        while not until():
            assert child.poll() is None, child.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield child
    finally:
        child.kill()
        child.communicate()


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.ranks
def test_second_command_is_refused_and_continues_on_other_ranks_once_the_first_is_killed(
    tmp_path: Path, cli: Callable[..., Done]
) -> None:
    mirror, first = f"file://{tmp_path}/mirror", tmp_path / "mirror" / "cut"
    (tmp_path / "mirror").mkdir()
    endless = {"training.max_steps": 100_000}
    there = words(tmp_path, "elsewhere/cut", mirror, **endless)
    with training(
        *words(tmp_path, "cut", mirror, **endless), until=(first / "checkpoint-10" / "manifest.json").exists
    ) as child:
        done = cli(*there, "--resume", "auto")
        assert done.returncode == 2, done.stderr
        assert f"{mirror}/cut is in use by pid {child.pid}" in done.stderr
        assert child.poll() is None
    assert not (tmp_path / "elsewhere" / "cut").exists()
    done = cli(*there, "--set", "training.seed=7", "--resume", "auto")
    assert done.returncode == 2
    assert "which has ended or does not respond: it is taken over" in done.stderr
    assert "`training.seed`: " in done.stderr
    assert not (tmp_path / "elsewhere" / "cut").exists(), "nothing is downloaded for a recipe that is refused"
    newest = max(
        int(path.parent.name.partition("-")[2]) for path in first.glob("checkpoint-*[0-9]/manifest.json")
    )
    more = {"training.max_steps": newest + 5, "launch.num_processes": 1}
    done = cli(*words(tmp_path, "elsewhere/cut", mirror, **more), "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert f"resumed from checkpoint-{newest}" in done.stderr + done.stdout
    assert max(line["step"] for line in read_metrics(RunDir(tmp_path / "elsewhere" / "cut"))) == newest + 5


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.ranks
def test_restart_replaces_a_damaged_checkpoint_by_the_copy_of_the_mirror(tmp_path: Path) -> None:
    (tmp_path / "mirror").mkdir()
    run, mirrored = RunDir(tmp_path / "cut"), tmp_path / "mirror" / "cut" / "checkpoint-200" / "manifest.json"
    more = {"training.max_steps": 250, "training.save_steps": 200, "launch.max_restarts": 1}
    with training(
        *words(tmp_path, "cut", f"file://{tmp_path}/mirror", **more), until=mirrored.exists
    ) as child:
        (shard, *_) = (run.checkpoint(200) / "pytorch_model_fsdp_0").glob("*.distcp")
        shard.write_bytes(bytes(shard.stat().st_size))
        beat = read_heartbeat(run, 1)
        assert beat is not None
        os.kill(beat.pid, signal.SIGKILL)
        output, _ = child.communicate(timeout=300)
        assert child.returncode == 0, output
    assert "checkpoint-200 is replaced by the copy of the mirror: " in output
    assert "restarting from checkpoint-200 (restart 1 of 1)" in output
    (event,) = [line for line in read_metrics(run) if line.get("event") == "checkpoint_rejected"]
    assert event["checkpoint"] == "checkpoint-200"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("memory://x", "not a URL of a directory"),
        ("/mnt/x", "not a URL of a directory"),
        ("filecache::s3://b/x", "not a URL of a directory"),
        ("file:///a/../b", "not a URL of a directory"),
        ("s3://key:s3cr3t@bucket/x", "looks like a token, a password or a signature"),
        ("gs://bucket/x", "pip install 'fsdp-tune[gs]'"),
    ],
)
def test_url_that_is_no_mirror_is_refused(url: str, says: str, tmp_path: Path) -> None:
    done = invoke(*words(tmp_path, "run", url))
    assert done.exit_code == 2
    assert says in done.stderr
    assert "s3cr3t" not in done.output
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("fake_model")
def test_mirror_that_cannot_be_written_stops_a_new_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = invoke(*words(tmp_path, "run", f"file://{tmp_path}/file"))
    assert done.exit_code == 2
    assert "cannot be used" in done.stderr
    assert not (tmp_path / "run").exists()
