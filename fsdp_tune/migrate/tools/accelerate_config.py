"""Keys of Accelerate's configuration file, of its launcher and of DeepSpeed's JSON; and fms-hf-tuning, which
is launched with them.

fms-hf-tuning (`tuning.sft_trainer`, or its JSON) has options that mean something of their own, and a file of
data sets.
"""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_tune.core.values import as_list, as_mapping, is_mapping
from fsdp_tune.migrate.general import chat_template, sources
from fsdp_tune.migrate.rules import (
    TRAIN,
    UNSUPPORTED_SWITCH,
    Also,
    AskEach,
    At,
    Decide,
    FileKey,
    Inside,
    Outcome,
    Rule,
    Rules,
    Step,
    by_synonym,
    each,
    fine_or,
    implies,
    in_source,
    is_on,
    lora_targets,
    of_the_set,
    off_or,
    outcome_of,
    rename,
    renamed,
    same,
    section,
)
from fsdp_tune.migrate.tool import TRAINER_DEFAULTS, Method, Tool
from fsdp_tune.migrate.tools.long_rows import CUT_BY_TRL
from fsdp_tune.recipe.key_paths import KeyPath
from fsdp_tune.recipe.outcome import Ask, Drop, Fate, Weight, Write
from fsdp_tune.recipe.read.legacy import DTYPE_NAMES
from fsdp_tune.recipe.read.tool_detection import ACCELERATE, DEEPSPEED, FMS

_LAUNCH = "the launcher of this package sets it"
_BY_FSDP2 = "FSDP2 chooses sizes and overlap of its transfers"
_SHARDED = Drop("sharding is on by default; its keys have the details")
_WHOLE = Write({"fsdp.sharding_strategy": "NO_SHARD"}, "every rank holds the whole model (DDP)")
_KINDS = {
    **dict.fromkeys(("FSDP", "DEEPSPEED"), _SHARDED),
    **dict.fromkeys(("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU"), _WHOLE),
}
"""How the ranks share the model."""


def _kind(key: FileKey) -> Outcome:
    return _KINDS.get(
        str(key.value).upper(), Ask(f"`{key.value}` has no counterpart", "fsdp.sharding_strategy")
    )


def _precision(key: FileKey) -> Outcome:
    name = {False: "no"}.get(key.value, DTYPE_NAMES.get(key.value, key.value))
    return Write({"precision.mixed_precision": name}, fate=Fate.KEPT if name == key.value else Fate.CONVERTED)


def _compile(key: FileKey) -> Outcome:
    backend = key.mapping.get("dynamo_backend", "NO") if is_mapping(key.value) else key.value
    if str(backend).upper() == "NO":
        return Drop("off, as it is here")
    return Write({"kernels.compile": True}, "each decoder layer is compiled")


def _port(key: FileKey) -> Outcome:
    if key.value == 0:
        return Drop("a free port is found here too")
    return Write({"launch.main_process_port": key.value}, fate=Fate.KEPT)


_PREFIX = "parallelism_config_"


def _mesh(key: FileKey) -> Outcome:
    """Sizes of the mesh: replicas of a sharded model are HYBRID_SHARD; a size of 1 is the default."""
    name, replicas = key.name.removeprefix(_PREFIX), key.beside(f"{_PREFIX}dp_replicate_size")
    hybrid = (
        [Also("fsdp.sharding_strategy", "HYBRID_SHARD", key.name)]
        if name == "dp_replicate_size" and key.value != 1
        else []
    )
    if key.value == 1 or (name == "dp_shard_size" and replicas in (None, 1)):
        return [Drop("all ranks share one model, as they do by default"), *hybrid]
    return [Write({f"parallelism.{name}": key.value}), *hybrid]


_PARALLEL: Rules = {
    **each(
        [
            f"{_PREFIX}{name}"
            for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
        ],
        _mesh,
    ),
    "parallelism_config_cp_comm_strategy": Drop(
        "the keys and values of a row are exchanged as `sp_size` needs them"
    ),
    **each(
        (
            "parallelism_config_sp_backend",
            "parallelism_config_sp_seq_length_is_variable",
            "parallelism_config_sp_attn_implementation",
        ),
        Drop("`sp_size` is Ulysses, for rows of any length and each attention kernel"),
    ),
}
_AUTO_STAGE = Drop("auto: DeepSpeed takes it from the arguments of the trainer")

LAUNCHER_RULES: Rules = {
    "num_processes": same("launch.num_processes"),
    "num_machines": same("launch.num_machines"),
    "machine_rank": Drop("each machine runs the same command"),
    "main_process_port": _port,
    **each(
        (
            "compute_environment",
            "main_training_function",
            "debug",
            "downcast_bf16",
            "rdzv_backend",
            "same_network",
        ),
        Drop(_LAUNCH),
    ),
    **each(
        ("module", "m", "no_python", "standalone", "monitor_interval", "rdzv_conf", "rdzv_id"), Drop(_LAUNCH)
    ),
    **each(
        ("tpu_env", "tpu_use_cluster", "tpu_use_sudo", "tpu_name", "tpu_zone"),
        off_or("off", "TPUs are not supported"),
    ),
    "gpu_ids": Drop("`launch.num_processes` counts the ranks; CUDA_VISIBLE_DEVICES selects their GPUs"),
    **each(("ipex_config", "mpirun_config", "megatron_lm_config", "fp8_config"), UNSUPPORTED_SWITCH),
    "distributed_type": _kind,
    **each(
        ("multi_gpu", "use_fsdp", "use_deepspeed"),
        Drop("the ranks share the model by `fsdp.sharding_strategy`"),
    ),
    "mixed_precision": _precision,
    **each(("dynamo_backend", "dynamo_config"), _compile),
    "use_cpu": implies({"launch.device": "cpu"}),
    "enable_cpu_affinity": same("launch.enable_cpu_affinity"),
    "parallelism_config": section(_PARALLEL),
    "gradient_accumulation_steps": same("training.gradient_accumulation_steps"),
    "gradient_clipping": by_synonym("gradient_clipping"),
    "node_rank": Drop("each machine runs the same command"),
}
"""Keys of Accelerate's file, and options of `accelerate launch` and `torchrun`. See `settling.settle_key`."""


# ---- DeepSpeed


def unless_auto(rule: Rule) -> Rule:
    return lambda key: _AUTO_STAGE if key.value == "auto" else outcome_of(rule, key)


def _stage(key: FileKey) -> Outcome:
    if key.value in (1, "1"):
        return Write(
            {"fsdp.sharding_strategy": "SHARD_GRAD_OP"}, "gradients are sharded too; the numbers are the same"
        )
    return outcome_of(by_synonym("zero_stage"), key)


def _offload(key: FileKey) -> Outcome:
    """A mapping with a device, or the device alone."""
    device = key.mapping.get("device") if is_mapping(key.value) else key.value
    if device in (None, "none"):
        return Drop("off, as it is here")
    if device == "cpu":
        return Write(
            {"fsdp.offload_params": True}, "parameters, gradients and optimizer state are in host memory"
        )
    return Ask(
        "there is no offload to disks; `fsdp: {offload_params: true}` is to host memory",
        "fsdp.offload_params",
    )


def _enabled(dtype: str) -> Rule:
    def rule(key: FileKey) -> Outcome:
        enabled = key.mapping.get("enabled") if is_mapping(key.value) else key.value
        if enabled == "auto":
            return _AUTO_STAGE
        return Write({"precision.mixed_precision": dtype}) if is_on(enabled) else Drop("off")

    return rule


def _parameters(key: FileKey, rules: Rules) -> Rules:
    """Return a rule for the parameters of an optimizer or a schedule, if it has any."""
    inside = Inside({name: unless_auto(rule) for name, rule in rules.items()})
    return {"params": inside} if isinstance(key.below("params"), dict) else {}


def _optimizer(key: FileKey) -> Outcome:
    return Inside({"type": _optimizer_name, **_parameters(key, _OPTIMIZER)}, only=True)


def _optimizer_name(key: FileKey) -> Outcome:
    if str(key.value).lower() in ("adam", "adamw"):
        return Write({"training.optim": "adamw_torch_fused"})
    return Ask(f"`{key.value}` of DeepSpeed is not supported", "training.optim")


def _betas(key: FileKey) -> Outcome:
    if len(as_list(key.value)) == 2:
        return Write({"training.adam_beta1": key.value[0], "training.adam_beta2": key.value[1]})
    return Ask("two numbers: `training: {adam_beta1: 0.9, adam_beta2: 0.999}`", "training.adam_beta1")


_SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_TYPE = "training.lr_scheduler_type"


def _scheduler(key: FileKey) -> Outcome:
    kind = str(key.below("type"))
    if len(key.path) > 1 and (other := _other_schedule(key, _SCHEDULES.get(kind))) is not None:
        return AskEach(
            f"DeepSpeed's own schedule is used there, and `{other}` of the file says another: keep one", _TYPE
        )
    return Inside({"type": _schedule_name, **_parameters(key, _SCHEDULER)}, only=True)


def _other_schedule(key: FileKey, kind: str | None) -> str | None:
    """Return the key of the file, which includes that of DeepSpeed, that gives another schedule; "auto" takes
    the file's."""
    given, warmup = (
        key.ledger.settings.get(("training", name)) for name in ("lr_scheduler_type", "warmup_steps")
    )
    if given is not None and given.value != kind:
        return given.origins[0]
    of_deepspeed = key.below("params", "warmup_num_steps")
    return warmup.origins[0] if warmup is not None and of_deepspeed not in ("auto", warmup.value) else None


def _schedule_name(key: FileKey) -> Outcome:
    """The schedule, and what DeepSpeed's do where their parameters say nothing
    (deepspeed/runtime/lr_schedules.py)."""
    kind, warmup = str(key.value), key.beside("params", "warmup_num_steps")
    if kind not in _SCHEDULES:
        return Ask(f"`{kind}` of DeepSpeed is not known here", _TYPE)
    found: list[Step] = [Write({_TYPE: _SCHEDULES[kind]})]
    if warmup is None:
        found.append(Also("training.warmup_steps", 1000, f"default of {kind}", Weight.DEFAULT))
    if key.beside("params", "warmup_type") is None and warmup != 0:
        words = (
            f"without `warmup_type: linear`, `{kind}` warms up by the logarithm of the step; here it "
            "is linear"
        )
        found.append(Decide("training.warmup_steps", words))
    if kind != "WarmupCosineLR" and key.beside("params", "warmup_max_lr") is None:
        words = f"without `warmup_max_lr`, `{kind}` rises to 0.001, whatever the optimizer's rate is"
        found.append(Decide("training.learning_rate", words))
    return found


_OPTIMIZER: Rules = {
    "lr": by_synonym("lr"),
    "betas": _betas,
    "eps": same("training.adam_epsilon"),
    "weight_decay": same("training.weight_decay"),
    **each(("torch_adam", "adam_w_mode", "bias_correction"), Drop("AdamW as torch computes it")),
}
_SCHEDULER: Rules = {
    "warmup_num_steps": same("training.warmup_steps"),
    "warmup_max_lr": by_synonym("max_lr"),
    "total_num_steps": same("training.max_steps"),
    "warmup_min_lr": fine_or(
        (0, 0.0), "warm-up begins at 0 here too", "warm-up begins at 0", "training.warmup_steps"
    ),
    "warmup_type": fine_or(
        ("linear",), "warm-up is linear here too", "warm-up is linear", "training.warmup_steps"
    ),
}
_ZERO: Rules = {
    "stage": _stage,
    **each(("offload_optimizer", "offload_param"), _offload),
    "stage3_gather_16bit_weights_on_model_save": Drop("`merge-checkpoint` makes one model of the shards"),
}


def _zero(key: FileKey) -> Outcome:
    rules = {name: unless_auto(_ZERO.get(name, Drop(_BY_FSDP2))) for name in key.mapping}
    return Inside(rules, nulls=True) if rules else Drop("no keys")


def _log_interval(key: FileKey) -> Outcome:
    if isinstance(key.value, int):
        return Write({"training.logging_steps": key.value}, weight=Weight.IMPLIED)
    return Drop("`training.logging_steps` is the interval of the lines")


def _deepspeed_file(key: FileKey) -> Outcome:
    if is_mapping(key.value):
        return Inside(DEEPSPEED_RULES)
    return Ask(f"`{key.value}` was not found here: `fsdp-tune import {key.value}` reads it", "fsdp")


_BATCH: Rules = {
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
    "steps_per_print": _log_interval,
    **each(
        ("wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
        Drop("a matter of DeepSpeed's code"),
    ),
    **each(
        ("communication_data_type", "prescale_gradients", "gradient_predivide_factor"),
        Drop("it is `precision.reduce_dtype`"),
    ),
    "activation_checkpointing": Drop("it is `fsdp.activation_checkpointing`"),
    "sequence_parallel_size": same("parallelism.sp_size"),
    "seq_parallel_communication_data_type": Drop("it is `precision.reduce_dtype`"),
    **each(
        ("_comment", "comms_config", "comms_logger", "monitor_config", "tensorboard", "wandb", "csv_monitor"),
        Drop("a matter of DeepSpeed's code"),
    ),
}
"""Keys of DeepSpeed's JSON. See `settling.settle_key`."""
_PLUGIN: Rules = {
    "zero_stage": _stage,
    **each(("offload_optimizer_device", "offload_param_device"), _offload),
    "gradient_accumulation_steps": unless_auto(same("training.gradient_accumulation_steps")),
    "gradient_clipping": unless_auto(by_synonym("gradient_clipping")),
    **each(
        ("zero3_init_flag", "zero3_save_16bit_model", "deepspeed_multinode_launcher"),
        Drop("`fsdp:` needs no such switch"),
    ),
    **each(
        ("offload_optimizer_nvme_path", "offload_param_nvme_path", "deepspeed_moe_layer_cls_names"),
        UNSUPPORTED_SWITCH,
    ),
    "deepspeed_config_file": _deepspeed_file,
    "seq_parallel_communication_data_type": Drop("it is `precision.reduce_dtype`"),
}
ACCELERATE_RULES: Rules = {**LAUNCHER_RULES, "deepspeed_config": section(_PLUGIN)}


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


# ---- The file of data sets

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
"""By name; see `settling.settle_key`."""
ACCELERATE_TOOL = Tool(ACCELERATE, ACCELERATE_RULES)
DEEPSPEED_TOOL = Tool(DEEPSPEED, DEEPSPEED_RULES)
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
