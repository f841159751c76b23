"""Results of chaos tests, as a section of docs/evidence/faults.md. The rest of that page belongs to `tests/faults`."""

from __future__ import annotations

import re
from pathlib import Path

from tests.chaos.draw import KINDS, PHASES, TARGETS, Tally

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "faults.md"
START, END = "<!-- chaos: written by scripts/test-chaos --write -->", "<!-- end of chaos -->"


def tables(tally: Tally) -> str:
    """Return the hits by kind and phase as a Markdown table with sums, and a sentence with those of each kind of process."""
    lines = [f"| | {' | '.join(PHASES)} | all |", f"|---{'|---' * (len(PHASES) + 1)}|"]
    for kind in KINDS:
        counts = [tally.count(kind, phase) for phase in PHASES]
        lines.append(f"| {kind} | {' | '.join(str(count or '') for count in counts)} | {sum(counts)} |")
    totals = [tally.count(phase=phase) for phase in PHASES]
    lines.append(f"| all | {' | '.join(map(str, totals))} | {sum(totals)} |")
    targets = ", ".join(f"{target} {tally.count(target=target)}" for target in TARGETS)
    return "\n".join([*lines, "", f"Processes that were killed, stopped or signalled: {targets}."])


def section_of(page: str) -> str:
    """Return the section of a page with its marks, or "" if it has none."""
    start, end = page.find(START), page.find(END)
    return page[start : end + len(END)] + "\n" if 0 <= start < end else ""


def with_section(page: str, section: str) -> str:
    """Return the page with `section` instead of the one that it has, at its end."""
    rest = page.replace(section_of(page), "").rstrip("\n") + "\n"
    return f"{rest}\n{section}" if section else rest


def with_part(page: str, machines: int, summary: str, tally: Tally) -> str:
    """Return the page with the counts for that many machines; the section keeps those for the other number."""
    parts = _parts(section_of(page)) | {machines: f"{summary}\n\n{tables(tally)}"}
    texts = [f"### {_title(number)}\n\n{parts[number]}\n" for number in sorted(parts)]
    return with_section(page, "\n".join([f"{START}\n\n## Chaos\n\n{_ABOUT}", *texts, f"{END}\n"]))


def _parts(section: str) -> dict[int, str]:
    """Return the text below each heading of a section, by the number of machines."""
    number = {_title(each): each for each in (1, 2)}
    found = re.findall(r"^### ([^\n]*)\n\n(.*?)\n*(?=^###|^<!-- end)", section, re.MULTILINE | re.DOTALL)
    return {number[title]: text for title, text in found}


def _title(machines: int) -> str:
    return "One machine" if machines == 1 else "Two commands as two machines"


_ABOUT = """`scripts/test-chaos` starts `fsdp-tune train` on two CPU ranks and waits for a phase that a seed has drawn. Then it
disturbs one process, the disk or the clock, and resumes with `--resume auto` until the run has finished. Losses, evaluations and
merged tensors must equal those of an undisturbed run, bit for bit. Each row counts how often a disturbance hit a phase.
"""
