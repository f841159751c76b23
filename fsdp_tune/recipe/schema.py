"""Every key of a recipe, its type, default and meaning. Torch-free; the docstring under a key is its documentation.

`null` and `auto` are decided later and in one place (`recipe.resolve`); nothing else writes a recipe. Values that
follow from several keys are properties of `Recipe`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

Auto = Literal["auto"]
Device = Literal["auto", "cuda", "xpu", "npu", "mps", "cpu"]
Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
DataFormat = Literal["auto", "text", "prompt_completion", "alpaca", "messages", "sharegpt", "tokenized"]
LossOn = Literal["auto", "all", "completion", "assistant", "last_assistant"]
ShardingStrategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "NO_SHARD"]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class Tokens(Section):
    pad: str | None = None
    """Padding token; null = the tokenizer's, else one is chosen and said. Never trained."""
    eos: str | None = None
    """End-of-sequence token; null = the tokenizer's. Goes into generation_config too."""
    add: list[str] = []
    """Tokens to add; resizes the embedding."""


class Model(Section):
    name_or_path: str | None = None
    """Hub id, HF directory, RUN, or RUN/checkpoint-N (weights only). Required unless `from_config` is given."""
    revision: str = "main"
    """Branch, tag or commit; resolved once to a commit, recorded, the same on all ranks and on resume."""
    tokenizer: str | None = None
    """Hub id, directory or `builtin:NAME`; null = `name_or_path`."""
    tokenizer_revision: str | None = None
    """null = `revision` when the repository is the same, else main."""
    from_config: str | dict[str, Any] | None = None
    """A config.json, or the mapping inline (`{model_type: llama, hidden_size: 512}`): random weights."""
    config_overrides: dict[str, Any] = {}
    """Fields of the model's config class to change, checked against the class."""
    trust_remote_code: bool = False
    """Runs Python from the model's repository. Honoured only together with `--trust-remote-code`."""
    resize_embeddings: bool = False
    """A tokenizer larger than the embedding is an error; true grows the embedding instead."""
    attn_implementation: str = "auto"
    """Attention kernel, by transformers' names."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Storage of TRAINED parameters: fp32 master weights, or pure bf16 (half the memory, small updates are lost)."""
    frozen_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Storage of UNTRAINED parameters; auto = the compute dtype."""
    freeze: list[str] = []
    """Patterns of parameter names that are not trained."""
    tokens: Tokens = Tokens()


class DataSource(Section):
    path: str
    """What exists on disk is local; json | parquet | csv | text | arrow is a builder for `data_files`; else a hub id; `builtin:NAME` is made by the package."""
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | None = None
    split: str = "train"
    revision: str | None = None
    columns: list[str] | None = None
    """Columns to keep, as in TRL."""
    rename_columns: dict[str, str] = {}
    """{old: new}, as in datasets."""
    format: DataFormat | None = None
    loss_on: LossOn | None = None
    chat_template: str | None = None
    weight: PositiveFloat | None = None
    """Share of rows drawn from this source; absent = by size."""
    max_rows: PositiveInt | None = None
    label: str | None = None
    """Name of the set in reports and in `eval_<label>_loss`."""


class EvalFraction(Section):
    fraction: Fraction
    """Share of the training rows held out, chosen by row hash, before packing."""


class EvalRows(Section):
    rows: PositiveInt
    """Rows held out, chosen by row hash, before packing."""


class Mixture(Section):
    temperature: PositiveFloat = 1.0
    stopping_strategy: Literal["all_exhausted", "first_exhausted"] = "all_exhausted"


class Data(Section):
    train: list[DataSource] = []
    eval: EvalFraction | EvalRows | list[DataSource] | None = None
    """{fraction: 0.01} | {rows: 500} | a list, each entry a set of its own, named by label."""
    format: DataFormat = "auto"
    loss_on: LossOn = "auto"
    """Which tokens are trained; auto: text all, prompt_completion and alpaca completion, chats assistant."""
    chat_template: str | None = None
    """null = the tokenizer's | bundled name | file.jinja | hub id; chats with none are an error."""
    max_length: PositiveInt = 2048
    """Tokens of one row; longer rows follow `overlong`."""
    overlong: Literal["auto", "truncate", "drop", "split", "error"] = "auto"
    packing: bool = False
    """Joins examples into rows of `max_length`; no token attends across examples."""
    packing_strategy: Literal["bfd", "wrapped"] = "bfd"
    eval_packing: bool | None = None
    separator: str = ""
    """Stands between prompt and completion."""
    append_eos: bool | Auto = "auto"
    streaming: bool = False
    shuffle: bool = True
    shuffle_buffer_size: PositiveInt = 10000
    mixture: Mixture = Mixture()
    pad_to_multiple_of: PositiveInt = 8
    on_bad_row: Literal["error", "skip"] = "error"
    num_proc: PositiveInt | Auto = "auto"
    cache_dir: str | None = None


class Parallelism(Section):
    dp_replicate_size: PositiveInt | Auto = "auto"
    """Copies of the sharded model (HYBRID_SHARD); auto: one per machine, two on a single machine."""
    dp_shard_size: PositiveInt | Auto = "auto"
    """Ranks that share one copy; auto: the ranks of a machine under HYBRID_SHARD, else all."""
    tp_size: PositiveInt = 1
    cp_size: PositiveInt = 1
    sp_size: PositiveInt = 1


class Fsdp(Section):
    version: Literal[1, 2] = 2
    sharding_strategy: ShardingStrategy = "FULL_SHARD"
    """FULL_SHARD (ZeRO-3) | SHARD_GRAD_OP (ZeRO-2) | HYBRID_SHARD | HYBRID_SHARD_ZERO2 | NO_SHARD (plain DDP)."""
    reshard_after_forward: bool | PositiveInt | None = None
    """null = from the strategy; must agree with it."""
    auto_wrap_policy: Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "MODULE_NAMES_WRAP", "NO_WRAP"] = "TRANSFORMER_BASED_WRAP"
    transformer_layer_cls_to_wrap: str | list[str] | None = None
    """Class names of the decoder layers; null = found from the model."""
    min_num_params: PositiveInt | Auto = "auto"
    """SIZE_BASED_WRAP: smallest unit, in parameters; auto = half of one decoder layer."""
    modules_to_wrap: list[str] = []
    """MODULE_NAMES_WRAP: patterns of module names; one that matches nothing is an error."""
    ignored_modules: str | None = None
    """Regular expression of module names that FSDP leaves alone, as in Accelerate."""
    activation_checkpointing: Literal["none", "selective", "full", "auto"] | bool = "none"
    activation_checkpointing_every: PositiveInt = 1
    """Recompute every n-th decoder layer."""
    activation_checkpointing_offload: bool = False
    offload_params: bool = False
    """Keeps parameters, gradients and optimizer state in host memory."""
    forward_prefetch: bool | PositiveInt = False
    """true | units ahead."""
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"] | PositiveInt = "BACKWARD_PRE"
    sync_each_batch: bool = True
    """Reduce-scatter after every micro-batch; false keeps unsharded gradients between micro-batches."""
    state_dict_type: Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"] = "SHARDED_STATE_DICT"
    cpu_ram_efficient_loading: bool = True
    """Rank 0 alone reads the weights and sends each rank its shard."""


class Precision(Section):
    mixed_precision: Literal["no", "fp16", "bf16", "fp8"] = "bf16"
    """Compute dtype; no = fp32. The YAML boolean `no` is taken too."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """dtype in which gradients are summed over ranks."""
    fp8_recipe: Literal["rowwise", "tensorwise"] = "rowwise"


class EarlyStopping(Section):
    patience: PositiveInt = 3
    threshold: NonNegativeFloat = 0.0


class Training(Section):
    """TrainingArguments by their own names; those not listed here pass with transformers' default (`extra`)."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, use_attribute_docstrings=True)

    global_batch_size: PositiveInt | None = None
    """Sequences per optimizer step (a packed row is one); gives gradient_accumulation_steps."""
    per_device_train_batch_size: PositiveInt = 1
    per_device_eval_batch_size: PositiveInt | None = None
    gradient_accumulation_steps: PositiveInt | None = None
    learning_rate: NonNegativeFloat = 2.0e-5
    warmup_steps: NonNegativeFloat = 0
    """Steps, or a share of all steps when below 1."""
    logging_steps: PositiveInt = 10
    eval_strategy: Literal["auto", "no", "steps", "epoch"] = "auto"
    save_steps: PositiveInt | Fraction = 500
    save_total_limit: PositiveInt | None = 2
    """Complete checkpoints to keep; the newest and the best are never deleted."""
    report_to: list[str] = ["tensorboard"]
    seed: NonNegativeInt = 42
    data_seed: NonNegativeInt | None = None
    push_to_hub: bool = False
    on_nonfinite: Literal["stop", "skip"] = "stop"
    early_stopping: EarlyStopping | None = None


class Kernels(Section):
    loss: Literal["auto", "full", "chunked", "liger"] = "auto"
    liger: bool | Auto = "auto"
    compile: bool = False


class CheckpointSection(Section):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, validate_by_name=True, validate_by_alias=True)

    async_: bool = Field(default=True, alias="async")
    verify: Literal["digest", "size"] = "digest"
    probe: bool = True
    save_failure: Literal["warn", "stop"] = "warn"
    mirror: str | None = None


class Launch(Section):
    num_machines: PositiveInt = 1
    num_processes: PositiveInt | Auto = "auto"
    """TOTAL over machines, as in accelerate; auto = visible devices × num_machines."""
    device: Device = "auto"
    """auto NEVER falls to cpu: that must be written."""
    num_cpu_threads_per_process: PositiveInt | Auto = "auto"
    main_process_ip: str | None = None
    main_process_port: PositiveInt | Auto = "auto"
    env: dict[str, str] = {}
    max_restarts: NonNegativeInt = 0
    max_runtime: str | None = None
    hang_timeout: str = "30m"


class Merge(Section):
    at_end: bool = True
    dtype: Literal["auto", "keep", "bf16", "fp16", "fp32"] = "auto"
    max_shard_size: str = "5GB"
    adapter: Literal["merged", "adapter", "both"] = "both"
    verify: Literal["quick", "full", "none"] = "quick"


class Recipe(Section):
    recipe_version: Literal[1] = 1
    name: str | None = None
    """null = the file's stem."""
    output_dir: str = "runs/{name}"
    """Only {name} and {seed} are filled in; relative to where the command is run."""
    model: Model = Model()
    data: Data = Data()
    parallelism: Parallelism = Parallelism()
    fsdp: Fsdp = Fsdp()
    precision: Precision = Precision()
    training: Training = Training()
    lora: dict[str, Any] | None = None
    quantization: dict[str, Any] | None = None
    kernels: Kernels = Kernels()
    checkpoint: CheckpointSection = CheckpointSection()
    launch: Launch = Launch()
    merge: Merge = Merge()
