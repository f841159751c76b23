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
from fsdp_tune.core.tensors.dtypes import DTYPES
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.merging import merge_checkpoint
from fsdp_tune.merge.read.base import ReadBase, _find_untrained, _read, carried_problems
from fsdp_tune.merge.read.reader import SourceFiles, SourceTensor
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
    """Write a model in `dtype`, with tensors whose names end with one of `wide` in fp32, and random values
    everywhere."""
    torch.manual_seed(0)
    fields = dict(config)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    model.save_pretrained(folder)
    shapes = load_file(folder / "model.safetensors")
    state = {
        name: (torch.randn(tensor.shape) / 8).to(torch.float32 if name.endswith(wide) else dtype)
        for name, tensor in shapes.items()
    }
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
def test_bias_of_a_router_that_the_class_rounds_leaves_with_the_bits_of_the_base(
    dtype: str, tmp_path: Path
) -> None:
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


def test_tensor_that_the_base_has_lost_is_named_in_one_sentence(tmp_path: Path) -> None:
    """Before a run starts, and by the merge."""
    base = base_of(tmp_path / "base", FAMILIES["llama"], torch.float32)
    carried = {"mtp.norm.weight": torch.ones(4), "mtp.proj.weight": torch.ones(4, 4)}
    file = tmp_path / "base" / "model.safetensors"
    save_file(base | carried, file, metadata={"format": "pt"})
    recipe = recipe_of({"name_or_path": str(tmp_path / "base")})
    facts = find_facts(recipe).facts
    assert facts is not None
    assert carried_problems(recipe, facts) == []
    save_file(base, file, metadata={"format": "pt"})
    (problem,) = carried_problems(recipe, facts)
    assert problem.message == (
        "2 tensors that are not trained, such as `mtp.norm.weight`, could not be carried over by a merge: "
        "the base lacks `mtp.norm.weight` and 1 more, which a merge writes unchanged"
    )
    assert problem.hint is not None
    assert "model.leave_out" in problem.hint


def test_tensor_of_the_model_with_the_name_of_a_scale_is_restored(tmp_path: Path) -> None:
    """Only scales that an earlier version recorded as carried may be missing or left out."""
    names = ("a.k_scale", "b.k_scale")
    tensors = {name: SourceTensor(name, DTYPES["float32"], (1,), (), SourceFiles(tmp_path)) for name in names}
    base = ReadBase(tensors, names)
    assert set(_find_untrained(base, ["a.k_scale"], ["b.k_scale"], tmp_path)) == {"b.k_scale"}
    with pytest.raises(FsdpTuneError, match=r"the base lacks `c\.k_scale`, which"):
        _find_untrained(base, ["d.k_scale"], ["c.k_scale"], tmp_path)


def test_damaged_json_file_of_a_base_is_named(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": ')
    assert _read(tmp_path / "config.json") is None
    with pytest.raises(FsdpTuneError, match="it is not valid JSON") as caught:
        _read(tmp_path / "hf_quant_config.json")
    assert caught.value.problems[0].code == "merge-adapter-base"
