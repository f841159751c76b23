"""The list of lines for a GPU is true, and lines on it are not counted as untested."""

from __future__ import annotations

import ast
import os
import runpy
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.structure.sources import source


@pytest.fixture
def script(repository: Path) -> dict[str, Any]:
    return runpy.run_path(str(repository / "scripts" / "coverage"))


def functions(tree: ast.AST, prefix: str = "") -> Iterator[str]:
    """Qualified names, as coverage.py writes them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield f"{prefix}{node.name}"
            yield from functions(node, f"{prefix}{node.name}.")


def test_each_function_for_a_gpu_exists_and_has_a_gpu_test(repository: Path, script: dict[str, Any]) -> None:
    entries = script["gpu_functions"]()
    assert entries
    for (file, name), test in entries.items():
        assert name in set(functions(source(repository / file).tree)), f"{file} has no {name}"
        test_file, _, test_name = test.partition("::")
        test_module = source(repository / test_file)
        assert test_name in set(functions(test_module.tree)), f"{test_file} has no {test_name}"
        assert "pytest.mark.gpu" in test_module.text


def report(**missing: list[int]) -> dict[str, Any]:
    """A file of model/ with ten lines and four branches; `missing` lines by function."""
    lines = sum(len(numbers) for numbers in missing.values())
    summary = {"num_statements": 10, "covered_lines": 10 - lines, "num_branches": 4, "covered_branches": 3}
    found = {name: {"missing_lines": numbers} for name, numbers in missing.items()}
    return {"files": {"fsdp_tune/model/adapters/nf4.py": {"summary": summary, "functions": found}}}


def test_lines_for_a_gpu_are_not_counted_as_untested(script: dict[str, Any]) -> None:
    folders = script["by_folder"](report(_on_cuda=[3, 4], quantise=[7, 8, 9, 11]))
    assert folders["model"].missing == {"fsdp_tune/model/adapters/nf4.py": ["quantise: 7-9, 11"]}
    assert "\nmodel\t40.0 %\t75.0 %\t4\t2\n" in script["table"](folders)


def test_data_are_combined_when_their_last_process_has_ended(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(folder: str, seconds: float) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", str(seconds)], env=os.environ | {script["MARK"]: folder})

    with started(str(tmp_path), 0.5) as measured, started(f"{tmp_path}-of-another", 60) as other:
        script["wait_until_written"](str(tmp_path))
        assert measured.wait(timeout=0.2) == 0, "it has just ended"
        assert other.poll() is None
        began = time.monotonic()
        monkeypatch.setitem(script["wait_until_written"].__globals__, "WRITING_SECONDS", 0.2)
        script["wait_until_written"](f"{tmp_path}-of-another")
        assert time.monotonic() - began < 30, "one that hangs is not waited for"
        other.kill()
