"""A base in pickled files has the account that it would have in safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.merge.lora.adapt import merge_problems
from fsdp_tune.merge.read.base import carried_problems
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.loading.pickled_files import read_pickled
from fsdp_tune.model.model_files import ModelInspection
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of

State = dict[str, torch.Tensor]
UP = "model.layers.0.mlp.up_proj.weight"
LORA = {"r": 2, "target_modules": ["up_proj"]}


@pytest.fixture
def state(tmp_path: Path) -> State:
    """The tensors of a model whose configuration is in the directory."""
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**FAMILIES["llama"]))
    model.config.save_pretrained(tmp_path)
    return {**model.state_dict(), "mtp.norm.weight": torch.ones(8)}


def as_one_file(folder: Path, state: State) -> None:
    torch.save(state, folder / "pytorch_model.bin")


def as_old_file(folder: Path, state: State) -> None:
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def as_shards(folder: Path, state: State) -> None:
    names = sorted(state)
    weight_map = {name: f"pytorch_model-{1 + (at % 2):05d}-of-00002.bin" for at, name in enumerate(names)}
    for file in set(weight_map.values()):
        torch.save({name: state[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


FORMS = {"one file": as_one_file, "old file": as_old_file, "shards": as_shards}
Form = Callable[[Path, State], None]


def inspected(folder: Path, **sections: Any) -> ModelInspection:
    return find_facts(recipe_of({"name_or_path": str(folder)}, **sections))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_tensors_are_counted_and_those_that_the_class_lacks_are_carried(
    form: Form, tmp_path: Path, state: State
) -> None:
    form(tmp_path, state)
    found = inspected(tmp_path)
    assert found.problems == ()
    assert found.facts is not None
    assert found.facts.tensors.counts == {"trained": len(state) - 1, "carried": 1}
    assert found.facts.tensors.carried == ("mtp.norm.weight",)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_missing_tensors_other_shapes_and_codes_are_refused_by_name(
    form: Form, tmp_path: Path, state: State
) -> None:
    for changed in ({UP: torch.ones(2, 2)}, {UP: state[UP].to(torch.int8)}, {}):
        form(tmp_path, {name: value for name, value in state.items() if name != UP} | changed)
        assert [problem for problem in inspected(tmp_path).problems if UP in problem.message]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_base_that_a_merge_cannot_read_is_refused_before_the_run(
    form: Form, tmp_path: Path, state: State
) -> None:
    form(tmp_path, state)
    refused = ["merge-damaged-pickle"] if form is as_old_file else []
    checks: list[tuple[Any, dict[str, Any], list[str]]] = [
        (merge_problems, {"lora": LORA}, refused),
        (carried_problems, {}, refused),
        (carried_problems, {"merge": {"at_end": False}}, []),
    ]
    for problems, sections, expected in checks:
        recipe, found = (
            recipe_of({"name_or_path": str(tmp_path)}, **sections),
            inspected(tmp_path, **sections),
        )
        assert [each.code for each in problems(recipe, found.facts)] == expected


def test_file_that_torch_does_not_read_is_refused_by_its_path(tmp_path: Path, state: State) -> None:
    as_one_file(tmp_path, state)
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(FsdpTuneError) as caught:
        read_pickled([file])
    (problem,) = caught.value.problems
    assert (problem.code, problem.where and problem.where.source) == ("model-weights-damaged", str(file))
    assert problem in inspected(tmp_path).problems
