"""What `import --json` answers."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.jobs.answers import ImportedKey
from fsdp_tune.jobs.compare_answer import CompareAnswer
from fsdp_tune.jobs.import_recipe import Import


@dataclass(frozen=True, slots=True)
class Decision(JsonAnswer):
    key: str
    words: str


@dataclass(frozen=True, slots=True)
class ImportAnswer(JsonAnswer):
    tool: str
    source: str
    output: str | None
    recipe: str
    """The text."""
    counts: dict[str, int]
    """Fate → how many keys."""
    account: list[ImportedKey]
    decisions: list[Decision]
    unchecked: list[str]
    check: CompareAnswer | None
    """With `--check`: the comparison of the file (A) with the written recipe (B)."""


def import_answer(found: Import) -> ImportAnswer:
    imported = found.imported
    return ImportAnswer(
        tool=imported.tool,
        source=str(imported.path),
        output=None if found.output is None else str(found.output),
        recipe=imported.text,
        counts=imported.counts,
        account=[ImportedKey(**row.as_dict()) for row in imported.rows],
        decisions=[Decision(key, words) for key, words in imported.decisions],
        unchecked=list(found.unchecked),
        check=found.check,
    )
