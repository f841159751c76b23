"""The parity check can fail: each bug planted in the worker moves its numbers out of the tolerance."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from tests.parity import runs
from tests.parity.bench import Bench
from tests.parity.breaks import BREAKS, run_broken
from tests.parity.cases import Case
from tests.parity.compare import deviation
from tests.parity.test_matrix import DROPOUT
from tests.ranks import RanksFailed

SEEN_BY: dict[str, Case] = {
    "mean of each rank": Case(),
    "mean of each micro-batch": Case(accumulation=4),
    "mean of each micro-batch of a budget": Case(tokens=64),
    "recomputation forgets the random state": replace(DROPOUT, recomputation="full"),
    "packed examples see each other": Case(packed=True),
    "gradients summed in bf16": Case(),
    "loss computed in bf16": Case(),
    "replicas never meet": Case(ranks=4, strategy="HYBRID_SHARD"),
    "weight decay on norms": Case(),
    "no weight decay": Case(),
    "no clipping": Case(),
    "optimizer starts anew on resume": Case(resumed="same"),
    "schedule starts anew on resume": Case(resumed="same"),
    "evaluation repeats rows": Case(),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", BREAKS)
def test_planted_bug_is_detected(name: str, bench: Bench, record_property) -> None:
    case = SEEN_BY[name]
    true = runs.trajectory(bench.run(DROPOUT)) if case.architecture == DROPOUT.architecture else bench.reference(packed=case.packed)
    try:
        found = deviation(bench.fresh_run(case, functools.partial(run_broken, name=name)), true)
    except RanksFailed:
        raise  # the plant itself does not apply any more
    except AssertionError as error:  # the trajectory is not complete, or the worker's own checks have stopped the run
        text = str(error).strip()
        assert "Traceback" not in text or "FsdpTuneError" in text, text
        record_property("parity", {"section": "bugs planted by hand", "case": name, "seen as": text.splitlines()[-1]})
        return
    record_property("parity", found.row("bugs planted by hand", name))
    assert not found.is_within_fp32, found
