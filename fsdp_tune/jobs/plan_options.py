"""Arguments of `plan`: what is predicted, and what is measured."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fsdp_tune.core.command import Option, Target
from fsdp_tune.jobs.options import Allowed, AllowedCode

PlannedGpu = Annotated[
    str | None,
    Option(
        "A GPU of the table (A100-40GB, H100-SXM …) or a YAML file; default: this machine's.",
        metavar="NAME|FILE",
    ),
]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    gpu: PlannedGpu = None
    num_gpus: Annotated[
        int | None,
        Option(
            "GPUs over all machines; overrides the recipe.",
            flags=("--num-gpus", "--num-processes"),
            metavar="N",
            minimum=1,
        ),
    ] = None
    target: Annotated[
        Target | None,
        Option(
            "How recipes are ranked: fastest (the default), cheapest (also on fewer GPUs), largest-context."
        ),
    ] = None
    exact: Annotated[bool, Option("Trace every decoder layer instead of repeating the middle ones.")] = False
    search: Annotated[
        bool,
        Option(
            "Plan only this recipe, without a ranking and a scaling table.",
            flags=("--no-search",),
            read=operator.not_,
            typed=bool,
        ),
    ] = True
    write: Annotated[
        Path | None, Option("Write the best recipe, with the reasons as comments.", metavar="FILE")
    ] = None
    calibrate: Annotated[
        Path | None, Option("Measure this GPU's speed from the metrics of a finished run.", metavar="RUN")
    ] = None
    dollars_per_hour: Annotated[
        float | None,
        Option(
            "Price of one GPU, for the cost of the run; overrides the price in a GPU file.", metavar="PRICE"
        ),
    ] = None
    allowed: AllowedCode = Allowed()


MEASURED_STEPS = 5
"""Of each recipe that `plan --measure` trains, unless another number is given."""


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """What `plan` measures on the machines of the recipe."""

    measure: Annotated[
        int | None,
        Option(
            "Train the N best recipes for a few steps on the machines of the recipe, and rank them by "
            "measured speed.",
            metavar="N",
            minimum=1,
        ),
    ] = None
    measure_steps: Annotated[
        int | None,
        Option(
            "With --measure: measured steps of each recipe, after two that do not count "
            f"[default: {MEASURED_STEPS}].",
            metavar="N",
            minimum=1,
        ),
    ] = None
    minutes: Annotated[
        float | None,
        Option("With --measure: start no measurement that would end after this time.", metavar="MINUTES"),
    ] = None
    machine_rank: Annotated[
        int | None,
        Option(
            "With --measure: number of this machine; the first is 0. Inside `srun` it is taken from Slurm.",
            metavar="N",
        ),
    ] = None
