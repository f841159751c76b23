"""Kinds of values of recipe keys.

A kind is a pydantic type with a description for messages (`Description`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from fsdp_tune.core.units import parse_bytes, parse_seconds
from fsdp_tune.recipe.schema.key_effects import Effect


class Section(BaseModel):
    """A group of keys. Frozen; unknown keys are refused, and no value is cast to another type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)
    default_effect: ClassVar[Effect | None] = None
    """The effect of each key without a declaration; None if every key declares its own."""


@dataclass(frozen=True, slots=True)
class Description:
    """The description of a kind of value in error messages and in the reference."""

    text: str


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
Duration = Annotated[
    str, AfterValidator(_duration), Description("a duration with units, such as 11h30m or 45m")
]
Size = Annotated[str, AfterValidator(_size), Description("a size with its unit, such as 5GB or 512MiB")]
RegularExpression = Annotated[str, AfterValidator(_regular_expression), Description("a regular expression")]
RunName = Annotated[str, AfterValidator(check_run_name), Description("a name")]
FsdpVersion = Annotated[Literal[1, 2], BeforeValidator(_exactly_int)]
RecipeVersion = Annotated[Literal[1], BeforeValidator(_exactly_int)]
Device = Literal["auto", "cuda", "xpu", "npu", "mps", "cpu"]
LossOn = Literal["auto", "all", "completion", "assistant", "last_assistant"]
ChatRole = Literal["system", "developer", "user", "assistant", "tool", "function_call"]


NO_TEMPLATE = "none"
"""As `chat_template` of a source: its rows are rendered as by a tokenizer without a chat template."""


def is_jinja(template: str) -> bool:
    """Return whether a chat template is given as its text, not by a name."""
    return any(mark in template for mark in ("{%", "{{", "{#"))
