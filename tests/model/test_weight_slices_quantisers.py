"""Every quantiser of transformers: its weights are decoded to the library's own values, or refused by name,
with settings and without.

The list is the library's, so that a new one fails here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.tensors.quantised_formats import METHODS
from fsdp_tune.model.loading.construct import build_empty, build_full
from fsdp_tune.model.loading.model_config import model_config
from fsdp_tune.model.loading.weight_slices import find_weight_files, fits, read_slices
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.merge.published import LAYOUTS
from tests.model.quantisers import (
    KINDS,
    LLAMA,
    MODULE,
    STORED,
    problems_of,
    settings_of,
    stored_parts,
    types_of,
    without_settings,
    write_config,
)
from tests.model.recipes import recipe_of


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A recipe for a model without settings of a quantiser."""
    folder = tmp_path_factory.mktemp("plain")
    write_config(folder, {})
    return recipe_of({"name_or_path": str(folder)})


def test_each_quantiser_of_transformers_has_a_layout_here() -> None:
    assert AUTO_QUANTIZER_MAPPING.keys() <= STORED.keys()


@pytest.mark.parametrize("method", [*STORED, "ptpc_fp8", "mlx"])
@pytest.mark.parametrize("nested", [False, True])
def test_settings_that_no_rule_reads_are_refused_by_the_name_of_the_method(
    method: str, nested: bool, tmp_path: Path
) -> None:
    settings = {"quantization_config": settings_of(method)}
    write_config(tmp_path, {"text_config": settings} if nested else settings)
    for kind, sections in KINDS.items():
        recipe = recipe_of({"name_or_path": str(tmp_path)}, **sections)
        if method in METHODS and kind != "qlora":
            assert not hasattr(model_config(recipe), "quantization_config")
            continue
        with pytest.raises(FsdpTuneError) as caught:
            model_config(recipe)
        assert caught.value.exit_code == 2
        named = {"bitsandbytes_4bit": "fp4", "bitsandbytes_8bit": "int8"}.get(method, method)
        assert f"({named})" in str(caught.value)


@pytest.mark.parametrize("method", STORED)
def test_tensors_of_a_quantiser_without_its_settings_are_refused_by_name(method: str, plain: Recipe) -> None:
    """As NVIDIA's `hf_quant_config.json`, GPTQ's `quantize_config.json` or `recipe.yaml` leave them:
    config.json has nothing."""
    assert MODULE in without_settings(plain, method)


@pytest.mark.parametrize("method", [method for method in STORED if method not in ("gguf", "spqr", "sinq")])
def test_codes_outside_of_the_model_are_not_carried_into_a_plain_one(method: str, plain: Recipe) -> None:
    """Three have nothing that names them: GGUF is not safetensors, and no library writes SpQR or SINQ for
    layers that predict tokens."""
    assert "mtp.up_proj" in problems_of(plain, types_of(plain) | stored_parts(method, "mtp.up_proj"))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "transform_config"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    ],
)
def test_options_under_which_codes_mean_other_values_are_refused(
    settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    write_config(tmp_path, {"quantization_config": settings_of("compressed-tensors") | settings})
    with pytest.raises(FsdpTuneError, match=named):
        model_config(recipe_of({"name_or_path": str(tmp_path)}))


def fp8_base(folder: Path, method: str) -> dict[str, torch.Tensor]:
    """Write a model as `method` stores it; return the stored tensors."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA)).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        if method == "fp4":
            tensors[name] = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8)
            tensors[f"{name}_scale_inv"] = torch.rand(rows, columns // 16)
            continue
        tensors[name] = tensors[name].mul(30).to(torch.float8_e4m3fn)
        exponents = torch.randint(118, 124, (rows, columns // 16), dtype=torch.uint8)
        tensors[f"{name}_scale_inv"] = exponents if method == "mxfp8" else torch.rand(-(-rows // 128), 1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(
        folder,
        {
            "quantization_config": {
                "quant_method": "mxfp8" if method == "mxfp8" else "fp8",
                "weight_block_size": [128, 128],
            }
        },
    )
    return tensors


@pytest.mark.parametrize("method", ["fp8", "mxfp8", "fp4"])
def test_both_ways_of_loading_have_the_values_of_transformers(method: str, tmp_path: Path) -> None:
    if method == "fp4" and not hasattr(Fp8Dequantize, "_unpack_fp4"):
        pytest.skip("transformers has no rule for values of 4 bits")
    tensors = fp8_base(tmp_path, method)
    recipe = recipe_of({"name_or_path": str(tmp_path)})
    sliced, files = build_empty(recipe).to_empty(device="cpu"), find_weight_files(recipe)
    assert files is not None
    assert fits(sliced, files)
    read_slices(sliced, files)
    whole = build_full(recipe).state_dict()
    for name, value in sliced.state_dict().items():
        scales = tensors.get(f"{name}_scale_inv")
        wanted = (
            tensors[name]
            if scales is None
            else Fp8Dequantize(None)._dequantize_one(tensors[name], scales, torch.float32)
        )
        assert torch.equal(value, wanted)
        assert torch.equal(whole[name], wanted)


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_models_are_those_that_transformers_dequantises_while_it_loads(method: str, tmp_path: Path) -> None:
    if method == "mxfp4":
        LAYOUTS["gpt_oss mxfp4"](tmp_path)
    else:
        fp8_base(tmp_path, "fp8")
    options: Any = FineGrainedFP8Config(dequantize=True) if method == "fp8" else Mxfp4Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=options)
    ours = build_full(recipe_of({"name_or_path": str(tmp_path)}))
    state = theirs.state_dict()
    assert ours.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name].float()) for name, value in ours.state_dict().items())
