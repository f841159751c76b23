from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.hub import cached_model_file
from fsdp_tune.recipe.references import from_run, missing_start_inputs
from fsdp_tune.recipe.schema.recipe import Recipe

GONE = "/gone/base"


@pytest.mark.parametrize(
    ("document", "keys"),
    [
        ({"model": {"name_or_path": GONE, "tokenizer": GONE}}, ["model.name_or_path", "model.tokenizer"]),
        ({"model": {"name_or_path": GONE, "tokenizer": GONE}, "lora": {"r": 4}}, ["model.tokenizer"]),
        (
            {"model": {"name_or_path": "org/not-cached", "tokenizer": "builtin:arithmetic"}},
            ["model.name_or_path"],
        ),
        (
            {"model": {"from_config": "/gone/config.json", "tokenizer": "builtin:arithmetic"}},
            ["model.from_config"],
        ),
        ({"model": {"from_config": {"model_type": "llama"}, "tokenizer": "builtin:arithmetic"}}, []),
        ({"data": {"chat_template": "/gone/chat.jinja"}}, ["data.chat_template"]),
        ({"data": {"chat_template": "org/not-cached"}}, ["data.chat_template"]),
        ({"data": {"chat_template": "chatml"}}, []),
        ({"data": {"chat_template": "{% for m in messages %}{{ m.content }}</think>{% endfor %}"}}, []),
    ],
)
def test_files_that_are_gone_are_found_by_key(document: dict[str, Any], keys: list[str]) -> None:
    recipe = Recipe.model_validate(document)
    assert list(missing_start_inputs(recipe)) == keys
    run = Path("/runs/one")
    taken = from_run(recipe, run, keys)
    assert (taken.model.name_or_path == str(run)) == bool(
        {"model.name_or_path", "model.from_config"}.intersection(keys)
    )
    assert (taken.model.tokenizer == str(run / "model")) == ("model.tokenizer" in keys)
    assert (taken.data.chat_template == str(run / "model")) == ("data.chat_template" in keys)
    assert not isinstance(taken.model.from_config, str)


def test_files_in_the_hub_cache_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--base" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    assert cached_model_file("org/base", "main", "config.json") is not None
    assert (
        missing_start_inputs(
            Recipe.model_validate({"model": {"name_or_path": "org/base", "tokenizer": "org/base"}})
        )
        == {}
    )
