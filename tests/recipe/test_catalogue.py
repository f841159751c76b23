"""Every recipe that ships loads without a notice, resolves, and does its arithmetic as its comments say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.devices import Machine
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.recipe.read.catalogue import architecture, catalogue, find_recipe, headline
from fsdp_tune.recipe.read.loader import load_recipe
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.recipe.schema.recipe import Recipe

BARE = Machine(None, 0, 8, None)
GIB = 2**30
PROMISED = {
    *(
        "gpt2_smoke",
        "llama7b_full_shard",
        "llama7b_shard_grad_op",
        "llama13b_full_shard",
        "llama70b_full_shard_offload",
    ),
    *("llama8b_hybrid_shard_multinode", "gpt2_xl_two_24gb", "qwen2_5_7b_chat", "mistral7b_completion"),
    *("qwen3_8b_chat", "smollm3_3b_chat", "llama3_2_3b_two_48gb", "gemma3_1b_24gb", "gpt_oss_20b_full_shard"),
    "gemma4_26b_two_b300",
    *("llama8b_lora_24gb", "llama8b_lora_8x80gb", "llama70b_qlora_two_24gb", "llama70b_qlora_4x80gb"),
}
LORA = {name for name in PROMISED if "lora" in name}
PARAMETERS = {
    # Counted once with transformers on the meta device.
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "openai-community/gpt2-xl": 1_557_611_200,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "google/gemma-3-1b-pt": 999_885_952,
    "unsloth/gpt-oss-20b-BF16": 20_914_757_184,
    "google/gemma-4-26B-A4B-it": 25_233_141_760,
}


def resolved(name: str, tmp_path: Path) -> Recipe:
    loaded = load_recipe(name)
    assert loaded.notices == ()
    return resolve(loaded.recipe, BARE, cwd=tmp_path, assume="cuda", positions=loaded.positions).recipe


def test_catalogue_has_documented_recipes() -> None:
    assert set(catalogue()) == PROMISED


@pytest.mark.parametrize("name", sorted(PROMISED))
def test_catalogue_recipes_resolve_without_notice(name: str, tmp_path: Path) -> None:
    recipe = resolved(name, tmp_path)
    assert recipe.name == name
    assert recipe.output_dir == str(tmp_path / "runs" / name)
    assert headline(catalogue()[name])


@pytest.mark.parametrize("name", sorted(PROMISED - LORA - {"gpt2_smoke"}))
def test_catalogue_model_is_packaged_and_comment_matches_its_state(name: str, tmp_path: Path) -> None:
    """`Sharded state: … = 12.6 GiB` is 16 bytes a parameter over the ranks of a shard group (offload: over
    the machine)."""
    recipe = resolved(name, tmp_path)
    assert recipe.model.name_or_path is not None
    facts = architecture(recipe.model.name_or_path)
    assert facts is not None
    assert recipe.data.max_length <= facts.get("max_position_embeddings", facts.get("n_positions", 0))
    text = catalogue()[name].read_text()
    claimed = re.search(r"Sharded state: [^=]*= ([\d,.]+) GiB", text)
    assert claimed is not None
    shard = 1 if recipe.fsdp.offload_params else recipe.parallelism.dp_shard_size
    assert isinstance(shard, int)
    state_gib = PARAMETERS[recipe.model.name_or_path] * 16 / shard / GIB
    assert abs(state_gib - float(claimed[1].replace(",", ""))) <= max(0.06, state_gib * 1e-3)


@pytest.mark.parametrize("name", sorted(LORA))
def test_comment_of_a_lora_recipe_matches_its_state(name: str, tmp_path: Path) -> None:
    """2 bytes a frozen parameter or 4.5 bits in a quantised layer, and 16 bytes a trained one: r (in + out)
    of every linear layer."""
    recipe = resolved(name, tmp_path)
    facts = architecture(str(recipe.model.name_or_path))
    assert recipe.lora is not None
    assert facts is not None
    width, inner, head = (
        facts["hidden_size"],
        facts["intermediate_size"],
        facts["hidden_size"] // facts["num_attention_heads"],
    )
    groups = facts["num_key_value_heads"] * head
    sizes = [
        (width, width),
        (width, groups),
        (width, groups),
        (width, width),
        (width, inner),
        (width, inner),
        (inner, width),
    ]
    trained = facts["num_hidden_layers"] * recipe.lora.r * sum(map(sum, sizes))
    frozen = PARAMETERS[str(recipe.model.name_or_path)]
    text = catalogue()[name].read_text()
    assert f"{trained / 1e6:.0f} million trained ones × 16 bytes = {trained * 16 / GIB:.1f} GiB" in text
    in_4_bits = (
        facts["num_hidden_layers"] * sum(rows * columns for rows, columns in sizes)
        if recipe.quantization
        else 0
    )
    assert f"× 2 bytes (bf16) = {(frozen - in_4_bits) * 2 / GIB:.1f} GiB, and" in text
    assert not in_4_bits or f"× 4.5 bits (nf4) = {in_4_bits * 4.5 / 8 / GIB:.1f} GiB" in text


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_architecture_facts_give_the_known_number_of_parameters(name: str) -> None:
    facts = architecture(name)
    assert facts is not None
    assert count(facts) == PARAMETERS[name]


def test_embedded_recipe_has_the_stated_size(tmp_path: Path) -> None:
    from fsdp_tune.data.read.file_access import builtin_tokenizer

    config = resolved("gpt2_smoke", tmp_path).model.from_config
    assert isinstance(config, dict)
    text = catalogue()["gpt2_smoke"].read_text()
    assert f"{count(config) / 1000:.0f} thousand parameters" in text
    tokens = builtin_tokenizer("builtin:arithmetic").get_vocab_size()
    assert f"the tokenizer has {tokens} tokens" in text
    assert tokens <= config["vocab_size"]


def count(facts: dict[str, object]) -> int:
    """Parameters of a decoder, from the published shapes of GPT-2 and of Llama's relatives."""

    def of(key: str, default: int = 0) -> int:
        return int(str(facts.get(key, default)))

    kind = facts["model_type"]
    if kind == "gpt2":
        width, layers, positions, vocabulary = (
            of("n_embd"),
            of("n_layer"),
            of("n_positions"),
            of("vocab_size"),
        )
        return vocabulary * width + positions * width + layers * (12 * width * width + 13 * width) + 2 * width
    width, inner, heads, groups = (
        of("hidden_size"),
        of("intermediate_size"),
        of("num_attention_heads"),
        of("num_key_value_heads"),
    )
    if kind == "gemma4_text":
        return count_gemma4(facts)
    head = of("head_dim", width // heads)
    attention = 2 * width * heads * head + 2 * width * groups * head
    attention += (heads + 2 * groups) * head if kind in ("qwen2", "gpt_oss") else 0  # biases
    attention += width + heads if kind == "gpt_oss" else 0  # bias of the output, sinks
    attention += 2 * head if kind in ("qwen3", "gemma3_text") else 0  # norms of queries and keys
    experts = of("num_local_experts")
    mlp = (
        experts * (3 * width * inner + 2 * inner + width) + experts * (width + 1)
        if experts
        else 3 * width * inner
    )
    norms = (4 if kind == "gemma3_text" else 2) * width
    return (
        of("num_hidden_layers") * (attention + mlp + norms)
        + width
        + of("vocab_size") * width * (1 if facts["tie_word_embeddings"] else 2)
    )


def count_gemma4(facts: dict[str, Any]) -> int:
    """Layers with full attention have wider heads, whose values are their keys; each layer has a dense MLP
    next to its experts."""
    width, heads, experts = facts["hidden_size"], facts["num_attention_heads"], facts["num_experts"]
    total = facts["vocab_size"] * width + width
    for kind in facts["layer_types"]:
        is_full = kind == "full_attention"
        head = facts["global_head_dim" if is_full else "head_dim"]
        projected = (1 if is_full else 2) * facts[
            "num_global_key_value_heads" if is_full else "num_key_value_heads"
        ]
        total += 2 * width * heads * head + width * projected * head + 2 * head
        total += 3 * width * (facts["intermediate_size"] + experts * facts["moe_intermediate_size"])
        total += experts * width + width + experts + 7 * width  # router with its scales, norms
    return total


def test_unpackaged_model_returns_none() -> None:
    assert architecture("nobody/nothing") is None


def test_recipe_argument_is_a_path_or_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe("gpt2_smoke") == catalogue()["gpt2_smoke"]
    (tmp_path / "gpt2_smoke").mkdir()  # a run of that name
    assert find_recipe("gpt2_smoke") == catalogue()["gpt2_smoke"]
    (tmp_path / "mine.yaml").write_text("")
    assert find_recipe("mine.yaml") == Path("mine.yaml")


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("gpt2_smok", "did you mean `gpt2_smoke`?"),
        (
            "configs/gpt2_smoke.yaml",
            "the catalogue has a recipe of this name: `--config gpt2_smoke`, or `fsdp-tune recipes "
            "copy gpt2_smoke`",
        ),
        ("zzzz", "`fsdp-tune recipes list` shows the catalogue; to use a file, pass its path"),
    ],
)
def test_missing_source_is_reported_with_close_matches(
    source: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FsdpTuneError) as caught:
        find_recipe(source)
    assert caught.value.problems[0].hint == hint
