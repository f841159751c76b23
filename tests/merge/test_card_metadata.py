"""What the hub reads of a model card: base, relation, data sets and languages, from the recipe and the local
cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants

from fsdp_tune.merge.card_metadata import hub_id
from fsdp_tune.merge.model_card import model_card
from fsdp_tune.recipe.schema.recipe import Recipe


def card_of(base: str | None, *paths: str, is_adapter: bool = False, **source: str) -> ModelCard:
    recipe = Recipe.model_validate(
        {
            "model": {"name_or_path": base},
            "data": {"train": [{"path": path, **source} for path in paths], "max_length": 8},
        }
    )
    return ModelCard(model_card("mine", recipe, None, [], [("Step", "3")], is_adapter=is_adapter))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/base-7b", "org/base-7b"),
        ("gpt2", "gpt2"),
        ("hf://datasets/openai/gsm8k@main/main/train-*.parquet", "openai/gsm8k"),
        ("hf://datasets/openai/gsm8k/train.parquet", "openai/gsm8k"),
        ("https://huggingface.co/datasets/openai/gsm8k/resolve/main/train.jsonl", "openai/gsm8k"),
        ("builtin:arithmetic", None),
        ("s3://bucket/org/rows.jsonl", None),
        ("https://example.org/rows.jsonl", None),
        ("/models/org/base", None),
        ("rows.jsonl", None),
        ("data/*.parquet", None),
        (".", None),
    ],
)
def test_hub_id_is_that_of_a_repository_or_none(name: str, expected: str | None) -> None:
    assert hub_id(name) == expected


def test_directory_of_this_machine_is_not_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_id("org/base") is None


@pytest.mark.parametrize(("is_adapter", "relation"), [(False, "finetune"), (True, "adapter")])
def test_card_has_the_relation_to_its_base(is_adapter: bool, relation: str) -> None:
    data = card_of("gpt2", "rows.jsonl", is_adapter=is_adapter).data
    assert (data.base_model, data.get("base_model_relation")) == ("gpt2", relation)


def test_names_that_are_of_no_repository_are_not_in_the_card() -> None:
    """`json` builds a data set from files, and what another tool wrote as a base may be a directory of its
    machine."""
    assert "datasets" not in card_of("org/base", "json", data_files="x.jsonl").data.to_dict()
    adapter = ModelCard(model_card("mine", None, None, [], [("Step", "3")], base="llama-7b", is_adapter=True))
    assert "base_model" not in adapter.data.to_dict()


def test_card_of_a_model_without_a_base_on_the_hub_has_no_relation() -> None:
    data = card_of("/models/base", "rows.jsonl").data.to_dict()
    assert data.keys() & {"base_model", "base_model_relation", "datasets", "language"} == set()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def put_card(cache: Path, name: str, text: str, branch: str = "main") -> None:
    """Cache the card of a data set as huggingface_hub does."""
    folder = cache / f"datasets--{name.replace('/', '--')}"
    commit = f"{branch:0<40}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / branch).write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "snapshots" / commit / "README.md").write_text(text)


def test_languages_are_those_of_the_cached_cards_of_all_data_sets(cache: Path) -> None:
    put_card(cache, "org/one", "---\nlanguage: en\n---\n")
    put_card(cache, "org/two", "---\nlanguage: [de, en]\n---\n")
    data = card_of("gpt2", "org/one", "org/two", "org/one").data.to_dict()
    assert (data["datasets"], data["language"]) == (["org/one", "org/two"], ["en", "de"])


@pytest.mark.parametrize("other", ["rows.jsonl", "org/not-cached", "org/silent", "org/broken"])
def test_language_is_unknown_if_it_is_of_one_data_set(cache: Path, other: str) -> None:
    put_card(cache, "org/one", "---\nlanguage: en\n---\n")
    put_card(cache, "org/silent", "# no metadata\n")
    put_card(cache, "org/broken", "---\n[1, 2]\n---\n")
    assert card_of("gpt2", "org/one", other).data.language is None


def test_language_is_that_of_the_revision_that_was_trained_on(cache: Path) -> None:
    put_card(cache, "org/one", "---\nlanguage: en\n---\n")
    put_card(cache, "org/one", "---\nlanguage: fr\n---\n", branch="v2")
    assert card_of("gpt2", "org/one", revision="v2").data.language == ["fr"]
