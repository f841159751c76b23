"""Recipes drawn from the schema follow the plain loop, and the fuzzer finds planted bugs."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.recipe.schema.keys import effect_of
from tests.fuzz.families import FAMILIES
from tests.fuzz.plants import PLANTS
from tests.ranks import shared_ranks

# `tests.fuzz.space` and what trains import torch, which collection does without.


def test_numeric_keys_are_drawn_or_excluded_with_a_reason() -> None:
    from tests.fuzz.space import NOT_DRAWN, drawn_keys, keys, reason_not_drawn, values_of

    for name in keys():
        if reason_not_drawn(name) is None:
            assert len(values_of(name)) > 0, name
    assert len(drawn_keys()) >= 30
    assert [name for name in NOT_DRAWN if name not in set(keys())] == [], "excluded keys still exist"


def test_draws_are_seeded_and_cover_every_family_and_switch() -> None:
    from tests.fuzz.space import draw, drawn_keys

    assert str(draw(7)) == str(draw(7)) != str(draw(8))
    drawn = [draw(seed) for seed in range(300)]
    assert {one.family for one in drawn} == FAMILIES.keys()
    assert {name for one in drawn for name in one.switches} >= set(drawn_keys())
    assert 0.4 < sum(one.resumed is not None for one in drawn) / len(drawn) < 0.6


def test_resumed_trial_changes_only_free_keys() -> None:
    from tests.fuzz.space import draw

    for seed in range(100):
        first = draw(seed)
        if first.resumed is None:
            continue
        changed = {
            name
            for name in first.switches.keys() | first.resumed.switches.keys()
            if first.switches.get(name) != first.resumed.switches.get(name)
        }
        assert all(effect_of(name).on_resume == "free" for name in changed - {"fsdp.modules_to_wrap"}), (
            seed,
            changed,
        )


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("seed", [5, 9, 13])
def test_drawn_recipe_follows_the_plain_loop(tmp_path: Path, seed: int) -> None:
    from tests.fuzz.__main__ import trial
    from tests.fuzz.space import draw

    assert trial(draw(seed), tmp_path / "trial", shared_ranks()).failures == []


@pytest.mark.slow
@pytest.mark.ranks
def test_three_hundred_drawn_recipes_follow_the_plain_loop(tmp_path: Path) -> None:
    from tests.fuzz.__main__ import fuzz

    assert fuzz(range(1000, 1300), tmp_path, shared_ranks()) == 0


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("plant", PLANTS)
def test_planted_bug_is_detected_within_200_trials(tmp_path: Path, plant: str) -> None:
    from tests.fuzz.__main__ import fuzz

    assert fuzz(range(200), tmp_path, shared_ranks(), plant) == 0
