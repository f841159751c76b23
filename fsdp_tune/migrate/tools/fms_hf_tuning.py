"""Options of fms-hf-tuning that mean something of their own, and its file of data sets.

The options are those of `tuning.sft_trainer`, or of its JSON. It is launched with Accelerate.
"""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_tune.core.values import as_list, as_mapping, is_mapping
from fsdp_tune.migrate.dataset_entries import sources
from fsdp_tune.migrate.general import chat_template
from fsdp_tune.migrate.rules import (
    TRAIN,
    At,
    FileKey,
    Inside,
    Outcome,
    Rules,
    by_synonym,
    each,
    fine_or,
    implies,
    in_source,
    lora_targets,
    of_the_set,
    off_or,
    rename,
    renamed,
    same,
    section,
)
from fsdp_tune.migrate.tool import TRAINER_DEFAULTS, Method, Tool
from fsdp_tune.migrate.tools.accelerate_config import ACCELERATE_RULES
from fsdp_tune.migrate.tools.long_rows import CUT_BY_TRL
from fsdp_tune.recipe.key_paths import KeyPath
from fsdp_tune.recipe.outcome import Ask, Drop, Fate, Write
from fsdp_tune.recipe.read.tool_detection import FMS

FMS_DATA_CONFIG = "data_config_path"
_EVAL: KeyPath = ("data", "eval", 0)
_SPLIT = "rows of text are not divided by a mark: write them as prompt and completion"


def fms_has_adapter(values: Mapping[str, object]) -> bool:
    return values.get("peft_method") == "lora"


def _tokenizer(key: FileKey) -> Outcome:
    if key.value == key.of_file("model_name_or_path"):
        return Drop("it is that of the model")
    return Write({"model.tokenizer": key.value})


def _text_field(key: FileKey) -> Outcome:
    if key.value == "text":
        return Drop("`text` is the name of that column here too")
    places = [TRAIN, *([_EVAL[:2]] if key.of_file("validation_data_path") else [])]
    return Write({(*place, 0, "rename_columns", str(key.value)): "text" for place in places})


_BY_CODE = "rows are made by code: write them as messages, or as prompt and completion"
_WRITE_SETS = "write the data sets as `data: {train: [{path: NAME}]}`"


def _data_config(key: FileKey) -> Outcome:
    if is_mapping(key.value):
        return Inside(_FMS_DATA)
    return Ask(
        f"`{key.value}` was not found here: write its data sets as `data: {{train: [{{path: NAME}}]}}`", TRAIN
    )


def _files(key: FileKey) -> Outcome:
    if len(key.items) == 1:
        return Write({(*key.place, "path"): key.items[0]})
    return Ask("write one source for each file: `data: {train: [{path: A}, {path: B}]}`", key.place)


def _handlers(key: FileKey) -> Outcome:
    """Functions that make the rows; those that only name columns or tokenise are not needed."""
    handlers = as_list(key.value)
    return Inside(dict.fromkeys(range(len(handlers)), _handler)) if handlers else Ask(_BY_CODE, key.place)


def _handler(key: FileKey) -> Outcome:
    """A function with its arguments. Input and output in two columns: the output is trained."""
    name, arguments = key.mapping.get("name"), (*key.path, "arguments")
    left = At(arguments, Drop("rows are tokenised by `data:`, with an end of sequence (`data.append_eos`)"))
    if name == "tokenize_and_apply_input_masking":
        contents = {"input_column_name": "prompt", "output_column_name": "completion"}
        given = as_mapping(key.below("arguments", "fn_kwargs"))
        columns = [
            At((*arguments, "fn_kwargs", argument), rename(here), key.place)
            for argument, here in contents.items()
            if argument in given
        ]
        return [Inside({"name": Write({(*key.place, "loss_on"): "completion"})}, only=True), *columns, left]
    if name == "apply_tokenizer_chat_template":
        return [Inside({"name": Write({(*key.place, "format"): "messages"})}, only=True), left]
    return Drop("rows are tokenised by `data:`") if name == "tokenize" else Ask(_BY_CODE, key.place)


def _renamed_columns(key: FileKey) -> Outcome:
    if is_mapping(key.value):
        return Write({(*key.place, "rename_columns"): key.value}, fate=Fate.KEPT)
    return Ask("write `rename_columns: {OLD: NEW}`", key.place)


def _split_of_set(key: FileKey) -> Outcome:
    if is_mapping(key.value):
        return Ask("write `data: {eval: {fraction: …}}`", "data.eval")
    return Write({(*key.place, "split"): key.value}, fate=Fate.KEPT)


_FMS_SET: Rules = {
    "name": Drop("a name for people"),
    "data_paths": _files,
    "sampling": in_source("weight"),
    "data_handlers": _handlers,
    "rename_columns": _renamed_columns,
    "retain_columns": Drop("columns that no format reads are ignored"),
    "split": _split_of_set,
}
_PROCESSOR: Rules = {
    "type": Drop("rows are prepared by `fsdp-tune prepare`"),
    "sampling_stopping_strategy": same("data.mixture.stopping_strategy"),
    "seed": same("training.data_seed"),
    "streaming": same("data.streaming"),
    "chat_template": chat_template,
    "odm": Ask("weights that change while training are `data: {curriculum: …}`", "data.curriculum"),
}
_FMS_DATA: Rules = {
    "dataprocessor": section(_PROCESSOR),
    "datasets": sources(TRAIN, _FMS_SET, hint=_WRITE_SETS),
}
_OWN_KERNELS = off_or("off", "kernels are chosen in `kernels:`")
FMS_RULES: Rules = {
    "model_name_or_path": same("model.name_or_path"),
    "tokenizer_name_or_path": _tokenizer,
    "use_flash_attn": implies(
        {"model.attn_implementation": "flash_attention_2"},
        off="off: `model.attn_implementation` is chosen by the GPU and the model",
    ),
    "flash_attn_implementation": same("model.attn_implementation"),
    "training_data_path": of_the_set("path"),
    "validation_data_path": of_the_set("path", _EVAL),
    "dataset_text_field": _text_field,
    "dataset_conversation_field": lambda key: renamed(str(key.value), "messages", (*TRAIN, 0)),
    **each(("response_template", "instruction_template"), Ask(_SPLIT, TRAIN)),
    "data_formatter_template": Ask(
        "rows are made of columns by a text: write them as prompt and completion", TRAIN
    ),
    "dataset_image_field": Ask("models with images are not trained here", TRAIN),
    "chat_template": chat_template,
    FMS_DATA_CONFIG: _data_config,
    "peft_method": lambda key: (
        Write({"lora": {}}) if key.value == "lora" else Drop("no adapter: every weight is trained")
    ),
    "r": same("lora.r"),
    "lora_alpha": same("lora.lora_alpha"),
    "lora_dropout": same("lora.lora_dropout"),
    "target_modules": lora_targets,
    "bias": same("lora.bias"),
    "max_seq_length": by_synonym("max_seq_length"),
    "packing": same("data.packing"),
    "padding_free": Drop("packed rows have no padding; `data.packing` packs"),
    "multipack": Drop("`data.packing` fills rows"),
    "enable_reduce_loss_sum": Drop("every trained token of a step weighs the same here"),
    "save_model_dir": Drop("a finished run is merged in its own directory"),
    "trackers": Drop("metrics.jsonl has every value; `training.report_to` names trackers"),
    "tracker": Drop("metrics.jsonl has every value; `training.report_to` names trackers"),
    "log_level": Drop("each rank writes its own log file"),
    "embedding_size_multiple_of": fine_or(
        (1,), "as it is here", "`model: {resize_embeddings: true}` grows the embedding", "model"
    ),
    "add_special_tokens": same("model.tokens.add"),
    "cache_dir": Drop("prepared data are in `data.cache_dir`"),
    **each(("fast_kernels", "fused_lora", "auto_gptq", "fast_moe"), _OWN_KERNELS),
    **each(
        ("num_train_dataset_shards", "num_eval_dataset_shards", "do_dataprocessing_only"),
        Drop("`fsdp-tune prepare` does that"),
    ),
    "accelerate_launch_args": section(ACCELERATE_RULES),
    "trainer_controller_config_file": Ask(
        "rules of the trainer are `training: {early_stopping: …}`", "training"
    ),
    **each(("prompt_tuning_init", "num_virtual_tokens", "prompt_tuning_init_text"), Drop("of prompt tuning")),
}
"""By name; see `settle_keys.settle_key`."""
FMS_TOOL = Tool(
    FMS,
    FMS_RULES,
    defaults={**TRAINER_DEFAULTS, "data.max_length": 4096, "training.save_strategy": "epoch"},
    adapter_defaults={"lora.r": 8, "lora.lora_alpha": 32, "lora.lora_dropout": 0.05},
    full_defaults={"model.dtype": "bf16"},
    has_adapter=fms_has_adapter,
    upcasts=True,
    long_rows=CUT_BY_TRL,
    method=Method("peft_method", ("lora", "none", "None", ""), "prompt tuning or activated LoRA"),
)
