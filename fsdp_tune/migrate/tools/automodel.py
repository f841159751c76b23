"""Keys of NeMo Automodel's recipes, which name Python objects with their arguments (`_target_`)."""

from __future__ import annotations

import re
from typing import Any, cast

from fsdp_tune.migrate.general import (
    TRAIN,
    Rule,
    Rules,
    SourceRule,
    ask_each,
    chat_template,
    decays_by_default,
    dtype,
    fine_or,
    implies,
    is_on,
    leave,
    leave_here,
    named_optimizer,
    off_or,
    question,
    rename,
    same,
    section,
    settle_source,
)
from fsdp_tune.migrate.ledger import Fate, Ledger, Path, Weight

TARGET = "_target_"
RECIPES = ("TrainFinetuneRecipeForNextTokenPrediction",)
UNSUPPORTED = "benchmark, distillation, diffusion or training of images"
"""The other values of `recipe`."""
_OPTIMIZERS = {"AdamW": "adamw_torch", "Adam": "adamw_torch", "SGD": "sgd", "FusedAdam": "adamw_torch", "Muon": "muon"}
_FROM_FILES = leave("it follows from the files of the model")
_KERNELS = leave("kernels of Automodel; here they are chosen in `kernels:` and by `model.attn_implementation`")
_COLLATION = leave("rows are padded to the longest of a batch, and packed rows are full")
_RENAMED = {"context": "instruction", "question": "instruction", "answer": "output", "instruction": "instruction"}


def _last(ledger: Ledger, path: Path) -> str:
    return str(ledger.value(*path, TARGET) or "").rpartition(".")[2]


# ---- Model and adapter


def _model_class(ledger: Ledger, path: Path, value: object) -> None:
    if str(value).endswith("from_config"):
        words = "the weights are random there: write `model: {from_config: DIR/config.json}` if they are to be so here too"
        ledger.ask(path, words, ("model", "from_config"))
    elif "ImageTextToText" in str(value):
        ledger.ask(path, "models with images are not trained here", ("model",))
    else:
        ledger.drop(path, "classes follow from the files of the model")


def _configuration(ledger: Ledger, path: Path, value: Any) -> None:
    """The configuration of a model of random weights, which names its files."""
    for name in cast("dict[str, Any]", value) if isinstance(value, dict) else {}:
        inner = (*path, name)
        if name in ("pretrained_model_name_or_path", "name_or_path") and ledger.get("model", "name_or_path") in (None, value[name]):
            ledger.write(inner, {"model.name_or_path": value[name]}, Fate.CONVERTED)
        elif name in (TARGET, "trust_remote_code", "name_or_path"):
            ledger.drop(inner, "it follows from the files of the model")
        elif ledger.is_open(inner):
            ask_each(ledger, inner)
    if ledger.is_open(path):
        ask_each(ledger, path)


def _targets(ledger: Ledger, path: Path, value: Any) -> None:
    """Patterns with `*` for the full names of modules."""
    patterns = [str(each) for each in (cast("list[Any]", value) if isinstance(value, list) else [value])]
    if "*" in patterns:
        ledger.write(path, {"lora.target_modules": "all-linear"}, Fate.CONVERTED, "linear layers; `*` is every module there")
    elif all(re.fullmatch(r"\*?\.?\w+", each) and (each[:2] == "*." or "*" not in each) for each in patterns):
        ledger.write(path, {"lora.target_modules": [each.removeprefix("*.") for each in patterns]}, Fate.CONVERTED)
    else:
        words = "|".join(".*".join(re.escape(part) for part in each.split("*")) for each in patterns)
        ledger.write(path, {"lora.target_modules": words}, Fate.CONVERTED, "as a regular expression for full names")


_PEFT: Rules = {
    TARGET: lambda ledger, path, _: ledger.write(path, {"lora": {}}, Fate.CONVERTED),
    "dim": same("lora.r"),
    "alpha": same("lora.lora_alpha"),
    "dropout": same("lora.lora_dropout"),
    "target_modules": _targets,
    "match_all_linear": implies({"lora.target_modules": "all-linear"}),
    "exclude_modules": question("write the modules to adapt as `lora: {target_modules: […]}`", "lora", "target_modules"),
    "use_dora": same("lora.use_dora"),
    "moe_rank_scaling": off_or("off", "write the ranks of the experts as `lora: {rank_pattern: {PATTERN: R}}`"),
    "lora_A_init": fine_or(("kaiming",), "as here", "A is drawn by `lora.init_lora_weights` here", "lora", "init_lora_weights"),
    **dict.fromkeys(("use_triton", "use_memory_efficient_lora", "dropout_position"), leave("a matter of Automodel's own code")),
    **dict.fromkeys(("lora_dtype",), leave("adapters are kept in `model.dtype`")),
}
_MODEL: Rules = {
    TARGET: _model_class,
    "pretrained_model_name_or_path": same("model.name_or_path"),
    "config": _configuration,
    **dict.fromkeys(("backend", "use_sdpa_patching", "kda_mode"), _KERNELS),
    **dict.fromkeys(("torch_dtype", "dtype"), dtype("model.dtype")),
    **dict.fromkeys(("force_hf", "load_base_model", "text_config", "use_cache"), _FROM_FILES),
    "output_hidden_states": leave("hidden states are not kept"),
    "use_liger_kernel": same("kernels.liger"),
    "revision": same("model.revision"),
    "freeze_router": off_or("off", "write the pattern of the routers: `model: {freeze: [PATTERN]}`"),
}

# ---- Ranks


def _ranks_of_data(ledger: Ledger, path: Path, value: Any) -> None:
    if isinstance(value, int) and value > 1:
        ledger.ask(path, "write `parallelism: {dp_shard_size: …}`, or leave it out: it follows from the ranks", ("parallelism",))
    else:
        ledger.drop(path, "it follows from the ranks")


def _degree(key: str) -> Rule:
    def rule(ledger: Ledger, path: Path, value: Any) -> None:
        if not isinstance(value, int) or value == 1:
            ledger.drop(path, "off: one rank, as it is here")
        else:
            ledger.write(path, {key: value}, Fate.KEPT if path[-1] == key.rpartition(".")[2] else Fate.CONVERTED)

    return rule


def _strategy(ledger: Ledger, path: Path, value: Any) -> None:
    names = {"fsdp2": {"fsdp.version": 2}, "ddp": {"fsdp.sharding_strategy": "NO_SHARD"}}
    if value in names:
        ledger.write(path, names[value], Fate.CONVERTED)
    else:
        ledger.ask(path, f"`{value}` has no counterpart: FSDP2 shards by `fsdp: {{sharding_strategy: FULL_SHARD}}`", ("fsdp",))


def _recomputation(ledger: Ledger, path: Path, value: Any) -> None:
    ledger.write(path, {"fsdp.activation_checkpointing": "full" if is_on(value) else "none"}, Fate.CONVERTED)


def _only_with_stages(ledger: Ledger, path: Path, _value: object) -> None:
    stages = ledger.value("distributed", "pp_size")
    if isinstance(stages, int) and stages > 1:
        ledger.ask(path, "there are no pipeline stages here", ("parallelism",))
    else:
        ledger.drop(path, "no effect with one pipeline stage")


def _dtype_of(key: str) -> Rule:
    names = {"bfloat16": "bf16", "bf16": "bf16", "float32": "fp32", "float16": "fp16"}

    def rule(ledger: Ledger, path: Path, value: object) -> None:
        name = names.get(str(value).removeprefix("torch."), str(value))
        name = "no" if (key, name) == ("precision.mixed_precision", "fp32") else name
        ledger.write(path, {key: name}, Fate.CONVERTED)

    return rule


_ASIDE = leave("ranks gather and reduce as FSDP2 orders it")
_PARALLEL: Rules = {
    TARGET: leave("ranks are sharded by `fsdp:`"),
    "strategy": _strategy,
    "dp_size": _ranks_of_data,
    "dp_replicate_size": _degree("parallelism.dp_replicate_size"),
    "tp_size": _degree("parallelism.tp_size"),
    "cp_size": _degree("parallelism.cp_size"),
    "pp_size": fine_or((1, "none", "None"), "off, as it is here", "there are no pipeline stages here", "parallelism"),
    "ep_size": fine_or((1, "none", "None"), "off, as it is here", "experts are sharded with their layer here", "parallelism"),
    "sequence_parallel": off_or("off", "write `parallelism: {sp_size: N}` to divide rows over ranks"),
    "activation_checkpointing": _recomputation,
    "mp_policy": section(
        {
            "param_dtype": _dtype_of("precision.mixed_precision"),
            "reduce_dtype": _dtype_of("precision.reduce_dtype"),
            **dict.fromkeys((TARGET, "output_dtype", "cast_forward_inputs"), leave("follows from `precision.mixed_precision`")),
        }
    ),
    "autocast_dtype": leave("the dtype of the computation is `precision.mixed_precision`"),
    "offload_policy": lambda ledger, path, value: ledger.write(path, {"fsdp.offload_params": bool(value)}, Fate.CONVERTED),
    "reshard_after_forward": same("fsdp.reshard_after_forward"),
    "pipeline": _only_with_stages,
    "moe": leave("experts are sharded with their layer"),
    **dict.fromkeys(("enable_fsdp2_prefetch", "fsdp2_backward_prefetch_depth", "fsdp2_forward_prefetch_depth"), _ASIDE),
    **dict.fromkeys(("defer_fsdp_grad_sync", "patch_is_packed_sequence", "enable_async_tensor_parallel", "enable_compile"), _ASIDE),
}

# ---- Data


def _rows(place: Path) -> Rule:
    def rule(ledger: Ledger, path: Path, value: object) -> None:
        if isinstance(value, dict):
            _settle_set(ledger, path, place)
            settle_source(ledger, path, place, _SET)
        else:
            ledger.ask(path, "write the rows as `data: {train: [{path: NAME}]}`", place[:2])

    return rule


def _settle_set(ledger: Ledger, path: Path, place: Path) -> None:
    """What the class of the rows says: chats, columns, or prompts that code makes."""
    name = _last(ledger, path)
    if name == "ChatDataset":
        ledger.write((*path, TARGET), {(*place, "format"): "messages"}, Fate.CONVERTED)
    elif name.startswith("ColumnMapped"):
        ledger.write((*path, TARGET), {(*place, "format"): "alpaca"}, Fate.CONVERTED)
    elif ledger.is_open((*path, TARGET)):
        ledger.ask((*path, TARGET), f"`{name}` makes its rows in code: write them as prompt and completion, or as messages", place)


def _path(ledger: Ledger, path: Path, place: Path, value: Any) -> None:
    ledger.write(path, {(*place, "path"): value}, Fate.CONVERTED)


def _columns(ledger: Ledger, path: Path, place: Path, value: object) -> None:
    names = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    for content, column in names.items():
        if content == "question" and "context" in names:
            rename(ledger, (*path, content), place, str(column), "input")
        elif content in _RENAMED:
            rename(ledger, (*path, content), place, str(column), _RENAMED[content])
        else:
            ledger.ask((*path, content), "rename the column by `rename_columns`", place)
    if ledger.is_open(path):
        ledger.ask(path, "rename the columns by `rename_columns`", place)


def _truncation(ledger: Ledger, path: Path, place: Path, value: object) -> None:
    if value in (True, "longest_first", "only_first") and place[1] == "train":
        ledger.write(path, {"data.overlong": "truncate"}, Fate.CONVERTED)
    elif place[1] == "train":
        ledger.ask(path, "longer rows are not cut there: `data: {overlong: truncate}`, `drop` or `error`", ("data", "overlong"))
    else:
        ledger.drop(path, "rows of evaluations are cut at `data.max_length` too")


def _length(ledger: Ledger, path: Path, place: Path, value: Any) -> None:
    if place[1] == "eval":
        ledger.drop(path, "rows of evaluations are cut at `data.max_length` too")
    elif not isinstance(value, int):
        ledger.ask(path, "write `data: {max_length: N}`", ("data", "max_length"))
    else:
        ledger.write(path, {"data.max_length": value}, Fate.CONVERTED)


def _answers_alone(ledger: Ledger, path: Path, place: Path, value: Any) -> None:
    ledger.write(path, {(*place, "loss_on"): "completion" if is_on(value) else "all"}, Fate.CONVERTED)


def _last_answer(ledger: Ledger, path: Path, place: Path, value: Any) -> None:
    if is_on(value):
        ledger.write(path, {(*place, "loss_on"): "last_assistant"}, Fate.CONVERTED)
    else:
        ledger.drop(path, "off, as it is here")


def _template(ledger: Ledger, path: Path, place: Path, value: Any) -> None:
    chat_template((*place, "chat_template"))(ledger, path, value)


def _tokenizer(ledger: Ledger, path: Path, _place: Path, value: object) -> None:
    """The tokenizer of a set; a recipe has one for all rows."""
    name = cast("dict[str, Any]", value).get("pretrained_model_name_or_path") if isinstance(value, dict) else None
    if name is None or name in (ledger.value("model", "pretrained_model_name_or_path"), ledger.get("model", "tokenizer")):
        ledger.drop(path, "it is that of the model")
    elif ledger.get("model", "tokenizer") is None:
        ledger.write(path, {"model.tokenizer": name}, Fate.CONVERTED)
    else:
        ledger.ask(path, "all rows have one tokenizer here", ("model", "tokenizer"))


_PADDING = leave_here("rows are padded to the longest of a batch")
_SET: dict[str, SourceRule] = {
    **dict.fromkeys(("path_or_dataset", "path_or_dataset_id", "dataset_name", "paths"), _path),
    **dict.fromkeys(
        ("limit_dataset_samples", "num_samples_limit"),
        lambda ledger, path, place, value: ledger.write(path, {(*place, "max_rows"): value}, Fate.CONVERTED),
    ),
    "column_mapping": _columns,
    **dict.fromkeys(("seq_length", "seq_len"), _length),
    "answer_only_loss_mask": _answers_alone,
    "mask_history": _last_answer,
    "chat_template": _template,
    "tokenizer": _tokenizer,
    **dict.fromkeys(("padding", "pad_to_max_length", "unshifted", "align_to_bos"), _PADDING),
    "truncation": _truncation,
    **dict.fromkeys(("shuffle_seed", "shuffle_files"), leave_here("rows are shuffled in each epoch, by `training.data_seed`")),
}


def _model_tokenizer(ledger: Ledger, path: Path, value: Any) -> None:
    _tokenizer(ledger, path, TRAIN, value)


def _packed(ledger: Ledger, path: Path, value: Any) -> None:
    if not isinstance(value, int) or value <= 0:
        ledger.drop(path, "off, as it is here")
    else:
        ledger.write(path, {"data.packing": True, "data.max_length": value}, Fate.CONVERTED)


_PACKING: Rules = {
    **dict.fromkeys(("packed_sequence_size", "pack_size"), _packed),
    **dict.fromkeys(("packing_strategy", "max_packs", "packing_ratio", "num_proc"), leave("`data.packing` packs all rows")),
    "split_across_pack": lambda ledger, path, value: ledger.write(
        path, {"data.packing_strategy": "wrapped" if is_on(value) else "bfd"}, Fate.CONVERTED
    ),
}
_LOADER: Rules = {
    "shuffle": same("data.shuffle"),
    "num_workers": same("training.dataloader_num_workers"),
    **dict.fromkeys((TARGET, "collate_fn", "drop_last", "pin_memory", "prefetch_factor", "persistent_workers"), _COLLATION),
    "batch_size": leave("the micro-batch is `training.per_device_train_batch_size`"),
}
_EVAL_LOADER: Rules = {
    **_LOADER,
    "shuffle": _COLLATION,
    "num_workers": _COLLATION,
    "batch_size": same("training.per_device_eval_batch_size"),
}

# ---- Optimizer, schedule, checkpoints


def defaults(ledger: Ledger) -> dict[str, Any]:
    """Return the decay, that of the class in torch, and the schedule: constant without `lr_scheduler`, a cosine with it."""
    is_adamw = decays_by_default(ledger, of_the_class=_last(ledger, ("optimizer",)) == "AdamW")
    # Adam, SGD and the AdamW of TransformerEngine (`FusedAdam`) have none.
    decay: dict[str, Any] = {"training.weight_decay": 0.01} if is_adamw else {}
    if not isinstance(ledger.value("lr_scheduler"), dict):
        return {**decay, "training.lr_scheduler_type": "constant"}
    if ledger.get("training", "warmup_steps") is None:
        words = "Automodel warms up for a tenth of all steps, at most 1,000, from a tenth of the rate; here it starts at 0"
        ledger.decide(("training", "warmup_steps"), words)
    found: dict[str, Any] = {**decay, "training.lr_scheduler_type": "cosine_with_min_lr", "training.warmup_steps": 0.1}
    kind = ledger.get("training", "lr_scheduler_type")
    rate = ledger.decided(("training", "learning_rate"), ledger.get("training", "learning_rate"))
    if kind in (None, "cosine_with_min_lr") and isinstance(rate, int | float):
        found["training.lr_scheduler_kwargs.min_lr"] = rate * 0.01
    return found


def _betas(ledger: Ledger, path: Path, value: object) -> None:
    pair = cast("list[Any]", value) if isinstance(value, list) else []
    if len(pair) == 2:
        ledger.write(path, {"training.adam_beta1": pair[0], "training.adam_beta2": pair[1]}, Fate.CONVERTED)
    else:
        ledger.ask(path, "write `training: {adam_beta1: …, adam_beta2: …}`", ("training", "adam_beta1"))


def _decay(ledger: Ledger, path: Path, value: Any) -> None:
    names = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine_with_min_lr"}
    if value in names:
        ledger.write(path, {"training.lr_scheduler_type": names[value]}, Fate.CONVERTED)
    else:
        ledger.ask(path, f"`{value}` is not known here: cosine, linear, constant …", ("training", "lr_scheduler_type"))


def _least_rate(ledger: Ledger, path: Path, value: Any) -> None:
    style = ledger.value("lr_scheduler", "lr_decay_style") or "cosine"
    if style == "cosine":
        ledger.write(path, {"training.lr_scheduler_kwargs.min_lr": value}, Fate.CONVERTED)
    elif style == "constant" or value == 0:
        ledger.drop(path, f"no effect on a {style} schedule")
    else:
        ledger.ask(path, f"a {style} schedule ends at 0 here", ("training", "lr_scheduler_kwargs"))


def _saving(ledger: Ledger, path: Path, value: Any) -> None:
    if is_on(value):
        ledger.drop(path, "on, as it is here")
    else:
        ledger.write(path, {"training.save_strategy": "no"}, Fate.CONVERTED, "no checkpoint but the last one")


def _intervals(name: str) -> Rule:
    def rule(ledger: Ledger, path: Path, value: Any) -> None:
        if name == "save" and ledger.value("checkpoint", "enabled") is False:
            ledger.drop(path, "`checkpoint.enabled` is off")
        else:
            ledger.write(path, {f"training.{name}_steps": value, f"training.{name}_strategy": "steps"}, Fate.CONVERTED)

    return rule


def _environment(name: str) -> Rule:
    return lambda ledger, path, value: ledger.write(path, {("launch", "env", name): str(value)}, Fate.CONVERTED)


def _tracker(ledger: Ledger, path: Path, value: Any) -> None:
    if isinstance(value, dict) and cast("dict[str, Any]", value).get("enable") is not False:
        ledger.set(("training", "report_to"), ["wandb"], "wandb", Weight.IMPLIED)
    _WANDB(ledger, path, value)


_WANDB = section(
    {
        "enable": leave("`training.report_to` names the trackers"),
        "project": _environment("WANDB_PROJECT"),
        "entity": _environment("WANDB_ENTITY"),
        "name": _environment("WANDB_NAME"),
        "group": _environment("WANDB_RUN_GROUP"),
        **dict.fromkeys(("save_dir", "dir"), leave("trackers write to the run directory")),
    }
)


def _nf4(ledger: Ledger, path: Path, value: Any) -> None:
    if is_on(value):
        ledger.write(path, {"quantization.load": "nf4"}, Fate.CONVERTED)
    else:
        ledger.drop(path, "off, as it is here")


_QUANTIZATION: Rules = {
    "load_in_4bit": _nf4,
    "load_in_8bit": off_or("off, as it is here", "8 bits are not supported: 4 bits are `quantization: {load: nf4}`"),
    "bnb_4bit_quant_type": fine_or(("nf4",), "4 bits are NF4 here", "4 bits are NF4 here", "quantization", "load"),
    "bnb_4bit_quant_storage": leave("shards hold the packed bits"),
}
_CHECKPOINT: Rules = {
    "enabled": _saving,
    "checkpoint_dir": same("output_dir"),
    **dict.fromkeys(("model_save_format", "save_consolidated", "dequantize_base_checkpoint"), leave("`merge-checkpoint` makes one model")),
}
_STEPS: Rules = {
    "global_batch_size": same("training.global_batch_size"),
    "local_batch_size": same("training.per_device_train_batch_size"),
    "ckpt_every_steps": _intervals("save"),
    "val_every_steps": _intervals("eval"),
    "num_epochs": same("training.num_train_epochs"),
    "max_steps": same("training.max_steps"),
    "gc_every_steps": leave("Python's collector is left alone"),
}
_RATES: Rules = {
    "lr_decay_style": _decay,
    "lr_warmup_steps": same("training.warmup_steps"),
    "min_lr": _least_rate,
}
_STEP: Rules = {
    TARGET: named_optimizer(_OPTIMIZERS, "weight_decay"),
    "lr": same("training.learning_rate"),
    "betas": _betas,
    "eps": same("training.adam_epsilon"),
    **dict.fromkeys(("foreach", "fused", "capturable"), leave("the fastest form that the device has is used")),
    **dict.fromkeys(("master_weights", "master_weight_bits", "store_param_remainders"), leave("the dtype of the weights is `model.dtype`")),
    **dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), leave("moments are fp32; `adamw_torch_8bit` keeps 8 bits")),
}
OTHER_MODELS = {"flow_matching": "diffusion models"}
RULES: Rules = {
    "recipe": leave("supervised fine-tuning is what `train` does"),
    "step_scheduler": section(_STEPS),
    "dist_env": leave("ranks are started by `fsdp-tune train`; one without progress ends after `launch.hang_timeout`"),
    "rng": section({"seed": same("training.seed"), **dict.fromkeys((TARGET, "ranked"), leave("each rank has a stream of its own"))}),
    "model": section(_MODEL),
    "peft": section(_PEFT),
    "tokenizer": _model_tokenizer,
    "distributed": section(_PARALLEL),
    "parallelizer": section({TARGET: leave("ranks are sharded by `fsdp:`"), "activation_checkpointing": _recomputation}),
    "loss_fn": leave("the loss is the cross-entropy of the trained tokens; `kernels.loss` chooses how it is computed"),
    "dataset": _rows(("data", "train", 0)),
    "validation_dataset": _rows(("data", "eval", 0)),
    "packed_sequence": section(_PACKING),
    "dataloader": section(_LOADER),
    "validation_dataloader": section(_EVAL_LOADER),
    "optimizer": section(_STEP),
    "lr_scheduler": section(_RATES),
    "clip_grad_norm": section({"max_norm": same("training.max_grad_norm")}),
    "checkpoint": section(_CHECKPOINT),
    "quantization": section(_QUANTIZATION),
    "wandb": _tracker,
    "compile": section(
        {
            "enabled": same("kernels.compile"),
            **dict.fromkeys(
                ("mode", "fullgraph", "dynamic", "backend", "options", "dynamo_cache_size_limit"), leave("see `kernels.compile`")
            ),
        }
    ),
    "fp8": section(
        {
            "enabled": implies({"precision.mixed_precision": "fp8"}),
            "recipe_name": same("precision.fp8_recipe"),
            **dict.fromkeys(
                ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp", "force_recompute_fp8_weight_in_bwd"),
                leave("see `precision.mixed_precision: fp8`"),
            ),
            "filter_fqns": leave("the head stays in bf16"),
            "emulate": off_or("off", "fp8 is not emulated"),
        }
    ),
    **dict.fromkeys(("ci", "benchmark", "nsys", "slurm", "launcher"), leave("a matter of Automodel's own machines")),
}
"""By name; see `general.settle_key`."""
