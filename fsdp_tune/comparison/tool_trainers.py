"""How a comparison uses the trainer of a tool: what a side is computed from, and what `TrlTrainers` and
`AxolotlTrainers` have in common. Imports nothing of a tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Facts = dict[str, Any]
IGNORE_INDEX = -100
PACKAGES = (
    "axolotl",
    "trl",
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "peft",
    "datasets",
    "numpy",
    "safetensors",
)
"""Packages that compute: their versions are shown, and those that a tool requires are installed."""
ROW_COLUMNS = (
    "input_ids",
    "labels",
    "attention_mask",
    "completion_mask",
    "assistant_masks",
    "seq_lengths",
    "position_ids",
)


class NotShownError(Exception):
    """What the tool computes, and a comparison cannot see."""


@dataclass
class ToolRequest:
    """What a tool computes its side from; the JSON object that `ToolChild` of `comparison/side_processes.py`
    sends."""

    tool: str
    values: dict[str, Any]
    """Options of the configuration."""
    settings: dict[str, object]
    """Options in place of those of the configuration."""
    until: list[str]
    """Names of the stages."""
    rows: str
    """File of lines {"key", "name", "source", "values"} with the rows as they were read."""
    model: str
    tokenizer: str
    revision: str | None
    trust_remote_code: bool
    """Whether code of a model's repository may run."""
    ranks: int
    """Ranks that read different rows."""
    model_rows: int
    """Rows that run through the model, at most."""
    ordered_steps: int
    """Steps whose order of rows is shown."""
    epoch_steps: int | None
    """Steps of an epoch, if the rows do not tell."""
    trained_steps: int
    model_tokens: int
    """Tokens of a row that run through the model, at least."""
    after_first_target: int
    """Tokens that run through the model from the first trained one on."""
    logit_columns: int
    exact_steps: int
    """Steps whose learning rates are shown."""


@dataclass(frozen=True)
class BatchOptions:
    """The batch of a step on one rank, and its precision, as the tool reads the options."""

    micro_batch: int
    """Rows of a micro-batch."""
    accumulation: int
    autocast: str
    """`bf16`, `fp16` or `no`."""


class ToolTrainers(Protocol):
    """How a tool makes its trainers."""

    ignored: list[str]
    """Options of the configuration that the tool does not read: known once a trainer is built."""

    def complete(self) -> Any:
        """Return a trainer whose rows are the examples: neither truncated nor packed."""
        ...

    def batch(self) -> BatchOptions: ...

    def small(self, size: int, accumulation: int) -> Any:
        """Return the trainer of the file, with so many rows in a micro-batch and micro-batches in a step."""
        ...

    def rows(self, trainer: Any) -> list[Facts]:
        """Return the rows that run through the model, with `seq_lengths` where the tool packs examples into
        them."""
        ...

    def collated(self, trainer: Any, rows: Sequence[Facts]) -> Facts: ...

    def own_order(self, trainer: Any) -> str | None:
        """Let the sampler of a trainer of `small` have the order that the file says. Returns why it cannot,
        if so."""
        ...


def row_columns(row: Mapping[str, Any]) -> Facts:
    """Return the columns of a row of a trainer that a comparison reads, without null ones."""
    return {name: value for name, value in row.items() if name in ROW_COLUMNS and value is not None}
