"""What a browser draws of a report, read back: numbers, axes, marks, the legend and the ranking."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.pages.report_page import report_page
from fsdp_tune.pages.run_record import labels_of, read_run
from fsdp_tune.run.directory import RunDir
from tests.pages.browser import CHROMIUM, Browser, browser
from tests.pages.situations import SITUATIONS, one_run, sweep
from tests.pages.written import training_line, written

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH"),
]


LOW_CONTRAST = """(() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const isOpaque = (colour) => numbers(colour).length < 4 || numbers(colour)[3] > 0;
  const own = (each) => getComputedStyle(each).backgroundColor;
  const behind = (each) => isOpaque(own(each)) ? own(each) : behind(each.parentElement);
  const hasText = (each) => [...each.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.textContent.trim());
  const texts = [...document.querySelectorAll("header *, main *, footer *")].filter((each) => hasText(each) && each.offsetParent);
  return texts.filter((each) => {
    const [low, high] = [getComputedStyle(each).color, behind(each)].map((colour) => light(numbers(colour))).sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05) < 4.5;
  }).map((each) => each.outerHTML.slice(0, 100)) })()"""  # noqa: E501
"""Texts with less contrast than 4.5, the limit of WCAG 2.1 AA."""
NAMELESS = """[...document.querySelectorAll("a, button, select, summary, [tabindex], [role=img]")].filter((each) =>
  !(each.textContent.trim() || each.ariaLabel || each.title || each.labels?.length)).map((each) => each.outerHTML.slice(0, 100))"""  # noqa: E501
OUTSIDE = """[...document.querySelectorAll("header *, main *")].filter((each) =>
  each.offsetParent && each.getBoundingClientRect().right > innerWidth + 1 && !each.closest(".scroll, .runs, .u-wrap")
  ).map((each) => each.outerHTML.slice(0, 100))"""  # noqa: E501


@contextmanager
def drawn(
    folder: Path, runs: Sequence[RunDir], width: int = 1280, scheme: str = "light"
) -> Iterator[Browser]:
    """Open the report of the runs and wait until every chart is drawn."""
    file = folder / "page.html"
    records = [
        read_run(run, label) for run, label in zip(runs, labels_of([run.path for run in runs]), strict=True)
    ]
    file.write_text(report_page(records, "2026-11-28 10:00"))
    with browser(folder) as window:
        window.open(file.as_uri(), width=width, scheme=scheme)
        window.wait_for(
            "document.documentElement.dataset.drawn === "
            "String(document.querySelectorAll('figure.chart').length)"
        )
        yield window
        assert window.problems == []


def hover(window: Browser, chart: str, share: float) -> list[list[str]]:
    """Move the cursor over a chart and return the rows that it shows."""
    figure = f'figure[data-key="{chart}"]'
    window.mouse("mouseMoved", f"{figure} .u-over", share - 0.02)
    window.wait_for(f"!document.querySelector('{figure} .readout').hidden")
    before = window.value(f"document.querySelector('{figure} .readout').textContent")
    window.mouse("mouseMoved", f"{figure} .u-over", share)
    with suppress(AssertionError):  # the same step
        window.wait_for(
            f"document.querySelector('{figure} .readout').textContent !== {json.dumps(before)}", seconds=1
        )
    rows = (
        f"[...document.querySelectorAll('{figure} .readout tr')].map((row) => [...row.cells].map((cell) "
        "=> cell.textContent))"
    )
    return window.value(rows)


def of(window: Browser, chart: str, name: str) -> Any:
    """Return what a chart has drawn: `axis`, `axisRoom` or `marks`."""
    return json.loads(window.value(f"document.querySelector('figure[data-key=\"{chart}\"]').dataset.{name}"))


def click(window: Browser, selector: str) -> None:
    window.value(f"document.querySelector({json.dumps(selector)}).click()")


def test_number_beside_a_step_is_of_that_step_or_none(tmp_path: Path) -> None:
    """Steps 0 to 100: one run has NaN at 50, the other ends at 40."""
    one = written(
        tmp_path / "one",
        [training_line(step, "nan" if step == 50 else 1.0 + step) for step in range(10, 101, 10)],
    )
    other = written(tmp_path / "two", [training_line(step, 2.0 + step) for step in range(10, 41, 10)])
    with drawn(tmp_path, (one, other)) as window:
        found = {
            rows[0][0]: dict(rows[1:])
            for rows in (hover(window, "Loss", (step - 10) / 90) for step in (20, 50, 90))
        }
        assert found == {
            "step 20": {"one": "21", "two": "22"},
            "step 50": {"one": "not finite", "two": "–"},
            "step 90": {"one": "91", "two": "–"},
        }


def test_axis_has_complete_labels(tmp_path: Path) -> None:
    run = written(
        tmp_path / "one",
        [training_line(step, learning_rate=2e-5 * step / 100) for step in range(10, 101, 10)],
    )
    with drawn(tmp_path, [run]) as window:
        labels = [label for label in of(window, "Learning rate", "axis") if label]
        assert {"1e-5", "2e-5"} <= set(labels)
        width = (
            f"(() => {{ const c = document.createElement('canvas').getContext('2d'); c.font = '12px system-ui, sans-serif'; \
            return Math.max(...{json.dumps(labels)}.map((label) => c.measureText(label).width)) }})()"  # noqa: E501
        )
        assert of(window, "Learning rate", "axisRoom") >= window.value(width) + 10


def test_spike_does_not_flatten_the_axis_unless_all_values_are_wanted(tmp_path: Path) -> None:
    lines = [training_line(step, 500.0 if step == 60 else 2.0 + step % 7 / 10) for step in range(1, 101)]
    with drawn(tmp_path, [written(tmp_path / "one", lines)]) as window:
        assert max(float(label) for label in of(window, "Loss", "axis") if label) < 10
        switch = 'figure[data-key="Loss"] .every'
        assert window.value(
            f"[document.querySelector('{switch}').hidden, document.querySelector('{switch}').title]"
        ) == [
            False,
            "1 value is far from the others",
        ]
        click(window, switch)
        window.wait_for("document.querySelector('figure[data-key=\"Loss\"]').dataset.axis.includes('500')")
        assert (
            window.value("document.querySelector('figure[data-key=\"Learning rate\"] .every').hidden") is True
        )


def test_run_that_diverges_does_not_flatten_the_others_and_one_that_is_always_elsewhere_is_shown(
    tmp_path: Path,
) -> None:
    def run(name: str, loss: Callable[[int], float]) -> RunDir:
        return written(tmp_path / name, [training_line(step, loss(step)) for step in range(1, 101)])

    near = [run(name, lambda step: 2.5 - step / 100 + step % 3 / 50) for name in ("sft-a", "sft-b", "sft-c")]
    diverging = [
        run(name, lambda step: 2.5 - step / 100 if step < 70 else 1.0 * step) for name in ("sft-d", "sft-e")
    ]
    with drawn(tmp_path, [*near, *diverging]) as window:
        assert max(float(label) for label in of(window, "Loss", "axis") if label) < 5
        assert (
            window.value("document.querySelector('figure[data-key=\"Loss\"] .every').title")
            == "62 values are far from the others"
        )
    (tmp_path / "other").mkdir()
    with drawn(tmp_path / "other", [*near, run("sft-f", lambda step: 50 + step / 100)]) as window:
        assert max(float(label) for label in of(window, "Loss", "axis") if label) >= 50


def test_marks_have_names_and_the_colour_of_their_run(tmp_path: Path) -> None:
    started = {"event": "train_started", "step": 20, "total_steps": 40, "time": 1.0}
    spike = {"event": "loss_spike", "step": 30, "message": "high"}
    one = written(tmp_path / "one", [training_line(10), training_line(20), started, training_line(40)])
    other = written(tmp_path / "two", [training_line(10), spike, training_line(40)])
    with drawn(tmp_path, (one, other)) as window:
        colours = window.value(
            "[0, 1].map((n) => getComputedStyle(document.documentElement).getPropertyValue('--c' + n).trim())"
        )
        assert [
            (mark["step"], mark["name"], mark["label"], mark["colour"], mark["isNamed"])
            for mark in of(window, "Loss", "marks")
        ] == [
            (20, "resumed", "one", colours[0], True),
            (30, "loss spike", "two", colours[1], True),
        ]
        click(window, "#controls .show[data-run='0']")
        assert [mark["label"] for mark in of(window, "Loss", "marks")] == ["two"]


def test_legend_hides_and_solos_runs_on_the_page(tmp_path: Path) -> None:
    runs = [
        written(tmp_path / f"run-{name}", [training_line(step, 1.0 * at) for step in (10, 20, 30)])
        for at, name in enumerate("abc", 1)
    ]
    with drawn(tmp_path, runs) as window:
        click(window, "#controls .solo[data-run='1']")
        assert [row[0] for row in hover(window, "Loss", 0.5)[1:]] == ["b"]
        assert [row[0] for row in hover(window, "Throughput", 0.5)[1:]] == ["b"]
        click(window, "#all-runs")
        click(window, "#controls .show[data-run='2']")
        assert [row[0] for row in hover(window, "Loss", 0.5)[1:]] == ["b", "a"]
        pressed = (
            "[...document.querySelectorAll('#controls .show')].map((each) => "
            "each.getAttribute('aria-pressed'))"
        )
        assert window.value(pressed) == ["true", "true", "false"]


def test_smoothing_changes_curves_and_no_number(tmp_path: Path) -> None:
    run = written(tmp_path / "one", [training_line(step, 1.0 + 8 * (step % 2)) for step in range(1, 201)])
    with drawn(tmp_path, [run]) as window:
        rows = hover(window, "Loss", 0.5)
        picture = "document.querySelector('figure[data-key=Loss] canvas').toDataURL()"
        before = window.value(picture)
        window.value(
            "(() => { const own = document.getElementById('smoothing'); own.value = '0.1';"
            " own.dispatchEvent(new Event('change', { bubbles: true })) })()"
        )
        window.wait_for(f"{picture} !== {json.dumps(before)}")
        assert hover(window, "Loss", 0.5) == rows


def test_twenty_four_runs_are_told_apart(tmp_path: Path) -> None:
    runs = [
        written(tmp_path / f"seed-{at}", [training_line(10), training_line(20)], seed=at) for at in range(24)
    ]
    with drawn(tmp_path, runs) as window:
        styles = (
            "[...document.querySelectorAll('#controls .swatch')].map((each) => { const own = "
            "getComputedStyle(each); return own.borderTopColor + ' ' + own.borderTopStyle })"
        )
        assert len(set(window.value(styles))) == 24
        assert window.value("document.querySelectorAll('#controls .show').length") == 24


def test_heading_sorts_the_ranking_with_unknown_values_last(tmp_path: Path) -> None:
    losses = {"a": 3.0, "b": 1.0, "c": "nan", "d": 2.0}
    runs = [written(tmp_path / f"run-{name}", [training_line(10, loss)]) for name, loss in losses.items()]
    names = "[...document.querySelectorAll('#ranking tbody th')].map((each) => each.textContent).join('')"
    with drawn(tmp_path, runs) as window:
        assert window.value(names) == "bdac"
        heading = (
            "[...document.querySelectorAll('#ranking thead button')].find((each) => each.textContent === "
            "'loss').click()"
        )
        window.value(heading)
        assert window.value(names) == "adbc"
        click(window, "#ranking thead button")
        assert window.value(names) == "abcd"


@pytest.mark.parametrize(
    ("width", "scheme"), [(390, "light"), (390, "dark"), (1280, "light"), (1280, "dark")]
)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_situation_is_readable_in_every_window(
    tmp_path: Path, situation: str, width: int, scheme: str
) -> None:
    """Nothing is outside of the window, texts have contrast, controls have names. The picture is kept next to
    the page."""
    with drawn(tmp_path, SITUATIONS[situation](tmp_path / "runs"), width, scheme) as window:
        window.picture(tmp_path / f"{situation}-{width}-{scheme}.png")
        assert window.value("[innerWidth, document.documentElement.scrollWidth <= innerWidth]") == [
            width,
            True,
        ]
        assert [window.value(found) for found in (OUTSIDE, LOW_CONTRAST, NAMELESS)] == [[], [], []]
        assert (tmp_path / "page.html").stat().st_size < 1_000_000


def test_first_screen_of_one_run_has_its_curves(tmp_path: Path) -> None:
    with drawn(tmp_path, one_run(tmp_path / "runs")) as window:
        assert (
            window.value(
                "document.querySelector('figure[data-key=Loss] .plot').getBoundingClientRect().bottom"
            )
            < 900
        )


@pytest.mark.parametrize("count", [3, 12, 24])
def test_ranking_fits_in_the_window_and_on_a_phone_shows_what_it_is_sorted_by(
    tmp_path: Path, count: int
) -> None:
    runs = sweep(tmp_path / "runs", count)
    with drawn(tmp_path, runs) as window:
        assert window.value(
            "(({ scrollWidth, clientWidth }) => scrollWidth <= "
            "clientWidth)(document.querySelector('#ranking').parentElement)"
        )
    (tmp_path / "phone").mkdir()
    with drawn(tmp_path / "phone", runs, 390) as window:
        assert window.value(
            "document.querySelector('#ranking [aria-sort]').getBoundingClientRect().right <= innerWidth"
        )
        assert window.value("document.querySelector('#controls').offsetHeight") < 100


def test_link_leads_below_the_legend(tmp_path: Path) -> None:
    with drawn(tmp_path, sweep(tmp_path / "runs", 12)) as window:
        click(window, "nav a[href='#speed']")
        boxes = (
            "['#controls', '#speed h2'].map((each) => document.querySelector(each).getBoundingClientRect())"
        )
        edges = f"{boxes}.map(({{ top, bottom }}) => [top, bottom])"
        window.wait_for("scrollY > 0")
        (legend_top, legend_bottom), (heading_top, _) = window.value(edges)
        assert legend_top == 0 <= legend_bottom <= heading_top < 300


def test_legend_hides_the_bars_of_a_run(tmp_path: Path) -> None:
    with drawn(tmp_path, sweep(tmp_path / "runs", 3)) as window:
        rows = "[...document.querySelectorAll('.bar-row')].map((each) => each.firstChild)"
        shown = f"{rows}.filter((each) => each.offsetParent).map((each) => each.textContent)"
        assert window.value(shown) == ["lr1e-5", "lr2e-5", "lr5e-5"]
        click(window, "#controls .solo[data-run='1']")
        assert window.value(shown) == ["lr2e-5"]


def test_axis_of_a_constant_is_near_it(tmp_path: Path) -> None:
    with drawn(
        tmp_path,
        [written(tmp_path / "one", [training_line(step, peak_reserved_gib=66.9) for step in (10, 20)])],
    ) as window:
        labels = [float(label) for label in of(window, "GPU memory of rank 0, peak so far", "axis") if label]
        assert 60 < min(labels) < 66.9 < max(labels) < 74


def test_keyboard_sorts_the_ranking_and_hides_a_run(tmp_path: Path) -> None:
    runs = [
        written(tmp_path / f"run-{name}", [training_line(10, loss)])
        for name, loss in (("a", 2.0), ("b", 1.0))
    ]
    with drawn(tmp_path, runs) as window:
        focused = "document.activeElement.textContent"
        for _ in range(20):
            window.key("Tab")
            if window.value(focused) == "run":
                break
        window.key("Enter")
        assert (
            window.value(
                "[...document.querySelectorAll('#ranking tbody th')].map((each) => each.textContent).join('')"
            )
            == "ab"
        )
        assert window.value("getComputedStyle(document.activeElement).outlineStyle") != "none"
        for _ in range(20):
            window.key("Tab")
            if window.value("document.activeElement.matches('.show')"):
                break
        window.key("Enter")
        assert window.value("document.activeElement.getAttribute('aria-pressed')") == "false"
