"""A tracker that raises or hangs is disabled; before that it gets every event it handles, in one thread."""

from __future__ import annotations

import os
import sys
import threading
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback, TrainerState
from transformers.integrations import MLflowCallback, WandbCallback, integration_utils

from fsdp_tune.run.directory import RunDir
from fsdp_tune.worker.observe.tracker_ids import continue_tracker_runs, keep_id
from fsdp_tune.worker.observe.trackers import Guarded, keep_mlflow_run


class Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []
        self.stuck = threading.Event()

    def _see(self, event: str, step: int) -> None:
        self.seen.append((event, step, threading.get_ident()))

    def on_log(self, step: int, **_: Any) -> str:  # type: ignore[override]
        self._see("log", step)
        if step == 3:
            raise ConnectionError("the server is gone")
        if step == 4:
            self.stuck.wait(60)
        return "control"

    def on_save(self, step: int, **_: Any) -> None:  # type: ignore[override]
        self._see("save", step)


def guarded() -> tuple[Recorder, Guarded, list[str]]:
    recorder, told = Recorder(), []
    return recorder, Guarded(recorder, told.append, 0.3), told


def test_tracker_events_arrive_in_order_in_one_thread() -> None:
    recorder, guard, told = guarded()
    assert guard.on_log(1) == "control"  # type: ignore[attr-defined]
    guard.on_save(1)  # type: ignore[attr-defined]
    guard.on_step_end(1)  # type: ignore[attr-defined]
    guard.on_log(2)  # type: ignore[attr-defined]
    assert [(event, step) for event, step, _ in recorder.seen] == [("log", 1), ("save", 1), ("log", 2)]
    assert len({thread for _, _, thread in recorder.seen}) == 1
    assert told == []


def test_failing_tracker_is_disabled() -> None:
    recorder, guard, told = guarded()
    guard.on_log(3)  # type: ignore[attr-defined]
    guard.on_log(2)  # type: ignore[attr-defined]
    assert told == ["Recorder failed and gets no more events: ConnectionError: the server is gone"]
    assert len(recorder.seen) == 1


def test_hanging_tracker_is_abandoned() -> None:
    recorder, guard, told = guarded()
    assert guard.on_log(4) is None  # type: ignore[attr-defined]
    guard.on_log(2)  # type: ignore[attr-defined]
    recorder.stuck.set()
    assert told == [
        "Recorder failed and gets no more events: TimeoutError: `on_log` did not return within 0.3 s"
    ]
    assert len(recorder.seen) == 1


class StandInWandb(types.ModuleType):
    """The parts of wandb that `WandbCallback.setup` uses. `init` takes id, resume and directory from the
    environment, as wandb does."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.run: Any = None
        self.config: Any = Config()
        self.started: list[tuple[str | None, str | None, str | None]] = []

    def init(self, **_: Any) -> None:
        self.started.append(
            (os.environ.get("WANDB_RUN_ID"), os.environ.get("WANDB_RESUME"), os.environ.get("WANDB_DIR"))
        )
        self.run = types.SimpleNamespace(_label=lambda **_: None)


class Config(dict[str, Any]):
    def update(self, *_: Any, **__: Any) -> None: ...


ARGUMENTS: Any = types.SimpleNamespace(to_dict=dict, run_name=None, output_dir="run")
MODEL: Any = types.SimpleNamespace(num_parameters=lambda: 1)


def said_nothing(line: str) -> None:
    raise AssertionError(line)


def started_wandb(run: RunDir, monkeypatch: pytest.MonkeyPatch, **given: str) -> tuple[str | None, ...]:
    """Id, resume mode and directory that wandb gets from one start of the ranks of `run`."""
    with monkeypatch.context() as patch:
        patch.setattr(
            os,
            "environ",
            {**{name: value for name, value in os.environ.items() if "WANDB" not in name}, **given},
        )
        wandb, errors = StandInWandb(), types.ModuleType("wandb.sdk.lib.config_util")
        errors.ConfigError = ValueError  # type: ignore[attr-defined]
        parents = {name: types.ModuleType(name) for name in ("wandb.sdk", "wandb.sdk.lib")}
        for name, module in {"wandb": wandb, **parents, "wandb.sdk.lib.config_util": errors}.items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(integration_utils, "is_wandb_available", lambda: True)
        continue_tracker_runs(run, ["wandb"], os.environ, said_nothing)
        WandbCallback().setup(ARGUMENTS, TrainerState(), MODEL)
        return wandb.started[0]


def test_wandb_continues_its_run_when_a_run_is_resumed_and_writes_into_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    first = started_wandb(run, monkeypatch)
    assert first[0]
    assert first[1:] == ("allow", str(tmp_path))
    assert started_wandb(run, monkeypatch) == first
    other = tmp_path / "other"
    other.mkdir()
    assert started_wandb(RunDir(other), monkeypatch)[0] != first[0]


def test_user_variables_take_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path)
    first, *_ = started_wandb(run, monkeypatch)
    assert started_wandb(run, monkeypatch, WANDB_RESUME="never") == (None, "never", str(tmp_path))
    assert started_wandb(run, monkeypatch)[0] == first
    assert started_wandb(run, monkeypatch, WANDB_RUN_ID="mine", WANDB_DIR="/elsewhere") == (
        "mine",
        "allow",
        "/elsewhere",
    )
    assert started_wandb(run, monkeypatch)[0] == "mine"


def test_mlflow_continues_the_run_that_its_server_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, active = (
        RunDir(tmp_path),
        types.SimpleNamespace(info=types.SimpleNamespace(run_id="from-the-server")),
    )
    limits = types.SimpleNamespace(MAX_PARAM_VAL_LENGTH=250, MAX_PARAMS_TAGS_PER_BATCH=100)
    mlflow: Any = types.ModuleType("mlflow")
    mlflow.__version__, mlflow.utils = "3.0.0", types.SimpleNamespace(validation=limits)
    mlflow.is_tracking_uri_set = lambda: True
    mlflow.get_tracking_uri = mlflow.start_run = mlflow.log_params = mlflow.end_run = lambda *_, **__: None
    answers = iter([None, active, active, None])
    mlflow.active_run = lambda: next(answers)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setattr(integration_utils, "is_mlflow_available", lambda: True)
    environment: dict[str, str] = {}
    continue_tracker_runs(run, ["mlflow"], environment, said_nothing)
    assert environment == {}
    trainer: Any = types.SimpleNamespace(callback_handler=types.SimpleNamespace(callbacks=[MLflowCallback()]))
    keep_mlflow_run(trainer, partial(keep_id, run, "mlflow", say=said_nothing))
    trainer.callback_handler.callbacks[0].on_train_begin(ARGUMENTS, TrainerState(), None, model=MODEL)
    continue_tracker_runs(run, ["mlflow"], environment, said_nothing)
    assert environment == {"MLFLOW_RUN_ID": "from-the-server"}


def test_each_tracker_continues_its_own_run(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    continue_tracker_runs(RunDir(tmp_path), ["tensorboard", "trackio"], environment, said_nothing)
    assert (environment, list(tmp_path.iterdir())) == ({}, [])
    continue_tracker_runs(RunDir(tmp_path), ["swanlab", "comet_ml"], environment, said_nothing)
    assert {name: len(value) for name, value in environment.items() if name != "SWANLAB_LOG_DIR"} == {
        "SWANLAB_RUN_ID": 21,
        "SWANLAB_RESUME": 5,
        "COMET_EXPERIMENT_KEY": 32,
    }
    again: dict[str, str] = {}
    continue_tracker_runs(RunDir(tmp_path), ["swanlab", "comet_ml"], again, said_nothing)
    assert again == environment


@pytest.mark.parametrize("text", ["", "[]", '{"wandb": 1}', '{"wandb": "id"'])
def test_unreadable_run_ids_are_reported_and_replaced(tmp_path: Path, text: str) -> None:
    run, said = RunDir(tmp_path), list[str]()
    run.trackers_json.write_text(text)
    continue_tracker_runs(run, ["wandb"], {}, said.append)
    assert said == [f"WARNING: {run.trackers_json} cannot be read; trackers start new runs"]
    continue_tracker_runs(run, ["wandb"], {}, said_nothing)
