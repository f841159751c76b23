"""The parameters and buffers that stay in fp32 in a model of 16 bits: those of its class, and of its base.

`from_pretrained(dtype=…)` of transformers 5.17 to 5.24 loads a tensor in fp32 if its name matches a pattern of the class
(`_keep_in_fp32_modules_strict`; for fp16 `_keep_in_fp32_modules` too), and otherwise in the dtype that the constructor gave it
(`convert_and_load_state_dict_in_model`). Routers of mixtures of experts and their biases are such tensors: in bf16, biases that
differ become equal, and other experts are chosen. This module is the only reader of that fact. Loading gives the tensors this dtype,
FSDP2 gathers them in it (`model.shard.fsdp_units`), the read-back expects it, and a merge keeps it (`run.base_model.BaseLayout`).

Of some families the class keeps none, and the published files have such tensors in fp32 among others in 16 bits all the same
(`e_score_correction_bias` of MiniMax M2). transformers loads and computes them in the dtype of the model, and so does a run: a class that
keeps none has no cast for them, so that fp32 would reach a layer in 16 bits. A merge does not round them: it reads those that are not
trained from the base (`with_rounded`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_tune.model.adapters.lora import name_in_base
from fsdp_tune.model.internals.transformers_internals import DTYPE_PLAN
from fsdp_tune.model.loading.stored_tensors import DTYPES
from fsdp_tune.model.shard.local import TORCH_DTYPE, kept_in_fp32
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.base_model import BaseLayout, BaseRecord, Rounded, kind_of_name

if TYPE_CHECKING:
    from fsdp_tune.model.loading.tensor_account import BaseTensors, TensorAccount

HALVES = ("bf16", "fp16")
_WIDE = ("F32", "F64")
_OF_CODES = ("decoded", "dropped")
_NAMES = {dtype: name for name, dtype in TORCH_DTYPE.items()}


def keep_precision(model: PreTrainedModel, stored: torch.dtype, computed: torch.dtype, like: PreTrainedModel | None = None) -> None:
    """Give each parameter and persistent buffer of a bare model, constructed in `stored`, the dtype in which `from_pretrained` loads
    it, and record the names of those that are in fp32 although the model is stored or computes in 16 bits: `kept_in_fp32`.

    `like`: the model constructed in `stored`, if this one is in another dtype for now.

    Weights that are stored in fp32 and computed in 16 bits have the names that the class keeps at the compute dtype.
    """
    kept = names_in_fp32(like if like is not None else model, stored) | patterns_in_fp32(model, computed)
    for name, tensor in _state(model):
        if name in kept and tensor.dtype != torch.float32:
            tensor.data = tensor.data.float()
    model.kept_in_fp32 = frozenset(kept)  # type: ignore[assignment]  # nn.Module declares its attributes as tensors and modules


def follow_names(model: PreTrainedModel) -> None:
    """Update the recorded names after adapters have renamed the parameters of the modules that they adapt."""
    kept = kept_in_fp32(model)
    model.kept_in_fp32 = frozenset(name for name, _ in _state(model) if name_in_base(name) in kept)  # type: ignore[assignment]


def names_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """Return the names of the tensors that `from_pretrained` loads in fp32, of a model that was constructed in `dtype`."""
    if dtype not in (torch.bfloat16, torch.float16):
        return set()
    made = {name for name, tensor in _state(model) if tensor.dtype == torch.float32}
    return made | patterns_in_fp32(model, dtype)


def patterns_in_fp32(model: nn.Module, dtype: torch.dtype) -> set[str]:
    """Return the names of the tensors that match a pattern of the class, searched as transformers does, where `*` is any text."""
    patterns = [pattern.replace("*", ".*") for pattern in DTYPE_PLAN.of(model)(dtype)]
    found = re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)")
    return {name for name, _ in _state(model) if found.search(name)}


def kinds_in_fp32(construct: Callable[[torch.dtype], PreTrainedModel]) -> dict[str, tuple[str, ...]]:
    """Return {dtype of a recipe: names that the class keeps in fp32 at that dtype}, with `{}` for each number in a name.

    `construct` returns the bare model in a dtype, on the meta device.
    """
    found: dict[str, tuple[str, ...]] = {}
    for dtype in HALVES:
        names = names_in_fp32(construct(TORCH_DTYPE[dtype]), TORCH_DTYPE[dtype])
        found[dtype] = tuple(sorted({kind_of_name(name) for name in names}))
    return {dtype: kinds for dtype, kinds in found.items() if kinds}


def fp32_of_base(base: BaseTensors, account: TensorAccount) -> frozenset[str]:
    """Return the parameters and buffers that a base stores in fp32 while most elements of its files are in 16 bits; none of a base that
    is in fp32 as a whole. Quantised weights are not counted: their codes say nothing about the others."""
    sizes = dict.fromkeys((True, False), 0)
    plain = {name: stored for name, stored in base.types.items() if stored.is_float and account.fates.get(name) not in _OF_CODES}
    for stored in plain.values():
        sizes[stored.dtype in _WIDE] += math.prod(stored.shape)
    if sizes[True] >= sizes[False]:
        return frozenset()
    return frozenset(account.parameters[name] for name, stored in plain.items() if stored.dtype in _WIDE and name in account.parameters)


def kinds_of_base(base: BaseTensors, account: TensorAccount, state: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Return the names of `fp32_of_base` as a layout records them: with `{}` for each number, or in full if the base stores others of the
    kind in 16 bits. A parameter that is made of several tensors is recorded by its kind. `state`: of the model.
    """
    names = fp32_of_base(base, account)
    others = {kind_of_name(name) for name in state.keys() - names}
    shapes = {parameter: base.types[name].shape for name, parameter in account.parameters.items() if name in base.types}
    alone = {name for name in names if kind_of_name(name) in others and shapes[name] == tuple(state[name].shape)}
    return tuple(sorted(alone | {kind_of_name(name) for name in names - alone}))


def with_rounded(
    record: BaseRecord,
    recipe: Recipe,
    state: Mapping[str, torch.Tensor],
    layout: BaseLayout,
    base: BaseTensors | None,
    account: TensorAccount | None,
) -> BaseRecord:
    """Return the record of a base with the tensors that are not trained and of which the run has fewer bits (`BaseRecord.rounded`).

    Training does not change them, but their copy in its checkpoints is rounded. A run that continues another one has no `base`, and may
    train what that one did not. A merge of an adapter reads all tensors under it from the base. `state`: of the model.
    """
    found = record.rounded if base is None or account is None else _rounded_of_base(base, account, state, layout)
    untrained = _untrained_names(state, layout) if found and recipe.lora is None else set[str]()
    return replace(record, rounded={name: each for name, each in found.items() if name in untrained})


def _rounded_of_base(
    base: BaseTensors, account: TensorAccount, state: Mapping[str, torch.Tensor], layout: BaseLayout
) -> dict[str, Rounded]:
    """Return the frozen tensors of a base of which the model has fewer bits, by their names in a merged model."""
    found: dict[str, Rounded] = {}
    for name, parameter in account.parameters.items():
        stored, live = base.types.get(name), state[parameter].dtype
        if account.fates.get(name) != "frozen" or stored is None or not stored.is_float or live not in _NAMES:
            continue
        if torch.promote_types(DTYPES[stored.dtype], live) != live:
            found[name if name in account.converted else layout.name_of(parameter)] = Rounded(name, _NAMES[live])
    return found


def _untrained_names(state: Mapping[str, torch.Tensor], layout: BaseLayout) -> set[str]:
    """Return the tensors of a merged model that are made of parameters which are not trained, and of buffers."""
    frozen = {parameter for parameter, tensor in state.items() if not tensor.requires_grad}
    made = (tensor for group in layout.tensors for tensor in group.expanded())
    named = {tensor.name for tensor in made if all(piece.parameter in frozen for piece in tensor.pieces)}
    return named | {layout.name_of(parameter) for parameter in frozen}


def _state(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the floating-point parameters and persistent buffers by name."""
    persistent = model.state_dict().keys()
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tensor) for name, tensor in named if name in persistent and tensor.is_floating_point()]
