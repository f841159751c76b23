"""`evaluate`: score a model on rows of data, with an interval, and compare it with its base."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsdp_tune.cli.options import AllowExtensionsOption, JsonOption, SetOption, SettingsOption
from fsdp_tune.cli.output import Screen, command
from fsdp_tune.core.errors import usage_error
from fsdp_tune.core.units import format_seconds

if TYPE_CHECKING:
    from fsdp_tune.jobs.evaluate import Evaluation, SetResult


class DeviceKind(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class LoadedDtype(StrEnum):
    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A model directory, a run (its merged model), RUN/adapter, or a hub id.", show_default=False),
]
MetricOption = Annotated[
    str, typer.Option("--metric", metavar="NAME", help="exact_match, perplexity, or an entry point of the group `fsdp_tune.metrics`.")
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="PATH",
        help="Rows: a file, a directory, a hub id or builtin:NAME [default: the eval sets of RECIPE or of the run].",
        show_default=False,
    ),
]
SplitOption = Annotated[str | None, typer.Option("--split", help="Split of `--data` [default: train].", show_default=False)]
DataNameOption = Annotated[
    str | None, typer.Option("--data-name", metavar="NAME", help="Configuration of a hub data set.", show_default=False)
]
FormatOption = Annotated[
    str | None, typer.Option("--format", help="Format of `--data`, as `data.format` [default: detected].", show_default=False)
]
RenameOption = Annotated[
    list[str] | None, typer.Option("--rename", metavar="OLD=NEW", help="Rename a column of `--data`. Repeatable.", show_default=False)
]
IgnoreOption = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore-column", metavar="NAME", help="Ignore a column of `--data` that no format reads. Repeatable.", show_default=False
    ),
]
MaxRowsOption = Annotated[int | None, typer.Option("--max-rows", metavar="N", min=1, help="Only the first N rows.", show_default=False)]
AnswerOption = Annotated[
    str | None,
    typer.Option(
        "--answer",
        metavar="REGEX",
        help="exact_match: compare the first match of this in both texts (its first group), such as '#### (.*)'.",
        show_default=False,
    ),
]
NewTokensOption = Annotated[int, typer.Option("--max-new-tokens", metavar="N", min=1, help="exact_match: longest generated answer.")]
BaseModelOption = Annotated[
    str | None,
    typer.Option("--base", metavar="MODEL", help="Evaluate this model on the same rows too, and compare both.", show_default=False),
]
BatchOption = Annotated[int, typer.Option("--batch-size", metavar="N", min=1, help="Rows of one forward pass.")]
DeviceOption = Annotated[DeviceKind, typer.Option("--device", help="auto = the accelerator of this machine, else cpu.")]
DtypeOption = Annotated[LoadedDtype, typer.Option("--dtype", help="Type of the weights; auto = as stored.")]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write prompt, prediction, target and score of each row.", show_default=False)
]
TrustCodeOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code from the repositories of the models.")]


def evaluate(
    model: ModelArgument,
    config: SettingsOption = None,
    overrides: SetOption = None,
    metric: MetricOption = "perplexity",
    data: DataOption = None,
    split: SplitOption = None,
    data_name: DataNameOption = None,
    format_: FormatOption = None,
    rename: RenameOption = None,
    ignore_column: IgnoreOption = None,
    max_rows: MaxRowsOption = None,
    answer: AnswerOption = None,
    max_new_tokens: NewTokensOption = 256,
    base: BaseModelOption = None,
    batch_size: BatchOption = 8,
    device: DeviceOption = DeviceKind.AUTO,
    dtype: DtypeOption = LoadedDtype.AUTO,
    out: OutOption = None,
    trust_remote_code: TrustCodeOption = False,
    allow_extensions: AllowExtensionsOption = False,
    json_output: JsonOption = False,
) -> None:
    """Evaluate a model on rows that are formatted as in training, with a confidence interval.

    Format, template and eval sets come from the recipe of `--config`, else from the run that wrote the model.

    \b
    Examples:
        fsdp-tune evaluate runs/llama7b --base meta-llama/Llama-2-7b-hf
        fsdp-tune evaluate runs/llama7b --data test.jsonl --metric exact_match --answer '#### (.*)'
    """
    with command(json_output) as screen:
        import fsdp_tune

        if overrides and config is None:
            hint = "add `--config RECIPE`; `--ignore-column NAME` ignores columns of `--data` without one"
            raise usage_error("no-recipe", "`--set` changes a recipe, and none is given", hint=hint)
        source = {"split": split, "name": data_name, "format": format_, "rename_columns": _renamed(rename)}
        options = fsdp_tune.EvaluateOptions(
            metric=metric,
            data=data,
            source={key: value for key, value in source.items() if value is not None},
            ignore_columns=tuple(ignore_column or ()),
            max_rows=max_rows,
            answer=answer,
            max_new_tokens=max_new_tokens,
            base=base,
            batch_size=batch_size,
            device=device.value,
            dtype=dtype.value,
            out=out,
            allowed=fsdp_tune.Allowed(trust_remote_code, extensions=allow_extensions),
        )
        loaded = None if config is None else fsdp_tune.load_recipe(config, overrides or ())
        found = fsdp_tune.evaluate(model, options, recipe=loaded, observer=screen)
        screen.document(found.as_dict())
        show(screen, found)


def _renamed(pairs: list[str] | None) -> dict[str, str] | None:
    for pair in pairs or ():
        if "=" not in pair:
            raise usage_error("usage", f"`--rename {pair}` has no `=`", hint="--rename question=prompt")
    return dict(pair.split("=", 1) for pair in pairs) if pairs else None


def show(screen: Screen, found: Evaluation) -> None:
    """Print a line for each set and model, and the comparison."""
    rows: list[list[Any]] = []
    for label, result in found.sets.items():
        for name, estimate in ((found.model, result.metric), (found.base, result.base)):
            if estimate is not None:
                rows.append([label, name, f"{result.rows:,}", f"{result.tokens:,}", f"{estimate.value:.4f}", _span(estimate)])
    screen.table("", ["set", "model", "rows", "tokens", found.metric, f"interval ({found.interval})"], rows)
    for label, result in found.sets.items():
        for line in _notes(found, result):
            screen.message(f"{label}: {line}")
    screen.message(f"evaluated in {format_seconds(found.seconds)} on {found.device}")


def _notes(found: Evaluation, result: SetResult) -> list[str]:
    lines: list[str] = []
    if result.cut_rows:
        left = ", and left out" if found.metric == "exact_match" else ""
        lines.append(f"{result.cut_rows:,} rows are cut at `data.max_length`{left}")
    if result.loss is not None:
        lines.append(f"loss {result.loss.value:.4f} {_span(result.loss)} nats a token")
    if (compared := result.comparison) is not None:
        what = "loss" if result.loss is not None else found.metric
        span = f"[{compared.low:+.4f}, {compared.high:+.4f}]"
        lines.append(f"{what} {compared.difference:+.4f} {span} against {found.base}, p = {compared.p:.2g} ({found.test})")
    return lines


def _span(estimate: Any) -> str:
    return f"[{estimate.low:.4f}, {estimate.high:.4f}]"
