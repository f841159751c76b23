"""Completion of words in the shell, by the metavar of an option or argument; no library that computes is
imported for it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import islice
from pathlib import Path

from fsdp_tune.core.files import expanded

Completer = Callable[[str], list[str]]
"""What was typed of a word → the words that it may become."""
SHELL = "_FSDP_TUNE_COMPLETE"
"""Set by the script of the shell, with the name of the shell."""
BASH = "complete_bash"
MOST_ENTRIES = 2000
"""Entries of a directory that are looked at."""


def complete_recipes(incomplete: str) -> list[str]:
    """Names of the catalogue, and YAML files."""
    from fsdp_tune.recipe.read.catalogue import catalogue

    return [
        *(name for name in catalogue() if name.startswith(incomplete)),
        *_matching_paths(incomplete, _is_yaml),
    ]


def complete_runs(incomplete: str) -> list[str]:
    """Run directories. Where there is none, the shell completes files."""
    from fsdp_tune.run.directory import RunDir

    return list(_matching_paths(incomplete, lambda path: path.is_dir() and RunDir(path).is_used))


def complete_sides(incomplete: str) -> list[str]:
    """What can be compared."""
    return [*complete_recipes(incomplete), *complete_runs(incomplete)]


def complete_gpus(incomplete: str) -> list[str]:
    """GPUs of the table, and YAML files."""
    from fsdp_tune.core.gpus import known_hardware

    known = [name for name in known_hardware() if name.startswith(incomplete)]
    return [*known, *_matching_paths(incomplete, _is_yaml)]


def complete_keys(incomplete: str) -> list[str]:
    """Keys of a recipe."""
    return [name for name in _settable_keys() if name.startswith(incomplete)]


def complete_overrides(incomplete: str) -> list[str]:
    """Keys of a recipe, and after `KEY=` its values: the choices, or else its default.

    The only key that fits is followed by `=` and its values: a shell puts a space after a single word, and
    none after what several have in common.
    """
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={choice}" for choice in _values_of_key(key) if choice.startswith(value)]
    found = complete_keys(key)
    return (
        [f"{found[0]}=", *(f"{found[0]}={choice}" for choice in _values_of_key(found[0]))]
        if len(found) == 1
        else found
    )


COMPLETERS: dict[str, Completer] = {
    "RECIPE": complete_recipes,
    "RUN": complete_runs,
    "RUN…": complete_runs,
    "SRC": complete_runs,
    "MODEL": complete_runs,
    "A": complete_sides,
    "B": complete_sides,
    "NAME|FILE": complete_gpus,
    "KEY|CODE": complete_keys,
    "KEY=VALUE": complete_overrides,
    "KEY=VALUE,VALUE": complete_overrides,
}
"""By metavar."""


@contextmanager
def split_words(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Answer bash in its own words: it splits at `=`, so that `--set key=value` arrives as four words, of
    which it completes the last."""
    if environment.get(SHELL) != BASH:
        yield
        return
    words, current = environment.get("COMP_WORDS", "").split("\n"), int(environment.get("COMP_CWORD") or 0)
    joined, before = _joined_words([*words, ""][: current + 1])
    environment["COMP_WORDS"], environment["COMP_CWORD"] = "\n".join(joined), str(len(joined) - 1)
    answer = io.StringIO()
    try:
        with redirect_stdout(answer):
            yield
    finally:
        sys.stdout.write("".join(f"{line.removeprefix(before)}\n" for line in answer.getvalue().splitlines()))


def _joined_words(words: Sequence[str]) -> tuple[list[str], str]:
    """Join the words around each `=`, and return what of the last one bash takes for words before it."""
    joined, before = list(words[:1]), ""
    for index, word in enumerate(words[1:], start=1):
        if "=" in (word, words[index - 1]) and index > 1:
            before = joined[-1] + (word if word == "=" else "")
            joined[-1] += word
        else:
            joined.append(word)
            before = ""
    return joined, before


def _settable_keys() -> list[str]:
    """Return the keys that `--set` takes and that have a value of their own: no sections, and nothing inside
    a list."""
    from fsdp_tune.recipe.schema.keys import all_keys, sections_in
    from fsdp_tune.recipe.schema.training_fields import TRAINING_FIELDS, owner_of

    declared = {key.path: sections_in(key.field.annotation) for key in all_keys()}
    listed = {key.path for key in all_keys() if "list[" in str(key.field.annotation) and declared[key.path]}
    own = [
        path
        for path, sections in declared.items()
        if not sections and not any(path[:length] in listed for length in range(len(path)))
    ]
    passed = [("training", name) for name in TRAINING_FIELDS.fields if owner_of(name) is None]
    return sorted({".".join(path) for path in [*own, *passed]})


def _values_of_key(name: str) -> list[str]:
    from fsdp_tune.recipe.schema.keys import choices, field_at
    from fsdp_tune.recipe.schema.training_fields import TRAINING_FIELDS

    field = field_at(name.split("."))
    if field is not None:
        if any(container in str(field.annotation) for container in ("dict[", "list[")):
            return []
        own = choices(field.annotation)
        default, is_bool = field.default, field.annotation is bool or "bool" in str(field.annotation)
    elif (
        passed := TRAINING_FIELDS.fields.get(name.removeprefix("training."))
    ) is not None and name.startswith("training."):
        own = [value for kind in passed.types for value in TRAINING_FIELDS.enums.get(kind, ())]
        default, is_bool = passed.default, "bool" in passed.types
    else:
        return []
    found = [*own, *(["true", "false"] if is_bool else [])]
    return found or (
        [f"{default}"] if isinstance(default, int | float) or (isinstance(default, str) and default) else []
    )


def _is_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml") and path.is_file()


def _matching_paths(incomplete: str, is_wanted: Callable[[Path], bool]) -> Iterator[str]:
    """Yield the wanted entries that begin with what was typed, and those inside directories that do."""
    before, slash, start = incomplete.rpartition("/")
    for name in _entries_of(f"{before}{slash}" or "."):
        if not name.startswith(start) or (name.startswith(".") and not start):
            continue
        path = f"{before}{slash}{name}"
        if is_wanted(expanded(path)):
            yield path
        else:
            yield from (
                f"{path}/{inner}" for inner in _entries_of(path) if is_wanted(expanded(Path(path, inner)))
            )


def _entries_of(folder: str) -> Iterable[str]:
    try:
        with os.scandir(expanded(folder)) as entries:
            return sorted(entry.name for entry in islice(entries, MOST_ENTRIES))
    except OSError:
        return ()
