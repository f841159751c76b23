"""Where features work: fp8 and bf16, `parallelism.sp_size`, `data.streaming`, `lora:` and `quantization:`.

The rules are part of `rules.contradictions.RULES`. `recipe.world` checks the ranks of sequence parallelism;
the limits of the model itself are in `model.kernels.linear_layers`, `model.sequence_parallel` and
`model.adapters.lora`.
"""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_tune.core.expert_kernels import EXPERTS_KERNELS
from fsdp_tune.core.flash_kernels import flash_version
from fsdp_tune.recipe.schema.keys import Finding, Rule, given
from fsdp_tune.recipe.schema.recipe import Lora, Recipe
from fsdp_tune.recipe.schema.training_fields import training_value

FP8_MULTIPLE = 16
"""cuBLAS needs the inner and last sizes of fp8 matrices, widths and tokens, to be multiples of this (torch's
`_scaled_mm`)."""
OLDEST_FP8_GPU = (8, 9)
"""Compute capability of Ada; also Hopper and Blackwell. torch has kernels for one scale and for a scale per
row on all of them."""
OLDEST_BF16_GPU = (8, 0)
"""Compute capability of Ampere, the first GPUs with tensor cores for bf16 and the oldest with
FlashAttention."""
_KEY, _RECIPE, _KERNEL = "precision.mixed_precision", "precision.fp8_recipe", "model.attn_implementation"
_EXPERTS = "kernels.experts"


def computes_in_fp8(recipe: Recipe) -> bool:
    return recipe.precision.mixed_precision == "fp8"


def gathers_in_fp8(recipe: Recipe) -> bool:
    """Return whether weights are gathered in fp8: every rank has the scale of a full weight before the
    gather, but not one per column."""
    return computes_in_fp8(recipe) and recipe.precision.fp8_recipe == "tensorwise" and recipe.is_sharded


def fp8_limits(recipe: Recipe) -> Iterator[Finding]:
    fsdp = recipe.fsdp
    if computes_in_fp8(recipe) and fsdp.version == 1 and recipe.is_sharded:
        message = (
            f"`{_KEY}: fp8` needs FSDP2: `fsdp.version: 1` concatenates weights into flat vectors, which "
            "have no scale for each weight"
        )
        yield Finding(
            "contradiction", (_KEY, "fsdp.version"), message, "use `fsdp.version: 2`, or write `bf16`"
        )
    if not gathers_in_fp8(recipe):
        return
    if (
        fsdp.offload_params
    ):  # torch copies an offloaded shard to the device first, and torchao's scale is lost in that copy
        message = (
            f"`{_RECIPE}: tensorwise` gathers in fp8, and `fsdp.offload_params: true` keeps weights on "
            "the host, where the scale is lost"
        )
        yield Finding(
            "contradiction",
            (_RECIPE, "fsdp.offload_params"),
            message,
            "write `fp8_recipe: rowwise`, which gathers in bf16",
        )
    if type(fsdp.reshard_after_forward) is int:
        value = f"`fsdp.reshard_after_forward: {fsdp.reshard_after_forward}` (ranks)"
        hint = "write `fp8_recipe: rowwise`, or leave `reshard_after_forward` out"
        message = f"{value} keeps a part of the gathered weights, which FSDP2 cannot do with fp8"
        yield Finding("contradiction", (_RECIPE, "fsdp.reshard_after_forward"), message, hint)


def fp8_gpu_problem(name: str, capability: tuple[int, int]) -> Finding | None:
    """Return the problem of computing in fp8 on a GPU that has no units for it."""
    if capability >= OLDEST_FP8_GPU:
        return None
    wanted, has = ".".join(map(str, OLDEST_FP8_GPU)), ".".join(map(str, capability))
    message = f"`{_KEY}: fp8` needs compute capability {wanted} (Ada, Hopper, Blackwell); {name} has {has}"
    older = "bf16" if capability >= OLDEST_BF16_GPU else "fp16"
    return Finding("fp8-gpu-too-old", (_KEY,), message, f"write `{_KEY}: {older}`")


def flash_gpu_problem(recipe: Recipe, name: str, capability: tuple[int, int]) -> Finding | None:
    """Return the problem of a FlashAttention that has no kernels for a GPU: the first step would fail with
    "no kernel image"."""
    kernel = recipe.model.attn_implementation
    flash = flash_version(kernel)
    if flash is None or (reason := flash.against(name, capability)) is None:
        return None
    return Finding(
        "flash-gpu-unsupported", (_KERNEL,), f"`{_KERNEL}: {kernel}`: {reason}", f"write `{_KERNEL}: auto`"
    )


def experts_gpu_problem(recipe: Recipe, name: str, capability: tuple[int, int]) -> Finding | None:
    """Return the problem of a kernel for experts that has none for a GPU."""
    requested = recipe.kernels.experts
    if requested == "auto" or (reason := EXPERTS_KERNELS[requested].against(name, capability)) is None:
        return None
    return Finding(
        "experts-gpu-unsupported",
        (_EXPERTS,),
        f"`{_EXPERTS}: {requested}`: {reason}",
        f"write `{_EXPERTS}: auto`",
    )


def experts_kernel(recipe: Recipe) -> Iterator[Finding]:
    """Refuse kernels for experts on devices, in dtypes and under a compiler that do not have them."""
    requested = recipe.kernels.experts
    if requested == "auto":
        return
    kernel, written = EXPERTS_KERNELS[requested], f"`{_EXPERTS}: {requested}`"
    if kernel.generations and recipe.launch.device not in ("auto", "cuda"):
        message = f"{written} has kernels for CUDA, and `launch.device` is {recipe.launch.device}"
        yield Finding("contradiction", (_EXPERTS, "launch.device"), message, "leave `experts` at auto")
    if kernel.generations and recipe.compute_dtype == "fp32":
        message = f"{written} computes in 16 bits, and this recipe computes in fp32"
        yield Finding(
            "contradiction",
            (_EXPERTS, _KEY),
            message,
            "leave `experts` at auto, or write `mixed_precision: bf16`",
        )
    elif kernel.generations and not recipe.is_sharded and recipe.model.dtype == "fp32":
        # Autocast casts nothing that is given to a kernel of another package; under FSDP the weights
        # themselves are in 16 bits.
        message = (
            f"{written} computes in 16 bits, and without sharding the weights that it is given are in "
            "fp32 (`model.dtype`)"
        )
        hint = f"leave `experts` at auto, or write `dtype: {recipe.compute_dtype}`"
        yield Finding("contradiction", (_EXPERTS, "model.dtype"), message, hint)
    if recipe.kernels.compile and not kernel.compiles:
        message = (
            f"{written} loops over the experts that were chosen, which `kernels.compile: true` would "
            "compile for each set of them"
        )
        yield Finding("contradiction", (_EXPERTS, "kernels.compile"), message, "leave `experts` at auto")


EXPERTS_RULES: tuple[Rule, ...] = (experts_kernel,)


def slow_bf16(recipe: Recipe, name: str, capability: tuple[int, int]) -> Finding | None:
    """Return what to know about bf16 on a GPU whose tensor cores lack it: libraries compute it there all the
    same, slowly."""
    if computes_in_fp8(recipe) or recipe.compute_dtype != "bf16" or capability >= OLDEST_BF16_GPU:
        return None
    has = ".".join(map(str, capability))
    message = (
        f"{name} (compute capability {has}) has no tensor cores for bf16, which it emulates several "
        "times slower than it computes fp16"
    )
    if recipe.precision.mixed_precision == "bf16":
        return Finding("bf16-gpu-too-old", (_KEY,), message, f"write `{_KEY}: fp16`")
    return Finding(
        "bf16-gpu-too-old", ("model.dtype",), message, f"write `model.dtype: fp32` and `{_KEY}: fp16`"
    )


def slow_bf16_cpu(recipe: Recipe) -> Finding | None:
    """Return what bf16 costs on CPU ranks whose CPU has no instructions for it."""
    if recipe.compute_dtype != "bf16":
        return None
    keys = (_KEY,) if recipe.model.dtype == "fp32" else ("model.dtype", _KEY)
    message = (
        "this CPU has no instructions for bf16 (AMX, AVX512_BF16): linear layers take 5 to 26 times as "
        "long as in fp32"
    )
    return Finding(
        "bf16-cpu-slow",
        keys,
        message,
        " ".join(f"--set {key}={'fp32' if key == 'model.dtype' else 'no'}" for key in keys),
    )


FP8_RULES: tuple[Rule, ...] = (fp8_limits,)


_SP_KEY = "parallelism.sp_size"


def rows_divide(recipe: Recipe) -> Iterator[Finding]:
    """Require that `sp_size` divides every row: those of `max_length` tokens, and shorter ones with their
    padding."""
    size, longest, padding = (
        recipe.parallelism.of_row.sequence,
        recipe.data.max_length,
        recipe.data.pad_to_multiple_of,
    )
    what = f"`{_SP_KEY}: {size}` divides each row over as many ranks"
    if longest % size:
        message = f"{what}, and `data.max_length: {longest}` is not a multiple of {size}"
        below, above = longest // size * size, -(-longest // size) * size
        yield Finding(
            "indivisible",
            ("data.max_length", _SP_KEY),
            message,
            f"write {f'{below} or ' if below else ''}{above}",
        )
    if padding % size and given(recipe, "data.pad_to_multiple_of"):
        message = f"{what}, and `data.pad_to_multiple_of: {padding}` is not a multiple of {size}"
        yield Finding(
            "indivisible", ("data.pad_to_multiple_of", _SP_KEY), message, "leave `pad_to_multiple_of` out"
        )


def sequence_limits(recipe: Recipe) -> Iterator[Finding]:
    """Refuse what was not shown to train as it does with `sp_size: 1`."""
    size, fsdp = recipe.parallelism.of_row.sequence, recipe.fsdp
    if size == 1:
        return
    dropout = recipe.lora.lora_dropout if recipe.lora is not None else 0.0
    kernel, noise = recipe.model.attn_implementation, training_value(recipe.training, "neftune_noise_alpha")
    refused = {
        "fsdp.version": (
            fsdp.version == 1 and recipe.is_sharded and "`fsdp.version: 1`",
            "use `fsdp.version: 2`",
        ),
        "kernels.compile": (
            recipe.kernels.compile
            and "`kernels.compile: true` (layers would be compiled with the exchange of tokens inside)",
            "leave `compile` out",
        ),
        _RECIPE: (
            computes_in_fp8(recipe)
            and recipe.precision.fp8_recipe == "tensorwise"
            and f"`{_RECIPE}: tensorwise` (the scale of a token would depend on the other tokens of "
            "its rank)",
            "write `fp8_recipe: rowwise`, which has a scale for each token in the forward pass and "
            "in the gradient of the input",
        ),
        "lora.lora_dropout": (
            dropout
            and f"`lora.lora_dropout: {dropout}` (a token's mask would depend on the rank that holds "
            "the token)",
            "write `lora_dropout: 0`",
        ),
        "training.neftune_noise_alpha": (
            noise
            and f"`training.neftune_noise_alpha: {noise:g}` (the noise is scaled by the length of the row)",
            "leave `neftune_noise_alpha` out",
        ),
        "extensions.metrics": (
            recipe.extensions.metrics
            and "`extensions.metrics` (a rank has the logits of its part of a row only)",
            "leave `metrics` out",
        ),
        "model.attn_implementation": (
            kernel == "flex_attention" and f"`model.attn_implementation: {kernel}`",
            "leave it at auto",
        ),
    }
    for key, (what, hint) in refused.items():
        if what:
            yield Finding(
                "contradiction", (key, _SP_KEY), f"`{_SP_KEY}: {size}` does not support {what}", hint
            )


SEQUENCE_RULES: tuple[Rule, ...] = (rows_divide, sequence_limits)


_STREAMING = "data.streaming"
_WHY = "`data.streaming: true` reads rows while the run trains"


def stream_has_an_end(recipe: Recipe) -> Iterator[Finding]:
    if recipe.data.streaming and training_value(recipe.training, "max_steps") <= 0:
        message = f"{_WHY}, so their number is unknown, and `training.max_steps` is missing"
        yield Finding("missing-key", (_STREAMING, "training"), message, "write `training.max_steps`")


def stream_needs_no_prepared_rows(recipe: Recipe) -> Iterator[Finding]:
    """Refuse what needs all rows before the first step."""
    data = recipe.data
    if not data.streaming:
        return
    if data.eval is not None and not isinstance(data.eval, list):
        message = f"{_WHY}, and `data.eval` would hold out a part of all rows"
        yield Finding(
            "contradiction",
            ("data.eval", _STREAMING),
            message,
            "give the rows to evaluate on as sources: `eval: [{path: …}]`",
        )
    if recipe.training.per_device_train_batch_tokens is not None:
        message = f"{_WHY}, and `training.per_device_train_batch_tokens` forms batches of all rows by length"
        keys = ("training.per_device_train_batch_tokens", _STREAMING)
        yield Finding("contradiction", keys, message, "use `data.packing: true`, which fills rows")
    if data.drop_duplicates:
        message = f"{_WHY}, and `data.drop_duplicates: true` compares all rows with each other"
        yield Finding("contradiction", ("data.drop_duplicates", _STREAMING), message, "leave one of them out")
    if data.mixture.temperature != 1.0:
        message = (
            f"{_WHY}, so the sizes of the sources, which `data.mixture.temperature` flattens, are unknown"
        )
        yield Finding(
            "contradiction", ("data.mixture.temperature", _STREAMING), message, "give each source a `weight`"
        )
    for index in [index for index, source in enumerate(data.train) if source.max_rows is not None]:
        key = f"data.train[{index}].max_rows"
        message = (
            f"{_WHY}, in lanes that do not read it from its beginning to its end, so `max_rows` has "
            "no meaning"
        )
        yield Finding("contradiction", (key, _STREAMING), message, "select files by `data_files`")


def stream_has_no_epochs(recipe: Recipe) -> Iterator[Finding]:
    """Refuse to act once an epoch: the only one ends with the run, so that a run that is stopped would have
    no checkpoint."""
    for name in ("save_strategy", "eval_strategy", "logging_strategy"):
        if recipe.data.streaming and training_value(recipe.training, name) == "epoch":
            key = f"training.{name}"
            message = (
                f"`{key}: epoch` waits for the end of an epoch, and `data.streaming: true` has none "
                "before the last step"
            )
            yield Finding("contradiction", (key, _STREAMING), message, f"write `{name}: steps`")


def mixture_of_a_stream_has_weights(recipe: Recipe) -> Iterator[Finding]:
    data = recipe.data
    if not data.streaming or len(data.train) < 2:
        return
    if missing := [index for index, source in enumerate(data.train) if source.weight is None]:
        message = (
            f"{_WHY}, so the sizes of the sources are unknown, and `data.train[{missing[0]}]` has no `weight`"
        )
        yield Finding(
            "missing-key",
            (f"data.train[{missing[0]}]", _STREAMING),
            message,
            "give each source a `weight`, its share",
        )


def curriculum_is_in_order(recipe: Recipe) -> Iterator[Finding]:
    data, before = recipe.data, 0
    for index, stage in enumerate(data.curriculum):
        key = f"data.curriculum[{index}]"
        if stage.until_step <= before:
            message = f"`{key}` ends at step {stage.until_step}, and the stage before it at step {before}"
            yield Finding(
                "wrong-value", (f"{key}.until_step",), message, "write the stages in the order of their steps"
            )
        if len(stage.weights) != len(data.train) or not any(stage.weights):
            message = (
                f"`{key}.weights` has {len(stage.weights)} values, and `data.train` {len(data.train)} entries"
            )
            if len(stage.weights) == len(data.train):
                message = f"`{key}.weights` are all 0"
            yield Finding(
                "wrong-value", (f"{key}.weights",), message, "write one number for each entry, in their order"
            )
        before = stage.until_step


def passes_are_of_a_stream(recipe: Recipe) -> Iterator[Finding]:
    for index, source in enumerate(recipe.data.train):
        if source.repeats is not None and not recipe.data.streaming:
            key = f"data.train[{index}].repeats"
            message = f"`{key}` limits the passes over a stream, and `data.streaming` is false"
            yield Finding(
                "contradiction",
                (key, _STREAMING),
                message,
                "use `training.num_train_epochs`, or `weight`s of the sources",
            )


STREAMING_RULES: tuple[Rule, ...] = (
    *(
        stream_has_an_end,
        stream_needs_no_prepared_rows,
        stream_has_no_epochs,
        mixture_of_a_stream_has_weights,
    ),
    *(curriculum_is_in_order, passes_are_of_a_stream),
)


def lora_limits(recipe: Recipe) -> Iterator[Finding]:
    if recipe.lora is None:
        return
    if recipe.model.from_config is not None:
        message = (
            "`lora:` trains a small change of a trained model, and `model.from_config` starts from "
            "random weights, which nothing keeps"
        )
        yield Finding(
            "contradiction",
            ("model.from_config", "lora"),
            message,
            "write `model.name_or_path`, or leave `lora:` out",
        )
    if recipe.model.freeze:
        message = "`model.freeze` has no effect with `lora:`, which freezes every parameter of the model"
        yield Finding(
            "contradiction",
            ("model.freeze", "lora"),
            message,
            "leave it out; `lora.modules_to_save` names modules to train in full",
        )
    if recipe.fsdp.version == 1 and recipe.is_sharded:
        message = (
            "`lora:` needs FSDP2: `fsdp.version: 1` joins frozen and trained parameters of a unit in one "
            "flat tensor of one dtype"
        )
        yield Finding("contradiction", ("fsdp.version", "lora"), message, "use `fsdp.version: 2`")
    start = recipe.lora.init_lora_weights
    if isinstance(start, str) and start != "gaussian":
        message = (
            f"`lora.init_lora_weights: {start}` is not supported: initialisations from the weights "
            "(PiSSA, OLoRA, EVA …) change the base"
        )
        yield Finding(
            "wrong-value",
            ("lora.init_lora_weights",),
            message,
            "write true (A uniform, B zero) or gaussian (A normal, B zero)",
        )
    if recipe.lora.use_dora and recipe.lora.init_lora_weights is False:
        message = (
            "`lora.use_dora: true` with `init_lora_weights: false` is not supported: the lengths of the "
            "rows are those of the base"
        )
        yield Finding(
            "contradiction",
            ("lora.init_lora_weights", "lora.use_dora"),
            message,
            "leave `init_lora_weights` out",
        )
    if recipe.lora.target_parameters:
        yield from _of_parameters(recipe, recipe.lora)
    if computes_in_fp8(recipe):
        message = (
            "`precision.mixed_precision: fp8` with `lora:` is not supported: the adapted layers "
            "compute in bf16"
        )
        yield Finding("contradiction", ("precision.mixed_precision", "lora"), message, "write `bf16`")


def _of_parameters(recipe: Recipe, lora: Lora) -> Iterator[Finding]:
    key, why = (
        "lora.target_parameters",
        "an adapter of stacked matrices is added to them before they multiply",
    )
    if lora.lora_dropout:
        yield Finding(
            "contradiction",
            ("lora.lora_dropout", key),
            f"`lora.lora_dropout` with `{key}` is not supported: {why}",
            "write 0",
        )
    if lora.use_dora:
        message = f"`lora.use_dora: true` with `{key}` is not supported"
        yield Finding("contradiction", ("lora.use_dora", key), message, "write `use_dora: false`")
    if recipe.kernels.compile:
        message = (
            f"`kernels.compile: true` with `{key}` is not supported: layers would be recompiled in every step"
        )
        yield Finding("contradiction", ("kernels.compile", key), message, "write `kernels: {compile: false}`")
    if recipe.kernels.liger is True:
        message = (
            f"`kernels.liger: true` with `{key}` is not supported: Liger would replace the forward of "
            "the adapted experts"
        )
        yield Finding("contradiction", ("kernels.liger", key), message, "write `kernels: {liger: auto}`")


_TRAIN = "quantization.train"


def quantization_limits(recipe: Recipe) -> Iterator[Finding]:
    if (
        recipe.quantization is not None
        and recipe.quantization.load is None
        and recipe.quantization.train is None
    ):
        message = "`quantization: {load: null}` without `train` quantises nothing"
        yield Finding(
            "missing-key",
            ("quantization.load", "quantization"),
            message,
            "leave `quantization` out, or write `train: int4`",
        )
    if recipe.nf4 is None:
        return
    if recipe.lora is None:
        message = (
            "`quantization:` holds frozen weights in 4 bits, which cannot be trained: `lora:` is missing"
        )
        keys = ("quantization.load", "quantization", _TRAIN)  # with `train`, `load` has another default
        yield Finding("contradiction", keys, message, "add `lora: {}`, or leave `quantization` out")
    if recipe.merge.dtype == "keep" and recipe.merge.base == "trained" and recipe.merge.adapter != "adapter":
        message = (
            "`merge.dtype: keep` cannot keep the trained weights of `quantization.load`, which are in 4 bits"
        )
        yield Finding(
            "contradiction",
            ("merge.dtype", "quantization", _TRAIN),
            message,
            "leave `merge.dtype` out, or write `merge: {base: original}`",
        )


def quantised_training_limits(recipe: Recipe) -> Iterator[Finding]:
    """Refuse what `quantization.train` would train otherwise than the converted model computes."""
    section = recipe.quantised_training
    if section is None:
        return
    what = f"`{_TRAIN}: {section.train}`"
    if section.load is not None:
        message = (
            f"{what} trains the weights, and `quantization.load: {section.load}` holds frozen ones in 4 bits"
        )
        yield Finding("contradiction", (_TRAIN, "quantization.load"), message, "leave one of them out")
    elif recipe.lora is not None:
        message = (
            f"{what} with `lora:` is not supported: PEFT adds the adapter to the product of rounded "
            "weights, torchao has no layer that "
        )
        message += "rounds their sum, and the merged and converted model would compute with the rounded sum"
        hint = "leave `lora:` out, or train an adapter on a quantised base: `quantization: {load: nf4}`"
        yield Finding("contradiction", (_TRAIN, "lora"), message, hint)
    if section.group_size == 1:
        yield Finding(
            "wrong-value",
            ("quantization.group_size",),
            "`quantization.group_size: 1` is a scale for each weight",
            "write 32",
        )
    if recipe.merge.quantise and recipe.merge.dtype not in ("auto", "keep", "fp32", recipe.compute_dtype):
        message = (
            f"`merge.quantise: true` rounds weights of {recipe.compute_dtype}, and `merge.dtype: "
            f"{recipe.merge.dtype}` has others"
        )
        yield Finding("contradiction", ("merge.dtype", "merge.quantise"), message, "leave `merge.dtype` out")
    if computes_in_fp8(recipe):
        message = f"{what} with `{_KEY}: fp8` is not supported: both replace the linear layers"
        yield Finding("contradiction", (_KEY, _TRAIN), message, "write `bf16`")
    if recipe.kernels.compile and recipe.compute_dtype != "fp32":
        message = (
            f"{what} with `kernels.compile: true` in {recipe.compute_dtype} is not supported: a compiled "
            "graph computes scales in fp32"
        )
        message += ", so that weights near an edge are rounded to another value than in the converted model"
        yield Finding("contradiction", ("kernels.compile", _TRAIN), message, "leave `kernels.compile` out")
    if recipe.kernels.mlp_slice_tokens is not None:
        message = (
            f"{what} with `kernels.mlp_slice_tokens` is not supported: the weights would be quantised "
            "again for each slice"
        )
        yield Finding(
            "contradiction", ("kernels.mlp_slice_tokens", _TRAIN), message, "leave `mlp_slice_tokens` out"
        )


ADAPTER_RULES: tuple[Rule, ...] = (lora_limits, quantization_limits, quantised_training_limits)
