"""The chaos test itself: what it draws, each invariant on a directory that violates it, and one disturbed
run."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
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

from fsdp_tune.run.claim import locked
from fsdp_tune.run.directory import CHECKPOINT_KIND, RunDir
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest, digest_file
from tests.chaos import page
from tests.chaos.__main__ import Chaos
from tests.chaos.draw import (
    AGENT,
    CHILD,
    CLOCK,
    COMMAND,
    CUTS,
    FULL_DISK,
    HARMLESS,
    KILL,
    KINDS,
    LOADER,
    LONG_CUT,
    LONG_STOP,
    PHASES,
    RANK,
    READ_ONLY_DISK,
    SHORT_CUT,
    SHORT_STOP,
    SLOW_DISK,
    Disturbance,
    Setting,
    Tally,
    draw,
    draw_start,
)
from tests.chaos.ends import Attempt, Situation, judge
from tests.chaos.invariants import (
    leftovers,
    listening,
    lost_checkpoints,
    merged_differences,
    step_differences,
)
from tests.chaos.play import compile_shim
from tests.chaos.processes import (
    FRESH_SECONDS,
    MACHINE,
    MARK,
    STALE_SECONDS,
    Process,
    Watcher,
    listens_to,
    marked,
)
from tests.cuda.devices import on_devices

HANG = 20.0
LAST_STEP = 16


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
    (path / MANIFEST_NAME).write_text(
        Manifest(CHECKPOINT_KIND, {"weights": digest_file(path / "weights")}, {"step": step}).to_json()
    )
    return path


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "place" / "run")
    run.logs.mkdir(parents=True)
    return run


@pytest.fixture
def reference(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "reference" / "run")


def setting(machines: int = 1, first_step: int = 0) -> Setting:
    return Setting(machines, HANG, first_step, LAST_STEP)


def drawn(seed: int, number: int, machines: int = 1, never: str = "") -> list[Disturbance]:
    """Disturbances in a row, each of which hits but those of the phase `never`."""
    dice, tally, found = random.Random(seed), Tally(), []
    for _ in range(number):
        one = draw(dice, tally, setting(machines))
        tally.add(one, is_hit=one.phase != never)
        found.append(one)
    return found


def test_same_seed_draws_same_disturbances() -> None:
    assert drawn(3, 20) == drawn(3, 20)
    assert drawn(3, 20) != drawn(4, 20)


def test_phases_and_kinds_are_drawn_uniformly() -> None:
    for seed in range(20):
        phases = Counter(one.phase for one in drawn(seed, 2 * len(PHASES)))
        kinds = Counter(one.kind for one in drawn(seed, 2 * len(KINDS)))
        assert phases == dict.fromkeys(PHASES, 2), seed
        assert set(kinds) == set(KINDS), seed
        assert max(kinds.values()) <= 3, seed


def test_all_combinations_are_drawn_before_any_repeats() -> None:
    found = Counter((one.kind, one.phase) for one in drawn(5, len(PHASES) * len(KINDS)))
    assert found == {(kind, phase): 1 for phase in PHASES for kind in KINDS}


def test_all_processes_and_both_machines_are_disturbed() -> None:
    found = drawn(1, 60, machines=2)
    assert {one.machine for one in found} == {0, 1}
    assert {one.target for one in found} == {"", COMMAND, AGENT, RANK, LOADER, CHILD}


def test_link_is_cut_between_two_machines_alone() -> None:
    assert not {one.kind for one in drawn(1, 60)} & set(CUTS)
    cuts = [one for one in drawn(1, 60, machines=2) if one.kind in CUTS]
    assert {one.kind for one in cuts} == set(CUTS)
    assert all(one.seconds < HANG if one.kind == SHORT_CUT else one.seconds > HANG + 5 for one in cuts)


def test_missed_phase_is_drawn_more_often_but_not_exclusively() -> None:
    phases = Counter(one.phase for one in drawn(0, 48, never="merging"))
    assert max(phases, key=phases.__getitem__) == "merging"
    assert set(phases) == set(PHASES)
    assert phases["merging"] < 12


def test_steps_are_drawn_from_remaining_steps() -> None:
    dice = random.Random(0)
    found = [draw(dice, Tally(), setting(first_step=12)) for _ in range(100)]
    assert {one.step for one in found} == {0, 13, 14, 15}
    assert {one.step > 0 for one in found if one.phase == "training"} == {True}


def test_every_startup_disturbance_can_be_drawn() -> None:
    """A harmful one may end the run, so it is the last one."""
    dice, tally = random.Random(0), Tally()
    for _ in range(200):
        main, *others = draw_start(dice, tally, setting())
        assert all(one.kind in HARMLESS for one in others)
        assert len({one.phase for one in (main, *others)}) == 1 + len(others) <= 5
        if main.kind not in HARMLESS:
            assert all(PHASES.index(one.phase) < PHASES.index(main.phase) for one in others)
        for one in (main, *others):
            tally.add(one, is_hit=True)
    assert tally.count() > 200


def test_short_stop_is_below_hang_timeout_and_long_stop_above() -> None:
    stops = [one for one in drawn(0, 60) if "stop" in one.kind]
    assert all(one.seconds < HANG if one.kind == SHORT_STOP else one.seconds > HANG + 5 for one in stops)


@pytest.mark.parametrize(
    "steps", [range(1, 6), range(1, 8), range(2, 7)], ids=["lost", "twice", "begins late"]
)
def test_differing_steps_are_detected(steps: range, run: RunDir, reference: RunDir) -> None:
    write_steps(reference, range(1, 7))
    write_steps(run, steps)
    assert step_differences(run, reference)


def test_last_digit_difference_of_loss_or_eval_loss_is_detected(run: RunDir, reference: RunDir) -> None:
    write_steps(reference, range(1, 7))
    for key, value in (("loss", 1 / 6 + 2**-54), ("eval_loss", 2.0 + 2**-51)):
        write_steps(run, range(1, 7), **{key: value})
        assert step_differences(run, reference)
    write_steps(run, range(1, 7))
    assert step_differences(run, reference) == []


def test_flipped_bit_in_merged_tensor_is_detected(run: RunDir, reference: RunDir) -> None:
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


def test_reported_checkpoint_may_only_be_removed_by_rotation(run: RunDir) -> None:
    for step in (6, 9):
        write_checkpoint(run, step)
    assert lost_checkpoints(run, [3, 6, 9], keep=2) == []
    assert lost_checkpoints(run, [3, 6], keep=2) == [], "9 has taken the place of 3, and is not reported yet"
    assert len(lost_checkpoints(run, [6, 9, 12], keep=2)) == 1
    shutil.rmtree(run.checkpoint(6))
    assert lost_checkpoints(run, [6, 9], keep=2) == [
        "checkpoint-6 was reported as saved and is gone; there are [9]"
    ]


def test_checkpoint_that_fails_verification_is_detected(run: RunDir) -> None:
    (write_checkpoint(run, 6) / "weights").write_bytes(bytes(99))
    assert [each.split(":")[0] for each in lost_checkpoints(run, [], keep=2)] == ["half written"]


def test_leftover_files_are_detected(run: RunDir) -> None:
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


def test_open_port_is_detected() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert listening(port) == []
        server.listen()
        assert listening(port) == [f"port {port} is still open"]


HANG_TEXT = "error: no progress for 25s: rank 1 (step 3, `forward`, stopped (SIGSTOP)) is late"
KILLED_TEXT = "error: rank 1 was killed by SIGKILL at step 3"
LOADER_TEXT = (
    "error: a process of the data loader is gone while rows were read: DataLoader worker (pid 4) is "
    "killed by signal: Killed."
)


def ended(
    *codes: int | None,
    text: str = "",
    step: int = 3,
    is_over: bool = False,
    listens: bool = True,
    is_early: bool = False,
    **more: object,
) -> Attempt:
    """One command for each code; each prints the same text."""
    situation = Situation(step, is_over=is_over, listens=listens, is_early=is_early)
    return Attempt(list(codes), [text] * len(codes), situation=situation, **more)


def verdict(kind: str, target: str, attempt: Attempt, phase: str = "training") -> list[str]:
    attempt = replace(attempt, target=Process(11, 10, target, 0, 1))
    return judge(Disturbance(kind, phase, target), attempt, hang_seconds=HANG, last_step=LAST_STEP)


@pytest.mark.parametrize(
    ("kind", "target", "attempt"),
    [
        pytest.param(SHORT_STOP, RANK, ended(5, text=HANG_TEXT), id="short stop is a hang"),
        pytest.param(SHORT_STOP, COMMAND, ended(0, restarts=1), id="short stop restarts"),
        pytest.param(SLOW_DISK, "", ended(5, text=HANG_TEXT), id="slow disk is a hang"),
        pytest.param(CLOCK, "", ended(1, text="error: late"), id="clock ends the run"),
        pytest.param(LONG_STOP, AGENT, ended(5, text=HANG_TEXT), id="another is named than the agent"),
        pytest.param(LONG_STOP, RANK, ended(0), id="a rank stands still and the run finishes"),
        pytest.param(
            LONG_STOP,
            RANK,
            ended(5, text=HANG_TEXT.replace("rank 1", "rank 0"), named_after_seconds=25.0),
            id="other rank named",
        ),
        pytest.param(LONG_STOP, RANK, ended(5, text=HANG_TEXT, named_after_seconds=60.0), id="named late"),
        pytest.param(LONG_STOP, LOADER, ended(5, text=HANG_TEXT), id="no report of a hang"),
        pytest.param(LONG_STOP, RANK, ended(0, step=0, is_early=True), id="an early rank stands still"),
        pytest.param(KILL, RANK, ended(0), id="a rank is killed and the run finishes"),
        pytest.param(KILL, RANK, ended(5), id="killed rank without a message"),
        pytest.param(KILL, RANK, ended(1, text=KILLED_TEXT), id="killed rank with another code"),
        pytest.param(
            KILL,
            RANK,
            ended(5, text=KILLED_TEXT.replace("rank 1", "rank 0")),
            id="another rank is named as killed",
        ),
        pytest.param(KILL, RANK, ended(0, restarts=1), id="restarted without a reason"),
        pytest.param(
            KILL,
            LOADER,
            ended(1, text="error: RuntimeError: no message"),
            id="killed loader without its message",
        ),
        pytest.param(KILL, LOADER, ended(0), id="a loader is killed and the run finishes"),
        pytest.param(KILL, CHILD, ended(1, text="error: this is a bug"), id="killed child is not named"),
        pytest.param(KILL, COMMAND, ended(-9, left=["rank 11 (rank 1)"]), id="a rank is left"),
        pytest.param(KILL, COMMAND, ended(0, -9), id="the other command is killed"),
        pytest.param(KILL, RANK, ended(None), id="no end"),
        pytest.param(FULL_DISK, "", ended(5, text=HANG_TEXT), id="full disk is a hang"),
        pytest.param(
            FULL_DISK,
            "",
            ended(1, text="error: rank 0 ended before it could report"),
            id="full disk is not named",
        ),
        pytest.param(
            READ_ONLY_DISK,
            "",
            ended(1, text="error: No space left on device"),
            id="another error than that of the disk",
        ),
        pytest.param("SIGTERM", RANK, ended(130), id="SIGTERM ends as Ctrl-C"),
        pytest.param("SIGINT", COMMAND, ended(143), id="Ctrl-C ends as SIGTERM"),
        pytest.param("SIGHUP", COMMAND, ended(0), id="the run does not stop"),
        pytest.param("SIGTERM", COMMAND, ended(-15), id="a command that listens dies"),
        pytest.param("SIGTERM", LOADER, ended(143), id="a loader's signal ends the run"),
        pytest.param("SIGTERM", CHILD, ended(-15), id="a child's signal ends the command"),
        pytest.param(
            KILL, COMMAND, ended(0, 143, dismissed={1}), id="a command waits although the run has finished"
        ),
        pytest.param(
            "SIGTERM", COMMAND, ended(143, text="Traceback (most recent call last):"), id="traceback"
        ),
    ],
)
def test_undocumented_exit_is_a_violation(kind: str, target: str, attempt: Attempt) -> None:
    assert verdict(kind, target, attempt)


@pytest.mark.parametrize(
    ("kind", "target", "attempt"),
    [
        pytest.param(SHORT_STOP, RANK, ended(0), id="short stop"),
        pytest.param(KILL, RANK, ended(5, text=KILLED_TEXT), id="killed rank"),
        pytest.param(KILL, RANK, ended(0, step=0, is_early=True), id="killed rank of an early launch"),
        pytest.param("SIGTERM", AGENT, ended(0, step=0, is_early=True), id="ended early launch"),
        pytest.param(KILL, RANK, ended(5, 5, text=KILLED_TEXT), id="killed rank, two machines"),
        pytest.param(
            READ_ONLY_DISK,
            "",
            Attempt(
                [1, 1],
                ["error: Read-only file system", "error: rank 0 ended before it could report"],
                situation=Situation(3),
            ),
            id="a disk of one machine, seen from the other",
        ),
        pytest.param(
            READ_ONLY_DISK,
            "",
            Attempt(
                [1, 1],
                ["error: rank 0 ended with exit code 1 before it could report"] * 2,
                situation=Situation(3),
            ),
            id="a disk of one machine, whose verdict the other repeats",
        ),
        pytest.param(
            READ_ONLY_DISK,
            "",
            Attempt(
                [1, 5],
                ["error: Read-only file system", "error: machine 0: OSError: Read-only file system"],
                situation=Situation(),
            ),
            id="a disk of one machine, whose command ends first",
        ),
        pytest.param(KILL, RANK, ended(0, text=KILLED_TEXT, restarts=1), id="killed rank, restarted"),
        pytest.param(KILL, RANK, ended(0, is_over=True), id="killed when all was done"),
        pytest.param(KILL, LOADER, ended(1, text=LOADER_TEXT), id="killed loader"),
        pytest.param(KILL, LOADER, ended(0, step=14), id="loader killed after its last batch"),
        pytest.param(KILL, COMMAND, ended(-9), id="killed command"),
        pytest.param(
            KILL, COMMAND, ended(-9, 5, text="error: another rank is gone"), id="killed command of two"
        ),
        pytest.param(
            KILL,
            COMMAND,
            ended(-9, 143, text="error:", dismissed={1}),
            id="a command that waited for the killed one",
        ),
        pytest.param(LONG_STOP, RANK, ended(5, text=HANG_TEXT, named_after_seconds=25.0), id="hang"),
        pytest.param(LONG_STOP, COMMAND, ended(0), id="the command stood still"),
        pytest.param(
            LONG_STOP, CHILD, ended(0, 143, dismissed={1}), id="the store stood still at the end of the run"
        ),
        pytest.param(
            LONG_CUT,
            "",
            ended(0, 143, dismissed={1}, step=LAST_STEP),
            id="the link was cut at the end of the run",
        ),
        pytest.param("SIGTERM", RANK, ended(143, 143), id="a signal to a rank of two machines"),
        pytest.param("SIGHUP", COMMAND, ended(0, step=10), id="a signal shortly before the end"),
        pytest.param("SIGTERM", COMMAND, ended(-15, listens=False), id="a command that does not listen yet"),
        pytest.param(
            FULL_DISK, "", ended(1, text="error: metrics.jsonl: No space left on device"), id="full disk"
        ),
    ],
)
def test_documented_exit_is_not_a_violation(kind: str, target: str, attempt: Attempt) -> None:
    assert verdict(kind, target, attempt) == []


@pytest.mark.parametrize(
    ("kind", "code", "step", "is_fine"),
    [
        (SHORT_CUT, 0, 3, True),
        (SHORT_CUT, 5, 3, False),
        (LONG_CUT, 5, 3, True),
        (LONG_CUT, 0, 3, False),
        (LONG_CUT, 0, LAST_STEP, True),
        (LONG_CUT, 1, 3, False),
    ],
)
def test_link_that_is_cut_longer_than_the_limit_ends_the_run(
    kind: str, code: int, step: int, is_fine: bool
) -> None:
    text = "error: no progress for 20 s" if code else ""
    attempt = Attempt([code, code], [text, text], situation=Situation(step))
    assert (
        judge(Disturbance(kind, "training", ""), attempt, hang_seconds=HANG, last_step=LAST_STEP) == []
    ) is is_fine


def test_machines_compare_their_clocks_while_they_prepare() -> None:
    text = "error: machine 1 (b) differs from machine 0 (a): a clock that is 24h00m00s behind the other"
    attempt = Attempt([1, 1], [text, text], situation=Situation())
    clock = Disturbance(CLOCK, "preparing", "")
    assert judge(clock, replace(attempt, has_jumped=True), hang_seconds=HANG, last_step=LAST_STEP) == []
    assert judge(clock, attempt, hang_seconds=HANG, last_step=LAST_STEP)


def test_undisturbed_attempt_must_finish() -> None:
    assert judge(None, Attempt([0], [""]), hang_seconds=HANG, last_step=LAST_STEP) == []
    assert judge(
        Disturbance(KILL, "training", RANK),
        Attempt([5], [KILLED_TEXT]),
        hang_seconds=HANG,
        last_step=LAST_STEP,
    )


def test_processes_are_found_by_marker_without_their_parent(tmp_path: Path) -> None:
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


def write_beat(run: RunDir, rank: int, pid: int, phase: str, step: int, age_seconds: float = 0.0) -> None:
    path = run.rank_heartbeat(rank)
    path.write_text(json.dumps({"rank": rank, "pid": pid, "phase": phase, "step": step}))
    written_at = time.time() - age_seconds
    os.utime(path, (written_at, written_at))


COMMAND_0, AGENT_0, RANK_0 = (
    Process(1, 0, COMMAND, 0, None),
    Process(2, 1, AGENT, 0, None),
    Process(3, 2, RANK, 0, 0),
)


def test_phase_is_read_from_live_heartbeats_stages_and_process_table(run: RunDir) -> None:
    watcher = Watcher(run, started_at=time.time() - 5, last_step=LAST_STEP)

    def phases(*processes: Process) -> set[str]:
        return set(watcher.moment(processes).phases)

    assert phases(COMMAND_0) == {"preparing"}
    assert phases(COMMAND_0, AGENT_0) == {"launching"}
    write_beat(run, 0, 999, "training", 5)
    assert phases(COMMAND_0, AGENT_0, RANK_0) == {"launching"}, "the heartbeat is of an older rank"
    write_beat(run, 0, 3, "backward", 5)
    assert phases(COMMAND_0, AGENT_0, RANK_0) == {"training"}
    (run.path / ".checkpoint-3.stage-7").mkdir()
    assert phases(COMMAND_0, AGENT_0, RANK_0) == {"training", "saving"}
    write_beat(run, 0, 3, "saving", LAST_STEP)
    assert phases(COMMAND_0, AGENT_0, RANK_0) == {"final save"}
    assert phases(COMMAND_0, AGENT_0) == set(), "its ranks have ended"
    assert phases(COMMAND_0) == set(), "the command may start the ranks again"
    (run.logs / "outcome.json").write_text('{"exit_code": 0}')
    assert phases(COMMAND_0) == {"merging"}
    assert phases() == set()


def test_phase_in_old_heartbeat_is_ignored(run: RunDir) -> None:
    watcher = Watcher(run, started_at=time.time(), last_step=LAST_STEP)
    write_beat(run, 0, 3, "evaluating", 5, age_seconds=STALE_SECONDS)
    assert watcher.moment([COMMAND_0, AGENT_0, RANK_0]).phases == set()
    write_beat(run, 0, 3, "evaluating", 5, age_seconds=2 * FRESH_SECONDS)
    assert watcher.moment([COMMAND_0, AGENT_0, RANK_0]).phases == {"evaluating"}, (
        "it was written since the last look"
    )
    assert watcher.moment([COMMAND_0, AGENT_0, RANK_0]).phases == set()
    write_beat(run, 0, 3, "evaluating", 5)
    found = watcher.moment([COMMAND_0, AGENT_0, RANK_0])
    assert (found.phases, found.step, found.phase_of_rank) == ({"evaluating"}, 5, {0: "evaluating"})


def test_merge_of_finished_run_is_detected(run: RunDir) -> None:
    watcher = Watcher(run, started_at=time.time(), last_step=LAST_STEP)
    assert watcher.moment([COMMAND_0]).phases == {"preparing"}
    (run.path / ".merged.stage-1").mkdir()
    assert watcher.moment([COMMAND_0]).phases == {"merging"}


def test_handled_and_ignored_signals_count_as_listening() -> None:
    script = (
        "import signal; signal.signal(signal.SIGTERM, print); signal.signal(signal.SIGHUP, "
        "signal.SIG_IGN); print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert [
            listens_to(child.pid, number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        ] == [True, True, False]
        child.kill()


def tally_of(*hits: tuple[str, str, str]) -> Tally:
    return Tally(Counter(hits))


def test_results_of_as_many_machines_are_replaced_and_shown() -> None:
    tally = tally_of((KILL, "training", RANK), (KILL, "merging", RANK), (CLOCK, "merging", ""))
    parts = page.with_part([], page.part(2, "Seed 2.", tally))
    parts = page.with_part(parts, page.part(1, "Seed 1.", tally_of()))
    parts = page.with_part(parts, page.part(1, "Seed 3.", tally_of()))
    assert [(each["machines"], each["summary"]) for each in parts] == [(1, "Seed 3."), (2, "Seed 2.")]
    assert parts[1]["hits"][KILL] == {"training": 1, "merging": 1}
    assert (parts[1]["processes"][RANK], sum(parts[1]["processes"].values())) == (2, 2)
    text = page.section(parts)
    assert [
        text.count(each) for each in ("## Chaos\n", "**One machine.** Seed 3.", "**2 machines.** Seed 2.")
    ] == [1, 1, 1]
    assert f"{KILL} 2, " in text


needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="the shim is compiled by gcc")


@needs_gcc
def test_disk_shim_fails_only_in_its_directory_of_a_running_process(tmp_path: Path) -> None:
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
    with subprocess.Popen(
        [sys.executable, "-c", script], env=stage.environment("t", 0) | {"PYTHONPATH": ""}, **pipes
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def written(path: Path) -> int:
            child.stdin.write(f"{path}\n")
            child.stdin.flush()
            return int(child.stdout.readline())

        inside, outside = stage.run.path / "a", tmp_path / "b"
        assert written(inside) == 100_000
        stage.disks[0] = FULL_DISK
        stage.control(0)
        assert (written(inside), written(outside)) == (28, 100_000)
        stage.disks[0] = READ_ONLY_DISK
        stage.control(0)
        assert (written(inside), written(outside)) == (30, 100_000)
        stage.disks[0] = SLOW_DISK
        stage.control(0)
        started = time.monotonic()
        assert written(inside) == 100_000
        assert time.monotonic() - started > 1.0
        child.stdin.close()


@needs_gcc
def test_clock_jump_does_not_change_waiting_time(tmp_path: Path) -> None:
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
        stage.clocks[0] = seconds
        stage.control(0)
        command = [sys.executable, "-c", script]
        done = subprocess.run(
            command, env=stage.environment("t", 0), capture_output=True, text=True, check=True, timeout=60
        )
        told, waited = done.stdout.split()
        assert abs(float(told) - time.time() - seconds) < 60
        assert waited == "True"


@needs_gcc
@pytest.mark.slow
@pytest.mark.ranks
@on_devices
def test_run_with_killed_rank_equals_undisturbed_run(tmp_path: Path, device: str) -> None:
    chaos = Chaos(tmp_path, random.Random(0), machines=1, device=device)
    chaos.undisturbed()
    chaos.story([[Disturbance(KILL, "training", RANK, step=4)]])
    assert chaos.violations == []
    assert chaos.tally.hits == {(KILL, "training", RANK): 1}
    assert chaos.attempts in (1, 2, 3)


@needs_gcc
@pytest.mark.slow
@pytest.mark.ranks
def test_kills_after_the_last_save_and_inside_the_merge_lose_nothing(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, random.Random(0), machines=1)
    chaos.undisturbed()
    chaos.story([[Disturbance(KILL, "final save", RANK)], [Disturbance(KILL, "merging", COMMAND)]])
    assert chaos.violations == []
    assert {kind for kind, _, _ in chaos.tally.hits} <= {KILL}
    assert chaos.tally.hits or chaos.tally.missed
