"""The table is the catalogue: every id once, every test that it names exists, every plant applies."""

from __future__ import annotations

import ast
import contextlib
import functools
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.checks import in_child
from tests.faults.planting import PACKAGE, DoesNotApply
from tests.faults.plants import PLANTS
from tests.faults.scoreboard import MISSING, WRONG, Board, Standing, page
from tests.faults.table import COSTS, PROMISES, REFUSED, ROWS, SURVIVED

ROOT = Path(__file__).resolve().parent.parent.parent


@functools.cache
def functions(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_fault_catalogue_is_complete_and_ordered() -> None:
    assert [row.id for row in ROWS] == [f"F{number:03d}" for number in range(1, 147)]


def test_rows_have_existing_tests_or_a_reason() -> None:
    for row in ROWS:
        assert row.cost in COSTS, row
        assert row.promise in PROMISES, row
        assert row.ends in (SURVIVED, REFUSED), row
        assert bool(row.tests) != bool(row.absent), row
    named = {tuple(test.split("::")) for row in ROWS for test in row.tests}
    assert [f"{file}::{name}" for file, name in sorted(named) if name not in functions(file)] == []


@functools.cache
def dumped(path: str) -> str:
    return ast.dump(ast.parse((PACKAGE / path).read_text(encoding="utf-8")))


@pytest.mark.source
def test_plants_apply_and_change_their_modules() -> None:
    """Where the code has moved on, the plant moves with it."""
    unapplied: dict[str, str] = {}
    for plant in PLANTS:
        try:
            if ast.dump(ast.parse(plant.planted())) == dumped(plant.path):
                unapplied[plant.name] = "changes nothing"
        except DoesNotApply as error:
            unapplied[plant.name] = str(error)
    assert unapplied == {}


def test_selected_tests_of_a_plant_cover_each_of_its_rows() -> None:
    for plant in (plant for plant in PLANTS if plant.by):
        named = {test.split("[")[0] for test in plant.by}
        rows = [row for row in ROWS if row.id in plant.rows]
        assert named <= {test for row in rows for test in row.tests}, plant.name
        assert all(named & set(row.tests) for row in rows), plant.name


def test_selected_tests_have_parameters_that_exist(tmp_path: Path) -> None:
    """Pytest runs nothing for a parameter that is gone, and the planted bug then counts as not seen."""
    selected = {test for plant in PLANTS for test in plant.by}
    files = sorted({test.split("::")[0] for test in selected})

    def collect() -> None:
        with open(tmp_path / "listed", "w", encoding="utf-8") as listed, contextlib.redirect_stdout(listed):
            assert (
                pytest.main(
                    ["-q", "--collect-only", "-n0", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *files]
                )
                == 0
            )

    # A fork of this process, in which most of the files are imported.
    with contextlib.chdir(ROOT):
        assert in_child(collect) == 0, (tmp_path / "listed").read_text()
    listed = (tmp_path / "listed").read_text(encoding="utf-8").splitlines()
    assert selected - {*listed, *(test.split("[")[0] for test in listed)} == set()


def test_every_promise_has_a_plant_and_every_plant_names_rows_with_tests() -> None:
    rows = {row.id: row for row in ROWS}
    assert {row for plant in PLANTS for row in plant.rows} <= {row.id for row in ROWS if row.tests}
    planted = {rows[row].promise for plant in PLANTS for row in plant.rows}
    assert planted == set(PROMISES)


def test_results_round_trip_and_rows_that_run_again_replace_theirs() -> None:
    standings = {
        row.id: Standing(row.ends, 3, (f"a bug of {row.id}", "another")) if row.tests else Standing(MISSING)
        for row in ROWS
    }
    board = Board(
        ["The whole catalogue: 60 minutes."], standings, Counter(kill_points_of_a_save=240, corruptions=1_100)
    )
    assert Board.of(board.results([])) == board
    board.run_again(
        Board(
            ["F041: 2 minutes."], {"F041": Standing(WRONG, 1)}, Counter(rank_kills_in_a_row=20, corruptions=7)
        )
    )
    again = Board.of(board.results([]))
    assert again.standings["F041"] == Standing(WRONG, 1)
    assert {id for id, one in again.standings.items() if one != standings[id]} <= {"F041"}
    assert again.counts == {"kill_points_of_a_save": 240, "corruptions": 1_100, "rank_kills_in_a_row": 20}
    assert again.what == ["The whole catalogue: 60 minutes.", "F041: 2 minutes."]


def test_page_counts_the_rows_and_has_the_chaos_tests() -> None:
    standings = {row.id: Standing(row.ends, 2) if row.tests else Standing(MISSING) for row in ROWS}
    standings["F041"] = Standing(WRONG, 1)
    text = page(
        Board(["All."], standings, Counter(saves=400)).results(
            [{"machines": 1, "summary": "Seed 1.", "hits": {}, "processes": {}}]
        )
    )
    assert f"| **all** | {sum(bool(row.tests) for row in ROWS)} of {len(ROWS)} |" in text
    assert "Among the cases: 400 saves." in text
    assert "F041" in text.partition("without a planted bug: ")[2].splitlines()[0]
    assert "**One machine.** Seed 1." in text
