"""Read the configuration of another tool, with lines and comments: YAML, JSON, or the command that starts it, in a text file.

Of a command, the options of the program, those of the launcher before it, and the variables before both are read.
"""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from fsdp_tune.core.errors import FsdpTuneError, Problem, Where, usage_error
from fsdp_tune.core.units import ScalarError, parse_plain
from fsdp_tune.recipe.read.foreign.ledger import Path as KeyPath
from fsdp_tune.recipe.read.foreign.python_script import MOST_BYTES, read_script
from fsdp_tune.recipe.read.foreign.shell_script import ShellScript, Statement, Unexpanded
from fsdp_tune.recipe.read.other_tools import no_importer, other_tool
from fsdp_tune.recipe.read.tools import AXOLOTL, EXAMPLES, FMS, LLAMA_FACTORY, OPTION_NAMES, SCRIPTS, SWIFT, TRL, UNSLOTH, tool_of, tried
from fsdp_tune.recipe.read.yaml_source import ListNode, MappingNode, Node, compose, read_text

LAUNCHER, ENVIRONMENT = "launcher", "environment"
"""Keys under which the options of the launcher and the variables are in the account."""
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_ASSIGNS = re.compile(r"[A-Za-z_]\w*=")
_SETS = re.compile(r"\w+\.[\w.]+=")
"""A key of Hydra, `trainer.total_epochs=3`."""
_PLACEHOLDER = re.compile(r"\$\{[^{}]*\}|\$[A-Za-z_]\w*$")
"""Text that a tool, or the shell, replaces before it is a value."""
_SHELL = frozenset({"export", "set", "cd", "echo", "module", "source", "pip", "conda", "mkdir", "if", "fi", "then", "for", "done"})
_TRAINING = ("sft", "pt", "train")
COMMAND = "command"
"""Key under which the account has ms-swift's word for the method, where it is not `sft`."""
_OTHER_TRAINING = ("dpo", "kto", "grpo", "ppo", "rloo", "reward", "rlhf", "orpo", "online_dpo", "gkd", "run_mlm", "run_plm", "megatron")
_LAUNCHERS = frozenset({"accelerate", "torchrun", "deepspeed", "python", "python3", "uv", "srun", "mpirun", "nohup"})
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
}
_SWIFT_MODULE = "swift.cli."
_SWITCHES = frozenset({"multi_gpu", "standalone", "use_fsdp", "use_deepspeed", "no_python", "module", "m", "no_local_rank", "cpu"})
"""Options of launchers that take no value, before the name of a script."""


@dataclass(frozen=True, slots=True)
class ForeignCommand:
    words: list[str]
    """The variables that it inherits, as assignments, and its words. Those that are not known are `Unexpanded`."""
    comments: list[str]
    """Lines of comment in the file before the command."""
    unread: list[str]
    """Words that may be any options, one sentence each."""


def command_in(text: str) -> ForeignCommand | None:
    """Return the command of a shell script that starts a trainer, its variables first; None if there is none.

    Raises: usage error for several.
    """
    script = ShellScript(text)
    found = [(statement, script.words(statement)) for statement in script.statements if not statement.is_assignment]
    found = [
        (statement, words)
        for statement, words in found
        if words and _is_program(words) and any(word.startswith("--") or word in _PROGRAMS or _SETS.match(word) for word in words)
    ]
    chosen = [each for each in found if _is_training(each[1])] or found
    if len(chosen) > 1:
        names = " and ".join(f"`{' '.join(_without_variables(words)[:2])} …`" for _, words in chosen[:2])
        message = f"the file starts {len(chosen)} programs with options: {names}"
        raise usage_error("unknown-foreign-file", message, hint="leave one of them in the file")
    if not chosen:
        return None
    statement, words = chosen[0]
    words, unread = _without_loose_words(words)
    _check_method(words)
    inherited = {name: script.value(name, statement) for name in script.exported}
    own = {match[1] for word in words if (match := _VARIABLE.fullmatch(word))}
    variables = [_joined(f"{name}=", value) for name, value in inherited.items() if name not in own]
    return ForeignCommand([*variables, *words], _comments_before(script, statement), unread)


def _joined(before: str, value: str) -> str:
    """Return a word with text before it, `Unexpanded` if the word is."""
    return Unexpanded(before + value, value.why) if isinstance(value, Unexpanded) else before + value


def _without_loose_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Remove words that are not known and are the value of no option: each may be any options. Return a sentence for each, too."""
    kept: list[str] = []
    unread: list[str] = []
    for word in words:
        is_value = bool(kept) and kept[-1].startswith("-") and "=" not in kept[-1]
        if not isinstance(word, Unexpanded) or not kept or is_value or _ASSIGNS.match(word) or word.startswith("-"):
            kept.append(word)
        else:
            unread.append(f"`{word}` of the command may be options: {word.why}; write what they set")
    return kept, unread


def _comments_before(script: ShellScript, statement: Statement) -> list[str]:
    lines = [(line, f"#{text}") for line, text in script.comments if line < statement.line]
    return [text.lstrip("#").strip() for _, text in lines if not text.startswith(("#!", "#SBATCH")) and text.strip("# ")]


def _check_method(words: list[str]) -> None:
    """Refuse a command that trains by another method, since a recipe of its options would train something else. Raises: usage error."""
    rest = _without_variables(words)
    options = next((index for index, word in enumerate(rest) if word.startswith("--")), len(rest))
    scripts = [word.rpartition("/")[2].removesuffix(".py") for word in rest if word.endswith(".py")]
    named = [*rest[:options], *scripts]
    found = next(
        (word for word in named if word in _OTHER_TRAINING or word.startswith(tuple(f"{name}_" for name in _OTHER_TRAINING))), None
    )
    if found is not None:
        raise usage_error("no-counterpart", f"the command trains by `{found}`, which this release does not have", hint=_IMPORTED)
    verb = _verb(rest)
    if verb is not None and verb not in _TRAINING:
        raise usage_error("no-counterpart", f"the command does not train, but runs `{verb}`", hint=_IMPORTED)


_IMPORTED = "only supervised fine-tuning and pre-training of causal language models can be imported"


def _verb(words: Sequence[str]) -> str | None:
    """Return what a command of a tool does: the word after its name, or the last part of its script or module."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name = word.rpartition("/")[2]
        if name in ("trl", "swift", "llamafactory-cli", "axolotl"):
            return after if after and not after.startswith("-") and "." not in after else None
        if word.startswith(_SWIFT_MODULE) or ("swift/cli/" in word and word.endswith(".py")):
            return name.removeprefix(_SWIFT_MODULE).removesuffix(".py")
    return None


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


def parse_command(words: list[str]) -> tuple[dict[str, Any], str | None]:
    """Return the options of the program, and the tool if the program's name identifies it.

    Options of its launcher and variables are under keys of their own.
    """
    values: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    while words and (match := _VARIABLE.fullmatch(words[0])) and not words[0].startswith("-"):
        value = _part_of(words[0], match[2])
        # The text is what a program gets; the number of ranks is read as a number here.
        environment[match[1]] = value if isinstance(value, Unexpanded) or str(value) == match[2] else match[2]
        words = words[1:]
    start, tool = _program(words)
    if launcher := _options(words[1:start], is_launcher=True):
        values[LAUNCHER] = launcher
    if environment:
        values[ENVIRONMENT] = environment
    if tool == SWIFT and _verb(words) == "pt":
        values[COMMAND] = "pt"
    return values | _options(words[start + 1 :], is_launcher=False), tool


def _program(words: list[str]) -> tuple[int, str | None]:
    """Return the position of the last word before the options of the program, and the tool by its name."""
    tool = None
    position = 0
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        is_module = index > 0 and words[index - 1] == "-m"
        if name in _PROGRAMS or word.endswith(".py") or is_module:
            # ms-swift has a `sft.py` too, in `swift/cli`.
            tool, position = SWIFT if "swift" in word else _PROGRAMS.get(name), index
            break
    else:
        if words and words[0] not in _LAUNCHERS:
            return 0, None
    after = words[position + 1 : position + 2]
    return position + (1 if after and after[0] in _TRAINING else 0), tool


def _options(words: list[str], *, is_launcher: bool) -> dict[str, Any]:
    """Return the options: `--name value`, `--name=value`, `--name a b`, and `--name` alone, which is true.

    Words before the first option are left out, except a file of options, as `llamafactory-cli train FILE` takes it.
    """
    values: dict[str, Any] = {}
    name: str | None = None
    for word in words:
        if word.startswith("-") and not _is_number(word):
            raw, sign, value = word.lstrip("-").partition("=")
            name = raw.replace("-", "_")
            if name in values:
                raise usage_error("duplicate-key", f"`--{raw}` is given twice", hint="keep one of them")
            values[name] = _part_of(word, value) if sign else True
            if sign or (is_launcher and name in _SWITCHES):
                name = None
        elif name is None:
            if not is_launcher and word.endswith((".yaml", ".yml", ".json")):
                values["config"] = word
            elif not is_launcher and "=" in word:
                raw, _, value = word.partition("=")
                values[raw] = _part_of(word, value)
        elif values[name] is True:
            values[name] = _scalar(word)
            name = None if is_launcher else name
        else:
            there = values[name]
            values[name] = [*there, _scalar(word)] if isinstance(there, list) else [there, _scalar(word)]
    return values


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-[0-9.]+(e-?[0-9]+)?", word) is not None


def _part_of(word: str, text: str) -> Any:
    """Return the value in the part of a word after its `=`."""
    return Unexpanded(text, word.why) if isinstance(word, Unexpanded) else _scalar(text)


def _scalar(text: str) -> Any:
    """Return a value as the shell's text is read by argparse: numbers, booleans, JSON, else text."""
    if isinstance(text, Unexpanded):
        return text
    try:
        return parse_plain(text)[0]
    except ScalarError:
        return text


_YAML = (".yaml", ".yml")


@dataclass(slots=True)
class ForeignFile:
    path: Path
    tool: str
    values: dict[str, Any]
    lines: Mapping[KeyPath, int] = field(default_factory=dict[KeyPath, int])
    above: Mapping[KeyPath, list[str]] = field(default_factory=dict[KeyPath, list[str]])
    """Lines of comment before a key."""
    beside: Mapping[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    """The comment on the line of a key."""
    computed: Mapping[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    """Keys whose value only running the script would give, each with why."""
    unread: Sequence[str] = ()
    """Parts of a script that are not among the values, one sentence each."""
    named: Path | None = None
    """The file of options that it names, whose keys are among the values; those that the file has too are under `config`."""


def read_foreign(path: Path, tool: str | None = None) -> ForeignFile:
    """Read a file, and recognise its tool unless it is given. Raises: FsdpTuneError if it has no keys, or those of no tool."""
    if path.suffix in SCRIPTS:
        if tool not in (None, UNSLOTH):
            hint = "name the file of its options, or the script with its command"
            raise usage_error("unknown-foreign-file", f"a Python file is not a configuration of {tool}", hint=hint, where=Where(str(path)))
        script = read_script(read_text(path, most_bytes=MOST_BYTES), path)
        return ForeignFile(path, UNSLOTH, script.values, script.lines, {}, script.beside, script.computed, script.unread)
    text = read_text(path)
    command = None if path.suffix in (*_YAML, ".json", ".toml") else command_in(text)
    if command is not None:
        values, named = parse_command(command.words)
        found = ForeignFile(path, tool or named or "", values, above={(): command.comments}, unread=command.unread)
    elif path.suffix == ".json":
        found = ForeignFile(path, tool or "", _json(text, path))
    elif path.suffix == ".toml":
        found = ForeignFile(path, tool or "", _toml(text, path))
    else:
        found = _yaml(text, path, tool or "")
    _take_named_file(found)
    if not found.tool and (other := other_tool(found.values)) is not None:
        message, hint = no_importer(other, found.values)
        raise usage_error("unknown-foreign-file", message, hint=hint, where=Where(str(path)))
    found.tool = found.tool or tool_of(found.values) or ""
    if not found.tool:
        names = ", ".join(OPTION_NAMES)
        message = f"this is not recognised as the configuration of another trainer; keys that tell it: {tried(found.values)}"
        raise usage_error("unknown-foreign-file", message, hint=f"name the tool with `--from`: {names}", where=Where(str(path)))
    return found


def take_unexpanded(values: dict[str, Any]) -> dict[KeyPath, str]:
    """Return why each key has no known value whose text the shell or the tool replaces; `values` then have it as plain text."""
    return dict(_unexpanded(values, ()))


def _unexpanded(value: dict[str, Any] | list[Any], path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    pairs = cast("list[tuple[Any, Any]]", list(value.items() if isinstance(value, dict) else enumerate(value)))
    is_leaf = isinstance(value, list) and not any(isinstance(item, dict | list) for _, item in pairs)
    for name, inner in pairs:
        place = path if is_leaf else (*path, name)
        if isinstance(inner, Unexpanded):
            yield place, f"{inner.why}: write its value"
            value[name] = str.__str__(inner)
        elif isinstance(inner, str) and _PLACEHOLDER.search(inner) and not _IS_TEXT.search(str(place[-1] if place else "")):
            yield place, f"`{inner}` is replaced by the tool or its environment: write its value"
        elif isinstance(inner, dict | list):
            yield from _unexpanded(cast("dict[str, Any] | list[Any]", inner), place)


_IS_TEXT = re.compile(r"template|prompt|system|jinja|regex|pattern")
"""Keys whose text may have a `$` of its own."""


def existing_file(directory: Path, name: str) -> Path | None:
    """Return the file of a name in a configuration, which is relative to its directory, to one of those above, or to this one."""
    places = [directory / name, Path(name), *(above / name for above in list(directory.resolve().parents)[:3])]
    return next((place for place in places if place.suffix in (*_YAML, ".json") and place.is_file()), None)


def _take_named_file(found: ForeignFile) -> None:
    """Put the keys of the file of options that a command names beside its own, which come first: rules read one from another."""
    name = found.values.get("config")
    found.named = existing_file(found.path.parent, name) if isinstance(name, str) else None
    if found.named is None:
        return
    inner = read_mapping(found.named)
    hidden = {key: value for key, value in inner.items() if key in found.values}
    found.values = {**inner, **found.values, "config": hidden or name}


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the values of a YAML or JSON file that another one names. Raises: FsdpTuneError."""
    text = read_text(path)
    return _json(text, path) if path.suffix == ".json" else _yaml(text, path, "").values


def _json(text: str, path: Path) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise usage_error("duplicate-key", f"`{twice}` is written twice", hint="keep one of them", where=Where(str(path)))
        return dict(pairs)

    try:
        values = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        where = Where(str(path), error.lineno, error.colno)
        raise usage_error("yaml-syntax", f"the file is not JSON: {error.msg}", where=where) from error
    return _mapping(values, path)


def _toml(text: str, path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise usage_error("yaml-syntax", f"the file is not TOML: {error}", where=Where(str(path))) from error
    return _mapping(values, path)


def _mapping(values: object, path: Path) -> dict[str, Any]:
    if not isinstance(values, dict) or not values:
        raise usage_error("not-a-mapping", "the file has no keys with values", where=Where(str(path)))
    return cast("dict[str, Any]", values)


def _yaml(text: str, path: Path, tool: str) -> ForeignFile:
    root, problems = compose(text, str(path))
    wrong = [problem for problem in problems if problem.code != "recipe-not-text"]
    if wrong:
        raise FsdpTuneError(*(_about_the_file(problem) for problem in wrong))
    values = _mapping(None if root is None else _value(root), path)
    lines: dict[KeyPath, int] = {}
    if root is not None:
        _collect_lines(root, (), lines)
    above, beside = _comments(text, lines)
    return ForeignFile(path, tool, values, lines, above, beside)


def _about_the_file(problem: Problem) -> Problem:
    return Problem(problem.code, problem.message.replace("the recipe", "the file"), problem.where, problem.hint)


def _value(node: Node) -> Any:
    """Return a node as values. Other tools read YAML 1.1, in which `yes` is a boolean and `1_000` a number."""
    if isinstance(node, MappingNode):
        return {key: _value(entry.node) for key, entry in node.entries.items()}
    if isinstance(node, ListNode):
        return [_value(item) for item in node.items]
    if node.plain and node.suspicion is not None:
        value = yaml.safe_load(node.text)
        return value if isinstance(value, bool | int | float) else node.value
    return node.value


def _collect_lines(node: Node, path: KeyPath, lines: dict[KeyPath, int]) -> None:
    if isinstance(node, MappingNode):
        for name, entry in node.entries.items():
            lines[(*path, name)] = entry.where.line or 0
            _collect_lines(entry.node, (*path, name), lines)
    elif isinstance(node, ListNode):
        for index, item in enumerate(node.items):
            lines[(*path, index)] = item.where.line or 0
            _collect_lines(item, (*path, index), lines)


_BESIDE = re.compile(r"""^(?:[^#"']|"[^"]*"|'[^']*'|(?<=\S)[#'])*?(?:^|\s)#\s?(?P<words>.*)$""")


END = ""
"""In the place of a key: comments after the last one."""


def _comments(text: str, lines: Mapping[KeyPath, int]) -> tuple[dict[KeyPath, list[str]], dict[KeyPath, str]]:
    """Return the comments above and beside each key: the outermost one of a line. Those before the first key belong to the file, ()."""
    by_line: dict[int, KeyPath] = {}
    for path, line in sorted(lines.items(), key=lambda item: len(item[0])):
        by_line.setdefault(line, path)
    above: dict[KeyPath, list[str]] = {}
    beside: dict[KeyPath, str] = {}
    waiting: list[str] = []
    is_first = True
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            waiting.append(line.strip().lstrip("#").strip())
        elif not line.strip() and is_first and waiting:
            above[()] = [*above.get((), []), *waiting]  # a block of its own at the top is about the file
            waiting = []
        elif number in by_line:
            if words := [each for each in waiting if each]:
                above[by_line[number]] = words
            waiting, is_first = [], False
            if match := _BESIDE.match(line):
                beside[by_line[number]] = match["words"].strip()
    if words := [each for each in waiting if each]:
        above[(END,)] = words
    return above, beside
