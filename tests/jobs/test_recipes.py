"""What every job checks before its work."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import fsdp_tune
from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.jobs.recipes import check_cache
from fsdp_tune.recipe.read.loader import LoadedRecipe
from tests.cli.inspection import fake_model  # noqa: F401  a fixture

JOBS: dict[str, Callable[[LoadedRecipe], object]] = {
    "prepare": fsdp_tune.prepare,
    "plan": fsdp_tune.plan,
    "rehearse": fsdp_tune.rehearse,
    "train": fsdp_tune.train,
}


def problem_of(job: Callable[[LoadedRecipe], object], loaded: LoadedRecipe) -> Problem:
    with pytest.raises(FsdpTuneError) as caught:
        job(loaded)
    (problem,) = caught.value.problems
    return problem


def smoke(tmp_path: Path, *overrides: str) -> LoadedRecipe:
    return fsdp_tune.load_recipe("gpt2_smoke", [f"output_dir={tmp_path / 'run'}", *overrides])


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
@pytest.mark.parametrize("place", ["file", "below a file", "/proc/x", "dangling link"])
def test_unusable_cache_directory_is_reported_first(
    tmp_path: Path, job: Callable[[LoadedRecipe], object], place: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling link").symlink_to("/proc/x/y")
    folder = {
        "file": tmp_path / "file",
        "below a file": tmp_path / "file" / "x" / "y",
        "/proc/x": Path("/proc/x"),
    }.get(place, tmp_path / place)
    before = sorted(tmp_path.iterdir())
    began = time.monotonic()
    problem = problem_of(job, smoke(tmp_path, f"data.cache_dir={folder}"))
    assert time.monotonic() - began < 5
    assert problem.code == "cache-unusable"
    assert f"`{folder}`, cannot be used: " in problem.message
    assert "--set data.cache_dir=DIR" in str(problem.hint)
    assert problem.where.source is not None, "the key that names it"
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("job", [*JOBS.values(), fsdp_tune.validate], ids=[*JOBS, "validate"])
def test_user_without_home_directory_is_told_to_name_a_cache(
    tmp_path: Path, job: Callable[[LoadedRecipe], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", without_home)
    problem = problem_of(job, smoke(tmp_path))
    assert (problem.code, "export XDG_CACHE_HOME=DIR" in str(problem.hint)) == ("cache-unusable", True)


@pytest.mark.usefixtures("fake_model")
def test_validate_finds_a_file_in_the_place_of_the_cache_and_creates_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert (
        problem_of(fsdp_tune.validate, smoke(tmp_path, f"data.cache_dir={tmp_path / 'file' / 'x'}")).code
        == "cache-unusable"
    )
    fsdp_tune.validate(smoke(tmp_path, f"data.cache_dir={tmp_path / 'new' / 'x'}"))
    assert not (tmp_path / "new").exists()


def test_directory_of_compiled_kernels_is_checked_where_ranks_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    check_cache(smoke(tmp_path, cache).recipe)
    problem = problem_of(
        lambda loaded: check_cache(loaded.recipe), smoke(tmp_path, cache, "kernels.compile=true")
    )
    assert "of compiled kernels" in problem.message
    assert "export XDG_CACHE_HOME=DIR" in str(problem.hint)


@pytest.mark.parametrize(
    ("number", "is_accepted"), [(errno.EROFS, True), (errno.EACCES, True), (errno.EIO, False)]
)
def test_prepared_data_on_a_read_only_disk_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_accepted: bool
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(number, os.strerror(number))

    loaded = smoke(tmp_path, f"data.cache_dir={tmp_path}")
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert problem_of(lambda each: check_cache(each.recipe), loaded).code == "cache-unusable"
    (tmp_path / "data").mkdir()
    if is_accepted:
        check_cache(loaded.recipe)
    else:
        assert os.strerror(number) in problem_of(lambda each: check_cache(each.recipe), loaded).message
