from __future__ import annotations

import json
import time

import pytest

from fsdp_tune.core.errors import Notice, Problem, Where
from fsdp_tune.core.units import (
    format_age,
    format_bytes,
    format_clock,
    format_figure,
    format_seconds,
    format_short,
    parse_bytes,
    parse_seconds,
    sparkline,
    without_long_words,
)


def test_sparkline_draws_least_to_greatest() -> None:
    assert sparkline([4.0, 2.0, 1.0, 0.5]) == "█▄▂▁"
    assert sparkline([1.0, float("nan"), 1.0]) == "▁×▁"
    assert sparkline([]) == ""


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (format_age(3 * 86_400 + 5), "3 days"),
        (format_age(86_399), "23 hours"),
        (format_age(3_600), "1 hour"),
        (format_age(119), "1 minute"),
        (format_age(-2), "0 seconds"),
        (format_age(1.9), "1 second"),
        (format_bytes(3 << 30), "3.00 GiB"),
        (format_bytes(1536), "1.50 KiB"),
        (format_bytes(1023), "1023 B"),
        (format_short(2e-5), "2e-5"),
        (format_short(0.0001), "1e-4"),
        (format_short(0.00123456), "0.0012346"),
        (format_short(-1.5e6), "-1.5e6"),
        (format_short(0.0), "0"),
        (format_short(12345.678), "12346"),
        (format_short(123_456.0), "1.2346e5"),
        (format_short(99_999.9), "1e5"),
        (format_seconds(3723.4), "1h02m03s"),
        (format_seconds(61), "1m01s"),
        (format_seconds(2.25), "2.2s"),
        (format_figure(0.012345), "0.0123"),
        (format_figure(1234.6), "1,235"),
    ],
)
def test_ages_sizes_durations_and_figures_are_rounded_as_documented(text: str, wanted: str) -> None:
    assert text == wanted


def test_clock_names_the_day_within_a_week_and_else_the_date() -> None:
    noon = time.mktime((2026, 11, 29, 12, 0, 0, 0, 0, -1))
    day = 86_400
    assert [format_clock(noon + after, noon) for after in (60, 2 * day, 6 * day, -day)] == [
        "12:01",
        "Tue 12:00",
        "2026-12-05 12:00",
        "2026-11-28 12:00",
    ]


def test_word_of_thousands_of_characters_is_truncated_in_every_message() -> None:
    """A number of 200,000 digits was echoed whole: by `num_processes: 1_777…`, `--gpu 777…`, `explain 777…`,
    `import 777…`."""
    word = "7" * 200_000
    problem = Problem("p", f"`{word}` is text", Where(word), f"write `{word}`", (f"or {word}.",))
    notice = Notice("n", f"`{word}`", hint=word)
    texts = [
        json.dumps(problem.as_dict()),
        str(problem.where),
        notice.message,
        str(notice.hint),
        *problem.ways_out,
    ]
    assert max(map(len, texts)) < 600
    assert problem.message == f"`{word[:59]}…` is text"
    assert without_long_words("a " * 5000) == "a " * 5000, "a long message has words"
    path = "/data/" + "x" * 900
    assert Problem("p", path).message == path


@pytest.mark.parametrize("text", ["7" * 40_000 + "m", "7" * 400 + "GB", "5IB", "5 ib"])
def test_size_and_duration_of_any_length_are_refused_by_their_unit(text: str) -> None:
    for parse in (parse_bytes, parse_seconds):
        with pytest.raises(ValueError, match=r"is not a (size|duration): write"):
            parse(text)
