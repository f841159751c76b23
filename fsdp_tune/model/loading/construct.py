"""Construct the recipe's Hugging Face causal LM: from weights, from a config with random weights, or empty on
the meta device."""

from __future__ import annotations

import copy
import difflib
import fnmatch
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from fsdp_tune.core.errors import FsdpTuneError, Problem, Where, usage_error
from fsdp_tune.core.library_errors import first_line
from fsdp_tune.model.adapters.lora import inject_lora, name_in_base
from fsdp_tune.model.adapters.nf4 import quantise_layers
from fsdp_tune.model.experts import allow_any_width
from fsdp_tune.model.kernels.attention import choose_attention
from fsdp_tune.model.loading.adapter_files import check_adapter, start_adapters
from fsdp_tune.model.loading.kept_precision import follow_names, keep_precision
from fsdp_tune.model.loading.language_model import of_other_modalities
from fsdp_tune.model.loading.model_config import model_config, model_not_found
from fsdp_tune.model.loading.rope_scaling import require_rotary_scaling
from fsdp_tune.model.loading.rotary import fix_rotary_frequencies
from fsdp_tune.model.loading.stored_tensors import Stored, decoding, read_whole
from fsdp_tune.model.loading.unfilled import LoadingInfo, not_converted, require_filled
from fsdp_tune.model.loading.weight_slices import WeightFiles, find_weight_files
from fsdp_tune.model.model_files import untrained_tokens
from fsdp_tune.model.shard.local import TORCH_DTYPE, kept_in_fp32
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import run_of


def attention(recipe: Recipe, config: PreTrainedConfig) -> str | None:
    """Return the attention kernel to request from transformers; None selects the model's default."""
    chosen = choose_attention(recipe, config).value
    return None if chosen == "auto" else chosen


def storage_dtype(recipe: Recipe) -> torch.dtype:
    return TORCH_DTYPE[recipe.model.dtype]


def _refused(recipe: Recipe, config: PreTrainedConfig, error: Exception) -> FsdpTuneError:
    """Return the error for a model that transformers rejects, for an unsupported attention kernel or a
    missing package."""
    reason = first_line(error).partition(". ")[0]
    if config.get_text_config() is not config and "configuration class" in reason:
        return of_other_modalities(str(recipe.model.name_or_path), config, recipe.model.revision)
    kernel = recipe.model.attn_implementation
    is_of_kernel = kernel != "auto" and (kernel in reason or "attention implementation" in reason)
    key = "model.attn_implementation" if is_of_kernel else "model"
    hint = "`auto` chooses a kernel that is installed and that the model supports" if is_of_kernel else None
    return FsdpTuneError(
        Problem("model-refused", f"transformers rejects this model: {reason}", Where(key=key), hint)
    )


def _from_config(recipe: Recipe, config: PreTrainedConfig) -> PreTrainedModel:
    model = construct(recipe, config, storage_dtype(recipe))
    _settle(recipe, model)
    return model


def construct(recipe: Recipe, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Construct the model's class in `dtype` on the current device, as it is. Raises: error for a model that
    transformers rejects."""
    # Resizing the embedding writes its size into the model's config, so each model gets a copy.
    own = copy.deepcopy(config)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            own,
            dtype=dtype,
            attn_implementation=attention(recipe, own),
            trust_remote_code=recipe.model.trust_remote_code,
        )
    except (ValueError, ImportError) as error:
        raise _refused(recipe, config, error) from error
    return model


def _settle(recipe: Recipe, model: PreTrainedModel, like: PreTrainedModel | None = None) -> None:
    allow_any_width()
    keep_precision(model, storage_dtype(recipe), TORCH_DTYPE[recipe.compute_dtype], like)
    require_rotary_scaling(recipe, model)
    fix_rotary_frequencies(model, recipe.data.max_length)


def build_empty(
    recipe: Recipe, config: PreTrainedConfig | None = None, *, vocabulary: int | None = None
) -> PreTrainedModel:
    """Build the model with parameters and buffers on the meta device: names, shapes and dtypes without
    memory."""
    with torch.device("meta"):
        model = _from_config(recipe, config or model_config(recipe))
        _finish(recipe, model, vocabulary)
    return model


def build_base(recipe: Recipe, config: PreTrainedConfig) -> PreTrainedModel:
    """Build the model of `build_empty` as its class makes it: without adapters, and with all parameters
    trained."""
    with torch.device("meta"):
        return _from_config(recipe, config)


def _constructed(recipe: Recipe, config: PreTrainedConfig) -> PreTrainedModel:
    """Return the class in the dtype of the recipe, on the meta device: weights to be quantised are read in
    fp32."""
    with torch.device("meta"):
        return construct(recipe, config, storage_dtype(recipe))


def build_with_buffers(recipe: Recipe, config: PreTrainedConfig) -> PreTrainedModel:
    """Build the model with parameters on the meta device and buffers with their real values."""
    with init_empty_weights(include_buffers=False):
        return _from_config(recipe, config)


def build_full(
    recipe: Recipe, config: PreTrainedConfig | None = None, *, vocabulary: int | None = None
) -> PreTrainedModel:
    """Build the model with real weights in host memory: read, or drawn from `training.seed`.

    `vocabulary` is the number of tokenizer entries; a smaller embedding grows when `model.resize_embeddings`
    is set.
    """
    config = config or model_config(recipe)
    torch.manual_seed(recipe.training.seed)
    if recipe.model.from_config is not None or run_of(Path(str(recipe.model.name_or_path))) is not None:
        # The weights of a run are loaded from its sharded checkpoint after this model is wrapped.
        model = _from_config(recipe, config)
    else:
        model, loading = _from_files(recipe, config)
        require_filled(recipe, model, loading)
        if recipe.model.config_overrides.get("tie_word_embeddings") is False:
            start_untied_head(model, loading["missing_keys"])
        _settle(recipe, model, _constructed(recipe, config) if recipe.nf4 is not None else None)
    _finish(recipe, model, vocabulary)
    if recipe.nf4 is not None:  # trained parameters were read in fp32 too
        kept = kept_in_fp32(model)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and name not in kept:
                parameter.data = parameter.data.to(storage_dtype(recipe))
    start_adapters(recipe, model)
    return model


def _from_files(recipe: Recipe, config: PreTrainedConfig) -> tuple[PreTrainedModel, LoadingInfo]:
    """Return the model with the weights of its files, and the account of transformers about them
    (`output_loading_info`)."""
    name, files = str(recipe.model.name_or_path), None
    options: dict[str, object] = {
        # Rounded to bf16 first, some weights would get other codes in 4 bits.
        "dtype": storage_dtype(recipe) if recipe.nf4 is None else torch.float32,
        "attn_implementation": attention(recipe, config),
        "low_cpu_mem_usage": True,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # `require_filled` reports them
    }
    try:
        files = find_weight_files(recipe)
        if files is not None and files.has_codes:
            return _from_codes(recipe, config, files, options)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            config=copy.deepcopy(config),
            revision=recipe.model.revision,
            trust_remote_code=recipe.model.trust_remote_code,
            **options,
        )
    except (OSError, ValueError) as error:
        raise model_not_found(name, error) from error
    except RuntimeError as error:
        if "automatic conversion" not in str(error):
            raise
        raise not_converted() from error
    return loaded


def _from_codes(
    recipe: Recipe, config: PreTrainedConfig, files: WeightFiles, options: dict[str, Any]
) -> tuple[PreTrainedModel, LoadingInfo]:
    """Load a model whose quantised weights are decoded as transformers reads each of them."""
    empty = build_base(recipe, config)
    state = {name: _Lazy(stored) for name, stored in files.tensors.items()}
    with decoding():
        loaded: Any = type(empty).from_pretrained(None, config=empty.config, state_dict=state, **options)
    return loaded


class _Lazy:
    """A stored tensor that transformers reads by `tensor[...]`, as it does a slice of safetensors."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored

    def __getitem__(self, _: object) -> torch.Tensor:
        return read_whole(self._stored).view(self._stored.shape)


@torch.no_grad()
def start_untied_head(model: PreTrainedModel, missing: Collection[str]) -> None:
    """Copy the embedding into a head that the files lack, since they hold tied weights once. transformers
    would draw it at random."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if head is not None and any(model.get_parameter(name) is head.weight for name in missing):
        head.weight.copy_(embedding.weight)


def _finish(recipe: Recipe, model: PreTrainedModel, vocabulary: int | None) -> None:
    _refuse_layerdrop(model)
    has_grown = resize_embeddings(recipe, model, vocabulary)
    # Routing biases of mixtures of experts, sinusoidal positions: the read-back must not report them as
    # errors.
    model.frozen_by_its_code = frozenset(name for name, p in model.named_parameters() if not p.requires_grad)  # type: ignore[assignment]
    if recipe.lora is None:
        freeze(recipe, model)
    else:
        inject_lora(recipe, model, storage_dtype(recipe))
        follow_names(model)
        check_adapter(recipe, model)
        if has_grown and not trains_new_tokens(model):
            raise untrained_tokens(recipe, is_tied=is_tied(model))
    check_parameter_groups(recipe, model)
    quantise_layers(recipe, model)
    _store_frozen(recipe, model)
    model.config.use_cache = False


def _refuse_layerdrop(model: PreTrainedModel) -> None:
    """Refuse a model that skips layers at random. Raises: usage error.

    Each rank draws from its own generator, so ranks would skip different layers: FSDP would wait forever for
    ranks that never gather a layer, and DDP for gradients that are never computed.
    """
    rate = max(
        (
            rate
            for module in model.modules()
            if isinstance(rate := getattr(module, "layerdrop", None), int | float)
        ),
        default=0.0,
    )
    if rate <= 0.0:
        return
    fields = [
        name for name, value in model.config.to_dict().items() if name.endswith("layerdrop") and value == rate
    ]
    name = next((name for name in fields if not name.startswith("encoder")), "layerdrop")
    raise usage_error(
        "layerdrop-not-supported",
        f"{type(model).__name__} skips layers at random (`{name}: {rate}` in its configuration); "
        "ranks would skip different layers and wait for each other forever",
        where=Where(key="model.config_overrides"),
        hint=f"--set model.config_overrides.{name}=0.0, or write `model.config_overrides: {{{name}: 0.0}}`",
    )


def frozen_by_its_code(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of the parameters that the model's constructor froze, independent of the recipe."""
    names: frozenset[str] = vars(model).get("frozen_by_its_code", frozenset())
    return names


def embedding_rows(model: PreTrainedModel) -> int:
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def is_embedding_trained(model: PreTrainedModel) -> bool:
    return any(parameter.requires_grad for parameter in model.get_input_embeddings().parameters())


def trains_new_tokens(model: PreTrainedModel) -> bool:
    """Return whether all rows of embedding and head are trained in full: new ones begin with drawn values,
    which no adapter's file has."""
    modules = [
        module
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        if module is not None
    ]
    return all(module.weight.requires_grad for module in modules)


def is_tied(model: PreTrainedModel) -> bool:
    """Return whether embedding and head are one weight."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is getattr(model.get_input_embeddings(), "weight", None)


def resize_embeddings(recipe: Recipe, model: PreTrainedModel, vocabulary: int | None) -> bool:
    """Grow the embedding to the size of the tokenizer if the recipe allows it; a larger embedding stays.
    Return whether it grew.

    Raises: usage error.
    """
    if vocabulary is None or vocabulary <= (rows := embedding_rows(model)):
        return False
    if not recipe.model.grows_embedding:
        raise usage_error(
            "vocabulary-larger-than-embedding",
            f"the tokenizer has {vocabulary} entries and the model's embedding {rows} rows",
            ways_out=(
                "--set model.resize_embeddings=true grows the embedding",
                "set the tokenizer that belongs to the model",
            ),
        )
    # mean_resizing draws the new rows from the distribution of the old ones, which have no values on the meta
    # device.
    on_meta = model.get_input_embeddings().weight.device.type == "meta"
    model.resize_token_embeddings(vocabulary, mean_resizing=not on_meta)
    return True


def freeze(recipe: Recipe, model: nn.Module) -> None:
    """Stop training parameters that match `model.freeze`. Raises: usage error for a pattern without a match,
    or if nothing is left."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in recipe.model.freeze:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise usage_error(
                "freeze-matches-nothing",
                f"model.freeze: `{pattern}` matches no parameter",
                hint=f"names look like `{names[0]}`",
            )
    for name in names:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in recipe.model.freeze):
            model.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise usage_error(
            "nothing-to-train", "model.freeze matches every parameter: nothing is left to train"
        )


def check_parameter_groups(recipe: Recipe, model: nn.Module) -> None:
    """Raises: usage error if a pattern of `training.parameter_groups` matches no trained parameter, or only
    those of earlier entries."""
    names, key = (
        [name for name, parameter in model.named_parameters() if parameter.requires_grad],
        "training.parameter_groups",
    )
    taken: set[str] = set()
    for index, group in enumerate(recipe.training.parameter_groups):
        matched = {
            pattern: {name for name in names if fnmatch.fnmatchcase(name, pattern)} for pattern in group.match
        }
        for pattern, found in matched.items():
            which = f"{key}[{index}].match: `{pattern}` matches"
            if not found:
                near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
                hint = f"the nearest names are {', '.join(f'`{name}`' for name in near)}"
                raise usage_error(
                    "parameter-group-matches-nothing",
                    f"{which} no trained parameter",
                    where=Where(key=key),
                    hint=hint,
                )
            if found <= taken:
                message = (
                    f"{which} only parameters that earlier entries match, such as `{min(found)}`; the "
                    "first entry that matches counts"
                )
                raise usage_error(
                    "parameter-group-hidden",
                    message,
                    where=Where(key=key),
                    hint="write narrower entries before wider ones",
                )
        taken |= set().union(*matched.values())


def _store_frozen(recipe: Recipe, model: PreTrainedModel) -> None:
    """Store the parameters that the recipe froze in `model.frozen_dtype`; those that the model's own code
    froze keep their dtype.

    A frozen parameter in the same module as a trained one keeps its dtype: kernels such as the CPU's layer
    norm need one dtype for both. So do norms and biases beside layers that are trained in fp32: the autocast
    of NO_SHARD casts what a matrix multiplies and leaves an fp32 input of a norm as it is, and a checkpoint
    has the same dtypes under every strategy. With `lora:` no checkpoint has them, and they
    keep their dtype under NO_SHARD alone: there a norm gets fp32 from a module of `lora.modules_to_save`.
    What the class keeps in fp32 stays so.
    """
    frozen_dtype = TORCH_DTYPE[
        recipe.compute_dtype if recipe.model.frozen_dtype == "auto" else recipe.model.frozen_dtype
    ]
    keeps_vectors = recipe.lora is None or not recipe.is_sharded
    own, kept = frozen_by_its_code(model), kept_in_fp32(model)
    for owner_name, owner in model.named_modules():
        parameters = dict(owner.named_parameters(recurse=False))
        if any(parameter.requires_grad for parameter in parameters.values()):
            continue
        for name, parameter in parameters.items():
            full_name = f"{owner_name}.{name}" if owner_name else name
            is_kept = (
                full_name in kept or name_in_base(full_name) in own or (keeps_vectors and parameter.ndim < 2)
            )
            if parameter.is_floating_point() and not is_kept:
                parameter.data = parameter.data.to(frozen_dtype)
