"""Make a recipe of the file of another tool: read it, settle every key, complete it, and check it by the
reader of recipes itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath

from fsdp_tune.core.errors import FsdpTuneError, Problem, Where, usage_error
from fsdp_tune.migrate import completion
from fsdp_tune.migrate.completion import complete, name_model_and_data
from fsdp_tune.migrate.general import by_name
from fsdp_tune.migrate.ledger import AccountRow, Ledger, without_places
from fsdp_tune.migrate.open_keys import settle_computed
from fsdp_tune.migrate.quoted import read_quoted
from fsdp_tune.migrate.ranks_and_batch import RANKS
from fsdp_tune.migrate.read.command_line import ENVIRONMENT, LAUNCHER, STARTS_EACH_RANK
from fsdp_tune.migrate.read.foreign_file import (
    MANIFEST,
    SBATCH,
    ForeignFile,
    named_values,
    read_foreign,
    take_unexpanded,
)
from fsdp_tune.migrate.recipe_text import recipe_text
from fsdp_tune.migrate.rules import FileKey, Inside, Outcome, Rule, Rules, each, outcome_of, same, section
from fsdp_tune.migrate.settling import ask_each, settle_all
from fsdp_tune.migrate.tools import accelerate_config, jobs, llama_factory, torchtune
from fsdp_tune.migrate.tools.deepspeed import DEEPSPEED_RULES
from fsdp_tune.migrate.tools.fms_hf_tuning import FMS_DATA_CONFIG
from fsdp_tune.migrate.tools.table import TOOLS
from fsdp_tune.recipe.key_paths import KeyPath, dotted
from fsdp_tune.recipe.outcome import Ask, Drop, Fate, Write
from fsdp_tune.recipe.read.loader import parse_recipe
from fsdp_tune.recipe.read.overrides import Override, read_overrides
from fsdp_tune.recipe.read.tool_detection import LLAMA_FACTORY, SWIFT, TORCHTUNE, TRL, UNSLOTH
from fsdp_tune.recipe.rules.rates import UNREAD
from fsdp_tune.recipe.schema.recipe import Recipe

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
    def names_inputs(self) -> bool:
        """Whether the file, or an override, names model and rows."""
        places = [source.path for source in self.recipe.data.train]
        return (
            self.recipe.model.name_or_path != completion.MODEL_PLACEHOLDER
            and completion.DATA_PLACEHOLDER not in places
        )

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
    rules = _rules(found, ignored)
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
    text, recipe = _accepted(ledger, found, overrides, said)
    ledger.close()
    decisions = tuple((dotted(target), words) for target, words in ledger.decisions)
    return ImportedRecipe(found.tool, path, text, recipe, tuple(ledger.rows), decisions)


def _rules(found: ForeignFile, ignored: Collection[str]) -> Rules:
    """Return the rules of the keys of a file; `ignored` are those that its tool does not read."""
    rules = {
        **TOOLS[found.tool].rules,
        LAUNCHER: section(_LAUNCHER),
        ENVIRONMENT: _environment,
        "config": _named(found.named),
        **_NESTED,
    }
    rules |= {SBATCH: jobs.sbatch, MANIFEST: Inside(jobs.MANIFEST_RULES)}
    rules |= {"env": _environment} if found.tool == TRL else {}  # TrlParser exports them
    return {**rules, **each(ignored, Drop("the tool does not read it"))}


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


# ---- Files that the file names


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
        llama_factory.include_info(ledger, found.path.parent)


def _file(rules: Rules, otherwise: Rule) -> Rule:
    """Return a rule for the name of a file, in whose place its keys are if it was found."""
    return lambda key: Inside(rules) if isinstance(key.value, dict) else outcome_of(otherwise, key)


def _not_found(key: FileKey) -> Outcome:
    return Ask(f"`{key.value}` was not found here: `fsdp-tune import {key.value}` reads it")


def _named(file: FilePath | None) -> Rule:
    """Return a rule for the name of the file of options, and for its keys that the command gives too."""

    def rule(key: FileKey) -> Outcome:
        if isinstance(key.value, dict):
            return Inside(each(tuple(key.mapping), Drop("the command gives it too, and comes first")))
        return _not_found(key) if file is None else Drop("its keys are read")

    return rule


def _deepspeed(key: FileKey) -> Outcome:
    own = TOOLS[key.tool].rules.get("deepspeed", by_name)
    return Inside(DEEPSPEED_RULES) if isinstance(key.value, dict) else outcome_of(own, key)


def _variable(key: FileKey) -> Outcome:
    """A variable of the environment that ranks get too."""
    return Write({("launch", "env", key.name): str(key.value)}, fate=Fate.KEPT)


def _machines_of_tool(key: FileKey) -> Outcome:
    """The machines of the launchers of ms-swift and LLaMA-Factory; torchrun and Accelerate do not read the
    variable."""
    if key.tool in (SWIFT, LLAMA_FACTORY):
        return Write({"launch.num_machines": key.value})
    return Drop("the option of the launcher counts the machines")


_VARIABLES: Rules = {
    **each(
        ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"), Drop("set it where `fsdp-tune train` starts")
    ),
    "NPROC_PER_NODE": same("launch.num_processes"),
    "NNODES": _machines_of_tool,
    "NODE_RANK": Drop("each machine runs the same command"),
    "MASTER_ADDR": same("launch.main_process_ip"),
    "MASTER_PORT": same("launch.main_process_port"),
    "FORCE_TORCHRUN": Drop("`fsdp-tune train` starts the ranks"),
    "ACCELERATE_LOG_LEVEL": Drop("each rank writes its own log file"),
    "OMP_NUM_THREADS": same("launch.num_cpu_threads_per_process"),
    "TOKENIZERS_PARALLELISM": Drop("rows are tokenised by processes of `data.num_proc`"),
}


def _environment(key: FileKey) -> Outcome:
    """Set each variable without a rule for the ranks: a variable has no other meaning by its name."""
    if not isinstance(key.value, dict):
        return Ask("it is not a mapping of variables")
    return Inside({name: _VARIABLES.get(name, _variable) for name in key.mapping})


_LAUNCHER: Rules = {
    **accelerate_config.LAUNCHER_RULES,
    **each(("nodes", "N"), jobs.nodes),  # of srun
    **each(STARTS_EACH_RANK, Drop("`fsdp-tune train` starts the ranks")),
    "config_file": _file(accelerate_config.ACCELERATE_RULES, _not_found),
    "deepspeed_config_file": _file(DEEPSPEED_RULES, _not_found),
}
_NESTED: Rules = {"deepspeed": _deepspeed}


# ---- The text


def _accepted(
    ledger: Ledger, found: ForeignFile, overrides: Sequence[str], read: Mapping[KeyPath, Override]
) -> tuple[str, Recipe]:
    """Return the text of a recipe, and what it loads as. A value that its reader refuses becomes a question,
    with the reader's message.

    Raises: FsdpTuneError for a refused value of `--set`.
    """
    for _ in range(_MOST_CORRECTIONS):
        text = recipe_text(ledger, found)
        try:
            path = found.path.with_suffix(".yaml")
            recipe = parse_recipe(text, path, overrides).recipe
            assert not overrides or recipe == parse_recipe(text, path).recipe, (
                "the text has the values of `--set`"
            )
            return text, recipe
        except FsdpTuneError as error:
            problems = [replace(each, message=without_places(each.message)) for each in error.problems]
            if said := [problem for each in problems if (problem := _at_override(read, each)) is not None]:
                raise FsdpTuneError(*said) from error
            withdrawn = [
                target for problem in problems if (target := _setting_of(ledger, problem)) is not None
            ]
            if not withdrawn:
                places = [
                    replace(each, where=Where(str(found.path), key=each.where.key)) for each in problems
                ]
                raise FsdpTuneError(*places) from error
            name_model_and_data(ledger)
    raise AssertionError("a recipe without settings loads")


def _at_override(overrides: Mapping[KeyPath, Override], problem: Problem) -> Problem | None:
    """Return a problem that is about an override, at its place; None for another one."""
    if str(problem.where.source).startswith("--set"):
        return problem
    key = problem.where.key or ""
    about = next(
        (each.where for target, each in overrides.items() if f"{dotted(target)}.".startswith(f"{key}.")), None
    )
    return None if about is None or not key else replace(problem, where=Where(about.source, key=key))


def _setting_of(ledger: Ledger, problem: Problem) -> KeyPath | None:
    """Take back the setting that a problem is about, and return it; None if the recipe has none there any
    more.

    A setting that nothing would read is left out; other ones become questions.
    """
    key = problem.where.key or ""
    names = {dotted(target): target for target in ledger.settings}
    target = names.get(key) or next(
        (path for name, path in names.items() if name.startswith((f"{key}.", f"{key}["))), None
    )
    target = target or next(
        (path for name, path in names.items() if key.startswith((f"{name}.", f"{name}["))), None
    )
    if target is None or not key or ledger.is_answered(target):
        return None
    if problem.code == UNREAD:
        ledger.discard(target, f"no effect: {problem.message}")
    else:
        ledger.withdraw(target, problem.message + (f"; {problem.hint}" if problem.hint else ""))
    return target
