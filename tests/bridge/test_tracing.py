"""Traces by a child: named by what they depend on, kept, made anew when damaged; a model that is refused stops nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fsdp_tune.bridge import tracing
from fsdp_tune.bridge.tracing import Tracing, trace_key
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
    with Tracing(tmp_path) as asked:
        first, second = asked([resolved(), resolved()])
    assert isinstance(first, Trace)
    assert first is second


def test_a_child_that_dies_is_told_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{key(resolved())}.npz").write_bytes(b"no trace")
    monkeypatch.setattr(tracing, "COMMAND", ("/bin/sh", "-c", "echo no room left >&2; exit 3"))
    with Tracing(tmp_path) as asked:
        (lost,) = asked([resolved()])
    assert isinstance(lost, FsdpTuneError)
    assert lost.problems[0].code == "trace-failed"
    assert "no room left" in lost.problems[0].message


@pytest.mark.slow
def test_a_model_that_is_refused_stops_no_other(tmp_path: Path) -> None:
    small = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 384}
    good = resolved(gpus=2, model={"from_config": small | {"num_attention_heads": 4}})
    bad = resolved(gpus=2, model={"from_config": {"model_type": "no such architecture"}})
    with Tracing(tmp_path) as asked:
        refused, traced = asked([bad, good])
    assert isinstance(refused, FsdpTuneError)
    assert isinstance(traced, Trace)
    assert traced.shapes.world_size == 2
    with Tracing(tmp_path) as asked:
        (again,) = asked([good])
    assert isinstance(again, Trace)
    assert again.to_bytes() == traced.to_bytes()


def answering(script: str) -> tuple[str, ...]:
    """A child that answers as `script` says: `job` is what it was asked."""
    head = "import json, sys\nfor line in sys.stdin:\n    job = json.loads(line)\n    "
    return (sys.executable, "-c", head + script)


def test_a_refusal_is_handed_over_and_the_child_asked_once_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "print(json.dumps({'job': job['job'], 'problems': [{'code': 'refused', 'message': str(job['job'])}]}), flush=True)"
    monkeypatch.setattr(tracing, "COMMAND", answering(script))
    with Tracing(tmp_path) as asked:
        one, other, again = asked([resolved(), resolved(micro_batch=2), resolved()])
        assert isinstance(one, FsdpTuneError)
        assert isinstance(other, FsdpTuneError)
        assert (one.problems[0].code, one.problems[0].message, other.problems[0].message) == ("refused", "0", "1")
        assert again is one


def test_a_trace_that_was_promised_and_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "COMMAND", answering("print(json.dumps({'job': job['job'], 'problems': []}), flush=True)"))
    with Tracing(tmp_path) as asked:
        (lost,) = asked([resolved()])
    assert isinstance(lost, FsdpTuneError)
    assert "cannot be read" in lost.problems[0].message
