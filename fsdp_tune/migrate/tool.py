"""A tool whose files are imported: the rules of its keys, and what it does where its file says nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fsdp_tune.migrate.rules import Rules

Defaults = Mapping[str, object]
"""Dotted key of a recipe → value."""
TRAINER_DEFAULTS: Defaults = {"training.learning_rate": 5e-5, "training.per_device_train_batch_size": 8}
"""Defaults of TrainingArguments that a recipe does not share."""


class Method(NamedTuple):
    """The key that names the method of a training."""

    key: str
    imported: tuple[str, ...]
    """Its values that are imported."""
    others: str
    """What the other values are."""


@dataclass(frozen=True, slots=True)
class Tool:
    """Everything that an import knows of one tool but the keys that tell it, which are in
    `recipe.read.tool_detection`."""

    name: str
    rules: Rules
    """By name; see `settle_keys.settle_key`."""
    defaults: Defaults = field(default_factory=dict[str, object])
    """What the tool does where its file says nothing and a recipe would do another thing: the defaults in its
    own code."""
    adapter_defaults: Defaults = field(default_factory=dict[str, object])
    """The same where an adapter is trained."""
    full_defaults: Defaults = field(default_factory=dict[str, object])
    """The same where none is: beside these, frozen weights are stored and computed in bf16 there as here."""
    adapter_switches: tuple[str, ...] = ()
    """Keys that decide whether the tool trains adapters."""
    trains_adapters: bool = False
    """Whether it trains them unless `adapter_switches` say otherwise."""
    has_adapter: Callable[[Mapping[str, object]], bool] | None = None
    """Whether the values of a file train an adapter, where no key alone decides."""
    loads_as_stored: bool = False
    """Whether weights are trained in the dtype of their files, as transformers 5 loads them."""
    upcasts: bool = False
    """Whether sharded weights are trained in fp32 whatever the dtype in which they are loaded."""
    long_rows: Mapping[bool | str, str] = field(default_factory=dict[bool | str, str])
    """`data.overlong` of any format, by False without packing or the strategy of packing; empty if the file
    decides."""
    stream_buffer: int | None = None
    """Rows in the buffer that shuffles a stream."""
    null_is_default: bool = False
    """Whether null is what a key that is left out is. A length is a number in such a tool."""
    other_training: Mapping[str, str] = field(default_factory=dict[str, str])
    """Keys of another kind of training, which is not imported, with its name."""
    method: Method | None = None
