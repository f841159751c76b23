"""`merge-checkpoint`: sharded checkpoint → ordinary model directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import fsdp_tune
from fsdp_tune.cli.output import Screen
from fsdp_tune.cli.verbs import verb
from fsdp_tune.core.option import Argument, Option
from fsdp_tune.core.units import format_bytes, format_seconds
from fsdp_tune.merge.merge_options import MergeOptions

if TYPE_CHECKING:
    from fsdp_tune.merge.merging import MergeResult


@verb
def merge_checkpoint(
    screen: Screen,
    source: Annotated[
        Path,
        Argument("A run directory, a `checkpoint-N` of any tool, a folder of `.distcp` shards, or a PEFT adapter.", metavar="SRC"),
    ],
    options: MergeOptions,
    push_to_hub: Annotated[
        str | None, Option("Upload the result to a private repository; `fsdp-tune push` has more options.", metavar="OWNER/NAME")
    ] = None,
) -> None:
    """Merge a sharded checkpoint into an ordinary Hugging Face model directory.

    It streams at the speed of the disk in constant memory, runs no code from the checkpoint, and leaves a complete
    output or none.

    \b
    Examples:
        fsdp-tune merge-checkpoint runs/llama7b
        fsdp-tune merge-checkpoint checkpoint-500/pytorch_model_fsdp_0 --base meta-llama/Llama-2-7b-hf -o merged --dtype bf16
    """
    from fsdp_tune.jobs.answers import PushedMergeAnswer

    # The merge has its own threads. Those of numpy's BLAS, fixed when numpy is loaded, would wait for them at each small product.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    result = fsdp_tune.merge_checkpoint(source, options, observer=screen)
    _show(screen, result)
    if push_to_hub is not None:
        pushed = fsdp_tune.push(result.output, to=push_to_hub, observer=screen)
        screen.document(PushedMergeAnswer(**result.as_dict(), pushed=pushed.url))
        screen.message(f"pushed: {pushed.url}")


def _show(screen: Screen, result: MergeResult) -> None:
    """Print what was merged, the reason for the choice, where it is, and the speed."""
    screen.document(result.as_dict())
    rate = result.size_bytes / 1e9 / max(result.seconds, 1e-3)
    screen.message(f"merged {result.source}{f': {result.reason}' if result.is_choice else ''}")
    screen.message(
        f"{result.tensors:,} tensors, {result.parameters:,} parameters, {result.dtype}, {format_bytes(result.size_bytes)} "
        f"in {format_seconds(result.seconds)}{f' ({rate:.2f} GB/s)' if rate >= 0.01 else ''}, verified: {result.verified}"
    )
    screen.message(f"the {'adapter' if result.adapter is not None and result.adapter.is_exported else 'model'} is in {result.output}")
