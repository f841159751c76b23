"""Environment variables with values that a library refuses while it is imported, such as
`TORCH_LOGS=garbage`.

Libraries read dozens of variables and raise at once, in any process, with a traceback into their own code.
The variable is found in that traceback: its name is in the message, or in the statement that failed, or its
value is quoted in the message.

A directory of PYTHONPATH may have a module that is named like one of a library.
"""

from __future__ import annotations

import ast
import linecache
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdp_tune.core.errors import Problem, usage_error
from fsdp_tune.core.import_path import PACKAGE
from fsdp_tune.core.secrets import masked
from fsdp_tune.core.units import shown

_START = "Traceback (most recent call last):\n"
_FRAME = re.compile(r'^\s+File "([^"]+)", line (\d+), in (\S+)$', re.MULTILINE)
_RAISED = re.compile(r"^\S*?([A-Za-z_][\w.]*): ?(?!\s*File)", re.MULTILINE)
_LIBRARY = re.compile(r"(?:site|dist)-packages/([^/]+)/")
_NO_REFUSALS = frozenset(
    {
        *(
            "ImportError",
            "ModuleNotFoundError",
            "OSError",
            "FileNotFoundError",
            "PermissionError",
            "MemoryError",
            "OutOfMemoryError",
        ),
        *("ChildFailedError", "SignalException"),
    }
)
"""What they report is missing (a library, a file, memory), or is the end of another process."""

_OF_WRONG_MODULE = ("AttributeError", "ImportError", "ModuleNotFoundError")
"""Errors that name the module which lacks something."""

BOOLEANS = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
"""Variables that Hugging Face's libraries take as 0 unless they know the word."""
_OF_THE_SHELL = frozenset(
    {
        "HOME",
        "HOSTNAME",
        "LANG",
        "LOGNAME",
        "OLDPWD",
        "PATH",
        "PWD",
        "SHELL",
        "SHLVL",
        "TERM",
        "TMPDIR",
        "USER",
    }
)
"""Variables whose values appear in messages of all kinds."""
_WORDS = frozenset({"", "1", "ON", "YES", "TRUE", "0", "OFF", "NO", "FALSE"})


@dataclass(frozen=True, slots=True)
class _Traceback:
    frames: list[tuple[str, int, str]]
    """File, line and function, from the outermost."""
    kind: str
    message: str

    @property
    def importing(self) -> list[str]:
        """The files of the modules that were being imported, from the outermost.

        The module that `python -m` runs is no import: its frame is called by `runpy`, and is below everything
        that the program does.
        """
        callers = ["", *(function for _, _, function in self.frames)]
        return [
            file
            for caller, (file, _, function) in zip(callers, self.frames, strict=False)
            if function == "<module>" and caller != "_run_code"
        ]

    @property
    def library(self) -> str | None:
        """The library that was being imported; None: the exception was not raised by an import."""
        imported = [match[1] for file in self.importing if (match := _LIBRARY.search(file))]
        return imported[-1] if imported else None


def raise_if_refused(text: str, environment: Mapping[str, str] | None = None) -> None:
    """Raise a usage error if a traceback in `text` is that of a library that refuses an environment
    variable."""
    if (problem := find_refusal(text, environment)) is not None:
        raise usage_error(problem.code, problem.message, hint=problem.hint)


def find_refusal(text: str, environment: Mapping[str, str] | None = None) -> Problem | None:
    """Return the problem of the variable that a library refused, by a traceback in `text`; None if there is
    none.

    `environment`: that of the process that wrote the text; None: as of this one.
    """
    variables = os.environ if environment is None else environment
    for trace in _tracebacks(text):
        if (hidden := _hidden_module(trace, variables)) is not None:
            return hidden
        if trace.library is None or trace.kind.rpartition(".")[2] in _NO_REFUSALS:
            continue
        if (
            name := _in_message(trace, variables)
            or _in_statement(trace, variables)
            or _by_value(trace, variables)
        ) is not None:
            value = masked(name, variables[name])
            reason = next((line.strip() for line in trace.message.splitlines() if line.strip()), trace.kind)
            reason = reason.replace(variables[name], value)[:200] if variables[name] else reason
            message = (
                f"{trace.library} does not accept the environment variable {name}={shown(value)}: {reason}"
            )
            return Problem("environment-variable", message, hint=f"correct it, or remove it: `unset {name}`")
    return None


def refuse_odd_booleans(environment: Mapping[str, str]) -> None:
    """Raise a usage error for a switch whose value is neither on nor off; libraries would take it as off."""
    for name in BOOLEANS:
        if (value := environment.get(name, "")).upper() not in _WORDS:
            message = f"the environment variable {name}={shown(value)} is neither on nor off"
            raise usage_error("environment-variable", message, hint=f"write `{name}=1` or `{name}=0`")


def _hidden_module(trace: _Traceback, variables: Mapping[str, str]) -> Problem | None:
    """Return the problem of a module in a directory of PYTHONPATH that was imported in the place of another
    of the same name."""
    named = (
        re.findall(r"'(\w+)(?:\.[\w.]+)?'", trace.message)
        if trace.kind.rpartition(".")[2] in _OF_WRONG_MODULE
        else []
    )
    reason = f"{trace.kind}: {trace.message.strip()}".splitlines()[0][:200]
    for folder in map(Path, filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))):
        running = [
            Path(file).relative_to(folder).parts[0]
            for file in trace.importing
            if Path(file).is_relative_to(folder)
        ]
        for name in [*named, *(part.removesuffix(".py") for part in running)]:
            path = next(
                (path for path in (folder / name / "__init__.py", folder / f"{name}.py") if path.is_file()),
                None,
            )
            if path is not None and name != PACKAGE and (hidden := _hidden_by(name, folder)) is not None:
                message = f"PYTHONPATH leads to {path}, which hides {hidden}: {reason}"
                return Problem(
                    "environment-variable",
                    message,
                    hint=f"rename {path}, or leave {folder} out of PYTHONPATH",
                )
    return None


def _hidden_by(name: str, folder: Path) -> str | None:
    """Describe the module that is not imported if a directory before it has one of the same name; None if
    there is no other."""
    if name in sys.stdlib_module_names:
        return f"Python's own module `{name}`"
    installed = [
        Path(entry)
        for entry in sys.path
        if Path(entry).name in ("site-packages", "dist-packages") and Path(entry) != folder
    ]
    is_there = any(
        (entry / name / "__init__.py").is_file() or (entry / f"{name}.py").is_file() for entry in installed
    )
    return f"the installed `{name}`" if is_there else None


def _tracebacks(text: str) -> Iterator[_Traceback]:
    for part in text.split(_START)[1:]:
        frames = list(_FRAME.finditer(part))
        raised = _RAISED.search(part, frames[-1].end()) if frames else None
        if raised is not None:
            yield _Traceback(
                [(frame[1], int(frame[2]), frame[3]) for frame in frames],
                raised[1],
                part[raised.end() :][:2000],
            )


def _in_message(trace: _Traceback, variables: Mapping[str, str]) -> str | None:
    return next(
        (name for name in re.findall(r"\b[A-Z][A-Z0-9_]{2,}\b", trace.message) if name in variables), None
    )


def _in_statement(trace: _Traceback, variables: Mapping[str, str]) -> str | None:
    """Return the variable that the statement of a frame reads, from the innermost frame outwards."""
    for file, line, _ in reversed(trace.frames):
        names = re.findall(r"""["']([A-Z][A-Z0-9_]{2,})["']""", _statement(file, line))
        if (name := next((name for name in names if name in variables), None)) is not None:
            return name
    return None


def _by_value(trace: _Traceback, variables: Mapping[str, str]) -> str | None:
    """Return the only variable of a library whose value is a word of the message."""
    message = trace.message.lower()
    found = [
        name
        for name, value in variables.items()
        if re.fullmatch(r"[A-Z][A-Z0-9_]+", name)
        and name not in _OF_THE_SHELL
        and len(value) > 1
        and _has_word(message, value.lower())
    ]
    return found[0] if len(found) == 1 else None


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None


def _statement(file: str, line: int) -> str:
    """Return the source of the simple statement around a line, or the line."""
    source = linecache.getlines(file)
    try:
        nodes = [
            node
            for node in ast.walk(ast.parse("".join(source)))
            if isinstance(node, ast.stmt) and not hasattr(node, "body")
        ]
    except (SyntaxError, ValueError):
        nodes = []
    around = [node for node in nodes if node.lineno <= line <= (node.end_lineno or node.lineno)]
    first, last = (around[0].lineno, around[0].end_lineno or line) if around else (line, line)
    return "".join(source[first - 1 : last])
