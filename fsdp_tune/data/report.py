"""The report on prepared data: in the manifest of their cache, in RUN/data.json and in `prepare --json`."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.run.records import PartialFacts


@dataclass(frozen=True, slots=True)
class KeyAccount(JsonAnswer):
    """What becomes of a key of the rows."""

    key: str
    how: str
    meaning: str
    rows: int


@dataclass(frozen=True, slots=True)
class DecodedExample(JsonAnswer):
    where: str
    runs: list[tuple[str, bool]]
    """Text, and whether it is trained."""
    ids: list[list[int]]
    """Token ids of each part."""


@dataclass(frozen=True, slots=True)
class ReportedExample:
    where: str
    runs: list[tuple[str, bool]]


@dataclass(frozen=True, slots=True)
class NamedRows:
    """Some rows."""

    rows: int = 0
    """Their number."""
    first: tuple[str, ...] = ()
    """The first of them as `file:row`."""

    def __str__(self) -> str:
        return f"{self.rows:,} {'row' if self.rows == 1 else 'rows'}"

    def describe_first(self) -> str:
        return f"the first: {', '.join(self.first[:3])}"


@dataclass(frozen=True, slots=True)
class Spread:
    min: int = 0
    median: int | float = 0
    max: int = 0

    def __str__(self) -> str:
        return f"{self.min:,.0f} / {self.median:,.0f} / {self.max:,.0f}"


@dataclass(frozen=True, slots=True)
class SplitRows:
    """Rows that became several examples each."""

    rows: int = 0
    examples: int = 0


@dataclass(frozen=True, slots=True)
class EndTokens:
    """The token at the end of a sequence."""

    token: str | None = None
    supervised: int = 0
    """Examples that train it."""
    examples: int = 0
    appended_to_chats: int = 0


@dataclass(frozen=True, slots=True)
class BeginTokens:
    """Examples with the token at the beginning of a sequence."""

    once: int
    more: int
    examples: int


class InputAccount(PartialFacts):
    """A source, and its share of an epoch."""

    set: str = ""
    path: str = ""
    label: str | None = None
    files: int = 0
    format: str = ""
    loss_on: str = ""
    alpaca_prompt: str | None = None
    """What formats rows of that kind."""
    rows: int = 0
    rows_drawn: int = 0
    repeats: float = 0.0
    """How often each row is drawn."""
    tokens: int = 0
    supervised_tokens: int = 0
    share: float = 0.0
    """Of the tokens of its set."""
    keys: tuple[KeyAccount, ...] = ()

    @property
    def name(self) -> str:
        return self.label or self.path


class SetAccount(PartialFacts):
    """The numbers of one set. Examples are complete or split rows of a source; `rows` are the units of a
    global batch."""

    rows: int = 0
    examples: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    supervised_tokens_per_example: Spread = Spread()
    tokens_per_example: Spread = Spread()
    cut_by_packing: int = 0
    truncated: int = 0
    first_truncated: tuple[str, ...] = ()
    split: int = 0
    dropped_too_long: NamedRows = NamedRows()
    dropped_nothing_left: NamedRows = NamedRows()
    dropped_duplicates: NamedRows = NamedRows()
    """Of the training set with `data.drop_duplicates`: rows with the tokens and targets of an earlier row, or
    of one that is held out."""
    fill: float = 0.0
    """Tokens in the rows, of `data.max_length` in each."""
    repeated: NamedRows = NamedRows()
    """Of the training set without `data.drop_duplicates`: rows with the tokens and targets of an earlier
    one."""
    also_trained: NamedRows = NamedRows()
    """Of the other sets: rows with the content, or the tokens and targets, of a training row."""

    @property
    def dropped(self) -> int:
        return self.dropped_too_long.rows + self.dropped_nothing_left.rows + self.dropped_duplicates.rows

    @property
    def trained_share(self) -> float:
        """Of the tokens."""
        return self.supervised_tokens / max(self.tokens, 1)


class DataReport(PartialFacts):
    rows_read: int = 0
    rows_bad: NamedRows = NamedRows()
    rows_untrained: NamedRows = NamedRows()
    rows_kept: int = 0
    """Examples of all sets, without those of bad and untrained rows and of dropped duplicates, before they
    are cut."""
    rows_split: SplitRows = SplitRows()
    inputs: tuple[InputAccount, ...] = ()
    sets: dict[str, SetAccount] = Field(default_factory=dict[str, SetAccount])
    eos: EndTokens = EndTokens()
    bos: BeginTokens | None = None
    """None if the tokenizer has no such token."""
    bos_repeated_in_text: int = 0
    bos_missing_in_chat: int = 0
    joined_without_space: int = 0
    notes: dict[str, dict[str, NamedRows]] = Field(default_factory=dict[str, dict[str, NamedRows]])
    """Rows by the code of a notice and its detail, the most frequent detail first."""
    example: ReportedExample | None = None
    """A training example, once the data are opened."""
    stream_sample_rows: int | None = None
    """Of a stream: at most so many first rows of each source are in this report."""
