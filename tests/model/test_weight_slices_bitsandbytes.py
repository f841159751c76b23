"""Model files that bitsandbytes quantised: read to the byte, or refused with what to write instead."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.adapters.nf4 import dequantise, layers_in_4_bits, quantise
from fsdp_tune.model.loading.construct import build_empty
from fsdp_tune.model.loading.nf4_files import refuse_other_quantisation, refuse_unread
from fsdp_tune.model.loading.weight_slices import find_weight_files, fits, read_slices
from tests.model.recipes import recipe_of
from tests.parity.architectures import make_model

NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
RECIPE: dict[str, Any] = {"lora": {"r": 4}, "quantization": {}, "merge": {"adapter": "adapter"}}


def write_4_bits(folder: Path, *, nested: bool) -> dict[str, torch.Tensor]:
    """Rewrite a model's files in the format of bitsandbytes 0.50 (`QuantState.as_dict(packed=True)`); return
    the weights in them."""
    tensors, weights = load_file(folder / "model.safetensors"), dict[str, torch.Tensor]()
    for name in [name for name in tensors if "_proj." in name and tensors[name].shape[1] % 64 == 0]:
        packed, scales = quantise(tensors[name], torch.float32)
        absmax = scales.view(torch.float32).reshape(-1)
        state: dict[str, Any] = {
            "quant_type": "nf4",
            "blocksize": 64,
            "dtype": "float32",
            "shape": list(tensors[name].shape),
        }
        if nested:
            codes = torch.arange(len(absmax)).mul(7).to(torch.uint8)
            table, of_blocks = torch.linspace(-1, 1, 256), torch.rand(-(-len(absmax) // 256)) + 0.01
            tensors |= {f"{name}.nested_absmax": of_blocks, f"{name}.nested_quant_map": table}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}
            absmax = torch.stack(
                [table[int(code)] * of_blocks[index // 256] + 0.5 for index, code in enumerate(codes)]
            )
        tensors[name], tensors[f"{name}.absmax"] = packed.view(-1, 1), codes if nested else absmax
        tensors[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        )
        weights[name] = dequantise(packed, absmax.view(torch.uint8).view(len(packed), -1), torch.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": NF4}))
    return weights


def read_4_bits(folder: Path) -> dict[str, torch.Tensor]:
    """Read the files into a model; return the weights of its layers in 4 bits."""
    recipe = recipe_of({"name_or_path": str(folder)}, **RECIPE)
    model, files = build_empty(recipe).to_empty(device="cpu"), find_weight_files(recipe)
    assert files is not None
    assert fits(model, files)
    read_slices(model, files)
    return {
        f"{name.removesuffix('.base_layer')}.weight": layer.weight
        for name, layer in layers_in_4_bits(model).items()
    }


@pytest.mark.parametrize("nested", [False, True])
def test_files_in_4_bits_are_read_as_they_are(
    tmp_path: Path, nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # several pieces for each tensor
    monkeypatch.setattr("fsdp_tune.model.loading.weight_slices.BUFFER_BYTES", 1000)
    wanted = write_4_bits(make_model("llama-blocks", tmp_path), nested=nested)
    found = read_4_bits(tmp_path)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_codes_stored_as_bf16_are_read_as_bytes(tmp_path: Path) -> None:
    wanted = write_4_bits(make_model("llama-blocks", tmp_path), nested=False)
    tensors = load_file(tmp_path / "model.safetensors")
    # `bnb_4bit_quant_storage: bfloat16`
    tensors |= {name: tensors[name].view(-1, 2).view(torch.bfloat16) for name in wanted}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = read_4_bits(tmp_path)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("", lambda codes: codes[:-64]),
        (".absmax", lambda scales: scales[:-1]),
        (".absmax", lambda scales: scales.to(torch.int16)),
        (".nested_absmax", lambda scales: scales[:0]),
        (".nested_quant_map", lambda values: values[:8]),
    ],
)
def test_parts_of_another_size_are_refused(
    tmp_path: Path, part: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    name = next(iter(write_4_bits(make_model("llama-blocks", tmp_path), nested=True)))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name + part] = change(tensors[name + part]).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(FsdpTuneError, match="is damaged"):
        find_weight_files(recipe_of({"name_or_path": str(tmp_path)}, **RECIPE))


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"blocksize": 128}, "blocks of 128"),
        ({"shape": None}, "is damaged"),
        ({"shape": [-64, 64]}, "is damaged"),
        ({"shape": [10**12, 64]}, "is damaged"),
        ({"shape": [64.0, 64.0]}, "is damaged: ValueError('it has the shape"),
        (None, "is damaged"),
    ],
)
def test_state_that_cannot_be_used_is_refused(
    tmp_path: Path, state: dict[str, Any] | None, says: str
) -> None:
    write_4_bits(make_model("llama-blocks", tmp_path), nested=False)
    tensors = load_file(tmp_path / "model.safetensors")
    key = next(name for name in tensors if "quant_state" in name)
    text = "x" if state is None else json.dumps(json.loads(bytes(tensors[key].tolist())) | state)
    save_file(
        tensors | {key: torch.tensor(list(text.encode()), dtype=torch.uint8)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(FsdpTuneError, match=re.escape(says)):
        find_weight_files(recipe_of({"name_or_path": str(tmp_path)}, **RECIPE))


@pytest.mark.parametrize(
    ("stored", "changed", "says"),
    [
        (NF4, {"quantization": None, "lora": None}, "write `lora: {}` and `quantization: {}`"),
        (NF4, {"quantization": {"scales": "bf16"}}, "write `scales: fp32`"),
        (NF4, {"fsdp": {"cpu_ram_efficient_loading": False}}, "leave `fsdp.cpu_ram_efficient_loading` out"),
        (NF4, {"fsdp": {"version": 1, "sharding_strategy": "NO_SHARD"}}, "leave `fsdp.version` out"),
        (NF4, {"merge": {}}, "write `merge: {adapter: adapter}`"),
        (NF4 | {"bnb_4bit_quant_type": "fp4"}, {}, "quantised (fp4)"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, {"quantization": None}, "quantised (int8)"),
        ({"quant_method": "gptq", "bits": 4}, {}, "quantised (gptq)"),
    ],
)
def test_other_quantisation_is_refused_with_what_to_write(
    stored: dict[str, Any], changed: dict[str, Any], says: str
) -> None:
    config = AutoConfig.for_model("llama", quantization_config=stored)
    with pytest.raises(FsdpTuneError) as refused:
        refuse_other_quantisation(recipe_of({"name_or_path": "x"}, **(RECIPE | changed)), config)
    (problem,) = refused.value.problems
    assert says in f"{problem.message} {problem.hint}"


def test_weights_in_16_bits_are_not_refused() -> None:
    config = AutoConfig.for_model("llama")
    refuse_other_quantisation(recipe_of({"name_or_path": "x"}, **RECIPE), config)
    refuse_unread(recipe_of({"name_or_path": "x"}, **RECIPE), config)
    with pytest.raises(FsdpTuneError, match="other layers in 4 bits"):
        refuse_unread(
            recipe_of({"name_or_path": "x"}, **RECIPE), AutoConfig.for_model("llama", quantization_config=NF4)
        )
