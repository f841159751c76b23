"""The chaos test itself: what it draws, each invariant on a directory that violates it, and one disturbed run."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fsdp_tune.launch.lock import locked
from fsdp_tune.manifest import MANIFEST_NAME, Manifest, digest_file
from fsdp_tune.run_dir import CHECKPOINT_KIND, RunDir
from tests.chaos import page
from tests.chaos.__main__ import Chaos
from tests.chaos.draw import (
    AGENT,
    CHILD,
    CLOCK,
    COMMAND,
    FULL_DISK,
    KILL,
    KINDS,
    LOADER,
    LONG_STOP,
    PHASES,
    RANK,
    READ_ONLY_DISK,
    SHORT_STOP,
    SLOW_DISK,
    Disturbance,
    draw,
)
from tests.chaos.invariants import Attempt, judge, leftovers, listening, lost_checkpoints, merged_differences, step_differences
from tests.chaos.play import compile_shim
from tests.chaos.processes import MACHINE, MARK, Process, marked, moment

HANG = 20.0


def write_steps(run: RunDir, steps: range, **last: float) -> None:
    lines = [{"step": step, "loss": 1 / step, "eval_loss": 2.0} for step in steps]
    lines[-1] |= last
    events = [{"event": "checkpoint_saved", "step": steps[-1]}]
    run.path.mkdir(parents=True, exist_ok=True)
    run.metrics_jsonl.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *events]))


def write_checkpoint(run: RunDir, step: int) -> Path:
    path = run.checkpoint(step)
    path.mkdir(parents=True)
    (path / "weights").write_bytes(bytes(100))
    (path / MANIFEST_NAME).write_text(Manifest(CHECKPOINT_KIND, {"weights": digest_file(path / "weights")}, {"step": step}).to_json())
    return path


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "place" / "run")
    run.logs.mkdir(parents=True)
    return run


@pytest.fixture
def reference(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "reference" / "run")


# ------------------------------------------------------------------------------------------------ drawing


def drawn(seed: int, number: int, machines: int = 1) -> list[Disturbance]:
    dice, hits, found = random.Random(seed), Counter[str](), []
    for _ in range(number):
        one = draw(dice, hits, machines=machines, hang_seconds=HANG, last_step=16)
        hits.update((one.kind, one.phase))
        found.append(one)
    return found


def test_a_seed_draws_the_same_disturbances_again() -> None:
    assert drawn(3, 20) == drawn(3, 20)
    assert drawn(3, 20) != drawn(4, 20)


def test_every_phase_and_kind_is_drawn_before_long() -> None:
    for seed in range(20):
        found = drawn(seed, 40, machines=2)
        assert {one.phase for one in found} == set(PHASES)
        assert {one.kind for one in found} == set(KINDS)
        assert {one.machine for one in found} == {0, 1}


def test_a_short_stop_is_below_the_hang_timeout_and_a_long_one_above() -> None:
    stops = [one for one in drawn(0, 300) if "stop" in one.kind]
    assert all(one.seconds < HANG if one.kind == SHORT_STOP else one.seconds > HANG + 10 for one in stops)


# ------------------------------------------------------------------------------------------------ invariants


@pytest.mark.parametrize("steps", [range(1, 6), range(1, 8), range(2, 7)], ids=["lost", "twice", "begins late"])
def test_steps_that_differ_are_found(steps: range, run: RunDir, reference: RunDir) -> None:
    write_steps(reference, range(1, 7))
    write_steps(run, steps)
    assert step_differences(run, reference)


def test_a_last_digit_of_a_loss_or_an_evaluation_is_found(run: RunDir, reference: RunDir) -> None:
    write_steps(reference, range(1, 7))
    for key, value in (("loss", 1 / 6 + 2**-54), ("eval_loss", 2.0 + 2**-51)):
        write_steps(run, range(1, 7), **{key: value})
        assert step_differences(run, reference)
    write_steps(run, range(1, 7))
    assert step_differences(run, reference) == []


def test_a_bit_of_a_merged_tensor_is_found(run: RunDir, reference: RunDir) -> None:
    weights = {"a": torch.zeros(3), "b": torch.ones(2, dtype=torch.bfloat16)}
    assert merged_differences(run, reference) == ["there is no merged model"]
    for each in (run, reference):
        each.merged.mkdir(parents=True)
        save_file(weights, each.merged / "model.safetensors")
    assert merged_differences(run, reference) == []
    save_file(weights | {"a": torch.tensor([0.0, -0.0, 0.0])}, run.merged / "model.safetensors")
    assert merged_differences(run, reference) == ["a of the merged model differs"]
    save_file({"a": weights["a"]}, run.merged / "model.safetensors")
    assert merged_differences(run, reference) == ["the merged model has other tensors: ['b']"]


def test_a_reported_checkpoint_may_go_by_rotation_alone(run: RunDir) -> None:
    for step in (6, 9):
        write_checkpoint(run, step)
    assert lost_checkpoints(run, [3, 6, 9], keep=2) == []
    assert lost_checkpoints(run, [3, 6], keep=2) == [], "9 has taken the place of 3, and is not reported yet"
    assert len(lost_checkpoints(run, [6, 9, 12], keep=2)) == 1
    shutil.rmtree(run.checkpoint(6))
    assert lost_checkpoints(run, [6, 9], keep=2) == ["checkpoint-6 was reported as saved and is gone; there are [9]"]


def test_a_checkpoint_that_does_not_verify_is_found(run: RunDir) -> None:
    (write_checkpoint(run, 6) / "weights").write_bytes(bytes(99))
    assert [each.split(":")[0] for each in lost_checkpoints(run, [], keep=2)] == ["half written"]


def test_what_a_run_leaves_behind_is_found(run: RunDir) -> None:
    assert leftovers(run, is_finished=True, seen=[]) == []
    (run.path / ".checkpoint-3.stage-1").mkdir()
    (run.logs / "rank-0000.heartbeat.tmp").touch()
    (run.path.parent / ".run.stage-2").mkdir()
    assert len(leftovers(run, is_finished=True, seen=[])) == 3
    assert leftovers(run, is_finished=False, seen=[]) == [], "the next command removes stages"
    with locked(run):
        assert "run.lock is still held" in leftovers(run, is_finished=False, seen=[])[0]
    shared = Path(f"/dev/shm/torch_{os.getpid()}_chaos")
    shared.touch()
    try:
        assert leftovers(run, is_finished=False, seen=[os.getpid()]) == [f"{shared} is left"]
    finally:
        shared.unlink()


def test_an_open_port_is_found() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert listening(port) == []
        server.listen()
        assert listening(port) == [f"port {port} is still open"]


RANK_1 = Process(11, 10, RANK, 0, 1)
HANG_TEXT = "error: nothing has moved for 25s: rank 1 (step 3, `forward`, stopped (SIGSTOP)) is late"


def verdict(kind: str, target: str, attempt: Attempt, *, restarts: bool = False) -> list[str]:
    attempt = replace(attempt, target=attempt.target or Process(11, 10, target, 0, 1))
    return judge(Disturbance(kind, "training", target), attempt, hang_seconds=HANG, has_restarts=restarts)


@pytest.mark.parametrize(
    ("kind", "target", "attempt"),
    [
        (SHORT_STOP, RANK, Attempt([5])),
        (SHORT_STOP, COMMAND, Attempt([0], restarts=1)),
        (LONG_STOP, AGENT, Attempt([5])),
        (SLOW_DISK, "", Attempt([5])),
        (CLOCK, "", Attempt([1])),
        (FULL_DISK, "", Attempt([5])),
        (KILL, RANK, Attempt([1])),
        (KILL, RANK, Attempt([5], "error: rank 0 was killed by SIGKILL at step 3")),
        (LONG_STOP, RANK, Attempt([5], HANG_TEXT.replace("rank 1", "rank 0"), named_after_seconds=25.0)),
        (LONG_STOP, RANK, Attempt([5], HANG_TEXT, named_after_seconds=40.0)),
        (LONG_STOP, LOADER, Attempt([5], HANG_TEXT)),
        ("SIGTERM", RANK, Attempt([130])),
        ("SIGINT", COMMAND, Attempt([143])),
        ("SIGTERM", CHILD, Attempt([-15])),
        (KILL, RANK, Attempt([None])),
        (KILL, COMMAND, Attempt([-9], left=["rank 11 (rank 1)"])),
        (KILL, COMMAND, Attempt([0, -9])),
        ("SIGTERM", COMMAND, Attempt([143], "Traceback (most recent call last):")),
    ],
)
def test_an_end_that_is_not_promised_is_found(kind: str, target: str, attempt: Attempt) -> None:
    assert verdict(kind, target, attempt)


@pytest.mark.parametrize(
    ("kind", "target", "attempt", "restarts"),
    [
        (SHORT_STOP, RANK, Attempt([0]), False),
        (KILL, COMMAND, Attempt([-9]), False),
        (KILL, RANK, Attempt([5], "error: rank 1 was killed by\nSIGKILL at step 3"), False),
        (KILL, RANK, Attempt([0], "rank 1 was killed by SIGKILL at step 3: restarting", restarts=1), True),
        (LONG_STOP, RANK, Attempt([5], HANG_TEXT, named_after_seconds=25.0), False),
        ("SIGTERM", RANK, Attempt([143, 143]), False),
        (FULL_DISK, "", Attempt([1]), False),
    ],
)
def test_a_promised_end_is_no_violation(kind: str, target: str, attempt: Attempt, restarts: bool) -> None:
    assert verdict(kind, target, attempt, restarts=restarts) == []


# ------------------------------------------------------------------------------------------------ observation


def test_processes_are_found_by_their_mark_also_without_their_parent(tmp_path: Path) -> None:
    """The sleeper's parent ends at once, so that no walk over children would find it."""
    environment = {**os.environ, MARK: "token-of-a-test", MACHINE: "1", "RANK": "3"}
    subprocess.run(["/bin/sh", "-c", "sleep 30 >/dev/null 2>&1 &"], env=environment, check=True)
    deadline = time.monotonic() + 10
    while not (found := marked("token-of-a-test")) and time.monotonic() < deadline:
        time.sleep(0.05)  # the sleeper may not have its environment yet
    try:
        assert [(process.role, process.machine, process.rank) for process in found] == [(CHILD, 1, 3)]
    finally:
        for process in found:
            os.kill(process.pid, 9)


def write_beat(run: RunDir, rank: int, pid: int, phase: str, step: int) -> None:
    run.rank_heartbeat(rank).write_text(json.dumps({"pid": pid, "phase": phase, "step": step}))


def test_a_phase_is_read_from_heartbeats_of_live_ranks_stages_and_the_process_table(run: RunDir) -> None:
    command, agent, rank = Process(1, 0, COMMAND, 0, None), Process(2, 1, AGENT, 0, None), Process(3, 2, RANK, 0, 0)

    def phases(*processes: Process) -> set[str]:
        return set(moment(run, processes, started_at=time.time() - 5, last_step=16).phases)

    assert phases(command) == {"preparing"}
    assert phases(command, agent) == {"launching"}
    write_beat(run, 0, 999, "training", 5)
    assert phases(command, agent, rank) == {"launching"}, "the heartbeat is of an older rank"
    write_beat(run, 0, 3, "backward", 5)
    assert phases(command, agent, rank) == {"training"}
    (run.path / ".checkpoint-3.stage-7").mkdir()
    assert phases(command, agent, rank) == {"training", "saving"}
    write_beat(run, 0, 3, "saving", 16)
    assert phases(command, agent, rank) == {"final save"}
    (run.logs / "outcome.json").touch()
    assert phases(command) == {"merging"}
    assert phases() == set()


# ------------------------------------------------------------------------------------------------ the page


def test_the_section_is_replaced_and_the_rest_of_the_page_stays() -> None:
    first, second = (page.section(f"Seed {seed}.", Counter({(KILL, "training"): seed})) for seed in (1, 2))
    written = page.with_section(page.with_section("# Faults\n\nrows\n", first), second)
    assert written.startswith("# Faults\n\nrows\n\n<!-- chaos")
    assert (page.section_of(written), written.count("## Chaos")) == (second, 1)
    assert page.with_section("# Faults\n\nrows\n", page.section_of("# no section")) == "# Faults\n\nrows\n"


# ------------------------------------------------------------------------------------------------ the disk, and a run

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="the shim is compiled by gcc")


@needs_gcc
def test_the_disk_breaks_below_its_directory_alone_and_while_a_process_runs(tmp_path: Path) -> None:
    """The process writes each time that it reads a line, and prints what came of it."""
    from tests.chaos.play import Stage

    stage = Stage(tmp_path, compile_shim(tmp_path), 1)
    stage.run.path.mkdir()
    stage.control(0)
    script = """
import os, sys
for line in sys.stdin:
    try:
        with open(line.strip(), "wb") as file: file.write(b"x" * 100_000)
        print(os.path.getsize(line.strip()), flush=True)
    except OSError as error: print(error.errno, flush=True)
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], env=stage.environment("t", 0) | {"PYTHONPATH": ""}, **pipes) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def written(path: Path) -> int:
            child.stdin.write(f"{path}\n")
            child.stdin.flush()
            return int(child.stdout.readline())

        inside, outside = stage.run.path / "a", tmp_path / "b"
        assert written(inside) == 100_000
        stage.control(0, FULL_DISK)
        assert (written(inside), written(outside)) == (28, 100_000)
        stage.control(0, READ_ONLY_DISK)
        assert (written(inside), written(outside)) == (30, 100_000)
        stage.control(0, SLOW_DISK)
        started = time.monotonic()
        assert written(inside) == 100_000
        assert time.monotonic() - started > 1.0
        child.stdin.close()


@needs_gcc
def test_the_wall_clock_jumps_and_waiting_takes_as_long_as_before(tmp_path: Path) -> None:
    from tests.chaos.play import Stage

    stage = Stage(tmp_path, compile_shim(tmp_path), 1)
    script = """
import multiprocessing, threading, time
started = time.monotonic()
time.sleep(0.1)
multiprocessing.Semaphore(0).acquire(timeout=0.1)
threading.Event().wait(0.1)
print(time.time(), 0.25 < time.monotonic() - started < 20)
"""
    for seconds in (86400, -86400):
        stage.control(0, clock_seconds=seconds)
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=stage.environment("t", 0), capture_output=True, text=True, check=True, timeout=60)
        told, waited = done.stdout.split()
        assert abs(float(told) - time.time() - seconds) < 60
        assert waited == "True"


@needs_gcc
@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_whose_rank_was_killed_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, random.Random(0), machines=1)
    chaos.undisturbed()
    chaos.story([Disturbance(KILL, "training", RANK, step=4)])
    assert chaos.violations == []
    assert chaos.hits == {(KILL, "training"): 1}
    assert chaos.attempts in (1, 2, 3)
