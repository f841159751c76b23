"""The report about runs as one HTML file: charts that a vendored uPlot draws, tables, recipe and environment. Works from disk, offline."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import jinja2

from fsdp_tune.core.secrets import mask_text
from fsdp_tune.core.version import __version__
from fsdp_tune.pages.charts import (
    Chart,
    Table,
    charts_of,
    difference_table,
    events_of,
    plan_table,
    points_each,
    samples_of,
    source_tables,
    spike_tables,
    step_parts,
    summary_table,
)
from fsdp_tune.pages.html_pages import ASSETS, asset
from fsdp_tune.pages.run_record import RunRecord, differences

MAX_BYTES = 1_000_000
SHARES = (1.0, 0.5, 0.25, 0.1, 0.03)
"""Of the points, events and texts of a page; the first that fits is taken."""
EVENTS, PROMPTS, SAMPLE_STEPS, SAMPLE_CHARACTERS, RECIPE_CHARACTERS = 200, 20, 12, 1000, 20_000
SPIKE_ROWS = 100
RESOLVED_RECIPES = 8
"""Runs whose every key is on the page; of more runs there are the differences."""
UNCOMPARED_KEYS = ("name", "output_dir")
UNCOMPARED_FACTS = ("memory available",)


@dataclass(frozen=True, slots=True)
class Differences:
    """What is not the same in all runs: key → the value of each run as text, None where it has none."""

    recipe: dict[str, list[str | None]]
    environment: dict[str, list[str | None]]


def differences_of(runs: Sequence[RunRecord]) -> Differences:
    """Return the differences of recipes and environments; names and directories of the runs, which always differ, are not compared."""
    return Differences(
        differences([run.recipe for run in runs], ignored=UNCOMPARED_KEYS),
        differences([run.environment for run in runs], ignored=UNCOMPARED_FACTS),
    )


def report_page(runs: Sequence[RunRecord], written_at: str, *, is_live: bool = False) -> str:
    """Return a complete document below `MAX_BYTES`; long curves, events and texts are shortened and say so.

    If it `is_live`, its script fetches it again from where it was served, and takes over what is new.

    Text of runs is data of others: the template escapes it, and the page allows no script but its own two, by their digests.
    """
    charts, found = charts_of(runs), differences_of(runs)
    page = ""
    for share in SHARES:
        page = _rendered(runs, charts, found, share, written_at=written_at, is_live=is_live)
        if len(page.encode()) < MAX_BYTES:
            break
    return page


def _rendered(
    runs: Sequence[RunRecord], charts: Sequence[Chart], found: Differences, share: float, *, written_at: str, is_live: bool
) -> str:
    limit = max(6, int(share * points_each(charts)))
    count = len(runs)
    prompts = samples_of(runs, steps=max(2, int(share * SAMPLE_STEPS)), characters=int(share * SAMPLE_CHARACTERS) // count + 40)
    facts = dict.fromkeys(key for run in runs for key in run.environment)
    scripts = [_uplot("uPlot.iife.min.js"), asset("report.js")]
    connect = "connect-src 'self'; " if is_live else ""
    return _template().render(
        title=", ".join(run.label for run in runs),
        written_at=written_at,
        version=__version__,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; {connect}script-src {' '.join(map(_digest, scripts))}",
        is_live=is_live,
        styles=[_uplot("uPlot.min.css"), asset("page.css"), asset("report.css")],
        scripts=scripts,
        licence=_uplot("LICENSE"),
        data=_inert(json.dumps([chart.as_json(limit) for chart in charts], ensure_ascii=False, allow_nan=False, separators=(",", ":"))),
        groups=[(name, list(group)) for name, group in groupby(enumerate(charts), key=lambda each: each[1].group)],
        limit=limit,
        thinned=any(len(series.curve.steps) > limit for chart in charts for series in chart.series),
        runs=runs,
        without_lines=[run.label for run in runs if not run.lines.losses],
        summary=summary_table(runs),
        parts=[(run.label, parts) for run in runs if (parts := step_parts(run))],
        plans=plan_table(runs),
        sources=source_tables(runs),
        events=[events_of(run, max(10, int(share * EVENTS) // count)) for run in runs],
        spikes=spike_tables(runs, max(4, int(share * SPIKE_ROWS) // count)),
        samples=prompts[:PROMPTS],
        more_prompts=max(0, len(prompts) - PROMPTS),
        recipe=difference_table(found.recipe, runs),
        written=[(run, run.written[: int(share * RECIPE_CHARACTERS)]) for run in runs],
        resolved=[(run, _resolved(run)) for run in runs[:RESOLVED_RECIPES]],
        environment=difference_table(found.environment, runs),
        facts=Table(["", *(run.label for run in runs)], [[fact, *(run.environment.get(fact, "–") for run in runs)] for fact in facts]),
    )


def _resolved(run: RunRecord) -> Table:
    return Table(["key", "value", "why"], [[key, value, mask_text(run.reasons.get(key, ""))] for key, value in run.recipe.items()])


def _uplot(name: str) -> str:
    return asset(f"../uplot/{name}")


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.j2")


def _inert(text: str) -> str:
    """Return JSON that cannot end its script element: every `<`, `>` and `&` as an escape of JSON."""
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
