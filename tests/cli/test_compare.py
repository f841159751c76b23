"""`compare` as a command: stages and cause on the terminal, one JSON document, exit codes, another
interpreter."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

from fsdp_tune.comparison.side_processes import ObservingChild
from tests.cli.conftest import Cli, document
from tests.cli.in_process import answer, errors, invoke, settings
from tests.jobs.sides import in_process
from tests.pages.written import training_line, written


@pytest.mark.e2e
def test_first_difference_and_its_cause_are_printed_and_exit_1(cli: Cli) -> None:
    done = cli("compare", "gpt2_smoke", "--set", "data.loss_on=all")
    assert done.returncode == 1, done.stderr
    assert "✓ tokens of the first rows" in done.stdout
    assert "≠ which of them are trained: 64 of 64 differ" in done.stdout
    assert "  cause `data.loss_on`: with A's value in B the difference vanishes" in done.stdout
    assert "  hint: `--set data.loss_on=completion` gives B the numbers of A at this stage" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_equal_sides_exit_0_with_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ObservingChild, "computed", in_process)
    found = answer("compare", "gpt2_smoke", *settings("training.save_steps=100"))
    assert (found["equal"], found["first"], found["cause"]) == (True, None, None)
    assert [key["key"] for key in found["keys"]] == ["training.save_steps", "training.eval_steps"]
    assert found["not_compared"]


@pytest.mark.slow
@pytest.mark.e2e
def test_another_interpreter_is_the_cause_if_its_arithmetic_differs(cli: Cli, tmp_path: Path) -> None:
    """An interpreter that sees the same packages, but for a cross-entropy that is a thousandth larger."""
    import venv

    venv.create(tmp_path / "other", symlinks=True, with_pip=False)
    python = tmp_path / "other" / "bin" / "python"
    (site,) = (tmp_path / "other").glob("lib/python*/site-packages")
    (site / "all.pth").write_text(f"{Path(yaml.__file__).parent.parent}\n")
    (site / "sitecustomize.py").write_text(PATCH)
    done = cli("compare", "gpt2_smoke", "--python", str(python), "--json")
    found = document(done)
    assert done.returncode == 1, done.stderr
    assert (found["a"]["python"], found["b"]["python"]) == (sys.executable, str(python))
    assert (found["first"]["stage"], found["cause"]["keys"], found["cause"]["is_shown"]) == (
        "row_losses",
        [],
        True,
    )
    assert "with A's interpreter B gives the same" in found["cause"]["text"]
    status = {stage["name"]: stage["status"] for stage in found["stages"]}
    assert (status["logits"], status["tokens"]) == ("equal", "equal")


PATCH = """
import importlib.abc
import sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "fsdp_tune.model.step":
            import torch.nn.functional as F
            own = F.cross_entropy
            F.cross_entropy = lambda *given, **named: own(*given, **named) * 1.001
            sys.meta_path.remove(self)

sys.meta_path.insert(0, Finder())
"""


def test_runs_are_compared_without_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "one", [training_line(1, 3.0), training_line(2, 2.0)])
    written(tmp_path / "two", [training_line(1, 3.0), training_line(2, 2.5)], torch="2.12")
    done = invoke("compare", "one", "two")
    assert done.exit_code == 1, done.output
    assert "first difference: lines of metrics.jsonl, step by step" in done.stdout
    assert "  at    step 2, loss" in done.stdout
    assert "first step: 2, loss: 2 in A, 2.5 in B" in done.stdout
    assert "torch: 2.13 / 2.12" in done.stdout
    assert invoke("compare", "one", "one", "--html", "page.html").exit_code == 0
    assert re.search(
        r"equal: 2 of 3 stages compared; lines of metrics.jsonl, step by step: 2 of 2",
        (tmp_path / "page.html").read_text(),
    )
    written(tmp_path / "empty")
    assert invoke("compare", "one", "empty").exit_code == 6
    invoke("compare", "one", "two", "--html", "page.html")
    page = (tmp_path / "page.html").read_text()
    assert all(f"<td>{text}</td>" in page for text in ("step 2, loss", "2.13", "2.12"))
    assert "http" not in page
    assert invoke("compare", "one", "two", "--html", "none/page.html").exit_code == 2


def test_mistakes_exit_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, code in (
        (["gpt2_smoke"], "compare-one-side"),
        (["gpt2_smoke", "--python", str(tmp_path / "none")], "compare-python"),
        (["gpt2_smoke", "no_such_recipe"], "recipe-not-found"),
        (["gpt2_smoke", "--set", "training.lr=1"], "unknown-key"),
        (["run", "http://127.0.0.1:1/v1", "--set", "training.seed=1", "--with", "trl"], "compare-override"),
    ):
        assert errors("compare", *arguments)[0]["code"] == code


@pytest.mark.e2e
def test_interpreter_without_torch_is_exit_2(cli: Cli, tmp_path: Path) -> None:
    import venv

    venv.create(tmp_path / "bare", symlinks=True, with_pip=False)
    written(tmp_path / "run")
    done = cli("compare", "run", "run", "--python", str(tmp_path / "bare" / "bin" / "python"), "--json")
    (problem,) = document(done)["errors"]
    assert (done.returncode, problem["code"]) == (2, "compare-python")
    assert "needs torch and transformers" in problem["hint"]
