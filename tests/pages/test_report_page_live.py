"""The page of `report --follow`: what is served to whom, and what a browser makes of it while the runs
write."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from fsdp_tune.core.errors import FsdpTuneError, usage_error
from fsdp_tune.pages import report_page as report_pages
from fsdp_tune.pages.report_page import LivePage, report_page
from fsdp_tune.pages.run_record import read_run
from fsdp_tune.run.directory import RunDir
from tests.pages.browser import CHROMIUM, browser
from tests.pages.written import training_line, written


@contextmanager
def serving(render: Callable[[], str], *, renewed_seconds: float = 0.0) -> Iterator[LivePage]:
    page = LivePage(render, renewed_seconds=renewed_seconds)
    thread = threading.Thread(target=page.run)
    thread.start()
    try:
        yield page
    finally:
        page.shutdown()
        thread.join(10)


def fetched(
    page: LivePage, path: str | None = None, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], str]:
    port = page.server_address[1]
    assert isinstance(port, int)
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request(
            method,
            page.path if path is None else path,
            headers={name.replace("_", "-"): value for name, value in headers.items()},
        )
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read().decode()


def test_page_is_served_at_its_secret_address_only() -> None:
    with serving(lambda: "<p>ok") as page:
        assert fetched(page)[::2] == (200, "<p>ok")
        for path in (
            "/",
            "/etc/passwd",
            f"{page.path}x",
            f"{page.path}../recipe.json",
            page.path.rstrip("/"),
            "/../../etc/passwd",
            "/%00",
        ):
            assert fetched(page, path)[::2] == (404, "not found")


def test_page_is_not_served_under_a_name_of_another_site() -> None:
    with serving(lambda: "<p>ok") as page:
        for host in ("localhost:8100", "127.0.0.1", "LOCALHOST"):
            assert fetched(page, Host=host)[0] == 200, host
        for host in ("evil.example:80", "", "localhost.evil.example"):
            assert fetched(page, Host=host)[0] == 421, host


def test_only_get_is_answered() -> None:
    with serving(lambda: "<p>ok") as page:
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
            assert fetched(page, method=method)[0] == 501, method


def test_page_that_is_known_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_pages, "RENEWED_SHARE", 0.0)  # a slow machine would not make the page again
    pages = iter(["one", "one", "two"])
    with serving(lambda: next(pages)) as page:
        _, headers, _ = fetched(page)
        assert fetched(page, If_None_Match=headers["ETag"])[::2] == (304, "")
        assert fetched(page, If_None_Match=headers["ETag"])[::2] == (200, "two")


def test_page_is_read_once_for_requests_at_the_same_time() -> None:
    reads: list[int] = []
    with serving(lambda: str(reads.append(1)), renewed_seconds=60) as page:
        assert {fetched(page)[2] for _ in range(5)} == {"None"}
    assert reads == [1]


def test_run_that_cannot_be_read_is_reported_until_it_can() -> None:
    answers: list[Exception | str] = [usage_error("not-a-run", "it is gone"), OSError(5, "I/O error"), "back"]

    def render() -> str:
        answer = answers.pop(0)
        if isinstance(answer, str):
            return answer
        raise answer

    with serving(render) as page:
        found = [fetched(page)[::2] for _ in range(3)]
    assert [status for status, _ in found] == [503, 503, 200]
    assert "it is gone" in found[0][1]
    assert "I/O error" in found[1][1]


def test_bug_ends_the_command() -> None:
    page = LivePage(lambda: str(1 // 0))

    def request() -> None:
        with pytest.raises(http.client.RemoteDisconnected):
            fetched(page)

    requested = threading.Thread(target=request)
    requested.start()
    with pytest.raises(ZeroDivisionError):
        page.run()
    requested.join(10)


def connected(page: LivePage) -> socket.socket:
    return socket.create_connection(page.server_address, timeout=10)  # type: ignore[arg-type]


def test_silent_connections_take_no_more_than_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_pages, "REQUEST_SECONDS", 2.0)
    with serving(lambda: "the page") as page, ExitStack() as silent:
        for _ in range(report_pages.CONNECTIONS + 10):
            silent.enter_context(connected(page))
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            fetched(page)
        time.sleep(2.5)
        assert fetched(page)[2] == "the page"


def test_request_that_arrives_byte_by_byte_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_pages, "REQUEST_SECONDS", 0.5)
    with serving(lambda: "the page") as page, connected(page) as slow:

        def drip() -> None:
            while time.monotonic() - began < 10:
                slow.sendall(b"G")
                time.sleep(0.1)

        began = time.monotonic()
        with pytest.raises(ConnectionError):
            drip()
        assert time.monotonic() - began < 5


def test_port_in_use_and_port_out_of_range_are_usage_errors() -> None:
    with LivePage(lambda: "") as page:
        port = page.server_address[1]
        assert isinstance(port, int)
        for taken in (port, 70_000):
            with pytest.raises(FsdpTuneError, match=f"port {taken}") as caught:
                LivePage(lambda: "", port=taken)
            assert caught.value.problems[0].code == "port-not-free"


class Growing:
    """A run that trains on from one reading of the page to the next, and evaluates from the third on."""

    def __init__(self, folder: Path) -> None:
        self.run = written(folder, [training_line(1), training_line(2)])
        self.readings = 0

    def __call__(self) -> str:
        self.readings += 1
        if self.readings in (2, 3):
            step = 10 * self.readings
            lines = [training_line(step), *([{"step": step, "eval_loss": 2.5}] if self.readings == 3 else [])]
            with open(self.run.metrics_jsonl, "a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
        return report_page([read_run(self.run, "one")], "2026-11-26 14:00", is_live=True)


def test_only_a_live_page_may_connect(tmp_path: Path) -> None:
    run = written(tmp_path / "one", [training_line(1)])
    assert "connect-src &#39;self&#39;" in page_of(run, is_live=True)
    assert "connect-src" not in page_of(run, is_live=False)
    assert "data-live>" in page_of(run, is_live=True)


def page_of(run: RunDir, *, is_live: bool) -> str:
    return report_page([read_run(run, "one")], "2026-11-26 14:00", is_live=is_live).partition("<body")[0]


BROWSER = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH"
)


@pytest.mark.slow
@BROWSER
def test_browser_takes_over_what_a_run_writes_without_a_reload(tmp_path: Path) -> None:
    """A reload would end the variable of the page, close the table, and show all steps."""
    growing = Growing(tmp_path / "one")
    with serving(growing) as page, browser(tmp_path) as window:
        window.open(page.url)
        window.wait_for("document.documentElement.dataset.drawn === '7'")
        window.value(
            "window.sameDocument = 'yes'; document.querySelector('figure[data-key=Loss] details').open = true"
        )
        window.wait_for("document.querySelector('main').textContent.includes('Evaluation loss')")
        window.wait_for("document.querySelectorAll('canvas').length === 8")
        assert window.value("window.sameDocument") == "yes"
        assert window.value(
            "[...document.querySelectorAll('figure')].map((each) => each.dataset.key).slice(0, 3)"
        ) == [
            "Loss",
            "Evaluation loss",
            "Learning rate",
        ]
        steps = (
            "[...document.querySelectorAll('figure[data-key=Loss] .numbers tbody th')].map((each) => "
            "each.textContent)"
        )
        assert window.value(steps) == ["1", "2", "20", "30"]
        assert "steps30" in window.value("document.querySelector('#runs').textContent")
        assert "to 0.167 at step 30" in window.value(
            "document.querySelector('figure[data-key=Loss] .plot').ariaLabel"
        )
        assert window.value("document.querySelector('#live').textContent") == "Follows the runs."
        assert window.problems == []


@pytest.mark.slow
@BROWSER
def test_enlarged_part_stays_enlarged_and_whole_curves_grow(tmp_path: Path) -> None:
    growing = Growing(tmp_path / "one")
    with serving(growing) as page, browser(tmp_path) as window:
        window.open(page.url.replace("127.0.0.1", "localhost"))
        window.wait_for("document.documentElement.dataset.drawn === '7'")
        window.value("document.querySelector('figure[data-key=\"Waiting and updating\"] .field').click()")
        over = "figure[data-key=Loss] .u-over"
        for kind, share in (
            ("mouseMoved", 0.01),
            ("mousePressed", 0.01),
            ("mouseMoved", 0.6),
            ("mouseReleased", 0.6),
        ):
            window.mouse(kind, over, share)
        window.wait_for("document.documentElement.dataset.renewed === '2'")
        window.mouse("mouseMoved", over, 0.99)
        step = "document.querySelector('figure[data-key=Loss] .readout td')?.textContent"
        window.wait_for(f"{step} === 'step 2'")  # the right edge is at step 1.6
        assert window.value("document.querySelectorAll('.field[aria-pressed=false]').length") == 1
        window.value("document.getElementById('reset').click()")
        for share in (0.9, 0.98):
            time.sleep(0.5)  # the plot moves its cursor once a frame
            window.mouse("mouseMoved", over, share)
        window.wait_for(f"{step} === 'step 30'")
        assert window.problems == []


@pytest.mark.slow
@BROWSER
def test_ranking_that_the_reader_sorts_stays_sorted_by_the_values_and_columns_of_each_version(
    tmp_path: Path,
) -> None:
    """The page itself is sorted by loss, and by evaluation loss once there is one, in a column to the
    left."""
    losses = {"a": [3.0, 3.0], "b": [1.0, 9.0], "c": [2.0, 0.5]}
    runs = {name: written(tmp_path / name, [training_line(10, first)]) for name, (first, _) in losses.items()}
    has_grown = threading.Event()

    def render() -> str:
        if has_grown.is_set():
            for name, (first, second) in losses.items():
                lines = [
                    training_line(10, first),
                    training_line(20, second),
                    {"step": 20, "eval_loss": second + 1, "time": 20.0},
                ]
                runs[name].metrics_jsonl.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return report_page(
            [read_run(run, name) for name, run in runs.items()], "2026-11-26 14:00", is_live=True
        )

    order = "[...document.querySelectorAll('#ranking tbody th')].map((each) => each.textContent).join('')"
    sorted_by = (
        "[...document.querySelectorAll('#ranking [aria-sort]')].map((each) => each.textContent + ' ' + "
        "each.ariaSort)"
    )
    headings = "[...document.querySelectorAll('#ranking thead th')].map((each) => each.textContent)"
    with serving(render) as page, browser(tmp_path) as window:
        window.open(page.url)
        window.wait_for("document.documentElement.dataset.renewed === '1'")
        assert window.value(order) == "bca"
        window.value(
            "[...document.querySelectorAll('#ranking thead button')].find((each) => each.textContent "
            "=== 'loss').click()"
        )
        assert (window.value(order), window.value(sorted_by)) == ("acb", ["loss descending"])
        before = window.value(headings)
        has_grown.set()
        window.wait_for(f"{order} === 'bac'")
        assert window.value(sorted_by) == ["loss descending"]
        assert {*window.value(headings)} > {*before}
        assert window.problems == []


@pytest.mark.slow
@BROWSER
def test_browser_says_why_the_page_is_not_current(tmp_path: Path) -> None:
    growing = Growing(tmp_path / "one")
    moved = threading.Event()

    def render() -> str:
        if moved.is_set():
            raise usage_error("not-a-run", "the run <b>moved</b>")
        return growing()

    with browser(tmp_path) as window:
        said = "document.querySelector('#live').textContent === "
        with serving(render) as page:
            window.open(page.url)
            window.wait_for("document.documentElement.dataset.renewed === '1'")
            moved.set()
            window.wait_for(
                "document.querySelector('#live').textContent.includes('cannot be read: the run <b>moved</b>')"
            )
            moved.clear()
            window.wait_for(f"{said}'Follows the runs.'")
        window.wait_for(f"{said}'Not current: fsdp-tune report --follow has ended.'")
        assert window.value("document.querySelectorAll('canvas').length") >= 7
