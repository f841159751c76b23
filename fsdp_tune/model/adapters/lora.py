"""Put PEFT's LoRA layers into a model before it is sharded, and give them the values that one process would
draw.

The modules are PEFT's; the choice of targets, the first values and the files are ours: PEFT ignores a target
that hits nothing, draws from the generator of each rank, and saves what one rank holds.
"""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_tune.core.errors import Where, usage_error
from fsdp_tune.core.tensors.peft_names import PREFIX, tensor_name
from fsdp_tune.model.adapters.targets import Targets, find_saved, find_targets, is_stack, last_parts
from fsdp_tune.model.shard.local import copy_part, count_elements, local_part
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.sections import Lora
from fsdp_tune.run.directory import run_of
from fsdp_tune.run.manifest import digest_number

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER_NAME = "default"
"""PEFT's name of the only adapter, a part of its parameters' names."""


_BASE_LAYER = re.compile(r"\.base_layer(?=\.)")
"""In the names of what PEFT's layers enclose: once for a module, once for each adapted parameter of a
module."""


_OWN = re.compile(rf"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)\.{ADAPTER_NAME}(\.weight)?$")


def is_of_adapter(name: str) -> bool:
    """Return whether a parameter of the live model belongs to an adapter, by its name."""
    return _OWN.search(name) is not None


def name_in_base(name: str) -> str | None:
    """Return the name that a parameter or buffer has in the model without adapters; None for a parameter of
    an adapter."""
    return None if is_of_adapter(name) else _BASE_LAYER.sub("", name)


def name_in_file(name: str) -> str:
    """Return the name that a trained parameter has in PEFT's `adapter_model.safetensors`
    (`get_peft_model_state_dict`, PEFT 0.21)."""
    found = _OWN.search(name)
    return PREFIX + name if found is None else tensor_name(name[: found.start()], f"lora_{found[1]}")


def inject_lora(recipe: Recipe, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Replace the targets of `lora:` by PEFT's layers, in place, with adapters in `dtype`, and say which
    parameters are trained.

    Raises: usage error.

    Modules of `modules_to_save` are trained where they are: PEFT would keep, shard and gather their frozen
    original too.
    """
    lora = recipe.lora
    assert lora is not None
    if (run := run_of(Path(str(recipe.model.name_or_path)))) is not None:
        merged = (
            ""
            if (run.merged / "config.json").is_file()
            else f"`fsdp-tune merge-checkpoint {run.path}`, then "
        )
        raise usage_error(
            "lora-on-run",
            f"`lora:` needs a model directory, and {recipe.model.name_or_path} is a run of fsdp-tune",
            where=Where(key="model.name_or_path"),
            ways_out=(
                f"new adapters on the model that it trained: {merged}`--set model.name_or_path={run.merged}`",
                *(
                    [
                        "continue its adapter: its base as `model.name_or_path`, and `lora.adapter: "
                        f"{run.path}`"
                    ]
                    * run.base_json.exists()
                ),
            ),
        )
    targets, saved = find_targets(recipe, model), find_saved(recipe, model)
    frozen_by_its_code = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    biases = set(_trained_biases(lora, model, targets.modules))
    _inject(lora, model, targets)
    in_full = tuple(f"{name}." for name in saved)
    for name, parameter in model.named_parameters():
        base = name_in_base(name)
        if base is None:
            parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(
            base is None or ((name.startswith(in_full) or base in biases) and base not in frozen_by_its_code)
        )


def adapters_of(model: nn.Module) -> dict[str, Any]:
    """Return PEFT's layers by the name that the adapted module, or parameter, has in the bare model."""
    found: dict[str, object] = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            parameter = getattr(module, "parameter_name", None)  # of a ParamWrapper
            found[_BASE_LAYER.sub("", f"{name}.")[:-1] + (f".{parameter}" if parameter else "")] = module
    return found


def _inject(lora: Lora, model: PreTrainedModel, targets: Targets) -> None:
    """Replace the targets by PEFT's layers. Raises: usage error if PEFT refuses one, or adapts other modules
    than these.

    In mixtures of experts PEFT (`convert_peft_config_for_transformers`) takes `gate_proj`, `up_proj` and
    `down_proj` of any layer for the experts of transformers 4, and adapts the fused experts instead; it would
    do the same when it loads the adapter.
    """
    inject_adapter_in_model = _peft().inject_adapter_in_model
    where = Where(key="lora.target_modules")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of `fan_in_fan_out`, which PEFT sets for each layer by its kind
            inject_adapter_in_model(peft_config(lora, targets), model, adapter_name=ADAPTER_NAME)
    except ValueError as error:
        hint = f"name other layers: {last_parts(targets.modules)}"
        raise usage_error(
            "lora-target", f"PEFT does not adapt these modules: {error}", where=where, hint=hint
        ) from error
    adapted = adapters_of(model).keys()
    if lost := [name for name in targets.modules if name not in adapted]:
        message = (
            f"`lora.target_modules`: PEFT adapts the fused experts of {type(model).__name__} instead of "
            f"`{lost[0]}`, which is not supported"
        )
        left = [name for name in targets.modules if name not in lost]
        raise usage_error(
            "lora-target",
            message,
            where=where,
            hint=f"write `target_modules: [{last_parts(left)}]`" if left else None,
        )
    assert adapted == {*targets.modules, *targets.parameters}, (
        "a full name matches one module or parameter alone"
    )


def _peft() -> ModuleType:
    try:
        import peft
    except ImportError as error:
        raise usage_error(
            "lora-needs-peft", "`lora:` needs PEFT, which is not installed", hint="pip install peft"
        ) from error
    return peft


def _trained_biases(lora: Lora, model: nn.Module, targets: dict[str, nn.Module]) -> list[str]:
    if lora.bias == "all":
        return [name for name, _ in model.named_parameters() if name.rpartition(".")[2] == "bias"]
    return (
        [f"{name}.bias" for name, module in targets.items() if getattr(module, "bias", None) is not None]
        if lora.bias != "none"
        else []
    )


def peft_config(lora: Lora, targets: Targets) -> LoraConfig:
    """Return the `LoraConfig` for the targets, by their full names."""
    return _peft().LoraConfig(
        r=lora.r,
        lora_alpha=_number(lora.lora_alpha),
        lora_dropout=lora.lora_dropout,
        target_modules=list(targets.modules),
        target_parameters=list(targets.parameters) or None,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern={pattern: _number(alpha) for pattern, alpha in lora.alpha_pattern.items()},
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        init_lora_weights=lora.init_lora_weights,
        task_type="CAUSAL_LM",
    )


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else value


def adapter_config(recipe: Recipe, model: PreTrainedModel) -> dict[str, object]:
    """Return the content of `adapter_config.json` for a model with adapters, so that PEFT, vLLM and a merge
    can read the adapter."""
    lora = recipe.lora
    assert lora is not None
    config = model.peft_config[ADAPTER_NAME].to_dict()  # type: ignore[index, union-attr]  # set by PEFT
    values: dict[str, object] = {
        key: sorted(value) if isinstance(value, set) else value for key, value in config.items()
    }
    return values | {
        "base_model_name_or_path": _place_of(str(recipe.model.name_or_path)),
        "revision": recipe.model.revision,
        # Full names: PEFT matches the ends of names, so that `norm` would be `input_layernorm` too.
        "modules_to_save": list(find_saved(recipe, model)) or None,
        "bias": lora.bias,
        "inference_mode": True,
    }


def _place_of(name: str) -> str:
    """Return the full path of a directory, since an adapter is used from other places than it was trained
    in."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def stacks_without_adapters(model: nn.Module) -> dict[str, float]:
    """Return the stacked matrices that have no adapters, by name in the base, with their shares of the base's
    parameters."""
    base = {
        name: p
        for wrapped_name, p in model.named_parameters()
        if (name := name_in_base(wrapped_name)) is not None
    }
    total, adapted = count_elements(base.items()), adapters_of(model)
    return {name: p.numel() / total for name, p in base.items() if is_stack(name, p) and name not in adapted}


@torch.no_grad()
def draw_adapters(recipe: Recipe, model: nn.Module) -> None:
    """Fill the adapters of a (sharded) model whose base is loaded.

    A parameter's values follow from `training.seed` and its name alone, so they are the same on any number of
    ranks.
    """
    lora = recipe.lora
    assert lora is not None
    for name, parameter in model.named_parameters():
        found = _OWN.search(name)
        if found is not None and found[1] != "magnitude_vector":
            rank: int = model.get_submodule(name[: found.start()]).r[ADAPTER_NAME]  # type: ignore[index, assignment, union-attr]
            values = first_values(
                lora, found[1], tuple(parameter.shape), rank, f"{recipe.training.seed} {name}"
            )
            copy_part(parameter, values)
    for module in model.modules():
        for magnitude in getattr(module, "lora_magnitude_vector", {}).values():
            # Of a linear layer, whose rows lie on the same rank as the elements of the magnitude.
            weight: torch.Tensor = local_part(module.base_layer.weight)  # type: ignore[union-attr]
            local_part(magnitude.weight).copy_(torch.linalg.norm(weight.float(), dim=1))


def first_values(lora: Lora, part: str, shape: tuple[int, ...], rank: int, key: str) -> torch.Tensor:
    """Return the values of a full tensor in fp32, as PEFT's `reset_lora_parameters` draws them. `key` seeds
    the generator."""
    generator = torch.Generator().manual_seed(digest_number(key, size=7))
    values = torch.empty(shape, dtype=torch.float32)
    if part == "embedding_B":
        return values.normal_(generator=generator)
    if part == "embedding_A" or (part == "B" and lora.init_lora_weights is not False):
        return values.zero_()
    if lora.init_lora_weights == "gaussian":
        return values.normal_(std=1 / rank, generator=generator)
    bound = 1 / math.sqrt(shape[1])  # of a linear layer: kaiming_uniform_ with a = √5
    return values.uniform_(-bound, bound, generator=generator)
