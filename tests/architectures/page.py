"""The page of results: one row for each architecture that trains, then what is refused, fails or was not tried, with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.architectures.tiny import MOST_PARAMETERS

TOLERANCE = 1e-5
_RANDOM = {"phimoe": "the router draws experts at random in training (`sparsemixer`), so that losses depend on the batching"}
"""Architectures whose losses cannot equal those of a plain loop, with the reason."""
SHOWN = 160
_INTRODUCTION = """# Models

{tried} architectures that transformers {version} lists for causal language modelling, in tiny form: random weights, the sizes of
`fsdp-tune rehearse`, fp32, two CPU ranks, FSDP2 with `fsdp.activation_checkpointing: full` and `kernels.loss: chunked`. This command
writes the table:

```bash
scripts/test-models --write
```

The reasons of failures are those of the model's code or of its tiny sizes unless they name a key. Architectures with code of their own
outside transformers (`trust_remote_code`) are not in this table.
{counts}

| column | meaning |
|---|---|
| unpacked, packed | largest relative difference of the first and the third loss from a plain loop on one device; at most 1e-5 |
| resume | a run resumed at step 2 against the uninterrupted run: losses and parameters equal bit for bit, or their largest difference |
| merged | the merged model, loaded by transformers alone, has the trained parameters bit for bit |
| generates | greedy generation from the merged model equals transformers' `generate` |
| balance | the model has a load-balancing loss and it was on, with coefficient 0.1: {balance} |

Resume, merge and generation are those of the packed run, or of the unpacked run where packing is refused.
"""
_BALANCE = "part of the gradients that the losses verify. It is computed for each example, so that it does not depend on the batch"


def page(results: Sequence[dict[str, Any]], version: str) -> str:
    ordered = sorted(results, key=lambda each: each["architecture"])
    trained = [each for each in ordered if each["unpacked"] or each["packed"]]
    wrong = [each for each in ordered if failures_of(each)]
    refused = [each for each in ordered if each not in trained and not each["failed"] and each["model_class"]]
    unbuilt = [each for each in ordered if not each["model_class"]]
    right = [each for each in trained if each not in wrong]
    counts = (
        f"{len(right)} train, resume, merge and generate, {sum(each['packed'] is not None for each in right)} of them packed too; "
        f"{len(refused)} are refused, {len(wrong)} fail, {len(unbuilt)} were not tried."
    )
    lines = [_INTRODUCTION.format(tried=len(results), version=version, counts=counts, balance=_BALANCE)]
    lines += ["| architecture | unpacked | packed | resume | merged | generates | balance | notes |", "|---|---|---|---|---|---|---|---|"]
    lines += [_row(each) for each in trained]
    lines += ["", "## Failures", "", "Errors of the model's code at these sizes, and comparisons that differ.", ""] if wrong else []
    lines += [f"- `{each['architecture']}`: {'; '.join(failures_of(each))}" for each in wrong]
    lines += ["", "## Refused", "", "The message of the first check that refuses the model, without its hint.", ""]
    lines += ["| architecture | reason |", "|---|---|"]
    lines += [f"| `{each['architecture']}` | {_cell(next(iter(_other_refusals(each).values())))} |" for each in refused]
    lines += ["", "## Not tried", ""]
    lines += [f"transformers cannot build these here from a small configuration of at most {MOST_PARAMETERS:,} parameters.", ""]
    lines += ["| architecture | reason |", "|---|---|"]
    lines += [f"| `{each['architecture']}` | {_cell(each['refused']['model'])} |" for each in unbuilt]
    return "\n".join(lines) + "\n"


def failures_of(result: dict[str, Any]) -> list[str]:
    """Return what is wrong with a result, which a refusal is not."""
    found = [f"{stage}: {_shortened(reason)}" for stage, reason in result["failed"].items()]
    for way in ("unpacked", "packed"):
        if (off := _largest(result[way])) is not None and not off <= TOLERANCE and result["architecture"] not in _RANDOM:
            found.append(f"{way}: the loss is off by {off:.1e}")
    if result["unpacked"] or result["packed"]:
        found += [f"{stage}: differs" for stage in ("merged", "generated") if not result[stage] and stage not in result["failed"]]
    return found


def _row(result: dict[str, Any]) -> str:
    cells = [
        f"`{result['architecture']}`",
        *(_difference(result, way) for way in ("unpacked", "packed")),
        "failed" if result["resumed"] is None else "bitwise" if result["resumed"] == 0 else f"{result['resumed']:.1e}",
        *("yes" if result[stage] else "no" for stage in ("merged", "generated")),
        "yes" if result["has_balance"] and "balance" not in result["refused"] else "refused" if result["has_balance"] else "",
        "; ".join([*(f"{stage}: {_cell(why)}" for stage, why in result["refused"].items()), *_random(result)]),
    ]
    return f"| {' | '.join(cells)} |"


def _random(result: dict[str, Any]) -> list[str]:
    return [_RANDOM[name]] if (name := result["architecture"]) in _RANDOM else []


def _difference(result: dict[str, Any], way: str) -> str:
    off = _largest(result[way])
    return f"{off:.0e}" if off is not None else "refused" if way in result["refused"] else "failed"


def _largest(differences: Sequence[float] | None) -> float | None:
    return None if differences is None else max(differences)


def _other_refusals(result: dict[str, Any]) -> dict[str, str]:
    """Return the refusals that a run cannot do without."""
    return {stage: reason for stage, reason in result["refused"].items() if stage not in ("balance", "chunked loss")}


def _cell(text: str) -> str:
    return _shortened(text).replace("|", "\\|").replace("<", "&lt;")


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 1].rsplit(" ", 1)[0] + " …"
