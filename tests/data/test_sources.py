from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.data.read import sources
from fsdp_tune.data.read.file_access import FileDigests
from fsdp_tune.data.read.row_files import BadRow
from fsdp_tune.data.read.sources import COMPRESSED, KIND_OF_SUFFIX, RowSource, find_source
from fsdp_tune.recipe.references import can_only_be_a_path
from fsdp_tune.recipe.schema.data_section import DataSource
from tests.data.support import write_jsonl


def source(path: Path | str, **entry: Any) -> RowSource:
    return find_source(DataSource(path=str(path), **entry), "data.train[0]")


def texts(found: RowSource) -> list[str]:
    return [row[1]["text"] for _, row in found.read() if not isinstance(row, BadRow)]


def problem(path: Path | str, **entry: Any) -> Problem:
    with pytest.raises(FsdpTuneError) as caught:
        source(path, **entry)
    assert caught.value.exit_code == 2
    (found,) = caught.value.problems
    assert found.where.key == "data.train[0]"
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a1"}, {"text": "a2"}])
    write_jsonl(tmp_path / "b.jsonl", [{"text": "b1"}])
    (tmp_path / ".hidden.jsonl").write_text("x")
    (tmp_path / "README.md").write_text("x")
    return tmp_path


def test_file_directory_and_glob_sources(folder: Path) -> None:
    assert texts(source(folder / "a.jsonl")) == ["a1", "a2"]
    assert texts(source(folder)) == ["a1", "a2", "b1"]
    assert texts(source(folder / "[b]*.jsonl")) == ["b1"]
    assert source(folder).names == (str(folder / "a.jsonl"), str(folder / "b.jsonl"))


@pytest.mark.parametrize("key", ["split", "name", "revision"])
def test_key_that_a_loader_would_never_see_is_refused(key: str) -> None:
    found = problem("sales", loader="mine", **{key: "test"})
    assert f"`{key}` has no meaning for rows from a `loader`" in found.message
    assert found.hint == "pass it in `loader_options`"


def test_directory_is_read_behind_links_and_with_endings_in_capitals(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    write_jsonl(elsewhere / "c.jsonl", [{"text": "c1"}])
    write_jsonl(folder / "D.JSONL", [{"text": "d1"}])
    (folder / "more").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(folder)
    (folder / "_cache").symlink_to("/")
    assert texts(source(folder)) == ["d1", "a1", "a2", "b1", "c1"]
    assert texts(source(folder / "D.JSONL")) == ["d1"]


def test_rows_of_a_directory_that_cannot_be_read_are_not_left_out(folder: Path) -> None:
    (folder / "c.jsonl.xz").write_text("x")
    assert problem(folder).hint == "`unxz c.jsonl.xz`"
    write_jsonl(folder / "c.jsonl", [{"text": "c1"}])
    assert texts(source(folder)) == ["a1", "a2", "b1", "c1"], "the archive is next to its contents"
    (folder / "d.jsonl").symlink_to("gone.jsonl")
    message = f"`{folder}/d.jsonl` is a link to `gone.jsonl`, which does not exist"
    assert [problem(path).message for path in (folder, folder / "*.jsonl")] == [message] * 2


def test_name_of_a_directory_is_no_glob(tmp_path: Path) -> None:
    for name in ("rows[1]", "rows1"):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "a.jsonl", [{"text": name}])
    inside = tmp_path / "rows[1]"
    assert texts(source(inside, data_files="*.jsonl")) == ["rows[1]"]
    assert texts(source("json", data_dir=str(inside), data_files="*.jsonl")) == ["rows[1]"]


def test_data_files_inside_a_directory_and_with_a_builder(folder: Path) -> None:
    assert texts(source(folder, data_files="b*")) == ["b1"]
    assert texts(source("json", data_files=[str(folder / "b.jsonl"), str(folder / "*.jsonl")])) == [
        "b1",
        "a1",
        "a2",
    ]
    (folder / "rows").write_text("one\ntwo\n")
    assert texts(source("text", data_files=str(folder / "rows"))) == ["one", "two"]
    assert problem("json").code == "data-not-found"


def test_builder_with_files_is_not_the_directory_of_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for name in ("text", "json"):
        (folder / name).mkdir()
    assert texts(source("text", data_files=str(folder / "b.jsonl"))) == ['{"text": "b1"}']
    write_jsonl(folder / "json" / "c.jsonl", [{"text": "c1"}])
    assert texts(source("json")) == ["c1"], "without files the directory is meant"


def test_gzip_is_known_by_the_ending_before_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    assert texts(source(tmp_path)) == ["a"]


def test_file_names_determine_the_splits_of_a_directory(tmp_path: Path) -> None:
    for name in ("train-00.jsonl", "train-01.jsonl", "test.jsonl", "my_dev.jsonl"):
        write_jsonl(tmp_path / name, [{"text": name}])
    assert texts(source(tmp_path)) == ["train-00.jsonl", "train-01.jsonl"]
    assert texts(source(tmp_path, split="validation")) == ["my_dev.jsonl"]
    (tmp_path / "test.jsonl").unlink()
    assert problem(tmp_path, split="test").hint == "its splits are: train, validation"


def test_saved_data_set_has_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"text": [f"row {index}" for index in range(5)]})
    rows.select([3, 1]).save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(str(tmp_path / "many"))
    found = source(tmp_path / "one")
    assert texts(found) == ["row 3", "row 1"]
    assert len(found.content(FileDigests(tmp_path / "cache"))) == 1, (
        "the bytes of its file decide whether prepared data are current"
    )
    assert texts(source(tmp_path / "many", split="test")) == ["row 0"]
    assert problem(tmp_path / "many", split="dev").hint == "its splits are: train, test"
    (tmp_path / "one" / "state.json").write_text("{")
    assert problem(tmp_path / "one").code == "data-unreadable"


def test_digest_of_in_memory_data_set_covers_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    sets = [datasets.Dataset.from_dict({"text": [text]}) for text in ("one", "two")]
    first, second, again = (
        RowSource(DataSource(path="hub/id"), "data.train[0]", ("hub/id",), dataset=rows).content(
            FileDigests(tmp_path)
        )
        for rows in (*sets, sets[0])
    )
    assert first == again
    assert first != second


def test_digest_depends_on_reader_options(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.txt"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    digests = FileDigests(tmp_path / "cache")
    assert source(tmp_path / "rows.jsonl").content(digests) != source(tmp_path / "rows.txt").content(digests)


def test_missing_names_are_reported_with_the_existing_ones(folder: Path) -> None:
    assert problem(folder / "aa.jsonl").hint == "did you mean `a.jsonl`?"
    assert "no directory" in (problem(folder / "nowhere" / "x.jsonl").hint or "")
    assert problem(folder / "c*.jsonl").message == f"no file matches `{folder}/c*.jsonl`"
    assert problem("rows.jsonl").message == f"`{Path('rows.jsonl').absolute()}` does not exist"
    (folder / "empty").mkdir()
    assert "no directory" not in (problem(folder / "empty" / "x.jsonl").hint or "")
    assert "holds no data files" in problem(folder / "empty").message


def test_missing_file_in_a_directory_that_may_not_be_listed_is_not_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> list[Path]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert problem(folder / "aa.jsonl").code == "data-not-found"
    assert problem("~/aa.jsonl").message == f"`{Path('~/aa.jsonl').expanduser()}` does not exist"
    monkeypatch.setattr(Path, "iterdir", lambda _: pytest.fail("no directory is listed for a glob"))
    assert problem(folder / "c*.jsonl").message == f"no file matches `{folder}/c*.jsonl`"


def test_file_in_a_directory_that_may_not_be_entered_is_unreadable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refuse)
    found = problem(folder / "a.jsonl")
    assert (found.code, found.message) == (
        "data-unreadable",
        f"`{folder / 'a.jsonl'}` cannot be read: Permission denied",
    )


def test_files_of_two_kinds_are_refused_by_name(folder: Path) -> None:
    (folder / "c.csv").write_text("text\nx\n")
    found = problem(folder)
    assert found.code == "mixed-files"
    assert "c.csv" in found.message


def test_unknown_file_ending_is_refused_with_the_builder(folder: Path) -> None:
    (folder / "rows.dat").write_text("x")
    assert "path: json, data_files: rows.dat" in (problem(folder / "rows.dat").hint or "")
    (folder / "rows.jsonl.xz").write_text("x")
    assert "unxz rows.jsonl.xz" in (problem(folder / "rows.jsonl.xz").hint or "")


@pytest.mark.parametrize("option", [{"split": "test"}, {"name": "main"}, {"revision": "abc"}])
def test_hub_keys_are_refused_for_files(folder: Path, option: dict[str, str]) -> None:
    assert next(iter(option)) in problem(folder / "a.jsonl", **option).message


def test_split_is_refused_for_named_files_of_a_directory(folder: Path) -> None:
    assert "`split` has no meaning" in problem(folder, data_files="a.jsonl", split="test").message


def test_directory_among_named_files_is_called_one(folder: Path) -> None:
    (folder / "more").mkdir()
    found = problem(folder, data_files="more")
    assert found.message == f"`{folder / 'more'}` is a directory, and `data_files` takes files"
    assert f"`{folder / 'more'}/*.jsonl`" in (found.hint or "")


def test_directory_of_named_files_may_be_below_the_home_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert texts(source("json", data_files="b.jsonl", data_dir=f"~/{folder.name}")) == ["b1"]


def test_unreachable_hub_id_error_names_the_resource_and_alternatives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sources, "hub_is_reachable", lambda: False)
    found = problem("tatsu-lab/alpaca")
    assert found.code == "hub-unreachable"
    assert "`tatsu-lab/alpaca`" in found.message
    assert found.ways_out[0] == "give a local path in `data.train[0].path`"
    assert "hf download --repo-type dataset tatsu-lab/alpaca" in found.ways_out[1]


def test_missing_config_of_cached_data_set_is_named_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise ValueError(
            "Couldn't find cache for openai/gsm8k for config 'socratic'\nAvailable configs in the "
            "cache: ['main']"
        )

    monkeypatch.setattr(sources, "hub_is_reachable", lambda: False)
    monkeypatch.setattr("datasets.load_dataset", load)
    found = problem("openai/gsm8k", name="socratic")
    assert found.code == "data-unreadable"
    assert "Available configs in the cache: ['main']" in found.message
    assert "data.train[0].name" in (found.hint or "")


def test_builtin_sources_are_read_and_unknown_ones_refused() -> None:
    assert len(list(source("builtin:arithmetic", split="test").read())) == 111
    with pytest.raises(FsdpTuneError, match="there is no `builtin:poems`"):
        source("builtin:poems")
    with pytest.raises(FsdpTuneError, match="has no split `dev`"):
        source("builtin:arithmetic", split="dev")


@pytest.mark.parametrize("ending", [*KIND_OF_SUFFIX, *COMPRESSED, ".jsonl.gz"])
def test_missing_file_name_is_not_looked_up_on_the_hub(ending):
    assert can_only_be_a_path(f"rows{ending}")
    assert not can_only_be_a_path("owner/rows")
