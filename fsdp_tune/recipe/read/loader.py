"""Read a recipe file with its overrides into a checked recipe; the only reader of recipes. Every error is
collected before raising."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, cast

from pydantic import ValidationError

from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem, Where, usage_error
from fsdp_tune.core.units import printable
from fsdp_tune.recipe.key_paths import KeyPath, dotted
from fsdp_tune.recipe.read.catalogue import find_recipe
from fsdp_tune.recipe.read.explain import check_free_mappings, check_training, explain
from fsdp_tune.recipe.read.legacy import settle, take_aliases, translate
from fsdp_tune.recipe.read.other_tools import no_importer, other_tool
from fsdp_tune.recipe.read.overrides import OptionOverride, apply_overrides
from fsdp_tune.recipe.read.recipe_text import read_text
from fsdp_tune.recipe.read.tool_detection import SCRIPTS, foreign_tool
from fsdp_tune.recipe.read.wrong_values import broken, drop, touches, without
from fsdp_tune.recipe.read.yaml_source import ListNode, MappingNode, Node, ScalarNode, compose, plain_value
from fsdp_tune.recipe.rules.contradictions import REMARKS, RULES
from fsdp_tune.recipe.rules.without_effect import inactive_keys
from fsdp_tune.recipe.schema.keys import Finding, as_notice, as_problem, field_at, sections_in
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.unsupported_values import refused
from fsdp_tune.recipe.schema.value_kinds import check_run_name
from fsdp_tune.recipe.world import WORLD_RULES, World

IMPORTED_FROM, BY_IMPORT = "# Imported from ", " by `fsdp-tune import`."
"""Begin and end of the first line of a recipe that `import` has written."""


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    recipe: Recipe
    """As written, with defaults; `recipe.resolve` decides `auto` and null."""
    notices: tuple[Notice, ...]
    path: Path
    text: str
    """The unmodified content of the file."""
    overrides: tuple[str, ...]
    positions: Mapping[str, Where]
    """Position of each written key (`fsdp.version`); keys that have their default are absent."""

    @property
    def is_imported(self) -> bool:
        """Whether `import` wrote the file: its model, rows and packages are on the machine that the other
        tool's file was for."""
        first = self.text.partition("\n")[0]
        return first.startswith(IMPORTED_FROM) and first.endswith(BY_IMPORT)


class WrongRecipeError(FsdpTuneError):
    """The mistakes of a recipe that was read. `recipe` has the values without mistakes; None if too few are
    left.

    `suspects`: the keys whose values were dropped or contradict each other, so that checks that depend on
    them would mislead.
    """

    def __init__(
        self,
        recipe: Recipe | None,
        positions: Mapping[str, Where],
        *problems: Problem,
        suspects: Collection[str] = (),
    ) -> None:
        self.recipe, self.positions, self.suspects = recipe, positions, frozenset(suspects)
        super().__init__(*problems)


def load_recipe(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    name: str | None = None,
    unneeded: frozenset[str] = frozenset(),
) -> LoadedRecipe:
    """Read and check a recipe. Keys and values are checked here; devices, model and data by the functions
    that take the recipe.

    `source` is a path or a catalogue name. `overrides` are `KEY=VALUE`, as for `--set`; `name` overrides the
    recipe's. `unneeded`: codes of problems that do not matter to the caller (`rules.INPUTS` for a plan).
    Raises: FsdpTuneError with all problems, by line.
    """
    path = find_recipe(str(source))
    if path.suffix in SCRIPTS:
        raise _not_a_recipe("a Python script", path)
    if path.suffix == ".toml":
        raise _not_a_recipe("a TOML file", path)
    loaded = parse_recipe(read_text(path), path, overrides, name=name, unneeded=unneeded)
    return replace(
        loaded, notices=tuple(sorted([*loaded.notices, *_open_decisions(loaded.text, path)], key=_order))
    )


DECIDE = "# DECIDE: "
"""Begins the comments in which `import` leaves a question."""


def _open_decisions(text: str, path: Path) -> Iterator[Notice]:
    """Yield a notice for each question of `import` that is still in the file: the recipe trains with a
    default in its place."""
    for number, line in enumerate(text.splitlines(), 1):
        before, mark, words = line.partition(DECIDE)
        if mark and not before.strip():
            message = (
                "a decision is left open: "
                f"{textwrap.shorten(printable(words), _SHOWN_DECISION, placeholder=' …')}"
            )
            yield Notice(
                "decision-open",
                message,
                Where(str(path), number, len(before) + 1),
                "settle it, and remove the comment",
            )


_SHOWN_DECISION = 160
"""Characters."""


def parse_recipe(
    text: str,
    path: Path,
    overrides: Sequence[str] = (),
    *,
    name: str | None = None,
    options: Sequence[OptionOverride] = (),
    unneeded: frozenset[str] = frozenset(),
) -> LoadedRecipe:
    """Check the text of a recipe as `load_recipe` does; errors cite `path`, and its stem is the default
    name."""
    tree, problems = _compose_mapping(text, str(path))
    _refuse_other_tools(tree, path)
    notices, wrong = translate(tree)
    problems.extend(wrong)
    for more_notices, more_problems in (apply_overrides(tree, overrides, options), settle(tree)):
        notices.extend(more_notices)
        problems.extend(more_problems)
    take_aliases(tree)
    _drop_empty_sections(tree, ())
    recipe, dropped, wrong = _validate(tree)
    problems.extend(wrong)
    positions, readable = _positions(tree), recipe
    suspects = {*dropped, *(problem.where.key for problem in problems if problem.where.key is not None)}
    if recipe is not None:
        recipe, wrong = _named(recipe, path, name)
        problems.extend(wrong)
        contradictions = [finding for finding in _findings(recipe, unneeded) if not touches(finding, dropped)]
        contradictory = {key for finding in contradictions for key in finding.keys}
        suspects |= contradictory
        # The number of ranks decides nothing about model and rows: keys that only contradict it are no
        # suspects.
        of_world = [finding for finding in _world_findings(recipe) if not touches(finding, dropped)]
        problems.extend(
            _in_the_file(as_problem(finding, positions), tree) for finding in [*contradictions, *of_world]
        )
        readable = without(recipe, contradictory) if problems else recipe
        found = [finding for finding in inactive_keys(recipe) if not touches(finding, dropped)]
        notices.extend(as_notice(finding, positions, strict=True) for finding in found)
        notices.extend(
            as_notice(finding, positions, strict=False) for rule in REMARKS for finding in rule(recipe)
        )
    if problems or recipe is None:
        raise WrongRecipeError(readable, positions, *sorted(problems, key=_order), suspects=suspects)
    return LoadedRecipe(recipe, tuple(sorted(notices, key=_order)), path, text, tuple(overrides), positions)


def _compose_mapping(text: str, source: str) -> tuple[MappingNode, list[Problem]]:
    root, problems = compose(text, source)
    if root is None or (isinstance(root, ScalarNode) and root.value is None):
        problem = Problem(
            "empty-recipe",
            "the recipe is empty",
            Where(source, 1, 1),
            "`fsdp-tune recipes copy gpt2_smoke` copies a recipe to start from",
        )
        raise FsdpTuneError(*problems, problem)
    if not isinstance(root, MappingNode):
        kind = "a list" if isinstance(root, ListNode) else "one value"
        hint = "write a space after the colon of `key: value`" if isinstance(root, ScalarNode) else None
        message = (
            f"the recipe is {kind}; it must be keys with values, such as `model: {{name_or_path: gpt2}}`"
        )
        raise FsdpTuneError(*problems, Problem("not-a-mapping", message, root.where, hint))
    return root, problems


def _refuse_other_tools(tree: MappingNode, path: Path) -> None:
    """Raises: usage error for the configuration of another trainer, instead of one for each of its keys."""
    values = cast("dict[str, object]", plain_value(tree))
    tool = foreign_tool(values)
    if tool is not None:
        raise _not_a_recipe(f"a configuration of {tool}", path)
    names_model = isinstance(model := values.get("model"), dict) and "name_or_path" in model
    if "recipe_version" not in values and not names_model and (tool := other_tool(values)) is not None:
        message, hint = no_importer(tool, values)
        raise usage_error("foreign-configuration", message, hint=hint, where=Where(str(path)))


def _not_a_recipe(what: str, path: Path) -> FsdpTuneError:
    target = "imported.yaml" if path.name == "recipe.yaml" else "recipe.yaml"
    hint = f"fsdp-tune import {shlex.quote(printable(str(path)))} --output {target}"
    return usage_error(
        "foreign-configuration", f"this is {what}, and not a recipe", hint=hint, where=Where(str(path))
    )


def _drop_empty_sections(tree: MappingNode, path: tuple[str, ...]) -> None:
    """Remove empty sections: `fsdp:` with all its keys commented out is null in YAML and means the
    defaults."""
    for key in list(tree.entries):
        node, field = tree.entries[key].node, field_at((*path, key))
        is_section = field is not None and field.default is not None and bool(sections_in(field.annotation))
        if is_section and isinstance(node, MappingNode):
            _drop_empty_sections(node, (*path, key))
        elif (
            is_section
            and isinstance(node, ScalarNode)
            and node.value is None
            and node.plain
            and not node.broken
        ):
            del tree.entries[key]


class _Validated(NamedTuple):
    """A recipe without its wrong values. `recipe`: None if the others are wrong together."""

    recipe: Recipe | None
    dropped: set[str]
    """Keys whose values were wrong."""
    problems: list[Problem]


def _validate(tree: MappingNode) -> _Validated:
    """Validate the values of a tree, and drop those that are wrong.

    The remaining values are still validated, so that one error reports contradictions elsewhere too. Without
    a wrong value, pydantic may find others: two more rounds find those that users have together.
    """
    data: object = plain_value(tree)
    problems: dict[KeyPath, Problem] = check_training(tree) | check_free_mappings(tree)
    dropped: set[str] = set()
    for path in (*broken(tree, ()), *problems):
        drop(data, path, dropped)
    for _ in range(3):
        try:
            return _Validated(Recipe.model_validate(data), dropped, list(problems.values()))
        except ValidationError as error:
            for path, problem in explain(error, tree).items():
                problems.setdefault(path, problem)
                drop(data, path[:-1] if problem.code == "missing-key" else path, dropped)
    return _Validated(None, dropped, list(problems.values()))


def _named(recipe: Recipe, path: Path, name: str | None) -> tuple[Recipe, list[Problem]]:
    chosen = name if name is not None else recipe.name if recipe.name is not None else path.stem
    try:
        check_run_name(chosen)
    except ValueError as error:
        where = Where("--name") if name is not None else Where(str(path), key="name")
        return recipe, [
            Problem("wrong-value", f"the name of the run: {error}", where, "give one with `--name`")
        ]
    return recipe.model_copy(update={"name": chosen}), []


def _findings(recipe: Recipe, unneeded: frozenset[str]) -> list[Finding]:
    found = [finding for rule in RULES for finding in rule(recipe) if finding.code not in unneeded]
    for row, value in refused(recipe):
        text = (
            "" if isinstance(value, dict) else f": {str(value).lower() if isinstance(value, bool) else value}"
        )
        message = f"`{row.key}{text}` is not supported yet: this release has no {row.what}"
        found.append(Finding("not-yet", (row.key,), message, row.meanwhile))
    return found


def _world_findings(recipe: Recipe) -> list[Finding]:
    if not isinstance(recipe.launch.num_processes, int):
        return []
    world = World(recipe.launch.num_processes, recipe.launch.num_machines)
    return [finding for rule in WORLD_RULES for finding in rule(recipe, world)]


def _in_the_file(problem: Problem, tree: MappingNode) -> Problem:
    """Give a problem without a position, such as a missing key, the position of the beginning of the
    recipe."""
    return (
        problem
        if problem.where.source is not None
        else problem.at(replace(tree.where, key=problem.where.key))
    )


def _positions(tree: MappingNode) -> dict[str, Where]:
    positions: dict[str, Where] = {}

    def walk(node: Node, path: KeyPath) -> None:
        if isinstance(node, MappingNode):
            for key, entry in node.entries.items():
                positions[dotted((*path, key))] = Where(
                    entry.where.source, entry.where.line, entry.where.column, dotted((*path, key))
                )
                walk(entry.node, (*path, key))
        elif isinstance(node, ListNode):
            for index, item in enumerate(node.items):
                positions[dotted((*path, index))] = Where(
                    item.where.source, item.where.line, item.where.column, dotted((*path, index))
                )
                walk(item, (*path, index))

    walk(tree, ())
    return positions


def _order(found: Problem | Notice) -> tuple[int, int, int, str]:
    """Sort by line of the file, then by number of `--set`, then problems without a position."""
    where = found.where
    if where.line is not None:
        return 0, where.line, where.column or 0, found.code
    number = re.fullmatch(r"--set #(\d+)", where.source or "")
    return (1, int(number[1]), 0, found.code) if number else (2, 0, 0, found.code)
