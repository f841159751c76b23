"""Quantised weights in files of `torch.save` are refused: transformers would cast their codes to floats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.loading.construct import build_full
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.loading.weight_slices import find_weight_files
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of

UP = "model.layers.0.mlp.up_proj.weight"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT8 = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}


def save(folder: Path, codes: torch.dtype | None, settings: dict[str, Any] | None, *, sharded: bool = False) -> Path:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**FAMILIES["llama"])).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if codes is not None:
        scales = {f"{UP}_scale_inv": torch.ones(1, 1)} if codes.is_floating_point else {f"{UP}_scale": torch.ones(len(tensors[UP]), 1)}
        tensors |= {UP: tensors[UP].to(codes), **scales}
    file = folder / ("part.bin" if sharded else "pytorch_model.bin")
    torch.save(tensors, file)
    if sharded:
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file.name)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    if settings is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return file


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("codes", "settings"), [(torch.float8_e4m3fn, FP8), (torch.int8, INT8), (torch.float8_e4m3fn, None), (torch.int8, None)]
)
def test_codes_are_refused_where_they_are_validated_and_loaded(
    codes: torch.dtype, settings: dict[str, Any] | None, sharded: bool, tmp_path: Path
) -> None:
    file = save(tmp_path, codes, settings, sharded=sharded)
    recipe = recipe_of({"name_or_path": str(tmp_path)})
    (problem,) = find_facts(recipe).problems
    assert (problem.code, problem.where.source) == ("model-quantised", str(file))
    assert (str(settings["quant_method"]) if settings else UP) in problem.message
    assert problem.hint is not None
    for load in (find_weight_files, build_full):
        with pytest.raises(FsdpTuneError) as caught:
            load(recipe)
        assert caught.value.problems[0].code == "model-quantised"


def test_plain_files_and_a_configuration_alone_are_accepted(tmp_path: Path) -> None:
    file = save(tmp_path, None, None)
    recipe = recipe_of({"name_or_path": str(tmp_path)})
    files = find_weight_files(recipe)
    assert files is not None
    assert (find_facts(recipe).problems, files.tensors) == ((), {})
    file.unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    assert find_facts(recipe).problems == ()  # it can be planned
