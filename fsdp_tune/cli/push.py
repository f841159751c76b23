"""`push`: upload the model of a run to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import fsdp_tune
from fsdp_tune.cli.output import Screen
from fsdp_tune.cli.verbs import given, verb
from fsdp_tune.core.option import Argument
from fsdp_tune.jobs.options import PushOptions


@verb
def push(
    screen: Screen,
    source: Annotated[Path, Argument("A run with a merged model, or a directory that a merge wrote.", metavar="RUN")],
    options: PushOptions,
) -> None:
    """Upload the merged model or the adapter of a run to the Hugging Face hub, private by default.

    A push that was interrupted goes on where it stopped.

    \b
    Examples:
        fsdp-tune push runs/llama7b
        fsdp-tune push runs/llama7b --to my-org/llama7b-gsm8k --adapter
    """
    from fsdp_tune.jobs.answers import PushAnswer

    pushed = fsdp_tune.push(source, **given(options), observer=screen)
    screen.document(PushAnswer(pushed.url))
    screen.message(f"pushed: {pushed.url}")
