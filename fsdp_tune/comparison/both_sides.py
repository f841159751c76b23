"""What both sides of a comparison compute of a model in the same way, whichever tool trains it.

The interpreter of a tool imports this too: only the standard library, and torch inside functions.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

SMALL_MODEL = (
    "the model's own size and weights: its stages ran on a small one with random weights (`--model full` "
    "loads it)"
)
AUTOCAST = "autocast of the forward"
"""A place in the stage `dtypes`."""
ROUNDING = (
    "how half precision rounds: beside a tool, both sides compute in fp32, and the dtypes are "
    "compared by name"
)
DRAWN = (
    "first values of adapters and the masks of dropout, which each tool draws itself: both sides ran "
    "with the same values, without dropout"
)


def summary(tensor: Any) -> list[float]:
    """Return the norm of a tensor and its product with a fixed vector, in fp64: other values change at least
    one of them."""
    torch = importlib.import_module("torch")
    flat = tensor.double().reshape(-1)
    return [
        float(flat.norm()),
        float(flat @ torch.cos(torch.arange(len(flat), dtype=torch.float64) * 0.7 + 1.0)),
    ]


def rounding_of_summary(parameter: Any) -> list[float]:
    """Return what the numbers of a change's `summary` may be off by if the parameter is stored in fp32.

    Each element is off by up to the distance of two numbers of its size, independent of the others. So the
    norm is off by that of one element, and a sum of n elements, each times a cosine, by √(n/2) times as much.
    """
    torch = importlib.import_module("torch")
    flat = parameter.double().reshape(-1)
    spacing = float(torch.finfo(torch.float32).eps * flat.square().mean().sqrt())
    return [spacing, spacing * math.sqrt(len(flat) / 2)]


def dtype_text(parameter: Any) -> str:
    return (
        f"{str(parameter.dtype).removeprefix('torch.')}, {'trained' if parameter.requires_grad else 'frozen'}"
    )


def dropouts(model: Any) -> dict[str, float]:
    """Return the shares that a model drops in training, by module."""
    nn = importlib.import_module("torch.nn")
    found = {
        name: float(module.p)
        for name, module in model.named_modules()
        if isinstance(module, nn.Dropout) and module.p
    }
    shares = {name: getattr(module, "attention_dropout", None) for name, module in model.named_modules()}
    found |= {name: share for name, share in shares.items() if share and isinstance(share, float)}
    return {f"dropout of {plain_name(name)}": share for name, share in found.items()}


def settle_draws(model: Any) -> None:
    """Switch dropout off, give adapters fixed first values, and upcast to fp32: nothing after other draws, or
    after other last bits of half precision in Adam's first steps, could be compared."""
    torch = importlib.import_module("torch")
    model.float()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif getattr(module, "attention_dropout", None):
            module.attention_dropout = 0.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_drawn(name):
                wave = torch.sin(torch.arange(parameter.numel(), dtype=torch.float64) * 0.9 + 0.3) * 0.02
                parameter.copy_(wave.reshape(parameter.shape))


def is_drawn(name: str) -> bool:
    return ".lora_A." in name or ".lora_embedding_A." in name


def plain_name(name: str) -> str:
    """Return the name of a parameter without what PEFT's model puts before it."""
    return name.removeprefix("base_model.model.")


def cut_length(length: int, trained: Sequence[int], most: int, after_first: int) -> int:
    """Return how many tokens of a row run through the model: at most so many, or some after the first trained
    one."""
    return min(length, max(most, trained[0] + after_first if trained else 0))
