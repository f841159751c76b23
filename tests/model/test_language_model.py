"""Models of several modalities: what is trained of them has the logits of the full model for text, or is refused by name."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.loading.construct import build_full
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.loading.language_model import language_model_of, main, write_language_model
from tests.merge.checkpoints import same_bits
from tests.merge.published import LAYOUTS
from tests.model.composites import (
    TABLE,
    difference,
    logits_of,
    make,
    merged_difference,
    names,
    outcome,
    recipe_for,
    written_difference,
)
from tests.model.recipes import recipe_of

MOST = 1e-5
ROWS = [line.split("\t") for line in TABLE.read_text().splitlines()[1:]]
TRIED = [name for name, _, result, *_ in ROWS if result in ("trained", "language model")]


def test_hint_of_a_model_without_a_causal_lm_writes_its_language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    composite = make("mistral3", tmp_path / "full")
    (problem,) = find_facts(recipe_for(composite)).problems
    assert "Mistral3Config, a model of several modalities" in problem.message
    command = shlex.split(str(problem.hint).partition("name that: ")[2])
    assert command[:3] == ["python", "-m", "fsdp_tune.model.loading.language_model"]
    monkeypatch.chdir(tmp_path)
    assert main(command[3:]) == 0
    assert find_facts(recipe_of({"name_or_path": str(tmp_path / "DIRECTORY")})).problems == ()
    assert written_difference(composite, tmp_path / "again") == 0.0


def test_language_model_that_computes_otherwise_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cohere2ForCausalLM multiplies its logits by `logit_scale`, and the full model's class does not."""
    composite = make("cohere2_vision", tmp_path / "full", vision_config__num_hidden_layers=1)
    assert main([str(composite.folder), str(tmp_path / "text")]) == 2
    message = capsys.readouterr().err
    assert "the logits of Cohere2ForCausalLM differ" in message
    assert "hint: name a model of text alone" in message
    assert not (tmp_path / "text").exists()
    scale_of_one = make("cohere2_vision", tmp_path / "other", vision_config__num_hidden_layers=1, text_config__logit_scale=1.0)
    assert written_difference(scale_of_one, tmp_path / "text") == 0.0


def test_scale_of_logits_is_found_in_bf16_and_codes_without_settings_are_refused(tmp_path: Path) -> None:
    composite = make("cohere2_vision", tmp_path / "full", vision_config__num_hidden_layers=1, text_config__logit_scale=0.8333)
    full: Any = composite.kind.from_pretrained(composite.folder, dtype=torch.bfloat16)
    with pytest.raises(FsdpTuneError, match="the logits of Cohere2ForCausalLM differ"):
        language_model_of(full.eval(), "it")
    file = composite.folder / "model.safetensors"
    tensors = load_file(file)
    weight = next(name for name in tensors if name.endswith("up_proj.weight"))
    tensors[weight] = tensors[weight].to(torch.float8_e4m3fn)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(FsdpTuneError, match="its weights are quantised"):
        write_language_model(str(composite.folder), tmp_path / "text")


@pytest.mark.parametrize(
    ("change", "named"),
    [({"quantization_config": {"quant_method": "fp8"}}, "quantised"), ({"architectures": ["LlamaForCausalLM2"]}, "LlamaForCausalLM2")],
)
def test_model_whose_language_model_cannot_be_read_is_refused(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    from tests.architectures.tiny import set_fields

    composite = make("mistral3", tmp_path / "full")
    set_fields(composite.folder, **change)
    with pytest.raises(FsdpTuneError, match=named):
        write_language_model(str(composite.folder), tmp_path / "text")
    assert not (tmp_path / "text").exists()


@pytest.mark.parametrize(
    "tied",
    [(True, False), pytest.param((False, True), marks=pytest.mark.slow), pytest.param((True, True), marks=pytest.mark.slow)],
    ids=["outer", "inner", "both"],
)
def test_text_is_tied_as_the_class_of_the_full_model_ties_it(tied: tuple[bool, bool], tmp_path: Path) -> None:
    outer, inner = tied
    composite = make("qwen3_5", tmp_path / "full", tie_word_embeddings=outer, text_config__tie_word_embeddings=inner)
    recipe = recipe_for(composite)
    assert find_facts(recipe).problems == ()
    live = build_full(recipe).eval()
    assert difference(composite.logits, logits_of(live, composite.ids)) == 0.0
    assert (live.get_output_embeddings().weight is live.get_input_embeddings().weight) == outer  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("outer", [True, False])
def test_merged_model_in_the_full_class_has_the_logits_of_the_live_one(outer: bool, tmp_path: Path) -> None:
    composite = make("qwen3_5", tmp_path / "full", tie_word_embeddings=outer, text_config__tie_word_embeddings=False)
    assert merged_difference(composite, tmp_path / "made") == 0.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")  # of Gemma 4's own configuration
@pytest.mark.parametrize("name", TRIED)
def test_logits_for_text_are_those_of_the_full_model(name: str, tmp_path: Path) -> None:
    """Of the live model, of the merged one in the class of the base, and of the language model that is written to a directory."""
    if name not in CONFIG_MAPPING_NAMES:
        pytest.skip("the installed transformers does not have it")
    result, why, found = outcome(name, tmp_path)
    assert result in ("trained", "language model"), why
    assert float(found) < MOST


PUBLISHED = {
    "kimi_k25": ("language_model.model.layers.0.self_attn.kv_a_proj_with_mqa.weight", "vision_tower.encoder.blocks.0.wqkv.weight"),
    "minimax_m3_vl": ("language_model.model.layers.0.self_attn.q_proj.weight", "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"),
    "nemotron_h_omni": ("language_model.backbone.layers.0.mixer.in_proj.weight", "vision_model.radio_model.model.blocks.0.attn.qkv.weight"),
}
"""Names in the files of Kimi K2.5, MiniMax M3 and Nemotron Omni, of which transformers 5.24 writes other ones for Kimi."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_language_model_is_read_from_the_names_that_are_published(name: str, tmp_path: Path) -> None:
    if name not in CONFIG_MAPPING_NAMES:
        pytest.skip("the installed transformers does not have it")
    composite = make(name, tmp_path / "full")
    file = composite.folder / "model.safetensors"
    tensors = {stored.replace("language_model.model.blocks.", "language_model.model.layers."): t for stored, t in load_file(file).items()}
    assert set(PUBLISHED[name]) <= tensors.keys()
    save_file(tensors, file, metadata={"format": "pt"})
    (problem,) = find_facts(recipe_for(composite)).problems
    assert "a model of several modalities" in problem.message
    assert written_difference(composite, tmp_path / "text") == 0.0


@pytest.mark.slow
def test_adapters_that_are_stored_in_a_base_are_refused(tmp_path: Path) -> None:
    """Phi-4-multimodal as its own code stores it: each layer's weight as `base_layer`, next to the adapters of vision and speech."""
    base = LAYOUTS["phi4_multimodal"](tmp_path)
    tensors = {name.replace("qkv_proj.weight", "qkv_proj.base_layer.weight"): value for name, value in base.plain.items()}
    tensors["model.layers.0.self_attn.qkv_proj.lora_A.vision.weight"] = torch.ones(2, 64)
    save_file(tensors, base.folder / "model.safetensors", metadata={"format": "pt"})
    (problem,) = find_facts(recipe_of({"name_or_path": str(base.folder)})).problems
    assert problem.code == "model-weights-missing"
    assert "qkv_proj.weight" in problem.message


@pytest.mark.slow
def test_model_whose_text_has_no_causal_lm_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("ernie4_5_vl_moe", architectures=["Ernie4_5_VLMoeForConditionalGeneration"]).save_pretrained(tmp_path)
    (problem,) = find_facts(recipe_of({"name_or_path": str(tmp_path)})).problems
    assert "it has none for its text, Ernie4_5_VLMoeTextConfig, either" in str(problem.hint)


@pytest.mark.slow
def test_table_has_every_model_of_several_modalities() -> None:
    assert set(names()) <= {name for name, *_ in ROWS}


@pytest.mark.parametrize("is_pickled", [False, True])
def test_tensors_in_fp32_among_others_in_16_bits_are_written_as_the_files_have_them(is_pickled: bool, tmp_path: Path) -> None:
    folder = make("mistral3", tmp_path / "full").folder
    torch.manual_seed(0)
    stored = {
        name: torch.randn(value.shape).to(torch.float32 if name.endswith("norm.weight") else torch.bfloat16)
        for name, value in load_file(folder / "model.safetensors").items()
    }
    (folder / "model.safetensors").unlink()
    if is_pickled:
        torch.save(stored, folder / "pytorch_model.bin")
    else:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}))
    write_language_model(str(folder), tmp_path / "text")
    written = load_file(tmp_path / "text" / "model.safetensors")
    assert {value.dtype for value in written.values()} == {torch.float32, torch.bfloat16}
    for name, value in written.items():
        (source,) = (each for key, each in stored.items() if key.endswith(f"language_model.{name}"))
        assert same_bits(value, source), name
