"""The modules of the package, each read and parsed once for all tests of its structure."""

from __future__ import annotations

import ast
import functools
import gc
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fsdp_tune"


@dataclass(frozen=True)
class Source:
    """A Python file: its text, its tree, and all nodes of the tree in the order of `ast.walk`."""

    path: Path
    text: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]

    @property
    def name(self) -> str:
        """Path from the root of the repository."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def module(self) -> str:
        return ".".join(self.path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def parsed(text: str, path: Path) -> Source:
    tree = ast.parse(text)
    return Source(path, text, tree, tuple(ast.walk(tree)))


@functools.cache
def source(path: Path) -> Source:
    return parsed(path.read_text(encoding="utf-8"), path)


@functools.cache
def modules() -> tuple[Source, ...]:
    """Every module of the package, in the order of their paths. Do not change the trees."""
    gc.disable()  # it would visit half a million nodes again and again
    try:
        return tuple(source(path) for path in sorted(PACKAGE.rglob("*.py")))
    finally:
        gc.freeze()
        gc.enable()


def root_name(node: ast.AST) -> str:
    """Return the first name of a dotted expression, as `torch` of `torch.nn.Linear`; empty for any other
    expression."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
