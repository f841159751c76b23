"""Generate the keys and defaults of other tools from their sources: `python -m tests.migrate.tool_keys [--check] TOOL=DIRECTORY …`.

A directory is the package of the tool: `axolotl`, `trl`, `llamafactory`, `swift`. Nothing of it is run. A key that a tool no longer has
stays in the table, for files of its older versions. With `--check` nothing is written, and a key that the table lacks is an error.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_tune.migrate.tool_keys import FILE
from fsdp_tune.migrate.tools.llama_factory import LINE_ENDS

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
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        is_constant = ast.unparse(statement.annotation).startswith("ClassVar") or statement.target.id.isupper()
        if not is_constant and not statement.target.id.startswith("_"):
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


def differences(tool: str, table: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return a line for each key of a tool that its table lacks, or has with another default."""
    new = [f"{tool} has the key `{key}`, which the table lacks" for key in found if key not in table]
    other = [
        key
        for key in found
        if key in table and (found[key] != table[key] or isinstance(found[key], bool) is not isinstance(table[key], bool))
    ]
    return new + [f"the default of {tool}'s `{key}` is {found[key]!r}, in the table {table[key]!r}" for key in other]


def line_ends(package: Path) -> set[str]:
    """Return LLaMA-Factory's templates that end an answer with white space after the token that ends the turn."""
    tree = ast.parse((package / "data" / "template.py").read_text(encoding="utf-8"))
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call) and ast.unparse(each.func) == "register_template"]
    fields = [{str(each.arg): each.value for each in call.keywords} for call in calls]
    return {ast.literal_eval(each["name"]) for each in fields if "format_assistant" in each and _ends_line(each["format_assistant"])}


def _ends_line(formatter: ast.expr) -> bool:
    assert isinstance(formatter, ast.Call)
    slots: list[Any] = ast.literal_eval(next(each.value for each in formatter.keywords if each.arg == "slots"))
    text = "".join(each if isinstance(each, str) else "<eos>" for each in slots)
    return text != text.rstrip() and not text.rstrip().endswith("{{content}}")


def main(arguments: list[str]) -> int:
    """Update the tables of the named tools, or check them. Returns the exit code."""
    tables: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    lines: list[str] = []
    for name, _, directory in (argument.partition("=") for argument in arguments if argument != "--check"):
        found = keys_of(name, Path(directory))
        if not found:
            lines.append(f"{directory} has no schema of {name}: {', '.join(SOURCES[name])}")
        lines += differences(name, tables.get(name, {}), found)
        if name == "LLaMA-Factory" and (Path(directory) / "data" / "template.py").exists():
            lines += [f"{name}'s template `{each}` ends answers with a line end" for each in sorted(line_ends(Path(directory)) - LINE_ENDS)]
        tables[name] = dict(sorted({**tables.get(name, {}), **found}.items()))
    if "--check" in arguments:
        sys.stderr.writelines(f"{line}\n" for line in lines)
        return 1 if lines else 0
    rows = (f"  {json.dumps(tool)}: {json.dumps(keys)}" for tool, keys in sorted(tables.items()))
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
