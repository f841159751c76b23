"""Read a YAML file that is not a recipe with the recipe's reader: limited size, depth and aliases, and no key twice."""

from __future__ import annotations

from pathlib import Path

from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.recipe.read.yaml_source import compose, plain_value, read_text


def read_plain_yaml(path: Path) -> object:
    """Return the only document of a file as dicts, lists and scalars; None if it is empty. Raises: FsdpTuneError."""
    try:
        tree, problems = compose(read_text(path), str(path))
    except FsdpTuneError as error:
        raise FsdpTuneError(*map(about_the_file, error.problems)) from error
    if problems:
        raise FsdpTuneError(*map(about_the_file, problems))
    return None if tree is None else plain_value(tree)


def about_the_file(problem: Problem) -> Problem:
    """Return a problem of the recipe's reader with words for any file."""
    return Problem(problem.code, problem.message.replace("the recipe", "the file"), problem.where, problem.hint)
