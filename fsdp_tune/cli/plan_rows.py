"""Words and rows of a plan, as both the terminal and the HTML page show them."""

from __future__ import annotations

from collections.abc import Callable

from fsdp_tune.core.units import format_figure
from fsdp_tune.planner.predict.accuracy import FigureError
from fsdp_tune.planner.predict.predict import Plan


def describe_error(error: FigureError) -> str:
    if error.median_percent is None:
        return "not measured"
    return (
        f"median error {error.median_percent:.1f} %, nine of ten below {error.p90_percent:.1f} % "
        f"({error.rows} published runs)"
    )


def describe_changes(changes: dict[str, object]) -> str:
    """Describe changes, such as `FULL_SHARD, activation_checkpointing full`; the requested recipe has
    none."""
    if not changes:
        return "your recipe, unchanged"
    return ", ".join(
        f"{key.split('.')[1]} {str(value).lower() if isinstance(value, bool) else value}"
        for key, value in changes.items()
    )


def place(plan: Plan) -> str:
    """Return the place in the ranking: `3`, or `3 = 1` for a recipe that is equal to the first within the
    error."""
    return f"{plan.place}" if plan.equal_from in (None, plan.place) else f"{plan.place} = {plan.equal_from}"


EXPERTS_TITLE = (
    "expert parallelism: the experts of a layer divided among neighbouring ranks; seconds of a step, "
    "hidden ones included"
)
EXPERTS_HEAD = (
    "ranks",
    "fits",
    "GiB",
    "s/step",
    "tokens/s/GPU",
    "gathers",
    "all-to-all",
    "products",
    "rows of an expert",
)


def expert_rows(plan: Plan) -> list[tuple[str, ...]]:
    return [
        (
            f"{row.ep_size} (yours)" if row.is_yours else str(row.ep_size),
            row.fits,
            f"{row.device_gib:.1f}",
            format_figure(row.step_seconds),
            f"{row.tokens_per_second_per_device:,.0f}",
            f"{row.gather_seconds:.3f}",
            f"{row.exchange_seconds:.3f}",
            f"{row.product_seconds:.3f}",
            f"{row.rows_of_expert:,.0f}",
        )
        for row in plan.experts
    ]


MEASURED_HEAD = (
    "changes to your recipe",
    "",
    "s/step (planned)",
    "tokens/s/device",
    "GiB reserved (planned)",
)


def measured_rows(plan: Plan) -> list[tuple[str, ...]]:
    return [
        (
            describe_changes(each.recipe_changes),
            each.outcome,
            _pair(each.step_seconds, each.predicted_step_seconds, format_figure),
            "" if each.tokens_per_second_per_device is None else f"{each.tokens_per_second_per_device:,.0f}",
            _pair(each.peak_reserved_gib, each.predicted_peak_reserved_gib, "{:.1f}".format),
        )
        for each in plan.measured
    ]


def _pair(measured: float | None, predicted: float | None, form: Callable[[float], str]) -> str:
    """Return `0.61 (0.58)`; what is unknown is left out."""
    return f"{'' if measured is None else form(measured)}{'' if predicted is None else f' ({form(predicted)})'}".strip()  # noqa: E501
