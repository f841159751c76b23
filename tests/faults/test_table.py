"""The table is the catalogue: every id once, every test that it names exists, every plant applies."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.planting import PACKAGE, Plant
from tests.faults.plants import PLANTS
from tests.faults.scoreboard import MISSING, WRONG, Board, Standing, page
from tests.faults.table import COSTS, PROMISES, REFUSED, ROWS, SURVIVED, Row

ROOT = Path(__file__).resolve().parent.parent.parent


@functools.cache
def functions(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_fault_catalogue_is_complete_and_ordered() -> None:
    assert [row.id for row in ROWS] == [f"F{number:03d}" for number in range(1, 147)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_rows_have_existing_tests_or_a_reason(row: Row) -> None:
    assert row.cost in COSTS
    assert row.promise in PROMISES
    assert row.ends in (SURVIVED, REFUSED)
    assert bool(row.tests) != bool(row.absent)
    for test in row.tests:
        file, name = test.split("::")
        assert name in functions(file), f"{test} does not exist"


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_plant_applies_and_changes_its_module(plant: Plant) -> None:
    """Where the code has moved on, the plant moves with it."""
    planted = ast.parse(plant.planted())
    assert ast.dump(planted) != ast.dump(ast.parse((PACKAGE / plant.path).read_text(encoding="utf-8")))


@pytest.mark.parametrize("plant", [plant for plant in PLANTS if plant.by], ids=lambda plant: plant.name)
def test_selected_tests_of_a_plant_cover_each_of_its_rows(plant: Plant) -> None:
    named = {test.split("[")[0] for test in plant.by}
    rows = [row for row in ROWS if row.id in plant.rows]
    assert named <= {test for row in rows for test in row.tests}
    assert all(named & set(row.tests) for row in rows)


def test_selected_tests_have_parameters_that_exist() -> None:
    """Pytest runs nothing for a parameter that is gone, and the planted bug then counts as not seen."""
    selected = {test for plant in PLANTS for test in plant.by}
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-n0", *sorted({test.split("::")[0] for test in selected})]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert selected - {*listed, *(test.split("[")[0] for test in listed)} == set()


def test_every_promise_has_a_plant_and_every_plant_names_rows_with_tests() -> None:
    rows = {row.id: row for row in ROWS}
    assert {row for plant in PLANTS for row in plant.rows} <= {row.id for row in ROWS if row.tests}
    planted = {rows[row].promise for plant in PLANTS for row in plant.rows}
    assert planted == set(PROMISES)


def test_results_round_trip_and_rows_that_run_again_replace_theirs() -> None:
    standings = {row.id: Standing(row.ends, 3, (f"a bug of {row.id}", "another")) if row.tests else Standing(MISSING) for row in ROWS}
    board = Board(["The whole catalogue: 60 minutes."], standings, Counter(kill_points_of_a_save=240, corruptions=1_100))
    assert Board.of(board.results([])) == board
    board.run_again(Board(["F041: 2 minutes."], {"F041": Standing(WRONG, 1)}, Counter(rank_kills_in_a_row=20, corruptions=7)))
    again = Board.of(board.results([]))
    assert again.standings["F041"] == Standing(WRONG, 1)
    assert {id for id, one in again.standings.items() if one != standings[id]} <= {"F041"}
    assert again.counts == {"kill_points_of_a_save": 240, "corruptions": 1_100, "rank_kills_in_a_row": 20}
    assert again.what == ["The whole catalogue: 60 minutes.", "F041: 2 minutes."]


def test_page_counts_the_rows_and_has_the_chaos_tests() -> None:
    standings = {row.id: Standing(row.ends, 2) if row.tests else Standing(MISSING) for row in ROWS}
    standings["F041"] = Standing(WRONG, 1)
    text = page(
        Board(["All."], standings, Counter(saves=400)).results([{"machines": 1, "summary": "Seed 1.", "hits": {}, "processes": {}}])
    )
    assert f"| **all** | {sum(bool(row.tests) for row in ROWS)} of {len(ROWS)} |" in text
    assert "Among the cases: 400 saves." in text
    assert "F041" in text.partition("without a planted bug: ")[2].splitlines()[0]
    assert "**One machine.** Seed 1." in text
