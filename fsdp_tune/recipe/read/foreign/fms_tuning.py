"""Options of fms-hf-tuning (`tuning.sft_trainer`, or its JSON) that mean something of their own, and its file of data sets."""

from __future__ import annotations

from typing import Any, cast

from fsdp_tune.recipe.read.foreign.accelerate_config import ACCELERATE_RULES
from fsdp_tune.recipe.read.foreign.general import (
    TRAIN,
    Rule,
    Rules,
    SourceRule,
    by_synonym,
    chat_template,
    fine_or,
    is_on,
    leave,
    leave_here,
    off_or,
    question,
    rename,
    same,
    section,
    settle_all,
    settle_source,
)
from fsdp_tune.recipe.read.foreign.ledger import Fate, Ledger, Path
from fsdp_tune.recipe.synonyms import SYNONYMS

METHODS = ("lora", "none", "None", "")
UNSUPPORTED = "prompt tuning or activated LoRA"
"""The other values of `peft_method`."""
DATA_CONFIG = "data_config_path"
_EVAL: Path = ("data", "eval", 0)
_SPLIT = "rows of text are not divided by a mark: write them as prompt and completion"


def has_adapter(values: dict[str, Any]) -> bool:
    return values.get("peft_method") == "lora"


def _adapter(ledger: Ledger, path: Path, value: Any) -> None:
    if value == "lora":
        ledger.write(path, {"lora": {}}, Fate.CONVERTED)
    else:
        ledger.drop(path, "no adapter: every weight is trained")


def _targets(ledger: Ledger, path: Path, value: Any) -> None:
    advice = SYNONYMS["lora_target_modules"].advice(value)
    if advice.tree:
        ledger.write(path, {"lora.target_modules": advice.tree["lora"]["target_modules"]}, Fate.KEPT)
    else:
        ledger.ask(path, advice.words, ("lora", "target_modules"))


def _flash(ledger: Ledger, path: Path, value: Any) -> None:
    if is_on(value):
        ledger.write(path, {"model.attn_implementation": "flash_attention_2"}, Fate.CONVERTED)
    else:
        ledger.drop(path, "off: `model.attn_implementation` is chosen by the GPU and the model")


def _tokenizer(ledger: Ledger, path: Path, value: Any) -> None:
    if value == ledger.value("model_name_or_path"):
        ledger.drop(path, "it is that of the model")
    else:
        ledger.write(path, {"model.tokenizer": value}, Fate.CONVERTED)


def _text_field(ledger: Ledger, path: Path, value: Any) -> None:
    if value == "text":
        ledger.drop(path, "`text` is the name of that column here too")
        return
    places = [TRAIN, *([_EVAL[:2]] if ledger.value("validation_data_path") else [])]
    ledger.write(path, {(*place, 0, "rename_columns", str(value)): "text" for place in places}, Fate.CONVERTED)


def _chat_field(ledger: Ledger, path: Path, value: Any) -> None:
    rename(ledger, path, (*TRAIN, 0), str(value), "messages")


def _path(place: Path) -> Rule:
    return lambda ledger, path, value: ledger.write(path, {(*place, "path"): value}, Fate.CONVERTED)


# ---- The file of data sets


def _data_config(ledger: Ledger, path: Path, value: Any) -> None:
    if isinstance(value, dict):
        settle_all(ledger, path, _DATA)
    else:
        ledger.ask(path, f"`{value}` was not found here: write its data sets as `data: {{train: [{{path: NAME}}]}}`", TRAIN)


def _sets(ledger: Ledger, path: Path, value: Any) -> None:
    if not isinstance(value, list):
        ledger.ask(path, "write the data sets as `data: {train: [{path: NAME}]}`", TRAIN)
        return
    for index in range(len(cast("list[Any]", value))):
        settle_source(ledger, (*path, index), (*TRAIN, index), _SET)


def _files(ledger: Ledger, path: Path, place: Path, value: Any) -> None:
    names = cast("list[Any]", value) if isinstance(value, list) else [value]
    if len(names) == 1:
        ledger.write(path, {(*place, "path"): names[0]}, Fate.CONVERTED)
    else:
        ledger.ask(path, "write one source for each file: `data: {train: [{path: A}, {path: B}]}`", place)


def _handlers(ledger: Ledger, path: Path, place: Path, value: Any) -> None:
    """Functions that make the rows; those that only name columns or tokenise are not needed."""
    for index, handler in enumerate(cast("list[Any]", value) if isinstance(value, list) else []):
        inner = (*path, index)
        known = cast("dict[str, Any]", handler) if isinstance(handler, dict) else {}
        arguments: Any = ledger.value(*inner, "arguments", "fn_kwargs")
        if known.get("name") == "tokenize_and_apply_input_masking":
            _masked(ledger, inner, place, cast("dict[str, Any]", arguments) if isinstance(arguments, dict) else {})
        elif known.get("name") == "apply_tokenizer_chat_template":
            ledger.write((*inner, "name"), {(*place, "format"): "messages"}, Fate.CONVERTED)
            _leave_arguments(ledger, inner)
        elif known.get("name") == "tokenize":
            ledger.drop(inner, "rows are tokenised by `data:`")
        else:
            ledger.ask(inner, "rows are made by code: write them as messages, or as prompt and completion", place)
    if ledger.is_open(path):
        ledger.ask(path, "rows are made by code: write them as messages, or as prompt and completion", place)


def _masked(ledger: Ledger, path: Path, place: Path, arguments: dict[str, Any]) -> None:
    """Input and output in two columns, of which the output is trained."""
    ledger.write((*path, "name"), {(*place, "loss_on"): "completion"}, Fate.CONVERTED)
    for key, name in (("input_column_name", "prompt"), ("output_column_name", "completion")):
        if key in arguments:
            rename(ledger, (*path, "arguments", "fn_kwargs", key), place, str(arguments[key]), name)
    _leave_arguments(ledger, path)


def _leave_arguments(ledger: Ledger, path: Path) -> None:
    if ledger.is_open((*path, "arguments")):
        ledger.drop((*path, "arguments"), "rows are tokenised by `data:`, with an end of sequence (`data.append_eos`)")


_SET: dict[str, SourceRule] = {
    "name": leave_here("a name for people"),
    "data_paths": _files,
    "sampling": lambda ledger, path, place, value: ledger.write(path, {(*place, "weight"): value}, Fate.CONVERTED),
    "data_handlers": _handlers,
    "rename_columns": lambda ledger, path, place, value: (
        ledger.write(path, {(*place, "rename_columns"): value}, Fate.KEPT)
        if isinstance(value, dict)
        else ledger.ask(path, "write `rename_columns: {OLD: NEW}`", place)
    ),
    "retain_columns": leave_here("columns that no format reads are ignored"),
    "split": lambda ledger, path, place, value: (
        ledger.ask(path, "write `data: {eval: {fraction: …}}`", ("data", "eval"))
        if isinstance(value, dict)
        else ledger.write(path, {(*place, "split"): value}, Fate.KEPT)
    ),
}
_PROCESSOR: Rules = {
    "type": leave("rows are prepared by `fsdp-tune prepare`"),
    "sampling_stopping_strategy": same("data.mixture.stopping_strategy"),
    "seed": same("training.data_seed"),
    "streaming": same("data.streaming"),
    "chat_template": question("write it to a file: `data: {chat_template: FILE.jinja}`", "data", "chat_template"),
    "odm": question("weights that change while training are `data: {curriculum: …}`", "data", "curriculum"),
}
_DATA: Rules = {"dataprocessor": section(_PROCESSOR), "datasets": _sets}
_PREPARED = leave("`fsdp-tune prepare` does that")
_OWN_KERNELS = off_or("off", "kernels are chosen in `kernels:`")
RULES: Rules = {
    "model_name_or_path": same("model.name_or_path"),
    "tokenizer_name_or_path": _tokenizer,
    **dict.fromkeys(("use_flash_attn",), _flash),
    "flash_attn_implementation": same("model.attn_implementation"),
    "training_data_path": _path((*TRAIN, 0)),
    "validation_data_path": _path(_EVAL),
    "dataset_text_field": _text_field,
    "dataset_conversation_field": _chat_field,
    **dict.fromkeys(("response_template", "instruction_template"), question(_SPLIT, "data", "train")),
    "data_formatter_template": question("rows are made of columns by a text: write them as prompt and completion", "data", "train"),
    "dataset_image_field": question("models with images are not trained here", "data", "train"),
    "chat_template": chat_template("data.chat_template"),
    DATA_CONFIG: _data_config,
    "peft_method": _adapter,
    "r": same("lora.r"),
    "lora_alpha": same("lora.lora_alpha"),
    "lora_dropout": same("lora.lora_dropout"),
    "target_modules": _targets,
    "bias": same("lora.bias"),
    "max_seq_length": by_synonym("max_seq_length"),
    "packing": same("data.packing"),
    "padding_free": leave("packed rows have no padding; `data.packing` packs"),
    "multipack": leave("`data.packing` fills rows"),
    "enable_reduce_loss_sum": leave("every trained token of a step weighs the same here"),
    "save_model_dir": leave("a finished run is merged in its own directory"),
    "trackers": leave("metrics.jsonl has every value; `training.report_to` names trackers"),
    "tracker": leave("metrics.jsonl has every value; `training.report_to` names trackers"),
    "log_level": leave("each rank writes its own log file"),
    "embedding_size_multiple_of": fine_or((1,), "as it is here", "`model: {resize_embeddings: true}` grows the embedding", "model"),
    "add_special_tokens": same("model.tokens.add"),
    "cache_dir": leave("prepared data are in `data.cache_dir`"),
    **dict.fromkeys(("fast_kernels", "fused_lora", "auto_gptq", "fast_moe"), _OWN_KERNELS),
    **dict.fromkeys(("num_train_dataset_shards", "num_eval_dataset_shards", "do_dataprocessing_only"), _PREPARED),
    "accelerate_launch_args": section(ACCELERATE_RULES),
    "trainer_controller_config_file": question("rules of the trainer are `training: {early_stopping: …}`", "training"),
    **dict.fromkeys(("prompt_tuning_init", "num_virtual_tokens", "prompt_tuning_init_text"), leave("of prompt tuning")),
}
"""By name; see `general.settle_key`."""
