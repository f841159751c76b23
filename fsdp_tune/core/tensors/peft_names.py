"""Names of the tensors of PEFT's adapters, read from `get_peft_model_state_dict` and
`BaseTuner._remove_adapter_name_from_key` (PEFT 0.21).

Inside a model (the names of its state dict, as a sharded checkpoint holds them) the adapter's name stands
before the last part: `base_model.model.M.lora_A.default.weight`; the file of an adapter is without it. M is
the module in the base model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from fsdp_tune.core.errors import Where, failed_error

PREFIX = "base_model.model."
"""Of the name of each tensor."""
MAGNITUDE = ".lora_magnitude_vector"
_FACTOR = re.compile(r"(?P<module>.+)\.(?P<part>lora_[AB])(\.(?P<adapter>[^.]+))?\.(?P<what>weight|bias)")
_EMBEDDING = re.compile(r"(?P<module>.+)\.(?P<part>lora_embedding_[AB])(\.(?P<adapter>[^.]+))?")
_OTHER = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_magnitude_vector|token_adapter\.trainable_tokens_\w+)(\.(?P<adapter>[^.]+?))?(\.weight)?"
)
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")
_COPY = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<rest>[^.]+)")
"""In an adapter's own file: `save_embedding_layers` writes the wrapper of a trained embedding too, without
the adapter's name."""
_ORIGINAL = re.compile(r".+\.(original_module|token_adapter\.base_layer)\..+")
_OF_TRAINING = re.compile(r"\.lora_velora_\w+(\.|$)")
"""VeLoRA's projection of activations, which only the backward uses."""
_BASE_LAYER = re.compile(r"(?P<module>.+)\.base_layer\.(?P<rest>[^.]+)")


def without_copies(names: Iterable[str]) -> dict[str, str]:
    """Return {the name that PEFT reads: name} of the tensors of an adapter's file.

    With `save_embedding_layers` PEFT writes the wrapper of an embedding or head of `modules_to_save` too: the
    frozen original, which is left out here, and the trained weight for a second time.
    """
    found: dict[str, str] = {}
    copies: dict[str, str] = {}
    for name in names:
        module, _, rest = name.rpartition(".")
        if module.endswith(".modules_to_save"):
            copies[f"{module.removesuffix('.modules_to_save')}.{rest}"] = name
        elif not module.endswith(".original_module"):
            found[name] = name
    return copies | found


def tensor_name(module: str, part: str) -> str:
    """`lora_B.bias` of `M` → `base_model.model.M.lora_B.bias`; the tensors of embeddings and DoRA's
    magnitudes have no `.weight`."""
    has_no_end = part.startswith(("lora_embedding", "lora_magnitude")) or part.endswith(".bias")
    return f"{PREFIX}{module}.{part}{'' if has_no_end else '.weight'}"


@dataclass(slots=True)
class PeftNames:
    """The keys of a checkpoint by what they are; modules and weights by their names in the base model.

    `factors`: {module: {"lora_A" | "lora_B" | "lora_B.bias" | "lora_embedding_A" | "lora_embedding_B": key}};
    `weights`: {name: key} of what stands for a tensor of the base model, trained or not; `wrapped`: those
    names among them that were found under an adapter's layer; `saved`: those that come from
    `modules_to_save`;
    `others`: {name in the adapter's file: key} of what is not plain LoRA, such as the magnitudes of DoRA.
    """

    factors: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    weights: dict[str, str] = field(default_factory=dict[str, str])
    wrapped: set[str] = field(default_factory=set[str])
    saved: set[str] = field(default_factory=set[str])
    others: dict[str, str] = field(default_factory=dict[str, str])
    adapters: set[str] = field(default_factory=set[str])
    twice: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    copies: dict[str, str] = field(default_factory=dict[str, str])
    """{name: key} of trained weights that the file usually holds under their own name too, which PEFT
    reads."""


def classify_names(keys: Iterable[str], where: Where) -> PeftNames:
    """Classify the keys of a checkpoint, or of an adapter's file. Raises: FailedError for several adapters,
    and for two keys that are the same tensor of the model."""
    found = PeftNames()
    for key in keys:
        _classify(found, key, key.removeprefix(PREFIX))
    for name, key in found.copies.items():
        found.saved.add(name)
        found.weights.setdefault(name, key)
    if len(found.adapters) > 1:
        raise failed_error(
            "merge-adapter-several",
            f"the checkpoint holds several adapters: {', '.join(sorted(found.adapters))}",
            where=where,
            hint="save one of them with PEFT (`selected_adapters`) and merge that",
        )
    if found.twice:
        one, other = found.twice[0]
        raise failed_error(
            "merge-adapter-damaged",
            f"`{one}` and `{other}` are the same tensor of the model",
            where=where,
            hint="save the adapter again from where it was trained",
        )
    return found


def unwrapped(module: str) -> str:
    """`M.base_layer` → `M`: PEFT nests the layers of several adapted parameters of one module."""
    while module.endswith(".base_layer"):
        module = module.removesuffix(".base_layer")
    return module


def _classify(found: PeftNames, key: str, name: str) -> None:
    if _ORIGINAL.fullmatch(name) or _OF_TRAINING.search(name):
        return
    if match := _FACTOR.fullmatch(name):
        part = match["part"] if match["what"] == "weight" else f"{match['part']}.bias"
        taken = found.factors.setdefault(match["module"], {}).setdefault(part, key)
    elif match := _EMBEDDING.fullmatch(name):
        taken = found.factors.setdefault(match["module"], {}).setdefault(match["part"], key)
    elif match := _OTHER.fullmatch(name):
        taken = found.others.setdefault(f"{match['module']}.{match['part']}", key)
    elif match := _SAVED.fullmatch(name):
        base_name = f"{match['module']}.{match['rest']}"
        found.saved.add(base_name)
        taken = found.weights.setdefault(base_name, key)
    elif match := _COPY.fullmatch(name):
        taken = found.copies.setdefault(f"{match['module']}.{match['rest']}", key)
    elif match := _BASE_LAYER.fullmatch(name):
        base_name = f"{match['module']}.{match['rest']}"
        found.wrapped.add(base_name)
        taken = found.weights.setdefault(base_name, key)
    elif ".lora_" in name:
        taken = found.others.setdefault(name, key)
    else:
        taken = found.weights.setdefault(name, key)
    if match and match.groupdict().get("adapter") is not None:
        found.adapters.add(match["adapter"])
    if taken != key:
        found.twice.append((taken, key))
