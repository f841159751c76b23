"""Build a model from a recipe, and its errors."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.loading.construct import build_empty, build_full, embedding_rows, generation_config, model_config
from fsdp_tune.recipe.read.catalogue import architecture
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of
from tests.parity.architectures import make_model


def codes(act: Any) -> list[str]:
    with pytest.raises(FsdpTuneError) as caught:
        act()
    return [problem.code for problem in caught.value.problems]


def llama(**fields: Any) -> dict[str, Any]:
    return {"from_config": FAMILIES["llama"] | fields}


@pytest.mark.parametrize(
    ("model", "code"),
    [
        ({"from_config": {"model_type": "llama", "hiden_size": 64}}, "config-field-unknown"),
        ({"from_config": {"model_type": "no-such-model"}}, "config-invalid"),
        ({**llama(), "config_overrides": {"atention_dropout": 0.1}}, "config-override-unknown"),
    ],
)
def test_wrong_configuration_is_named(model: dict[str, Any], code: str) -> None:
    recipe = recipe_of(model)
    assert codes(lambda: model_config(recipe)) == [code]


def test_misspelt_field_gets_a_suggestion() -> None:
    with pytest.raises(FsdpTuneError) as caught:
        model_config(recipe_of({"from_config": {"model_type": "llama", "hiden_size": 64}}))
    assert caught.value.problems[0].hint == "did you mean `hidden_size`?"


QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 1,
    "num_experts": 4,
    "vocab_size": 128,
}


def test_undeclared_config_field_that_models_read_is_accepted() -> None:
    assert model_config(recipe_of({"from_config": QWEN3_MOE})).head_dim == 32


@pytest.mark.parametrize(
    ("family", "field"),
    [("llama", "rope_theta"), ("gpt_neox", "rotary_emb_base"), ("gemma3_text", "rope_local_base_freq"), ("gemma3_text", "rope_theta")],
)
def test_field_of_transformers_4_is_accepted_where_it_has_an_effect(family: str, field: str) -> None:
    config = model_config(recipe_of({"from_config": FAMILIES[family] | {field: 1234.0}}))
    assert "1234.0" in str(config.rope_parameters)
    assert codes(lambda: model_config(recipe_of(llama(rotary_emb_base=1234.0)))) == ["config-field-unknown"]
    assert codes(lambda: model_config(recipe_of(llama(rope_local_base_freq=1234.0)))) == ["config-field-unknown"]


def test_config_written_by_transformers_may_have_undeclared_fields(tmp_path: Path) -> None:
    """Qwen3-30B-A3B's config.json, for one."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN3_MOE | {"max_window_layers": 48, "transformers_version": "4.51.0"}))
    assert model_config(recipe_of({"from_config": str(file)})).hidden_size == 64
    file.write_text(json.dumps(QWEN3_MOE | {"max_windows_layers": 48}))
    assert codes(lambda: model_config(recipe_of({"from_config": str(file)}))) == ["config-field-unknown"]


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"hidden_size": 8}'])
def test_damaged_config_file_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    found = codes(lambda: model_config(recipe_of({"from_config": str(tmp_path / "config.json")})))
    assert found in (["config-unreadable"], ["config-without-model-type"])


def gone(tmp_path: Path, key: str) -> Recipe:
    """A recipe whose path was there when it was resolved."""
    recipe = recipe_of({"name_or_path": str(tmp_path)})
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"name_or_path": None, key: str(tmp_path / "gone")})})


def test_missing_config_file_is_an_error(tmp_path: Path) -> None:
    assert codes(lambda: model_config(gone(tmp_path, "from_config"))) == ["config-unreadable"]


def test_missing_model_error_has_a_hint(tmp_path: Path) -> None:
    recipe = gone(tmp_path, "name_or_path")
    with pytest.raises(FsdpTuneError) as caught:
        model_config(recipe)
    [problem] = caught.value.problems
    assert problem.code == "model-not-found"
    assert problem.ways_out


def test_config_overrides_are_applied_and_cache_is_off() -> None:
    config = model_config(recipe_of({**llama(), "config_overrides": {"attention_dropout": 0.25}}))
    assert (config.attention_dropout, config.use_cache) == (0.25, False)


def test_generation_config_keeps_cache() -> None:
    recipe = recipe_of(llama())
    assert generation_config(recipe, model_config(recipe)).use_cache is True


def test_attribute_map_names_are_accepted() -> None:
    config = model_config(recipe_of({"from_config": {"model_type": "gpt2", "hidden_size": 32, "num_hidden_layers": 3, "n_head": 4}}))
    assert (config.n_embd, config.n_layer) == (32, 3)


def test_seed_determines_weights() -> None:
    one, same, other = (build_full(recipe_of(training={"seed": seed})) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_empty_model_is_on_meta_device() -> None:
    empty, full = build_empty(recipe_of("gpt2")), build_full(recipe_of("gpt2"))
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    assert [(n, p.shape, p.dtype) for n, p in empty.named_parameters()] == [(n, p.shape, p.dtype) for n, p in full.named_parameters()]
    assert empty.lm_head.weight is empty.transformer.wte.weight


@pytest.mark.parametrize("build", [build_empty, build_full])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_larger_tokenizer_grows_the_embedding_only_when_allowed(build: Any, family: str) -> None:
    allowed = recipe_of({"from_config": FAMILIES[family], "resize_embeddings": True})
    model = build(allowed, vocabulary=300)
    assert (embedding_rows(model), model.config.vocab_size, model.get_output_embeddings().weight.shape[0]) == (300, 300, 300)
    assert codes(lambda: build(recipe_of(family), vocabulary=300)) == ["vocabulary-larger-than-embedding"]
    assert embedding_rows(build(recipe_of(family), vocabulary=200)) == 257, "a smaller tokenizer leaves it as it is"


def test_added_tokens_grow_the_embedding() -> None:
    model = build_empty(recipe_of({**llama(), "tokens": {"add": ["<x>"]}}), vocabulary=258)
    assert embedding_rows(model) == 258


def test_resizing_one_model_leaves_the_configuration_for_the_next(tmp_path: Path) -> None:
    recipe = recipe_of({"name_or_path": str(make_model("llama", tmp_path)), "resize_embeddings": True})
    config = model_config(recipe)
    build_empty(recipe, config, vocabulary=300)
    assert embedding_rows(build_full(recipe, config, vocabulary=300)) == 300


def test_frozen_parameters_are_stored_in_their_dtype_and_not_trained() -> None:
    recipe = recipe_of({**llama(), "freeze": ["model.embed_tokens.*"], "frozen_dtype": "bf16"})
    model = build_full(recipe)
    assert (model.model.embed_tokens.weight.dtype, model.model.embed_tokens.weight.requires_grad) == (torch.bfloat16, False)
    assert (model.lm_head.weight.dtype, model.lm_head.weight.requires_grad) == (torch.float32, True)


def test_frozen_parameter_next_to_a_trained_one_keeps_its_dtype() -> None:
    """The CPU's layer norm takes no weight in bf16 with a bias in fp32."""
    recipe = recipe_of({"from_config": FAMILIES["gpt2"], "freeze": ["*.1.*weight"], "frozen_dtype": "bf16"})
    layer = build_full(recipe).transformer.h[1]
    assert (layer.ln_1.weight.dtype, layer.ln_1.weight.requires_grad, layer.ln_1.bias.requires_grad) == (torch.float32, False, True)


def test_frozen_norms_keep_their_dtype() -> None:
    """Autocast passes an fp32 input to a norm as it is, and the CPU's layer norm takes no bf16 weight for it."""
    recipe = recipe_of({"from_config": FAMILIES["gpt2"], "freeze": ["transformer.h.0.*"], "frozen_dtype": "bf16"})
    layer = build_full(recipe).transformer.h[0]
    assert (layer.ln_1.weight.dtype, layer.mlp.c_fc.weight.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(("patterns", "code"), [(["model.embd.*"], "freeze-matches-nothing"), (["*"], "nothing-to-train")])
def test_freezing_none_or_all_parameters_is_an_error(patterns: list[str], code: str) -> None:
    recipe = recipe_of({**llama(), "freeze": patterns})
    assert codes(lambda: build_empty(recipe)) == [code]


@pytest.mark.parametrize("pattern", ["model.layers.0.mlp.up_projj.*", "model.norm.weight"])
def test_group_without_a_trained_parameter_is_an_error_with_the_nearest_names(pattern: str) -> None:
    groups = [{"match": ["model.layers.1.*", pattern], "learning_rate": 1e-3}]
    recipe = recipe_of({**llama(), "freeze": ["model.norm.*"]}, training={"parameter_groups": groups})
    with pytest.raises(FsdpTuneError) as caught:
        build_empty(recipe)
    [problem] = caught.value.problems
    assert problem.code == "parameter-group-matches-nothing"
    assert f"[0].match: `{pattern}`" in problem.message
    assert "up_projj" not in pattern or "`model.layers.0.mlp.up_proj.weight`" in (problem.hint or "")


def test_group_hidden_by_earlier_ones_is_an_error() -> None:
    """A hidden entry would have no effect, without a word."""
    wide, narrow = ({"match": [pattern], "learning_rate": 1e-3} for pattern in ("*", "lm_head.*"))
    with pytest.raises(FsdpTuneError, match=r"\[1\].match: `lm_head.\*` matches only parameters that earlier entries match"):
        build_empty(recipe_of(llama(), training={"parameter_groups": [wide, narrow]}))
    build_empty(recipe_of(llama(), training={"parameter_groups": [narrow, wide]}))


def test_low_precision_weights_are_upcast_to_fp32(tmp_path: Path) -> None:
    source = make_model("llama", tmp_path)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert {p.dtype for p in build_full(recipe_of({"name_or_path": str(source)})).parameters()} == {torch.float32}
    pure = build_full(recipe_of({"name_or_path": str(source), "dtype": "bf16"}, precision={"mixed_precision": "bf16"}))
    assert {p.dtype for p in pure.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", sorted(json.loads(resources.files("fsdp_tune.recipe").joinpath("model_configs.json").read_bytes())))
def test_packaged_architecture_builds_a_config(name: str) -> None:
    """Some are in the format before transformers 5, with `rope_theta` next to `rope_scaling`."""
    facts = architecture(name)
    assert facts is not None
    config = model_config(recipe_of({"from_config": facts}))
    if "rope_theta" in facts:
        of_layers = config.rope_parameters.get("full_attention", config.rope_parameters)  # Gemma 3 has another for layers with windows
        assert of_layers["rope_theta"] == facts["rope_theta"]
        assert of_layers["rope_type"] == (facts.get("rope_scaling") or {"rope_type": "default"})["rope_type"]


def test_head_untied_by_the_recipe_starts_as_the_embedding(tmp_path: Path) -> None:
    """The files hold tied weights once, and transformers draws a head that they lack."""
    source = make_model("qwen3", tmp_path)
    model = build_full(recipe_of({"name_or_path": str(source), "config_overrides": {"tie_word_embeddings": False}}))
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert head is not embedding
    assert torch.equal(head, embedding)


def test_experts_in_4_bits_of_gpt_oss_are_read_as_transformers_dequantises_them(tmp_path: Path) -> None:
    """OpenAI's files: blocks of 32 numbers in MXFP4, and a scale of 8 bits for each."""
    source = tmp_path / "model"
    sizes = {"hidden_size": 64, "intermediate_size": 64}  # whole blocks
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**FAMILIES["gpt_oss"] | sizes)).save_pretrained(source)
    tensors, drawn = load_file(source / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, outer, inner // 32, 16), generator=drawn)
        scales = torch.randint(118, 124, blocks.shape[:-1], generator=drawn)
        tensors |= {f"{name}_blocks": blocks.to(torch.uint8), f"{name}_scales": scales.to(torch.uint8)}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    found = dict(build_full(recipe_of({"name_or_path": str(source)})).named_parameters())
    wanted = AutoModelForCausalLM.from_pretrained(source, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16)
    experts = {name: each for name, each in wanted.named_parameters() if "proj" in name and "experts" in name}
    assert any(each.abs().max() > 0.1 for each in experts.values())
    assert all(torch.equal(found[name].float(), each.float()) for name, each in experts.items())


def test_dtype_that_torch_does_not_have_is_an_error_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["llama"] | {"torch_dtype": "auto"}))
    with pytest.raises(FsdpTuneError, match=r"cannot be loaded: .*auto") as caught:
        model_config(recipe_of({"name_or_path": str(tmp_path)}))
    assert caught.value.problems[0].code == "model-not-found"
