"""Every definition in the package is used in the package; helpers of tests belong to the tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.structure.test_layers import modules

WORD = re.compile(r"[A-Za-z_]\w*")
ATTRIBUTE = re.compile(r"\.([A-Za-z_]\w*)")
Statement = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

# Methods and fields that a library looks for by name.
CALLED_BY = {
    "transformers.Trainer": {
        *("get_batch_samples", "floating_point_ops", "_clip_grad_norm", "_get_grad_norm", "_maybe_log_save_evaluate"),
        *("_load_best_model", "_load_rng_state", "_load_from_checkpoint", "_load_callback_state"),
        *("_prepare_for_training", "get_train_dataloader"),
    },
    "torch's device modules": {
        "is_capturing",
        *("synchronize", "wait_stream", "wait_event", "record_event", "current_stream", "get_amp_supported_dtype"),
    },
    "torch's DDP": {"_rebuild_buckets"},
    "torch's dispatch modes": {"_should_skip_dynamo"},
    "torch.distributed.checkpoint": {"create_stream", "commit_tensor"},
    "urllib": {"redirect_request"},
    "http.server": {"allow_reuse_address", "daemon_threads", "do_GET", "handle_error", "log_message", "service_actions"},
    "pickle": {"find_class", "persistent_load"},
    "ctypes": {"_fields_"},
    "files": {"seekable", "writable"},
    "logging": {"emit"},
    "recipe files": {"recipe_version"},
}
TRAINER_EVENT = re.compile(r"on_\w+")


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def defined(tree: ast.Module) -> Iterator[str]:
    """Functions, methods, classes, constants of the module, fields of classes; not what a decorator hands on, nor members of an enum."""
    for node in ast.walk(tree):
        if isinstance(node, Statement) and not any(isinstance(each, ast.Call) for each in node.decorator_list):
            yield node.name
        is_enum = isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Enum") for base in node.bases)
        for statement in node.body if isinstance(node, ast.Module | ast.ClassDef) and not is_enum else []:
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def named(tree: ast.Module) -> Iterator[str]:
    """Return every name that is read, imported, passed as a keyword, or in a string other than a docstring."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.stmt) and is_docstring(node)}  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from WORD.findall(node.value)


def dead(package: list[str], others: list[str], templates: list[str] | None = None) -> set[str]:
    """Names that are defined in the sources of `package` and stand nowhere else: in them, in `others`, or as attributes in `templates`."""
    trees = [ast.parse(text) for text in package]
    names = {name for tree in [*trees, *map(ast.parse, others)] for name in named(tree)}
    names |= {name for template in templates or [] for name in ATTRIBUTE.findall(template)}
    return {name for tree in trees for name in defined(tree) if name not in names and not name.startswith("__")}


def found(repository: Path) -> set[str]:
    package = [path.read_text(encoding="utf-8") for path in modules(repository)]
    scripts = [*(repository / "scripts").iterdir(), *(repository / "benchmarks").glob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in scripts if path.is_file()]
    templates = [path.read_text(encoding="utf-8") for path in (repository / "fsdp_tune").rglob("*.j2")]
    return dead(package, [text for text in texts if not text.startswith("#!/bin/")], templates)


def test_every_definition_is_used(repository: Path) -> None:
    excused = {name for names in CALLED_BY.values() for name in names}
    assert sorted(name for name in found(repository) - excused if not TRAINER_EVENT.fullmatch(name)) == []


def test_every_exemption_is_needed(repository: Path) -> None:
    names = {name for path in modules(repository) for name in defined(ast.parse(path.read_text(encoding="utf-8")))}
    assert [name for excused in CALLED_BY.values() for name in excused if name not in names] == []


def test_search_finds_planted_dead_code() -> None:
    package = [
        'LIMIT = 1\n"""Of nothing."""\ndef used():\n    """Beside `unused`."""\n    return 1\ndef unused():\n    return used()\n',
        "class Box:\n    size: int\n    lid: int\n    def open(self):\n        return self.size\n",
        "from package import Box\nBox(size=1)\n",
    ]
    assert dead(package, []) == {"LIMIT", "unused", "lid", "open"}
    assert dead(package, ["print(box.lid, package.LIMIT)"]) == {"unused", "open"}
    assert dead(package, ["print(package.LIMIT)"], ["{{ box.lid }} unused"]) == {"unused", "open"}
