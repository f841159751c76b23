"""What chaos tests have hit, as a section of docs/faults.md. The rest of that page belongs to `tests/faults`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.chaos.draw import KINDS, PHASES

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
START, END = "<!-- chaos: written by scripts/test-chaos --write -->", "<!-- end of chaos -->"


def table(hits: Counter[tuple[str, str]]) -> str:
    """Return the hits by kind and phase as a Markdown table with sums. `hits` counts (kind, phase)."""
    lines = [f"| | {' | '.join(PHASES)} | all |", f"|---{'|---' * (len(PHASES) + 1)}|"]
    for kind in KINDS:
        counts = [hits[kind, phase] for phase in PHASES]
        lines.append(f"| {kind} | {' | '.join(str(count or '') for count in counts)} | {sum(counts)} |")
    totals = [sum(hits[kind, phase] for kind in KINDS) for phase in PHASES]
    lines.append(f"| all | {' | '.join(map(str, totals))} | {sum(totals)} |")
    return "\n".join(lines)


def section_of(page: str) -> str:
    """Return the section of a page with its marks, or "" if it has none."""
    start, end = page.find(START), page.find(END)
    return page[start : end + len(END)] + "\n" if 0 <= start < end else ""


def with_section(page: str, section: str) -> str:
    """Return the page with `section` instead of the one that it has, at its end."""
    rest = page.replace(section_of(page), "").rstrip("\n") + "\n"
    return f"{rest}\n{section}" if section else rest


def section(summary: str, hits: Counter[tuple[str, str]]) -> str:
    return f"{START}\n\n## Chaos\n\n{_ABOUT}\n{summary}\n\n{table(hits)}\n\n{END}\n"


_ABOUT = """`scripts/test-chaos` starts `fsdp-tune train` on two CPU ranks and waits for a phase that a seed has drawn. Then it
disturbs one process, the disk or the clock, and resumes with `--resume auto` until the run has finished. Losses, evaluations and
merged tensors must equal those of an undisturbed run, bit for bit. Each row counts how often a disturbance hit a phase.
"""
