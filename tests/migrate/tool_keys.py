"""Generate the keys and defaults of other tools from their sources:
`python -m tests.migrate.tool_keys [--check] TOOL=DIRECTORY …`.

A directory is the package of the tool: `axolotl`, `trl`, `llamafactory`, `swift`. Nothing of it is run. A key
that a tool no longer has stays in the table, for files of its older versions. With `--check` nothing is
written, and a key that the table lacks is an error.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_tune.migrate.tool_keys import FILE
from fsdp_tune.migrate.tools import llama_factory_templates, swift_templates

SOURCES = {
    "axolotl": ("utils/schemas/*.py",),
    "TRL": ("trainer/sft_config.py", "trainer/base_config.py", "trainer/model_config.py", "scripts/utils.py"),
    "LLaMA-Factory": ("hparams/*_args.py",),
    "ms-swift": (
        *(
            "arguments/base_args/base_args.py",
            "arguments/base_args/data_args.py",
            "arguments/base_args/model_args.py",
        ),
        *(
            "arguments/base_args/quant_args.py",
            "arguments/base_args/template_args.py",
            "arguments/sft_args.py",
        ),
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
TEMPLATES = {"LLaMA-Factory": "data/template.py", "ms-swift": "template"}
"""The file or folder that has the templates of a tool."""
LINE_ENDS = {"LLaMA-Factory": llama_factory_templates.LINE_ENDS, "ms-swift": swift_templates.LINE_ENDS}


def keys_of(tool: str, package: Path) -> dict[str, Any]:
    """Return the keys of a tool with their defaults; null if the default is null or is computed."""
    files = [file for pattern in SOURCES[tool] for file in sorted(package.glob(pattern))]
    nodes = [
        node
        for file in files
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    ]
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
        is_constant = (
            ast.unparse(statement.annotation).startswith("ClassVar") or statement.target.id.isupper()
        )
        if not is_constant and not statement.target.id.startswith("_"):
            yield statement.target.id, _default(statement.value)


def _default(value: ast.expr | None) -> Any:
    if isinstance(value, ast.Call):
        named = {keyword.arg: keyword.value for keyword in value.keywords}
        value = named.get(
            "default", value.args[0] if value.args and ast.unparse(value.func) == "Field" else None
        )
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
        if key in table
        and (found[key] != table[key] or isinstance(found[key], bool) is not isinstance(table[key], bool))
    ]
    return new + [
        f"the default of {tool}'s `{key}` is {found[key]!r}, in the table {table[key]!r}" for key in other
    ]


def line_ends(tool: str, package: Path) -> set[str]:
    """Return the templates of a tool that end an answer with white space after the token that ends the
    turn."""
    if tool == "ms-swift":
        return _line_ends_of_swift(package)
    tree = ast.parse((package / "data" / "template.py").read_text(encoding="utf-8"))
    fields = [
        {str(each.arg): each.value for each in call.keywords} for call in _calls(tree, "register_template")
    ]
    found = {each["name"]: each["format_assistant"] for each in fields if "format_assistant" in each}
    return {ast.literal_eval(name) for name, formatter in found.items() if _ends_line(_slots(formatter))}


def _calls(tree: ast.AST, function: str) -> list[ast.Call]:
    return [
        each for each in ast.walk(tree) if isinstance(each, ast.Call) and ast.unparse(each.func) == function
    ]


def _slots(formatter: ast.expr) -> list[Any]:
    assert isinstance(formatter, ast.Call)
    return ast.literal_eval(next(each.value for each in formatter.keywords if each.arg == "slots"))


def _ends_line(slots: list[Any]) -> bool:
    text = "".join(each if isinstance(each, str) else "<eos>" for each in slots)
    return text != text.rstrip() and not text.rstrip().endswith("{{content}}")


def _parts(suffix: ast.expr) -> list[Any]:
    """Return the texts of a suffix; None for a part that is a token or a name."""
    return (
        [each.value if isinstance(each, ast.Constant) else None for each in suffix.elts]
        if isinstance(suffix, ast.List)
        else []
    )


def _line_ends_of_swift(package: Path) -> set[str]:
    """`suffix` of a template, or that of its class or of a base of it; names of templates are constants."""
    trees = [
        ast.parse(file.read_text(encoding="utf-8")) for file in sorted((package / "template").rglob("*.py"))
    ]
    classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    constants = {
        f"{node.name}.{ast.unparse(statement.targets[0])}": ast.literal_eval(statement.value)
        for node in classes.values()
        for statement in node.body
        if isinstance(statement, ast.Assign)
        and node.name.endswith("TemplateType")
        and isinstance(statement.value, ast.Constant)
    }

    def inherited(name: str) -> list[Any]:
        node = classes[name]
        given = next(
            (
                each.value
                for each in node.body
                if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == "suffix"
            ),
            None,
        )
        found = (
            next((each.body for each in ast.walk(given) if isinstance(each, ast.Lambda)), None)
            if given
            else None
        )
        return _parts(found) if found else inherited(ast.unparse(node.bases[0]))

    found: set[str] = set()
    for call in (each for tree in trees for each in _calls(tree, "register_template")):
        meta = call.args[0]
        if not isinstance(meta, ast.Call):
            continue
        fields = {str(each.arg): each.value for each in meta.keywords}
        name = fields["template_type"] if "template_type" in fields else meta.args[0]
        if _ends_line(_parts(fields["suffix"]) if "suffix" in fields else inherited(ast.unparse(meta.func))):
            found.add(
                constants[ast.unparse(name)] if isinstance(name, ast.Attribute) else ast.literal_eval(name)
            )
    return found


def main(arguments: list[str]) -> int:
    """Update the tables of the named tools, or check them. Returns the exit code."""
    tables: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    lines: list[str] = []
    for name, _, directory in (argument.partition("=") for argument in arguments if argument != "--check"):
        found = keys_of(name, Path(directory))
        if not found:
            lines.append(f"{directory} has no schema of {name}: {', '.join(SOURCES[name])}")
        lines += differences(name, tables.get(name, {}), found)
        if name in LINE_ENDS and (Path(directory) / TEMPLATES[name]).exists():
            new = line_ends(name, Path(directory)) - LINE_ENDS[name]
            lines += [f"{name}'s template `{each}` ends answers with a line end" for each in sorted(new)]
        tables[name] = dict(sorted({**tables.get(name, {}), **found}.items()))
    if "--check" in arguments:
        sys.stderr.writelines(f"{line}\n" for line in lines)
        return 1 if lines else 0
    rows = (f"  {json.dumps(tool)}: {json.dumps(keys)}" for tool, keys in sorted(tables.items()))
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
