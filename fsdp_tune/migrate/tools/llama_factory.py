"""Options of LLaMA-Factory that mean something of their own. Its data sets are entries of
`dataset_info.json`, which a file names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path as FilePath

from fsdp_tune.core.values import as_mapping, is_list
from fsdp_tune.migrate.general import DFT, chat_template, source
from fsdp_tune.migrate.ledger import Ledger
from fsdp_tune.migrate.read.foreign_file import read_mapping
from fsdp_tune.migrate.rules import (
    TRAIN,
    UNSUPPORTED_SWITCH,
    Also,
    At,
    Decide,
    FileKey,
    Inside,
    Outcome,
    Rule,
    Rules,
    Step,
    each,
    fine_or,
    implies,
    in_source,
    is_on,
    off_or,
    remarked,
    renamed,
    same,
    switch,
)
from fsdp_tune.migrate.tool import TRAINER_DEFAULTS, Method, Tool
from fsdp_tune.migrate.tools.long_rows import CUT_BY_TRL
from fsdp_tune.migrate.tools.swift import JOINED, MEDIA, method
from fsdp_tune.recipe.key_paths import KeyPath
from fsdp_tune.recipe.outcome import Ask, Drop, Fate, Weight, Write, in_words
from fsdp_tune.recipe.read.tool_detection import LLAMA_FACTORY
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

LINE_ENDS = frozenset(
    (
        *("alpaca", "chatml", "chatml_de", "cpm4", "dbrx", "deepseekcoder", "default", "ernie", "exaone"),
        *("falcon_h1", "gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "gemma4n", "granite3"),
        *("granite4", "intern2", "intern_s1", "intern_vl", "keye_vl", "lfm2", "lfm2_vl"),
        *("llava_next_qwen", "llava_next_video_yi", "llava_next_yi", "mimo", "mimo_v2", "mimo_vl"),
        *("minicpm_o", "minicpm_v", "minicpm_v_4_6", "minimax1", "minimax2", "moss_vl", "opencoder"),
        *("paligemma_chat", "phi", "phi_small", "qwen", "qwen2_audio", "qwen2_omni", "qwen2_vl", "qwen3"),
        *("qwen3_5", "qwen3_5_nothink", "qwen3_6", "qwen3_nothink", "qwen3_omni", "qwen3_omni_nothink"),
        *(
            "qwen3_vl",
            "qwen3_vl_nothink",
            "sailor",
            "smollm",
            "smollm2",
            "starchat",
            "yi",
            "youtu_vl",
            "yuan",
        ),
    )
)
"""Templates that end an answer with white space after the token that ends the turn (`format_assistant` in its
data/template.py, 2026-08); `python -m tests.migrate.tool_keys --check` finds new ones."""
_LINE_END = (
    "LLaMA-Factory also trains the line end that its template writes after the last token of an answer; here "
    "it is context, which only labels of your own train (`format: segments` or `tokenized`)"
)
_OF_TOKENIZER = (
    "Without `template`, LLaMA-Factory also trains white space that the tokenizer's template writes after "
    "the last token of an answer, as ChatML does; here it is context"
)


def include_info(ledger: Ledger, directory: FilePath) -> None:
    """Put the entries of `dataset_info.json` that the file names into its account. `directory` is that of the
    file."""
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
    """Return the file beside the configuration, or in `dataset_dir`, which is relative to the directory of
    the command: one above."""
    above = [directory, *list(directory.resolve().parents)[:3], FilePath()]
    places = [directory / INFO, FilePath(data) / INFO, *(each / data / INFO for each in above)]
    return next((place for place in places if place.is_file()), None)


def _names(value: object) -> list[str]:
    items = value if is_list(value) else str(value or "").split(",")
    return [str(item).strip() for item in items if str(item).strip()]


def _listed_datasets(place: KeyPath) -> Rule:
    """Names in `dataset_info.json`, with commas between them."""

    def rule(key: FileKey) -> Outcome:
        names = _names(key.value)
        said = (
            f". {_OF_TOKENIZER}"
            if place == TRAIN and key.of_file("stage") is None and _is_template_of_tokenizer(key)
            else ""
        )
        first = sum(1 for target in key.ledger.settings if target[:2] == place and target[-1] == "path")
        unknown = [name for name in names if key.of_file(INFO, name) is None]
        if unknown:
            words = in_words(SYNONYMS["dataset"].outcome(", ".join(unknown)))
            return Ask(f"`{INFO}` was not found here, or does not have it: {words}{said}", place)
        places = [(name, (*place, index)) for index, name in enumerate(names, first)]
        settings = {(*target, "path"): _path_of(key.of_file(INFO, name)) or "NAME" for name, target in places}
        entries = [At((INFO, name), source(target, _ENTRY)) for name, target in places]
        if key.of_file("stage") == "pt":
            texts = [
                step
                for name, target in places
                for step in _text_steps(name, as_mapping(key.of_file(INFO, name)), target)
            ]
            return [*texts, Write(settings, f"by {INFO}"), *entries]
        is_alpaca = any((key.of_file(INFO, name, "formatting") or "alpaca") == "alpaca" for name in names)
        return [Write(settings, f"by {INFO}{f'; {JOINED}' if is_alpaca else ''}{said}"), *entries]

    return rule


def _text_steps(name: str, entry: dict[str, object], place: KeyPath) -> list[Step]:
    """`stage: pt` reads the text of the first message, without a template: of Alpaca's columns that is
    `prompt`."""
    columns = as_mapping(entry.get("columns"))
    column = str(columns.get("prompt") or "instruction")
    found: list[Step] = [Also((*place, "format"), "text", "`stage: pt` reads texts", Weight.GIVEN)]
    if entry.get("formatting", "alpaca") != "alpaca" or columns.get("query"):
        found.append(
            Decide(
                place, "`stage: pt` trains the first message of a row, without a template: write it as `text`"
            )
        )
    elif column != "text":
        found.append(
            Also((*place, "rename_columns", column), "text", "`stage: pt` reads this column", Weight.GIVEN)
        )
    words = "`stage: pt` reads the text of the first message alone"
    return [*found, *(At((INFO, name, key), Drop(words)) for key in ("formatting", "columns", "tags"))]


def _path_of(entry: Mapping[str, object]) -> str | None:
    found = entry.get("hf_hub_url") or entry.get("file_name")
    return str(found) if found else None


def _place(key: FileKey) -> Outcome:
    """The key that `_path_of` took is converted; others name other places of the same rows."""
    target = (*key.place, "path")
    found = key.of_recipe(*target)
    if found == key.value:
        return Write({target: found})
    return (
        Ask("write the file or the hub id of the rows", target)
        if found == "NAME"
        else Drop(f"the rows are read from `{found}`")
    )


def _formatting(key: FileKey) -> Outcome:
    """Rows whose messages have `role` and `content` are LLaMA-Factory's sharegpt too."""
    is_chat = key.value == "sharegpt" and as_mapping(key.beside("tags")).get("role_tag") == "role"
    return Write({(*key.place, "format"): "messages" if is_chat else str(key.value)})


def _columns(key: FileKey) -> Outcome:
    is_chat = (
        key.of_recipe(*key.place, "format") == "messages"
        or (key.beside("tags", "role_tag") or "from") == "role"
    )
    names = _COLUMNS | ({"messages": "messages"} if is_chat else {})
    return (
        Inside({content: _column(names.get(content)) for content in key.mapping})
        if key.mapping
        else Drop("no columns")
    )


def _column(name: str | None) -> Rule:
    if name is None:
        return lambda key: Ask("rows of preferences, images or sound are not trained here", key.place)
    return lambda key: renamed(str(key.value), name, key.place)


_TAGS = {
    "role_tag": ("from", "role"),
    "content_tag": ("value", "content"),
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "system_tag": ("system",),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call",),
}
"""How the keys of a message, and the roles in them, are named here too."""
_ROLES = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
    "observation_tag": "tool",
    "function_tag": "function_call",
}


def _tag(key: FileKey) -> Outcome:
    if key.value in _TAGS.get(key.name, ()):
        return Drop("that name is known here too")
    if key.name in _ROLES:
        return Write({("data", "roles", str(key.value)): _ROLES[key.name]})
    return Ask(
        "messages have `role` and `content`, or `from` and `value`: rename the keys in the file", key.place
    )


def _sample(key: FileKey) -> Outcome:
    words = (
        f"{key.value} rows are drawn at random there, and those of a smaller set are repeated; "
        "`max_rows` takes the first ones"
    )
    return Ask(words, (*key.place, "max_rows"))


_ENTRY: Rules = {
    **each(("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"), _place),
    "formatting": _formatting,
    "columns": _columns,
    "tags": lambda key: Inside(each(tuple(key.mapping), _tag)) if key.mapping else Drop("no tags"),
    "ranking": switch(lambda key: Ask("rows of preferences are not trained here", key.place), Drop("off")),
    "num_samples": _sample,
    "folder": in_source("data_dir"),
    "load_from": Drop("the place of the rows says so"),
}

# ---- Keys of the file


def _trains_all(key: FileKey) -> bool:
    return is_on(key.of_file("train_on_prompt") or False)


def _is_template_of_tokenizer(key: FileKey) -> bool:
    return not key.of_file("template") and not _trains_all(key)


def _template(key: FileKey) -> Outcome:
    if key.of_file("stage") == "pt":
        return Drop("`stage: pt` renders no template")
    outcome = chat_template(key)
    has_line_end = str(key.value) in LINE_ENDS and not _trains_all(key)
    return remarked(outcome, _LINE_END) if has_line_end and not isinstance(outcome, Drop) else outcome


def _stage(key: FileKey) -> Outcome:
    if key.value != "pt":
        words = "supervised fine-tuning is what `train` does"
        return Drop(f"{words}. {_OF_TOKENIZER}" if _is_template_of_tokenizer(key) else words)
    found: list[Step] = [Write({"data.loss_on": "all"}, "pre-training: every token is trained")]
    origin = f"default of {LLAMA_FACTORY} for `stage: pt`"
    if (packing := key.of_file("packing")) is None:
        found.append(Also("data.packing", True, origin))
    if packing is None or is_on(packing):
        found.append(
            Also("data.packing_strategy", "wrapped", f"{origin}: texts are joined and cut into blocks")
        )
    return found


def _rows_of_each(key: FileKey) -> Outcome:
    """A limit of every data set."""
    names = {
        TRAIN: _names(key.of_file("dataset")) or ["NAME"],
        ("data", "eval"): _names(key.of_file("eval_dataset")),
    }
    places = [(*place, index, "max_rows") for place, named in names.items() for index in range(len(named))]
    return Write(dict.fromkeys(places, key.value))


def _shares(key: FileKey) -> Outcome:
    try:
        weights = [float(share) for share in _names(key.value)]
    except ValueError:
        return Ask("write a `weight` for each source", TRAIN)
    return Write({(*TRAIN, index, "weight"): weight for index, weight in enumerate(weights)})


_CUT = (
    "prompt and answer of a longer row are cut in proportion there; here its end is, and a row without a "
    "trained token is left out"
)
_PACKED = "examples in one row never see each other here, as with `neat_packing`"
_OPTIMIZERS = (
    "use_galore",
    "use_apollo",
    "use_badam",
    "use_adam_mini",
    "galore_layerwise",
    "apollo_layerwise",
)
_LOSSES = (
    "use_asft_loss",
    "use_eaft_loss",
    "use_llama_pro",
    "mixture_of_depths",
    "shift_attn",
    "pissa_convert",
    "use_kt",
)


def _order(key: FileKey) -> Outcome:
    """`SequentialSampler`, over rows that a held-out part or a stream's buffer has shuffled before."""
    if not is_on(key.value):
        return Drop("off: rows are shuffled in each epoch, as here")
    if is_on(key.of_file("streaming") or False) or key.of_file("val_size"):
        words = (
            "LLaMA-Factory keeps the order of one shuffle, which a held-out part and a stream's buffer need"
        )
        return Ask(
            f"{words}: write `data: {{shuffle: false}}` for the order of the files, or leave it out",
            "data.shuffle",
        )
    return Write({"data.shuffle": False})


_QUANTISED = "weights that are quantised already are not trained: name the original model"

RULES: Rules = {
    "stage": _stage,
    "dataset": _listed_datasets(TRAIN),
    "eval_dataset": _listed_datasets(("data", "eval")),
    "dataset_dir": Drop(f"the files of `{INFO}` are written with their paths"),
    "template": _template,
    "neat_packing": implies({"data.packing": True}, "examples in one row never see each other"),
    "max_samples": _rows_of_each,
    "cutoff_len": lambda key: Write({"data.max_length": key.value}, _CUT),
    **each(
        ("use_v1_kernels", "preprocessing_batch_size", "eval_num_beams"),
        Drop("a matter of LLaMA-Factory's own code"),
    ),
    "tokenized_path": Drop("prepared data are named by their content, in `data.cache_dir`"),
    "interleave_probs": _shares,
    "packing": lambda key: Write({"data.packing": key.value}, _PACKED, Fate.KEPT),
    "finetuning_type": method,
    "pure_bf16": implies({"model.dtype": "bf16", "precision.mixed_precision": "bf16"}),
    "use_muon": implies({"training.optim": "muon"}),
    "buffer_size": same("data.shuffle_buffer_size"),
    "disable_shuffling": _order,
    "plot_loss": Drop("the run card has the curve of the loss"),
    "quantization_method": fine_or(
        ("bnb", "bitsandbytes"), "4 bits are NF4 here, as in bitsandbytes", _QUANTISED, "quantization.load"
    ),
    **each(("use_unsloth", "use_unsloth_gc"), Drop("kernels are chosen in `kernels:`")),
    "use_reentrant_gc": Drop("activation checkpointing is always non-reentrant"),
    "upcast_layernorm": Drop("norms are trained in `model.dtype`, fp32 by default"),
    **each(
        _OPTIMIZERS,
        off_or("off", "this optimizer is not supported: `adamw_torch_8bit` needs less memory too"),
    ),
    "use_dft_loss": implies({"training.loss": "dft"}, DFT),
    **each(_LOSSES, UNSUPPORTED_SWITCH),
    **each(("image_max_pixels", "video_max_pixels", "video_maxlen", "video_fps"), Drop(MEDIA)),
    **each(("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model"), Drop(MEDIA)),
    "default_system": Ask("add the system message to the rows", TRAIN),
    "cp_size": same("parallelism.sp_size"),
    "ray_num_workers": Drop("ranks are started by `fsdp-tune train`"),
    "predict_with_generate": off_or(
        "off", "write `training: {sample: {every: 500, prompts: […]}}` to see answers while training"
    ),
}
"""By name; see `settling.settle_key`."""
TOOL = Tool(
    LLAMA_FACTORY,
    RULES,
    defaults={
        **TRAINER_DEFAULTS,
        "fsdp.activation_checkpointing": "full",
        "training.logging_steps": 500,
        "training.report_to": [],
    },
    adapter_defaults={"lora.r": 8, "lora.target_modules": "all-linear", "precision.mixed_precision": "bf16"},
    # weights are cast to fp32, and computed in it without `bf16`
    full_defaults={"precision.mixed_precision": "no"},
    adapter_switches=("finetuning_type",),
    trains_adapters=True,
    long_rows=CUT_BY_TRL,  # `wrapped`: `stage: pt`
    stream_buffer=16384,
    method=Method("stage", ("sft", "pt"), "preference tuning and reward models"),
)
