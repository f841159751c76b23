"""Which tests `scripts/test --changed` chooses."""

from __future__ import annotations

from pathlib import Path

import grimp
import pytest

from tests import changed


@pytest.fixture(scope="module")
def graph(repository: Path) -> grimp.ImportGraph:
    return grimp.build_graph("fsdp_tune", "tests", cache_dir=str(repository / ".import_linter_cache"))


def test_module_brings_the_tests_of_its_plants_then_those_named_after_it_then_its_users(
    graph: grimp.ImportGraph,
) -> None:
    chosen = list(changed.chosen(["fsdp_tune/merge/copy/ties.py"], graph))

    reasons = [why for _, why in chosen]
    assert reasons == sorted(
        reasons,
        key=["finds a planted bug", "is named after it", "imports it", "imports what imports it"].index,
    )
    assert ("tests/merge/test_ties.py", "is named after it") in chosen
    assert any(test == "tests/merge/test_integrity.py" for test, _ in chosen)


def test_planted_bugs_of_a_module_bring_the_tests_that_find_them(graph: grimp.ImportGraph) -> None:
    chosen = [
        test
        for test, why in changed.chosen(["fsdp_tune/run/manifest.py"], graph)
        if why == "finds a planted bug"
    ]
    assert "tests/faults/test_damage.py::test_every_flipped_bit_is_detected" in chosen


def test_changed_helper_brings_the_tests_that_import_it(graph: grimp.ImportGraph) -> None:
    chosen = dict(changed.chosen(["tests/cluster/mirrors.py", "tests/core/test_units.py"], graph))
    assert chosen["tests/core/test_units.py"] == "changed"
    assert chosen["tests/cluster/test_remote_run.py"] == "uses a changed helper"


def test_costly_tests_are_left_out_and_reported() -> None:
    tests = [("tests/a.py::test_one", "x"), ("tests/b.py", "x"), ("tests/c.py", "x"), ("tests/d.py", "x")]
    taken, left = changed.fitting(
        tests, {"tests/a.py": 10.0, "tests/b.py": 60.0, "tests/c.py": 5.0, "tests/d.py": 900.0}, 70.0
    )
    assert list(taken) == ["tests/a.py::test_one", "tests/b.py", "tests/c.py"]
    assert left == ["tests/d.py"]
