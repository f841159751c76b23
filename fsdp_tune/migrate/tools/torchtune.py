"""Keys of torchtune's recipes, which name Python components with their arguments."""

from __future__ import annotations

import re
from typing import Any, cast

from fsdp_tune.migrate.general import (
    Rule,
    Rules,
    by_synonym,
    chat_template,
    decays_by_default,
    implies,
    is_on,
    leave,
    named_optimizer,
    off_or,
    rename,
    same,
    section,
    settle_all,
)
from fsdp_tune.migrate.ledger import Fate, Ledger, Path, Weight
from fsdp_tune.migrate.tools.emulated_quantisation import TORCHTUNE_QAT

COMPONENT = "_component_"
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_PROFILER = leave("it is `train --profile`, and `metrics.jsonl` has times and memory")
_FROM_FILES = leave("it follows from the files of the model")
_DATASETS = {
    "alpaca_dataset": "tatsu-lab/alpaca",
    "alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
    "grammar_dataset": "liweili/c4_200m",
    "samsum_dataset": "Samsung/samsum",
    "slimorca_dataset": "Open-Orca/SlimOrca-Dedup",
    "wikitext_dataset": "EleutherAI/wikitext_document_level",
    "cnn_dailymail_articles_dataset": "ccdv/cnn_dailymail",
}
"""Builders with a data set of their own (torchtune/datasets): its hub id."""
_TRAINS_ALL = ("alpaca_dataset", "alpaca_cleaned_dataset")
"""Builders that train the prompts too, unless `train_on_input` is false."""
_BUILDERS = {"text_completion_dataset": "text", "instruct_dataset": "alpaca"}
_CHATS = {"chat_dataset": None, "slimorca_dataset": "sharegpt"}
"""Builders of chats: the style of their rows, None if `conversation_style` has it."""
_STYLES = {"sharegpt": ("sharegpt", "conversations"), "openai": ("messages", "messages")}
"""Styles of conversations: the format here, and its column."""
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


def resolve_references(values: dict[str, Any]) -> dict[str, Any]:
    """Replace `${key.inner}` by the value of that key, as OmegaConf does. One that the file does not have is kept as it is written."""

    def found(name: str) -> Any:
        value: Any = values
        for part in name.split("."):
            if not isinstance(value, dict) or part not in value:
                return f"${{{name}}}"
            value = cast("dict[str, Any]", value)[part]
        return value

    def resolved(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: resolved(inner) for name, inner in cast("dict[str, Any]", value).items()}
        if isinstance(value, list):
            return [resolved(item) for item in cast("list[Any]", value)]
        if not isinstance(value, str):
            return value
        if (match := _REFERENCE.fullmatch(value)) is not None:
            return found(match[1])
        return _REFERENCE.sub(lambda match: str(found(match[1])), value)

    return cast("dict[str, Any]", resolved(values))


def _component(ledger: Ledger, path: Path) -> str:
    return str(ledger.value(*path, COMPONENT) or "").rpartition(".")[2]


# ---- The model


def _builder(ledger: Ledger, path: Path, value: object) -> None:
    """`lora_llama3_8b` and `qlora_…` add an adapter; the model itself is that of the checkpointer's directory."""
    name = str(value).rpartition(".")[2]
    if name.startswith(("lora_", "qlora_", "dora_")):
        settings: dict[str, Any] = {"lora": {}}
        settings |= {"quantization.load": "nf4"} if name.startswith("qlora_") else {}
        settings |= {"lora.use_dora": True} if name.startswith("dora_") else {}
        ledger.write(path, settings, Fate.CONVERTED, weight=Weight.IMPLIED)
    else:
        ledger.drop(path, "the model is that of `checkpointer.checkpoint_dir`")


def _targets(ledger: Ledger, path: Path, value: Any) -> None:
    """Names of the modules; with `apply_lora_to_mlp` those of the MLP too."""
    names = [_ADAPTED.get(str(name), str(name)) for name in (cast("list[Any]", value) if isinstance(value, list) else [value])]
    names += _MLP if is_on(ledger.value(*path[:-1], "apply_lora_to_mlp")) else []
    names += ["lm_head"] if is_on(ledger.value(*path[:-1], "apply_lora_to_output")) else []
    ledger.write(path, {"lora.target_modules": names}, Fate.CONVERTED)


def _more_targets(ledger: Ledger, path: Path, value: Any) -> None:
    if not is_on(value):
        ledger.drop(path, "off")
    elif ledger.value(*path[:-1], "lora_attn_modules"):
        ledger.drop(path, "its modules are in `lora.target_modules`, with those of `lora_attn_modules`")
    else:
        by_synonym(str(path[-1]))(ledger, path, value)


_MODEL: Rules = {
    COMPONENT: _builder,
    "lora_attn_modules": _targets,
    **dict.fromkeys(("apply_lora_to_mlp", "apply_lora_to_output"), _more_targets),
    "use_dora": same("lora.use_dora"),
    "quantize_base": by_synonym("quantize_base"),
}
_CHECKPOINTER: Rules = {
    "checkpoint_dir": same("model.name_or_path"),
    **dict.fromkeys((COMPONENT, "checkpoint_files", "model_type", "safe_serialization"), _FROM_FILES),
    "output_dir": lambda ledger, path, value: (
        ledger.drop(path, "it is `output_dir` too")
        if value == ledger.value("output_dir")
        else ledger.write(path, {"output_dir": value}, Fate.CONVERTED, weight=Weight.IMPLIED)
    ),
    "adapter_checkpoint": by_synonym("adapters"),
    "recipe_checkpoint": leave("it is `train --resume`"),
    "keep_last_n_checkpoints": same("training.save_total_limit"),
}
_TOKENIZER: Rules = {
    COMPONENT: _FROM_FILES,
    **dict.fromkeys(
        ("path", "merges_file", "merges_path", "vocab_path", "special_tokens_path"), leave("the tokenizer is that of the model's directory")
    ),
    "max_seq_len": by_synonym("max_seq_len"),
    "prompt_template": chat_template("data.chat_template"),
}

# ---- Data


def _dataset(place: Path) -> Rule:
    def rule(ledger: Ledger, path: Path, value: object) -> None:
        sets: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
        if not all(isinstance(each, dict) and each != {} for each in sets):
            ledger.ask(path, "a data set is a mapping with its `_component_`", ("data", str(place[1])))
            return
        for index in range(len(sets)):
            _settle_set(ledger, (*path, index) if isinstance(value, list) else path, (*place, index))

    return rule


def _settle_set(ledger: Ledger, path: Path, place: Path) -> None:
    name = _component(ledger, path)
    columns = ledger.value(*path, "column_map")
    if name in _DATASETS and ledger.value(*path, "source") is None:
        ledger.write((*path, COMPONENT), {(*place, "path"): _DATASETS[name]}, Fate.CONVERTED)
    elif name == "instruct_dataset" and not columns:  # its rows have `input` and `output`, and become a chat of two messages
        written = {(*place, "format"): "alpaca", (*place, "rename_columns", "input"): "instruction"}
        ledger.write((*path, COMPONENT), written, Fate.CONVERTED)
    elif _BUILDERS.get(name):
        ledger.write((*path, COMPONENT), {(*place, "format"): _BUILDERS[name]}, Fate.CONVERTED)
    elif ledger.is_open((*path, COMPONENT)):
        ledger.drop((*path, COMPONENT), "the columns of the rows decide the format")
    if name in _TRAINS_ALL and ledger.value(*path, "train_on_input") is None and place[1] == "train":
        ledger.set((*place, "loss_on"), "all", f"default of {name}", Weight.DEFAULT)
    settle_all(ledger, path, {key: _at(place, key) for key in cast("dict[str, Any]", ledger.value(*path) or {})})


def _style(ledger: Ledger, path: Path) -> str | None:
    """Return the style of the conversations of a data set, given the path of one of its keys; None if it has no conversations."""
    builder = _component(ledger, path[:-1])
    given = ledger.value(*path[:-1], "conversation_style")
    return str(given) if given is not None else _CHATS.get(builder, "sharegpt" if builder in _CHATS else None)


def _trained(ledger: Ledger, path: Path, place: Path, value: Any) -> None:
    """Chats have several answers; prompts have one completion."""
    answers = "completion" if _style(ledger, path) is None else "assistant"
    ledger.write(path, {(*place, "loss_on"): "all" if is_on(value) else answers}, Fate.CONVERTED)


def _column_map(ledger: Ledger, path: Path, place: Path, value: object) -> None:
    """{content: column}, as each builder names its contents."""
    style = _style(ledger, path)
    names = {"instruction": "instruction", "output": "output", "input": "input"}
    if style is not None:
        names = {"conversations": _STYLES.get(style, ("", "conversations"))[1], "messages": "messages"}
    elif _component(ledger, path[:-1]) == "instruct_dataset":
        names = {"input": "instruction", "output": "output"}
    for content, column in cast("dict[str, Any]", value).items() if isinstance(value, dict) else ():
        if content in names:
            rename(ledger, (*path, content), place, str(column), names[content])
        else:
            ledger.ask((*path, content), "rename the column: `rename_columns: {OLD: NEW}`", place)
    if ledger.is_open(path):
        ledger.ask(path, "write the columns as `rename_columns: {OLD: NEW}`", place)


def _at(place: Path, name: str) -> Rule:
    keys = {"source": "path", "split": "split", "name": "name", "data_files": "data_files", "data_dir": "data_dir", "subset": "name"}

    def rule(ledger: Ledger, path: Path, value: Any) -> None:
        is_training = place[1] == "train"
        style = _style(ledger, path)
        if name in keys:
            ledger.write(path, {(*place, keys[name]): value}, Fate.KEPT if keys[name] == name else Fate.CONVERTED)
        elif name == "packed":
            ledger.write(path, {"data.packing" if is_training else "data.eval_packing": value}, Fate.CONVERTED)
        elif name == "train_on_input":
            _trained(ledger, path, place, value)
        elif name == "column":
            rename(ledger, path, place, str(value), "text")
        elif name == "conversation_column" and style in _STYLES:
            rename(ledger, path, place, str(value), _STYLES[style][1])
        elif name == "conversation_style" and value in _STYLES:
            ledger.write(path, {(*place, "format"): _STYLES[value][0]}, Fate.CONVERTED)
        elif name in ("conversation_style", "conversation_column"):
            words = "conversations are `format: sharegpt`, with `from` and `value`, or `messages`, with `role` and `content`"
            ledger.ask(path, words, (*place, "format"))
        elif name == "column_map":
            _column_map(ledger, path, place, value)
        elif name == "new_system_prompt":
            ledger.ask(path, "add the system message to the rows", place)
        elif name == "max_rows":
            ledger.write(path, {(*place, "max_rows"): value}, Fate.KEPT)
        else:
            ledger.ask(path, f"`{name}` of a data set is not known here", place)

    return rule


# ---- Optimizer, schedule and loggers


def _optimizer(ledger: Ledger, path: Path, value: object) -> None:
    names = _OPTIMIZERS | (dict.fromkeys(("Adam", "AdamW"), "adamw_torch_fused") if is_on(ledger.value(*path[:-1], "fused")) else {})
    named_optimizer(names, "weight_decay")(ledger, path, value)


def has_decay(ledger: Ledger) -> bool:
    """Return whether the optimizer decays without a key: AdamW in torch, torchao and bitsandbytes. The default of Adam and SGD is 0."""
    return decays_by_default(ledger, of_the_class="AdamW" in _component(ledger, ("optimizer",)))


def _betas(ledger: Ledger, path: Path, value: Any) -> None:
    ledger.write(path, {"training.adam_beta1": value[0], "training.adam_beta2": value[1]}, Fate.CONVERTED)


def _schedule(ledger: Ledger, path: Path, value: object) -> None:
    if "cosine" in str(value):
        ledger.write(path, {"training.lr_scheduler_type": "cosine"}, Fate.CONVERTED)
    else:
        ledger.ask(path, f"`{value}` is not known here: cosine, linear, constant …", ("training", "lr_scheduler_type"))


def _logger(ledger: Ledger, path: Path, value: object) -> None:
    names = {"WandBLogger": ["wandb"], "TensorBoardLogger": ["tensorboard"], "CometLogger": ["comet_ml"]}
    name = str(value).rpartition(".")[2]
    if name in names:
        ledger.write(path, {"training.report_to": names[name]}, Fate.CONVERTED)
    else:
        ledger.drop(path, "metrics.jsonl of the run has every value")


def _steps_of_all_epochs(ledger: Ledger, path: Path, value: Any) -> None:
    epochs = ledger.decided(("training", "num_train_epochs"), ledger.value("epochs") or 1)
    if not (isinstance(value, int) and isinstance(epochs, int | float) and float(epochs).is_integer()):
        ledger.ask(
            path, "steps of an epoch and epochs are not both whole numbers: write `training: {max_steps: …}`", ("training", "max_steps")
        )
        return
    ledger.write(path, {"training.max_steps": value * int(epochs)}, Fate.COMPUTED, f"{value} × {epochs:g} epochs: it counts all steps here")


def _evaluation(ledger: Ledger, path: Path, value: Any) -> None:
    ledger.write(path, {"training.eval_steps": value, "training.eval_strategy": "steps"}, Fate.CONVERTED)


def _dtype(ledger: Ledger, path: Path, value: object) -> None:
    """torchtune trains weights in this dtype."""
    if value == "bf16":
        ledger.write(
            path, {"model.dtype": "bf16", "precision.mixed_precision": "bf16"}, Fate.CONVERTED, "weights are trained in bf16 there"
        )
    elif value == "fp32":
        ledger.write(path, {"model.dtype": "fp32", "precision.mixed_precision": "no"}, Fate.CONVERTED)
    else:
        ledger.ask(path, "write `model: {dtype: …}` and `precision: {mixed_precision: …}`", ("model", "dtype"))


def _compile(ledger: Ledger, path: Path, value: Any) -> None:
    is_given = value if not isinstance(value, dict) else any(cast("dict[str, Any]", value).values())
    ledger.write(path, {"kernels.compile": bool(is_given)}, Fate.KEPT if is_given == value else Fate.CONVERTED)


RULES: Rules = {
    "model": section(_MODEL),
    "checkpointer": section(_CHECKPOINTER),
    "tokenizer": section(_TOKENIZER),
    "dataset": _dataset(("data", "train")),
    "dataset_val": _dataset(("data", "eval")),
    "optimizer": section(
        {
            COMPONENT: _optimizer,
            "lr": by_synonym("lr"),
            "betas": _betas,
            "eps": same("training.adam_epsilon"),
            "fused": leave("`training.optim` says so"),
        }
    ),
    "lr_scheduler": section({COMPONENT: _schedule, "num_warmup_steps": by_synonym("num_warmup_steps")}),
    "loss": leave("the loss is the cross-entropy of the trained tokens; `kernels.loss` chooses how it is computed"),
    "metric_logger": section(
        {
            COMPONENT: _logger,
            "log_dir": leave("trackers write to the run directory"),
            "project": lambda ledger, path, value: ledger.write(path, {("launch", "env", "WANDB_PROJECT"): str(value)}, Fate.CONVERTED),
            "group": lambda ledger, path, value: ledger.write(path, {("launch", "env", "WANDB_RUN_GROUP"): str(value)}, Fate.CONVERTED),
        }
    ),
    "max_steps_per_epoch": _steps_of_all_epochs,
    "run_val_every_n_steps": _evaluation,
    "batch_size_val": same("training.per_device_eval_batch_size"),
    "save_every_n_steps": same("training.save_steps"),
    "dtype": _dtype,
    "device": same("launch.device"),
    "shuffle": same("data.shuffle"),
    "compile": _compile,
    "profiler": _PROFILER,
    "enable_activation_offloading": implies({"fsdp.activation_checkpointing_offload": True}),
    "optimizer_in_bwd": off_or(
        "off", "the optimizer's step is not part of the backward pass; `training: {optim: adamw_torch_8bit}` saves memory"
    ),
    "custom_sharded_layers": leave("the embedding and the head are FSDP units of the root"),
    "tensor_parallel_dim": same("parallelism.tp_size"),
    "data_parallel_replicate_dim": same("parallelism.dp_replicate_size"),
    "data_parallel_shard_dim": lambda ledger, path, value: (
        ledger.drop(path, "all ranks share one model, as they do by default")
        if value == -1
        else ledger.write(path, {"parallelism.dp_shard_size": value}, Fate.CONVERTED)
    ),
    **dict.fromkeys(("log_peak_memory_stats", "log_level", "use_output_dir"), leave("memory is in every line of metrics.jsonl")),
    **dict.fromkeys(("low_cpu_ram", "memory_efficient_fsdp_wrap"), leave("no rank ever holds the whole model")),
    "resume_from_checkpoint": leave("it is `train --resume`"),
    **TORCHTUNE_QAT,
    "fsdp_cpu_offload": by_synonym("fsdp_cpu_offload"),
    "clip_grad_norm": by_synonym("clip_grad_norm"),
}
"""By name; see `general.settle_key`."""
UNSUPPORTED = {
    **dict.fromkeys(("ref_checkpointer", "ppo_epochs", "grpo_samples", "reward_checkpointer"), "preference tuning"),
    **dict.fromkeys(("teacher_model", "teacher_checkpointer"), "distillation"),
    **dict.fromkeys(("prompt", "tasks", "max_new_tokens"), "generation or benchmarks as a configuration of their own"),
}
