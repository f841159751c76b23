"""What every HTML page has in common: one file without network, one style for light, dark and print, escaped
text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from pathlib import Path

ASSETS = Path(__file__).parent / "assets"


@cache
def asset(name: str) -> str:
    """Return the text of a file of the package that a page includes."""
    return (ASSETS / name).read_text(encoding="utf-8")


def html_document(title: str, parts: Iterable[str]) -> str:
    """Return a complete document without scripts or external files. `parts` are HTML already; empty ones are
    left out."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    top = f'<html lang="en"><head>{head}<title>{escape(title)}</title><style>{asset("page.css")}</style></head><body>'  # noqa: E501
    lines = ["<!doctype html>", top, f"<h1>{escape(title)}</h1>", *parts, "</body></html>"]
    return "\n".join(line for line in lines if line) + "\n"


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are already HTML; `head` is text."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return (
        '<div class="scroll" '
        f'tabindex="0"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )
