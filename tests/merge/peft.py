"""LoRA adapters as PEFT writes them, and their expected merge in torch; names and scaling are hand-written
from PEFT."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from fsdp_tune.core.tensors.peft_names import PREFIX

RANK, ALPHA = 4, 8
CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": None,
    "r": RANK,
    "lora_alpha": ALPHA,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
}
State = dict[str, torch.Tensor]


def values(*shape: int, seed: int) -> torch.Tensor:
    """Small multiples of 1/16: sums of products of these are exact in fp32, so results are compared bit for
    bit."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float() / 16


def exact(model: nn.Module) -> Any:
    """The model with weights that are multiples of 1/16."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(values(*parameter.shape, seed=1000 + number))
    return model


def factors(model: nn.Module, *ends: str, rank: int = RANK) -> dict[str, State]:
    """{module: {part: tensor}} for every layer whose name ends with one of `ends`, with PEFT's shapes."""
    found: dict[str, State] = {}
    for number, (name, module) in enumerate(model.named_modules()):
        if not name.endswith(ends):
            continue
        if isinstance(module, nn.Embedding):
            found[name] = {
                "lora_embedding_A": values(rank, module.num_embeddings, seed=number),
                "lora_embedding_B": values(module.embedding_dim, rank, seed=number + 500),
            }
        else:
            rows, columns = module.weight.T.shape if isinstance(module, Conv1D) else module.weight.shape
            found[name] = {
                "lora_A": values(rank, columns, seed=number),
                "lora_B": values(rows, rank, seed=number + 500),
            }
    assert found
    return found


def key(module: str, part: str, adapter: str | None = None) -> str:
    name = f"{PREFIX}{module}.{part}" + (f".{adapter}" if adapter else "")
    return name if part.startswith("lora_embedding") else f"{name}.weight"


def adapter_state(adapter: Mapping[str, State], name: str | None = None) -> State:
    """The factors alone, with the adapter's name as inside a model, or without it as in an adapter's file."""
    return {
        key(module, part, name): tensor for module, parts in adapter.items() for part, tensor in parts.items()
    }


def whole_state(model: nn.Module, adapter: Mapping[str, State], *, saved: Mapping[str, State] = {}) -> State:
    """The state dict of the PEFT model. `saved`: {module of `modules_to_save`: its trained state}."""
    state: State = {}
    for name, tensor in model.state_dict().items():
        module, _, rest = name.rpartition(".")
        if module in saved:
            state[f"{PREFIX}{module}.original_module.{rest}"] = tensor
            state[f"{PREFIX}{module}.modules_to_save.default.{rest}"] = saved[module][rest]
        else:
            state[PREFIX + (f"{module}.base_layer.{rest}" if module in adapter else name)] = tensor
    return state | adapter_state(adapter, "default")


def added(
    model: nn.Module, adapter: Mapping[str, State], *, rslora: bool = False, alpha: float = ALPHA
) -> State:
    """The state dict of the base with every layer's scaling · B·A added, in float64, rounded to the base's
    type once."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for module, parts in adapter.items():
        is_embedding = "lora_embedding_A" in parts
        a, b = (parts[f"lora_embedding_{side}" if is_embedding else f"lora_{side}"].double() for side in "AB")
        delta = (b @ a) * (alpha / (math.sqrt(len(a)) if rslora else len(a)))
        if is_embedding or isinstance(model.get_submodule(module), Conv1D):
            delta = delta.T
        old = state[f"{module}.weight"]
        state[f"{module}.weight"] = (old.double() + delta).to(old.dtype)
    return state


def write_config(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def adapter_directory(folder: Path, state: State, **changes: Any) -> Path:
    write_config(folder, **changes)
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in state.items()},
        folder / "adapter_model.safetensors",
    )
    return folder
