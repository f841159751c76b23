"""The files and directories that a recipe names outside of itself.

Paths are made absolute, so that every rank finds the same files. Inputs that only the start of a run reads
are taken by a resume from the run's directory if their files are gone: RUN/model has the configuration of the
model, its tokenizer and its chat template, and a checkpoint has the weights; only that of an adapter has no
weights of the base.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from fsdp_tune.core.files import expanded, pattern_below
from fsdp_tune.core.hub import cached_model_file
from fsdp_tune.core.values import as_items
from fsdp_tune.recipe.rules.paths import OUTPUT_FIELDS
from fsdp_tune.recipe.schema.data_section import BUILDERS
from fsdp_tune.recipe.schema.keys import Finding
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.value_kinds import is_jinja

PACKAGE = Path(__file__).resolve().parent.parent


def output_directory(recipe: Recipe, cwd: Path) -> tuple[Path, list[Finding]]:
    """Return the run directory with {name} and {seed} filled in, and the reasons why it cannot be used."""
    values = {"name": recipe.name or "run", "seed": str(recipe.training.seed)}
    resolved = Path(cwd, OUTPUT_FIELDS.sub(lambda found: values[found[1]], recipe.output_dir)).resolve()
    problem = _path_problem(recipe, resolved, cwd)
    return resolved, [] if problem is None else [
        Finding("bad-output-dir", ("output_dir",), f"`output_dir` {problem[0]}", problem[1])
    ]


def _path_problem(recipe: Recipe, path: Path, cwd: Path) -> tuple[str, str] | None:
    """Return why a directory cannot be that of a run, and what to do; None if it can."""
    elsewhere = "name a new directory, such as `runs/{name}`"
    if path == Path(path.anchor):
        return "is the root of the file system", elsewhere
    if path == absolute_path("~", cwd).resolve():
        return "is your home directory", elsewhere
    if path.exists() and not path.is_dir():
        return f"is `{path}`, which is a file", elsewhere
    blocked = next((parent for parent in path.parents if parent.exists() and not parent.is_dir()), None)
    if blocked is not None:
        return f"leads through `{blocked}`, which is a file", elsewhere
    if path == PACKAGE or PACKAGE in path.parents:
        return "is inside the installed package", elsewhere
    if recipe.data.cache_dir is not None:
        cache = absolute_path(recipe.data.cache_dir, cwd).resolve()
        if path == cache or path in cache.parents:  # a run directory is made, and moved aside, in one piece
            return f"contains `data.cache_dir`, `{cache}`", "name a cache outside of it, or leave the key out"
    data = _local_data(recipe, cwd)
    for source in data:
        if source.is_dir() and source != cwd.resolve() and (path == source or source in path.parents):
            return f"is inside the training data `{source}`", elsewhere
    models = [
        absolute_path(name, cwd)
        for name in (recipe.model.name_or_path, recipe.model.tokenizer)
        if name is not None
    ]
    for source in (*data, *(model.resolve() for model in models if exists(model))):
        if path in source.parents and path.exists():
            return f"contains the data or model `{source}`, which `--overwrite` would move away", elsewhere
    return None


def _local_data(recipe: Recipe, cwd: Path) -> list[Path]:
    """Return the local files and directories of training and evaluation data; of a glob the pattern, whose
    parents have them."""
    paths: list[Path] = []
    for _, source in (*recipe.data.sources, *recipe.evaluation.sources):
        is_built = source.path in BUILDERS
        folder = absolute_path(source.data_dir or "", cwd) if is_built else cwd
        names = map(str, as_items(source.data_files or [])) if is_built else [source.path]
        paths += [absolute_path(name, folder) for name in names if "://" not in name]
    return [path.resolve() for path in paths if exists(path) or glob.has_magic(str(path))]


def absolute_path(name: str, cwd: Path) -> Path:
    """Return a path that a recipe names. It may begin with `~`, or `~USER`."""
    return Path(cwd, expanded(name))


def absolute_paths(
    data: dict[str, Any], cwd: Path, resumed: Path | None = None
) -> tuple[dict[str, str], list[Finding]]:
    """Make the local paths in the dumped recipe `data` absolute, in place. Return the reason of each change,
    and findings of missing files.

    Missing files of a data source are reported by the code that reads them. `resumed`: the directory of a
    run, which has what a resume needs of the model, the tokenizer and the chat template with which it was
    started.
    """
    work = _Paths(
        cwd, recorded=_recorded(resumed) if resumed is not None else {}, is_adapter=data["lora"] is not None
    )
    model = data["model"]
    same = model["tokenizer"] == model["name_or_path"]
    model["name_or_path"] = work.local(model["name_or_path"], "model.name_or_path", must_exist=True)
    model["tokenizer"] = (
        model["name_or_path"] if same else work.local(model["tokenizer"], "model.tokenizer", must_exist=True)
    )
    if isinstance(model["from_config"], str):
        model["from_config"] = work.config_file(model["from_config"])
    rows = data["data"]
    rows["cache_dir"] = str(work.absolute(rows["cache_dir"]))
    rows["chat_template"] = work.local(rows["chat_template"], "data.chat_template", must_exist=True)
    evaluation = data["evaluation"]
    if evaluation["scratch_dir"] is not None:
        evaluation["scratch_dir"] = str(work.absolute(evaluation["scratch_dir"]))
    groups = {"data.train": rows["train"], "data.eval": rows["eval"], "evaluation.sets": evaluation["sets"]}
    for key, group in groups.items():
        for index, source in enumerate(
            cast(list[dict[str, object]], group) if isinstance(group, list) else []
        ):
            work.source(source, f"{key}[{index}]")
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
        return absolute_path(name, self.cwd)

    def local(self, name: str | None, key: str, *, must_exist: bool) -> str | None:
        """Return the absolute path of a name that exists on this disk or can only be a path; return any other
        name (a hub id) unchanged."""
        if name is None or name.startswith("builtin:") or "://" in name:
            return name
        path = self.absolute(name)
        if exists(path):
            self.reasons[key] = "found on this machine"
            return str(path.resolve())
        if self.recorded.get(key) == str(path.resolve()):
            return self._of_run(key)
        if not can_only_be_a_path(name):
            return name
        if must_exist:
            message = f"`{key}` is `{name}`, and `{path}` does not exist"
            hint = (
                _START.format(cwd=self.cwd)
                if not Path(name).is_absolute() and not name.startswith("~")
                else None
            )
            self.findings.append(Finding("not-found", (key,), message, hint))
        return pattern_below(self.cwd, name)

    def _of_run(self, key: str) -> str:
        """Return the path of a file that is gone, as the resumed run recorded it."""
        path = self.recorded[key]
        if key == "model.name_or_path" and self.is_adapter:
            message = (
                f"`{key}` was `{path}` so far, and it does not exist: the checkpoints of `lora:` hold "
                "the adapters alone"
            )
            self.findings.append(
                Finding(
                    "not-found", (key,), message, f"put the same model there again, or pass `--set {key}=DIR`"
                )
            )
        else:
            self.reasons[key] = "recorded by the run as it was started"
        return path

    def source(self, source: dict[str, Any], key: str) -> None:
        if source["path"] not in BUILDERS:
            source["path"] = self.local(source["path"], f"{key}.path", must_exist=False)
        elif source["data_files"] is not None:
            files, folder = source["data_files"], self.absolute(source["data_dir"] or "")
            names = [files] if isinstance(files, str) else files
            absolute = [name if "://" in name else pattern_below(folder, name) for name in names]
            source["data_files"] = absolute[0] if isinstance(files, str) else absolute
        source["chat_template"] = self.local(source["chat_template"], f"{key}.chat_template", must_exist=True)

    def config_file(self, name: str) -> str:
        path = self.absolute(name)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file() and self.recorded.get("model.from_config") in (
            str(path.resolve()),
            str(path.resolve() / "config.json"),
        ):
            return self._of_run("model.from_config")
        if not path.is_file():
            hint = "give a config.json, or the mapping itself: `{model_type: llama, hidden_size: 512}`"
            self.findings.append(
                Finding(
                    "not-found",
                    ("model.from_config",),
                    f"`model.from_config` is `{name}`, and `{path}` does not exist",
                    hint,
                )
            )
        return str(path.resolve())


def _recorded(run: Path) -> dict[str, str]:
    """Return the paths in the recipe of a run; {} if it cannot be read, which is reported where the run
    is."""
    try:
        raw: dict[str, dict[str, object]] = json.loads((run / "recipe.json").read_bytes())
        found = {
            f"{section}.{key}": value for section in ("model", "data") for key, value in raw[section].items()
        }
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str)}


_START = "relative paths start at {cwd}"
FILE_ENDINGS = (
    *(".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv", ".txt", ".arrow", ".jinja", ".jinja2", ".j2"),
    *(".gz", ".zst", ".bz2", ".xz", ".zip", ".7z", ".tar"),
)


def can_only_be_a_path(name: str) -> bool:
    """Return whether a name cannot be a hub id (`name` or `owner/name`) because of its beginning, its ending,
    its slashes or a glob.

    The text of a chat template is neither.
    """
    is_path = (
        name.startswith(("/", ".", "~"))
        or name.endswith(FILE_ENDINGS)
        or name.count("/") > 1
        or glob.has_magic(name)
    )
    return is_path and not is_jinja(name)


def exists(path: Path) -> bool:
    """Return whether a path exists. A text that is too long for a path counts as absent."""
    try:
        return path.exists()
    except OSError:
        return False


_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "chat_template.jinja",
)


def missing_start_inputs(recipe: Recipe) -> dict[str, str]:
    """Return the keys of a resolved recipe whose files are not on this machine, with their values, if a
    resume needs only the run's."""
    return {each.key: each.name for each in _start_inputs(recipe) if not _is_here(each.name, each.revision)}


class _StartInput(NamedTuple):
    """A key that names files, its value, and their revision on the hub."""

    key: str
    name: str
    revision: str


def _start_inputs(recipe: Recipe) -> Iterator[_StartInput]:
    model, template = recipe.model, recipe.data.chat_template
    if isinstance(model.from_config, str):
        yield _StartInput("model.from_config", model.from_config, model.revision)
    elif model.from_config is None and model.name_or_path is not None and recipe.lora is None:
        yield _StartInput("model.name_or_path", model.name_or_path, model.revision)
    if model.tokenizer is not None:
        yield _StartInput("model.tokenizer", model.tokenizer, model.tokenizer_revision or "main")
    if template is not None and "/" in template and not is_jinja(template):  # all others are bundled
        yield _StartInput("data.chat_template", template, "main")


def _is_here(name: str, revision: str) -> bool:
    if name.startswith("builtin:") or "://" in name or exists(Path(name)):
        return True
    return not can_only_be_a_path(name) and any(
        cached_model_file(name, revision, file) is not None for file in _FILES
    )


def from_run(recipe: Recipe, run: Path, keys: Collection[str]) -> Recipe:
    """Return the recipe with the inputs of `keys` taken from a run, for building the model that one of its
    checkpoints fills."""
    model, own = dict[str, object](), str(run / "model")
    if {"model.name_or_path", "model.from_config"}.intersection(keys):
        model = {"name_or_path": str(run), "from_config": None}
    if "model.tokenizer" in keys:
        model["tokenizer"] = own
    data = {"chat_template": own} if "data.chat_template" in keys else {}
    return recipe.model_copy(
        update={"model": recipe.model.model_copy(update=model), "data": recipe.data.model_copy(update=data)}
    )
