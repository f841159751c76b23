"""What a run does not train leaves as the base stores it, also where the run holds a rounded copy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.merging import merge_checkpoint
from fsdp_tune.model.loading.construct import build_full
from fsdp_tune.model.loading.inspect import find_facts
from tests.architectures.tiny import config_of
from tests.merge.checkpoints import make_run, same_bits
from tests.merge.published import Base, run_model
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of

State = dict[str, torch.Tensor]
NORM, EMBEDDING = "model.layers.0.input_layernorm.weight", "model.embed_tokens.weight"


def base_of(folder: Path, config: dict[str, Any], dtype: torch.dtype, *wide: str) -> State:
    """Write a model in `dtype`, with tensors whose names end with one of `wide` in fp32, and random values everywhere."""
    torch.manual_seed(0)
    fields = dict(config)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    model.save_pretrained(folder)
    shapes = load_file(folder / "model.safetensors")
    state = {name: (torch.randn(tensor.shape) / 8).to(torch.float32 if name.endswith(wide) else dtype) for name, tensor in shapes.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return state


def trained_run(folder: Path, **model: Any) -> Path:
    """A run on a base, whose trained parameters have changed."""
    recipe = recipe_of({"name_or_path": str(folder / "base"), **model}, precision={"mixed_precision": "bf16"})
    found = find_facts(recipe)
    assert found.problems == ()
    loaded = build_full(recipe)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.add_(1 / 16 if parameter.requires_grad else 0)
    files = run_model(folder, Base(folder / "base"), found)
    return make_run(folder / "run", {1: loaded.state_dict()}, model=files, recipe=recipe)


def merged(run: Path, dtype: Any = None) -> State:
    output = merge_checkpoint(run, MergeOptions(dtype=dtype, overwrite=True, verify="full")).output
    return load_file(output / "model.safetensors")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_bias_of_a_router_that_the_class_rounds_leaves_with_the_bits_of_the_base(dtype: str, tmp_path: Path) -> None:
    config = {key: value for key, value in config_of("minimax_m2").items() if key != "output_router_logits"}
    base = base_of(tmp_path / "base", config, torch.bfloat16, "e_score_correction_bias")
    biases = [name for name in base if name.endswith("e_score_correction_bias")]
    assert biases
    found = merged(trained_run(tmp_path, dtype=dtype))
    assert found.keys() == base.keys()
    assert [name for name in biases if not same_bits(found[name], base[name])] == []
    assert not torch.equal(found[EMBEDDING].float(), base[EMBEDDING].float())


def test_frozen_tensors_leave_with_the_bits_of_the_base(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", FAMILIES["llama"], torch.float32)
    run = trained_run(tmp_path, freeze=[EMBEDDING, NORM])
    for dtype in ("fp32", "keep"):
        found = merged(run, dtype)
        assert [name for name in base if same_bits(found[name], base[name])] == [EMBEDDING, NORM]
    in_16_bits = merged(run, "bf16")
    assert same_bits(in_16_bits[EMBEDDING], base[EMBEDDING].bfloat16())
    shutil.rmtree(tmp_path / "base")
    assert same_bits(merged(run, "bf16")[EMBEDDING], in_16_bits[EMBEDDING])
    with pytest.raises(FsdpTuneError, match="base"):
        merged(run, "fp32")


def test_half_precision_of_another_kind_is_read_from_the_base(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", FAMILIES["llama"], torch.float16)
    found = merged(trained_run(tmp_path, freeze=[EMBEDDING]), "fp16")
    assert [name for name in base if same_bits(found[name], base[name])] == [EMBEDDING]


def test_stacked_experts_that_are_frozen_are_read_from_their_tensors(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", FAMILIES["mixtral"], torch.float32)
    experts = [name for name in base if ".experts." in name]
    assert len(experts) > 2
    found = merged(trained_run(tmp_path, freeze=["*.experts.*"]), "fp32")
    assert {name for name in base if same_bits(found[name], base[name])} == set(experts)
