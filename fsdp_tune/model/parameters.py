"""Parameters of a model: dtypes by the names of recipes, names and class without wrappers, and which of them decay."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Return whether weight decay acts on a parameter: a matrix whose name contains neither "norm" nor "bias".

    Stacked experts (gpt-oss) and attention heads (XLNet) have biases of two dimensions.
    """
    return parameter.ndim >= 2 and not any(word in name.lower() for word in ("norm", "bias"))


def plain_name(name: str) -> str:
    """Return a parameter's name in the bare model, without the parts that DDP and FSDP1 add."""
    return name.removeprefix("module.").replace("_fsdp_wrapped_module.", "")


def decayed_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters with weight decay. Needs the bare model, since FSDP1's parts of a matrix are vectors."""
    return frozenset(name for name, parameter in model.named_parameters() if decays(name, parameter))


def bare_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that `module` had before FSDP2 replaced it by a subclass of its own (`FSDPLlamaForCausalLM`)."""
    return next(each for each in type(module).__mro__ if not issubclass(each, FSDPModule))
