"""Traces by a child process: cached by their inputs and rebuilt if damaged; a refused model does not stop
others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.planner import tracing
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.planner.tracing import Tracing, trace_key
from fsdp_tune.recipe.schema.key_effects import MEMORY, TIME
from fsdp_tune.recipe.schema.keys import all_keys, effect_of
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import PASSED_EFFECTS
from tests.planner.hand_trace import Hand
from tests.planner.recipes import resolved


def key(recipe: Recipe) -> str:
    return trace_key(recipe, exact=False, vocabulary=None)


def test_trace_is_named_by_what_it_depends_on() -> None:
    base = key(resolved())
    assert base == key(resolved(training={"learning_rate": 1.0e-3, "save_steps": 7}, merge={"at_end": False}))
    assert base != key(resolved(micro_batch=2))
    assert base != key(resolved(data={"train": [{"path": "builtin:arithmetic"}], "max_length": 256}))
    assert base != key(resolved(fsdp={"activation_checkpointing": "full"}))
    assert base != trace_key(resolved(), exact=True, vocabulary=None)
    assert base != trace_key(resolved(), exact=False, vocabulary=1000)


def with_value(recipe: Recipe, name: str, value: object) -> Recipe:
    """A copy of `recipe` with another value, not validated."""
    section, _, field = name.partition(".")
    if not field:
        return recipe.model_copy(update={section: value})
    copy = getattr(recipe, section).model_copy(update={"async_" if field == "async" else field: value})
    return recipe.model_copy(update={section: copy})


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_every_recipe_key_that_affects_memory_or_time_is_in_the_name_of_a_trace() -> None:
    recipe = resolved(lora={}, quantization={})
    base = key(recipe)
    names = [each.name for each in all_keys() if each.effect is not None and len(each.path) <= 2]
    names += [f"training.{name}" for name in PASSED_EFFECTS]
    in_name = {name for name in names if key(with_value(recipe, name, "another value")) != base}
    assert in_name == {name for name in names if effect_of(name).affects & (MEMORY | TIME)}
    assert {
        "data.max_length",
        "fsdp.offload_params",
        "training.optim_target_modules",
        "kernels.loss",
    } <= in_name
    assert {"training.learning_rate", "training.seed", "merge.dtype", "name"}.isdisjoint(in_name)


def test_unknown_training_field_is_in_the_name_of_a_trace() -> None:
    training = resolved().training.model_copy(update={"field_of_the_next_release": 1})
    assert key(resolved().model_copy(update={"training": training})) != key(resolved())


def test_trace_key_changes_with_config_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text("{}")
    (tmp_path / "model").mkdir()
    config = tmp_path / "model" / "config.json"
    config.write_text('{"hidden_size": 64}')
    recipe = with_value(resolved(), "model.from_config", None)
    recipe = with_value(recipe, "model.name_or_path", str(tmp_path))
    before = key(recipe)
    assert key(recipe) == before
    config.write_text('{"hidden_size": 128}')
    assert key(recipe) != before


def test_trace_key_changes_with_hub_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--model"
    recipe = with_value(with_value(resolved(), "model.from_config", None), "model.name_or_path", "org/model")
    names = [key(recipe)]
    for commit in ("1111", "2222"):
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
        names.append(key(recipe))
    assert len(set(names)) == 3
    assert key(with_value(recipe, "model.revision", "1111")) not in names, "the revision is a key of its own"


def test_trace_key_changes_with_package_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    names = []
    for version in ("0.1", "0.2"):
        for stale in tmp_path.glob("*.dist-info"):
            stale.rmdir()
        (tmp_path / f"torchao-{version}.dist-info").mkdir()
        tracing.installed_code.cache_clear()
        names.append(key(resolved()))
    tracing.installed_code.cache_clear()
    assert names[0] != names[1]


def test_trace_of_changed_config_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    Hand().op("mm", flops=1.0).trace().save(tmp_path / "traced.npz")
    edit = (
        f"import shutil; shutil.copy({str(tmp_path / 'traced.npz')!r}, job['output']); "
        f"open({str(config)!r}, 'w').write('1'); "
    )
    monkeypatch.setattr(
        tracing, "COMMAND", answering(edit + "print(json.dumps({'job': 0, 'problems': []}), flush=True)")
    )
    with Tracing(tmp_path / "cache") as asked:
        (found,) = asked([resolved(model={"from_config": str(config)})])
    assert isinstance(found, Trace)
    assert list((tmp_path / "cache").iterdir()) == []


def test_trace_key_changes_with_config_content(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama", "hidden_size": 64}')
    recipe = resolved(model={"from_config": str(config)})
    before = key(recipe)
    config.write_text('{"model_type": "llama", "hidden_size": 128}')
    assert key(recipe) != before


def test_cached_trace_starts_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "COMMAND", ("/nowhere/python",))
    Hand().op("mm", flops=1.0).trace().save(tmp_path / f"{key(resolved())}.npz")
    with Tracing(tmp_path) as asked:
        first, second = asked([resolved(), resolved()])
    assert isinstance(first, Trace)
    assert first is second


def test_child_that_dies_is_reported_with_its_last_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{key(resolved())}.npz").write_bytes(b"no trace")
    monkeypatch.setattr(tracing, "COMMAND", ("/bin/sh", "-c", "echo no room left >&2; exit 3"))
    with Tracing(tmp_path) as asked:
        (lost,) = asked([resolved()])
    assert isinstance(lost, FsdpTuneError)
    assert lost.problems[0].code == "trace-failed"
    assert "no room left" in lost.problems[0].message


def test_request_after_the_death_of_a_child_starts_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "COMMAND", ("/bin/sh", "-c", "kill -KILL $$"))
    refused = (
        "print(json.dumps({'job': job['job'], 'problems': [{'code': 'x', 'message': 'alive'}]}), flush=True)"
    )
    with Tracing(tmp_path) as asked:
        (lost,) = asked([resolved()])
        monkeypatch.setattr(tracing, "COMMAND", answering(refused))
        (found,) = asked([resolved(micro_batch=2)])
    assert "killed by SIGKILL" in str(lost)
    assert str(found) == "alive"


@pytest.mark.parametrize("length", [0, 100, -1])
def test_trace_that_was_cut_off_is_traced_again(
    tmp_path: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"{key(resolved())}.npz"
    file.write_bytes(Hand().op("mm", flops=1.0).trace().to_bytes()[:length])
    monkeypatch.setattr(tracing, "COMMAND", ("/bin/sh", "-c", "echo traced again >&2; exit 3"))
    with Tracing(tmp_path) as asked:
        (found,) = asked([resolved()])
    assert "traced again" in str(found)


@pytest.mark.slow
def test_refused_model_does_not_stop_others(tmp_path: Path) -> None:
    small = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "vocab_size": 384,
    }
    good = resolved(gpus=2, model={"from_config": small | {"num_attention_heads": 4}})
    bad = resolved(gpus=2, model={"from_config": {"model_type": "no such architecture"}})
    with Tracing(tmp_path) as asked:
        refused, traced = asked([bad, good])
    assert isinstance(refused, FsdpTuneError)
    assert isinstance(traced, Trace)
    assert traced.shapes.topology.world_size == 2
    with Tracing(tmp_path) as asked:
        (again,) = asked([good])
    assert isinstance(again, Trace)
    assert again.to_bytes() == traced.to_bytes()


def answering(script: str) -> tuple[str, ...]:
    """A child that answers with `script`; `job` is the request."""
    head = "import json, sys\nfor line in sys.stdin:\n    job = json.loads(line)\n    "
    return (sys.executable, "-c", head + script)


def test_refusal_is_passed_on_and_the_child_is_queried_once_per_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "print(json.dumps({'job': job['job'], 'problems': [{'code': 'refused', 'message': "
        "str(job['job'])}]}), flush=True)"
    )
    monkeypatch.setattr(tracing, "COMMAND", answering(script))
    with Tracing(tmp_path) as asked:
        one, other, again = asked([resolved(), resolved(micro_batch=2), resolved()])
        assert isinstance(one, FsdpTuneError)
        assert isinstance(other, FsdpTuneError)
        assert (one.problems[0].code, one.problems[0].message, other.problems[0].message) == (
            "refused",
            "0",
            "1",
        )
        assert again is one


def test_missing_trace_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tracing, "COMMAND", answering("print(json.dumps({'job': job['job'], 'problems': []}), flush=True)")
    )
    with Tracing(tmp_path) as asked:
        (lost,) = asked([resolved()])
    assert isinstance(lost, FsdpTuneError)
    assert "cannot be read" in lost.problems[0].message
