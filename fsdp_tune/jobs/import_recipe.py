"""The configuration of another trainer, with an account of every key."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fsdp_tune.comparison.causes import is_named
from fsdp_tune.core import atomic
from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.core.errors import FsdpTuneError, usage_error
from fsdp_tune.core.values import as_items
from fsdp_tune.data.format.templates import BUNDLED
from fsdp_tune.jobs.answers import ImportedKey
from fsdp_tune.jobs.compare import compare
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import Allowed, CompareOptions
from fsdp_tune.jobs.served import CompareAnswer
from fsdp_tune.migrate.importing import ImportedRecipe, import_file
from fsdp_tune.migrate.ledger import Fate
from fsdp_tune.recipe.key_paths import dotted
from fsdp_tune.recipe.read.tool_detection import OPTION_NAMES
from fsdp_tune.recipe.schema.data_section import BUILDERS, DataSource
from fsdp_tune.recipe.schema.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Decision(JsonAnswer):
    key: str
    words: str


@dataclass(frozen=True, slots=True)
class ImportAnswer(JsonAnswer):
    tool: str
    source: str
    output: str | None
    recipe: str
    """The text."""
    counts: dict[str, int]
    """Fate → how many keys."""
    account: list[ImportedKey]
    decisions: list[Decision]
    unchecked: list[str]
    check: CompareAnswer | None
    """With `--check`: the comparison of the file (A) with the written recipe (B)."""


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

    def answer(self) -> ImportAnswer:
        imported = self.imported
        return ImportAnswer(
            tool=imported.tool,
            source=str(imported.path),
            output=None if self.output is None else str(self.output),
            recipe=imported.text,
            counts=imported.counts,
            account=[ImportedKey(**row.as_dict()) for row in imported.rows],
            decisions=[Decision(key, words) for key, words in imported.decisions],
            unchecked=list(self.unchecked),
            check=self.check,
        )


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
    return replace(found, check=check_import(found, allowed=allowed, observer=observer)) if check else found


def check_import(
    found: Import, *, allowed: Allowed = Allowed(), observer: Observer = Observer()
) -> CompareAnswer:
    """Compare the imported file with the recipe that was written, as `compare` does: from the tokens of the
    rows to a step's update.

    TRL and axolotl compute the side of their files themselves. Of another tool it is what is imported without
    overrides, so that only what they, or a person, have changed is found.
    Raises: FsdpTuneError if no recipe was written, or if the model or the rows that it names cannot be read
    here.
    """
    if found.output is None:
        raise nothing_to_check()
    path = found.imported.path
    read = partial(
        import_file, path, tool=found.imported.tool, num_gpus=found.num_gpus, templates=frozenset(BUNDLED)
    )
    plain = read() if found.overrides else found.imported
    if answers := _answers(plain, found.overrides):
        plain = read(overrides=answers)
    if not plain.names_inputs:
        message = (
            f"`--check` compares {path} with the recipe, and neither it nor `--set` names model and rows"
        )
        raise usage_error(
            "import-check", message, hint="leave out `--check`: `fsdp-tune rehearse` tries the recipe itself"
        )
    return compare(
        plain, found.output, CompareOptions(num_gpus=found.num_gpus, allowed=allowed), observer=observer
    )


def _answers(plain: ImportedRecipe, overrides: Sequence[str]) -> list[str]:
    """Return the overrides that say what the file leaves open, and change nothing that it gives."""
    asked = {dotted(target) for row in plain.rows if row.fate is Fate.QUESTION for target in row.targets}
    asked |= {key for key, _ in plain.decisions if key}
    return [text for text in overrides if is_named(text.partition("=")[0].strip(), asked)]


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
