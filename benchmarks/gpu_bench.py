"""The state that the parts of a GPU day share: how they run, the plans, and the recipes that they vary."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import plan_gpu
from gpu_runs import Runner, resolved
from step_inputs import LORA

if TYPE_CHECKING:
    from fsdp_tune.planner.tracing import Tracing

Row = dict[str, Any]
Case = TypeVar("Case")


@dataclass
class Bench:
    """What parts are given."""

    run: Runner
    hardware: Any
    """GPU whose figures `plan` takes."""
    tiny: bool
    """Models and rows are toys: figures show only that a part can run."""
    done: frozenset[str] = frozenset()
    """Names of the rows that need not be measured again."""
    plans: Mapping[str, Row] = field(default_factory=dict[str, Row])
    """What was planned earlier, by the name of the row."""
    plans_ahead: bool = False
    """Nothing runs, and everything is planned."""

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if "tracing" in vars(self):
            self.tracing.close()

    @cached_property
    def tracing(self) -> Tracing:
        from fsdp_tune.planner.tracing import Tracing

        return Tracing(self.run.folder / "traces", offline=True)

    def remaining(self, cases: Iterable[tuple[str, Case]]) -> Iterator[tuple[str, Case]]:
        """Yield the (name, case) that have no row yet."""
        return ((name, case) for name, case in cases if name not in self.done)

    def measure(self, name: str, tree: dict[str, Any], **how: int) -> Row:
        """Return the row of a run. Its plan is an earlier one: a paid minute plans nothing."""
        plan = self._planned(tree) if self.plans_ahead else self.plans.get(name, {})
        return {"name": name, **plan, **self.run(tree, **how).row()}

    def _planned(self, tree: dict[str, Any]) -> Row:
        from fsdp_tune.core.errors import FsdpTuneError

        try:
            recipe = resolved(tree, self.run.folder / "planned.json", self.run.device_name)
        except FsdpTuneError as error:
            return {"fits": "unknown", "plan_failed": error.problems[0].message}
        (trace,) = self.tracing([recipe])
        return plan_gpu.predicted(recipe, self.hardware, trace)

    def large(self, dtype: str, **sections: dict[str, Any]) -> dict[str, Any]:
        """A recipe of the 8B Llama at 4,096 tokens; `sections` are put over it."""
        case = plan_gpu.Case("8B", 4096, 1, recomputation="full", dtype=dtype)
        tree = self.shrunk(case, steps=9)
        tree["model"] = tree["model"] | {
            "from_config": tree["model"]["from_config"] | {"tie_word_embeddings": False}
        }
        return self.changed(tree, sections)

    def with_lora(self, tree: dict[str, Any]) -> dict[str, Any]:
        """The recipe with adapters on all linear layers. These need a model directory; it holds no weights,
        since they are drawn."""
        model = dict(tree["model"])
        base = self.run.folder / "base"
        base.mkdir(exist_ok=True)
        (base / "config.json").write_text(json.dumps(model.pop("from_config")), encoding="utf-8")
        return tree | {"model": model | {"name_or_path": str(base)}, "lora": LORA}

    def shrunk(self, case: plan_gpu.Case, steps: int) -> dict[str, Any]:
        if self.tiny:
            small = {
                "model": "small",
                "tokens": min(case.tokens, 64),
                "rows": min(case.rows, 2),
                "accumulation": case.accumulation,
            }
            case = plan_gpu.Case(**small, recomputation=case.recomputation, loss=case.loss, dtype=case.dtype)
        return plan_gpu.recipe_of(case, self.run.folder, min(steps, 4) if self.tiny else steps)

    @staticmethod
    def changed(tree: dict[str, Any], sections: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        return tree | {name: tree.get(name, {}) | keys for name, keys in sections.items()}
