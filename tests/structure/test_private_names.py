"""Private names of libraries are in `model/internals/`, one module for each library, and nowhere else.

A new minor version of the stack is allowed in pyproject.toml after this test and `scripts/test-newest` passed on it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.core.errors import ExitCode, FsdpTuneError
from fsdp_tune.model.internals import internal
from fsdp_tune.model.internals.internal import Attribute, Internal, Name, NoFallback, Parameter
from tests.structure.internals import entries
from tests.structure.test_layers import modules

ROOT = Path(__file__).resolve().parents[2]
INTERNALS = ROOT / "fsdp_tune" / "model" / "internals"
STACK = {"torch", "transformers", "accelerate", "peft", "datasets", "tokenizers", "safetensors", "huggingface_hub", "torchao"}
ENTRIES = entries()
HOOKS = {entry.last for name, entry in ENTRIES.items() if "TRAINER_HOOKS" in name or name.endswith(".INIT_GROUP")}
"""Methods that subclasses override or call. A library finds them by name, so that only their check can be with the other private names."""
DOCUMENTED_BY_PYTHON = {"os._exit", "sys._current_frames", "pickle._Unpickler"}
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "replaced"}
UNDOCUMENTED = {"transformers.masking_utils": {"ALL_MASK_ATTENTION_FUNCTIONS"}, "transformers.modeling_flash_attention_utils": set[str]()}
"""Modules without a stable interface, with what the documentation names of them."""
OF_OTHER_BUILDS = {"_dump_nccl_trace", "_dump_nccl_trace_json", "_dump_xccl_trace", "_dump_xccl_trace_json"}


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return the full name of each name of the stack that a module imports."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            names |= {each.asname or each.name.split(".")[0]: each.name if each.asname else each.name.split(".")[0] for each in node.names}
    return {name: full for name, full in names.items() if full.split(".")[0] in STACK}


def _defined(tree: ast.Module) -> set[str]:
    """Return the private names that a module gives to its own functions, classes, attributes and constants."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ("self", "cls"):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def private_names(text: str) -> Iterator[str]:
    """Yield what a module imports, reads, passes as a keyword or names in a string that is private to another module."""
    tree = ast.parse(text)
    imported, own = _imported(tree), _defined(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in STACK:
            for each in node.names:
                is_undocumented = node.module in UNDOCUMENTED and each.name not in UNDOCUMENTED[str(node.module)]
                if _is_private(f"{node.module}.{each.name}") or is_undocumented or f"{node.module}.{each.name}" in UNDOCUMENTED:
                    yield f"{node.module}.{each.name}"
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.split(".")[0] in STACK and _is_private(each.name))
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            receiver = ast.unparse(node.value)
            is_own = node.attr in own and (receiver in ("self", "cls", "super()") or receiver.isidentifier()) and receiver not in imported
            is_hook = node.attr in HOOKS and receiver in ("self", "super()")
            if not is_own and not is_hook and f"{receiver}.{node.attr}" not in DOCUMENTED_BY_PYTHON:
                yield f"{receiver}.{node.attr}"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in BY_NAME and len(node.args) > 1 and isinstance(node.args[1], ast.Constant) and _is_private(str(node.args[1].value)):
                yield f"{called}(…, {node.args[1].value!r})"
            if called.split(".")[0] in imported:
                yield from (f"{called}({each.arg}=…)" for each in node.keywords if each.arg and _is_private(each.arg))
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).split(".")[0] in imported:
            yield from (str(each.value) for each in ast.walk(node.slice) if isinstance(each, ast.Constant) and _is_private(str(each.value)))


def test_private_names_of_libraries_are_in_one_module_for_each_library(repository: Path) -> None:
    found: dict[str, list[str]] = {}
    for path in modules(repository):
        if path.parent != INTERNALS and (names := sorted(set(private_names(path.read_text(encoding="utf-8"))))):
            found[path.relative_to(repository).as_posix()] = names
    assert found == {}
    for name, entry in ENTRIES.items():
        assert name.startswith(f"{entry.library}_internals."), f"{name} is of {entry.library}"


@pytest.mark.parametrize(
    "text",
    [
        "from torch.utils._pytree import tree_map",
        "from torch.optim.optimizer import _foreach_supported_types",
        "import torch._dynamo",
        "import torch\ntorch._foreach_mul_([], 2)",
        "import torch\ndef f(tensor: torch.Tensor): return tensor._local_tensor",
        "def f(module): return module.weight._local_tensor._scale",
        "class Own:\n    def __init__(self): self._data = 1\ndef f(tensors): return tensors[0]._data",
        "def f(model): return getattr(model, '_no_split_modules', None)",
        "from torch.distributed.device_mesh import DeviceMesh\nDeviceMesh('cpu', [0], _init_backend=False)",
        "from torch.distributed.fsdp import ShardingStrategy\nShardingStrategy['_HYBRID_SHARD_ZERO2']",
        "from transformers.masking_utils import find_packed_sequence_indices",
        "from transformers import masking_utils",
        "from transformers import Trainer\nclass T(Trainer):\n    def train(self): return self._inner_training_loop()",
    ],
)
def test_private_name_is_found(text: str) -> None:
    assert list(private_names(text))


def _subclasses() -> Iterator[tuple[ast.ClassDef, type]]:
    """Yield the package's classes whose base is a class of the stack, with that base."""
    for path in modules(ROOT):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = _imported(tree)
        for node in ast.walk(tree):
            for base in node.bases if isinstance(node, ast.ClassDef) else []:
                first, _, rest = ast.unparse(base).partition(".")
                full = ".".join([imported[first], *([rest] if rest else [])]) if first in imported else None
                if full is not None and isinstance(kind := _resolved(full), type):
                    yield node, kind  # type: ignore[misc]


def _resolved(full: str) -> Any:
    module, _, name = full.rpartition(".")
    return getattr(importlib.import_module(module), name, None)


def test_overridden_and_inherited_private_methods_are_listed() -> None:
    found: set[str] = set()
    for node, base in _subclasses():
        for each in ast.walk(node):
            name = each.name if isinstance(each, ast.FunctionDef) else each.attr if isinstance(each, ast.Attribute) else ""
            is_of_object = not isinstance(each, ast.Attribute) or ast.unparse(each.value) in ("self", "cls", "super()")
            if _is_private(name) and not name.startswith("__") and is_of_object and hasattr(base, name):
                found.add(name)
    assert sorted(found ^ HOOKS) == []


# ---- Each entry


@pytest.mark.parametrize("name", ENTRIES)
def test_installed_version_has_the_name(name: str) -> None:
    entry = ENTRIES[name]
    installed = ".".join(metadata.version(entry.library).split(".")[:2])
    assert installed in entry.read_in or entry.path.rpartition(".")[2] in ("_orig_dtype", "_fsdp_param_groups"), (
        f"read the source of {entry.library} {installed}, then add it to READ_IN"
    )
    if isinstance(entry, Name | Parameter) and entry.last not in OF_OTHER_BUILDS:
        assert entry.exists(), f"{entry.path} is gone: what replaces it?"


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("gone", ["the module", "the name"])
def test_version_without_the_name_has_the_fallback_or_is_refused(name: str, gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ENTRIES[name]

    def import_module(module: str) -> Any:
        if gone == "the module":
            raise ModuleNotFoundError(f"No module named {module!r}")
        return SimpleNamespace()

    monkeypatch.setattr(internal, "importlib", SimpleNamespace(import_module=import_module))
    fallback = NoFallback.REFUSED if isinstance(entry, Parameter) else entry.fallback  # type: ignore[attr-defined]
    if fallback is not NoFallback.REFUSED:
        if isinstance(entry, Name):
            assert entry.get() is fallback
            with entry.replaced(None):
                assert not entry.exists()
        return
    with pytest.raises(FsdpTuneError) as raised:
        _use(entry)
    (problem,) = raised.value.problems
    assert (problem.code, raised.value.exit_code) == ("library-internal-missing", ExitCode.USAGE)
    for part in (entry.feature, entry.path.replace(":", "."), f"{entry.library} {metadata.version(entry.library)}"):
        assert part in problem.message
    assert problem.hint == f'pip install "{entry.library}=={entry.read_in[-1]}.*"'


def _use(entry: Internal) -> Any:
    if isinstance(entry, Attribute):
        return entry.of(object())
    return entry.value(False) if isinstance(entry, Parameter) else entry.get()  # type: ignore[attr-defined]


def test_each_entry_is_documented() -> None:
    """The string after a constant or a group of them says what it is for."""
    for path in INTERNALS.glob("*_internals.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for index, node in enumerate(body):
            if isinstance(node, ast.Assign) and not ast.unparse(node.targets[0]).startswith(("_", "(_", "READ_IN")):
                after = next((each for each in body[index + 1 :] if not isinstance(each, ast.Assign)), None)
                assert isinstance(after, ast.Expr), f"{path.name}: {ast.unparse(node.targets[0])}"
                assert inspect.cleandoc(str(after.value.value))[-1] == ".", path.name  # type: ignore[attr-defined]


LOOKED_UP_AT_IMPORT = """
import importlib, pkgutil, sys
import fsdp_tune
from fsdp_tune.model.internals.internal import Attribute, Name, Parameter

def looked_up(entry, *_):
    raise SystemExit(f"{entry.path} is looked up at import")

Name.get = Attribute.of = Parameter.value = looked_up
for each in pkgutil.walk_packages(fsdp_tune.__path__, "fsdp_tune."):
    if not each.name.endswith("__main__"):
        importlib.import_module(each.name)
print(len([name for name in sys.modules if name.startswith("fsdp_tune.")]))
"""


def test_no_private_name_is_looked_up_at_import() -> None:
    """A run that does not use a feature therefore does not need the feature's names."""
    child = subprocess.run([sys.executable, "-c", LOOKED_UP_AT_IMPORT], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    assert int(child.stdout) > 250
