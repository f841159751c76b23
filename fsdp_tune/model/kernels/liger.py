"""Liger's Triton kernels (arXiv:2410.10989) for RMSNorm, rotary embedding and gated MLP of a model:
`kernels.liger`.

They are installed in the model object by Liger's own function for the model type. That function also replaces
names in modules of transformers; the classes are restored afterwards, so that later models of the process are
unchanged. The rotary function is not an attribute of the model object, so its replacement stays until the
next model of the type gets Liger's kernels.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType

import torch
from transformers import PreTrainedModel

from fsdp_tune.core.errors import usage_error
from fsdp_tune.data.store import IGNORE_INDEX
from fsdp_tune.model.kernels.head import LossOptions
from fsdp_tune.model.model_files import WRITTEN, KernelChoice
from fsdp_tune.recipe.schema.recipe import Recipe

LIGER = "liger_kernel"


_INSTALL_LIGER = "pip install liger-kernel"


# `kernels.loss` selects the loss; Liger's options would replace the model's forward.
_LOSSES_OFF = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def has_liger() -> bool:
    return importlib.util.find_spec(LIGER) is not None


def require_liger(key: str) -> None:
    """Check that the package that `key` needs is installed. Raises: usage error (exit 2)."""
    if not has_liger():
        raise usage_error(
            "liger-not-installed",
            f"`{key}` needs the package liger-kernel, which is not installed",
            hint=f"`{_INSTALL_LIGER}`",
        )


def choose_liger(recipe: Recipe, model: PreTrainedModel, device_type: str) -> KernelChoice:
    """Choose `kernels.liger`, as `true` or `false`. Raises: usage error if the recipe sets `true` and it is
    impossible."""
    requested = recipe.kernels.liger
    if requested is False:
        return KernelChoice("false", WRITTEN)
    if recipe.lora is not None and recipe.lora.target_parameters:  # which `recipe.rules` refuses with `true`
        return KernelChoice(
            "false", "Liger would replace the forward of the adapted experts (`lora.target_parameters`)"
        )
    if recipe.fsdp.ep_size > 1:  # which `recipe.rules` refuses with `true`
        return KernelChoice(
            "false", "Liger would replace the forward of the experts that ranks divide (`fsdp.ep_size`)"
        )
    if requested is True:
        require_liger("kernels.liger: true")
    if requested == "auto" and recipe.kernels.compile:
        return KernelChoice("false", "the compiler fuses the same operations")
    if device_type != "cuda":
        return KernelChoice(
            "false", f"Liger's kernels are for CUDA GPUs here, and the device is {device_type}"
        )
    if not has_liger():
        return KernelChoice("false", f"the package liger-kernel is not installed (`{_INSTALL_LIGER}`)")
    model_type = str(model.config.model_type)
    if model_type not in _liger_functions():
        if requested is True:
            message = f"`kernels.liger: true`: Liger has no kernels for models of type `{model_type}`"
            raise usage_error(
                "liger-lacks-model", message, hint="leave `kernels.liger` at auto, or write false"
            )
        return KernelChoice("false", f"Liger has no kernels for models of type `{model_type}`")
    return KernelChoice(
        "true", WRITTEN if requested is True else "liger-kernel is installed and supports this model"
    )


def _liger_functions() -> dict[str, Callable[..., None]]:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN  # pyright: ignore[reportMissingImports]  # optional

    return dict(MODEL_TYPE_TO_APPLY_LIGER_FN)


def apply_liger(model: PreTrainedModel, *, rotary: bool) -> None:
    """Install Liger's kernels in a model. Call it before any other change to a `forward`.

    `rotary`: also the rotary embedding. It writes its result over the queries and keys, unseen by autograd.
    So selective recomputation, which keeps products of matrices for the backward, would rotate them twice.
    """
    apply = _liger_functions()[str(model.config.model_type)]
    wanted = _LOSSES_OFF | {"rope": rotary}
    options = {name: value for name, value in wanted.items() if name in inspect.signature(apply).parameters}
    module = sys.modules[type(model).__module__]
    own = _OWN_ROTARY.setdefault(
        module.__name__,
        {
            name: value
            for name, value in vars(module).items()
            if "rotary" in name and inspect.isfunction(value)
        },
    )
    vars(module).update(own)
    with _classes_kept(module):
        apply(model=model, **options)


_OWN_ROTARY: dict[str, dict[str, FunctionType]] = {}
"""Rotary functions of modules of transformers by name, as they were before Liger's."""


@contextlib.contextmanager
def _classes_kept(module: ModuleType) -> Iterator[None]:
    before = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def modules_of_liger(model: torch.nn.Module) -> int:
    """Return the number of modules of a live model that run one of Liger's `forward` functions; for the
    read-back."""
    return sum(_origin(module).startswith(LIGER) for module in model.modules())


def _origin(module: torch.nn.Module) -> str:
    return str(getattr(inspect.unwrap(module.forward), "__module__", ""))


def liger_summed_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    options: LossOptions,
) -> torch.Tensor:
    """Compute `summed_linear_loss` with Liger. Not for fp16: it rounds the gradients of the logits before the
    loss scale is applied."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction  # pyright: ignore[reportMissingImports]

    shape = options.logits
    if shape.scale != 1.0:
        hidden, bias = hidden * shape.scale, None if bias is None else bias * shape.scale
    loss: torch.Tensor = LigerFusedLinearCrossEntropyFunction.apply(
        hidden,
        weight,
        targets,
        bias,
        None,  # weights of the classes
        IGNORE_INDEX,
        0.0,  # the z-loss
        options.label_smoothing,
        "sum",
        shape.softcap,
        False,
        torch.float32,  # dtype of the sum of the weight's gradient
    )[0]
    return loss
