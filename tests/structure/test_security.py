"""Nothing that comes from a checkpoint, a data set or a recipe runs code: calls that the source must not contain."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.structure.test_layers import modules

# A call that runs what a file says, or a shell. pickle.Unpickler alone may be derived from: with an allow-list of its own.
FORBIDDEN_CALLS = frozenset(
    {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load", "pickle.loads", "yaml.unsafe_load", "yaml.full_load"}
    | {"marshal.loads", "shelve.open", "torch.hub.load", "shutil.unpack_archive", "joblib.load"}
)


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Return every call with its dotted name in the source."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def keyword(call: ast.Call, name: str) -> str | None:
    return next((ast.unparse(each.value) for each in call.keywords if each.arg == name), None)


def offences(path: Path) -> list[str]:
    found: list[str] = []
    for name, call in calls(path):
        if name in FORBIDDEN_CALLS:
            found.append(name)
        if name == "torch.load" and keyword(call, "weights_only") != "True":
            found.append("torch.load without weights_only=True")
        if name == "yaml.load" and "SafeLoader" not in (keyword(call, "Loader") or "".join(map(ast.unparse, call.args[1:]))):
            found.append("yaml.load without a safe loader")
        if keyword(call, "shell") not in (None, "False"):
            found.append("a shell")
        found += [f"{each}=True" for each in ("trust_remote_code", "allow_pickle") if keyword(call, each) == "True"]
        if name.endswith("extractall") and keyword(call, "filter") is None:
            found.append("extractall without a filter")
    return [f"{path.name}: {offence}" for offence in found]


def test_package_never_executes_file_contents(repository: Path) -> None:
    assert [offence for path in modules(repository) for offence in offences(path)] == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import yaml\nyaml.load(text, yaml.Loader)",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import pickle\npickle.loads(raw)",
        "model.from_pretrained(name, trust_remote_code=True)",
        "eval(text)",
    ],
)
def test_search_finds_planted_calls(tmp_path: Path, source: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert len(offences(path)) == 1


def test_every_unpickler_has_an_allow_list(repository: Path) -> None:
    """An Unpickler that overrides `find_class` decides by itself what a pickle may name; another one imports anything."""
    found: dict[str, bool] = {}
    for path in modules(repository):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and any("Unpickler" in ast.unparse(base) for base in node.bases):
                found[f"{path.name}: {node.name}"] = any(
                    isinstance(each, ast.FunctionDef) and each.name == "find_class" for each in node.body
                )
    assert found
    assert all(found.values()), found
