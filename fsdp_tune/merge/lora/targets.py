"""Assign the factors of an adapter to tensors of the base, and find the tensors that it replaces. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdp_tune.core.config_changes import vocabulary_changes, vocabulary_of
from fsdp_tune.core.errors import FsdpTuneError, Where, failed_error
from fsdp_tune.core.model_parts import OLD_HEADS, is_embedding, is_head, tie_setting
from fsdp_tune.core.tensors.peft_names import unwrapped
from fsdp_tune.merge.copy.gather import BUFFER_BYTES
from fsdp_tune.merge.copy.ties import embedding_of
from fsdp_tune.merge.lora.config import AdapterConfig
from fsdp_tune.merge.lora.experts import are_transposed, find_stack, updates
from fsdp_tune.merge.read.reader import LowRank, SourceTensor

MOST_RANK = 65_536


WIDEST_BYTES = 8
"""Of one element."""


@dataclass(slots=True)
class Layers:
    """`base`: the model's tensors; `replaced`: what the adapter brings in their place; `factors`: {module:
    {part: tensor}}; `place`: the directory of the base; `magnitudes`: DoRA's, by module.

    What is added: `tensors` of the output, with their updates, and the `scalings` used."""

    base: Mapping[str, SourceTensor]
    replaced: Mapping[str, SourceTensor]
    factors: Mapping[str, Mapping[str, SourceTensor]]
    place: Path
    magnitudes: Mapping[str, SourceTensor] = field(default_factory=dict[str, SourceTensor])
    tensors: dict[str, SourceTensor] = field(default_factory=dict[str, SourceTensor])
    scalings: set[float] = field(default_factory=set[float])
    config_changes: dict[str, object] = field(default_factory=dict[str, object])

    def name_in_base(self, name: str) -> str | None:
        """Directories may name a model without its prefix (`h.0.attn` for `transformer.h.0.attn`), as GPT-2's
        on the hub does, and the head of GPT-NeoX as transformers 4 does."""
        names = (name, name.partition(".")[2], OLD_HEADS.get(name))
        return next((each for each in names if each in self.tensors), None)


def add_layers(layers: Layers, config: AdapterConfig, model: Mapping[str, object] | None) -> Layers:
    """Fills `layers.tensors`. FailedError if base and adapter do not fit, or if the adapter is not plain
    LoRA.

    `model` is the config.json of the base, where there is one.
    """
    layers.tensors = dict(layers.base)
    for name, tensor in layers.replaced.items():
        _replace(layers, name, tensor, model)
    shared = _shared_weight(layers, config, model)
    if shared is not None and not any(config.saves(name) for name in layers.replaced if is_embedding(name)):
        layers.tensors[shared.name] = shared  # a resized one may be stored as the head's alone
        if shared.shape != layers.base[shared.name].shape:
            layers.config_changes |= vocabulary_changes(model or {}, shared.shape[0])
    is_transposed = _vote(layers)
    for module, parts in layers.factors.items():
        if parameters := config.parameters_of(unwrapped(module)):
            _add_to_experts(layers, config, unwrapped(module), parameters, parts)
            continue
        if shared is not None and is_head(f"{module}.weight"):
            layers.tensors.setdefault(f"{module}.weight", replace(shared, name=f"{module}.weight"))
        _add(
            layers,
            config,
            module,
            parts,
            square_is_transposed=config.fan_in_fan_out if is_transposed is None else is_transposed,
        )
    if shared is not None and not config.ties_embeddings:
        _keep_head(layers, shared, model)
    _check_rows(layers)
    return layers


def _shared_weight(
    layers: Layers, config: AdapterConfig, model: Mapping[str, object] | None
) -> SourceTensor | None:
    """Return the weight, under the adapter, that embedding and head share, by the embedding's name; None if
    the base has both, or no head.

    Of a resized embedding it is in the adapter's file (`save_embedding_layers`), under the name of either.
    """
    embedding = embedding_of(layers.base)
    if embedding is None or any(map(is_head, layers.base)) or not _is_causal(layers, model):
        return None
    shared = (
        tensor
        for name, tensor in layers.replaced.items()
        if (is_embedding(name) or is_head(name)) and not config.saves(name)
    )
    return replace(
        next((tensor for tensor in shared if tensor.shape[1:] == embedding.shape[1:]), embedding),
        name=embedding.name,
    )


def _is_causal(layers: Layers, model: Mapping[str, Any] | None) -> bool:
    """Return whether the model has a head, by its config; without one, by what the adapter changes."""
    if model is None:
        return any(is_head(f"{module}.weight") for module in layers.factors) or any(
            map(is_head, layers.replaced)
        )
    return any(
        word in kind
        for kind in model.get("architectures") or ()
        for word in ("CausalLM", "LMHead", "ConditionalGeneration")
    )


def _replace(layers: Layers, name: str, tensor: SourceTensor, model: Mapping[str, object] | None) -> None:
    """`modules_to_save`, trained biases, and embeddings of a vocabulary that has grown."""
    found = layers.name_in_base(name)
    if found is None:
        embedding = embedding_of(layers.base)
        if is_head(name) and embedding is not None and embedding.shape[1:] == tensor.shape[1:]:
            layers.tensors[name] = tensor  # tied in the base, which holds the embedding alone
            return
        raise _misfit(layers, f"it has no `{name}`, which the adapter replaces")
    old = layers.base[found]
    if old.shape != tensor.shape:
        has_grown = (
            len(old.shape) == 2
            and old.shape[1:] == tensor.shape[1:]
            and (is_embedding(name) or is_head(name))
        )
        if not has_grown or model is None or vocabulary_of(model) not in (old.shape[0], tensor.shape[0]):
            raise _misfit(
                layers, f"its `{found}` is {list(old.shape)}, and the adapter has {list(tensor.shape)} for it"
            )
        layers.config_changes |= vocabulary_changes(model, tensor.shape[0])
    layers.tensors[found] = replace(tensor, name=found)


def _vote(layers: Layers) -> bool | None:
    """Whether the layers are `Conv1D`s, whose weights are [in, out] (GPT-2), by those that are not square;
    None for no evidence.

    PEFT's `fan_in_fan_out` tells the kind of the layer that it wrapped last, which may be the head.
    """
    seen: set[bool] = set()
    for module, parts in layers.factors.items():
        name = layers.name_in_base(f"{module}.weight")
        a, b = parts.get("lora_A"), parts.get("lora_B")
        if name is None or a is None or b is None or is_head(name) or not len(a.shape) == len(b.shape) == 2:
            continue
        shape = (b.shape[0], a.shape[1])
        if shape[0] != shape[1] and layers.tensors[name].shape in (shape, shape[::-1]):
            seen.add(layers.tensors[name].shape != shape)
    return seen.pop() if len(seen) == 1 else None


def _add(
    layers: Layers,
    config: AdapterConfig,
    module: str,
    parts: Mapping[str, SourceTensor],
    *,
    square_is_transposed: bool,
) -> None:
    if "base_layer" in module.split("."):
        raise config.unsupported(f"`{module}` is changed by several adapters, one over the other")
    is_embedding_layer = "lora_embedding_A" in parts or "lora_embedding_B" in parts
    a, b = (parts.get(f"lora_embedding_{side}" if is_embedding_layer else f"lora_{side}") for side in "AB")
    if a is None or b is None:
        raise _damaged(config, f"`{module}` has one of its two factors alone")
    if 0 in (*a.shape, *b.shape):
        message = (
            f"the factors of `{module}` are empty ({list(a.shape)} and {list(b.shape)}): saved by a "
            "process that held no part of them"
        )
        raise _damaged(config, message)
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise config.unsupported(f"the factors of `{module}` are not matrices (a convolution)")
    rank = a.shape[0]
    if b.shape[1] != rank or not 0 < rank <= MOST_RANK:
        raise _damaged(
            config, f"the factors of `{module}` do not fit each other: {list(a.shape)} and {list(b.shape)}"
        )
    name = layers.name_in_base(f"{module}.weight")
    if name is None:
        raise _misfit(layers, f"it has no `{module}.weight`, which the adapter changes")
    weight, shape = layers.tensors[name], (b.shape[0], a.shape[1])
    wanted = shape[::-1] if is_embedding_layer else shape
    if weight.shape != wanted and (is_embedding_layer or weight.shape != shape[::-1]):
        raise _misfit(layers, f"its `{name}` is {list(weight.shape)}, and the adapter is for {list(wanted)}")
    for tensor in (weight, a, b):
        if not tensor.dtype.converts:
            raise config.unsupported(
                f"`{tensor.name}` is {tensor.dtype.name} (quantised?), to which nothing can be added"
            )
    if config.fan_in_fan_out and weight.encoded is not None and weight.encoded.weight.is_read_in_full:
        raise config.unsupported(
            f"`{name}` is decoded as [out, in], and the adapter is of Conv1D, whose weights are [in, out]"
        )
    is_transposed = (
        is_embedding_layer or weight.shape != shape or (shape[0] == shape[1] and square_is_transposed)
    )
    scaling = config.scaling(module, rank)
    layers.scalings.add(scaling)
    magnitude = _magnitude(layers, config, module, wanted, is_transposed=is_transposed)
    layers.tensors[name] = replace(weight, update=LowRank(scaling, b, a, is_transposed, magnitude))
    if bias := parts.get("lora_B.bias"):
        _add_bias(layers, config, module, bias, scaling)


def _add_to_experts(
    layers: Layers,
    config: AdapterConfig,
    owner: str,
    parameters: Sequence[str],
    parts: Mapping[str, SourceTensor],
) -> None:
    """`parameters`: those of the module that have adapters. The names of the factors do not tell which one
    theirs is; the shapes do."""
    a, b = parts.get("lora_A"), parts.get("lora_B")
    if a is None or b is None or not len(a.shape) == len(b.shape) == 2 or a.shape[0] != b.shape[1]:
        raise _damaged(config, f"the factors of the experts of `{owner}` do not fit each other")
    stacks = {
        name: stack
        for name in parameters
        if (stack := find_stack(layers.tensors, layers.name_in_base, owner, name)) is not None
    }
    for name in parameters:
        found = layers.name_in_base(f"{owner}.{name}")
        if name not in stacks and found is not None:
            sizes = list(layers.tensors[found].shape)
            raise config.unsupported(
                f"`{found}`, which `target_parameters` names, is {sizes}, not a stack of matrices"
            )
    gate_up = find_stack(layers.tensors, layers.name_in_base, owner, "gate_up_proj")
    shape = (b.shape[0], a.shape[1])
    fitting = {
        name: (stack, transposed)
        for name, stack in stacks.items()
        if a.shape[0] % stack.experts == 0
        and (transposed := are_transposed(stack, shape, gate_up)) is not None
    }
    if len(fitting) > 1 or any(
        stack.shape == shape == shape[::-1] for name, stack in stacks.items() if name not in fitting
    ):
        named = " and ".join(parameters)
        raise config.unsupported(
            f"the shapes of `{owner}` do not tell to which axes of {named} the factors for "
            f"{list(shape)} belong"
        )
    if not fitting:
        raise _misfit(
            layers,
            f"`{owner}` has no experts that fit the adapter of {' and '.join(parameters)}, which is "
            f"for {list(shape)}",
        )
    ((name, (stack, transposed)),) = fitting.items()
    scaling = config.scaling(f"{owner}.{name}", a.shape[0] // stack.experts)
    layers.scalings.add(scaling)
    for tensor, update in updates(stack, a, b, scaling, is_transposed=transposed).items():
        if not layers.tensors[tensor].dtype.converts:
            raise config.unsupported(
                f"`{tensor}` is {layers.tensors[tensor].dtype.name} (quantised?), to which nothing "
                "can be added"
            )
        layers.tensors[tensor] = replace(layers.tensors[tensor], update=update)


def _magnitude(
    layers: Layers, config: AdapterConfig, module: str, shape: tuple[int, ...], *, is_transposed: bool
) -> SourceTensor | None:
    magnitude = layers.magnitudes.get(module)
    if magnitude is None and not config.use_dora:
        return None
    if magnitude is None or not config.use_dora:
        raise _damaged(
            config,
            f"`{module}` has {'no magnitudes' if magnitude is None else 'magnitudes'}, and "
            f"`use_dora` is {config.use_dora}",
        )
    if is_transposed or magnitude.shape != shape[:1] or shape[1] * WIDEST_BYTES > BUFFER_BYTES:
        raise config.unsupported(f"`{module}` was trained with DoRA and is not a linear layer of usual size")
    return magnitude


def _add_bias(layers: Layers, config: AdapterConfig, module: str, bias: SourceTensor, scaling: float) -> None:
    """`lora_bias`: the second factor has a bias of its own."""
    name = layers.name_in_base(f"{module}.bias")
    if name is None:
        hint = "load it with PEFT, which cannot merge it either, or export it with `--adapter`"
        raise config.unsupported(
            f"the adapter has a bias (`lora_bias`) for `{module}`, which has none in the base", hint
        )
    if layers.tensors[name].shape != bias.shape:
        raise _misfit(
            layers,
            f"its `{name}` is {list(layers.tensors[name].shape)}, and the adapter's is {list(bias.shape)}",
        )
    layers.tensors[name] = replace(layers.tensors[name], update=LowRank(scaling, bias, None))


def _keep_head(layers: Layers, shared: SourceTensor, model: Mapping[str, object] | None) -> None:
    """Add a head equal to the weight under the adapter if the embedding alone was trained, or if the run
    untied the two."""
    if any(map(is_head, layers.tensors)):
        return
    if layers.tensors[shared.name] != shared or (model is not None and tie_setting(model) is False):
        layers.tensors["lm_head.weight"] = replace(shared, name="lm_head.weight")


def _check_rows(layers: Layers) -> None:
    """Refuse an embedding and a head of different vocabularies: the adapter's files lack the new rows of one
    of them."""
    embedding = embedding_of(layers.tensors)
    for name, head in layers.tensors.items():
        if (
            embedding is None
            or not is_head(name)
            or head.shape[0] == embedding.shape[0]
            or len(head.shape) != 2
        ):
            continue
        before = layers.base.get(name)
        if before is None or before.shape[0] == layers.base[embedding.name].shape[0]:
            small, large = sorted((head, embedding), key=lambda tensor: tensor.shape[0])
            raise failed_error(
                "merge-adapter-base",
                f"the adapter was trained with a vocabulary of {large.shape[0]}, and neither its files nor "
                f"the base have the new rows of `{small.name}`, which has {small.shape[0]}",
                where=Where(str(layers.place)),
                hint="save the resized model that the adapter was trained on (`save_pretrained`) and name "
                "it: `--base MODEL`",
            )


def _misfit(layers: Layers, why: str) -> FsdpTuneError:
    return failed_error(
        "merge-adapter-base",
        f"the adapter does not fit this base: {why}",
        where=Where(str(layers.place)),
        hint="is it the model that the adapter was trained on (`--base MODEL`)?",
    )


def _damaged(config: AdapterConfig, why: str) -> FsdpTuneError:
    return failed_error(
        "merge-adapter-damaged",
        why,
        where=Where(str(config.path.parent)),
        hint="save the adapter again from where it was trained",
    )
