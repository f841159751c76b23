"""The parameters and buffers that a model's class keeps in fp32 when the model is loaded in 16 bits.

`from_pretrained(dtype=…)` of transformers 5.17 to 5.24 loads a tensor in fp32 if its name matches a pattern of the class
(`_keep_in_fp32_modules_strict`; for fp16 `_keep_in_fp32_modules` too), and otherwise in the dtype that the constructor gave it
(`convert_and_load_state_dict_in_model`). Routers of mixtures of experts and their biases are such tensors: in bf16, biases that
differ become equal, and other experts are chosen. This module is the only reader of that fact. Loading gives the tensors this dtype,
FSDP2 gathers them in it (`model.shard.fsdp_units`), the read-back expects it, and a merge keeps it (`run.base_model.BaseLayout`).
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_tune.model.adapters.lora import name_in_base
from fsdp_tune.model.internals.transformers_internals import DTYPE_PLAN
from fsdp_tune.model.shard.local import TORCH_DTYPE, kept_in_fp32
from fsdp_tune.run.base_model import kind_of_name

HALVES = ("bf16", "fp16")


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


def _state(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the floating-point parameters and persistent buffers by name."""
    persistent = model.state_dict().keys()
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tensor) for name, tensor in named if name in persistent and tensor.is_floating_point()]
