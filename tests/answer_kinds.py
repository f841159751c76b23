"""Which answers each command may give with `--json`: for their JSON Schemas, and for the tests that hold
documents to them."""

from __future__ import annotations

from dataclasses import make_dataclass
from functools import cache
from typing import Any, get_type_hints

from fsdp_tune.jobs.answers import (
    CacheCleanAnswer,
    CacheListAnswer,
    CodeExplanation,
    EnvironmentAnswer,
    KeyExplanation,
    NewRecipeAnswer,
    PreviewAnswer,
    PushAnswer,
    RecipeFileAnswer,
    RecipesAnswer,
    RecipeTextAnswer,
    RehearseAnswer,
    ReportAnswer,
    TemplatesAnswer,
    TemplateTextAnswer,
    WrittenAnswer,
)
from fsdp_tune.jobs.compare_answer import CompareAnswer
from fsdp_tune.jobs.doctor import DoctorAnswer
from fsdp_tune.jobs.drill import DrillAnswer
from fsdp_tune.jobs.evaluate import Evaluation
from fsdp_tune.jobs.generate import Generation
from fsdp_tune.jobs.import_answer import ImportAnswer
from fsdp_tune.jobs.observer import FollowerAnswer, TrainAnswer
from fsdp_tune.jobs.submit import SubmitAnswer
from fsdp_tune.jobs.submit_containers import ManifestAnswer
from fsdp_tune.jobs.sweep import SweepAnswer
from fsdp_tune.jobs.validate import PrepareAnswer, PrepareShownAnswer, ValidateAnswer
from fsdp_tune.launch.run_status import DirectoryStatus, RunStatus
from fsdp_tune.merge.merge_options import MergeAnswer, PushedMergeAnswer
from fsdp_tune.planner.predict.predict import SHORT, Plan


def plan_answer() -> type:
    """Return the class of the answer of `plan`: `Plan` without its timeline, and with short plans in it."""
    hints = get_type_hints(Plan)
    short = make_dataclass(
        "PlannedAlternative", [*((name, hints[name]) for name in SHORT), ("is_yours", bool)]
    )
    nested: dict[str, Any] = dict.fromkeys(("alternatives", "other_trainings"), list[short])
    return make_dataclass(
        "PlanAnswer", [(name, nested.get(name, hint)) for name, hint in hints.items() if name != "memory"]
    )


@cache
def answers() -> dict[str, tuple[type, ...]]:
    """Return the classes that each command may answer with. `recipes schema` prints the schema of a
    recipe."""
    return {
        "train": (TrainAnswer, FollowerAnswer, WrittenAnswer, PreviewAnswer, SweepAnswer),
        "validate": (ValidateAnswer,),
        "import": (ImportAnswer,),
        "plan": (plan_answer(),),
        "prepare": (PrepareShownAnswer, PrepareAnswer),
        "rehearse": (RehearseAnswer,),
        "submit slurm": (SubmitAnswer, DrillAnswer),
        "merge-checkpoint": (PushedMergeAnswer, MergeAnswer),
        "push": (PushAnswer,),
        "evaluate": (Evaluation,),
        "chat": (Generation,),
        "generate": (Generation,),
        "compare": (CompareAnswer,),
        "status": (RunStatus, DirectoryStatus),
        "report": (ReportAnswer,),
        "submit kubernetes": (ManifestAnswer,),
        "submit skypilot": (ManifestAnswer,),
        "submit dstack": (ManifestAnswer,),
        "explain": (KeyExplanation, CodeExplanation),
        "doctor": (DoctorAnswer,),
        "env": (EnvironmentAnswer,),
        "cache list": (CacheListAnswer,),
        "cache clean": (CacheCleanAnswer,),
        "templates list": (TemplatesAnswer,),
        "templates show": (TemplateTextAnswer,),
        "recipes list": (RecipesAnswer,),
        "recipes show": (RecipeTextAnswer,),
        "recipes copy": (RecipeFileAnswer,),
        "recipes new": (NewRecipeAnswer,),
    }
