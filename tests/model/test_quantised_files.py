"""The conversion of a merged model in this process: what it writes, and models that transformers would load
otherwise. `tests/merge/test_quantised.py` has the command around it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdp_tune.model.loading import quantised_files
from fsdp_tune.model.loading.quantised_files import Converted, convert
from fsdp_tune.recipe.schema.recipe import Recipe

pytest.importorskip("torchao")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
RECIPE = Recipe.model_validate(
    {
        "quantization": {"train": "int4", "group_size": 16, "modules_to_not_convert": ["v_proj"]},
        "precision": {"mixed_precision": "bf16"},
    }
)


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    model.save_pretrained(tmp_path / "merged")
    return tmp_path / "merged"


def test_model_is_written_as_it_was_trained_with_the_configuration_of_the_merge(merged: Path) -> None:
    path = merged / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"of_the_owner": "stays"}))
    found = convert(RECIPE, merged, merged.parent / "codes", 10**6)
    assert (found.layers, found.left) == (6, ("model.layers.0.self_attn.v_proj", "lm_head"))
    assert found.difference == 0.0, "the same rounding as in training"
    config = json.loads((merged.parent / "codes" / "config.json").read_text())
    assert (config["of_the_owner"], config["dtype"]) == ("stays", "bfloat16")
    assert config["quantization_config"]["quant_method"] == "torchao"
    tensors = load_file(merged.parent / "codes" / "model.safetensors")
    assert found.size_bytes == (merged.parent / "codes" / "model.safetensors").stat().st_size
    assert tensors["model.layers.0.self_attn.v_proj.weight"].dtype == torch.bfloat16
    [codes] = [each for name, each in tensors.items() if "q_proj" in name and each.shape == (32, 32)]
    assert codes.dtype == torch.int8
    assert -8 <= int(codes.min()) < 0 < int(codes.max()) <= 7, "four bits"


def test_tensor_that_transformers_does_not_load_is_refused(merged: Path) -> None:
    tensors = load_file(merged / "model.safetensors")
    save_file(tensors | {"extra.weight": torch.zeros(2)}, merged / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"transformers reports .*extra\.weight"):
        convert(RECIPE, merged, merged.parent / "codes", 10**6)


def test_layer_that_is_written_without_codes_is_found(merged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def patterns(left: Any, quantised: Any) -> list[str]:
        return [*left, sorted(quantised)[0]]

    monkeypatch.setattr(quantised_files, "patterns_of", patterns)
    message = "6 layers were trained as quantised, and 5 of the written model are"
    with pytest.raises(ValueError, match=message):
        convert(RECIPE, merged, merged.parent / "codes", 10**6)


def test_tensor_that_the_written_model_lacks_is_found(merged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"model.norm.weight", "model.embed_tokens.weight"}
    monkeypatch.setattr(
        quantised_files, "_names", lambda folder: names if folder == merged else names - {"model.norm.weight"}
    )
    with pytest.raises(ValueError, match=r"drops tensors of the merged model, such as model\.norm\.weight"):
        convert(RECIPE, merged, merged.parent / "codes", 10**6)


def test_answer_is_the_only_line_on_the_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given: list[object] = []

    def stand_in(*arguments: object) -> Converted:
        print("a library prints")
        given.extend(arguments)
        return Converted(2, ("lm_head",), 0.0, 5, "0.18.0")

    request = {"recipe": RECIPE.model_dump(mode="json", by_alias=True), "max_shard_bytes": 7}
    request |= {"merged": str(tmp_path / "merged"), "output": str(tmp_path / "codes")}
    monkeypatch.setattr(quantised_files, "convert", stand_in)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))
    quantised_files.main()
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "layers": 2,
        "left": ["lm_head"],
        "difference": 0.0,
        "size_bytes": 5,
        "torchao": "0.18.0",
    }
    assert printed.err == "a library prints\n"
    assert given == [RECIPE, tmp_path / "merged", tmp_path / "codes", 7]
