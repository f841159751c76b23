"""Options of LLaMA-Factory that mean something of their own. Its data sets are entries of `dataset_info.json`, which a file names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any, cast

from fsdp_tune.migrate.general import (
    DFT,
    TRAIN,
    UNSUPPORTED_SWITCH,
    Rule,
    Rules,
    SourceRule,
    chat_template,
    fine_or,
    implies,
    is_on,
    leave,
    leave_here,
    off_or,
    question,
    rename,
    same,
    settle_source,
)
from fsdp_tune.migrate.ledger import Fate, Ledger, Path, Weight
from fsdp_tune.migrate.read.foreign_file import read_mapping
from fsdp_tune.migrate.tools.flat_options import MEDIA, method, unless_pretraining
from fsdp_tune.recipe.read.tools import LLAMA_FACTORY
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
        is_of_texts = ledger.value("stage") == "pt"
        if is_of_texts:
            _settle_texts(ledger, names, place, first)
        is_alpaca = not is_of_texts and any((ledger.value(INFO, name, "formatting") or "alpaca") == "alpaca" for name in names)
        ledger.write(path, settings, Fate.CONVERTED, f"by {INFO}{_JOINED if is_alpaca else ''}")
        for index, name in enumerate(names, first):
            if ledger.is_open((INFO, name)):
                settle_source(ledger, (INFO, name), (*place, index), _ENTRY)

    return rule


def _settle_texts(ledger: Ledger, names: list[str], place: Path, first: int) -> None:
    """`stage: pt` reads the text of the first message, without a template: of Alpaca's columns that is `prompt`."""
    for index, name in enumerate(names, first):
        entry: dict[str, Any] = ledger.value(INFO, name)
        columns = cast("dict[str, Any]", found) if isinstance(found := entry.get("columns"), dict) else {}
        source, column = (*place, index), str(columns.get("prompt") or "instruction")
        ledger.set((*source, "format"), "text", "`stage: pt` reads texts", Weight.GIVEN)
        if entry.get("formatting", "alpaca") != "alpaca" or columns.get("query"):
            ledger.decide(source, "`stage: pt` trains the first message of a row, without a template: write it as `text`")
        elif column != "text":
            ledger.set((*source, "rename_columns", column), "text", "`stage: pt` reads this column", Weight.GIVEN)
        for key in ("formatting", "columns", "tags"):
            if ledger.is_open((INFO, name, key)):
                ledger.drop((INFO, name, key), "`stage: pt` reads the text of the first message alone")


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


def _sample(ledger: Ledger, path: Path, place: Path, value: object) -> None:
    words = f"{value} rows are drawn at random there, and those of a smaller set are repeated; `max_rows` takes the first ones"
    ledger.ask(path, words, (*place, "max_rows"))


_ENTRY: dict[str, SourceRule] = {
    **dict.fromkeys(("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"), _place),
    "formatting": _formatting,
    "columns": _columns,
    "tags": _tags,
    "ranking": _ranking,
    "num_samples": _sample,
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
    names = {TRAIN: _names(ledger.value("dataset")) or ["NAME"], ("data", "eval"): _names(ledger.value("eval_dataset"))}
    places = [(*place, index, "max_rows") for place, named in names.items() for index in range(len(named))]
    ledger.write(path, dict.fromkeys(places, value), Fate.CONVERTED)


def _shares(ledger: Ledger, path: Path, value: Any) -> None:
    try:
        weights = [float(each) for each in _names(value)]
    except ValueError:
        ledger.ask(path, "write a `weight` for each source", TRAIN)
        return
    ledger.write(path, {(*TRAIN, index, "weight"): weight for index, weight in enumerate(weights)}, Fate.CONVERTED)


def _packing(ledger: Ledger, path: Path, value: Any) -> None:
    ledger.write(path, {"data.packing": value}, Fate.KEPT, "examples in one row never see each other here, as with `neat_packing`")


def _training_dtype(ledger: Ledger, path: Path, value: Any) -> None:
    if is_on(value):
        ledger.write(path, {"model.dtype": "bf16", "precision.mixed_precision": "bf16"}, Fate.CONVERTED)
    else:
        ledger.drop(path, "off, as it is here")


_CUT = "prompt and answer of a longer row are cut in proportion there; here its end is, and a row without a trained token is left out"
_OPTIMIZERS = ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "galore_layerwise", "apollo_layerwise")
_LOSSES = ("use_asft_loss", "use_eaft_loss", "use_llama_pro", "mixture_of_depths", "shift_attn", "pissa_convert", "use_kt")
_QUANTISED = "weights that are quantised already are not trained: name the original model"

RULES: Rules = {
    "stage": _stage,
    "dataset": _listed_datasets(TRAIN),
    "eval_dataset": _listed_datasets(("data", "eval")),
    "dataset_dir": leave(f"the files of `{INFO}` are written with their paths"),
    "template": unless_pretraining(chat_template("data.chat_template"), "stage", "`stage: pt` renders no template"),
    "neat_packing": implies({"data.packing": True}, "examples in one row never see each other"),
    "max_samples": _rows_of_each,
    "cutoff_len": lambda ledger, path, value: ledger.write(path, {"data.max_length": value}, Fate.CONVERTED, _CUT),
    **dict.fromkeys(("use_v1_kernels", "preprocessing_batch_size", "eval_num_beams"), leave("a matter of LLaMA-Factory's own code")),
    "tokenized_path": leave("prepared data are named by their content, in `data.cache_dir`"),
    "interleave_probs": _shares,
    "packing": _packing,
    "finetuning_type": method,
    "pure_bf16": _training_dtype,
    "use_muon": implies({"training.optim": "muon"}),
    "buffer_size": same("data.shuffle_buffer_size"),
    "plot_loss": leave("the run card has the curve of the loss"),
    "quantization_method": fine_or(("bnb", "bitsandbytes"), "4 bits are NF4 here, as in bitsandbytes", _QUANTISED, "quantization", "load"),
    **dict.fromkeys(("use_unsloth", "use_unsloth_gc"), leave("kernels are chosen in `kernels:`")),
    "use_reentrant_gc": leave("activation checkpointing is always non-reentrant"),
    "upcast_layernorm": leave("norms are trained in `model.dtype`, fp32 by default"),
    **dict.fromkeys(_OPTIMIZERS, off_or("off", "this optimizer is not supported: `adamw_torch_8bit` needs less memory too")),
    "use_dft_loss": implies({"training.loss": "dft"}, DFT),
    **dict.fromkeys(_LOSSES, UNSUPPORTED_SWITCH),
    **dict.fromkeys(("image_max_pixels", "video_max_pixels", "video_maxlen", "video_fps"), leave(MEDIA)),
    **dict.fromkeys(("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model"), leave(MEDIA)),
    "default_system": question("add the system message to the rows", "data", "train"),
    "cp_size": same("parallelism.sp_size"),
    "ray_num_workers": leave("ranks are started by `fsdp-tune train`"),
    "predict_with_generate": off_or("off", "write `training: {sample: {every: 500, prompts: […]}}` to see answers while training"),
}
"""By name; see `general.settle_key`."""
STAGES = ("sft", "pt")
UNSUPPORTED = "preference tuning and reward models"
"""The other values of `stage`."""
