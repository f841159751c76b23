"""An inspection is kept and reused only while nothing that it depends on has changed."""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_tune.core import reads as module
from fsdp_tune.core.errors import Problem
from fsdp_tune.core.reads import Reads, digest_of
from fsdp_tune.model import kept_inspections
from fsdp_tune.model.kept_inspections import entry_path, inspected_part, keep, kept, without_session
from fsdp_tune.model.model_files import ModelInspection
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.model.recipes import model_facts, recipe_of

FOUND = ModelInspection(model_facts())


def test_inspection_without_problems_is_kept_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time_ns
    # the files of this test are old enough
    monkeypatch.setattr(module.time, "time_ns", lambda: now() + 10**10)
    entry, config = tmp_path / "entry", tmp_path / "base" / "config.json"
    config.parent.mkdir()
    config.write_text("{}")
    recipe = recipe_of({"name_or_path": str(config.parent)})
    foreign = recipe.model_copy(update={"model": recipe.model.model_copy(update={"trust_remote_code": True})})
    with Reads() as reads:
        pass
    for refused, found in (
        (recipe, replace(FOUND, problems=(Problem("x", "y"),))),
        (recipe, ModelInspection(None)),
        (foreign, FOUND),
    ):
        keep(entry, refused, found, reads)
        assert not entry.exists()
    keep(entry, recipe, FOUND, reads)
    assert kept(entry) == FOUND
    before = config.stat()
    config.write_text("[]")
    os.utime(config, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert kept(entry) is None
    entry.write_bytes(entry.read_bytes()[:-9])
    assert kept(entry) is None
    assert kept(tmp_path / "missing") is None


def test_name_of_an_entry_depends_on_all_that_the_process_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (["python"], "{}", {"HF_HOME": "/a"})
    first = entry_path(*given)
    assert first is not None
    assert first == entry_path(*given)
    others = [
        (["python3"], "{}", given[2]),
        (["python"], "[]", given[2]),
        (["python"], "{}", {"HF_HOME": "/b"}),
    ]
    assert len({first, *(entry_path(*other) for other in others)}) == 4
    with monkeypatch.context() as patch:
        patch.setattr("sys.path", [*sys.path, str(tmp_path)])
        assert entry_path(*given) != first, "a file `.pth` was changed"
    monkeypatch.chdir(tmp_path)
    assert entry_path(*given) != first, "paths of a recipe are relative"
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert entry_path(*given) is None
    job = {
        "SLURM_JOB_ID": "7",
        "XDG_SESSION_ID": "3",
        "KRB5CCNAME": "FILE:/tmp/krb5cc_1_x",
        "DBUS_SESSION_BUS_ADDRESS": "unix:path=/run",
    }
    assert (
        without_session({"TERM": "xterm", "SSH_TTY": "/dev/pts/1", "_": "x", "HF_HOME": "/a"} | job)
        == given[2]
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert entry_path(*given) is None


@pytest.mark.parametrize(
    "damaged", [b'{"paths": [1], "states": ""}', b"[" * 100_000, b"[]", b'{"paths": ["/"]}']
)
def test_damaged_entry_is_a_missing_one(tmp_path: Path, damaged: bytes) -> None:
    entry = tmp_path / "entry"
    entry.write_bytes(zlib.compress(damaged))
    assert kept(entry) is None


def test_entry_is_not_decompressed_beyond_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = tmp_path / "entry"
    entry.write_bytes(
        zlib.compress(
            json.dumps({"paths": [], "states": digest_of([]), "inspection": FOUND.to_json()}).encode()
        )
    )
    assert kept(entry) == FOUND
    monkeypatch.setattr("fsdp_tune.model.kept_inspections._MOST_BYTES", 100)
    assert kept(entry) is None


def test_oldest_entries_are_removed_and_data_of_the_package_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdp_tune.model.kept_inspections._MOST_ENTRIES", 2)
    for number, name in enumerate(("older", "old")):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, ns=(number, number))
    with Reads(time.time_ns() + 10**11) as reads:
        pass
    keep(tmp_path / "entry", recipe_of({"name_or_path": "gpt2"}), FOUND, reads)
    assert {path.name for path in tmp_path.iterdir()} == {"old", "entry"}
    assert str(Path(kept_inspections.__file__).parents[1] / "recipe" / "training_fields.json") in reads.states
    recent = Reads(0)
    recent.include(str(tmp_path / "entry"))
    assert not recent.is_reusable, "it changed after the process was started"


def test_rows_and_names_are_not_given_to_the_inspection() -> None:
    recipe = recipe_of(
        data={
            "train": [{"path": "a"}, {"path": "b"}],
            "eval": [{"path": "c"}],
            "mixture": {"weight_by": "tokens"},
        }
    )
    part = inspected_part(recipe)
    assert Recipe.model_validate_json(part.model_dump_json(by_alias=True)) == part
    assert part == inspected_part(
        recipe_of(data={"train": [{"path": "d"}], "eval": [{"path": "e"}]}).model_copy(
            update={"name": "other"}
        )
    )
    assert part != inspected_part(recipe_of("gpt2"))
