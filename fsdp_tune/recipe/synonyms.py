"""Names of recipe keys in other trainers: the key here, and what to write for the value that is given.

The hint of an unknown key has it in words, and `fsdp-tune import` writes it. Each conversion is a function of
a value, which states how unit or sense differ. A test runs each name with a value, and loads what its hint
proposes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fsdp_tune.core.units import printable
from fsdp_tune.core.values import is_list, is_mapping
from fsdp_tune.recipe.outcome import Ask, Drop, Write, in_words, nested, written

Outcome = Write | Ask | Drop
Convert = Callable[[Any], Outcome]
"""From a value in the other tool."""


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

    def outcome(self, value: Any) -> Outcome:
        """Return what becomes of a value. Where only an example is known, a person has to decide."""
        if self.example and (value is None or self.convert is None or isinstance(value, Mapping)):
            return Ask(f"write `{self.example}`", self.key)
        if isinstance(self.convert, Drop):
            return self.convert
        found = self.convert(value) if self.convert is not None else _write(self.key, value)
        return replace(found, near=self.key) if isinstance(found, Ask) else found


def _write(key: str, value: object) -> Write:
    return Write(nested(key, value))


def _as(key: str, change: Callable[[Any], object]) -> Convert:
    """Return a converter that writes the changed value."""
    return lambda value: _write(key, change(value))


def _ask(words: str) -> Convert:
    """Return a converter for a value in another unit that needs a number which is not here: `words` have the
    formula."""
    return lambda value: Ask(words.format(value=printable(str(value))))


_THE_SAME = Drop("without the key it is the same")


def _cases(key: str, cases: Mapping[str, object], other: str | Drop) -> Convert:
    """Return a converter for values by name: a value here, keys of a recipe, or an outcome. `other`: the
    words for the rest."""

    def convert(value: object) -> Outcome:
        name = printable(str(value)).lower()
        if name not in cases:
            return other if isinstance(other, Drop) else Ask(other.format(value=name))
        found = cases[name]
        return found if isinstance(found, Write | Drop) else _write(key, found)

    return convert


def _switch(key: str, on: object, off: object = _THE_SAME) -> Convert:
    return _cases(
        key,
        {"true": on, "false": off, "1": on, "0": off, "yes": on, "no": off},
        "`{value}` is neither true nor false",
    )


def _names(value: object) -> list[Any]:
    """Return a list from one, or from names with commas between them."""
    return list(value) if is_list(value) else [part.strip() for part in str(value).split(",")]


def _first_adapter(value: object) -> Outcome:
    """Take the first of a list of adapters: a run continues one. An option without a value is true, and names
    none."""
    names = [value] if isinstance(value, bool) else _names(value)
    if not names:
        return Drop("it names no adapter")
    return (
        _write("lora.adapter", names[0])
        if isinstance(names[0], str)
        else Ask("write the directory of the adapter")
    )


def _held_out(value: object) -> Outcome:
    """Convert a size of a held-out part: below 1 a share of the rows, else a number of rows; 0 is none."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value == 0:
            return Drop("without the key nothing is evaluated")
        return _write("data.eval", {"fraction": value} if value < 1 else {"rows": int(value)})
    return Ask(f"write `{_HELD_OUT}`")


def _per_epoch(key: str) -> Convert:
    """Convert a number of events in an epoch: here, below 1, the interval is a share of all steps."""
    strategy = key.replace("_steps", "_strategy")
    # axolotl skips 0 as if the key were absent: no evaluations, but a checkpoint after each epoch
    # (`_configure_save_and_eval_strategy`).
    none = (
        _write(strategy, "no")
        if key == "training.eval_steps"
        else Drop("0 is as without the key there: it saves after each epoch")
    )

    def convert(value: object) -> Outcome:
        if value == 0 and not isinstance(value, bool):
            return none
        if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
            return Ask(f"write `{written(key, 0.5)}` for two in all: below 1 it is a share of all steps")
        if value <= 1:
            return _write(strategy, "epoch")
        share = round(1 / value, 4)
        return Ask(
            f"write `{written(key, share)}` for one epoch; with more, {share} / epochs: below 1 it "
            "is a share of all steps"
        )

    return convert


def _sources(value: object) -> list[Any]:
    """Return sources from entries of other tools: their paths, with names of configurations and splits."""
    kept = ("path", "name", "split", "data_files")
    entries = [each if is_mapping(each) else {"path": str(each)} for each in _names(value)]
    return [{key: entry[key] for key in kept if key in entry} or {"path": "NAME"} for entry in entries]


def _source(name: str) -> Convert:
    """Return a converter to a key of the entries of `data.train`."""
    return lambda value: _write("data.train", ({} if name == "path" else {"path": "NAME"}) | {name: value})


def _column(name: str) -> Convert:
    return lambda value: _write("data.train", {"path": "NAME", "rename_columns": {str(value): name}})


_TRAIN = "data: {train: [{path: NAME}]}"
_HELD_OUT = "data: {eval: {fraction: 0.05}}"
_MICRO_BATCH = "training.per_device_train_batch_size"
_LINEAR = "lora: {target_modules: all-linear}"
_SMALL_SCALES = "quantization: {load: nf4, scales: bf16}"
_NF4 = "quantization: {load: nf4}"
_TO_NF4 = Write({"quantization": {"load": "nf4"}})
_TO_SMALL_SCALES = Write({"quantization": {"load": "nf4", "scales": "bf16"}})
_SLICED_MLP = "kernels: {mlp_slice_tokens: 16384}"
_YARN = "model: {rope_scaling: {rope_type: yarn, factor: 4.0}}"
_PROMPTS = "data: {loss_on: completion}"
_ALL_TEXT = "data: {loss_on: all}` (the prompt too) or `data: {loss_on: completion}"
_NO_8_BIT = "{value} is not supported: 4 bits are `quantization: {{load: nf4}}`"
_DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16", "true"), "bf16"),
    **dict.fromkeys(("float16", "fp16"), "fp16"),
    **dict.fromkeys(("float32", "fp32", "false", "no"), "no"),
}
_ATTENTION = {
    **dict.fromkeys(("fa2", "flash_attention_2", "flash_attn", "true"), "flash_attention_2"),
    **dict.fromkeys(("disabled", "eager"), "eager"),
    **dict.fromkeys(("auto", "false"), _THE_SAME),
    "fa3": "flash_attention_3",
    "sdpa": "sdpa",
}
_KERNEL = "write the kernel as `model: {{attn_implementation: …}}`: auto, sdpa, flash_attention_2, eager"
_NOT_PISSA = Drop("adapters that change the base (PiSSA, OLoRA, CorDA) are not supported")
_RECOMPUTE = "fsdp.activation_checkpointing"
_QLORA = Write({"lora": {"r": 16}, "quantization": {"load": "nf4"}})
_NO_ADAPTER = (
    "`{value}` is not one of lora and qlora, which are `lora: {{r: 16}}` and `quantization: {{load: nf4}}`"
)
_NO_DTYPE = "`{value}` is not one of no, bf16, fp16 and fp8"
_MIXES = {
    "concat": _THE_SAME,
    "interleave_under": {"stopping_strategy": "first_exhausted"},
    "interleave_over": {"stopping_strategy": "all_exhausted"},
}
_NO_MIX = "write `data: {{mixture: {{stopping_strategy: all_exhausted}}}}`, and a `weight` for each source"
_SLICES = (
    "it counts tokens in a slice, that one slices of a row: write `kernels: {{mlp_slice_tokens: N}}` "
    "with N = `data.max_length` / {value}"
)
_WHOLE_TABLES = (
    "rows of a table cannot be trained alone: write `lora: {{modules_to_save: [embed_tokens, lm_head]}}`"
)
_RANKS = (
    "it counts the ranks of all machines: write `launch: {{num_processes: N}}` with N = {value} × machines"
)
_STAGES = {
    "0": "NO_SHARD",
    "2": "SHARD_GRAD_OP",
    "3": "FULL_SHARD",
    "full": "FULL_SHARD",
    "hybrid": "HYBRID_SHARD",
    "ddp": "NO_SHARD",
}
_NO_STAGE = "it is one of FULL_SHARD (ZeRO 3), SHARD_GRAD_OP (ZeRO 2), HYBRID_SHARD and NO_SHARD (DDP)"
_attention = _cases("model.attn_implementation", _ATTENTION, _KERNEL)


def _roles(value: object) -> Outcome:
    names = _names(value)
    if names == ["assistant"] or names == ["gpt"]:
        return _write("data.loss_on", "assistant")
    return Ask(
        "write `data: {loss_on: all}` for all roles; single ones other than the assistant by a "
        "`train` in their messages"
    )


def _targets(value: object) -> Outcome:
    if not isinstance(value, str) and not is_list(value):
        return Ask(f"write `{_LINEAR}`")
    if isinstance(value, str) and any(character in value for character in r"\[](|*^$+?"):
        return _write("lora.target_modules", value)  # a regular expression for full names, in PEFT too
    names = _names(value)
    return _write("lora.target_modules", "all-linear" if names in (["all"], ["all-linear"]) else names)


def _tracker(name: str) -> Convert:
    return lambda value: _write(f"launch.env.WANDB_{name.upper()}", str(value))


STRATEGIES_ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "FULL_SHARD": (
        "zero3",
        "zerostage3",
        "stage3",
        "deepspeedzero3",
        "fsdp",
        "fsdp1",
        "fsdp2",
        "full",
        "sharded",
    ),
    "SHARD_GRAD_OP": (
        "zero2",
        "zerostage2",
        "stage2",
        "deepspeedzero2",
        "zero1",
        "zerostage1",
        "stage1",
        "deepspeedzero1",
    ),
    "HYBRID_SHARD": ("hybrid", "hsdp", "hybridzero3", "hybridfsdp"),
    "HYBRID_SHARD_ZERO2": ("hybridzero2", "hsdpzero2"),
    "NO_SHARD": (
        "ddp",
        "dp",
        "dataparallel",
        "distributeddataparallel",
        "multigpu",
        "zero0",
        "stage0",
        "none",
        "replicated",
    ),
}
"""What other tools call a sharding strategy, for hints: in lower case, letters and digits alone."""

_FORMATS = {
    **dict.fromkeys(("completion", "pretrain"), "text"),
    "chat_template": "messages",
    "sharegpt": "sharegpt",
    "alpaca": "alpaca",
    "input_output": "segments",
}


def _formats(value: object) -> Outcome:
    if (name := str(value)) in _FORMATS:  # a variant, `alpaca:chat` or `alpaca.chat`, has other prompts
        settings = nested("data.train", {"path": "NAME", "format": _FORMATS[name]})
        return Write(settings, "or leave it out: the columns decide")
    return Ask(
        "leave it out, since the columns decide, and rename the columns with `rename_columns: {OLD: NEW}`"
    )


def _as_builder(value: object) -> Outcome:
    return Ask(
        f"write `data: {{train: [{{path: {printable(str(value))}, data_files: FILE}}]}}`, or the "
        "file itself as `path`"
    )


_Row = tuple[str, str | None] | tuple[str, str | None, Convert | Drop]
_BY_TOOL: dict[str | None, dict[str, _Row]] = {
    "axolotl": {
        "base_model": ("model.name_or_path", None),
        "micro_batch_size": (_MICRO_BATCH, None),
        "num_epochs": ("training.num_train_epochs", None),
        "sequence_len": ("data.max_length", None),
        "sample_packing": ("data.packing", None),
        "eval_sample_packing": ("data.eval_packing", None),
        "val_set_size": ("data.eval", _HELD_OUT, _held_out),
        "test_datasets": ("data.eval", "data: {eval: [{path: NAME}]}", _as("data.eval", _sources)),
        "train_on_inputs": ("data.loss_on", _ALL_TEXT, _switch("data.loss_on", "all", "completion")),
        "roles_to_train": ("data.loss_on", "data: {loss_on: assistant}", _roles),
        "datasets": ("data.train", _TRAIN, _as("data.train", _sources)),
        "dataset_prepared_path": ("data.cache_dir", None),
        "dataset_processes": ("data.num_proc", None),
        "optimizer": ("training.optim", None),
        "lr_scheduler": ("training.lr_scheduler_type", None),
        "flash_attention": (
            "model.attn_implementation",
            "model: {attn_implementation: flash_attention_2}",
            _attention,
        ),
        "sdp_attention": (
            "model.attn_implementation",
            "model: {attn_implementation: sdpa}",
            _switch("model.attn_implementation", "sdpa"),
        ),
        "tiled_mlp": ("kernels.mlp_slice_tokens", _SLICED_MLP, _switch("kernels.mlp_slice_tokens", 16384)),
        "tiled_mlp_num_shards": ("kernels.mlp_slice_tokens", _SLICED_MLP, _ask(_SLICES)),
        "special_tokens": ("model.tokens", "model: {tokens: {pad: …, eos: …}}"),
        "overrides_of_model_config": ("model.config_overrides", None),
        "revision_of_model": ("model.revision", None),
        "evals_per_epoch": (
            "training.eval_steps",
            "training: {eval_steps: 0.5}",
            _per_epoch("training.eval_steps"),
        ),
        "saves_per_epoch": (
            "training.save_steps",
            "training: {save_steps: 0.5}",
            _per_epoch("training.save_steps"),
        ),
        "adapter": (
            "lora",
            f"lora: {{r: 16}}`, and for qlora `{_NF4}",
            _cases("lora", {"lora": {"r": 16}, "qlora": _QLORA}, _NO_ADAPTER),
        ),
        "lora_target_linear": ("lora.target_modules", _LINEAR, _switch("lora.target_modules", "all-linear")),
        "lora_layers_to_transform": ("lora.layers_to_transform", None),
        "lora_model_dir": ("lora.adapter", None),
        "merge_lora": (
            "merge.adapter",
            "merge: {adapter: merged}",
            _switch("merge.adapter", "merged", "adapter"),
        ),
        "peft_layers_to_transform": ("lora.layers_to_transform", None),
        "peft_init_lora_weights": ("lora.init_lora_weights", None),
        "peft_use_dora": ("lora.use_dora", None),
        "peft_use_rslora": ("lora.use_rslora", None),
    },
    "TRL": {
        "model_name_or_path": ("model.name_or_path", None),
        "model_revision": ("model.revision", None),
        "dataset_name": ("data.train", _TRAIN, _source("path")),
        "dataset_config": ("data.train.name", None, _source("name")),
        "dataset_train_split": ("data.train.split", None, _source("split")),
        "dataset_test_split": (
            "data.eval",
            "data: {eval: [{path: NAME, split: test}]}",
            _as("data.eval", lambda split: [{"path": "NAME", "split": split}]),
        ),
        "dataset_text_field": (
            "data.train.rename_columns",
            "data: {train: [{path: NAME, rename_columns: {FIELD: text}}]}",
            _column("text"),
        ),
        "dataset_num_proc": ("data.num_proc", None),
        "completion_only_loss": ("data.loss_on", _PROMPTS, _switch("data.loss_on", "completion", "all")),
        "assistant_only_loss": (
            "data.loss_on",
            "data: {loss_on: assistant}",
            _switch("data.loss_on", "assistant", "all"),
        ),
        "eos_token": ("model.tokens.eos", None),
        "pad_token": ("model.tokens.pad", None),
        "chat_template_path": ("data.chat_template", None),
        "attn_impl": ("model.attn_implementation", None),
        "use_peft": ("lora", "lora: {r: 16}", _switch("lora", {"r": 16})),
        "bnb_4bit_compute_dtype": (
            "precision.mixed_precision",
            None,
            _cases("precision.mixed_precision", _DTYPES, _NO_DTYPE),
        ),
        "bnb_4bit_quant_type": (
            "quantization.load",
            None,
            _cases("quantization.load", {"nf4": _TO_NF4}, _NO_8_BIT),
        ),
        "use_bnb_nested_quant": (
            "quantization.scales",
            _SMALL_SCALES,
            _switch("quantization.scales", _TO_SMALL_SCALES),
        ),
    },
    "LLaMA-Factory": {
        "cutoff_len": ("data.max_length", None),
        "template": (
            "data.chat_template",
            None,
            _ask(
                "leave it out for the tokenizer's own, or write a bundled one for `{value}`: "
                "`fsdp-tune templates` lists their names"
            ),
        ),
        "dataset": (
            "data.train",
            _TRAIN,
            _ask(
                "write the file or the hub id that `dataset_info.json` has for `{value}`: `data: "
                "{{train: [{{path: NAME}}]}}`"
            ),
        ),
        "eval_dataset": ("data.eval", "data: {eval: [{path: NAME}]}"),
        "val_size": ("data.eval", _HELD_OUT, _held_out),
        "train_on_prompt": ("data.loss_on", _ALL_TEXT, _switch("data.loss_on", "all", "completion")),
        "mask_history": (
            "data.loss_on",
            "data: {loss_on: last_assistant}",
            _switch("data.loss_on", "last_assistant"),
        ),
        "neat_packing": ("data.packing", None),
        "preprocessing_num_workers": ("data.num_proc", None),
        "max_samples": ("data.train.max_rows", None, _source("max_rows")),
        "mix_strategy": (
            "data.mixture",
            "data: {mixture: {stopping_strategy: first_exhausted}}",
            _cases("data.mixture", _MIXES, _NO_MIX),
        ),
        "flash_attn": ("model.attn_implementation", None, _attention),
        "enable_liger_kernel": ("kernels.liger", None),
        "resize_vocab": ("model.resize_embeddings", None),
        "new_special_tokens": ("model.tokens.add", None, _as("model.tokens.add", _names)),
        "finetuning_type": (
            "lora",
            "lora: {r: 16}",
            _cases("lora", {"lora": {"r": 16}, "full": _THE_SAME}, _NO_ADAPTER),
        ),
        "lora_target": (
            "lora.target_modules",
            f"{_LINEAR}` (all) or `lora: {{target_modules: [q_proj, v_proj]}}",
            _targets,
        ),
        "pissa_init": (
            "lora.init_lora_weights",
            None,
            _cases("lora.init_lora_weights", {"false": _THE_SAME}, _NOT_PISSA),
        ),
        "additional_target": ("lora.modules_to_save", None, _as("lora.modules_to_save", _names)),
        "adapter_name_or_path": ("lora.adapter", None),
        "quantization_bit": (
            "quantization.load",
            _NF4,
            _cases("quantization.load", {"4": _TO_NF4}, _NO_8_BIT),
        ),
        "quantization_type": (
            "quantization.load",
            None,
            _cases("quantization.load", {"nf4": _TO_NF4}, _NO_8_BIT),
        ),
        "double_quantization": (
            "quantization.scales",
            _SMALL_SCALES,
            _switch("quantization.scales", _TO_SMALL_SCALES),
        ),
        "disable_gradient_checkpointing": (
            _RECOMPUTE,
            "fsdp: {activation_checkpointing: none}",
            _switch(_RECOMPUTE, "none", "full"),
        ),
    },
    "ms-swift": {
        **dict.fromkeys(
            ("train_type", "tuner_type"),
            ("lora", "lora: {r: 16}", _cases("lora", {"lora": {"r": 16}, "full": _THE_SAME}, _NO_ADAPTER)),
        ),
        "split_dataset_ratio": ("data.eval", _HELD_OUT, _held_out),
        "val_dataset": ("data.eval", "data: {eval: [{path: NAME}]}", _as("data.eval", _sources)),
        "quant_bits": ("quantization.load", _NF4, _cases("quantization.load", {"4": _TO_NF4}, _NO_8_BIT)),
        "adapters": ("lora.adapter", None, _first_adapter),
    },
    "torchtune": {
        "batch_size": (_MICRO_BATCH, None),
        "epochs": ("training.num_train_epochs", None),
        "max_steps_per_epoch": (
            "training.max_steps",
            None,
            _ask(
                "write `training: {{max_steps: {value}}}` for one epoch; for several, {value} × "
                "epochs: it counts all steps of the run"
            ),
        ),
        "clip_grad_norm": ("training.max_grad_norm", None),
        "enable_activation_checkpointing": (
            _RECOMPUTE,
            "fsdp: {activation_checkpointing: full}",
            _switch(_RECOMPUTE, "full"),
        ),
        "fsdp_cpu_offload": ("fsdp.offload_params", None),
        "fsdp_reshard_after_forward": ("fsdp.reshard_after_forward", None),
        "log_every_n_steps": ("training.logging_steps", None),
        "max_seq_len": ("data.max_length", None),
        "packed": ("data.packing", None),
        "lora_attn_modules": (
            "lora.target_modules",
            "lora: {target_modules: [q_proj, v_proj]}",
            _as("lora.target_modules", _names),
        ),
        "apply_lora_to_mlp": ("lora.target_modules", _LINEAR, _switch("lora.target_modules", "all-linear")),
        "apply_lora_to_output": (
            "lora.target_modules",
            "lora: {target_modules: [q_proj, v_proj, lm_head]}",
            _switch("lora.target_modules", ["q_proj", "v_proj", "lm_head"]),
        ),
        "save_adapter_weights_only": (
            "merge.adapter",
            "merge: {adapter: adapter}",
            _switch("merge.adapter", "adapter", "both"),
        ),
        "quantize_base": ("quantization.load", _NF4, _switch("quantization.load", _TO_NF4)),
        "checkpointer": ("model.name_or_path", None),
    },
    "Accelerate": dict.fromkeys(
        (
            *(
                "compute_environment",
                "distributed_type",
                "downcast_bf16",
                "machine_rank",
                "main_training_function",
                "rdzv_backend",
            ),
            *("same_network", "tpu_env", "tpu_use_cluster", "tpu_use_sudo"),
        ),
        ("launch", None, Drop("`fsdp-tune train` starts the ranks")),
    ),
    None: {
        **dict.fromkeys(("lora_r", "lora_rank", "rank"), ("lora.r", None)),
        "lora_target_modules": ("lora.target_modules", None, _targets),
        "lora_modules_to_save": ("lora.modules_to_save", None, _as("lora.modules_to_save", _names)),
        **dict.fromkeys(
            ("trainable_token_indices", "peft_trainable_token_indices"),
            ("lora.modules_to_save", "lora: {modules_to_save: [embed_tokens, lm_head]}", _ask(_WHOLE_TABLES)),
        ),
        "loraplus_lr_ratio": ("lora.loraplus_lr_ratio", None),
        "load_in_4bit": ("quantization.load", _NF4, _switch("quantization.load", _TO_NF4)),
        "bnb_4bit_use_double_quant": (
            "quantization.scales",
            _SMALL_SCALES,
            _switch("quantization.scales", _TO_SMALL_SCALES),
        ),
        "lora_target_parameters": ("lora.target_parameters", None, _as("lora.target_parameters", _names)),
        **dict.fromkeys(("num_gpus", "n_gpus", "gpus", "world_size"), ("launch.num_processes", None)),
        "devices": (
            "launch.num_processes",
            None,
            _as("launch.num_processes", lambda value: len(value) if is_list(value) else value),
        ),
        "nproc_per_node": ("launch.num_processes", None, _ask(_RANKS)),
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
            (_MICRO_BATCH, None),
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
            ("data.train", _TRAIN, _as("data.train", _sources)),
        ),
        **dict.fromkeys(
            ("eval_file", "validation_file", "val_file"),
            ("data.eval", "data: {eval: [{path: NAME}]}", _as("data.eval", _sources)),
        ),
        "test_size": ("data.eval", _HELD_OUT, _held_out),
        **dict.fromkeys(("save_dir", "out_dir", "output_path", "checkpoint_dir"), ("output_dir", None)),
        **dict.fromkeys(("rope_scaling", "rope_parameters"), ("model.rope_scaling", _YARN)),
        **dict.fromkeys(("experiment_name", "wandb_name", "wandb_run_name"), ("name", None)),
        **dict.fromkeys(
            ("mixed_precision_dtype", "amp"),
            ("precision.mixed_precision", None, _cases("precision.mixed_precision", _DTYPES, _NO_DTYPE)),
        ),
        **dict.fromkeys(
            ("zero_stage", "sharding"),
            ("fsdp.sharding_strategy", None, _cases("fsdp.sharding_strategy", _STAGES, _NO_STAGE)),
        ),
        "wandb": (
            "training.report_to",
            "training: {report_to: [wandb]}",
            _switch("training.report_to", ["wandb"]),
        ),
        **dict.fromkeys(
            ("logger", "loggers", "tracker"), ("training.report_to", None, _as("training.report_to", _names))
        ),
        **{
            f"wandb_{name}": ("launch.env", f"launch: {{env: {{WANDB_{name.upper()}: …}}}}", _tracker(name))
            for name in ("project", "entity", "mode")
        },
    },
}


def _synonym(tool: str | None, row: _Row) -> Synonym:
    return Synonym(tool, row[0], row[1], row[2] if len(row) == 3 else None)


SYNONYMS = {name: _synonym(tool, row) for tool, names in _BY_TOOL.items() for name, row in names.items()}
OF_A_SOURCE = {
    "type": Synonym("axolotl", "data.train.format", None, _formats),
    "ds_type": Synonym("axolotl", "data.train.path", None, _as_builder),
    "field_messages": Synonym("axolotl", "data.train.rename_columns", None, _column("messages")),
    "field_instruction": Synonym("axolotl", "data.train.rename_columns", None, _column("instruction")),
    "field_input": Synonym("axolotl", "data.train.rename_columns", None, _column("input")),
    "field_output": Synonym("axolotl", "data.train.rename_columns", None, _column("output")),
    "field": Synonym("axolotl", "data.train.rename_columns", None, _column("text")),
    "subset": Synonym("LLaMA-Factory", "data.train.name", None, _source("name")),
    "num_samples": Synonym("LLaMA-Factory", "data.train.max_rows", None, _source("max_rows")),
    "file_name": Synonym("LLaMA-Factory", "data.train.path", None, _source("path")),
    "hf_hub_url": Synonym("LLaMA-Factory", "data.train.path", None, _source("path")),
}
"""Names inside an entry of a list of data sets, which mean something else outside of it."""


def synonym_hint(name: str, value: Any = None, *, in_source: bool = False) -> str | None:
    """Return a hint for a key of another trainer: the key of the recipe, and what to write for `value`. None:
    the name is not known."""
    found = (OF_A_SOURCE.get(name.lower()) if in_source else None) or SYNONYMS.get(name.lower())
    return found.hint(printable(name), value) if found is not None else None
