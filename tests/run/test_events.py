"""The events: each is written, read again and shown; lines of earlier versions are still read."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.events import (
    EVENTS,
    NAMED_ROWS,
    FirstStep,
    LossSpike,
    Profiled,
    RankSlowed,
    RecipeChanged,
    read_event,
)
from fsdp_tune.run.metrics_event import MetricsEvent, OtherEvent
from fsdp_tune.run.metrics_file import append_event, read_metrics


def test_every_event_is_written_somewhere(repository: Path) -> None:
    texts = [
        path.read_text(encoding="utf-8")
        for path in (repository / "fsdp_tune").rglob("*.py")
        if path.name != "events.py"
    ]
    used = {name for text in texts for name in re.findall(r"\b([A-Z]\w+)(?=\(|, f?\")", text)}
    assert {kind.__name__ for kind in EVENTS.values()} - used == set()


def line_of(name: str, **fields: Any) -> dict[str, Any]:
    return {"event": name, "step": 7, "time": 1.0, **fields}


SHARE = {
    "total": 0.5,
    "compute": 0.25,
    "all_gather": 0.0,
    "reduce_scatter": 0.0,
    "all_reduce": 0.0,
    "idle": 0.25,
}
SPIKE_ROWS = [
    {
        "file": "a.jsonl",
        "row": row,
        "tokens": 5,
        "step": 7,
        "rank": 1,
        "micro_batch": number,
        "sequence": 0,
        "loss": 9.5 / number * 2,
    }
    for row, number in ((3, 2), (4, 2), (5, 2), (6, 2), (7, 3))
]
SHOWN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "train_started": (
        {"total_steps": 9},
        ["the live model matches the recipe; training to step 9 from step 7"],
    ),
    "first_step": (
        {"phase_seconds": {"importing": 1.25, "joining": 0.05, "training": 2.0}},
        ["first step 3.3 s after the launch (importing 1.2, training 2.0)"],
    ),
    "samples": (
        {
            "seconds": 1.0,
            "samples": [{"prompt": "a\n" * 40, "text": "two\nthree"}, {"prompt": "b", "text": "c" * 200}],
        },
        ["step 7: … " + r"a\n" * 20 + r" → two\nthree", "step 7: b → " + "c" * 120 + " …"],
    ),
    "checkpoint_probed": ({"seconds": 1.0}, []),
    "witnessed": ({"cpu_seconds": 1.0}, []),
    "witness_cost": ({"cpu_seconds": 1.0, "training_cpu_seconds": 9.0, "steps": 100}, []),
    "checkpoint_saved": (
        {"seconds": 1.5, "stall_seconds": 0.1, "size_bytes": 3 * 2**20},
        ["checkpoint-7 saved: 3.00 MiB in 1.5s"],
    ),
    "checkpoint_failed": ({"message": "no space"}, ["warning: checkpoint-7 was NOT saved: no space"]),
    "checkpoint_evaluated": (
        {
            "checkpoint": "0a54",
            "seconds": 30.0,
            "scores": {
                "sums/exact_match": {"value": 0.5, "low": 0.25, "high": 0.75, "rows": 8},
                "arc_easy/acc": {"value": 0.25, "low": None, "high": None, "rows": 20},
            },
            "definition": "77",
            "warnings": ["sums: 1 of 8 answers was cut"],
            "ranks_waited_seconds": None,
        },
        [
            "checkpoint-7 evaluated: sums/exact_match 0.5000 [0.2500, 0.7500], arc_easy/acc 0.2500",
            "warning: checkpoint-7: sums: 1 of 8 answers was cut",
        ],
    ),
    "checkpoint_evaluation_failed": (
        {
            "checkpoint": "0a54",
            "code": "merge-disk-full",
            "message": "no room",
            "command": "c1",
            "ranks_waited_seconds": 3.0,
        },
        ["warning: checkpoint-7 was not evaluated: no room"],
    ),
    "rotation_failed": ({"message": "busy"}, ["step 7: rotation failed: busy"]),
    "files_moved": ({"message": "a file had the name"}, ["step 7: files moved: a file had the name"]),
    "compiled": ({"seconds": 2.0, "graphs": 3}, ["step 7: compiled (seconds 2.0, graphs 3)"]),
    "compile_fallback": ({"message": "f was recompiled"}, ["step 7: compile fallback: f was recompiled"]),
    "profiled": (
        {"trace": "t.json.gz", "steps": 2, "seconds": {"forward": SHARE, "backward": SHARE}},
        [
            "profile              total         compute      all-gather  reduce-scatter      "
            "all-reduce            idle",
            "forward          250.00 ms       125.00 ms         0.00 ms         0.00 ms         0.00 "
            "ms       125.00 ms",
            "backward         250.00 ms       125.00 ms         0.00 ms         0.00 ms         0.00 "
            "ms       125.00 ms",
            "step             500.00 ms       250.00 ms         0.00 ms         0.00 ms         0.00 "
            "ms       250.00 ms",
            "profile: t.json.gz (open it in https://ui.perfetto.dev)",
        ],
    ),
    "slow_rank": (
        {"rank": 1, "part": "data", "share": 0.2, "behind_seconds": 0.5, "message": "rank 1 is slow"},
        ["warning: step 7: rank 1 is slow"],
    ),
    "rank_recovered": (
        {"rank": 1, "message": "it is as fast as the others"},
        ["step 7: rank recovered: it is as fast as the others (rank 1)"],
    ),
    "loss_spike": (
        {"message": "high", "rows": SPIKE_ROWS, "rows_total": 90},
        [
            "step 7: loss spike: high",
            "  highest of 90 rows: step 7, rank 1, micro-batch 2 with loss 9.5000: "
            "a.jsonl:3 (5 tokens), a.jsonl:4 (5 tokens), a.jsonl:5 (5 tokens) and 1 more row",
        ],
    ),
    "gradient_spike": ({"message": "high", "rows": [], "rows_total": 0}, ["step 7: gradient spike: high"]),
    "zero_gradient": ({"message": "zero"}, ["step 7: zero gradient: zero"]),
    "weights_look_random": ({"message": "blind"}, ["step 7: weights look random: blind"]),
    "precision_warning": ({"message": "fp32"}, ["step 7: precision warning: fp32"]),
    "loss_scale_backed_off": ({"loss_scale": 512.0}, ["step 7: loss scale backed off (loss_scale 512.0)"]),
    "step_skipped": ({"reason": "nan"}, ["step 7: step skipped (reason nan)"]),
    "tracker_failed": ({"message": "wandb hangs"}, ["warning: step 7: wandb hangs"]),
    "stopping": ({"reason": "interrupted"}, ["step 7: stopping (interrupted)"]),
    "best_restarted": ({"message": "other rows"}, ["step 7: best restarted: other rows"]),
    "early_stopped": ({"message": "no better"}, ["step 7: early stopped: no better"]),
    "train_finished": ({}, []),
    "mirrored": (
        {
            "folder": "checkpoint-7",
            "seconds": 2.0,
            "size_bytes": 3 * 2**20,
            "verified": "the store's checksum",
        },
        ["checkpoint-7 mirrored: 3.00 MiB sent in 2.0s, verified by the store's checksum"],
    ),
    "checkpoint_rejected": (
        {"checkpoint": "checkpoint-7", "message": "checkpoint-7 is not used: damaged"},
        [],
    ),
    "mirror_failed": ({"message": "s3://b/r: refused"}, ["warning: the mirror is behind: s3://b/r: refused"]),
    "restarted": (
        {"restart": 1, "max_restarts": 2, "failed_after_step": 8, "code": "rank-lost", "message": "lost"},
        [],
    ),
    "machines_changed": (
        {"machines": [0, 2], "ranks": 4, "gradient_accumulation_steps": 3, "message": "fewer"},
        [],
    ),
    "continued": ({"seconds": 60.0, "message": "stopped for 1m00s"}, []),
    "recipe_changed": (
        {"changes": [{"key": "training.max_steps", "old": 1, "new": None, "class": "trajectory"}]},
        [],
    ),
}
"""Event → its fields, and what the terminal prints."""


@pytest.mark.parametrize("name", EVENTS)
def test_event_is_read_shown_and_written_as_it_was(name: str) -> None:
    written, lines = SHOWN[name]
    event = read_event(line_of(name, **written))
    assert isinstance(event, EVENTS[name])
    assert (event.shown() if event.is_shown else []) == lines
    assert json.dumps(event.line(1.0)) == json.dumps(line_of(name, **written)), (
        "the same fields in the same order"
    )


def test_file_has_event_step_and_time_first(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    append_event(run, FirstStep(1, {"training": 2.0}))
    (line,) = read_metrics(run)
    assert list(line) == ["event", "step", "time", "phase_seconds"]
    assert line["time"] > 1e9


def test_first_step_counts_from_the_command_if_its_time_is_known() -> None:
    assert FirstStep(1, {"training": 2.0}).shown(1.5) == [
        "first step 3.5 s after the start (checking 1.5, training 2.0)"
    ]


def test_line_of_an_earlier_version_is_read() -> None:
    old = read_event(line_of("slow_rank", rank=1, ratio=2.0, behind_seconds=0.5, message="slow"))
    assert old == RankSlowed(7, 1, part=None, share=None, behind_seconds=0.5, message="slow", time=1.0)
    spike = read_event({"event": "loss_spike", "step": 7, "message": "high"})
    assert spike == LossSpike(7, "high", rows=None, rows_total=None)
    assert isinstance(spike, LossSpike)
    assert spike.shown() == ["step 7: loss spike: high"]


def test_changed_key_is_written_and_read_as_class() -> None:
    line = line_of("recipe_changed", **SHOWN["recipe_changed"][0])
    event = read_event(line)
    assert isinstance(event, RecipeChanged)
    assert event.changes[0].class_ == "trajectory"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (line_of("gpu_on_fire", message="hot", degrees=99), ["step 7: gpu on fire: hot (degrees 99)"]),
        (line_of("train_started", total_steps="many"), ["step 7: train started (total_steps many)"]),
        ({"event": "stopping"}, ["step None: stopping"]),
        ({"event": None, "step": True}, ["step None: None"]),
        ({"event": "gone", "step": 7, "time": 10**400}, ["step 7: gone"]),
        (line_of("checkpoint_saved", seconds=float("nan")), ["step 7: checkpoint saved (seconds nan)"]),
    ],
)
def test_event_of_another_version_is_described(line: dict[str, Any], shown: list[str]) -> None:
    event = read_event(line)
    assert isinstance(event, OtherEvent)
    assert event.shown() == shown
    known = EVENTS.get(event.name, MetricsEvent)
    assert event.level == getattr(known, "level", "news")


def test_line_of_a_step_is_no_event() -> None:
    assert read_event({"step": 7, "loss": 1.0}) is None


def test_schema_has_the_fields_of_every_event(repository: Path) -> None:
    schema = json.loads(
        (repository / "docs" / "reference" / "schemas" / "metrics-events.json").read_text(encoding="utf-8")
    )
    assert len(schema["anyOf"]) == len(EVENTS)
    for name, kind in EVENTS.items():
        made = schema["$defs"][kind.__name__]
        assert (
            set(made["properties"])
            == set(made["required"])
            == {"event", *(each.name for each in fields(kind))}
        )
        assert made["properties"]["event"] == {"const": name}


def test_reference_names_the_limit_of_rows() -> None:
    assert f"at most {NAMED_ROWS}," in " ".join((LossSpike.__doc__ or "").split())


@pytest.mark.parametrize("seconds", [{}, {"forward": {"cpu": 1.0}, "backward": {"gpu": 1.0}}])
def test_profile_of_other_phases_is_shown(seconds: dict[str, Any]) -> None:
    event = read_event(line_of("profiled", trace="t.json", steps=2, seconds=seconds))
    assert isinstance(event, Profiled)
    assert len(event.shown()) == len(seconds) + 3


def test_reading_a_line_parses_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are read in several threads, where CPython 3.11 fails to parse:
    `AST constructor recursion depth mismatch`."""
    monkeypatch.setattr("ast.parse", lambda *_, **__: pytest.fail("parses"))
    for kind in EVENTS.values():
        TypeAdapter(kind)
