"""Results of chaos tests: a table for the terminal, what the data of docs/evidence/faults.md keep of them,
and its section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.chaos.draw import CUTS, KINDS, PHASES, TARGETS, Tally, kinds_on

HEADING = """## Chaos

`scripts/test --suite chaos` starts `fsdp-tune train` on two CPU ranks and waits for a phase that a seed has drawn. Then it
disturbs one process, the disk, the clock or the link, and resumes with `--resume auto` until the run has finished. Losses, evaluations and
merged tensors must equal those of an undisturbed run, bit for bit.
"""  # noqa: E501


def table(tally: Tally) -> str:
    """Return the hits by kind and phase with sums, and a sentence with those of each kind of process."""
    lines = [f"| | {' | '.join(PHASES)} | all |", f"|---{'|---' * (len(PHASES) + 1)}|"]
    for kind in (*KINDS, *(cut for cut in CUTS if tally.count(cut))):
        counts = [tally.count(kind, phase) for phase in PHASES]
        lines.append(f"| {kind} | {' | '.join(str(count or '') for count in counts)} | {sum(counts)} |")
    totals = [tally.count(phase=phase) for phase in PHASES]
    lines.append(f"| all | {' | '.join(map(str, totals))} | {sum(totals)} |")
    targets = _counts({target: tally.count(target=target) for target in TARGETS})
    return "\n".join([*lines, "", f"Processes that were killed, stopped or signalled: {targets}."])


def part(machines: int, summary: str, tally: Tally) -> dict[str, Any]:
    """Return what is kept of the tests on that many machines."""
    hits = {
        kind: {phase: count for phase in PHASES if (count := tally.count(kind, phase))}
        for kind in kinds_on(machines)
    }
    return {
        "machines": machines,
        "summary": summary,
        "hits": hits,
        "processes": {target: tally.count(target=target) for target in TARGETS},
    }


def with_part(parts: Sequence[Mapping[str, Any]], new: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts with `new` instead of the one for as many machines."""
    return sorted(
        [new, *(each for each in parts if each["machines"] != new["machines"])],
        key=lambda each: each["machines"],
    )


def section(parts: Sequence[Mapping[str, Any]]) -> str:
    """Return the section of the page: hits by kind. The data have those by phase and by process too."""
    texts = [HEADING]
    for each in parts:
        title = "One machine" if each["machines"] == 1 else f"{each['machines']} machines"
        kinds = {kind: sum(phases.values()) for kind, phases in each["hits"].items()}
        texts.append(f"**{title}.** {each['summary']} By kind: {_counts(kinds)}.\n")
    return "\n".join(texts)


def _counts(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in numbers.items())
