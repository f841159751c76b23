"""`report`, from the command line and from Python."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import fsdp_tune
from tests.cli.conftest import Cli, document
from tests.pages.written import training_line, written


def test_report_writes_a_page_and_one_document(cli: Cli, tmp_path: Path) -> None:
    written(tmp_path / "runs" / "one", [training_line(10), {"step": 10, "eval_loss": 2.0}], learning_rate=1e-4)
    written(tmp_path / "runs" / "two", [training_line(10)], learning_rate=2e-4)
    done = cli("report", "runs/one", "runs/two", "--json")
    found = document(done)
    assert done.returncode == 0, done.stderr
    assert [(run["label"], run["steps"], run["loss"]["last"]) for run in found["runs"]] == [("one", 10, 0.5), ("two", 10, 0.5)]
    assert found["recipe_differences"] == {"training.learning_rate": ["0.0001", "0.0002"]}
    page = tmp_path / found["page"]
    assert page.name == "report.html"
    assert page.read_text().startswith("<!doctype html>")
    assert stat.S_IMODE(page.stat().st_mode) == 0o600


def test_report_is_a_table_on_the_terminal(cli: Cli, tmp_path: Path) -> None:
    written(tmp_path / "one", [training_line(10), training_line(20, "nan")])
    done = cli("report", "one", "one", "--output", "page.html")
    assert done.returncode == 0
    assert "not finite" in done.stderr + done.stdout
    assert (done.stderr + done.stdout).count("not started") == 1  # the same directory twice is one run
    assert (tmp_path / "page.html").exists()


def test_report_of_a_directory_that_is_no_run_exits_2(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    written(tmp_path / "one")
    done = cli("report", "one", "other", "--json")
    assert (done.returncode, document(done)["errors"][0]["code"]) == (2, "not-a-run")
    assert not (tmp_path / "report.html").exists()


def test_python_api_returns_the_page_without_writing(tmp_path: Path) -> None:
    run = written(tmp_path / "one", [training_line(10)])
    found = fsdp_tune.report([run.path])
    assert (found.page, found.differences.recipe) == (None, {})
    assert found.html.startswith("<!doctype html>")
    assert found.runs[0].summary()["steps"] == 10


@pytest.mark.parametrize("json_output", [False, True])
def test_followed_report_is_served_until_ctrl_c(tmp_path: Path, json_output: bool) -> None:
    run = written(tmp_path / "one", [training_line(10)])
    command = [sys.executable, "-m", "fsdp_tune", "report", "one", "--follow", *(["--json"] if json_output else [])]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"SSH_CONNECTION": "10.0.0.1 22 10.0.0.2 22", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes) as process:
        talk = process.stderr if json_output else process.stdout
        assert talk is not None
        url = next(found[1] for line in talk if (found := re.match(r"the page is at (\S+)", line)))
        port = url.split(":")[2].split("/")[0]
        assert f": ssh -L {port}:127.0.0.1:{port} " in next(talk)
        assert "<td>10</td>" in urllib.request.urlopen(url, timeout=30).read().decode()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "error:" not in err
    assert "Traceback" not in err
    assert (err if json_output else out).splitlines()[-1] == "the page is no longer served; runs are not affected"
    if json_output:
        found = document(subprocess.CompletedProcess([], 130, out, err))
        assert (found["page"], found["runs"][0]["steps"], "errors" in found) == (None, 10, False)
    assert not (tmp_path / "report.html").exists()
    assert run.path.exists()


def test_followed_report_prints_the_end_of_each_run_and_is_served_on(tmp_path: Path) -> None:
    one, two = (written(tmp_path / name, [training_line(10)]) for name in ("one", "two"))
    command = [sys.executable, "-m", "fsdp_tune", "report", "one", "two", "--follow"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = next(found[1] for line in process.stdout if (found := re.match(r"the page is at (\S+)", line)))
        assert "Ctrl-C ends" in next(process.stdout)
        for run, reason, line in (
            (one, "lost_rank", f"{one.path} has ended (lost_rank)\n"),
            (two, "finished", f"{two.path} has finished; the page is served until Ctrl-C\n"),
        ):
            run.logs.mkdir(exist_ok=True)
            run.outcome_json.write_text(json.dumps({"exit_code": 0, "exit_reason": reason, "step": 10, "time": 0.0, "problem": None}))
            assert next(process.stdout) == line
        assert urllib.request.urlopen(url, timeout=30).status == 200
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130


@pytest.mark.parametrize("options", [["--follow", "-o", "page.html"], ["--port", "8100"], ["--follow", "--port", "70000"]])
def test_options_that_do_not_fit_exit_2(cli: Cli, tmp_path: Path, options: list[str]) -> None:
    written(tmp_path / "one")
    done = cli("report", "one", *options, "--json")
    code = "port-not-free" if "70000" in options else "report-output"
    assert (done.returncode, document(done)["errors"][0]["code"]) == (2, code)
    assert not (tmp_path / "report.html").exists()
