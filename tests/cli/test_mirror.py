"""`checkpoint.mirror` through the command: a run whose disk is gone continues from its mirror, and nothing starts over by accident."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.metrics_file import read_metrics
from tests.cli.conftest import Done
from tests.cli.test_lora_run import losses

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
    settings = SETTINGS | {"output_dir": folder / name} | ({"checkpoint.mirror": mirror} if mirror else {}) | more
    return ["train", "--config", "gpt2_smoke", *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.ranks
def test_killed_run_whose_disk_is_gone_ends_bitwise_the_same_from_the_mirror(tmp_path: Path, cli: Callable[..., Done]) -> None:
    mirror = f"file://{tmp_path}/mirror"
    (tmp_path / "mirror").mkdir()
    whole, cut = RunDir(tmp_path / "whole"), RunDir(tmp_path / "cut")
    done = cli(*words(tmp_path, "whole", None))
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-m", "fsdp_tune", *words(tmp_path, "cut", mirror)]
    child = subprocess.Popen(command, env=dict(os.environ), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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
    assert losses(cut) == losses(whole)
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
def test_url_that_is_no_mirror_is_refused(url: str, says: str, tmp_path: Path, cli: Callable[..., Done]) -> None:
    done = cli(*words(tmp_path, "run", url))
    assert done.returncode == 2
    assert says in done.stderr
    assert "s3cr3t" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_mirror_that_cannot_be_written_stops_a_new_run(tmp_path: Path, cli: Callable[..., Done]) -> None:
    (tmp_path / "file").write_text("")
    done = cli(*words(tmp_path, "run", f"file://{tmp_path}/file"))
    assert done.returncode == 2
    assert "cannot be used" in done.stderr
    assert not (tmp_path / "run").exists()
