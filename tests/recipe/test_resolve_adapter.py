"""Keys of `lora:` that a recipe leaves unset are those of the adapter that `lora.adapter` names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.devices import Machine
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.tensors.peft_config import CONFIG_FILE
from fsdp_tune.recipe.resolve import Resolution, resolve
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.recipe.loading import load_with

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 7,
    "lora_dropout": 0.25,
    "target_modules": ["q_proj"],
    "bias": "none",
}


def adapter(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(CONFIG | changes))
    return folder


def resolved(cwd: Path, name: str, output: str = "out", **lora: Any) -> Resolution:
    document = {
        "model": {"name_or_path": "org/model", "tokenizer": "builtin:arithmetic"},
        "data": {"train": [{"path": "builtin:arithmetic"}]},
        "lora": {"adapter": name, **lora},
        "launch": {"device": "cpu", "num_processes": 2},
        "output_dir": output,
    }
    return resolve(Recipe.model_validate(document), Machine(None, 0, 2, None), cwd=cwd)


def refused(cwd: Path, name: str, **lora: Any) -> tuple[str, str]:
    with pytest.raises(FsdpTuneError) as caught:
        resolved(cwd, name, **lora)
    (problem,) = caught.value.problems
    return problem.message, str(problem.hint)


def test_unset_keys_are_those_of_the_adapter_with_a_reason(tmp_path: Path) -> None:
    adapter(tmp_path / "mine", use_rslora=True, modules_to_save=["lm_head"], rank_pattern=None)
    found = resolved(tmp_path, "mine", lora_dropout=0.0)
    assert found.recipe.lora is not None
    assert (found.recipe.lora.r, found.recipe.lora.lora_alpha, found.recipe.lora.use_rslora) == (4, 7, True)
    assert (found.recipe.lora.target_modules, found.recipe.lora.modules_to_save) == (["q_proj"], ["lm_head"])
    assert found.recipe.lora.lora_dropout == 0.0, "the recipe sets it"
    assert found.recipe.lora.adapter == str(tmp_path / "mine")
    assert found.reasons["lora.r"] == "the adapter's adapter_config.json"
    assert "lora.lora_dropout" not in found.reasons


def test_resolved_recipe_is_resolved_to_itself(tmp_path: Path) -> None:
    adapter(tmp_path / "mine")
    once = resolved(tmp_path, "mine").recipe
    assert resolve(once, Machine(None, 0, 2, None), cwd=tmp_path).recipe == once


def test_run_stands_for_its_adapter(tmp_path: Path) -> None:
    adapter(tmp_path / "run" / "adapter")
    found = resolved(tmp_path, "run")
    assert found.recipe.lora is not None
    assert (found.recipe.lora.adapter, found.recipe.lora.r) == (str(tmp_path / "run" / "adapter"), 4)


def test_run_without_an_adapter_names_the_command_that_writes_it(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoint-3").mkdir(parents=True)
    (tmp_path / "run" / "recipe.json").write_text("{}")
    assert (
        f"`fsdp-tune merge-checkpoint {tmp_path / 'run'} --adapter` writes one" in refused(tmp_path, "run")[1]
    )
    assert "--adapter --step 3 --output DIR`" in refused(tmp_path, "run/checkpoint-3")[1]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"r": 0}, "r"),
        ({"lora_alpha": "x"}, "lora_alpha"),
        ({"target_modules": {"a": 1}}, "target_modules"),
        ({"bias": "some"}, "bias"),
    ],
    ids=str,
)
def test_values_that_lora_does_not_take_are_named(change: dict[str, Any], key: str, tmp_path: Path) -> None:
    adapter(tmp_path / "mine", **change)
    message, hint = refused(tmp_path, "mine")
    assert f"its `{key}` is {json.dumps(change[key])}" in message
    assert f"write `lora.{key}`" in hint


def test_limits_of_lora_hold_for_values_of_the_adapter(tmp_path: Path) -> None:
    adapter(tmp_path / "mine", target_parameters=["experts.down_proj"])
    assert (
        "`lora.lora_dropout` with `lora.target_parameters` is not supported" in refused(tmp_path, "mine")[0]
    )
    assert resolved(tmp_path, "mine", lora_dropout=0.0).recipe.lora is not None


def test_adapter_of_another_type_is_left_to_the_model(tmp_path: Path) -> None:
    adapter(tmp_path / "mine", peft_type="IA3", r=None)
    found = resolved(tmp_path, "mine").recipe.lora
    assert found is not None
    assert found.r == 16


def test_run_that_was_started_has_the_keys_of_an_adapter_that_is_gone(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "earlier" / "adapter")
    once = resolved(tmp_path, "earlier").recipe
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "recipe.json").write_text(once.model_dump_json(by_alias=True))
    (folder / CONFIG_FILE).unlink()
    assert resolved(tmp_path, "earlier").recipe == once
    assert resolved(tmp_path, "earlier/adapter").recipe == once
    elsewhere = resolved(tmp_path, "earlier/adapter", output="another").recipe.lora
    assert elsewhere is not None
    assert elsewhere.r == 16, "reported with the model: there is no adapter"


def test_defaults_that_are_not_those_of_peft_are_reported() -> None:
    machine = Machine("cuda", 2, 8, "H100")

    def reasons(section: str) -> dict[str, str]:
        found = resolve(load_with(section).recipe, machine, cwd=Path("/")).reasons
        return {key: reason for key, reason in found.items() if key.startswith("lora.")}

    assert reasons("lora: {}") == {
        "lora.r": "the default; PEFT's is 8",
        "lora.lora_alpha": "the default; PEFT's is 8",
    }
    assert reasons("lora: {r: 4, lora_alpha: 8}") == {}
    assert reasons("") == {}
