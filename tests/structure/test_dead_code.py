"""Every definition in the package is used in the package; helpers of tests belong to the tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.structure import sources
from tests.structure.sources import Source

pytestmark = pytest.mark.source

WORD = re.compile(r"[A-Za-z_]\w*")
ATTRIBUTE = re.compile(r"\.([A-Za-z_]\w*)")
Statement = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

# Methods and fields that a library looks for by name.
CALLED_BY = {
    "transformers.Trainer": {
        *(
            "get_batch_samples",
            "floating_point_ops",
            "_clip_grad_norm",
            "_get_grad_norm",
            "_maybe_log_save_evaluate",
        ),
        *("_load_best_model", "_load_rng_state", "_load_from_checkpoint", "_load_callback_state"),
        *("_prepare_for_training", "get_train_dataloader"),
    },
    "torch's device modules": {
        "is_capturing",
        *(
            "synchronize",
            "wait_stream",
            "wait_event",
            "record_event",
            "current_stream",
            "get_amp_supported_dtype",
        ),
    },
    "torch's DDP": {"_rebuild_buckets"},
    "torch's dispatch modes": {"_should_skip_dynamo"},
    "torch.distributed.checkpoint": {"create_stream", "commit_tensor"},
    "urllib": {"redirect_request"},
    "http.server": {
        "allow_reuse_address",
        "daemon_threads",
        "do_GET",
        "handle_error",
        "log_message",
        "service_actions",
        "verify_request",
        "request_queue_size",
    },
    "pickle": {"find_class", "persistent_load"},
    "ctypes": {"_fields_"},
    "files": {"seekable", "writable"},
    "logging": {"emit"},
    "recipe files": {"recipe_version"},
}
TRAINER_EVENT = re.compile(r"on_\w+")


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def defined(module: Source) -> Iterator[str]:
    """Functions, methods, classes, constants of the module, fields of classes; not what a decorator hands on,
    nor members of an enum."""
    for node in module.nodes:
        if isinstance(node, Statement) and not any(
            isinstance(each, ast.Call) for each in node.decorator_list
        ):
            yield node.name
        is_enum = isinstance(node, ast.ClassDef) and any(
            ast.unparse(base).endswith("Enum") for base in node.bases
        )
        for statement in node.body if isinstance(node, ast.Module | ast.ClassDef) and not is_enum else []:
            targets = (
                statement.targets
                if isinstance(statement, ast.Assign)
                else [getattr(statement, "target", None)]
            )
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def named(module: Source) -> Iterator[str]:
    """Return every name that is read, imported, passed as a keyword, or in a string other than a
    docstring."""
    docstrings = {
        id(node.value) for node in module.nodes if isinstance(node, ast.stmt) and is_docstring(node)
    }  # type: ignore[attr-defined]
    for node in module.nodes:
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


def dead(package: Sequence[Source], others: Sequence[Source] = (), templates: Sequence[str] = ()) -> set[str]:
    """Names that are defined in `package` and stand nowhere else: in its modules, in `others`, or as
    attributes in `templates`."""
    names = {name for module in (*package, *others) for name in named(module)}
    names |= {name for template in templates for name in ATTRIBUTE.findall(template)}
    return {
        name
        for module in package
        for name in defined(module)
        if name not in names and not name.startswith("__")
    }


def found(repository: Path) -> set[str]:
    paths = [*(repository / "scripts").iterdir(), *(repository / "benchmarks").glob("*.py")]
    scripts = [
        path
        for path in paths
        if path.is_file() and not path.read_text(encoding="utf-8").startswith("#!/bin/")
    ]
    templates = [path.read_text(encoding="utf-8") for path in (repository / "fsdp_tune").rglob("*.j2")]
    return dead(sources.modules(), [sources.source(path) for path in scripts], templates)


def test_every_definition_is_used(repository: Path) -> None:
    excused = {name for names in CALLED_BY.values() for name in names}
    assert sorted(name for name in found(repository) - excused if not TRAINER_EVENT.fullmatch(name)) == []


def test_every_exemption_is_needed() -> None:
    names = {name for module in sources.modules() for name in defined(module)}
    assert [name for excused in CALLED_BY.values() for name in excused if name not in names] == []


def planted(text: str) -> Source:
    return sources.parsed(text, Path("planted.py"))


def test_search_finds_planted_dead_code() -> None:
    package = [
        planted(
            'LIMIT = 1\n"""Of nothing."""\ndef used():\n    """Beside `unused`."""\n    return '
            "1\ndef unused():\n    return used()\n"
        ),
        planted("class Box:\n    size: int\n    lid: int\n    def open(self):\n        return self.size\n"),
        planted("from package import Box\nBox(size=1)\n"),
    ]
    assert dead(package) == {"LIMIT", "unused", "lid", "open"}
    assert dead(package, [planted("print(box.lid, package.LIMIT)")]) == {"unused", "open"}
    assert dead(package, [planted("print(package.LIMIT)")], ["{{ box.lid }} unused"]) == {"unused", "open"}
