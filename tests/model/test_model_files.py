from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.data.tokenise.exported_tokenizer import TokenizerOrigin
from fsdp_tune.model.model_files import ModelFacts, check_vocabulary, save_model_files, with_special_tokens
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.sections import Lora, Model, Tokens
from tests.model.recipes import model_facts

NAMES = ("bos_token_id", "eos_token_id", "pad_token_id")


def facts_of(config: dict[str, Any], **changes: Any) -> ModelFacts:
    return model_facts(config=config, exported_config=config, **changes)


class FakeTokenizer:
    special_tokens_map: ClassVar[dict[str, Any]] = {}
    chat_template = None
    bos_token_id = None
    eos_token_id = 7
    pad_token_id = 8

    def __len__(self) -> int:
        return 9

    def save_pretrained(self, directory: str) -> Any:
        (Path(directory) / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("config", "eos"),
    [
        ({}, 7),
        ({"eos_token_id": 50256}, 7),
        ({"eos_token_id": [1, 7]}, [1, 7]),
        ({"eos_token_id": [1, 2]}, 7),
    ],
)
def test_generation_config_stops_at_trained_eos(config: dict[str, Any], eos: Any) -> None:
    changed = with_special_tokens(config, FakeTokenizer(), NAMES)
    assert changed["eos_token_id"] == eos
    assert changed["pad_token_id"] == 8
    assert "bos_token_id" not in changed


def test_id_beyond_the_vocabulary_is_dropped_where_the_tokenizer_has_none() -> None:
    assert with_special_tokens({"bos_token_id": 50256}, FakeTokenizer(), NAMES)["bos_token_id"] is None
    assert with_special_tokens({"bos_token_id": 5}, FakeTokenizer(), NAMES)["bos_token_id"] == 5


def test_config_generation_config_and_tokenizer_are_written(tmp_path: Path) -> None:
    save_model_files(tmp_path, model_facts(), FakeTokenizer(), TokenizerOrigin())
    config = json.loads((tmp_path / "config.json").read_text())
    assert "vocab_size" not in config
    assert (config["architectures"], config["use_cache"], config["eos_token_id"]) == (
        ["GPT2LMHeadModel"],
        True,
        7,
    )
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {
        "temperature": 0.5,
        "eos_token_id": 7,
        "pad_token_id": 8,
    }
    assert (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize(("rows", "kept"), [(9, 3), (2, 3)])
def test_padding_id_of_the_base_stays_in_the_config(tmp_path: Path, rows: int, kept: int) -> None:
    save_model_files(
        tmp_path, facts_of({"pad_token_id": 3}, embedding_rows=rows), FakeTokenizer(), TokenizerOrigin()
    )
    assert json.loads((tmp_path / "config.json").read_text())["pad_token_id"] == kept
    assert json.loads((tmp_path / "generation_config.json").read_text())["pad_token_id"] == 8


def test_padding_id_beyond_the_embedding_is_dropped(tmp_path: Path) -> None:
    save_model_files(tmp_path, facts_of({"pad_token_id": 50256}), FakeTokenizer(), TokenizerOrigin())
    assert json.loads((tmp_path / "config.json").read_text())["pad_token_id"] is None


@pytest.mark.parametrize("family", ["xglm", "youtu"])
def test_model_that_computes_with_its_padding_id_loads_with_the_logits_it_was_trained_with(
    tmp_path: Path, family: str
) -> None:
    """XGLM zeroes the position of its padding id, Youtu the embedding of its own, each time it is loaded."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"xglm": {"d_model": 16, "num_layers": 1, "attention_heads": 2, "ffn_dim": 16}}
    small = sizes.get(
        family, {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    )
    config = AutoConfig.for_model(
        family,
        vocab_size=9,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        max_position_embeddings=32,
        **small,
    )
    torch.manual_seed(0)
    trained = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        trained.get_input_embeddings().weight.normal_()[config.pad_token_id] = 0  # that row gets no gradient
    trained.save_pretrained(tmp_path)
    save_model_files(
        tmp_path,
        facts_of(config.to_dict(), architecture=type(trained).__name__),
        FakeTokenizer(),
        TokenizerOrigin(),
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.tensor([[4, 8, 8, 1, 3, 0, 5, 6, 7, 2]])
    assert torch.equal(loaded(input_ids=ids).logits, trained(input_ids=ids).logits)


def test_grown_embedding_is_in_the_config(tmp_path: Path) -> None:
    save_model_files(tmp_path, model_facts(embedding_rows=5), FakeTokenizer(), TokenizerOrigin())
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 9


def test_grown_embedding_of_a_text_in_a_model_of_several_modalities_is_in_the_config_of_the_text(
    tmp_path: Path,
) -> None:
    config = {"text_config": {"vocab_size": 5, "hidden_size": 3}, "vision_config": {"hidden_size": 2}}
    save_model_files(tmp_path, facts_of(config, embedding_rows=5), FakeTokenizer(), TokenizerOrigin())
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["text_config"], "vocab_size" in written) == ({"vocab_size": 9, "hidden_size": 3}, False)


def test_vocabulary_beyond_the_embedding_is_refused_with_both_sizes() -> None:
    with pytest.raises(FsdpTuneError, match=r"1,001 tokens.*1,000 rows") as caught:
        check_vocabulary(model_facts(embedding_rows=1000), Recipe(), 1001)
    assert caught.value.exit_code == 2
    check_vocabulary(model_facts(embedding_rows=1000), Recipe(), 1000)


@pytest.mark.parametrize("says", [Model(resize_embeddings=True), Model(tokens=Tokens(add=["<call>"]))])
def test_growing_embedding_accepts_any_vocabulary(says: Model) -> None:
    check_vocabulary(model_facts(embedding_rows=1000), Recipe(model=says), 1001)


FROZEN = {"embedding_rows": 1000, "is_embedding_trained": False, "trains_new_tokens": False}
ADDS_TOKENS = Recipe(model=Model(tokens=Tokens(add=["<call>"])), lora=Lora())


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        (ADDS_TOKENS, "model.tokens.add"),
        (Recipe(model=Model(resize_embeddings=True), lora=Lora()), "model.resize_embeddings"),
    ],
)
def test_new_rows_of_a_frozen_embedding_are_refused_with_a_way_out(recipe: Recipe, key: str) -> None:
    with pytest.raises(FsdpTuneError) as caught:
        check_vocabulary(model_facts(**FROZEN), recipe, 1001)
    (problem,) = caught.value.problems
    assert (problem.code, problem.where.key, caught.value.exit_code) == ("lora-new-tokens", key, 2)
    assert "modules_to_save" in str(problem.hint)
    assert "tie_word_embeddings: false" in str(problem.hint)
    with pytest.raises(FsdpTuneError) as caught:
        check_vocabulary(model_facts(**FROZEN, tied_embeddings=False), recipe, 1001)
    assert "tie_word_embeddings" not in str(caught.value.problems[0].hint)
    assert (
        check_vocabulary(
            model_facts(**FROZEN | {"is_embedding_trained": True, "trains_new_tokens": True}), recipe, 1001
        )
        == []
    )
    with pytest.raises(FsdpTuneError):  # an adapter on the embedding leaves its new rows as they were drawn
        check_vocabulary(model_facts(**FROZEN | {"is_embedding_trained": True}), recipe, 1001)


def test_added_tokens_in_spare_rows_of_a_frozen_embedding_are_noticed() -> None:
    assert [notice.code for notice in check_vocabulary(model_facts(**FROZEN), ADDS_TOKENS, 1000)] == [
        "lora-new-tokens"
    ]
    assert check_vocabulary(model_facts(**FROZEN), Recipe(lora=Lora()), 1000) == []
