"""`submit slurm --drill` takes no recipe, and its exit code is the verdict on the two models."""

from __future__ import annotations

import json

import pytest

from fsdp_tune.cli import submit as submits
from fsdp_tune.cli.screen import Screen
from fsdp_tune.jobs import drill as drills
from fsdp_tune.jobs.drill import DrillAnswer, DrillEvent
from fsdp_tune.jobs.submit import SubmitAnswer
from fsdp_tune.jobs.submit_options import SlurmOptions
from tests.cli.in_process import errors, invoke

EVENTS = [
    DrillEvent("preemption", 0, 143, "requeued", 1200, 1200, 0, 95.0),
    DrillEvent("node loss", 1, None, None, 2400, 2000, 400, 240.0),
]


def drilled(monkeypatch: pytest.MonkeyPatch, *, equal: bool, difference: float) -> list[tuple[object, ...]]:
    """Replace the drill. The list gets its arguments."""
    calls = list[tuple[object, ...]]()
    found = DrillAnswer("runs/drill", "runs/undisturbed", ["1", "2"], EVENTS, 3000, equal, difference)

    def drill(*arguments: object) -> DrillAnswer:
        calls.append(arguments)
        return found

    monkeypatch.setattr(drills, "drill", drill)
    return calls


@pytest.mark.parametrize(
    ("equal", "difference", "code", "verdict"),
    [
        (True, 0.0, 0, "the model after 3,000 steps equals, bit for bit, that of a run without"),
        (False, 5e-5, 0, "the model after 3,000 steps differs by up to 5e-05 in a weight from that of a run"),
        (
            False,
            2e-4,
            1,
            "the model after 3,000 steps differs by up to 0.0002 in a weight from that of a run",
        ),
    ],
)
def test_drill_fails_if_the_models_differ_by_more_than_rounding(
    monkeypatch: pytest.MonkeyPatch, equal: bool, difference: float, code: int, verdict: str
) -> None:
    calls = drilled(monkeypatch, equal=equal, difference=difference)
    done = invoke("submit", "slurm", "--drill", "--partition", "gpu", "--set", "training.max_steps=9")
    assert done.exit_code == code, done.output
    assert verdict in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("  ")][2:]
    assert rows == [
        ["preemption", "1,200", "1,200", "0", "1m35s", "143"],
        ["node", "loss", "2,400", "2,000", "400", "4m00s", "killed"],
    ]
    ((_, slurm, overrides, _),) = calls
    assert slurm == SlurmOptions(partition="gpu")
    assert overrides == ["training.max_steps=9"]
    done = invoke("submit", "slurm", "--drill", "--json")
    assert (done.exit_code, json.loads(done.stdout)["equal"]) == (code, equal)


@pytest.mark.parametrize(
    "words",
    [["gpt2_smoke"], ["--print"], ["--follow"], ["--sweep", "seed=1,2"], ["--again"], ["--name", "x"]],
)
def test_drill_with_an_option_of_a_recipe_is_refused(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    calls = drilled(monkeypatch, equal=True, difference=0.0)
    (problem,) = errors("submit", "slurm", "--drill", *words)
    assert (problem["code"], problem["message"]) == ("usage", "`--drill` trains its own recipe")
    assert calls == []


def answer(**changes: object) -> SubmitAnswer:
    same: dict[str, object] = {
        "run_dir": "runs/a",
        "job": "7",
        "state": "submitted",
        "script": "runs/a.submit/job.sh",
        "log": "runs/a.submit/7.log",
        "text": "",
        "machines": 1,
        "gpus_per_machine": 0,
        "lead_seconds": None,
        "lead_reason": None,
        "exit_code": None,
    }
    return SubmitAnswer(**{**same, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"job": None, "state": "finished"}, ["runs/a has finished; nothing is submitted"]),
        ({"state": "RUNNING"}, ["job 7 is in the queue already (RUNNING); nothing is submitted"]),
        (
            {},
            [
                "job 7 submitted: 1 node; the run is runs/a",
                "script: runs/a.submit/job.sh",
                "log: runs/a.submit/7.log",
            ],
        ),
        (
            {"machines": 2, "gpus_per_machine": 8, "lead_seconds": 120, "lead_reason": "the least"},
            [
                "job 7 submitted: 2 nodes × 8 GPUs; the run is runs/a",
                "told to stop 120 s before its time limit: the least",
                "script: runs/a.submit/job.sh",
                "log: runs/a.submit/7.log",
            ],
        ),
    ],
)
def test_submission_is_shown_with_what_came_of_it(changes: dict[str, object], lines: list[str]) -> None:
    screen = Screen(json_output=False)
    with screen.collected() as shown:
        submits._show(screen, answer(**changes))
    assert shown == lines
