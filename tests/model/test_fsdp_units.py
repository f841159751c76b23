"""The FSDP units of every decoder family, on models without weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn
from transformers import PreTrainedModel

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.loading.construct import build_empty
from fsdp_tune.model.shard import fsdp_units
from fsdp_tune.model.shard.fsdp_units import (
    decoder_layer_classes,
    decoder_layers,
    minimum_unit_parameters,
    plan_units,
)
from tests.architectures.tiny import config_of
from tests.model import families
from tests.model.families import FAMILIES
from tests.model.recipes import lora_recipe, recipe_of

# By hand, from the module trees: class of the decoder layer, prefix of its name, the embedding's unit, the
# last unit.
BY_CLASS: dict[str, tuple[str, str, tuple[str, ...] | None, tuple[str, ...]]] = {
    "gpt2": ("GPT2Block", "transformer.h", None, ("transformer.ln_f", "transformer.wte", "lm_head")),
    "llama": ("LlamaDecoderLayer", "model.layers", ("model.embed_tokens",), ("model.norm", "lm_head")),
    "mistral": ("MistralDecoderLayer", "model.layers", ("model.embed_tokens",), ("model.norm", "lm_head")),
    "qwen2": ("Qwen2DecoderLayer", "model.layers", ("model.embed_tokens",), ("model.norm", "lm_head")),
    "qwen3": ("Qwen3DecoderLayer", "model.layers", None, ("model.norm", "model.embed_tokens", "lm_head")),
    "gemma": ("GemmaDecoderLayer", "model.layers", None, ("model.norm", "model.embed_tokens", "lm_head")),
    "phi": ("PhiDecoderLayer", "model.layers", ("model.embed_tokens",), ("model.final_layernorm", "lm_head")),
    "gpt_neox": (
        "GPTNeoXLayer",
        "gpt_neox.layers",
        ("gpt_neox.embed_in",),
        ("gpt_neox.final_layer_norm", "lm_head"),
    ),
    "bloom": (
        "BloomBlock",
        "transformer.h",
        None,
        ("transformer.ln_f", "transformer.word_embeddings", "lm_head"),
    ),
    "mixtral": ("MixtralDecoderLayer", "model.layers", ("model.embed_tokens",), ("model.norm", "lm_head")),
}


@pytest.mark.parametrize("family", BY_CLASS)
def test_layers_embedding_and_head_are_units(family: str) -> None:
    recipe = recipe_of(family)
    model = build_empty(recipe)
    layer_class, prefix, embedding, tail = BY_CLASS[family]
    plan = plan_units(recipe, model)
    assert decoder_layer_classes(model) == (layer_class,)
    assert plan.groups == ((f"{prefix}.0",), (f"{prefix}.1",), *([embedding] if embedding else []), tail)
    assert plan.keeps_gathered == {tail}


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("policy", ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"])
def test_no_parameter_is_in_two_units_and_no_unit_is_empty(family: str, policy: str) -> None:
    recipe = recipe_of(family, fsdp={"auto_wrap_policy": policy})
    model = build_empty(recipe)
    taken: dict[int, tuple[str, ...]] = {}
    for group in plan_units(recipe, model).groups:  # children first: a parent gets what they left
        own = {id(p) for name in group for p in model.get_submodule(name).parameters()} - taken.keys()
        assert own, group
        taken |= dict.fromkeys(own, group)
    assert taken


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi", "mixtral"])
@pytest.mark.parametrize("minimum", [1, 500, 3000, 9000, 10**9])
def test_size_wrap_respects_minimum_and_skips_containers(family: str, minimum: int) -> None:
    recipe = recipe_of(family, fsdp={"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": minimum})
    model = build_empty(recipe)
    names = [name for (name,) in plan_units(recipe, model).groups]
    taken: set[int] = set()
    for name in names:
        module = model.get_submodule(name)
        own = [p for p in module.parameters() if id(p) not in taken]
        assert sum(p.numel() for p in own) >= minimum, name
        assert not isinstance(module, nn.ModuleList), name
        taken |= {id(p) for p in own}
    for name, module in model.named_modules():
        left = [p for p in module.parameters() if id(p) not in taken]
        if sum(p.numel() for p in left) >= minimum:
            # Only the root, containers, and what holds a part of a tied pair may be left with that much.
            assert not name or isinstance(module, nn.ModuleList) or holds_tied(model, module), name


def holds_tied(model: PreTrainedModel, module: nn.Module) -> bool:
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return embedding is head and any(p is head for p in module.parameters())


def test_size_wrap_defaults_to_half_a_layer() -> None:
    recipe = recipe_of("llama", fsdp={"auto_wrap_policy": "SIZE_BASED_WRAP"})
    model = build_empty(recipe)
    assert (
        minimum_unit_parameters(recipe, model)
        == sum(p.numel() for p in model.get_submodule("model.layers.0").parameters()) // 2
    )


def test_patterns_match_one_name_part_each() -> None:
    patterns = ["model.layers.*", "lm_head", "model.layers.*.mlp"]
    recipe = recipe_of("llama", fsdp={"auto_wrap_policy": "MODULE_NAMES_WRAP", "modules_to_wrap": patterns})
    groups = [name for (name,) in plan_units(recipe, build_empty(recipe)).groups]
    assert sorted(groups) == [
        "lm_head",
        "model.layers.0",
        "model.layers.0.mlp",
        "model.layers.1",
        "model.layers.1.mlp",
    ]
    assert groups.index("model.layers.0.mlp") < groups.index("model.layers.0"), (
        "a child must be wrapped before its parent"
    )


def test_no_wrap_has_only_the_root_unit() -> None:
    recipe = recipe_of("llama", fsdp={"auto_wrap_policy": "NO_WRAP"})
    assert plan_units(recipe, build_empty(recipe)).groups == ()


def test_layer_classes_can_be_named_as_in_accelerate() -> None:
    recipe = recipe_of("llama", fsdp={"transformer_layer_cls_to_wrap": "LlamaMLP,LlamaAttention"})
    names = [name for (name,) in plan_units(recipe, build_empty(recipe)).groups[:4]]
    assert sorted(names) == [
        f"model.layers.{layer}.{part}" for layer in (0, 1) for part in ("mlp", "self_attn")
    ]


def test_ignored_modules_are_in_no_unit() -> None:
    frozen = {"from_config": FAMILIES["llama"], "freeze": ["model.embed_tokens.*", "model.layers.1.*"]}
    recipe = recipe_of(frozen, fsdp={"ignored_modules": r"model\.embed_tokens|model\.layers\.1"})
    names = {name for group in plan_units(recipe, build_empty(recipe)).groups for name in group}
    assert names == {"model.layers.0", "model.norm", "lm_head"}


def test_ignored_modules_that_train_are_refused_where_gradients_would_be_wrong() -> None:
    fsdp = {"ignored_modules": r"model\.layers\.\d+\.input_layernorm"}
    recipe = recipe_of("llama", fsdp=fsdp)
    with pytest.raises(
        FsdpTuneError, match=r"`model\.layers\.0\.input_layernorm`.*ranks would differ"
    ) as caught:
        plan_units(recipe, build_empty(recipe))
    assert [problem.code for problem in caught.value.problems] == ["ignored-modules-trained"]
    alone = recipe_of("llama", ranks=1, fsdp=fsdp)
    assert plan_units(alone, build_empty(alone)).groups
    alone = alone.model_copy(update={"model": alone.model.model_copy(update={"dtype": "bf16"})})
    with pytest.raises(FsdpTuneError, match="micro-batches would be added in bf16"):
        plan_units(alone, build_empty(alone))


@pytest.mark.parametrize(
    ("fsdp", "code"),
    [
        ({"transformer_layer_cls_to_wrap": "LlamaDecoderLayr"}, "layer-class-not-found"),
        (
            {"auto_wrap_policy": "MODULE_NAMES_WRAP", "modules_to_wrap": ["model.layer.*"]},
            "wrap-pattern-matches-nothing",
        ),
        (
            {"auto_wrap_policy": "MODULE_NAMES_WRAP", "modules_to_wrap": ["model.*.mlp"]},
            "wrap-pattern-matches-nothing",
        ),
        ({"ignored_modules": "embed_tokens"}, "ignored-modules-match-nothing"),
    ],
)
def test_pattern_without_a_match_is_an_error_with_alternatives(fsdp: dict, code: str) -> None:
    recipe = recipe_of("llama", fsdp=fsdp)
    with pytest.raises(FsdpTuneError) as caught:
        plan_units(recipe, build_empty(recipe))
    assert [problem.code for problem in caught.value.problems] == [code]


@pytest.mark.parametrize("ranks", [1, 2])
def test_selective_recomputation_refuses_layers_with_units_inside(ranks: int) -> None:
    """torch 2.13 raises in the first backward: a unit's hooks are counted among the operations of the
    layer."""
    small = {
        "auto_wrap_policy": "SIZE_BASED_WRAP",
        "min_num_params": 100,
        "activation_checkpointing": "selective",
    }
    recipe = recipe_of("gpt2", ranks=ranks, fsdp=small)
    with pytest.raises(FsdpTuneError, match=r"makes one of `transformer\.h\.0\."):
        plan_units(recipe, build_empty(recipe))
    allowed = [small | {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}]
    recipes = [recipe_of("gpt2", ranks=ranks, fsdp=each) for each in allowed]
    assert all(plan_units(each, build_empty(each)).groups for each in recipes)


ZAMBA2 = {
    "model_type": "zamba2",
    **families.COMMON,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "hybrid_layer_ids": [1, 3],
    "num_mem_blocks": 1,
    "adapter_rank": 4,
    "mamba_d_state": 8,
    "n_mamba_heads": 4,
    "mamba_ngroups": 1,
    "mamba_headdim": 16,
}
BERT = families.BERT | {"is_decoder": True}


def test_layer_inside_another_layer_is_part_of_it() -> None:
    """Zamba2's hybrid layers hold a Mamba layer, and both classes are named in `_no_split_modules`."""
    names = [name for name, _ in decoder_layers(build_empty(recipe_of({"from_config": ZAMBA2})))]
    assert names == [f"model.layers.{index}" for index in range(4)]


def test_layers_that_share_parameters_share_a_unit() -> None:
    recipe = recipe_of({"from_config": ZAMBA2})
    groups = plan_units(recipe, build_empty(recipe)).groups
    assert ("model.layers.1", "model.layers.3") in groups
    assert ("model.layers.0",) in groups


def test_head_that_shares_a_bias_with_no_unit_goes_to_the_root() -> None:
    """BERT's prediction head ties the decoder's bias to one of its own."""
    recipe = recipe_of({"from_config": BERT})
    plan = plan_units(recipe, build_empty(recipe))
    assert plan.groups == (("bert.encoder.layer.0",), ("bert.encoder.layer.1",))
    assert plan.keeps_gathered == frozenset()


def test_parts_of_an_adapted_layer_are_no_units(tmp_path: Path) -> None:
    """PEFT's DoRA reads the weights of a layer outside of the forward of its parts."""
    recipe = lora_recipe(
        tmp_path,
        {"r": 4, "use_dora": True},
        fsdp={"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 100},
    )
    names = [name for group in plan_units(recipe, build_empty(recipe)).groups for name in group]
    assert "model.layers.0.mlp.up_proj" in names
    assert not any(".base_layer" in name or ".lora_" in name for name in names)


def test_final_norm_is_that_of_the_language_model() -> None:
    recipe = recipe_of({"from_config": config_of("gemma3")})
    assert plan_units(recipe, build_empty(recipe)).groups[-1] == (
        "model.language_model.norm",
        "model.language_model.embed_tokens",
        "lm_head",
    )


@pytest.mark.parametrize(
    ("family", "norm"),
    [
        ("gemma3n_text", "model.norm"),
        ("gemma4_text", "model.norm"),
        ("mbart", "model.decoder.layer_norm"),
    ],
)
def test_norms_of_inputs_after_the_layers_are_not_the_final_one(family: str, norm: str) -> None:
    recipe = recipe_of({"from_config": config_of(family)})
    assert plan_units(recipe, build_empty(recipe)).groups[-1][0] == norm


def test_final_norm_is_found_where_the_model_holds_the_layers_itself() -> None:
    model = nn.Module()
    model.layers, model.norm = nn.ModuleList([nn.Linear(2, 2)]), nn.LayerNorm(2)
    assert fsdp_units._final_norm(model, ["layers.0"], 2) is model.norm  # type: ignore[arg-type]
    assert fsdp_units._final_norm(model, ["norm"], 2) is None  # type: ignore[arg-type]
