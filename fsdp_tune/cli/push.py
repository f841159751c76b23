"""`push`: upload the model of a run to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fsdp_tune.cli.options import JsonOption
from fsdp_tune.cli.output import command

SourceArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run with a merged model, or a directory that a merge wrote.", show_default=False)
]
ToOption = Annotated[
    str | None,
    typer.Option(
        metavar="OWNER/NAME", help="The repository [default: training.hub_model_id, else the name of the run].", show_default=False
    ),
]
PublicOption = Annotated[
    bool | None,
    typer.Option(
        "--public/--private",
        help="Visibility of a new repository; one that is public already needs `--public` [default: the recipe's, else private].",
        show_default=False,
    ),
]
RevisionOption = Annotated[
    str | None,
    typer.Option(metavar="BRANCH", help="Branch, created if needed [default: training.hub_revision, else main].", show_default=False),
]
AdapterOption = Annotated[bool, typer.Option("--adapter", help="Upload RUN/adapter instead of the merged model.")]


def push(
    source: SourceArgument,
    to: ToOption = None,
    public: PublicOption = None,
    revision: RevisionOption = None,
    adapter: AdapterOption = False,
    json_output: JsonOption = False,
) -> None:
    """Upload the merged model or the adapter of a run to the Hugging Face hub, private by default.

    A push that was interrupted goes on where it stopped.

    \b
    Examples:
        fsdp-tune push runs/llama7b
        fsdp-tune push runs/llama7b --to my-org/llama7b-gsm8k --adapter
    """
    with command(json_output) as screen:
        import fsdp_tune

        pushed = fsdp_tune.push(source, to=to, public=public, revision=revision, adapter=adapter, observer=screen)
        screen.document({"pushed": pushed.url})
        screen.message(f"pushed: {pushed.url}")
