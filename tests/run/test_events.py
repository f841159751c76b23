"""The table of events: what is written is in it, with its fields, and the terminal has a line for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.run import metrics_file
from fsdp_tune.run.metrics_file import EVENTS, describe

OF_CURVES = {"LOSS_SPIKE", "GRADIENT_SPIKE", "ZERO_GRADIENT", "WEIGHTS_LOOK_RANDOM"}
"""Passed to the call that writes them as the variable `kind`."""


def calls(repository: Path) -> Iterator[tuple[str, set[str], bool]]:
    """(name in the table, fields, whether it passes more by `**`) of every call that writes an event."""
    for path in (repository / "fsdp_tune").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = getattr(node, "func", None)
            is_call = isinstance(node, ast.Call)
            if is_call and (getattr(called, "attr", "") in ("event", "_event") or getattr(called, "id", "") == "append_event"):
                kind = node.args[getattr(called, "id", "") == "append_event"]
                name = ast.unparse(kind)
                if name != "kind" and not name.isupper():
                    continue  # another method of this name
                yield name, {each.arg for each in node.keywords if each.arg}, any(each.arg is None for each in node.keywords)


def test_every_written_event_is_in_the_table_with_its_fields(repository: Path) -> None:
    written = list(calls(repository))
    for name, fields, has_more in written:
        if name == "kind":
            assert has_more or fields == {"message"}
            continue
        declared = set(getattr(metrics_file, name).fields)
        assert fields < declared if has_more else fields == declared, name
    source = (repository / "fsdp_tune" / "worker" / "step_checks.py").read_text(encoding="utf-8")
    assert all(f"found.append(({name}, " in source for name in OF_CURVES)
    assert {name.lower() for name, *_ in written} - {"kind"} | {name.lower() for name in OF_CURVES} == EVENTS.keys()


def line_of(name: str, **fields: Any) -> dict[str, Any]:
    return {"event": name, "step": 7, "time": 1.0, **fields}


SHARE = {"total": 0.5, "compute": 0.25, "all_gather": 0.0, "reduce_scatter": 0.0, "all_reduce": 0.0, "idle": 0.25}
PLACE = {"step": 7, "rank": 1, "sequence": 0, "tokens": 5}
SPIKE_ROWS = [
    {"file": "a.jsonl", "row": row, **PLACE, "micro_batch": number, "loss": 9.5 / number * 2}
    for row, number in ((3, 2), (4, 2), (5, 2), (6, 2), (7, 3))
]
SHOWN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "train_started": ({"total_steps": 9}, ["the live model matches the recipe; training to step 9 from step 7"]),
    "first_step": (
        {"phase_seconds": {"importing": 1.25, "joining": 0.05, "training": 2.0}},
        ["first step 3.3 s after the launch (importing 1.2, training 2.0)"],
    ),
    "samples": (
        {"seconds": 1.0, "samples": [{"prompt": "a\n" * 40, "text": "two\nthree"}, {"prompt": "b", "text": "c" * 200}]},
        ["step 7: … " + r"a\n" * 20 + r" → two\nthree", "step 7: b → " + "c" * 120 + " …"],
    ),
    "checkpoint_probed": ({"seconds": 1.0}, []),
    "witnessed": ({"cpu_seconds": 1.0}, []),
    "witness_cost": ({"cpu_seconds": 1.0, "training_cpu_seconds": 9.0, "steps": 100}, []),
    "checkpoint_saved": ({"seconds": 1.5, "stall_seconds": 0.1, "size_bytes": 3 * 2**20}, ["checkpoint-7 saved: 3.00 MiB in 1.5s"]),
    "checkpoint_failed": ({"message": "no space"}, ["warning: checkpoint-7 was NOT saved: no space"]),
    "rotation_failed": ({"message": "busy"}, ["step 7: rotation failed: busy"]),
    "compiled": ({"seconds": 2.0, "graphs": 3}, ["step 7: compiled (seconds 2.0, graphs 3)"]),
    "compile_fallback": ({"message": "f was recompiled"}, ["step 7: compile fallback: f was recompiled"]),
    "profiled": (
        {"trace": "t.json.gz", "steps": 2, "seconds": {"forward": SHARE, "backward": SHARE}},
        [
            "profile              total         compute      all-gather  reduce-scatter      all-reduce            idle",
            "forward          250.00 ms       125.00 ms         0.00 ms         0.00 ms         0.00 ms       125.00 ms",
            "backward         250.00 ms       125.00 ms         0.00 ms         0.00 ms         0.00 ms       125.00 ms",
            "step             500.00 ms       250.00 ms         0.00 ms         0.00 ms         0.00 ms       250.00 ms",
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
    "loss_scale_backed_off": ({"loss_scale": 512}, ["step 7: loss scale backed off (loss_scale 512)"]),
    "step_skipped": ({"reason": "nan"}, ["step 7: step skipped (reason nan)"]),
    "tracker_failed": ({"message": "wandb hangs"}, ["warning: step 7: wandb hangs"]),
    "stopping": ({"reason": "interrupted"}, ["step 7: stopping (interrupted)"]),
    "early_stopped": ({"message": "no better"}, ["step 7: early stopped: no better"]),
    "train_finished": ({}, []),
    "mirrored": ({"folder": "checkpoint-7", "seconds": 2.0, "size_bytes": 3 * 2**20}, ["checkpoint-7 mirrored: 3.00 MiB sent in 2.0s"]),
    "checkpoint_rejected": ({"checkpoint": "checkpoint-7", "message": "checkpoint-7 is not used: damaged"}, []),
    "mirror_failed": ({"message": "s3://b/r: refused"}, ["warning: the mirror is behind: s3://b/r: refused"]),
    "restarted": ({"restart": 1, "max_restarts": 2, "failed_after_step": 8, "code": "rank-lost", "message": "lost"}, []),
    "machines_changed": ({"machines": [0, 2], "ranks": 4, "gradient_accumulation_steps": 3, "message": "fewer"}, []),
    "recipe_changed": ({"changes": []}, []),
}
"""Event → its fields, and what the terminal prints."""


@pytest.mark.parametrize("name", EVENTS)
def test_terminal_shows_event(name: str) -> None:
    fields, lines = SHOWN[name]
    kind = EVENTS[name]
    assert set(fields) == set(kind.fields)
    assert (kind.show(line_of(name, **fields)) if kind.show is not None else []) == lines


def test_event_of_another_version_is_described() -> None:
    assert describe(line_of("gpu_on_fire", message="hot", degrees=99)) == ["step 7: gpu on fire: hot (degrees 99)"]
