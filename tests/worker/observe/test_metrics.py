"""metrics.jsonl: every step once, also after failures; valid JSON numbers; sums over all ranks."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import MixtralConfig

from fsdp_tune.core.gpus import ModelDimensions
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.events import LossScaleBackedOff, TrainFinished
from fsdp_tune.run.metrics_file import Follower, MetricsFile, append_event
from fsdp_tune.worker.observe.metrics import Lines, Sums, device_peak_flops, model_size, peak_memory_gib
from fsdp_tune.worker.step_observer import LoggedStep
from tests.ranks import Ranks


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def lines(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics_jsonl.read_text().splitlines()]


def test_resumed_file_is_truncated_to_the_checkpoint(run: RunDir) -> None:
    old = [
        {"event": "train_started", "step": 0},
        *({"step": step, "loss": 1.0 / step} for step in range(1, 8)),
        {"event": "x", "step": 6},
    ]
    torn = '{"step": 8, "lo'
    run.metrics_jsonl.write_text("".join(json.dumps(line) + "\n" for line in old) + "not json\n[5]\n" + torn)
    metrics = MetricsFile(run, resume_step=5, enabled=True)
    metrics.write({"step": 6, "loss": 0.25})
    metrics.close()
    assert lines(run) == [*old[:6], {"step": 6, "loss": 0.25}]


def test_run_from_step_0_starts_with_an_empty_file(run: RunDir) -> None:
    run.metrics_jsonl.write_text('{"step": 1, "loss": 1}\n')
    MetricsFile(run, resume_step=None, enabled=True).close()
    assert lines(run) == []


def test_second_evaluation_of_a_step_replaces_the_first(run: RunDir) -> None:
    kept = [{"step": 2, "eval_loss": 1.5}, {"step": 4, "loss": 1.0}, {"step": 4, "event": "stopping"}]
    gone = [{"step": 4, "eval_loss": 1.25}, {"step": 4, "event": "early_stopped"}]
    run.metrics_jsonl.write_text("".join(json.dumps(line) + "\n" for line in [*kept, *gone]))
    metrics = MetricsFile(run, resume_step=4, enabled=True)
    follower = Follower(run.metrics_jsonl)
    metrics.remove_evaluation(4)
    assert follower.read() == []
    metrics.write({"step": 4, "eval_loss": 1.0})
    metrics.close()
    assert follower.read() == [{"step": 4, "eval_loss": 1.0}]
    assert lines(run) == [*kept, {"step": 4, "eval_loss": 1.0}]


def test_evaluation_that_was_never_written_leaves_the_file_as_it_is(run: RunDir) -> None:
    run.metrics_jsonl.write_text('{"step": 2, "eval_loss": 1.5}\n')
    metrics = MetricsFile(run, resume_step=4, enabled=True)
    before = run.metrics_jsonl.stat().st_ino
    metrics.remove_evaluation(4)
    metrics.write({"step": 4, "eval_loss": 1.0})
    metrics.close()
    assert run.metrics_jsonl.stat().st_ino == before
    assert [line["step"] for line in lines(run)] == [2, 4]


def test_last_line_without_its_end_is_completed(run: RunDir) -> None:
    run.metrics_jsonl.write_text('{"step": 2, "loss": 1.5}')
    metrics = MetricsFile(run, resume_step=4, enabled=True)
    metrics.write({"step": 5, "loss": 1.0})
    metrics.close()
    assert [line["step"] for line in lines(run)] == [2, 5]


def test_event_that_is_appended_while_the_file_is_replaced_is_kept(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.metrics_jsonl.write_text('{"step": 4, "eval_loss": 1.5}\n')
    metrics = MetricsFile(run, resume_step=4, enabled=True)
    write_text = Path.write_text

    def slow(path: Path, text: str, **options: Any) -> int:
        append_event(run, TrainFinished(4))
        return write_text(path, text, **options)

    monkeypatch.setattr(Path, "write_text", slow)
    metrics.remove_evaluation(4)
    metrics.write({"step": 4, "eval_loss": 1.0})
    metrics.close()
    assert [line.get("event", line.get("eval_loss")) for line in lines(run)] == ["train_finished", 1.0]


def test_other_ranks_write_nothing(run: RunDir) -> None:
    metrics = MetricsFile(run, resume_step=None, enabled=False)
    metrics.write({"step": 1})
    metrics.event(TrainFinished(1))
    metrics.close()
    assert not run.metrics_jsonl.exists()


def test_line_is_on_disk_before_the_file_is_closed(run: RunDir) -> None:
    metrics = MetricsFile(run, resume_step=None, enabled=True)
    metrics.write({"step": 1, "loss": 0.1 + 0.2})
    assert lines(run) == [{"step": 1, "loss": 0.1 + 0.2}], "all digits"
    metrics.close()


def test_lines_refused_by_the_disk_are_written_once_later(run: RunDir) -> None:
    metrics = MetricsFile(run, resume_step=None, enabled=True)
    metrics.write({"step": 1, "loss": 1.0})
    with patch(
        "fsdp_tune.run.metrics_file._write_all", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    ):
        metrics.write({"step": 2, "loss": 0.5})
    metrics.write({"step": 3, "loss": 0.25})
    metrics.close()
    assert metrics.failure is not None
    assert metrics.failure.errno == errno.ENOSPC
    assert lines(run) == [{"step": 1, "loss": 1.0}], "no line without the one before it"
    for _ in range(2):
        again = MetricsFile(run, resume_step=3, enabled=True)
        again.write_missing(metrics.unwritten)
        again.close()
    assert [line["step"] for line in lines(run)] == [1, 2, 3]


@pytest.mark.parametrize("limit", [0, 1, 20, 34, 50])
def test_file_size_limit_is_reported_and_the_torn_line_is_cut(run: RunDir, limit: int) -> None:
    """A file may be no larger than that: the line that passes it is cut in the middle."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    metrics = MetricsFile(run, resume_step=None, enabled=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))  # Python ignores SIGXFSZ
    try:
        for step in (1, 2, 3):
            metrics.write({"step": step, "loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    metrics.close()
    assert metrics.failure is not None
    assert metrics.failure.errno == errno.EFBIG
    again = MetricsFile(run, resume_step=3, enabled=True)
    again.write_missing(metrics.unwritten)
    again.close()
    assert [line["step"] for line in lines(run)] == [1, 2, 3]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_visible_and_lines_are_valid_json(run: RunDir, value: float) -> None:
    metrics = MetricsFile(run, resume_step=None, enabled=True)
    metrics.event(LossScaleBackedOff(3, value))
    metrics.close()
    [line] = lines(run)
    assert (line["event"], line["step"], line["loss_scale"]) == ("loss_scale_backed_off", 3, str(value))


def sum_over_ranks() -> tuple[dict[str, float], list[float]]:
    import torch.distributed as dist

    rank = dist.get_rank()
    sums = Sums(torch.device("cpu"))
    sums.add(torch.tensor(1.5 + rank))
    sums.add(torch.tensor(0.25))
    sums.add_batch(10 + rank, 4, 0.5)
    state = sums.state()
    again = Sums(torch.device("cpu"))
    again.load(state)
    assert again.reduced() == sums.reduced() | {"data_wait_seconds": 0.0}
    return sums.reduced(), state


@pytest.mark.ranks
def test_sums_cover_all_ranks_and_are_checkpointed(on_ranks: Ranks) -> None:
    answers = on_ranks.run(2, sum_over_ranks)
    for reduced, _ in answers:
        assert (reduced["loss_sum"], reduced["tokens"], reduced["supervised_tokens"]) == (
            1.5 + 2.5 + 0.5,
            21.0,
            8.0,
        )
    assert [state for _, state in answers] == [[1.75, 10.0, 4.0], [2.75, 11.0, 4.0]]


def sums_of_sources() -> list[Any]:
    import torch.distributed as dist

    rank = dist.get_rank()
    sums = Sums(torch.device("cpu"), 3)
    assert sums.source_losses is not None
    sums.add(torch.tensor(6.0))
    sums.source_losses += torch.tensor([4.0 + rank, 2.0, 0.0])
    sums.add_batch(20, 5, 0.0)
    sums.add_sources([(1, 2, 0), (), (1, 1, 0)])  # a filler has no tokens
    again, older = Sums(torch.device("cpu"), 3), Sums(torch.device("cpu"), 3)
    again.load(sums.state())
    older.load(sums.state()[:3])
    return [each.reduced()["source_losses"] for each in (sums, again, older)]


@pytest.mark.ranks
def test_losses_of_sources_cover_all_ranks_and_are_checkpointed(on_ranks: Ranks) -> None:
    for found, restored, without in on_ranks.run(2, sums_of_sources):
        assert found == restored == [9 / 4, 4 / 6, None]
        assert without == [None] * 3


def two_lines() -> list[dict[str, Any]]:
    made = Lines(torch.device("cpu"))
    made.start(4)
    found = []
    for step in (6, 8):
        made.sums.add(torch.tensor(6.0))
        made.sums.add_batch(16, 3, 0.0)
        found.append(made.facts(LoggedStep(step, 1.0, 1e-3)))
    return found


@pytest.mark.ranks
def test_metrics_line_covers_steps_since_the_last(on_ranks: Ranks) -> None:
    for first, second in on_ranks.run(2, two_lines):
        assert (first["loss"], first["supervised_tokens"], first["tokens"]) == (2.0, 6, 32)
        assert (second["loss"], second["supervised_tokens"], second["tokens"]) == (2.0, 6, 64)


def line_with_mfu() -> dict[str, Any]:
    model = ModelDimensions(active_parameters=1000, trained_parameters=1000, layers=2, heads=4, head_dim=8)
    made = Lines(torch.device("cpu"), model, peak_flops=1e6)
    made.start(0)
    made.sums.add(torch.tensor(6.0))
    made.sums.add_batch(10, 3, 0.0, attended=6 * 6 + 4 * 4)  # two packed examples
    return made.facts(LoggedStep(1, 1.0, 1e-3))


@pytest.mark.ranks
def test_mfu_of_a_line_counts_packed_examples_each_by_itself(on_ranks: Ranks) -> None:
    for line in on_ranks.run(2, line_with_mfu):
        flops_per_token = 6 * 1000 + 12 * 2 * 4 * 8 * 5.2
        assert line["mfu"] == pytest.approx(flops_per_token * line["tokens_per_second_per_device"] / 1e6)


@pytest.mark.parametrize("active", [400, None])
def test_mfu_counts_active_parameters(active: int | None) -> None:
    loaded: Any = SimpleNamespace(
        model=SimpleNamespace(config=MixtralConfig()),
        size=SimpleNamespace(active_parameters=active, trained_parameters=active),
    )
    size = model_size(loaded)
    assert (size.active_parameters if size else None) == active


def test_cpu_has_no_known_peak() -> None:
    assert device_peak_flops(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("device", "counts", "allocated", "reserved"),
    [
        (
            "cuda",
            SimpleNamespace(max_memory_allocated=lambda _: 2 << 30, max_memory_reserved=lambda _: 3 << 30),
            2.0,
            3.0,
        ),
        (
            "xpu",
            SimpleNamespace(max_memory_allocated=lambda _: 2 << 30, max_memory_reserved=lambda _: 3 << 30),
            2.0,
            3.0,
        ),
        ("mtia", SimpleNamespace(max_memory_allocated=lambda _: 2 << 30), 2.0, None),
        ("mps", SimpleNamespace(), None, None),
        ("cpu", SimpleNamespace(), None, None),
    ],
)
def test_peak_memory_is_that_of_the_allocator_of_any_accelerator(
    monkeypatch: pytest.MonkeyPatch, device: str, counts: Any, allocated: float | None, reserved: float | None
) -> None:
    monkeypatch.setattr(torch, device, counts)
    found = peak_memory_gib(torch.device(device))
    assert (found["peak_allocated_gib"], found["peak_reserved_gib"]) == (allocated, reserved)
    assert (found["peak_host_gib"] or 0.0) > 0.0
