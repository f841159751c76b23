"""Every key of a recipe, with type, default and meaning. Free of torch; the docstring under a key is its
documentation.

`recipe.resolve` decides `null` and `auto` later; no other code changes a recipe. Values that follow from
several keys are properties of `Recipe`.
"""

# ruff: noqa: RUF012  pydantic copies a default for each instance, and ours are frozen

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, cast

from pydantic import ConfigDict

from fsdp_tune.core.topology import DIMENSIONS, Topology
from fsdp_tune.recipe.schema.data_section import Data, DataSource, EvalFraction, EvalRows, Mixture
from fsdp_tune.recipe.schema.evaluation import CheckpointEvaluation
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
from fsdp_tune.recipe.schema.row_formats import DataFormat
from fsdp_tune.recipe.schema.sections import (
    CheckpointSection,
    Extensions,
    Kernels,
    Launch,
    Lora,
    Merge,
    Model,
    Quantization,
    Tokens,
)
from fsdp_tune.recipe.schema.strategies import STRATEGIES, ShardingStrategy
from fsdp_tune.recipe.schema.value_kinds import (
    Auto,
    Device,
    Fraction,
    FsdpVersion,
    LossOn,
    Positive,
    PositiveOrZero,
    RecipeVersion,
    RegularExpression,
    RunName,
    Section,
    Text,
    Whole,
    WholeOrZero,
)

__all__ = [
    "CheckpointSection",
    "Data",
    "DataFormat",
    "DataSource",
    "Device",
    "EarlyStopping",
    "EvalFraction",
    "EvalRows",
    "Extensions",
    "Fsdp",
    "Kernels",
    "Launch",
    "Lora",
    "LossOn",
    "Merge",
    "Mixture",
    "Model",
    "Parallelism",
    "ParameterGroup",
    "Positive",
    "Precision",
    "Quantization",
    "Recipe",
    "Section",
    "ShardingStrategy",
    "Tokens",
    "Training",
]

ComputeDtype = Literal["fp32", "bf16", "fp16"]


class Parallelism(Section):
    default_effect = Effect(MEMORY | TIME, FREE)

    dp_replicate_size: Whole | Auto = "auto"
    """Replicas of the sharded model (HYBRID_SHARD); auto: one per machine, two on a single machine."""
    dp_shard_size: Whole | Auto = "auto"
    """Ranks that share one replica, divided by `sp_size`; auto: the ranks of a machine under HYBRID_SHARD,
    else all."""
    tp_size: Whole = 1
    """Tensor parallel ranks."""
    cp_size: Whole = 1
    """Context parallel ranks."""
    sp_size: Whole = 1
    """Ranks that share each row (Ulysses): each has a part of its tokens in all layers, and a part of the
    heads in attention."""

    @property
    def of_row(self) -> Topology:
        """The ranks that share one row, along the dimensions whose size is never `auto`."""
        return Topology(
            **{name: getattr(self, each.key) for name, each in DIMENSIONS.items() if not each.has_own_rows}
        )


class Fsdp(Section):
    default_effect = Effect(MEMORY | TIME, FREE)

    version: FsdpVersion = 2
    """FSDP2 (`fully_shard`), or the deprecated FSDP1."""
    sharding_strategy: ShardingStrategy = "FULL_SHARD"
    """FULL_SHARD (ZeRO-3) | SHARD_GRAD_OP (ZeRO-2) | HYBRID_SHARD | HYBRID_SHARD_ZERO2 | NO_SHARD (plain
    DDP)."""
    reshard_after_forward: bool | Whole | None = None
    """null = from the strategy; true | false | ranks; must agree with it."""
    reshard_after_backward: bool | Auto = True
    """false: free gathered parameters only after the last micro-batch of a step: fewer gathers, more memory;
    auto = false if it fits."""
    auto_wrap_policy: Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "MODULE_NAMES_WRAP", "NO_WRAP"] = (
        "TRANSFORMER_BASED_WRAP"
    )
    """FSDP units: decoder layers, modules by size, modules by name, or the root alone."""
    transformer_layer_cls_to_wrap: Text | list[Text] | None = None
    """Class names of the decoder layers; null = detected from the model."""
    min_num_params: Whole | Auto = "auto"
    """SIZE_BASED_WRAP: smallest unit, in parameters; auto = half of one decoder layer."""
    modules_to_wrap: list[Text] = []
    """MODULE_NAMES_WRAP: patterns of module names; one that matches nothing is an error."""
    ignored_modules: RegularExpression | None = None
    """Regular expression of the names of modules that FSDP does not shard, as in Accelerate."""
    activation_checkpointing: Literal["none", "selective", "full", "auto"] = "none"
    """Recompute decoder layers in the backward pass: a third more compute, far less memory; auto = the
    cheapest that fits."""
    activation_checkpointing_every: Whole = 1
    """Recompute every n-th decoder layer."""
    activation_checkpointing_offload: bool = False
    """Keep the inputs of recomputed layers in host memory."""
    offload_params: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    forward_prefetch: bool | Whole = False
    """Gather the next unit during the forward pass: true | units ahead."""
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"] | Whole = "BACKWARD_PRE"
    """BACKWARD_PRE (implicit prefetching on FSDP2) | units ahead; BACKWARD_POST and NO_PREFETCH on version 1
    only."""
    sync_each_batch: bool = True
    """Reduce-scatter after every micro-batch; false keeps unsharded gradients between micro-batches."""
    ep_size: Whole = 1
    """Ranks that divide the experts of each layer and exchange tokens (expert parallelism); each rank reads
    its own rows."""
    state_dict_type: Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"] = "SHARDED_STATE_DICT"
    """Checkpoint format: every rank writes its shards, or rank 0 writes full tensors as safetensors."""
    cpu_ram_efficient_loading: bool = True
    """true: no rank holds the full model; each reads its slices, or rank 0 reads and sends them; false: every
    rank reads all weights."""


class Precision(Section):
    default_effect = Effect(MEMORY | TIME | NUMBERS, REFUSED)

    mixed_precision: Literal["auto", "no", "fp16", "bf16", "fp8"] = "auto"
    """Compute dtype; no = that of `model.dtype`, auto = bf16, or no on CPU ranks without bf16 instructions.
    false is accepted too."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """dtype in which gradients are summed over ranks."""
    fp8_recipe: Literal["rowwise", "tensorwise"] = "rowwise"
    """Scaling of fp8 matrices."""


class EarlyStopping(Section):
    default_effect = Effect(NUMBERS, TRAJECTORY)

    patience: Whole = 3
    """Evaluations without progress before the run ends."""
    threshold: PositiveOrZero = 0.0
    """Smallest improvement that counts as progress."""


class ParameterGroup(Section):
    default_effect = Effect(NUMBERS, TRAJECTORY)

    match: list[Text]
    """Patterns of parameter names, as in `model.freeze`; one that matches no trained parameter is an
    error."""
    learning_rate: PositiveOrZero | None = None
    """Peak learning rate of these parameters; null = `training.learning_rate`."""
    weight_decay: PositiveOrZero | None = None
    """Weight decay of these parameters; null = `training.weight_decay`, which spares norms and biases."""


class Sample(Section):
    default_effect = Effect(NOTHING, FREE)

    every: Whole
    """Steps between two generations; the last step has one too, unless early stopping ends the run before
    it."""
    prompts: list[Text | list[dict[str, str]]]
    """Texts, and chats as lists of {role: …, content: …}, which are rendered with the generation prompt."""
    max_new_tokens: Whole = 64
    """Tokens generated after each prompt, greedily, unless the end of the sequence comes first."""


class Training(Section):
    """TrainingArguments by their own names; those not listed here are passed on with transformers' default
    (`model_extra`)."""

    model_config = ConfigDict(extra="allow")

    global_batch_size: Annotated[Whole | None, Effect(NUMBERS, TRAJECTORY)] = None
    """Sequences per optimizer step (a packed row is one); gives gradient_accumulation_steps."""
    per_device_train_batch_size: Annotated[Whole, Effect(MEMORY | TIME, FREE)] = 1
    """Sequences of one forward pass on one device."""
    per_device_train_batch_tokens: Annotated[Whole | None, Effect(MEMORY | TIME, FREE)] = None
    """Token slots of one forward pass on one device, padding included; batches are formed by length; a
    multiple of data.max_length."""
    per_device_eval_batch_size: Annotated[Whole | None, Effect(MEMORY | TIME, FREE)] = None
    """null = per_device_train_batch_size."""
    gradient_accumulation_steps: Annotated[Whole | None, Effect(MEMORY | TIME, FREE)] = None
    """Micro-batches per step; null = from global_batch_size, else 1."""
    loss: Annotated[Literal["cross_entropy", "dft"], Effect(NUMBERS, TRAJECTORY)] = "cross_entropy"
    """Training loss of a token; dft = cross-entropy times its detached probability (dynamic fine-tuning);
    `eval_loss` is cross-entropy."""
    learning_rate: Annotated[PositiveOrZero, Effect(NUMBERS, TRAJECTORY)] = 2.0e-5
    """Peak learning rate."""
    parameter_groups: Annotated[list[ParameterGroup], Effect(NUMBERS, TRAJECTORY)] = []
    """Learning rate and weight decay by parameter name; the first entry that matches a name counts."""
    warmup_steps: Annotated[PositiveOrZero, Effect(NUMBERS, TRAJECTORY)] = 0
    """Steps, or a share of all steps when below 1."""
    logging_steps: Annotated[Whole, Effect(NOTHING, FREE)] = 10
    """Steps between two lines of metrics.jsonl."""
    eval_strategy: Annotated[Literal["auto", "no", "steps", "epoch"], Effect(MEMORY | RESULT, FREE)] = "auto"
    """When to evaluate; auto = with every save if `data.eval` is set."""
    save_steps: Annotated[Whole | Fraction, Effect(RESULT, FREE)] = 500
    """Steps between checkpoints, or a share of all steps; `epoch` and `no` by save_strategy."""
    save_total_limit: Annotated[WholeOrZero | None, Effect(NOTHING, FREE)] = 2
    """Complete checkpoints to keep; the newest and the best are never deleted. 0 or null keeps all."""
    report_to: Annotated[list[Text], Effect(NOTHING, FREE)] = []
    """Trackers, such as wandb; tensorboard (`fsdp-tune[tensorboard]`) writes to RUN/tensorboard."""
    seed: Annotated[WholeOrZero, Effect(DATA | NUMBERS, REFUSED)] = 42
    """Seed of initial weights, dropout and LoRA."""
    data_seed: Annotated[WholeOrZero | None, Effect(DATA, REFUSED)] = None
    """Seed of the order of the rows; null = `seed`. Does not affect the eval split."""
    push_to_hub: Annotated[bool, Effect(NOTHING, FREE)] = False
    """Upload merged/ once, at the end; private by default."""
    on_nonfinite: Annotated[Literal["stop", "skip"], Effect(NUMBERS, TRAJECTORY)] = "stop"
    """On a NaN or infinite loss or gradient: stop the run, or skip the update."""
    witness: Annotated[Literal["first", "off"] | Whole, Effect(NOTHING, FREE)] = "first"
    """When a run checks its own invariants: first = before step 1 and at the first update; N = every N steps
    too; off = never."""
    early_stopping: Annotated[EarlyStopping | None, Effect(NUMBERS, TRAJECTORY)] = None
    """{patience: 3, threshold: 0.0} on metric_for_best_model."""
    sample: Annotated[Sample | None, Effect(NOTHING, FREE)] = None
    """{every: 500, prompts: [...]}: generate with the model in training, into metrics.jsonl and onto the
    terminal."""


class Recipe(Section):
    recipe_version: Annotated[RecipeVersion, Effect(NOTHING, REFUSED)] = 1
    """Version of this format."""
    name: Annotated[RunName | None, Effect(NOTHING, FREE)] = None
    """Name of the run; null = the stem of the recipe file."""
    output_dir: Annotated[Text, Effect(NOTHING, FREE)] = "runs/{name}"
    """Run directory, relative to the working directory; {name} and {seed} are filled in."""
    model: Model = Model()
    data: Data = Data()
    parallelism: Parallelism = Parallelism()
    fsdp: Fsdp = Fsdp()
    precision: Precision = Precision()
    training: Training = Training()
    lora: Annotated[Lora | None, Effect(MEMORY | TIME | NUMBERS, REFUSED)] = None
    """Train low-rank adapters of a frozen model: `{}` for the defaults, or by PEFT's names; null = train the
    model itself."""
    quantization: Annotated[Quantization | None, Effect(MEMORY | TIME | NUMBERS, REFUSED)] = None
    """`{}`: frozen weights under `lora:` in 4 bits (QLoRA); `{train: int4}`: quantisation-aware training;
    null = weights as they are."""
    kernels: Kernels = Kernels()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: CheckpointEvaluation = CheckpointEvaluation()
    launch: Launch = Launch()
    extensions: Extensions = Extensions()
    merge: Merge = Merge()

    @property
    def world_size(self) -> int:
        """Number of ranks over all machines, of a resolved recipe."""
        assert isinstance(self.launch.num_processes, int), "the recipe is not resolved"
        return self.launch.num_processes

    @property
    def local_world_size(self) -> int:
        """Number of ranks per machine, of a resolved recipe."""
        return self.world_size // self.launch.num_machines

    @property
    def has_own_directories(self) -> bool:
        """Whether each of several machines has a run directory of its own."""
        return self.launch.num_machines > 1 and not self.launch.shared_directory

    @property
    def on_all_machines(self) -> Recipe:
        """The recipe without the directories that each machine may name otherwise."""
        if not self.has_own_directories:
            return self
        return self.model_copy(
            update={"output_dir": "", "data": self.data.model_copy(update={"cache_dir": None})}
        )

    @property
    def data_size(self) -> int:
        """Number of groups of ranks that read different rows; available before the mesh is resolved."""
        return self.world_size // self.parallelism.of_row.world_size

    @property
    def topology(self) -> Topology:
        """Sizes of the parallel dimensions, of a resolved recipe."""
        parallelism, machines = self.parallelism, self.launch.num_machines
        if not self.is_sharded:
            return replace(parallelism.of_row, replicate=self.data_size, machines=machines)
        copies, shards = parallelism.dp_replicate_size, parallelism.dp_shard_size
        assert isinstance(copies, int), "the recipe is not resolved"
        assert isinstance(shards, int), "the recipe is not resolved"
        return replace(parallelism.of_row, replicate=copies, shard=shards, machines=machines)

    @property
    def open_files_needed(self) -> int:
        """Open files of a rank of a resolved recipe: those of its topology, and of the meshes of divided
        experts and of shards that fewer ranks share after the forward."""
        dimensions = 3 if self.is_hybrid else 2
        other_meshes = (self.fsdp.ep_size > 1) + (type(self.fsdp.reshard_after_forward) is int)
        return self.topology.open_files_needed(dimensions * other_meshes)

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step, of a resolved recipe."""
        if self.training.per_device_train_batch_tokens is not None:
            assert self.training.global_batch_size is not None, "a rule requires it"
            return self.training.global_batch_size
        return (
            self.training.per_device_train_batch_size
            * self.data_size
            * (self.training.gradient_accumulation_steps or 1)
        )

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates."""
        return self.data.eval is not None and self.training.eval_strategy != "no"

    @property
    def best_by_score(self) -> bool:
        """Whether `training.metric_for_best_model` is a score of `evaluation:`, which the ranks do not
        know."""
        metric = (self.training.model_extra or {}).get("metric_for_best_model")
        return isinstance(metric, str) and self.evaluation.has_score(metric)

    @property
    def is_sharded(self) -> bool:
        """False for NO_SHARD, which is plain DDP."""
        return STRATEGIES[self.fsdp.sharding_strategy].is_sharded

    @property
    def is_hybrid(self) -> bool:
        return STRATEGIES[self.fsdp.sharding_strategy].is_hybrid

    @property
    def reshards_after_forward(self) -> bool | int:
        """Whether a unit frees gathered parameters after its forward (ZeRO-3) or keeps them until its
        backward; n: keeps 1/n of them."""
        explicit = self.fsdp.reshard_after_forward
        return STRATEGIES[self.fsdp.sharding_strategy].reshards if explicit is None else explicit

    @property
    def nf4(self) -> Quantization | None:
        """The section `quantization:` if it holds frozen weights in 4 bits."""
        return (
            self.quantization if self.quantization is not None and self.quantization.load == "nf4" else None
        )

    @property
    def quantised_training(self) -> Quantization | None:
        """The section `quantization:` if it trains with emulated quantisation."""
        return (
            self.quantization
            if self.quantization is not None and self.quantization.train is not None
            else None
        )

    @property
    def ships_quantised(self) -> bool:
        """Return whether the merge also writes the quantised model that the run emulates."""
        return self.quantised_training is not None and self.merge.quantise

    @property
    def compute_dtype(self) -> ComputeDtype:
        """dtype of matrix multiplications; with `mixed_precision: no` that of the stored parameters.

        That of GPUs as long as `auto` is not resolved.
        """
        mixed = self.precision.mixed_precision
        return (
            self.model.dtype
            if mixed == "no"
            else cast(ComputeDtype, "bf16" if mixed in ("auto", "fp8") else mixed)
        )

    @property
    def layer_classes(self) -> tuple[str, ...] | None:
        """Class names to wrap, `A,B` split as Accelerate does; None = detected from the model."""
        given = self.fsdp.transformer_layer_cls_to_wrap
        if given is None:
            return None
        names = given.split(",") if isinstance(given, str) else given
        return tuple(name.strip() for name in names)
