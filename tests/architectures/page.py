"""docs/reference/models.md: the names of the architectures that train, and of those that do not with the
reason."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.evidence import Evidence, Results

TOLERANCE = 1e-5
_RANDOM = {
    "phimoe": "the router draws experts at random in training (`sparsemixer`), so that losses depend on the "
    "batching"
}
"""Architectures whose losses cannot equal those of a plain loop, with the reason."""
SHOWN = 160
_INTRODUCTION = """# Models

This page lists which of the {tried} architectures that transformers {transformers} has for causal language modelling can be trained.
Each was tried in tiny form: random weights, the sizes of `fsdp-tune rehearse`, fp32, two CPU ranks, FSDP2 with
`fsdp.activation_checkpointing: full` and `kernels.loss: chunked`. [models.json](../evidence/data/models.json) has the numbers and
messages of each. `scripts/test --suite models --write` measures them and writes this page. Architectures with code outside of
transformers (`trust_remote_code`) were not tried.

{counts} For an architecture that trains:

- its first and third loss equal those of a plain loop on one device within 1e-5 (largest difference: {largest});
- a run resumed at step 2 has the losses and parameters of the uninterrupted run, bit for bit ({bitwise} of {right});
- the merged model, loaded by transformers alone, has the trained parameters bit for bit;
- greedy generation from it equals transformers' `generate`.
"""  # noqa: E501
_UNREACHED = """Examples have at most {longest_row} tokens. Within them a sliding window is full attention, the top-k of an
indexer selects every token, and a recurrence has one chunk. So the losses above do not test these fields of the configuration,
which have the default of the architecture:"""  # noqa: E501
_LATER_PACKED = """These results are older than the packing of hybrids. Most of these models can be packed now:
[Packing of hybrids](../evidence/packing.md) has the figures, and the models that are still refused."""  # noqa: E501
_NOTES = {
    "index_topk": "with `index_topk: 8`, measured on its own with transformers 5.24, `deepseek_v32` and "
    "`glm_moe_dsa` follow the plain "
    "loop within 1e-7 too; but a selection is not continuous, and where rounding or padding changes "
    "it, losses may differ by 1e-4 and more"
}
"""What is known about a field that no row reaches."""
_REFUSED = {
    "unpacked": "Refused",
    "chunked loss": "Trained without the chunked loss",
    "balance": "Trained without a load-balancing loss",
}
"""What was refused → what came of it. Refused packing has a section of its own."""


def page(results: Results, _previous: str = "") -> str:
    ordered = sorted(results.rows, key=lambda each: each["architecture"])
    wrong = [each for each in ordered if failures_of(each)]
    right = [each for each in ordered if (each["unpacked"] or each["packed"]) and each not in wrong]
    packed = [each for each in right if each["packed"] is not None]
    refused = [each for each in ordered if each["model_class"] and each not in [*right, *wrong]]
    unbuilt = [each for each in ordered if not each["model_class"]]
    counts = (
        f"{len(right)} train, resume, merge and generate, {len(packed)} of them packed too; "
        f"{len(refused)} are refused, {len(wrong)} fail, {len(unbuilt)} were not tried."
    )
    largest = max(
        (off for each in right if each["architecture"] not in _RANDOM for off in _differences(each)),
        default=0.0,
    )
    bitwise = sum(each["resumed"] == 0 for each in right)
    about = {
        **results.about,
        "tried": len(ordered),
        "counts": counts,
        "largest": f"{largest:.0e}",
        "bitwise": bitwise,
        "right": len(right),
    }
    lines = [_INTRODUCTION.format(**about), "## Train, packed too", "", _names(packed), ""]
    lines += [
        "## Train, packing refused",
        "",
        *_by_reason("", [each for each in right if each not in packed], "packed"),
        "",
    ]
    lines += [_LATER_PACKED, ""] if about["transformers"].startswith("5.23") else []
    balanced = [each for each in right if each["has_balance"] and "balance" not in each["refused"]]
    lines += [
        "## Load-balancing loss",
        "",
        "The losses above also verify its gradients, with coefficient 0.1. It is computed for each",
    ]
    lines += [f"example, so that it does not depend on the batch: {_names(balanced)}.", ""]
    lines += ["## What the tiny form does not exercise", "", _UNREACHED.format(**results.about), ""]
    lines += [*_by_limit([each for each in right if each["unreached"]]), ""]
    lines += ["## Other refusals, failures", ""]
    for what, outcome in _REFUSED.items():
        lines += _by_reason(
            f"{outcome}: ",
            [each for each in (refused if what == "unpacked" else right) if what in each["refused"]],
            what,
        )
    lines += [f"- Failed: `{each['architecture']}`: {'; '.join(failures_of(each))}" for each in wrong]
    lines += [
        f"- Random: `{name}`: {why}"
        for name, why in _RANDOM.items()
        if any(each["architecture"] == name for each in right)
    ]
    lines += (
        [f"- Not tried, as transformers cannot build them from a small configuration: {_names(unbuilt)}"]
        if unbuilt
        else []
    )
    return "\n".join(lines) + "\n"


def failures_of(result: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a result, which a refusal is not."""
    found = [f"{stage}: {_shortened(reason)}" for stage, reason in result["failed"].items()]
    for way in ("unpacked", "packed"):
        off = max(result[way] or (0.0,))
        if not off <= TOLERANCE and result["architecture"] not in _RANDOM:
            found.append(f"{way}: the loss is off by {off:.1e}")
    if result["unpacked"] or result["packed"]:
        found += [
            f"{stage}: differs"
            for stage in ("merged", "generated")
            if not result[stage] and stage not in result["failed"]
        ]
    return found


def _differences(result: Mapping[str, Any]) -> list[float]:
    return [*(result["unpacked"] or ()), *(result["packed"] or ())]


def _general(result: Mapping[str, Any], what: str) -> str:
    """Return the reason of a refusal without the names and numbers of this model, so that equal reasons
    meet."""
    reason = (
        result["refused"]
        .get(what, "no reason")
        .replace(result["model_class"], "the model")
        .removeprefix("`kernels.loss: chunked`: ")
    )
    return re.sub(
        r" with attention `\w+`|: logits (of an example )?move by [\d.]+% when .*?change[sd]?\b", "", reason
    )


def _by_reason(heading: str, results: Sequence[Mapping[str, Any]], what: str) -> list[str]:
    members: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for each in results:
        members[_general(each, what)].append(each)
    return [f"- {heading}{_shortened(reason)}: {_names(each)}" for reason, each in members.items()]


def _by_limit(results: Sequence[Mapping[str, Any]]) -> list[str]:
    members: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for each in results:
        for limit in dict.fromkeys(name.rpartition(".")[2] for name in each["unreached"]):
            members[limit].append(each)
    lines = [f"- `{limit}`: {_names(each)}" for limit, each in sorted(members.items())]
    return [
        f"{line}. {_capital(_NOTES[limit])}." if (limit := line.split("`")[1]) in _NOTES else line
        for line in lines
    ]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _names(results: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"`{each['architecture']}`" for each in results)


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 1].rsplit(" ", 1)[0] + " …"


EVIDENCE = Evidence(Path("reference/models.md"), page)
