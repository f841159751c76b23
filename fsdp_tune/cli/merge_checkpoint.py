"""`merge-checkpoint`: sharded checkpoint → ordinary model directory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_tune.cli.options import JsonOption
from fsdp_tune.cli.output import Screen, command, stopping_cleanly
from fsdp_tune.core.errors import usage_error
from fsdp_tune.core.units import MIB, format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from fsdp_tune.cli.progress import Bar
    from fsdp_tune.merge.merging import MergeResult


class Dtype(StrEnum):
    KEEP = "keep"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class Verify(StrEnum):
    QUICK = "quick"
    FULL = "full"
    NONE = "none"


SourceArgument = Annotated[
    Path,
    typer.Argument(
        metavar="SRC",
        help="A run directory, a `checkpoint-N` of any tool, a folder of `.distcp` shards, or a PEFT adapter.",
        show_default=False,
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="DIR", help="The model directory to write [default: RUN/merged].", show_default=False),
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(help="Type of the weights [default: the run's `merge.dtype`, else keep]. Integers and fp8 stay.", show_default=False),
]
ShardSizeOption = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Largest file, such as 5GB or 900MiB [default: the run's, else 5GB].", show_default=False)
]
VerifyOption = Annotated[
    Verify | None,
    typer.Option(
        help="quick: read every tensor back, check names, shapes and digests. full: read from the disk itself too, and load the model. "
        "[default: the run's, else quick]",
        show_default=False,
    ),
]
BaseOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL", help="Take config and tokenizer from this directory or hub model [default: RUN/model].", show_default=False
    ),
]
StepOption = Annotated[
    int | None, typer.Option(metavar="N", help="Merge the checkpoint of this step [default: the newest complete one].", show_default=False)
]
BestOption = Annotated[bool, typer.Option("--best", help="Merge the checkpoint with the best evaluation.")]
AverageOption = Annotated[
    str | None,
    typer.Option(metavar="last:N|STEPS", help="Merge the mean of several checkpoints: `last:3`, or `100,200,300`.", show_default=False),
]
AdapterOption = Annotated[
    bool, typer.Option("--adapter/--merged", help="A LoRA adapter: write it alone, as PEFT does, or add it to the weights of its base.")
]
AdapterConfigOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The adapter's adapter_config.json [default: the one beside the weights].", show_default=False),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier merge wrote, once the new one is whole.")]
IncompleteOption = Annotated[
    bool, typer.Option("--allow-incomplete", help="Take a checkpoint that is not complete, naming what is missing.")
]
NonfiniteOption = Annotated[bool, typer.Option("--allow-nonfinite", help="Keep NaN and infinite weights, naming the tensors.")]

PushOption = Annotated[
    str | None,
    typer.Option("--push-to-hub", metavar="OWNER/NAME", help="Upload the result; a new repository is private.", show_default=False),
]


def merge_checkpoint(
    source: SourceArgument,
    output: OutputOption = None,
    dtype: DtypeOption = None,
    max_shard_size: ShardSizeOption = None,
    verify: VerifyOption = None,
    base: BaseOption = None,
    step: StepOption = None,
    best: BestOption = False,
    average: AverageOption = None,
    adapter: AdapterOption = False,
    adapter_config: AdapterConfigOption = None,
    overwrite: OverwriteOption = False,
    allow_incomplete: IncompleteOption = False,
    allow_nonfinite: NonfiniteOption = False,
    push_to_hub: PushOption = None,
    json_output: JsonOption = False,
) -> None:
    """Merge a sharded checkpoint into an ordinary Hugging Face model directory.

    It streams at the speed of the disk in constant memory, runs no code from the checkpoint, and leaves the whole
    output or nothing.

    \b
    Examples:
        fsdp-tune merge-checkpoint runs/llama7b
        fsdp-tune merge-checkpoint checkpoint-500/pytorch_model_fsdp_0 --base meta-llama/Llama-2-7b-hf -o merged --dtype bf16
    """
    with command(json_output) as screen, stopping_cleanly():
        # The merge has threads of its own. Those of numpy's BLAS, fixed when numpy is loaded, would wait for them at each small product.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        from fsdp_tune.merge.merging import MergeOptions
        from fsdp_tune.merge.merging import merge_checkpoint as merge

        options = MergeOptions(
            output=output,
            dtype=dtype.value if dtype is not None else None,
            max_shard_bytes=_size(max_shard_size),
            verify=verify.value if verify is not None else None,
            base=base,
            step=step,
            best=best,
            average=average,
            adapter=adapter,
            adapter_config=adapter_config,
            overwrite=overwrite,
            allow_incomplete=allow_incomplete,
            allow_nonfinite=allow_nonfinite,
        )
        result = merge(source, options, partial(byte_progress, screen))
        show_result(screen, result)
        if push_to_hub is not None:
            from fsdp_tune.merge.destination import push_to_hub as push

            address = push(result.output, push_to_hub)
            screen.document({**result.as_dict(), "pushed": address})
            screen.say(f"pushed: {address}")


def _size(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise usage_error("merge-shard-size", f"`--max-shard-size`: {error}") from error


def show_result(screen: Screen, result: MergeResult) -> None:
    """What was merged, why that, where it is, and how fast it went."""
    screen.notices(result.notices)
    screen.document(result.as_dict())
    rate = result.size_bytes / 1e9 / max(result.seconds, 1e-3)
    screen.say(f"merged {result.source}{f': {result.reason}' if result.is_choice else ''}")
    screen.say(
        f"{result.tensors:,} tensors, {result.parameters:,} parameters, {result.dtype}, {format_bytes(result.size_bytes)} "
        f"in {format_seconds(result.seconds)}{f' ({rate:.2f} GB/s)' if rate >= 0.01 else ''}, verified: {result.verified}"
    )
    screen.say(f"the {'adapter' if result.adapter is not None and result.adapter.is_exported else 'model'} is in {result.output}")


@contextmanager
def byte_progress(screen: Screen, label: str, total: int | None, unit: str) -> Iterator[_ByteBar]:
    """A bar in MiB with the rate in GB/s; the bar itself adds the time that is left."""
    assert unit == "bytes"
    with screen.progress(label, None if total is None else -(-total // MIB), "MiB") as bar:
        yield _ByteBar(bar)


class _ByteBar:
    """Counts bytes and shows MiB: several threads advance by pieces that are not multiples of 1 MiB."""

    def __init__(self, bar: Bar) -> None:
        self._bar, self._bytes, self._started = bar, 0, time.monotonic()
        self._lock = threading.Lock()

    def advance(self, n: int = 1) -> None:
        with self._lock:
            self._bytes += n
            done = self._bytes
        rate = done / max(time.monotonic() - self._started, 1e-9)
        self._bar.at(-(-done // MIB), f"{rate / 1e9:.2f} GB/s")
