"""The account of a base's tensors: each tensor of its files has one fate, found from headers, config.json and the model on the meta device.

*trained* and *frozen*: a parameter or buffer of the model. *decoded*: a part of a quantised weight that a rule reads. *carried*: not in
the class that is trained (`mtp.*`, `visual.*`, an extra layer of next-token prediction), and written unchanged into a merged model.
*left out*: carried, but named by `model.leave_out`. Anything else is refused by name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from fsdp_tune.core.errors import Problem, Where
from fsdp_tune.core.tensors.encodings import BITSANDBYTES, Encodings, StoredType, Unread, find_encodings, method_of
from fsdp_tune.model.adapters.lora import name_in_base
from fsdp_tune.recipe.schema.recipe import Recipe

Fate = Literal["trained", "frozen", "decoded", "carried", "left out"]
IN_16_BITS = "name the model in 16 bits as `model.name_or_path`: `quantization: {load: nf4}` quantises it as it is read"
_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")
_WRAPPERS = ("model", "language_model", "transformer")
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class BaseTensors:
    """Names, types and shapes of the tensors of a model's files, the file of each, and how its config.json says they are quantised."""

    types: dict[str, StoredType]
    files: dict[str, Path]
    quantisation: Mapping[str, Any]

    def encodings(self) -> Encodings:
        return find_encodings(self.types, self.quantisation)


@dataclass(frozen=True, slots=True)
class TensorAccount:
    """`fates`: of each tensor by its name in the files; `rules`: {rule: number of weights} of the decoded ones; `parameters`: the name
    in the model of each plain or decoded weight that the model has."""

    fates: dict[str, Fate]
    rules: dict[str, int]
    parameters: dict[str, str]
    problems: tuple[Problem, ...] = ()

    def counts(self) -> dict[str, int]:
        """Return {fate: number of tensors}, without those of none."""
        return dict(Counter(self.fates.values()))

    def names(self, fate: Fate) -> tuple[str, ...]:
        return tuple(sorted(name for name, found in self.fates.items() if found == fate))


def account_for(recipe: Recipe, model: PreTrainedModel, base: BaseTensors) -> TensorAccount:
    """Return the account of a base's files under the model that is trained, with or without adapters."""
    encodings = base.encodings()
    problems = [*unread_problems(encodings.unread, base.files)]
    plain = {name: stored for name, stored in base.types.items() if name not in encodings.parts}
    names = [*plain, *encodings.weights]
    state = parameters_of(model)
    parameters = {name: found for name, found in parameter_names(model, names, state).items() if found in state}
    fates: dict[str, Fate] = {}
    if method_of(base.quantisation) == BITSANDBYTES:
        plain = {name: stored for name, stored in plain.items() if not _is_of_4_bits(name, base.types)}
        fates |= dict.fromkeys(base.types.keys() - plain.keys(), "decoded")
    for name, stored in plain.items():
        parameter = parameters.get(name)
        if parameter is None:
            fates[name] = "left out" if is_left_out(recipe, name) else "carried"
            continue
        fates[name] = "trained" if state[parameter].requires_grad else "frozen"
        if state[parameter].is_floating_point() and not stored.is_float:
            why = f"is of the type {stored.dtype}, and the model has `{parameter}` in floating point"
            problems += unread_problems([Unread(name, why)], base.files)
    for name, weight in encodings.weights.items():
        fate: Fate = "decoded" if name in parameters or not is_left_out(recipe, name) else "left out"
        fates |= dict.fromkeys(weight.parts, fate)
    problems += _unused_entries(recipe, fates, encodings)
    rules = Counter(weight.rule for weight in encodings.weights.values())
    return TensorAccount(fates, dict(rules), parameters, tuple(problems))


def parameters_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by the names that they have without adapters."""
    persistent = set(model.state_dict())
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {own: tensor for name, tensor in tensors if name in persistent and (own := name_in_base(name)) is not None}


def parameter_names(model: PreTrainedModel, names: Iterable[str], state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return {name in the files: name that transformers gives it in the model}, whether the model has it or not.

    Of the tensors of different experts one is looked up: a mapping for DeepSeek V3 would take seconds otherwise.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    known: dict[str, str] = {}
    found: dict[str, str] = {}
    meta: Any = state
    for name in sorted(names, key=dot_natural_key):  # the order in which transformers renames, which one of its renamings depends on
        kind = _EXPERT.sub("0", name)
        if kind not in known:
            known[kind], _ = rename_source_key(kind, renamings, converters, model.base_model_prefix, meta)
            if known[kind] not in state and kind in state:
                known[kind] = kind
        number = _EXPERT.search(name)
        found[name] = known[kind] if number is None else _EXPERT.sub(number[0], known[kind])
    return found


def is_left_out(recipe: Recipe, name: str) -> bool:
    """Return whether an entry of `model.leave_out` names a tensor: a module that it is in, by one part of its path or several."""
    return any(is_inside(name, entry) for entry in recipe.model.leave_out)


def is_inside(name: str, module: str) -> bool:
    return f".{module}." in f".{name}."


def unread_problems(unread: Iterable[Unread], files: Mapping[str, Path]) -> list[Problem]:
    """Return a problem for the tensors of each file that no rule reads: the first by name, with the number of the others."""
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
    """Return whether a tensor is a weight that bitsandbytes quantised, or one of the parts that are stored with it."""
    weight, mark, _ = name.partition(".weight.")
    return mark != "" or f"{name}.absmax" in types or (weight != name and f"{weight}.weight.absmax" in types)


def _unused_entries(recipe: Recipe, fates: Mapping[str, Fate], encodings: Encodings) -> list[Problem]:
    """Return a problem for each entry of `model.leave_out` that names no carried tensor, or one that the model has."""
    problems: list[Problem] = []
    for entry in recipe.model.leave_out:
        named = {fate for name, fate in fates.items() if is_inside(name, entry)}
        if "left out" in named:
            continue
        others = sorted({_module(name) for name, fate in fates.items() if fate == "carried" and name not in encodings.parts})
        what = "is trained or frozen as a part of the model" if named else "matches no tensor of the base"
        hint = f"what can be left out: {', '.join(others)}" if others else "the model has all tensors of the base: remove the entry"
        problems.append(Problem("leave-out", f"model.leave_out: `{entry}` {what}", Where(key="model.leave_out"), hint))
    return problems


def _module(name: str) -> str:
    """Return the module of a tensor as a user would name it: `mtp`, `visual`, `layers.61`."""
    parts = name.split(".")
    while len(parts) > 2 and parts[0] in _WRAPPERS:
        parts = parts[1:]
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]
