"""Make a recipe of the file of another tool: read it, settle every key, complete it, and check it by the
reader of recipes itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath

from fsdp_tune.core.errors import Where, usage_error
from fsdp_tune.migrate.accepted_text import accepted_text
from fsdp_tune.migrate.completion import complete
from fsdp_tune.migrate.file_rules import rules_of
from fsdp_tune.migrate.ledger import AccountRow, Ledger
from fsdp_tune.migrate.open_keys import settle_computed
from fsdp_tune.migrate.placeholders import DATA_PLACEHOLDER, MODEL_PLACEHOLDER
from fsdp_tune.migrate.quoted_values import read_quoted
from fsdp_tune.migrate.ranks_and_batch import RANKS
from fsdp_tune.migrate.read.command_line import ENVIRONMENT, LAUNCHER
from fsdp_tune.migrate.read.foreign_file import (
    MANIFEST,
    SBATCH,
    ForeignFile,
    named_values,
    read_foreign,
    take_unexpanded,
)
from fsdp_tune.migrate.rules import Inside
from fsdp_tune.migrate.settle_keys import ask_each, settle_all
from fsdp_tune.migrate.tools import torchtune
from fsdp_tune.migrate.tools.fms_hf_tuning import FMS_DATA_CONFIG
from fsdp_tune.migrate.tools.llama_factory_datasets import include_info
from fsdp_tune.migrate.tools.table import TOOLS
from fsdp_tune.recipe.key_paths import KeyPath, dotted
from fsdp_tune.recipe.outcome import Fate
from fsdp_tune.recipe.read.overrides import read_overrides
from fsdp_tune.recipe.read.tool_detection import LLAMA_FACTORY, TORCHTUNE, UNSLOTH
from fsdp_tune.recipe.schema.recipe import Recipe


@dataclass(frozen=True, slots=True)
class ImportedRecipe:
    tool: str
    path: FilePath
    """The file that was imported."""
    text: str
    """The recipe, with the origin of each value as a comment."""
    recipe: Recipe
    """What the text loads as."""
    rows: tuple[AccountRow, ...]
    """One for each key of the file, in its order."""
    decisions: tuple[tuple[str, str], ...]
    """What else has to be decided: (key of the recipe, words)."""

    @property
    def names_inputs(self) -> bool:
        """Whether the file, or an override, names model and rows."""
        places = [source.path for source in self.recipe.data.train]
        return self.recipe.model.name_or_path != MODEL_PLACEHOLDER and DATA_PLACEHOLDER not in places

    @property
    def counts(self) -> dict[str, int]:
        """Number of keys by what became of them."""
        found = Counter(row.fate for row in self.rows)
        return {fate.value: found[fate] for fate in Fate}


def import_file(
    path: FilePath,
    *,
    tool: str | None = None,
    num_gpus: int | None = None,
    templates: Collection[str] = (),
    ignored: Collection[str] = (),
    overrides: Sequence[str] = (),
) -> ImportedRecipe:
    """Turn a configuration of another tool into a recipe. `tool` is recognised if it is not given; `num_gpus`
    is the number of ranks that it was made for, if the file does not say it; `templates` are the names of
    bundled chat templates; `ignored` are keys that the tool does not read, and that are dropped; `overrides`
    are `KEY=VALUE` of the recipe, as for `--set`, which come before what the file has.

    The text loads as a recipe: a value that the reader of recipes refuses has become a question. Raises:
    FsdpTuneError for a file that is not readable, of no known tool, or for another kind of training, and for
    an override that a recipe refuses.
    """
    found = read_foreign(path, tool)
    if found.tool == TORCHTUNE:
        found.values = torchtune.resolve_references(found.values)
    if found.tool != UNSLOTH:
        found.computed = take_unexpanded(found.values)
    _refuse_other_training(found)
    said = read_overrides(overrides)
    if num_gpus is not None and (both := said.get(RANKS) or said.get(RANKS[:1])) is not None:
        where, hint = both.where, "give one of them"
        raise usage_error(
            "duplicate-key",
            f"`--num-gpus {num_gpus}` sets `{dotted(RANKS)}` too",
            hint=hint,
            where=where,
        )
    rules = rules_of(found, ignored)
    unknown = {**found.computed, **read_quoted(found, rules)}
    ledger = Ledger(
        found.values,
        found.lines,
        found.tool,
        templates,
        {target: each.value for target, each in said.items()},
    )
    settle_computed(ledger, unknown, rules)
    _include(ledger, found)
    settle_all(ledger, (), Inside(rules))
    ask_each(ledger, ())
    complete(ledger, num_gpus, rules)
    for words in found.unread:
        ledger.decide((), words)
    text, recipe = accepted_text(ledger, found, overrides, said)
    ledger.close()
    decisions = tuple((dotted(target), words) for target, words in ledger.decisions)
    return ImportedRecipe(found.tool, path, text, recipe, tuple(ledger.rows), decisions)


def options_of(path: FilePath) -> dict[str, object]:
    """Return the options of a configuration, with those of the file that it names, without the launcher's.
    Raises: FsdpTuneError."""
    aside = (LAUNCHER, ENVIRONMENT, SBATCH, MANIFEST, "config")
    return {name: value for name, value in read_foreign(path).values.items() if name not in aside}


def _refuse_other_training(found: ForeignFile) -> None:
    """Raises: usage error for preference tuning and the like: a recipe of it would train something else."""
    values = found.values
    tool = TOOLS[found.tool]
    wrong = [(name, kind) for name, kind in tool.other_training.items() if values.get(name)]
    if (method := tool.method) is not None and values.get(method.key) not in (None, *method.imported):
        wrong.append((method.key, method.others))
    for name, kind in [pair for pair in wrong if (pair[0],) not in found.computed][:1]:
        where = Where(str(found.path), found.lines.get((name,)), key=name)
        given = f": {values[name]}" if isinstance(values[name], str) else ""
        message = f"`{name}{given}` of {found.tool}: this release has no {kind}"
        raise usage_error(
            "no-counterpart",
            message,
            hint="only supervised fine-tuning and pre-training can be imported",
            where=where,
        )


def _include(ledger: Ledger, found: ForeignFile) -> None:
    """Put the keys of the files that are named, and that are here, into the account."""
    named: list[KeyPath] = [(LAUNCHER, "config_file"), (LAUNCHER, "deepspeed_config_file"), ("deepspeed",)]
    named += [
        ("deepspeed_config", "deepspeed_config_file"),
        ("fsdp_config",),
        (FMS_DATA_CONFIG,),
    ]
    for key in named:
        named_file = named_values(found, ledger.value(*key))
        if named_file is not None:
            ledger.include(key, named_file.values)
    if found.tool == LLAMA_FACTORY:
        include_info(ledger, found.path.parent)
