"""Every function that queries the hub returns the same error without a network.

Errors of the hub itself: tests/faults/test_strangers.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fsdp_tune.core import hub
from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.data.format import templates
from fsdp_tune.data.tokenise.tokenizer import open_tokenizer
from fsdp_tune.merge.config_and_tokenizer import fetch_model
from fsdp_tune.recipe.schema.recipe import Recipe

DOORS: dict[str, tuple[Callable[[str], object], str]] = {
    "tokenizer": (
        lambda name: open_tokenizer(Recipe.model_validate({"model": {"tokenizer": name}})),
        "model.tokenizer",
    ),
    "template": (templates.resolve_template, "data.chat_template"),
    "model": (lambda name: hub.download_model(name, "main"), "model.name_or_path"),
    "base": (fetch_model, "--base"),
}


def asked(door: str, name: str) -> Problem:
    with pytest.raises(FsdpTuneError) as caught:
        DOORS[door][0](name)
    assert caught.value.exit_code == 2
    return caught.value.problems[0]


@pytest.mark.parametrize("door", DOORS)
def test_unreachable_hub_error_names_resource_and_alternatives(door: str) -> None:
    problem = asked(door, "org/not-here")
    assert problem.code == "hub-unreachable"
    assert (
        "`org/not-here` is not in the local cache, and HF_HUB_OFFLINE keeps this command off"
        in problem.message
    )
    assert problem.ways_out[0] == f"give a local path in `{DOORS[door][1]}`"
    assert "`hf download org/not-here`" in problem.ways_out[1]
    assert "unset HF_HUB_OFFLINE" in problem.ways_out[2]


@pytest.mark.parametrize("door", DOORS)
def test_offline_error_does_not_mention_unset_variables(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.hub_is_reachable.cache_clear()
    monkeypatch.setattr(
        hub.socket, "create_connection", lambda *_, **__: (_ for _ in ()).throw(OSError("no route"))
    )
    try:
        problem = asked(door, "org/not-here")
    finally:
        hub.hub_is_reachable.cache_clear()
    assert problem.code == "hub-unreachable"
    assert "the Hugging Face hub cannot be reached" in problem.message
    assert "HF_HUB_OFFLINE" not in " ".join(problem.ways_out)


@pytest.mark.parametrize("door", DOORS)
def test_invalid_repository_name_is_reported(door: str) -> None:
    problem = asked(door, "not a name")
    if door == "template":  # may be the name of a bundled template, too
        assert "`not a name` is not a bundled chat template" in problem.message
        assert "ORG/NAME" in (problem.hint or "")
    else:
        assert "not a valid name of a repository on the hub (ORG/NAME)" in problem.message
        assert DOORS[door][1] in (problem.hint or "")
