"""Paths of a recipe made absolute, so that a rank finds the same files from anywhere; and where a run may not be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from fsdp_tune.recipe.findings import Finding
from fsdp_tune.recipe.rules import BUILDERS
from fsdp_tune.recipe.schema import Recipe

PACKAGE = Path(__file__).resolve().parent.parent


def output_directory(recipe: Recipe, cwd: Path) -> tuple[Path, list[Finding]]:
    """The run directory with {name} and {seed} filled in, and what speaks against it."""
    filled = recipe.output_dir.format(name=recipe.name or "run", seed=recipe.training.seed)
    path = Path(cwd, filled)
    resolved = path.resolve()
    return resolved, [_finding(message, hint) for message, hint in _objections(recipe, resolved, cwd)]


def _finding(message: str, hint: str) -> Finding:
    return Finding("bad-output-dir", ("output_dir",), f"`output_dir` {message}", hint)


def _objections(recipe: Recipe, path: Path, cwd: Path) -> list[tuple[str, str]]:
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
        return [("lies inside the installed package", elsewhere)]
    for source in _local_directories(recipe, cwd):
        if path == source or source in path.parents:
            return [(f"lies inside the training data `{source}`", elsewhere)]
        if path in source.parents and path.exists():
            return [(f"holds the data or model `{source}`, and `--overwrite` would move them away", elsewhere)]
    return []


def _local_directories(recipe: Recipe, cwd: Path) -> list[Path]:
    """Directories that the recipe reads from."""
    evals = recipe.data.eval if isinstance(recipe.data.eval, list) else []
    named = [source.path for source in (*recipe.data.train, *evals)]
    return [path.resolve() for path in (Path(cwd, name) for name in named) if path.is_dir() and path.resolve() != cwd.resolve()]


def absolute_paths(data: dict[str, Any], cwd: Path) -> tuple[dict[str, str], list[Finding]]:
    """Rewrites the paths in the dumped recipe `data`: what exists on disk is local. Returns the reasons and what is missing."""
    reasons: dict[str, str] = {}
    findings: list[Finding] = []
    model = data["model"]
    same = model["tokenizer"] == model["name_or_path"]
    model["name_or_path"] = _local(model["name_or_path"], cwd, "model.name_or_path", reasons, findings)
    model["tokenizer"] = model["name_or_path"] if same else _local(model["tokenizer"], cwd, "model.tokenizer", reasons, findings)
    if isinstance(model["from_config"], str):
        model["from_config"] = _config_file(model["from_config"], cwd, findings)
    data["data"]["cache_dir"] = str(Path(cwd, data["data"]["cache_dir"]))
    if data["data"]["chat_template"] is not None:
        data["data"]["chat_template"] = _local(data["data"]["chat_template"], cwd, "data.chat_template", reasons, findings)
    for group in ("train", "eval"):
        sources = cast(list[dict[str, Any]], data["data"][group]) if isinstance(data["data"][group], list) else []
        for index, source in enumerate(sources):
            _source_paths(source, cwd, f"data.{group}[{index}]", reasons, findings)
    return reasons, findings


def _source_paths(source: dict[str, Any], cwd: Path, key: str, reasons: dict[str, str], findings: list[Finding]) -> None:
    if source["path"] not in BUILDERS:
        source["path"] = _local(source["path"], cwd, f"{key}.path", reasons, findings)
    elif source["data_files"] is not None:
        files = source["data_files"]
        absolute = [_file_or_url(name, cwd) for name in ([files] if isinstance(files, str) else files)]
        source["data_files"] = absolute[0] if isinstance(files, str) else absolute
    if source["chat_template"] is not None:
        source["chat_template"] = _local(source["chat_template"], cwd, f"{key}.chat_template", reasons, findings)


def _file_or_url(name: str, cwd: Path) -> str:
    return name if "://" in name else str(Path(cwd, name))


def _local(name: str | None, cwd: Path, key: str, reasons: dict[str, str], findings: list[Finding]) -> str | None:
    """The absolute path of what exists; anything else is left as a hub id, unless it can only be a path."""
    if name is None or name.startswith("builtin:") or "://" in name:
        return name
    if name.startswith("~"):
        findings.append(Finding("not-found", (key,), f"`{key}` begins with `~`, which is not expanded", "write the path out"))
        return name
    path = Path(cwd, name)
    if path.exists():
        reasons[key] = "found on this machine"
        return str(path.resolve())
    if name.startswith(("/", "./", "../")) or name.endswith(
        (".jsonl", ".json", ".parquet", ".csv", ".txt", ".arrow", ".jinja", ".gz", ".zst")
    ):
        findings.append(Finding("not-found", (key,), f"`{key}` is `{name}`, and there is no `{path}`", f"relative paths start at {cwd}"))
    return name


def _config_file(name: str, cwd: Path, findings: list[Finding]) -> str:
    path = Path(cwd, name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        hint = "give a config.json, or the mapping itself: `{model_type: llama, hidden_size: 512}`"
        findings.append(Finding("not-found", ("model.from_config",), f"`model.from_config` is `{name}`, and there is no `{path}`", hint))
    return str(path.resolve())
