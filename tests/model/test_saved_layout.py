"""The layout that transformers saves a model in, found without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fsdp_tune.model.loading.saved_layout import base_layout, saved_layout
from fsdp_tune.run.base_model import BaseLayout, FileTensor
from tests.architectures.tiny import config_of, known
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of


def build(family: str, device: str = "meta", **changes: Any) -> PreTrainedModel:
    fields = (FAMILIES[family] if family in FAMILIES else config_of(family)) | changes
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))


def values_of(tensor: FileTensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a tensor of a file, put together from its pieces by indexing alone."""
    made = torch.full(tensor.shape, torch.nan)
    for piece in tensor.pieces:
        kept = dict(zip(piece.axes, piece.sizes, strict=True))
        box = state[piece.parameter]
        for axis, start in reversed(list(enumerate(piece.start))):
            box = box.narrow(axis, start, kept[axis]) if axis in kept else box.select(axis, start)
        order = sorted(piece.axes)
        place = tuple(slice(at, at + size) for at, size in zip(piece.position, piece.sizes, strict=True))
        made[place] = box.permute([order.index(axis) for axis in piece.axes])
    return made


MIXTURES = (
    "deepseek_v4",
    "mixtral",
    "qwen2_moe",
    "phimoe",
    "qwen3_moe",
    "olmoe",
    "granitemoe",
    "aria_text",
    "deepseek_v3",
)
OTHERS = ("jamba", "hrm_text", "sarvam_moe", "kimi_linear", "lara_mini", "nemotron_h")


@pytest.mark.parametrize("family", known(*MIXTURES, *OTHERS))
def test_pieces_are_what_save_pretrained_writes(family: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = build(family, "cpu")
    model.save_pretrained(tmp_path)
    layout, state = saved_layout(model), dict(model.state_dict())
    used = {piece.parameter for tensor in layout.tensors for piece in tensor.pieces}
    made = {tensor.name: values_of(tensor, state) for group in layout.tensors for tensor in group.expanded()}
    made |= {layout.name_of(name): tensor for name, tensor in state.items() if name not in used}
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() <= made.keys()  # tied weights are written once
    assert all(torch.equal(made[name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_oss", "bloom"])
def test_model_whose_files_have_its_names_has_an_empty_layout(family: str) -> None:
    assert saved_layout(build(family)) == BaseLayout()


def test_experts_of_a_parameter_are_recorded_once() -> None:
    layout = saved_layout(build("mixtral", num_local_experts=64))
    assert [(tensor.name, tensor.count) for tensor in layout.tensors if ".0.block" in tensor.name] == [
        (f"model.layers.0.block_sparse_moe.experts.{{}}.{name}.weight", 64) for name in ("w2", "w1", "w3")
    ]
    assert len(list(layout.tensors[0].expanded())) == 64
    assert BaseLayout.from_dict(json.loads(json.dumps(layout.as_dict()))) == layout


def test_files_that_hold_the_parameters_of_the_model_are_the_layout() -> None:
    model = build("mixtral")
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert saved_layout(model, own) == BaseLayout()
    stack = "model.layers.0.mlp.experts.down_proj"
    partly = saved_layout(model, {name: shape for name, shape in own.items() if name == stack})
    assert stack not in {piece.parameter for tensor in partly.tensors for piece in tensor.pieces}
    assert partly.renamed == saved_layout(model).renamed
    assert saved_layout(model, {stack: (1, 2, 3)}) == saved_layout(model)  # the name of something else


def test_conversion_that_computes_values_leaves_all_names(monkeypatch: Any) -> None:
    from fsdp_tune.model.loading import saved_layout as module

    monkeypatch.setattr(
        module,
        "revert_weight_conversion",
        lambda _, state: {name: tensor + 1 for name, tensor in state.items()},
    )
    assert saved_layout(build("mixtral")) == BaseLayout()


def test_layout_of_the_base_is_read_from_its_index_and_of_a_run_from_its_record(tmp_path: Path) -> None:
    model = build("mixtral")
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(FAMILIES["mixtral"]))
    recipe = recipe_of({"name_or_path": str(base)})
    assert base_layout(recipe, model) == saved_layout(model)
    index = base / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": dict.fromkeys(model.state_dict(), "model-00001-of-00001.safetensors")})
    )
    assert base_layout(recipe, model) == BaseLayout()
    index.write_text("{")
    assert base_layout(recipe, model) == saved_layout(model)
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "recipe.json").write_text("{}")
    (run / "model" / "config.json").write_text(json.dumps(FAMILIES["mixtral"]))
    of_run = recipe_of({"name_or_path": str(run)})
    assert base_layout(of_run, model) == saved_layout(model)
    BaseLayout({"lm_head.weight": "head.weight"}).write(run / "model" / "base_layout.json")
    assert base_layout(of_run, model).renamed == {"lm_head.weight": "head.weight"}
