"""Kill, stop and fail the real worker in the middle of a run: it resumes, and ends like an undisturbed
run."""

from __future__ import annotations

import errno
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.run.directory import RunDir, latest_checkpoint
from tests.cuda.devices import on_devices
from tests.faults import ranks
from tests.faults.checks import stages, verified_steps
from tests.faults.conftest import Count
from tests.faults.disk import Fault
from tests.faults.ranks import Happening
from tests.faults.training import CASE, STEPS, Training, numbers, outcomes
from tests.parity import runs
from tests.parity.bench import shared_bench
from tests.parity.cases import Case
from tests.ranks import KILLED, Ranks

pytestmark = pytest.mark.ranks
slow = pytest.mark.slow


def cases(fast: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
    return [*fast, *(pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=slow) for one in rest)]


def each(rest: Sequence[Any]) -> list[Any]:
    """One argument, whose values may be tuples; all slow."""
    return [pytest.param(one, marks=slow, id=str(one)) for one in rest]


def death(training: Training, *happenings: Happening) -> RunDir:
    run = training.new()
    ends = training.attempt(run, happenings)
    killed = {happening.rank for happening in happenings}
    assert {rank for rank, end in enumerate(ends) if end.code == -signal.SIGKILL} == killed
    for rank, end in enumerate(ends):
        if rank not in killed:
            outcome = json.loads(run.rank_outcome(rank).read_text())
            assert (outcome["exit_code"], outcome["exit_reason"]) == (5, "lost_rank"), end.text
    return run


@on_devices
@pytest.mark.parametrize(
    ("phase", "step"),
    cases(
        [("forward", 8)],
        [("fetch", 4), ("reduce", 7), ("log", 6), ("evaluate", 5), ("save", 3), ("save", 12), ("forward", 0)],
    ),
)
@pytest.mark.parametrize("rank", cases([1], [0]))
def test_rank_killed_in_any_phase_ends_the_others_and_the_run_resumes(
    rank: int, phase: str, step: int, training: Training
) -> None:
    run = death(training, Happening(rank, phase, step))
    training.finish(run)
    training.is_whole(run)


@on_devices
@slow
def test_rank_killed_while_ranks_generate_ends_the_others_and_the_run_resumes(on_ranks: Ranks) -> None:
    sample = {"every": 4, "prompts": ["one plus two is", "two"], "max_new_tokens": 4}
    training = Training(on_ranks, changes={"training": {"sample": sample}}, vocabulary=384)
    run = death(training, Happening(1, ranks.SAMPLE, 8))
    assert verified_steps(run) == [3, 6]
    training.finish(run)
    training.is_whole(run)
    assert samples(run) == samples(training.whole)
    assert [step for step, _ in samples(run)] == [4, 8, 12]


def samples(run: RunDir) -> list[tuple[int, list[str]]]:
    return [
        (line["step"], [each["text"] for each in line["samples"]])
        for line in runs.lines(run)
        if line.get("event") == "samples"
    ]


@on_devices
@slow
def test_run_with_all_ranks_killed_resumes(training: Training) -> None:
    run = training.new()
    ends = training.attempt(run, [Happening(0, "forward", 8), Happening(1, "forward", 8)])
    assert -signal.SIGKILL in {end.code for end in ends}
    assert verified_steps(run) in ([3, 6], [3]), (
        "the save of step 6 is in the background, and a busy machine may not have written it"
    )
    training.finish(run)
    training.is_whole(run)


@on_devices
@slow
def test_five_crashes_in_a_row_lose_nothing(training: Training) -> None:
    run = training.new()
    for attempt, step in enumerate((3, 3, 4, 7, 7)):
        ends = training.attempt(run, [Happening(attempt % 2, "forward", step)])
        assert -signal.SIGKILL in {end.code for end in ends}
        steps = verified_steps(run)
        assert (steps[-1] if steps else 0) >= step - step % 3 - 3, "at most save_steps steps are lost"
    training.finish(run)
    training.is_whole(run)


@on_devices
@slow
@pytest.mark.parametrize("number", [1, 37, 90, 300, 500, 700, 1200])
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_killed_at_a_file_operation_of_a_save_resumes(
    number: int, rank: int, training: Training
) -> None:
    """Saves run in the background while the next steps are taken."""
    run = training.new()
    ends = training.attempt(run, faults=[(rank, Fault(number, "torn", inside=".checkpoint-"))])
    assert ends[rank].code == KILLED
    training.finish(run)
    training.is_whole(run)


@on_devices
@pytest.mark.parametrize("step", cases([], [1, 2, 3, 4, 5, 6, 7, 8, 9]))
def test_stop_and_resume_at_any_step_continues_losses(step: int, training: Training) -> None:
    """Dropout, accumulation, a schedule, the end of an epoch, and the steps where it saves anyway."""
    run = training.new()
    ends = training.attempt(run, [Happening(step % 2, "forward", step, signal.SIGUSR1)])
    assert outcomes(ends) == [(143, "preempted")] * 2
    [stopped] = {end.value["step"] for end in ends}
    assert step < stopped <= step + 2
    assert verified_steps(run)[-1] == stopped
    training.finish(run)
    training.is_whole(run)


@on_devices
@pytest.mark.parametrize(
    ("number", "code"), cases([], [(signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGINT, 130)])
)
@pytest.mark.parametrize(
    "phases", each([("fetch", "forward"), ("forward", "log"), ("log", "fetch"), ("reduce", "save")])
)
def test_signals_at_different_times_stop_both_ranks_at_one_step(
    number: int, code: int, phases: tuple[str, str], training: Training
) -> None:
    run = training.new()
    ends = training.attempt(
        run, [Happening(rank, phase, 5, number, times=3) for rank, phase in enumerate(phases)]
    )
    assert {outcome[0] for outcome in outcomes(ends)} == {code}
    assert len({end.value["step"] for end in ends}) == 1
    assert verified_steps(run)[-1] == ends[0].value["step"]
    stops = [line for line in runs.lines(run) if line.get("event") == "stopping"]
    assert len(stops) == 1, "one save, though each signal came three times to each rank"
    training.finish(run)
    training.is_whole(run)


@slow
@pytest.mark.parametrize("step", [10, 11])
def test_signal_in_last_steps_keeps_final_checkpoint(step: int, training: Training) -> None:
    run = training.new()
    ends = training.attempt(run, [Happening(0, "forward", step, signal.SIGTERM)])
    assert outcomes(ends)[0] in ((0, "finished"), (143, "preempted"))
    if outcomes(ends)[0][0] == 143:
        training.finish(run)
    training.is_whole(run)


@on_devices
@pytest.mark.parametrize("number", cases([], [1, 3, 60, 150, 260, 330]))
def test_signal_during_a_save_stops_after_it(number: int, training: Training) -> None:
    run = training.new()
    fault = Fault(number, "before", inside=".checkpoint-3.", signal=signal.SIGTERM)
    ends = training.attempt(run, faults=[(0, fault)])
    assert outcomes(ends) == [(143, "preempted")] * 2
    assert 3 in verified_steps(run)
    training.finish(run)
    training.is_whole(run)


@on_devices
@slow
@pytest.mark.parametrize("rank", [0, 1])
def test_failed_save_on_stop_exits_1_and_keeps_older_checkpoint(rank: int, training: Training) -> None:
    run = training.new()
    full = Fault(1, "error", errno.ENOSPC, sticky=True, inside=".checkpoint-8.")
    ends = training.attempt(run, [Happening(0, "forward", 6, signal.SIGUSR1)], [(rank, full)])
    assert outcomes(ends) == [(1, "failed")] * 2
    assert "No space left" in ends[0].value["problem"]["message"]
    assert verified_steps(run) == [3, 6]
    training.finish(run)
    training.is_whole(run)


@on_devices
@slow
@pytest.mark.parametrize("rank", [0, 1])
def test_save_succeeds_after_disk_space_is_freed(rank: int, training: Training) -> None:
    run = training.new()
    ends = training.attempt(
        run, faults=[(rank, Fault(1, "error", errno.ENOSPC, sticky=True, inside=".checkpoint-6."))]
    )
    assert outcomes(ends) == [(0, "finished")] * 2
    events = {
        line["step"]: line["event"]
        for line in runs.lines(run)
        if str(line.get("event")).startswith("checkpoint_")
    }
    assert events == {
        3: "checkpoint_saved",
        6: "checkpoint_failed",
        9: "checkpoint_saved",
        12: "checkpoint_saved",
    }
    training.is_whole(run)


@slow
@pytest.mark.parametrize("kind", ["torn", "beyond", "gone", "garbage"])
def test_metrics_are_truncated_to_the_checkpoint_and_hold_each_step_once(
    kind: str, training: Training
) -> None:
    run = training.new()
    training.attempt(run, [Happening(1, "forward", 8)])
    text = run.metrics_jsonl.read_text()
    if kind == "torn":
        run.metrics_jsonl.write_text(text + text.splitlines()[-1][: len(text.splitlines()[-1]) // 2])
    elif kind == "beyond":
        run.metrics_jsonl.write_text(text + '{"step": 11, "loss": 1.0}\n{"step": 999, "loss": 1.0}\n')
    elif kind == "garbage":
        run.metrics_jsonl.write_text("\x00\x00[]\nnull\n" + text + '\n{"step": "x", "loss": 3}\n')
    else:
        run.metrics_jsonl.unlink()
    # of step 6, or of 3 where the save in the background was slower than the kill
    newest, _ = latest_checkpoint(run)
    assert newest is not None
    training.finish(run)
    found, wanted = numbers(run), numbers(training.whole)
    assert found == (wanted[newest.step :] if kind == "gone" else wanted)


@on_devices
@pytest.mark.parametrize("worlds", each([(2, 4, 1), (1, 2, 4), (4, 2, 1)]))
def test_two_resumes_on_other_numbers_of_ranks_follow_the_reference(
    worlds: tuple[int, ...], on_ranks: Ranks, count: Count
) -> None:
    """Llama without dropout, whose curve does not depend on the number of ranks."""
    training = Training(on_ranks, Case("llama", ranks=2))
    run: RunDir | None = None
    for world, stop in zip(worlds, (4, 8, None), strict=True):
        case = Case("llama", ranks=world)
        again = training.new(case)
        training.case = case
        if run is not None:
            for name in (checkpoint.name for checkpoint in run.path.glob("checkpoint-*")):
                (run.path / name).rename(again.path / name)
            run.metrics_jsonl.rename(again.metrics_jsonl)
        run = again
        if stop is None:
            training.finish(run)
        else:
            ends = training.attempt(run, [Happening(world - 1, "forward", stop - 2, signal.SIGUSR1)])
            assert set(outcomes(ends)) == {(143, "preempted")}
            assert verified_steps(run)[-1] == stop
    assert run is not None
    found, wanted = runs.loss_lines(run), runs.loss_lines(training.whole)
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    for one, other in zip(found, wanted, strict=True):
        assert (one["supervised_tokens"], one["tokens"]) == (other["supervised_tokens"], other["tokens"]), (
            "the same rows"
        )
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    reference = shared_bench().reference("llama")
    for one, loss in zip(found[:3], reference.losses, strict=False):
        assert one["loss"] == pytest.approx(loss, rel=1e-5), "warmup is the same for both lengths"
    count(resumes=2)


@on_devices
@slow
@pytest.mark.parametrize(
    "change",
    [
        {"fsdp": {"activation_checkpointing": "full"}},
        {"fsdp": {"sharding_strategy": "NO_SHARD"}},
        {"fsdp": {"state_dict_type": "FULL_STATE_DICT"}},
    ],
    ids=["recomputation", "replicated", "full state dict"],
)
def test_resume_with_other_sharding_equals_uninterrupted_run(change: dict[str, Any], on_ranks: Ranks) -> None:
    training = Training(on_ranks, CASE, change)
    run = training.new()
    training.attempt(run, [Happening(0, "forward", 7)])
    training.finish(run)
    training.is_whole(run)


@on_devices
@slow
def test_recomputation_draws_same_dropout_masks_after_resume(training: Training, on_ranks: Ranks) -> None:
    recomputed = Training(on_ranks, CASE, {"fsdp": {"activation_checkpointing": "full"}})
    run = recomputed.new()
    recomputed.attempt(run, [Happening(0, "forward", 7)])
    recomputed.finish(run)
    assert numbers(run) == numbers(training.whole)


@on_devices
@pytest.mark.parametrize("world", [pytest.param(1, marks=slow), 4])
def test_ranks_of_another_world_size_have_own_random_streams(
    world: int, tmp_path: Path, on_ranks: Ranks
) -> None:
    on_ranks.run(2, ranks.save, tmp_path, ranks.FIRST)
    drawn = on_ranks.run(world, ranks.drawn_after_coming_back, tmp_path / f"checkpoint-{ranks.FIRST}")
    assert len(set(drawn)) == world
    assert drawn == on_ranks.run(
        world, ranks.drawn_after_coming_back, tmp_path / f"checkpoint-{ranks.FIRST}"
    ), "repeatable"


@on_devices
@slow
def test_repeated_saves_leak_nothing(tmp_path: Path, on_ranks: Ranks, count: Count) -> None:
    for early, late in on_ranks.run(2, ranks.many_saves, tmp_path, 400, limit_seconds=400.0):
        assert late[0] <= early[0] + 2, "open files"
        assert late[1] <= early[1] + 1, "threads"
        assert late[2] <= early[2] + 40_000, "resident KiB"
    assert stages(tmp_path) == []
    assert verified_steps(RunDir(tmp_path)) == [399, 400]
    count(saves=400)
