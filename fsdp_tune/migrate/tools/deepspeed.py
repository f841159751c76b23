"""Keys of DeepSpeed's JSON, and of the section of Accelerate's file that names or holds it."""

from __future__ import annotations

from fsdp_tune.core.values import is_mapping
from fsdp_tune.migrate.general import betas
from fsdp_tune.migrate.rules import (
    UNSUPPORTED_SWITCH,
    Also,
    AskEach,
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
    is_on,
    outcome_of,
    same,
)
from fsdp_tune.migrate.tool import Tool
from fsdp_tune.recipe.outcome import Ask, Drop, Weight, Write
from fsdp_tune.recipe.read.tool_detection import DEEPSPEED

_BY_FSDP2 = "FSDP2 chooses sizes and overlap of its transfers"
_OF_ACCELERATE = "deepspeed_config"
_AUTO_STAGE = Drop("auto: DeepSpeed takes it from the arguments of the trainer")


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


def _decoupled(key: FileKey) -> Outcome:
    """Off, `Adam` adds the decay to the gradient; `AdamW` does not read it."""
    is_adam = str(key.of_file(*key.path[:-2], "type")).lower() == "adam"
    if is_on(key.value) or not is_adam or not key.beside("weight_decay"):
        return Drop("AdamW as torch computes it")
    return Ask("Adam adds the decay to the gradient; here it decays the weights", "training.weight_decay")


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


def _schedule_steps(key: FileKey) -> Outcome:
    """The steps of a schedule, which are those of the training here.

    In a file of its own nothing else says how long training is. A trainer stops by its own arguments, and
    that of transformers refuses a schedule of another length (`HfTrainerDeepSpeedConfig`).
    """
    if key.path[0] == "scheduler":
        return outcome_of(same("training.max_steps"), key)
    given = key.ledger.settings.get(("training", "max_steps"))
    steps = given.value if given is not None else key.of_file("max_steps")
    if steps == key.value:
        return Drop("as many as the trainer's steps")
    if key.path[0] == _OF_ACCELERATE or (isinstance(steps, int) and steps > 0):
        return Ask(
            "DeepSpeed's schedule ends after so many steps, and training by the arguments of the trainer; "
            "here both end together",
            "training.max_steps",
        )
    return Drop("transformers refuses a schedule of another length than the training, whose epochs say it")


_OPTIMIZER: Rules = {
    "lr": by_synonym("lr"),
    "betas": betas,
    "eps": same("training.adam_epsilon"),
    "weight_decay": same("training.weight_decay"),
    "torch_adam": Drop("AdamW as torch computes it"),
    "adam_w_mode": _decoupled,
    "bias_correction": fine_or(
        (True,), "averages are corrected here too", "averages are always corrected here", "training.optim"
    ),
}
_SCHEDULER: Rules = {
    "warmup_num_steps": same("training.warmup_steps"),
    "warmup_max_lr": by_synonym("max_lr"),
    "total_num_steps": _schedule_steps,
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
"""Keys of DeepSpeed's JSON. See `settle_keys.settle_key`."""
PLUGIN_RULES: Rules = {
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
DEEPSPEED_TOOL = Tool(DEEPSPEED, DEEPSPEED_RULES)
