"""`compare`: the first difference of two recipes, runs or configurations of other tools, and its cause."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import fsdp_tune
from fsdp_tune.cli.screen import Screen
from fsdp_tune.cli.terminal_text import wrapped
from fsdp_tune.cli.verbs import Overrides, verb
from fsdp_tune.core.atomic import check_output_file, write_file
from fsdp_tune.core.command import Argument, Option
from fsdp_tune.core.errors import ExitCode, usage_error
from fsdp_tune.jobs.options import CompareOptions
from fsdp_tune.pages.html_pages import html_document, html_table

if TYPE_CHECKING:
    from fsdp_tune.comparison.causes import DifferentKey
    from fsdp_tune.comparison.served_numbers import ComparedPrompt
    from fsdp_tune.comparison.stages import ComparedStage
    from fsdp_tune.jobs.compare_answer import Cause, CompareAnswer, FirstDifference, SideAnswer

WIDTH, WIDEST = 80, 110
LONGEST_VALUE = 200
NAMED_STAGES = 3
"""Stages that were not compared, as the verdict names them; more are counted."""
OWN_KINDS = ("recipe", "run", "model", "server")
SIGNS = {"equal": "✓", "different": "≠", "not_compared": "–"}
CLASSES = {"equal": "yes", "different": "no", "not_compared": "tight"}
PLAIN_SIGNS = {"equal": "=", "different": "x", "not_compared": "-"}
"""Where the terminal's encoding lacks the others."""


@verb
def compare(
    screen: Screen,
    a: Annotated[
        str,
        Argument(
            "A recipe (a YAML file or a name of the catalogue), a run directory, or a configuration "
            "of another tool.",
            metavar="A",
        ),
    ],
    b: Annotated[
        str | None,
        Argument(
            "The same, or the address of a server with OpenAI's API. With --set, --python or --with, B may "
            "be left out; A is then compared with its changed form.",
            metavar="B",
        ),
    ] = None,
    *,
    overrides: Overrides = (),
    options: CompareOptions,
    html: Annotated[
        Path | None, Option("Write the comparison as a page, in one file without network.", metavar="FILE")
    ] = None,
) -> None:
    """Find the first difference between two recipes or runs, and its cause.

    The stages reach from the tokens of the first rows to the update of a step. They are computed on the CPU
    in one process, with a scaled-down model. To find the cause, B is computed again with A's values of the
    keys that differ. Two runs are first compared by their files. If B is a server that serves A, prompts,
    their tokens, log-probabilities and greedy answers are compared. `--set` changes B. The verdict names what
    was compared.

    Exit code 0: equal; 1: different; 2: a side cannot be read; 6: too little could be compared for a verdict.

    \b
    Examples:
        fsdp-tune compare recipe.yaml axolotl.yaml
        fsdp-tune compare runs/monday runs/tuesday
        fsdp-tune compare recipe.yaml --python ~/old/bin/python
        fsdp-tune compare recipe.yaml --with transformers==4.57.6
        fsdp-tune compare runs/monday http://localhost:8000/v1
    """
    if b is None and not (overrides or options.python or options.requirements):
        raise usage_error(
            "compare-one-side",
            "there is nothing to compare A with",
            hint="give B, `--set KEY=VALUE`, `--python PYTHON` or `--with REQUIREMENT`",
        )
    if html is not None:
        check_output_file(html, replaces=True)
    found = fsdp_tune.compare(a, a if b is None else b, options, overrides=overrides, observer=screen)
    screen.document(found)
    show_comparison(screen, found)
    if html is not None:
        write_file(html, comparison_page(found))
        screen.message(f"the page is {html}")
    if found.verdict != "equal":
        raise typer.Exit(EXIT_CODES[found.verdict])


EXIT_CODES = {"different": ExitCode.FAILED, "not_comparable": ExitCode.NOT_COMPARABLE}


def show_comparison(screen: Screen, found: CompareAnswer) -> None:
    """Print the stages, the first difference with its cause, the later ones, the keys, and what was not
    compared."""
    for letter, side in (("A", found.a), ("B", found.b)):
        computed = "imported" if side.tool_version is None else f"computed by {side.kind} {side.tool_version}"
        kind = side.kind if side.kind in OWN_KINDS else f"configuration of {side.kind}, {computed}"
        is_other = (
            found.a.python != found.b.python and found.a.tool_version is None and found.b.tool_version is None
        )
        python = f", computed by {side.python}" if side.python is not None and is_other else ""
        _print(screen, f"{letter}  ", f"{side.name} ({kind}){python}{_with_overrides(side)}")
    for name, (a, b) in found.environment.items():
        _print(screen, "   ", f"{name}: {a} / {b}")
    for line in found.failed:
        _print(screen, "!  ", line)
    signs = SIGNS if (screen.talk.encoding or "utf-8").lower().startswith("utf") else PLAIN_SIGNS
    for stage in found.stages:
        _print(screen, f"{signs[stage.status]} ", f"{stage.title}{_note(stage)}")
    if found.first is not None:
        _show_difference(screen, "first difference", found.first, found.cause, found)
    for each in found.later:
        _show_difference(screen, "then", each.difference, each.cause, found)
    _show_steps(screen, found)
    _show_keys(screen, found.keys)
    if found.not_compared:
        screen.message("not compared:")
    for line in found.not_compared:
        _print(screen, "  – " if signs is SIGNS else "  - ", line)
    _print(screen, "", f"{verdict_of(found)} (tolerance {found.tolerance:g})")


def _with_overrides(side: SideAnswer) -> str:
    return "".join(f" --set {shlex.quote(each)}" for each in side.overrides)


def verdict_of(found: CompareAnswer) -> str:
    """Return the verdict with what it rests on and what it leaves out."""
    compared = [stage for stage in found.stages if stage.status != "not_compared"]
    missing = [stage.title for stage in found.stages if stage.status == "not_compared"]
    head = {"equal": "equal", "different": "different", "not_comparable": "not comparable"}[found.verdict]
    of_stages = (
        f"{len(compared)} of {len(found.stages)} stages compared" if compared else "nothing was compared"
    )
    parts = [of_stages, *(line for line in found.compared if " of A" in line)]
    if found.first is None and found.unsettled:
        parts.append(
            f"none differs, but keys that may change rows or results do: {', '.join(found.unsettled)}"
        )
    if found.failed:
        parts.append("a tool failed")
    if found.not_compared:
        named = f"{', '.join(missing)}, and " if 0 < len(missing) <= NAMED_STAGES else ""
        parts.append(f"not compared: {named}what is listed above ({len(found.not_compared):,})")
    return f"{head}: {'; '.join(parts)}"


def comparison_page(found: CompareAnswer) -> str:
    """Return a complete document: the stages, the differences with their causes, keys, prompts, and what was
    not compared."""
    sides = [
        [letter, escape(side.name), escape(f"{side.kind}{_with_overrides(side)}")]
        for letter, side in (("A", found.a), ("B", found.b))
    ]
    stages = [
        [
            escape(stage.title),
            f'<span class="{CLASSES[stage.status]}">{stage.status.replace("_", " ")}</span>',
            *_found(stage),
        ]
        for stage in found.stages
    ]
    differences = [(found.first, found.cause), *((each.difference, each.cause) for each in found.later)]
    title_of = {stage.name: stage.title for stage in found.stages}
    causes = [
        [
            escape(each)
            for each in (
                title_of.get(difference.stage, difference.stage),
                difference.place,
                difference.a,
                difference.b,
            )
        ]
        + [
            escape(f"{cause.text}{f' — {cause.hint}' if cause.hint else ''}")
            if cause is not None
            else "not found"
        ]
        for difference, cause in differences
        if difference is not None
    ]
    keys = [
        [escape(key.key), escape(_value(key.a)), escape(_value(key.b)), escape(", ".join(key.affects))]
        for key in found.keys
    ]
    versions = [
        [escape(name), *(escape(str(each)) for each in both)] for name, both in found.environment.items()
    ]
    prompts = [_prompt_cells(each) for each in (found.served.prompts if found.served is not None else ())]
    tables = [
        ("Stages", ("stage", "", "A", "B", "places that differ"), stages),
        ("Differences", ("stage", "at", "A", "B", "cause"), causes),
        ("Keys that differ", ("key", "A", "B", "affects"), keys),
        ("Environment", ("", "A", "B"), versions),
        (
            "Prompts",
            ("prompt", "tokens A / B", "answer of A", "answer of B", "mean difference", "largest"),
            prompts,
        ),
        ("Not compared", ("",), [[escape(line)] for line in found.not_compared]),
    ]
    failed = [f"<p>{escape(line)}</p>" for line in found.failed]
    parts = [f"<h2>{name}</h2>\n{html_table(head, rows)}" for name, head, rows in tables if rows]
    verdict = f"<p><b>{escape(verdict_of(found))}</b> (tolerance {found.tolerance:g})</p>"
    return html_document("Comparison", [html_table(("", "", ""), sides), verdict, *failed, *parts])


def _prompt_cells(each: ComparedPrompt) -> list[str]:
    numbers = (
        "–" if value is None else f"{value:.3g}" for value in (each.mean_difference, each.max_difference)
    )
    counts = f"{each.tokens_a} / {'?' if each.tokens_b is None else each.tokens_b}"
    return [escape(each.prompt), counts, escape(each.answer_a), escape(each.answer_b or "–"), *numbers]


def _found(stage: ComparedStage) -> list[str]:
    """Return the cells of a stage: what both sides have at the first difference, and how many places
    differ."""
    first = stage.difference
    counts = f"{stage.different_places:,} of {stage.places:,}" if stage.places else ""
    detail = f"{counts}{'; ' if counts and stage.detail else ''}{stage.detail or ''}"
    return [escape(first.a) if first else "", escape(first.b) if first else "", escape(detail)]


def _show_steps(screen: Screen, found: CompareAnswer) -> None:
    """Print the first step of two runs that differs, with its rows, and the first one with other bits."""
    if (step := found.first_step) is not None:
        _print(
            screen,
            "first step: ",
            f"{step.step}, {step.field}: {_number(step.a)} in A, {_number(step.b)} in B",
        )
        if found.rows_of_step is not None:
            _print(screen, "  its rows: ", found.rows_of_step)
    if (step := found.first_bits) is not None and step != found.first_step:
        _print(screen, "first difference in bits: ", f"step {step.step}, {step.field}")


def _note(stage: ComparedStage) -> str:
    if stage.status == "different":
        detail = f"; {stage.detail}" if stage.detail else ""
        return f": {stage.different_places:,} of {stage.places:,} differ{detail}"
    return f": {stage.detail}" if stage.detail and stage.status == "equal" else ""


def _show_difference(
    screen: Screen, head: str, found: FirstDifference, cause: Cause | None, whole: CompareAnswer
) -> None:
    title = next((stage.title for stage in whole.stages if stage.name == found.stage), found.stage)
    _print(screen, f"{head}: ", title)
    _print(screen, "  at    ", found.place)
    _print(screen, "  A     ", found.a)
    _print(screen, "  B     ", found.b)
    if cause is None:
        _print(screen, "  cause ", "not found: no keys were found that make it vanish")
        return
    _print(screen, "  cause ", cause.text)
    for key in cause.keys if cause.is_shown else ():
        _print(screen, "        ", f"{key.key}: {_value(key.a)} in A, {_value(key.b)} in B")
    if cause.hint is not None:
        _print(screen, "  hint: ", cause.hint)


def _show_keys(screen: Screen, keys: Sequence[DifferentKey]) -> None:
    changing = [key for key in keys if key.changes_numbers]
    others = [key.key for key in keys if not key.changes_numbers]
    if changing:
        screen.message("keys that differ and change rows or numbers:")
        for key in changing:
            _print(
                screen,
                "  ",
                f"{key.key}: {_value(key.a)} in A, {_value(key.b)} in B ({', '.join(key.affects)})",
            )
    if others:
        _print(screen, "other keys that differ: ", ", ".join(others))


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.9g}"


def _value(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def _print(screen: Screen, head: str, text: str) -> None:
    """Print a line that is wrapped, also in a pipe, with the text indented below its beginning."""
    width = max(WIDTH, min(screen.wrap_width or WIDTH, WIDEST))
    for line in wrapped(head + text, width, len(head)):
        screen.message(line.rstrip(), wraps=False)
