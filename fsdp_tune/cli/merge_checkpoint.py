"""`merge-checkpoint`: sharded checkpoint → ordinary model directory."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_tune.cli.options import JsonOption
from fsdp_tune.cli.output import Screen, command
from fsdp_tune.core.errors import usage_error
from fsdp_tune.core.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
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


class BaseWeights(StrEnum):
    TRAINED = "trained"
    ORIGINAL = "original"


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
        help="quick: check digests, names and shapes; read 32 KiB of every 2 MiB back. full: also read every byte back from the disk "
        "and load the model. "
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
    bool | None,
    typer.Option(
        "--adapter/--merged",
        help="A LoRA adapter: write it alone, as PEFT does, or add it to the weights of its base [default: merge.adapter of the run].",
        show_default=False,
    ),
]
AdapterConfigOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The adapter's adapter_config.json [default: the one next to the weights].", show_default=False),
]
BaseWeightsOption = Annotated[
    BaseWeights | None,
    typer.Option(
        help="A base that was held in 4 bits: its weights as they were trained, or as stored [default: the run's `merge.base`].",
        show_default=False,
    ),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the output of an earlier merge, once the new one is complete.")]
IncompleteOption = Annotated[
    bool, typer.Option("--allow-incomplete", help="Merge a checkpoint that is not complete; missing files are reported.")
]
NonfiniteOption = Annotated[bool, typer.Option("--allow-nonfinite", help="Keep NaN and infinite weights; their tensors are reported.")]

PushOption = Annotated[
    str | None,
    typer.Option(
        "--push-to-hub",
        metavar="OWNER/NAME",
        help="Upload the result to a private repository; `fsdp-tune push` has more options.",
        show_default=False,
    ),
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
    adapter: AdapterOption = None,
    adapter_config: AdapterConfigOption = None,
    base_weights: BaseWeightsOption = None,
    overwrite: OverwriteOption = False,
    allow_incomplete: IncompleteOption = False,
    allow_nonfinite: NonfiniteOption = False,
    push_to_hub: PushOption = None,
    json_output: JsonOption = False,
) -> None:
    """Merge a sharded checkpoint into an ordinary Hugging Face model directory.

    It streams at the speed of the disk in constant memory, runs no code from the checkpoint, and leaves a complete
    output or none.

    \b
    Examples:
        fsdp-tune merge-checkpoint runs/llama7b
        fsdp-tune merge-checkpoint checkpoint-500/pytorch_model_fsdp_0 --base meta-llama/Llama-2-7b-hf -o merged --dtype bf16
    """
    with command(json_output) as screen:
        # The merge has its own threads. Those of numpy's BLAS, fixed when numpy is loaded, would wait for them at each small product.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        import fsdp_tune

        options = fsdp_tune.MergeOptions(
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
            base_weights=base_weights.value if base_weights is not None else None,
            overwrite=overwrite,
            allow_incomplete=allow_incomplete,
            allow_nonfinite=allow_nonfinite,
        )
        result = fsdp_tune.merge_checkpoint(source, options, observer=screen)
        _show(screen, result)
        if push_to_hub is not None:
            pushed = fsdp_tune.push(result.output, to=push_to_hub, observer=screen)
            screen.document({**result.as_dict(), "pushed": pushed.url})
            screen.message(f"pushed: {pushed.url}")


def _size(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise usage_error("merge-shard-size", f"`--max-shard-size`: {error}") from error


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
