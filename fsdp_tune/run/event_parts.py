"""Parts of the events of metrics.jsonl: generated samples, scores of checkpoints, rows of a spike, changed
keys, and their text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import AliasChoices, Field, JsonValue

from fsdp_tune.core.command import JsonAnswer

SAMPLE_CHARACTERS = 60
SHOWN_SPIKE_ROWS = 3


def describe(name: str, step: int | None, details: Mapping[str, JsonValue]) -> list[str]:
    """Return `step 7: loss scale backed off: message (field value, …)`."""
    values = ", ".join(f"{key} {value}" for key, value in details.items() if key != "message")
    message = f": {details['message']}" if "message" in details else ""
    return [f"step {step}: {name.replace('_', ' ')}{message}" + (f" ({values})" if values else "")]


@dataclass(frozen=True, slots=True)
class GeneratedSample(JsonAnswer):
    """What the model generated for a prompt."""

    prompt: str
    text: str

    def __str__(self) -> str:
        """Return the end of the prompt and the beginning of the text on one line."""
        prompt, text = (json.dumps(each, ensure_ascii=False)[1:-1] for each in (self.prompt, self.text))
        shown = f"… {prompt[-SAMPLE_CHARACTERS:]}" if len(prompt) > SAMPLE_CHARACTERS else prompt
        return f"{shown} → {text[: 2 * SAMPLE_CHARACTERS]}{' …' if len(text) > 2 * SAMPLE_CHARACTERS else ''}"


@dataclass(frozen=True, slots=True)
class CheckpointScore(JsonAnswer):
    """A score of the model of a checkpoint. The interval is at 95 %; None: the score has none."""

    value: float
    low: float | None
    high: float | None
    rows: int

    def __str__(self) -> str:
        interval = (
            f" [{self.low:.4f}, {self.high:.4f}]" if self.low is not None and self.high is not None else ""
        )
        return f"{self.value:.4f}{interval}"


def shown_scores(scores: Mapping[str, CheckpointScore]) -> str:
    return ", ".join(f"{name} {score}" for name, score in scores.items())


@dataclass(frozen=True, slots=True)
class SpikeRow(JsonAnswer):
    """A row of a spike. A file of such objects, one a line, is one for `train --skip-rows`."""

    file: str
    row: int
    """In the file, from 1: its line, where the file has lines."""
    tokens: int
    step: int
    rank: int
    micro_batch: int
    """In the step, from 1."""
    sequence: int
    """Packed examples share one."""
    loss: float | None
    """Mean token loss of the micro-batch."""


@dataclass(frozen=True, slots=True)
class ChangedKey(JsonAnswer):
    key: str
    old: object
    new: object
    class_: Annotated[str, Field(validation_alias=AliasChoices("class", "class_"))]
    """What the change does to the training."""


def shown_rows(rows: Sequence[SpikeRow], total: int) -> str:
    """Return the rows of the micro-batch with the highest loss in one line."""
    first = rows[0]
    place = (first.step, first.rank, first.micro_batch)
    worst = [row for row in rows if (row.step, row.rank, row.micro_batch) == place]
    shown = ", ".join(f"{row.file}:{row.row} ({row.tokens:,} tokens)" for row in worst[:SHOWN_SPIKE_ROWS])
    hidden = len(worst) - SHOWN_SPIKE_ROWS
    more = f" and {hidden:,} more row{'' if hidden == 1 else 's'}" if hidden > 0 else ""
    loss = f" with loss {first.loss:.4f}" if first.loss is not None else ""
    return (
        f"highest of {total:,} rows: step {first.step}, rank {first.rank}, micro-batch "
        f"{first.micro_batch}{loss}: {shown}{more}"
    )
