"""`report`, from the command line and from Python."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import urllib.request
from pathlib import Path

import pytest

import fsdp_tune
from fsdp_tune.run.directory import RunDir
from tests.cli.conftest import Cli, document
from tests.cli.forked import Fork, command
from tests.cli.in_process import errors, invoke
from tests.pages.written import training_line, written


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the run `one`."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "one", [training_line(10), {"step": 10, "eval_loss": 2.0}], learning_rate=1e-4)
    return tmp_path


def test_report_writes_a_page_and_one_document(cli: Cli, here: Path) -> None:
    written(here / "two", [training_line(10)], learning_rate=2e-4)
    done = cli("report", "one", "two", "--json")
    found = document(done)
    assert done.returncode == 0, done.stderr
    assert [(run["label"], run["steps"], run["loss"]["last"]) for run in found["runs"]] == [
        ("one", 10, 0.5),
        ("two", 10, 0.5),
    ]
    assert found["recipe_differences"] == {"training.learning_rate": ["0.0001", "0.0002"]}
    page = here / found["page"]
    assert page.name == "report.html"
    assert page.read_text().startswith("<!doctype html>")
    os.umask(umask := os.umask(0))
    assert stat.S_IMODE(page.stat().st_mode) == 0o666 & ~umask  # it is there to be shared


def test_report_is_a_table_on_the_terminal(here: Path) -> None:
    written(here / "nan", [training_line(10), training_line(20, "nan")])
    done = invoke("report", "nan", "nan", "--output", "page.html")
    assert done.exit_code == 0
    assert "not finite" in done.output
    assert done.output.count("not started") == 1  # the same directory twice is one run
    assert (here / "page.html").exists()


def test_python_api_returns_the_page_without_writing(here: Path) -> None:
    found = fsdp_tune.report([here / "one"])
    assert (found.page, found.differences.recipe) == (None, {})
    assert found.html.startswith("<!doctype html>")
    assert found.runs[0].summary()["steps"] == 10


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["other"], "not-a-run"),
        (["--follow", "-o", "page.html"], "report-output"),
        (["--port", "8100"], "report-output"),
        (["--follow", "--port", "70000"], "port-not-free"),
    ],
)
def test_what_is_refused_writes_no_page(here: Path, words: list[str], code: str) -> None:
    (here / "other").mkdir()
    assert errors("report", "one", *words)[0]["code"] == code
    assert not list(here.glob("*.html"))


class Following:
    """`report RUN… --follow`, whose page is at `url`. Its lines arrive in a file."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._lines = folder / "lines"

        def program() -> None:
            file = os.open(self._lines, os.O_WRONLY | os.O_CREAT)
            os.dup2(file, 2 if "--json" in words else 1)
            command("report", *words, "--follow")()

        self.fork = Fork(program, SSH_CONNECTION="10.0.0.1 22 10.0.0.2 22", PYTHONUNBUFFERED="1")
        self.url = self.found(r"the page is at (\S+)")[1]

    def found(self, pattern: str) -> re.Match[str]:
        """Wait until the command has printed a line."""
        return self.fork.wait_for(self._lines, pattern)

    def page(self) -> str:
        with urllib.request.urlopen(self.url, timeout=30) as response:
            return response.read().decode()

    def interrupted(self) -> tuple[int, str, list[str]]:
        """Return the exit code, the document and the lines."""
        os.kill(self.fork.pid, signal.SIGINT)
        done = self.fork.end()
        return done.code, done.out + done.err, self._lines.read_text().splitlines()


def end(run: RunDir, reason: str) -> None:
    run.logs.mkdir(exist_ok=True)
    run.outcome_json.write_text(
        json.dumps({"exit_code": 0, "exit_reason": reason, "step": 10, "time": 0.0, "problem": None})
    )


def test_followed_report_is_served_until_ctrl_c_and_prints_the_end_of_each_run(here: Path) -> None:
    one, two = RunDir(here / "one"), written(here / "two", [training_line(10)])
    following = Following(here, "one", "two")
    port = following.url.split(":")[2].split("/")[0]
    following.found(f": ssh -L {port}:127.0.0.1:{port} ")
    assert "<td>10</td>" in following.page()
    end(one, "lost_rank")
    following.found(re.escape(f"{one.path} has ended (lost_rank)\n"))
    end(two, "finished")
    following.found(re.escape(f"{two.path} has finished; the page is served until Ctrl-C\n"))
    assert following.page()
    code, rest, lines = following.interrupted()
    assert (code, rest, lines[-1]) == (130, "", "the page is no longer served; runs are not affected")
    assert list(here.glob("*.html")) == []


def test_followed_report_has_one_document(here: Path) -> None:
    code, text, lines = Following(here, "one", "--json").interrupted()
    found = json.loads(text)
    assert (code, found["page"], found["runs"][0]["steps"], "errors" in found) == (130, None, 10, False)
    assert lines[-1] == "the page is no longer served; runs are not affected"
