"""Make the paths of a recipe absolute, so that every rank finds the same files, and check the output directory.

Inputs that only the start of a run reads: a resume takes them from the run's directory if their files are gone.

RUN/model has the configuration of the model, its tokenizer and its chat template, and a checkpoint has the weights; only that of an
adapter has no weights of the base.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from fsdp_tune.core.hub import cached_model_file
from fsdp_tune.recipe.findings import Finding
from fsdp_tune.recipe.rules.contradictions import OUTPUT_FIELDS
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.sections import BUILDERS

PACKAGE = Path(__file__).resolve().parent.parent


def output_directory(recipe: Recipe, cwd: Path) -> tuple[Path, list[Finding]]:
    """Return the run directory with {name} and {seed} filled in, and the reasons why it cannot be used."""
    values = {"name": recipe.name or "run", "seed": str(recipe.training.seed)}
    filled = OUTPUT_FIELDS.sub(lambda found: values[found[1]], recipe.output_dir)
    path = Path(cwd, filled)
    resolved = path.resolve()
    return resolved, [_finding(message, hint) for message, hint in _path_problems(recipe, resolved, cwd)]


def _finding(message: str, hint: str) -> Finding:
    return Finding("bad-output-dir", ("output_dir",), f"`output_dir` {message}", hint)


def _path_problems(recipe: Recipe, path: Path, cwd: Path) -> list[tuple[str, str]]:
    elsewhere = "name a new directory, such as `runs/{name}`"
    if path == Path(path.anchor):
        return [("is the root of the file system", elsewhere)]
    if path == Path.home().resolve():
        return [("is your home directory", elsewhere)]
    if path.exists() and not path.is_dir():
        return [(f"is `{path}`, which is a file", elsewhere)]
    blocked = next((parent for parent in path.parents if parent.exists() and not parent.is_dir()), None)
    if blocked is not None:
        return [(f"leads through `{blocked}`, which is a file", elsewhere)]
    if path == PACKAGE or PACKAGE in path.parents:
        return [("is inside the installed package", elsewhere)]
    for source in _local_directories(recipe, cwd):
        if path == source or source in path.parents:
            return [(f"is inside the training data `{source}`", elsewhere)]
    for source in _local_inputs(recipe, cwd):
        if path in source.parents and path.exists():
            return [(f"contains the data or model `{source}`, which `--overwrite` would move away", elsewhere)]
    return []


def _local_directories(recipe: Recipe, cwd: Path) -> list[Path]:
    """Return the local directories of training and evaluation data, except the working directory."""
    named = [source.path for _, source in recipe.data.sources]
    return [path.resolve() for path in (Path(cwd, name) for name in named) if path.is_dir() and path.resolve() != cwd.resolve()]


def _local_inputs(recipe: Recipe, cwd: Path) -> list[Path]:
    """Return the local files and directories that the recipe reads: data, model and tokenizer."""
    named = [*(source.path for _, source in recipe.data.sources), recipe.model.name_or_path, recipe.model.tokenizer]
    paths = (Path(cwd, Path(name).expanduser()) for name in named if name is not None)
    return [path.resolve() for path in paths if path.exists()]


def absolute_paths(data: dict[str, Any], cwd: Path, resumed: Path | None = None) -> tuple[dict[str, str], list[Finding]]:
    """Make the local paths in the dumped recipe `data` absolute, in place. Return the reason of each change, and findings of missing files.

    Missing files of a data source are reported by the code that reads them. `resumed`: the directory of a run, which has what a resume
    needs of the model, the tokenizer and the chat template with which it was started.
    """
    work = _Paths(cwd, recorded=_recorded(resumed) if resumed is not None else {}, is_adapter=data["lora"] is not None)
    model = data["model"]
    same = model["tokenizer"] == model["name_or_path"]
    model["name_or_path"] = work.local(model["name_or_path"], "model.name_or_path", must_exist=True)
    model["tokenizer"] = model["name_or_path"] if same else work.local(model["tokenizer"], "model.tokenizer", must_exist=True)
    if isinstance(model["from_config"], str):
        model["from_config"] = work.config_file(model["from_config"])
    rows = data["data"]
    rows["cache_dir"] = str(work.absolute(rows["cache_dir"]))
    rows["chat_template"] = work.local(rows["chat_template"], "data.chat_template", must_exist=True)
    for group in ("train", "eval"):
        sources = cast(list[dict[str, Any]], rows[group]) if isinstance(rows[group], list) else []
        for index, source in enumerate(sources):
            work.source(source, f"data.{group}[{index}]")
    return work.reasons, work.findings


@dataclass(slots=True)
class _Paths:
    cwd: Path
    recorded: dict[str, str] = field(default_factory=dict[str, str])
    """The values of a run that is resumed."""
    is_adapter: bool = False
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    findings: list[Finding] = field(default_factory=list[Finding])

    def absolute(self, name: str) -> Path:
        return Path(self.cwd, Path(name).expanduser())

    def local(self, name: str | None, key: str, *, must_exist: bool) -> str | None:
        """Return the absolute path of a name that exists on this disk or can only be a path; return any other name (a hub id) unchanged."""
        if name is None or name.startswith("builtin:") or "://" in name:
            return name
        path = self.absolute(name)
        if path.exists():
            self.reasons[key] = "found on this machine"
            return str(path.resolve())
        if self.recorded.get(key) == str(path.resolve()):
            return self._of_run(key)
        if not can_only_be_a_path(name):
            return name
        if must_exist:
            message = f"`{key}` is `{name}`, and `{path}` does not exist"
            hint = _START.format(cwd=self.cwd) if not Path(name).expanduser().is_absolute() else None
            self.findings.append(Finding("not-found", (key,), message, hint))
        return str(path)

    def _of_run(self, key: str) -> str:
        """Return the path of a file that is gone, as the resumed run recorded it."""
        path = self.recorded[key]
        if key == "model.name_or_path" and self.is_adapter:
            message = f"`{key}` was `{path}` so far, and it does not exist: the checkpoints of `lora:` hold the adapters alone"
            self.findings.append(Finding("not-found", (key,), message, f"put the same model there again, or pass `--set {key}=DIR`"))
        else:
            self.reasons[key] = "recorded by the run as it was started"
        return path

    def source(self, source: dict[str, Any], key: str) -> None:
        if source["path"] not in BUILDERS:
            source["path"] = self.local(source["path"], f"{key}.path", must_exist=False)
        elif source["data_files"] is not None:
            files = source["data_files"]
            absolute = [name if "://" in name else str(self.absolute(name)) for name in ([files] if isinstance(files, str) else files)]
            source["data_files"] = absolute[0] if isinstance(files, str) else absolute
        source["chat_template"] = self.local(source["chat_template"], f"{key}.chat_template", must_exist=True)

    def config_file(self, name: str) -> str:
        path = self.absolute(name)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file() and self.recorded.get("model.from_config") in (str(path.resolve()), str(path.resolve() / "config.json")):
            return self._of_run("model.from_config")
        if not path.is_file():
            hint = "give a config.json, or the mapping itself: `{model_type: llama, hidden_size: 512}`"
            self.findings.append(
                Finding("not-found", ("model.from_config",), f"`model.from_config` is `{name}`, and `{path}` does not exist", hint)
            )
        return str(path.resolve())


def _recorded(run: Path) -> dict[str, str]:
    """Return the paths in the recipe of a run; {} if it cannot be read, which is reported where the run is."""
    try:
        raw: dict[str, dict[str, Any]] = json.loads((run / "recipe.json").read_bytes())
        found = {f"{section}.{key}": value for section in ("model", "data") for key, value in raw[section].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str)}


_START = "relative paths start at {cwd}"
FILE_ENDINGS = (
    *(".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv", ".txt", ".arrow", ".jinja", ".jinja2", ".j2"),
    *(".gz", ".zst", ".bz2", ".xz", ".zip", ".7z", ".tar"),
)


def can_only_be_a_path(name: str) -> bool:
    """Return whether a name cannot be a hub id (`name` or `owner/name`) because of its beginning, its ending, its slashes or a glob."""
    return name.startswith(("/", ".", "~")) or name.endswith(FILE_ENDINGS) or name.count("/") > 1 or glob.has_magic(name)


_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "chat_template.jinja")


def missing_start_inputs(recipe: Recipe) -> dict[str, str]:
    """Return the keys of a resolved recipe whose files are not on this machine, with their values, if a resume needs only the run's."""
    return {key: name for key, name, revision in _start_inputs(recipe) if not _is_here(name, revision)}


def _start_inputs(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yield key, value and revision on the hub."""
    model, template = recipe.model, recipe.data.chat_template
    if isinstance(model.from_config, str):
        yield "model.from_config", model.from_config, model.revision
    elif model.from_config is None and model.name_or_path is not None and recipe.lora is None:
        yield "model.name_or_path", model.name_or_path, model.revision
    if model.tokenizer is not None:
        yield "model.tokenizer", model.tokenizer, model.tokenizer_revision or "main"
    if template is not None and "/" in template:  # all others are bundled
        yield "data.chat_template", template, "main"


def _is_here(name: str, revision: str) -> bool:
    if name.startswith("builtin:") or "://" in name or Path(name).exists():
        return True
    return not can_only_be_a_path(name) and any(cached_model_file(name, revision, file) is not None for file in _FILES)


def from_run(recipe: Recipe, run: Path, keys: Collection[str]) -> Recipe:
    """Return the recipe with the inputs of `keys` taken from a run, for building the model that one of its checkpoints fills."""
    model, own = dict[str, Any](), str(run / "model")
    if {"model.name_or_path", "model.from_config"}.intersection(keys):
        model = {"name_or_path": str(run), "from_config": None}
    if "model.tokenizer" in keys:
        model["tokenizer"] = own
    data = {"chat_template": own} if "data.chat_template" in keys else {}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=model), "data": recipe.data.model_copy(update=data)})
