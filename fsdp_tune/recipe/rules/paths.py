"""Rules about how paths are written in a recipe: no variables of the shell, no `~`, and no characters that
a name cannot have."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fsdp_tune.core.units import printable, shown
from fsdp_tune.core.values import texts_below
from fsdp_tune.recipe.schema.keys import Finding
from fsdp_tune.recipe.schema.recipe import Recipe

OUTPUT_FIELDS = re.compile(r"\{(name|seed)\}")


_SHELL_VARIABLE = re.compile(r"\$(\{)?([A-Za-z_][A-Za-z0-9_]*)(?(1)\})")


def no_shell_variables_in_paths(recipe: Recipe) -> Iterator[Finding]:
    """`$SCRATCH/x` would become a directory of that name. Paths that are only read may contain a `$`, but not
    begin with one."""
    read = [("model.name_or_path", recipe.model.name_or_path), ("model.tokenizer", recipe.model.tokenizer)]
    read += [
        (f"{key}.path", source.path) for key, source in (*recipe.data.sources, *recipe.evaluation.sources)
    ]
    read = [(key, path) for key, path in read if path is not None and path.startswith("$")]
    for key, path in [
        ("output_dir", recipe.output_dir),
        ("data.cache_dir", recipe.data.cache_dir or ""),
        *read,
    ]:
        if variable := _SHELL_VARIABLE.search(path):
            message = (
                f"`{key}` contains `{shown(variable[0])}`, and a recipe does not expand variables of "
                "the shell"
            )
            through_shell = (
                "" if "[" in key else f', or let the shell expand it: `--set {key}="{shown(path)}"`'
            )
            yield Finding("shell-variable", (key,), message, f"write the path out{through_shell}")


def written_paths(recipe: Recipe) -> Iterator[Finding]:
    path, keys = recipe.output_dir, ("output_dir",)
    rest = OUTPUT_FIELDS.sub("", path)
    if _SHELL_VARIABLE.search(path):
        pass  # reported by `no_shell_variables_in_paths`
    elif "{" in rest or "}" in rest:
        braces = re.search(r"\{[^{}]*\}?|\}", rest)
        message = f"`output_dir` contains `{shown(braces[0] if braces else rest)}`, which is not filled in"
        yield Finding("bad-output-dir", keys, message, "only {name} and {seed} are")
    elif path.startswith("~"):
        yield Finding(
            "bad-output-dir",
            keys,
            "`output_dir` begins with `~`, which is not expanded",
            "write the path out",
        )
    for key, text, code in (
        ("output_dir", path, "bad-output-dir"),
        ("data.cache_dir", recipe.data.cache_dir, "wrong-value"),
    ):
        if found := next((character for character in text or "" if not character.isprintable()), None):
            escape = printable(found)
            hint = f"in double quotes `{escape}` is one character: write the path in single quotes"
            yield Finding(code, (key,), f"`{key}` contains the control character `{escape}`", hint)


def no_nul_characters(recipe: Recipe) -> Iterator[Finding]:
    """No path, name or text of a recipe may have one: the operating system ends a name there."""
    for key, text in texts_below(recipe.model_dump(by_alias=True)):
        # these have rules of their own
        if "\0" in text and not key.startswith(("launch.env.", "output_dir", "data.cache_dir")):
            hint = "in double quotes `\\0` is one character: write the value in single quotes"
            yield Finding("wrong-value", (key,), f"`{key}` contains the character `\\x00`", hint)
