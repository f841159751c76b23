"""Files of other trainers are imported, answered by `--set`, and trained; TRL's own losses are those of the
run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ranks, warm
from tests.cli.conftest import document
from tests.cli.imported_files import FILES, Imported, write_rows
from tests.cli.small_runs import losses
from tests.comparison.tool_files import files

__all__ = ["files"]
pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.ranks]
TRAINED = (
    *("training.max_steps=2", "training.logging_steps=1", "training.report_to=[]", "merge.at_end=false"),
    *("launch.device=cpu", "launch.num_cpu_threads_per_process=1"),
)
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def rows(files: Path) -> Path:
    write_rows(files)
    return files


def losses_of_trl(folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Train with TRL in this process, and return the losses of its steps."""
    from trl.scripts.sft import main, make_parser

    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["trl", "sft"])
    parsed: tuple[Any, ...] = make_parser().parse_args_and_config([*words, "--output_dir", "of-trl"])
    main(*parsed)
    state = json.loads((folder / "of-trl" / "checkpoint-2" / "trainer_state.json").read_text())
    return [line["loss"] for line in state["log_history"] if "loss" in line]


@pytest.mark.filterwarnings("ignore")  # of TRL, which runs in this process
@pytest.mark.parametrize("case", FILES, ids=[f"{case.tool}: {case.name}" for case in FILES])
def test_imported_file_trains(
    case: Imported, rows: Path, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.platform == "linux":  # each command as a fork of a process that has imported the stack
        monkeypatch.setattr(warm, "connect", lambda: ranks.connect("cpu"))
    for path in rows.iterdir():
        if path.name == "base" or path.suffix == ".jsonl":
            (tmp_path / path.name).symlink_to(path)
    for name, text in ((case.file, case.text), *case.beside):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    answers = [word for answer in case.answers for word in ("--set", answer)]
    done = cli("import", case.file, "--output", "recipe.yaml", "--json", *answers)
    assert done.returncode == 0, done.stderr
    account = document(done)
    assert account["tool"] == case.tool
    assert [(row["key"], row["reason"]) for row in account["account"] if row["fate"] == "question"] == []
    assert "# DECIDE" not in (tmp_path / "recipe.yaml").read_text()

    given = [
        *TRAINED,
        "output_dir=run",
        *(() if "num_processes" in (tmp_path / "recipe.yaml").read_text() else ("launch.num_processes=1",)),
    ]
    trained = cli(
        "train", "--config", "recipe.yaml", *(word for override in given for word in ("--set", override))
    )
    assert trained.returncode == 0, trained.stderr[-3000:]
    found = losses(tmp_path / "run")
    assert len(found) == 2
    assert all(0.5 < loss < 20 for loss in found), found
    if case.losses:
        pytest.importorskip("trl")
        command = (
            case.text.partition("trl sft ")[2].partition("#")[0].split()
            if case.file == "run.sh"
            else ["--config", case.file]
        )
        own = losses_of_trl(tmp_path, command, monkeypatch)
        assert own[: case.losses] == pytest.approx(found[: case.losses], rel=ROUNDING)
