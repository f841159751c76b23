"""Two commands in two network namespaces, as two machines: real ranks over gloo, loopback host names, a link
that is cut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdp_tune.run.directory import RunDir, latest_checkpoint
from tests.conftest import REPOSITORY
from tests.launch.namespaces import (
    ADDRESSES,
    INTERFACE,
    IPV6_ADDRESSES,
    Wire,
    marks_of_machines,
    on_machine,
    two_namespaces,
)
from tests.parity.runs import lines, loss_lines

pytestmark = marks_of_machines()
LIMIT_SECONDS = 400.0


class Machine:
    """The command of one machine."""

    def __init__(
        self, folder: Path, number: int, run: RunDir, keys: dict[str, Any], words: tuple[str, ...]
    ) -> None:
        settings = {
            "launch.num_machines": 2,
            "launch.num_processes": 2,
            "launch.main_process_ip": ADDRESSES[0],
            "launch.device": "cpu",
            "launch.num_cpu_threads_per_process": 1,
            "training.logging_steps": 1,
            "training.eval_strategy": "no",
            "merge.at_end": False,
            "output_dir": str(run.path),
        }
        arguments = [
            word
            for key, value in (settings | keys).items()
            for word in ("--set", f"{key}={json.dumps(value)}")
        ]
        command = [
            sys.executable,
            "-m",
            "fsdp_tune",
            "train",
            "--config",
            "gpt2_smoke",
            *arguments,
            "--machine-rank",
            str(number),
            *words,
        ]
        self.log = folder / f"machine-{number}.log"
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                on_machine(number, command), cwd=folder, stdout=log, stderr=log, env=env
            )

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def code(self) -> int:
        return self.process.wait(timeout=LIMIT_SECONDS)

    def children_with(self, word: str) -> list[psutil.Process]:
        return [
            each
            for each in psutil.Process(self.process.pid).children(recursive=True)
            if word in each.cmdline()
        ]


class TwoMachines:
    def __init__(self, folder: Path, wire: Wire) -> None:
        self.folder, self.wire, self.run = folder, wire, RunDir(folder / "run")
        self.started: list[Machine] = []

    def start(self, number: int, *words: str, **keys: Any) -> Machine:
        run = self.run if keys.get("launch.shared_directory", True) else self.own_run(number)
        self.started.append(Machine(self.folder, number, run, keys, words))
        return self.started[-1]

    def own_run(self, number: int) -> RunDir:
        return RunDir(self.folder / f"disk-{number}" / "run")

    def both(self, *words: str, **keys: Any) -> tuple[Machine, Machine]:
        second = self.start(1, *words, **keys)
        return self.start(0, *words, **keys), second

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: any(line["step"] >= step for line in loss_lines(self.run)))

    def wait_for_event(self, name: str, alive: list[Machine]) -> None:
        self.wait_for(lambda: any(line.get("event") == name for line in lines(self.run)), alive)

    def wait_for(self, holds: Callable[[], object], alive: list[Machine] | None = None) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not self.run.metrics_jsonl.exists() or not holds():
            assert time.monotonic() < deadline, [each.said for each in self.started]
            alive_ones = self.started[-2:] if alive is None else alive
            assert all(each.process.poll() is None for each in alive_ones), [
                each.said for each in self.started
            ]
            time.sleep(0.1)


def plain_run(folder: Path, keys: dict[str, Any]) -> RunDir:
    """Train the same recipe on one machine, without a disturbance."""
    folder.mkdir()
    machine = Machine(folder, 0, RunDir(folder / "run"), keys, ())
    assert machine.code() == 0, machine.said
    return RunDir(folder / "run")


@contextmanager
def two_machines(folder: Path, addresses: tuple[str, str] = ADDRESSES) -> Iterator[TwoMachines]:
    with two_namespaces(addresses) as wire:
        machines = TwoMachines(folder, wire)
        try:
            yield machines
        finally:
            for each in machines.started:
                each.process.kill()
                each.process.wait()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[TwoMachines]:
    with two_machines(tmp_path) as machines:
        yield machines


def test_machines_whose_names_are_loopback_train_and_survive_a_cut_and_a_dead_store(two: TwoMachines) -> None:
    first, second = two.both(**{"training.max_steps": 60})
    two.wait_for_step(3)
    two.wire.cut()
    time.sleep(15)
    two.wire.restore()
    reached = max(line["step"] for line in loss_lines(two.run))
    two.wait_for_step(reached + 2)
    (store,) = first.children_with("fsdp_tune.launch.machines.store")
    store.send_signal(signal.SIGKILL)
    assert (first.code(), second.code()) == (0, 0), first.said + second.said
    assert [line["step"] for line in loss_lines(two.run)] == list(range(1, 61))
    assert f"the network is `{INTERFACE}`, which has the address {ADDRESSES[0]}" in first.said
    assert (
        f"the network is `{INTERFACE}`, which is on the route to the first machine, {ADDRESSES[0]}"
        in second.said
    )
    environment = json.loads(two.run.launch_json.read_bytes())["environment"]
    assert environment["GLOO_SOCKET_IFNAME"] == INTERFACE
    assert environment["NCCL_SOCKET_IFNAME"] == f"={INTERFACE}"


def test_machines_with_ipv6_addresses_alone_train(tmp_path: Path) -> None:
    with two_machines(tmp_path, IPV6_ADDRESSES) as two:
        first, second = two.both(**{"training.max_steps": 12, "launch.main_process_ip": IPV6_ADDRESSES[0]})
        assert (first.code(), second.code()) == (0, 0), first.said + second.said
        assert [line["step"] for line in loss_lines(two.run)] == list(range(1, 13))
        assert f"the network is `{INTERFACE}`, which has the address {IPV6_ADDRESSES[0]}" in first.said


def test_long_cut_ends_both_machines(two: TwoMachines) -> None:
    first, second = two.both(**{"training.max_steps": 2000, "launch.hang_timeout": "60s"})
    two.wait_for_step(3)
    two.wire.cut()
    began = time.monotonic()
    assert (first.code(), second.code()) == (5, 5), first.said + second.said
    assert time.monotonic() - began < 300
    assert "no progress for" in first.said
    assert "the network" in first.said


def test_killed_first_machine_ends_the_other(two: TwoMachines) -> None:
    first, second = two.both(**{"training.max_steps": 2000})
    two.wait_for_step(3)
    first.process.kill()
    began = time.monotonic()
    assert second.code() == 5, second.said
    assert time.monotonic() - began < 150
    assert "machine 0" in second.said
    assert "is lost" in second.said


def test_killed_second_machine_joins_the_restart(two: TwoMachines) -> None:
    keys = {"training.max_steps": 60, "training.save_steps": 4, "launch.max_restarts": 2}
    first, second = two.both(**keys)
    two.wait_for_step(6)
    second.process.kill()
    second.process.wait()
    again = two.start(1, "--resume", "auto", **keys)
    assert (first.code(), again.code()) == (0, 0), first.said + again.said
    (event,) = [line for line in lines(two.run) if line.get("event") == "restarted"]
    assert event["code"] == "machine-lost"
    assert "machine 1 (machine-b) is lost" in event["message"]
    assert max(line["step"] for line in loss_lines(two.run)) == 60


def test_signal_on_the_second_machine_saves_and_stops_both(two: TwoMachines) -> None:
    first, second = two.both(**{"training.max_steps": 2000})
    two.wait_for_step(3)
    second.process.send_signal(signal.SIGTERM)
    assert (first.code(), second.code()) == (143, 143), first.said + second.said
    checkpoint, _ = latest_checkpoint(two.run)
    assert checkpoint is not None
    assert checkpoint.step >= 3


def test_machines_that_differ_end_before_a_rank_starts(two: TwoMachines) -> None:
    second = two.start(1, **{"training.max_steps": 60, "training.learning_rate": 1e-5})
    first = two.start(0, **{"training.max_steps": 60})
    assert (first.code(), second.code()) == (1, 1), first.said + second.said
    differs = (
        "machine 1 (machine-b) differs from machine 0 (machine-a): another value of `training.learning_rate`"
    )
    assert f"error: {differs}" in second.said
    assert f"error: machine 1: {differs}" in first.said
    assert list(two.run.logs.glob("rank-*")) == []


@pytest.mark.parametrize("returns", [False, True], ids=["lost", "comes back"])
def test_run_continues_without_a_lost_machine(two: TwoMachines, returns: bool) -> None:
    steps = 300 if returns else 40
    keys = {
        "training.max_steps": steps,
        "training.save_steps": 4,
        "training.global_batch_size": 8,
        "training.per_device_train_batch_size": 2,
        "launch.max_restarts": 3,
        "launch.min_machines": 1,
        "launch.replacement_timeout": "5s",
    }
    first, second = two.both(**keys)
    two.wait_for_step(6)
    second.process.kill()
    second.process.wait()
    two.wait_for_event("machines_changed", [first])
    again = two.start(1, "--resume", "auto", **keys) if returns else None
    if again is not None:
        two.wait_for(lambda: "the run continues on machine 0" in again.said)
        (rank,) = first.children_with("fsdp_tune.worker")[-1:]
        rank.kill()
        assert again.code() == 0, first.said + again.said
    assert first.code() == 0, first.said
    changes = [line for line in lines(two.run) if line.get("event") == "machines_changed"]
    assert [(line["machines"], line["ranks"], line["gradient_accumulation_steps"]) for line in changes] == [
        ([0], 1, 4),
        *([([0, 1], 2, 2)] if returns else []),
    ]
    assert (
        "continuing on machine 0, without machine 1: 1 rank × 4 micro-batches a step; the global "
        "batch is the same" in first.said
    )
    assert [line["step"] for line in loss_lines(two.run)] == list(range(1, steps + 1))
    undisturbed = plain_run(
        two.folder / "plain", {**keys, "launch.num_machines": 1, "launch.min_machines": None}
    )
    assert [line["tokens"] for line in loss_lines(two.run)] == [
        line["tokens"] for line in loss_lines(undisturbed)
    ]
    assert [line["loss"] for line in loss_lines(two.run)] == pytest.approx(
        [line["loss"] for line in loss_lines(undisturbed)], rel=1e-4
    )
