"""`evaluate`: score a model on rows of data, with an interval, and compare it with its base."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import fsdp_tune
from fsdp_tune.cli.output import Screen
from fsdp_tune.cli.verbs import Overrides, verb
from fsdp_tune.core.errors import usage_error
from fsdp_tune.core.option import Argument, Option
from fsdp_tune.core.units import format_seconds
from fsdp_tune.jobs.options import EvaluateOptions

if TYPE_CHECKING:
    from fsdp_tune.jobs.evaluate import Evaluation, SetResult


@verb
def evaluate(
    screen: Screen,
    model: Annotated[str, Argument("A model directory, a run (its merged model), RUN/adapter, or a hub id.", metavar="MODEL")],
    *,
    config: Annotated[
        str | None,
        Option(
            "Take data format, chat template and eval sets from this recipe: a YAML file or a name of the catalogue "
            "[default: those of the run that wrote the model].",
            flags=("--config", "-c"),
            metavar="RECIPE",
        ),
    ] = None,
    overrides: Overrides = (),
    options: EvaluateOptions,
) -> None:
    """Evaluate a model on rows that are formatted as in training, with a confidence interval.

    Format, template and eval sets come from the recipe of `--config`, else from the run that wrote the model.

    \b
    Examples:
        fsdp-tune evaluate runs/llama7b --base meta-llama/Llama-2-7b-hf
        fsdp-tune evaluate runs/llama7b --data test.jsonl --metric exact_match --answer '#### (.*)'
    """
    if overrides and config is None:
        hint = "add `--config RECIPE`; `--ignore-column NAME` ignores columns of `--data` without one"
        raise usage_error("no-recipe", "`--set` changes a recipe, and none is given", hint=hint)
    loaded = None if config is None else fsdp_tune.load_recipe(config, overrides)
    found = fsdp_tune.evaluate(model, options, recipe=loaded, observer=screen)
    screen.document(found)
    show(screen, found)


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
