from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp_tune.core.atomic import check_output_file
from fsdp_tune.core.errors import ExitCode, FsdpTuneError


def refusal(path: Path, *, replaces: bool = False) -> tuple[str, str, str | None]:
    with pytest.raises(FsdpTuneError) as caught:
        check_output_file(path, replaces=replaces)
    (problem,) = caught.value.problems
    assert caught.value.exit_code == ExitCode.USAGE
    return problem.code, problem.message, problem.hint


def test_existing_file_is_refused_unless_the_command_replaces_it(tmp_path: Path) -> None:
    file, link = tmp_path / "page.html", tmp_path / "link"
    check_output_file(file)
    file.touch()
    link.symlink_to(tmp_path / "missing")
    for path in (file, link):
        assert refusal(path) == (
            "output-exists",
            f"`{path}` already exists",
            "give another file name, or remove it",
        )
        check_output_file(path, replaces=True)


@pytest.mark.parametrize("replaces", [True, False])
def test_directory_is_never_an_output_file(tmp_path: Path, replaces: bool) -> None:
    assert refusal(tmp_path, replaces=replaces) == (
        "output-exists",
        f"`{tmp_path}` is a directory",
        "give the name of a file",
    )


def test_missing_or_protected_directory_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "none" / "page.html"
    code, message, hint = refusal(path, replaces=True)
    assert (code, hint) == ("no-directory", f"mkdir -p {path.parent}")
    assert message == f"`{path}` cannot be written: the directory `{path.parent}` does not exist"
    path.parent.mkdir()
    check_output_file(path)
    monkeypatch.setattr(os, "access", lambda *_: False)  # tests may run as root, whom permissions do not stop
    assert refusal(path)[:2] == (
        "no-directory",
        f"`{path}` cannot be written: no permission to write in `{path.parent}`",
    )


def test_name_without_a_directory_is_a_file_of_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_output_file(Path("page.html"))
