"""What a comparison of two sides finds, part by part, and the answer that it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdp_tune.comparison.causes import DifferentKey, different_paths, is_named
from fsdp_tune.comparison.stages import NEVER_COMPARED, ComparedStage, Observation
from fsdp_tune.comparison.verdicts import evidence_of, unsettled_keys, verdict
from fsdp_tune.core.secrets import mask_text
from fsdp_tune.core.user_cache import default_cache_directory
from fsdp_tune.data.read.file_access import FileDigests
from fsdp_tune.jobs.compare_answer import (
    CompareAnswer,
    LaterDifference,
    SideAnswer,
    first_of,
    not_compared_lines,
)
from fsdp_tune.jobs.compared_runs import ComparedRuns, cause_not_shown
from fsdp_tune.jobs.compared_sides import ComparedSide
from fsdp_tune.jobs.options import CompareOptions
from fsdp_tune.recipe.key_paths import KeyPath, dotted


@dataclass
class Findings:
    """What is found, part by part."""

    a: ComparedSide
    b: ComparedSide
    keys: dict[KeyPath, DifferentKey]
    """That differ in the resolved recipes."""
    options: CompareOptions
    tolerance: float = 0.0
    environment: dict[str, list[str | None]] = field(default_factory=dict[str, "list[str | None]"])
    runs: ComparedRuns = field(default_factory=ComparedRuns)
    """Of two runs: their files. Its stages come before and after those of the recipes."""
    stages: list[ComparedStage] = field(default_factory=list[ComparedStage])
    observations: tuple[Observation, Observation] | None = None
    causes: list[LaterDifference] = field(default_factory=list[LaterDifference])
    left_out: list[str] = field(default_factory=list[str])
    failed: list[str] = field(default_factory=list[str])
    interpreters: tuple[str | None, str | None] = (None, None)
    tool_versions: tuple[str | None, str | None] = (None, None)

    @property
    def is_of_runs(self) -> bool:
        return self.a.run is not None and self.b.run is not None

    def all_stages(self) -> list[ComparedStage]:
        return [*self.runs.before, *self.stages, *self.runs.after]

    def unsettled(self) -> list[KeyPath]:
        """Return the keys that change rows, numbers or the delivered model, and are not shown to make no
        difference."""
        changing = [path for path, key in self.keys.items() if key.changes_numbers]
        digests = FileDigests(default_cache_directory())
        return unsettled_keys(
            changing, (self.a.resolved, self.b.resolved), self.all_stages(), self.observations, digests
        )

    def answer(self) -> CompareAnswer:
        stages, unsettled = self.all_stages(), self.unsettled()
        environment = self.runs.environment | self.environment
        found = first_of(stages)
        causes = (
            self.causes if found is not None and self.causes and self.causes[0].difference == found else []
        )
        shown_cause = causes[0].cause if causes else None
        keys = sorted(self.keys.values(), key=lambda key: not key.changes_numbers)
        open_keys = [self.keys[path] for path in unsettled]
        by_lines = {"steps", "evaluations"}
        return CompareAnswer(
            equal=(outcome := verdict(stages, unsettled, failed=bool(self.failed))) == "equal",
            a=self._side_answer(0),
            b=self._side_answer(1),
            keys=keys,
            environment=environment,
            stages=stages,
            first=found,
            cause=shown_cause or (cause_not_shown(found, open_keys, environment, stages) if found else None),
            later=causes[1:] if causes else self.causes,
            first_step=self.runs.first,
            first_bits=self.runs.first_bits,
            rows_of_step=self.runs.rows_of_step,
            tolerance=self.tolerance or self.runs.tolerance,
            not_compared=self._not_compared(stages, unsettled),
            failed=self.failed,
            verdict=outcome,
            compared=[
                *evidence_of([stage for stage in stages if stage.name not in by_lines]),
                *self.runs.compared,
            ],
            unsettled=[key.key for key in open_keys],
        )

    def _not_compared(self, stages: Sequence[ComparedStage], unsettled: Sequence[KeyPath]) -> list[str]:
        missing = ((each.title, str(each.detail)) for each in stages if each.status == "not_compared")
        left_out = [*self.left_out, *self.runs.left_out, *not_compared_lines(missing)]
        for side in (self.a, self.b):
            left_out += not_compared_lines(
                (f"`{key.key}`", f"of {side.name}: {key.reason or key.fate}") for key in side.not_carried
            )
            if side.imported is not None and side.options is None:
                left_out.append(
                    f"what {side.kind} computes: {side.name} is the recipe that `import` makes of it"
                )
            left_out += [
                f"`{key}`, to decide: {words}"
                for key, words in (side.imported.decisions if side.imported else ())
            ]
        shown = {key.key for each in self.causes if each.cause is not None for key in each.cause.keys}
        if (
            self.stages
            and not self.failed
            and all(each.cause is not None and each.cause.is_shown for each in self.causes)
        ):
            # others follow from these
            written = {dotted(path) for path in different_paths(self.a.written, self.b.written)}
            unseen = [
                dotted(path)
                for path in unsettled
                if not is_named(dotted(path), shown) and is_named(dotted(path), written)
            ]
            left_out += not_compared_lines((f"`{key}`", "no stage shows an effect") for key in unseen)
        return list(dict.fromkeys([*left_out, *(NEVER_COMPARED if self.stages else ())]))

    def _side_answer(self, index: int) -> SideAnswer:
        side = (self.a, self.b)[index]
        overrides = [mask_text(each) for each in side.loaded.overrides]
        return SideAnswer(
            side.name,
            side.kind,
            self.interpreters[index],
            side.not_carried,
            overrides,
            self.tool_versions[index],
        )
