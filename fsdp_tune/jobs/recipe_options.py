"""Arguments of the jobs that write a recipe: a new one, or one imported from another tool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from fsdp_tune.core.command import Only, Option
from fsdp_tune.jobs.options import Allowed
from fsdp_tune.jobs.plan_options import PlannedGpu
from fsdp_tune.recipe.read.tool_detection import OptionName

Method = Literal["full", "lora", "qlora"]


@dataclass(frozen=True, slots=True)
class NewRecipeOptions:
    gpu: PlannedGpu = None
    num_gpus: Annotated[int, Option("GPUs over all machines.", metavar="N", minimum=1)] = 1
    method: Annotated[
        Literal["auto", Method],
        Option("What to train; auto: all parameters if that fits, else LoRA, else QLoRA."),
    ] = "auto"
    split: Annotated[str | None, Option("Split of a hub data set [default: train].")] = None
    max_length: Annotated[int, Option("Largest number of tokens in a row.", metavar="N", minimum=1)] = 2048
    global_batch_size: Annotated[int, Option("Rows in a step, over all GPUs.", metavar="N", minimum=1)] = 64
    output: Annotated[Path, Option("The recipe.", flags=("--output", "-o"), metavar="FILE")] = Path(
        "recipe.yaml"
    )


@dataclass(frozen=True, slots=True)
class ImportOptions:
    tool: Annotated[
        OptionName | None,
        Option("The tool that the file is for [default: recognised by its keys].", flags=("--from",)),
    ] = None
    output: Annotated[
        Path | None, Option("The recipe [default: stdout].", flags=("--output", "-o"), metavar="FILE")
    ] = None
    force: Annotated[bool, Option("Replace `--output` if it exists.")] = False
    num_gpus: Annotated[
        int | None,
        Option(
            "Number of GPUs that the file was written for; sets `launch.num_processes` and "
            "`training.global_batch_size`.",
            metavar="N",
            minimum=1,
        ),
    ] = None
    overrides: Annotated[
        Sequence[str],
        Option(
            "Set a key that FILE lacks, or replace its value. Repeatable.",
            flags=("--set",),
            metavar="KEY=VALUE",
        ),
    ] = ()
    check: Annotated[bool, Option("Compare FILE with the written recipe, as `fsdp-tune compare` does.")] = (
        False
    )
    allowed: Annotated[Allowed, Only(("remote_code",))] = Allowed()
