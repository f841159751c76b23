"""`plan --measure` on two machines in one process: traces and trainings are fakes, calls go through a real
store of torch."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.errors import ExitCode, ExitReason, FsdpTuneError, Problem, usage_error
from fsdp_tune.jobs import measure as measuring
from fsdp_tune.jobs import measuring_machines, trial
from fsdp_tune.jobs.measure import measure
from fsdp_tune.jobs.observer import Observer, TrainResult
from fsdp_tune.jobs.options import Allowed, TrainOptions
from fsdp_tune.jobs.trial import TrialSettings
from fsdp_tune.launch.machines import calls
from fsdp_tune.planner.predict.predict import Plan
from fsdp_tune.recipe.read.loader import LoadedRecipe, load_recipe
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from tests.cli.fake_tracing import FakeTracing, replaced_tracing  # noqa: F401  a fixture
from tests.launch.conftest import quick_machines  # noqa: F401  a fixture
from tests.launch.links import Network
from tests.pages.written import training_line, written

pytestmark = pytest.mark.usefixtures("quick_machines")
Ends = Callable[[int, int], Exception | ExitReason | None]
"""How the training of a trial ends on a machine, by both numbers from 0; None: it finishes."""


@pytest.fixture(name="network")
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    network = Network()
    monkeypatch.setattr(
        measuring_machines, "open_channel", lambda machine, *_, topic: network.channel(machine, topic=topic)
    )
    monkeypatch.setattr(calls, "READ_SECONDS", 0.01)
    yield network
    network.close()


@pytest.fixture
def recipe(
    tmp_path: Path, fake: type[FakeTracing], monkeypatch: pytest.MonkeyPatch, network: Network
) -> Path:
    monkeypatch.setattr(fake, "state_gib", 1)
    data: dict[str, Any] = {
        "model": {"from_config": {"model_type": "llama"}, "tokenizer": "builtin:arithmetic"},
        "data": {
            "train": [{"path": "builtin:arithmetic"}],
            "max_length": 128,
            "cache_dir": str(tmp_path / "cache"),
        },
        "training": {"global_batch_size": 4, "per_device_train_batch_size": 2},
        "kernels": {"loss": "full"},
        "launch": {
            "device": "cpu",
            "num_processes": 2,
            "num_machines": 2,
            "main_process_ip": "127.0.0.1",
            "hang_timeout": "20s",
        },
        "output_dir": str(tmp_path / "runs" / "one"),
    }
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(data))
    return file


class Trained:
    """Replaces `train`. Every machine waits for the other in it, as ranks do."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._both = threading.Barrier(2)
        self.recipes: list[list[Recipe]] = [[], []]

    def __call__(self, loaded: LoadedRecipe, options: TrainOptions, **_: object) -> TrainResult:
        machine = options.machine_rank or 0
        number = len(self.recipes[machine])
        self.recipes[machine].append(loaded.recipe)
        self._both.wait(20.0)
        end = self._ends(machine, number)
        if isinstance(end, Exception):
            raise end
        path = Path(loaded.recipe.output_dir)
        lines = [training_line(step, 1.0, step_seconds=float(1 + number)) for step in range(1, 8)]
        run = written(path, lines) if machine == 0 else RunDir(path)
        return TrainResult(run, loaded.recipe, end or ExitReason.FINISHED, machine_rank=machine)

    def names(self, machine: int) -> list[str]:
        return [Path(each.output_dir).name for each in self.recipes[machine]]


@pytest.fixture
def both(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[Any], Trained]]:
    """Measure on both machines. Returns the plan or the error of each, and what was trained."""

    def run(ends: Ends = lambda _machine, _number: None, *words: str, **options: Any) -> Any:
        trained = Trained(ends)
        monkeypatch.setattr(trial, "train", trained)
        found: list[Plan | FsdpTuneError | None] = [None, None]

        def of(machine: int) -> None:
            try:
                found[machine] = measure(load_recipe(recipe, words), count=2, machine_rank=machine, **options)
            except FsdpTuneError as error:
                found[machine] = error

        other = threading.Thread(target=of, args=(1,), daemon=True)
        other.start()
        of(0)
        other.join(30.0)
        assert not other.is_alive()
        return found, trained

    return run


def test_both_machines_train_each_trial_and_return_the_same_figures(both: Any, tmp_path: Path) -> None:
    (first, other), trained = both(write=tmp_path / "best.yaml")
    assert isinstance(first, Plan), first
    assert isinstance(other, Plan), other
    assert trained.names(0) == trained.names(1) == ["1", "2", "3"][: len(first.measured)]
    assert [each.recipe_changes for each in other.measured] == [
        each.recipe_changes for each in first.measured
    ]
    assert [each.step_seconds for each in first.measured] == sorted(
        float(1 + number) for number in range(len(first.measured))
    )
    assert other.measured == first.measured
    assert {each.num_processes for each in first.measured} == {2}
    assert {len({each.output_dir for each in pair}) for pair in zip(*trained.recipes, strict=True)} == {1}, (
        "in one directory"
    )
    assert (tmp_path / "best.yaml").is_file()
    assert not list(tmp_path.glob("**/.fsdp-tune-measure-*"))


def test_machines_without_a_shared_directory_train_in_their_own(both: Any) -> None:
    (first, other), trained = both(lambda _machine, _number: None, "launch.shared_directory=false")
    assert isinstance(first, Plan), first
    assert isinstance(other, Plan), other
    assert trained.names(0) == trained.names(1)
    assert all(mine.output_dir != theirs.output_dir for mine, theirs in zip(*trained.recipes, strict=True))


def test_trial_that_is_out_of_memory_on_one_machine_is_so_for_all(both: Any) -> None:
    """The first machine's `train` ends with the failure of another one, that one's with its own."""
    full = FsdpTuneError(
        Problem("out-of-memory", "rank 1 is out of memory"), exit_code=ExitCode.OUT_OF_MEMORY
    )
    (first, other), _ = both(lambda _machine, number: full if number == 0 else None)
    assert [each.outcome for each in first.measured][-1] == "out of memory"
    assert first.measured[0].outcome == "measured"
    assert other.measured == first.measured


def test_stop_ends_both_with_its_code(both: Any) -> None:
    (first, other), trained = both(lambda _machine, _number: ExitReason.PREEMPTED)
    assert [error.exit_code for error in (first, other)] == [ExitCode.PREEMPTED] * 2
    assert trained.names(0) == trained.names(1) == ["1"]


def test_machine_that_cannot_follow_ends_the_measurement(both: Any) -> None:
    """What it refuses itself, such as a package that is missing there."""
    refused = usage_error("not-installed", "liger-kernel is not installed")

    def ends(machine: int, _number: int) -> Exception:
        failed = FsdpTuneError(Problem("machine-failed", "machine 1: it"), exit_code=ExitCode.FAILED)
        return refused if machine == 1 else failed

    (first, other), _ = both(ends)
    assert other is refused
    assert isinstance(first, FsdpTuneError)
    assert first.problems[0].message == "machine 1: liger-kernel is not installed"


def test_what_the_first_machine_refuses_is_an_error_on_all(
    both: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise usage_error("no-gpu-named", "this machine shows no GPU")

    monkeypatch.setattr(measuring, "planned_here", refuse)
    (first, other), trained = both()
    assert first.problems[0].code == "no-gpu-to-measure"
    assert other.problems[0].message == f"machine 0: {first.problems[0].message}"
    assert trained.recipes == [[], []]


@pytest.mark.parametrize("run", ["../one/1", ".fsdp-tune-measure-a/../1", "/tmp/1", ""])
def test_only_directories_of_trials_are_used(run: str, recipe: Path, network: Network) -> None:
    """The store has no authentication."""
    settings = TrialSettings(5, None, Allowed(), 1)
    first = calls.FirstMachine(lambda topic: network.channel(0, topic=topic), 2, 20.0)

    def call() -> None:
        with contextlib.suppress(FsdpTuneError):  # that of the other
            first.__enter__().call(run)

    called = threading.Thread(target=call, daemon=True)
    called.start()
    with pytest.raises(FsdpTuneError, match="machine 0 has called a run"):
        measuring_machines.follow(load_recipe(recipe), settings, Observer())
    called.join(10.0)


def called(**changes: Any) -> calls.LaunchCall:
    return calls.LaunchCall(**{"token": "t", "command": "c", "call": 1, "state": "final"} | changes)


def test_trial_is_found_above_the_output_directory_and_is_else_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first machine makes the directory of trials in the lowest folder that it has."""
    monkeypatch.setattr(measuring_machines, "READ_SECONDS", 0.0)
    monkeypatch.setattr(measuring_machines, "VISIBLE_SECONDS", 0.05)
    call = called(run=".fsdp-tune-measure-ab_1/3")
    output = tmp_path / "runs" / "one"
    with pytest.raises(FsdpTuneError, match=r"does not see .*: \.fsdp-tune-measure-ab_1$") as caught:
        measuring_machines._run_directory(call, output, None)
    assert caught.value.problems[0].code == "run-directory-not-shared"
    (tmp_path / ".fsdp-tune-measure-ab_1").mkdir()
    assert measuring_machines._run_directory(call, output, None) == tmp_path / call.run
    assert measuring_machines._run_directory(call, output, tmp_path / "own") == tmp_path / "own" / "3"


@pytest.mark.parametrize(
    "result",
    [
        None,
        {},
        {"plan": None},
        {"plan": {}},
        {"plan": {"measured": [{"batch": 3}]}},
        {"plan": {"measured": []}},
    ],
)
def test_first_machine_that_sends_no_plan_has_failed(result: dict[str, Any] | None) -> None:
    with pytest.raises(FsdpTuneError, match="machine 0 has sent no plan") as caught:
        measuring_machines._plan_of(called(result=result))
    assert (caught.value.problems[0].code, caught.value.exit_code) == ("machine-failed", ExitCode.FAILED)
