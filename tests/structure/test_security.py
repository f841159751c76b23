"""Nothing that comes from a checkpoint, a data set or a recipe runs code: calls that the source must not
contain."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.structure.sources import Source, modules, parsed

# A call that runs what a file says, or a shell. pickle.Unpickler alone may be derived from: with an
# allow-list of its own.
FORBIDDEN_CALLS = frozenset(
    {
        "eval",
        "exec",
        "compile",
        "__import__",
        "os.system",
        "os.popen",
        "pickle.load",
        "pickle.loads",
        "yaml.unsafe_load",
        "yaml.full_load",
    }
    | {"marshal.loads", "shelve.open", "torch.hub.load", "shutil.unpack_archive", "joblib.load"}
)


def dotted_name(node: ast.expr) -> str:
    """Return `a.b.c`; of a function that is no name, as `read().split`, its last attribute after a dot."""
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> str | None:
    return next((ast.unparse(each.value) for each in call.keywords if each.arg == name), None)


def offences(module: Source) -> list[str]:
    found: list[str] = []
    for call in (node for node in module.nodes if isinstance(node, ast.Call)):
        name = dotted_name(call.func)
        if name in FORBIDDEN_CALLS:
            found.append(name)
        if name == "torch.load" and keyword(call, "weights_only") != "True":
            found.append("torch.load without weights_only=True")
        if name == "yaml.load" and "SafeLoader" not in (
            keyword(call, "Loader") or "".join(map(ast.unparse, call.args[1:]))
        ):
            found.append("yaml.load without a safe loader")
        if keyword(call, "shell") not in (None, "False"):
            found.append("a shell")
        found += [
            f"{each}=True" for each in ("trust_remote_code", "allow_pickle") if keyword(call, each) == "True"
        ]
        if name.endswith("extractall") and keyword(call, "filter") is None:
            found.append("extractall without a filter")
    return [f"{module.path.name}: {offence}" for offence in found]


@pytest.mark.source
def test_package_never_executes_file_contents() -> None:
    assert [offence for module in modules() for offence in offences(module)] == []


def test_yaml_of_users_is_read_by_one_reader() -> None:
    """PyYAML's functions expand aliases of aliases, recurse without a limit, and take the last of two equal
    keys."""
    loads = (
        "yaml.load",
        "yaml.safe_load",
        "yaml.load_all",
        "yaml.safe_load_all",
        "yaml.compose",
        "yaml.parse",
    )
    calls = [
        (module.path.name, node)
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.Call)
    ]
    found = {(module, ast.unparse(call.args[0])) for module, call in calls if dotted_name(call.func) in loads}
    own_table, one_word = ("gpus.py", "TABLE.read_text(encoding='utf-8')"), ("foreign_file.py", "node.text")
    assert found == {own_table, one_word}


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
def test_search_finds_planted_calls(source: str) -> None:
    assert len(offences(parsed(source, Path("module.py")))) == 1


def test_every_unpickler_has_an_allow_list() -> None:
    """An Unpickler that overrides `find_class` decides by itself what a pickle may name; another one imports
    anything."""
    kinds = [
        (module, node) for module in modules() for node in module.nodes if isinstance(node, ast.ClassDef)
    ]
    found = {
        f"{module.path.name}: {kind.name}": any(
            isinstance(each, ast.FunctionDef) and each.name == "find_class" for each in kind.body
        )
        for module, kind in kinds
        if any("Unpickler" in ast.unparse(base) for base in kind.bases)
    }
    assert found
    assert all(found.values()), found
