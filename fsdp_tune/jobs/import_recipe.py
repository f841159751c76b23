"""The configuration of another trainer, with an account of every key."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_tune.core import atomic
from fsdp_tune.core.errors import FsdpTuneError, usage_error
from fsdp_tune.core.values import as_items
from fsdp_tune.data.format.templates import BUNDLED
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import Allowed
from fsdp_tune.migrate.importing import ImportedRecipe, import_file
from fsdp_tune.recipe.read.tool_detection import OPTION_NAMES
from fsdp_tune.recipe.schema.data_section import BUILDERS, DataSource
from fsdp_tune.recipe.schema.recipe import Recipe

if TYPE_CHECKING:
    from fsdp_tune.jobs.compare_answer import CompareAnswer


@dataclass(frozen=True, slots=True)
class Import:
    """A recipe made of another tool's configuration. Its `imported.text` loads; whether it trains the same is
    for `unchecked` to say."""

    imported: ImportedRecipe
    unchecked: tuple[str, ...]
    """What was not checked here, one sentence each."""
    output: Path | None = None
    num_gpus: int | None = None
    overrides: tuple[str, ...] = ()
    check: CompareAnswer | None = None


def import_recipe(
    source: str | Path,
    *,
    tool: str | None = None,
    output: str | Path | None = None,
    force: bool = False,
    num_gpus: int | None = None,
    overrides: Sequence[str] = (),
    check: bool = False,
    allowed: Allowed = Allowed(),
    observer: Observer = Observer(),
) -> Import:
    """Read a configuration of another trainer (`OPTION_NAMES` has them), or the script or notebook with its
    arguments, which is not run.

    `tool` is a name of `--from`; None: recognised by the keys. The recipe is written to `output`, if it is
    given; an existing file is
    replaced with `force` alone. `num_gpus`: the GPUs that the configuration was made for, if it does not say
    it. `overrides`: `KEY=VALUE` for the recipe, in place of what the file has or leaves open. `check`: as
    `check_import`; `allowed` is the code that this may run.
    Raises: FsdpTuneError for a file of no known tool, of another kind of training, or that exists already,
    and for a wrong override.
    """
    path = Path(source)
    target = None if output is None else Path(output)
    if tool is not None and tool not in OPTION_NAMES:
        raise usage_error(
            "unknown-foreign-file",
            f"`{tool}` is not a tool whose files are read",
            hint=f"one of {', '.join(OPTION_NAMES)}",
        )
    if check and target is None:
        raise nothing_to_check()
    if target is not None:
        _check_target(target, path, force=force)
    known = OPTION_NAMES[tool] if tool else None
    imported = import_file(
        path, tool=known, num_gpus=num_gpus, templates=frozenset(BUNDLED), overrides=overrides
    )
    if target is not None:
        atomic.write_file(target, imported.text)
    found = Import(imported, _unchecked(imported.recipe), target, num_gpus, tuple(overrides))
    if not check or target is None:
        return found
    from fsdp_tune.jobs.import_check import check_import  # an import without it loads nothing that compares

    compared = check_import(
        imported, target, num_gpus=num_gpus, overrides=overrides, allowed=allowed, observer=observer
    )
    return replace(found, check=compared)


def nothing_to_check() -> FsdpTuneError:
    return usage_error(
        "import-check",
        "`--check` compares the file with the written recipe, and `--output` is missing",
        hint="--output recipe.yaml",
    )


def _check_target(target: Path, source: Path, *, force: bool) -> None:
    if target.exists() and source.exists() and target.samefile(source):
        raise usage_error(
            "output-exists", f"`{target}` is the file to be imported", hint="give another file name"
        )
    atomic.check_output_file(target, replaces=force, otherwise="`--force`")


def _unchecked(recipe: Recipe) -> tuple[str, ...]:
    """Say what the keys alone do not show: `validate` looks at model and rows."""
    found: list[str] = []
    name = recipe.model.name_or_path
    if name is not None and not Path(name).is_dir():
        found.append(
            f"the model `{name}` is not on this machine: its architecture, tokenizer and chat template"
        )
    missing = [name for _, source in recipe.data.sources for name in _missing_rows(source)]
    if missing:
        found.append(
            f"the rows of {', '.join(f'`{path}`' for path in dict.fromkeys(missing))} are not on "
            "this machine: their columns and format"
        )
    return tuple(found)


def _missing_rows(source: DataSource) -> list[str]:
    """Return what is not on this machine of the rows of a source: its path, or files of it where that is
    their kind."""
    names = [source.path]
    if source.path in BUILDERS and source.data_files:
        names = [str(Path(source.data_dir or "", str(name))) for name in as_items(source.data_files)]
    return [name for name in names if not Path(name).exists() and not glob.glob(name, recursive=True)]  # noqa: PTH207  absolute patterns
