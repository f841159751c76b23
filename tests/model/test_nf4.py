"""Weights in 4 bits: their bytes, the layers that hold them, and how they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.tensors.dtypes import NF4_BLOCK, NF4_VALUES
from fsdp_tune.merge.copy.values import rounded_to_nf4
from fsdp_tune.model.adapters.nf4 import (
    Nf4Linear,
    dequantise,
    describe_nf4,
    in_one_formula,
    layers_in_4_bits,
    nf4_notices,
    plan_nf4,
    quantise,
)
from fsdp_tune.model.loading.construct import build_empty, build_full
from fsdp_tune.model.loading.weight_slices import find_weight_files, fits, read_slices
from fsdp_tune.model.shard.local import count_elements
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.model.recipes import recipe_of
from tests.parity.architectures import make_model
from tests.ranks import Ranks

SCALES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model("llama-blocks", tmp_path_factory.mktemp("llama")))


def recipe_with(folder: str, scales: str = "fp32", **sections: Any) -> Recipe:
    return recipe_of(
        {"name_or_path": folder, **sections.pop("model", {})},
        lora={"r": 4},
        quantization={"scales": scales},
        **sections,
    )


def test_values_are_quantiles_of_the_normal_distribution() -> None:
    highest = 0.9677083
    positive = torch.special.ndtri(torch.linspace(highest, 0.5, 9, dtype=torch.float64)[:-1])
    negative = torch.special.ndtri(torch.linspace(highest, 0.5, 8, dtype=torch.float64)[:-1])
    found = torch.cat((positive, torch.zeros(1), -negative)).sort().values / positive.max()
    torch.testing.assert_close(found, torch.tensor(NF4_VALUES, dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize("scales", SCALES)
def test_each_weight_gets_the_nearest_value(scales: str) -> None:
    rows = torch.randn(5, 192, generator=torch.Generator().manual_seed(0))
    rows[2, 64:128] = 0
    found = dequantise(*quantise(rows, SCALES[scales]), torch.float32).view(-1, NF4_BLOCK)
    blocks = rows.view(-1, NF4_BLOCK)
    largest = blocks.abs().amax(dim=1, keepdim=True).to(SCALES[scales]).float()
    candidates = torch.tensor(NF4_VALUES) * largest[..., None]
    distance = (blocks[..., None] - candidates).abs().amin(dim=-1)
    assert torch.equal(found.isfinite(), torch.ones_like(found, dtype=torch.bool))
    torch.testing.assert_close((found - blocks).abs(), distance, atol=1e-6, rtol=0)
    assert torch.count_nonzero(found[7]) == 0, "a block of zeros"


def test_bytes_of_known_weights() -> None:
    """Codes and scale of a block, as bitsandbytes 0.50 writes them (`quantize_4bit`, nf4, blocks of 64)."""
    row = torch.linspace(-1, 2, 64)[None]
    packed, scales = quantise(row, torch.float32)
    assert scales.view(torch.float32).tolist() == [[2.0]]
    codes = [34, 51, 51, 52, 68, 68, 85, 85, 102, 102, 119, 120, 136, 137, 153, 170]
    codes += [170, 187, 187, 204, 204, 205, 221, 221, 238, 238, 238, 238, 238, 255, 255, 255]
    assert packed.tolist() == [codes]


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_rows_are_quantised_alone(scales: str, rows: int) -> None:
    whole = torch.randn(9, 128, generator=torch.Generator().manual_seed(1))
    packed, by_block = quantise(whole, SCALES[scales])
    part = quantise(whole[2 : 2 + rows], SCALES[scales])
    assert torch.equal(part[0], packed[2 : 2 + rows])
    assert torch.equal(part[1], by_block[2 : 2 + rows])
    assert dequantise(*part, torch.bfloat16).shape == (rows, 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_formula_and_merge_make_the_same_weights(dtype: torch.dtype) -> None:
    rows = torch.randn(40, 128, generator=torch.Generator().manual_seed(2))
    packed, scales = quantise(rows, torch.float32)
    found = dequantise(packed, scales, dtype)
    blocks, by_block = packed.view(-1, NF4_BLOCK // 2), scales.view(-1).view(torch.float32)
    assert torch.equal(in_one_formula(blocks, by_block, torch.tensor(NF4_VALUES), dtype).view(40, 128), found)
    merged = torch.from_numpy(rounded_to_nf4(rows.numpy().reshape(-1), "fp32")).view(40, 128)
    assert torch.equal(merged.to(dtype), found)


@pytest.mark.parametrize("values", [np.float32, np.float64])
def test_merge_rounds_scales_to_bf16(values: type) -> None:
    rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
    found = rounded_to_nf4(rows.numpy().astype(values).reshape(-1), "bf16")
    assert torch.equal(
        torch.from_numpy(found).view(4, 64), dequantise(*quantise(rows, torch.bfloat16), torch.float32)
    )


def test_layer_computes_with_its_weights_and_keeps_only_bytes_for_the_backward() -> None:
    torch.manual_seed(4)
    linear = nn.Linear(128, 10)
    layer = Nf4Linear(linear, torch.float32)
    x, y = (torch.randn(3, 128).requires_grad_() for _ in range(2))
    y.data = x.data
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        layer(x).square().sum().backward()
    assert {tensor.dtype for tensor in kept if tensor.shape[0] == 10} == {torch.uint8}
    bias = linear.bias.grad
    linear.bias.grad = None
    nn.functional.linear(y, layer.weight, linear.bias).square().sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert bias is not None
    assert torch.equal(bias, linear.bias.grad)


def test_layers_of_the_decoder_are_replaced_and_counted(llama: str) -> None:
    recipe = recipe_with(llama)
    model = build_empty(recipe)
    layers = layers_in_4_bits(model)
    assert {name.split(".")[-2] for name in layers} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
    }
    assert all(name.endswith(".base_layer") for name in layers)
    bare = AutoModelForCausalLM.from_pretrained(llama)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert count_elements(model.named_parameters()) == sum(p.numel() for p in bare.parameters()) + adapters
    assert (
        "18 linear layers in 4.5 bits a weight; 3 left, its 130 columns are not a multiple of 64"
        in describe_nf4(recipe, model)
    )
    assert not any(p.dtype == torch.uint8 for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_reading_slices_and_reading_the_model_give_the_same_bytes(
    tmp_path: Path, llama: str, scales: str, stored: torch.dtype
) -> None:
    AutoModelForCausalLM.from_pretrained(llama, dtype=stored).save_pretrained(tmp_path)
    recipe = recipe_with(str(tmp_path), scales, model={"dtype": "bf16"})
    whole, sliced = build_full(recipe), build_empty(recipe).to_empty(device="cpu")
    files = find_weight_files(recipe)
    assert files is not None
    assert fits(sliced, files)
    read_slices(sliced, files)
    layers = layers_in_4_bits(sliced)
    for name, layer in layers_in_4_bits(whole).items():
        assert torch.equal(layer.weight_nf4, layers[name].weight_nf4)
        assert torch.equal(layer.weight_scales, layers[name].weight_scales)


def _bytes_of_ranks(folder: str) -> list[list[Any]]:
    """On a rank: the shapes of its part, and whether it is what one process has of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from fsdp_tune.model.shard.wrap import allow_integer_parameters

    recipe = recipe_with(folder)
    whole = layers_in_4_bits(build_full(recipe))
    model = build_empty(recipe)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    allow_integer_parameters()
    fully_shard(
        model,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    model.to_empty(device="cpu")
    files = find_weight_files(recipe)
    assert files is not None
    read_slices(model, files)
    found = []
    for name, layer in layers_in_4_bits(model).items():
        same = torch.equal(layer.weight_nf4.full_tensor(), whole[name].weight_nf4)  # type: ignore[attr-defined]
        same &= torch.equal(layer.weight_scales.full_tensor(), whole[name].weight_scales)  # type: ignore[attr-defined]
        found.append([list(layer.weight_nf4.to_local().shape), same])  # type: ignore[attr-defined]
    return found


@pytest.mark.ranks
def test_ranks_hold_parts_of_the_bytes_of_one_process(llama: str, on_ranks: Ranks) -> None:
    found = on_ranks.run(4, _bytes_of_ranks, llama)
    assert all(same for rank in found for _, same in rank)
    assert sum(rank[4][0][0] for rank in found) == 130, "rows of gate_proj, which four ranks do not divide"


def test_experts_stay_in_16_bits_with_a_notice(tmp_path: Path) -> None:
    recipe = recipe_of(
        {"name_or_path": str(make_model("mixtral-16", tmp_path))},
        lora={"target_modules": ["q_proj"], "r": 2},
        quantization={},
    )
    model = build_empty(recipe)
    (notice,) = nf4_notices(recipe, model)
    assert notice.code == "nf4-without-experts"
    assert {name.rpartition(".")[2] for name in layers_in_4_bits(model)} == {
        "base_layer",
        "k_proj",
        "v_proj",
        "o_proj",
    }


def test_shared_weight_stays_in_16_bits(llama: str) -> None:
    """As in Zamba2, whose layers share blocks."""
    model = AutoModelForCausalLM.from_pretrained(llama).requires_grad_(False)
    layers = model.model.layers
    layers[2].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    chosen, left = plan_nf4(model, [(f"model.layers.{index}", layer) for index, layer in enumerate(layers)])
    shared = ["model.layers.0.mlp.up_proj", "model.layers.2.mlp.up_proj"]
    assert [name for name, why in left.items() if "shares its weight" in why] == shared
    assert "model.layers.1.mlp.up_proj" in chosen


def test_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    recipe = recipe_of({"name_or_path": str(make_model("gpt2", tmp_path))}, lora={}, quantization={})
    with pytest.raises(FsdpTuneError, match="Conv1D"):
        build_empty(recipe)
