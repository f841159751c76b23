"""`prepare`: tokenise and pack once, and account for what is trained; `train` calls the same functions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsdp_tune.cli.options import (
    Allowed,
    ConfigArg,
    ConfigOption,
    JsonOption,
    NameOption,
    SetOption,
    TrustOption,
    VerifyDataOption,
    asked_recipe,
    chosen_recipe,
)
from fsdp_tune.cli.output import Screen, command, printable, stopping_cleanly

if TYPE_CHECKING:
    from fsdp_tune.data.preparation import Prepared
    from fsdp_tune.recipe.schema import Recipe

LONGEST_RUN = 600
"""Characters of one part of an example that are shown; the middle of a longer one is left out."""
BEGIN, END = "⟦", "⟧"

ShowOption = Annotated[int, typer.Option("--show", metavar="N", min=0, help="Decode N rows, with the trained part marked.")]
DownloadOption = Annotated[bool, typer.Option("--download", help="Fetch the model's weights into the local cache too.")]


def prepare(
    recipe: ConfigArg = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    name: NameOption = None,
    show: ShowOption = 0,
    download: DownloadOption = False,
    verify_data: VerifyDataOption = False,
    trust_remote_code: TrustOption = False,
    json_output: JsonOption = False,
) -> None:
    """Tokenise and pack the data of a recipe into the cache, and show what is trained. Needs no GPU.

    \b
    Examples:
        fsdp-tune prepare --config gpt2_smoke --show 3
        fsdp-tune prepare my.yaml --download       (before a job on machines without network)
    """
    with command(json_output) as screen, stopping_cleanly():
        from fsdp_tune.data.preparation import decoded_rows
        from fsdp_tune.data.preparation import prepare as prepare_data
        from fsdp_tune.data.tokenise.tokenizer import load_encoder

        # What was decided for the ranks is not told: none is started, and the rows are the same for any number of them.
        asked = asked_recipe(screen, chosen_recipe(recipe, config), overrides, name=name, allowed=Allowed(trust_remote_code))
        if download:
            _download(screen, asked.recipe)
        encoder = load_encoder(asked.recipe)
        screen.notices(encoder.notices)
        ranks_are_known = asked.machine.device is not None or asked.loaded.recipe.launch.num_processes != "auto"
        with screen.progress("tokenising", None, "rows") as bar:
            data = prepare_data(asked.recipe, encoder, progress=bar, check_rows=ranks_are_known, verify=verify_data)
        screen.notices(data.as_notices())
        rows = decoded_rows(data.train, encoder, show) if show else []
        screen.document(_document(data, rows))
        show_data(screen, data, with_example=not rows)
        for examples in rows:
            for example in examples:
                show_example(screen, example)


def show_data(screen: Screen, data: Prepared, *, with_example: bool = True) -> None:
    """The account as a table and a few lines, and one example with its trained part marked."""
    report = data.report
    rows = [
        [
            name,
            f"{account['rows']:,}",
            f"{account['examples']:,}",
            f"{account['tokens']:,}",
            f"{account['supervised_tokens']:,}",
            _spread(account["supervised_tokens_per_example"]),
            _spread(account["tokens_per_example"]),
            f"{100 * account['fill']:.1f} %",
        ]
        for name, account in report["sets"].items()
    ]
    columns = ["set", "rows", "examples", "tokens", "trained", "trained each ¹", "tokens each ¹", "of max_length"]
    screen.table(f"data ({'from the cache' if data.reused else 'prepared'}: {data.path})", columns, rows)
    screen.say("¹ of an example: least / median / most")
    for line in _lines(report):
        screen.say(line)
    if with_example:
        show_example(screen, report["example"])


def _lines(report: dict[str, Any]) -> list[str]:
    from fsdp_tune.data.account import source_lines

    kinds = [f"{given['path']}: {given['format']}, loss on {given['loss_on']}" for given in report["inputs"]]
    dropped = sum(account[why]["rows"] for account in report["sets"].values() for why in ("dropped_too_long", "dropped_nothing_left"))
    left_out = report["rows_bad"]["rows"] + report["rows_untrained"]["rows"] + dropped
    eos, bos = report["eos"], report["bos"]
    cut = sum(account["truncated"] for account in report["sets"].values())
    before_the_cut = ", before the cut" if cut or any(account["cut_by_packing"] for account in report["sets"].values()) else ""
    return [
        *kinds,
        *source_lines(report),
        f"{report['rows_read']:,} rows read, {left_out:,} left out, {cut:,} cut at max_length",
        f"end of sequence `{eos['token']}` trained in {eos['supervised']:,} of {eos['examples']:,} examples{before_the_cut}",
        "beginning of sequence: none in this tokenizer"
        if bos is None
        else f"beginning of sequence once in {bos['once']:,} of {bos['examples']:,} examples, more often in {bos['more']:,}",
    ]


def show_example(screen: Screen, example: dict[str, Any]) -> None:
    """One decoded example: trained text in colour on a terminal, in brackets elsewhere."""
    screen.say(f"{example['where']} (trained: {'green' if screen.is_live else BEGIN + '…' + END})")
    runs = [(_shortened(text), trained) for text, trained in example["runs"]]
    if screen.is_live:
        typer.echo(
            "".join(typer.style(printable(text), fg="green") if trained else printable(text) for text, trained in runs), file=screen.talk
        )
    else:
        screen.say("".join(f"{BEGIN}{text}{END}" if trained else text for text, trained in runs))


def _shortened(text: str) -> str:
    half = LONGEST_RUN // 2
    return text if len(text) <= LONGEST_RUN else f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"


def _spread(values: dict[str, float]) -> str:
    return f"{values['min']:,.0f} / {values['median']:,.0f} / {values['max']:,.0f}"


def _document(data: Prepared, rows: list[list[dict[str, Any]]]) -> dict[str, Any]:
    document = {"path": data.path, "key": data.key, "reused": data.reused, "train": data.train, "evals": data.evals, "report": data.report}
    return document | ({"shown": rows} if rows else {})


def _download(screen: Screen, recipe: Recipe) -> None:
    from fsdp_tune.core.hub import download_model

    name = recipe.model.name_or_path
    if name is None or Path(name).exists():
        screen.say("the model is local: there are no weights to download")
        return
    screen.say(f"the model is in {download_model(name, recipe.model.revision)}")
