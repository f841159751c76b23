"""`import`: turn the configuration of another trainer into a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import fsdp_tune
from fsdp_tune.cli.output import Screen
from fsdp_tune.cli.verbs import given, verb
from fsdp_tune.core.option import Argument
from fsdp_tune.jobs.options import ImportOptions

if TYPE_CHECKING:
    from fsdp_tune.jobs.import_recipe import Import


@verb
def import_config(
    screen: Screen,
    file: Annotated[
        Path,
        Argument(
            "A configuration of axolotl, TRL, LLaMA-Factory, ms-swift, torchtune, Accelerate or DeepSpeed (YAML or JSON), or a script "
            "with the command that starts one of them, or transformers' `run_clm.py`.",
            metavar="FILE",
        ),
    ],
    options: ImportOptions,
) -> None:
    """Turn a configuration of another trainer into a recipe, with an account of every key of the file.

    Each key is kept, converted, computed with others, dropped with the reason, or a question: a line `# DECIDE:` in the recipe.

    \b
    Example:
        fsdp-tune import axolotl.yaml --output recipe.yaml
    """
    from fsdp_tune.jobs.answers import Decision, ImportAnswer, ImportedKey

    output = options.output
    found = fsdp_tune.import_recipe(file, **given(options))
    imported = found.imported
    screen.document(
        ImportAnswer(
            tool=imported.tool,
            source=str(file),
            output=None if output is None else str(output),
            recipe=imported.text,
            counts=imported.counts,
            account=[ImportedKey(**row.as_dict()) for row in imported.rows],
            decisions=[Decision(key, words) for key, words in imported.decisions],
            unchecked=list(found.unchecked),
        )
    )
    if not screen.json_output:
        if output is None:
            screen.result(imported.text)
        _show(screen, found, output)


def _show(screen: Screen, found: Import, output: Path | None) -> None:
    imported = found.imported
    rows = [(row.key, row.fate.value, ", ".join(row.as_dict()["to"]), row.reason) for row in imported.rows]
    screen.table(f"{imported.path} is a configuration of {imported.tool}", ["key", "became", "key here", "remark"], rows)
    counts = ", ".join(f"{count} {fate}" for fate, count in imported.counts.items())
    screen.message(f"keys: {len(imported.rows)} ({counts})")
    for key, words in imported.decisions:
        screen.message(f"to decide: {key}: {words}")
    for line in found.unchecked:
        screen.message(f"not checked: {line}")
    name = output or "recipe.yaml"
    screen.message(f"{f'wrote {output}; ' if output else ''}look for `# DECIDE:` in it, then `fsdp-tune validate --config {name}`")
