"""Read the command that starts a trainer: the options of the program, those of its launcher, and the
variables before both."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from fsdp_tune.core.errors import usage_error
from fsdp_tune.migrate.read.command_options import (
    SWITCHES,
    options_of,
    part_of,
    torchtune_options,
    without_negations,
)
from fsdp_tune.migrate.read.shell_script import ShellScript, Unexpanded
from fsdp_tune.migrate.read.shell_syntax import Statement, script_of_shell
from fsdp_tune.recipe.read.tool_detection import AXOLOTL, EXAMPLES, FMS, LLAMA_FACTORY, SWIFT, TORCHTUNE, TRL

LAUNCHER, ENVIRONMENT = "launcher", "environment"
"""Keys under which the options of the launcher and the variables are in the account."""
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_ASSIGNS = re.compile(r"[A-Za-z_]\w*=")
_SETS = re.compile(r"\w+\.[\w.]+=")
"""A key of Hydra, `trainer.total_epochs=3`."""
_SHELL = frozenset(
    {
        "export",
        "set",
        "cd",
        "echo",
        "module",
        "source",
        "pip",
        "conda",
        "mkdir",
        "if",
        "fi",
        "then",
        "for",
        "done",
    }
)
_TRAINING = ("sft", "pt", "train")
COMMAND = "command"
"""Key under which the account has ms-swift's word for the method, where it is not `sft`."""
_OTHER_TRAINING = (
    "dpo",
    "kto",
    "grpo",
    "ppo",
    "rloo",
    "reward",
    "rlhf",
    "orpo",
    "online_dpo",
    "gkd",
    "run_mlm",
    "run_plm",
    "megatron",
    "knowledge_distillation",
)
_LAUNCHERS = frozenset(
    {"accelerate", "torchrun", "deepspeed", "python", "python3", "uv", "srun", "mpirun", "nohup"}
)
_PROGRAMS = {
    "trl": TRL,
    "axolotl": AXOLOTL,
    "axolotl.cli.train": AXOLOTL,
    "megatron": SWIFT,
    "swift": SWIFT,
    "llamafactory-cli": LLAMA_FACTORY,
    "sft.py": TRL,
    "run_clm.py": EXAMPLES,
    "run_clm_no_trainer.py": EXAMPLES,
    "sft_trainer.py": FMS,
    "tuning.sft_trainer": FMS,
    "tune": TORCHTUNE,
}
_STARTERS = frozenset(
    {"accelerate", "deepspeed", "trl", "axolotl", "megatron", "swift", "llamafactory-cli", "tune"}
)
STARTS_EACH_RANK = ("srun", "mpirun")
"""Launchers that start a program once for each rank, on all machines; the account has them as options if they
start it directly."""
_TORCHTUNE_RECIPE = re.compile(r"^[\w/]+_(?:single_device|distributed)(?:\.py)?$")
"""The word after `tune run`, and after the options of torchrun between them."""
_WRAPPERS = frozenset({"env", "nohup", "exec", "time", "command"})
"""Programs that run the command after them, with the same variables."""
_SWIFT_MODULE = "swift.cli."


@dataclass(frozen=True, slots=True)
class ForeignCommand:
    words: list[str]
    """The variables that it inherits, as assignments, and its words. Those that are not known are
    `Unexpanded`."""
    comments: list[str]
    """Lines of comment in the file before the command."""
    unread: list[str]
    """Words that may be any options, one sentence each."""
    line: int = 1
    """Line of the script on which the command starts."""
    written_file: Callable[[str], str | None] = lambda _: None
    """Returns the text of a file that the script writes before the command; None if it does not."""


class ParsedCommand(NamedTuple):
    values: dict[str, object]
    """The options, with those of the launcher and the variables under keys of their own."""
    tool: str | None
    """None if the name of the program identifies none."""


def command_in(text: str, known: Mapping[str, str] = MappingProxyType({})) -> ForeignCommand | None:
    """Return the command of a shell script that starts a trainer, its variables first; None if there is none.

    `known`: values of variables that the script does not bind.

    Raises: usage error for several.
    """
    script = ShellScript(text, known)
    found = [
        (statement, _without_marks(script.words(statement)))
        for statement in script.statements
        if not statement.is_assignment
    ]
    found = [
        (statement, words)
        for statement, words in found
        if words
        and _is_program(words)
        and any(_may_train(word) for word in (*words, *_command_of_shell(words)[1].split()))
    ]
    chosen = [each for each in found if _is_training(each[1])] or found
    if len(chosen) > 1:
        names = " and ".join(f"`{' '.join(_without_variables(words)[:2])} …`" for _, words in chosen[:2])
        message = f"the file starts {len(chosen)} programs with options: {names}"
        raise usage_error("unknown-foreign-file", message, hint="leave one of them in the file")
    if not chosen:
        return None
    statement, words = chosen[0]
    _check_end(script, statement, words)
    before, inner = _command_of_shell(words)
    if inner:
        return _inside(before, inner, script, statement, known)
    words, unread = _without_loose_words(words)
    _check_method(words)
    inherited = {name: script.value(name, statement) for name in script.exported}
    own = {match[1] for word in words if (match := _VARIABLE.fullmatch(word))}
    variables = [_joined(f"{name}=", value) for name, value in inherited.items() if name not in own]
    written = functools.partial(script.written_file, statement=statement)
    return ForeignCommand(
        [*variables, *words], _comments_before(script, statement), unread, statement.line, written
    )


def _without_marks(words: list[str]) -> list[str]:
    """Return the words without the `@` with which a Makefile does not print a command."""
    return (
        [words[0][1:], *words[1:]]
        if words and words[0].startswith("@") and not isinstance(words[0], Unexpanded)
        else words
    )


def _check_end(script: ShellScript, statement: Statement, words: list[str]) -> None:
    """Refuse a command whose options go on after its end, as after a comment between them, a space after
    `\\`, or `^` of Windows.

    Raises: usage error.
    """
    after = script.statements[script.statements.index(statement) + 1 :][:1]
    text = after[0].words[0].text if after else ""
    if words[-1] in ("^", "`") or text.startswith("--"):
        line, option = (after[0].line, f"`{text}`") if after else (statement.line, "another line")
        message = f"line {line}: the command ends before {option}, which belongs to no command"
        hint = (
            "end each line of a command but the last with `\\`: without a space after it, and with no "
            "comment between the lines"
        )
        raise usage_error("unknown-foreign-file", message, hint=hint)


def _may_train(word: str) -> bool:
    return word.startswith("--") or word in _PROGRAMS or _SETS.match(word) is not None


def _command_of_shell(words: list[str]) -> tuple[list[str], str]:
    """Return the words before `bash -c TEXT`, and its text; "" if there is none."""
    for at in range(len(words)):
        if (text := script_of_shell(words[at:])) is not None:
            return words[:at], str.__str__(text)
    return [], ""


def _inside(
    before: list[str], text: str, script: ShellScript, statement: Statement, known: Mapping[str, str]
) -> ForeignCommand | None:
    """Return the command in the text of `bash -c`, with the launcher and the variables outside of it."""
    found = command_in(text, known)
    if found is None:
        return None
    exported = [_joined(f"{name}=", script.value(name, statement)) for name in script.exported]
    own, rest = _variables_of(found.words)
    outer, launcher = _variables_of(before)
    names = {word.partition("=")[0] for word in own}
    outer = [word for word in (*exported, *outer) if word.partition("=")[0] not in names]
    written = functools.partial(script.written_file, statement=statement)
    comments = [*_comments_before(script, statement), *found.comments]
    return ForeignCommand([*outer, *own, *launcher, *rest], comments, found.unread, statement.line, written)


def _variables_of(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the assignments before a program, those of `env` too, and the other words."""
    variables: list[str] = []
    rest = list(words)
    while rest and (_VARIABLE.fullmatch(rest[0]) or rest[0] in _WRAPPERS):
        word = rest.pop(0)
        variables += [] if word in _WRAPPERS else [word]
    if "env" in rest[: _program(rest)[0]]:
        at = rest.index("env")
        inner, after = _variables_of(rest[at:])
        variables, rest = [*variables, *inner], [*rest[:at], *after]
    return variables, rest


def _joined(before: str, value: str) -> str:
    """Return a word with text before it, `Unexpanded` if the word is."""
    return Unexpanded(before + value, value.why) if isinstance(value, Unexpanded) else before + value


def _without_loose_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Remove words that are not known and belong to no option, since each may stand for several options.
    Return a sentence for each."""
    kept: list[str] = []
    unread: list[str] = []
    for word in words:
        is_value = bool(kept) and kept[-1].startswith("-") and "=" not in kept[-1]
        is_set = _ASSIGNS.match(word) or _SETS.match(word)
        if not isinstance(word, Unexpanded) or not kept or is_value or is_set or word.startswith("-"):
            kept.append(word)
        else:
            unread.append(f"`{word}` of the command may be options: {word.why}; write what they set")
    return kept, unread


def _comments_before(script: ShellScript, statement: Statement) -> list[str]:
    lines = [(line, f"#{text}") for line, text in script.comments if line < statement.line]
    return [
        text.lstrip("#").strip()
        for _, text in lines
        if not text.startswith(("#!", "#SBATCH")) and text.strip("# ")
    ]


def _check_method(words: list[str]) -> None:
    """Refuse a command that trains by another method, since a recipe of its options would train something
    else. Raises: usage error."""
    rest = _without_variables(words)
    options = next((index for index, word in enumerate(rest) if word.startswith("--")), len(rest))
    parts = [
        part
        for word in rest
        if "tune" in rest and _TORCHTUNE_RECIPE.search(word)
        for part in re.split(r"[_/]", word)
    ]
    scripts = [word.rpartition("/")[2].removesuffix(".py") for word in rest if word.endswith(".py")]
    named = [
        *rest[:options],
        *scripts,
        *(f"{part}_distillation" if part == "knowledge" else part for part in parts),
    ]
    found = next(
        (
            word
            for word in named
            if word in _OTHER_TRAINING or word.startswith(tuple(f"{name}_" for name in _OTHER_TRAINING))
        ),
        None,
    )
    if found is not None:
        raise usage_error(
            "no-counterpart",
            f"the command trains by `{found}`, which this release does not have",
            hint=_IMPORTED,
        )
    verb = _verb(rest)
    if verb is not None and verb not in _TRAINING:
        raise usage_error("no-counterpart", f"the command does not train, but runs `{verb}`", hint=_IMPORTED)


_IMPORTED = "only supervised fine-tuning and pre-training of causal language models can be imported"


def _verb(words: list[str]) -> str | None:
    """Return what a command of a tool does: the word after its name, or the last part of its script or
    module."""
    for index, word in enumerate(words[: _program(words)[0] + 1]):
        name, after = word.rpartition("/")[2], "".join(words[index + 1 : index + 2])
        if name in ("trl", "swift", "llamafactory-cli", "axolotl") and _is_started(words, index):
            return after if after and not after.startswith("-") and "." not in after else None
        if word.startswith(_SWIFT_MODULE) or ("swift/cli/" in word and word.endswith(".py")):
            return name.removeprefix(_SWIFT_MODULE).removesuffix(".py")
    return None


def _is_started(words: list[str], index: int) -> bool:
    """Return whether the name of a tool starts it. After an option it may be a value (`--job-name trl`),
    unless its verb follows."""
    before, after = "".join(words[max(0, index - 1) : index]), "".join(words[index + 1 : index + 2])
    is_option = before.startswith("-") and before != "--" and "=" not in before
    return (
        not is_option
        or before.lstrip("-").replace("-", "_") in SWITCHES
        or after in ("run", *_TRAINING, *_OTHER_TRAINING)
    )


def _is_program(words: list[str]) -> bool:
    first = next(iter(_without_variables(words)), "")
    return first not in _SHELL and re.fullmatch(r"[\w./~${}-]*[\w}]", first) is not None


def _without_variables(words: list[str]) -> list[str]:
    return list(itertools.dropwhile(lambda word: _VARIABLE.fullmatch(word) is not None, words))


def _is_training(words: list[str]) -> bool:
    """Return whether a command is a known trainer's command that trains: `swift export` prepares data."""
    _, tool = _program(_without_variables(words))
    others = (*_TRAINING, *_OTHER_TRAINING)
    if inner := _command_of_shell(words)[1]:
        return any(_is_training(ShellScript(inner).words(each)) for each in ShellScript(inner).statements)
    return tool is not None and (
        tool == TORCHTUNE or any(word in others or word.endswith(".py") for word in words)
    )


def parse_command(words: list[str]) -> ParsedCommand:
    """Return the options of the program, and the tool if the program's name identifies it.

    Options of its launcher and variables are under keys of their own.
    """
    values: dict[str, object] = {}
    environment: dict[str, object] = {}
    variables, words = _variables_of(words)
    for word in variables:
        name, _, text = word.partition("=")
        value = part_of(word, text)
        # The text is what a program gets; the number of ranks is read as a number here.
        environment[name] = value if isinstance(value, Unexpanded) or str(value) == text else text
    start, tool = _program(words)
    launcher = options_of(words[1:start], is_launcher=True)
    if starter(words) == "python" and (
        of_slurm := next((word for word in words[:start] if word in STARTS_EACH_RANK), None)
    ):
        launcher[of_slurm] = True
    if launcher:
        values[LAUNCHER] = launcher
    if environment:
        values[ENVIRONMENT] = environment
    if tool == SWIFT and _verb(words) == "pt":
        values[COMMAND] = "pt"
    if tool == TORCHTUNE:
        return ParsedCommand(values | torchtune_options(words[start + 1 :]), tool)
    return ParsedCommand(
        values | without_negations(options_of(words[start + 1 :], is_launcher=False), tool), tool
    )


def starter(words: list[str]) -> str:
    """Return what starts the ranks of a command: "torchrun", another launcher or the tool's own, or "python"
    if each is started alone."""
    _, words = _variables_of(words)
    names = [word.rpartition("/")[2] for word in words[: _program(words)[0] + 1]]
    has_verbs = _STARTERS - {"accelerate", "deepspeed"}
    if any(name == "torchrun" or name.startswith("torch.distributed.") for name in names):
        return "torchrun"
    return next(
        (
            name
            for at, name in enumerate(names)
            if name in _STARTERS and (name not in has_verbs or _is_started(words, at))
        ),
        "python",
    )


def _program(words: list[str]) -> tuple[int, str | None]:
    """Return the position of the last word before the options of the program, and the tool by its name."""
    tool = None
    position = 0
    if (
        recipe := next((at for at, word in enumerate(words) if _TORCHTUNE_RECIPE.search(word)), None)
    ) is not None and "tune" in words:
        return recipe, TORCHTUNE
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        is_module = index > 0 and words[index - 1] == "-m"
        if word.endswith(".py") or is_module or (name in _PROGRAMS and _is_started(words, index)):
            # ms-swift has a `sft.py` too, in `swift/cli`.
            tool, position = SWIFT if "swift" in word else _PROGRAMS.get(name), index
            break
    else:
        if words and words[0] not in _LAUNCHERS:
            return 0, None
    after = words[position + 1 : position + 2]
    return position + (1 if after and after[0] in _TRAINING else 0), tool
