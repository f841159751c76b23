"""The text of an imported recipe, as the reader of recipes accepts it: a value that it refuses becomes a
question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fsdp_tune.core.errors import FsdpTuneError, Problem, Where
from fsdp_tune.migrate.ledger import Ledger, without_places
from fsdp_tune.migrate.placeholders import name_model_and_data
from fsdp_tune.migrate.read.foreign_file import ForeignFile
from fsdp_tune.migrate.recipe_text import recipe_text
from fsdp_tune.recipe.key_paths import KeyPath, dotted
from fsdp_tune.recipe.read.loader import parse_recipe
from fsdp_tune.recipe.read.overrides import Override
from fsdp_tune.recipe.rules.rates import UNREAD
from fsdp_tune.recipe.schema.recipe import Recipe

_MOST_CORRECTIONS = 50


def accepted_text(
    ledger: Ledger, found: ForeignFile, overrides: Sequence[str], read: Mapping[KeyPath, Override]
) -> tuple[str, Recipe]:
    """Return the text of a recipe, and what it loads as. A value that its reader refuses becomes a question,
    with the reader's message.

    Raises: FsdpTuneError for a refused value of `--set`.
    """
    for _ in range(_MOST_CORRECTIONS):
        text = recipe_text(ledger, found)
        try:
            path = found.path.with_suffix(".yaml")
            recipe = parse_recipe(text, path, overrides).recipe
            assert not overrides or recipe == parse_recipe(text, path).recipe, (
                "the text has the values of `--set`"
            )
            return text, recipe
        except FsdpTuneError as error:
            problems = [replace(each, message=without_places(each.message)) for each in error.problems]
            if said := [problem for each in problems if (problem := _at_override(read, each)) is not None]:
                raise FsdpTuneError(*said) from error
            withdrawn = [
                target for problem in problems if (target := _setting_of(ledger, problem)) is not None
            ]
            if not withdrawn:
                places = [
                    replace(each, where=Where(str(found.path), key=each.where.key)) for each in problems
                ]
                raise FsdpTuneError(*places) from error
            name_model_and_data(ledger)
    raise AssertionError("a recipe without settings loads")


def _at_override(overrides: Mapping[KeyPath, Override], problem: Problem) -> Problem | None:
    """Return a problem that is about an override, at its place; None for another one."""
    if str(problem.where.source).startswith("--set"):
        return problem
    key = problem.where.key or ""
    about = next(
        (each.where for target, each in overrides.items() if f"{dotted(target)}.".startswith(f"{key}.")), None
    )
    return None if about is None or not key else replace(problem, where=Where(about.source, key=key))


def _setting_of(ledger: Ledger, problem: Problem) -> KeyPath | None:
    """Take back the setting that a problem is about, and return it; None if the recipe has none there any
    more.

    A setting that nothing would read is left out; other ones become questions.
    """
    key = problem.where.key or ""
    names = {dotted(target): target for target in ledger.settings}
    target = names.get(key) or next(
        (path for name, path in names.items() if name.startswith((f"{key}.", f"{key}["))), None
    )
    target = target or next(
        (path for name, path in names.items() if key.startswith((f"{name}.", f"{name}["))), None
    )
    if target is None or not key or ledger.is_answered(target):
        return None
    if problem.code == UNREAD:
        ledger.discard(target, f"no effect: {problem.message}")
    else:
        ledger.withdraw(target, problem.message + (f"; {problem.hint}" if problem.hint else ""))
    return target
