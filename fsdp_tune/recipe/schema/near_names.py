"""Decide whether one name of a key may be meant by another: names of different units or scopes resemble each
other, and never agree."""

from __future__ import annotations

import difflib
import re

_UNITS = {
    "step": "steps",
    "steps": "steps",
    "iters": "steps",
    "iterations": "steps",
    "epoch": "epochs",
    "epochs": "epochs",
    "seconds": "time",
    "minutes": "time",
    "hours": "time",
    "timeout": "time",
    "runtime": "time",
    "tokens": "tokens",
    "rows": "rows",
    "samples": "rows",
    "examples": "rows",
    "ratio": "share",
    "fraction": "share",
    "share": "share",
    "length": "length",
    "bytes": "bytes",
}
_SCOPES: tuple[dict[str, str], ...] = (
    {
        **dict.fromkeys(("train", "training"), "train"),
        **dict.fromkeys(("eval", "evaluation", "val", "valid", "validation", "test"), "eval"),
        **dict.fromkeys(("save", "saving", "checkpoint"), "save"),
        **dict.fromkeys(("log", "logging"), "log"),
        "warmup": "warmup",
    },
    {
        **dict.fromkeys(("global", "total", "effective"), "all"),
        **dict.fromkeys(("local", "micro", "device", "gpu", "rank"), "one"),
        **dict.fromkeys(("node", "machine", "machines", "nodes"), "machine"),
    },
)
"""Families of words: of two names, both with a word of a family, the words must mean the same."""
_TYPO = 0.8


def agree(name: str, candidate: str) -> bool:
    """Return whether a key that is not known may be a misspelling of a key: they count the same unit, in the
    same scope.

    A scope or unit that the name has and the key lacks disagrees too; one that only the key has may have been
    left out.
    """
    if not _meanings(name, _UNITS) <= _meanings(candidate, _UNITS):
        return False
    return all(_meanings(name, family) <= _meanings(candidate, family) for family in _SCOPES)


def _meanings(name: str, words: dict[str, str]) -> set[str]:
    """Return what the words of a name mean, misspelled ones too."""
    found: set[str] = set()
    for part in re.split(r"[_\-.]", name.lower()):
        near = (
            [part]
            if part in words
            else difflib.get_close_matches(part, words, n=1, cutoff=_TYPO)
            if len(part) > 3
            else []
        )
        found |= {words[each] for each in near}
    return found
