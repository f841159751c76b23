"""Kinds of values of recipe keys, the effects that a key declares, the formats of rows, and the sharding strategies.

A kind is a pydantic type with a description for messages (`Description`). Next to its type each key declares what it affects, and
whether a resumed run may change it (`Effect`). A declaration holds for a resolved recipe and covers the direct effects of the key:
`training.global_batch_size` affects memory only through `training.gradient_accumulation_steps`, which declares that effect itself. The
name of a cached trace and the classes of changes on resume follow from the declarations (`recipe.schema.keys.effect_of`). A key without
one affects everything and cannot change on resume.

Every list of strategies is derived from `STRATEGIES`, except `recipe.fsdp_arguments`, which defines the expected state of a live run
independently, so that a mistake here is found.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Flag, StrEnum, auto
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from fsdp_tune.core.units import parse_bytes, parse_seconds


class Affects(Flag):
    NOTHING = 0
    DATA = auto()
    """The rows that are trained on or evaluated, and their order."""
    MEMORY = auto()
    """Device or host memory of a run."""
    TIME = auto()
    """Seconds of a training step."""
    NUMBERS = auto()
    """Losses and weights computed from the same rows, beyond rounding."""
    RESULT = auto()
    """The delivered model, of the same losses: which checkpoint it is, and how its weights are rounded."""


class OnResume(StrEnum):
    FREE = "free"
    """May change: how the run is executed and observed."""
    TRAJECTORY = "trajectory"
    """May change and is reported: what the next steps compute."""
    REFUSED = "refused"
    """May not change: the completed steps depend on it."""


@dataclass(frozen=True, slots=True)
class Effect:
    """Metadata of a recipe field: `key: Annotated[Whole, Effect(MEMORY | TIME, FREE)]`."""

    affects: Affects
    on_resume: OnResume


NOTHING, DATA, MEMORY, TIME, NUMBERS = Affects.NOTHING, Affects.DATA, Affects.MEMORY, Affects.TIME, Affects.NUMBERS
RESULT = Affects.RESULT
FREE, TRAJECTORY, REFUSED = OnResume.FREE, OnResume.TRAJECTORY, OnResume.REFUSED
UNDECLARED = Effect(~NOTHING, REFUSED)


class Section(BaseModel):
    """A group of keys. Frozen; unknown keys are refused, and no value is cast to another type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)
    default_effect: ClassVar[Effect | None] = None
    """The effect of each key without a declaration; None if every key declares its own."""


@dataclass(frozen=True, slots=True)
class Description:
    """The description of a kind of value in error messages and in the reference."""

    text: str


TORCH_VARLEN = "torch_varlen"
"""This package's name of the kernel `torch.nn.attention.varlen`."""
SDPA_OR_EAGER = "sdpa_or_eager"
"""The kernel that `auto` chooses on a GPU without FlashAttention: SDPA, or eager for a model class without it (GPT-OSS has sinks)."""


def is_flash_kernel(attn_implementation: str) -> bool:
    """Return whether `attn_implementation` is a flash kernel, by transformers' rule (`is_flash_attention_requested`).

    Examples: `flash_attention_2`, `kernels-community/flash-attn2@main`.
    """
    return "flash" in attn_implementation


def needs_cuda(attn_implementation: str) -> bool:
    """Return whether an attention kernel is CUDA code without a version for the CPU."""
    return is_flash_kernel(attn_implementation) or attn_implementation == TORCH_VARLEN


def _duration(text: str) -> str:
    parse_seconds(text)
    return text


def _size(text: str) -> str:
    parse_bytes(text)
    return text


def _regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"`{text}` is not a valid regular expression: {error}") from error
    return text


def _exactly_int(value: object) -> object:
    if type(value) is not int:  # True == 1 and 2.0 == 2: a Literal alone would accept them
        raise ValueError("a whole number is needed")
    return value


def check_run_name(text: str) -> str:
    if text in {"", ".", ".."} or "/" in text or not text.isprintable() or len(text.encode()) > 200:
        raise ValueError("a name becomes a directory name: no `/`, nothing unprintable, at most 200 bytes")
    return text


Auto = Literal["auto"]
Whole = Annotated[int, Field(gt=0), Description("a whole number above 0")]
WholeOrZero = Annotated[int, Field(ge=0), Description("a whole number, 0 or more")]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False), Description("a number above 0")]
PositiveOrZero = Annotated[float, Field(ge=0.0, allow_inf_nan=False), Description("a number, 0 or more")]
AboveOne = Annotated[float, Field(gt=1.0, allow_inf_nan=False), Description("a number above 1")]
Fraction = Annotated[float, Field(gt=0.0, lt=1.0), Description("a number between 0 and 1")]
Port = Annotated[int, Field(ge=1, le=65535), Description("a port, 1 to 65535")]
Text = Annotated[str, Field(min_length=1), Description("text")]
Duration = Annotated[str, AfterValidator(_duration), Description("a duration with units, such as 11h30m or 45m")]
Size = Annotated[str, AfterValidator(_size), Description("a size with its unit, such as 5GB or 512MiB")]
RegularExpression = Annotated[str, AfterValidator(_regular_expression), Description("a regular expression")]
RunName = Annotated[str, AfterValidator(check_run_name), Description("a name")]
FsdpVersion = Annotated[Literal[1, 2], BeforeValidator(_exactly_int)]
RecipeVersion = Annotated[Literal[1], BeforeValidator(_exactly_int)]
Device = Literal["auto", "cuda", "xpu", "npu", "mps", "cpu"]
DataFormat = Literal["auto", "text", "prompt_completion", "alpaca", "messages", "sharegpt", "segments", "tokenized"]
LossOn = Literal["auto", "all", "completion", "assistant", "last_assistant"]
ChatRole = Literal["system", "developer", "user", "assistant", "tool", "function_call"]


@dataclass(frozen=True, slots=True)
class RowFormat:
    """What differs by the format of rows. `data/format/formats.py` reads them."""

    columns: tuple[tuple[str, ...], ...]
    """The columns that it needs, in one of several spellings; `format: auto` detects it by them."""
    loss_on: tuple[str, ...]
    """The possible values of `loss_on`; `auto` selects the first."""
    holds: Literal["text", "text or chat", "chat with a template", "chat", "ids"]
    """text or chat: each row by itself. chat with a template: where there is a chat template, else text."""
    marks_trained: bool = False
    """Whether rows mark what is trained."""
    question: Callable[[str, str], dict[str, object]] | None = None
    """Makes a row of a prompt and an answer. None: a prompt is not the question of an answer, and is continued as it is."""
    surrounds: str | None = None
    """What a prompt becomes, if the package surrounds it with text of its own; None: it stays as it is."""


def _messages(prompt: str, answer: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


ROW_FORMATS: dict[str, RowFormat] = {
    "text": RowFormat((("text",),), ("all",), "text"),
    "prompt_completion": RowFormat(
        (("prompt", "completion"),),
        ("completion", "all"),
        "text or chat",
        question=lambda prompt, answer: {"prompt": prompt, "completion": answer},
    ),
    "alpaca": RowFormat(
        (("instruction", "output"), ("instruction", "response"), ("query", "response")),
        ("completion", "last_assistant", "all"),
        "chat with a template",
        question=lambda prompt, answer: {"instruction": prompt, "output": answer},
        surrounds="Stanford Alpaca's instruction",
    ),
    "messages": RowFormat((("messages",),), ("assistant", "last_assistant", "all"), "chat", question=_messages),
    "sharegpt": RowFormat(
        (("conversations",), ("conversation",)),
        ("assistant", "last_assistant", "all"),
        "chat",
        question=lambda prompt, answer: {"conversations": _messages(prompt, answer)["messages"]},
    ),
    "segments": RowFormat((("segments",),), ("labels",), "text", marks_trained=True),
    "tokenized": RowFormat((("input_ids",),), ("labels",), "ids", marks_trained=True),
}
"""One for each `DataFormat` but auto."""


ShardingStrategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "NO_SHARD"]


@dataclass(frozen=True, slots=True)
class Strategy:
    number: int
    """torch.distributed.fsdp.ShardingStrategy, as `accelerate config` numbers them."""
    is_sharded: bool
    """False: every rank holds the full model (plain DDP)."""
    is_hybrid: bool
    """Sharded within each of several copies. The search tries it over several machines, where copies avoid traffic on slow links."""
    reshards: bool
    """Whether a unit frees its gathered parameters after its forward, and gathers them again for its backward (ZeRO-3)."""
    other_names: tuple[str, ...]
    """What other tools call it, for hints: in lower case, letters and digits alone."""


STRATEGIES: dict[ShardingStrategy, Strategy] = {
    "FULL_SHARD": Strategy(
        1,
        is_sharded=True,
        is_hybrid=False,
        reshards=True,
        other_names=("zero3", "zerostage3", "stage3", "deepspeedzero3", "fsdp", "fsdp1", "fsdp2", "full", "sharded"),
    ),
    "SHARD_GRAD_OP": Strategy(
        2,
        is_sharded=True,
        is_hybrid=False,
        reshards=False,
        other_names=("zero2", "zerostage2", "stage2", "deepspeedzero2", "zero1", "zerostage1", "stage1", "deepspeedzero1"),
    ),
    "HYBRID_SHARD": Strategy(
        4, is_sharded=True, is_hybrid=True, reshards=True, other_names=("hybrid", "hsdp", "hybridzero3", "hybridfsdp")
    ),
    "HYBRID_SHARD_ZERO2": Strategy(5, is_sharded=True, is_hybrid=True, reshards=False, other_names=("hybridzero2", "hsdpzero2")),
    "NO_SHARD": Strategy(
        3,
        is_sharded=False,
        is_hybrid=False,
        reshards=False,
        other_names=("ddp", "dp", "dataparallel", "distributeddataparallel", "multigpu", "zero0", "stage0", "none", "replicated"),
    ),
}
"""In the order in which the search tries them."""


NO_TEMPLATE = "none"
"""As `chat_template` of a source: its rows are rendered as by a tokenizer without a chat template."""


def is_jinja(template: str) -> bool:
    """Return whether a chat template is given as its text, not by a name."""
    return any(mark in template for mark in ("{%", "{{", "{#"))
