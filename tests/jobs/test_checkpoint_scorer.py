"""The command has each complete checkpoint scored once, by a process that never outlives it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from fsdp_tune.core import devices
from fsdp_tune.core.devices import Device
from fsdp_tune.core.errors import FsdpTuneError, Notice
from fsdp_tune.core.signals import StoppedBySignal
from fsdp_tune.core.units import format_bytes
from fsdp_tune.jobs import checkpoint_scorer as jobs
from fsdp_tune.jobs.checkpoint_scorer import (
    Evaluating,
    check_evaluation,
    evaluating,
    refuse_scores_without_room,
)
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.launch import scoring
from fsdp_tune.launch.scoring import EvaluationDevice, ScoringProcess, evaluation_device
from fsdp_tune.model.model_files import ModelFacts
from fsdp_tune.planner.trace_format import KINDS
from fsdp_tune.recipe.schema.evaluation import CheckpointEvaluation
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.checkpoint_scores import CheckpointScores
from fsdp_tune.run.directory import RunDir, complete_checkpoints
from fsdp_tune.run.evaluation_record import EvaluationRecord
from fsdp_tune.run.events import CheckpointEvaluated, CheckpointEvaluationFailed
from fsdp_tune.run.metrics_file import MetricsFile, append_event, read_metrics
from tests.run.test_checkpoint_scores import save

SCORES = {"scores": {"sums/exact_match": {"value": 0.5, "low": 0.1, "high": 0.9, "rows": 8}}}
PRINTS = "import sys, json; print(json.dumps({line}))"
WAITS = "import sys, time, os; open(sys.argv[1] + '/pid', 'w').write(str(os.getpid())); time.sleep(99)"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.logs.mkdir(parents=True)
    return run


@pytest.fixture
def scored_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces the process that scores a checkpoint by a program that is given the run and the step."""
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.05)
    return lambda program: monkeypatch.setattr(scoring, "SCORE", (sys.executable, "-I", "-S", "-c", program))


def recipe(run: RunDir, timeout: str = "1h", **training: Any) -> Recipe:
    document = {
        "model": {"name_or_path": "gpt2"},
        "data": {"train": [{"path": "rows.jsonl"}]},
        "evaluation": {
            "sets": [{"path": "rows.jsonl", "label": "sums", "metric": "exact_match"}],
            "timeout": timeout,
        },
        "training": training,
        "launch": {"device": "cpu"},
        "output_dir": str(run.path),
    }
    return Recipe.model_validate(document)


def events(run: RunDir) -> list[tuple[str, int]]:
    return [
        (str(line["event"]), int(line["step"]))
        for line in read_metrics(run)
        if "evaluat" in str(line.get("event"))
    ]


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_each_checkpoint_is_scored_once_and_old_ones_are_removed_at_the_end(
    run: RunDir, scored_by: Callable[[str], None]
) -> None:
    scored_by(PRINTS.format(line=SCORES))
    save(run, 10)
    evaluations = Evaluating(run, recipe(run, save_total_limit=1), Observer())
    with evaluations.following():
        until(lambda: events(run) == [("checkpoint_evaluated", 10)])
        save(run, 20)
        save(run, 30)
        evaluations.finish()
    assert events(run) == [("checkpoint_evaluated", step) for step in (10, 20, 30)]
    assert [each.step for each in complete_checkpoints(run)[0]] == [30]
    again = Evaluating(run, recipe(run), Observer())
    with again.following():
        again.finish()
    assert len(events(run)) == 3


def test_error_in_the_thread_is_said_at_the_end_and_the_next_command_evaluates(
    run: RunDir, scored_by: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    scored_by(PRINTS.format(line=SCORES))
    save(run, 10)
    observer = Notices()
    with monkeypatch.context() as patched:
        patched.setattr(scoring, "_read", lambda *_: 1 / 0)
        evaluations = Evaluating(run, recipe(run), observer)
        with evaluations.following():
            evaluations.finish()
    assert observer.codes == ["evaluations-stopped"]
    assert "ZeroDivisionError" in (run.logs / jobs.LOG).read_text()
    again = Evaluating(run, recipe(run), Observer())
    with again.following():
        again.finish()
    assert events(run) == [("checkpoint_evaluated", 10)]


def test_checkpoints_that_cannot_be_listed_at_the_end_are_said(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run ends as if they were evaluated. While ranks run, the next look may succeed."""
    save(run, 10)

    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(jobs, "checkpoints_to_evaluate", refuse)
    observer = Notices()
    evaluations = Evaluating(run, recipe(run), observer)
    with evaluations.following():
        evaluations.finish()
    assert observer.codes == ["evaluations-stopped"]


def test_line_that_rank_0_cut_off_is_written_again(run: RunDir, scored_by: Callable[[str], None]) -> None:
    scored_by(PRINTS.format(line=SCORES))
    save(run, 10)
    evaluations = Evaluating(run, recipe(run), Observer())
    with evaluations.following():
        until(lambda: len(events(run)) == 1)
        MetricsFile(run, resume_step=5, enabled=True).close()
        scored_by("raise SystemExit(1)")
        until(lambda: events(run) == [("checkpoint_evaluated", 10)])


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (
            PRINTS.format(line={"problem": {"code": "merge-disk-full", "message": "no room"}}),
            "merge-disk-full",
        ),
        ("raise SystemExit(3)", "evaluation-failed"),
        ("import os; os.kill(os.getpid(), 9)", "evaluation-failed"),
        (WAITS, "evaluation-timeout"),
    ],
)
def test_failed_evaluation_is_an_event_and_is_tried_again_by_the_next_command(
    run: RunDir, scored_by: Callable[[str], None], program: str, code: str
) -> None:
    scored_by(program)
    save(run, 10)
    evaluations = Evaluating(run, recipe(run, "1s" if program == WAITS else "1h"), Observer())
    with evaluations.following():
        evaluations.finish()
    assert [line["code"] for line in read_metrics(run)] == [code]
    scored_by(PRINTS.format(line=SCORES))
    evaluations = Evaluating(run, recipe(run), Observer())
    with evaluations.following():
        evaluations.finish()
    assert events(run)[1:] == [("checkpoint_evaluated", 10)]


def test_stop_ends_the_process_and_the_next_command_evaluates(
    run: RunDir, scored_by: Callable[[str], None]
) -> None:
    scored_by(WAITS)
    save(run, 10)
    with Evaluating(run, recipe(run), Observer()).following():
        until(lambda: (run.path / "pid").exists() and (run.path / "pid").read_text() != "")
        child = psutil.Process(int((run.path / "pid").read_text()))
    assert not child.is_running()
    assert events(run) == []
    scored_by(PRINTS.format(line=SCORES))
    evaluations = Evaluating(run, recipe(run), Observer())
    with evaluations.following():
        evaluations.finish()
    assert events(run) == [("checkpoint_evaluated", 10)]


def test_mistake_in_a_set_is_found_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp_tune.data.tokenise.tokenizer import load_encoder

    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a row without a prompt"}) + "\n")
    document = recipe(RunDir(tmp_path)).model_dump(by_alias=True)
    document["model"] |= {"tokenizer": "builtin:arithmetic", "tokenizer_revision": "main"}
    document["data"] |= {"cache_dir": str(tmp_path / "cache"), "num_proc": 1}
    document["evaluation"]["sets"][0]["path"] = str(tmp_path / "rows.jsonl")
    strange = Recipe.model_validate(document)
    with pytest.raises(FsdpTuneError) as caught:
        check_evaluation(strange, load_encoder(strange), Observer())
    assert caught.value.problems[0].code == "no-prompt"
    document["evaluation"]["sets"][0] |= {"path": str(tmp_path / "missing.jsonl")}
    missing = Recipe.model_validate(document)
    with pytest.raises(FsdpTuneError) as caught:
        check_evaluation(missing, load_encoder(missing), Observer())
    assert str(caught.value.problems[0].where.key).startswith("evaluation.sets[0]")


@pytest.mark.parametrize(
    ("when", "visible", "ranks", "variable", "expected"),
    [
        ("alongside", 8, 8, None, EvaluationDevice("cpu", ranks_compute=True)),
        (
            "alongside",
            8,
            6,
            None,
            EvaluationDevice("cuda", {"CUDA_VISIBLE_DEVICES": "6,7"}, ranks_compute=True),
        ),
        (
            "alongside",
            3,
            2,
            "4,5,6",
            EvaluationDevice("cuda", {"CUDA_VISIBLE_DEVICES": "6"}, ranks_compute=True),
        ),
        ("at_end", 3, 3, None, EvaluationDevice("auto", {"CUDA_VISIBLE_DEVICES": "0,1,2"})),
        ("between_steps", 8, 2, None, EvaluationDevice("auto", {"CUDA_VISIBLE_DEVICES": "0,1"})),
        ("between_steps", 3, 2, "4,5,6", EvaluationDevice("auto", {"CUDA_VISIBLE_DEVICES": "4,5"})),
    ],
)
def test_evaluation_uses_gpus_of_the_ranks_or_those_that_no_rank_uses(
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    visible: int,
    ranks: int,
    variable: str | None,
    expected: EvaluationDevice,
) -> None:
    there = 7 if variable is not None else visible
    monkeypatch.setattr(
        devices, "nvidia_devices", lambda: [Device("cuda", "A GPU", f"GPU-{index}") for index in range(there)]
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    document = {
        "evaluation": {"sets": [{"path": "a"}], "when": when},
        "launch": {"device": "cuda", "num_processes": ranks},
    }
    resolved = Recipe.model_validate(document)
    assert evaluation_device(resolved) == expected
    variables = evaluation_device(resolved, after_ranks=True).variables
    assert variables["CUDA_VISIBLE_DEVICES"] == ",".join((variable or "0,1,2,3,4,5,6,7").split(",")[:ranks])


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, StoppedBySignal), (signal.SIGINT, KeyboardInterrupt)]
)
def test_signal_at_the_last_step_is_not_followed_by_evaluations(
    run: RunDir, scored_by: Callable[[str], None], number: int, error: type[BaseException]
) -> None:
    scored_by(WAITS)
    save(run, 10)
    evaluations = Evaluating(run, recipe(run), Observer())
    with pytest.raises(error), evaluations.following():
        evaluations.finish(number)
    scored_by(PRINTS.format(line=SCORES))
    evaluations = Evaluating(run, recipe(run), Observer())
    with evaluations.following():
        evaluations.finish()
        evaluations.finish(number)  # nothing is left, so the run is merged
    assert events(run) == [("checkpoint_evaluated", 10)]


class Notices(Observer):
    def __init__(self) -> None:
        self.codes: list[str] = []

    def notices(self, notices: Sequence[Notice]) -> None:
        self.codes += [each.code for each in notices]


def evaluated(run: RunDir) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run) if line.get("event") == "checkpoint_evaluated"]


def test_score_that_no_task_has_is_a_warning_and_nothing_is_deleted(
    run: RunDir, scored_by: Callable[[str], None]
) -> None:
    scored_by(
        PRINTS.format(
            line={
                "scores": {
                    "gsm8k/exact_match.strict-match": {"value": 0.5, "low": None, "high": None, "rows": 8}
                }
            }
        )
    )
    best = {
        "metric_for_best_model": "gsm8k/exact_match",
        "greater_is_better": True,
        "load_best_model_at_end": True,
    }
    document = recipe(run, save_total_limit=1, **best).model_dump(by_alias=True)
    document["evaluation"] |= {"sets": [], "tasks": ["gsm8k"]}
    for step in (10, 20, 30):
        save(run, step)
    Evaluating(run, Recipe.model_validate(document), Observer()).finish()
    assert [each.step for each in complete_checkpoints(run)[0]] == [30, 20, 10]
    first, *others = [line["warnings"] for line in evaluated(run)]
    assert "no score `gsm8k/exact_match`" in first[0]
    assert "gsm8k/exact_match.strict-match" in first[0]
    assert others == [[], []]


@pytest.mark.parametrize(
    ("program", "event"),
    [("raise SystemExit(3)", "_evaluation_failed"), (PRINTS.format(line=SCORES), "_evaluated")],
)
def test_line_that_a_full_disk_refused_is_written_later(
    run: RunDir, scored_by: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, program: str, event: str
) -> None:
    calls: list[object] = []

    def append(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        append_event(*arguments)

    monkeypatch.setattr(jobs, "append_event", append)
    scored_by(program)
    save(run, 10)
    Evaluating(run, recipe(run), Observer()).finish()
    assert events(run) == [(f"checkpoint{event}", 10)]


def test_scores_of_any_length_are_read(run: RunDir, scored_by: Callable[[str], None]) -> None:
    """A pipe that is read at the end takes 64 KiB, and the process would wait for its reader until
    `evaluation.timeout`."""
    score = {"value": 0.5, "low": None, "high": None, "rows": 8}
    scored_by(
        f"import json; print(json.dumps({{'scores': {{f'mmlu_{{i:060}}/acc': {score} for i in "
        f"range(1000)}}}}))"
    )
    save(run, 10)
    Evaluating(run, recipe(run, "5s"), Observer()).finish()
    [line] = evaluated(run)
    assert len(line["scores"]) == 1000


def test_scores_that_are_empty_are_a_failure(run: RunDir, scored_by: Callable[[str], None]) -> None:
    scored_by(
        PRINTS.format(line={"scores": {}, "warnings": ["`wikitext/bits_per_byte` is nan, so it is left out"]})
    )
    save(run, 10)
    Evaluating(run, recipe(run), Observer()).finish()
    (line,) = read_metrics(run)
    assert (line["event"], line["code"]) == ("checkpoint_evaluation_failed", "evaluation-failed")
    assert "bits_per_byte" in line["message"]


def test_finished_run_is_concluded_although_nothing_can_be_removed_or_logged(
    run: RunDir, scored_by: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    scored_by(PRINTS.format(line=SCORES))
    save(run, 10)
    observer = Notices()
    Evaluating(run, recipe(run), observer).finish()
    monkeypatch.setattr(jobs, "rotate", refuse)
    monkeypatch.setattr(jobs.DISK, "open_private", refuse)
    Evaluating(run, recipe(run, report_to=["tensorboard"]), observer).finish()
    assert observer.codes == ["rotation-failed", "scores-not-tracked"]


def test_process_of_an_evaluation_has_a_clean_environment_and_the_gpus_that_ranks_have_left(
    run: RunDir, scored_by: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    scored_by(
        "import sys, json, os; name = f'{sys.argv[3]} {os.environ.get(chr(76) + \"OCAL_RANK\")}'; "
        "print(json.dumps({'scores': {name: {'value': 1.0, 'low': None, 'high': None, 'rows': 1}}}))"
    )
    save(run, 10)
    document = recipe(run).model_dump(by_alias=True)
    document["launch"] |= {"device": "cuda", "num_processes": 1}
    monkeypatch.setattr(scoring, "visible_devices", lambda _: [object()])
    Evaluating(run, Recipe.model_validate(document), Observer()).finish()
    assert [list(line["scores"]) for line in evaluated(run)] == [["auto None"]]


def test_process_that_a_rank_starts_has_nothing_of_the_rank(
    run: RunDir, scored_by: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its one thread nor its cores, if the launcher has more."""
    names = ["OMP_NUM_THREADS", "NCCL_DEBUG", "KEPT"]
    for name in names:
        monkeypatch.setenv(name, "1")
    there = "','.join(sorted(os.environ.keys() & {" + ", ".join(map(repr, names)) + "}))"
    scored_by(
        "import sys, json, os, time\nlimit = time.time() + 10\n"
        "while len(os.sched_getaffinity(0)) < 2 and time.time() < limit: time.sleep(0.01)\n"
        f"name = {there} + ' ' + str(len(os.sched_getaffinity(0)) > 1)\n"
        "print(json.dumps({'scores': {name: {'value': 1.0, 'low': None, 'high': None, 'rows': 1}}}))"
    )
    save(run, 10)
    document = recipe(run).model_dump(by_alias=True)
    document["launch"] |= {"env": {"NCCL_DEBUG": "1"}}
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        checkpoint = complete_checkpoints(run)[0][0]
        process = ScoringProcess(
            run, Recipe.model_validate(document), checkpoint, EvaluationDevice("cpu"), from_rank=True
        )
        until(process.has_ended)
        outcome = process.outcome()
        process.end()
    finally:
        os.sched_setaffinity(0, cores)
    assert isinstance(outcome, CheckpointEvaluated), outcome
    assert list(outcome.scores) == [f"KEPT {len(os.sched_getaffinity(os.getppid())) > 1}"]


@pytest.mark.parametrize(
    ("when", "after_ranks", "words"),
    [("alongside", False, "low-priority"), ("alongside", True, ""), ("at_end", False, "")],
)
def test_only_an_evaluation_next_to_ranks_that_compute_has_a_lower_priority(
    run: RunDir, scored_by: Callable[[str], None], when: str, after_ranks: bool, words: str
) -> None:
    """Ranks that wait for it would wait as long as any other program of the host computes."""
    scored_by(
        "import sys, json; name = 'found ' + ' '.join(sys.argv[4:])\n"
        "print(json.dumps({'scores': {name: {'value': 1.0, 'low': None, 'high': None, 'rows': 1}}}))"
    )
    save(run, 10)
    document = recipe(run).model_dump(by_alias=True)
    document["evaluation"] |= {"when": when}
    own, checkpoint = Recipe.model_validate(document), complete_checkpoints(run)[0][0]
    process = ScoringProcess(run, own, checkpoint, evaluation_device(own, after_ranks=after_ranks))
    until(process.has_ended)
    outcome = process.outcome()
    process.end()
    assert isinstance(outcome, CheckpointEvaluated), outcome
    assert list(outcome.scores) == [f"found {words}"]


def test_evaluations_of_a_finished_run_come_after_the_ranks(
    run: RunDir, scored_by: Callable[[str], None]
) -> None:
    """On their GPUs, and with the priority of the command: it waits, and no rank computes."""
    scored_by(
        "import sys, json; name = 'found ' + ' '.join(sys.argv[4:])\n"
        "print(json.dumps({'scores': {name: {'value': 1.0, 'low': None, 'high': None, 'rows': 1}}}))"
    )
    save(run, 10)
    evaluations = Evaluating(run, recipe(run), Observer(), had_finished=True)
    with evaluations.following():
        evaluations.finish()
    [event] = CheckpointScores.read(run).evaluated.values()
    assert list(event.scores) == ["found "]


def test_what_failed_between_steps_of_this_start_is_not_evaluated_again(
    run: RunDir, scored_by: Callable[[str], None]
) -> None:
    scored_by(PRINTS.format(line=SCORES))
    save(run, 10)
    identity = complete_checkpoints(run)[0][0].manifest.identity
    for again in (False, True):
        record = EvaluationRecord.of(recipe(run).evaluation, {"sums": "digest"})
        record.write(run.evaluation_json)
        if not again:
            append_event(
                run, CheckpointEvaluationFailed(10, identity, "evaluation-failed", "killed", record.command)
            )
        Evaluating(run, recipe(run), Observer()).finish()
        assert [step for name, step in events(run) if name == "checkpoint_evaluated"] == [10] * again, (
            "the next start tries it"
        )


def test_model_that_killed_ranks_have_left_is_removed(run: RunDir) -> None:
    with Evaluating(run, recipe(run), Observer()).following():
        (run.path / ".evaluation" / "checkpoint-10-model").mkdir(parents=True)
    assert not (run.path / ".evaluation").exists()


def test_worker_that_a_killed_process_has_left_is_ended(
    run: RunDir, scored_by: Callable[[str], None]
) -> None:
    """It holds the standard output open, which is read to its end."""
    worker = (
        "open(sys.argv[1] + '/worker', 'w').write(str(subprocess.Popen([sys.executable, '-c', 'import "
        "time; time.sleep(40)']).pid))"
    )
    scored_by(f"import os, sys, subprocess; {worker}; os.kill(os.getpid(), 9)")
    save(run, 10)
    started = time.monotonic()
    Evaluating(run, recipe(run), Observer()).finish()
    assert time.monotonic() - started < 30
    assert events(run) == [("checkpoint_evaluation_failed", 10)]
    left = int((run.path / "worker").read_text())
    until(lambda: not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE)


def test_finished_run_is_scored_by_the_evaluation_of_the_new_command(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Recipe] = []

    def check(own: Recipe, *_: object) -> EvaluationRecord:
        checked.append(own)
        return EvaluationRecord.of(own.evaluation, {"sums": "digest"})

    monkeypatch.setattr(jobs, "check_evaluation", check)
    monkeypatch.setattr(jobs, "load_encoder", lambda _: None)
    monkeypatch.setattr(
        jobs, "recipe_of_run", lambda _: recipe(run).model_copy(update={"evaluation": CheckpointEvaluation()})
    )
    for _ in range(2):
        with evaluating(run, recipe(run), Observer(), had_finished=True):
            pass
    assert [each.evaluation for each in checked] == [recipe(run).evaluation]
    record = EvaluationRecord.read(run.evaluation_json)
    assert record is not None
    assert record.section == recipe(run).evaluation


@pytest.mark.parametrize(
    ("when", "billions", "is_refused"),
    [("between_steps", 4.2, True), ("between_steps", 3.8, False), ("at_end", 8, False)],
)
def test_model_that_has_no_room_between_steps_is_refused_with_what_it_needs(
    when: str, billions: float, is_refused: bool
) -> None:
    document = {
        "evaluation": {"sets": [{"path": "a"}], "when": when},
        "launch": {"device": "cuda", "num_processes": 1},
        "precision": {"mixed_precision": "bf16"},
    }
    model: Any = SimpleNamespace(parameters=billions * 10**9)
    components = {"parameters": 30.0, "optimizer state": 40.0, "activations": 9.0}
    plan: Any = SimpleNamespace(
        components=components, usable_gib=79.0, device_gib=80.9, peak_reserved_gib=80.0
    )
    assert set(jobs.KEPT_BETWEEN_STEPS) < set(KINDS), "names of the plan"
    with (
        pytest.raises(
            FsdpTuneError, match=r"needs 7\.8 GiB and activations on each GPU, and 7\.6 of 79\.0 GiB are free"
        )
        if is_refused
        else nullcontext()
    ):
        refuse_scores_without_room(Recipe.model_validate(document), model, plan)


@pytest.mark.parametrize(
    ("when", "device", "place"),
    [
        ("alongside", "cpu", "host memory, next to the ranks"),
        ("at_end", "cpu", "host memory, after the ranks"),
        ("at_end", "cuda", "GPUs of the ranks, after them"),
        ("between_steps", "cuda", "each GPU of the first machine, next to what its rank keeps between steps"),
        ("alongside", "cuda", "GPUs that no rank uses"),
    ],
)
def test_memory_and_disk_of_an_evaluation_are_announced_with_their_place(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, when: str, device: str, place: str
) -> None:
    monkeypatch.setattr(
        devices, "nvidia_devices", lambda: [Device("cuda", "A GPU", f"GPU-{index}") for index in range(2)]
    )
    document = recipe(run).model_dump(by_alias=True)
    document["evaluation"] |= {"when": when}
    document["launch"] |= {"device": device, "num_processes": 1}
    (notice,) = jobs.notices_of_evaluation(
        Recipe.model_validate(document), cast(ModelFacts, SimpleNamespace(parameters=2 * 10**9))
    )
    assert f"and its activations on {place}, and " in notice.message
    assert f" in {run.path} (" in notice.message, "the directory is there"


@pytest.mark.parametrize(
    ("merge", "precision", "size_bytes"),
    [
        ("auto", "bf16", 4 * 10**9),
        ("auto", "no", 8 * 10**9),
        ("fp32", "bf16", 8 * 10**9),
        ("bf16", "no", 4 * 10**9),
    ],
)
def test_model_to_be_scored_has_the_size_of_its_merge_and_needs_a_disk_for_two(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, merge: str, precision: str, size_bytes: int
) -> None:
    free = [2 * size_bytes - 1, 2 * size_bytes]
    monkeypatch.setattr(jobs.shutil, "disk_usage", lambda _: SimpleNamespace(free=free.pop(0)))
    document = recipe(run).model_dump(by_alias=True)
    document |= {"merge": {"dtype": merge}, "precision": {"mixed_precision": precision}}
    model: Any = SimpleNamespace(parameters=2 * 10**9)
    found = [jobs.notices_of_evaluation(Recipe.model_validate(document), model)[0] for _ in free[:]]
    assert found[0].message.startswith(f"an evaluation needs {format_bytes(size_bytes)} and ")
    assert [each.hint for each in found] == ["`evaluation.scratch_dir` names another disk", None]


def test_scores_of_weights_that_the_run_does_not_compute_with_are_announced(run: RunDir) -> None:
    model: Any = SimpleNamespace(parameters=10)

    def codes(**sections: Any) -> list[str]:
        document = recipe(run).model_dump(by_alias=True) | sections
        return [each.code for each in jobs.notices_of_evaluation(Recipe.model_validate(document), model)]

    rounded = {"quantization": {"train": "int4"}}
    assert codes() == ["evaluation-needs"]
    assert codes(**rounded) == ["evaluation-needs", "evaluation-not-rounded"]
    assert codes(**rounded, merge={"quantise": True}) == ["evaluation-needs"]
    assert codes(**rounded, evaluation={}) == [], "nothing is scored"


def test_tasks_without_their_package_are_refused_before_training(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = recipe(run).model_dump(by_alias=True)
    document["evaluation"] |= {"sets": [], "tasks": ["gsm8k"]}
    tasks, encoder = Recipe.model_validate(document), cast(Any, None)
    monkeypatch.setattr(jobs.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(FsdpTuneError, match="the package is not installed") as caught:
        check_evaluation(tasks, encoder, Observer())
    assert caught.value.problems[0].where.key == "evaluation.tasks"
    monkeypatch.setattr(jobs.importlib.util, "find_spec", lambda _: object())
    assert check_evaluation(tasks, encoder, Observer()).section == tasks.evaluation


@pytest.mark.parametrize(
    ("program", "codes"),
    [
        ("import sys; print('sent', sys.argv[1])", []),
        ("raise SystemExit('no answer')", ["scores-not-tracked"]),
        ("import time; time.sleep(60)", ["scores-not-tracked"]),
    ],
)
def test_last_scores_are_sent_to_trackers_by_a_process_that_does_not_outlive_the_command(
    run: RunDir,
    scored_by: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    codes: list[str],
) -> None:
    scored_by(PRINTS.format(line=SCORES))
    save(run, 10)
    started: list[Any] = []
    start = jobs.children.start

    def remember(*words: Any, **more: Any) -> Any:
        started.append(start(*words, **more))
        return started[-1]

    monkeypatch.setattr(jobs.children, "start", remember)
    monkeypatch.setattr(jobs, "TRACK", (sys.executable, "-I", "-S", "-c", program))
    monkeypatch.setattr(jobs, "WATCH_SECONDS", 0.02)
    monkeypatch.setattr(jobs, "TRACKERS_SECONDS", 0.2 if "sleep" in program else 60.0)
    observer = Notices()
    Evaluating(run, recipe(run, report_to=["tensorboard"]), observer).finish()
    assert observer.codes == codes
    assert started[-1].poll() is not None
    log = (run.logs / jobs.LOG).read_text()
    assert "sleep" in program or ("no answer" if codes else f"sent {run.path}") in log
    assert events(run) == [("checkpoint_evaluated", 10)]


def test_scores_that_cannot_be_read_for_a_moment_end_no_run(
    run: RunDir, scored_by: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is deleted meanwhile, and the next start finds the checkpoints without scores."""
    scored_by(PRINTS.format(line=SCORES))
    save(run, 10)
    save(run, 20)
    one = recipe(run, save_total_limit=1)
    observer = Notices()
    with monkeypatch.context() as patched:

        def refuse(_: RunDir) -> None:
            raise OSError(5, "Input/output error")

        patched.setattr(jobs.CheckpointScores, "read", refuse)
        with Evaluating(run, one, observer).following():
            time.sleep(0.1)
        Evaluating(run, one, observer).finish()
    assert (observer.codes, events(run)) == (["evaluations-stopped", "rotation-failed"], [])
    assert len(complete_checkpoints(run)[0]) == 2
    Evaluating(run, one, observer).finish()
    assert events(run) == [("checkpoint_evaluated", 10), ("checkpoint_evaluated", 20)]
    assert [each.step for each in complete_checkpoints(run)[0]] == [20]
