"""Results of `evaluate` in a model card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from fsdp_tune.merge.output_directory import model_card
from fsdp_tune.merge.publish import CardResult, add_results
from fsdp_tune.recipe.schema.recipe import Recipe

RESULT = CardResult("/home/ann/secret|rows.jsonl", "train", "perplexity", 2.3456789, (2.1, 2.6), 1234)


@pytest.fixture
def card(tmp_path: Path) -> Path:
    path = tmp_path / "README.md"
    recipe = Recipe.model_validate(
        {"model": {"name_or_path": "org/base"}, "data": {"train": [{"path": "builtin:arithmetic"}], "max_length": 8}}
    )
    path.write_text(model_card("mine", recipe, None, [], [("Step", "3")]))
    return path


def test_results_are_metadata_and_a_table(card: Path) -> None:
    before = card.read_text()
    add_results(card, [RESULT, replace(RESULT, data="held out", split=None, base=("org/base", 3.5))])
    text = card.read_text()
    data = ModelCard(text).data
    assert [(each.dataset_name, each.metric_type, each.metric_value) for each in data.eval_results] == [
        ("secret|rows.jsonl", "perplexity", 2.34568),
        ("held out", "perplexity", 2.34568),
    ]
    assert (data.model_name, data.base_model, data.library_name) == ("mine", "org/base", "transformers")
    assert r"| secret\|rows.jsonl | train | perplexity | 2.34568 | 2.1 to 2.6 | 1234 |  |" in text
    assert "| held out |  | perplexity | 2.34568 | 2.1 to 2.6 | 1234 | 3.5 (org/base) |" in text
    assert text.index("## Evaluation") < text.index("## Recipe")
    assert text.endswith(before[before.index("## Recipe") :])
    assert "/home/ann" not in text


def test_later_result_replaces_the_same_metric_on_the_same_rows(card: Path) -> None:
    add_results(card, [RESULT, replace(RESULT, metric="exact_match")])
    add_results(card, [replace(RESULT, value=1.5)])
    add_results(card, [replace(RESULT, value=1.25)])
    text = card.read_text()
    assert text.count("## Evaluation") == text.count("| perplexity |") == text.count("| exact_match |") == 1
    assert "| perplexity | 1.25 |" in text
    once = text
    add_results(card, [replace(RESULT, value=1.25)])
    assert card.read_text() == once


def test_text_of_the_owner_stays(card: Path) -> None:
    own = card.read_text().partition("## Recipe")[0] + "## Use\n\nMine.\n"
    card.write_text(own)
    add_results(card, [RESULT])
    card.write_text(card.read_text() + "## More\n\nText.\n")
    add_results(card, [RESULT])
    assert "## Use\n\nMine." in card.read_text()
    assert "## More\n\nText." in card.read_text()


@pytest.mark.parametrize("front", ["[1, 2]", "a: b: c"])
def test_card_whose_metadata_is_not_a_mapping_is_not_changed(card: Path, front: str) -> None:
    broken = f"---\n{front}\n---\n\n# mine\n"
    card.write_text(broken)
    with pytest.raises(Exception, match=r"mapping|dict"):
        add_results(card, [RESULT])
    assert card.read_text() == broken
