"""Read the arguments of a training script or notebook of unsloth from its syntax tree; nothing of it is run.

Keys of unsloth that mean something of their own. A call is a section of the account, named by its function: `SFTConfig.learning_rate`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, cast

from fsdp_tune.core.errors import Where, usage_error
from fsdp_tune.recipe.read.foreign.general import (
    TRAIN,
    Rule,
    Rules,
    SourceRule,
    chat_template,
    dtype,
    is_on,
    leave,
    leave_here,
    lora_targets,
    off_or,
    question,
    same,
    section,
    settle_source,
)
from fsdp_tune.recipe.read.foreign.ledger import Fate, Ledger, Path, Weight
from fsdp_tune.recipe.read.foreign.long_rows import packing_strategy
from fsdp_tune.recipe.read.foreign.notebook import code_cells
from fsdp_tune.recipe.read.foreign.script_names import UNKNOWN, ScriptNames, called
from fsdp_tune.recipe.read.tools import UNSLOTH

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
_OTHER_TRAINING = re.compile(r"(?:DPO|ORPO|KTO|GRPO|PPO|CPO|Reward|RLOO)(?:Trainer|Config)|FastVisionModel|FastSentenceTransformer")
_MAGIC = re.compile(r"^(\s*)[!%].*$", re.MULTILINE)
_BESIDE = re.compile(r"\s*[,)]*\s*#\s*(.*)")
_RUNS_OTHER = re.compile(r"^(\s*)%(?:run|store|load|load_ext|env)\b.*$", re.MULTILINE)
"""Magics of a notebook that may bind names."""


@dataclass(slots=True)
class Script:
    """The arguments of the calls of a script, by section."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    lines: dict[Path, int] = field(default_factory=dict[Path, int])
    beside: dict[Path, str] = field(default_factory=dict[Path, str])
    computed: dict[Path, str] = field(default_factory=dict[Path, str])
    """Arguments that only running the script would give, with why; their value is their text."""
    other_training: str | None = None
    """A class that it calls, of another kind of training."""
    unread: list[str] = field(default_factory=list[str])
    """Parts that are not in `values`, one sentence each."""


def read_script(text: str, path: FilePath) -> Script:
    """Return the arguments of a script or notebook. Raises: usage error for one that is not Python, or that has no model of unsloth."""
    script = Script()
    is_notebook = path.suffix == ".ipynb"
    cells: list[tuple[ast.Module, list[str]]] = []
    broken: list[str] = []
    for number, source in enumerate(code_cells(text, path) if is_notebook else [text], 1):
        try:
            code = _MAGIC.sub(r"\1pass", _RUNS_OTHER.sub(r"\1from _ import *", source)) if is_notebook else source
            cells.append((ast.parse(code), source.splitlines()))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if not is_notebook:
                raise usage_error("yaml-syntax", f"the file is not Python: {error}", where=Where(str(path))) from error
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
        raise usage_error("no-counterpart", f"the script trains with `{script.other_training}`", hint=hint, where=Where(str(path)))
    if MODEL not in script.values:
        message = f"`{path}` calls neither {' nor '.join(f'`{name}.{MODEL}`' for name in _MODELS)}"
        hint = "scripts are read for unsloth's calls, notebooks also for commands; of other tools name the configuration or the command"
        raise usage_error("unknown-foreign-file", message, hint=hint, where=Where(str(path)))
    return script


def _objects_of_calls(module: ast.Module) -> dict[str, str]:
    """Return the names to which the arguments of a trainer are assigned, with their section."""
    found: dict[str, str] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and (name := called(node.value)) in _CALLS:
            section = _CALLS[name] or name
            found |= {each.id: section for each in node.targets if isinstance(each, ast.Name) and section in _ARGUMENT_CLASSES}
    return found


class _CallReader:
    """Reads the statements of one file, or of the cells of a notebook, in their order."""

    def __init__(self, script: Script, names: ScriptNames, objects: Mapping[str, str]) -> None:
        """`objects`: names of the objects that a read call makes, with the section of its arguments."""
        self._script, self._names, self._objects = script, names, objects

    def read(self, statements: Sequence[ast.AST], source: Sequence[str], under: str = "", *, has_lines: bool) -> None:
        """Read calls; the body of a function is read where it is written, and that of `if False:` is not.

        `under`: the condition of the branch that the statements are in, "" if they run whenever the script does.
        """
        self._source, self._has_lines = source, has_lines
        for statement in statements:
            blocks = {
                name: [each for each in cast("list[Any]", value) if isinstance(each, ast.stmt | ast.ExceptHandler | ast.match_case)]
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
        elif section not in values and not (section in _ARGUMENT_CLASSES and _ARGUMENT_CLASSES & values.keys()):
            values[section] = {}
            self._arguments(node, (section,), values[section])
        elif TRAINER not in values or section == TRAINER:
            before = "" if section == TRAINER else " before the trainer is made"
            unread.append(f"`{name}` is called more than once{before}: the first call is read")

    def _arguments(self, node: ast.Call, path: Path, into: dict[str, Any]) -> None:
        names = _POSITIONAL.get(str(path[0]), ())
        for argument in [*node.args[len(names) :], *(each for each in node.args if isinstance(each, ast.Starred))]:
            words = f"`{ast.unparse(argument)}` of `{called(node)}` has no name: write what it sets"
            self._script.unread += [words] if words not in self._script.unread else []
        given = [(name, value) for name, value in zip(names, node.args, strict=False) if name and not isinstance(value, ast.Starred)]
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

    def _enter(self, path: Path, into: dict[str, Any], value: Any, node: ast.expr) -> None:
        into[str(path[-1])] = value
        if self._has_lines:
            self._script.lines[path] = node.lineno
        line = self._source[(node.end_lineno or 1) - 1].encode()[node.end_col_offset or 0 :].decode(errors="replace")
        if match := _BESIDE.fullmatch(line):
            self._script.beside[path] = match[1]

    def _attributes(self, statement: ast.AST) -> None:
        """Read `args.learning_rate = 1e-5`: an argument that is assigned too has no value that can be read."""
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        for target in targets:
            if not isinstance(target, ast.Attribute):
                continue
            owner = ast.unparse(target.value)
            section = self._objects.get(owner.removesuffix(".args")) if isinstance(target.value, ast.Name) else None
            if section is None and owner.endswith(".args"):
                section = next((each for each in self._script.values if each in _ARGUMENT_CLASSES), None)
            if section is None or section not in self._script.values:
                continue
            arguments: dict[str, Any] = self._script.values[section]
            arguments.setdefault(target.attr, ast.unparse(statement)[:200])
            self._script.computed[section, target.attr] = f"`{ast.unparse(target)}` is assigned after the call: write its value"


def _calls(statement: ast.AST, blocks: Sequence[ast.AST]) -> list[ast.Call]:
    """Return the calls of a statement, without those of its blocks, in the order in which they are written."""
    below = {id(node) for block in blocks for node in ast.walk(block)}
    found = [node for node in ast.walk(statement) if isinstance(node, ast.Call) and id(node) not in below]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


# ---- Rules

_QUANTISED = re.compile(r"(-unsloth)?-bnb-4bit$")


def has_adapter(values: dict[str, Any]) -> bool:
    return ADAPTER in values and not is_on(cast("dict[str, Any]", values[MODEL]).get("full_finetuning", False))


def _model(ledger: Ledger, path: Path, value: object) -> None:
    name = _QUANTISED.sub("", str(value))
    reason = "the weights of 16 bits, which are quantised here when they are read" if name != value else ""
    ledger.write(path, {"model.name_or_path": name}, Fate.CONVERTED, reason)


def _full(ledger: Ledger, path: Path, value: Any) -> None:
    ledger.drop(path, "every weight is trained if there is no `lora:`" if is_on(value) else "off: the file trains an adapter")


def _four_bits(ledger: Ledger, path: Path, value: Any) -> None:
    if not is_on(value):
        ledger.drop(path, "off, as it is here")
    elif is_on(ledger.value(MODEL, "full_finetuning")):
        ledger.drop(path, "no effect: `full_finetuning` trains every weight")
    else:
        ledger.write(path, {"quantization.load": "nf4"}, Fate.CONVERTED)


def _recomputation(ledger: Ledger, path: Path, value: Any) -> None:
    settings: dict[str, Any] = {"fsdp.activation_checkpointing": "full" if value == "unsloth" or is_on(value) else "none"}
    settings |= {"fsdp.activation_checkpointing_offload": True} if value == "unsloth" else {}
    ledger.write(path, settings, Fate.CONVERTED, weight=Weight.IMPLIED)


def _length(ledger: Ledger, path: Path, value: Any) -> None:
    ledger.write(path, {"data.max_length": value}, Fate.CONVERTED)


def _answers(ledger: Ledger, path: Path, value: object) -> None:
    """The texts before a question and an answer; here the chat template marks the answers."""
    names = list(cast("dict[str, Any]", value)) if isinstance(value, dict) else []
    settings: dict[str, Any] = {"data.loss_on": "assistant"}
    if not names:
        ledger.write(path, settings, Fate.CONVERTED)
    for name in names:
        if ledger.is_open((*path, name)):
            ledger.write((*path, name), settings, Fate.CONVERTED, "the chat template marks the answers")


def _rows(ledger: Ledger, path: Path, value: object) -> None:
    for index in range(len(cast("list[Any]", value))):
        settle_source(ledger, (*path, index), (*TRAIN, index), _SET)


def _text_field(ledger: Ledger, path: Path, value: object) -> None:
    if value == "text" or ledger.value(MAP):
        ledger.drop(path, "the column of the rows that the script makes" if ledger.value(MAP) else "`text` is its name here too")
    else:
        ledger.write(path, {(*TRAIN, 0, "rename_columns", str(value)): "text"}, Fate.CONVERTED)


def _part(name: str) -> Rule:
    """Return a rule for a switch of the parts of a model that adapters are in."""
    fine = name != "finetune_vision_layers"

    def rule(ledger: Ledger, path: Path, value: Any) -> None:
        if is_on(value) is fine:
            ledger.drop(path, "every linear layer of the language model is adapted, and nothing else")
        else:
            ledger.ask(path, "write the modules to adapt as `lora: {target_modules: […]}`", ("lora", "target_modules"))

    return rule


_OBJECT = leave("an object of the script")
_OWN = leave("a matter of unsloth's own code")
_SET: dict[str, SourceRule] = {
    "streaming": lambda ledger, path, _place, value: ledger.write(path, {"data.streaming": bool(value)}, Fate.CONVERTED),
    **dict.fromkeys(("trust_remote_code", "token", "num_proc", "cache_dir"), leave_here("rows are read without code of their own")),
}
_MODEL: Rules = {
    "model_name": _model,
    "max_seq_length": _length,
    "dtype": dtype("model.dtype"),
    "load_in_4bit": _four_bits,
    "load_in_8bit": off_or("off, as it is here", "8 bits are not supported: 4 bits are `quantization: {load: nf4}`"),
    "load_in_16bit": leave("weights that are not quantised have 16 bits: `model.frozen_dtype`"),
    "full_finetuning": _full,
    "attn_implementation": same("model.attn_implementation"),
    "trust_remote_code": same("model.trust_remote_code"),
    "use_gradient_checkpointing": _recomputation,
    "max_lora_rank": leave("of generation with vLLM"),
    "gpu_memory_utilization": leave("of generation with vLLM"),
    "fast_inference": leave("of generation with vLLM"),
    "device_map": leave("ranks are placed by `launch:`"),
    **dict.fromkeys(("unsloth_force_compile", "offload_embedding", "auto_model", "fix_tokenizer", "return_logits"), _OWN),
}
_PARTS = ("finetune_vision_layers", "finetune_language_layers", "finetune_attention_modules", "finetune_mlp_modules")
_ADAPTER: Rules = {
    "r": same("lora.r"),
    "lora_alpha": same("lora.lora_alpha"),
    "lora_dropout": same("lora.lora_dropout"),
    "bias": same("lora.bias"),
    "target_modules": lora_targets,
    "use_rslora": same("lora.use_rslora"),
    "use_dora": same("lora.use_dora"),
    "modules_to_save": same("lora.modules_to_save"),
    "use_gradient_checkpointing": _recomputation,
    "random_state": leave("adapters are drawn from `training.seed`"),
    "loftq_config": question("adapters that change the base are not supported", "lora", "init_lora_weights"),
    "max_seq_length": leave("it is that of the model"),
    **{name: _part(name) for name in _PARTS},
    **dict.fromkeys(("model", "task_type"), _OBJECT),
}
_ARGUMENTS: Rules = {
    "dataset_text_field": _text_field,
    **dict.fromkeys(("max_seq_length", "max_length"), _length),
    "packing": same("data.packing"),
    "packing_strategy": packing_strategy,
    "padding_free": leave("packed rows have no padding; `data.packing` packs"),
    "dataset_kwargs": leave("rows are tokenised once; see `data:`"),
    "embedding_learning_rate": question("write `training: {parameter_groups: [{match: […], learning_rate: …}]}`", "training"),
    "eval_strategy": same("training.eval_strategy"),
}
_TRAINER: Rules = {
    **_ARGUMENTS,
    "eval_dataset": question("write the rows to evaluate on as `data: {eval: …}`", "data", "eval"),
    "formatting_func": question("rows are made by code: write them as messages, or as prompt and completion", "data", "train"),
    "compute_metrics": question("metrics are entry points: `fsdp-tune evaluate --metric`"),
    **dict.fromkeys(("model", "tokenizer", "processing_class", "args", "train_dataset", "data_collator"), _OBJECT),
    "peft_config": question("write its rank, scale and modules under `lora:`", "lora"),
    "callbacks": question("callbacks are extensions: `extensions: {callbacks: […]}`"),
}
RULES: Rules = {
    MODEL: section(_MODEL),
    ADAPTER: lambda ledger, path, value: (
        section(_ADAPTER)(ledger, path, value) if value else ledger.write(path, {"lora": {}}, Fate.CONVERTED)
    ),
    **dict.fromkeys((ARGUMENTS, PLAIN_ARGUMENTS), section(_ARGUMENTS)),
    TRAINER: section(_TRAINER),
    ROWS: _rows,
    MAP: question("rows are made by code: write them as messages, or as prompt and completion", "data", "train"),
    TEMPLATE: section(
        {
            "chat_template": chat_template("data.chat_template"),
            "mapping": leave("`from`, `value` and the usual roles are known here too"),
            **dict.fromkeys(("map_eos_token", "tokenizer", "system_message"), leave("the tokens of the template are kept")),
        }
    ),
    ANSWERS: _answers,
}
"""By name; see `general.settle_key`."""
OBJECTS = frozenset({"model", "tokenizer", "processing_class", "args", "train_dataset", "data_collator", "token"})
"""Arguments that are objects: their text is not a value that a person has to write."""
