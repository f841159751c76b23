"""The small files of a run, as they are sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.cluster.mirror.sent_contents import as_content_errors, read_run_files
from fsdp_tune.core.errors import FailedError, Problem, Where
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.remote_requests import ContentError
from fsdp_tune.run.written_files import record_model_files
from tests.cluster.mirrors import make_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run")


def test_files_of_the_run_are_read_without_the_line_that_is_being_written(run: RunDir) -> None:
    run.recipe_json.chmod(0o600)
    run.launch_json.write_text("{}")
    contents, private = read_run_files(run)
    assert contents == {
        "recipe.json": b'{"name": "r"}',
        "metrics.jsonl": b'{"step": 1, "loss": 2.0}\n',
        "model/config.json": b"{}",
    }, "launch.json has the variables of this machine"
    assert private == {"recipe.json"}


def test_model_files_that_differ_from_what_was_written_are_not_read(run: RunDir) -> None:
    record_model_files(run.model)
    assert "model/manifest.json" in read_run_files(run)[0]
    (run.model / "config.json").write_text("{ }")
    with (
        pytest.raises(ContentError, match=r"^model/config\.json: 3 bytes instead of 2$"),
        as_content_errors("model"),
    ):
        read_run_files(run)


def test_first_of_several_damaged_files_is_named_with_their_number() -> None:
    problems = [Problem("file-changed", "missing", Where(f"/run/model/{name}")) for name in "abc"]
    with pytest.raises(ContentError, match=r"^model/a: missing \(and 2 more\)$"), as_content_errors("model"):
        raise FailedError(*problems)
