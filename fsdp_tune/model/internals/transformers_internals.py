"""Private names of transformers. Each entry: what it is for, what needs it, and what replaces it where a
version does not have it."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from fsdp_tune.model.internals.internal import Attribute, Name, Parameter

READ_IN = ("5.17", "5.23", "5.24")
_CHOICE = "the choice of `model.attn_implementation`"
_MODEL = "transformers:PreTrainedModel"

ATTENTION = Attribute(
    "transformers:PreTrainedConfig._attn_implementation", "reading the attention kernel of a model", READ_IN
)
"""The attention kernel of a model, which transformers may have replaced."""


def attention_of(config: object) -> str:
    """Return the name of the attention kernel of a model with this configuration."""
    return str(ATTENTION.of(config))


EXPERTS = Attribute("transformers:PreTrainedConfig._experts_implementation", "`kernels.experts`", READ_IN)
"""The kernel of stacked experts: their forward looks it up in the configuration that they hold. Setting it
sets nested ones too."""


def forget_kernels(config: object) -> None:
    """Remove the kernels that a config.json names, so that transformers' defaults apply: it downloads and
    runs the code of some."""
    for kernel in (ATTENTION, EXPERTS):
        kernel.set(config, None)


def eager_config(folder: Path) -> object:
    """Return the configuration of a local model with eager attention, which every model supports, and with
    the default kernel of experts.

    Its config.json may name a kernel that is not installed here, or one that transformers downloads and runs.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    forget_kernels(config)
    # by attribute: `_attn_implementation` in a config.json wins over the argument
    ATTENTION.set(config, "eager")
    return config


def has_experts_kernel(module: nn.Module) -> bool:
    """Return whether a module is of a class that `use_experts_implementation` has decorated, by what that
    gives to its objects."""
    given = vars(module)
    return "has_gate" in given and "is_transposed" in given and "config" in given


def has_own_gate(experts: nn.Module) -> bool:
    """Return whether such a class computes its gate itself, instead of by the function that the decorator
    gives to classes without one."""
    gate: object = getattr(type(experts), "_apply_gate", None)
    return gate is None or not gate.__module__.startswith("transformers.integrations.")


SUPPORTS_SDPA = Attribute(f"{_MODEL}._supports_sdpa", _CHOICE, READ_IN, fallback=lambda _: False)
SUPPORTS_FLASH = Attribute(f"{_MODEL}._supports_flash_attn", _CHOICE, READ_IN, fallback=lambda _: False)
SUPPORTS_INTERFACE = Attribute(
    f"{_MODEL}._supports_attention_backend", _CHOICE, READ_IN, fallback=lambda _: False
)
"""Whether a model takes these kernels. Fallback: it does not, so that `auto` chooses a slower one."""
OWN_FLASH_KERNELS = Attribute(
    f"{_MODEL}._compatible_flash_implementations", _CHOICE, READ_IN, fallback=lambda _: None
)
"""Flash kernels of a model's own. Fallback: it has none."""
LAYER_CLASSES = Attribute(
    f"{_MODEL}._no_split_modules", "`fsdp.auto_wrap_policy`", READ_IN, fallback=lambda _: None
)
"""Names of the classes of decoder layers. Fallback: the members of the model's largest list of modules."""
MAY_BE_MISSING = Attribute(
    f"{_MODEL}._keys_to_ignore_on_load_missing",
    "the check of a merged model",
    READ_IN,
    fallback=lambda _: None,
)
"""Patterns of parameters that files need not have. Fallback: files must have all."""
DTYPE_PLAN = Attribute(
    f"{_MODEL}._get_dtype_plan", "`model.dtype` and `precision.mixed_precision` of 16 bits", READ_IN
)
"""Given a dtype, the patterns of names that `from_pretrained` loads in fp32 at that dtype."""

FIND_PACKED = Name(
    "transformers.masking_utils:find_packed_sequence_indices",
    "packed rows without synchronisation",
    READ_IN,
    fallback=None,
)
IS_PACKED = Name(
    "transformers.modeling_flash_attention_utils:_is_packed_sequence",
    "packed rows without synchronisation",
    READ_IN,
    fallback=None,
)
"""Checks of position ids on the device. Fallback: the checks are made, and each waits for the device."""
FIND_PACKED_IN_PART = Name(
    "transformers.masking_utils:find_packed_sequence_indices", "`parallelism.sp_size`", READ_IN
)
"""The same check, of the tokens of one rank that shares rows with others, where it would find wrong
examples."""
GROUPED_PRODUCT_TAKES = Name(
    "transformers.integrations.moe:_can_use_grouped_mm", "experts of any width", READ_IN, fallback=None
)
"""Whether torch's grouped product takes an input and the weights of experts. Fallback: torch refuses widths
that it does not take."""
SONICMOE_NEEDS = Name(
    "transformers.integrations.sonicmoe:SONICMOE_DEPENDENCIES",
    "`kernels.experts: sonicmoe`",
    READ_IN,
    fallback=None,
)
"""{package: oldest version} without which SonicMoE does not load. Fallback: any version is taken."""
RECORDED_OUTPUTS = Name(
    "transformers.modeling_utils:_CAN_RECORD_REGISTRY", "`output_router_logits: true` under FSDP2", READ_IN
)
"""The outputs of layers that a model can record, by its printed class, which FSDP2 replaces."""
NO_ERROR_FOR_MISSING = Parameter(
    "transformers.utils.hub:cached_files._raise_exceptions_for_missing_entries",
    "reading the weights of a model",
    READ_IN,
)
"""A keyword that `cached_file` passes on. False: a file that a model does not have is None."""

_HOOKS = (
    "_prepare_for_training",
    "_init_training_state",
    "_run_epoch",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_maybe_log_save_evaluate",
    "_evaluate",
    "_determine_best_metric",
    "_save_checkpoint",
    "_load_best_model",
    "_load_rng_state",
    "_load_from_checkpoint",
    "_load_callback_state",
)
TRAINER_HOOKS = {name: Name(f"transformers:Trainer.{name}", "`fsdp-tune train`", READ_IN) for name in _HOOKS}
"""Methods that `worker/trainer.py` and its base override or call. The Trainer would train another way if it
no longer called one of them."""


def require_trainer_hooks() -> None:
    """Check that the Trainer has each method that is overridden. Raises: usage error (exit 2)."""
    for hook in TRAINER_HOOKS.values():
        hook.get()


@dataclass(frozen=True, slots=True)
class KernelWithFallback:
    """A function of a model's module that is an optional package's where that is installed, and plain PyTorch
    where it is not."""

    function: str
    package: str
    is_installed: bool
    lengths: frozenset[str]
    """The parameters of the installed function that take the lengths of packed examples: `cu_seqlens`,
    `seq_idx`."""

    @property
    def trains(self) -> bool:
        """Whether it computes rows. The others compute one token at a time, which only generation does."""
        return not any(part in self.function for part in ("_update", "recurrent_"))


_WRAPPER_VARIABLES = {"func_name", "package", "is_new_implementation"}
_LENGTHS = frozenset({"cu_seqlens", "seq_idx"})


def kernel_with_fallback(function: object) -> KernelWithFallback | None:
    """Return what `use_kernel_func_from_hub_with_fallback` has made of a function; None for any other, or in
    a version without it."""
    if not inspect.isfunction(function) or not _WRAPPER_VARIABLES.issubset(function.__code__.co_freevars):
        return None
    known = inspect.getclosurevars(function).nonlocals
    installed = bool(known["is_new_implementation"])
    lengths = _LENGTHS.intersection(known.get("applicable_params", ())) if installed else frozenset[str]()
    return KernelWithFallback(str(known["func_name"]), str(known["package"]), installed, lengths)


@contextlib.contextmanager
def plain_functions(model: nn.Module) -> Iterator[None]:
    """Within the context, the modules of a model's classes use plain PyTorch in place of the packages'
    functions, which need a GPU."""
    modules = {
        name: sys.modules[name]
        for name in {type(each).__module__ for each in model.modules()}
        if name in sys.modules
    }
    replaced = [
        (module, name, value)
        for module in modules.values()
        for name, value in vars(module).items()
        if (kernel := kernel_with_fallback(value)) is not None and kernel.is_installed
    ]
    try:
        for module, name, value in replaced:
            setattr(module, name, value.__wrapped__)
        yield
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)
