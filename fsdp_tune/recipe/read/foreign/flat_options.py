"""Options of LLaMA-Factory, ms-swift and transformers' `run_clm.py` that mean something of their own; all take one flat list of options.

Data sets of LLaMA-Factory are entries of `dataset_info.json`, which a configuration names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any, cast

from fsdp_tune.recipe.read.foreign.foreign_file import COMMAND, read_mapping
from fsdp_tune.recipe.read.foreign.general import (
    TRAIN,
    Rule,
    Rules,
    SourceRule,
    by_synonym,
    chat_template,
    dtype,
    fine_or,
    implies,
    is_on,
    leave,
    leave_here,
    lora_targets,
    off_or,
    question,
    rename,
    same,
    settle_by_name,
    settle_source,
)
from fsdp_tune.recipe.read.foreign.ledger import Fate, Ledger, Path, Weight
from fsdp_tune.recipe.read.tools import LLAMA_FACTORY
from fsdp_tune.recipe.schema.keys import dotted
from fsdp_tune.recipe.synonyms import SYNONYMS

INFO = "dataset_info.json"
_COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "messages": "conversations",
    "system": "system",
    "tools": "tools",
}
"""Contents of a column in LLaMA-Factory, and the name of that column here."""
_JOINED = "; a row's `input` follows its `instruction` after an empty line here, after one line end there"
"""`"\\n".join(query)` in its data/converter.py. Alpaca's own prompt has an empty line."""


def include_info(ledger: Ledger, directory: FilePath) -> None:
    """Put the entries of `dataset_info.json` that the file names into its account. `directory` is that of the file."""
    named = [name for key in ("dataset", "eval_dataset") for name in _names(ledger.value(key))]
    found = _find_info(directory, str(ledger.value("dataset_dir") or "data")) if named else None
    if found is None:
        return
    known = read_mapping(found)
    entries = {name: dict(known[name]) for name in named if isinstance(known.get(name), dict)}
    for entry in entries.values():
        if entry.get("file_name"):
            entry["file_name"] = str(found.parent / str(entry["file_name"]))
    if entries:
        ledger.include((INFO,), entries)


def _find_info(directory: FilePath, data: str) -> FilePath | None:
    """Return the file beside the configuration, or in `dataset_dir`, which is relative to the directory of the command: one above."""
    above = [directory, *list(directory.resolve().parents)[:3], FilePath()]
    places = [directory / INFO, FilePath(data) / INFO, *(each / data / INFO for each in above)]
    return next((place for place in places if place.is_file()), None)


def _names(value: object) -> list[str]:
    items = cast("list[object]", value) if isinstance(value, list) else str(value or "").split(",")
    return [str(item).strip() for item in items if str(item).strip()]


def _listed_datasets(place: Path) -> Rule:
    """Names in `dataset_info.json`, with commas between them."""

    def rule(ledger: Ledger, path: Path, value: Any) -> None:
        names = _names(value)
        first = sum(1 for key in ledger.settings if key[:2] == place and key[-1] == "path")
        unknown = [name for name in names if ledger.value(INFO, name) is None]
        if unknown:
            words = SYNONYMS["dataset"].advice(", ".join(unknown)).words
            ledger.ask(path, f"`{INFO}` was not found here, or does not have it: {words}", place)
            return
        settings: dict[Path, Any] = {}
        for index, name in enumerate(names, first):
            settings[(*place, index, "path")] = _path_of(ledger.value(INFO, name)) or "NAME"
        is_alpaca = any((ledger.value(INFO, name, "formatting") or "alpaca") == "alpaca" for name in names)
        ledger.write(path, settings, Fate.CONVERTED, f"by {INFO}{_JOINED if is_alpaca else ''}")
        for index, name in enumerate(names, first):
            if ledger.is_open((INFO, name)):
                settle_source(ledger, (INFO, name), (*place, index), _ENTRY)

    return rule


def _path_of(entry: Mapping[str, Any]) -> str | None:
    found = entry.get("hf_hub_url") or entry.get("file_name")
    return str(found) if found else None


def _place(ledger: Ledger, path: Path, place: Path, value: object) -> None:
    """The key that `_path_of` took is converted; others name other places of the same rows."""
    found = ledger.get(*place, "path")
    if found == value:
        ledger.write(path, {(*place, "path"): found}, Fate.CONVERTED)
    elif found == "NAME":
        ledger.ask(path, "write the file or the hub id of the rows", (*place, "path"))
    else:
        ledger.drop(path, f"the rows are read from `{found}`")


def _formatting(ledger: Ledger, path: Path, place: Path, value: object) -> None:
    """Rows whose messages have `role` and `content` are LLaMA-Factory's sharegpt too."""
    tags = ledger.value(*path[:-1], "tags")
    is_chat = value == "sharegpt" and isinstance(tags, dict) and cast("dict[str, Any]", tags).get("role_tag") == "role"
    name = "messages" if is_chat else str(value)
    ledger.write(path, {(*place, "format"): name}, Fate.CONVERTED)


def _columns(ledger: Ledger, path: Path, place: Path, value: object) -> None:
    is_chat = ledger.get(*place, "format") == "messages" or _role_tag(ledger, path) == "role"
    for content, column in cast("dict[str, Any]", value).items() if isinstance(value, dict) else ():
        name = "messages" if content == "messages" and is_chat else _COLUMNS.get(content)
        if column is None:
            ledger.drop((*path, content), "no value")
        elif name is None:
            ledger.ask((*path, content), "rows of preferences, images or sound are not trained here", place)
        else:
            rename(ledger, (*path, content), place, str(column), name)
    if ledger.is_open(path):
        ledger.drop(path, "no columns")


def _role_tag(ledger: Ledger, path: Path) -> str:
    return str(ledger.value(*path[:-1], "tags", "role_tag") or "from")


def _tags(ledger: Ledger, path: Path, place: Path, value: object) -> None:
    """How the keys of a message, and the roles in them, are named."""
    same_here = {
        "role_tag": ("from", "role"),
        "content_tag": ("value", "content"),
        "user_tag": ("human", "user"),
        "assistant_tag": ("gpt", "assistant"),
        "system_tag": ("system",),
        "observation_tag": ("observation", "tool"),
        "function_tag": ("function_call",),
    }
    roles = {
        "user_tag": "user",
        "assistant_tag": "assistant",
        "system_tag": "system",
        "observation_tag": "tool",
        "function_tag": "function_call",
    }
    for tag, name in cast("dict[str, Any]", value).items() if isinstance(value, dict) else ():
        if name in same_here.get(tag, ()):
            ledger.drop((*path, tag), "that name is known here too")
        elif tag in roles:
            ledger.write((*path, tag), {("data", "roles", str(name)): roles[tag]}, Fate.CONVERTED)
        else:
            ledger.ask((*path, tag), "messages have `role` and `content`, or `from` and `value`: rename the keys in the file", place)
    if ledger.is_open(path):
        ledger.drop(path, "no tags")


def _ranking(ledger: Ledger, path: Path, place: Path, value: Any) -> None:
    if is_on(value):
        ledger.ask(path, "rows of preferences are not trained here", place)
    else:
        ledger.drop(path, "off")


_ENTRY: dict[str, SourceRule] = {
    **dict.fromkeys(("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"), _place),
    "formatting": _formatting,
    "columns": _columns,
    "tags": _tags,
    "ranking": _ranking,
    "folder": lambda ledger, path, place, value: ledger.write(path, {(*place, "data_dir"): value}, Fate.CONVERTED),
    "load_from": leave_here("the place of the rows says so"),
}

# ---- Keys of the file


def _stage(ledger: Ledger, path: Path, value: object) -> None:
    if value == "pt":
        ledger.write(path, {"data.loss_on": "all"}, Fate.CONVERTED, "pre-training: every token is trained")
        origin = f"default of {LLAMA_FACTORY} for `stage: pt`"
        if (packing := ledger.value("packing")) is None:
            ledger.set(("data", "packing"), True, origin, Weight.IMPLIED)
        if packing is None or is_on(packing):
            ledger.set(("data", "packing_strategy"), "wrapped", f"{origin}: texts are joined and cut into blocks", Weight.IMPLIED)
    else:
        ledger.drop(path, "supervised fine-tuning is what `train` does")


def _rows_of_each(ledger: Ledger, path: Path, value: Any) -> None:
    """A limit of every data set."""
    count = max(1, len(_names(ledger.value("dataset"))))
    ledger.write(path, {(*TRAIN, index, "max_rows"): value for index in range(count)}, Fate.CONVERTED)


def _shares(ledger: Ledger, path: Path, value: Any) -> None:
    try:
        weights = [float(each) for each in _names(value)]
    except ValueError:
        ledger.ask(path, "write a `weight` for each source", TRAIN)
        return
    ledger.write(path, {(*TRAIN, index, "weight"): weight for index, weight in enumerate(weights)}, Fate.CONVERTED)


def _packing(ledger: Ledger, path: Path, value: Any) -> None:
    ledger.write(path, {"data.packing": value}, Fate.KEPT, "examples in one row never see each other here, as with `neat_packing`")


def _method(ledger: Ledger, path: Path, value: Any) -> None:
    if value == "lora":
        ledger.write(path, {"lora": {}}, Fate.CONVERTED)
    else:
        by_synonym("finetuning_type" if path[-1] == "finetuning_type" else "tuner_type")(ledger, path, value)


def _training_dtype(ledger: Ledger, path: Path, value: Any) -> None:
    if is_on(value):
        ledger.write(path, {"model.dtype": "bf16", "precision.mixed_precision": "bf16"}, Fate.CONVERTED)
    else:
        ledger.drop(path, "off, as it is here")


_OPTIMIZERS = ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "galore_layerwise", "apollo_layerwise")
_LOSSES = ("use_dft_loss", "use_asft_loss", "use_eaft_loss", "use_llama_pro", "mixture_of_depths", "shift_attn", "pissa_convert", "use_kt")
_QUANTISED = "weights that are quantised already are not trained: name the original model"
_MEDIA = "models with images or sound are not trained here"

LLAMA_FACTORY_RULES: Rules = {
    "stage": _stage,
    "dataset": _listed_datasets(TRAIN),
    "eval_dataset": _listed_datasets(("data", "eval")),
    "dataset_dir": leave(f"the files of `{INFO}` are written with their paths"),
    "template": chat_template("data.chat_template"),
    "max_samples": _rows_of_each,
    "interleave_probs": _shares,
    "packing": _packing,
    "finetuning_type": _method,
    "pure_bf16": _training_dtype,
    "use_muon": implies({"training.optim": "muon"}),
    "buffer_size": same("data.shuffle_buffer_size"),
    "plot_loss": leave("the run card has the curve of the loss"),
    "quantization_method": fine_or(("bnb", "bitsandbytes"), "4 bits are NF4 here, as in bitsandbytes", _QUANTISED, "quantization", "load"),
    **dict.fromkeys(("use_unsloth", "use_unsloth_gc"), leave("kernels are chosen in `kernels:`")),
    "use_reentrant_gc": leave("activation checkpointing is always non-reentrant"),
    "upcast_layernorm": leave("norms are trained in `model.dtype`, fp32 by default"),
    **dict.fromkeys(_OPTIMIZERS, off_or("off", "this optimizer is not supported: `adamw_torch_8bit` needs less memory too")),
    **dict.fromkeys(_LOSSES, off_or("off", "there is no counterpart")),
    **dict.fromkeys(("image_max_pixels", "video_max_pixels", "video_maxlen", "video_fps"), leave(_MEDIA)),
    **dict.fromkeys(("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model"), leave(_MEDIA)),
    "default_system": question("add the system message to the rows", "data", "train"),
    "cp_size": same("parallelism.sp_size"),
    "ray_num_workers": leave("ranks are started by `fsdp-tune train`"),
    "predict_with_generate": off_or("off", "write `training: {sample: {every: 500, prompts: […]}}` to see answers while training"),
}
"""By name; see `general.settle_key`."""
LLAMA_FACTORY_STAGES = ("sft", "pt")
LLAMA_FACTORY_UNSUPPORTED = "preference tuning and reward models"
"""The other values of `stage`."""


_NAME = re.compile(r"(?P<path>[^:#]+|.*?)(?::(?P<subset>[^:#]+))?(?:#(?P<rows>\d+))?")


def _named_datasets(place: Path) -> Rule:
    """`org/name:subset#rows`, or files; several with spaces between them."""

    def rule(ledger: Ledger, path: Path, value: Any) -> None:
        names = [str(name) for name in (cast("list[Any]", value) if isinstance(value, list) else [value])]
        settings: dict[Path, Any] = {}
        for index, name in enumerate(names):
            match = _NAME.fullmatch(name)
            assert match is not None
            settings[(*place, index, "path")] = match["path"].removeprefix("HF::").removeprefix("MS::")
            settings |= {(*place, index, "name"): match["subset"]} if match["subset"] else {}
            settings |= {(*place, index, "max_rows"): int(match["rows"])} if match["rows"] else {}
        from_hub = any("/" in name and not name.startswith((".", "/")) for name in names)
        ledger.write(path, settings, Fate.CONVERTED, "ids are of ModelScope there, of the Hugging Face hub here" if from_hub else "")

    return rule


def _model(ledger: Ledger, path: Path, value: Any) -> None:
    is_local = str(value).startswith((".", "/"))
    reason = "" if is_local else "an id of ModelScope there, of the Hugging Face hub here"
    ledger.write(path, {"model.name_or_path": value}, Fate.CONVERTED, reason)


def _pretraining(ledger: Ledger, path: Path, value: object) -> None:
    """`swift pt` trains every token of rows without a chat template, whatever the options say."""
    ledger.write(path, {"data.loss_on": "all"}, Fate.CONVERTED, f"`swift {value}` trains every token")
    words = "`swift pt` joins the messages of a row without a chat template: write such rows as `text`, or train them by the template"
    ledger.decide(("data", "chat_template"), words)


def _unless_pretraining(rule: Rule) -> Rule:
    words = "`swift pt` sets it: every token of rows without a chat template"
    return lambda ledger, path, value: ledger.drop(path, words) if ledger.value(COMMAND) == "pt" else rule(ledger, path, value)


def _loss_scale(ledger: Ledger, path: Path, value: Any) -> None:
    """Which tokens are trained."""
    names = {"default": "assistant", "last_round": "last_assistant", "all": "all"}
    if value in names:
        ledger.write(path, {"data.loss_on": names[value]}, Fate.CONVERTED)
    else:
        ledger.ask(path, "tokens have one weight here: write `data: {loss_on: …}`", ("data", "loss_on"))


def _torch_dtype(ledger: Ledger, path: Path, value: object) -> None:
    dtype("model.dtype")(ledger, path, value)
    computed = "bf16" if value in ("bfloat16", "bf16") else "fp16"
    ledger.set(("precision", "mixed_precision"), computed, f"{path[-1]}: ms-swift computes in half precision", Weight.IMPLIED)


def _truncation(ledger: Ledger, path: Path, value: Any) -> None:
    names = {"delete": "drop", "right": "truncate", "split": "split", "raise": "error"}
    if value in names:
        ledger.write(path, {"data.overlong": names[value]}, Fate.CONVERTED)
    else:
        ledger.ask(path, "rows are cut at their end: `data: {overlong: truncate}`, or `drop`", ("data", "overlong"))


def _sharding(ledger: Ledger, path: Path, value: Any) -> None:
    """`zero2`, `zero3_offload` …, or a file."""
    match = re.fullmatch(r"zero([0-3])(_offload)?", str(value))
    if match is None:
        settle_by_name(ledger, path, value)
        return
    strategy = {"0": "NO_SHARD", "1": "SHARD_GRAD_OP", "2": "SHARD_GRAD_OP", "3": "FULL_SHARD"}[match[1]]
    settings: dict[str, Any] = {"fsdp.sharding_strategy": strategy} | ({"fsdp.offload_params": True} if match[2] else {})
    ledger.write(path, settings, Fate.CONVERTED)


SWIFT_RULES: Rules = {
    **dict.fromkeys(("model", "model_id_or_path"), _model),
    "dataset": _named_datasets(("data", "train")),
    "val_dataset": _named_datasets(("data", "eval")),
    **dict.fromkeys(("train_type", "tuner_type", "sft_type"), _method),
    "target_modules": lora_targets,
    "torch_dtype": _torch_dtype,
    COMMAND: _pretraining,
    "loss_scale": _unless_pretraining(_loss_scale),
    "truncation_strategy": _truncation,
    "deepspeed": _sharding,
    "template": _unless_pretraining(chat_template("data.chat_template")),
    "sequence_parallel_size": same("parallelism.sp_size"),
    "attn_impl": lambda ledger, path, value: ledger.write(
        path, (SYNONYMS["flash_attn"].advice(value).tree or {"model.attn_implementation": value}), Fate.CONVERTED
    ),
    "streaming": same("data.streaming"),
    "shuffle_buffer_size": same("data.shuffle_buffer_size"),
    "dataset_shuffle": same("data.shuffle"),
    "train_dataloader_shuffle": same("data.shuffle"),
    **dict.fromkeys(("load_from_cache_file", "add_version", "use_hf", "check_model"), leave("a matter of ms-swift's own code")),
    **dict.fromkeys(("freeze_vit", "freeze_aligner", "vit_lr", "aligner_lr", "max_pixels"), leave(_MEDIA)),
    "freeze_llm": off_or("off", "the language model is what is trained; `model: {freeze: [PATTERN]}` freezes parts"),
    "use_chat_template": _unless_pretraining(off_or("rows of text have no template", "chats are rendered by the chat template")),
    **dict.fromkeys(("model_author", "model_name"), question("write the name into the rows", "data", "train")),
    "system": question("add the system message to the rows", "data", "train"),
    "task_type": fine_or(("causal_lm",), "the models are causal language models", "classifiers and embeddings are not trained here"),
    "model_type": leave("classes follow from the files of the model"),
    "quant_method": leave("4 bits are NF4 here, as in bitsandbytes"),
    "merge_lora": by_synonym("merge_lora"),
}
"""By name; see `general.settle_key`."""
SWIFT_UNSUPPORTED = {"rlhf_type": "preference tuning"}


# ---- run_clm.py of transformers, and the options that TRL has too

FIRST: Path = (*TRAIN, 0)


def of_the_set(name: str, place: Path = FIRST) -> Rule:
    """Return a rule for a key of the only data set, or of the one at `place`."""
    return lambda ledger, path, value: ledger.write(path, {(*place, name): value}, Fate.CONVERTED)


def _optional_adapter(ledger: Ledger, path: Path, value: Any) -> None:
    advice = SYNONYMS["use_peft"].advice(value)
    if advice.tree:
        ledger.write(path, {"lora": {}}, Fate.CONVERTED)
    else:
        ledger.drop(path, "off, as it is here")


def _share_held_out(ledger: Ledger, path: Path, value: Any) -> None:
    """A percentage of the training rows; a file or a split of its own comes first."""
    if ledger.value("validation_file") is not None:
        ledger.drop(path, "`validation_file` is evaluated")
    elif not isinstance(value, int | float):
        ledger.ask(path, "write a share: `data: {eval: {fraction: 0.05}}`", ("data", "eval"))
    elif not ledger.value("do_eval") and ledger.value("eval_strategy") in (None, "no"):
        ledger.drop(path, "nothing is evaluated")
    else:
        ledger.write(path, {"data.eval.fraction": float(value) / 100}, Fate.CONVERTED, "a percentage there, a share here")


OF_SCRIPTS: dict[str, Rule] = {
    "model_name_or_path": same("model.name_or_path"),
    "dataset_name": of_the_set("path"),
    **dict.fromkeys(("dataset_config", "dataset_config_name"), of_the_set("name")),
    "dataset_train_split": of_the_set("split"),
    "use_peft": _optional_adapter,
    "lora_task_type": leave("the models are causal language models"),
}
"""Options of `trl sft` and `run_clm.py`."""
EXAMPLE_RULES: Rules = {
    **OF_SCRIPTS,
    "train_file": of_the_set("path"),
    "validation_file": of_the_set("path", ("data", "eval", 0)),
    "validation_split_percentage": _share_held_out,
    "max_train_samples": of_the_set("max_rows"),
    "max_eval_samples": question("write a number of rows: `data: {eval: {rows: …}}`", "data", "eval"),
    "keep_linebreaks": leave("rows of a text keep their line ends"),
    "config_name": lambda ledger, path, value: (
        ledger.drop(path, "it is that of the model")
        if value == ledger.value("model_name_or_path")
        else ledger.ask(path, "a model of random weights is `model: {from_config: …}`", ("model", "from_config"))
    ),
    "config_overrides": question("write a mapping: `{n_layer: 2}`", "model", "config_overrides"),
    "model_type": leave("classes follow from the files of model and tokenizer"),
    "streaming": same("data.streaming"),
}
"""By name; see `general.settle_key`."""


def pack_texts(ledger: Ledger) -> None:
    """`run_clm.py` joins all texts and cuts them into full blocks, of 1,024 tokens unless it is told otherwise."""
    origin = "run_clm.py joins texts and fills every block"
    ledger.set(("data", "packing"), True, origin, Weight.DEFAULT)
    ledger.set(("data", "packing_strategy"), "wrapped", origin, Weight.DEFAULT)
    ledger.set(("data", "max_length"), 1024, "default of run_clm.py", Weight.DEFAULT)


# ---- Mixtures of TRL and of the alignment handbook


def listed_sources(named: Mapping[str, SourceRule] | None = None) -> Rule:
    """Return a rule for a mixture. `named`: as in `settle_source`."""

    def rule(ledger: Ledger, path: Path, value: object) -> None:
        if not isinstance(value, list):
            ledger.ask(path, "write the data sets as `data: {train: [{path: NAME}]}`", TRAIN)
            return
        for index in range(len(cast("list[Any]", value))):
            settle_source(ledger, (*path, index), (*TRAIN, index), named)

    return rule


def _kept_share(ledger: Ledger, path: Path, place: Path, value: Any) -> None:
    if value == 1:
        ledger.drop(path, "all rows are used here too")
    else:
        ledger.ask(path, "a share of the rows, drawn once, is used: write their number, `max_rows: N`", (*place, "max_rows"))


MIXED: dict[str, SourceRule] = {  # of the alignment handbook and its descendants
    "id": lambda ledger, path, place, value: ledger.write(path, {(*place, "path"): value}, Fate.CONVERTED),
    "config": lambda ledger, path, place, value: ledger.write(path, {(*place, "name"): value}, Fate.CONVERTED),
    "weight": _kept_share,
}


def mixer(ledger: Ledger, path: Path, value: object) -> None:
    """{data set: share of its training rows}, of the older alignment handbook."""
    for index, (name, share) in enumerate(cast("dict[str, Any]", value).items() if isinstance(value, dict) else ()):
        inner = (*path, name)
        if share == 1:
            ledger.write(inner, {(*TRAIN, index, "path"): name}, Fate.CONVERTED)
        else:
            ledger.set((*TRAIN, index, "path"), name, dotted(inner), Weight.GIVEN)
            _kept_share(ledger, inner, (*TRAIN, index), share)
    if ledger.is_open(path):
        ledger.ask(path, "write the data sets as `data: {train: [{path: NAME}]}`", TRAIN)
