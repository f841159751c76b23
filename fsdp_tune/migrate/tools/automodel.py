"""Keys of NeMo Automodel's recipes, which name Python objects with their arguments (`_target_`)."""

from __future__ import annotations

import re

from fsdp_tune.core.values import is_mapping
from fsdp_tune.migrate.general import betas, decays_by_default, named_optimizer
from fsdp_tune.migrate.ledger import Ledger
from fsdp_tune.migrate.rules import (
    Also,
    AskEach,
    FileKey,
    Inside,
    Outcome,
    Rule,
    Rules,
    cases,
    each,
    fine_or,
    implies,
    off_or,
    outcome_of,
    same,
    section,
    steps,
    switch,
    variable,
)
from fsdp_tune.migrate.tool import Method, Tool
from fsdp_tune.migrate.tools.automodel_distributed import DISTRIBUTED, RECOMPUTATION
from fsdp_tune.migrate.tools.automodel_rows import EVAL_LOADER, LOADER, PACKING, set_of_rows, set_tokenizer
from fsdp_tune.migrate.tools.named_objects import TARGET, class_named
from fsdp_tune.migrate.training_arguments import dtype
from fsdp_tune.recipe.outcome import Ask, Drop, Write
from fsdp_tune.recipe.read.tool_detection import AUTOMODEL

_OPTIMIZERS = {
    "AdamW": "adamw_torch",
    "Adam": "adamw_torch",
    "SGD": "sgd",
    "FusedAdam": "adamw_torch",
    "Muon": "muon",
}
_FROM_FILES = Drop("it follows from the files of the model")
_KERNELS = Drop("kernels of Automodel; here they are chosen in `kernels:` and by `model.attn_implementation`")


def _model_class(key: FileKey) -> Outcome:
    if str(key.value).endswith("from_config"):
        words = (
            "the weights are random there: write `model: {from_config: DIR/config.json}` if they are to "
            "be so here too"
        )
        return Ask(words, "model.from_config")
    if "ImageTextToText" in str(key.value):
        return Ask("models with images are not trained here", "model")
    return Drop("classes follow from the files of the model")


def _configuration(key: FileKey) -> Outcome:
    """The configuration of a model of random weights, which names its files."""
    return (
        Inside({name: _CONFIGURATION.get(name, AskEach()) for name in key.mapping})
        if key.mapping
        else AskEach()
    )


def _configured_model(key: FileKey) -> Outcome:
    if key.of_recipe("model", "name_or_path") in (None, key.value):
        return Write({"model.name_or_path": key.value})
    return _FROM_FILES if key.name == "name_or_path" else AskEach()


_CONFIGURATION: Rules = {
    **each(("pretrained_model_name_or_path", "name_or_path"), _configured_model),
    **each((TARGET, "trust_remote_code"), _FROM_FILES),
}


def _targets(key: FileKey) -> Outcome:
    """Patterns with `*` for the full names of modules."""
    patterns = [str(each) for each in key.items]
    if "*" in patterns:
        return Write({"lora.target_modules": "all-linear"}, "linear layers; `*` is every module there")
    if all(re.fullmatch(r"\*?\.?\w+", each) and (each[:2] == "*." or "*" not in each) for each in patterns):
        return Write({"lora.target_modules": [each.removeprefix("*.") for each in patterns]})
    words = "|".join(".*".join(re.escape(part) for part in each.split("*")) for each in patterns)
    return Write({"lora.target_modules": words}, "as a regular expression for full names")


_PEFT: Rules = {
    TARGET: Write({"lora": {}}),
    "dim": same("lora.r"),
    "alpha": same("lora.lora_alpha"),
    "dropout": same("lora.lora_dropout"),
    "target_modules": _targets,
    "match_all_linear": implies({"lora.target_modules": "all-linear"}),
    "exclude_modules": Ask(
        "write the modules to adapt as `lora: {target_modules: […]}`", "lora.target_modules"
    ),
    "use_dora": same("lora.use_dora"),
    "moe_rank_scaling": off_or(
        "off", "write the ranks of the experts as `lora: {rank_pattern: {PATTERN: R}}`"
    ),
    "lora_A_init": fine_or(
        ("kaiming",), "as here", "A is drawn by `lora.init_lora_weights` here", "lora.init_lora_weights"
    ),
    **each(
        ("use_triton", "use_memory_efficient_lora", "dropout_position"),
        Drop("a matter of Automodel's own code"),
    ),
    "lora_dtype": Drop("adapters are kept in `model.dtype`"),
}
_MODEL: Rules = {
    TARGET: _model_class,
    "pretrained_model_name_or_path": same("model.name_or_path"),
    "config": _configuration,
    **each(("backend", "use_sdpa_patching", "kda_mode"), _KERNELS),
    **each(("torch_dtype", "dtype"), dtype),
    **each(("force_hf", "load_base_model", "text_config", "use_cache"), _FROM_FILES),
    "output_hidden_states": Drop("hidden states are not kept"),
    "use_liger_kernel": same("kernels.liger"),
    "revision": same("model.revision"),
    "freeze_router": off_or("off", "write the pattern of the routers: `model: {freeze: [PATTERN]}`"),
}


def defaults(ledger: Ledger) -> dict[str, object]:
    """Return the decay, that of the class in torch, and the schedule: constant without `lr_scheduler`, a
    cosine with it."""
    is_adamw = decays_by_default(
        ledger, of_the_class=class_named(ledger.value("optimizer", TARGET)) == "AdamW"
    )
    # Adam, SGD and the AdamW of TransformerEngine (`FusedAdam`) have none.
    decay: dict[str, object] = {"training.weight_decay": 0.01} if is_adamw else {}
    if not isinstance(ledger.value("lr_scheduler"), dict):
        return {**decay, "training.lr_scheduler_type": "constant"}
    if ledger.get("training", "warmup_steps") is None:
        words = (
            "Automodel warms up for a tenth of all steps, at most 1,000, from a tenth of the rate; here "
            "it starts at 0"
        )
        ledger.decide(("training", "warmup_steps"), words)
    found: dict[str, object] = {
        **decay,
        "training.lr_scheduler_type": "cosine_with_min_lr",
        "training.warmup_steps": 0.1,
    }
    kind = ledger.get("training", "lr_scheduler_type")
    rate = ledger.decided(("training", "learning_rate"), ledger.get("training", "learning_rate"))
    if kind in (None, "cosine_with_min_lr") and isinstance(rate, int | float):
        found["training.lr_scheduler_kwargs.min_lr"] = rate * 0.01
    return found


_decay = cases(
    "training.lr_scheduler_type",
    {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine_with_min_lr"},
    lambda key: Ask(
        f"`{key.value}` is not known here: cosine, linear, constant …", "training.lr_scheduler_type"
    ),
)


def _least_rate(key: FileKey) -> Outcome:
    style = key.of_file("lr_scheduler", "lr_decay_style") or "cosine"
    if style == "cosine":
        return Write({"training.lr_scheduler_kwargs.min_lr": key.value})
    if style == "constant" or key.value == 0:
        return Drop(f"no effect on a {style} schedule")
    return Ask(f"a {style} schedule ends at 0 here", "training.lr_scheduler_kwargs")


def _interval(name: str) -> Rule:
    return lambda key: Write({f"training.{name}_steps": key.value, f"training.{name}_strategy": "steps"})


def _saves(key: FileKey) -> Outcome:
    if key.of_file("checkpoint", "enabled") is False:
        return Drop("`checkpoint.enabled` is off")
    return outcome_of(_interval("save"), key)


def _tracker(key: FileKey) -> Outcome:
    is_tracked = is_mapping(key.value) and key.value.get("enable") is not False
    report = [Also("training.report_to", ["wandb"], "wandb")] if is_tracked else []
    return [*report, *steps(outcome_of(_WANDB, key))]


_WANDB = section(
    {
        "enable": Drop("`training.report_to` names the trackers"),
        "project": variable("WANDB_PROJECT"),
        "entity": variable("WANDB_ENTITY"),
        "name": variable("WANDB_NAME"),
        "group": variable("WANDB_RUN_GROUP"),
        **each(("save_dir", "dir"), Drop("trackers write to the run directory")),
    }
)
_QUANTIZATION: Rules = {
    "load_in_4bit": implies({"quantization.load": "nf4"}),
    "load_in_8bit": off_or(
        "off, as it is here", "8 bits are not supported: 4 bits are `quantization: {load: nf4}`"
    ),
    "bnb_4bit_quant_type": fine_or(
        ("nf4",), "4 bits are NF4 here", "4 bits are NF4 here", "quantization.load"
    ),
    "bnb_4bit_quant_storage": Drop("shards hold the packed bits"),
}
_CHECKPOINT: Rules = {
    "enabled": switch(
        Drop("on, as it is here"), Write({"training.save_strategy": "no"}, "no checkpoint but the last one")
    ),
    "checkpoint_dir": same("output_dir"),
    **each(
        ("model_save_format", "save_consolidated", "dequantize_base_checkpoint"),
        Drop("`merge-checkpoint` makes one model"),
    ),
}
_STEPS: Rules = {
    "global_batch_size": same("training.global_batch_size"),
    "local_batch_size": same("training.per_device_train_batch_size"),
    "ckpt_every_steps": _saves,
    "val_every_steps": _interval("eval"),
    "num_epochs": same("training.num_train_epochs"),
    "max_steps": same("training.max_steps"),
    "gc_every_steps": Drop("Python's collector is left alone"),
}
_RATES: Rules = {
    "lr_decay_style": _decay,
    "lr_warmup_steps": same("training.warmup_steps"),
    "min_lr": _least_rate,
}
_STEP: Rules = {
    TARGET: named_optimizer(_OPTIMIZERS, "weight_decay"),
    "lr": same("training.learning_rate"),
    "betas": betas,
    "eps": same("training.adam_epsilon"),
    **each(("foreach", "fused", "capturable"), Drop("the fastest form that the device has is used")),
    **each(
        ("master_weights", "master_weight_bits", "store_param_remainders"),
        Drop("the dtype of the weights is `model.dtype`"),
    ),
    **each(("exp_avg_dtype", "exp_avg_sq_dtype"), Drop("moments are fp32; `adamw_torch_8bit` keeps 8 bits")),
}
RULES: Rules = {
    "recipe": Drop("supervised fine-tuning is what `train` does"),
    "step_scheduler": section(_STEPS),
    "dist_env": Drop(
        "ranks are started by `fsdp-tune train`; one without progress ends after `launch.hang_timeout`"
    ),
    "rng": section(
        {"seed": same("training.seed"), **each((TARGET, "ranked"), Drop("each rank has a stream of its own"))}
    ),
    "model": section(_MODEL),
    "peft": section(_PEFT),
    "tokenizer": set_tokenizer,
    "distributed": section(DISTRIBUTED),
    "parallelizer": section(
        {TARGET: Drop("ranks are sharded by `fsdp:`"), "activation_checkpointing": RECOMPUTATION}
    ),
    "loss_fn": Drop(
        "the loss is the cross-entropy of the trained tokens; `kernels.loss` chooses how it is computed"
    ),
    "dataset": set_of_rows(("data", "train", 0)),
    "validation_dataset": set_of_rows(("data", "eval", 0)),
    "packed_sequence": section(PACKING),
    "dataloader": section(LOADER),
    "validation_dataloader": section(EVAL_LOADER),
    "optimizer": section(_STEP),
    "lr_scheduler": section(_RATES),
    "clip_grad_norm": section({"max_norm": same("training.max_grad_norm")}),
    "checkpoint": section(_CHECKPOINT),
    "quantization": section(_QUANTIZATION),
    "wandb": _tracker,
    "compile": section(
        {
            "enabled": same("kernels.compile"),
            **each(
                ("mode", "fullgraph", "dynamic", "backend", "options", "dynamo_cache_size_limit"),
                Drop("see `kernels.compile`"),
            ),
        }
    ),
    "fp8": section(
        {
            "enabled": implies({"precision.mixed_precision": "fp8"}),
            "recipe_name": same("precision.fp8_recipe"),
            **each(
                (
                    "enable_fsdp_float8_all_gather",
                    "precompute_float8_dynamic_scale_for_fsdp",
                    "force_recompute_fp8_weight_in_bwd",
                ),
                Drop("see `precision.mixed_precision: fp8`"),
            ),
            "filter_fqns": Drop("the head stays in bf16"),
            "emulate": off_or("off", "fp8 is not emulated"),
        }
    ),
    **each(("ci", "benchmark", "nsys", "slurm", "launcher"), Drop("a matter of Automodel's own machines")),
}
"""By name; see `settle_keys.settle_key`."""
TOOL = Tool(
    AUTOMODEL,
    RULES,
    defaults={"training.max_grad_norm": 1.0},
    adapter_defaults={"lora.r": 8, "lora.lora_alpha": 32, "lora.lora_dropout": 0.0},
    loads_as_stored=True,
    other_training={"flow_matching": "diffusion models"},
    method=Method(
        "recipe",
        ("TrainFinetuneRecipeForNextTokenPrediction",),
        "benchmark, distillation, diffusion or training of images",
    ),
)
