"""Compare two recipes, runs or configurations of other tools: the first difference from tokens to the update,
and its cause.

Torch runs in child processes, one for each interpreter (`comparison/observe.py`).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fsdp_tune.comparison.causes import (
    DifferentKey,
    by_likelihood,
    causing,
    different_key,
    different_paths,
    is_among,
    option_paths,
    setting_of,
    value_at,
    with_passed_defaults,
    with_values,
)
from fsdp_tune.comparison.environments import find_interpreter, needed_requirements, python_with
from fsdp_tune.comparison.openai_server import is_url
from fsdp_tune.comparison.side_processes import ObservingChild, ToolChild
from fsdp_tune.comparison.stages import (
    DATA_STAGES,
    ComparedStage,
    Observation,
    compare_observations,
    open_words,
    tolerances,
    without_weights,
)
from fsdp_tune.comparison.tool_options import TOOLS
from fsdp_tune.core.errors import FsdpTuneError, usage_error
from fsdp_tune.core.ownership import temporary_directory
from fsdp_tune.core.user_cache import default_cache_directory
from fsdp_tune.jobs.compare_answer import Cause, CompareAnswer, LaterDifference, first_of
from fsdp_tune.jobs.compared_runs import compare_runs
from fsdp_tune.jobs.compared_sides import TEMPLATES, ComparedSide, read_side, resolved_side
from fsdp_tune.jobs.described_causes import cause_in_tool, cause_of_keys, cause_of_versions
from fsdp_tune.jobs.found_differences import Findings
from fsdp_tune.jobs.observer import Observer, session
from fsdp_tune.jobs.options import CompareOptions
from fsdp_tune.jobs.recipes import refuse_code, resolve_recipe
from fsdp_tune.jobs.served import compare_with_server
from fsdp_tune.migrate.importing import ImportedRecipe, import_file
from fsdp_tune.pages.run_record import differing_values
from fsdp_tune.recipe.key_paths import KeyPath, dotted
from fsdp_tune.recipe.outcome import Fate
from fsdp_tune.recipe.read.loader import parse_recipe
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import chooses_by_evaluation

Versions = dict[str, list[str | None]]
"""Library → its version in A and in B, of those that differ."""


def compare(
    a: str | Path | ImportedRecipe,
    b: str | Path,
    options: CompareOptions = CompareOptions(),
    *,
    overrides: Sequence[str] = (),
    observer: Observer = Observer(),
) -> CompareAnswer:
    """Compare two recipes stage by stage, from the tokens of their first rows to the update of a step, on the
    CPU in one process.

    Each side is a recipe (a path or a catalogue name), a run directory, or a configuration of another tool,
    which is imported first unless it is given as an `ImportedRecipe`. B may be the address of a server with
    OpenAI's API; A is then the run, model or adapter that it should serve. `overrides` are `KEY=VALUE` for B.
    Two runs are compared by their files, and their recipes stage by stage where these differ.
    Raises: FsdpTuneError for a side that cannot be read or resolved, and for an interpreter that cannot run
    the comparison.
    """
    if options.tolerance is not None and not (math.isfinite(options.tolerance) and options.tolerance >= 0):
        raise usage_error(
            "usage",
            f"`--tolerance {options.tolerance}` is not a number of 0 or more",
            hint="--tolerance 1e-6",
        )
    if options.requirements and options.python is not None:
        raise usage_error(
            "compare-with", "`--with` and `--python` both name the environment of B", hint="give one of them"
        )
    with session():
        if is_url(str(b)) and not isinstance(a, ImportedRecipe):
            _refuse_options_of_recipes(str(b), overrides, options)
            return compare_with_server(str(a), str(b), options, observer)
        one = read_side(a if isinstance(a, ImportedRecipe) else str(a), (), options, observer)
        other = read_side(str(b), overrides, options, observer)
        options = _with_interpreter(one, other, options, observer)
        paths = list(
            different_paths(with_passed_defaults(one.resolved), with_passed_defaults(other.resolved))
        )
        chooses = any(chooses_by_evaluation(side.recipe.training) for side in (one, other))
        values = [(path, value_at(one.resolved, path), value_at(other.resolved, path)) for path in paths]
        keys = {path: different_key(path, a, b, chooses_by_evaluation=chooses) for path, a, b in values}
        result = Findings(one, other, keys, options)
        if one.run is not None and other.run is not None:
            result.runs = compare_runs(
                one.run, other.run, (one.recipe, other.recipe), list(keys.values()), options.tolerance
            )
        if not result.is_of_runs or options.python is not None or result.unsettled():
            with ExitStack() as stack:
                folder = stack.enter_context(temporary_directory("compare-"))
                _Walk(result, folder, stack, observer).run()
        return result.answer()


def _refuse_options_of_recipes(url: str, overrides: Sequence[str], options: CompareOptions) -> None:
    """Raises: usage error for options that change B, if B is a server."""
    given = {
        "--set": bool(overrides),
        "--python": options.python is not None,
        "--with": bool(options.requirements),
    }
    if wrong := [f"`{option}`" for option, is_given in given.items() if is_given]:
        message = f"{' and '.join(wrong)} cannot change `{url}`, which is a server"
        raise usage_error("compare-override", message, hint=f"leave out {' and '.join(wrong)}")


def _with_interpreter(
    a: ComparedSide, b: ComparedSide, options: CompareOptions, observer: Observer
) -> CompareOptions:
    """Make the environment that is needed, and return the options with its interpreter."""
    requirements = needed_requirements(
        [side.kind for side in (a, b) if side.options is not None], options.requirements
    )
    if options.python is not None or not requirements:
        return options
    observer.phase(f"environment with {', '.join(requirements)}")
    return replace(options, python=python_with(requirements, default_cache_directory()))


def _without(side: ComparedSide, options: Sequence[KeyPath]) -> ComparedSide:
    """Return a side that its tool computes without some of its options."""
    return replace(side, options=with_values(side.options or {}, {}, options))


class _Walk:
    """The stages of two sides, and the search for the cause of the first difference.

    For the cause, the *changed* side is computed with values of the *kept* one. It is B, unless a tool
    computes B and not A.
    """

    def __init__(self, result: Findings, folder: Path, stack: ExitStack, observer: Observer) -> None:
        self._result, self._observer = result, observer
        self._options = options = result.options
        self._folder, self._stack = folder, stack
        for side in (result.a, result.b):
            refuse_code(side.recipe, options.allowed, starts_ranks=False)
        observer.phase("computing A and B")
        self._paths: list[KeyPath] = []
        self._ignored: dict[KeyPath, str] = {}
        self._is_turned = result.b.options is not None and result.a.options is None
        self._kept, self._changed = (result.b, result.a) if self._is_turned else (result.a, result.b)
        tools = [side for side in (result.a, result.b) if side.options is not None]
        settings: dict[str, Any] = {
            "rows": options.rows,
            "model": options.model,
            "is_beside_tool": bool(tools),
        }
        python = None if tools else options.python  # with a tool, its interpreter
        settings["shows_defaults"] = python is not None
        self._here = stack.enter_context(ObservingChild(sys.executable, folder, **settings))
        self._there = self._here
        if python is not None:
            self._there = stack.enter_context(ObservingChild(find_interpreter(python), folder, **settings))
        self._tools = {side.name: self._tool_of(side) for side in tools}
        self._tolerance, self._of_steps = self._tolerance_of()

    def _tool_of(self, side: ComparedSide) -> ToolChild:
        """Return the process in which a tool computes a side, on the rows and the model of the recipe that
        `import` makes."""
        recipe, python = side.recipe, self._options.python
        assert python is not None, "an environment was made"
        file = self._folder / f"inputs-{len(list(self._folder.glob('inputs-*')))}.json"
        self._here.computed(recipe, "update", file)
        inputs = {
            **json.loads(file.read_text(encoding="utf-8")),
            "tokenizer": recipe.model.tokenizer or recipe.model.name_or_path,
            "revision": recipe.model.revision,
            "ranks": recipe.data_size,
            "trust_remote_code": recipe.model.trust_remote_code,
        }
        return self._stack.enter_context(closing(ToolChild(find_interpreter(python), side.kind, inputs)))

    def _observe(self, side: ComparedSide, until: str) -> Observation:
        if side.options is None:
            return (self._here if side is self._result.a else self._there).observe(side.recipe, until)
        return self._tools[side.name].observe(side.options, until)

    def run(self) -> None:
        result, last = self._result, "update"
        a, b = (self._observe(side, last) for side in (result.a, result.b))
        sides = ((result.a, a), (result.b, b))
        self._as_read(a, b)
        own = str(self._options.python or sys.executable)
        is_own = (result.a.options is not None, result.b.options is not None or not self._tools)
        result.interpreters = (own if is_own[0] else sys.executable, own if is_own[1] else sys.executable)
        versions = differing_values(
            [{name: str(version) for name, version in each.versions.items()} for each in (a, b)]
        )
        result.tool_versions = tuple(  # type: ignore[assignment]  # of two
            each.versions.get(TOOLS[side.kind]) if side.options is not None else None for side, each in sides
        )
        if self._there is not self._here or self._tools:
            result.environment |= {
                name: found for name, found in versions.items() if name in a.versions and name in b.versions
            }
        result.tolerance = self._tolerance
        result.stages, result.observations = self._all_compared(a, b), (a, b)
        models = [
            (side.recipe.model.name_or_path, side.recipe.model.revision) for side in (result.a, result.b)
        ]
        if self._options.model == "small" and models[0] != models[1]:
            result.stages = without_weights(result.stages, *(str(name) for name, _ in models))
        result.failed = [
            f"{side.kind} did not compute all of {side.name}: {each.failed}"
            for side, each in sides
            if each.failed
        ]
        result.left_out += [*a.left_out, *(each for each in b.left_out if each not in a.left_out)]
        self._observer.phase("searching for the causes")
        result.causes = list(self._causes(b if self._is_turned else a, result.stages, versions))

    def _as_read(self, a: Observation, b: Observation) -> None:
        """Import each side again without what its tool does not read, and find the keys in which the recipes
        then differ."""
        one, other = (
            self._read_by_tool(side, seen) for side, seen in ((self._result.a, a), (self._result.b, b))
        )
        resolved = set(different_paths(one.resolved, other.resolved))
        self._paths = [
            path for path in different_paths(one.written, other.written) if is_among(path, resolved)
        ]
        self._kept, self._changed = (other, one) if self._is_turned else (one, other)

    def _read_by_tool(self, side: ComparedSide, seen: Observation) -> ComparedSide:
        # The rows are those of the file in any case.
        named = [
            row for row in (side.imported.rows if side.imported else ()) if str(row.path[0]) in seen.ignored
        ]
        rows = [
            row
            for row in named
            if row.targets
            and not any(target[:2] in (("data", "train"), ("data", "eval")) for target in row.targets)
        ]
        if side.options is None or side.imported is None or not rows:
            return side
        self._ignored |= {
            target: f"`{row.key}` of {side.name}, which {side.kind} ignores"
            for row in rows
            for target in row.targets
        }
        ignored = frozenset(str(row.path[0]) for row in rows)
        try:
            path, gpus = side.imported.path, self._options.num_gpus
            imported = import_file(path, tool=side.kind, num_gpus=gpus, templates=TEMPLATES, ignored=ignored)
            loaded = parse_recipe(imported.text, path, (), name=path.stem)
            return replace(
                resolved_side(side.name, loaded, imported, self._options, Observer()), options=side.options
            )
        except FsdpTuneError:  # the file makes no recipe without these options
            return side

    def _all_compared(
        self, kept: Observation, changed: Observation, *, is_turned: bool = False
    ) -> list[ComparedStage]:
        sides = (changed, kept) if is_turned else (kept, changed)
        return compare_observations(
            *sides, self._tolerance, of_steps=self._of_steps, grows=self._options.tolerance is None
        )

    def _compared(self, name: str, kept: Observation, changed: Observation) -> ComparedStage:
        found = self._all_compared(kept, changed, is_turned=self._is_turned)
        absent = ComparedStage(name, name, "not_compared", "it was not computed")
        return next((stage for stage in found if stage.name == name), absent)

    def _causes(
        self, kept: Observation, stages: Sequence[ComparedStage], versions: Versions
    ) -> Iterator[LaterDifference]:
        """Yield the first difference with its cause, then what is left with the kept side's values of that
        cause, and so on."""
        fixed: tuple[KeyPath, ...] = ()
        different = {stage.name for stage in stages if stage.status == "different"}
        while (found := first_of(stages)) is not None and found.stage in different:
            keys, cause = self._cause(found.stage, kept, versions, fixed)
            is_left_out = False
            if cause is None and self._tools:
                is_left_out, cause = self._cause_in_tools(found.stage, kept, fixed)
            yield LaterDifference(found, cause)
            if not (keys or is_left_out):
                return
            fixed = (*fixed, *keys)
            kept, changed = (
                self._observe(self._kept, "update"),
                self._changed_with(fixed, "update", self._there),
            )
            assert changed is not None, "it was computed to find the cause"
            stages = self._all_compared(kept, changed, is_turned=self._is_turned)

    def _changed_with(
        self, paths: Sequence[KeyPath], until: str, child: ObservingChild
    ) -> Observation | None:
        """Compute the changed side with values of the kept one; None for a combination that no recipe may
        have."""
        if self._changed.options is not None:
            return self._tool_with(self._changed, paths, until)
        recipe = self._recipe_with(paths)
        return None if recipe is None else child.observe(recipe, until)

    def _tool_with(self, side: ComparedSide, paths: Sequence[KeyPath], until: str) -> Observation:
        kept, own = self._kept.options or {}, side.options or {}
        rows = [row for each in (side, self._kept) for row in (each.imported.rows if each.imported else ())]
        chosen = option_paths(paths, [(row.path, row.targets) for row in rows], (kept, own))
        return self._observe(replace(side, options=with_values(own, kept, chosen)), until)

    def _cause_in_tools(
        self, stage: str, kept: Observation, fixed: tuple[KeyPath, ...]
    ) -> tuple[bool, Cause]:
        """Leave out of a tool's side the options without which the stage is equal. Return whether there are
        any, and the cause."""
        changed = self._changed_with(fixed, stage, self._there)
        assert changed is not None
        if found := self._needless(
            self._kept, lambda less: self._compared(stage, self._observe(less, stage), changed)
        ):
            side, self._kept = self._kept, _without(self._kept, found)
        elif found := self._needless(
            self._changed, lambda less: self._compared(stage, kept, self._tool_with(less, fixed, stage))
        ):
            side, self._changed = self._changed, _without(self._changed, found)
        else:
            side = self._kept if self._kept.options is not None else self._changed
        assert side.imported is not None, "a tool computes it"
        values = {dotted(path): value_at(side.options, path) for path in found}
        return bool(found), cause_in_tool(
            side.kind, side.name, values, open_words(stage, side.imported.decisions, kept, changed)
        )

    def _needless(
        self, side: ComparedSide, compared: Callable[[ComparedSide], ComparedStage]
    ) -> tuple[KeyPath, ...]:
        """Return the options of a tool's side without which a stage is equal."""
        if side.options is None or side.imported is None:
            return ()
        rows = [
            row
            for row in side.imported.rows
            if row.fate in (Fate.DROPPED, Fate.QUESTION) or set(row.targets) & set(self._paths)
        ]
        lost = [row.path for row in rows if value_at(side.options, row.path) is not None]
        return causing(lost, lambda chosen: compared(_without(side, chosen)).is_settled)

    def _tolerance_of(self) -> tuple[float, float | None]:
        """Return the tolerance, and that of stages of a step if it is another one."""
        if self._options.tolerance is not None:
            return self._options.tolerance, None
        is_fp32 = bool(self._tools) or all(
            side.recipe.compute_dtype == "fp32" for side in (self._result.a, self._result.b)
        )
        is_one = self._there is self._here and not self._tools
        return tolerances(is_fp32=is_fp32, is_one_environment=is_one, keys=map(dotted, self._result.keys))

    def _cause(
        self, stage: str, kept: Observation, versions: Versions, fixed: tuple[KeyPath, ...]
    ) -> tuple[tuple[KeyPath, ...], Cause | None]:
        """Return the keys without which the stage is equal, and the cause: these keys, or the interpreter."""
        candidates = by_likelihood(
            [path for path in self._paths if path not in fixed], is_data_stage=stage in DATA_STAGES
        )

        def vanishes(chosen: Sequence[KeyPath], child: ObservingChild) -> bool:
            changed = self._changed_with((*fixed, *chosen), stage, child)
            return changed is not None and self._compared(stage, kept, changed).is_settled

        if found := causing(candidates, lambda chosen: vanishes(chosen, self._there)):
            return found, self._of_keys(found)
        if self._there is self._here:
            return (), None
        if vanishes((), self._here):
            return (), cause_of_versions(stage, versions, ())
        found = causing(candidates, lambda chosen: vanishes(chosen, self._here))
        return (), cause_of_versions(stage, versions, self._described(found)) if found else None

    def _recipe_with(self, paths: Sequence[KeyPath]) -> Recipe | None:
        """Return the changed side's recipe with the kept one's values of some keys, resolved; None if no
        recipe may have them."""
        document = with_values(self._changed.written, self._kept.written, paths)
        try:
            loaded = replace(self._changed.loaded, recipe=Recipe.model_validate(document), notices=())
            return resolve_recipe(loaded, self._options.allowed, Observer()).recipe
        except (ValidationError, FsdpTuneError):
            return None

    def _described(self, paths: Sequence[KeyPath]) -> list[DifferentKey]:
        a, b = (
            (self._changed.written, self._kept.written)
            if self._is_turned
            else (self._kept.written, self._changed.written)
        )
        return [different_key(path, value_at(a, path), value_at(b, path)) for path in paths]

    def _of_keys(self, found: Sequence[KeyPath]) -> Cause:
        keys = self._described(found)
        values = [key.b if self._is_turned else key.a for key in keys]
        settings = dict(
            setting_of(self._kept.written, path, value) for path, value in zip(found, values, strict=True)
        )
        ignored = {
            text: self._has(path) for path, text in self._ignored.items() if is_among(path, set(found))
        }
        return cause_of_keys(keys, settings, ("B", "A") if self._is_turned else ("A", "B"), ignored)

    def _has(self, path: KeyPath) -> bool:
        """Return whether the changed side has the value that an option of the kept side, which its tool
        ignores, gives a recipe."""
        given = self._result.b if self._is_turned else self._result.a
        return value_at(given.written, path) == value_at(self._changed.written, path)
