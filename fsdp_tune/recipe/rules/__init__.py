"""Contradictions between keys: each rule looks at one, says what is at odds, and changes nothing.

Rules here need neither the machine nor the number of ranks; those that do are in `world.py`. Rules about keys that have no
effect beside the others are in `inactive.py`.
"""

from __future__ import annotations

import re

from fsdp_tune.recipe.findings import Finding, Rule, given
from fsdp_tune.recipe.rules.launch import ENVIRONMENT_RULES
from fsdp_tune.recipe.rules.optimizer import OPTIMIZER_RULES, rounds_by_chance
from fsdp_tune.recipe.rules.precision import FP8_RULES
from fsdp_tune.recipe.rules.training import TRAINING_RULES
from fsdp_tune.recipe.scalars import printable, shown
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.recipe.schema.keys import closest
from fsdp_tune.recipe.schema.kinds import is_flash_kernel
from fsdp_tune.recipe.schema.model_and_data import BUILDERS
from fsdp_tune.recipe.schema.strategies import STRATEGIES


def model_source(recipe: Recipe) -> Finding | None:
    model = recipe.model
    if model.name_or_path is None and model.from_config is None:
        hint = "a hub id, a directory, or a run: `model: {name_or_path: meta-llama/Llama-2-7b-hf}`"
        return Finding(
            "no-model",
            ("model.name_or_path", "model.from_config", "model"),
            "the recipe names no model: `model.name_or_path` is missing",
            hint,
        )
    if model.name_or_path is not None and model.from_config is not None:
        message = "`model.from_config` starts from random weights, `model.name_or_path` from trained ones"
        return Finding(
            "contradiction", ("model.from_config", "model.name_or_path"), message, "keep one; `model.tokenizer` names a tokenizer"
        )
    if model.from_config is not None and model.tokenizer is None:
        message = "a model from `model.from_config` brings no tokenizer: `model.tokenizer` is missing"
        return Finding("no-tokenizer", ("model.from_config",), message, "name one: a hub id, a directory, or `builtin:arithmetic`")
    return None


def config_names_its_type(recipe: Recipe) -> Finding | None:
    config = recipe.model.from_config
    if isinstance(config, dict) and not isinstance(config.get("model_type"), str):
        message = "`model.from_config` must say which architecture it is: `model_type` is missing"
        return Finding("wrong-value", ("model.from_config",), message, "for example `model_type: llama`")
    return None


INPUTS = frozenset({"no-tokenizer", "no-data"})
"""Codes of findings about inputs that a run needs and a plan does not."""


def some_training_data(recipe: Recipe) -> Finding | None:
    if recipe.data.train:
        return None
    hint = "for example `data: {train: [{path: train.jsonl}]}`"
    return Finding("no-data", ("data.train", "data"), "the recipe names no training data: `data.train` is missing or empty", hint)


def builders_have_files(recipe: Recipe) -> Finding | None:
    for key, source in recipe.data.sources:
        if source.path in BUILDERS and source.data_files is None:
            return Finding("missing-key", (f"{key}.path",), f"`path: {source.path}` reads files: `{key}.data_files` is missing")
    return None


def eval_is_not_empty(recipe: Recipe) -> Finding | None:
    if recipe.data.eval == []:
        return Finding("no-data", ("data.eval",), "`data.eval` is an empty list", "remove it, or name a set")
    return None


def eval_labels_differ(recipe: Recipe) -> Finding | None:
    if not isinstance(recipe.data.eval, list):
        return None
    seen: dict[str, int] = {}
    for index, source in enumerate(recipe.data.eval):
        if source.label is not None and source.label in seen:
            keys = (f"data.eval[{index}].label", f"data.eval[{seen[source.label]}].label")
            return Finding("contradiction", keys, f"two evaluation sets have the label `{source.label}`")
        if source.label is not None:
            seen[source.label] = index
    return None


def reshard_agrees(recipe: Recipe) -> Finding | None:
    asked, strategy = recipe.fsdp.reshard_after_forward, recipe.fsdp.sharding_strategy
    reshards = STRATEGIES[strategy].reshards
    if asked is None or bool(asked) == reshards:
        return None
    does = "frees the gathered parameters after the forward pass" if reshards else "keeps the parameters after the forward pass"
    message = f"`fsdp.reshard_after_forward: {str(asked).lower()}` contradicts `fsdp.sharding_strategy: {strategy}`, which {does}"
    return Finding("contradiction", ("fsdp.reshard_after_forward", "fsdp.sharding_strategy"), message, "remove `reshard_after_forward`")


def offload_needs_shards(recipe: Recipe) -> Finding | None:
    if recipe.fsdp.offload_params and not recipe.is_sharded:
        message = "`fsdp.offload_params: true` needs sharded parameters, and `fsdp.sharding_strategy: NO_SHARD` (plain DDP) has none"
        hint = "use FULL_SHARD, or leave `offload_params` out"
        return Finding("contradiction", ("fsdp.offload_params", "fsdp.sharding_strategy"), message, hint)
    return None


def ddp_reduces_in_fp32(recipe: Recipe) -> Finding | None:
    if not recipe.is_sharded and recipe.precision.reduce_dtype != "fp32":
        message = (
            f"`precision.reduce_dtype: {recipe.precision.reduce_dtype}` has no counterpart under `NO_SHARD`: DDP sums gradients as they are"
        )
        return Finding("contradiction", ("precision.reduce_dtype", "fsdp.sharding_strategy"), message, "leave `reduce_dtype` out")
    return None


def backward_prefetch_by_version(recipe: Recipe) -> Finding | None:
    prefetch, version = recipe.fsdp.backward_prefetch, recipe.fsdp.version
    keys = ("fsdp.backward_prefetch", "fsdp.version")
    if version == 2 and prefetch in {"BACKWARD_POST", "NO_PREFETCH"} and recipe.is_sharded:
        message = f"`fsdp.backward_prefetch: {prefetch}` has no counterpart on FSDP2, which always gathers the next unit ahead"
        return Finding("contradiction", keys, message, "leave it out, write units ahead (`1`), or use `fsdp.version: 1`")
    if version == 1 and isinstance(prefetch, int):
        message = f"`fsdp.backward_prefetch: {prefetch}` (units ahead) needs FSDP2; version 1 takes names"
        return Finding("contradiction", keys, message, "write BACKWARD_PRE, or use `fsdp.version: 2`")
    return None


def version_1_limits(recipe: Recipe) -> Finding | None:
    """What `FullyShardedDataParallel` cannot do and `fully_shard` can."""
    if recipe.fsdp.version == 2 or not recipe.is_sharded:
        return None
    forward = recipe.fsdp.forward_prefetch
    if type(forward) is int:
        return _needs_2("fsdp.forward_prefetch", f"`fsdp.forward_prefetch: {forward}` (units ahead)")
    if recipe.kernels.compile:
        return _needs_2("kernels.compile", "`kernels.compile: true`")
    if recipe.fsdp.activation_checkpointing_offload:
        return _needs_2("fsdp.activation_checkpointing_offload", "`fsdp.activation_checkpointing_offload: true`")
    if recipe.training.on_nonfinite == "skip":  # after the forward that locates the value, FSDP1's ranks wait for ever
        return _needs_2("training.on_nonfinite", "`training.on_nonfinite: skip`")
    model = recipe.model
    if model.freeze and model.frozen_dtype not in ("auto", model.dtype):  # FSDP1 joins a unit's parameters in one flat tensor
        return _needs_2("model.frozen_dtype", f"`model.frozen_dtype: {model.frozen_dtype}` with `model.dtype: {model.dtype}`")
    reshard = recipe.fsdp.reshard_after_forward
    if type(reshard) is int:
        return _needs_2("fsdp.reshard_after_forward", f"`fsdp.reshard_after_forward: {reshard}` (ranks)")
    return None


def _needs_2(key: str, what: str) -> Finding:
    return Finding(
        "contradiction", (key, "fsdp.version"), f"{what} needs FSDP2, and the recipe asks for `fsdp.version: 1`", "use `fsdp.version: 2`"
    )


def named_modules_are_named(recipe: Recipe) -> Finding | None:
    if recipe.fsdp.auto_wrap_policy == "MODULE_NAMES_WRAP" and not recipe.fsdp.modules_to_wrap:
        message = "`fsdp.auto_wrap_policy: MODULE_NAMES_WRAP` needs names: `fsdp.modules_to_wrap` is empty"
        return Finding("missing-key", ("fsdp.auto_wrap_policy",), message, "for example `modules_to_wrap: [model.layers.*]`")
    return None


def bf16_storage(recipe: Recipe) -> Finding | None:
    if recipe.model.dtype == "bf16" and recipe.precision.mixed_precision == "fp16":
        message = "`model.dtype: bf16` keeps bf16 weights, and `precision.mixed_precision: fp16` computes in fp16"
        return Finding("contradiction", ("precision.mixed_precision", "model.dtype"), message, "with bf16 weights write `bf16` or `no`")
    return None


OUTPUT_FIELDS = re.compile(r"\{(name|seed)\}")
_SHELL_VARIABLE = re.compile(r"\$(\{)?([A-Za-z_][A-Za-z0-9_]*)(?(1)\})")


def paths_hold_no_shell_variables(recipe: Recipe) -> Finding | None:
    """`$SCRATCH/x` would become a directory of that name. Paths that are only read are refused for a `$` at their start alone."""
    read = [("model.name_or_path", recipe.model.name_or_path), ("model.tokenizer", recipe.model.tokenizer)]
    read += [(f"{key}.path", source.path) for key, source in recipe.data.sources]
    read = [(key, path) for key, path in read if path is not None and path.startswith("$")]
    for key, path in [("output_dir", recipe.output_dir), ("data.cache_dir", recipe.data.cache_dir or ""), *read]:
        if variable := _SHELL_VARIABLE.search(path):
            message = f"`{key}` holds `{shown(variable[0])}`, and a recipe does not expand variables of the shell"
            hint = "write the path out"
            if "[" not in key:
                hint += f', or let the shell fill it in: `--set {key}="{shown(path)}"`'
            return Finding("shell-variable", (key,), message, hint)
    return None


def output_dir_template(recipe: Recipe) -> Finding | None:
    keys = ("output_dir",)
    if _SHELL_VARIABLE.search(recipe.output_dir):
        return None  # `paths_hold_no_shell_variables` reports it
    rest = OUTPUT_FIELDS.sub("", recipe.output_dir)
    if "{" in rest or "}" in rest:
        braces = re.search(r"\{[^{}]*\}?|\}", rest)
        message = f"`output_dir` has `{shown(braces[0] if braces else rest)}`, which is not filled in"
        return Finding("bad-output-dir", keys, message, "only {name} and {seed} are")
    if recipe.output_dir.startswith("~"):
        return Finding("bad-output-dir", keys, "`output_dir` begins with `~`, which is not expanded", "write the path out")
    return None


def written_paths_are_printable(recipe: Recipe) -> Finding | None:
    for key, path, code in (("output_dir", recipe.output_dir, "bad-output-dir"), ("data.cache_dir", recipe.data.cache_dir, "wrong-value")):
        if found := next((character for character in path or "" if not character.isprintable()), None):
            escape = printable(found)
            message = f"`{key}` holds the control character `{escape}`"
            return Finding(code, (key,), message, f"in double quotes `{escape}` is one character: write the path in single quotes")
    return None


KERNELS = ("auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")


def attention_kernel_is_spelt_right(recipe: Recipe) -> Finding | None:
    """A name that no list of transformers has may be a model's own; one that is close to a known name is a typing error."""
    kernel = recipe.model.attn_implementation
    near = None if kernel in KERNELS or "/" in kernel else closest(kernel, KERNELS)
    if near is None:
        return None
    message = f"`model.attn_implementation` is `{shown(kernel)}`, which is not a kernel of transformers"
    return Finding("wrong-value", ("model.attn_implementation",), message, f"did you mean `{near}`?")


def ranks_need_collectives(recipe: Recipe) -> Finding | None:
    if recipe.launch.device != "mps":
        return None
    message = "`launch.device: mps`: torch.distributed has no collectives there, and the ranks of a run are made of them"
    return Finding("device-without-collectives", ("launch.device",), message, ways_out=("--set launch.device=cpu trains on the CPU",))


def cpu_limits(recipe: Recipe) -> Finding | None:
    loading = recipe.fsdp.cpu_ram_efficient_loading and given(recipe, "fsdp.cpu_ram_efficient_loading")
    if recipe.launch.device == "cpu" and recipe.fsdp.version == 1 and recipe.is_sharded:
        if loading:
            return _fsdp1_needs_a_gpu("fsdp.cpu_ram_efficient_loading", "it sends weights over NCCL only")
        if recipe.fsdp.offload_params:
            return _fsdp1_needs_a_gpu("fsdp.offload_params", "it asks for the GPU that the weights come back to")
    kernel = recipe.model.attn_implementation
    # FlashAttention is CUDA code; torch has no backward pass of FlexAttention on the CPU.
    if (
        recipe.launch.device == "cpu"
        and not attention_kernel_is_spelt_right(recipe)
        and (is_flash_kernel(kernel) or kernel == "flex_attention")
    ):
        message = f"`model.attn_implementation: {kernel}` cannot train on the CPU"
        return Finding("contradiction", ("model.attn_implementation", "launch.device"), message, "leave it at auto, or write `sdpa`")
    return None


def _fsdp1_needs_a_gpu(key: str, why: str) -> Finding:
    message = f"`{key}: true` does not work with FSDP1 on the CPU: {why}"
    return Finding("contradiction", (key, "fsdp.version", "launch.device"), message, "leave it out, or use `fsdp.version: 2`")


def liger_needs_a_gpu(recipe: Recipe) -> Finding | None:
    """Liger is Triton code; its loss rounds the gradients of the logits before fp16's loss scale reaches them."""
    kernels = recipe.kernels
    asked = [(key, value) for key, value in (("kernels.liger", kernels.liger), ("kernels.loss", kernels.loss)) if value in (True, "liger")]
    if asked and recipe.launch.device == "cpu":
        key, value = asked[0]
        message = f"`{key}: {str(value).lower()}` cannot run on `launch.device: cpu`: Liger's kernels are for GPUs"
        hint = "leave it at auto" if key == "kernels.liger" else "write `chunked`, which holds no logits either"
        return Finding("contradiction", (key, "launch.device"), message, hint)
    if kernels.loss == "liger" and recipe.precision.mixed_precision == "fp16":
        message = "`kernels.loss: liger` rounds gradients before fp16's loss scale reaches them, and most of them to zero"
        return Finding("contradiction", ("kernels.loss", "precision.mixed_precision"), message, "write `chunked`, or train in bf16")
    return None


def compiled_offload_is_of_whole_layers(recipe: Recipe) -> Finding | None:
    """What goes to the host is saved outside the compiled part of a layer, and a policy for its operators would have to look inside."""
    fsdp = recipe.fsdp
    if recipe.kernels.compile and fsdp.activation_checkpointing_offload and fsdp.activation_checkpointing == "selective":
        message = (
            "`kernels.compile: true` with `fsdp.activation_checkpointing_offload: true` compiles what is recomputed as one piece, "
            "into which `fsdp.activation_checkpointing: selective` cannot look"
        )
        keys = ("fsdp.activation_checkpointing", "fsdp.activation_checkpointing_offload", "kernels.compile")
        return Finding("contradiction", keys, message, "write `full`, or leave `activation_checkpointing_offload` out")
    return None


RULES: tuple[Rule, ...] = (
    model_source,
    config_names_its_type,
    some_training_data,
    builders_have_files,
    eval_is_not_empty,
    eval_labels_differ,
    reshard_agrees,
    offload_needs_shards,
    ddp_reduces_in_fp32,
    backward_prefetch_by_version,
    version_1_limits,
    named_modules_are_named,
    bf16_storage,
    paths_hold_no_shell_variables,
    output_dir_template,
    written_paths_are_printable,
    attention_kernel_is_spelt_right,
    ranks_need_collectives,
    cpu_limits,
    liger_needs_a_gpu,
    compiled_offload_is_of_whole_layers,
    *ENVIRONMENT_RULES,
    *OPTIMIZER_RULES,
    *FP8_RULES,
    *TRAINING_RULES,
)


def pure_bf16(recipe: Recipe) -> Finding | None:
    if recipe.model.dtype != "bf16" or rounds_by_chance(recipe):
        return None
    message = "`model.dtype: bf16` trains bf16 weights without fp32 masters: updates below 1/256 of a weight are lost"
    hint = '`training.optim_args: "bf16_stochastic_round=true"` keeps them on average; `fp32` keeps all, '
    hint += "for twice the memory of weights, gradients and optimizer state"
    return Finding("pure-bf16", ("model.dtype",), message, hint)


REMARKS: tuple[Rule, ...] = (pure_bf16,)
"""Notices about choices that are allowed and often regretted."""
