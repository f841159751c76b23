"""The optimizers of `training.optim`: the arguments of each (`training.optim_args`), and the state that it
keeps."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_tune.recipe.schema.recipe import ParameterGroup, Training
from fsdp_tune.recipe.schema.training_fields import TRAINING_FIELDS, training_value

DEFAULT_OPTIMIZER = "adamw_torch_fused"


STATE_DTYPE, STOCHASTIC, BLOCK = "state_dtype", "bf16_stochastic_round", "block_size"


DEFAULT_BLOCK = 256
"""transformers' default for 8 and 4 bits; torchao's own default for 4 bits is 128."""


TRUE_WORDS, _FALSE_WORDS = ("true", "1", "yes"), ("false", "0", "no")


@dataclass(frozen=True, slots=True)
class OptimizerArgument:
    description: str
    """The accepted values, for messages."""
    read: Callable[[str], Any]
    """Parse its text. Raises: ValueError."""


@dataclass(frozen=True, slots=True)
class SupportedOptimizer:
    arguments: Mapping[str, OptimizerArgument]
    state_tensors: int
    """Number of state tensors of the parameter's size, per parameter."""
    state_if: tuple[str, ...] = ()
    """Arguments that add one such tensor each."""
    block_bits: int | None = None
    """Bits of each moment where moments are kept in blocks with a scale (torchao); None where they have a
    dtype of torch."""
    needs_shapes: bool = False
    """Whether an update depends on rows and columns of the full tensor, which FSDP1's flat parameters do not
    keep."""
    state_dtype: str | None = None
    """dtype of the moments; None = that of the parameters, or `state_dtype`."""


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


def _steps(text: str) -> int:
    if not 1 <= int(text) < 100:
        raise ValueError(text)
    return int(text)


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _coefficients(text: str) -> tuple[float, ...]:
    numbers = tuple(map(_number, text.split("/")))
    if len(numbers) != 3:
        raise ValueError(text)
    return numbers


def _adjustment(text: str) -> str:
    if text not in ("match_rms_adamw", "original"):
        raise ValueError(text)
    return text


_NUMBER, _SWITCH = OptimizerArgument("a number", _number), OptimizerArgument("true or false", _switch)


_ROUNDING = {STOCHASTIC: _SWITCH}


_BLOCKS = {BLOCK: OptimizerArgument("a power of two, 16 or more", _block), **_ROUNDING}


_RMSPROP = {**dict.fromkeys(("momentum", "alpha", "eps"), _NUMBER), "centered": _SWITCH}


_MUON = {
    **dict.fromkeys(("momentum", "eps"), _NUMBER),
    "nesterov": _SWITCH,
    "ns_steps": OptimizerArgument("a whole number from 1 to 99", _steps),
    "ns_coefficients": OptimizerArgument("three numbers, such as `3.4445/-4.775/2.0315`", _coefficients),
    "adjust_lr_fn": OptimizerArgument("`match_rms_adamw` or `original`", _adjustment),
}


MUON_DEFAULTS: dict[str, object] = {
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": (3.4445, -4.775, 2.0315),
    "eps": 1e-7,
    "ns_steps": 5,
    "adjust_lr_fn": "match_rms_adamw",
}
"""torch's defaults, except that the learning rate is scaled so that an update is as large as AdamW's
(arXiv:2502.16982): one `training.learning_rate` then fits the matrices and the rest."""


OPTIMIZERS: dict[str, SupportedOptimizer] = {
    "adamw_torch_fused": SupportedOptimizer(
        {STATE_DTYPE: OptimizerArgument("`fp32` or `bf16`", _state_dtype), **_ROUNDING}, 2
    ),
    "adamw_torch": SupportedOptimizer({}, 2),
    "adamw_torch_8bit": SupportedOptimizer(_BLOCKS, 2, block_bits=8),
    "adamw_torch_4bit": SupportedOptimizer(_BLOCKS, 2, block_bits=4),
    "sgd": SupportedOptimizer(
        {**dict.fromkeys(("momentum", "dampening"), _NUMBER), "nesterov": _SWITCH}, 0, state_if=("momentum",)
    ),
    "adagrad": SupportedOptimizer(dict.fromkeys(("lr_decay", "eps"), _NUMBER), 1),
    "rmsprop": SupportedOptimizer(_RMSPROP, 1, state_if=("momentum", "centered")),
    "adafactor": SupportedOptimizer({}, 0, needs_shapes=True, state_dtype="fp32"),
    "muon": SupportedOptimizer(_MUON, 1, needs_shapes=True),
}
"""By transformers' name (`OptimizerNames`), with the arguments as transformers reads them; `muon` is our name
for `torch.optim.Muon`.

The state of Adafactor is negligible: a number for each row and each column. For Muon the row counts that of a
matrix; what AdamW updates has a second moment too.
"""


def optimizer_name(training: Training) -> str:
    return str(training_value(training, "optim") or DEFAULT_OPTIMIZER)


def pairs_of(training: Training) -> list[tuple[str, str | None]]:
    """Split `momentum=0.9, nesterov=true` into names and values; the value is None if there is no `=`."""
    text = str(training_value(training, "optim_args") or "").replace(" ", "")
    parts = text.split(",") if text else []
    return [(name, value if sign else None) for name, sign, value in (part.partition("=") for part in parts)]


def optimizer_arguments(training: Training) -> dict[str, Any]:
    """Return the given arguments, parsed. The rules of the recipe have refused invalid ones."""
    arguments = OPTIMIZERS[optimizer_name(training)].arguments
    return {name: arguments[name].read(value) for name, value in pairs_of(training) if value is not None}


OPTIMIZER_FIELDS = tuple(
    name for name in TRAINING_FIELDS.fields if name.startswith(("adam_", "optim_")) and name != "optim_args"
)
"""Fields of which an optimizer reads some. Every one reads `optim_args`, as far as its row in `OPTIMIZERS`
has the argument."""


def optimizer_options(training: Training) -> dict[str, object]:
    """Return the keyword arguments of the class of `training.optim`, as
    `Trainer.get_optimizer_cls_and_kwargs` does."""
    name, given = optimizer_name(training), optimizer_arguments(training)
    options: dict[str, object] = {"lr": training.learning_rate}
    if name in ("sgd", "adagrad", "rmsprop"):
        return options | given
    if name == "adafactor":
        return options | {"scale_parameter": False, "relative_step": False}
    options["betas"] = (training_value(training, "adam_beta1"), training_value(training, "adam_beta2"))
    options["eps"] = training_value(training, "adam_epsilon")
    if state_bits(training) is not None:
        return {**options, BLOCK: given.get(BLOCK, DEFAULT_BLOCK), STOCHASTIC: given.get(STOCHASTIC, False)}
    if name == "muon":
        return options | {"fused": True, "muon": MUON_DEFAULTS | given}
    return options | ({"fused": True} if name == "adamw_torch_fused" else {})


def state_bits(training: Training) -> int | None:
    """Return the bits of each moment where moments are kept in blocks with a scale; else None."""
    name = optimizer_name(training)
    return OPTIMIZERS[name].block_bits if name in OPTIMIZERS else None


def state_dtype(training: Training, stored: str) -> str:
    """Return the dtype of the moments, `fp32` or `bf16`, for parameters that are stored in `stored`."""
    return OPTIMIZERS[optimizer_name(training)].state_dtype or str(
        optimizer_arguments(training).get(STATE_DTYPE, stored)
    )


def state_bytes(training: Training, stored_bytes: int) -> float:
    """Return the bytes of optimizer state per parameter element, without state that is stored once per
    tensor."""
    row, arguments = OPTIMIZERS[optimizer_name(training)], optimizer_arguments(training)
    width = {"fp32": 4.0, "bf16": 2.0}.get(arguments.get(STATE_DTYPE, ""), stored_bytes)
    if row.block_bits is not None:
        width = row.block_bits / 8 + 4 / arguments.get(BLOCK, DEFAULT_BLOCK)
    return width * (row.state_tensors + sum(bool(arguments.get(name)) for name in row.state_if))


def matching_group(training: Training, name: str) -> ParameterGroup | None:
    """Return the first entry of `training.parameter_groups` with a pattern that matches a parameter's
    name."""
    for group in training.parameter_groups:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in group.match):
            return group
    return None
