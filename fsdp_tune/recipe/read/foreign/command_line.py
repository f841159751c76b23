"""Parse the command that starts another trainer: its options, those of the launcher before it, and the variables before both."""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import dataclass
from typing import Any

from fsdp_tune.core.errors import usage_error
from fsdp_tune.recipe.read.tools import EXAMPLES, LLAMA_FACTORY, SWIFT, TRL
from fsdp_tune.recipe.scalars import ScalarError, parse_plain

LAUNCHER, ENVIRONMENT = "launcher", "environment"
"""Keys under which the options of the launcher and the variables are in the account."""
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_SUBSTITUTION = re.compile(r"\$\([^()\n']*\)")
_SHELL = frozenset({"export", "set", "cd", "echo", "module", "source", "pip", "conda", "mkdir", "if", "fi", "then", "for", "done"})
_TRAINING = ("sft", "pt", "train")
_OTHER_TRAINING = ("dpo", "kto", "grpo", "ppo", "rloo", "reward", "rlhf", "orpo", "online_dpo", "gkd", "run_mlm", "run_plm", "megatron")
_LAUNCHERS = frozenset({"accelerate", "torchrun", "deepspeed", "python", "python3", "uv", "srun", "mpirun", "nohup"})
_OPERATORS = frozenset({"|", "&&", "||", ";", "&", ">", ">>", "2>", "2>&1", "<"})
_PROGRAMS = {
    "trl": TRL,
    "megatron": SWIFT,
    "swift": SWIFT,
    "llamafactory-cli": LLAMA_FACTORY,
    "sft.py": TRL,
    "run_clm.py": EXAMPLES,
    "run_clm_no_trainer.py": EXAMPLES,
}
_SWITCHES = frozenset({"multi_gpu", "standalone", "use_fsdp", "use_deepspeed", "no_python", "module", "m", "no_local_rank", "cpu"})
"""Options of launchers that take no value, before the name of a script."""


@dataclass(frozen=True, slots=True)
class ForeignCommand:
    words: list[str]
    comments: list[str]
    """Lines of comment in the file before the command."""


def command_in(text: str) -> ForeignCommand | None:
    """Return the command of a shell script that starts a trainer, its variables first; None if there is none. Raises: usage error for
    several."""
    comments: list[str] = []
    variables: list[str] = []
    found: list[list[str]] = []
    joined = re.sub(r"\\[ \t]*\n", " ", text)
    for line in _SUBSTITUTION.sub(lambda match: f"'{match[0]}'", joined).splitlines():
        stripped = line.strip()
        if stripped.startswith("#") and not found:
            comments += [stripped.lstrip("#").strip()] if not stripped.startswith(("#!", "#SBATCH")) and stripped.strip("# ") else []
            continue
        try:
            words = shlex.split(_without_comment(stripped))
        except ValueError:
            continue
        if words[:1] == ["export"]:
            variables += [word for word in words[1:] if _VARIABLE.fullmatch(word)]
        elif words and all(_VARIABLE.fullmatch(word) for word in words):
            variables += words
        elif words and _is_program(words) and any(word.startswith("--") or word in _PROGRAMS for word in words[1:]):
            found.append(list(itertools.takewhile(lambda word: word not in _OPERATORS, words)))
    trainings = [words for words in found if _is_training(words)]
    chosen = trainings or found
    if len(chosen) > 1:
        names = " and ".join(f"`{' '.join(_without_variables(words)[:2])} …`" for words in chosen[:2])
        message = f"the file starts {len(chosen)} programs with options: {names}"
        raise usage_error("unknown-foreign-file", message, hint="leave one of them in the file")
    if not chosen:
        return None
    _check_method(chosen[0])
    return ForeignCommand(_expanded([*variables, *chosen[0]]), comments)


def _check_method(words: list[str]) -> None:
    """Raises: usage error for a command that trains by another method: a recipe of its options would train something else."""
    rest = _without_variables(words)
    options = next((index for index, word in enumerate(rest) if word.startswith("--")), len(rest))
    scripts = [word.rpartition("/")[2].removesuffix(".py") for word in rest if word.endswith(".py")]
    named = [*rest[:options], *scripts]
    found = next(
        (word for word in named if word in _OTHER_TRAINING or word.startswith(tuple(f"{name}_" for name in _OTHER_TRAINING))), None
    )
    if found is not None:
        hint = "only supervised fine-tuning and pre-training of causal language models can be imported"
        raise usage_error("no-counterpart", f"the command trains by `{found}`, which this release does not have", hint=hint)


def _without_comment(line: str) -> str:
    """Remove a comment, which begins with a `#` at the beginning of a word, outside of quotes."""
    quote = ""
    for index, character in enumerate(line):
        if character in "'\"" and quote in ("", character):
            quote = "" if quote else character
        elif character == "#" and not quote and (index == 0 or line[index - 1].isspace()):
            return line[:index]
    return line


def _is_program(words: list[str]) -> bool:
    first = next(iter(_without_variables(words)), "")
    return first not in _SHELL and re.fullmatch(r"[\w./~${}-]*[\w}]", first) is not None


def _without_variables(words: list[str]) -> list[str]:
    return list(itertools.dropwhile(lambda word: _VARIABLE.fullmatch(word) is not None, words))


def _is_training(words: list[str]) -> bool:
    """Return whether a command is a known trainer's command that trains: `swift export` prepares data."""
    _, tool = _program(_without_variables(words))
    others = (*_TRAINING, *_OTHER_TRAINING)
    return tool is not None and (any(word in others for word in words) or any(word.endswith(".py") for word in words))


def _expanded(words: list[str]) -> list[str]:
    """Replace variables of the shell that the script itself sets; those that the command does not use stay variables of its environment."""
    known = {match[1]: match[2] for word in words if (match := _VARIABLE.fullmatch(word))}
    used: set[str] = set()

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        used.add(name)
        return known.get(name, match[0])

    expanded = [_evaluated(re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, word)) for word in words]
    return [word for word in expanded if not ((match := _VARIABLE.fullmatch(word)) and match[1] in used)]


def _evaluated(word: str) -> str:
    """Return `$(expr 32 / 4)` as its number."""
    match = re.fullmatch(r"\$\(expr (\d+) ([/*]) (\d+)\)", word.replace("\\", ""))
    if match is None or match[3] == "0":
        return word
    left, right = int(match[1]), int(match[3])
    return str(left // right if match[2] == "/" else left * right)


def parse_command(words: list[str]) -> tuple[dict[str, Any], str | None]:
    """Return the options of the program, with those of its launcher and its variables under keys of their own, and the tool if its name
    tells it."""
    values: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    while words and (match := _VARIABLE.fullmatch(words[0])) and not words[0].startswith("-"):
        environment[match[1]] = _scalar(match[2])
        words = words[1:]
    start, tool = _program(words)
    if launcher := _options(words[1:start], is_launcher=True):
        values[LAUNCHER] = launcher
    if environment:
        values[ENVIRONMENT] = environment
    return values | _options(words[start + 1 :], is_launcher=False), tool


def _program(words: list[str]) -> tuple[int, str | None]:
    """Return the position of the last word before the options of the program, and the tool by its name."""
    tool = None
    position = 0
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name in _PROGRAMS or word.endswith(".py"):
            # ms-swift has a `sft.py` too, in `swift/cli`.
            tool, position = SWIFT if "swift" in word else _PROGRAMS.get(name), index
            break
    else:
        if words and words[0] not in _LAUNCHERS:
            return 0, None
    after = words[position + 1 : position + 2]
    return position + (1 if after and after[0] in _TRAINING else 0), tool


def _options(words: list[str], *, is_launcher: bool) -> dict[str, Any]:
    """Return `--name value`, `--name=value`, `--name a b` and `--name` alone, which is true. Words before the first option are left out,
    but for a file of options, as `llamafactory-cli train FILE` takes it."""
    values: dict[str, Any] = {}
    name: str | None = None
    for word in words:
        if word.startswith("-") and not _is_number(word):
            raw, sign, value = word.lstrip("-").partition("=")
            name = raw.replace("-", "_")
            if name in values:
                raise usage_error("duplicate-key", f"`--{raw}` is given twice", hint="keep one of them")
            values[name] = _scalar(value) if sign else True
            if sign or (is_launcher and name in _SWITCHES):
                name = None
        elif name is None:
            if not is_launcher and word.endswith((".yaml", ".yml", ".json")):
                values["config"] = word
            elif not is_launcher and "=" in word:
                raw, _, value = word.partition("=")
                values[raw] = _scalar(value)
        elif values[name] is True:
            values[name] = _scalar(word)
            name = None if is_launcher else name
        else:
            there = values[name]
            values[name] = [*there, _scalar(word)] if isinstance(there, list) else [there, _scalar(word)]
    return values


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-[0-9.]+(e-?[0-9]+)?", word) is not None


def _scalar(text: str) -> Any:
    """Return a value as the shell's text is read by argparse: numbers, booleans, JSON, else text."""
    try:
        return parse_plain(text)[0]
    except ScalarError:
        return text
