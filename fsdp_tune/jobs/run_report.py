"""Report on runs: their curves, events, data, recipes and environments, and how they differ, from their files alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_tune.core.atomic import json_safe, write_file
from fsdp_tune.jobs.answers import ReportAnswer, RunFigures
from fsdp_tune.pages.report_page import Differences, differences_of, report_page
from fsdp_tune.pages.run_record import RunRecord, labels_of, read_run
from fsdp_tune.run.directory import existing_run


@dataclass(frozen=True, slots=True)
class RunReport:
    """What is known about the runs when they are read."""

    runs: list[RunRecord]
    differences: Differences
    """Of recipes and environments; empty for a single run."""
    html: str
    """The page: a complete document below a megabyte, which needs no network."""
    page: Path | None = None
    """Where the page was written."""

    def as_dict(self) -> dict[str, Any]:
        """Return the document of `report --json`."""
        return ReportAnswer(
            page=str(self.page) if self.page is not None else None,
            runs=[RunFigures(**json_safe(run.summary())) for run in self.runs],
            recipe_differences=self.differences.recipe,
            environment_differences=self.differences.environment,
        ).as_dict()


def report(runs: Sequence[Path | str], *, output: Path | str | None = None) -> RunReport:
    """Read run directories, also of runs that are training, and compare them; with `output`, write the page there, replacing it.

    The page is readable by its owner only, like the recipe and the logs that it cites. No run is changed.
    Raises: FsdpTuneError `not-a-run`, and `run-unreadable` for files that are damaged or of a newer version.
    """
    found = list(dict.fromkeys(existing_run(Path(run)) for run in runs))
    records = [read_run(run, label) for run, label in zip(found, labels_of([run.path for run in found]), strict=True)]
    html = report_page(records, time.strftime("%Y-%m-%d %H:%M", time.gmtime()))
    page = Path(output) if output is not None else None
    if page is not None:
        write_file(page, html, private=True)
    return RunReport(records, differences_of(records), html, page)
