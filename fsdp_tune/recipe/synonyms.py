"""Names of recipe keys in other trainers: the key here, and what to write for the value that is given.

The hint of an unknown key has it in words, and `fsdp-tune import` writes it. A test runs each name with a
value, and loads what its hint proposes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fsdp_tune.core.units import printable
from fsdp_tune.core.values import is_list
from fsdp_tune.recipe.conversions import (
    DTYPES,
    HELD_OUT,
    MICRO_BATCH,
    NF4,
    NO_DTYPE,
    NO_STAGE,
    SMALL_SCALES,
    STAGES,
    TO_NF4,
    TO_SMALL_SCALES,
    TRAIN,
    Convert,
    Converted,
    Row,
    as_builder,
    ask,
    cases,
    changed,
    column,
    formats,
    held_out,
    listed,
    source,
    sources,
    switch,
    targets,
    tracker,
    write,
)
from fsdp_tune.recipe.outcome import Ask, Drop, in_words
from fsdp_tune.recipe.tool_names import BY_TOOL


@dataclass(frozen=True, slots=True)
class Synonym:
    tool: str | None
    """None: a common name of several tools."""
    key: str
    """Dotted, without list indexes; under `training.` also a field of TrainingArguments."""
    example: str | None = None
    """Example to write, if the form of the value differs too."""
    convert: Convert | Drop | None = None
    """None: the same value, or the example where there is one."""

    def hint(self, name: str, value: Any) -> str:
        """Return the hint for `name: value`; a value of None is one that is not known."""
        known = f"`{name}` of {self.tool} is `{self.key}` here" if self.tool else f"it is `{self.key}` here"
        if value is None and not self.example:
            return known
        return f"{known}: {in_words(self.outcome(value))}"

    def outcome(self, value: Any) -> Converted:
        """Return what becomes of a value. Where only an example is known, a person has to decide."""
        if self.example and (value is None or self.convert is None or isinstance(value, Mapping)):
            return Ask(f"write `{self.example}`", self.key)
        if isinstance(self.convert, Drop):
            return self.convert
        found = self.convert(value) if self.convert is not None else write(self.key, value)
        return replace(found, near=self.key) if isinstance(found, Ask) else found


_YARN = "model: {rope_scaling: {rope_type: yarn, factor: 4.0}}"
_WHOLE_TABLES = (
    "rows of a table cannot be trained alone: write `lora: {{modules_to_save: [embed_tokens, lm_head]}}`"
)
_RANKS = (
    "it counts the ranks of all machines: write `launch: {{num_processes: N}}` with N = {value} × machines"
)
_OF_SEVERAL: dict[str, Row] = {
    **dict.fromkeys(("lora_r", "lora_rank", "rank"), ("lora.r", None)),
    "lora_target_modules": ("lora.target_modules", None, targets),
    "lora_modules_to_save": ("lora.modules_to_save", None, changed("lora.modules_to_save", listed)),
    **dict.fromkeys(
        ("trainable_token_indices", "peft_trainable_token_indices"),
        ("lora.modules_to_save", "lora: {modules_to_save: [embed_tokens, lm_head]}", ask(_WHOLE_TABLES)),
    ),
    "loraplus_lr_ratio": ("lora.loraplus_lr_ratio", None),
    "load_in_4bit": ("quantization.load", NF4, switch("quantization.load", TO_NF4)),
    "bnb_4bit_use_double_quant": (
        "quantization.scales",
        SMALL_SCALES,
        switch("quantization.scales", TO_SMALL_SCALES),
    ),
    "lora_target_parameters": ("lora.target_parameters", None, changed("lora.target_parameters", listed)),
    **dict.fromkeys(("num_gpus", "n_gpus", "gpus", "world_size"), ("launch.num_processes", None)),
    "devices": (
        "launch.num_processes",
        None,
        changed("launch.num_processes", lambda value: len(value) if is_list(value) else value),
    ),
    "nproc_per_node": ("launch.num_processes", None, ask(_RANKS)),
    **dict.fromkeys(("nnodes", "num_nodes", "n_nodes", "nodes"), ("launch.num_machines", None)),
    "master_addr": ("launch.main_process_ip", None),
    "master_port": ("launch.main_process_port", None),
    **dict.fromkeys(
        (
            "num_train_steps",
            "max_train_steps",
            "total_training_steps",
            "total_steps",
            "train_steps",
            "num_steps",
        ),
        ("training.max_steps", None),
    ),
    **dict.fromkeys(
        ("max_epochs", "total_epochs", "train_epochs", "max_train_epochs"),
        ("training.num_train_epochs", None),
    ),
    **dict.fromkeys(
        (
            *(
                "train_micro_batch_size_per_gpu",
                "per_gpu_train_batch_size",
                "local_batch_size",
                "micro_batch_size_per_gpu",
            ),
            *("device_train_microbatch_size", "train_micro_batch_size"),
        ),
        (MICRO_BATCH, None),
    ),
    **dict.fromkeys(
        ("train_batch_size", "total_batch_size", "effective_batch_size", "global_train_batch_size"),
        ("training.global_batch_size", None),
    ),
    **dict.fromkeys(("lr", "max_lr", "peak_lr"), ("training.learning_rate", None)),
    **dict.fromkeys(("gradient_clipping", "grad_clip", "max_norm"), ("training.max_grad_norm", None)),
    **dict.fromkeys(
        ("accumulate_grad_batches", "grad_accum_steps", "accumulation_steps"),
        ("training.gradient_accumulation_steps", None),
    ),
    **dict.fromkeys(("num_warmup_steps", "warmup_ratio"), ("training.warmup_steps", None)),
    **dict.fromkeys(
        ("seq_len", "seq_length", "sequence_length", "block_size", "context_length", "max_seq_length"),
        ("data.max_length", None),
    ),
    "group_by_length": (
        "data.packing",
        "data: {packing: true}",
        Drop("without packing, rows of similar length are always put together"),
    ),
    **dict.fromkeys(
        ("model_name", "model_id", "model_path", "pretrained_model_name_or_path"),
        ("model.name_or_path", None),
    ),
    **dict.fromkeys(
        ("tokenizer_name", "tokenizer_name_or_path", "tokenizer_path"), ("model.tokenizer", None)
    ),
    "torch_dtype": ("model.dtype", None),
    **dict.fromkeys(
        ("train_file", "train_files", "train_data", "train_path", "data_path", "dataset_path"),
        ("data.train", TRAIN, changed("data.train", sources)),
    ),
    **dict.fromkeys(
        ("eval_file", "validation_file", "val_file"),
        ("data.eval", "data: {eval: [{path: NAME}]}", changed("data.eval", sources)),
    ),
    "test_size": ("data.eval", HELD_OUT, held_out),
    **dict.fromkeys(("save_dir", "out_dir", "output_path", "checkpoint_dir"), ("output_dir", None)),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), ("model.rope_scaling", _YARN)),
    **dict.fromkeys(("experiment_name", "wandb_name", "wandb_run_name"), ("name", None)),
    **dict.fromkeys(
        ("mixed_precision_dtype", "amp"),
        ("precision.mixed_precision", None, cases("precision.mixed_precision", DTYPES, NO_DTYPE)),
    ),
    **dict.fromkeys(
        ("zero_stage", "sharding"),
        ("fsdp.sharding_strategy", None, cases("fsdp.sharding_strategy", STAGES, NO_STAGE)),
    ),
    "wandb": (
        "training.report_to",
        "training: {report_to: [wandb]}",
        switch("training.report_to", ["wandb"]),
    ),
    **dict.fromkeys(
        ("logger", "loggers", "tracker"),
        ("training.report_to", None, changed("training.report_to", listed)),
    ),
    **{
        f"wandb_{name}": ("launch.env", f"launch: {{env: {{WANDB_{name.upper()}: …}}}}", tracker(name))
        for name in ("project", "entity", "mode")
    },
}


def _synonym(tool: str | None, row: Row) -> Synonym:
    return Synonym(tool, row[0], row[1], row[2] if len(row) == 3 else None)


_BY_TOOL: Mapping[str | None, Mapping[str, Row]] = {**BY_TOOL, None: _OF_SEVERAL}
SYNONYMS = {name: _synonym(tool, row) for tool, names in _BY_TOOL.items() for name, row in names.items()}
OF_A_SOURCE = {
    "type": Synonym("axolotl", "data.train.format", None, formats),
    "ds_type": Synonym("axolotl", "data.train.path", None, as_builder),
    "field_messages": Synonym("axolotl", "data.train.rename_columns", None, column("messages")),
    "field_instruction": Synonym("axolotl", "data.train.rename_columns", None, column("instruction")),
    "field_input": Synonym("axolotl", "data.train.rename_columns", None, column("input")),
    "field_output": Synonym("axolotl", "data.train.rename_columns", None, column("output")),
    "field": Synonym("axolotl", "data.train.rename_columns", None, column("text")),
    "subset": Synonym("LLaMA-Factory", "data.train.name", None, source("name")),
    "num_samples": Synonym("LLaMA-Factory", "data.train.max_rows", None, source("max_rows")),
    "file_name": Synonym("LLaMA-Factory", "data.train.path", None, source("path")),
    "hf_hub_url": Synonym("LLaMA-Factory", "data.train.path", None, source("path")),
}
"""Names inside an entry of a list of data sets, which mean something else outside of it."""


def synonym_hint(name: str, value: Any = None, *, in_source: bool = False) -> str | None:
    """Return a hint for a key of another trainer: the key of the recipe, and what to write for `value`. None:
    the name is not known."""
    found = (OF_A_SOURCE.get(name.lower()) if in_source else None) or SYNONYMS.get(name.lower())
    return found.hint(printable(name), value) if found is not None else None
