from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.merge.merge_options import hints_with_command


@pytest.mark.parametrize(
    ("hint", "complete"),
    [
        ("choose one with `--step N`", "choose one with `{} --step N`"),
        ("--output ANOTHER", "{} --output ANOTHER"),
        ("`--a` or `--b`", "`{} --a` or `{} --b`"),
        ("`ulimit -f`; `fsdp-tune train --resume auto`", "`ulimit -f`; `fsdp-tune train --resume auto`"),
    ],
)
def test_options_in_hints_of_a_merge_get_its_command(hint: str, complete: str) -> None:
    with pytest.raises(FsdpTuneError) as caught, hints_with_command(Path("a run")):
        raise FsdpTuneError(Problem("merge-x", "m", hint=hint, ways_out=(hint,)))
    [problem] = caught.value.problems
    expected = complete.replace("{}", "fsdp-tune merge-checkpoint 'a run'")
    assert (problem.hint, problem.ways_out) == (expected, (expected,))
