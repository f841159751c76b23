"""Adapters of stacked experts (`target_parameters`) are merged as PEFT merges them, into files with or
without stacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_tune.core.errors import FailedError, Problem
from fsdp_tune.core.tensors.peft_config import CONFIG_FILE, WEIGHTS_FILE
from fsdp_tune.merge.copy import gather, write
from tests.model.families import FAMILIES
from tests.parity.peft_adapters import make_adapter

LORA = {
    "r": 3,
    "target_modules": ["q_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a tensor for each expert": ("qwen2_moe", {}),
    "Mixtral's names": ("mixtral", {}),
    "one parameter": ("mixtral", {"target_parameters": ["mlp.experts.down_proj"], "target_modules": []}),
    "ranks of their own": (
        "qwen2_moe",
        {"rank_pattern": {"gate_up_proj": 2}, "alpha_pattern": {"down_proj": 5}, "use_rslora": True},
    ),
    "one transposed stack": ("gpt_oss", {}),
}


def make_base(family: str, folder: Path, **changes: Any) -> Path:
    fields = FAMILIES[family] | changes
    torch.manual_seed(0)
    config = AutoConfig.for_model(**fields)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def assert_merged_as_by_peft(merge: Any, base: Path, adapter: Path) -> None:
    output = merge(adapter, base=str(base), dtype="fp32").output
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).state_dict()
    assert found.keys() == expected.keys()
    targets = tuple(json.loads((adapter / CONFIG_FILE).read_text())["target_parameters"])
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)
        assert not name.endswith(targets) or not torch.allclose(tensor, before[name], atol=1e-3), name


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")
@pytest.mark.parametrize("case", CASES)
def test_experts_are_merged_as_peft_merges_them(case: str, merge: Any, tmp_path: Path) -> None:
    family, changes = CASES[case]
    base = make_base(family, tmp_path / "base")
    assert_merged_as_by_peft(merge, base, make_adapter(base, LORA | changes, tmp_path / "adapter"))


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_matrices_larger_than_a_buffer_are_merged_in_parts(
    family: str, merge: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    for module in (gather, write):
        monkeypatch.setattr(module, "BUFFER_BYTES", 640)
    base = make_base(family, tmp_path / "base")
    assert_merged_as_by_peft(merge, base, make_adapter(base, LORA, tmp_path / "adapter"))


def test_square_stacks_are_merged_by_the_sides_of_their_neighbour(merge: Any, tmp_path: Path) -> None:
    base = make_base("gpt_oss", tmp_path / "base", intermediate_size=32)
    assert_merged_as_by_peft(merge, base, make_adapter(base, LORA, tmp_path / "adapter"))


def test_adapter_of_experts_is_exported_as_it_is(merge: Any, tmp_path: Path) -> None:
    base = make_base("mixtral", tmp_path / "base")
    adapter = make_adapter(base, LORA, tmp_path / "adapter")
    exported, stored = (
        load_file(folder / WEIGHTS_FILE)
        for folder in (merge(adapter, adapter=True, dtype="keep").output, adapter)
    )
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], stored[name]) for name in stored)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"r": 2}, "the rank of `model.layers.0.mlp.experts"),
        ({"target_parameters": ["experts.gate_proj"]}, "has no experts that fit"),
    ],
    ids=["another rank", "another parameter"],
)
def test_adapter_that_does_not_fit_the_experts_is_refused(
    change: dict[str, Any], words: str, merge: Any, tmp_path: Path
) -> None:
    base = make_base("mixtral", tmp_path / "base")
    adapter = make_adapter(base, LORA | {"target_modules": []}, tmp_path / "adapter")
    path = adapter / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FailedError, match=words):
        merge(adapter, base=str(base))


def refusal(merge: Any, adapter: Path, base: Path) -> Problem:
    with pytest.raises(FailedError) as caught:
        merge(adapter, base=str(base))
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize("parameter", ["self_attn.q_proj.weight", "mlp.down_proj.weight"])
def test_adapter_of_a_single_matrix_by_its_parameter_is_not_supported(
    parameter: str, merge: Any, tmp_path: Path
) -> None:
    base = make_base("llama", tmp_path / "base")
    adapter = make_adapter(
        base, {"r": 3, "target_modules": [], "target_parameters": [parameter]}, tmp_path / "adapter"
    )
    problem = refusal(merge, adapter, base)
    assert problem.code == "merge-adapter-unsupported"
    assert f"{parameter}`, which `target_parameters` names, is [" in problem.message


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
# PEFT takes `lora_B.bias` for a part of a sharded tensor
@pytest.mark.filterwarnings("ignore:Adapter 'default'")
def test_bias_of_an_adapter_without_one_in_the_base_is_not_supported(merge: Any, tmp_path: Path) -> None:
    base = make_base("llama", tmp_path / "base")
    adapter = make_adapter(
        base, {"r": 3, "target_modules": ["q_proj"], "lora_bias": True}, tmp_path / "adapter"
    )
    problem = refusal(merge, adapter, base)
    assert problem.code == "merge-adapter-unsupported"
    assert (
        "a bias (`lora_bias`) for `model.layers.0.self_attn.q_proj`, which has none in the base"
        in problem.message
    )


def test_square_experts_without_a_neighbour_that_tells_their_axes_are_not_supported(
    merge: Any, tmp_path: Path
) -> None:
    base = make_base("gpt_oss", tmp_path / "base", intermediate_size=16)  # gate_up_proj is square
    only = LORA | {"target_modules": [], "target_parameters": ["experts.gate_up_proj"]}
    assert (
        refusal(merge, make_adapter(base, only, tmp_path / "adapter"), base).code
        == "merge-adapter-unsupported"
    )
