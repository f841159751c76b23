"""`import`: turn the configuration of another trainer into a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fsdp_tune.cli.options import JsonOption
from fsdp_tune.cli.output import Screen, command

if TYPE_CHECKING:
    from fsdp_tune.jobs.import_recipe import Import

FileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="A configuration of axolotl, TRL, LLaMA-Factory, ms-swift, torchtune, Accelerate or DeepSpeed (YAML or JSON), or a script "
        "with the command that starts one of them, or transformers' `run_clm.py`.",
        show_default=False,
    ),
]
FromOption = Annotated[
    Literal["axolotl", "trl", "llama-factory", "ms-swift", "torchtune", "accelerate", "deepspeed", "transformers"] | None,
    typer.Option("--from", help="The tool of the file [default: recognised by its keys].", show_default=False),
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="The recipe [default: stdout].", show_default=False)
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace `--output` if it exists.")]
GpusOption = Annotated[
    int | None,
    typer.Option(
        "--num-gpus", min=1, metavar="N", help="GPUs that the file was made for: gives `training.global_batch_size`.", show_default=False
    ),
]


def import_config(
    file: FileArgument,
    tool: FromOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    num_gpus: GpusOption = None,
    json_output: JsonOption = False,
) -> None:
    """Turn a configuration of another trainer into a recipe, with an account of every key of the file.

    Each key is kept, converted, computed with others, dropped with the reason, or a question: a line `# DECIDE:` in the recipe.

    \b
    Example:
        fsdp-tune import axolotl.yaml --output recipe.yaml
    """
    with command(json_output) as screen:
        import fsdp_tune

        found = fsdp_tune.import_recipe(file, tool=tool, output=output, force=force, num_gpus=num_gpus)
        imported = found.imported
        screen.document(
            {
                "tool": imported.tool,
                "source": str(file),
                "output": None if output is None else str(output),
                "recipe": imported.text,
                "counts": imported.counts,
                "account": [row.as_dict() for row in imported.rows],
                "decisions": [{"key": key, "words": words} for key, words in imported.decisions],
                "unchecked": list(found.unchecked),
            }
        )
        if not json_output:
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
