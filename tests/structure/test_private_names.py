"""Private names of libraries are in `model/internals/`, one module for each library, and nowhere else.

A new minor version of the stack is allowed in pyproject.toml after this test and `scripts/test-newest` passed
on it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
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
from tests.faults.checks import in_child
from tests.structure.internals import entries
from tests.structure.sources import PACKAGE, Source, modules, parsed, root_name, source

pytestmark = pytest.mark.source

INTERNALS = PACKAGE / "model" / "internals"
STACK = {
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "datasets",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "torchao",
}
ENTRIES = entries()
HOOKS = {
    entry.last for name, entry in ENTRIES.items() if "TRAINER_HOOKS" in name or name.endswith(".INIT_GROUP")
}
"""Methods that subclasses override or call. A library finds them by name, so that only their check can be
with the other private names."""
DOCUMENTED_BY_PYTHON = {"os._exit", "sys._current_frames", "pickle._Unpickler"}
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "replaced"}
UNDOCUMENTED = {
    "transformers.masking_utils": {"ALL_MASK_ATTENTION_FUNCTIONS"},
    "transformers.modeling_flash_attention_utils": set[str](),
}
"""Modules without a stable interface, with what the documentation names of them."""
OF_OTHER_BUILDS = {"_dump_nccl_trace", "_dump_nccl_trace_json", "_dump_xccl_trace", "_dump_xccl_trace_json"}


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _imported(module: Source) -> dict[str, str]:
    """Return the full name of each name of the stack that a module imports."""
    names: dict[str, str] = {}
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            names |= {
                each.asname or each.name.split(".")[0]: each.name if each.asname else each.name.split(".")[0]
                for each in node.names
            }
    return {name: full for name, full in names.items() if full.split(".")[0] in STACK}


def _defined(module: Source) -> set[str]:
    """Return the private names that a module gives to its own functions, classes, attributes and
    constants."""
    found: set[str] = set()
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and _is_named(node.value, "self", "cls")
        ):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def _is_named(node: ast.expr, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def private_names(module: Source) -> Iterator[str]:
    """Yield what a module imports, reads, passes as a keyword or names in a string that is private to another
    module."""
    imported, own = _imported(module), _defined(module)
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in STACK:
            for each in node.names:
                is_undocumented = (
                    node.module in UNDOCUMENTED and each.name not in UNDOCUMENTED[str(node.module)]
                )
                if (
                    _is_private(f"{node.module}.{each.name}")
                    or is_undocumented
                    or f"{node.module}.{each.name}" in UNDOCUMENTED
                ):
                    yield f"{node.module}.{each.name}"
        elif isinstance(node, ast.Import):
            yield from (
                each.name
                for each in node.names
                if each.name.split(".")[0] in STACK and _is_private(each.name)
            )
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            receiver = ast.unparse(node.value)
            is_own = (
                node.attr in own
                and (receiver in ("self", "cls", "super()") or receiver.isidentifier())
                and receiver not in imported
            )
            is_hook = node.attr in HOOKS and receiver in ("self", "super()")
            if not is_own and not is_hook and f"{receiver}.{node.attr}" not in DOCUMENTED_BY_PYTHON:
                yield f"{receiver}.{node.attr}"
        elif isinstance(node, ast.Call):
            named = node.args[1] if _is_named(node.func, *BY_NAME) and len(node.args) > 1 else None
            if isinstance(named, ast.Constant) and _is_private(str(named.value)):
                yield f"{ast.unparse(node.func)}(…, {named.value!r})"
            if root_name(node.func) in imported:
                yield from (
                    f"{ast.unparse(node.func)}({each.arg}=…)"
                    for each in node.keywords
                    if each.arg and _is_private(each.arg)
                )
        elif isinstance(node, ast.Subscript) and root_name(node.value) in imported:
            yield from (
                str(each.value)
                for each in ast.walk(node.slice)
                if isinstance(each, ast.Constant) and _is_private(str(each.value))
            )


def test_private_names_of_libraries_are_in_one_module_for_each_library() -> None:
    elsewhere = [module for module in modules() if module.path.parent != INTERNALS]
    assert {module.name: names for module in elsewhere if (names := sorted(set(private_names(module))))} == {}
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
        "from transformers import Trainer\nclass T(Trainer):\n    def train(self): return "
        "self._inner_training_loop()",
    ],
)
def test_private_name_is_found(text: str) -> None:
    assert list(private_names(parsed(text, Path("module.py"))))


def _subclasses() -> Iterator[tuple[ast.ClassDef, type]]:
    """Yield the package's classes whose base is a class of the stack, with that base, and those on top of
    them."""
    found: dict[str, type] = {}
    above: list[tuple[ast.ClassDef, str]] = []
    for module in modules():
        imported = _imported(module)
        for node in module.nodes:
            for base in node.bases if isinstance(node, ast.ClassDef) else []:
                first, _, rest = ast.unparse(base).partition(".")
                full = ".".join([imported[first], *([rest] if rest else [])]) if first in imported else None
                if full is None:
                    above.append((node, first))  # type: ignore[arg-type]
                elif isinstance(kind := _resolved(full), type):
                    found[node.name] = kind  # type: ignore[attr-defined]
                    yield node, kind  # type: ignore[misc]
    yield from ((node, found[base]) for node, base in above if base in found)


def _resolved(full: str) -> Any:
    module, _, name = full.rpartition(".")
    return getattr(importlib.import_module(module), name, None)


def test_overridden_and_inherited_private_methods_are_listed() -> None:
    found: set[str] = set()
    for node, base in _subclasses():
        for each in ast.walk(node):
            name = (
                each.name
                if isinstance(each, ast.FunctionDef)
                else each.attr
                if isinstance(each, ast.Attribute)
                else ""
            )
            if not _is_private(name) or name.startswith("__") or not hasattr(base, name):
                continue
            if not isinstance(each, ast.Attribute) or ast.unparse(each.value) in ("self", "cls", "super()"):
                found.add(name)
    assert sorted(found ^ HOOKS) == []


@pytest.mark.parametrize("library", sorted({entry.library for entry in ENTRIES.values()}))
def test_installed_version_has_the_names(library: str) -> None:
    installed = ".".join(metadata.version(library).split(".")[:2])
    for entry in (each for each in ENTRIES.values() if each.library == library):
        is_of_another_build = entry.path.rpartition(".")[2] in ("_orig_dtype", "_fsdp_param_groups")
        assert installed in entry.read_in or is_of_another_build, (
            f"read the source of {library} {installed}, then add it to READ_IN"
        )
        if isinstance(entry, Name | Parameter) and entry.last not in OF_OTHER_BUILDS:
            assert entry.exists(), f"{entry.path} is gone: what replaces it?"


def _without_the_module(module: str) -> Any:
    raise ModuleNotFoundError(f"No module named {module!r}")


@pytest.mark.parametrize(
    "import_module", [_without_the_module, lambda _: SimpleNamespace()], ids=["the module", "the name"]
)
def test_version_without_a_name_has_the_fallback_or_is_refused(
    import_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internal, "importlib", SimpleNamespace(import_module=import_module))
    for name, entry in ENTRIES.items():
        fallback = NoFallback.REFUSED if isinstance(entry, Parameter) else entry.fallback  # type: ignore[attr-defined]
        if fallback is NoFallback.REFUSED:
            _expect_refusal(entry)
        elif isinstance(entry, Name):
            assert entry.get() is fallback, name
            with entry.replaced(None):
                assert not entry.exists(), name


def _expect_refusal(entry: Internal) -> None:
    with pytest.raises(FsdpTuneError) as raised:
        _use(entry)
    (problem,) = raised.value.problems
    assert (problem.code, raised.value.exit_code) == ("library-internal-missing", ExitCode.USAGE)
    for part in (
        entry.feature,
        entry.path.replace(":", "."),
        f"{entry.library} {metadata.version(entry.library)}",
    ):
        assert part in problem.message
    assert problem.hint == f'pip install "{entry.library}=={entry.read_in[-1]}.*"'


def _use(entry: Internal) -> Any:
    if isinstance(entry, Attribute):
        return entry.of(object())
    return entry.value(False) if isinstance(entry, Parameter) else entry.get()  # type: ignore[attr-defined]


def test_each_entry_is_documented() -> None:
    """The string after a constant or a group of them says what it is for."""
    for path in INTERNALS.glob("*_internals.py"):
        body = source(path).tree.body
        for index, node in enumerate(body):
            if isinstance(node, ast.Assign) and not ast.unparse(node.targets[0]).startswith(
                ("_", "(_", "READ_IN")
            ):
                after = next((each for each in body[index + 1 :] if not isinstance(each, ast.Assign)), None)
                assert isinstance(after, ast.Expr), f"{path.name}: {ast.unparse(node.targets[0])}"
                assert inspect.cleandoc(str(after.value.value))[-1] == ".", path.name  # type: ignore[attr-defined]


def _register_operators_again() -> None:
    """Give the package's operators another namespace: torch takes each of them only once."""
    import torch.library

    registered, register_fake = torch.library.Library, torch.library.register_fake

    class Library(registered):  # type: ignore[valid-type, misc]
        def __init__(self, namespace: str, *arguments: Any) -> None:
            super().__init__(namespace.replace("fsdp_tune", "again"), *arguments)

    def fake(name: str, *arguments: Any, **named: Any) -> Any:
        return register_fake(name.replace("fsdp_tune::", "again::"), *arguments, **named)

    torch.library.Library, torch.library.register_fake = Library, fake  # type: ignore[misc]


def _import_everything_again() -> None:
    """In a fork: import each module of the package once more, with look-ups that end it."""
    _register_operators_again()
    for name in [name for name in sys.modules if name == "fsdp_tune" or name.startswith("fsdp_tune.")]:
        del sys.modules[name]
    again = importlib.import_module("fsdp_tune.model.internals.internal")

    def looked_up(entry: Any, *_: Any) -> Any:
        raise AssertionError(f"{entry.path} is looked up at import")

    again.Name.get = again.Attribute.of = again.Parameter.value = looked_up
    package = importlib.import_module("fsdp_tune")
    for each in pkgutil.walk_packages(package.__path__, "fsdp_tune."):
        if not each.name.endswith("__main__"):
            importlib.import_module(each.name)
    assert len([name for name in sys.modules if name.startswith("fsdp_tune.")]) > 250


def test_no_private_name_is_looked_up_at_import() -> None:
    """A run that does not use a feature therefore does not need the feature's names."""
    assert in_child(_import_everything_again) == 0
