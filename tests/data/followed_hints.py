"""Public shapes of rows, each trained by the command line as its hints say.

`python -m tests.data.followed_hints` writes docs/evidence/hints.md.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.data.public_rows import PUBLIC
from tests.evidence import DOCS

PAGE = DOCS / "evidence" / "hints.md"
MOST_HINTS = 3
RECIPE: dict[str, Any] = {
    "model": {
        "from_config": {
            "model_type": "gpt2",
            "vocab_size": 384,
            "n_positions": 2048,
            "n_embd": 16,
            "n_layer": 1,
            "n_head": 2,
        },
        "tokenizer": "builtin:arithmetic",
    },
    "training": {"global_batch_size": 1, "per_device_train_batch_size": 1, "max_steps": 1},
    "launch": {"device": "cpu", "num_processes": 1},
    "merge": {"at_end": False},
}
HEAD = """# Hints that are followed

Rows in the shapes of public data sets and of files that users have, with nothing said about them but the
path. Each was given to `fsdp-tune train`. Where that was refused, the hint was followed to the letter, by a
program, and the command was run again, until a step was trained (a GPT-2 of one layer, one CPU rank).
Written by `python -m tests.data.followed_hints`; `tests/data/test_shapes.py` runs each row.

| rows | refused as | what the hint says | outcome |
|---|---|---|---|
"""


@dataclass(frozen=True)
class Followed:
    refusals: tuple[tuple[str, str], ...]
    """(code, hint) of each, in the order in which they were followed."""
    exit_code: int
    """Of the last command."""
    steps: int
    """That were trained."""


def follow(directory: Path, entry: dict[str, Any], options: dict[str, Any], hint: str) -> None:
    """Do what a hint says: run its first command, or write its keys into the source or the recipe."""
    command = re.search(r"`((?:jq|mv|python|gzip) .*?)`(?:, and|$| \()", hint, re.DOTALL)
    if command is not None:
        assert shutil.which("jq") or not command[1].startswith("jq")
        subprocess.run(
            ["bash", "-c", re.sub("^python ", f"{sys.executable} ", command[1])], check=True, cwd=directory
        )
        target = re.search(r"> (\S+)$", command[1]) or re.search(r"(\S+)$", command[1])
        assert target is not None
        entry.clear()
        entry["path"] = target[1]
    elif found := re.search(r"`(\{path: json.*?\})`", hint):
        entry.clear()
        entry |= yaml.safe_load(found[1])
    elif found := re.search(r"`rename_columns: (\{.*?\})`", hint):
        entry["rename_columns"] = yaml.safe_load(found[1])
    elif found := re.search(r"`--set '?data\.(\w+)=(.*?)'?`", hint):
        options[found[1]] = yaml.safe_load(found[2])
    elif found := re.search(r"`path: (.*?)`", hint):
        entry["path"] = found[1]
    else:
        raise AssertionError(f"nothing to follow: {hint}")


def train_as_hinted(directory: Path, name: str) -> Followed:
    """Train rows of `PUBLIC` and follow each hint."""
    file, text = PUBLIC[name]
    (directory / file).write_text(text)
    entry: dict[str, Any] = {"path": file}
    options: dict[str, Any] = {"max_length": 2048, "chat_template": "chatml"}
    refusals: list[tuple[str, str]] = []
    while True:
        recipe = {**RECIPE, "data": {"train": [entry], **options}, "output_dir": "run"}
        (directory / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        done = subprocess.run(
            [sys.executable, "-m", "fsdp_tune", "train", "--config", "recipe.yaml", "--json"],
            cwd=directory,
            capture_output=True,
            text=True,
            check=False,
        )
        answer = yaml.safe_load(done.stdout)
        if done.returncode != 2:
            return Followed(tuple(refusals), done.returncode, answer.get("steps", 0))
        error = answer["errors"][0]
        refusals.append((error["code"], error["hint"]))
        assert len(refusals) <= MOST_HINTS, refusals
        follow(directory, entry, options, error["hint"])


def row_of(name: str, directory: Path, found: Followed) -> str:
    def cell(text: str) -> str:
        return text.replace(f"{directory}/", "").replace("|", "\\|").replace("\n", " ")

    codes = ", ".join(f"`{code}`" for code, _ in found.refusals) or "-"
    hints = "; then ".join(cell(hint) for _, hint in found.refusals) or "-"
    outcome = f"{found.steps} step trained" if found.exit_code == 0 else f"exit code {found.exit_code}"
    return f"| {name} | {codes} | {hints} | {outcome} |\n"


def page() -> str:
    parts = [HEAD]
    for name in PUBLIC:
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder).resolve()
            parts.append(row_of(name, directory, train_as_hinted(directory, name)))
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
