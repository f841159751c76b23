"""Generate the keys and defaults of other tools from their sources: `python -m tests.migrate.tool_keys TOOL=DIRECTORY …`.

A directory is the package of the tool: `axolotl`, `trl`, `llamafactory`, `swift`. Nothing of it is run.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_tune.migrate.tool_keys import FILE

SOURCES = {
    "axolotl": ("utils/schemas/*.py",),
    "TRL": ("trainer/sft_config.py", "trainer/base_config.py", "trainer/model_config.py", "scripts/utils.py"),
    "LLaMA-Factory": ("hparams/*_args.py",),
    "ms-swift": (
        *("arguments/base_args/base_args.py", "arguments/base_args/data_args.py", "arguments/base_args/model_args.py"),
        *("arguments/base_args/quant_args.py", "arguments/base_args/template_args.py", "arguments/sft_args.py"),
        *("arguments/tuner_args.py", "trainers/arguments.py"),
    ),
}
ROOTS = {
    "axolotl": ("AxolotlInputConfig",),
    "TRL": ("SFTConfig", "ModelConfig", "ScriptArguments"),
    "LLaMA-Factory": ("ModelArguments", "DataArguments", "TrainingArguments", "FinetuningArguments"),
    "ms-swift": ("TrainArgumentsMixin", "SftArguments"),
}
"""Classes whose fields, with those of their bases in the same files, are keys at the top of a file."""


def keys_of(tool: str, package: Path) -> dict[str, Any]:
    """Return the keys of a tool with their defaults; null if the default is null or is computed."""
    files = [file for pattern in SOURCES[tool] for file in sorted(package.glob(pattern))]
    nodes = [node for file in files for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    classes = {node.name: node for node in nodes}

    def fields(name: str) -> dict[str, Any]:
        if name not in classes:
            return {}
        found: dict[str, Any] = {}
        for base in reversed(classes[name].bases):  # the first base comes first
            found |= fields(ast.unparse(base).rpartition(".")[2])
        return found | dict(_fields(classes[name]))

    found: dict[str, Any] = {}
    for root in ROOTS[tool]:
        found |= fields(root)
    return dict(sorted(found.items()))


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and not statement.target.id.startswith("_"):
            yield statement.target.id, _default(statement.value)


def _default(value: ast.expr | None) -> Any:
    if isinstance(value, ast.Call):
        named = {keyword.arg: keyword.value for keyword in value.keywords}
        value = named.get("default", value.args[0] if value.args and ast.unparse(value.func) == "Field" else None)
    found: object = None
    try:
        found = None if value is None else ast.literal_eval(value)
    except ValueError:
        return None
    return found if isinstance(found, str | int | float | bool | list) else None  # pyright: ignore[reportUnknownVariableType]


if __name__ == "__main__":
    tables: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for argument in sys.argv[1:]:
        name, _, directory = argument.partition("=")
        tables[name] = keys_of(name, Path(directory))
    lines = (f"  {json.dumps(tool)}: {json.dumps(keys)}" for tool, keys in sorted(tables.items()))
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
