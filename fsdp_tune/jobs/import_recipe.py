"""Turn the configuration of another trainer into a recipe, with an account of every key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fsdp_tune.core import atomic
from fsdp_tune.core.errors import usage_error
from fsdp_tune.data.format.templates import BUNDLED
from fsdp_tune.recipe.read.foreign.importing import ImportedRecipe, import_file
from fsdp_tune.recipe.read.tools import OPTION_NAMES
from fsdp_tune.recipe.schema.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Import:
    """A recipe made of another tool's configuration. Its `imported.text` loads; whether it trains the same is for `unchecked` to say."""

    imported: ImportedRecipe
    unchecked: tuple[str, ...]
    """What was not checked here, one sentence each."""


def import_recipe(
    source: str | Path, *, tool: str | None = None, output: str | Path | None = None, force: bool = False, num_gpus: int | None = None
) -> Import:
    """Read a configuration of axolotl, TRL, LLaMA-Factory, ms-swift, torchtune, Accelerate, DeepSpeed or of transformers' examples.

    `tool` is a name of `--from`; None: recognised by the keys. The recipe is written to `output`, if it is given; an existing file is
    replaced with `force` alone. `num_gpus`: the GPUs that the configuration was made for, if it does not say it.
    Raises: FsdpTuneError for a file of no known tool, of another kind of training, or that exists already.
    """
    path = Path(source)
    target = None if output is None else Path(output)
    if tool is not None and tool not in OPTION_NAMES:
        raise usage_error("unknown-foreign-file", f"`{tool}` is not a tool whose files are read", hint=f"one of {', '.join(OPTION_NAMES)}")
    if target is not None:
        _check_target(target, path, force=force)
    imported = import_file(path, tool=OPTION_NAMES[tool] if tool else None, num_gpus=num_gpus, templates=frozenset(BUNDLED))
    if target is not None:
        atomic.write_file(target, imported.text)
    return Import(imported, _unchecked(imported.recipe))


def _check_target(target: Path, source: Path, *, force: bool) -> None:
    if target.exists() and source.exists() and target.samefile(source):
        raise usage_error("output-exists", f"`{target}` is the file to be imported", hint="give another file name")
    if (target.exists() or target.is_symlink()) and not force:
        raise usage_error("output-exists", f"`{target}` already exists", hint="give another file name, or `--force`")
    if target.is_dir():
        raise usage_error("output-exists", f"`{target}` is a directory", hint="give the name of a file")
    if not target.parent.is_dir():
        raise usage_error("no-directory", f"the directory `{target.parent}` does not exist", hint="create it first")


def _unchecked(recipe: Recipe) -> tuple[str, ...]:
    """Say what the keys alone do not show: `validate` looks at model and rows."""
    found: list[str] = []
    name = recipe.model.name_or_path
    if name is not None and not Path(name).is_dir():
        found.append(f"the model `{name}` is not on this machine: its architecture, tokenizer and chat template")
    missing = [source.path for _, source in recipe.data.sources if not Path(source.path).exists()]
    if missing:
        found.append(
            f"the rows of {', '.join(f'`{path}`' for path in dict.fromkeys(missing))} are not on this machine: their columns and format"
        )
    return tuple(found)
