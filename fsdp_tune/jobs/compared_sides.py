"""The sides of a comparison: recipes, runs or configurations of other tools, read and resolved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fsdp_tune.comparison.tool_options import TOOLS
from fsdp_tune.core.errors import FsdpTuneError, usage_error
from fsdp_tune.data.format.templates import BUNDLED
from fsdp_tune.jobs.answers import ImportedKey
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import CompareOptions
from fsdp_tune.jobs.recipes import resolve_recipe
from fsdp_tune.launch.command.resume import read_resolved
from fsdp_tune.migrate.importing import ImportedRecipe, import_file, options_of
from fsdp_tune.migrate.ledger import DEFAULT_OF
from fsdp_tune.recipe.outcome import Fate
from fsdp_tune.recipe.read.loader import LoadedRecipe, load_recipe, parse_recipe
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir

TEMPLATES = frozenset(BUNDLED)


@dataclass(frozen=True, slots=True)
class ComparedSide:
    name: str
    kind: str
    loaded: LoadedRecipe
    recipe: Recipe
    """Resolved."""
    run: RunDir | None = None
    imported: ImportedRecipe | None = None
    options: dict[str, object] | None = None
    """Those of the tool that computes this side."""

    @property
    def written(self) -> dict[str, object]:
        return self.loaded.recipe.model_dump(mode="json", by_alias=True)

    @property
    def resolved(self) -> dict[str, object]:
        return self.recipe.model_dump(mode="json", by_alias=True)

    @property
    def not_carried(self) -> list[ImportedKey]:
        """Keys of a foreign file that its recipe lacks. A default of the tool that the file spells out says
        nothing more."""
        rows = () if self.imported is None else self.imported.rows
        left_out = [row for row in rows if row.fate in (Fate.DROPPED, Fate.QUESTION)]
        return [ImportedKey(**row.as_dict()) for row in left_out if not row.reason.startswith(DEFAULT_OF)]


def read_side(
    side: str | ImportedRecipe, overrides: Sequence[str], options: CompareOptions, observer: Observer
) -> ComparedSide:
    """Read a side. Raises: FsdpTuneError."""
    if isinstance(side, ImportedRecipe):
        return resolved_side(
            str(side.path),
            parse_recipe(side.text, side.path, overrides, name=side.path.stem),
            side,
            options,
            observer,
        )
    name, path = side, Path(side)
    if RunDir(path).is_used:
        if overrides:
            raise usage_error(
                "compare-override",
                f"`--set` changes a recipe, and `{name}` is a run",
                hint="leave out `--set`",
            )
        run = RunDir(path.resolve())
        recipe = read_resolved(run)
        return ComparedSide(name, "run", LoadedRecipe(recipe, (), run.recipe_json, "", (), {}), recipe, run)
    imported: ImportedRecipe | None = None
    try:
        loaded = load_recipe(name, overrides)
    except FsdpTuneError as error:
        is_command = path.is_file() and path.suffix in (".sh", ".bash", ".txt")
        if not is_command and not any(problem.code == "foreign-configuration" for problem in error.problems):
            raise
        imported = import_file(path, num_gpus=options.num_gpus, templates=TEMPLATES)
        loaded = parse_recipe(imported.text, path, overrides, name=path.stem)
    return resolved_side(name, loaded, imported, options, observer)


def resolved_side(
    name: str,
    loaded: LoadedRecipe,
    imported: ImportedRecipe | None,
    options: CompareOptions,
    observer: Observer,
) -> ComparedSide:
    if options.num_gpus is not None and loaded.recipe.launch.num_processes == "auto":
        launch = loaded.recipe.launch.model_copy(update={"num_processes": options.num_gpus})
        loaded = replace(loaded, recipe=loaded.recipe.model_copy(update={"launch": launch}))
    resolution = resolve_recipe(loaded, options.allowed, observer)
    observer.notices(resolution.notices)
    kind, values = imported.tool if imported else "recipe", None
    if imported is not None and kind in TOOLS and options.tools == "run" and not loaded.overrides:
        values = options_of(imported.path)
    return ComparedSide(name, kind, loaded, resolution.recipe, None, imported, values)
