"""The parity check can fail: each planted bug moves the numbers beyond the tolerance."""

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
    "loss averaged per rank": Case(),
    "loss averaged per micro-batch": Case(accumulation=4),
    "loss averaged per micro-batch of a token budget": Case(tokens=64),
    "recomputation without preserved RNG state": replace(DROPOUT, recomputation="full"),
    "packed examples not isolated": Case(packed=True),
    "gradients summed in bf16": Case(),
    "loss computed in bf16": Case(),
    "replicas not synchronised": Case(ranks=4, strategy="HYBRID_SHARD"),
    "weight decay on norms": Case(),
    "no weight decay": Case(),
    "no clipping": Case(),
    "optimizer state not restored on resume": Case(resumed="same"),
    "schedule not restored on resume": Case(resumed="same"),
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
        record_property("parity", {"section": "planted bugs", "case": name, "seen as": text.splitlines()[-1]})
        return
    record_property("parity", found.row("planted bugs", name))
    assert not found.is_within_fp32, found
