"""From the file of another tool to a recipe: read, settle every key, complete, and check by the reader of recipes itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from fsdp_tune.core.errors import FsdpTuneError, Problem, Where, usage_error
from fsdp_tune.recipe.read.foreign import accelerate_config, axolotl, hf_scripts, llama_factory, swift, torchtune
from fsdp_tune.recipe.read.foreign.command_line import ENVIRONMENT, LAUNCHER
from fsdp_tune.recipe.read.foreign.completion import complete
from fsdp_tune.recipe.read.foreign.foreign_file import ForeignFile, read_foreign, read_mapping
from fsdp_tune.recipe.read.foreign.general import Rule, Rules, ask_each, leave, same, section, settle_all, settle_by_name
from fsdp_tune.recipe.read.foreign.ledger import AccountRow, Fate, Ledger, Path
from fsdp_tune.recipe.read.foreign.recipe_text import recipe_text
from fsdp_tune.recipe.read.loader import parse_recipe
from fsdp_tune.recipe.read.tools import ACCELERATE, AXOLOTL, DEEPSPEED, EXAMPLES, LLAMA_FACTORY, SWIFT, TORCHTUNE, TRL
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.recipe.schema.keys import dotted

RULES: dict[str, Rules] = {
    AXOLOTL: axolotl.RULES,
    TRL: hf_scripts.TRL_RULES,
    EXAMPLES: hf_scripts.EXAMPLE_RULES,
    LLAMA_FACTORY: llama_factory.RULES,
    SWIFT: swift.RULES,
    TORCHTUNE: torchtune.RULES,
    ACCELERATE: accelerate_config.ACCELERATE_RULES,
    DEEPSPEED: accelerate_config.DEEPSPEED_RULES,
}
_MOST_CORRECTIONS = 50


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
    def counts(self) -> dict[str, int]:
        """Number of keys by what became of them."""
        found = Counter(row.fate for row in self.rows)
        return {fate.value: found[fate] for fate in Fate}


def import_file(path: FilePath, *, tool: str | None = None, num_gpus: int | None = None, templates: Collection[str] = ()) -> ImportedRecipe:
    """Turn a configuration of another tool into a recipe. `tool` is recognised if it is not given; `num_gpus` is the number of ranks that
    it was made for, if the file does not say it; `templates` are the names of bundled chat templates.

    The text loads as a recipe: a value that the reader of recipes refuses has become a question. Raises: FsdpTuneError for a file that is
    not readable, of no known tool, or for another kind of training.
    """
    found = read_foreign(path, tool)
    if found.tool == TORCHTUNE:
        found.values = torchtune.resolve_references(found.values)
    _refuse_other_training(found)
    ledger = Ledger(found.values, found.lines, found.tool, templates)
    _include(ledger, found)
    rules = RULES[found.tool]
    settle_all(ledger, (), {**rules, LAUNCHER: section(_LAUNCHER), ENVIRONMENT: section(_VARIABLES), **_NESTED})
    ask_each(ledger, ())
    complete(ledger, num_gpus)
    text, recipe = _accepted(ledger, found)
    ledger.close()
    decisions = tuple((dotted(target), words) for target, words in ledger.decisions)
    return ImportedRecipe(found.tool, path, text, recipe, tuple(ledger.rows), decisions)


def _refuse_other_training(found: ForeignFile) -> None:
    """Raises: usage error for preference tuning and the like: a recipe of it would train something else."""
    values = found.values
    kinds = {AXOLOTL: axolotl.UNSUPPORTED, SWIFT: swift.UNSUPPORTED, TORCHTUNE: torchtune.UNSUPPORTED, TRL: hf_scripts.UNSUPPORTED}.get(
        found.tool, {}
    )
    wrong = [(name, kind) for name, kind in kinds.items() if values.get(name)]
    if found.tool == LLAMA_FACTORY and values.get("stage") not in (None, *llama_factory.STAGES):
        wrong = [("stage", llama_factory.UNSUPPORTED)]
    for name, kind in wrong[:1]:
        where = Where(str(found.path), found.lines.get((name,)), key=name)
        given = f": {values[name]}" if isinstance(values[name], str) else ""
        message = f"`{name}{given}` of {found.tool}: this release has no {kind}"
        raise usage_error("no-counterpart", message, hint="only supervised fine-tuning and pre-training can be imported", where=where)


# ---- Files that the file names


def _include(ledger: Ledger, found: ForeignFile) -> None:
    """Put the keys of the files that are named, and that are here, into the account."""
    directory = found.path.parent
    named: list[Path] = [("config",), (LAUNCHER, "config_file"), (LAUNCHER, "deepspeed_config_file"), ("deepspeed",)]
    named += [("deepspeed_config", "deepspeed_config_file"), ("fsdp_config",)]
    for key in named:
        name = ledger.value(*key)
        place = _existing(directory, name) if isinstance(name, str) else None
        if place is not None:
            ledger.include(key, read_mapping(place))
    if found.tool == LLAMA_FACTORY:
        llama_factory.include_info(ledger, directory)


def _existing(directory: FilePath, name: str) -> FilePath | None:
    places = [directory / name, FilePath(name), *(above / name for above in list(directory.resolve().parents)[:3])]
    return next((place for place in places if place.suffix in (".yaml", ".yml", ".json") and place.is_file()), None)


def _file(rules: Rules, otherwise: Rule) -> Rule:
    """Return a rule for the name of a file, in whose place its keys are if it was found."""

    def rule(ledger: Ledger, path: Path, value: Any) -> None:
        if isinstance(value, dict):
            settle_all(ledger, path, rules)
        else:
            otherwise(ledger, path, value)

    return rule


def _not_found(ledger: Ledger, path: Path, value: Any) -> None:
    ledger.ask(path, f"`{value}` was not found here: `fsdp-tune import {value}` reads it")


def _config(ledger: Ledger, path: Path, value: Any) -> None:
    """The file of options that a command line names, with the keys of its tool."""
    _file(RULES[ledger.tool], _not_found)(ledger, path, value)


def _deepspeed(ledger: Ledger, path: Path, value: Any) -> None:
    own = RULES[ledger.tool].get("deepspeed")
    if isinstance(value, dict):
        settle_all(ledger, path, accelerate_config.DEEPSPEED_RULES)
    elif own is not None:
        own(ledger, path, value)
    else:
        settle_by_name(ledger, path, value)


def _variable(ledger: Ledger, path: Path, value: Any) -> None:
    """A variable of the environment that ranks get too."""
    ledger.write(path, {("launch", "env", str(path[-1])): str(value)}, Fate.KEPT)


class _Variables(dict[str, Rule]):
    """The rules of the environment: a variable without a rule is set for the ranks."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Rule:
        return _variable


_VARIABLES = _Variables(
    {
        **dict.fromkeys(("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"), leave("set it where `fsdp-tune train` starts")),
        "NPROC_PER_NODE": same("launch.num_processes"),
        "NNODES": same("launch.num_machines"),
        "NODE_RANK": leave("each machine runs the same command"),
        "MASTER_ADDR": same("launch.main_process_ip"),
        "MASTER_PORT": same("launch.main_process_port"),
        "FORCE_TORCHRUN": leave("`fsdp-tune train` starts the ranks"),
        "ACCELERATE_LOG_LEVEL": leave("each rank writes its own log file"),
    }
)
_LAUNCHER: Rules = {
    **accelerate_config.LAUNCHER_RULES,
    "config_file": _file(accelerate_config.ACCELERATE_RULES, _not_found),
    "deepspeed_config_file": _file(accelerate_config.DEEPSPEED_RULES, _not_found),
}
_NESTED: Rules = {"config": _config, "deepspeed": _deepspeed}


# ---- The text


def _accepted(ledger: Ledger, found: ForeignFile) -> tuple[str, Recipe]:
    """Return the text of a recipe, and what it loads as. A value that its reader refuses becomes a question, with the reader's message."""
    for _ in range(_MOST_CORRECTIONS):
        text = recipe_text(ledger, found)
        try:
            return text, parse_recipe(text, found.path.with_suffix(".yaml")).recipe
        except FsdpTuneError as error:
            withdrawn = [target for problem in error.problems if (target := _setting_of(ledger, problem)) is not None]
            if not withdrawn:
                raise
    raise AssertionError("a recipe without settings loads")


def _setting_of(ledger: Ledger, problem: Problem) -> Path | None:
    """Take back the setting that a problem is about, and return it; None if the recipe has none there any more."""
    key = problem.where.key or ""
    names = {dotted(target): target for target in ledger.settings}
    target = names.get(key) or next((path for name, path in names.items() if name.startswith((f"{key}.", f"{key}["))), None)
    target = target or next((path for name, path in names.items() if key.startswith((f"{name}.", f"{name}["))), None)
    if target is None or not key:
        return None
    ledger.withdraw(target, problem.message + (f"; {problem.hint}" if problem.hint else ""))
    return target
