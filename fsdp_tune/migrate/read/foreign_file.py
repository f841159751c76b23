"""Read the configuration of another tool, with lines and comments: YAML, JSON, TOML, or the command that
starts it."""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.core.values import is_mapping
from fsdp_tune.migrate.read.batch_options import BatchOption, batch_options, variables
from fsdp_tune.migrate.read.command_line import ForeignCommand, command_in, parse_command, starter
from fsdp_tune.migrate.read.job_manifest import JobManifest, manifest_in
from fsdp_tune.migrate.read.notebook import code_cells, shell_script
from fsdp_tune.migrate.read.python_script import MOST_BYTES, read_script
from fsdp_tune.migrate.read.shell_script import Unexpanded
from fsdp_tune.recipe.key_paths import KeyPath
from fsdp_tune.recipe.read.other_tools import no_importer, other_tool
from fsdp_tune.recipe.read.plain_yaml import about_the_file, compose_plain
from fsdp_tune.recipe.read.recipe_text import read_text
from fsdp_tune.recipe.read.tool_detection import OPTION_NAMES, SCRIPTS, TORCHTUNE, UNSLOTH, tool_of, tried
from fsdp_tune.recipe.read.yaml_source import ListNode, MappingNode, Node

_PLACEHOLDER = re.compile(r"\$\{[^{}]*\}|\$[A-Za-z_]\w*$")
"""Text that a tool, or the shell, replaces before it is a value."""
_YAML = (".yaml", ".yml")
SBATCH, MANIFEST = "sbatch", "manifest"
"""Keys under which the options of Slurm, and what the manifest of a container engine says of the launch, are
in the account."""


@dataclass(slots=True)
class ForeignFile:
    path: Path
    tool: str
    values: dict[str, object]
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
    """The file of options that it names, whose keys are among the values; those that the file has too are
    under `config`."""
    written_file: Callable[[str], str | None] = lambda _: None
    """Returns the text of a file that the script itself writes before its command; None if it does not."""


def read_foreign(path: Path, tool: str | None = None) -> ForeignFile:
    """Read a file, and recognise its tool unless it is given. Raises: FsdpTuneError if it has no keys, or
    those of no tool."""
    notebook = ""
    if path.suffix == ".ipynb":
        notebook = shell_script(code_cells(read_text(path, most_bytes=MOST_BYTES), path))
    command = command_in(notebook) if notebook else None
    options: dict[str, BatchOption] = {}
    is_command = command is not None and parse_command(command.words).tool is not None
    if path.suffix in SCRIPTS and not is_command:
        return _script(path, tool)
    text = notebook or read_text(path)
    if not notebook and path.suffix not in (*_YAML, ".json", ".toml"):
        command = command_in(text, variables(options := batch_options(text)))
    manifest = _manifest(text, path) if path.suffix in _YAML else None
    if manifest is not None and (command := command_in(manifest.script, manifest.known)) is None:
        raise _nothing_to_import(manifest, path)
    if command is not None:
        found = _of_command(path, tool, command, manifest, options)
    elif path.suffix == ".json":
        found = ForeignFile(path, tool or "", _json(text, path))
    elif path.suffix == ".toml":
        found = ForeignFile(path, tool or "", _toml(text, path))
    else:
        found = _yaml(text, path, tool or "")
    _take_named_file(found)
    found.tool = found.tool or _recognised(found)
    return found


def _script(path: Path, tool: str | None) -> ForeignFile:
    if tool not in (None, UNSLOTH):
        message = f"a Python file is not a configuration of {tool}"
        hint = "name the file of its options, or the script with its command"
        raise usage_error("unknown-foreign-file", message, hint=hint, where=Where(str(path)))
    script = read_script(read_text(path, most_bytes=MOST_BYTES), path)
    return ForeignFile(
        path, UNSLOTH, script.values, script.lines, {}, script.beside, script.computed, script.unread
    )


def _of_command(
    path: Path,
    tool: str | None,
    command: ForeignCommand,
    manifest: JobManifest | None,
    options: Mapping[str, BatchOption],
) -> ForeignFile:
    values, named = parse_command(command.words)
    if manifest is not None and (machines := _machines(manifest, command)):
        values |= {MANIFEST: machines}
    if options:
        values |= {SBATCH: {name: option.value for name, option in options.items()}}
    lines: dict[KeyPath, int] = {(SBATCH, name): option.line for name, option in options.items()}
    above: dict[KeyPath, list[str]] = {(): command.comments}
    return ForeignFile(
        path,
        tool or named or "",
        values,
        lines,
        above,
        unread=command.unread,
        written_file=command.written_file,
    )


def _recognised(found: ForeignFile) -> str:
    """Return the tool whose keys a file has. Raises: usage error if there is no importer for it."""
    where = Where(str(found.path))
    if (other := other_tool(found.values)) is not None:
        message, hint = no_importer(other, found.values)
        raise usage_error("unknown-foreign-file", message, hint=hint, where=where)
    if tool := tool_of(found.values):
        return tool
    message = (
        "this is not recognised as the configuration of another trainer; keys that identify one: "
        f"{tried(found.values)}"
    )
    hint = f"name the tool with `--from`: {', '.join(OPTION_NAMES)}"
    raise usage_error("unknown-foreign-file", message, hint=hint, where=where)


def _manifest(text: str, path: Path) -> JobManifest | None:
    try:
        return manifest_in(text, str(path))
    except FsdpTuneError as error:
        raise FsdpTuneError(*(about_the_file(problem) for problem in error.problems)) from error


def _nothing_to_import(manifest: JobManifest, path: Path) -> FsdpTuneError:
    """Return the error of a manifest whose containers start no trainer."""
    message = (
        f"this is a manifest for {manifest.engine}, and none of its commands starts a trainer with "
        "options that can be read"
    )
    way = f"; `{manifest.way} RECIPE` writes such a manifest" if manifest.way else ""
    hint = f"import the script or the configuration that its command names{way}"
    return usage_error("unknown-foreign-file", message, hint=hint, where=Where(str(path)))


def take_unexpanded(values: dict[str, object]) -> dict[KeyPath, str]:
    """Return why each key has no known value whose text the shell or the tool replaces; `values` then have it
    as plain text."""
    return dict(_unexpanded(values, ()))


def _unexpanded(value: dict[str, Any] | list[Any], path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    pairs = cast(
        "list[tuple[Any, Any]]", list(value.items() if isinstance(value, dict) else enumerate(value))
    )
    is_leaf = isinstance(value, list) and not any(isinstance(item, dict | list) for _, item in pairs)
    for name, inner in pairs:
        place = path if is_leaf else (*path, name)
        if isinstance(inner, Unexpanded):
            yield place, f"{inner.why}: write its value"
            value[name] = str.__str__(inner)
        elif (
            isinstance(inner, str)
            and _PLACEHOLDER.search(inner)
            and not _IS_TEXT.search(str(place[-1] if place else ""))
        ):
            yield place, f"`{inner}` is replaced by the tool or its environment: write its value"
        elif isinstance(inner, dict | list):
            yield from _unexpanded(cast("dict[str, object] | list[object]", inner), place)


_IS_TEXT = re.compile(r"template|prompt|system|jinja|regex|pattern")
"""Keys whose text may have a `$` of its own."""


class NamedFile(NamedTuple):
    """A file that another one names."""

    path: Path
    values: dict[str, object]


def named_values(found: ForeignFile, name: object) -> NamedFile | None:
    """Return the place and the values of a YAML or JSON file that another one names; None if it is not here.

    A script may write it; otherwise the name is relative to the script's directory, to one of those above, or
    to this one.
    Raises: FsdpTuneError for a file that cannot be read.
    """
    if not isinstance(name, str) or Path(name).suffix not in (*_YAML, ".json"):
        return None
    if (text := found.written_file(name)) is not None:
        return NamedFile(found.path, _values_of(text, found.path, Path(name).suffix))
    directory = found.path.parent
    places = [
        directory / name,
        Path(name),
        *(above / name for above in list(directory.resolve().parents)[:3]),
    ]
    place = next((place for place in places if place.is_file()), None)
    return None if place is None else NamedFile(place, read_mapping(place))


def _take_named_file(found: ForeignFile) -> None:
    """Put the keys of the file of options that a command names beside its own, which come first: rules read
    one from another."""
    name = found.values.get("config")
    named = named_values(found, name)
    if named is None:
        return
    found.named, inner = named
    if found.tool == TORCHTUNE:
        found.values = {
            "config": name,
            **_with_dotted(inner, {key: value for key, value in found.values.items() if key != "config"}),
        }
        return
    hidden = {key: value for key, value in inner.items() if key in found.values}
    found.values = {**inner, **found.values, "config": hidden or name}


def _with_dotted(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, object]:
    """Return values with those of `key.inner=value`; a text in the place of a component is its name, as
    torchtune reads it."""
    values = copy.deepcopy(values)
    for name, value in changes.items():
        *sections, last = name.split(".")
        into = values
        for section in sections:
            inner = into.setdefault(section, {})
            into = inner if is_mapping(inner) else into.setdefault(section, {})
        there = into.get(last)
        if isinstance(there, dict) and "_component_" in there and isinstance(value, str):
            there["_component_"] = value
        elif value is None:
            into.pop(last, None)
        else:
            into[last] = value
    return values


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the values of a YAML or JSON file that another one names. Raises: FsdpTuneError."""
    return _values_of(read_text(path), path, path.suffix)


def _values_of(text: str, path: Path, suffix: str) -> dict[str, object]:
    return _json(text, path) if suffix == ".json" else _yaml(text, path, "").values


def _json(text: str, path: Path) -> dict[str, object]:
    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in pairs]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise usage_error(
                "duplicate-key",
                f"`{twice}` is written twice",
                hint="keep one of them",
                where=Where(str(path)),
            )
        return dict(pairs)

    try:
        values = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        where = Where(str(path), error.lineno, error.colno)
        raise usage_error("yaml-syntax", f"the file is not JSON: {error.msg}", where=where) from error
    return _mapping(values, path)


def _toml(text: str, path: Path) -> dict[str, object]:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise usage_error("yaml-syntax", f"the file is not TOML: {error}", where=Where(str(path))) from error
    return _mapping(values, path)


def _mapping(values: object, path: Path) -> dict[str, Any]:
    if not is_mapping(values) or not values:
        raise usage_error("not-a-mapping", "the file has no keys with values", where=Where(str(path)))
    return values


def _yaml(text: str, path: Path, tool: str) -> ForeignFile:
    root = compose_plain(text, str(path))
    values = _mapping(None if root is None else _value(root), path)
    lines: dict[KeyPath, int] = {}
    if root is not None:
        _collect_lines(root, (), lines)
    above, beside = _comments(text, lines)
    return ForeignFile(path, tool, values, lines, above, beside)


def _machines(manifest: JobManifest, command: ForeignCommand) -> dict[str, int]:
    """Return the machines that run a command, under the key that says whether they train as one, and the
    ranks of each."""
    containers, started_by = manifest.containers_at(command.line), starter(command.words)
    found = (
        {"machines" if started_by in manifest.joined else "nodes": containers.machines}
        if containers.machines > 1
        else {}
    )
    return found | (
        {"processes": containers.processes}
        if started_by == "torchrun" and containers.processes is not None
        else {}
    )


def _value(node: Node) -> object:
    """Return a node as values. Other tools read YAML 1.1, in which `yes` is a boolean and `1_000` a
    number."""
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
    """Return the comments above and beside each key: the outermost one of a line. Those before the first key
    belong to the file, ()."""
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
