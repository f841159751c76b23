"""Kernels of optional packages that a model's class calls, such as linear attention: which are installed, and
what runs without them."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from fsdp_tune.core.errors import Notice
from fsdp_tune.model.internals.transformers_internals import kernel_with_fallback
from fsdp_tune.model.model_files import INSTALLED, KernelChoice

MISSING = "missing"
DISTRIBUTIONS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}
"""Import name → what pip installs."""


@dataclass(frozen=True, slots=True)
class ClassKernel:
    """The functions of one package that a model calls in training."""

    package: str
    functions: tuple[str, ...]
    is_installed: bool

    @property
    def distribution(self) -> str:
        return DISTRIBUTIONS.get(self.package, self.package)


def class_kernels(model: nn.Module) -> tuple[ClassKernel, ...]:
    """Return the optional packages of a model's classes. transformers replaces each missing function by one
    in plain PyTorch."""
    functions: dict[str, set[str]] = defaultdict(set)
    present: dict[str, bool] = {}
    for name in {type(module).__module__ for module in model.modules()}:
        for function in vars(sys.modules[name]).values():
            found = kernel_with_fallback(function)
            if found is None or not found.trains:
                continue
            functions[found.package].add(found.function)
            present[found.package] = present.get(found.package, True) and found.is_installed
    return tuple(
        ClassKernel(package, tuple(sorted(functions[package])), present[package])
        for package in sorted(functions)
    )


def choose_class_kernels(model: nn.Module, device_type: str) -> dict[str, KernelChoice]:
    """Return for each package whether its kernels run: distribution → `installed` or `MISSING`. They are for
    GPUs."""
    if device_type != "cuda":
        return {}
    return {
        kernel.distribution: KernelChoice(
            INSTALLED if kernel.is_installed else MISSING, ", ".join(kernel.functions)
        )
        for kernel in class_kernels(model)
    }


def slow_kernel_notices(model: nn.Module, chosen: Mapping[str, KernelChoice]) -> list[Notice]:
    """Return a notice if packages are missing here, so that layers run in plain PyTorch.

    `chosen`: the choices of a run, with those of `choose_class_kernels`.
    """
    missing = {
        distribution: choice.reason for distribution, choice in chosen.items() if choice.value == MISSING
    }
    if not missing:
        return []
    names, functions = " and ".join(missing), ", ".join(missing.values())
    message = (
        f"{names} {'is' if len(missing) == 1 else 'are'} not installed here: {type(model).__name__} computes "
        f"{functions} in plain PyTorch, with equal results; such models took 1.7 to 4 times as long in "
        "published runs"
    )
    hint = f"`pip install {' '.join(missing)}` where the run is started"
    return [Notice("slow-kernels", message, hint=hint)]
