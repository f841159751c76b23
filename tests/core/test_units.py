from __future__ import annotations

import json

import pytest

from fsdp_tune.core.errors import Notice, Problem, Where
from fsdp_tune.core.units import parse_bytes, parse_seconds, sparkline, without_long_words


def test_sparkline_draws_least_to_greatest() -> None:
    assert sparkline([4.0, 2.0, 1.0, 0.5]) == "█▄▂▁"
    assert sparkline([1.0, float("nan"), 1.0]) == "▁×▁"
    assert sparkline([]) == ""


def test_word_of_thousands_of_characters_is_truncated_in_every_message() -> None:
    """A number of 200,000 digits was echoed whole: by `num_processes: 1_777…`, `--gpu 777…`, `explain 777…`, `import 777…`."""
    word = "7" * 200_000
    problem = Problem("p", f"`{word}` is text", Where(word), f"write `{word}`", (f"or {word}.",))
    notice = Notice("n", f"`{word}`", hint=word)
    texts = [json.dumps(problem.as_dict()), str(problem.where), notice.message, str(notice.hint), *problem.ways_out]
    assert max(map(len, texts)) < 600
    assert problem.message == f"`{word[:59]}…` is text"
    assert without_long_words("a " * 5000) == "a " * 5000, "a long message has words"
    path = "/data/" + "x" * 900
    assert Problem("p", path).message == path


@pytest.mark.parametrize("text", ["7" * 40_000 + "m", "7" * 400 + "GB"])
def test_size_and_duration_of_any_length_are_refused_by_their_unit(text: str) -> None:
    for parse in (parse_bytes, parse_seconds):
        with pytest.raises(ValueError, match=r"is not a (size|duration): write"):
            parse(text)
