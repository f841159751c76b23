from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from fsdp_tune.cli import bars
from fsdp_tune.cli.train_view import data_lines, kernels_line, show_decided
from fsdp_tune.cli.verbs import Screen
from fsdp_tune.core.errors import Problem
from fsdp_tune.data.format.templates import bundled_text
from fsdp_tune.data.report import DataReport
from fsdp_tune.recipe.read.loader import catalogue
from fsdp_tune.recipe.resolve import Resolution
from tests.model.recipes import model_facts
from tests.planner.recipes import resolved

STEP = {"step": 20, "loss": 2.5, "grad_norm": 1.25, "learning_rate": 1e-4, "tokens_per_second_per_device": 1234.5, "peak_host_gib": 0.5}


def written_to_a_terminal(program: str, columns: int = 0, **variables: str) -> str:
    """What the program writes when its stdout is a terminal. 0 columns: the terminal does not say."""
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40 if columns else 0, columns, 0, 0))
    # Parallel test runners set COLUMNS, which goes before the size of the terminal.
    environment = (
        {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")} | {"TERM": "xterm"} | variables
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=terminal, stderr=subprocess.PIPE, env=environment) as child:
        os.close(terminal)
        raw = b""
        while True:
            try:
                data = os.read(main, 65536)
            except OSError:  # EIO: the other end is closed
                break
            raw += data
            if not data:
                break
        os.close(main)
        assert child.stderr is not None
        assert child.stderr.read() == b""
    return raw.decode()


def shown_on_a_terminal(program: str, columns: int = 0) -> str:
    """What the program shows on a terminal, without colours and movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written_to_a_terminal(program, columns))


def test_lines_are_printed_above_a_live_bar() -> None:
    program = (
        "from fsdp_tune.cli.verbs import command\n"
        "with command(False) as screen, screen.progress('training', None, 'steps') as bar:\n"
        "    bar.start(0, 60); screen.message('said → in between'); bar.at(60, 'loss 1.5')"
    )
    shown = shown_on_a_terminal(program)
    assert "said → in between\r\n" in shown
    assert "training  60/60 steps  loss 1.5  ━" in shown


def test_unused_bar_leaves_no_line() -> None:
    program = "from fsdp_tune.cli.verbs import command\nwith command(False) as screen, screen.progress('x', None, 'rows'): pass"
    assert shown_on_a_terminal(program).split("\n")[-1].strip("\r ") == ""


def test_piped_output_has_lines_only_for_long_work(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(json_output=False)
    with screen.progress("tokenising", 100, "rows") as bar:
        bar.advance(50)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(bars, "PLAIN_INTERVAL_SECONDS", 0.0)
    with screen.progress("tokenising", 100, "rows") as bar:
        bar.advance(50)
    assert capsys.readouterr().out.startswith("tokenising: 50 of 100 rows (50 %)")


def test_step_is_printed_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(json_output=False)
    with screen.training():
        screen.metrics({"event": "train_started", "step": 0, "total_steps": 100})
        screen.metrics(STEP)
        screen.metrics({**STEP, "step": 40, "loss": "nan", "grad_norm": None})
        screen.metrics({"step": 40, "eval_loss": 1.5, "eval_a_loss": 1.0, "eval_b_loss": 2.0})
        shares = {"step_seconds": 2.0, "data_wait_seconds": 0.02}
        shares |= {"last_step_seconds": 1.0, "exposed_communication_seconds": None, "optimizer_seconds": 0.05}
        screen.metrics({**STEP, "step": 60, "mfu": 0.412, **shares})
        screen.metrics({"event": "witness_cost", "step": 40, "time": 1.0, "cpu_seconds": 0.1, "training_cpu_seconds": 3.0, "steps": 100})
        screen.metrics({"event": "loss_scale_backed_off", "step": 41, "time": 1.0, "loss_scale": 512.0})
        screen.metrics({"event": "samples", "step": 42, "seconds": 1.0, "samples": [{"prompt": "a\n" * 40, "text": "two\nthree"}]})
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"step 20/100  .* left  loss 2\.5000  grad norm 1\.250  lr 1\.00e-04  1,234 tokens/s/device  0\.50 GiB", lines[1])
    assert re.match(r"step 40/100  .* left  loss nan  grad norm -", lines[2])
    assert lines[3] == "step 40: eval loss 1.5000 (a 1.0000, b 2.0000)"
    assert "tokens/s/device  MFU 41%  0.50 GiB  (data 1%, optimizer 5%)" in lines[4]
    assert lines[5] == "step 41: loss scale backed off (loss_scale 512.0)"
    assert lines[6] == "step 42: … " + "a\\n" * 20 + " → two\\nthree"


LONG_RUN = (
    "from fsdp_tune.cli.verbs import command\n"
    "line = {'loss': 2.5, 'grad_norm': 1.25, 'learning_rate': 1e-4, 'tokens_per_second_per_device': 1234.5, 'peak_host_gib': 0.5}\n"
    "line |= {'step_seconds': 2.0, 'data_wait_seconds': 0.02, 'mfu': 0.412, 'last_step_seconds': 1.0, 'optimizer_seconds': 0.05}\n"
    "with command(False) as screen, screen.training():\n"
    "    screen.metrics({'event': 'train_started', 'step': 0, 'total_steps': 20000})\n"
    "    screen._steps._bar._started -= 3600\n"
    "    screen.metrics({**line, 'step': 1000}); screen.metrics({**line, 'step': 2000, 'loss': 'nan'})"
)


@pytest.mark.parametrize(
    ("columns", "last"),
    [(60, "loss"), (80, "1,234 tok/s"), (120, "tok/s  data 1% opt 5%  0.50 GiB  MFU 41%  grad 1.250"), (200, "optimizer")],
)
def test_logged_steps_stay_on_screen_with_step_time_left_and_loss_first(columns: int, last: str) -> None:
    shown = shown_on_a_terminal(LONG_RUN, columns)
    kept = [line for line in re.split(r"[\r\n]+", shown) if line.startswith("step ")]
    assert [re.match(r"step (\d+)/20000  1?\dh..m..s left  loss (2.5000|nan)", line) is not None for line in kept] == [True, True]
    assert all(len(line) <= columns for line in kept)
    assert last in kept[0]
    bars = [line for line in re.split(r"[\r\n]+", shown) if line.startswith("training")]
    assert re.match(r"training  2,000/20,000 steps  .*h..m..s left  loss nan", bars[-1])
    assert all(len(line) <= columns for line in bars)


def frames(program: str) -> list[str]:
    """What the bar has shown, without repetitions."""
    start = "import time\nfrom fsdp_tune.cli.verbs import command\nwith command(False) as screen, screen.training():\n"
    shown = shown_on_a_terminal(start + "".join(f"    {line}; time.sleep(0.3)\n" for line in program.splitlines()), 120)
    return list(dict.fromkeys(line.rstrip() for line in re.split(r"[\r\n]+", shown) if line.strip()))


def test_phases_of_the_start_are_shown_with_elapsed_time() -> None:
    program = """pass
screen.position(0, 'importing', 0, 0)
time.sleep(0.3)
screen.position(0, 'loading the model', 0, 0)"""
    shown = " | ".join(frames(program))
    assert re.search(r"starting the ranks  0\.\ds .*importing  0\.[1-9]s .*loading the model  0\.\ds", shown)
    assert "0 steps" not in shown


def test_phases_before_the_ranks_are_shown_from_the_first_second() -> None:
    program = (
        "import time\nfrom fsdp_tune.cli.verbs import command\n"
        "with command(False) as screen:\n"
        "    screen.phase('reading the recipe'); time.sleep(0.2); screen.began -= 60\n"
        "    screen.phase('planning'); screen.message('a line'); time.sleep(0.2)\n"
        "    with screen.progress('tokenising', None, 'rows') as bar: bar.advance(3); time.sleep(0.2)\n"
    )
    shown = shown_on_a_terminal(program, 80)
    assert re.search(r"reading the recipe  0\.\ds", shown)
    assert re.search(r"a line\r\n", shown)
    lines = [line.strip() for line in re.split(r"[\r\n]+", shown) if line.strip()]
    assert lines[-1] == "tokenising  3 rows"
    assert "planning" not in lines[-1]


def test_command_shows_its_first_phase_on_a_terminal() -> None:
    program = "import sys; sys.argv = ['fsdp-tune', 'train', 'missing.yaml']; from fsdp_tune.cli.app import main; main()"
    shown = re.split(r"[\r\n]+", shown_on_a_terminal(f"import sys; sys.stderr = sys.stdout; {program}", 80))
    first, *_ = (line for line in shown if line)
    assert re.match(r"reading the recipe  \d\.\ds", first)
    assert any(line.startswith("error: missing.yaml: ") for line in shown)


def test_piped_phases_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for json_output in (False, True):
        screen = Screen(json_output=json_output)
        screen.phase("planning")
        screen.close()
        assert capsys.readouterr().out == ("{}\n" if json_output else "")


def test_quiet_prints_problems_and_warnings_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    screen = Screen(json_output=False)
    screen.is_quiet = True
    screen.log_to(tmp_path / "log")
    with screen.training():
        screen.metrics({"event": "train_started", "step": 0, "total_steps": 100})
        screen.metrics(STEP)
        screen.metrics({"event": "tracker_failed", "step": 1, "time": 1.0, "message": "no disk"})
    screen.table("t", ["a"], [["b"]])
    screen.close([Problem("c", "failed")])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == ["warning: step 1: no disk", "error: failed"]
    assert "step 20/100" in (tmp_path / "log").read_text()


LOSSES = (
    "from fsdp_tune.cli.verbs import command\nimport time\n"
    "with command(False) as screen, screen.training():\n"
    "    screen.metrics({'event': 'train_started', 'step': 0, 'total_steps': 20000})\n"
    "    for step in range(1, 31): screen.metrics({'loss': 40.0 - step, 'step': 600 * step})\n"
    "    time.sleep(0.2)\n"
)


@pytest.mark.parametrize(("columns", "points", "width"), [(80, 10, 12), (120, 20, 24)])
def test_bar_has_a_sparkline_of_the_last_losses(columns: int, points: int, width: int) -> None:
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", shown_on_a_terminal(LOSSES, columns)) if line.startswith("training")]
    assert max(map(len, lines)) <= columns
    found = re.search(r"loss 10\.0000  ([▁▂▃▄▅▆▇█]+)  ([━─]+)$", lines[-1])
    assert found is not None, lines[-1]
    assert (len(found[1]), found[1][0], found[1][-1], len(found[2])) == (points, "█", "▁", width)


def test_bar_is_coloured_unless_no_color_is_set() -> None:
    assert "\x1b[32m" in written_to_a_terminal(LOSSES, 120)
    assert re.search(r"\x1b\[(\d+;)*3[0-7]m", written_to_a_terminal(LOSSES, 120, NO_COLOR="1")) is None


def test_bar_moves_with_each_step_and_shows_evaluation_and_saving() -> None:
    program = """screen.metrics({'event': 'train_started', 'step': 0, 'total_steps': 60})
screen.position(0, 'forward', 0, 0)
screen.position(1, 'training', 0, 0)
screen.position(7, 'forward', 0, 0)
screen.position(12, 'evaluating', 3, 40)
screen.position(12, 'evaluating', 27, 40)
screen.position(12, 'saving', 0, 0)
screen.position(13, 'backward', 0, 0)
screen.position(61, 'finished', 0, 0)"""
    shown = frames(program)
    evaluating = (r"evaluating 3/40 batches 0\.\ds", r"evaluating 27/40 batches 0\.[3-9]s")
    for pattern in (
        r"training  0/60 steps  first step",
        r"training  1/60 steps",
        r"training  7/60 steps  .*left",
        *evaluating,
        r"saving 0\.\ds",
        "13/60",
        "ending the ranks",
    ):
        assert any(re.search(pattern, line) for line in shown), (pattern, shown)
    assert not any("saving" in line for line in shown if "13/60" in line)
    assert not any("61/60" in line for line in shown)


def test_first_step_counts_from_the_start_of_the_command_and_later_ones_from_the_launch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks count from their launch, and start again after a failure; a sweep starts its next run."""
    event = {"event": "first_step", "step": 1, "time": 1000.0, "phase_seconds": {"launching": 2.0, "training": 3.0}}
    screen = Screen(json_output=False)
    monkeypatch.setattr("time.time", lambda: 1000.5)  # the line is half a second old
    monkeypatch.setattr("time.monotonic", lambda: screen.began + 9.5)
    with screen.training():
        screen.metrics(event)
        screen.metrics(event)
    began = screen.began
    monkeypatch.setattr("time.monotonic", lambda: began + 100.0)
    screen.next_run()
    monkeypatch.setattr("time.monotonic", lambda: began + 106.5)
    with screen.training():
        screen.metrics(event)
    assert capsys.readouterr().out.splitlines() == [
        "first step 9.0 s after the start (checking 4.0, launching 2.0, training 3.0)",
        "first step 5.0 s after the launch (launching 2.0, training 3.0)",
        "first step 6.0 s after the start (checking 1.0, launching 2.0, training 3.0)",
    ]


def test_time_left_of_resumed_run_uses_steps_since_its_start(capsys: pytest.CaptureFixture[str]) -> None:
    with bars.SilentBar(Screen(json_output=False), "training", None, "steps") as bar:
        bar.start(90, 100)
        assert bar.seconds_left() is None
        bar._started -= 5.0
        bar.at(95)
        assert bar.seconds_left() == pytest.approx(5.0, abs=0.5)
    capsys.readouterr()


KERNELS = model_facts(
    kernels={
        "model.attn_implementation": {"value": "sdpa", "reason": "flash-attn is not installed"},
        "kernels.loss": {"value": "chunked", "reason": "the logits are larger than one slice"},
        "kernels.liger": {"value": "false", "reason": "Liger is for GPUs"},
        "kernels.compile": {"value": "true", "reason": "the recipe requests it"},
        "kernels.mlp_slice_tokens": {"value": "null", "reason": "the recipe does not set it"},
    }
)


def test_kernels_line_names_the_chosen_kernels() -> None:
    assert kernels_line(KERNELS) == "kernels: attention sdpa, loss chunked, compile"


def test_stopped_run_keeps_bar_at_last_step() -> None:
    program = LONG_RUN + "; screen.metrics({'event': 'stopping', 'step': 2007, 'time': 1.0, 'reason': 'interrupted'})"
    lines = re.split(r"[\r\n]+", shown_on_a_terminal(program, 80))
    assert "step 2007: stopping (interrupted)" in lines
    assert [line for line in lines if line.startswith("training")][-1].startswith("training  2,007/20,000 steps")


def test_every_resolved_value_is_printed_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    show_decided(Screen(json_output=False), Resolution(resolved(), {"fsdp.reshard_after_forward": "FULL_SHARD"}, ()), KERNELS)
    shown = capsys.readouterr().out
    assert re.search(r"kernels.liger +false +Liger is for GPUs", shown)
    assert re.search(r"fsdp.reshard_after_forward +true +FULL_SHARD", shown)


def test_last_column_of_a_table_is_wrapped_to_the_terminal() -> None:
    program = (
        "from fsdp_tune.cli.verbs import command\n"
        "with command(False) as screen: screen.table('t', ['key', 'because'], [['a.key', 'words ' * 30], ['b', 'short']])"
    )
    lines = shown_on_a_terminal(program, 60).replace("\r", "").splitlines()
    assert max(map(len, lines)) <= 60
    assert " ".join(lines).split().count("words") == 30
    assert lines[4].startswith("         words")


def test_table_wider_than_the_terminal_is_printed_as_records() -> None:
    path = "/a/long-path/" + "x" * 50
    program = (
        "from fsdp_tune.cli.verbs import command\n"
        f"row = ['train', '1,234,567', {path!r}, 'two words ' * 10, '']\n"
        "with command(False) as screen: screen.table('t', ['set', 'rows', 'path', 'because', 'last'], [row, ['b', '2', '/b', 'c', 'd']])"
    )
    lines = shown_on_a_terminal(program, 80).replace("\r", "").splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[:4] == ["t", "  train", "    rows     1,234,567", f"    path     {path}"]
    assert lines[4].startswith("    because  two words two words")
    assert lines[5].startswith("             ")
    assert lines[6:] == ["  b", "    rows     2", "    path     /b", "    because  c", "    last     d"]
    wide = shown_on_a_terminal(program, 240).replace("\r", "").splitlines()
    assert wide[1].split() == ["set", "rows", "path", "because", "last"]


def test_words_of_a_table_without_room_for_them_are_below_its_rows() -> None:
    program = (
        "from fsdp_tune.cli.verbs import command\n"
        "rows = [['a.key', 'x' * 40, 'two words ' * 6], ['b', 'y', ''], ['c', 'z', 'short']]\n"
        "with command(False) as screen: screen.table('t', ['key', 'value', 'because'], rows)"
    )
    lines = shown_on_a_terminal(program, 60).replace("\r", "").splitlines()
    assert lines == [
        "t",
        "  key    value",
        "      because",
        f"  {'─' * 5}  {'─' * 40}",
        f"  a.key  {'x' * 40}",
        "      two words two words two words two words two words two",
        "      words",
        "  b      y",
        "  c      z",
        "      short",
    ]


@pytest.mark.parametrize(("columns", "lines"), [(40, [3, 4]), (200, [1, 1])])
def test_lines_are_wrapped_between_words_and_code_is_not_broken(columns: int, lines: list[int], tmp_path: Path) -> None:
    """The log has one line whatever the terminal is."""
    text = "batch: two sequences on each rank; write `training.global_batch_size: 8` to fix it"
    program = (
        "from pathlib import Path\n"
        "from fsdp_tune.cli.verbs import command\n"
        "from fsdp_tune.core.errors import Notice\n"
        f"text = {text!r}\n"
        "import os; os.dup2(1, 2)\n"
        "with command(False) as screen:\n"
        f"    screen.log_to(Path({str(tmp_path / 'log')!r}))\n"
        "    screen.message(text)\n"
        "    screen.notices([Notice('a', text)])"
    )
    shown = shown_on_a_terminal(program, columns).replace("\r", "").splitlines()
    assert max(map(len, shown)) <= columns
    assert len(shown) == sum(lines)
    assert sum("`training.global_batch_size: 8`" in line for line in shown) == 2
    assert [" ".join(line.split()) for line in (" ".join(shown[: lines[0]]), " ".join(shown[lines[0] :]))] == [text, f"notice: {text}"]
    assert len((tmp_path / "log").read_text().splitlines()) == 2


def test_files_are_printed_as_they_are() -> None:
    """A template, or a recipe, may be copied from the terminal."""
    for words, text in (
        (["templates", "show", "qwen3"], bundled_text("qwen3")),
        (["recipes", "show", "gpt2_smoke"], recipe_text("gpt2_smoke")),
    ):
        program = f"import sys; sys.argv = ['fsdp-tune', *{words}]\nfrom fsdp_tune.cli.app import main\nmain()"
        assert shown_on_a_terminal(program, 40).replace("\r", "") == text.rstrip("\n") + "\n"


def recipe_text(name: str) -> str:
    return catalogue()[name].read_text(encoding="utf-8")


@pytest.mark.parametrize("columns", [80, 120])
def test_account_of_prepared_data_fits_the_terminal(columns: int) -> None:
    program = (
        "from types import SimpleNamespace\n"
        "from fsdp_tune.cli.verbs import command\n"
        "from fsdp_tune.cli import prepare\n"
        "from fsdp_tune.data.report import DataReport\n"
        "prepare._lines = lambda report: []\n"
        "spread = {'min': 2, 'median': 300, 'max': 4096}\n"
        "account = {'rows': 889, 'examples': 889, 'tokens': 6686123, 'supervised_tokens': 2492, 'fill': 0.235,\n"
        "           'supervised_tokens_per_example': spread, 'tokens_per_example': spread}\n"
        "report = DataReport.model_validate({'sets': {'train': account, 'held_out': account}})\n"
        "data = SimpleNamespace(report=report, reused=False, path='/c')\n"
        "with command(False) as screen: prepare.show_data(screen, data)"
    )
    lines = shown_on_a_terminal(program, columns).replace("\r", "").splitlines()
    assert max(map(len, lines)) <= columns
    assert sum("6,686,123" in line for line in lines) == 2
    assert sum(" ".join(line.split()).endswith("23.5 %") for line in lines) == 2


def test_data_lines_start_with_the_training_set() -> None:
    account = {
        "rows": 9,
        "tokens": 100,
        "supervised_tokens": 25,
        "truncated": 2,
        "dropped_too_long": {"rows": 1},
        "dropped_nothing_left": {"rows": 0},
    }
    lines = data_lines(DataReport.model_validate({"sets": {"held_out": account, "train": account}}), reused=True)
    assert lines[0] == "data train: 9 rows, 100 tokens, 25 trained (25%), 2 truncated, 1 dropped (from the cache)"
