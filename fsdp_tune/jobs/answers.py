"""The answers of the commands with `--json`, a class each, as far as they need no other room: any command may
load this module. The rest are next to what makes them, such as those of `status`, `evaluate`, `plan`,
`validate`, `prepare` and `merge-checkpoint`.

`scripts/generate` writes their JSON Schemas. Fields are added, and none is renamed or taken away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.run.event_parts import ChangedKey


@dataclass(frozen=True, slots=True)
class Remark(JsonAnswer):
    """A problem in `errors`, or a fact in `notices` that stops nothing."""

    code: str
    """A stable name, explained in docs/reference/errors.md."""
    file: str | None
    line: int | None
    """From 1, like `column`."""
    column: int | None
    key: str | None
    """Of the recipe."""
    message: str
    hint: str | None
    """What to type."""


@dataclass(frozen=True, slots=True)
class WrittenAnswer(JsonAnswer):
    """A run directory that `train --no-start` wrote."""

    run_dir: str
    commands: list[str]
    """Each starts the run."""
    exit_reason: Literal["not_started"]


@dataclass(frozen=True, slots=True)
class StartPoint(JsonAnswer):
    step: int
    checkpoint: str | None


@dataclass(frozen=True, slots=True)
class PreviewAnswer(JsonAnswer):
    """What `train` would do: the answer of `train --dry-run`."""

    recipe: dict[str, Any]
    """With every key decided."""
    reasons: dict[str, str]
    """Key → why it has its value."""
    begins: StartPoint
    changes: list[ChangedKey]
    """Of a resume, those that change the training."""
    argv: list[str]
    environment: dict[str, str]
    """Variables that are set."""
    inherited: dict[str, str | None]
    """Variables that the ranks inherit; null for a value that is not listed."""
    removed: list[str]
    allowed_variables: list[str]
    machine_rank: int
    world_size: int
    python: str


@dataclass(frozen=True, slots=True)
class CheckAnswer(JsonAnswer):
    name: str
    passed: bool
    detail: str
    seconds: float


@dataclass(frozen=True, slots=True)
class RehearseAnswer(JsonAnswer):
    passed: bool
    changes: list[str]
    """How the rehearsed recipe differs."""
    checks: list[CheckAnswer]
    folder: str | None
    """Where everything that was written is kept; null if all checks passed."""


@dataclass(frozen=True, slots=True)
class PushAnswer(JsonAnswer):
    pushed: str
    """Address of the commit on the hub."""


@dataclass(frozen=True, slots=True)
class CurveEnds(JsonAnswer):
    """Ends of a curve; null where all values are NaN or infinite."""

    first: float | None
    last: float | None
    best: float | None
    best_step: int | None
    not_finite: int


@dataclass(frozen=True, slots=True)
class RunFigures(JsonAnswer):
    run_dir: str
    label: str
    state: str
    steps: int
    total_steps: int | None
    seconds_in_steps: float
    tokens: int | None
    loss: CurveEnds | None
    eval_loss: CurveEnds | None
    tokens_per_second_per_device: float | None
    mfu: float | None
    peak_reserved_gib: float | None
    peak_host_gib: float | None
    events: dict[str, int]
    """Event → how often."""
    problem: str | None


@dataclass(frozen=True, slots=True)
class ReportAnswer(JsonAnswer):
    page: str | None
    runs: list[RunFigures]
    recipe_differences: dict[str, list[str | None]]
    """Key → its value in each run."""
    environment_differences: dict[str, list[str | None]]


@dataclass(frozen=True, slots=True)
class DeviceAnswer(JsonAnswer):
    kind: str
    name: str
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class KnownBadAnswer(JsonAnswer):
    code: str
    problem: str
    remedy: str
    source: str


@dataclass(frozen=True, slots=True)
class EnvironmentAnswer(JsonAnswer):
    versions: dict[str, str | None]
    """Package → its version; null: not installed."""
    host: dict[str, str | int | None]
    devices: list[DeviceAnswer]
    lost_devices: list[str]
    hidden_by: str | None
    driver: str | None
    torch: dict[str, object]
    """What torch reports; `error` if it cannot be imported."""
    interconnect: dict[str, object]
    variables: dict[str, object]
    accelerate_default_config: dict[str, object] | None
    known_bad: list[KnownBadAnswer]


@dataclass(frozen=True, slots=True)
class CacheUseAnswer(JsonAnswer):
    time: float
    recipe: str | None
    run: str | None
    live: bool


@dataclass(frozen=True, slots=True)
class CacheEntryAnswer(JsonAnswer):
    path: str
    holds: str
    size_bytes: int
    last_used: float
    uses: list[CacheUseAnswer]


@dataclass(frozen=True, slots=True)
class KeptEntryAnswer(CacheEntryAnswer):
    reason: str


@dataclass(frozen=True, slots=True)
class CacheListAnswer(JsonAnswer):
    cache_dir: str
    entries: list[CacheEntryAnswer]


@dataclass(frozen=True, slots=True)
class CacheCleanAnswer(JsonAnswer):
    cache_dir: str
    removed: list[CacheEntryAnswer]
    kept: list[KeptEntryAnswer]
    dry_run: bool


@dataclass(frozen=True, slots=True)
class ImportedKey(JsonAnswer):
    """What became of a key of the file."""

    key: str
    line: int | None
    value: Any
    fate: str
    to: list[str]
    """Keys of the recipe."""
    reason: str | None


@dataclass(frozen=True, slots=True)
class KeyExplanation(JsonAnswer):
    """A recipe key, as docs/reference/recipe.yaml describes it."""

    key: str
    meaning: str
    takes: str
    default: object
    """Null for a section too."""
    is_required: bool
    in_this_release: list[object]
    """The supported values, where this release does not support all."""
    affects: list[str]
    """What a change of the value changes: `data`, `memory`, `time`, `numbers`."""
    on_resume: str
    """`free`: may change; `trajectory`: may change, and is reported; `refused`: may not change."""
    keys: list[str]
    """Of a section."""


@dataclass(frozen=True, slots=True)
class CodeMessage(JsonAnswer):
    message: str
    """With `…` for what is known at run time only."""
    hint: str | None


@dataclass(frozen=True, slots=True)
class CodeExplanation(JsonAnswer):
    """The code of an error or notice: its messages, and what docs/reference/errors.md adds to them."""

    code: str
    text: str
    messages: list[CodeMessage]


@dataclass(frozen=True, slots=True)
class TemplateAnswer(JsonAnswer):
    name: str
    for_: str
    system: bool
    tools: bool
    thinking: bool
    tokens: list[str]


@dataclass(frozen=True, slots=True)
class FittedTemplateAnswer(TemplateAnswer):
    """With `--tokenizer`."""

    fits: bool


@dataclass(frozen=True, slots=True)
class TemplateTextAnswer(TemplateAnswer):
    text: str


@dataclass(frozen=True, slots=True)
class TemplatesAnswer(JsonAnswer):
    templates: list[FittedTemplateAnswer] | list[TemplateAnswer]


@dataclass(frozen=True, slots=True)
class RecipeLine(JsonAnswer):
    name: str
    headline: str
    path: str


@dataclass(frozen=True, slots=True)
class RecipesAnswer(JsonAnswer):
    recipes: list[RecipeLine]


@dataclass(frozen=True, slots=True)
class RecipeFileAnswer(JsonAnswer):
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class RecipeTextAnswer(RecipeFileAnswer):
    text: str


@dataclass(frozen=True, slots=True)
class NewRecipeAnswer(RecipeTextAnswer):
    method: str
    refused: dict[str, str]
    """The methods that did not fit, each with the reason."""
