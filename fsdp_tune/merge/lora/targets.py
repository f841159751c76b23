"""`adapter_config.json`: the scaling of a LoRA adapter's factors (PEFT's `LoraConfig`, read from PEFT 0.21).

Assign the factors of adapted experts (PEFT's `target_parameters`) to tensors of the base, stacked or one for each expert. Pure.

transformers stacks the matrices of a mixture's experts in one parameter [experts, rows, columns]; the files of most models hold one
tensor for each expert, and gate and up apart (`MergeModulelist` and `Concatenate` in transformers' `conversion_mapping`).

Assign the factors of an adapter to tensors of the base, and find the tensors that it replaces. Pure.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdp_tune.core.errors import FsdpTuneError, Where, failed_error, usage_error
from fsdp_tune.core.families import EXPERT_MODULES, EXPERT_PARTS, OLD_HEADS, are_stacked_experts, is_embedding, is_head, tie_setting
from fsdp_tune.core.files import read_regular
from fsdp_tune.core.tensors.dtypes import Shape
from fsdp_tune.core.tensors.file_formats import (
    CONFIG_FILE,
    MAGNITUDE,
    PeftNames,
    initialisation_that_changes_base,
    is_trained_in_full,
    other_arithmetic,
    unwrapped,
    value_for,
)
from fsdp_tune.merge.copy.gather import BUFFER_BYTES
from fsdp_tune.merge.copy.ties import embedding_of
from fsdp_tune.merge.read.reader import LowRank, LowRankOfExperts, SourceTensor

MAX_CONFIG_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    path: Path
    values: Mapping[str, Any]

    @property
    def base(self) -> str | None:
        """The model that the adapter was trained on, as its config names it."""
        value = self.values.get("base_model_name_or_path")
        return value if isinstance(value, str) and value else None

    @property
    def fan_in_fan_out(self) -> bool:
        return self.values.get("fan_in_fan_out") is True

    @property
    def use_dora(self) -> bool:
        return self.values.get("use_dora") is True

    @property
    def ties_embeddings(self) -> bool:
        return self.values.get("ensure_weight_tying") is True

    def saves(self, weight: str) -> bool:
        return is_trained_in_full(self.values, weight)

    def parameters_of(self, module: str) -> list[str]:
        """Return the parameters of a module that `target_parameters` names, by the last part of their names."""
        named: Any = self.values.get("target_parameters") or []
        split = [name.rpartition(".") for name in named if isinstance(name, str)]
        return [parameter for owner, _, parameter in split if module == owner or module.endswith(f".{owner}")]

    def scaling(self, module: str, rank: int) -> float:
        """alpha / rank, or alpha / √rank with `use_rslora`, of one module. Raises: FailedError if the config has another rank."""
        wanted = self._of_pattern("rank_pattern", module, self.values.get("r", 8))
        alpha = self._of_pattern("alpha_pattern", module, self.values.get("lora_alpha", 8))
        if type(wanted) is not int or isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise self.wrong(f"it gives no rank and alpha of `{module}`")
        if wanted != rank:
            raise self.wrong(f"it says that the rank of `{module}` is {wanted}, and the factors have {rank}: it belongs to another adapter")
        return alpha / (math.sqrt(rank) if self.values.get("use_rslora") is True else rank)

    def _of_pattern(self, name: str, module: str, default: Any) -> Any:
        patterns = self.values.get(name) or {}
        if not isinstance(patterns, dict):
            raise self.wrong(f"its `{name}` is not an object")
        try:
            return value_for(module, patterns, default)
        except re.error as error:
            raise self.wrong(f"its `{name}` has an invalid pattern: {error}") from error

    def check_mergeable(self, *, has_own_base: bool) -> None:
        """Raises: FailedError for anything but LoRA and DoRA. `has_own_base`: the weights under the adapter are in the checkpoint."""
        kind = self.values.get("peft_type")
        if kind != "LORA":
            raise self.unsupported(f"the adapter is of the type {kind}")
        if (name := other_arithmetic(self.values)) is not None:
            raise self.unsupported(f"the adapter was trained with `{name}`")
        start = initialisation_that_changes_base(self.values)
        if not has_own_base and start is not None:
            raise self.unsupported(
                f"the adapter began with `init_lora_weights: {start}`, which changes the base as training begins",
                "convert it with PEFT (`save_pretrained(…, path_initial_model_for_weight_conversion=…)`) and merge the result",
            )

    def unsupported(self, why: str, hint: str = "merge it with PEFT (`merge_and_unload`), or export it with `--adapter`") -> FsdpTuneError:
        return failed_error("merge-adapter-unsupported", f"{why}: only LoRA and DoRA are merged", where=Where(str(self.path)), hint=hint)

    def wrong(self, why: str) -> FsdpTuneError:
        return failed_error(
            "merge-adapter-config",
            f"the adapter's config cannot be used: {why}",
            where=Where(str(self.path)),
            hint=f"give the right one with `--adapter-config` (the {CONFIG_FILE} that PEFT wrote)",
        )


def find_config(given: Path | None, places: Sequence[Path]) -> AdapterConfig | None:
    """The one that was given (a file, or the directory that holds it), else the first beside the weights."""
    if given is not None:
        path = given / CONFIG_FILE if given.is_dir() else given
        if not path.is_file():
            raise usage_error("merge-adapter-config", f"there is no {CONFIG_FILE} here", where=Where(str(given)))
        return _read(path)
    for place in places:
        if (place / CONFIG_FILE).is_file():
            return _read(place / CONFIG_FILE)
    return None


def _read(path: Path) -> AdapterConfig:
    try:
        values = json.loads(read_regular(path, most_bytes=MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterConfig(path, {}).wrong(str(error)) from error
    if not isinstance(values, dict):
        raise AdapterConfig(path, {}).wrong("it is not a JSON object")
    return AdapterConfig(path, values)


def derive_config(names: PeftNames, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return the text of an `adapter_config.json`, as far as the tensors tell it: ALPHA stands for `lora_alpha`.

    None for experts, of which the names of the factors do not tell the parameter.
    """
    if any("base_layer" in module.split(".") or are_stacked_experts(module) for module in names.factors):
        return None
    keys = {module: parts.get("lora_A") or parts.get("lora_embedding_A") for module, parts in names.factors.items()}
    ranks = {module: shapes[key][0] for module, key in keys.items() if key is not None and shapes[key]}
    if not ranks:
        return None
    (rank, _), *_ = Counter(ranks.values()).most_common()
    fields: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": "ALPHA"}
    fields["target_modules"] = sorted({module.rpartition(".")[2] for module in names.factors})
    fields |= {"rank_pattern": others} if (others := {module: each for module, each in ranks.items() if each != rank}) else {}
    fields |= {"use_dora": True} if any(name.endswith(MAGNITUDE) for name in names.others) else {}
    saved = sorted({name.rpartition(".")[0] for name in names.saved})
    fields |= {"modules_to_save": saved} if saved else {}
    return json.dumps(fields).replace('"ALPHA"', "ALPHA")


@dataclass(frozen=True, slots=True)
class Stack:
    """Experts of the base: `shape` [rows, columns] of one of them, and their tensors as (name, expert, first row in its matrix).

    The expert is None for one tensor with all of them.
    """

    experts: int
    shape: Shape
    tensors: tuple[tuple[str, int | None, int], ...]

    @property
    def is_one_tensor(self) -> bool:
        return self.tensors[0][1] is None


def find_stack(base: Mapping[str, SourceTensor], name_in_base: Callable[[str], str | None], owner: str, parameter: str) -> Stack | None:
    """Return the experts that the model holds as `owner`.`parameter`; None if the base has neither the stack nor all its parts."""
    for module in dict.fromkeys(owner.replace(*spelling) for spelling in EXPERT_MODULES):
        if (name := name_in_base(f"{module}.{parameter}")) is not None and len(base[name].shape) == 3:
            return Stack(base[name].shape[0], base[name].shape[1:], ((name, None, 0),))
        for parts in EXPERT_PARTS.get(parameter, ()):
            tensors: list[tuple[str, int | None, int]] = []
            experts, rows, columns = 0, 0, {0}
            while None not in (names := [name_in_base(f"{module}.{experts}.{part}.weight") for part in parts]):
                found = [name for name in names if name is not None]
                firsts = [sum(base[each].shape[0] for each in found[:index]) for index in range(len(found))]
                tensors += [(name, experts, first) for name, first in zip(found, firsts, strict=True)]
                rows, columns = sum(base[name].shape[0] for name in found), {base[name].shape[1] for name in found}
                experts += 1
            if tensors and len(columns) == 1:
                return Stack(experts, (rows, *columns), tuple(tensors))
    return None


def updates(stack: Stack, a: SourceTensor, b: SourceTensor, scaling: float, *, is_transposed: bool) -> dict[str, LowRankOfExperts]:
    """Return the update of each tensor of a stack, by name."""
    return {
        name: LowRankOfExperts(scaling, b, a, stack.experts, is_transposed, expert, first_row) for name, expert, first_row in stack.tensors
    }


def are_transposed(stack: Stack, shape: Shape, gate_up: Stack | None) -> bool | None:
    """Return whether the matrices are [in, out] (GPT-OSS); None if they do not fit `shape` [out, in], or if nothing tells.

    `gate_up` tells it of a square `down_proj`: its matrices are [in, 2 · out] or [2 · out, in].
    """
    if not stack.is_one_tensor:
        return False if stack.shape == shape else None
    if shape[0] != shape[1]:
        return stack.shape != shape if stack.shape in (shape, shape[::-1]) else None
    if stack.shape != shape or gate_up is None or not gate_up.is_one_tensor or gate_up.shape[0] == gate_up.shape[1]:
        return None
    return gate_up.shape[0] == shape[0]


MOST_RANK = 65_536
WIDEST_BYTES = 8
"""Of one element."""
VOCABULARY_KEY = "vocab_size"


@dataclass(slots=True)
class Layers:
    """`base`: the model's tensors; `replaced`: what the adapter brings in their place; `factors`: {module: {part: tensor}};
    `place`: the directory of the base; `magnitudes`: DoRA's, by module.

    What is added: `tensors` of the output, with their updates, and the `scalings` used."""

    base: Mapping[str, SourceTensor]
    replaced: Mapping[str, SourceTensor]
    factors: Mapping[str, Mapping[str, SourceTensor]]
    place: Path
    magnitudes: Mapping[str, SourceTensor] = field(default_factory=dict[str, SourceTensor])
    tensors: dict[str, SourceTensor] = field(default_factory=dict[str, SourceTensor])
    scalings: set[float] = field(default_factory=set[float])
    config_changes: dict[str, Any] = field(default_factory=dict[str, Any])

    def name_in_base(self, name: str) -> str | None:
        """Directories may name a model without its prefix (`h.0.attn` for `transformer.h.0.attn`), as GPT-2's on the hub does, and the
        head of GPT-NeoX as transformers 4 does."""
        names = (name, name.partition(".")[2], OLD_HEADS.get(name))
        return next((each for each in names if each in self.tensors), None)


def add_layers(layers: Layers, config: AdapterConfig, model: Mapping[str, Any] | None) -> Layers:
    """Fills `layers.tensors`. FailedError if base and adapter do not fit, or if the adapter is not plain LoRA.

    `model` is the config.json of the base, where there is one.
    """
    layers.tensors = dict(layers.base)
    for name, tensor in layers.replaced.items():
        _replace(layers, name, tensor, model)
    shared = _shared_weight(layers, config, model)
    if shared is not None and not any(config.saves(name) for name in layers.replaced if is_embedding(name)):
        layers.tensors[shared.name] = shared  # a resized one may be stored as the head's alone
        if shared.shape != layers.base[shared.name].shape:
            layers.config_changes[VOCABULARY_KEY] = shared.shape[0]
    is_transposed = _vote(layers)
    for module, parts in layers.factors.items():
        if parameters := config.parameters_of(unwrapped(module)):
            _add_to_experts(layers, config, unwrapped(module), parameters, parts)
            continue
        if shared is not None and is_head(f"{module}.weight"):
            layers.tensors.setdefault(f"{module}.weight", replace(shared, name=f"{module}.weight"))
        _add(layers, config, module, parts, square_is_transposed=config.fan_in_fan_out if is_transposed is None else is_transposed)
    if shared is not None and not config.ties_embeddings:
        _keep_head(layers, shared, model)
    _check_rows(layers)
    return layers


def _shared_weight(layers: Layers, config: AdapterConfig, model: Mapping[str, Any] | None) -> SourceTensor | None:
    """Return the weight, under the adapter, that embedding and head share, by the embedding's name; None if the base has both, or no head.

    Of a resized embedding it is in the adapter's file (`save_embedding_layers`), under the name of either.
    """
    embedding = embedding_of(layers.base)
    if embedding is None or any(map(is_head, layers.base)) or not _is_causal(layers, model):
        return None
    shared = (tensor for name, tensor in layers.replaced.items() if (is_embedding(name) or is_head(name)) and not config.saves(name))
    return replace(next((tensor for tensor in shared if tensor.shape[1:] == embedding.shape[1:]), embedding), name=embedding.name)


def _is_causal(layers: Layers, model: Mapping[str, Any] | None) -> bool:
    """Return whether the model has a head, by its config; without one, by what the adapter changes."""
    if model is None:
        return any(is_head(f"{module}.weight") for module in layers.factors) or any(map(is_head, layers.replaced))
    return any(word in kind for kind in model.get("architectures") or () for word in ("CausalLM", "LMHead", "ConditionalGeneration"))


def _replace(layers: Layers, name: str, tensor: SourceTensor, model: Mapping[str, Any] | None) -> None:
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
        has_grown = len(old.shape) == 2 and old.shape[1:] == tensor.shape[1:] and (is_embedding(name) or is_head(name))
        if not has_grown or model is None or model.get(VOCABULARY_KEY) not in (old.shape[0], tensor.shape[0]):
            raise _misfit(layers, f"its `{found}` is {list(old.shape)}, and the adapter has {list(tensor.shape)} for it")
        layers.config_changes[VOCABULARY_KEY] = tensor.shape[0]
    layers.tensors[found] = replace(tensor, name=found)


def _vote(layers: Layers) -> bool | None:
    """Whether the layers are `Conv1D`s, whose weights are [in, out] (GPT-2), by those that are not square; None for no evidence.

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


def _add(layers: Layers, config: AdapterConfig, module: str, parts: Mapping[str, SourceTensor], *, square_is_transposed: bool) -> None:
    if "base_layer" in module.split("."):
        raise config.unsupported(f"`{module}` is changed by several adapters, one over the other")
    is_embedding_layer = "lora_embedding_A" in parts or "lora_embedding_B" in parts
    a, b = (parts.get(f"lora_embedding_{side}" if is_embedding_layer else f"lora_{side}") for side in "AB")
    if a is None or b is None:
        raise _damaged(config, f"`{module}` has one of its two factors alone")
    if 0 in (*a.shape, *b.shape):
        message = f"the factors of `{module}` are empty ({list(a.shape)} and {list(b.shape)}): saved by a process that held no part of them"
        raise _damaged(config, message)
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise config.unsupported(f"the factors of `{module}` are not matrices (a convolution)")
    rank = a.shape[0]
    if b.shape[1] != rank or not 0 < rank <= MOST_RANK:
        raise _damaged(config, f"the factors of `{module}` do not fit each other: {list(a.shape)} and {list(b.shape)}")
    name = layers.name_in_base(f"{module}.weight")
    if name is None:
        raise _misfit(layers, f"it has no `{module}.weight`, which the adapter changes")
    weight, shape = layers.tensors[name], (b.shape[0], a.shape[1])
    wanted = shape[::-1] if is_embedding_layer else shape
    if weight.shape != wanted and (is_embedding_layer or weight.shape != shape[::-1]):
        raise _misfit(layers, f"its `{name}` is {list(weight.shape)}, and the adapter is for {list(wanted)}")
    for tensor in (weight, a, b):
        if not tensor.dtype.converts:
            raise config.unsupported(f"`{tensor.name}` is {tensor.dtype.name} (quantised?), to which nothing can be added")
    is_transposed = is_embedding_layer or weight.shape != shape or (shape[0] == shape[1] and square_is_transposed)
    scaling = config.scaling(module, rank)
    layers.scalings.add(scaling)
    magnitude = _magnitude(layers, config, module, wanted, is_transposed=is_transposed)
    layers.tensors[name] = replace(weight, update=LowRank(scaling, b, a, is_transposed, magnitude))
    if bias := parts.get("lora_B.bias"):
        _add_bias(layers, config, module, bias, scaling)


def _add_to_experts(
    layers: Layers, config: AdapterConfig, owner: str, parameters: Sequence[str], parts: Mapping[str, SourceTensor]
) -> None:
    """`parameters`: those of the module that have adapters. The names of the factors do not tell which one theirs is; the shapes do."""
    a, b = parts.get("lora_A"), parts.get("lora_B")
    if a is None or b is None or not len(a.shape) == len(b.shape) == 2 or a.shape[0] != b.shape[1]:
        raise _damaged(config, f"the factors of the experts of `{owner}` do not fit each other")
    stacks = {name: stack for name in parameters if (stack := find_stack(layers.tensors, layers.name_in_base, owner, name)) is not None}
    for name in parameters:
        found = layers.name_in_base(f"{owner}.{name}")
        if name not in stacks and found is not None:
            sizes = list(layers.tensors[found].shape)
            raise config.unsupported(f"`{found}`, which `target_parameters` names, is {sizes}, not a stack of matrices")
    gate_up = find_stack(layers.tensors, layers.name_in_base, owner, "gate_up_proj")
    shape = (b.shape[0], a.shape[1])
    fitting = {
        name: (stack, transposed)
        for name, stack in stacks.items()
        if a.shape[0] % stack.experts == 0 and (transposed := are_transposed(stack, shape, gate_up)) is not None
    }
    if len(fitting) > 1 or any(stack.shape == shape == shape[::-1] for name, stack in stacks.items() if name not in fitting):
        named = " and ".join(parameters)
        raise config.unsupported(f"the shapes of `{owner}` do not tell to which axes of {named} the factors for {list(shape)} belong")
    if not fitting:
        raise _misfit(layers, f"`{owner}` has no experts that fit the adapter of {' and '.join(parameters)}, which is for {list(shape)}")
    ((name, (stack, transposed)),) = fitting.items()
    scaling = config.scaling(f"{owner}.{name}", a.shape[0] // stack.experts)
    layers.scalings.add(scaling)
    for tensor, update in updates(stack, a, b, scaling, is_transposed=transposed).items():
        if not layers.tensors[tensor].dtype.converts:
            raise config.unsupported(f"`{tensor}` is {layers.tensors[tensor].dtype.name} (quantised?), to which nothing can be added")
        layers.tensors[tensor] = replace(layers.tensors[tensor], update=update)


def _magnitude(layers: Layers, config: AdapterConfig, module: str, shape: tuple[int, ...], *, is_transposed: bool) -> SourceTensor | None:
    magnitude = layers.magnitudes.get(module)
    if magnitude is None and not config.use_dora:
        return None
    if magnitude is None or not config.use_dora:
        raise _damaged(
            config, f"`{module}` has {'no magnitudes' if magnitude is None else 'magnitudes'}, and `use_dora` is {config.use_dora}"
        )
    if is_transposed or magnitude.shape != shape[:1] or shape[1] * WIDEST_BYTES > BUFFER_BYTES:
        raise config.unsupported(f"`{module}` was trained with DoRA and is not a linear layer of usual size")
    return magnitude


def _add_bias(layers: Layers, config: AdapterConfig, module: str, bias: SourceTensor, scaling: float) -> None:
    """`lora_bias`: the second factor has a bias of its own."""
    name = layers.name_in_base(f"{module}.bias")
    if name is None:
        hint = "load it with PEFT, which cannot merge it either, or export it with `--adapter`"
        raise config.unsupported(f"the adapter has a bias (`lora_bias`) for `{module}`, which has none in the base", hint)
    if layers.tensors[name].shape != bias.shape:
        raise _misfit(layers, f"its `{name}` is {list(layers.tensors[name].shape)}, and the adapter's is {list(bias.shape)}")
    layers.tensors[name] = replace(layers.tensors[name], update=LowRank(scaling, bias, None))


def _keep_head(layers: Layers, shared: SourceTensor, model: Mapping[str, Any] | None) -> None:
    """Add a head equal to the weight under the adapter if the embedding alone was trained, or if the run untied the two."""
    if any(map(is_head, layers.tensors)):
        return
    if layers.tensors[shared.name] != shared or (model is not None and tie_setting(model) is False):
        layers.tensors["lm_head.weight"] = replace(shared, name="lm_head.weight")


def _check_rows(layers: Layers) -> None:
    """Refuse an embedding and a head of different vocabularies: the adapter's files lack the new rows of one of them."""
    embedding = embedding_of(layers.tensors)
    for name, head in layers.tensors.items():
        if embedding is None or not is_head(name) or head.shape[0] == embedding.shape[0] or len(head.shape) != 2:
            continue
        before = layers.base.get(name)
        if before is None or before.shape[0] == layers.base[embedding.name].shape[0]:
            small, large = sorted((head, embedding), key=lambda tensor: tensor.shape[0])
            raise failed_error(
                "merge-adapter-base",
                f"the adapter was trained with a vocabulary of {large.shape[0]}, and neither its files nor the base "
                f"have the new rows of `{small.name}`, which has {small.shape[0]}",
                where=Where(str(layers.place)),
                hint="save the resized model that the adapter was trained on (`save_pretrained`) and name it: `--base MODEL`",
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
        "merge-adapter-damaged", why, where=Where(str(config.path.parent)), hint="save the adapter again from where it was trained"
    )
