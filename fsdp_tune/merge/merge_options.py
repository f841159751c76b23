"""Arguments of a merge, each an option of the command like those in `jobs/options.py`, and its answer with
`--json`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from fsdp_tune.core.command import BaseWeights, JsonAnswer, MergeCheck, MergedDtype, Option
from fsdp_tune.core.errors import FsdpTuneError, Problem, usage_error
from fsdp_tune.core.units import parse_bytes

_OPTIONS = re.compile(r"(^|`)(--[^`]+)")


@contextmanager
def hints_with_command(source: Path) -> Iterator[None]:
    """Give the hints of a merge that another command makes the name of `merge-checkpoint`, since that command
    lacks the options in them.

    An option of the same name may mean something else there: `train --overwrite` starts over.
    """
    try:
        yield
    except FsdpTuneError as error:
        command = f"fsdp-tune merge-checkpoint {shlex.quote(str(source))}"
        error.problems = tuple(_with_command(problem, command) for problem in error.problems)
        raise


def _with_command(problem: Problem, command: str) -> Problem:
    def complete(hint: str) -> str:
        return _OPTIONS.sub(lambda found: f"{found[1]}{command} {found[2]}", hint)

    ways_out = tuple(complete(each) for each in problem.ways_out)
    return replace(
        problem, hint=complete(problem.hint) if problem.hint is not None else None, ways_out=ways_out
    )


def _shard_bytes(typed: str) -> int:
    try:
        return parse_bytes(typed)
    except ValueError as error:
        raise usage_error("merge-shard-size", f"`--max-shard-size`: {error}") from error


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """Options of a merge; None takes the run's own `merge:` section, or the default for a checkpoint of
    another tool.

    `adapter`: write a LoRA adapter alone (True), or add it to its base (False); None does what the run's
    `merge.adapter` says, else False.
    """

    output: Annotated[
        Path | None,
        Option(
            "The model directory to write [default: RUN/merged].", flags=("--output", "-o"), metavar="DIR"
        ),
    ] = None
    dtype: Annotated[
        MergedDtype | None,
        Option("Type of the weights [default: the run's `merge.dtype`, else keep]. Integers and fp8 stay."),
    ] = None
    max_shard_bytes: Annotated[
        int | None,
        Option(
            "Largest file, such as 5GB or 900MiB [default: the run's, else 5GB].",
            flags=("--max-shard-size",),
            metavar="SIZE",
            read=_shard_bytes,
        ),
    ] = None
    verify: Annotated[
        MergeCheck | None,
        Option(
            "quick: check digests, names and shapes; read 32 KiB of every 2 MiB back. full: also read every "
            "byte back from the disk and load the model. [default: the run's, else quick]."
        ),
    ] = None
    base: Annotated[
        str | None,
        Option(
            "Take config and tokenizer from this directory or hub model [default: RUN/model].",
            metavar="MODEL",
        ),
    ] = None
    step: Annotated[
        int | None,
        Option("Merge the checkpoint of this step [default: the newest complete one].", metavar="N"),
    ] = None
    best: Annotated[bool, Option("Merge the checkpoint with the best evaluation.")] = False
    average: Annotated[
        str | None,
        Option(
            "Merge the mean of several checkpoints: `last:3`, or the steps `100,200,300`.",
            metavar="last:N|STEPS",
        ),
    ] = None
    adapter: Annotated[
        bool | None,
        Option(
            "For a LoRA adapter: export only the adapter, as PEFT does, or merge it into its base "
            "[default: merge.adapter of the run].",
            flags=("--adapter/--merged",),
        ),
    ] = None
    adapter_config: Annotated[
        Path | None,
        Option("The adapter's adapter_config.json [default: the one next to the weights].", metavar="FILE"),
    ] = None
    base_weights: Annotated[
        BaseWeights | None,
        Option(
            "For a base in 4 bits: merge into its weights as they were trained, or as stored "
            "[default: the run's `merge.base`]."
        ),
    ] = None
    quantise: Annotated[
        bool | None,
        Option(
            "Also write the model that `quantization.train` emulates, into OUTPUT-quantised "
            "[default: the run's `merge.quantise`].",
            flags=("--quantise/--no-quantise",),
        ),
    ] = None
    overwrite: Annotated[
        bool, Option("Replace the output of an earlier merge, once the new one is complete.")
    ] = False
    allow_incomplete: Annotated[
        bool, Option("Merge a checkpoint that is not complete; missing files are reported.")
    ] = False
    allow_nonfinite: Annotated[bool, Option("Keep NaN and infinite weights; their tensors are reported.")] = (
        False
    )


@dataclass(frozen=True, slots=True)
class MergedAdapter(JsonAnswer):
    is_exported: bool
    config: str
    layers: int
    base: str | None
    base_weights: str | None


@dataclass(frozen=True, slots=True)
class QuantisedAnswer(JsonAnswer):
    """The quantised model of a run with `quantization.train`."""

    directory: str
    layers: int
    """Number of quantised linear layers."""
    difference: float
    """Norm of the difference between its logits and those of the trained model, over their norm."""
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MergeAnswer(JsonAnswer):
    merged: str
    """The directory that was written."""
    source: str
    step: int | None
    reason: str
    """Why this checkpoint."""
    dtype: str
    """Of most parameters."""
    dtypes: dict[str, int]
    """Number of tensors of each dtype."""
    files: list[str]
    tensors: int
    parameters: int
    size_bytes: int
    seconds: float
    verified: str
    adapter: MergedAdapter | None
    quantised: QuantisedAnswer | None


@dataclass(frozen=True, slots=True)
class PushedMergeAnswer(MergeAnswer):
    """With `--push-to-hub`."""

    pushed: str
    """Address of the commit on the hub."""
