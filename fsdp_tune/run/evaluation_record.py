"""evaluation.json: what the scores of checkpoints are computed from now, written by each start of a run with `evaluation:`.

Ranks, evaluations and merges read it, so that a score of other rows, or of another metric of the same name, is not compared with these.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdp_tune.recipe.schema.evaluation import CheckpointEvaluation
from fsdp_tune.run.manifest import digest_of_values
from fsdp_tune.run.records import Document


@dataclass(frozen=True, slots=True)
class EvaluationRecord(Document):
    command: str
    """Identifies the start: a checkpoint whose evaluation failed in an earlier one is evaluated again."""
    evaluation: dict[str, object]
    """The section of the recipe."""
    rows: dict[str, str]
    """Label of each set → digest of its rows as tokens and targets."""
    is_rounded: bool = False
    """Whether the quantised model is scored (`Recipe.ships_quantised`)."""
    merge: dict[str, object] = field(default_factory=dict[str, object])
    """Keys of `merge:` that decide the weights of the model, where they are not their defaults."""

    @classmethod
    def of(
        cls,
        evaluation: CheckpointEvaluation,
        rows: Mapping[str, str],
        *,
        is_rounded: bool = False,
        merge: Mapping[str, object] | None = None,
    ) -> EvaluationRecord:
        return cls(uuid.uuid4().hex, evaluation.model_dump(mode="json", by_alias=True), dict(rows), is_rounded, dict(merge or {}))

    @property
    def section(self) -> CheckpointEvaluation:
        return CheckpointEvaluation.model_validate(self.evaluation)

    @property
    def definition(self) -> str:
        """A digest of all that decides the scores of a model. Scores of another definition cannot be compared with these."""
        section = self.section
        sets = {each.set_label: [each.metric, each.answer, each.max_new_tokens, self.rows.get(each.set_label)] for each in section.sets}
        weights = ({"is_rounded": True} if self.is_rounded else {}) | ({"merge": self.merge} if self.merge else {})
        return digest_of_values({"sets": sets, "tasks": sorted(section.tasks), "task_rows": section.task_rows} | weights)
