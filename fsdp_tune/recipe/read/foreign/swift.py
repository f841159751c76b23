"""Options of ms-swift that mean something of their own."""

from __future__ import annotations

import re
from typing import Any, cast

from fsdp_tune.recipe.read.foreign.general import (
    Rule,
    Rules,
    by_synonym,
    chat_template,
    dtype,
    fine_or,
    leave,
    off_or,
    question,
    same,
)
from fsdp_tune.recipe.read.foreign.ledger import Fate, Ledger, Path
from fsdp_tune.recipe.synonyms import SYNONYMS

_NAME = re.compile(r"(?P<path>[^:#]+|.*?)(?::(?P<subset>[^:#]+))?(?:#(?P<rows>\d+))?")
_MEDIA = "models with images or sound are not trained here"


def _datasets(place: Path) -> Rule:
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


def _tuner(ledger: Ledger, path: Path, value: Any) -> None:
    if value == "lora":
        ledger.write(path, {"lora": {}}, Fate.CONVERTED)
    else:
        by_synonym("tuner_type")(ledger, path, value)


def _targets(ledger: Ledger, path: Path, value: Any) -> None:
    advice = SYNONYMS["lora_target_modules"].advice(value)
    if advice.tree:
        ledger.write(path, {"lora.target_modules": advice.tree["lora"]["target_modules"]}, Fate.KEPT)
    else:
        ledger.ask(path, advice.words, ("lora", "target_modules"))


def _loss_scale(ledger: Ledger, path: Path, value: Any) -> None:
    """Which tokens are trained."""
    names = {"default": "assistant", "last_round": "last_assistant", "all": "all"}
    if value in names:
        ledger.write(path, {"data.loss_on": names[value]}, Fate.CONVERTED)
    else:
        ledger.ask(path, "tokens have one weight here: write `data: {loss_on: …}`", ("data", "loss_on"))


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
        from fsdp_tune.recipe.read.foreign.general import settle_by_name

        settle_by_name(ledger, path, value)
        return
    strategy = {"0": "NO_SHARD", "1": "SHARD_GRAD_OP", "2": "SHARD_GRAD_OP", "3": "FULL_SHARD"}[match[1]]
    settings: dict[str, Any] = {"fsdp.sharding_strategy": strategy} | ({"fsdp.offload_params": True} if match[2] else {})
    ledger.write(path, settings, Fate.CONVERTED)


RULES: Rules = {
    **dict.fromkeys(("model", "model_id_or_path"), _model),
    "dataset": _datasets(("data", "train")),
    "val_dataset": _datasets(("data", "eval")),
    **dict.fromkeys(("train_type", "tuner_type", "sft_type"), _tuner),
    "target_modules": _targets,
    "torch_dtype": dtype("model.dtype"),
    "loss_scale": _loss_scale,
    "truncation_strategy": _truncation,
    "deepspeed": _sharding,
    "template": chat_template("data.chat_template"),
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
    "use_chat_template": off_or("rows of text have no template", "chats are rendered by the chat template"),
    **dict.fromkeys(("model_author", "model_name"), question("write the name into the rows", "data", "train")),
    "system": question("add the system message to the rows", "data", "train"),
    "task_type": fine_or(("causal_lm",), "the models are causal language models", "classifiers and embeddings are not trained here"),
    "model_type": leave("classes follow from the files of the model"),
    "quant_method": leave("4 bits are NF4 here, as in bitsandbytes"),
    "merge_lora": by_synonym("merge_lora"),
}
"""By name; see `general.settle_key`."""
UNSUPPORTED = {"rlhf_type": "preference tuning"}
