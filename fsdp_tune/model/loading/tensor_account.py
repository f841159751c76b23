"""The account of a base's tensors: each tensor of its files has one fate, found from headers, config.json and
the model on the meta device.

*trained* and *frozen*: a parameter or buffer of the model. *decoded*: a part of a quantised weight that a
rule reads. *carried*: not in the class that is trained (`mtp.*`, `visual.*`, an extra layer of next-token
prediction), and written unchanged into a merged model. A quantised weight of these is decoded too, since the
merged model is a plain one. *dropped*: quantises what layers of the base compute (`k_scale` of a cache),
which is measured before training and has no use without the settings of the base; or is a bias of zeros next
to a decoded weight, which old AutoGPTQ wrote for layers without one. *left out*: named by `model.leave_out`.
Anything else is refused by name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D

from fsdp_tune.core.errors import Problem, Where
from fsdp_tune.core.families import LAYERS
from fsdp_tune.core.model_parts import part_of
from fsdp_tune.core.tensors.dtypes import Shape
from fsdp_tune.core.tensors.quantised_formats import BITSANDBYTES, Encodings, find_encodings, method_of
from fsdp_tune.core.tensors.quantised_weight import StoredType, Unread
from fsdp_tune.model.adapters.lora import name_in_base
from fsdp_tune.model.adapters.nf4 import layers_in_4_bits
from fsdp_tune.model.loading.stored_tensors import read_whole, tensors_of
from fsdp_tune.model.loading.unfilled import TensorSource, unfilled_problems
from fsdp_tune.model.shard.local import NF4_PACKED, NF4_SCALES
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.base_model import BaseRecord

Fate = Literal["trained", "frozen", "decoded", "carried", "dropped", "left out"]
IN_16_BITS = (
    "name the model in 16 bits as `model.name_or_path`: `quantization: {load: nf4}` quantises it as "
    "it is read"
)
_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class BaseTensors:
    """Names, types and shapes of the tensors of a model's files, the file of each, and how its config.json
    says they are quantised."""

    types: dict[str, StoredType]
    files: dict[str, Path]
    quantisation: Mapping[str, object]
    problems: tuple[Problem, ...] = ()
    """Of tensors that several files hold."""

    def encodings(self) -> Encodings:
        return find_encodings(self.types, self.quantisation)

    def plain_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return {name: shape} of the tensors that a plain model would have, where each quantised weight is
        one."""
        encodings = self.encodings()
        plain = {name: stored.shape for name, stored in self.types.items() if name not in encodings.parts}
        return plain | {name: weight.shape for name, weight in encodings.weights.items()}


@dataclass(frozen=True, slots=True)
class InModel:
    """The name that transformers gives a tensor of files in the model, and whether it makes the parameter of
    several, or of a part.
    `others`: further parameters that are made of the same tensor (`qkv_proj`)."""

    name: str
    is_converted: bool
    others: tuple[str, ...] = ()

    def of_expert(self, number: str) -> InModel:
        return replace(
            self,
            name=_EXPERT.sub(number, self.name),
            others=tuple(_EXPERT.sub(number, name) for name in self.others),
        )


@dataclass(frozen=True, slots=True)
class TensorAccount:
    """`fates`: of each tensor by its name in the files; `rules`: {rule: number of weights} of the decoded
    ones; `parameters`: the name in the model of each plain or decoded weight that the model has; `converted`:
    those of which transformers makes it by joining, splitting or transposing."""

    fates: dict[str, Fate]
    rules: dict[str, int]
    parameters: dict[str, str]
    converted: frozenset[str] = frozenset()
    problems: tuple[Problem, ...] = ()

    def counts(self) -> dict[str, int]:
        """Return {fate: number of tensors}, without those of none."""
        return dict(Counter(self.fates.values()))

    def names(self, fate: Fate) -> tuple[str, ...]:
        return tuple(sorted(name for name, found in self.fates.items() if found == fate))

    def record(self) -> BaseRecord:
        return BaseRecord(
            self.counts(), self.rules, self.names("carried"), self.names("left out"), self.names("dropped")
        )


def account_for(
    recipe: Recipe, config: PreTrainedConfig, model: PreTrainedModel, base: BaseTensors
) -> TensorAccount:
    """Return the account of a base's files under the model that is trained, with or without adapters.
    `config`: that of the base."""
    layers = LAYERS.of(config.get_text_config()) or 0
    encodings = base.encodings()
    problems = [*base.problems, *unread_problems(encodings.unread, base.files)]
    if recipe.nf4 is not None and encodings.weights:
        message = f"the weights of {recipe.model.name_or_path} are quantised ({method_of(base.quantisation)})"
        problems.append(Problem("model-quantised", message, Where(key="model.name_or_path"), IN_16_BITS))
    unread = {each.name for each in encodings.unread}
    state = parameters_of(model)
    of_weights = encodings.of_weights
    stored_names = [name for name in base.types if name not in of_weights and name not in unread]
    shapes = {name: base.types[name].shape for name in stored_names} | {
        name: each.shape for name, each in encodings.weights.items()
    }
    in_model = _same_names(shapes, state) or names_in_model(model, shapes, state)
    parameters = {name: found.name for name, found in in_model.items() if found.name in state}
    # A class may have a parameter of such a name.
    dropped = {name for name in encodings.of_activations if name not in parameters}
    plain = {name: base.types[name] for name in stored_names if name not in dropped}
    biases = _foreign_biases(encodings, plain, parameters)
    fates: dict[str, Fate] = dict.fromkeys(dropped, "dropped")
    if method_of(base.quantisation) == BITSANDBYTES:
        # Their own reader checks them.
        plain = {name: stored for name, stored in plain.items() if not _is_of_4_bits(name, base.types)}
        fates |= dict.fromkeys(base.types.keys() - plain.keys(), "decoded")
    for name in plain:
        if name in parameters:
            fates[name] = "trained" if state[parameters[name]].requires_grad else "frozen"
        elif is_left_out(recipe, name, layers):
            fates[name] = "left out"
        else:
            fates[name] = "dropped" if name in biases else "carried"
    for name, weight in encodings.weights.items():
        carried: Fate = "left out" if is_left_out(recipe, name, layers) else "carried"
        fates |= dict.fromkeys(weight.parts, "decoded" if name in parameters else carried)
    lost = _not_zero(sorted(name for name in biases if fates[name] == "dropped"), base.files)
    refused = [*_of_other_types(plain, parameters, state), *lost, *_of_conv1d(model, encodings, parameters)]
    problems += unread_problems(refused, base.files)
    if not problems:  # else they may be what is missing
        compared = {name: shapes[name] for name in (*plain, *encodings.weights)}
        sources = {
            name: TensorSource(
                (in_model[name].name, *in_model[name].others), compared.get(name), in_model[name].is_converted
            )
            for name in parameters
        }
        problems += unfilled_problems(recipe, model, state, sources, base.files)
    converted = frozenset(name for name in parameters if in_model[name].is_converted)
    problems += [*_unused_entries(recipe, fates, layers), *_partly_left_out(model, config, fates, layers)]
    one_to_one = {name: each for name, each in parameters.items() if name not in converted}
    problems += _twice(one_to_one, base.files)
    rules = Counter(weight.rule for weight in encodings.weights.values())
    return TensorAccount(fates, dict(rules), parameters, converted, tuple(problems))


def _of_other_types(
    plain: Mapping[str, StoredType], parameters: Mapping[str, str], state: Mapping[str, torch.Tensor]
) -> list[Unread]:
    """Return tensors that are no numbers in floating point, as their parameters are."""
    found: list[Unread] = []
    for name, stored in plain.items():
        parameter = parameters.get(name)
        if parameter is not None and state[parameter].is_floating_point() and not stored.is_float:
            why = f"is of the type {stored.dtype}, and the model has `{parameter}` in floating point"
            found.append(Unread(name, why))
    return found


def _twice(parameters: Mapping[str, str], files: Mapping[str, Path]) -> list[Problem]:
    """Return the problem of tensors that are the same parameter of the model, with and without a prefix: the
    first by name would count where transformers loads them, and the one with the model's own name where ranks
    read slices. `parameters`: {name in files: parameter}.
    """
    found: dict[str, list[str]] = {}
    for name, parameter in parameters.items():
        found.setdefault(parameter, []).append(name)
    several = {parameter: sorted(names) for parameter, names in found.items() if len(names) > 1}
    if not several:
        return []
    parameter = min(several)
    one, other = several[parameter][:2]
    message = f"`{one}` and `{other}` are both `{parameter}` of the model ({len(several):,} such parameters)"
    where = Where(str(files[one]) if one in files else None, key="model.name_or_path")
    return [
        Problem(
            "model-weights-twice",
            message,
            where,
            "remove the tensors that are wrong from the files, or download the model again",
        )
    ]


def parameters_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by the names that they have without adapters; of a layer in 4
    bits, its weight [out, in]."""
    persistent = set(model.state_dict())
    layers = layers_in_4_bits(model)
    weights = {
        name_in_base(f"{name}.weight"): torch.empty(layer.out_features, layer.in_features, device="meta")
        for name, layer in layers.items()
    }
    persistent -= {f"{name}.{part}" for name in layers for part in (NF4_PACKED, NF4_SCALES)}
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
        *weights.items(),
    ]
    return {
        own: tensor
        for name, tensor in tensors
        if (name in persistent or name in weights) and (own := name_in_base(str(name)))
    }


def _same_names(shapes: Mapping[str, Shape], state: Mapping[str, torch.Tensor]) -> dict[str, InModel] | None:
    """Return the names of files that have exactly the parameters of the model; None if they have others,
    which transformers may rename.

    Its table of all renamings takes a tenth of a second to build in each process.
    """
    is_same = shapes.keys() == state.keys() and all(
        tuple(state[name].shape) == shape for name, shape in shapes.items()
    )
    return {name: InModel(name, is_converted=False) for name in shapes} if is_same else None


def names_in_model(
    model: PreTrainedModel, names: Iterable[str], state: Mapping[str, torch.Tensor], *, legacy: bool = True
) -> dict[str, InModel]:
    """Return the name in the model of each tensor of files, whether the model has it or not. `legacy`: by
    transformers' old names too.

    Of the tensors of different experts one is looked up: a mapping for DeepSeek V3 would take seconds
    otherwise.
    """
    conversions = get_model_conversion_mapping(model, add_legacy=legacy)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    targets = {
        pattern: tuple(each.target_patterns) for each in converters for pattern in each.source_patterns
    }
    known: dict[str, InModel] = {}
    found: dict[str, InModel] = {}
    meta: Any = state
    # the order in which transformers renames, which one of its renamings depends on
    for name in sorted(names, key=dot_natural_key):
        kind = _EXPERT.sub("0", name)
        if kind not in known:
            new, pattern = rename_source_key(kind, renamings, converters, model.base_model_prefix, meta)
            if new not in state and kind in state:
                new, pattern = kind, None
            first, *others = targets.get(pattern or "", ("",))
            known[kind] = InModel(
                new, pattern is not None, tuple(new.replace(first, other) for other in others)
            )
        found[name] = (
            known[kind] if (number := _EXPERT.search(name)) is None else known[kind].of_expert(number[0])
        )
    return found


def _foreign_biases(encodings: Encodings, plain: Collection[str], parameters: Mapping[str, str]) -> set[str]:
    """Return the biases next to decoded weights of the model for which the model has no parameter."""
    owners = [
        name.removesuffix("weight")
        for name in encodings.weights
        if name in parameters and name.endswith(".weight")
    ]
    return {name for owner in owners if (name := f"{owner}bias") in plain and name not in parameters}


def _of_conv1d(
    model: PreTrainedModel, encodings: Encodings, parameters: Mapping[str, str]
) -> Iterator[Unread]:
    """Yield the codes of a layer of GPTQ or AWQ, whose weight is [out, in], for which the model has a
    `Conv1D` with [in, out]."""
    owners = {
        name_in_base(f"{name}.weight") for name, module in model.named_modules() if isinstance(module, Conv1D)
    }
    for name, weight in encodings.weights.items():
        if weight.is_read_in_full and (parameter := parameters.get(name)) in owners:
            yield Unread(
                weight.codes,
                f"({weight.rule}) is the weight of a Linear, [out, in], and `{parameter}` of a "
                "Conv1D, [in, out]",
            )


def _not_zero(names: Iterable[str], files: Mapping[str, Path]) -> Iterator[Unread]:
    """Yield the biases with values other than zero, of files that are on this machine: ranks check those that
    are downloaded."""
    by_file: dict[Path, list[str]] = {}
    for name in names:
        if (file := files.get(name)) is not None and file.is_file():
            by_file.setdefault(file, []).append(name)
    for file, found in by_file.items():
        stored = dict(tensors_of(file))
        for name in found:
            if read_whole(stored[name]).count_nonzero():
                yield Unread(
                    name, "is a bias of a quantised layer, which has none in the model that is trained"
                )


def is_left_out(recipe: Recipe, name: str, layers: int) -> bool:
    """Return whether an entry of `model.leave_out` names the part of the base that a tensor is in, or a
    module that encloses it."""
    return any(_names(entry, name, layers) for entry in recipe.model.leave_out)


def _names(entry: str, name: str, layers: int) -> bool:
    return entry == part_of(name, layers) or f".{entry}." in f".{name}."


def unread_problems(unread: Iterable[Unread], files: Mapping[str, Path]) -> list[Problem]:
    """Return a problem for the tensors of each file that no rule reads: the first ones, with the number of
    the others."""
    by_file: dict[Path | None, list[Unread]] = {}
    for each in unread:
        by_file.setdefault(files.get(each.name), []).append(each)
    return [
        Problem(
            "model-quantised",
            "; ".join(f"`{each.name}` {each.why}" for each in found[:_SHOWN])
            + (f"; {len(found) - _SHOWN:,} more such tensors" if len(found) > _SHOWN else ""),
            Where(str(file) if file is not None else None, key="model.name_or_path"),
            IN_16_BITS,
        )
        for file, found in by_file.items()
    ]


def _is_of_4_bits(name: str, types: Mapping[str, StoredType]) -> bool:
    """Return whether a tensor is a weight that bitsandbytes quantised, or one of the parts that are stored
    with it."""
    weight, mark, _ = name.partition(".weight.")
    return mark != "" or f"{name}.absmax" in types or (weight != name and f"{weight}.weight.absmax" in types)


def _unused_entries(recipe: Recipe, fates: Mapping[str, Fate], layers: int) -> list[Problem]:
    """Return a problem for each entry of `model.leave_out` that names no carried tensor, or one that the
    model has."""
    problems: list[Problem] = []
    for entry in recipe.model.leave_out:
        named = {fate for name, fate in fates.items() if _names(entry, name, layers)}
        if "left out" in named:
            continue
        others = sorted({part_of(name, layers) for name, fate in fates.items() if fate == "carried"})
        what = "names tensors of the model that is trained" if named else "matches no tensor of the base"
        hint = (
            f"can be left out: {', '.join(others)}"
            if others
            else "the model has all tensors of the base: remove the entry"
        )
        problems.append(
            Problem("leave-out", f"model.leave_out: `{entry}` {what}", Where(key="model.leave_out"), hint)
        )
    return problems


def _partly_left_out(
    model: PreTrainedModel, config: PreTrainedConfig, fates: Mapping[str, Fate], layers: int
) -> list[Problem]:
    """Return a problem for a base of several modalities of which some are left out: no configuration
    describes the rest."""
    parts = {
        fate: {
            part
            for name, found in fates.items()
            if found == fate and (part := part_of(name, layers)) != "mtp"
        }
        for fate in ("carried", "left out")
    }
    if type(config) is type(model.config) or not parts["left out"] or not parts["carried"]:
        return []
    kept, gone = (", ".join(sorted(parts[fate])) for fate in ("carried", "left out"))
    message = (
        f"model.leave_out: {gone} would be left out and {kept} kept, and {type(config).__name__} "
        "describes no such model"
    )
    every = sorted(parts["carried"] | parts["left out"])
    return [
        Problem(
            "leave-out",
            message,
            Where(key="model.leave_out"),
            f"leave out all of them: [{', '.join(every)}], or none",
        )
    ]
