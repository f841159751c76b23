"""Rules about keys that contradict each other, and rows for keys that have no effect because of others.
Nothing is changed.

A rule yields one finding for each contradiction. A key without effect is one notice, and an error under
`validate --strict`. Neither needs the machine or the number of ranks: rules that do are in `recipe.world`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdp_tune.core.families import SCALED_FIELDS
from fsdp_tune.recipe.rules.adapters import ADAPTER_RULES
from fsdp_tune.recipe.rules.evaluation import EVALUATION_RULES, best_is_not_merged, builder_has_files
from fsdp_tune.recipe.rules.experts import EXPERT_PARALLEL_RULES
from fsdp_tune.recipe.rules.kernels import attention_kernel, kernels, mlp_slices
from fsdp_tune.recipe.rules.launch import ENVIRONMENT_RULES
from fsdp_tune.recipe.rules.limits import EXPERTS_RULES, FP8_RULES, SEQUENCE_RULES
from fsdp_tune.recipe.rules.paths import no_nul_characters, no_shell_variables_in_paths, written_paths
from fsdp_tune.recipe.rules.rates import RATE_RULES
from fsdp_tune.recipe.rules.streaming import STREAMING_RULES
from fsdp_tune.recipe.rules.training import OPTIMIZER_RULES, TRAINING_RULES, rounds_stochastically
from fsdp_tune.recipe.schema.data_section import DataSource
from fsdp_tune.recipe.schema.keys import Finding, Rule, given
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.strategies import STRATEGIES

INPUTS = frozenset({"no-tokenizer", "no-data"})
"""Codes of findings about inputs that a run needs and a plan does not."""


def model_source(recipe: Recipe) -> Iterator[Finding]:
    model = recipe.model
    if model.name_or_path is None and model.from_config is None:
        hint = "write a hub id, a directory, or a run: `model: {name_or_path: meta-llama/Llama-2-7b-hf}`"
        keys = ("model.name_or_path", "model.from_config", "model")
        yield Finding("no-model", keys, "the recipe names no model: `model.name_or_path` is missing", hint)
    elif model.name_or_path is not None and model.from_config is not None:
        keys, hint = (
            ("model.from_config", "model.name_or_path"),
            "keep one; `model.tokenizer` names a tokenizer",
        )
        yield Finding(
            "contradiction",
            keys,
            "`model.from_config` starts from random weights, `model.name_or_path` from trained ones",
            hint,
        )
    elif model.from_config is not None and model.tokenizer is None:
        message = "a model from `model.from_config` has no tokenizer: `model.tokenizer` is missing"
        yield Finding(
            "no-tokenizer",
            ("model.from_config",),
            message,
            "name one: a hub id, a directory, or `builtin:arithmetic`",
        )
    if isinstance(model.from_config, dict) and not isinstance(model.from_config.get("model_type"), str):
        message = "`model.from_config` must name the architecture: `model_type` is missing"
        yield Finding("wrong-value", ("model.from_config",), message, "for example `model_type: llama`")


def data_sources(recipe: Recipe) -> Iterator[Finding]:
    """Training sources and evaluation sets are named, have their files, and have labels by which their
    metrics differ."""
    if not recipe.data.train:
        hint = "for example `data: {train: [{path: train.jsonl}]}`"
        yield Finding(
            "no-data",
            ("data.train", "data"),
            "the recipe names no training data: `data.train` is missing or empty",
            hint,
        )
    for key, source in recipe.data.sources:
        yield from builder_has_files(key, source)
    if recipe.data.eval == []:
        yield Finding("no-data", ("data.eval",), "`data.eval` is an empty list", "remove it, or name a set")
    yield from _repeated_labels("data.train", recipe.data.train, "training sources")
    yield from _labels_that_are_numbers(recipe)
    yield from _repeated_labels(
        "data.eval", recipe.data.eval if isinstance(recipe.data.eval, list) else [], "evaluation sets"
    )


def _repeated_labels(key: str, sources: Sequence[DataSource], kind: str) -> Iterator[Finding]:
    """Metrics are named by label, so that two sources with one label would have one line."""
    seen: dict[str, int] = {}
    for index, source in enumerate(sources):
        if source.label is not None and seen.setdefault(source.label, index) != index:
            keys = (f"{key}[{index}].label", f"{key}[{seen[source.label]}].label")
            yield Finding(
                "contradiction",
                keys,
                f"two {kind} have the label `{source.label}`",
                "give each a label of its own",
            )


def _labels_that_are_numbers(recipe: Recipe) -> Iterator[Finding]:
    """A training source without a label has its number in the names of metrics."""
    sources = recipe.data.train
    for index, source in enumerate(sources):
        number = int(source.label) if source.label is not None and source.label.isdecimal() else index
        if (
            number != index
            and number < len(sources)
            and sources[number].label is None
            and source.label == str(number)
        ):
            message = f"the label `{number}` is the name of source {number} in metrics, which has no label"
            yield Finding(
                "contradiction",
                (f"data.train[{index}].label",),
                message,
                "use another label, or label that source too",
            )


def strategy_agrees(recipe: Recipe) -> Iterator[Finding]:
    fsdp = recipe.fsdp
    reshard, reshards = fsdp.reshard_after_forward, STRATEGIES[fsdp.sharding_strategy].reshards
    if reshard is not None and bool(reshard) != reshards:
        does = (
            "frees the gathered parameters after the forward pass"
            if reshards
            else "keeps the parameters after the forward pass"
        )
        value = f"`fsdp.reshard_after_forward: {str(reshard).lower()}`"
        message = f"{value} contradicts `fsdp.sharding_strategy: {fsdp.sharding_strategy}`, which {does}"
        yield Finding(
            "contradiction",
            ("fsdp.reshard_after_forward", "fsdp.sharding_strategy"),
            message,
            "remove `reshard_after_forward`",
        )
    if fsdp.offload_params and not recipe.is_sharded:
        message = (
            "`fsdp.offload_params: true` needs sharded parameters, and `fsdp.sharding_strategy: "
            "NO_SHARD` (plain DDP) has none"
        )
        keys, hint = (
            ("fsdp.offload_params", "fsdp.sharding_strategy"),
            "use FULL_SHARD, or leave `offload_params` out",
        )
        yield Finding("contradiction", keys, message, hint)
    if fsdp.offload_params and fsdp.reshard_after_backward is False:
        message = (
            "`fsdp.offload_params: true` keeps parameters in host memory, and `fsdp.reshard_after_backward: "
            "false` keeps all of them, gathered, on the device between micro-batches"
        )
        keys = ("fsdp.reshard_after_backward", "fsdp.offload_params")
        yield Finding("contradiction", keys, message, "leave `reshard_after_backward` out")
    if not recipe.is_sharded and recipe.precision.reduce_dtype != "fp32":
        value = f"`precision.reduce_dtype: {recipe.precision.reduce_dtype}`"
        message = f"{value} has no effect under `NO_SHARD`: DDP sums gradients in their own dtype"
        yield Finding(
            "contradiction",
            ("precision.reduce_dtype", "fsdp.sharding_strategy"),
            message,
            "leave `reduce_dtype` out",
        )
    if fsdp.auto_wrap_policy == "MODULE_NAMES_WRAP" and not fsdp.modules_to_wrap:
        message = "`fsdp.auto_wrap_policy: MODULE_NAMES_WRAP` needs names: `fsdp.modules_to_wrap` is empty"
        yield Finding(
            "missing-key",
            ("fsdp.auto_wrap_policy",),
            message,
            "for example `modules_to_wrap: [model.layers.*]`",
        )


def fsdp_version(recipe: Recipe) -> Iterator[Finding]:
    """Limits of `fully_shard` (version 2) and of `FullyShardedDataParallel` (version 1)."""
    fsdp, model = recipe.fsdp, recipe.model
    keys = ("fsdp.backward_prefetch", "fsdp.version")
    if fsdp.version == 1 and isinstance(fsdp.backward_prefetch, int):
        message = (
            f"`fsdp.backward_prefetch: {fsdp.backward_prefetch}` (units ahead) needs FSDP2; version 1 "
            "takes names"
        )
        yield Finding("contradiction", keys, message, "write BACKWARD_PRE, or use `fsdp.version: 2`")
    if not recipe.is_sharded:
        return
    if fsdp.version == 2:
        if fsdp.backward_prefetch in {"BACKWARD_POST", "NO_PREFETCH"}:
            message = (
                f"`fsdp.backward_prefetch: {fsdp.backward_prefetch}` has no equivalent on FSDP2, which "
                "always gathers the next unit ahead"
            )
            yield Finding(
                "contradiction",
                keys,
                message,
                "leave it out, write units ahead (`1`), or use `fsdp.version: 1`",
            )
        return
    needs_2 = {
        "fsdp.forward_prefetch": type(fsdp.forward_prefetch) is int
        and f"`fsdp.forward_prefetch: {fsdp.forward_prefetch}` (units ahead)",
        "kernels.compile": recipe.kernels.compile and "`kernels.compile: true`",
        # FSDP1's gathered parameters are views, which autograd does not take as inputs.
        "kernels.mlp_slice_tokens": recipe.kernels.mlp_slice_tokens is not None
        and f"`kernels.mlp_slice_tokens: {recipe.kernels.mlp_slice_tokens}`",
        "fsdp.activation_checkpointing_offload": fsdp.activation_checkpointing_offload
        and "`fsdp.activation_checkpointing_offload: true`",
        # After the forward that locates the value, FSDP1's ranks wait forever.
        "training.on_nonfinite": recipe.training.on_nonfinite == "skip" and "`training.on_nonfinite: skip`",
        # FSDP1 concatenates the parameters of a unit into one flat tensor.
        "model.frozen_dtype": bool(model.freeze)
        and model.frozen_dtype not in ("auto", model.dtype)
        and f"`model.frozen_dtype: {model.frozen_dtype}` with `model.dtype: {model.dtype}`",
        "fsdp.reshard_after_backward": fsdp.reshard_after_backward is False
        and "`fsdp.reshard_after_backward: false`",
        "fsdp.reshard_after_forward": type(fsdp.reshard_after_forward) is int
        and f"`fsdp.reshard_after_forward: {fsdp.reshard_after_forward}` (ranks)",
    }
    for key, what in needs_2.items():
        if what:
            message = f"{what} needs FSDP2, and the recipe sets `fsdp.version: 1`"
            yield Finding("contradiction", (key, "fsdp.version"), message, "use `fsdp.version: 2`")


def bf16_storage(recipe: Recipe) -> Iterator[Finding]:
    if recipe.model.dtype == "bf16" and recipe.precision.mixed_precision == "fp16":
        message = (
            "`model.dtype: bf16` keeps bf16 weights, and `precision.mixed_precision: fp16` computes in fp16"
        )
        yield Finding(
            "contradiction",
            ("precision.mixed_precision", "model.dtype"),
            message,
            "with bf16 weights write `bf16` or `no`",
        )


def rope_scaling(recipe: Recipe) -> Iterator[Finding]:
    scaling = recipe.model.rope_scaling
    if scaling is None:
        return
    for name in scaling.unused:
        keys = (f"model.rope_scaling.{name}", "model.rope_scaling.rope_type")
        yield Finding(
            "contradiction",
            keys,
            f"`rope_type: {scaling.rope_type}` does not read `{name}`",
            f"leave `{name}` out",
        )
    pairs = {("beta_slow", "beta_fast"): (1.0, 32.0), ("low_freq_factor", "high_freq_factor"): (1.0, 4.0)}
    for (low, high), defaults in pairs.items():
        values = [
            getattr(scaling, name) or default for name, default in zip((low, high), defaults, strict=True)
        ]
        if values[0] >= values[1]:
            keys = (f"model.rope_scaling.{low}", f"model.rope_scaling.{high}", "model.rope_scaling")
            yield Finding(
                "contradiction",
                keys,
                f"`{low}` is {values[0]:g} and `{high}` is {values[1]:g}: `{high}` must be larger",
            )
    for field in SCALED_FIELDS:
        if field in recipe.model.config_overrides:
            keys = ("model.config_overrides", "model.rope_scaling")
            message = f"`model.config_overrides` sets `{field}`, which `model.rope_scaling` sets too"
            yield Finding("contradiction", keys, message, "keep one of them")


def device_limits(recipe: Recipe) -> Iterator[Finding]:
    if recipe.launch.device == "mps":
        message = (
            "`launch.device: mps`: torch.distributed has no collectives on this device, and a run needs them"
        )
        yield Finding(
            "device-without-collectives",
            ("launch.device",),
            message,
            ways_out=("--set launch.device=cpu trains on the CPU",),
        )
    if recipe.launch.device == "cpu" and recipe.fsdp.version == 1 and recipe.is_sharded:
        reasons: dict[str, str] = {}
        if recipe.fsdp.cpu_ram_efficient_loading and given(recipe, "fsdp.cpu_ram_efficient_loading"):
            reasons["fsdp.cpu_ram_efficient_loading"] = "it sends weights over NCCL only"
        if recipe.fsdp.offload_params:
            reasons["fsdp.offload_params"] = "it needs a GPU to copy the weights to"
        for key, why in reasons.items():
            message = f"`{key}: true` does not work with FSDP1 on the CPU: {why}"
            yield Finding(
                "contradiction",
                (key, "fsdp.version", "launch.device"),
                message,
                "leave it out, or use `fsdp.version: 2`",
            )


RULES: tuple[Rule, ...] = (
    *(model_source, data_sources, strategy_agrees, fsdp_version, bf16_storage),
    *(
        no_shell_variables_in_paths,
        written_paths,
        no_nul_characters,
        rope_scaling,
        attention_kernel,
        device_limits,
        kernels,
        mlp_slices,
    ),
    *(*ENVIRONMENT_RULES, *OPTIMIZER_RULES, *FP8_RULES, *ADAPTER_RULES, *TRAINING_RULES, *STREAMING_RULES),
    *(*RATE_RULES, *SEQUENCE_RULES, *EVALUATION_RULES, *EXPERTS_RULES, *EXPERT_PARALLEL_RULES),
)


def pure_bf16(recipe: Recipe) -> Iterator[Finding]:
    if recipe.model.dtype == "bf16" and not rounds_stochastically(recipe):
        message = (
            "`model.dtype: bf16` trains bf16 weights without fp32 masters: updates smaller than about "
            "1/256 of a weight are lost"
        )
        hint = '`training.optim_args: "bf16_stochastic_round=true"` keeps them on average; `fp32` keeps all, '
        hint += "for twice the memory of weights, gradients and optimizer state"
        yield Finding("pure-bf16", ("model.dtype",), message, hint)


def scaling_outside_adapters(recipe: Recipe) -> Iterator[Finding]:
    if recipe.model.rope_scaling is not None and recipe.lora is not None and recipe.merge.adapter != "merged":
        message = (
            "an adapter's files do not contain `model.rope_scaling`; the merged model's config.json does"
        )
        hint = "load the adapter onto its base with that config.json"
        yield Finding("rope-scaling-outside-adapter", ("model.rope_scaling",), message, hint)


REMARKS: tuple[Rule, ...] = (pure_bf16, scaling_outside_adapters, best_is_not_merged)
"""Notices about choices that are allowed and often a mistake."""
