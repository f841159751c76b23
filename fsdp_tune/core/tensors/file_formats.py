"""File formats of models and adapters: the header of a safetensors file, and PEFT's adapter files (PEFT
0.21).

A header is read and validated, and written, for ranks and for merges. The format is
https://github.com/huggingface/safetensors: eight bytes of length, a JSON object, and the tensors' bytes
without a hole. The caller maps element types to those of torch or numpy.

Of PEFT: names of files and of tensors, and the fields of LoraConfig that decide the arithmetic.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from fsdp_tune.core.errors import Notice, Where, failed_error

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
_LENGTH_BYTES = 8


class DamagedHeader(ValueError):
    """The header is invalid; the message is the reason, and the caller adds the file."""


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a file; `dtype` is safetensors' name, `first_byte` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first_byte: int
    size_bytes: int


def read_header(
    read: Callable[[int, int], bytes], size_bytes: int, item_bytes: Mapping[str, int]
) -> list[HeaderEntry]:
    """Return the tensors of a file of `size_bytes`, in the order of their bytes. `read(offset, count)`
    returns bytes of the file.

    `item_bytes` is the size of an element by the name of its type; sizes of other types are not checked.
    Raises: DamagedHeader for holes, overlaps, duplicates and wrong sizes.
    """
    header, base = _header(read, size_bytes)
    entries = [
        _entry(name, value, base, item_bytes) for name, value in header.items() if name != "__metadata__"
    ]
    entries.sort(key=lambda entry: (entry.first_byte, entry.size_bytes))
    at = base
    for entry in entries:
        if entry.first_byte != at:
            raise DamagedHeader(
                f"`{entry.name}` begins at byte {entry.first_byte:,} where byte {at:,} is due (a "
                "hole or an overlap)"
            )
        at += entry.size_bytes
    if at != size_bytes:
        raise DamagedHeader(f"it is {size_bytes:,} bytes long where its header describes {at:,}")
    return entries


def header_bytes(
    tensors: Iterable[tuple[str, str, Sequence[int], int]],
    metadata: Mapping[str, str],
    *,
    alignment_bytes: int = 8,
) -> bytes:
    """Return the start of a file up to the first tensor, which begins at a multiple of `alignment_bytes`.

    `tensors` are (name, safetensors' name of the type, shape, bytes), in the order in which their bytes
    follow.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, dtype, shape, size_bytes in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size_bytes]}
        at += size_bytes
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-(_LENGTH_BYTES + len(raw)) % alignment_bytes)
    return struct.pack("<Q", len(raw)) + raw


def read_user_metadata(read: Callable[[int, int], bytes], size_bytes: int) -> dict[str, Any]:
    """Return `__metadata__` of a file, empty if it has none. Raises: DamagedHeader."""
    found = _header(read, size_bytes)[0].get("__metadata__")
    return cast("dict[str, object]", found) if isinstance(found, dict) else {}


def _header(read: Callable[[int, int], bytes], size_bytes: int) -> tuple[dict[str, object], int]:
    """Return the header and the byte after it."""
    if size_bytes < _LENGTH_BYTES:
        raise DamagedHeader("it is too short")
    (length,) = struct.unpack("<Q", read(0, _LENGTH_BYTES))
    if length > min(MAX_HEADER_BYTES, size_bytes - _LENGTH_BYTES):
        raise DamagedHeader(f"its header claims {length:,} bytes")
    return _object(read(_LENGTH_BYTES, length)), _LENGTH_BYTES + length


def _object(raw: bytes) -> dict[str, object]:
    try:
        header: object = json.loads(raw, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise DamagedHeader(f"its header is not a JSON object ({error})") from error
    if not isinstance(header, dict):
        raise DamagedHeader("its header is not a JSON object")
    return cast("dict[str, object]", header)


def without_duplicates(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a name occurs twice")
    return value


def _entry(name: str, value: Any, base: int, item_bytes: Mapping[str, int]) -> HeaderEntry:
    if not name.isprintable():
        raise DamagedHeader(f"a tensor has no name that can be printed: {name!r}")
    try:
        dtype, shape, (start, end) = str(value["dtype"]), tuple(value["shape"]), value["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedHeader(f"the header of `{name}` is not understood") from error
    if any(type(number) is not int or number < 0 for number in (*shape, start, end)) or end < start:
        raise DamagedHeader(f"the header of `{name}` is not understood")
    # Python's integers do not overflow
    if dtype in item_bytes and end - start != math.prod(shape) * item_bytes[dtype]:
        raise DamagedHeader(f"`{name}` of shape {list(shape)} cannot be {end - start:,} bytes long")
    return HeaderEntry(name, dtype, shape, base + start, end - start)


CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Of the name of each tensor."""
Value = TypeVar("Value")

# The layer does not compute x·(W + scaling·B·A), or the factors belong elsewhere.
_OTHER_ARITHMETIC = (
    "use_qalora",
    "use_bdlora",
    "kasa_config",
    "monteclora_config",
    "arrow_config",
    "alora_invocation_tokens",
    "trainable_token_indices",
    "layer_replication",
)
# What is stored is LoRA, and what trains it is not: other gradients, or a bias of B, which runs of this
# package do not have.
_OTHER_TRAINING = ("velora_config", "lora_bias")
# Fields that `lora:`, a merge or both read.
_READ = (
    *(
        "peft_type",
        "base_model_name_or_path",
        "revision",
        "r",
        "lora_alpha",
        "use_rslora",
        "use_dora",
        "rank_pattern",
        "alpha_pattern",
    ),
    *(
        "target_modules",
        "target_parameters",
        "layers_to_transform",
        "modules_to_save",
        "bias",
        "lora_dropout",
        "init_lora_weights",
    ),
    *("fan_in_fan_out", "ensure_weight_tying"),
)
# Fields without a meaning for the stored tensors: which modules were found is in the names of the tensors,
# and the rest was used once.
_UNUSED = (
    *(
        "task_type",
        "auto_mapping",
        "peft_version",
        "inference_mode",
        "exclude_modules",
        "layers_pattern",
        "runtime_config",
    ),
    *(
        "megatron_config",
        "megatron_core",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
    ),
)
KNOWN_FIELDS = frozenset((*_OTHER_ARITHMETIC, *_OTHER_TRAINING, *_READ, *_UNUSED))
# Initialisations that subtract something from the base weights when training starts: the factors fit only the
# remainder.
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
_TRAINS_OTHERWISE = ("mica",)
"""Initialisations after which B stays frozen."""
_ONLY_VALUES = ("gaussian", "eva", "orthogonal", "true", "false", "none")
INITIALISATIONS = (*_CHANGES_THE_BASE, *_TRAINS_OTHERWISE, *_ONLY_VALUES)


def other_arithmetic(config: Mapping[str, object]) -> str | None:
    """Return the first field of an `adapter_config.json` that makes it something else than LoRA or DoRA, or
    None."""
    return next((name for name in _OTHER_ARITHMETIC if config.get(name)), None)


def other_training(config: Mapping[str, object]) -> str | None:
    """Return what makes the training of an adapter differ from that of LoRA, by its `adapter_config.json`, or
    None."""
    if str(config.get("init_lora_weights")).lower().startswith(_TRAINS_OTHERWISE):
        return f"init_lora_weights: {config['init_lora_weights']}"
    return next((name for name in _OTHER_TRAINING if config.get(name)), None)


def unknown_field_notices(config: Mapping[str, object], path: Path) -> list[Notice]:
    """Return a notice about the fields and the initialisation of an `adapter_config.json` that PEFT 0.21 does
    not have."""
    names = sorted(name for name, value in config.items() if value and name not in KNOWN_FIELDS)
    if not str(config.get("init_lora_weights", True)).lower().startswith(INITIALISATIONS):
        names.append(f"init_lora_weights: {config['init_lora_weights']}")
    if not names:
        return []
    listed = ", ".join(f"`{name}`" for name in names)
    message = (
        f"{listed}: set in the adapter's config, unknown here, and taken for a setting that does not "
        "change what the adapter computes"
    )
    return [
        Notice(
            "adapter-field-unknown", message, where=Where(str(path)), hint="compare the result with PEFT's"
        )
    ]


def initialisation_that_changes_base(config: Mapping[str, object]) -> str | None:
    """Return `init_lora_weights` of an `adapter_config.json` if it changed the base under the adapter, or
    None."""
    start = str(config.get("init_lora_weights")).lower()
    return start if start.startswith(_CHANGES_THE_BASE) else None


def pattern_matches(pattern: str, module: str) -> bool:
    """Return whether a key of `rank_pattern` or `alpha_pattern` matches the end of a module name
    (`get_pattern_key`). Raises: re.error."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def value_for(module: str, patterns: Mapping[str, Value], default: Value) -> Value:
    """Return the value of the first pattern that matches a module's name. Raises: re.error."""
    return next((value for pattern, value in patterns.items() if pattern_matches(pattern, module)), default)


def is_trained_in_full(config: Mapping[str, object], weight: str) -> bool:
    """Return whether a weight of the base belongs to a module of `modules_to_save`, by the
    `adapter_config.json`."""
    saved: Any = config.get("modules_to_save") or []
    module = weight.rpartition(".")[0]
    return any(module == each or module.endswith(f".{each}") for each in saved if isinstance(each, str))


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


# ---- Names of tensors, read from `get_peft_model_state_dict` and `BaseTuner._remove_adapter_name_from_key`.
# Inside a model (the names of its state dict, as a sharded checkpoint holds them) the adapter's name stands
# before the last part: `base_model.model.M.lora_A.default.weight`; the file of an adapter is without it. M is
# the module in the base model.

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


@dataclass(slots=True)
class PeftNames:
    """The keys of a checkpoint by what they are; modules and weights by their names in the base model.

    `factors`: {module: {"lora_A" | "lora_B" | "lora_B.bias" | "lora_embedding_A" | "lora_embedding_B": key}};
    `weights`: {name: key} of what stands for a tensor of the base model, trained or not; `wrapped`: those
    names among them that were found under an adapter's layer; `saved`: those that come from
    `modules_to_save`;
    `others`: {name in the adapter's file: key} of what is no plain LoRA, such as the magnitudes of DoRA.
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
