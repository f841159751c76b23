"""What is learned from measured recipes, and which recipes cannot be measured."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.core.errors import ExitCode, FsdpTuneError, Problem, failed_error, usage_error
from fsdp_tune.core.gpus import CPU
from fsdp_tune.jobs import measure as measuring
from fsdp_tune.jobs.measure import _Measuring
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import Allowed
from fsdp_tune.jobs.trial import TrialSettings
from fsdp_tune.planner.predict.calibration import Measured
from fsdp_tune.recipe.schema.recipe import Recipe

SETTINGS = TrialSettings(5, None, Allowed())


class Said(Observer):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


def measuring_with(observer: Observer, trials: Sequence[Any] = (), **changes: Any) -> _Measuring:
    loaded: Any = SimpleNamespace(recipe=Recipe(), path=Path("recipe.yaml"))
    options = {"exact": False, "write": None, "settings": SETTINGS, "caller": None} | changes
    found = _Measuring(loaded, observer=observer, disk=ExitStack(), **options)
    found.trials = list(trials)
    return found


def trial(
    seconds: float | None, *, tokens: float = 100.0, is_full: bool = True, reserved: float | None = 1e9
) -> Any:
    """A trial with this time of a step, and these tokens a second."""
    measured = Measured(Recipe(), seconds or 0.0, 7, reserved_bytes=reserved) if is_full and seconds else None
    figures = SimpleNamespace(step_seconds=seconds, tokens_per_second=tokens)
    return SimpleNamespace(figures=figures, measured=measured, share_of_full_rows=0.5)


class Plans:
    """Records what is learned."""

    def __init__(self, name: str = "A100-40GB", *, time: object = 1.25, memory: object = 1.1) -> None:
        self.hardware = SimpleNamespace(name=name)
        self._time, self._memory = time, memory
        self.learned: list[Measured] = []
        self.reserved: list[Measured] = []

    def learn(self, measured: Measured) -> object:
        self.learned.append(measured)
        return self._result(self._time)

    def learn_memory(self, runs: Sequence[Measured]) -> object:
        self.reserved += runs
        return self._result(self._memory)

    @staticmethod
    def _result(found: object) -> object:
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture(autouse=True)
def versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "installed_versions", lambda _names: {"torch": "2.13"})
    monkeypatch.setattr(measuring, "nvidia_driver", lambda: "580.1")


def calibrate(plans: Plans, *trials: Any) -> list[str]:
    """Calibrate from trials. Returns the messages."""
    said = Said()
    found = measuring_with(said, trials)
    found._calibrate(plans, found._fastest_first()[0])  # type: ignore[arg-type]
    return said.messages


def test_time_is_learned_from_the_fastest_and_memory_from_all() -> None:
    plans = Plans()
    slow, fast, failed, short = (
        trial(2.0, tokens=50.0),
        trial(3.0, tokens=200.0),
        trial(None, tokens=0.0),
        trial(1.0, tokens=10.0, is_full=False),
    )
    assert calibrate(plans, slow, failed, short, fast) == [
        "A100-40GB took 1.25 of the predicted time; kept for later plans",
        "A100-40GB reserved at most 1.10 of the predicted memory; kept for later plans",
    ]
    assert [each.step_seconds for each in plans.learned] == [3.0], "by tokens a second"
    assert [each.step_seconds for each in plans.reserved] == [3.0, 2.0]
    assert {(each.torch, each.driver) for each in plans.reserved} == {("2.13", "580.1")}


@pytest.mark.parametrize(
    ("plans", "messages"),
    [
        (Plans(memory=None), ["A100-40GB took 1.25 of the predicted time; kept for later plans"]),
        (
            Plans(time=usage_error("calibrate-no-run", "it waits for the host")),
            [
                "the time of plans is not calibrated: it waits for the host",
                "A100-40GB reserved at most 1.10 of the predicted memory; kept for later plans",
            ],
        ),
        (
            Plans(memory=usage_error("calibrate-no-run", "it reserved 9 times the planned memory")),
            [
                "A100-40GB took 1.25 of the predicted time; kept for later plans",
                "the memory of plans is not calibrated: it reserved 9 times the planned memory",
            ],
        ),
    ],
    ids=["no figure", "time", "memory"],
)
def test_figure_that_teaches_nothing_does_not_prevent_the_other(plans: Plans, messages: list[str]) -> None:
    assert calibrate(plans, trial(1.0)) == messages


def test_short_rows_and_the_cpu_calibrate_nothing() -> None:
    plans = Plans()
    assert calibrate(plans, trial(1.0, is_full=False)) == [
        "plans are not calibrated: a step computed 50% of the tokens of full rows"
    ]
    on_cpu = Plans(CPU)
    assert calibrate(on_cpu, trial(1.0)) == []
    assert plans.learned == on_cpu.learned == on_cpu.reserved == []


@pytest.fixture
def planned(tmp_path: Path) -> Any:
    return SimpleNamespace(
        recipe=SimpleNamespace(output_dir=str(tmp_path / "run")), hardware=None, written={}, forced={}
    )


def test_ranking_without_a_recipe_that_fits_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, planned: Any, tmp_path: Path
) -> None:
    made, ranking = (
        SimpleNamespace(num_processes=8, gpu="A100-40GB"),
        SimpleNamespace(to_measure=lambda _: []),
    )
    monkeypatch.setattr(_Measuring, "_planned", lambda _: planned)
    monkeypatch.setattr(_Measuring, "_ranked", lambda *_: (made, ranking))
    monkeypatch.setattr(_Measuring, "_run", lambda _: pytest.fail("something was trained"))
    monkeypatch.setattr(measuring, "PlanSession", lambda *_, **__: ExitStack())
    found = measuring_with(Observer())
    with pytest.raises(FsdpTuneError, match="no recipe fits 8 × A100-40GB") as caught:
        found.measure(3)
    assert caught.value.problems[0].code == "nothing-fits"
    assert list(tmp_path.glob(".fsdp-tune-measure-*")) != []
    found.disk.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("problems", "code"),
    [
        (["no-gpu-named"], "no-gpu-to-measure"),
        (["unknown-key"], "unknown-key"),
        (["no-gpu-named", "unknown-key"], "no-gpu-named"),
    ],
)
def test_only_a_missing_gpu_is_explained_by_the_option(
    monkeypatch: pytest.MonkeyPatch, problems: list[str], code: str
) -> None:
    def refuse(*_: object) -> None:
        raise FsdpTuneError(*(Problem(each, "this machine shows no GPU") for each in problems))

    monkeypatch.setattr(measuring, "planned_here", refuse)
    with pytest.raises(FsdpTuneError) as caught:
        measuring_with(Observer())._planned()
    assert caught.value.problems[0].code == code
    assert ("--measure" in caught.value.problems[0].message) == (code == "no-gpu-to-measure")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (failed_error("rank-failed", "rank 1 failed"), "failed"),
        (
            FsdpTuneError(Problem("out-of-memory", "rank 1 failed"), exit_code=ExitCode.OUT_OF_MEMORY),
            "out of memory",
        ),
        (FsdpTuneError(Problem("stopped", "a signal"), exit_code=ExitCode.PREEMPTED), None),
        (FsdpTuneError(Problem("stopped", "Ctrl-C"), exit_code=ExitCode.INTERRUPTED), None),
    ],
)
def test_trial_that_fails_has_an_outcome_and_a_stop_ends_the_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: FsdpTuneError, outcome: str | None
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(TrialSettings, "train", fail)
    calls, ended = list[str](), list[tuple[str, str]]()
    tried: Any = SimpleNamespace(
        folder=tmp_path / "trials" / "2",
        loaded=None,
        ended=lambda *what: ended.append(what),
        read=lambda _: pytest.fail("it has no figures"),
    )
    found = measuring_with(Observer(), caller=SimpleNamespace(call=calls.append))
    if outcome is None:
        with pytest.raises(FsdpTuneError) as caught:
            found._train(tried)
        assert caught.value is error
        assert ended == []
    else:
        found._train(tried)
        assert ended == [(outcome, "rank 1 failed")]
    assert calls == ["trials/2"], "what the other machines are called for"
