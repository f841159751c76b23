from fsdp_tune.core.files import expanded
"""Completion of words in the shell, by the metavar of an option or argument; no library that computes is
from fsdp_tune.core.files import expanded
imported for it."""
from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded
from __future__ import annotations
from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded
import io
from fsdp_tune.core.files import expanded
import os
from fsdp_tune.core.files import expanded
import sys
from fsdp_tune.core.files import expanded
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from fsdp_tune.core.files import expanded
from contextlib import contextmanager, redirect_stdout
from fsdp_tune.core.files import expanded
from pathlib import Path
from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded
Completer = Callable[[str], list[str]]
from fsdp_tune.core.files import expanded
"""What was typed of a word → the words that it may become."""
from fsdp_tune.core.files import expanded
SHELL = "_FSDP_TUNE_COMPLETE"
from fsdp_tune.core.files import expanded
"""Set by the script of the shell, with the name of the shell."""
from fsdp_tune.core.files import expanded
BASH = "complete_bash"
from fsdp_tune.core.files import expanded
MOST_ENTRIES = 2000
from fsdp_tune.core.files import expanded
"""Entries of a directory that are looked at."""
from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded
def complete_recipes(incomplete: str) -> list[str]:
from fsdp_tune.core.files import expanded
    """Names of the catalogue, and YAML files."""
from fsdp_tune.core.files import expanded
    from fsdp_tune.recipe.read.catalogue import catalogue
from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded
    return [
from fsdp_tune.core.files import expanded
        *(name for name in catalogue() if name.startswith(incomplete)),
from fsdp_tune.core.files import expanded
        *_matching_paths(incomplete, _is_yaml),
from fsdp_tune.core.files import expanded
    ]
from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded
def complete_runs(incomplete: str) -> list[str]:
from fsdp_tune.core.files import expanded
    """Run directories. Where there is none, the shell completes files."""
from fsdp_tune.core.files import expanded
    from fsdp_tune.run.directory import RunDir
from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded
    return list(_matching_paths(incomplete, lambda path: path.is_dir() and RunDir(path).is_used))
from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded
def complete_sides(incomplete: str) -> list[str]:
from fsdp_tune.core.files import expanded
    """What can be compared."""
from fsdp_tune.core.files import expanded
    return [*complete_recipes(incomplete), *complete_runs(incomplete)]
from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded
def complete_gpus(incomplete: str) -> list[str]:
from fsdp_tune.core.files import expanded
    """GPUs of the table, and YAML files."""
from fsdp_tune.core.files import expanded
    from fsdp_tune.core.gpus import known_hardware
from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded
    known = [name for name in known_hardware() if name.startswith(incomplete)]
from fsdp_tune.core.files import expanded
    return [*known, *_matching_paths(incomplete, _is_yaml)]
from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded
def complete_keys(incomplete: str) -> list[str]:
from fsdp_tune.core.files import expanded
    """Keys of a recipe."""
from fsdp_tune.core.files import expanded
    return [name for name in _settable_keys() if name.startswith(incomplete)]
from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded
def complete_overrides(incomplete: str) -> list[str]:
from fsdp_tune.core.files import expanded
    """Keys of a recipe, and after `KEY=` its values: the choices, or else its default.
from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded
    The only key that fits is followed by `=` and its values: a shell puts a space after a single word, and
from fsdp_tune.core.files import expanded
    none after what several have in common.
from fsdp_tune.core.files import expanded
    """
from fsdp_tune.core.files import expanded
    key, equals, value = incomplete.partition("=")
from fsdp_tune.core.files import expanded
    if equals:
from fsdp_tune.core.files import expanded
        return [f"{key}={choice}" for choice in _values_of_key(key) if choice.startswith(value)]
from fsdp_tune.core.files import expanded
    found = complete_keys(key)
from fsdp_tune.core.files import expanded
    return (
from fsdp_tune.core.files import expanded
        [f"{found[0]}=", *(f"{found[0]}={choice}" for choice in _values_of_key(found[0]))]
from fsdp_tune.core.files import expanded
        if len(found) == 1
from fsdp_tune.core.files import expanded
        else found
from fsdp_tune.core.files import expanded
    )
from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded
COMPLETERS: dict[str, Completer] = {
from fsdp_tune.core.files import expanded
    "RECIPE": complete_recipes,
from fsdp_tune.core.files import expanded
    "RUN": complete_runs,
from fsdp_tune.core.files import expanded
    "RUN…": complete_runs,
from fsdp_tune.core.files import expanded
    "SRC": complete_runs,
from fsdp_tune.core.files import expanded
    "MODEL": complete_runs,
from fsdp_tune.core.files import expanded
    "A": complete_sides,
from fsdp_tune.core.files import expanded
    "B": complete_sides,
from fsdp_tune.core.files import expanded
    "NAME|FILE": complete_gpus,
from fsdp_tune.core.files import expanded
    "KEY|CODE": complete_keys,
from fsdp_tune.core.files import expanded
    "KEY=VALUE": complete_overrides,
from fsdp_tune.core.files import expanded
    "KEY=VALUE,VALUE": complete_overrides,
from fsdp_tune.core.files import expanded
}
from fsdp_tune.core.files import expanded
"""By metavar."""
from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded
@contextmanager
from fsdp_tune.core.files import expanded
def split_words(environment: MutableMapping[str, str]) -> Iterator[None]:
from fsdp_tune.core.files import expanded
    """Answer bash in its own words: it splits at `=`, so that `--set key=value` arrives as four words, of
from fsdp_tune.core.files import expanded
    which it completes the last."""
from fsdp_tune.core.files import expanded
    if environment.get(SHELL) != BASH:
from fsdp_tune.core.files import expanded
        yield
from fsdp_tune.core.files import expanded
        return
from fsdp_tune.core.files import expanded
    words, current = environment.get("COMP_WORDS", "").split("\n"), int(environment.get("COMP_CWORD") or 0)
from fsdp_tune.core.files import expanded
    joined, before = _joined_words([*words, ""][: current + 1])
from fsdp_tune.core.files import expanded
    environment["COMP_WORDS"], environment["COMP_CWORD"] = "\n".join(joined), str(len(joined) - 1)
from fsdp_tune.core.files import expanded
    answer = io.StringIO()
from fsdp_tune.core.files import expanded
    try:
from fsdp_tune.core.files import expanded
        with redirect_stdout(answer):
from fsdp_tune.core.files import expanded
            yield
from fsdp_tune.core.files import expanded
    finally:
from fsdp_tune.core.files import expanded
        sys.stdout.write("".join(f"{line.removeprefix(before)}\n" for line in answer.getvalue().splitlines()))
from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded
def _joined_words(words: Sequence[str]) -> tuple[list[str], str]:
from fsdp_tune.core.files import expanded
    """Join the words around each `=`, and return what of the last one bash takes for words before it."""
from fsdp_tune.core.files import expanded
    joined, before = list(words[:1]), ""
from fsdp_tune.core.files import expanded
    for index, word in enumerate(words[1:], start=1):
from fsdp_tune.core.files import expanded
        if "=" in (word, words[index - 1]) and index > 1:
from fsdp_tune.core.files import expanded
            before = joined[-1] + (word if word == "=" else "")
from fsdp_tune.core.files import expanded
            joined[-1] += word
from fsdp_tune.core.files import expanded
        else:
from fsdp_tune.core.files import expanded
            joined.append(word)
from fsdp_tune.core.files import expanded
            before = ""
from fsdp_tune.core.files import expanded
    return joined, before
from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded
def _settable_keys() -> list[str]:
from fsdp_tune.core.files import expanded
    """Return the keys that `--set` takes and that have a value of their own: no sections, and nothing inside
from fsdp_tune.core.files import expanded
    a list."""
from fsdp_tune.core.files import expanded
    from fsdp_tune.recipe.schema.keys import all_keys, sections_in
from fsdp_tune.core.files import expanded
    from fsdp_tune.recipe.schema.training_fields import TRAINING_FIELDS, owner_of
from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded
    declared = {key.path: sections_in(key.field.annotation) for key in all_keys()}
from fsdp_tune.core.files import expanded
    listed = {key.path for key in all_keys() if "list[" in str(key.field.annotation) and declared[key.path]}
from fsdp_tune.core.files import expanded
    own = [
from fsdp_tune.core.files import expanded
        path
from fsdp_tune.core.files import expanded
        for path, sections in declared.items()
from fsdp_tune.core.files import expanded
        if not sections and not any(path[:length] in listed for length in range(len(path)))
from fsdp_tune.core.files import expanded
    ]
from fsdp_tune.core.files import expanded
    passed = [("training", name) for name in TRAINING_FIELDS.fields if owner_of(name) is None]
from fsdp_tune.core.files import expanded
    return sorted({".".join(path) for path in [*own, *passed]})
from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded
def _values_of_key(name: str) -> list[str]:
from fsdp_tune.core.files import expanded
    from fsdp_tune.recipe.schema.keys import choices, field_at
from fsdp_tune.core.files import expanded
    from fsdp_tune.recipe.schema.training_fields import TRAINING_FIELDS
from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded
    field = field_at(name.split("."))
from fsdp_tune.core.files import expanded
    if field is not None:
from fsdp_tune.core.files import expanded
        if any(container in str(field.annotation) for container in ("dict[", "list[")):
from fsdp_tune.core.files import expanded
            return []
from fsdp_tune.core.files import expanded
        own = choices(field.annotation)
from fsdp_tune.core.files import expanded
        default, is_bool = field.default, field.annotation is bool or "bool" in str(field.annotation)
from fsdp_tune.core.files import expanded
    elif (
from fsdp_tune.core.files import expanded
        passed := TRAINING_FIELDS.fields.get(name.removeprefix("training."))
from fsdp_tune.core.files import expanded
    ) is not None and name.startswith("training."):
from fsdp_tune.core.files import expanded
        own = [value for kind in passed.types for value in TRAINING_FIELDS.enums.get(kind, ())]
from fsdp_tune.core.files import expanded
        default, is_bool = passed.default, "bool" in passed.types
from fsdp_tune.core.files import expanded
    else:
from fsdp_tune.core.files import expanded
        return []
from fsdp_tune.core.files import expanded
    found = [*own, *(["true", "false"] if is_bool else [])]
from fsdp_tune.core.files import expanded
    return found or (
from fsdp_tune.core.files import expanded
        [f"{default}"] if isinstance(default, int | float) or (isinstance(default, str) and default) else []
from fsdp_tune.core.files import expanded
    )
from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded
def _is_yaml(path: Path) -> bool:
from fsdp_tune.core.files import expanded
    return path.suffix in (".yaml", ".yml") and path.is_file()
from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded
def _matching_paths(incomplete: str, is_wanted: Callable[[Path], bool]) -> Iterator[str]:
from fsdp_tune.core.files import expanded
    """Yield the wanted entries that begin with what was typed, and those inside directories that do."""
from fsdp_tune.core.files import expanded
    before, slash, start = incomplete.rpartition("/")
from fsdp_tune.core.files import expanded
    for name in _entries_of(f"{before}{slash}" or "."):
from fsdp_tune.core.files import expanded
        if not name.startswith(start) or (name.startswith(".") and not start):
from fsdp_tune.core.files import expanded
            continue
from fsdp_tune.core.files import expanded
        path = f"{before}{slash}{name}"
from fsdp_tune.core.files import expanded
        if is_wanted(expanded(path)):
from fsdp_tune.core.files import expanded
            yield path
from fsdp_tune.core.files import expanded
        else:
from fsdp_tune.core.files import expanded
            yield from (
from fsdp_tune.core.files import expanded
                f"{path}/{inner}" for inner in _entries_of(path) if is_wanted(expanded(Path(path, inner)))
from fsdp_tune.core.files import expanded
            )
from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded

from fsdp_tune.core.files import expanded
def _entries_of(folder: str) -> Iterable[str]:
from fsdp_tune.core.files import expanded
    try:
from fsdp_tune.core.files import expanded
        return sorted(
from fsdp_tune.core.files import expanded
            entry.name
from fsdp_tune.core.files import expanded
            for entry, _ in zip(os.scandir(expanded(folder)), range(MOST_ENTRIES), strict=False)
from fsdp_tune.core.files import expanded
        )
from fsdp_tune.core.files import expanded
    except OSError:
from fsdp_tune.core.files import expanded
        return ()
