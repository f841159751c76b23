"""The configuration of another trainer next to the recipe that was made of it: `import --check`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fsdp_tune.comparison.causes import is_named
from fsdp_tune.core.errors import usage_error
from fsdp_tune.data.format.templates import BUNDLED
from fsdp_tune.jobs.compare import compare
from fsdp_tune.jobs.compare_answer import CompareAnswer
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import Allowed, CompareOptions
from fsdp_tune.migrate.importing import ImportedRecipe, import_file
from fsdp_tune.recipe.key_paths import dotted
from fsdp_tune.recipe.outcome import Fate


def check_import(
    imported: ImportedRecipe,
    written: Path,
    *,
    num_gpus: int | None,
    overrides: Sequence[str],
    allowed: Allowed = Allowed(),
    observer: Observer = Observer(),
) -> CompareAnswer:
    """Compare the imported file with the recipe that was written, as `compare` does: from the tokens of the
    rows to a step's update. `num_gpus`, `overrides`: those of the import.

    TRL and axolotl compute the side of their files themselves. Of another tool it is what is imported without
    overrides, so that only what they, or a person, have changed is found.
    Raises: FsdpTuneError if the model or the rows that the file names cannot be read here.
    """
    path = imported.path
    read = partial(import_file, path, tool=imported.tool, num_gpus=num_gpus, templates=frozenset(BUNDLED))
    plain = read() if overrides else imported
    if answers := _answers(plain, overrides):
        plain = read(overrides=answers)
    if not plain.names_inputs:
        message = (
            f"`--check` compares {path} with the recipe, and neither it nor `--set` names model and rows"
        )
        raise usage_error(
            "import-check", message, hint="leave out `--check`: `fsdp-tune rehearse` tries the recipe itself"
        )
    options = CompareOptions(num_gpus=num_gpus, allowed=allowed)
    return compare(plain, written, options, observer=observer)


def _answers(plain: ImportedRecipe, overrides: Sequence[str]) -> list[str]:
    """Return the overrides that say what the file leaves open, and change nothing that it gives."""
    asked = {dotted(target) for row in plain.rows if row.fate is Fate.QUESTION for target in row.targets}
    asked |= {key for key, _ in plain.decisions if key}
    return [text for text in overrides if is_named(text.partition("=")[0].strip(), asked)]
