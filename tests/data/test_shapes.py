"""Rows in the shapes of public data sets: each refusal has a hint that leads to prepared rows when it is
followed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.data.read.shapes import delimiter_hint, shape_hint
from tests.data.followed_hints import MOST_HINTS, follow, train_as_hinted
from tests.data.public_rows import CHATS, PUBLIC
from tests.data.support import CHATML, ByteEncoder, marked, prepared, rows_of, write_jsonl


def prepare_as_hinted(directory: Path, path: Path) -> tuple[list[str], list[str]]:
    """Return the rows, with what is trained in brackets, and the hints that were followed."""
    entry: dict[str, Any] = {"path": str(path)}
    options: dict[str, Any] = {"max_length": 4096}
    hints: list[str] = []
    encoder = ByteEncoder(template=CHATML)
    while True:
        try:
            rows = rows_of(prepared(directory, entry, encoder=encoder, **options))
        except FsdpTuneError as error:
            hints.append(error.problems[0].hint or "")
            assert len(hints) <= MOST_HINTS, hints
            follow(directory, entry, options, hints[-1])
        else:
            return [marked(row, encoder) for row in rows], hints


@pytest.mark.parametrize("name", PUBLIC)
def test_hint_of_each_refusal_leads_to_prepared_rows(tmp_path: Path, name: str) -> None:
    file, text = PUBLIC[name]
    (tmp_path / file).write_text(text)
    rows, _ = prepare_as_hinted(tmp_path, tmp_path / file)
    assert rows
    assert all("[" in row for row in rows)


@pytest.mark.parametrize("name", ["CSV with semicolons", "CSV with tabs"])
def test_hint_of_a_compressed_table_unpacks_it_first(tmp_path: Path, name: str) -> None:
    file, text = PUBLIC[name]
    compressed = tmp_path / f"{file}.gz"
    compressed.write_bytes(gzip.compress(text.encode()))
    rows, hints = prepare_as_hinted(tmp_path, compressed)
    assert rows
    assert "gzip -dc" in hints[0]
    assert compressed.is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
def test_hint_of_each_refusal_leads_to_a_trained_step(tmp_path: Path, name: str) -> None:
    found = train_as_hinted(tmp_path, name)
    assert (found.exit_code, found.steps) == (0, 1), found


def test_prompts_of_public_sets_are_context(tmp_path: Path) -> None:
    """Following the hints trains answers alone, and loses no prompt, system message or function."""
    for name, context, answer in (
        ("Capybara", "user\nhi", "[yo"),
        ("xLAM", "Price of ACME?", '[[{"name": "quote"'),
        ("glaive v2", "SYSTEM: You are", "[USER: Price"),
        ("Nemotron", "detailed thinking on", "[yo"),
        ("tatsu-lab/alpaca", "Say hi.", "[hi"),
    ):
        file, text = PUBLIC[name]
        (directory := tmp_path / name.replace("/", "-")).mkdir()
        (directory / file).write_text(text)
        (row, *_), _ = prepare_as_hinted(directory, directory / file)
        assert context in row.partition("[")[0] or context in row, (name, row)
        assert answer in row, (name, row)


def test_manifest_next_to_rows_is_left_out_by_the_hint(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    write_jsonl(tmp_path / "rows" / "data.jsonl", CHATS)
    (tmp_path / "rows" / "dataset_manifest.json").write_text(
        json.dumps({"repo": "x", "run_id": "1"}, indent=1)
    )
    rows, hints = prepare_as_hinted(tmp_path, tmp_path / "rows")
    assert len(rows) == len(CHATS)
    assert f"{tmp_path}/rows/*.jsonl" in hints[-1]


def test_file_that_is_not_json_keeps_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"\n')
    with pytest.raises(FsdpTuneError) as caught:
        prepared(tmp_path, tmp_path / "rows.jsonl")
    assert "not JSON" in caught.value.problems[0].message


def test_file_that_cannot_be_read_has_no_hint_and_one_at_a_url_no_command(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").mkdir()
    assert shape_hint(tmp_path / "rows.jsonl", "lines", bool) is None
    for sign, shown in ((";", "`;`"), ("\t", "tabs")):
        hint = delimiter_hint("https://host/rows.csv", sign)
        assert hint == f"its fields are separated by {shown}: download it, and give its path"
