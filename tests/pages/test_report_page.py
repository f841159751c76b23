from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.errors import ExitCode, ExitReason, Problem
from fsdp_tune.pages.report_page import MAX_BYTES, report_page
from fsdp_tune.pages.run_record import read_run
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.rank_files import Verdict
from fsdp_tune.run.records import read_object
from tests.pages.browser import CHROMIUM, OPTIONS
from tests.pages.written import training_line, written

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class Elements(HTMLParser):
    """Collects (tag, attributes) of every element, and the text of every script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = self._in_script and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def page_of(*runs: RunDir) -> str:
    return report_page([read_run(run, run.name) for run in runs], "2026-11-26 14:00")


def hostile_run(folder: Path) -> RunDir:
    lines = [
        training_line(1, **{f"source_{HOSTILE}_loss": 1.0, "source_b_loss": 2.0}),
        training_line(2, **{f"source_{HOSTILE}_loss": 1.0, "source_b_loss": 2.0}),
        {"event": "loss_spike", "step": 2, "time": 1.0, "message": HOSTILE, "rows": [HOSTILE]},
        {"event": HOSTILE, "step": 2, HOSTILE: HOSTILE},
        {"event": "samples", "step": 2, "seconds": 1.0, "samples": [{"prompt": HOSTILE, "text": HOSTILE}]},
    ]
    run = written(folder, lines, text=f"# {HOSTILE}\n", torch=HOSTILE)
    data = read_object(run.data_json)
    data["report"]["inputs"][0]["label"] = HOSTILE
    run.data_json.write_text(json.dumps(data))
    run.readback_json.write_text(json.dumps({"ranks": [], "differences": [HOSTILE], "warnings": [HOSTILE]}))
    return run


def test_text_of_runs_stays_text(tmp_path: Path) -> None:
    page = page_of(hostile_run(tmp_path / "one"), written(tmp_path / "two", [training_line(1)]))
    elements = Elements(page)
    assert elements.all("img") == []
    assert len(elements.scripts) == 3  # the data, uPlot, and the drawing
    assert any(HOSTILE in chart["title"] for chart in json.loads(elements.scripts[0]))
    assert page.count("&lt;img") >= 10


def test_only_the_two_scripts_of_the_page_may_run(tmp_path: Path) -> None:
    elements = Elements(page_of(written(tmp_path / "one", [training_line(1)])))
    (policy,) = [
        str(each["content"])
        for each in elements.all("meta")
        if each.get("http-equiv") == "Content-Security-Policy"
    ]
    digests = {
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in elements.scripts[1:]
    }
    assert policy.startswith("default-src 'none'")
    assert set(policy.partition("script-src ")[2].split()) == digests


def test_page_needs_no_other_file(tmp_path: Path) -> None:
    elements = Elements(page_of(written(tmp_path / "one", [training_line(1)])))
    assert [attributes for _, attributes in elements.found if "src" in attributes] == []
    assert elements.all("link") == []
    assert all(str(link["href"]).startswith("#") for link in elements.all("a"))


def test_links_of_the_page_resolve(tmp_path: Path) -> None:
    lines = [
        training_line(1, source_a_loss=1.0),
        {"event": "samples", "step": 1, "seconds": 1.0, "samples": [{"prompt": "a", "text": "b"}]},
        {"event": "stopping", "step": 1, "reason": "SIGTERM"},
    ]
    elements = Elements(page_of(written(tmp_path / "one", lines)))
    names = {f"#{attributes['id']}" for _, attributes in elements.found if attributes.get("id")}
    links = {str(link["href"]) for link in elements.all("a")}
    assert {"#learning", "#data-by-source", "#samples", "#events"} <= links <= names


def test_every_chart_has_words_and_a_table(tmp_path: Path) -> None:
    page = page_of(written(tmp_path / "one", [training_line(1), training_line(2)]))
    elements = Elements(page)
    plots = [each for each in elements.all("div") if each.get("class") == "plot"]
    assert len(plots) == len(json.loads(elements.scripts[0])) == page.count('<details class="numbers">') == 7
    assert all(each["role"] == "img" and "at step 1 to" in str(each["aria-label"]) for each in plots)


def test_not_finite_values_are_null_in_the_data(tmp_path: Path) -> None:
    run = written(tmp_path / "one", [training_line(1), training_line(2, "nan"), training_line(3)])
    with open(run.metrics_jsonl, "a") as file:
        file.write('{"step": 4, "loss": NaN}\n')
    elements = Elements(page_of(run))
    data = json.loads(elements.scripts[0], parse_constant=pytest.fail)
    assert data[0]["series"][0]["y"] == [5.0, None, 1.66667, None]


def test_run_without_metrics_has_a_page(tmp_path: Path) -> None:
    run = written(tmp_path / "one")
    run.metrics_jsonl.unlink()
    page = page_of(run)
    assert "No training line yet: one." in page
    assert "<figure" not in page
    assert "name: written" in page


def test_title_of_many_runs_is_their_directory(tmp_path: Path) -> None:
    runs = [written(tmp_path / "sweep" / name) for name in "abcde"]
    assert "<h1>a, b</h1>" in page_of(*runs[:2])
    page = page_of(*runs)
    assert f"<h1>5 runs in {tmp_path.name}/sweep</h1>" in page
    assert f"in <code>{tmp_path / 'sweep'}</code>." in page


def test_single_run_has_its_figures_and_the_problem_that_ended_it(tmp_path: Path) -> None:
    run = written(tmp_path / "one", [training_line(10)])
    assert "ended with" not in page_of(run)
    problem = Problem("device-out-of-memory", "rank 5 ran out of GPU memory")
    Verdict(ExitCode.OUT_OF_MEMORY, ExitReason.OUT_OF_MEMORY, 10, problem).write(run.outcome_json)
    page = page_of(run)
    assert re.findall(r"<dt>(.*?)</dt><dd[^>]*>(.*?)</dd>", page)[:2] == [
        ("state", "out of memory"),
        ("ended with", "rank 5 ran out of GPU memory"),
    ]


def test_marks_are_listed_once_a_page(tmp_path: Path) -> None:
    spike = {"event": "loss_spike", "step": 10, "message": "high"}
    page = page_of(written(tmp_path / "one", [training_line(10), spike, {"step": 10, "eval_loss": 2.0}]))
    assert page.count("Dotted vertical lines: loss spike at step 10") == 1


def test_differences_are_of_recipes_and_environments(tmp_path: Path) -> None:
    runs = [
        written(tmp_path / "one", learning_rate=1e-4),
        written(tmp_path / "two", learning_rate=2e-4, torch="2.14"),
    ]
    text = re.sub(r"\s+", " ", page_of(*runs))
    assert '<tr><th scope="row">training.learning_rate</th><td>0.0001</td><td>0.0002</td></tr>' in text
    assert '<tr><th scope="row">torch</th><td>2.13</td><td>2.14</td></tr>' in text
    assert "The recipes are the same" in page_of(runs[0], written(tmp_path / "three", learning_rate=1e-4))


@pytest.mark.parametrize("number", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_page_of_long_runs_is_below_a_megabyte(tmp_path: Path, number: int) -> None:
    """Curves without regularity, long samples of text that escaping lengthens, thousands of events."""
    fields: dict[str, Any] = {f"source_{name}_loss": 1.2345678 for name in range(20)}
    lines: list[dict[str, Any]] = [
        training_line(step, 1 + (step * 7919 % 1009) / 997, **fields) for step in range(1, 2000)
    ]
    for step in range(100, 2000, 100):
        samples = [{"prompt": f"{HOSTILE} {row}", "text": "<&>" * 2000} for row in range(20)]
        lines.append({"event": "samples", "step": step, "seconds": 1.0, "samples": samples})
    lines += [{"event": "loss_spike", "step": step, "message": "<" * 500} for step in range(1000)]
    runs = [written(tmp_path / str(index), lines, text="<" * 100_000) for index in range(number)]
    page = page_of(*runs)
    assert len(page.encode()) < MAX_BYTES
    assert "Curves have at most" in page
    assert "more are in <code>metrics.jsonl</code>" in page


def test_licence_of_the_chart_library_is_in_the_page(tmp_path: Path) -> None:
    page = page_of(written(tmp_path / "one"))
    assert "Copyright (c) 2022 Leon Sorokin" in page
    assert 'THE SOFTWARE IS PROVIDED "AS IS"' in page


def drawn(page: str, folder: Path, width: int) -> str:
    """The document after its scripts have run in a window of that width. Fails if the browser reports an
    error."""
    file = folder / "page.html"
    file.write_text(page)
    options = [*OPTIONS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900"]
    command = [
        str(CHROMIUM),
        *options,
        "--enable-logging=stderr",
        "--virtual-time-budget=10000",
        "--dump-dom",
        file.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH")
@pytest.mark.parametrize("width", [390, 1280])
def test_browser_draws_every_chart_without_errors(tmp_path: Path, width: int) -> None:
    """The script counts the charts whose drawing has ended; the data of others in the page run nothing."""
    page = page_of(
        hostile_run(tmp_path / "one"),
        written(tmp_path / "two", [training_line(step) for step in range(1, 200)]),
    )
    found = drawn(page, tmp_path, width)
    assert (
        re.findall(r'<html lang="en"[^>]* data-drawn="(\d+)"', found)
        == [str(page.count('<figure class="chart"'))]
        == ["11"]
    )
    assert found.count("<canvas") == 11


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH")
def test_numbers_below_a_chart_are_a_table_of_all_runs(tmp_path: Path) -> None:
    runs = (
        written(tmp_path / "one", [training_line(1), training_line(1500, "nan")]),
        written(tmp_path / "two", [training_line(2)]),
    )
    page = page_of(*runs).replace('<details class="numbers">', '<details class="numbers" open>', 1)
    cells = re.search(
        r"<summary>Numbers: Loss</summary>.*?<table>(.*?)</table>", drawn(page, tmp_path, 800), re.DOTALL
    )
    assert cells is not None
    rows = [re.findall(r"<t[hd][^>]*>([^<]*)<", row) for row in cells[1].split("<tr>")[1:]]
    assert rows == [["step", "one", "two"], ["1", "5", ""], ["2", "", "2.5"], ["1,500", "not finite", ""]]
