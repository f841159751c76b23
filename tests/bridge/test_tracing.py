"""Traces by a child: named by what they depend on, kept, made anew when damaged; a model that is refused stops nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.bridge import tracing
from fsdp_tune.bridge.tracing import trace_key, trace_recipes
from fsdp_tune.errors import FsdpTuneError
from fsdp_tune.plan.trace_format import Trace
from fsdp_tune.recipe.schema import Recipe
from tests.plan.hand_trace import Hand
from tests.plan.recipes import resolved


def key(recipe: Recipe) -> str:
    return trace_key(recipe, exact=False, vocabulary=None)


def test_a_trace_is_named_by_what_it_depends_on() -> None:
    base = key(resolved())
    assert base == key(resolved(training={"learning_rate": 1.0e-3, "save_steps": 7}, merge={"at_end": False}))
    assert base != key(resolved(micro_batch=2))
    assert base != key(resolved(data={"train": [{"path": "builtin:arithmetic"}], "max_length": 256}))
    assert base != key(resolved(fsdp={"activation_checkpointing": "full"}))
    assert base != trace_key(resolved(), exact=True, vocabulary=None)
    assert base != trace_key(resolved(), exact=False, vocabulary=1000)


def test_another_config_at_the_same_path_is_another_trace(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama", "hidden_size": 64}')
    recipe = resolved(model={"from_config": str(config)})
    before = key(recipe)
    config.write_text('{"model_type": "llama", "hidden_size": 128}')
    assert key(recipe) != before


def test_a_kept_trace_starts_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "COMMAND", ("/nowhere/python",))
    Hand().op("mm", flops=1.0).trace().save(tmp_path / f"{key(resolved())}.npz")
    first, second = trace_recipes([resolved(), resolved()], cache=tmp_path)
    assert isinstance(first, Trace)
    assert first is second


def test_a_child_that_dies_is_told_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{key(resolved())}.npz").write_bytes(b"no trace")
    monkeypatch.setattr(tracing, "COMMAND", ("/bin/sh", "-c", "echo no room left >&2; exit 3"))
    (lost,) = trace_recipes([resolved()], cache=tmp_path)
    assert isinstance(lost, FsdpTuneError)
    assert lost.problems[0].code == "trace-failed"
    assert "no room left" in lost.problems[0].message


@pytest.mark.slow
def test_a_model_that_is_refused_stops_no_other(tmp_path: Path) -> None:
    small = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 384}
    good = resolved(gpus=2, model={"from_config": small | {"num_attention_heads": 4}})
    bad = resolved(gpus=2, model={"from_config": {"model_type": "no such architecture"}})
    refused, traced = trace_recipes([bad, good], cache=tmp_path)
    assert isinstance(refused, FsdpTuneError)
    assert isinstance(traced, Trace)
    assert traced.shapes.world_size == 2
    (again,) = trace_recipes([good], cache=tmp_path)
    assert isinstance(again, Trace)
    assert again.to_bytes() == traced.to_bytes()
