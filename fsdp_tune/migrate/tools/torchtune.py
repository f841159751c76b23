"""Keys of torchtune's recipes, which name Python components with their arguments."""

from __future__ import annotations

import re
from typing import Any

from fsdp_tune.core.values import as_mapping, is_list, is_mapping
from fsdp_tune.migrate.general import betas, decays_by_default, named_optimizer
from fsdp_tune.migrate.ledger import LedgerView
from fsdp_tune.migrate.rules import (
    FileKey,
    Outcome,
    Rules,
    by_synonym,
    each,
    implies,
    is_on,
    off_or,
    outcome_of,
    same,
    section,
    variable,
)
from fsdp_tune.migrate.tool import Tool
from fsdp_tune.migrate.tools.emulated_quantisation import TORCHTUNE_QAT
from fsdp_tune.migrate.tools.long_rows import CUT
from fsdp_tune.migrate.tools.named_objects import COMPONENT, class_named
from fsdp_tune.migrate.tools.torchtune_rows import FROM_FILES, TOKENIZER, datasets
from fsdp_tune.recipe.outcome import Ask, Drop, Fate, Weight, Write
from fsdp_tune.recipe.read.tool_detection import TORCHTUNE
from fsdp_tune.recipe.synonyms import SYNONYMS

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_PROFILER = Drop("it is `train --profile`, and `metrics.jsonl` has times and memory")
_SIZES = (
    "vocab_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "embed_dim",
    "intermediate_dim",
    "norm_eps",
    "rope_base",
)
"""Arguments of a generic builder, as `torchtune.models.qwen2.qwen2`, that a configuration of transformers has
too."""
_OPTIMIZERS = {
    "AdamW": "adamw_torch",
    "Adam": "adamw_torch",
    "SGD": "sgd",
    "PagedAdamW": "adamw_torch",
    "PagedAdamW8bit": "adamw_torch_8bit",
    "AdamW8bit": "adamw_torch_8bit",
}
_ADAPTED = {"output_proj": "o_proj"}
_MLP = ["gate_proj", "up_proj", "down_proj"]


def resolve_references(values: dict[str, object]) -> dict[str, object]:
    """Replace `${key.inner}` by the value of that key, as OmegaConf does. One that the file does not have is
    kept as it is written."""

    def found(name: str) -> object:
        value: Any = values
        for part in name.split("."):
            if part not in as_mapping(value):
                return f"${{{name}}}"
            value = value[part]
        return value

    def resolved(value: object) -> object:
        if is_mapping(value):
            return {name: resolved(inner) for name, inner in value.items()}
        if is_list(value):
            return [resolved(item) for item in value]
        if not isinstance(value, str):
            return value
        if (match := _REFERENCE.fullmatch(value)) is not None:
            return found(match[1])
        return _REFERENCE.sub(lambda match: str(found(match[1])), value)

    return as_mapping(resolved(values))


def _builder(key: FileKey) -> Outcome:
    """`lora_llama3_8b` and `qlora_…` add an adapter; the model itself is that of the checkpointer's
    directory."""
    name = class_named(key.value)
    if not name.startswith(("lora_", "qlora_", "dora_")):
        return Drop("the model is that of `checkpointer.checkpoint_dir`")
    more = {"qlora_": {"quantization.load": "nf4"}, "dora_": {"lora.use_dora": True}}.get(
        name.partition("_")[0] + "_", {}
    )
    return Write({"lora": {}, **more}, weight=Weight.IMPLIED)


def _targets(key: FileKey) -> Outcome:
    """Names of the modules; with `apply_lora_to_mlp` those of the MLP too."""
    names = [_ADAPTED.get(str(name), str(name)) for name in key.items]
    names += _MLP if is_on(key.beside("apply_lora_to_mlp")) else []
    names += ["lm_head"] if is_on(key.beside("apply_lora_to_output")) else []
    return Write({"lora.target_modules": names})


def _more_targets(key: FileKey) -> Outcome:
    if not is_on(key.value):
        return Drop("off")
    if key.beside("lora_attn_modules"):
        return Drop("its modules are in `lora.target_modules`, with those of `lora_attn_modules`")
    return SYNONYMS[key.name].outcome(key.value)


def _output(key: FileKey) -> Outcome:
    if key.value == key.of_file("output_dir"):
        return Drop("it is `output_dir` too")
    return Write({"output_dir": key.value}, weight=Weight.IMPLIED)


_MODEL: Rules = {
    COMPONENT: _builder,
    "lora_attn_modules": _targets,
    **each(("apply_lora_to_mlp", "apply_lora_to_output"), _more_targets),
    "use_dora": same("lora.use_dora"),
    "quantize_base": by_synonym("quantize_base"),
    "max_seq_len": Drop("it is the number of positions there; `tokenizer.max_seq_len` cuts rows"),
    **each(_SIZES, Drop("config.json of the model has it")),
}
_CHECKPOINTER: Rules = {
    "checkpoint_dir": same("model.name_or_path"),
    **each((COMPONENT, "checkpoint_files", "model_type", "safe_serialization"), FROM_FILES),
    "output_dir": _output,
    "adapter_checkpoint": by_synonym("adapters"),
    "recipe_checkpoint": Drop("it is `train --resume`"),
    "keep_last_n_checkpoints": same("training.save_total_limit"),
}


def _optimizer(key: FileKey) -> Outcome:
    fused = dict.fromkeys(("Adam", "AdamW"), "adamw_torch_fused") if is_on(key.beside("fused")) else {}
    return outcome_of(named_optimizer(_OPTIMIZERS | fused, "weight_decay"), key)


def has_decay(ledger: LedgerView) -> bool:
    """Return whether the optimizer decays without a key: AdamW in torch, torchao and bitsandbytes. The
    default of Adam and SGD is 0."""
    return decays_by_default(
        ledger, of_the_class="AdamW" in class_named(ledger.value("optimizer", COMPONENT))
    )


def _schedule(key: FileKey) -> Outcome:
    if "cosine" in str(key.value):
        return Write({"training.lr_scheduler_type": "cosine"})
    return Ask(f"`{key.value}` is not known here: cosine, linear, constant …", "training.lr_scheduler_type")


_LOGGERS = {"WandBLogger": ["wandb"], "TensorBoardLogger": ["tensorboard"], "CometLogger": ["comet_ml"]}


def _logger(key: FileKey) -> Outcome:
    name = str(key.value).rpartition(".")[2]
    return (
        Write({"training.report_to": _LOGGERS[name]})
        if name in _LOGGERS
        else Drop("metrics.jsonl of the run has every value")
    )


def _steps_of_all_epochs(key: FileKey) -> Outcome:
    epochs = key.ledger.decided(("training", "num_train_epochs"), key.of_file("epochs") or 1)
    if not (isinstance(key.value, int) and isinstance(epochs, int | float) and float(epochs).is_integer()):
        words = "steps of an epoch and epochs are not both whole numbers: write `training: {max_steps: …}`"
        return Ask(words, "training.max_steps")
    reason = f"{key.value} × {epochs:g} epochs: it counts all steps here"
    return Write({"training.max_steps": key.value * int(epochs)}, reason, Fate.COMPUTED)


_DTYPES = {
    "bf16": Write(
        {"model.dtype": "bf16", "precision.mixed_precision": "bf16"}, "weights are trained in bf16 there"
    ),
    "fp32": Write({"model.dtype": "fp32", "precision.mixed_precision": "no"}),
}


def _dtype(key: FileKey) -> Outcome:
    """torchtune trains weights in this dtype."""
    return _DTYPES.get(
        str(key.value), Ask("write `model: {dtype: …}` and `precision: {mixed_precision: …}`", "model.dtype")
    )


def _compile(key: FileKey) -> Outcome:
    is_given = any(key.value.values()) if is_mapping(key.value) else key.value
    return Write(
        {"kernels.compile": bool(is_given)}, fate=Fate.KEPT if is_given == key.value else Fate.CONVERTED
    )


def _shards(key: FileKey) -> Outcome:
    return (
        Drop("all ranks share one model, as they do by default")
        if key.value == -1
        else Write({"parallelism.dp_shard_size": key.value})
    )


RULES: Rules = {
    "model": section(_MODEL),
    "checkpointer": section(_CHECKPOINTER),
    "tokenizer": section(TOKENIZER),
    "dataset": datasets(("data", "train")),
    "dataset_val": datasets(("data", "eval")),
    "optimizer": section(
        {
            COMPONENT: _optimizer,
            "lr": by_synonym("lr"),
            "betas": betas,
            "eps": same("training.adam_epsilon"),
            "fused": Drop("`training.optim` says so"),
        }
    ),
    "lr_scheduler": section({COMPONENT: _schedule, "num_warmup_steps": by_synonym("num_warmup_steps")}),
    "loss": Drop(
        "the loss is the cross-entropy of the trained tokens; `kernels.loss` chooses how it is computed"
    ),
    "metric_logger": section(
        {
            COMPONENT: _logger,
            "log_dir": Drop("trackers write to the run directory"),
            "project": variable("WANDB_PROJECT"),
            "group": variable("WANDB_RUN_GROUP"),
        }
    ),
    "max_steps_per_epoch": _steps_of_all_epochs,
    "run_val_every_n_steps": lambda key: Write(
        {"training.eval_steps": key.value, "training.eval_strategy": "steps"}
    ),
    "batch_size_val": same("training.per_device_eval_batch_size"),
    "save_every_n_steps": same("training.save_steps"),
    "dtype": _dtype,
    "device": same("launch.device"),
    "shuffle": same("data.shuffle"),
    "compile": _compile,
    "profiler": _PROFILER,
    "enable_activation_offloading": implies({"fsdp.activation_checkpointing_offload": True}),
    "optimizer_in_bwd": off_or(
        "off",
        "the optimizer's step is not part of the backward pass; `training: {optim: "
        "adamw_torch_8bit}` saves memory",
    ),
    "custom_sharded_layers": Drop("the embedding and the head are FSDP units of the root"),
    "tensor_parallel_dim": same("parallelism.tp_size"),
    "data_parallel_replicate_dim": same("parallelism.dp_replicate_size"),
    "data_parallel_shard_dim": _shards,
    **each(
        ("log_peak_memory_stats", "log_level", "use_output_dir"),
        Drop("memory is in every line of metrics.jsonl"),
    ),
    **each(("low_cpu_ram", "memory_efficient_fsdp_wrap"), Drop("no rank ever holds the whole model")),
    "resume_from_checkpoint": Drop("it is `train --resume`"),
    **TORCHTUNE_QAT,
    "fsdp_cpu_offload": by_synonym("fsdp_cpu_offload"),
    "clip_grad_norm": by_synonym("clip_grad_norm"),
}
"""By name; see `settle_keys.settle_key`."""
UNSUPPORTED = {
    **dict.fromkeys(
        ("ref_checkpointer", "ppo_epochs", "grpo_samples", "reward_checkpointer"), "preference tuning"
    ),
    **dict.fromkeys(("teacher_model", "teacher_checkpointer"), "distillation"),
    **dict.fromkeys(
        ("prompt", "tasks", "max_new_tokens"), "generation or benchmarks as a configuration of their own"
    ),
}
TOOL = Tool(
    TORCHTUNE,
    RULES,
    defaults={
        "training.max_grad_norm": 0,
        "training.lr_scheduler_type": "constant",
        "training.weight_decay": 0.01,
    },
    long_rows=CUT,  # by the tokenizer, before rows are packed
    null_is_default=True,
    other_training=UNSUPPORTED,
)
