"""Rules about keys that contradict each other, and rows for keys that have no effect because of others. Nothing is changed.

A rule yields one finding for each contradiction. A key without effect is one notice, and an error under `validate --strict`. Neither
needs the machine or the number of ranks: rules that do are in `recipe.world`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from fsdp_tune.core.families import SCALED_FIELDS
from fsdp_tune.core.units import printable, shown
from fsdp_tune.core.values import texts_below
from fsdp_tune.recipe.rules.evaluation import EVALUATION_RULES, best_is_not_merged, builder_has_files
from fsdp_tune.recipe.rules.experts import EXPERT_PARALLEL_RULES
from fsdp_tune.recipe.rules.launch import ENVIRONMENT_RULES
from fsdp_tune.recipe.rules.limits import ADAPTER_RULES, EXPERTS_RULES, FP8_RULES, SEQUENCE_RULES, STREAMING_RULES
from fsdp_tune.recipe.rules.rates import RATE_RULES
from fsdp_tune.recipe.rules.training import OPTIMIZER_RULES, TRAINING_RULES, rounds_stochastically
from fsdp_tune.recipe.schema.attention_kernels import SDPA_OR_EAGER, TORCH_VARLEN, needs_cuda
from fsdp_tune.recipe.schema.keys import Finding, Rule, closest, given
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.sections import DataSource
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
        keys, hint = ("model.from_config", "model.name_or_path"), "keep one; `model.tokenizer` names a tokenizer"
        yield Finding("contradiction", keys, "`model.from_config` starts from random weights, `model.name_or_path` from trained ones", hint)
    elif model.from_config is not None and model.tokenizer is None:
        message = "a model from `model.from_config` has no tokenizer: `model.tokenizer` is missing"
        yield Finding("no-tokenizer", ("model.from_config",), message, "name one: a hub id, a directory, or `builtin:arithmetic`")
    if isinstance(model.from_config, dict) and not isinstance(model.from_config.get("model_type"), str):
        message = "`model.from_config` must name the architecture: `model_type` is missing"
        yield Finding("wrong-value", ("model.from_config",), message, "for example `model_type: llama`")


def data_sources(recipe: Recipe) -> Iterator[Finding]:
    """Training sources and evaluation sets are named, have their files, and have labels by which their metrics differ."""
    if not recipe.data.train:
        hint = "for example `data: {train: [{path: train.jsonl}]}`"
        yield Finding("no-data", ("data.train", "data"), "the recipe names no training data: `data.train` is missing or empty", hint)
    for key, source in recipe.data.sources:
        yield from builder_has_files(key, source)
    if recipe.data.eval == []:
        yield Finding("no-data", ("data.eval",), "`data.eval` is an empty list", "remove it, or name a set")
    yield from _repeated_labels("data.train", recipe.data.train, "training sources")
    yield from _labels_that_are_numbers(recipe)
    yield from _repeated_labels("data.eval", recipe.data.eval if isinstance(recipe.data.eval, list) else [], "evaluation sets")


def _repeated_labels(key: str, sources: Sequence[DataSource], kind: str) -> Iterator[Finding]:
    """Metrics are named by label, so that two sources with one label would have one line."""
    seen: dict[str, int] = {}
    for index, source in enumerate(sources):
        if source.label is not None and seen.setdefault(source.label, index) != index:
            keys = (f"{key}[{index}].label", f"{key}[{seen[source.label]}].label")
            yield Finding("contradiction", keys, f"two {kind} have the label `{source.label}`", "give each a label of its own")


def _labels_that_are_numbers(recipe: Recipe) -> Iterator[Finding]:
    """A training source without a label has its number in the names of metrics."""
    sources = recipe.data.train
    for index, source in enumerate(sources):
        number = int(source.label) if source.label is not None and source.label.isdecimal() else index
        if number != index and number < len(sources) and sources[number].label is None and source.label == str(number):
            message = f"the label `{number}` is the name of source {number} in metrics, which has no label"
            yield Finding("contradiction", (f"data.train[{index}].label",), message, "use another label, or label that source too")


def strategy_agrees(recipe: Recipe) -> Iterator[Finding]:
    fsdp = recipe.fsdp
    reshard, reshards = fsdp.reshard_after_forward, STRATEGIES[fsdp.sharding_strategy].reshards
    if reshard is not None and bool(reshard) != reshards:
        does = "frees the gathered parameters after the forward pass" if reshards else "keeps the parameters after the forward pass"
        value = f"`fsdp.reshard_after_forward: {str(reshard).lower()}`"
        message = f"{value} contradicts `fsdp.sharding_strategy: {fsdp.sharding_strategy}`, which {does}"
        yield Finding("contradiction", ("fsdp.reshard_after_forward", "fsdp.sharding_strategy"), message, "remove `reshard_after_forward`")
    if fsdp.offload_params and not recipe.is_sharded:
        message = "`fsdp.offload_params: true` needs sharded parameters, and `fsdp.sharding_strategy: NO_SHARD` (plain DDP) has none"
        keys, hint = ("fsdp.offload_params", "fsdp.sharding_strategy"), "use FULL_SHARD, or leave `offload_params` out"
        yield Finding("contradiction", keys, message, hint)
    if fsdp.offload_params and fsdp.reshard_after_backward is False:
        message = (
            "`fsdp.offload_params: true` keeps parameters in host memory, and `fsdp.reshard_after_backward: false` keeps all of them, "
            "gathered, on the device between micro-batches"
        )
        keys = ("fsdp.reshard_after_backward", "fsdp.offload_params")
        yield Finding("contradiction", keys, message, "leave `reshard_after_backward` out")
    if not recipe.is_sharded and recipe.precision.reduce_dtype != "fp32":
        value = f"`precision.reduce_dtype: {recipe.precision.reduce_dtype}`"
        message = f"{value} has no effect under `NO_SHARD`: DDP sums gradients in their own dtype"
        yield Finding("contradiction", ("precision.reduce_dtype", "fsdp.sharding_strategy"), message, "leave `reduce_dtype` out")
    if fsdp.auto_wrap_policy == "MODULE_NAMES_WRAP" and not fsdp.modules_to_wrap:
        message = "`fsdp.auto_wrap_policy: MODULE_NAMES_WRAP` needs names: `fsdp.modules_to_wrap` is empty"
        yield Finding("missing-key", ("fsdp.auto_wrap_policy",), message, "for example `modules_to_wrap: [model.layers.*]`")


def fsdp_version(recipe: Recipe) -> Iterator[Finding]:
    """Limits of `fully_shard` (version 2) and of `FullyShardedDataParallel` (version 1)."""
    fsdp, model = recipe.fsdp, recipe.model
    keys = ("fsdp.backward_prefetch", "fsdp.version")
    if fsdp.version == 1 and isinstance(fsdp.backward_prefetch, int):
        message = f"`fsdp.backward_prefetch: {fsdp.backward_prefetch}` (units ahead) needs FSDP2; version 1 takes names"
        yield Finding("contradiction", keys, message, "write BACKWARD_PRE, or use `fsdp.version: 2`")
    if not recipe.is_sharded:
        return
    if fsdp.version == 2:
        if fsdp.backward_prefetch in {"BACKWARD_POST", "NO_PREFETCH"}:
            message = (
                f"`fsdp.backward_prefetch: {fsdp.backward_prefetch}` has no equivalent on FSDP2, which always gathers the next unit ahead"
            )
            yield Finding("contradiction", keys, message, "leave it out, write units ahead (`1`), or use `fsdp.version: 1`")
        return
    needs_2 = {
        "fsdp.forward_prefetch": type(fsdp.forward_prefetch) is int and f"`fsdp.forward_prefetch: {fsdp.forward_prefetch}` (units ahead)",
        "kernels.compile": recipe.kernels.compile and "`kernels.compile: true`",
        # FSDP1's gathered parameters are views, which autograd does not take as inputs.
        "kernels.mlp_slice_tokens": recipe.kernels.mlp_slice_tokens is not None
        and f"`kernels.mlp_slice_tokens: {recipe.kernels.mlp_slice_tokens}`",
        "fsdp.activation_checkpointing_offload": fsdp.activation_checkpointing_offload and "`fsdp.activation_checkpointing_offload: true`",
        # After the forward that locates the value, FSDP1's ranks wait forever.
        "training.on_nonfinite": recipe.training.on_nonfinite == "skip" and "`training.on_nonfinite: skip`",
        # FSDP1 concatenates the parameters of a unit into one flat tensor.
        "model.frozen_dtype": bool(model.freeze)
        and model.frozen_dtype not in ("auto", model.dtype)
        and f"`model.frozen_dtype: {model.frozen_dtype}` with `model.dtype: {model.dtype}`",
        "fsdp.reshard_after_backward": fsdp.reshard_after_backward is False and "`fsdp.reshard_after_backward: false`",
        "fsdp.reshard_after_forward": type(fsdp.reshard_after_forward) is int
        and f"`fsdp.reshard_after_forward: {fsdp.reshard_after_forward}` (ranks)",
    }
    for key, what in needs_2.items():
        if what:
            message = f"{what} needs FSDP2, and the recipe sets `fsdp.version: 1`"
            yield Finding("contradiction", (key, "fsdp.version"), message, "use `fsdp.version: 2`")


def bf16_storage(recipe: Recipe) -> Iterator[Finding]:
    if recipe.model.dtype == "bf16" and recipe.precision.mixed_precision == "fp16":
        message = "`model.dtype: bf16` keeps bf16 weights, and `precision.mixed_precision: fp16` computes in fp16"
        yield Finding("contradiction", ("precision.mixed_precision", "model.dtype"), message, "with bf16 weights write `bf16` or `no`")


OUTPUT_FIELDS = re.compile(r"\{(name|seed)\}")


_SHELL_VARIABLE = re.compile(r"\$(\{)?([A-Za-z_][A-Za-z0-9_]*)(?(1)\})")


def no_shell_variables_in_paths(recipe: Recipe) -> Iterator[Finding]:
    """`$SCRATCH/x` would become a directory of that name. Paths that are only read may contain a `$`, but not begin with one."""
    read = [("model.name_or_path", recipe.model.name_or_path), ("model.tokenizer", recipe.model.tokenizer)]
    read += [(f"{key}.path", source.path) for key, source in (*recipe.data.sources, *recipe.evaluation.sources)]
    read = [(key, path) for key, path in read if path is not None and path.startswith("$")]
    for key, path in [("output_dir", recipe.output_dir), ("data.cache_dir", recipe.data.cache_dir or ""), *read]:
        if variable := _SHELL_VARIABLE.search(path):
            message = f"`{key}` contains `{shown(variable[0])}`, and a recipe does not expand variables of the shell"
            through_shell = "" if "[" in key else f', or let the shell expand it: `--set {key}="{shown(path)}"`'
            yield Finding("shell-variable", (key,), message, f"write the path out{through_shell}")


def written_paths(recipe: Recipe) -> Iterator[Finding]:
    path, keys = recipe.output_dir, ("output_dir",)
    rest = OUTPUT_FIELDS.sub("", path)
    if _SHELL_VARIABLE.search(path):
        pass  # reported by `no_shell_variables_in_paths`
    elif "{" in rest or "}" in rest:
        braces = re.search(r"\{[^{}]*\}?|\}", rest)
        message = f"`output_dir` contains `{shown(braces[0] if braces else rest)}`, which is not filled in"
        yield Finding("bad-output-dir", keys, message, "only {name} and {seed} are")
    elif path.startswith("~"):
        yield Finding("bad-output-dir", keys, "`output_dir` begins with `~`, which is not expanded", "write the path out")
    for key, text, code in (("output_dir", path, "bad-output-dir"), ("data.cache_dir", recipe.data.cache_dir, "wrong-value")):
        if found := next((character for character in text or "" if not character.isprintable()), None):
            escape = printable(found)
            hint = f"in double quotes `{escape}` is one character: write the path in single quotes"
            yield Finding(code, (key,), f"`{key}` contains the control character `{escape}`", hint)


def no_nul_characters(recipe: Recipe) -> Iterator[Finding]:
    """No path, name or text of a recipe may have one: the operating system ends a name there."""
    for key, text in texts_below(recipe.model_dump(by_alias=True)):
        if "\0" in text and not key.startswith(("launch.env.", "output_dir", "data.cache_dir")):  # these have rules of their own
            hint = "in double quotes `\\0` is one character: write the value in single quotes"
            yield Finding("wrong-value", (key,), f"`{key}` contains the character `\\x00`", hint)


def rope_scaling(recipe: Recipe) -> Iterator[Finding]:
    scaling = recipe.model.rope_scaling
    if scaling is None:
        return
    for name in scaling.unused:
        keys = (f"model.rope_scaling.{name}", "model.rope_scaling.rope_type")
        yield Finding("contradiction", keys, f"`rope_type: {scaling.rope_type}` does not read `{name}`", f"leave `{name}` out")
    pairs = {("beta_slow", "beta_fast"): (1.0, 32.0), ("low_freq_factor", "high_freq_factor"): (1.0, 4.0)}
    for (low, high), defaults in pairs.items():
        values = [getattr(scaling, name) or default for name, default in zip((low, high), defaults, strict=True)]
        if values[0] >= values[1]:
            keys = (f"model.rope_scaling.{low}", f"model.rope_scaling.{high}", "model.rope_scaling")
            yield Finding("contradiction", keys, f"`{low}` is {values[0]:g} and `{high}` is {values[1]:g}: it must be larger")
    for field in SCALED_FIELDS:
        if field in recipe.model.config_overrides:
            keys = ("model.config_overrides", "model.rope_scaling")
            message = f"`model.config_overrides` sets `{field}`, which `model.rope_scaling` sets too"
            yield Finding("contradiction", keys, message, "keep one of them")


_OWN_KERNELS = (TORCH_VARLEN, SDPA_OR_EAGER)


KERNELS = ("auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention", *_OWN_KERNELS)


def attention_kernel(recipe: Recipe) -> Iterator[Finding]:
    """A name that transformers does not list may be the model's own; one that is close to a listed name is a typing error."""
    kernel = recipe.model.attn_implementation
    if near := None if kernel in KERNELS or "/" in kernel else closest(kernel, KERNELS):
        message = f"`model.attn_implementation` is `{shown(kernel)}`, which is not a kernel of transformers"
        yield Finding("wrong-value", ("model.attn_implementation",), message, f"did you mean `{near}`?")
    elif recipe.launch.device == "cpu" and (needs_cuda(kernel) or kernel == "flex_attention"):
        # FlashAttention is CUDA code; torch has no backward pass of FlexAttention on the CPU.
        message = f"`model.attn_implementation: {kernel}` cannot train on the CPU"
        yield Finding("contradiction", ("model.attn_implementation", "launch.device"), message, "leave it at auto, or write `sdpa`")


def device_limits(recipe: Recipe) -> Iterator[Finding]:
    if recipe.launch.device == "mps":
        message = "`launch.device: mps`: torch.distributed has no collectives on this device, and a run needs them"
        yield Finding("device-without-collectives", ("launch.device",), message, ways_out=("--set launch.device=cpu trains on the CPU",))
    if recipe.launch.device == "cpu" and recipe.fsdp.version == 1 and recipe.is_sharded:
        reasons: dict[str, str] = {}
        if recipe.fsdp.cpu_ram_efficient_loading and given(recipe, "fsdp.cpu_ram_efficient_loading"):
            reasons["fsdp.cpu_ram_efficient_loading"] = "it sends weights over NCCL only"
        if recipe.fsdp.offload_params:
            reasons["fsdp.offload_params"] = "it needs a GPU to copy the weights to"
        for key, why in reasons.items():
            message = f"`{key}: true` does not work with FSDP1 on the CPU: {why}"
            yield Finding("contradiction", (key, "fsdp.version", "launch.device"), message, "leave it out, or use `fsdp.version: 2`")


def kernels(recipe: Recipe) -> Iterator[Finding]:
    """Liger is Triton code, and its loss rounds the gradients of the logits before fp16's loss scale is applied."""
    kernels, fsdp = recipe.kernels, recipe.fsdp
    liger = [(key, value) for key, value in (("kernels.liger", kernels.liger), ("kernels.loss", kernels.loss)) if value in (True, "liger")]
    if liger and recipe.launch.device == "cpu":
        key, value = liger[0]
        message = f"`{key}: {str(value).lower()}` cannot run on `launch.device: cpu`: Liger's kernels are for GPUs"
        hint = "leave it at auto" if key == "kernels.liger" else "write `chunked`, which holds no logits either"
        yield Finding("contradiction", (key, "launch.device"), message, hint)
    elif kernels.loss == "liger" and recipe.precision.mixed_precision == "fp16":
        message = "`kernels.loss: liger` rounds gradients before fp16's loss scale is applied, most of them to zero"
        yield Finding("contradiction", ("kernels.loss", "precision.mixed_precision"), message, "write `chunked`, or train in bf16")
    # Offloaded inputs are saved outside the compiled part of a layer; a policy for its operators would have to see inside.
    if kernels.compile and fsdp.activation_checkpointing_offload and fsdp.activation_checkpointing == "selective":
        message = (
            "`kernels.compile: true` with `fsdp.activation_checkpointing_offload: true` compiles a recomputed layer as one piece, "
            "in which `fsdp.activation_checkpointing: selective` cannot select operators"
        )
        keys = ("fsdp.activation_checkpointing", "fsdp.activation_checkpointing_offload", "kernels.compile")
        yield Finding("contradiction", keys, message, "write `full`, or leave `activation_checkpointing_offload` out")


def mlp_slices(recipe: Recipe) -> Iterator[Finding]:
    if recipe.kernels.mlp_slice_tokens is None:
        return
    refused = (
        ("kernels.compile", recipe.kernels.compile, True, "the compiler would put all slices into one graph", "false"),
        ("precision.mixed_precision", recipe.precision.mixed_precision, "fp8", "weights' gradients have one scale for all tokens", "bf16"),
        ("fsdp.activation_checkpointing", recipe.fsdp.activation_checkpointing, "selective", "it keeps products of all slices", "full"),
    )
    for key, value, without, why, instead in refused:
        if value == without:
            message = f"`{key}: {str(value).lower()}` contradicts `kernels.mlp_slice_tokens`: {why}"
            yield Finding(
                "contradiction", (key, "kernels.mlp_slice_tokens"), message, f"write `{instead}`, or leave `mlp_slice_tokens` out"
            )


RULES: tuple[Rule, ...] = (
    *(model_source, data_sources, strategy_agrees, fsdp_version, bf16_storage),
    *(no_shell_variables_in_paths, written_paths, no_nul_characters, rope_scaling, attention_kernel, device_limits, kernels, mlp_slices),
    *(*ENVIRONMENT_RULES, *OPTIMIZER_RULES, *FP8_RULES, *ADAPTER_RULES, *TRAINING_RULES, *STREAMING_RULES),
    *(*RATE_RULES, *SEQUENCE_RULES, *EVALUATION_RULES, *EXPERTS_RULES, *EXPERT_PARALLEL_RULES),
)


def pure_bf16(recipe: Recipe) -> Iterator[Finding]:
    if recipe.model.dtype == "bf16" and not rounds_stochastically(recipe):
        message = "`model.dtype: bf16` trains bf16 weights without fp32 masters: updates smaller than about 1/256 of a weight are lost"
        hint = '`training.optim_args: "bf16_stochastic_round=true"` keeps them on average; `fp32` keeps all, '
        hint += "for twice the memory of weights, gradients and optimizer state"
        yield Finding("pure-bf16", ("model.dtype",), message, hint)


def scaling_outside_adapters(recipe: Recipe) -> Iterator[Finding]:
    if recipe.model.rope_scaling is not None and recipe.lora is not None and recipe.merge.adapter != "merged":
        message = "an adapter's files do not contain `model.rope_scaling`; the merged model's config.json does"
        hint = "load the adapter onto its base with that config.json"
        yield Finding("rope-scaling-outside-adapter", ("model.rope_scaling",), message, hint)


REMARKS: tuple[Rule, ...] = (pure_bf16, scaling_outside_adapters, best_is_not_merged)
"""Notices about choices that are allowed and often a mistake."""
