"""Signs of life: what a rank's heartbeat tells, which rank the others wait for, and what a rank writes when nothing moves."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest

from fsdp_tune.errors import FailedError
from fsdp_tune.run_dir import RunDir
from fsdp_tune.worker import heartbeat as heartbeats
from fsdp_tune.worker.heartbeat import Heartbeat, is_waiting
from fsdp_tune.worker.metrics import MetricsFile
from fsdp_tune.worker.progress import Progress, Slowest, slowest
from tests.parity import runs
from tests.parity.bench import Bench
from tests.parity.cases import Case


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    return run


def content(run: RunDir) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run.rank_heartbeat(0).read_text())
    return document


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rank_that_waits_stays_alive_and_does_not_get_on(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(heartbeats, "SAMPLE_SECONDS", 0.01)
    beat = Heartbeat(run, 0)
    beat.start()
    try:
        beat.beat("training", 3)
        before = content(run)
        until(lambda: content(run)["time"] > before["time"])
        assert {**content(run), "time": 0} == {**before, "time": 0}
        beat.mark("forward")
        until(lambda: content(run)["phase"] == "forward")
        assert content(run)["ticks"] == before["ticks"] + 1
    finally:
        beat.close()


def test_marks_inside_a_step_write_no_file(run: RunDir) -> None:
    beat = Heartbeat(run, 0)
    beat.beat("training", 1)
    identity = run.rank_heartbeat(0).stat().st_ino
    for step in range(2, 50):
        beat.mark("forward")
        beat.mark("backward")
        beat.beat("training", step)
    assert run.rank_heartbeat(0).stat().st_ino == identity


def test_silence_is_noticed_by_the_rank_itself(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "INTERVAL_SECONDS", 0.02)
    monkeypatch.setattr(heartbeats, "SAMPLE_SECONDS", 0.01)
    told = threading.Event()
    beat = Heartbeat(run, 0, silence_seconds=0.2, on_silence=told.set)
    beat.start()
    try:
        beat.beat("training", 1)
        assert told.wait(30)
    finally:
        beat.close()


def test_bytes_moved_are_progress_where_files_are_written(run: RunDir, tmp_path: Path) -> None:
    beat = Heartbeat(run, 0)
    beat.beat("saving", 1)
    before = content(run)["moved_mib"]
    (tmp_path / "shard").write_bytes(b"x" * (3 << 20))
    beat.beat("probing a save")
    assert content(run)["moved_mib"] >= before + 3
    beat.beat("training")
    assert content(run)["moved_mib"] == 0


def test_a_run_directory_that_is_gone_ends_the_rank(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.logs.mkdir(parents=True)
    beat = Heartbeat(run, 0)
    beat.beat("training", 1)
    run.path.rename(tmp_path / "elsewhere")
    with pytest.raises(FailedError, match="no longer there") as caught:
        beat.beat("saving", 2)
    assert caught.value.problems[0].code == "run-directory-gone"
    assert not run.path.exists(), "nothing is created in its place"


def stand_in(path: str, depth: int) -> FrameType:
    """A frame whose caller, `depth` calls up, is code of the file `path`."""
    source = "def bottom(give):\n    return give()\n"
    namespace: dict[str, Any] = {}
    exec(compile(source, path, "exec"), namespace)

    def give(left: int) -> FrameType:
        import sys

        return give(left - 1) if left else sys._getframe()

    frame: FrameType = namespace["bottom"](lambda: give(depth))
    return frame


@pytest.mark.parametrize(
    ("path", "depth", "waits"),
    [
        ("/x/torch/distributed/distributed_c10d.py", 0, True),
        ("/x/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", 1, True),
        ("/x/torch/distributed/distributed_c10d.py", 9, False),
        ("/x/torch/nn/modules/linear.py", 0, False),
    ],
)
def test_waiting_is_told_from_working_by_the_innermost_calls(path: str, depth: int, waits: bool) -> None:
    assert is_waiting(stand_in(path, depth)) is waits


def test_the_slowest_is_compared_with_the_median_of_the_others() -> None:
    found = slowest([2.0, 8.0, 2.0, 2.2], steps=3)
    assert (found.rank, found.ratio, found.behind_seconds) == (1, 4.0, 2.0)
    assert slowest([1.0, 1.0], steps=1).ratio == 1.0
    assert slowest([0.0, 3.0], steps=1).ratio == float("inf")


@pytest.mark.parametrize(("behind_seconds", "told"), [(0.02, 0), (0.2, 1)])
def test_a_rank_is_slow_only_where_the_others_wait_for_long_enough_to_be_noticed(run: RunDir, behind_seconds: float, told: int) -> None:
    metrics = MetricsFile(run, resume_step=None, enabled=True)
    progress = Progress(Heartbeat(run, 0), metrics)
    progress._tell(Slowest(1, 2.5, behind_seconds), 10)
    metrics.close()
    assert len(run.metrics_jsonl.read_text().splitlines()) == told


def run_with_a_slow_rank(path: str) -> dict[str, Any]:
    """Rank 1 takes 0.4 s longer for each of its micro-batches: more than a busy machine takes from the other."""
    import torch.distributed as dist

    from fsdp_tune.worker import progress
    from fsdp_tune.worker.trainer import FsdpTrainer

    original = FsdpTrainer.training_step

    def slow(self: Any, *arguments: Any, **options: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(0.4)
        return original(self, *arguments, **options)

    with patch.object(FsdpTrainer, "training_step", slow), patch.object(progress, "WINDOW_SECONDS", 0.5):
        return runs.run_worker(path)


@pytest.mark.ranks
def test_a_slow_rank_is_an_event_and_stops_nothing(bench: Bench) -> None:
    run = bench.fresh_run(Case(), run_with_a_slow_rank)
    events = [line for line in runs.lines(run) if line.get("event") == "slow_rank"]
    assert events, "nobody was told"
    assert {event["rank"] for event in events} == {1}
    assert all(event["ratio"] > 1.5 and event["behind_seconds"] > 0.05 for event in events)
    assert events[0]["message"].startswith("rank 1 works ")
