"""Make a recipe: for a model, data and GPUs (`new`), or from the configuration of another trainer (`import`)."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from fsdp_tune.check.comparison.causes import is_named
from fsdp_tune.core import atomic
from fsdp_tune.core.atomic import DISK, check_output_file, write_file
from fsdp_tune.core.command import Bar, JsonAnswer
from fsdp_tune.core.errors import FsdpTuneError, usage_error
from fsdp_tune.data.format.templates import BUNDLED
from fsdp_tune.jobs.answers import ImportedKey
from fsdp_tune.jobs.compare import compare
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import Allowed, CompareOptions, Method, NewRecipeOptions
from fsdp_tune.jobs.plan import plan
from fsdp_tune.jobs.served import CompareAnswer
from fsdp_tune.planner.predict.predict import Plan
from fsdp_tune.recipe.read.foreign.importing import ImportedRecipe, import_file
from fsdp_tune.recipe.read.foreign.ledger import Fate
from fsdp_tune.recipe.read.loader import LoadedRecipe, parse_recipe
from fsdp_tune.recipe.read.tools import OPTION_NAMES
from fsdp_tune.recipe.references import can_only_be_a_path
from fsdp_tune.recipe.rules.contradictions import INPUTS
from fsdp_tune.recipe.schema.keys import dotted
from fsdp_tune.recipe.schema.recipe import Recipe

# ---- The best recipe of the planner, with a comment at each key that a user would ask about


_FULL_RATE, _ADAPTER_RATE = 1.0e-5, 2.0e-4
_METHODS: dict[Method, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": {"r": 16, "lora_alpha": 32}},
    "qlora": {"lora": {"r": 16, "lora_alpha": 32}, "quantization": {"load": "nf4"}},
}
_COMMENTS = {
    "  max_length:": "tokens of a row; longer examples are cut, and `prepare` counts them",
    "  packing:": "examples share rows, and no token sees another example",
    "  fraction:": "held out from `train`",
    "  global_batch_size:": "rows of a step over all GPUs",
    "  learning_rate:": "where to begin: try half and double of it",
    "  warmup_steps:": "a share of all steps",
    "  lora_alpha:": "updates are scaled by lora_alpha / r",
    "  load:": "frozen weights in 4 bits (QLoRA)",
    "  num_processes:": "one for each GPU",
    "output_dir:": "checkpoints, metrics and the merged model",
}


@dataclass(frozen=True, slots=True)
class NewRecipe:
    """`plan` is that of the recipe on the GPUs; `refused` has, for each method that did not fit, the reason."""

    path: Path
    method: Method
    plan: Plan
    refused: dict[str, str]


class _ProgressOnly(Observer):
    def __init__(self, inner: Observer, method: Method) -> None:
        self.inner, self.method = inner, method

    def progress(self, label: str, total: int | None, unit: str) -> AbstractContextManager[Bar]:
        return self.inner.progress(f"{self.method}: {label}", total, unit)


def new_recipe(model: str, data: str, options: NewRecipeOptions, observer: Observer = Observer()) -> NewRecipe:
    """Write the best recipe for a model, a source of rows and GPUs to `options.output`.

    With the method `auto`, all parameters are trained if that fits, else adapters, else adapters on weights in 4 bits.
    A layout with parameters in host memory is not taken by `auto`.
    Raises: FsdpTuneError for inputs that are not found, a file that exists, or if nothing fits.
    """
    target = options.output
    check_output_file(target)
    if can_only_be_a_path(data) and "://" not in data and not glob.has_magic(data) and not Path(data).expanduser().exists():
        raise usage_error("data-not-found", f"`{data}` does not exist", hint="a file, a directory, a hub id or builtin:NAME")
    refused: dict[str, str] = {}
    offloaded: NewRecipe | None = None
    for method in _methods(options.method):
        text = _text(model, data, method, options)
        try:
            made = _written(parse_recipe(text, target, unneeded=INPUTS), target, options, _ProgressOnly(observer, method))
        except FsdpTuneError as error:
            if error.problems[0].code != "nothing-fits":
                raise
            refused[method] = error.problems[0].message
            observer.message(f"{method}: {refused[method]}")
            continue
        found = NewRecipe(target, method, made, refused)
        if options.method != "auto" or not made.alternatives[0].recipe_changes.get("fsdp.offload_params"):
            write_file(target, _commented(target.read_text(encoding="utf-8")))
            return found
        refused[method] = "it fits only with parameters in host memory, which costs most of the time"
        observer.message(f"{method}: {refused[method]}")
        offloaded = offloaded or found
        DISK.unlink(target)
    tried = ", ".join(refused)
    if offloaded is not None:
        hint = f"`--method {offloaded.method}` writes the one with parameters in host memory"
        raise usage_error("nothing-fits", f"no recipe for {model} fits the GPUs alone ({tried} tried)", hint=hint)
    hint = "more or larger GPUs, or a shorter `--max-length`"
    raise usage_error("nothing-fits", f"no recipe for {model} fits ({tried} tried): {next(iter(refused.values()))}", hint=hint)


def _written(loaded: LoadedRecipe, target: Path, options: NewRecipeOptions, observer: Observer) -> Plan:
    return plan(loaded, gpu=options.gpu, num_gpus=options.num_gpus, target="fastest", write=target, observer=observer)


def _methods(wanted: str) -> list[Method]:
    return list(_METHODS) if wanted == "auto" else [method for method in _METHODS if method == wanted]


def _text(model: str, data: str, method: Method, options: NewRecipeOptions) -> str:
    source: dict[str, Any] = {"path": data} | ({"split": options.split} if options.split else {})
    document: dict[str, Any] = {
        "model": {"name_or_path": model},
        "data": {"train": [source], "eval": {"fraction": 0.01}, "max_length": options.max_length, "packing": True},
        **_METHODS[method],
        "precision": {"mixed_precision": "bf16"},
        "training": {
            "global_batch_size": options.global_batch_size,
            "learning_rate": _FULL_RATE if method == "full" else _ADAPTER_RATE,
            "num_train_epochs": 3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 0.03,
            "save_steps": 200,
        },
        "launch": {"num_processes": options.num_gpus},
        "output_dir": "runs/{name}",
    }
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def _commented(text: str) -> str:
    """Add to the lines of a recipe what their keys mean, unless they have a comment."""

    def with_words(line: str) -> str:
        words = next((words for key, words in _COMMENTS.items() if line.startswith(key)), None)
        return line if words is None or "#" in line else f"{line}  # {words}"

    return "".join(f"{with_words(line)}\n" for line in text.splitlines())


# ---- The configuration of another trainer, with an account of every key


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
    """A recipe made of another tool's configuration. Its `imported.text` loads; whether it trains the same is for `unchecked` to say."""

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
    """Read a configuration of another trainer (`OPTION_NAMES` has them), or the script or notebook with its arguments, which is not run.

    `tool` is a name of `--from`; None: recognised by the keys. The recipe is written to `output`, if it is given; an existing file is
    replaced with `force` alone. `num_gpus`: the GPUs that the configuration was made for, if it does not say it. `overrides`: `KEY=VALUE`
    for the recipe, in place of what the file has or leaves open. `check`: as `check_import`; `allowed` is the code that this may run.
    Raises: FsdpTuneError for a file of no known tool, of another kind of training, or that exists already, and for a wrong override.
    """
    path = Path(source)
    target = None if output is None else Path(output)
    if tool is not None and tool not in OPTION_NAMES:
        raise usage_error("unknown-foreign-file", f"`{tool}` is not a tool whose files are read", hint=f"one of {', '.join(OPTION_NAMES)}")
    if check and target is None:
        raise nothing_to_check()
    if target is not None:
        _check_target(target, path, force=force)
    known = OPTION_NAMES[tool] if tool else None
    imported = import_file(path, tool=known, num_gpus=num_gpus, templates=frozenset(BUNDLED), overrides=overrides)
    if target is not None:
        atomic.write_file(target, imported.text)
    found = Import(imported, _unchecked(imported.recipe), target, num_gpus, tuple(overrides))
    return replace(found, check=check_import(found, allowed=allowed, observer=observer)) if check else found


def check_import(found: Import, *, allowed: Allowed = Allowed(), observer: Observer = Observer()) -> CompareAnswer:
    """Compare the imported file with the recipe that was written, as `compare` does: from the tokens of the rows to a step's update.

    TRL and axolotl compute the side of their files themselves. Of another tool it is what is imported without overrides, so that only
    what they, or a person, have changed is found.
    Raises: FsdpTuneError if no recipe was written, or if the model or the rows that it names cannot be read here.
    """
    if found.output is None:
        raise nothing_to_check()
    path = found.imported.path
    read = partial(import_file, path, tool=found.imported.tool, num_gpus=found.num_gpus, templates=frozenset(BUNDLED))
    plain = read() if found.overrides else found.imported
    if answers := _answers(plain, found.overrides):
        plain = read(overrides=answers)
    if not plain.names_inputs:
        message = f"`--check` compares {path} with the recipe, and neither it nor `--set` names model and rows"
        raise usage_error("import-check", message, hint="leave out `--check`: `fsdp-tune rehearse` tries the recipe itself")
    return compare(plain, found.output, CompareOptions(num_gpus=found.num_gpus, allowed=allowed), observer=observer)


def _answers(plain: ImportedRecipe, overrides: Sequence[str]) -> list[str]:
    """Return the overrides that say what the file leaves open, and change nothing that it gives."""
    asked = {dotted(target) for row in plain.rows if row.fate is Fate.QUESTION for target in row.targets}
    asked |= {key for key, _ in plain.decisions if key}
    return [text for text in overrides if is_named(text.partition("=")[0].strip(), asked)]


def nothing_to_check() -> FsdpTuneError:
    return usage_error(
        "import-check", "`--check` compares the file with the recipe that is written, and none is", hint="--output recipe.yaml"
    )


def _check_target(target: Path, source: Path, *, force: bool) -> None:
    if target.exists() and source.exists() and target.samefile(source):
        raise usage_error("output-exists", f"`{target}` is the file to be imported", hint="give another file name")
    atomic.check_output_file(target, replaces=force, otherwise="`--force`")


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
