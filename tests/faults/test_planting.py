"""Edits find one node of the syntax tree, and fail if it is missing or ambiguous."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.planting import (
    DoesNotApply,
    Edit,
    always,
    catch,
    condition,
    drop,
    never,
    plant,
    replace,
    result,
    statement,
    value,
)

SOURCE = '''
LIMIT = 2

class Box:
    def put(self, thing, *, times=1):
        """Docstring."""
        if thing is None or len(self.things) > LIMIT:
            raise ValueError("too-many")
        try:
            disk.write(thing, sync=True)
        except OSError:
            return None
        return self.things
    def names(self):
        return [one.name for one in self.things if one.name]
'''


def planted(tmp_path: Path, where: str, *edits: Edit) -> str:
    (tmp_path / "box.py").write_text(SOURCE)
    return plant("a bug", where, *edits, rows="F001").planted(tmp_path)


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (replace("disk.write", "print"), "print(thing, sync=True)"),
        (value("sync", "not _"), "disk.write(thing, sync=not True)"),
        (value("times", "_ + 1"), "def put(self, thing, *, times=1 + 1):"),
        (never("LIMIT"), "if thing is None or False:"),
        (always("thing LIMIT"), "if True:"),
        (condition("LIMIT", "_ and times"), "if thing is None or (len(self.things) > LIMIT and times):"),
        (drop("disk.write"), "pass"),
        (drop("too-many"), "pass"),
        (statement("return things", "print(times); _"), "print(times)"),
        (catch("KeyError"), "except KeyError:"),
    ],
)
def test_edit_changes_the_named_piece(tmp_path: Path, edit: Edit, line: str) -> None:
    changed = [each.strip() for each in planted(tmp_path, "box:Box.put", edit).splitlines()]
    assert line in changed
    assert line not in SOURCE


def test_several_edits_and_a_result(tmp_path: Path) -> None:
    changed = planted(tmp_path, "box:Box.names", never("one.name"), result("_ or times"))
    assert "return [one.name for one in self.things if False] or times" in changed
    assert "LIMIT = 3" in planted(tmp_path, "box", value("LIMIT", "_ + 1")).replace("2 + 1", "3")


@pytest.mark.parametrize(
    ("where", "edit", "message"),
    [
        ("box:Box.put", never("MOST"), "MOST: expected one match, found nowhere"),
        ("box:Box.put", replace("thing", "None"), "found line 7, line 10"),
        ("box:Box.put", result("None"), "found line 12, line 13"),
        ("box:Box.take", never("LIMIT"), "0 definitions of `take`"),
    ],
)
def test_edit_without_exactly_one_target_raises(tmp_path: Path, where: str, edit: Edit, message: str) -> None:
    with pytest.raises(DoesNotApply, match=message):
        planted(tmp_path, where, edit)
