from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_tune.cli import runs
from fsdp_tune.cli.verbs import Screen
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.launch.run_status import DirectoryStatus, run_status
from fsdp_tune.run.directory import RunDir
from tests.cli.conftest import refuse_undeclared
from tests.cli.test_train_progress import shown_on_a_terminal
from tests.launch.test_accelerate import resolved

LINES: list[dict[str, object]] = [
    {"event": "train_started", "step": 0, "total_steps": 60, "time": 0.0},
    *(
        {"step": step, "loss": 60.0 / step, "time": 2.0 * step, "tokens_per_second_per_device": 1234.5, "peak_reserved_gib": 9.0}
        for step in range(1, 31)
    ),
]


def run_in(folder: Path, name: str) -> Path:
    """A run directory with metrics and a plan; no process works on it."""
    run = folder / name
    (run / "logs").mkdir(parents=True)
    (run / "recipe.json").write_text(resolved(folder).model_dump_json(by_alias=True))
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in LINES))
    (run / "plan.json").write_text('{"peak_reserved_gib": 10.0}')
    return run


def status(*arguments: object, columns: int = 80) -> list[str]:
    """The lines of `status` on a terminal."""
    argv = ["fsdp-tune", "status", *map(str, arguments)]
    program = f"import sys; sys.argv = {argv!r}; from fsdp_tune.cli.app import main; main()"
    return [line.rstrip() for line in shown_on_a_terminal(program, columns).replace("\r", "").splitlines()]


def test_status_names_the_rows_of_the_newest_spike_wherever_it_is(tmp_path: Path) -> None:
    place = {"tokens": 40, "step": 4, "rank": 1, "micro_batch": 2, "sequence": 3}
    rows = [{"file": "a.jsonl", "row": row, **place, "loss": 9.0} for row in range(1, 11)]
    spikes = [{"event": name, "step": 4, "message": name, "rows": rows, "rows_total": 64} for name in ("loss_spike", "gradient_spike")]
    run = run_in(tmp_path, "a")
    assert run_status(RunDir(run)).spike is None
    lines = [*spikes, *({"step": step, "loss": 1.0, "padding": "x" * 1000} for step in range(5, 400))]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = run_status(RunDir(run)).spike
    assert found is not None
    assert (found.event, found.step, found.rows_total, [row.row for row in found.rows]) == ("gradient_spike", 4, 64, list(range(1, 11)))
    shown = status(run)
    at = shown.index("gradient spike at step 4: gradient_spike")
    assert shown[at + 3].split() == ["a.jsonl:1", "40", "4/1/2", "9.0000"]
    assert shown[at + 11] == "8 of 64 rows (`--json` names 10); `train --skip-rows FILE` leaves rows out"


def test_status_has_speed_memory_and_sparkline(tmp_path: Path) -> None:
    lines = status(run_in(tmp_path, "a"))
    at = next(number for number, line in enumerate(lines) if line.startswith("step "))  # after the path, which may take two lines
    assert re.fullmatch(r"step 30 of 60, last line \d+\.\ds ago, loss 2\.0000", lines[at])
    assert lines[at + 1] == "last losses: █▇▆▅▄▄▃▂▂▁"
    assert lines[at + 2] == "1,234 tokens/s/device, 9.00 GiB reserved, 10.00 GiB planned (-10%)"


@pytest.mark.parametrize(("columns", "names"), [(80, ["losses"]), (120, ["tokens/s/device", "memory", "losses"])])
def test_status_of_a_directory_is_a_table(tmp_path: Path, columns: int, names: list[str]) -> None:
    for name in ("first", "second"):
        run_in(tmp_path, name)
    head, _, first, second = status(tmp_path, columns=columns)
    assert head.split() == ["run", "state", "step", "left", "loss", *names]
    assert first.split()[:3] == ["first", "not", "started"]
    assert second.split()[3:5] == ["30/60", "2.0000"]
    assert len(first) <= columns


def test_damaged_run_of_a_directory_is_a_notice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_in(tmp_path, "good")
    (run_in(tmp_path, "bad") / "plan.json").write_text("{")
    screen = Screen(json_output=True)
    answer = runs._read_status(screen, tmp_path)
    assert isinstance(answer, DirectoryStatus)
    assert [Path(run.run_dir).name for run in answer.runs] == ["good"]
    screen.document(answer)
    screen.close()
    document = capsys.readouterr().out
    assert [notice["code"] for notice in json.loads(document)["notices"]] == ["run-unreadable"]
    refuse_undeclared(["status"], document)
    with pytest.raises(FsdpTuneError, match="not a run directory"):
        runs._read_status(screen, tmp_path / "good" / "logs")


WATCH = (
    "import os, signal, sys; from dataclasses import replace; from pathlib import Path\n"
    "from fsdp_tune.cli import runs\n"
    "runs.WATCH_SECONDS = 0.2\n"
    "read, seen = runs._read_status, []\n"
    "def running(screen, path):\n"
    "    seen.append(1)\n"
    "    if len(seen) == STOP: os.kill(os.getpid(), signal.SIGINT)\n"
    "    return replace(read(screen, path), step=len(seen), **({'state': 'running', 'seconds_left': 9.0} if len(seen) < LAST else {}))\n"
    "runs._read_status = running\n"
    "from fsdp_tune.cli.app import main\n"
    "main()"
)


def test_watch_redraws_until_the_run_has_ended(tmp_path: Path) -> None:
    program = f"LAST, STOP = 3, 0; import sys; sys.argv = ['fsdp-tune', 'status', '--watch', {str(run_in(tmp_path, 'a'))!r}]\n{WATCH}"
    lines = re.split(r"[\r\n]+", shown_on_a_terminal(program, 80))
    steps = list(dict.fromkeys(line for line in lines if line.startswith("step ")))
    assert [re.match(r"step (\d)", line)[1] for line in steps] == ["1", "2", "3"]  # type: ignore[index]
    assert ["9.0s left" in line for line in steps] == [True, True, False]


def test_watch_in_a_pipe_prints_the_last_status_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    start = f"import sys; sys.argv = ['fsdp-tune', 'status', '--watch', {str(run_in(tmp_path, 'a'))!r}]\n"
    done = subprocess.run([sys.executable, "-c", f"LAST, STOP = 3, 0\n{start}{WATCH}"], capture_output=True, text=True, check=True)
    assert "\nstep 3 of 60" in done.stdout
    done = subprocess.run([sys.executable, "-c", f"LAST, STOP = 999, 2\n{start}{WATCH}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "no longer watched; the run is not affected\n", "")
