"""What a recipe names outside of itself: files and directories, user extensions, and the adapter that a run starts from.

Paths are made absolute, so that every rank finds the same files. Inputs that only the start of a run reads are taken by a resume from
the run's directory if their files are gone: RUN/model has the configuration of the model, its tokenizer and its chat template, and a
checkpoint has the weights; only that of an adapter has no weights of the base.

Extensions are entry points of installed distributions, found without importing them. Unset keys of `lora:` become those of the adapter
that `lora.adapter` names, as by PEFT's `from_pretrained`.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, cast

from pydantic import ValidationError

from fsdp_tune.core.errors import NOWHERE, FsdpTuneError, Problem, Where, usage_error
from fsdp_tune.core.hub import cached_model_file
from fsdp_tune.core.tensors.file_formats import CONFIG_FILE, PREFIX, WEIGHTS_FILE, DamagedHeader, read_header
from fsdp_tune.core.user_cache import home_directory
from fsdp_tune.core.values import as_items
from fsdp_tune.recipe.rules.contradictions import OUTPUT_FIELDS
from fsdp_tune.recipe.schema.keys import Finding, given
from fsdp_tune.recipe.schema.kinds import is_jinja
from fsdp_tune.recipe.schema.recipe import Lora, Recipe
from fsdp_tune.recipe.schema.sections import BUILDERS

PACKAGE = Path(__file__).resolve().parent.parent


def output_directory(recipe: Recipe, cwd: Path) -> tuple[Path, list[Finding]]:
    """Return the run directory with {name} and {seed} filled in, and the reasons why it cannot be used."""
    values = {"name": recipe.name or "run", "seed": str(recipe.training.seed)}
    resolved = Path(cwd, OUTPUT_FIELDS.sub(lambda found: values[found[1]], recipe.output_dir)).resolve()
    problem = _path_problem(recipe, resolved, cwd)
    return resolved, [] if problem is None else [Finding("bad-output-dir", ("output_dir",), f"`output_dir` {problem[0]}", problem[1])]


def _path_problem(recipe: Recipe, path: Path, cwd: Path) -> tuple[str, str] | None:
    """Return why a directory cannot be that of a run, and what to do; None if it can."""
    elsewhere = "name a new directory, such as `runs/{name}`"
    if path == Path(path.anchor):
        return "is the root of the file system", elsewhere
    if (home := home_directory()) is not None and path == home.resolve():
        return "is your home directory", elsewhere
    if path.exists() and not path.is_dir():
        return f"is `{path}`, which is a file", elsewhere
    blocked = next((parent for parent in path.parents if parent.exists() and not parent.is_dir()), None)
    if blocked is not None:
        return f"leads through `{blocked}`, which is a file", elsewhere
    if path == PACKAGE or PACKAGE in path.parents:
        return "is inside the installed package", elsewhere
    data = _local_data(recipe, cwd)
    for source in data:
        if source.is_dir() and source != cwd.resolve() and (path == source or source in path.parents):
            return f"is inside the training data `{source}`", elsewhere
    models = [absolute_path(name, cwd) for name in (recipe.model.name_or_path, recipe.model.tokenizer) if name is not None]
    for source in (*data, *(model.resolve() for model in models if exists(model))):
        if path in source.parents and path.exists():
            return f"contains the data or model `{source}`, which `--overwrite` would move away", elsewhere
    return None


def _local_data(recipe: Recipe, cwd: Path) -> list[Path]:
    """Return the local files and directories of training and evaluation data; of a glob the pattern, whose parents have them."""
    paths: list[Path] = []
    for _, source in (*recipe.data.sources, *recipe.evaluation.sources):
        is_built = source.path in BUILDERS
        folder = absolute_path(source.data_dir or "", cwd) if is_built else cwd
        names = map(str, as_items(source.data_files or [])) if is_built else [source.path]
        paths += [absolute_path(name, folder) for name in names if "://" not in name]
    return [path.resolve() for path in paths if exists(path) or glob.has_magic(str(path))]


def absolute_path(name: str, cwd: Path) -> Path:
    """Return a path that a recipe names. It may begin with `~`, or `~USER`; without such a user that is the name of a directory."""
    try:
        return Path(cwd, Path(name).expanduser())
    except RuntimeError:
        return Path(cwd, name)


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
    evaluation = data["evaluation"]
    if evaluation["scratch_dir"] is not None:
        evaluation["scratch_dir"] = str(work.absolute(evaluation["scratch_dir"]))
    groups = {"data.train": rows["train"], "data.eval": rows["eval"], "evaluation.sets": evaluation["sets"]}
    for key, group in groups.items():
        for index, source in enumerate(cast(list[dict[str, object]], group) if isinstance(group, list) else []):
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
        """Return the absolute path of a name that exists on this disk or can only be a path; return any other name (a hub id) unchanged."""
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
            hint = _START.format(cwd=self.cwd) if not Path(name).is_absolute() and not name.startswith("~") else None
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
            files, folder = source["data_files"], self.absolute(source["data_dir"] or "")
            names = [files] if isinstance(files, str) else files
            absolute = [name if "://" in name else str(absolute_path(name, folder)) for name in names]
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
        raw: dict[str, dict[str, object]] = json.loads((run / "recipe.json").read_bytes())
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
    """Return whether a name cannot be a hub id (`name` or `owner/name`) because of its beginning, its ending, its slashes or a glob.

    The text of a chat template is neither.
    """
    is_path = name.startswith(("/", ".", "~")) or name.endswith(FILE_ENDINGS) or name.count("/") > 1 or glob.has_magic(name)
    return is_path and not is_jinja(name)


def exists(path: Path) -> bool:
    """Return whether a path exists. A text that is too long for a path counts as absent."""
    try:
        return path.exists()
    except OSError:
        return False


_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "chat_template.jinja")


def missing_start_inputs(recipe: Recipe) -> dict[str, str]:
    """Return the keys of a resolved recipe whose files are not on this machine, with their values, if a resume needs only the run's."""
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
    return not can_only_be_a_path(name) and any(cached_model_file(name, revision, file) is not None for file in _FILES)


def from_run(recipe: Recipe, run: Path, keys: Collection[str]) -> Recipe:
    """Return the recipe with the inputs of `keys` taken from a run, for building the model that one of its checkpoints fills."""
    model, own = dict[str, object](), str(run / "model")
    if {"model.name_or_path", "model.from_config"}.intersection(keys):
        model = {"name_or_path": str(run), "from_config": None}
    if "model.tokenizer" in keys:
        model["tokenizer"] = own
    data = {"chat_template": own} if "data.chat_template" in keys else {}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=model), "data": recipe.data.model_copy(update=data)})


Kind = Literal["callbacks", "loaders", "metrics"]


@dataclass(frozen=True, slots=True)
class Extension:
    """An entry point of the group `fsdp_tune.KIND`."""

    kind: str
    name: str
    target: str
    """`package.module:attribute`."""
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"`{self.name}` of {self.distribution} {self.version}"

    def as_dict(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, str]) -> Self:
        return cls(**raw)

    def load(self, where: Where = NOWHERE) -> Any:
        """Import the object. Call it only where the user has allowed extensions. Raises: usage error."""
        try:
            return EntryPoint(self.name, self.target, f"fsdp_tune.{self.kind}").load()
        except FsdpTuneError:  # a stop signal
            raise
        except Exception as error:
            message = f"{self} (`{self.target}`) cannot be imported: {type(error).__name__}: {error}"
            raise usage_error("extension-failed", message, where=where) from error


def find_extension(kind: Kind, name: str, where: Where = NOWHERE) -> Extension:
    """Return the installed extension of this name. Raises: usage error that lists the installed names."""
    installed = entry_points(group=f"fsdp_tune.{kind}")
    found = [each for each in installed if each.name == name]
    if not found:
        names = ", ".join(sorted({each.name for each in installed})) or "none"
        message = f"no installed distribution has the entry point `{name}` in the group `fsdp_tune.{kind}`"
        raise usage_error("unknown-extension", message, where=where, hint=f"installed: {names}")
    extensions = {_described(kind, each) for each in found}
    if len(extensions) > 1:
        message = f"several distributions have the entry point `{name}` in the group `fsdp_tune.{kind}`"
        hint = f"uninstall all but one of {', '.join(sorted(each.distribution for each in extensions))}"
        raise usage_error("ambiguous-extension", message, where=where, hint=hint)
    return extensions.pop()


def _described(kind: Kind, point: EntryPoint) -> Extension:
    assert point.dist is not None, "entry points that are found belong to a distribution"
    return Extension(kind, point.name, point.value, point.dist.name, point.dist.version)


class NamedExtension(NamedTuple):
    key: str
    """Of the recipe."""
    kind: Kind
    name: str


def named_extensions(recipe: Recipe) -> list[NamedExtension]:
    """Return each extension that the recipe names."""
    lists: tuple[tuple[Kind, list[str]], ...] = (("callbacks", recipe.extensions.callbacks), ("metrics", recipe.extensions.metrics))
    named = [NamedExtension(f"extensions.{kind}[{i}]", kind, name) for kind, names in lists for i, name in enumerate(names)]
    sources = [(f"{key}.loader", entry.loader) for key, entry in recipe.data.sources if entry.loader is not None]
    return [*named, *(NamedExtension(key, "loaders", name) for key, name in sources)]


def find_extensions(recipe: Recipe) -> list[Extension]:
    """Return the installed extensions that a recipe names, without importing them. Raises: FsdpTuneError with every unknown name."""
    found: list[Extension] = []
    problems: list[Problem] = []
    for key, kind, name in named_extensions(recipe):
        try:
            found.append(find_extension(kind, name, Where(key=key)))
        except FsdpTuneError as error:
            problems.extend(error.problems)
    if problems:
        raise FsdpTuneError(*problems)
    return found


ADAPTER_KEY = "lora.adapter"
# Keys of `lora:` that PEFT's config has under the same names, with PEFT's values for those that it leaves out.
PEFT_DEFAULTS: dict[str, object] = {
    "r": 8,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "target_parameters": [],
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": [],
}
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_MODULE = re.compile(rf"{re.escape(PREFIX)}(.+)\.lora_(embedding_)?A(\.weight)?")


@dataclass(slots=True)
class ContinuedAdapter:
    """`values`: of keys of `lora:`; `reason`: where they are from."""

    values: dict[str, object] = field(default_factory=dict[str, object])
    reason: str = ""
    findings: list[Finding] = field(default_factory=list[Finding])


def continue_adapter(recipe: Recipe, cwd: Path, output: Path) -> ContinuedAdapter:
    """Return the place of the adapter and the values of unset keys. `output`: the run directory, which has them if it was started before.

    Whether the adapter fits the model is checked with the model (`model.loading.adapter_files`).
    """
    assert recipe.lora is not None
    assert recipe.lora.adapter is not None
    named = absolute_path(recipe.lora.adapter, cwd).resolve()
    inside = named / "adapter"
    folder = inside if not (named / CONFIG_FILE).is_file() and (inside / CONFIG_FILE).is_file() else named
    config = _read_object(folder / CONFIG_FILE)
    if config is None and (recorded := _recorded_lora(output, (named, inside))) is not None:
        own = {key: recorded[key] for key in Lora.model_fields if key in recorded and not given(recipe, f"lora.{key}")}
        return ContinuedAdapter(own | {"adapter": recorded["adapter"]}, "recorded by the run as it was started")
    found = ContinuedAdapter({"adapter": str(folder)}, f"the adapter's {CONFIG_FILE}")
    if config is None:
        found.findings += _adapter_of_run(named)
    elif config.get("peft_type") == "LORA":
        own = {key: value for key, value in _lora_values(config, folder).items() if not given(recipe, f"lora.{key}")}
        found.findings += _invalid_values(folder, own)
        found.values |= own
    return found


def without_adapter(recipe: Recipe) -> Recipe:
    """Return the recipe for building a model whose adapters are filled from a checkpoint, or not at all; the files may be gone."""
    if recipe.lora is None or recipe.lora.adapter is None:
        return recipe
    return recipe.model_copy(update={"lora": recipe.lora.model_copy(update={"adapter": None})})


def _lora_values(config: Mapping[str, object], folder: Path) -> dict[str, object]:
    values = {key: default if config.get(key) is None else config[key] for key, default in PEFT_DEFAULTS.items()}
    layers = config.get("layers_to_transform")
    targets = config.get("target_modules")
    # PEFT's other ways to choose modules have no keys here: the tensors tell which modules were chosen.
    if targets is None or config.get("exclude_modules") or config.get("layers_pattern"):
        return values | {"target_modules": _adapted_modules(folder, values["target_parameters"]), "layers_to_transform": None}
    return values | {"target_modules": targets, "layers_to_transform": [layers] if isinstance(layers, int) else layers}


def _adapted_modules(folder: Path, parameters: object) -> list[str]:
    """Return the full names of the modules with factors in the file, except the owners of `target_parameters`."""
    path = folder / WEIGHTS_FILE
    try:
        with open(path, "rb") as file:

            def read(at: int, count: int) -> bytes:
                file.seek(at)
                return file.read(count)

            names = [entry.name for entry in read_header(read, path.stat().st_size, {})]
    except (OSError, DamagedHeader):
        return []  # reported when the tensors are read
    owners = tuple(str(name).rpartition(".")[0] for name in cast(list[object], parameters))
    modules = (found[1] for name in names if (found := _MODULE.fullmatch(name)))
    return sorted({name for name in modules if not name.removesuffix(".base_layer").endswith(owners)} if owners else set(modules))


def _invalid_values(folder: Path, values: Mapping[str, object]) -> Iterator[Finding]:
    try:
        Lora.model_validate(values)
    except ValidationError as error:
        reasons = {str(wrong["loc"][0]): wrong["msg"] for wrong in error.errors()}  # a union has one for each of its types
        for key, reason in reasons.items():
            message = f"{ADAPTER_KEY}: {folder}: its `{key}` is {json.dumps(values.get(key))}: {reason}"
            yield Finding("adapter-does-not-fit", (ADAPTER_KEY,), message, f"correct its {CONFIG_FILE}, or write `lora.{key}`")


def _adapter_of_run(named: Path) -> Iterator[Finding]:
    """Report a run of this package without an exported adapter."""
    step = _CHECKPOINT.fullmatch(named.name)
    run = named.parent if step else named
    if (run / "recipe.json").is_file():
        options = f" --step {step[1]} --output DIR" if step else ""
        message = f"{ADAPTER_KEY}: {named} is a {'checkpoint' if step else 'run'}, and has no adapter in PEFT's format"
        place = "DIR" if step else run
        hint = f"`fsdp-tune merge-checkpoint {run} --adapter{options}` writes one; then `--set lora.adapter={place}`"
        yield Finding("adapter-does-not-fit", (ADAPTER_KEY,), message, hint)


def _recorded_lora(output: Path, named: tuple[Path, ...]) -> dict[str, object] | None:
    """Return `lora:` of the recipe of a run that was started from this adapter."""
    recipe = _read_object(output / "recipe.json") or {}
    lora = cast(dict[str, object], recipe.get("lora") or {})
    return lora if lora.get("adapter") in [str(each) for each in named] else None


def _read_object(path: Path) -> dict[str, object] | None:
    """Return a JSON object; None if there is none, which is reported with the model."""
    try:
        found: object = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return cast(dict[str, object], found) if isinstance(found, dict) else None
