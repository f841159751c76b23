from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from fsdp_tune.cli.screen import Screen, command
from fsdp_tune.cli.terminal_text import printable
from fsdp_tune.core import atomic
from fsdp_tune.core.errors import ExitCode, FsdpTuneError, Notice, Problem, Where, failed_error, usage_error
from fsdp_tune.core.library_errors import rust_errors_as_os_errors
from fsdp_tune.data.read.file_access import builtin_tokenizer
from tests.cli.forked import command as started
from tests.cli.forked import ended as ended_fork


def ended(
    json_output: bool,
    error: BaseException | None,
    document: dict[str, object] | None = None,
    log_directory: Path | None = None,
) -> int:
    """The exit code of a command that sets `document` and then raises `error`."""
    try:
        with command(json_output) as screen:
            screen.log_directory = log_directory
            if document is not None:
                screen.document(document)
            if error is not None:
                raise error
    except typer.Exit as stop:
        return stop.exit_code
    return 0


def test_error_prints_location_and_hint_line(capsys: pytest.CaptureFixture[str]) -> None:
    code = ended(
        False,
        usage_error(
            "unknown-key", "unknown key `x`", hint="did you mean `y`?", where=Where("recipe.yaml", 14, 3)
        ),
    )
    assert code == 2
    out, err = capsys.readouterr()
    assert err == "error: recipe.yaml:14:3: unknown key `x`\nhint: did you mean `y`?\n"
    assert out == ""


def test_all_problems_are_shown_and_ways_out_are_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    ended(
        False,
        FsdpTuneError(
            Problem("a", "first"), Problem("b", "second", ways_out=("--resume auto", "--overwrite"))
        ),
    )
    assert (
        capsys.readouterr().err == "error: first\nerror: second\nways out:\n  --resume auto\n  --overwrite\n"
    )


def test_json_document_of_a_failure_keeps_earlier_fields(capsys: pytest.CaptureFixture[str]) -> None:
    code = ended(True, failed_error("boom", "it broke", where=Where("f", 1, 2, "a.b")), {"run_dir": "r"})
    assert code == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "run_dir": "r",
        "errors": [
            {
                "code": "boom",
                "file": "f",
                "line": 1,
                "column": 2,
                "key": "a.b",
                "message": "it broke",
                "hint": None,
            }
        ],
    }
    assert err == "error: f:1:2: it broke\n"


def test_json_sends_lines_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with command(True) as screen:
        screen.message("talk")
        screen.table("t", ["a"], [["1"]])
        screen.notices([Notice("n", "note")])
        screen.document({"x": 1})
    out, err = capsys.readouterr()
    assert json.loads(out)["x"] == 1
    assert json.loads(out)["notices"][0]["message"] == "note"
    assert "talk" in err


def test_notice_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    with command(False) as screen:
        screen.notices([Notice("n", "note"), Notice("n", "note")])
        screen.notices([Notice("n", "note")])
    assert capsys.readouterr().err.count("note\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (usage_error("a", "b"), 2),
        (failed_error("a", "b"), 1),
        (FsdpTuneError(Problem("a", "b"), exit_code=ExitCode.OUT_OF_MEMORY), 3),
        (KeyboardInterrupt(), 130),
        (typer.Exit(143), 143),
        (PermissionError(13, "Permission denied", "/x"), 1),
        (ZeroDivisionError("oops"), 1),
        (None, 0),
    ],
)
@pytest.mark.parametrize("json_output", [False, True])
def test_exceptions_map_to_exit_codes(
    error: BaseException | None, code: int, json_output: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(json_output, error) == code
    if json_output:
        json.loads(capsys.readouterr().out)


def test_bug_report_names_the_traceback_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert ended(False, ZeroDivisionError("oops"), log_directory=tmp_path) == 1
    (log,) = tmp_path.iterdir()
    assert "ZeroDivisionError: oops" in log.read_text()
    err = capsys.readouterr().err
    assert str(log) in err
    assert "Traceback" not in err


def test_full_disk_is_reported_with_file_and_remedy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # what a write raises: it knows only a number

    monkeypatch.setattr(atomic.DISK, "write", full)
    with pytest.raises(OSError, match="No space") as caught:
        atomic.write_file(tmp_path / "recipe.json", "{}")
    assert ended(False, caught.value, log_directory=tmp_path) == 1
    told = capsys.readouterr().err
    assert told.startswith(
        f"error: {tmp_path / 'recipe.json'}: No space left on device\nhint: free space there, then "
        "run the command again"
    )


def test_text_that_is_no_name_of_a_file_is_shortened(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name = tmp_path / ("a" * 300)
    with pytest.raises(OSError, match="too long") as caught:
        name.exists()
    assert ended(False, caught.value, log_directory=tmp_path) == 2
    first, second = capsys.readouterr().err.splitlines()[:2]
    assert first.endswith("…: File name too long")
    assert len(first) < 100
    assert second == "hint: no file or directory can have so long a name; write a shorter one"
    assert list(tmp_path.iterdir()) == [], "no traceback of a typing mistake"


def test_link_that_leads_to_itself_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`Path.resolve` raises a RuntimeError for it before Python 3.13, which was reported as a bug."""
    link = tmp_path / "loop"
    link.symlink_to(link)
    with pytest.raises((OSError, RuntimeError)) as caught:
        link.resolve(strict=True)
    assert ended(False, caught.value, log_directory=tmp_path) == 2
    assert capsys.readouterr().err.startswith(
        f"error: {link}: Too many levels of symbolic links\nhint: the link leads to itself"
    )


def test_io_error_of_a_rust_library_is_reported_with_file_and_remedy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """tokenizers, safetensors and hf_xet raise their own exceptions with the text of an I/O error."""
    with (
        pytest.raises(OSError, match="File too large") as caught,
        rust_errors_as_os_errors(tmp_path / "model"),
    ):
        raise Exception("File too large (os error 27)")
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "model"))
    assert ended(False, caught.value, log_directory=tmp_path) == 1
    assert (
        f"error: {tmp_path / 'model'}: File too large\nhint: raise the limit of the size of files"
        in capsys.readouterr().err
    )
    for text in (
        "No such file or directory (os error 2)",
        "Error while serializing: I/O error: No such file or directory (os error 2)",
    ):
        assert ended(False, Exception(text), log_directory=tmp_path) == 1
        assert "error: [Errno 2] No such file or directory\n" in capsys.readouterr().err
    assert ended(False, Exception("os error 2"), log_directory=tmp_path) == 1
    assert "this is a bug" in capsys.readouterr().err


@pytest.mark.parametrize("library", ["tokenizers", "safetensors"])
def test_write_limit_reaches_the_libraries_as_an_os_error(tmp_path: Path, library: str) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=builtin_tokenizer("builtin:arithmetic"))

    def program() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            with rust_errors_as_os_errors(tmp_path):
                if library == "tokenizers":
                    tokenizer.save_pretrained(tmp_path)  # pyright: ignore[reportUnknownMemberType]
                else:
                    save_file({"a": torch.zeros(9999)}, tmp_path / "x.safetensors")
        except OSError as error:
            print(error.errno == errno.EFBIG, error.filename)

    assert ended_fork(program).out.split() == ["True", str(tmp_path)]


def test_removed_current_directory_is_reported(tmp_path: Path) -> None:
    def program() -> None:
        (tmp_path / "gone").mkdir()
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        started("train", "gpt2_smoke")()

    done = ended_fork(program)
    assert (done.code, done.err.splitlines()[0]) == (1, "error: the current directory has been removed")


def test_missing_file_that_a_library_words_itself_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    ended(False, FileNotFoundError("couldn't find a cached copy of rows"))
    assert "couldn't find a cached copy of rows" in capsys.readouterr().err


def test_terminal_escapes_are_printed_escaped() -> None:
    assert printable("a\x1b[31mb\r\u202e") == "a\\x1b[31mb\\r\\u202e"
    assert printable("ä\n\t漢") == "ä\n\t漢"


def test_closed_pipe_does_not_stop_a_command() -> None:
    read, write = os.pipe()
    os.close(read)
    program = (
        "import sys\nfrom fsdp_tune.cli.screen import command\n"
        "with command(False) as screen:\n for _ in range(9): screen.message('x')\nsys.stderr.write('end')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "end")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_descriptors_are_opened_on_dev_null_for_a_command_and_its_children(
    tmp_path: Path, closed: str
) -> None:
    report = tmp_path / "report"
    child = (
        "import os; print(*(os.readlink('/proc/self/fd/%d' % n) for n in range(3)), "
        f"file=open({str(report)!r}, 'w'))"
    )
    program = (
        "import subprocess, sys\nfrom fsdp_tune.cli import app\n"
        "def run():\n print('a line'); print('a line', file=sys.stderr); assert sys.stdin is not None\n"
        f" sys.exit(subprocess.run([sys.executable, '-c', {child!r}]).returncode)\n"
        "app.app = run\napp.main()"
    )
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program],
        capture_output=True,
        check=False,
        stdin=subprocess.PIPE,
    )
    assert done.returncode == 0, done.stderr
    targets = report.read_text().split()
    assert [target == "/dev/null" for target in targets] == [
        mark in f" {closed}" for mark in ("<&-", " >&-", "2>&-")
    ]


def test_full_disk_on_stdout_is_an_error() -> None:
    program = (
        "import sys, typer\nfrom fsdp_tune.cli.screen import command\n"
        "try:\n with command(True) as s: s.document({'a': 1})\nexcept typer.Exit as end: "
        "sys.exit(end.exit_code)"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (
        1,
        "error: stdout cannot be written (No space left on device)\n",
    )


def test_text_that_the_terminal_cannot_encode_is_escaped() -> None:
    program = "from fsdp_tune.cli.screen import Screen\nScreen(json_output=False).message('→ 漢')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment
    )
    assert done.stdout == "\\u2192 \\u6f22\n"


def test_log_file_has_lines_printed_before_it_was_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "logs" / "train.log"
    screen = Screen(json_output=False)
    screen.message("said early")
    screen.log_to(path)
    screen.fields(["step 1", "loss 2.0"], narrow=["step 1"])
    screen.warn("warning: w")
    screen.notices([Notice("n", "note", hint="do this")])
    screen.close([Problem("a", "it broke", hint="fix it")])
    out, err = capsys.readouterr()
    logged = [line[21:] for line in path.read_text().splitlines()]
    assert logged == [
        "said early",
        "step 1  loss 2.0",
        "warning: w",
        "notice: note",
        "hint: do this",
        "error: it broke",
        "hint: fix it",
    ]
    assert sorted(logged) == sorted((out + err).splitlines())
    assert path.stat().st_mode & 0o077 == 0


def test_unwritable_log_warns_once_and_does_not_stop_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with command(False) as screen:
        screen.log_to(tmp_path / "train.log")
        monkeypatch.setattr(atomic.DISK, "write", full)
        screen.message("first")
        screen.message("second")
    out, err = capsys.readouterr()
    assert out == "first\nsecond\n"
    assert (
        err == f"warning: {tmp_path}/train.log cannot be written (No space left on device) and is closed; "
        "the run continues\n"
    )
