"""Read the arguments of a training script or notebook of unsloth from its syntax tree; nothing of it is
run."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, cast

from fsdp_tune.core.errors import Where, usage_error
from fsdp_tune.migrate.read.notebook import code_cells
from fsdp_tune.migrate.read.script_names import UNKNOWN, ScriptNames, called
from fsdp_tune.recipe.key_paths import KeyPath
from fsdp_tune.recipe.read.tool_detection import UNSLOTH

MOST_BYTES = 32 << 20
"""Notebooks hold pictures."""


MODEL, ADAPTER, ARGUMENTS, TRAINER = "from_pretrained", "get_peft_model", "SFTConfig", "SFTTrainer"


ROWS, TEMPLATE, ANSWERS, MAP = "load_dataset", "get_chat_template", "train_on_responses_only", "map"


TOOL = UNSLOTH


PLAIN_ARGUMENTS = "TrainingArguments"
"""The class of transformers, which keeps its own defaults: unsloth replaces those of `SFTConfig` alone."""


_ARGUMENT_CLASSES = frozenset({ARGUMENTS, PLAIN_ARGUMENTS})


SECTIONS = {
    MODEL: ("data", "quantization", "model", "fsdp"),
    ADAPTER: ("lora", "fsdp"),
    **dict.fromkeys((ARGUMENTS, PLAIN_ARGUMENTS, TRAINER), ("training", "data")),
}
"""Sections of a recipe that the arguments of a call decide."""


_CALLS = {
    **dict.fromkeys((MODEL, ADAPTER, ROWS, TEMPLATE, ANSWERS, MAP), None),
    **dict.fromkeys((ARGUMENTS, "UnslothTrainingArguments"), ARGUMENTS),
    PLAIN_ARGUMENTS: None,
    **dict.fromkeys((TRAINER, "UnslothTrainer", "Trainer"), TRAINER),
}
"""Functions that are read → the section that their arguments are in; None: of the same name."""


_POSITIONAL: dict[str, tuple[str, ...]] = {
    MODEL: ("model_name", "max_seq_length", "dtype", "load_in_4bit"),
    ADAPTER: ("", "r", "target_modules", "lora_alpha", "lora_dropout", "bias"),
    ROWS: ("path", "name", "data_dir", "data_files", "split"),
    TEMPLATE: ("", "chat_template"),
    ANSWERS: ("",),
    **dict.fromkeys((ARGUMENTS, PLAIN_ARGUMENTS), ("output_dir",)),
    TRAINER: ("model", "args", "data_collator", "train_dataset", "eval_dataset"),
}
"""Parameters in their order; "" for the object that a function changes."""


_MODELS = ("FastLanguageModel", "FastModel")


_OTHER_TRAINING = re.compile(
    r"(?:DPO|ORPO|KTO|GRPO|PPO|CPO|Reward|RLOO)(?:Trainer|Config)|FastVisionModel|FastSentenceTransformer"
)


_MAGIC = re.compile(r"^(\s*)[!%].*$", re.MULTILINE)


_BESIDE = re.compile(r"\s*[,)]*\s*#\s*(.*)")


_RUNS_OTHER = re.compile(r"^(\s*)%(?:run|store|load|load_ext|env)\b.*$", re.MULTILINE)
"""Magics of a notebook that may bind names."""


@dataclass(slots=True)
class Script:
    """The arguments of the calls of a script, by section."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    lines: dict[KeyPath, int] = field(default_factory=dict[KeyPath, int])
    beside: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    computed: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    """Arguments that only running the script would give, with why; their value is their text."""
    other_training: str | None = None
    """A class that it calls, of another kind of training."""
    unread: list[str] = field(default_factory=list[str])
    """Parts that are not in `values`, one sentence each."""


def read_script(text: str, path: FilePath) -> Script:
    """Return the arguments of a script or notebook. Raises: usage error for one that is not Python, or that
    has no model of unsloth."""
    script = Script()
    is_notebook = path.suffix == ".ipynb"
    cells: list[tuple[ast.Module, list[str]]] = []
    broken: list[str] = []
    for number, source in enumerate(code_cells(text, path) if is_notebook else [text], 1):
        try:
            code = (
                _MAGIC.sub(r"\1pass", _RUNS_OTHER.sub(r"\1from _ import *", source))
                if is_notebook
                else source
            )
            cells.append((ast.parse(code), source.splitlines()))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if not is_notebook:
                raise usage_error(
                    "yaml-syntax", f"the file is not Python: {error}", where=Where(str(path))
                ) from error
            if any(name in source for name in _CALLS if name != MAP):
                broken.append(f"cell {number} is not Python that can be read: {error}")
    module = ast.Module([statement for tree, _ in cells for statement in tree.body], [])
    names = ScriptNames(module, frozenset(_CALLS), has_lines=not is_notebook)
    reader = _CallReader(script, names, _objects_of_calls(module))
    for tree, lines in cells:
        reader.read(tree.body, lines, has_lines=not is_notebook)
    script.unread += broken
    if script.other_training is not None:
        hint = "only supervised fine-tuning and pre-training can be imported"
        raise usage_error(
            "no-counterpart",
            f"the script trains with `{script.other_training}`",
            hint=hint,
            where=Where(str(path)),
        )
    if MODEL not in script.values:
        message = f"`{path}` calls neither {' nor '.join(f'`{name}.{MODEL}`' for name in _MODELS)}"
        hint = (
            "scripts are read for unsloth's calls, notebooks also for commands; of other tools name the "
            "configuration or the command"
        )
        raise usage_error("unknown-foreign-file", message, hint=hint, where=Where(str(path)))
    return script


def _objects_of_calls(module: ast.Module) -> dict[str, str]:
    """Return the names to which the arguments of a trainer are assigned, with their section."""
    found: dict[str, str] = {}
    for node in ast.walk(module):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and (name := called(node.value)) in _CALLS
        ):
            section = _CALLS[name] or name
            found |= {
                each.id: section
                for each in node.targets
                if isinstance(each, ast.Name) and section in _ARGUMENT_CLASSES
            }
    return found


class _CallReader:
    """Reads the statements of one file, or of the cells of a notebook, in their order."""

    def __init__(self, script: Script, names: ScriptNames, objects: Mapping[str, str]) -> None:
        """`objects`: names of the objects that a read call makes, with the section of its arguments."""
        self._script, self._names, self._objects = script, names, objects

    def read(
        self, statements: Sequence[ast.AST], source: Sequence[str], under: str = "", *, has_lines: bool
    ) -> None:
        """Read calls; the body of a function is read where it is written, and that of `if False:` is not.

        `under`: the condition of the branch that the statements are in, "" if they run whenever the script
        does.
        """
        self._source, self._has_lines = source, has_lines
        for statement in statements:
            blocks = {
                name: [
                    each
                    for each in cast("list[Any]", value)
                    if isinstance(each, ast.stmt | ast.ExceptHandler | ast.match_case)
                ]
                for name, value in ast.iter_fields(statement)
                if isinstance(value, list)
            }
            for call in _calls(statement, [each for block in blocks.values() for each in block]):
                self._call(call, under)
            self._attributes(statement)
            for name, block in blocks.items():
                condition = self._condition(statement, name)
                if condition is not None:
                    self.read(block, source, condition or under, has_lines=has_lines)

    def _condition(self, statement: ast.AST, part: str) -> str | None:
        """Return what a block of a statement depends on, "" for nothing; None if it never runs."""
        if isinstance(statement, ast.If):
            value = self._names.value(statement.test)
            if value is not UNKNOWN:
                return "" if bool(value) is (part == "body") else None
            text = ast.unparse(statement.test)
            is_main = re.fullmatch(r"__name__ == ['\"]__main__['\"]", text) is not None
            return "" if is_main and part == "body" else f"if {text[:60]}"
        if isinstance(statement, ast.For | ast.AsyncFor | ast.While):
            return "a loop"
        if isinstance(statement, ast.ExceptHandler | ast.match_case):
            return "a branch"
        return ""

    def _call(self, node: ast.Call, under: str) -> None:
        name = called(node)
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if other := _OTHER_TRAINING.fullmatch(owner) or _OTHER_TRAINING.fullmatch(name):
            self._script.other_training = other[0]
        if name not in _CALLS or (name == MODEL and owner not in _MODELS):
            return
        section = _CALLS[name] or name
        values, unread = self._script.values, self._script.unread
        if name == MAP and ROWS not in values:
            return
        if under and name != MAP and TRAINER not in values:
            unread.append(f"`{name}` is called only under `{under}`: written as if it always were")
        if name == MAP:
            values.setdefault(MAP, []).append(ast.unparse(node)[:200])
        elif section == ROWS:
            values.setdefault(ROWS, []).append({})
            self._arguments(node, (ROWS, len(values[ROWS]) - 1), values[ROWS][-1])
        elif section not in values and not (
            section in _ARGUMENT_CLASSES and _ARGUMENT_CLASSES & values.keys()
        ):
            values[section] = {}
            self._arguments(node, (section,), values[section])
        elif TRAINER not in values or section == TRAINER:
            before = "" if section == TRAINER else " before the trainer is made"
            unread.append(f"`{name}` is called more than once{before}: the first call is read")

    def _arguments(self, node: ast.Call, path: KeyPath, into: dict[str, Any]) -> None:
        names = _POSITIONAL.get(str(path[0]), ())
        for argument in [
            *node.args[len(names) :],
            *(each for each in node.args if isinstance(each, ast.Starred)),
        ]:
            words = f"`{ast.unparse(argument)}` of `{called(node)}` has no name: write what it sets"
            self._script.unread += [words] if words not in self._script.unread else []
        given = [
            (name, value)
            for name, value in zip(names, node.args, strict=False)
            if name and not isinstance(value, ast.Starred)
        ]
        for name, value in [*given, *((each.arg, each.value) for each in node.keywords)]:
            found = self._names.value(value)
            if name is None and isinstance(found, dict):  # `**arguments` of a known mapping
                for key, inner in cast("dict[str, Any]", found).items():
                    self._enter((*path, key), into, inner, value)
                continue
            key = name or f"**{ast.unparse(value)}"
            if found is UNKNOWN:
                self._script.computed[(*path, key)] = f"{self._names.why_unknown(value)}: write its value"
            self._enter((*path, key), into, ast.unparse(value) if found is UNKNOWN else found, value)

    def _enter(self, path: KeyPath, into: dict[str, Any], value: Any, node: ast.expr) -> None:
        into[str(path[-1])] = value
        if self._has_lines:
            self._script.lines[path] = node.lineno
        line = (
            self._source[(node.end_lineno or 1) - 1]
            .encode()[node.end_col_offset or 0 :]
            .decode(errors="replace")
        )
        if match := _BESIDE.fullmatch(line):
            self._script.beside[path] = match[1]

    def _attributes(self, statement: ast.AST) -> None:
        """Read `args.learning_rate = 1e-5`: an argument that is assigned too has no value that can be
        read."""
        targets = (
            statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        )
        for target in targets:
            if not isinstance(target, ast.Attribute):
                continue
            owner = ast.unparse(target.value)
            section = (
                self._objects.get(owner.removesuffix(".args")) if isinstance(target.value, ast.Name) else None
            )
            if section is None and owner.endswith(".args"):
                section = next((each for each in self._script.values if each in _ARGUMENT_CLASSES), None)
            if section is None or section not in self._script.values:
                continue
            arguments: dict[str, Any] = self._script.values[section]
            arguments.setdefault(target.attr, ast.unparse(statement)[:200])
            self._script.computed[section, target.attr] = (
                f"`{ast.unparse(target)}` is assigned after the call: write its value"
            )


def _calls(statement: ast.AST, blocks: Sequence[ast.AST]) -> list[ast.Call]:
    """Return the calls of a statement, without those of its blocks, in the order in which they are
    written."""
    below = {id(node) for block in blocks for node in ast.walk(block)}
    found = [node for node in ast.walk(statement) if isinstance(node, ast.Call) and id(node) not in below]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))
