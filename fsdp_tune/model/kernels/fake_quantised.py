"""Quantisation-aware training: linear layers of the decoder that compute with rounded weights
(`quantization.train`).

torchao's prepare step replaces each `nn.Linear`. The new layer rounds its weight in groups of a row (`int4`),
and for `int8-int4` also each token's input, to the values of the quantised model, and multiplies them in the
compute dtype; gradients pass straight through the rounding. Parameters keep their names, values and storage
dtype, so sharding, checkpoints and merges do not differ. FSDP gathers complete weights before a layer
computes, so groups are never divided. A layer whose weight other code reads would not round it there, and
stays as it is.
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_tune.core.errors import Notice, Where, usage_error
from fsdp_tune.core.expert_names import is_router
from fsdp_tune.core.units import format_bytes
from fsdp_tune.model.model_files import KernelChoice
from fsdp_tune.model.shard.fsdp_units import decoder_layers
from fsdp_tune.model.shard.local import TORCH_DTYPE, kept_in_fp32, require_torchao
from fsdp_tune.recipe.schema.recipe import Recipe

if TYPE_CHECKING:
    from torchao.core.config import AOBaseConfig

KEY, _GROUP, _LEFT = "quantization.train", "quantization.group_size", "quantization.modules_to_not_convert"

OLDEST_TORCHAO = (0, 18)
"""The first whose emulation, conversion and files were compared."""
_INT4: Any = vars(torch)["int4"]  # torch's type stubs lack it
_PREPARE: Any = "prepare"


@dataclass(frozen=True, slots=True)
class QuantisedPlan:
    """The layers that train with emulated quantisation, by name."""

    quantised: tuple[str, ...]
    left: dict[str, str]
    """Linear layers of the decoder that are not quantised, with the reason."""
    parameters: int
    """Number of elements of the quantised weights."""
    of_layers: int
    """Number of parameters of all decoder layers."""


def plan_quantised(recipe: Recipe, model: PreTrainedModel) -> QuantisedPlan:
    """Return the plan for a bare model, which is the same before and after `prepare_quantised`.

    Raises: usage error if nothing can be quantised, a pattern matches no linear layer, or a group does not
    divide the inputs of a layer.
    """
    section = recipe.quantised_training
    assert section is not None
    layers = decoder_layers(model, recipe.layer_classes)
    linear = {
        name: module
        for prefix, layer in layers
        for name, module in layer.named_modules(prefix=prefix)
        if isinstance(module, nn.Linear)
    }
    for pattern in section.modules_to_not_convert:
        if not any(_matches(name, pattern) for name in linear):
            message = f"`{_LEFT}`: `{pattern}` matches no linear layer of the decoder"
            hint = f"names look like `{next(iter(linear), 'model.layers.0.mlp.down_proj')}`"
            raise usage_error("qat-matches-nothing", message, where=Where(key=_LEFT), hint=hint)
    read, uses = (
        set(weights_read_by_others(model)),
        Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False)),
    )
    reasons = {
        name: _why_not(model, name, module, section.modules_to_not_convert) for name, module in linear.items()
    }
    for name, module in linear.items():
        if reasons[name] is None and name in read:
            reasons[name] = "other code of the model reads its weight"
        elif reasons[name] is None and uses[id(module.weight)] > 1:
            reasons[name] = "it shares its weight with another layer"
    quantised = {name: module for name, module in linear.items() if reasons[name] is None}
    left = {name: why for name, why in reasons.items() if why is not None}
    if not quantised:
        raise _nothing(recipe, model, left)
    for name, module in quantised.items():
        if module.in_features % section.group_size:
            message = (
                f"`{_GROUP}: {section.group_size}` does not divide the {module.in_features} inputs of "
                f"`{name}`"
            )
            hint = (
                "choose a divisor, or leave the layer out: `modules_to_not_convert: "
                f"['*.{name.rpartition('.')[2]}']`"
            )
            raise usage_error("qat-group-size", message, where=Where(key=_GROUP), hint=hint)
    return QuantisedPlan(
        quantised=tuple(quantised),
        left=left,
        parameters=sum(module.weight.numel() for module in quantised.values()),
        of_layers=sum({id(p): p.numel() for _, layer in layers for p in layer.parameters()}.values()),
    )


def _matches(name: str, pattern: str) -> bool:
    return any(
        fnmatch.fnmatchcase(name, each)
        for each in (pattern, f"*.{pattern}", f"{pattern}.*", f"*.{pattern}.*")
    )


def _why_not(model: PreTrainedModel, name: str, module: nn.Linear, patterns: list[str]) -> str | None:
    """Return why a linear layer is not quantised; None if it is."""
    if any(_matches(name, pattern) for pattern in patterns):
        return f"it is in `{_LEFT}`"
    if type(module) is not nn.Linear and not is_quantised(module):
        return f"it is a {type(module).__name__}, which may compute something else"
    if is_router(model.config, module.out_features) or module.out_features == 1:
        return "it is a router or a gate, whose few outputs need precision"
    if f"{name}.weight" in kept_in_fp32(model):
        return "the model's class keeps it in fp32"
    return None


def weights_read_by_others(model: nn.Module) -> Iterator[str]:
    """Yield the linear layers whose weight the code of a module around them reads, by name: Mamba multiplies
    by `self.dt_proj.weight`.

    The code of the classes decides, whichever of its branches run: a kernel that is installed later may take
    another one.
    """
    for name, module in model.named_modules():
        for child in _weights_read(type(module)):
            full = f"{name}.{child}" if name else child
            with_child: nn.Module | None = module
            for part in child.split("."):
                with_child = getattr(with_child, part, None)
            if isinstance(with_child, nn.Linear):
                yield full


_READ = re.compile(r"\bself\.([A-Za-z_][\w.]*)\.weight\b(?!\.(?:dtype|device|shape)\b)")
_SETUP = ("__init__", "_init_weights", "reset_parameters", "extra_repr")


@functools.cache
def _weights_read(kind: type[nn.Module]) -> frozenset[str]:
    """Return `a.b` for each `self.a.b.weight` in the code of a class and its bases, but for properties and
    what runs before training."""
    found: set[str] = set()
    for each in kind.__mro__:
        if each.__module__.startswith(("torch.", "torchao.")) or each is object or each is PreTrainedModel:
            continue
        for name, value in vars(each).items():
            if inspect.isfunction(value) and name not in _SETUP:
                try:
                    found |= {*_READ.findall(inspect.getsource(value))}
                except (OSError, TypeError):  # generated, as in tests
                    continue
    return frozenset(found)


def _nothing(recipe: Recipe, model: PreTrainedModel, left: dict[str, str]) -> Exception:
    assert recipe.quantised_training is not None
    name, why = next(
        iter(left.items()), ("", "its decoder layers have no nn.Linear (GPT-2, for example, has Conv1D)")
    )
    message = (
        f"`{KEY}: {recipe.quantised_training.train}` finds nothing to quantise in {type(model).__name__}: "
    )
    message += f"{f'`{name}`: ' if name else ''}{why}"
    return usage_error(
        "qat-nothing-to-quantise", message, where=Where(key=KEY), hint="leave `quantization` out"
    )


def is_quantised(module: nn.Module) -> bool:
    """Return whether a module is torchao's layer, possibly as the subclass that FSDP2 creates."""
    # importing it takes a second; if not imported, no module is one
    torchao = sys.modules.get("torchao.quantization.qat.linear")
    return torchao is not None and isinstance(module, torchao.FakeQuantizedLinear)


def choose_quantised(recipe: Recipe, model: PreTrainedModel) -> dict[str, KernelChoice]:
    """Return the choice by recipe key, in the format of `choose_kernels`; empty unless the recipe sets
    `quantization.train`."""
    section = recipe.quantised_training
    if section is None:
        return {}
    require_torchao(f"{KEY}: {section.train}", OLDEST_TORCHAO)
    return _choice(recipe, plan_quantised(recipe, model))


def _choice(recipe: Recipe, plan: QuantisedPlan) -> dict[str, KernelChoice]:
    section = recipe.quantised_training
    assert section is not None
    words = [f"{len(plan.quantised)} linear layers, a scale for {section.group_size} weights"]
    words += [f"{count} left, {why}" for why, count in Counter(plan.left.values()).items()]
    return {KEY: KernelChoice(str(section.train), "; ".join(words))}


def quantised_notices(recipe: Recipe, model: PreTrainedModel) -> list[Notice]:
    """Return a notice if a large part of the decoder layers stays as it is, or rounding needs much memory.
    The model may be on the meta device."""
    if recipe.quantised_training is None:
        return []
    plan = plan_quantised(recipe, model)
    found: list[Notice] = []
    if recipe.is_sharded and recipe.fsdp.activation_checkpointing == "none":
        size = format_bytes(2 * plan.parameters * TORCH_DTYPE[recipe.compute_dtype].itemsize)
        message = (
            f"`{KEY}` without recomputation keeps two complete copies of each rounded weight until the "
            f"backward pass: {size} a rank"
        )
        found.append(
            Notice("qat-keeps-weights", message, Where(key=KEY), "`fsdp.activation_checkpointing: full`")
        )
    layers = decoder_layers(model, recipe.layer_classes)
    stacked = sum(
        {id(p): p.numel() for _, layer in layers for p in layer.parameters() if p.ndim == 3}.values()
    )
    if stacked:
        share = plan.parameters / plan.of_layers
        message = (
            f"`{KEY}` quantises {share:.0%} of the parameters of the layers: stacked experts "
            f"({stacked:,}) are not linear layers"
        )
        found.append(Notice("qat-without-experts", message, where=Where(key=KEY)))
    return found


def base_config(recipe: Recipe) -> AOBaseConfig:
    """Return torchao's configuration of the quantised model."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig, PerGroup

    section = recipe.quantised_training
    assert section is not None
    groups = PerGroup(section.group_size)
    if section.train == "int8-int4":
        return Int8DynamicActivationIntxWeightConfig(weight_dtype=_INT4, weight_granularity=groups)
    return IntxWeightOnlyConfig(weight_dtype=_INT4, granularity=groups)


def prepare_quantised(recipe: Recipe, model: PreTrainedModel) -> dict[str, KernelChoice]:
    """Replace the planned layers of the bare model, except those already replaced, and return the choice."""
    section = recipe.quantised_training
    if section is None:
        return {}
    require_torchao(f"{KEY}: {section.train}", OLDEST_TORCHAO)
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    from fsdp_tune.model.kernels.rounding import Rounding

    plan = plan_quantised(recipe, model)
    fresh = {name: linear for name in plan.quantised if not is_quantised(linear := model.get_submodule(name))}
    quantize_(model, QATConfig(base_config(recipe), step=_PREPARE), filter_fn=lambda _, name: name in fresh)
    for name, linear in fresh.items():
        layer: Any = model.get_submodule(name)
        # On the meta device torchao makes new parameters, which are trained also where the old ones are
        # frozen.
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.train(linear.training)
        layer.weight_fake_quantizer = Rounding(layer.weight_fake_quantizer.config)
        if layer.activation_fake_quantizer is not None:
            layer.activation_fake_quantizer = Rounding(layer.activation_fake_quantizer.config)
    return _choice(recipe, plan)
