"""The section `data:` of a recipe."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from fsdp_tune.recipe.schema.key_effects import (
    DATA,
    FREE,
    MEMORY,
    NOTHING,
    REFUSED,
    TIME,
    Effect,
)
from fsdp_tune.recipe.schema.row_formats import DataFormat
from fsdp_tune.recipe.schema.value_kinds import (
    Auto,
    ChatRole,
    Description,
    Fraction,
    LossOn,
    Positive,
    PositiveOrZero,
    Section,
    Text,
    Whole,
)

# ruff: noqa: RUF012  pydantic copies a default for each instance, and ours are frozen

BUILDERS = ("json", "parquet", "csv", "text", "arrow")
"""Builders of `datasets` for files of one kind; `data_files` names the files."""


class DataSource(Section):
    default_effect = Effect(DATA, REFUSED)

    path: Text
    """Local if it exists on disk; json | parquet | csv | text | arrow = builder with `data_files`;
    `builtin:NAME`; else a hub id."""
    name: Text | None = None
    """Configuration of a hub data set (`main`, `en`)."""
    data_dir: Text | None = None
    """Directory inside the data set's repository."""
    data_files: Text | list[Text] | None = None
    """Files, globs or URLs."""
    split: Text = "train"
    """Split to read."""
    revision: Text | None = None
    """Branch, tag or commit of a hub data set."""
    columns: list[Text] | None = None
    """Columns to keep, as in TRL; null = all."""
    rename_columns: dict[str, Text] = {}
    """{old: new}, as in datasets."""
    format: DataFormat | None = None
    """null = `data.format`."""
    loss_on: LossOn | None = None
    """null = `data.loss_on`."""
    chat_template: Text | None = None
    """null = `data.chat_template`; none = no template: Stanford Alpaca's prompts."""
    weight: Positive | None = None
    """Share of this source in `data.mixture.weight_by`; null = by size."""
    max_rows: Whole | None = None
    """Number of rows to read from the beginning; null = all."""
    repeats: Whole | None = None
    """Largest number of passes over this source; null = as many as `training.max_steps` needs. Streaming
    only."""
    label: Text | None = None
    """Name of the set in reports and in `eval_<label>_loss`."""
    loader: Text | None = None
    """Entry point of the group `fsdp_tune.loaders` that reads the rows of `path`. Allowed only together with
    `--allow-extensions`."""
    loader_options: dict[str, Any] = {}
    """Options for `loader`."""

    @property
    def stem(self) -> str:
        """The last part of the path, without endings: `code` of `data/code.jsonl.gz`."""
        return self.path.rstrip("/").rpartition("/")[2].rpartition(":")[2].partition(".")[0]


class EvalFraction(Section):
    default_effect = Effect(DATA | MEMORY, REFUSED)

    fraction: Fraction
    """Share of the training rows held out, chosen by row hash, before packing."""


class EvalRows(Section):
    default_effect = Effect(DATA | MEMORY, REFUSED)

    rows: Whole
    """Rows held out, chosen by row hash, before packing."""


EVAL_TAGS = ("<fraction>", "<rows>", "<list>")


def eval_kind(value: object) -> str:
    """Return the tag of the form of `data.eval`, one of three. Tags start with `<`, which no key does."""
    # one source, where a list of sources belongs
    if isinstance(value, list) or (isinstance(value, dict) and "path" in value):
        return "<list>"
    if isinstance(value, EvalRows) or (
        isinstance(value, dict) and "rows" in value and "fraction" not in value
    ):
        return "<rows>"
    return "<fraction>"


EvalSets = Annotated[
    Annotated[EvalFraction, Tag("<fraction>")]
    | Annotated[EvalRows, Tag("<rows>")]
    | Annotated[list[DataSource], Tag("<list>")],
    Discriminator(eval_kind),
]


class Mixture(Section):
    default_effect = Effect(DATA, REFUSED)

    temperature: Positive = 1.0
    """1 = by size; above 1 flattens the shares of the sources (amount ** (1 / temperature), by
    `weight_by`)."""
    stopping_strategy: Literal["all_exhausted", "first_exhausted"] = "all_exhausted"
    """When a weighted mixture ends, as in datasets."""
    weight_by: Literal["rows", "tokens"] = "rows"
    """Unit of `weight` and `temperature`; tokens are counted after truncation to max_length."""


class Stage(Section):
    default_effect = Effect(DATA, REFUSED)

    until_step: Whole
    """First step that no longer belongs to this stage; stages are in the order of their steps."""
    weights: list[PositiveOrZero]
    """Share of each entry of `data.train`, in their order; 0 leaves one out."""


class Data(Section):
    train: Annotated[list[DataSource], Effect(DATA, REFUSED)] = []
    """Sources of the training rows; several are mixed."""
    eval: Annotated[EvalSets | None, Effect(DATA | MEMORY, REFUSED)] = None
    """{fraction: 0.01} | {rows: 500} | a list, each entry a set of its own, named by label."""
    format: Annotated[DataFormat, Effect(DATA, REFUSED)] = "auto"
    """Format of the rows; auto detects it from the columns, and it is an error if two formats match."""
    loss_on: Annotated[LossOn, Effect(DATA, REFUSED)] = "auto"
    """Tokens in the loss; auto: all for text, completion for prompt_completion and alpaca, assistant for
    chats."""
    chat_template: Annotated[Text | None, Effect(DATA, REFUSED)] = None
    """null = the tokenizer's | a name from `fsdp-tune templates` | file.jinja | Jinja text | hub id; chats
    without one are an error."""
    ignore_columns: Annotated[list[Text], Effect(DATA, REFUSED)] = []
    """Keys of the rows to ignore, with their names in the files; in messages `messages.rating`. Others that
    no format reads are errors."""
    roles: Annotated[dict[str, ChatRole], Effect(DATA, REFUSED)] = {}
    """{role in the rows: known role}, for chats whose speakers have other names; `function_call` is a call as
    JSON text."""
    max_length: Annotated[Whole, Effect(DATA | MEMORY | TIME, REFUSED)] = 2048
    """Tokens of one row; longer rows follow `overlong`."""
    overlong: Annotated[Literal["auto", "truncate", "drop", "split", "error"], Effect(DATA, REFUSED)] = "auto"
    """Handling of rows longer than max_length; auto = split for text, else truncate. Always counted."""
    drop_duplicates: Annotated[bool, Effect(DATA, REFUSED)] = False
    """Train only the first of rows with equal tokens and targets, over all sources. Duplicates are always
    counted, except in streams."""
    packing: Annotated[bool, Effect(DATA | MEMORY | TIME, REFUSED)] = False
    """Join examples into rows of `max_length`; no token attends across examples."""
    packing_strategy: Annotated[Literal["bfd", "wrapped"], Effect(DATA, REFUSED)] = "bfd"
    """bfd = best fit, keeps documents whole; wrapped cuts documents and fills every row."""
    eval_packing: Annotated[bool | None, Effect(DATA | MEMORY, FREE)] = None
    """null = `packing`."""
    separator: Annotated[str, Effect(DATA, REFUSED)] = ""
    """Text between prompt and completion, or after the prompts of Stanford Alpaca."""
    append_eos: Annotated[bool | Auto, Effect(DATA, REFUSED)] = "auto"
    """Append a trained end-of-sequence token to each example; auto = in all formats but segments and
    tokenized. Never doubled."""
    special_tokens_in_content: Annotated[Literal["auto", "text", "control"], Effect(DATA, REFUSED)] = "auto"
    """Encoding of `<|im_end|>` in the rows: text, or control tokens; auto = text in chats and alpaca rows,
    except `model.tokens.add`."""
    streaming: Annotated[bool, Effect(DATA | MEMORY | TIME, REFUSED)] = False
    """Read, tokenise and pack rows while training; needs training.max_steps."""
    stream_lanes: Annotated[Whole | Auto, Effect(DATA | MEMORY, REFUSED)] = "auto"
    """Parts of a stream that are read in parallel, whatever the number of ranks, which must divide it; auto =
    16 or more."""
    curriculum: Annotated[list[Stage], Effect(DATA, REFUSED)] = []
    """[{until_step, weights}]: shares of the sources by step; after the last stage each source's `weight`
    holds. Streaming only."""
    shuffle: Annotated[bool, Effect(DATA, REFUSED)] = True
    """Shuffle the training rows each epoch; the order depends on the seed and the epoch alone."""
    shuffle_buffer_size: Annotated[Whole, Effect(DATA | MEMORY, REFUSED)] = 10000
    """Rows that are shuffled among themselves, over all lanes; streaming only."""
    mixture: Mixture = Mixture()
    pad_to_multiple_of: Annotated[Whole, Effect(MEMORY | TIME, FREE)] = 8
    """Tokens; rows are padded to the longest of the batch, rounded up to this."""
    on_bad_row: Annotated[Literal["error", "skip"], Effect(DATA, REFUSED)] = "error"
    """skip counts bad rows and writes them to a file."""
    max_bad_share: Annotated[
        float, Field(ge=0.0, le=1.0), Description("a number from 0 to 1"), Effect(NOTHING, FREE)
    ] = 0.01
    """Largest share of bad rows to skip, of all rows; more is an error. Of a stream: of the rows that a lane
    has read, from 1,000 on."""
    num_proc: Annotated[Whole | Auto, Effect(NOTHING, FREE)] = "auto"
    """Processes that tokenise; auto = min(16, cores)."""
    cache_dir: Annotated[Text | None, Effect(NOTHING, FREE)] = None
    """Prepared data; null = $XDG_CACHE_HOME/fsdp-tune."""

    @property
    def eval_labels(self) -> list[str]:
        """Return the label of each eval set. Held-out rows are a set for each training source, since each has
        a loss of its own."""
        if isinstance(self.eval, list):
            return [
                each.label or (f"eval{index}" if len(self.eval) > 1 else "eval")
                for index, each in enumerate(self.eval, start=1)
            ]
        if self.eval is None or len(self.train) < 2:
            return [] if self.eval is None else ["held_out"]
        labels = [source.label or source.stem for source in self.train]
        is_clear = len(set(labels)) == len(labels) and "train" not in labels
        return labels if is_clear else [f"source{index}" for index in range(1, len(labels) + 1)]

    @property
    def train_names(self) -> list[str]:
        """Return the name of each training source in metrics: its label, or its number."""
        return [source.label or str(index) for index, source in enumerate(self.train)]

    @property
    def sources(self) -> list[tuple[str, DataSource]]:
        """Return every source with its key (`data.train[0]`), training first; held-out training rows are not
        a source."""
        evals = self.eval if isinstance(self.eval, list) else []
        groups = (("data.train", self.train), ("data.eval", evals))
        return [(f"{name}[{index}]", source) for name, group in groups for index, source in enumerate(group)]
