"""Read a YAML file that is not a recipe with the recipe's reader: limited size, depth and aliases, and no key
twice."""

from __future__ import annotations

from pathlib import Path

from fsdp_tune.core.errors import FsdpTuneError, Problem, usage_error
from fsdp_tune.recipe.read.recipe_text import read_text
from fsdp_tune.recipe.read.yaml_source import Node, compose_all, plain_value


def read_plain_yaml(path: Path) -> object:
    """Return the only document of a file as dicts, lists and scalars; None if it is empty. Raises:
    FsdpTuneError."""
    try:
        text = read_text(path, may_have_mark=True)
    except FsdpTuneError as error:
        raise FsdpTuneError(*map(about_the_file, error.problems)) from error
    tree = compose_plain(text, str(path))
    return None if tree is None else plain_value(tree)


def compose_plain(text: str, source: str) -> Node | None:
    """Return the tree of the only document in `text`; None if it is empty. Raises: FsdpTuneError."""
    try:
        found = compose_all(text, source)
    except FsdpTuneError as error:
        raise FsdpTuneError(*map(about_the_file, error.problems)) from error
    if len(found) > 1:
        raise usage_error(
            "two-documents",
            "the file holds two documents (`---`)",
            hint="split it into two files",
            where=found[1].where,
        )
    return found[0] if found else None


def about_the_file(problem: Problem) -> Problem:
    """Return a problem of the recipe's reader with words for any file, without a hint about recipes."""
    message = problem.message.replace("the recipe", "the file").replace("a recipe", "the file")
    hint = None if problem.hint is not None and "recipe" in problem.hint else problem.hint
    return Problem(problem.code, message, problem.where, hint, problem.ways_out)
