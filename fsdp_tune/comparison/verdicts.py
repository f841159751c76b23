"""The verdict of a comparison: what it rests on, and which keys that differ are shown to make no difference.

*equal* needs an equal stage of each kind that is claimed: of the rows, and of what is computed from them. A
key that changes rows, numbers or the delivered model forbids it, unless a stage that covers the full run is
equal and shows all that the key affects, or the key names the same bytes elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from fsdp_tune.comparison.causes import affects_of
from fsdp_tune.comparison.identity import are_same_files
from fsdp_tune.comparison.stages import DATA_STAGES, ComparedStage, Observation
from fsdp_tune.core.values import as_mapping
from fsdp_tune.data.read.file_access import FileDigests
from fsdp_tune.recipe.key_paths import KeyPath, dotted
from fsdp_tune.recipe.schema.key_effects import Affects

Verdict = Literal["equal", "different", "not_comparable"]
CLAIMS = (("tokens", "data"), ("loss", "update", "steps", "logprobs", "same_tokens", "answers"))
"""Stages of which one has to be equal: of the rows, and of what depends on the weights. A server has no
rows."""
SCHEDULE = frozenset(
    f"training.{name}"
    for name in (
        "learning_rate",
        "warmup_steps",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "max_steps",
        "num_train_epochs",
    )
)
"""Keys that affect nothing but the learning rate of each step, and the number of steps."""
PATTERNS = (("model", "freeze"), ("lora", "target_modules"), ("training", "parameter_groups"))
"""Keys whose values are names or patterns of parameters, and have no effect but by what they match."""
SAME_UPDATE = ("adamw_torch", "adamw_torch_fused")
"""Optimizers that compute the same update, one with a fused kernel, unless `training.optim_args` has more."""


def verdict(
    stages: Sequence[ComparedStage], unsettled: Iterable[KeyPath], *, failed: bool = False
) -> Verdict:
    """Return the verdict. `unsettled`: keys that differ and are not shown to make no difference; `failed`: a
    tool did not compute all."""
    names = {stage.name for stage in stages}
    equal = {stage.name for stage in stages if stage.status == "equal"}
    keys = list(unsettled)
    if any(stage.status == "different" for stage in stages) or any(not _is_of_rows(key) for key in keys):
        return "different"
    claims = [claim for claim in CLAIMS if names & set(claim)]
    if keys or failed or not claims or not all(equal & set(claim) for claim in claims):
        return "not_comparable"
    return "equal"


def unsettled_keys(
    paths: Sequence[KeyPath],
    recipes: tuple[Mapping[str, object], Mapping[str, object]],
    stages: Sequence[ComparedStage],
    observations: tuple[Observation, Observation] | None,
    digests: FileDigests,
) -> list[KeyPath]:
    """Return the keys among `paths` that are not shown to make no difference. `observations`: None if nothing
    was computed."""
    equal = {stage.name for stage in stages if stage.status == "equal"}
    complete = (
        equal & set.intersection(*(set(each.complete) for each in observations))
        if observations is not None
        else set[str]()
    )
    has_evaluations = observations is not None and any("eval_rows" in each.stages for each in observations)
    rows = {"rows", "order"} <= complete and equal.issuperset(set(DATA_STAGES) - {"eval_rows"})
    shown_rows = rows and (not has_evaluations or "eval_rows" in complete)
    shown_by_digest = {"data", "data_order"} <= equal
    choices = [each.chosen for each in observations or ()]
    are_chosen_alike = bool(choices and choices[0]) and choices[0] == choices[1]

    def is_settled(path: KeyPath) -> bool:
        name = dotted(path)
        if name in SCHEDULE:
            return "rate" in complete
        if path[:2] in PATTERNS and "update" in equal:
            return are_chosen_alike
        if name == "training.optim" and "update" in equal:
            training = [as_mapping(each.get("training")) for each in recipes]
            return all(
                each.get("optim") in (None, *SAME_UPDATE) and not each.get("optim_args") for each in training
            )
        if name == "training.global_batch_size":
            return "batch" in equal
        if _is_of_rows(path) and (shown_rows or (shown_by_digest and not name.startswith("data.eval"))):
            return True
        return are_same_files(path, *recipes, digests)

    return [path for path in paths if not is_settled(path)]


def _is_of_rows(path: KeyPath) -> bool:
    """Return whether a key affects which rows are read, and no number computed from the same rows."""
    affects = affects_of(path)
    return bool(affects & Affects.DATA) and not affects & (Affects.NUMBERS | Affects.RESULT)


def evidence_of(stages: Sequence[ComparedStage]) -> list[str]:
    """Return a line for each stage that was compared: its title, and how much of it."""
    return [f"{stage.title}: {stage.places:,} compared" for stage in stages if stage.status != "not_compared"]
