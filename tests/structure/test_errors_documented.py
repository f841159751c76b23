"""Every code is in docs/reference/messages.tsv, and every heading of docs/reference/errors.md is a code with
a text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.structure import problem_sites, sources
from tests.structure.problem_sites import HEADING, Site, all_sites, is_legible, message_table, sites_in

pytestmark = pytest.mark.source

CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@pytest.fixture
def sites() -> tuple[Site, ...]:
    return all_sites()


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")


def test_codes_are_kebab_case(sites: tuple[Site, ...]) -> None:
    assert [site for site in sites if CODE.fullmatch(site.code) is None] == []


def test_every_code_is_in_the_table_of_messages(sites: tuple[Site, ...], repository: Path) -> None:
    lines = (repository / "docs" / "reference" / "messages.tsv").read_text(encoding="utf-8").splitlines()[1:]
    listed = {line.split("\t")[0] for line in lines}
    assert {site.code: site.place for site in sites if site.code not in listed} == {}
    assert listed - {site.code for site in sites} == set()


def test_every_heading_is_a_code_with_a_text(sites: tuple[Site, ...], page: str) -> None:
    sections = re.split(HEADING, page)[1:]
    codes, bodies = sections[::2], sections[1::2]
    assert set(codes) - {site.code for site in sites} == set()
    assert [
        code for code, body in zip(codes, bodies, strict=True) if not body.partition("\n# ")[0].strip()
    ] == []
    assert len(codes) == len(set(codes))


def test_code_whose_message_only_the_run_decides_is_explained(sites: tuple[Site, ...], page: str) -> None:
    legible = {site.code for site in sites if is_legible(site.message)}
    assert {
        site.code: site.place for site in sites if site.code not in legible | set(HEADING.findall(page))
    } == {}


SOURCE = """
LIMIT = "at most nine"

def check(path, rows):
    hint = "write fewer rows"
    yield Finding("one", ("key",), f"{path} has {len(rows)} rows, {LIMIT}", hint)
    if rows:
        message = "some rows are left"
    else:
        message = "no rows are left"
    raise usage_error("two", message)
    for hint in rows:
        raise usage_error("three" if path else "four", "the rows " + "do not fit", hint=hint)
"""


def sites_of(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Site]:
    monkeypatch.setattr(problem_sites, "PACKAGE", tmp_path / "fsdp_tune")
    module = tmp_path / "fsdp_tune" / "rows.py"
    module.parent.mkdir()
    module.write_text(text, encoding="utf-8")
    return list(sites_in(sources.source(module)))


def test_forms_have_what_the_source_decides_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {site.code: site for site in sites_of(SOURCE, tmp_path, monkeypatch)}
    assert (found["one"].message, found["one"].hint) == ("… has … rows, at most nine", "write fewer rows")
    assert is_legible(found["one"].message)
    assert found["two"].message == "…"
    assert not is_legible(found["two"].message)
    assert (found["three"].message, found["four"].hint) == ("the rows do not fit", "")


def test_hint_has_the_other_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        'raise usage_error("one", "it is full", hint=f"free {space}", ways_out=("wait", other(), f"use '
        '{disk}"))'
    )
    assert [site.hint for site in sites_of(text, tmp_path, monkeypatch)] == ["free …; wait; use …"]


def test_table_has_every_legible_message_once_with_its_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = Site("one", "", "the rows do not fit", "write fewer rows")
    decided = [Site("two", "", "…", ""), Site("one", "", "… …", ""), Site("three", "", "`…`", "wait")]
    present = [*decided, fits, fits, Site("one", "", "no rows are left", "")]
    monkeypatch.setattr(problem_sites, "all_sites", lambda: present)
    assert message_table().splitlines()[1:] == [
        "one\tno rows are left\t",
        "one\tthe rows do not fit\twrite fewer rows",
        "three\t…\twait",
        "two\t…\t",
    ]
