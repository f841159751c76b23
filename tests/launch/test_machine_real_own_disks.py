"""Two commands in two network namespaces, each with its own run directory: a long cut, and a run that only
its mirror has any more."""

from __future__ import annotations

import hashlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from fsdp_tune.run.directory import RunDir, held_checkpoints, latest_checkpoint
from tests.launch.namespaces import ROUTER_ADDRESS, marks_of_machines, on_router, two_namespaces
from tests.launch.orphans import PROMISED_SECONDS
from tests.launch.test_machine_real import LIMIT_SECONDS, Machine, TwoMachines, plain_run, two_machines
from tests.parity.runs import lines, loss_lines

pytestmark = marks_of_machines()
S3_PORT = 9000
STEPS, SAVE_STEPS = 60, 10
KEYS: dict[str, Any] = {
    "training.max_steps": STEPS,
    "training.save_steps": SAVE_STEPS,
    "training.save_total_limit": 2,
    "training.global_batch_size": 512,  # steps slow enough to interfere with
    "launch.shared_directory": False,
    "merge.at_end": True,
}
ALONE = KEYS | {"launch.num_machines": 1, "launch.shared_directory": True}


@pytest.fixture
def two(tmp_path: Path) -> Iterator[TwoMachines]:
    with two_machines(tmp_path) as machines:
        machines.run = machines.own_run(0)
        yield machines


@pytest.fixture
def bucket(two: TwoMachines, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of an S3 server on the router."""
    url = f"http://{ROUTER_ADDRESS}:{S3_PORT}"
    variables = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in (variables | {"NO_PROXY": ROUTER_ADDRESS}).items():
        monkeypatch.setenv(name, value)
    with (two.folder / "s3.log").open("wb") as log:
        command = [sys.executable, "-m", "moto.server", "-H", ROUTER_ADDRESS, "-p", str(S3_PORT)]
        server = subprocess.Popen(on_router(command), stdout=log, stderr=log)
    try:
        make = f"import urllib.request as u; u.urlopen(u.Request({url + '/backup'!r}, method='PUT'))"
        deadline = time.monotonic() + LIMIT_SECONDS
        while (
            subprocess.run(
                on_router([sys.executable, "-c", make]), check=False, capture_output=True
            ).returncode
            != 0
        ):
            assert server.poll() is None, (two.folder / "s3.log").read_text()
            assert time.monotonic() < deadline, (two.folder / "s3.log").read_text()
            time.sleep(0.5)
        yield "s3://backup/runs"
    finally:
        server.kill()
        server.wait()


def processes_of(*machines: Machine) -> list[psutil.Process]:
    return [
        each for machine in machines for each in psutil.Process(machine.process.pid).children(recursive=True)
    ]


def left_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    return psutil.wait_procs(processes, timeout=PROMISED_SECONDS)[1]


def complete_steps(two: TwoMachines) -> list[int]:
    """The steps of the checkpoints that each machine has, all of them complete: what it lacks, the other
    has."""
    runs = [two.own_run(0), two.own_run(1)]
    for run, other in (runs, runs[::-1]):
        _, rejected = latest_checkpoint(run, digests=True, elsewhere=held_checkpoints(other, digests=True))
        assert rejected == []
    steps = [{each.step for each in held_checkpoints(run)} for run in runs]
    assert steps[0] == steps[1]
    return sorted(steps[0])


def weights(run: RunDir) -> dict[str, str]:
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in run.merged.glob("*.safetensors")
    }
    assert found, list(run.path.iterdir())
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The run of `KEYS` on one machine, with as many ranks."""
    with two_namespaces():
        return plain_run(tmp_path_factory.mktemp("undisturbed") / "plain", ALONE)


def assert_equal(run: RunDir, undisturbed: RunDir) -> None:
    """The losses of all steps and the weights are equal to the last bit."""
    assert [line["step"] for line in loss_lines(run)] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in loss_lines(run)] == [line["loss"] for line in loss_lines(undisturbed)]
    assert weights(run) == weights(undisturbed)


def start_steps(run: RunDir) -> list[int]:
    return [line["step"] for line in lines(run) if line.get("event") == "train_started"]


@pytest.mark.parametrize("source", ["disks", "mirror"])
def test_long_cut_ends_both_machines_and_they_continue(
    two: TwoMachines, undisturbed: RunDir, source: str
) -> None:
    keys = {**KEYS, "launch.hang_timeout": "45s"}
    if source == "mirror":
        (two.folder / "mirror").mkdir()
        keys["checkpoint.mirror"] = (two.folder / "mirror").as_uri()
    first, second = two.both(**keys)
    if source == "mirror":
        two.wait_for_event("mirrored", [first, second])
    else:
        two.wait_for_step(SAVE_STEPS + 2)
    processes = processes_of(first, second)
    two.wire.cut()
    assert (first.code(), second.code()) == (5, 5), first.said + second.said
    for machine, other in ((first, "machine 1"), (second, "machine 0")):
        error = machine.said.partition("error: ")[2]  # without the network that a start names
        assert "the network" in error, machine.said
        assert "no progress for" in error or f"{other} is lost" in error
    assert left_of(processes) == []
    newest = complete_steps(two)[-1]
    two.wire.restore()
    if source == "mirror":
        for run in (two.own_run(0), two.own_run(1)):
            for checkpoint in run.path.glob("checkpoint-*"):
                shutil.rmtree(checkpoint)
    first, second = two.both("--resume", "auto", **keys)
    assert (first.code(), second.code()) == (0, 0), first.said + second.said
    assert start_steps(two.run) == [0, newest]
    assert_equal(two.run, undisturbed)


def adapter_keys(folder: Path) -> dict[str, Any]:
    """An adapter on a saved model: nothing keeps random weights of a recipe, which an adapter would need."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=384,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    GPT2LMHeadModel(config).save_pretrained(folder / "model")
    return {"model.from_config": None, "model.name_or_path": str(folder / "model"), "lora": {"r": 4}}


@pytest.mark.parametrize("is_adapter", [False, True], ids=["full", "lora"])
def test_run_that_only_the_mirror_has_continues(
    two: TwoMachines, undisturbed: RunDir, bucket: str, is_adapter: bool
) -> None:
    changes = adapter_keys(two.folder) if is_adapter else {}
    keys = {**KEYS, **changes, "checkpoint.mirror": bucket}
    both = two.both(**keys)
    two.wait_for_event("mirrored", list(both))
    processes = processes_of(*both)
    for machine in both:
        machine.process.kill()
        machine.process.wait()
    assert left_of(processes) == []
    assert max(line["step"] for line in loss_lines(two.run)) < STEPS
    for run in (two.own_run(0), two.own_run(1)):
        shutil.rmtree(run.path)
    first, second = two.both("--resume", "auto", **keys)
    assert (first.code(), second.code()) == (0, 0), first.said + second.said
    starts = start_steps(two.run)
    assert (len(starts), starts[0], starts[1] >= SAVE_STEPS) == (2, 0, True)
    assert_equal(two.run, plain_run(two.folder / "plain", ALONE | changes) if is_adapter else undisturbed)


def test_command_stopped_in_the_last_save_is_not_waited_for(two: TwoMachines, undisturbed: RunDir) -> None:
    """The launcher of a command that gets a signal is at no barrier in the end, and the other one waited five
    minutes for it."""
    first, second = two.both(**KEYS)
    two.wait_for_step(STEPS - 2)
    second.process.send_signal(signal.SIGHUP)
    began = time.monotonic()
    assert first.code() == 0, first.said
    assert time.monotonic() - began < 120
    assert second.code() == 0, second.said
    assert_equal(two.run, undisturbed)
