"""What a command does around its ranks: on each machine, for a run that has finished, and in its
directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.core.devices import Machine
from fsdp_tune.core.errors import (
    ExitCode,
    ExitReason,
    FailedError,
    FsdpTuneError,
    Notice,
    Problem,
    usage_error,
)
from fsdp_tune.jobs import train as jobs
from fsdp_tune.jobs.observer import Observer, TrainResult
from fsdp_tune.jobs.options import TrainOptions
from fsdp_tune.launch.command.accelerate import launch_plan
from fsdp_tune.launch.command.resume import Start
from fsdp_tune.launch.supervise.launch_events import Event, Logged, Message, Position
from fsdp_tune.recipe.read.loader import parse_recipe
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.launch_files import ResumeRequest
from fsdp_tune.run.rank_files import Verdict
from tests.jobs.test_resizing import is_locked
from tests.launch.recipes import BASE
from tests.launch.written_runs import Data, checkpoint, files_of, finish, used, write_parts, write_run

TWO_MACHINES = ("launch.num_machines=2", "launch.num_processes=2", "launch.main_process_ip=127.0.0.1")
AUTO = TrainOptions(resume="auto")


class Seen(Observer):
    """Keeps what it receives, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, object]] = []
        self.codes: list[str] = []

    def message(self, text: str) -> None:
        self.events.append(("message", text))

    def notices(self, notices: Any) -> None:
        self.codes += [notice.code for notice in notices]

    def position(self, step: int, phase: str, done: int, planned: int) -> None:
        self.events.append(("position", (step, phase, done, planned)))

    def metrics(self, line: dict[str, object]) -> None:
        self.events.append(("metrics", line))

    def run_opened(self, run: RunDir, log: Path) -> None:
        self.events.append(("opened", log.name))

    def run_ended(self, result: TrainResult) -> None:
        self.events.append(("ended", result.exit_reason))

    def of(self, kind: str) -> list[object]:
        return [event for name, event in self.events if name == kind]


@pytest.fixture
def seen() -> Seen:
    return Seen()


Make = Callable[..., Any]


@pytest.fixture
def job_of(tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Returns the job of a resolved recipe, on one of its machines."""
    monkeypatch.setattr(jobs, "notices_of_machine", lambda *_: [])

    def make(*overrides: str, rank: int = 0, options: TrainOptions = TrainOptions(), **more: Any) -> Any:
        loaded = parse_recipe(BASE, tmp_path / "base.yaml", overrides)
        resolution = resolve(loaded.recipe, Machine(None, 0, 4, None), cwd=tmp_path, assume="cuda")
        run = RunDir(Path(resolution.recipe.output_dir))
        run.path.parent.mkdir(exist_ok=True)
        plan = launch_plan(resolution.recipe, run, machine_rank=rank)
        return jobs._Job(loaded, resolution, plan, (), options, seen, **more)

    return make


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """What the ranks of this machine do; the last one is the verdict."""
    played: list[Event] = []

    class Played:
        def __init__(self, *_: Any, newer_copy: object, sizes: object, **__: Any) -> None:
            self.newer_copy = newer_copy

        def events(self) -> Iterator[Event]:
            yield from played

    monkeypatch.setattr(jobs, "Attempts", Played)
    return played


def joined(ended: Verdict | None) -> Any:
    """The machines of a run as one sees them that is not the first."""
    return SimpleNamespace(join=lambda: ended)


def test_other_machine_runs_its_ranks_when_the_first_has_written_the_run(
    job_of: Make, seen: Seen, events: list[Event]
) -> None:
    """The metrics are those of the first machine, whose command shows them."""
    line: dict[str, Any] = {"step": 3, "loss": 1.0}
    ended = Verdict(ExitCode.OK, ExitReason.FINISHED, 4, signal=15)
    events += [Message("said"), Position(3, "evaluating", 1, 2), Logged(line), ended]
    result = job_of(*TWO_MACHINES, rank=1, connected=joined(None)).follow()
    assert (result.exit_reason, result.machine_rank, result.signal) == (ExitReason.FINISHED, 1, 15)
    assert not result.had_finished
    (waits, opened, starts, *others) = seen.events
    assert str(waits[1]).startswith("machine 1: waiting for the first machine (127.0.0.1:")
    assert str(waits[1]).endswith("for 2 ranks, 1 on each machine")
    assert opened == ("opened", "train-01.log")
    assert str(starts[1]).startswith("starting rank 1 on cpu; the run is ")
    assert others == [("message", "said"), ("position", (3, "evaluating", 1, 2))]


def test_first_machine_shows_the_metrics_and_tends_its_mirror_at_each_event(
    job_of: Make, seen: Seen, events: list[Event]
) -> None:
    tended: list[int] = []
    mirror = SimpleNamespace(tend=lambda: tended.append(len(seen.of("metrics"))), newer_copy=None)
    lines: list[dict[str, Any]] = [{"step": 1}, {"step": 2}]
    ended = Verdict(ExitCode.PREEMPTED, ExitReason.PREEMPTED, 2)
    events += [*map(Logged, lines), ended, Logged({"step": 3})]
    assert job_of(mirror=mirror).run_ranks() is ended
    assert seen.of("metrics") == lines, "nothing is read after the verdict"
    assert tended == [0, 1, 2]
    assert str(seen.of("message")[0]).startswith("starting ranks 0 to 1 on cpu; ")


@pytest.mark.parametrize(
    ("reason", "code", "problem"),
    [
        (ExitReason.FINISHED, ExitCode.OK, None),
        (ExitReason.PREEMPTED, ExitCode.PREEMPTED, None),
        (ExitReason.LOST_RANK, ExitCode.LOST_RANK, Problem("lost-rank", "rank 0 is gone")),
    ],
)
def test_other_machine_ends_as_the_first_has_decided_before_any_rank_started(
    job_of: Make, seen: Seen, reason: ExitReason, code: ExitCode, problem: Problem | None
) -> None:
    job = job_of(*TWO_MACHINES, rank=1, connected=joined(Verdict(code, reason, 9, problem)))
    if problem is not None:
        with pytest.raises(FsdpTuneError, match="rank 0 is gone") as caught:
            job.follow()
        assert caught.value.exit_code is code
        assert seen.of("ended") == [reason]
        return
    result = job.follow()
    assert (result.exit_reason, result.machine_rank) == (reason, 1)
    assert result.had_finished is (reason is ExitReason.FINISHED)
    assert seen.of("opened") == seen.of("ended") == []


def test_train_follows_on_a_machine_that_is_not_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    @contextmanager
    def connecting(_: Any, __: Any, plan: Any, *___: Any) -> Iterator[Any]:
        asked.append(plan.machine_rank)
        yield joined(Verdict(ExitCode.OK, ExitReason.FINISHED, 9))

    monkeypatch.setattr(jobs, "connecting", connecting)
    monkeypatch.setattr(jobs, "notices_of_machine", lambda *_: [])
    loaded = parse_recipe(BASE, tmp_path / "base.yaml", (*TWO_MACHINES, f"output_dir={tmp_path / 'run'}"))
    result = jobs.train(loaded, TrainOptions(machine_rank=1))
    assert (result.had_finished, result.as_dict()["machine_rank"], asked) == (True, 1, [1])


def finished_run(tmp_path: Path, *overrides: str) -> RunDir:
    run = RunDir(tmp_path / "run")
    used(run, tmp_path, *overrides)
    checkpoint(run, 8)
    finish(run, 8)
    return run


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments with which a finished run is concluded, and whether its directory is locked then."""
    found: list[Any] = []

    def finished(run: RunDir, _: Any, __: Any, start: Start, evaluations: object = None) -> str:
        found.append((start.step, evaluations, is_locked(run)))
        return "the result"

    monkeypatch.setattr(jobs, "finished", finished)
    return found


def test_finished_run_is_concluded_without_its_lock_if_nothing_is_left(
    tmp_path: Path, job_of: Make, ends: list[Any]
) -> None:
    run, said, read = finished_run(tmp_path, f"output_dir={tmp_path / 'run'}"), list[Verdict](), list[int]()
    connected = SimpleNamespace(conclude=said.append, advance=read.append)
    job = job_of(f"output_dir={run.path}", options=AUTO, connected=connected)
    assert job.lead() == "the result"
    assert ends == [(8, None, False)]
    assert [(each.reason, each.step) for each in said] == [(ExitReason.FINISHED, 8)], "of the other machines"
    assert sum(read) == 5, "bytes of the checkpoint, by which other machines see progress"


@pytest.mark.parametrize("has_mirror", [True, False])
def test_what_an_earlier_command_could_not_send_or_score_is_done_for_a_finished_run(
    tmp_path: Path, job_of: Make, ends: list[Any], monkeypatch: pytest.MonkeyPatch, has_mirror: bool
) -> None:
    """In its directory, which no other command uses meanwhile."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    more = f"evaluation={{sets: [{{path: {tmp_path / 'rows.jsonl'}}}]}}"
    overrides = (f"output_dir={tmp_path / 'run'}", *([] if has_mirror else [more]))
    finished_run(tmp_path, *overrides)
    opened: list[object] = []

    @contextmanager
    def sending(step: int | None) -> Iterator[None]:
        opened.append(step)
        yield
        opened.append("sent")

    @contextmanager
    def evaluating(run: RunDir, recipe: Any, _: Observer, *, had_finished: bool) -> Iterator[object]:
        opened.append(had_finished)
        yield "evaluations" if recipe.evaluation.is_on else None

    monkeypatch.setattr(jobs, "evaluating", evaluating)
    mirror = SimpleNamespace(sending=sending, prepare=lambda *_, **__: pytest.fail("nothing is trained"))
    connected = SimpleNamespace(conclude=lambda _: None, advance=lambda _: None)
    job = job_of(*overrides, options=AUTO, connected=connected, mirror=mirror if has_mirror else None)
    assert job.lead() == "the result"
    assert ends == [(8, None if has_mirror else "evaluations", True)]
    assert opened == ([None, True, "sent"] if has_mirror else [True])


def test_start_is_decided_again_after_a_newer_checkpoint_came_from_the_mirror(
    tmp_path: Path, job_of: Make, seen: Seen
) -> None:
    run = RunDir(tmp_path / "run")
    used(run, tmp_path, f"output_dir={run.path}")
    checkpoint(run, 4)
    starts: list[int] = []

    def prepare(start: Start, resume: str | None, *, overwrite: bool) -> bool:
        assert (resume, overwrite) == ("auto", False)
        starts.append(start.step)
        checkpoint(run, 8)
        return True

    mirror = SimpleNamespace(prepare=prepare)
    changed = (f"output_dir={run.path}", "training.learning_rate=0.5")
    start = job_of(*changed, options=AUTO, mirror=mirror).decide_start()
    assert (starts, start.step) == ([4], 8)
    (message,) = seen.of("message")
    assert str(message).startswith("from step 8 on `training.learning_rate`: ")


def test_run_without_the_files_of_another_machine_does_not_start_over(tmp_path: Path, job_of: Make) -> None:
    """Neither this machine nor the mirror has all of the only checkpoint."""
    runs = [RunDir(tmp_path / f"machine-{number}" / "run") for number in (0, 1)]
    overrides = (*TWO_MACHINES, "launch.shared_directory=false", f"output_dir={runs[0].path}")
    runs[0].path.parent.mkdir()
    recipe = used(runs[0], tmp_path, *overrides)
    write_parts(runs, 8, on=(0,))
    mirrored = (*overrides, f"checkpoint.mirror=file://{tmp_path}/mirror")
    prepared: list[int] = []
    mirror = SimpleNamespace(prepare=lambda start, *_, **__: prepared.append(start.step))
    job = job_of(*mirrored, options=AUTO, mirror=mirror)
    with pytest.raises(FailedError, match="checkpoint-8"):
        job.decide_start()
    assert prepared == [0]
    assert recipe.has_own_directories


def inputs_of(tmp_path: Path) -> Any:
    """Inputs that have been checked, of an adapter whose checkpoints are evaluated."""
    return SimpleNamespace(
        model=None,
        encoder=SimpleNamespace(tokenizer=None, origin=None),
        base=SimpleNamespace(write=lambda path: path.write_text("the base")),
        data=Data("k1"),
        plan=None,
        evaluation=SimpleNamespace(write=lambda path: path.write_text("the evaluation")),
    )


@pytest.fixture
def saved_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        jobs, "save_model_files", lambda folder, *_: (folder / "config.json").write_text("{}")
    )


@pytest.mark.usefixtures("saved_model")
def test_directory_is_written_and_locked_before_ranks_start(tmp_path: Path, job_of: Make, seen: Seen) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    run = RunDir(tmp_path / "run")
    overrides = (
        f"output_dir={run.path}",
        f"evaluation={{sets: [{{path: {tmp_path / 'rows.jsonl'}}}]}}",
    )
    with job_of(*overrides).owned(Start(), inputs_of(tmp_path)):
        assert is_locked(run)
        assert run.base_json.read_text() == "the base"
        assert run.evaluation_json.read_text() == "the evaluation"
        assert seen.of("opened") == ["train.log"]
    assert not is_locked(run)
    job = job_of(f"output_dir={run.path}", options=AUTO)
    run.evaluation_json.unlink()
    with job.owned(job.decide_start(), inputs_of(tmp_path)):
        assert (run.history / "001" / "recipe.json").exists()
        assert not run.evaluation_json.exists(), "nothing is evaluated any more"
    again = job_of(f"output_dir={run.path}", options=TrainOptions(overwrite=True))
    with again.owned(Start(), inputs_of(tmp_path)):
        assert not run.history.exists()
    (old,) = tmp_path.glob("run.old-*")
    assert (old / "history").is_dir()
    assert seen.of("message")[-1] == f"the old run is now {old}"


@pytest.mark.usefixtures("saved_model")
def test_run_that_another_command_continued_meanwhile_is_left_as_it_is(tmp_path: Path, job_of: Make) -> None:
    run = RunDir(tmp_path / "run")
    used(run, tmp_path, f"output_dir={run.path}")
    job = job_of(f"output_dir={run.path}", options=AUTO)
    start = job.decide_start()
    checkpoint(run, 4)
    with (
        pytest.raises(FsdpTuneError, match="another command continued"),
        job.owned(start, inputs_of(tmp_path)),
    ):
        pytest.fail("ranks would start at step 0")
    assert not run.history.exists()
    assert ResumeRequest.read(run.resume_json) == ResumeRequest()


def test_run_that_cannot_be_pushed_at_its_end_is_refused_before_its_inputs_are_read(
    tmp_path: Path, job_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets: list[str] = []

    def check_access(target: Any) -> None:
        targets.append(target.repository)
        raise usage_error("push-no-access", "401")

    monkeypatch.setattr(jobs, "check_access", check_access)
    monkeypatch.setattr(jobs.InputChecks, "check", lambda *_: pytest.fail("the inputs are read"))
    job = job_of(
        f"output_dir={tmp_path / 'run'}", "training.push_to_hub=true", "training.hub_model_id=me/model"
    )
    with pytest.raises(FsdpTuneError, match="401"), job.written(Start()):
        pytest.fail("it is written")
    assert targets == ["me/model"]


def resolved_run(tmp_path: Path, *overrides: str) -> tuple[Any, RunDir]:
    """A recipe and its directory, written as `train` on this machine would."""
    loaded = parse_recipe(BASE, tmp_path / "base.yaml", (f"output_dir={tmp_path / 'run'}", *overrides))
    recipe = jobs.preview(loaded).resolution.recipe
    run = RunDir(Path(recipe.output_dir))
    write_run(run, files_of(run, recipe))
    return loaded, run


def test_run_that_has_finished_is_not_written_again(tmp_path: Path, ends: list[Any]) -> None:
    loaded, run = resolved_run(tmp_path)
    checkpoint(run, 8)
    finish(run, 8)
    assert jobs.write_only(loaded, AUTO) == "the result"
    assert ends == [(8, None, False)]
    assert not run.history.exists()


def test_preview_has_the_notices_of_the_mirror_and_writes_nothing(
    tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, run = resolved_run(tmp_path)
    checkpoint(run, 8)
    before = sorted(tmp_path.rglob("*"))
    mirror = SimpleNamespace(
        preview=lambda start, resume: [Notice(f"newer-than-{start.step}-under-{resume}", "")]
    )
    monkeypatch.setattr(jobs.Mirroring, "of", lambda *_: mirror)
    found = jobs.preview(loaded, AUTO, observer=seen)
    assert (found.start.step, found.plan.run) == (8, run)
    assert "newer-than-8-under-auto" in seen.codes
    assert sorted(tmp_path.rglob("*")) == before


def test_rows_of_an_option_are_those_of_the_first_machine(tmp_path: Path) -> None:
    """Another machine need not have the file."""
    loaded = parse_recipe(BASE, tmp_path / "base.yaml", (*TWO_MACHINES, f"output_dir={tmp_path / 'run'}"))
    options = TrainOptions(skip_rows=tmp_path / "missing", machine_rank=1)
    assert jobs._job(loaded, options, Observer(), starts_here=True).skipped == ()
    with pytest.raises(FsdpTuneError, match="missing"):
        jobs._job(loaded, replace(options, machine_rank=0), Observer(), starts_here=True)
