"""The report about runs as one HTML file, works from disk, offline; and the same page served on this machine
while runs train.

A vendored uPlot draws the charts; tables, recipe and environment follow. While it is served, each request
gets the page as it is now, and its script fetches it again.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from itertools import groupby
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any, cast

import jinja2

from fsdp_tune.core.errors import FsdpTuneError, usage_error
from fsdp_tune.core.secrets import mask_text
from fsdp_tune.core.version import __version__
from fsdp_tune.pages.charts import Chart, charts_of, points_each
from fsdp_tune.pages.html_pages import ASSETS, asset
from fsdp_tune.pages.ranking import ranking_of
from fsdp_tune.pages.run_record import RunRecord, differing_environment, differing_values
from fsdp_tune.pages.step_shares import step_parts
from fsdp_tune.pages.tables import (
    Table,
    difference_table,
    events_of,
    plan_table,
    samples_of,
    source_tables,
    spike_tables,
    summary_table,
)

MAX_BYTES = 1_000_000
SHARES = (1.0, 0.5, 0.25, 0.1, 0.03)
"""Of the points, events and texts of a page; the first that fits is taken."""
EVENTS, PROMPTS, SAMPLE_STEPS, SAMPLE_CHARACTERS, RECIPE_CHARACTERS = 200, 20, 12, 1000, 20_000
SPIKE_ROWS = 100
RESOLVED_RECIPES = 8
"""Runs whose every key is on the page; of more runs there are the differences."""
NAMED_RUNS = 4
"""Runs in the title. The title of more is their directory."""
UNCOMPARED_KEYS = ("name", "output_dir")


@dataclass(frozen=True, slots=True)
class Differences:
    """What is not the same in all runs: key → the value of each run as text, None where it has none."""

    recipe: dict[str, list[str | None]]
    environment: dict[str, list[str | None]]


def differences_of(runs: Sequence[RunRecord]) -> Differences:
    """Return the differences of recipes and environments; names and directories of the runs, which always
    differ, are not compared."""
    return Differences(
        differing_values([run.recipe for run in runs], ignored=UNCOMPARED_KEYS),
        differing_environment(runs),
    )


def report_page(runs: Sequence[RunRecord], written_at: str, *, is_live: bool = False) -> str:
    """Return a complete document below `MAX_BYTES`; long curves, events and texts are shortened and say so.

    If it `is_live`, its script fetches it again from where it was served, and takes over what is new.

    Text of runs is data of others: the template escapes it, and the page allows no script but its own two, by
    their digests.
    """
    charts, found = charts_of(runs), differences_of(runs)
    page = ""
    for share in SHARES:
        page = _rendered(runs, charts, found, share, written_at=written_at, is_live=is_live)
        if len(page.encode()) < MAX_BYTES:
            break
    return page


def _rendered(
    runs: Sequence[RunRecord],
    charts: Sequence[Chart],
    found: Differences,
    share: float,
    *,
    written_at: str,
    is_live: bool,
) -> str:
    limit = max(6, int(share * points_each(charts)))
    count = len(runs)
    events = [events_of(run, max(10, int(share * EVENTS) // count)) for run in runs]
    prompts = samples_of(
        runs, steps=max(2, int(share * SAMPLE_STEPS)), characters=int(share * SAMPLE_CHARACTERS) // count + 40
    )
    scripts = [_uplot("uPlot.iife.min.js"), asset("report.js")]
    connect = "connect-src 'self'; " if is_live else ""
    return _template().render(
        title=_title(runs),
        parent=_parent(runs) if count > 1 else "",
        written_at=written_at,
        version=__version__,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; {connect}script-src "
        f"{' '.join(map(_digest, scripts))}",
        is_live=is_live,
        styles=[_uplot("uPlot.min.css"), asset("page.css"), asset("report.css")],
        scripts=scripts,
        licence=_uplot("LICENSE"),
        data=_inert(_charts_json(charts, limit)),
        first_marked=next((chart for chart in charts if chart.marks), None),
        groups=[
            (name, list(group)) for name, group in groupby(enumerate(charts), key=lambda each: each[1].group)
        ],
        limit=limit,
        thinned=any(len(series.curve.steps) > limit for chart in charts for series in chart.series),
        runs=runs,
        without_lines=[run.label for run in runs if not len(run.metrics.losses)],
        ranking=ranking_of(runs, found.recipe) if count > 1 else None,
        summary=summary_table(runs),
        **_step_chart(runs),
        plans=plan_table(runs),
        sources=source_tables(runs),
        events=[each for each in events if each.shown],
        without_events=[each.label for each in events if not each.shown],
        spikes=spike_tables(runs, max(4, int(share * SPIKE_ROWS) // count)),
        samples=prompts[:PROMPTS],
        more_prompts=max(0, len(prompts) - PROMPTS),
        recipe=difference_table(found.recipe, runs),
        written=[(run, run.written[: int(share * RECIPE_CHARACTERS)]) for run in runs],
        resolved=[(run, _resolved(run)) for run in runs[:RESOLVED_RECIPES]],
        environment=difference_table(found.environment, runs),
        facts=_facts_table(runs),
    )


def _charts_json(charts: Sequence[Chart], limit: int) -> str:
    values = [chart.as_json(limit) for chart in charts]
    return json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _facts_table(runs: Sequence[RunRecord]) -> Table:
    facts = dict.fromkeys(key for run in runs for key in run.environment)
    rows = [[fact, *(run.environment.get(fact, "–") for run in runs)] for fact in facts]
    return Table(["", *(run.label for run in runs)], rows)


def _title(runs: Sequence[RunRecord]) -> str:
    if len(runs) <= NAMED_RUNS:
        return ", ".join(run.label for run in runs)
    return f"{len(runs)} runs in {Path(*Path(_parent(runs)).parts[-2:])}"


def _parent(runs: Sequence[RunRecord]) -> str:
    """Return the closest directory that has all runs below it."""
    return os.path.commonpath([run.run.path.absolute().parent for run in runs])


def _step_chart(runs: Sequence[RunRecord]) -> dict[str, object]:
    """Return what a step of each run is made of, for one stacked chart: `bars` on the scale of the longest,
    and the parts of the legend."""
    bars = [(at, run.label, parts) for at, run in enumerate(runs) if (parts := step_parts(run))]
    longest = max((sum(part.seconds for part in parts) for _, _, parts in bars), default=1.0)
    names = list(dict.fromkeys(part.name for _, _, parts in bars for part in parts))
    return {"bars": bars, "longest_seconds": longest, "part_names": names}


def _resolved(run: RunRecord) -> Table:
    return Table(
        ["key", "value", "why"],
        [[key, value, mask_text(run.reasons.get(key, ""))] for key, value in run.recipe.items()],
    )


def _uplot(name: str) -> str:
    return asset(f"../uplot/{name}")


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2")


def _inert(text: str) -> str:
    """Return JSON that cannot end its script element: every `<`, `>` and `&` as an escape of JSON."""
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


ADDRESS = "127.0.0.1"
HOST_NAMES = ("127.0.0.1", "localhost")
"""Names under which a browser may reach the page, at any port: `ssh -L` forwards another one. A page of
another site whose name was made to resolve to this machine (DNS rebinding) sends its own name."""
RENEWED_SECONDS = 1.0
"""Age from which a page is read again."""
WATCHED_SECONDS = 2.0
RENEWED_SHARE = 4
"""A page that took long to read is kept for this many times as long."""
REQUEST_SECONDS = 10.0
"""For a connection to send its request. Then it is closed, also if bytes arrive one by one."""
CONNECTIONS = 32
"""At once. Another one is closed at once."""
MAX_PORT = 65_535


class LivePage(ThreadingTCPServer):
    """Serves one page, at an address that contains a secret: other users of the machine can reach its ports
    too.

    `render` returns the document; it is called by one thread at a time, and not more often than it takes.
    `watch` is called every few seconds by the thread of `run`.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = CONNECTIONS

    def __init__(
        self,
        render: Callable[[], str],
        *,
        port: int = 0,
        renewed_seconds: float = RENEWED_SECONDS,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        """Listen at `port`, or at a free one. Raises: usage error `port-not-free`."""
        self.path = f"/{secrets.token_urlsafe(16)}/"
        self._render, self._renewed_seconds = render, renewed_seconds
        self._watch, self._watch_at = watch, 0.0
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        self._page, self._tag, self._renew_at = b"", "", 0.0
        self._failure: FsdpTuneError | OSError | None = None
        self.bug: Exception | None = None
        """What no page may raise; it has ended the server."""
        try:
            super().__init__((ADDRESS, port), _PageAnswer)
        except (OSError, OverflowError) as error:
            why = (
                f"it is not one of 1 to {MAX_PORT:,}"
                if isinstance(error, OverflowError)
                else str(error.strerror).lower()
            )
            hint = "leave out `--port` to get a free one"
            raise usage_error(
                "port-not-free", f"the page cannot be served at port {port}: {why}", hint=hint
            ) from error

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}{self.path}"

    def run(self) -> None:
        """Answer requests until this thread is interrupted. Raises: what `render` raised, if it is a bug."""
        with self:
            self.serve_forever(poll_interval=0.2)
        if self.bug is not None:
            raise self.bug

    def verify_request(self, request: object, client_address: object) -> bool:  # noqa: ARG002  the signature of the base class
        """Return whether there is room for another connection."""
        return self._free.acquire(blocking=False)

    def process_request(self, request: Any, client_address: object) -> None:
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread, whose end would make room
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def service_actions(self) -> None:
        """Watch now and then, between requests."""
        if time.monotonic() >= self._watch_at:
            self._watch()
            self._watch_at = time.monotonic() + WATCHED_SECONDS

    def current(self) -> tuple[bytes, str]:
        """Return the page and its ETag. Raises: FsdpTuneError or OSError if the runs cannot be read now."""
        with self._lock:
            began = time.monotonic()
            if began >= self._renew_at:
                try:
                    self._page = self._render().encode()
                    self._failure = None
                except (FsdpTuneError, OSError) as error:
                    self._failure = error
                self._tag = f'"{hashlib.sha256(self._page).hexdigest()[:32]}"'
                ended = time.monotonic()
                self._renew_at = ended + max(self._renewed_seconds, RENEWED_SHARE * (ended - began))
            if self._failure is not None:
                raise self._failure
            return self._page, self._tag

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore browsers that went away."""

    def fail(self, error: Exception) -> None:
        """End the server, from the thread of a request."""
        self.bug = error
        self.shutdown()


class _PageAnswer(BaseHTTPRequestHandler):
    """Answers GET of the page. Any other method gets 501, from the base class."""

    timeout = REQUEST_SECONDS

    def handle(self) -> None:
        self._limit = threading.Timer(REQUEST_SECONDS, self._give_up)
        self._limit.daemon = True
        self._limit.start()
        try:
            super().handle()
        finally:
            self._limit.cancel()

    def _give_up(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        self._limit.cancel()  # the request is there; a slow line may take longer for the page
        page = cast(LivePage, self.server)
        host = self.headers.get("Host", "").rpartition(":")
        if (host[0] or host[2]).lower() not in HOST_NAMES:
            self._send(HTTPStatus.MISDIRECTED_REQUEST, b"this page is served to this machine only")
            return
        if not secrets.compare_digest(self.path.encode(), page.path.encode()):
            self._send(HTTPStatus.NOT_FOUND, b"not found")
            return
        try:
            text, tag = page.current()
        except (FsdpTuneError, OSError) as error:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, f"the runs cannot be read: {error}".encode())
        except Exception as error:  # noqa: BLE001  a bug: the command ends with it, as if it had happened in its own thread
            page.fail(error)
        else:
            is_known = self.headers.get("If-None-Match") == tag
            self._send(
                HTTPStatus.NOT_MODIFIED if is_known else HTTPStatus.OK,
                b"" if is_known else text,
                kind="text/html",
                tag=tag,
            )

    def _send(self, status: HTTPStatus, body: bytes, *, kind: str = "text/plain", tag: str = "") -> None:
        self.send_response(status)
        fields = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Cache-Control": "no-store",
            "Content-Security-Policy": "frame-ancestors 'none'",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in (fields | ({"ETag": tag} if tag else {})).items():
            self.send_header(name, value)
        if status is not HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def forwarding_command(port: int) -> str:
    """Return what to type at another machine to reach a port of this one."""
    return f"ssh -L {port}:{ADDRESS}:{port} {socket.gethostname()}"
