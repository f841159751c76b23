"""Read the arguments of a training script or notebook of unsloth from its syntax tree; nothing of it is run.

Keys of unsloth that mean something of their own. A call is a section of the account, named by its function: `SFTConfig.learning_rate`.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Sequence
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

MOST_BYTES = 32 << 20
"""Notebooks hold pictures."""
MODEL, ADAPTER, ARGUMENTS, TRAINER = "from_pretrained", "get_peft_model", "SFTConfig", "SFTTrainer"
ROWS, TEMPLATE, ANSWERS, MAP = "load_dataset", "get_chat_template", "train_on_responses_only", "map"
PLAIN_ARGUMENTS = "TrainingArguments"
"""The class of transformers, which keeps its own defaults: unsloth replaces those of `SFTConfig` alone."""
_ARGUMENT_CLASSES = frozenset({ARGUMENTS, PLAIN_ARGUMENTS})
_CALLS = {
    **dict.fromkeys((MODEL, ADAPTER, ROWS, TEMPLATE, ANSWERS, MAP), None),
    **dict.fromkeys((ARGUMENTS, "UnslothTrainingArguments"), ARGUMENTS),
    PLAIN_ARGUMENTS: None,
    **dict.fromkeys((TRAINER, "UnslothTrainer", "Trainer"), TRAINER),
}
"""Functions that are read → the section that their arguments are in; None: of the same name."""
_POSITIONAL = {MODEL: ("model_name",), ROWS: ("path", "name"), TEMPLATE: ("", "chat_template"), ADAPTER: ("",), ANSWERS: ("",)}
_MODELS = ("FastLanguageModel", "FastModel")
_OTHER_TRAINING = re.compile(r"(?:DPO|ORPO|KTO|GRPO|PPO|CPO|Reward|RLOO)(?:Trainer|Config)|FastVisionModel|FastSentenceTransformer")
_MAGIC = re.compile(r"^(\s*)[!%].*$", re.MULTILINE)
_BESIDE = re.compile(r"\s*[,)]*\s*#\s*(.*)")
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@dataclass(slots=True)
class Script:
    """The arguments of the calls of a script, by section."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    lines: dict[Path, int] = field(default_factory=dict[Path, int])
    beside: dict[Path, str] = field(default_factory=dict[Path, str])
    computed: list[Path] = field(default_factory=list[Path])
    """Arguments that only running the script would give; their value is their text."""
    other_training: str | None = None
    """A class that it calls, of another kind of training."""
    names: dict[str, Any] = field(default_factory=dict[str, Any])
    """Variables with a known value."""
    unread: list[str] = field(default_factory=list[str])
    """Parts that are not in `values`, one sentence each."""


def read_script(text: str, path: FilePath) -> Script:
    """Return the arguments of a script or notebook. Raises: usage error for one that is not Python, or that has no model of unsloth."""
    script = Script()
    is_notebook = path.suffix == ".ipynb"
    for number, source in enumerate(_cells(text, path) if is_notebook else [text], 1):
        try:
            tree = ast.parse(_MAGIC.sub(r"\1pass", source) if is_notebook else source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if not is_notebook:
                raise usage_error("yaml-syntax", f"the file is not Python: {error}", where=Where(str(path))) from error
            if any(name in source for name in _CALLS if name != MAP):
                script.unread.append(f"cell {number} is not Python that can be read: {error}")
            continue
        _CallReader(script, source, has_lines=not is_notebook).read(tree.body)
    if script.other_training is not None:
        hint = "only supervised fine-tuning and pre-training can be imported"
        raise usage_error("no-counterpart", f"the script trains with `{script.other_training}`", hint=hint, where=Where(str(path)))
    if MODEL not in script.values:
        message = f"`{path}` calls neither {' nor '.join(f'`{name}.{MODEL}`' for name in _MODELS)}"
        hint = "scripts and notebooks are read for the calls of unsloth; of other tools name the configuration or the command"
        raise usage_error("unknown-foreign-file", message, hint=hint, where=Where(str(path)))
    return script


def _cells(text: str, path: FilePath) -> list[str]:
    try:
        cells = json.loads(text)["cells"]
        code = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise usage_error("yaml-syntax", "the file is not a notebook: it has no `cells`", where=Where(str(path))) from error
    return [source if isinstance(source, str) else "".join(source) for source in code]


class _CallReader:
    """Reads the statements of one file or cell, in their order."""

    def __init__(self, script: Script, source: str, *, has_lines: bool) -> None:
        self._script, self._source, self._has_lines = script, source.splitlines(), has_lines

    def read(self, statements: Sequence[ast.AST]) -> None:
        """Read calls and names; the body of a function is read where it is written, and that of `if False:` is not."""
        for statement in statements:
            is_off = isinstance(statement, ast.If) and isinstance(statement.test, ast.Constant) and not statement.test.value
            inner = [
                each for _, value in ast.iter_fields(statement) for each in (cast("list[Any]", value) if isinstance(value, list) else [])
            ]
            blocks = [each for each in inner if isinstance(each, ast.stmt | ast.ExceptHandler)]
            for call in _calls(statement, blocks):
                self._call(call)
            if isinstance(statement, ast.Assign):
                self._remember(statement)
            self.read(cast("ast.If", statement).orelse if is_off else blocks)

    def _remember(self, statement: ast.Assign) -> None:
        names = self._script.names
        for target in statement.targets:
            if isinstance(target, ast.Name):
                names.pop(target.id, None)
                if (found := _literal(statement.value, names)) is not _UNKNOWN:
                    names[target.id] = found

    def _call(self, node: ast.Call) -> None:
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
        owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
        if other := _OTHER_TRAINING.fullmatch(owner) or _OTHER_TRAINING.fullmatch(name):
            self._script.other_training = other[0]
        if name not in _CALLS or (name == MODEL and owner not in _MODELS):
            return
        section = _CALLS[name] or name
        values = self._script.values
        if name == MAP and ROWS not in values:
            return
        if name == MAP:
            values.setdefault(MAP, []).append(ast.unparse(node)[:200])
        elif section == ROWS:
            values.setdefault(ROWS, []).append({})
            self._arguments(node, (ROWS, len(values[ROWS]) - 1), values[ROWS][-1])
        elif section not in values and not (section in _ARGUMENT_CLASSES and _ARGUMENT_CLASSES & values.keys()):
            values[section] = {}
            self._arguments(node, (section,), values[section])
        elif TRAINER not in values:
            self._script.unread.append(f"`{name}` is called more than once before the trainer is made: the first call is read")

    def _arguments(self, node: ast.Call, path: Path, into: dict[str, Any]) -> None:
        names = _POSITIONAL.get(str(path[0]), ())
        given = [(name, value) for name, value in zip(names, node.args, strict=False) if name]
        for name, value in [*given, *((each.arg, each.value) for each in node.keywords)]:
            key = name or f"**{ast.unparse(value)}"
            found = _literal(value, self._script.names)
            into[key] = ast.unparse(value) if found is _UNKNOWN else found
            if found is _UNKNOWN:
                self._script.computed.append((*path, key))
            if self._has_lines:
                self._script.lines[*path, key] = value.lineno
            line = self._source[(value.end_lineno or 1) - 1].encode()[value.end_col_offset or 0 :].decode(errors="replace")
            if match := _BESIDE.fullmatch(line):
                self._script.beside[*path, key] = match[1]


def _calls(statement: ast.AST, blocks: Sequence[ast.AST]) -> list[ast.Call]:
    """Return the calls of a statement, without those of its blocks, in the order in which they are written."""
    below = {id(node) for block in blocks for node in ast.walk(block)}
    found = [node for node in ast.walk(statement) if isinstance(node, ast.Call) and id(node) not in below]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


_UNKNOWN: Any = object()


def _literal(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return the value of an expression of literals and of names with known values; `_UNKNOWN` for any other."""
    if isinstance(node, ast.Name):
        return names.get(node.id, _UNKNOWN)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _literal(node.left, names), _literal(node.right, names)
        both = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (left, right))
        return _OPERATORS[type(node.op)](left, right) if both else _UNKNOWN
    text = ast.unparse(node)
    if text.startswith("torch.") and "(" not in text:
        return text.removeprefix("torch.")
    if re.fullmatch(r"(torch\.cuda\.)?is_bf(loat)?16_supported\(\)", text):
        return "auto"
    if re.fullmatch(r"not (torch\.cuda\.)?is_bf(loat)?16_supported\(\)", text):
        return False
    try:
        found = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _UNKNOWN
    return _plain(found)


def _plain(value: object) -> Any:
    """Return a literal as a value of YAML, or `_UNKNOWN`."""
    if isinstance(value, tuple | list):
        items = [_plain(item) for item in cast("list[object]", value)]
        return _UNKNOWN if _UNKNOWN in items else items
    if isinstance(value, dict):
        pairs = {str(name): _plain(item) for name, item in cast("dict[object, object]", value).items()}
        return _UNKNOWN if _UNKNOWN in pairs.values() else pairs
    return value if value is None or isinstance(value, str | bool | int | float) else _UNKNOWN


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
    **dict.fromkeys(("model", "tokenizer", "processing_class", "args", "train_dataset", "data_collator", "peft_config"), _OBJECT),
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
_OBJECTS = frozenset({"model", "tokenizer", "processing_class", "args", "train_dataset", "data_collator", "peft_config", "token"})
"""Arguments that are objects: their text is not a value that a person has to write."""


def settle_computed(ledger: Ledger, computed: Sequence[Path]) -> None:
    """Make questions of arguments whose value only running the script would give."""
    for path in computed:
        if path[-1] not in _OBJECTS and ledger.is_open(path):
            ledger.ask(path, "the script computes it: write its value")
