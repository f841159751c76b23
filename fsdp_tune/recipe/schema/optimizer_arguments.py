"""`training.optim_args`, the free text of transformers, taken apart once: which words each optimizer knows, and what they say.

Two words are ours: `state_dtype` and, for AdamW without torchao, `bf16_stochastic_round` (torchao's own name for it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsdp_tune.recipe.schema import Training
from fsdp_tune.recipe.schema.training_fields import training_value

DEFAULT_OPTIMIZER = "adamw_torch_fused"
TORCHAO_OPTIMIZERS = {"adamw_torch_8bit": 8, "adamw_torch_4bit": 4}
"""Name → bits of each moment. Both are AdamW of the package torchao."""
STATE_DTYPE, STOCHASTIC, BLOCK = "state_dtype", "bf16_stochastic_round", "block_size"
DEFAULT_BLOCK = 256
"""transformers' for both, where torchao has 128 for 4 bits."""

TRUE_WORDS, _FALSE_WORDS = ("true", "1", "yes"), ("false", "0", "no")


@dataclass(frozen=True, slots=True)
class Word:
    """One name that an optimizer takes."""

    says: str
    read: Callable[[str], Any]
    """ValueError for what it cannot be."""


def _switch(text: str) -> bool:
    if text.lower() not in TRUE_WORDS + _FALSE_WORDS:
        raise ValueError(text)
    return text.lower() in TRUE_WORDS


def _state_dtype(text: str) -> str:
    if text not in ("fp32", "bf16"):
        raise ValueError(text)
    return text


def _block(text: str) -> int:
    size = int(text)
    if size < 16 or size & (size - 1):
        raise ValueError(text)
    return size


_NUMBER, _SWITCH = Word("a number", float), Word("true or false", _switch)
_ROUNDING = {STOCHASTIC: _SWITCH}
_BLOCKS = {BLOCK: Word("a power of two from 16 on", _block), **_ROUNDING}
WORDS: dict[str, dict[str, Word]] = {
    "adamw_torch_fused": {STATE_DTYPE: Word("`fp32` or `bf16`", _state_dtype), **_ROUNDING},
    "adamw_torch": {},
    "adamw_torch_8bit": _BLOCKS,
    "adamw_torch_4bit": _BLOCKS,
    "sgd": {**dict.fromkeys(("momentum", "dampening", "weight_decay"), _NUMBER), "nesterov": _SWITCH},
    "adagrad": dict.fromkeys(("lr_decay", "weight_decay", "eps"), _NUMBER),
    "rmsprop": {**dict.fromkeys(("momentum", "alpha", "eps", "weight_decay"), _NUMBER), "centered": _SWITCH},
}
"""Optimizer → the words that it takes, as transformers reads them."""


def optimizer_name(training: Training) -> str:
    return str(training_value(training, "optim") or DEFAULT_OPTIMIZER)


def pairs_of(training: Training) -> list[tuple[str, str | None]]:
    """`momentum=0.9, nesterov=true` in pieces; None where a piece has no `=`."""
    text = str(training_value(training, "optim_args") or "").replace(" ", "")
    parts = text.split(",") if text else []
    return [(name, value if sign else None) for name, sign, value in (part.partition("=") for part in parts)]


def optimizer_arguments(training: Training) -> dict[str, Any]:
    """The words that are given, as values. The recipe's rules have refused what cannot be read."""
    words = WORDS[optimizer_name(training)]
    return {name: words[name].read(value) for name, value in pairs_of(training) if value is not None}


def state_bits(training: Training) -> int | None:
    """Bits of a moment, of an optimizer that keeps them in blocks with a scale; None: in a dtype of torch."""
    return TORCHAO_OPTIMIZERS.get(optimizer_name(training))


def state_dtype(training: Training, stored: str) -> str:
    """`fp32` or `bf16`: what the moments are kept in, where parameters are kept in `stored` (fp16 cannot be)."""
    return str(optimizer_arguments(training).get(STATE_DTYPE, stored))


def state_bytes(training: Training, stored_bytes: int) -> float:
    """Of all the state of one parameter, without what is kept once a tensor."""
    name, arguments = optimizer_name(training), optimizer_arguments(training)
    if name in TORCHAO_OPTIMIZERS:
        return 2 * (TORCHAO_OPTIMIZERS[name] / 8 + 4 / arguments.get(BLOCK, DEFAULT_BLOCK))
    width = {"fp32": 4, "bf16": 2}.get(arguments.get(STATE_DTYPE, ""), stored_bytes)
    if name == "sgd":
        return stored_bytes if arguments.get("momentum") else 0
    if name == "rmsprop":
        return stored_bytes * (1 + bool(arguments.get("momentum")) + bool(arguments.get("centered")))
    return width * (1 if name == "adagrad" else 2)
