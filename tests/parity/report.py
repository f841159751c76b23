"""Results of the parity tests, as a summary for the terminal and as docs/evidence/parity.md."""

from __future__ import annotations

from collections import defaultdict
from importlib.metadata import version

Row = dict[str, str]
_KEYS = ("section", "case")

HEAD = """# Parity

Written by `scripts/test-parity --write`; every line is a run of the real worker on CPU ranks over gloo
(torch {torch}, transformers {transformers}, accelerate {accelerate}).

The reference is `fsdp_tune/verify/parity/plain_loop.py`: a plain PyTorch loop on one device, without Trainer, Accelerate, FSDP, padding or
packing, where each example goes through the model alone. Each run takes 22 optimizer steps of 16 rows over 4 epochs, the last
batch of an epoch with 3 rows; tokens per row, per rank and per micro-batch differ, and some of them are not trained. Vocabulary
(257) and widths are not divisible by any number of ranks.

Numbers are relative deviations: `loss` and `grad norm` the largest over the steps, `mean` the mean signed one of the loss (a bug
pulls to one side, rounding does not), `parameters` the norm of the difference after the last step over the norm of the update,
`worst tensor` the same for the worst single tensor. The tests require loss, eval loss and gradient norm within 1e-5 and parameters
within 1e-4; half precision is compared with the deviation of one device of that precision from fp32.
Muon orthogonalises in bf16; its loss may deviate by 5e-5 and its parameters by 0.02.
"""

DRAWN = "## recipes drawn from the schema"
"""Heading of the last section of docs/evidence/parity.md, which is hand-written from the output of `scripts/test-fuzz`."""


def by_section(rows: list[Row]) -> dict[str, list[Row]]:
    sections: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        sections[row["section"]].append(row)
    return sections


def _columns(members: list[Row]) -> list[str]:
    """Of all rows: a planted bug that stops the run leaves words instead of numbers."""
    return [name for name in dict.fromkeys(name for row in members for name in row) if name not in _KEYS]


def summary(rows: list[Row]) -> list[str]:
    """One line a section: cases, and the largest of each number."""
    lines: list[str] = []
    for section, members in by_section(rows).items():
        names = _columns(members)
        worst = {name: _largest([row[name] for row in members if name in row]) for name in names}
        numbers = "  ".join(f"{name.strip()} ≤ {value}" for name, value in worst.items() if value is not None)
        lines.append(f"{section}: {len(members)} cases  {numbers}")
    return lines


def _largest(values: list[str]) -> str | None:
    try:
        return max(values, key=lambda value: abs(float(value)))
    except ValueError:
        return None  # words


def markdown(rows: list[Row], previous: str = "") -> str:
    """Return the new docs/evidence/parity.md. The section DRAWN of the previous one is kept."""
    parts = [HEAD.format(**{name: version(name).split("+")[0] for name in ("torch", "transformers", "accelerate")})]
    for section, members in by_section(rows).items():
        names = _columns(members)
        table = [["case", *names], ["---"] * (len(names) + 1), *([row["case"], *(row.get(name, "") for name in names)] for row in members)]
        parts.append(f"## {section}\n\n" + "\n".join("| " + " | ".join(cells) + " |" for cells in table) + "\n")
    _, heading, drawn = previous.partition(DRAWN)
    return "\n".join([*parts, heading + drawn])
