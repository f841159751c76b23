"""The quantised model next to a merged one: refused, or written with the logits of the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.merge.quantised import RECORD_NAME, check_quantised, quantise_merged, quantised_directory
from fsdp_tune.recipe.schema.recipe import Recipe

TRAINED = {"quantization": {"train": "int4", "group_size": 16}, "precision": {"mixed_precision": "bf16"}}


def recipe(**sections: Any) -> Recipe:
    return Recipe.model_validate(TRAINED | sections)


@pytest.mark.parametrize(
    ("trained", "dtype", "words"),
    [
        (None, "bf16", "the run has no such key"),
        (recipe(quantization=None), "bf16", "the run has no such key"),
        (recipe(), "fp16", "the run rounded weights of bf16 to int4, and merged weights would be in fp16"),
    ],
)
def test_option_without_emulated_quantisation_is_refused(trained: Recipe | None, dtype: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(FsdpTuneError, match=words) as caught:
        check_quantised(trained, tmp_path / "merged", dtype, overwrite=False)
    assert caught.value.exit_code == 2
    assert caught.value.problems[0].hint


def test_only_an_earlier_quantised_model_is_replaced(tmp_path: Path) -> None:
    folder = quantised_directory(tmp_path / "merged")
    folder.mkdir()
    check_quantised(recipe(), tmp_path / "merged", "bf16", overwrite=False)
    (folder / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(FsdpTuneError, match="the output exists"):
            check_quantised(recipe(), tmp_path / "merged", "fp32", overwrite=overwrite)
    (folder / RECORD_NAME).write_text("{}")
    check_quantised(recipe(), tmp_path / "merged", "keep", overwrite=True)


@pytest.mark.slow
@pytest.mark.parametrize("train", ["int4", "int8-int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_converted_model_has_the_logits_of_training(train: str, tied: bool, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path / "merged", max_shard_size="100KB")
    (tmp_path / "merged" / "chat_template.jinja").write_text("{{ messages }}")
    trained = recipe(quantization={"train": train, "group_size": 16, "modules_to_not_convert": ["v_proj"]})
    found = quantise_merged(tmp_path / "merged", trained, 40_000)
    assert (found.layers, found.difference) == (12, 0.0)
    assert len([*found.path.glob("*.safetensors")]) > 1
    assert (found.path / "chat_template.jinja").read_text() == "{{ messages }}"
    quantised: Any = AutoModelForCausalLM.from_pretrained(found.path, dtype="auto")
    assert quantised.model.layers[0].self_attn.v_proj.weight.dtype == torch.bfloat16
    assert quantised.config.quantization_config.quant_type.weight_dtype == torch.int4


@pytest.mark.slow
def test_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config

    model: Any = AutoModelForCausalLM.from_config(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50))
    model.save_pretrained(tmp_path / "merged")
    with pytest.raises(FsdpTuneError, match="finds nothing to quantise") as caught:
        quantise_merged(tmp_path / "merged", recipe(), 10**9)
    assert caught.value.exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]
