"""Load a model that is evaluated, as any user of transformers does; an adapter on the base that it was
trained on.

A run of this package may hold its base in 4 bits and change its configuration, which PEFT's files do not
record: base.json does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from fsdp_tune.answer.find_model import ModelToEvaluate
from fsdp_tune.answer.model_requests import Request
from fsdp_tune.core.errors import failed_error, usage_error
from fsdp_tune.core.hub import HubResource, hub_is_reachable
from fsdp_tune.core.library_errors import first_line
from fsdp_tune.core.tensors.peft_config import CONFIG_FILE, WEIGHTS_FILE, is_trained_in_full
from fsdp_tune.core.tensors.peft_names import PREFIX, without_copies
from fsdp_tune.core.tensors.quantised_formats import scales_among
from fsdp_tune.model.adapters.nf4 import SCALE_DTYPE, dequantise, quantise
from fsdp_tune.model.internals.transformers_internals import forget_kernels
from fsdp_tune.model.loading.adapter_files import published_prefixes
from fsdp_tune.model.loading.construct import embedding_rows, is_tied, start_untied_head
from fsdp_tune.model.loading.stored_tensors import tensors_of
from fsdp_tune.model.shard.local import TORCH_DTYPE
from fsdp_tune.run.base_model import BaseModel

if TYPE_CHECKING:
    from peft import PeftModel


def load_model(model: ModelToEvaluate, request: Request) -> PreTrainedModel:
    """Load a model with its adapter. Raises: FsdpTuneError if it cannot be loaded, or has weights missing."""
    return load_with_adapter(model, request)[0]


def load_with_adapter(model: ModelToEvaluate, request: Request) -> tuple[PreTrainedModel, PeftModel | None]:
    """Return a model with its adapter in its layers, and the PEFT model that switches it off. Raises: see
    `load_model`."""
    trained_base = model.trained_base
    loaded, missing = _load(model, request, trained_base)
    if trained_base is not None and trained_base.config_changes.get("tie_word_embeddings") is False:
        start_untied_head(loaded, missing)
        missing -= {
            name
            for name in missing
            if loaded.get_parameter(name) is getattr(loaded.get_output_embeddings(), "weight", None)
        }
    if missing:
        message = f"`{model.weights}` lacks {len(missing)} weights of its model, the first is {min(missing)}"
        raise failed_error(
            "model-incomplete",
            message,
            hint="transformers would fill them with random values; write the model again",
        )
    if model.adapter is not None:
        _resize(loaded, Path(model.adapter))
    rows = embedding_rows(loaded)
    if request.vocabulary_size > rows:
        message = (
            f"the tokenizer has {request.vocabulary_size:,} tokens, and the embedding of "
            f"`{model.weights}` has {rows:,} rows"
        )
        hint = "evaluate models with the tokenizer of the training"
        raise usage_error("vocabulary-larger-than-embedding", message, hint=hint)
    adapted: PeftModel | None = None
    if model.adapter is not None:
        from peft import PeftModel

        # PEFT's wrapper hides the arguments of the model's forward; the adapter is in the layers of the model
        # itself.
        adapted = PeftModel.from_pretrained(
            loaded, model.adapter, key_mapping=_published_names(loaded, Path(model.adapter))
        )
        loaded = cast(Any, adapted.get_base_model())
    placed: Any = loaded
    evaluated: PreTrainedModel = placed.to(request.device).eval()
    return evaluated, adapted


def _published_names(model: PreTrainedModel, adapter: Path) -> dict[str, str] | None:
    """Return {pattern: replacement} for the names of an adapter of a base of several modalities, of which
    `model` is the text's alone."""
    if not (adapter / WEIGHTS_FILE).is_file():
        return None
    prefixes = published_prefixes(model, dict(tensors_of(adapter / WEIGHTS_FILE)))
    return {f"^{re.escape(prefixes[0])}": prefixes[1]} if prefixes is not None else None


def _load(
    model: ModelToEvaluate, request: Request, trained_base: BaseModel | None
) -> tuple[PreTrainedModel, set[str]]:
    """Return the model without its adapter, in the precision and with the configuration of the training, and
    its missing weights."""
    options: dict[str, object] = {
        "trust_remote_code": request.trust_remote_code,
        "local_files_only": not hub_is_reachable(),
    }
    options["revision"] = model.revision
    in_4_bits = trained_base is not None and trained_base.nf4_scales is not None
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(model.weights, **options)
        forget_kernels(config)
        _change(config, trained_base.config_changes if trained_base is not None else {})
        as_stored = getattr(config, "dtype", None) or torch.float32
        dtype = as_stored if request.dtype == "auto" else TORCH_DTYPE[request.dtype]
        # Rounded first, some weights would get other codes than in training.
        options["dtype"] = torch.float32 if in_4_bits else "auto" if request.dtype == "auto" else dtype
        found: Any = AutoModelForCausalLM.from_pretrained(
            model.weights, config=config, output_loading_info=True, **options
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        resource = HubResource("model", model.weights, "MODEL", "model-not-found")
        message = f"the model `{model.weights}` cannot be loaded: {first_line(error)}"
        raise resource.problem(error) or usage_error("model-not-found", message) from error
    loaded, report = found
    if scales := scales_among(report["unexpected_keys"]):
        message = (
            f"the weights of `{model.weights}` are quantised, and transformers leaves them as codes: it "
            f"does not read `{scales[0]}`"
        )
        raise usage_error(
            "model-quantised", message, hint="name the merged model of a run, whose weights are decoded"
        )
    if in_4_bits and trained_base is not None:
        _round_to_4_bits(loaded, trained_base, dtype)
    return loaded, set(report["missing_keys"])


def _change(config: PreTrainedConfig, changes: Mapping[str, Any]) -> None:
    """Set the fields of the base's configuration that the training changed."""
    for name, value in changes.items():
        nested = getattr(config, name, None)
        if isinstance(nested, PreTrainedConfig):
            _change(nested, value)
        else:
            setattr(config, name, value)


@torch.no_grad()
def _round_to_4_bits(model: PreTrainedModel, trained_base: BaseModel, dtype: torch.dtype) -> None:
    """Give the weights that the training held in 4 bits the values that they had there, and all parameters
    their dtype.

    Raises: usage error if the model has other names than the training's.
    """
    assert trained_base.nf4_scales is not None
    parameters = dict(model.named_parameters())
    if lost := [name for name in trained_base.nf4_weights if name not in parameters]:
        message = f"the base of the adapter has no `{lost[0]}`, which was trained in 4 bits"
        raise usage_error(
            "base-changed",
            message,
            hint="evaluate the adapter with the transformers of the training, or its merged model",
        )
    for name, parameter in parameters.items():
        if name in trained_base.nf4_weights:
            parameter.data = dequantise(
                *quantise(parameter.data, SCALE_DTYPE[trained_base.nf4_scales]), dtype
            )
        else:
            parameter.data = parameter.data.to(dtype)


def _resize(model: PreTrainedModel, adapter: Path) -> None:
    """Give embedding and head the rows that the adapter was trained with, before PEFT replaces or adapts
    them.

    Raises: usage error if neither the adapter nor the base has the new rows of one of them.
    """
    if not (adapter / WEIGHTS_FILE).is_file():
        return
    tensors = dict(tensors_of(adapter / WEIGHTS_FILE))
    stored = {name: tensors[key].shape for name, key in without_copies(tensors).items()}
    both = [
        model.get_input_embeddings(),
        *([head] if (head := model.get_output_embeddings()) is not None else []),
    ]
    names = [next(name for name, module in model.named_modules() if module is each) for each in both]
    full = {
        name: shape
        for name in names
        for end in _WEIGHTS
        if (shape := stored.get(f"{PREFIX}{name}{end}")) is not None
    }
    adapted = [
        shape[axis]
        for name in names
        for end, axis in _FACTORS
        if (shape := stored.get(f"{PREFIX}{name}{end}")) is not None
    ]
    rows = {shape[0] for shape in full.values()} | set(adapted)
    if rows <= {embedding_rows(model)}:
        return
    config = json.loads((adapter / CONFIG_FILE).read_bytes())
    shared = [name for name in full if is_tied(model) and not is_trained_in_full(config, f"{name}.weight")]
    if len(rows) > 1 or (len(full) < len(names) and not shared):
        message = (
            f"`{adapter}` was trained with a vocabulary of {max(rows)}, and neither its files nor the "
            "base have all of the new rows"
        )
        hint = (
            "save the resized model that it was trained on (`save_pretrained`), and name it as "
            "`base_model_name_or_path` in its config"
        )
        raise usage_error("adapter-does-not-fit", message, hint=hint)
    model.resize_token_embeddings(rows.pop(), mean_resizing=False)


_WEIGHTS = (".weight", ".base_layer.weight")


_FACTORS = ((".lora_embedding_A", 1), (".lora_B.weight", 0))
"""Tensors of an adapted embedding or head, with the axis of the vocabulary."""
