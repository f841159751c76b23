"""The file of a ranked recipe: what its user wrote, with the changed keys marked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from fsdp_tune.core.errors import ExitCode, FsdpTuneError
from fsdp_tune.core.gpus import find_hardware
from fsdp_tune.jobs import ranked_recipe
from fsdp_tune.jobs.ranked_recipe import recipe_body, recipe_text
from tests.planner.recipes import resolved

MODEL = {"model": {"from_config": {"model_type": "llama"}, "tokenizer": "builtin:arithmetic"}}


def body(written: dict[str, Any], best: Any, **changes: object) -> tuple[dict[str, Any], list[str]]:
    """The document of a ranked recipe, and its marked lines."""
    plan = SimpleNamespace(recipe_changes={key.replace("__", "."): value for key, value in changes.items()})
    text = recipe_body(resolved(), written, SimpleNamespace(plan=plan, recipe=best))  # type: ignore[arg-type]
    marked = [line.partition("  #")[0].strip() for line in text.splitlines() if "# changed by plan" in line]
    return yaml.safe_load(text), marked


@pytest.mark.parametrize(
    ("training", "found"),
    [
        (
            {"global_batch_size": 64, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
            {"global_batch_size": 64, "per_device_train_batch_size": 2},
        ),
        (
            {"per_device_train_batch_tokens": 4096, "per_device_train_batch_size": 1},
            {"per_device_train_batch_tokens": 4096},
        ),
        (
            {"gradient_accumulation_steps": 8},
            {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2},
        ),
    ],
    ids=["global batch", "tokens", "accumulation"],
)
def test_batch_is_written_as_the_user_wrote_it(training: dict[str, Any], found: dict[str, Any]) -> None:
    best = resolved(micro_batch=2)
    document, marked = body({**MODEL, "training": training}, best, training__per_device_train_batch_size=2)
    assert document["training"] == found
    assert marked == ["per_device_train_batch_size: 2"] * ("per_device_train_batch_size" in found)


def test_accumulation_follows_from_a_global_batch() -> None:
    """Both would contradict each other on another number of ranks."""
    written = {**MODEL, "training": {"global_batch_size": 64, "gradient_accumulation_steps": 8}}
    document, _ = body(written, resolved())
    assert document["training"] == {"global_batch_size": 64}


def test_size_is_always_written_and_only_changes_are_marked() -> None:
    best = resolved(gpus=4, fsdp={"sharding_strategy": "SHARD_GRAD_OP"})
    written = {**MODEL, "training": {"max_steps": 10}, "launch": {"num_processes": "auto"}}
    document, marked = body(written, best, fsdp__sharding_strategy="SHARD_GRAD_OP")
    assert document["launch"] == {"num_processes": 4, "num_machines": 1}
    assert document["fsdp"] == {"sharding_strategy": "SHARD_GRAD_OP"}
    assert document["model"] == MODEL["model"]
    assert marked == ["sharding_strategy: SHARD_GRAD_OP"]


def test_key_that_the_ranked_recipe_has_otherwise_is_left_out() -> None:
    best = resolved(fsdp={"reshard_after_backward": False}, training={"max_steps": 10})
    written = {**MODEL, "fsdp": {"reshard_after_backward": True, "version": 2}}
    document, _ = body(written, best)
    assert document["fsdp"] == {"version": 2}


def test_recipe_of_the_cpu_is_written_for_the_gpus_that_are_planned() -> None:
    document, _ = body({**MODEL, "launch": {"device": "cpu", "num_processes": 2}}, resolved())
    assert document["launch"]["device"] == "cuda"


def test_value_that_a_plan_decided_is_written_and_not_decided_again() -> None:
    """It might be decided differently for another micro-batch."""
    best = resolved()
    document, _ = body({**MODEL, "fsdp": {"activation_checkpointing": "auto"}}, best)
    assert document["fsdp"] == {"activation_checkpointing": best.fsdp.activation_checkpointing}
    assert document["fsdp"]["activation_checkpointing"] != "auto"


def text_of(monkeypatch: pytest.MonkeyPatch, found: list[str], **planned: Any) -> str:
    """The text of a ranked recipe, which loads with these differences and is planned so."""
    figures = {
        "fits": "yes",
        "fits_because": "the memory is enough",
        "device_gib": 30.25,
        "usable_gib": 39.5,
        "step_seconds": None,
        "tokens_per_second_per_device": None,
    }
    plans: Any = SimpleNamespace(
        recipe=resolved(),
        hardware=find_hardware("A100-40GB"),
        plan_other=lambda _recipe: SimpleNamespace(**figures | planned),
    )
    best: Any = SimpleNamespace(recipe=resolved(), plan=SimpleNamespace(recipe_changes={}))
    monkeypatch.setattr(ranked_recipe, "differences", lambda *_: found)
    data = {"train": [{"path": "builtin:arithmetic"}], "max_length": 128}
    written: dict[str, Any] = {**MODEL, "data": data, "training": {"max_steps": 10, "global_batch_size": 64}}
    return recipe_text(plans, Path("best.yaml"), written, best, ["# why"])


def test_text_begins_with_the_reason_and_the_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    first = "# Predicted: 30.2 of 39.5 GiB on each GPU (fits: yes)"
    assert text_of(monkeypatch, []).splitlines()[:3] == ["# why", f"{first}.", ""]
    speed = {"step_seconds": 1.25, "tokens_per_second_per_device": 1234.0}
    assert text_of(monkeypatch, [], **speed).splitlines()[1] == (
        f"{first}, 1.25 s a step, 1,234 tokens a second and GPU."
    )


@pytest.mark.parametrize(
    ("found", "planned", "words"),
    [
        (["fsdp.version"], {}, "best.yaml is not the one that was planned: fsdp.version"),
        ([], {"fits": "no"}, "best.yaml does not fit when it is planned again: the memory is enough"),
    ],
)
def test_text_that_loads_as_another_recipe_is_not_returned(
    monkeypatch: pytest.MonkeyPatch, found: list[str], planned: dict[str, Any], words: str
) -> None:
    with pytest.raises(FsdpTuneError, match=words) as caught:
        text_of(monkeypatch, found, **planned)
    assert caught.value.problems[0].code == "written-recipe-differs"
    assert caught.value.exit_code == ExitCode.FAILED
