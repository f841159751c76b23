"""The section `evaluation:`: rows on which a process of its own scores the model of each saved checkpoint."""

from __future__ import annotations

from typing import Annotated, Literal

from fsdp_tune.recipe.schema.data_section import DataSource

# ruff: noqa: RUF012  pydantic copies a default for each instance, and ours are frozen
from fsdp_tune.recipe.schema.key_effects import FREE, NOTHING, RESULT, Effect
from fsdp_tune.recipe.schema.value_kinds import Duration, RegularExpression, Section, Text, Whole

SCORES_OF = {"exact_match": ("exact_match",), "perplexity": ("perplexity", "loss")}
"""The names of the scores of each `evaluation.sets[].metric`, after the label of the set and `/`."""


class EvaluationSet(DataSource):
    """Rows as in `data.train`, and how they are scored."""

    default_effect = Effect(RESULT, FREE)

    metric: Literal["exact_match", "perplexity"] = "perplexity"
    """exact_match: generated answers that equal the rows' answers; perplexity: of the trained tokens. Both as
    by `fsdp-tune evaluate`."""
    answer: RegularExpression | None = None
    """exact_match: compare only the first match of this pattern in both texts (its first group), such as
    `#### (.*)`."""
    max_new_tokens: Whole = 256
    """exact_match: longest generated answer."""

    @property
    def set_label(self) -> str:
        """The first part of the names of the scores."""
        return self.label or self.stem


class CheckpointEvaluation(Section):
    default_effect = Effect(NOTHING, FREE)

    sets: Annotated[list[EvaluationSet], Effect(RESULT, FREE)] = []
    """Sets of rows: keys as in `data.train`, with `metric`, `answer` and `max_new_tokens`. Scores are named
    `label/metric`."""
    tasks: Annotated[list[Text], Effect(RESULT, FREE)] = []
    """Tasks of lm_eval (`fsdp-tune[eval]`), with its own defaults. Scores are named `task/metric`."""
    task_rows: Annotated[Whole | None, Effect(RESULT, FREE)] = None
    """Rows of each task, from its beginning; null = all."""
    every: Annotated[Whole | None, Effect(RESULT, FREE)] = None
    """Evaluate only checkpoints whose step is a multiple of this; null = every checkpoint."""
    when: Literal["alongside", "between_steps", "at_end"] = "alongside"
    """alongside: during training, on unused GPUs of machine 0, else its CPU; between_steps: on the GPUs of
    the waiting ranks; at_end."""
    batch_size: Whole = 8
    """Rows of one forward pass."""
    timeout: Duration = "2h"
    """Longest evaluation of one checkpoint, after which it counts as failed."""
    scratch_dir: Text | None = None
    """Where the model of a checkpoint is written while it is evaluated; null = the run directory."""

    @property
    def is_on(self) -> bool:
        return bool(self.sets or self.tasks)

    def evaluates(self, step: int) -> bool:
        """Return whether the checkpoint of a step is evaluated."""
        return self.is_on and step % (self.every or 1) == 0

    @property
    def sources(self) -> list[tuple[str, EvaluationSet]]:
        """Every set with its key (`evaluation.sets[0]`)."""
        return [(f"evaluation.sets[{index}]", each) for index, each in enumerate(self.sets)]

    @property
    def scores(self) -> list[str]:
        """The names of the scores of the sets; those of tasks are known to lm_eval alone."""
        return [f"{each.set_label}/{name}" for each in self.sets for name in SCORES_OF[each.metric]]

    def has_score(self, name: str) -> bool:
        """Return whether evaluations of checkpoints have a score of this name. Any score of a task may
        exist."""
        return name in self.scores or any(name.startswith(f"{task}/") for task in self.tasks)
