"""Keys of Accelerate's configuration file, of its launcher and of DeepSpeed's JSON; and fms-hf-tuning, which is launched with them.

fms-hf-tuning (`tuning.sft_trainer`, or its JSON) has options that mean something of their own, and a file of data sets.
"""

from __future__ import annotations

from typing import Any, cast

from fsdp_tune.migrate.general import (
    TRAIN,
    UNSUPPORTED_SWITCH,
    Rule,
    Rules,
    SourceRule,
    by_synonym,
    chat_template,
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
    section,
    settle_all,
    settle_source,
)
from fsdp_tune.migrate.ledger import Fate, Ledger, Path, Weight, leaves
from fsdp_tune.recipe.read.legacy import DTYPE_NAMES

_LAUNCH = "the launcher of this package sets it"
_BY_FSDP2 = "FSDP2 chooses sizes and overlap of its transfers"


def _kind(ledger: Ledger, path: Path, value: object) -> None:
    """How the ranks share the model."""
    strategies = {
        "FSDP": None,
        "DEEPSPEED": None,
        "NO": "NO_SHARD",
        "MULTI_GPU": "NO_SHARD",
        "MULTI_CPU": "NO_SHARD",
        "MULTI_XPU": "NO_SHARD",
    }
    name = str(value).upper()
    if name not in strategies:
        ledger.ask(path, f"`{value}` has no counterpart", ("fsdp", "sharding_strategy"))
    elif (strategy := strategies[name]) is None:
        ledger.drop(path, "sharding is on by default; its keys have the details")
    else:
        ledger.write(path, {"fsdp.sharding_strategy": strategy}, Fate.CONVERTED, "every rank holds the whole model (DDP)")


def _precision(ledger: Ledger, path: Path, value: Any) -> None:
    name = {False: "no"}.get(value, DTYPE_NAMES.get(value, value))
    ledger.write(path, {"precision.mixed_precision": name}, Fate.KEPT if name == value else Fate.CONVERTED)


def _compile(ledger: Ledger, path: Path, value: Any) -> None:
    backend = cast("dict[str, Any]", value).get("dynamo_backend", "NO") if isinstance(value, dict) else value
    if str(backend).upper() == "NO":
        ledger.drop(path, "off, as it is here")
    else:
        ledger.write(path, {"kernels.compile": True}, Fate.CONVERTED, "each decoder layer is compiled")


def _port(ledger: Ledger, path: Path, value: Any) -> None:
    if value == 0:
        ledger.drop(path, "a free port is found here too")
    else:
        ledger.write(path, {"launch.main_process_port": value}, Fate.KEPT)


def _mesh(name: str) -> Rule:
    """Sizes of the mesh: replicas of a sharded model are HYBRID_SHARD; a size of 1 is the default."""

    def rule(ledger: Ledger, path: Path, value: Any) -> None:
        replicas = ledger.value(*path[:-1], "parallelism_config_dp_replicate_size")
        if value == 1 or (name == "dp_shard_size" and replicas in (None, 1)):
            ledger.drop(path, "all ranks share one model, as they do by default")
        else:
            ledger.write(path, {f"parallelism.{name}": value}, Fate.CONVERTED)
        if name == "dp_replicate_size" and value != 1:
            ledger.set(("fsdp", "sharding_strategy"), "HYBRID_SHARD", str(path[-1]), Weight.IMPLIED)

    return rule


_PARALLEL = {
    **{f"parallelism_config_{name}": _mesh(name) for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")},
    "parallelism_config_cp_comm_strategy": leave("the keys and values of a row are exchanged as `sp_size` needs them"),
    **dict.fromkeys(
        ("parallelism_config_sp_backend", "parallelism_config_sp_seq_length_is_variable", "parallelism_config_sp_attn_implementation"),
        leave("`sp_size` is Ulysses, for rows of any length and each attention kernel"),
    ),
}
_AUTO_STAGE = leave("auto: DeepSpeed takes it from the arguments of the trainer")

LAUNCHER_RULES: Rules = {
    "num_processes": same("launch.num_processes"),
    "num_machines": same("launch.num_machines"),
    "machine_rank": leave("each machine runs the same command"),
    "main_process_port": _port,
    **dict.fromkeys(
        ("compute_environment", "main_training_function", "debug", "downcast_bf16", "rdzv_backend", "same_network"), leave(_LAUNCH)
    ),
    **dict.fromkeys(("module", "m", "no_python", "standalone", "monitor_interval", "rdzv_conf", "rdzv_id"), leave(_LAUNCH)),
    **dict.fromkeys(("tpu_env", "tpu_use_cluster", "tpu_use_sudo", "tpu_name", "tpu_zone"), off_or("off", "TPUs are not supported")),
    "gpu_ids": leave("`launch.num_processes` counts the ranks; CUDA_VISIBLE_DEVICES selects their GPUs"),
    **dict.fromkeys(("ipex_config", "mpirun_config", "megatron_lm_config", "fp8_config"), UNSUPPORTED_SWITCH),
    "distributed_type": _kind,
    **dict.fromkeys(("multi_gpu", "use_fsdp", "use_deepspeed"), leave("the ranks share the model by `fsdp.sharding_strategy`")),
    "mixed_precision": _precision,
    **dict.fromkeys(("dynamo_backend", "dynamo_config"), _compile),
    "use_cpu": implies({"launch.device": "cpu"}),
    "enable_cpu_affinity": same("launch.enable_cpu_affinity"),
    "parallelism_config": section(_PARALLEL),
    "gradient_accumulation_steps": same("training.gradient_accumulation_steps"),
    "gradient_clipping": by_synonym("gradient_clipping"),
    "node_rank": leave("each machine runs the same command"),
}
"""Keys of Accelerate's file, and options of `accelerate launch` and `torchrun`. See `general.settle_key`."""


# ---- DeepSpeed


def unless_auto(rule: Rule) -> Rule:
    return lambda ledger, path, value: (_AUTO_STAGE if value == "auto" else rule)(ledger, path, value)


def _stage(ledger: Ledger, path: Path, value: Any) -> None:
    if value in (1, "1"):
        ledger.write(
            path, {"fsdp.sharding_strategy": "SHARD_GRAD_OP"}, Fate.CONVERTED, "gradients are sharded too; the numbers are the same"
        )
    else:
        by_synonym("zero_stage")(ledger, path, value)


def _offload(ledger: Ledger, path: Path, value: Any) -> None:
    """A mapping with a device, or the device alone."""
    device = cast("dict[str, Any]", value).get("device") if isinstance(value, dict) else value
    if device in (None, "none"):
        ledger.drop(path, "off, as it is here")
    elif device == "cpu":
        ledger.write(path, {"fsdp.offload_params": True}, Fate.CONVERTED, "parameters, gradients and optimizer state are in host memory")
    else:
        ledger.ask(path, "there is no offload to disks; `fsdp: {offload_params: true}` is to host memory", ("fsdp", "offload_params"))


def _enabled(dtype: str) -> Rule:
    def rule(ledger: Ledger, path: Path, value: Any) -> None:
        enabled = cast("dict[str, Any]", value).get("enabled") if isinstance(value, dict) else value
        if enabled == "auto":
            _AUTO_STAGE(ledger, path, value)
        elif is_on(enabled):
            ledger.write(path, {"precision.mixed_precision": dtype}, Fate.CONVERTED)
        else:
            ledger.drop(path, "off")

    return rule


def _optimizer(ledger: Ledger, path: Path, _: object) -> None:
    if ledger.is_open((*path, "type")):
        _optimizer_name(ledger, (*path, "type"), ledger.value(*path, "type"))
    params: Path = (*path, "params")
    if isinstance(ledger.value(*params), dict):
        settle_all(ledger, params, {name: unless_auto(rule) for name, rule in _OPTIMIZER.items()})


def _optimizer_name(ledger: Ledger, path: Path, value: object) -> None:
    if str(value).lower() in ("adam", "adamw"):
        ledger.write(path, {"training.optim": "adamw_torch_fused"}, Fate.CONVERTED)
    else:
        ledger.ask(path, f"`{value}` of DeepSpeed is not supported", ("training", "optim"))


def _betas(ledger: Ledger, path: Path, value: Any) -> None:
    if isinstance(value, list) and len(cast("list[Any]", value)) == 2:
        ledger.write(path, {"training.adam_beta1": value[0], "training.adam_beta2": value[1]}, Fate.CONVERTED)
    else:
        ledger.ask(path, "two numbers: `training: {adam_beta1: 0.9, adam_beta2: 0.999}`", ("training", "adam_beta1"))


def _scheduler(ledger: Ledger, path: Path, _: object) -> None:
    names = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    kind = str(ledger.value(*path, "type"))
    if len(path) > 1 and (other := _other_schedule(ledger, path, names.get(kind))) is not None:
        words = f"DeepSpeed's own schedule is used there, and `{other}` of the file says another: keep one"
        for leaf in [leaf for leaf in leaves(ledger.value(*path), path) if ledger.is_open(leaf)]:
            ledger.ask(leaf, words, ("training", "lr_scheduler_type"))
        return
    if not ledger.is_open((*path, "type")):
        pass
    elif kind in names:
        ledger.write((*path, "type"), {"training.lr_scheduler_type": names[kind]}, Fate.CONVERTED)
        _default_warmup(ledger, (*path, "params"), kind)
    else:
        ledger.ask((*path, "type"), f"`{kind}` of DeepSpeed is not known here", ("training", "lr_scheduler_type"))
    if isinstance(ledger.value(*path, "params"), dict):
        settle_all(ledger, (*path, "params"), {name: unless_auto(rule) for name, rule in _SCHEDULER.items()})


def _other_schedule(ledger: Ledger, path: Path, kind: str | None) -> str | None:
    """Return the key of the file, which includes that of DeepSpeed, that gives another schedule; "auto" takes the file's."""
    given, steps = (ledger.settings.get(("training", name)) for name in ("lr_scheduler_type", "warmup_steps"))
    if given is not None and given.value != kind:
        return given.origins[0]
    of_deepspeed = ledger.value(*path, "params", "warmup_num_steps")
    return steps.origins[0] if steps is not None and of_deepspeed not in ("auto", steps.value) else None


def _default_warmup(ledger: Ledger, params: Path, kind: str) -> None:
    """What DeepSpeed's schedules do where their parameters say nothing (deepspeed/runtime/lr_schedules.py)."""
    target = ("training", "warmup_steps")
    if ledger.value(*params, "warmup_num_steps") is None:
        ledger.set(target, 1000, f"default of {kind}", Weight.DEFAULT)
    if ledger.value(*params, "warmup_type") is None and ledger.value(*params, "warmup_num_steps") != 0:
        ledger.decide(target, f"without `warmup_type: linear`, `{kind}` warms up by the logarithm of the step; here it is linear")
    if kind != "WarmupCosineLR" and ledger.value(*params, "warmup_max_lr") is None:
        ledger.decide(("training", "learning_rate"), f"without `warmup_max_lr`, `{kind}` rises to 0.001, whatever the optimizer's rate is")


_OPTIMIZER: Rules = {
    "lr": by_synonym("lr"),
    "betas": _betas,
    "eps": same("training.adam_epsilon"),
    "weight_decay": same("training.weight_decay"),
    **dict.fromkeys(("torch_adam", "adam_w_mode", "bias_correction"), leave("AdamW as torch computes it")),
}
_SCHEDULER: Rules = {
    "warmup_num_steps": same("training.warmup_steps"),
    "warmup_max_lr": by_synonym("max_lr"),
    "total_num_steps": same("training.max_steps"),
    "warmup_min_lr": fine_or((0, 0.0), "warm-up begins at 0 here too", "warm-up begins at 0", "training", "warmup_steps"),
    "warmup_type": fine_or(("linear",), "warm-up is linear here too", "warm-up is linear", "training", "warmup_steps"),
}
_ZERO: Rules = {
    "stage": _stage,
    **dict.fromkeys(("offload_optimizer", "offload_param"), _offload),
    "stage3_gather_16bit_weights_on_model_save": leave("`merge-checkpoint` makes one model of the shards"),
}


def _zero(ledger: Ledger, path: Path, value: object) -> None:
    for name in cast("dict[str, Any]", value) if isinstance(value, dict) else ():
        inner = (*path, name)
        rule = _ZERO.get(name) or leave(_BY_FSDP2)
        unless_auto(rule)(ledger, inner, ledger.value(*inner))
    if ledger.is_open(path):
        ledger.drop(path, "no keys")


_BATCH = {
    "train_batch_size": by_synonym("train_batch_size"),
    "train_micro_batch_size_per_gpu": by_synonym("train_micro_batch_size_per_gpu"),
    "gradient_accumulation_steps": same("training.gradient_accumulation_steps"),
    "gradient_clipping": by_synonym("gradient_clipping"),
}
DEEPSPEED_RULES: Rules = {
    **{name: unless_auto(rule) for name, rule in _BATCH.items()},
    "zero_optimization": _zero,
    "bf16": _enabled("bf16"),
    "fp16": _enabled("fp16"),
    "optimizer": _optimizer,
    "scheduler": _scheduler,
    "steps_per_print": lambda ledger, path, value: (
        ledger.write(path, {"training.logging_steps": value}, Fate.CONVERTED, weight=Weight.IMPLIED)
        if isinstance(value, int)
        else ledger.drop(path, "`training.logging_steps` is the interval of the lines")
    ),
    **dict.fromkeys(
        ("wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"), leave("a matter of DeepSpeed's code")
    ),
    **dict.fromkeys(
        ("communication_data_type", "prescale_gradients", "gradient_predivide_factor"), leave("it is `precision.reduce_dtype`")
    ),
    "activation_checkpointing": leave("it is `fsdp.activation_checkpointing`"),
    "sequence_parallel_size": same("parallelism.sp_size"),
    "seq_parallel_communication_data_type": leave("it is `precision.reduce_dtype`"),
    **dict.fromkeys(
        ("_comment", "comms_config", "comms_logger", "monitor_config", "tensorboard", "wandb", "csv_monitor"),
        leave("a matter of DeepSpeed's code"),
    ),
}
"""Keys of DeepSpeed's JSON. See `general.settle_key`."""
_PLUGIN: Rules = {
    "zero_stage": _stage,
    **dict.fromkeys(("offload_optimizer_device", "offload_param_device"), _offload),
    "gradient_accumulation_steps": unless_auto(same("training.gradient_accumulation_steps")),
    "gradient_clipping": unless_auto(by_synonym("gradient_clipping")),
    **dict.fromkeys(("zero3_init_flag", "zero3_save_16bit_model", "deepspeed_multinode_launcher"), leave("`fsdp:` needs no such switch")),
    **dict.fromkeys(("offload_optimizer_nvme_path", "offload_param_nvme_path", "deepspeed_moe_layer_cls_names"), UNSUPPORTED_SWITCH),
    "deepspeed_config_file": lambda ledger, path, value: (
        settle_all(ledger, path, DEEPSPEED_RULES)
        if isinstance(value, dict)
        else ledger.ask(path, f"`{value}` was not found here: `fsdp-tune import {value}` reads it", ("fsdp",))
    ),
    "seq_parallel_communication_data_type": leave("it is `precision.reduce_dtype`"),
}
ACCELERATE_RULES: Rules = {**LAUNCHER_RULES, "deepspeed_config": section(_PLUGIN)}


FMS_METHODS = ("lora", "none", "None", "")
FMS_UNSUPPORTED = "prompt tuning or activated LoRA"
"""The other values of `peft_method`."""
FMS_DATA_CONFIG = "data_config_path"
_EVAL: Path = ("data", "eval", 0)
_SPLIT = "rows of text are not divided by a mark: write them as prompt and completion"


def fms_has_adapter(values: dict[str, Any]) -> bool:
    return values.get("peft_method") == "lora"


def _adapter(ledger: Ledger, path: Path, value: object) -> None:
    if value == "lora":
        ledger.write(path, {"lora": {}}, Fate.CONVERTED)
    else:
        ledger.drop(path, "no adapter: every weight is trained")


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


def _text_field(ledger: Ledger, path: Path, value: object) -> None:
    if value == "text":
        ledger.drop(path, "`text` is the name of that column here too")
        return
    places = [TRAIN, *([_EVAL[:2]] if ledger.value("validation_data_path") else [])]
    ledger.write(path, {(*place, 0, "rename_columns", str(value)): "text" for place in places}, Fate.CONVERTED)


def _chat_field(ledger: Ledger, path: Path, value: object) -> None:
    rename(ledger, path, (*TRAIN, 0), str(value), "messages")


def _path(place: Path) -> Rule:
    return lambda ledger, path, value: ledger.write(path, {(*place, "path"): value}, Fate.CONVERTED)


# ---- The file of data sets


def _data_config(ledger: Ledger, path: Path, value: object) -> None:
    if isinstance(value, dict):
        settle_all(ledger, path, _FMS_DATA)
    else:
        ledger.ask(path, f"`{value}` was not found here: write its data sets as `data: {{train: [{{path: NAME}}]}}`", TRAIN)


def _sets(ledger: Ledger, path: Path, value: object) -> None:
    if not isinstance(value, list):
        ledger.ask(path, "write the data sets as `data: {train: [{path: NAME}]}`", TRAIN)
        return
    for index in range(len(cast("list[Any]", value))):
        settle_source(ledger, (*path, index), (*TRAIN, index), _FMS_SET)


def _files(ledger: Ledger, path: Path, place: Path, value: Any) -> None:
    names = cast("list[Any]", value) if isinstance(value, list) else [value]
    if len(names) == 1:
        ledger.write(path, {(*place, "path"): names[0]}, Fate.CONVERTED)
    else:
        ledger.ask(path, "write one source for each file: `data: {train: [{path: A}, {path: B}]}`", place)


def _handlers(ledger: Ledger, path: Path, place: Path, value: object) -> None:
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


_FMS_SET: dict[str, SourceRule] = {
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
    "chat_template": chat_template("data.chat_template"),
    "odm": question("weights that change while training are `data: {curriculum: …}`", "data", "curriculum"),
}
_FMS_DATA: Rules = {"dataprocessor": section(_PROCESSOR), "datasets": _sets}
_OWN_KERNELS = off_or("off", "kernels are chosen in `kernels:`")
FMS_RULES: Rules = {
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
    FMS_DATA_CONFIG: _data_config,
    "peft_method": _adapter,
    "r": same("lora.r"),
    "lora_alpha": same("lora.lora_alpha"),
    "lora_dropout": same("lora.lora_dropout"),
    "target_modules": lora_targets,
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
    **dict.fromkeys(
        ("num_train_dataset_shards", "num_eval_dataset_shards", "do_dataprocessing_only"), leave("`fsdp-tune prepare` does that")
    ),
    "accelerate_launch_args": section(ACCELERATE_RULES),
    "trainer_controller_config_file": question("rules of the trainer are `training: {early_stopping: …}`", "training"),
    **dict.fromkeys(("prompt_tuning_init", "num_virtual_tokens", "prompt_tuning_init_text"), leave("of prompt tuning")),
}
"""By name; see `general.settle_key`."""
