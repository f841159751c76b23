"""Ranks that share each row (`parallelism.sp_size`) follow the trajectory of one device."""

from __future__ import annotations

import pytest

from tests.parity.bench import Bench
from tests.parity.cases import Case
from tests.parity.compare import deviation

_IN_SLICES = (("loss", "chunked"),)
SHARED = [
    Case("llama-16", sequence=2, packed=True, recomputation="full", kernels=_IN_SLICES),
    Case("llama-16", ranks=4, sequence=2, accumulation=2),
]


@pytest.mark.ranks
@pytest.mark.parametrize("case", SHARED, ids=str)
def test_run_follows_the_reference(case: Case, bench: Bench, record_property) -> None:
    found = deviation(bench.run(case), bench.reference(case.architecture, packed=case.packed))
    record_property("parity", found.row("ranks that share rows", case))
    assert found.is_within_fp32, f"{found}; worst is {found.worst_name}"
