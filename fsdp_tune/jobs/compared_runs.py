"""Two runs compared by their files: digests of rows, order and base, the lines of metrics.jsonl, and what may
explain a difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fsdp_tune.comparison.causes import DifferentKey, is_of_data, rounds_otherwise
from fsdp_tune.comparison.runs import (
    ROUNDING,
    ComparedLines,
    DifferentStep,
    Limits,
    compare_digests,
    compare_evaluations,
    compare_lines,
)
from fsdp_tune.comparison.stages import ComparedStage
from fsdp_tune.comparison.verdicts import SCHEDULE
from fsdp_tune.data.preparation import rows_of_step
from fsdp_tune.jobs.compare_answer import Cause, FirstDifference
from fsdp_tune.pages.run_record import RunRecord, differing_environment, read_run
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.base_model import BaseModel
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.records import Environment


@dataclass
class ComparedRuns:
    environment: dict[str, list[str | None]] = field(default_factory=dict[str, "list[str | None]"])
    before: list[ComparedStage] = field(default_factory=list[ComparedStage])
    """Digests: what the steps depend on."""
    after: list[ComparedStage] = field(default_factory=list[ComparedStage])
    """Lines and evaluations, those with the earlier difference first."""
    first: DifferentStep | None = None
    first_bits: DifferentStep | None = None
    rows_of_step: str | None = None
    compared: list[str] = field(default_factory=list[str])
    left_out: list[str] = field(default_factory=list[str])
    tolerance: float = 0.0


def compare_runs(
    a: RunDir, b: RunDir, recipes: tuple[Recipe, Recipe], keys: Sequence[DifferentKey], given: float | None
) -> ComparedRuns:
    """Compare two runs. `keys`: those that differ; `given`: a tolerance in place of what the compute dtype
    allows.

    Raises: usage error for damaged files.
    """
    one, other = read_run(a, "A"), read_run(b, "B")
    found = ComparedRuns(differing_environment([one, other]))
    keys_of_data = [each.data.key if each.data else None for each in (one, other)]
    found.before = [
        compare_digests("data", keys_of_data[0], keys_of_data[1], "data.json"),
        compare_digests("data_order", _order(one), _order(other), "readback.json"),
    ]
    if any(recipe.model.name_or_path is not None for recipe in recipes):
        found.before.append(_compare_bases(a, b))
    dtypes = sorted((recipe.compute_dtype for recipe in recipes), key=ROUNDING.__getitem__)
    can_round = bool(found.environment) or any(rounds_otherwise(key.key) for key in keys)
    limits = [Limits(dtypes[-1], can_round=can_round, given=given) for _ in range(2)]
    found.tolerance = limits[0].first
    lines = compare_lines(
        one.lines.losses, other.lines.losses, limits[0], (_every(recipes[0]), _every(recipes[1]))
    )
    evaluations = compare_evaluations(one.lines.evals, other.lines.evals, limits[1])
    has_evaluations = bool(one.lines.evals or other.lines.evals) or any(
        recipe.evaluates for recipe in recipes
    )
    parts: list[ComparedLines] = [lines, evaluations] if has_evaluations else [lines]
    parts.sort(key=_first_step)
    found.after = [part.stage for part in parts]
    found.first = next((part.first for part in parts if part.first is not None), None)
    found.first_bits = min(
        (part.first_bits for part in parts if part.first_bits is not None),
        key=lambda each: each.step,
        default=None,
    )
    found.compared = [part.evidence for part in parts if part.evidence]
    found.left_out = [line for part in parts for line in part.left_out]
    if lines.first is not None and found.first is lines.first:
        is_single = all(_covers_one_step(record, lines.first.step) for record in (one, other))
        _add_rows(found, a, recipes[0], lines.first.step, is_single=is_single)
    return found


def _covers_one_step(record: RunRecord, step: int) -> bool:
    return step == 1 or any(int(line["step"]) == step - 1 for line in record.lines.losses)


def _add_rows(found: ComparedRuns, a: RunDir, recipe: Recipe, step: int, *, is_single: bool) -> None:
    """Name the rows of the first line that differs, or why they are not named."""
    if not is_single:
        found.left_out.append(
            f"the rows of step {step}: step {step - 1} has no line of its own, and may have differed first"
        )
        return
    found.rows_of_step = rows_of_step(a.data_json, recipe, step)
    if found.rows_of_step is None:
        found.left_out.append(
            f"the rows of step {step}: the prepared data of A are gone, or it reads a stream"
        )


def _every(recipe: Recipe) -> int:
    return recipe.training.logging_steps


def _order(record: RunRecord) -> str | None:
    return record.readback.facts.data_order_digest if record.readback else None


def _first_step(part: ComparedLines) -> int:
    return part.first.step if part.first is not None else 1 << 62


def _compare_bases(a: RunDir, b: RunDir) -> ComparedStage:
    """Compare what identifies the weights: a commit of one repository, or digests of two directories."""
    one, other = (_base_of(run) for run in (a, b))
    stage = compare_digests("base", one, other, "environment.json")
    if one and other and one != other and one.startswith("blake2b:") is not other.startswith("blake2b:"):
        detail = f"A starts from {one} and B from {other}: one of the hub and one of a directory"
        return replace(stage, status="not_compared", detail=detail, difference=None, different_places=0)
    return stage


def _base_of(run: RunDir) -> str | None:
    recorded = Environment.read(run.environment_json)
    if recorded is not None and recorded.base is not None:
        return recorded.base
    trained = BaseModel.read(run.base_json)  # of an adapter, also of earlier versions
    return trained.digest if trained is not None else None


def cause_not_shown(
    found: FirstDifference,
    changing: Sequence[DifferentKey],
    environment: dict[str, list[str | None]],
    stages: Sequence[ComparedStage],
) -> Cause:
    """Return what may be the cause of a difference, where none was shown: keys that affect it, else versions
    and machines.

    A key is left out if all that it affects was found equal.
    """
    equal = {stage.name for stage in stages if stage.status == "equal"}
    keys = [key for key in changing if _may_cause(key, found, equal)]
    if keys:
        named = ", ".join(f"`{key.key}`" for key in keys)
        return Cause(keys, {}, is_shown=False, text=f"not shown; keys that may be it: {named}", hint=None)
    if found.stage == "data":
        text = (
            "not shown; the recipes read the same, so the files of the data or the tokenizer changed "
            "between the runs"
        )
        return Cause([], environment, is_shown=False, text=text, hint=None)
    if found.stage == "base":
        text = (
            "not shown; the recipes name the same model, so its weight files, or the commit of its "
            "branch, changed between the runs"
        )
        return Cause(
            [], {}, is_shown=False, text=text, hint="`model.revision: COMMIT` keeps a model of the hub"
        )
    if _field(found) == "learning_rate":
        text = (
            "not shown; the recipes have the same schedule, so one of the runs was continued with "
            "another one, or edited"
        )
        return Cause(
            [], {}, is_shown=False, text=text, hint="`RUN/history` has the recipes of earlier starts"
        )
    unseen = [
        stage.title
        for stage in stages
        if stage.name in ("data", "data_order", "base") and stage.status == "not_compared"
    ]
    also = f"; not compared: {', '.join(unseen)}" if unseen else ""
    if environment:
        text = (
            "not shown; the recipes have the same numbers, and the environments differ: "
            f"{', '.join(environment)}{also}"
        )
        return Cause([], environment, is_shown=False, text=text, hint=None)
    return Cause(
        [], {}, is_shown=False, text=f"not found: recipes and environments are equal{also}", hint=None
    )


def _field(found: FirstDifference) -> str:
    return found.place.rpartition(", ")[2] if found.stage in ("steps", "evaluations") else ""


def _may_cause(key: DifferentKey, found: FirstDifference, equal: set[str]) -> bool:
    name, field = key.key, _field(found)
    if found.stage in ("data", "data_order") or field.endswith("tokens"):
        return is_of_data(name) or (field.endswith("tokens") and name == "training.global_batch_size")
    if found.stage == "base":
        return name.startswith("model.")
    if field == "learning_rate":
        return name in SCHEDULE
    if found.stage == "evaluations" and "steps" in equal:
        return name.startswith("data.eval") or not is_of_data(name)
    if {"data", "data_order"} <= equal and is_of_data(name):
        return name == "training.seed"
    return not name.startswith("merge.")
