"""Every code of a message has a section in docs/reference/errors.md, and every section has its code and says something."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.structure import problem_sites
from tests.structure.problem_sites import HEADING, Site, all_sites, is_legible, message_table, sites_in, with_forms

CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@pytest.fixture(scope="module")
def sites() -> list[Site]:
    return all_sites()


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")


def test_codes_are_kebab_case(sites: list[Site]) -> None:
    assert [site for site in sites if CODE.fullmatch(site.code) is None] == []


def test_every_code_has_an_error_section(sites: list[Site], page: str) -> None:
    documented = set(HEADING.findall(page))
    assert {site.code: site.place for site in sites if site.code not in documented} == {}


def test_every_error_section_has_a_code(sites: list[Site], page: str) -> None:
    assert set(HEADING.findall(page)) - {site.code for site in sites} == set()


def test_error_sections_are_unique(page: str) -> None:
    found = HEADING.findall(page)
    assert len(found) == len(set(found))


def test_every_error_section_has_a_message_or_text(page: str) -> None:
    sections = re.split(HEADING, page)[1:]
    bodies = dict(zip(sections[::2], sections[1::2], strict=True))
    assert [code for code, body in bodies.items() if not body.partition("\n# ")[0].strip()] == []


# ---- The forms of messages

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


def test_forms_have_what_the_source_decides_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem_sites, "PACKAGE", tmp_path / "fsdp_tune")
    module = tmp_path / "fsdp_tune" / "rows.py"
    module.parent.mkdir()
    module.write_text(SOURCE, encoding="utf-8")
    found = {site.code: site for site in sites_in(module)}
    assert (found["one"].message, found["one"].hint) == ("… has … rows, at most nine", "write fewer rows")
    assert is_legible(found["one"].message)
    assert found["two"].message == "…"
    assert not is_legible(found["two"].message)
    assert (found["three"].message, found["four"].hint) == ("the rows do not fit", "…")


def test_page_keeps_hand_written_text_and_replaces_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    present = [Site("one", "", "the rows do not fit", "write fewer rows"), Site("two", "", "…", None)]
    monkeypatch.setattr(problem_sites, "all_sites", lambda: present)
    text = with_forms("# Errors\n\nHow.\n\n## one\n_an older form_\n\n## two\nBy hand.\n\n# Group\n\n## one\nBy hand.\n")
    assert text == (
        "# Errors\n\nHow.\n\n## one\n_the rows do not fit_\n\n## two\nBy hand.\n\n# Group\n\n## one\n_the rows do not fit_\n\nBy hand.\n\n"
    )
    assert with_forms(text) == text


def test_table_has_every_legible_message_once_with_its_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = Site("one", "", "the rows do not fit", "write fewer rows")
    present = [Site("two", "", "…", None), fits, fits, Site("one", "", "no rows are left", None)]
    monkeypatch.setattr(problem_sites, "all_sites", lambda: present)
    assert message_table() == "code\tmessage\thint\none\tno rows are left\t\none\tthe rows do not fit\twrite fewer rows\n"
