"""Private names of the stack: each is listed with the modules that use it, and exists in the installed versions.

A new minor version of the stack is allowed in pyproject.toml after this test and `scripts/test-newest` passed on it. The names were last
read in the sources of torch 2.11, 2.13 and 2.15, and of transformers 5.17, 5.23 and 5.24.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
STACK = {"torch", "transformers", "accelerate", "peft", "datasets", "tokenizers", "safetensors", "huggingface_hub", "torchao"}
PRIVATE: dict[str, tuple[str, ...]] = {
    "torch._C._current_graph_task_id": ("worker/observe/expert_loads.py",),
    "torch._C._distributed_c10d": ("worker/observe/flight.py",),
    "torch._dynamo.callback.on_compile_end": ("model/kernels/compiled.py",),
    "torch._dynamo.callback.on_compile_start": ("model/kernels/compiled.py",),
    "torch._dynamo.config.optimize_ddp": ("model/kernels/compiled.py",),
    "torch._dynamo.config.recompile_limit": ("model/kernels/compiled.py",),
    "torch._dynamo.utils.counters": ("model/kernels/compiled.py",),
    "torch._foreach_mul_": ("model/step.py",),
    "torch._foreach_norm": ("model/step.py",),
    "torch._fused_adamw_": ("model/optim/lean_adamw.py",),
    "torch._subclasses.fake_tensor.FakeTensorMode": (
        "merge/verify/loaded.py",
        "planner/trace/traced_step.py",
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo": ("worker/checkpoint/storage.py",),
    "torch.distributed.fsdp._fully_shard._fsdp_param": (
        "model/shard/wrap.py",
        "planner/trace/trace_recipe.py",
    ),
    "torch.distributed.fsdp._runtime_utils._reshard": ("model/shard/gathering.py",),
    "torch.distributed.tensor._sharding_prop.ShardingPropagator": ("planner/trace/recorder.py",),
    "torch.optim._muon._adjust_lr": ("model/optim/muon.py",),
    "torch.optim._muon._zeropower_via_newtonschulz": ("model/optim/muon.py",),
    "torch.testing._internal.distributed.fake_pg.FakeStore": ("planner/trace/trace_recipe.py",),
    "torch.utils._python_dispatch.TorchDispatchMode": (
        "planner/trace/recorder.py",
        "worker/readback/audit.py",
    ),
    "torch.utils._python_dispatch._disable_current_modes": (
        "model/balance.py",
        "model/kernels/head.py",
        "model/kernels/mlp_slices.py",
        "model/optim/torchao_adamw.py",
    ),
    "torch.utils.backend_registration._DummyBackendModule": ("planner/trace/device.py",),
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend": ("planner/trace/device.py",),
    "transformers.modeling_flash_attention_utils._is_packed_sequence": ("model/packed.py",),
    "transformers.modeling_utils._CAN_RECORD_REGISTRY": ("model/shard/wrap.py",),
}


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    before = _dotted(node.value) if isinstance(node, ast.Attribute) else None
    return f"{before}.{node.attr}" if isinstance(node, ast.Attribute) and before else None


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return the full name of each name of the stack that a module imports."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in STACK:
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            names |= {each.asname or each.name.split(".")[0]: each.name if each.asname else each.name.split(".")[0] for each in node.names}
    return {name: full for name, full in names.items() if full.split(".")[0] in STACK}


def _used(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a module imports, and those that it reads of what it imports."""
    imported = _imported(tree)
    yield from imported.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.split(".")[0] in STACK)
        name = _dotted(node) if isinstance(node, ast.Attribute) else None
        first, _, rest = (name or "").partition(".")
        if first in imported:
            yield f"{imported[first]}.{rest}"


def _found() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "fsdp_tune").rglob("*.py")):
        for name in _used(ast.parse(path.read_text(encoding="utf-8"))):
            if _is_private(name):
                found.setdefault(name, set()).add(path.relative_to(ROOT / "fsdp_tune").as_posix())
    # `torch._C` is read on the way to each of its own names.
    return {name: modules for name, modules in found.items() if not any(other.startswith(f"{name}.") for other in found)}


def test_private_names_of_the_stack_are_those_listed() -> None:
    assert {name: tuple(sorted(modules)) for name, modules in sorted(_found().items())} == PRIVATE


@pytest.mark.parametrize("name", PRIVATE)
def test_installed_version_has_the_private_name(name: str) -> None:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return
    raise AssertionError(name)
