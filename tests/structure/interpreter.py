"""Commands in forks of one fresh interpreter that has imported the command line and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAM = """
import json, os, sys, traceback
from fsdp_tune.cli.app import main

def run(words, variables, out, err):
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(variables)
    sys.argv = ["fsdp-tune", *words]
    code = 1
    try:
        main()
        code = 0
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(answer, json.dumps([code, list(sys.modules)]).encode())
    os._exit(0)

for line in sys.stdin:
    reader, answer = os.pipe()
    if os.fork() == 0:
        run(*json.loads(line))
    os.close(answer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.wait()
    print(text, flush=True)
"""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    modules: frozenset[str]
    """What was imported when the command ended."""

    @property
    def rooms(self) -> set[str]:
        """Imported modules, those of the package by their room."""
        return {name.split(".")[1] if name.startswith("fsdp_tune.") else name for name in self.modules}


class Interpreter:
    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._folder = process, folder

    def run(self, *words: str, **variables: str) -> Ended:
        """Run `fsdp-tune WORDS` in the empty directory of the interpreter."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        out, err = self._folder / "out", self._folder / "err"
        self._process.stdin.write(json.dumps([words, variables, str(out), str(err)]) + "\n")
        self._process.stdin.flush()
        code, modules = json.loads(self._process.stdout.readline())
        return Ended(
            code, out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8"), frozenset(modules)
        )


@contextmanager
def fresh_interpreter(folder: Path) -> Iterator[Interpreter]:
    place = folder / "place"
    place.mkdir()
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        command, cwd=place, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Interpreter(process, folder)
        assert process.stdin is not None
        process.stdin.close()
