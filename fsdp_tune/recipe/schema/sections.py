"""The sections of a recipe but for `data:` and `training:`: model, LoRA, quantization, kernels, checkpoint,
launch, merge."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from fsdp_tune.core.command import BaseWeights, MergeCheck, MergedDtype
from fsdp_tune.recipe.schema.key_effects import (
    DATA,
    FREE,
    MEMORY,
    NOTHING,
    NUMBERS,
    REFUSED,
    RESULT,
    TIME,
    TRAJECTORY,
    Effect,
)
from fsdp_tune.recipe.schema.value_kinds import (
    AboveOne,
    Auto,
    Description,
    Device,
    Duration,
    Port,
    Positive,
    Section,
    Size,
    Text,
    Whole,
    WholeOrZero,
)

# ruff: noqa: RUF012  pydantic copies a default for each instance, and ours are frozen


class Tokens(Section):
    default_effect = Effect(DATA | MEMORY | TIME | NUMBERS, REFUSED)

    pad: Text | None = None
    """Padding token; null = the tokenizer's, else one is chosen and reported. Never trained."""
    eos: Text | None = None
    """End-of-sequence token; null = the tokenizer's. Also written to generation_config."""
    add: list[Text] = []
    """Special tokens to add, for the chat template or the rows; resizes the embedding."""


_ROPE_FIELDS = {
    "linear": (),
    "dynamic": (),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "llama3": ("low_freq_factor", "high_freq_factor"),
}
"""The optional fields of each `rope_type`, as in transformers' `modeling_rope_utils.py`."""


class RopeScaling(Section):
    """Fields of transformers' `rope_parameters`, by the same names."""

    default_effect = Effect(MEMORY | TIME | NUMBERS, REFUSED)

    rope_type: Literal["linear", "dynamic", "yarn", "llama3"]
    """Formula of the stretched frequencies, as in transformers."""
    factor: AboveOne
    """Longest row after scaling, as a multiple of `original_max_position_embeddings`."""
    original_max_position_embeddings: Whole | None = None
    """Positions before scaling; null = those of the model's configuration."""
    attention_factor: Positive | None = None
    """yarn: scale of the rotary embeddings; null = 0.1 · ln(factor) + 1."""
    beta_fast: Positive | None = None
    """yarn: frequencies with more rotations than this are kept; null = 32."""
    beta_slow: Positive | None = None
    """yarn: frequencies with fewer rotations than this are divided by `factor`; null = 1."""
    mscale: Positive | None = None
    """yarn: `attention_factor` is computed from it together with `mscale_all_dim` (DeepSeek)."""
    mscale_all_dim: Positive | None = None
    """yarn: see `mscale`."""
    truncate: bool | None = None
    """yarn: round the range between `beta_fast` and `beta_slow` to whole dimensions; null = true."""
    low_freq_factor: Positive | None = None
    """llama3: wavelengths above original / low_freq_factor are stretched by `factor`; null = 1."""
    high_freq_factor: Positive | None = None
    """llama3: wavelengths below original / high_freq_factor are kept; null = 4."""
    layer_types: list[Text] | None = None
    """Types of layers to scale, for models with frequencies by type (gemma3); null = full_attention."""
    replace_existing: bool = False
    """true: replace a scaling that the model's configuration has; false: another scaling there is an
    error."""

    @property
    def unused(self) -> list[str]:
        """Names of the fields that are set and that `rope_type` does not read."""
        fields = {name for names in _ROPE_FIELDS.values() for name in names} - set(
            _ROPE_FIELDS[self.rope_type]
        )
        return sorted(name for name in fields if getattr(self, name) is not None)

    def parameters(self, original: int) -> dict[str, object]:
        """Return the fields for `rope_parameters`. `original` is the number of positions before scaling."""
        fields: dict[str, object] = {"rope_type": self.rope_type, "factor": self.factor}
        if self.rope_type in ("yarn", "llama3"):
            fields["original_max_position_embeddings"] = original
        if self.rope_type == "llama3":
            fields |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        return fields | {
            name: value for name in _ROPE_FIELDS[self.rope_type] if (value := getattr(self, name)) is not None
        }


class Model(Section):
    default_effect = Effect(MEMORY | TIME | NUMBERS, REFUSED)

    name_or_path: Annotated[Text | None, Effect(DATA | MEMORY | TIME | NUMBERS, REFUSED)] = None
    """Hub id, HF directory, RUN, or RUN/checkpoint-N (weights only). Required unless `from_config` is
    given."""
    revision: Annotated[Text, Effect(DATA | MEMORY | TIME | NUMBERS, REFUSED)] = "main"
    """Branch, tag or commit; resolved once to a commit, recorded, the same on all ranks and on resume."""
    tokenizer: Annotated[Text | None, Effect(DATA | MEMORY | TIME | NUMBERS, REFUSED)] = None
    """Hub id, directory or `builtin:NAME`; null = `name_or_path`."""
    tokenizer_revision: Annotated[Text | None, Effect(DATA | MEMORY | TIME | NUMBERS, REFUSED)] = None
    """null = `revision` when the repository is the same, else main."""
    from_config: Text | dict[str, Any] | None = None
    """A config.json, or the mapping inline (`{model_type: llama, hidden_size: 512}`): random weights."""
    config_overrides: dict[str, Any] = {}
    """Fields of the model's config class to change (`{attention_dropout: 0.0}`), checked against the
    class."""
    rope_scaling: RopeScaling | None = None
    """Stretch the rotary positions (`{rope_type: yarn, factor: 4.0}`), by transformers' names; also written
    to the merged config.json."""
    trust_remote_code: Annotated[bool, Effect(MEMORY | TIME | NUMBERS, FREE)] = False
    """Run Python code from the model's repository. Takes effect only together with `--trust-remote-code`."""
    resize_embeddings: bool = False
    """true: grow the embedding to a larger tokenizer; false: a larger tokenizer is an error."""
    attn_implementation: Annotated[Text, Effect(MEMORY | TIME, FREE)] = "auto"
    """Attention kernel, by transformers' names (sdpa, eager, flash_attention_2 …), torch_varlen (for packed
    rows), or sdpa_or_eager."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Storage dtype of trained parameters: fp32 master weights, or bf16: half the memory, small updates are
    lost (notice `pure-bf16`)."""
    frozen_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Storage dtype of frozen matrices; auto = the compute dtype, with FSDP1 `dtype`. Other frozen parameters
    are stored in `dtype`."""
    freeze: list[Text] = []
    """Name patterns of parameters that are not trained."""
    leave_out: Annotated[list[Text], Effect(RESULT, REFUSED)] = []
    """Parts of the base that are neither trained nor written into the merged model (`[mtp, visual]`). Others
    are written unchanged."""
    tokens: Tokens = Tokens()

    @property
    def grows_embedding(self) -> bool:
        """Whether a tokenizer larger than the embedding grows it."""
        return self.resize_embeddings or bool(self.tokens.add)


Rate = Annotated[
    float, Field(ge=0.0, lt=1.0, allow_inf_nan=False), Description("a number, 0 or more and below 1")
]


_NOT_EMULATED = {
    "fp8-int4": "torchao 0.18 rounds the gradients of its fp8 emulation to e4m3, where almost all are zero",
    "nvfp4": "torchao 0.18 does not emulate NVFP4: its layers multiply on Blackwell alone, and give "
    "biases no "
    "gradient",
}
"""Trainings of torchao that would not train what the converted model computes, with the reason."""


def _emulated(value: object) -> object:
    if isinstance(value, str) and value in _NOT_EMULATED:
        raise ValueError(f"`{value}` is not supported: {_NOT_EMULATED[value]}")
    return value


class Quantization(Section):
    default_effect = Effect(MEMORY | TIME | NUMBERS, REFUSED)

    load: Literal["nf4"] | None = "nf4"
    """nf4 = hold frozen weights in 4-bit NormalFloat in blocks of 64, as QLoRA and bitsandbytes do | null,
    the default with `train`."""
    scales: Literal["fp32", "bf16"] = "fp32"
    """dtype of the scale of a block: fp32 = bitsandbytes' values, 4.5 bits a weight | bf16 = 4.25 bits a
    weight."""
    train: Annotated[Literal["int4", "int8-int4"] | None, BeforeValidator(_emulated)] = None
    """Quantisation-aware training with emulated rounding: int4 = of weights, int8-int4 = also of inputs, to
    int8. Needs torchao."""
    group_size: Whole = 32
    """Weights of a row that share a scale under `train`; divides the inputs of each quantised layer."""
    modules_to_not_convert: list[Text] = []
    """Patterns of names of modules that `train` leaves as they are; one that matches no linear layer is an
    error."""

    @model_validator(mode="after")
    def _train_holds_nothing(self) -> Quantization:
        """Give `load` its default with `train`, which trains the weights that `load` would freeze."""
        if self.train is not None and "load" not in self.model_fields_set:
            object.__setattr__(self, "load", None)  # sections are frozen
        return self


class Lora(Section):
    default_effect = Effect(MEMORY | TIME | NUMBERS, REFUSED)

    r: Whole = 16
    """Rank of the adapters."""
    lora_alpha: Annotated[Positive, Effect(NUMBERS, REFUSED)] = 32.0
    """Scale: an adapter adds lora_alpha / r times B·A to its weight. `alpha` is accepted too."""
    lora_dropout: Rate = 0.0
    """Dropout of an adapter's input. `dropout` is accepted too."""
    target_modules: Text | list[Text] = "all-linear"
    """all-linear = every linear layer except the head | names of modules, by their last parts | a regular
    expression for full names."""
    target_parameters: list[Text] = []
    """Names of parameters that stack the matrices of experts, by their last parts, such as
    `mlp.experts.gate_up_proj`."""
    layers_to_transform: list[WholeOrZero] | None = None
    """Indexes of the decoder layers that get adapters; null = all."""
    rank_pattern: dict[str, Whole] = {}
    """{pattern of module names: rank} for modules whose rank is not `r`, as in PEFT."""
    alpha_pattern: Annotated[dict[str, Positive], Effect(NUMBERS, REFUSED)] = {}
    """{pattern of module names: lora_alpha}, as in PEFT."""
    modules_to_save: list[Text] = []
    """Names of modules that are trained in full and saved with the adapter, such as `lm_head`."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Biases that are trained: none, all of the model, or those of the adapted layers."""
    use_rslora: Annotated[bool, Effect(NUMBERS, REFUSED)] = False
    """Scale by lora_alpha / √r (rank-stabilised LoRA, arXiv:2312.03732)."""
    use_dora: bool = False
    """Train the length of each row of a weight apart from its direction (DoRA, arXiv:2402.09353)."""
    init_lora_weights: Annotated[bool | Text, Effect(NUMBERS, REFUSED)] = True
    """true: A uniform as a linear layer's, B zero | gaussian: A normal, B zero | false: B as A, so that the
    model starts changed."""
    loraplus_lr_ratio: Annotated[Positive, Effect(NUMBERS, TRAJECTORY)] = 1.0
    """Learning rate of B over that of A (LoRA+, arXiv:2402.12354)."""
    adapter: Annotated[Text | None, Effect(NUMBERS, REFUSED)] = None
    """Directory of a PEFT adapter, or RUN, whose training continues and whose values unset keys of `lora:`
    take; null = new adapters."""

    @model_validator(mode="before")
    @classmethod
    def _rename_lr_ratio(cls, values: object) -> object:
        """Accept the name that recipe.json of a run of version 0.1 has, so that the run can be resumed."""
        if isinstance(values, dict) and "lr_ratio" in values and "loraplus_lr_ratio" not in values:
            renamed = dict(cast("dict[str, object]", values))
            return renamed | {"loraplus_lr_ratio": renamed.pop("lr_ratio")}
        return cast(Any, values)


# ruff: noqa: RUF012  pydantic copies a default for each instance, and ours are frozen


class Kernels(Section):
    default_effect = Effect(MEMORY | TIME, FREE)

    loss: Literal["auto", "full", "chunked", "liger"] = "auto"
    """full holds the logits, tokens × vocabulary; chunked and liger do not; auto = chunked where they exceed
    512 MiB in fp32."""
    liger: bool | Auto = "auto"
    """Liger's kernels for norms, rotary embeddings and gated MLPs; auto = on CUDA, where liger-kernel is
    installed."""
    compile: bool = False
    """Compile each decoder layer separately with torch.compile; FSDP2 and DDP."""
    experts: Literal["auto", "grouped_mm", "batched_mm", "eager", "sonicmoe"] = "auto"
    """transformers' `experts_implementation`; auto = its own choice: grouped_mm, or eager for classes that
    have no other."""
    mlp_slice_tokens: Whole | None = None
    """Tokens of each row for which a decoder layer's MLP is computed at a time, so that its inner activations
    are small; null = all."""


class Extensions(Section):
    callbacks: Annotated[list[Text], Effect(NUMBERS, TRAJECTORY)] = []
    """Entry points of the group `fsdp_tune.callbacks`, called by the Trainer on every rank. Only together
    with `--allow-extensions`."""
    metrics: Annotated[list[Text], Effect(MEMORY, FREE)] = []
    """Entry points of the group `fsdp_tune.metrics`, computed with each evaluation. Only together with
    `--allow-extensions`."""


class CheckpointSection(Section):
    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    async_: Annotated[bool, Effect(MEMORY | TIME, FREE)] = Field(default=True, alias="async")
    """Continue training while the checkpoint is written."""
    verify: Annotated[Literal["digest", "size"], Effect(NOTHING, FREE)] = "digest"
    """How a checkpoint's files are checked before they are used: by digest, or by size alone."""
    probe: Annotated[bool, Effect(MEMORY, FREE)] = True
    """Save a complete checkpoint after step 1, read it back and remove it."""
    save_failure: Annotated[Literal["warn", "stop"], Effect(NOTHING, FREE)] = "warn"
    """Effect of a failed save: the run warns and continues, or stops."""
    mirror: Annotated[Text | None, Effect(NOTHING, FREE)] = None
    """URL (s3, gs, az, file) below which `RUN NAME/` gets copies of complete checkpoints and models, in the
    background."""


class Launch(Section):
    num_machines: Annotated[Whole, Effect(MEMORY | TIME, FREE)] = 1
    """Machines (nodes)."""
    num_processes: Annotated[Whole | Auto, Effect(MEMORY | TIME, FREE)] = "auto"
    """TOTAL over machines, as in accelerate; auto = visible devices × num_machines."""
    device: Annotated[Device, Effect(MEMORY | TIME, FREE)] = "auto"
    """cuda | xpu | npu | mps | cpu; auto never selects cpu, which must be written. xpu and npu are tested
    with simulated devices only."""
    num_cpu_threads_per_process: Annotated[Whole | Auto, Effect(TIME, FREE)] = "auto"
    """auto = cores / local ranks."""
    enable_cpu_affinity: Annotated[bool, Effect(TIME, FREE)] = False
    """Bind each rank to the cores nearest to its GPU (NUMA), as in accelerate; CUDA, with nvidia-ml-py
    installed."""
    main_process_ip: Annotated[Text | None, Effect(NOTHING, FREE)] = None
    """Address of machine 0; null = the address from Slurm or Kubernetes."""
    main_process_port: Annotated[Port | Auto, Effect(NOTHING, FREE)] = "auto"
    """auto = a free port; 29500 for several machines, which must agree on one."""
    env: Annotated[dict[str, str], Effect(MEMORY | TIME | RESULT, FREE)] = {}
    """Extra variables for ranks (NCCL_SOCKET_IFNAME: ib0); those that can run code need `--allow-env NAME`;
    secrets are refused."""
    shared_directory: Annotated[bool, Effect(NOTHING, FREE)] = True
    """Whether all machines see one `output_dir`; false = each has its own, with its ranks' part of every
    checkpoint."""
    max_restarts: Annotated[WholeOrZero, Effect(NOTHING, FREE)] = 0
    """Restarts after a failure."""
    min_machines: Annotated[Whole | None, Effect(NOTHING, FREE)] = None
    """Fewest machines on which a restart continues when others are lost, with the same global batch; null =
    all."""
    replacement_timeout: Annotated[Duration, Effect(NOTHING, FREE)] = "5m"
    """With min_machines, time for which a launch waits for a missing machine or its replacement before it
    starts on fewer."""
    max_runtime: Annotated[Duration | None, Effect(NOTHING, FREE)] = None
    """Time limit from the start of the launcher, saving included (11h30m)."""
    hang_timeout: Annotated[Duration, Effect(NOTHING, FREE)] = "30m"
    """Time without progress after which the run ends."""


class Merge(Section):
    default_effect = Effect(NOTHING, FREE)

    at_end: bool = True
    """Merge the last checkpoint (the best with training.load_best_model_at_end) into RUN/merged when the run
    has finished."""
    dtype: Annotated[Auto | MergedDtype, Effect(RESULT, FREE)] = "auto"
    """dtype of the merged weights; auto = the compute dtype (bf16 by default, also from fp32 master weights);
    keep = as stored."""
    max_shard_size: Size = "5GB"
    """Largest safetensors file."""
    adapter: Literal["merged", "adapter", "both"] = "both"
    """Output of a LoRA run: merged weights, the adapter, or both."""
    base: Annotated[BaseWeights, Effect(RESULT, FREE)] = "trained"
    """Weights under a merged QLoRA adapter: as they were trained, from 4 bits, or the original ones, which
    are another model."""
    verify: MergeCheck = "quick"
    """How the merged directory is checked."""
    quantise: Annotated[bool, Effect(RESULT, FREE)] = False
    """Also write the model that `quantization.train` emulates, into RUN/merged-quantised, as transformers
    loads it with torchao."""
