"""Results of `evaluate` in a model card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.merge.model_card import model_card
from fsdp_tune.merge.publish import CardResult, HubTarget, add_results, check_access
from fsdp_tune.recipe.schema.recipe import Recipe

FILE = "/home/ann/secret|rows.jsonl"
RESULT = CardResult(FILE, FILE, "train", "perplexity", 2.3456789, (2.1, 2.6), 1234)


@pytest.fixture
def card(tmp_path: Path) -> Path:
    path = tmp_path / "README.md"
    recipe = Recipe.model_validate(
        {
            "model": {"name_or_path": "org/base"},
            "data": {"train": [{"path": "builtin:arithmetic"}], "max_length": 8},
        }
    )
    path.write_text(model_card("mine", recipe, None, [], [("Step", "3")]))
    return path


def test_results_are_metadata_and_a_table(card: Path) -> None:
    before = card.read_text()
    add_results(
        card,
        [
            RESULT,
            replace(
                RESULT,
                name="held_out",
                data="org/sums",
                config="en",
                split="test",
                revision="v2",
                base=("org/base", 3.5),
            ),
        ],
    )
    text = card.read_text()
    data = ModelCard(text).data
    names = ("dataset_name", "dataset_type", "dataset_config", "dataset_split", "metric_type", "metric_value")
    assert [tuple(getattr(each, name) for name in names) for each in data.eval_results] == [
        ("secret|rows.jsonl", "secret|rows.jsonl", None, "train", "perplexity", 2.34568),
        ("held_out", "org/sums", "en", "test", "perplexity", 2.34568),
    ]
    assert [each.metric_args["interval"] for each in data.eval_results] == [[2.1, 2.6]] * 2
    assert {each.metric_args["interval_level"] for each in data.eval_results} == {0.95}
    assert [each.dataset_revision for each in data.eval_results] == [None, "v2"]
    assert (data.model_name, data.base_model, data.library_name) == ("mine", "org/base", "transformers")
    assert "| set | data | split | metric | value | 95 % interval | rows | base |" in text
    assert r"|  | secret\|rows.jsonl | train | perplexity | 2.34568 | 2.1 to 2.6 | 1234 |  |" in text
    assert (
        "| held_out | org/sums | test | perplexity | 2.34568 | 2.1 to 2.6 | 1234 | 3.5 (org/base) |" in text
    )
    assert text.index("## Evaluation") < text.index("## Recipe")
    assert text.endswith(before[before.index("## Recipe") :])
    assert "/home/ann" not in text


def test_name_that_is_no_repository_is_refused_before_the_training_without_a_login() -> None:
    with pytest.raises(FsdpTuneError) as caught:
        check_access(HubTarget("me/my model"))
    (problem,) = caught.value.problems
    assert (problem.code, problem.where.key) == ("push-name", "training.hub_model_id")
    assert problem.hint == "write `OWNER/NAME`"


def test_columns_without_a_value_are_left_out(card: Path) -> None:
    add_results(card, [RESULT])
    assert (
        "\n| data | split | metric | value | 95 % interval | rows |\n|---|---|---|---|---|---|\n"
        in card.read_text()
    )


def test_sets_of_the_same_data_keep_their_names(card: Path) -> None:
    add_results(
        card, [replace(RESULT, name=name, value=value) for name, value in (("short", 1.5), ("long", 2.5))]
    )
    found = ModelCard(card.read_text()).data.eval_results
    assert [(each.dataset_name, each.metric_value) for each in found] == [("short", 1.5), ("long", 2.5)]


def test_configurations_and_revisions_of_one_data_set_are_other_rows(card: Path) -> None:
    """Each is evaluated by a command of its own."""
    for config, revision, value in (
        ("main", None, 1.5),
        ("socratic", None, 2.5),
        ("main", "v2", 3.5),
        ("main", None, 1.25),
    ):
        add_results(
            card,
            [
                replace(
                    RESULT, name="org/sums", data="org/sums", config=config, revision=revision, value=value
                )
            ],
        )
    found = ModelCard(card.read_text()).data.eval_results
    assert sorted(
        (each.dataset_config, each.dataset_revision or "", each.metric_value) for each in found
    ) == [
        ("main", "", 1.25),
        ("main", "v2", 3.5),
        ("socratic", "", 2.5),
    ]


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
