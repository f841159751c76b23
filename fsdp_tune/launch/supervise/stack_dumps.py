"""Parse stack dumps of faulthandler: where a process is, and whether it waits there for other ranks. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):$")


_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.+)$')


# Frames below the waiting call to search for the collective's name: decorators, tensor subclasses and FSDP
# are in between.
_DEPTH = 12


_PACKAGE = "fsdp_tune/"


# Modules that pass work to a process group and wait for it. The vote on stopping waits in C++, directly below
# our own code.
_WAITING_FILES = ("/torch/distributed/", "fsdp_tune/worker/agreement.py")


_DCP = "/torch/distributed/checkpoint/"


_CHECKPOINT_FILE = "fsdp_tune/worker/checkpoint/save.py"


_NAMES = {"exchange": "the vote on stopping", "_engine_run_backward": "the backward"}


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: str
    function: str

    def __str__(self) -> str:
        at = self.file.rfind(_PACKAGE)
        return f"{self.file[at:] if at >= 0 else self.file}:{self.line} in {self.function}"


Stack = tuple[Frame, ...]
"""Innermost call first."""


def parse(text: str) -> list[Stack]:
    """Return every thread of the last dump in `text`, in its order: the main thread is last."""
    stacks: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            stacks.append([])
        elif (frame := _FRAME.match(line)) and stacks:
            stacks[-1].append(Frame(frame["file"], frame["line"], frame["function"]))
    return [tuple(stack) for stack in stacks if stack]


def main_thread(stacks: Sequence[Stack]) -> Stack:
    """Return the thread that entered through `python -m`, else the last one in the dump; () without a stack.

    If it only waits for its background save, return the thread of that save.
    """
    entered = [stack for stack in stacks if stack[-1].function == "_run_module_as_main"]
    main = (entered or list(stacks) or [()])[-1]
    saves = [
        stack
        for stack in stacks
        if any(_is_of(frame, _CHECKPOINT_FILE, "_write_reporting") for frame in stack)
    ]
    joins = any(_is_of(frame, _CHECKPOINT_FILE, "wait") for frame in main)
    return saves[-1] if joins and saves else main


def _is_of(frame: Frame, file: str, function: str) -> bool:
    return frame.file.endswith(file) and frame.function == function


def waits_in(stacks: Sequence[Stack]) -> str | None:
    """Return the name of the collective in which a rank waits for others; None if it does not wait.

    In the backward on a GPU the hooks run on an autograd thread, while the main thread is in the engine.
    """
    main = main_thread(stacks)
    name = _collective(main)
    if name is None and main and main[0].function == "_engine_run_backward":
        return next((found for stack in stacks if stack is not main and (found := _collective(stack))), None)
    return name


def _collective(stack: Stack) -> str | None:
    inner = stack[:_DEPTH]
    if not any(_waits_for_group(frame) for frame in inner[:4]):
        return None
    for frame in inner:
        if (
            frame.file.endswith("distributed/distributed_c10d.py")
            and not frame.function.startswith("_")
            and frame.function != "wait"
        ):
            return frame.function
    first = next(frame for frame in inner if _waits_for_group(frame))
    return _NAMES.get(first.function, first.function)


def _waits_for_group(frame: Frame) -> bool:
    """Return whether a frame belongs to a module that waits for a process group. DCP modules read and write
    files instead."""
    return any(mark in frame.file for mark in _WAITING_FILES) and _DCP not in frame.file


def find_location(stacks: Sequence[Stack]) -> str | None:
    """Return the innermost call of the main thread, and the innermost call in this package if that is another
    one."""
    main = main_thread(stacks)
    if not main:
        return None
    ours = next((frame for frame in main if _PACKAGE in frame.file), None)
    return str(main[0]) if ours is None or ours is main[0] else f"{main[0]}, called from {ours}"
