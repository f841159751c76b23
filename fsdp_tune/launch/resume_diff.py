"""What may differ between the recipe that a run began with and the one it goes on with. Pure.

Free: how the run is executed and observed. Trajectory: what the next steps do, accepted and told. Refused: what the
steps already taken rest on. A key in no table is refused, so that a new key is decided on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

from fsdp_tune.errors import FsdpTuneError, Problem
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.recipe.training_fields import TRAINING_FIELDS


class ChangeClass(StrEnum):
    FREE = "free"
    TRAJECTORY = "trajectory"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Change:
    key: str
    old: Any
    new: Any
    kind: ChangeClass

    def __str__(self) -> str:
        return f"`{self.key}`: {_shown(self.old)} → {_shown(self.new)}"

    def as_dict(self) -> dict[str, Any]:
        return {"key": self.key, "old": self.old, "new": self.new, "class": self.kind.value}


GLOBAL_BATCH = "training.global_batch_size"

# The longest prefix decides.
_CLASS_OF: dict[str, ChangeClass] = {
    **dict.fromkeys(("recipe_version", "model", "data", "precision", "training", "lora", "quantization"), ChangeClass.REFUSED),
    **dict.fromkeys(("name", "output_dir", "parallelism", "fsdp", "kernels", "checkpoint", "launch", "merge"), ChangeClass.FREE),
    **dict.fromkeys(("model.attn_implementation", "model.trust_remote_code", "data.num_proc", "data.cache_dir"), ChangeClass.FREE),
    **dict.fromkeys(("data.pad_to_multiple_of", "data.eval_packing"), ChangeClass.FREE),
    GLOBAL_BATCH: ChangeClass.TRAJECTORY,
    "training.on_nonfinite": ChangeClass.TRAJECTORY,
    "training.early_stopping": ChangeClass.TRAJECTORY,
}
_TRAJECTORY_FIELDS = frozenset(
    {
        "learning_rate",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "max_steps",
        "num_train_epochs",
        "weight_decay",
        "max_grad_norm",
    }
    | {"label_smoothing_factor", "neftune_noise_alpha"}
)
# The split of a global batch into ranks, micro-batches and accumulation changes no step; the global batch itself is compared.
_SPLIT_FIELDS = frozenset(
    {"per_device_train_batch_size", "per_device_train_batch_tokens", "gradient_accumulation_steps", "global_batch_size"}
)
_FREE_FIELDS = frozenset(
    {"per_device_eval_batch_size", "report_to", "push_to_hub", "metric_for_best_model", "greater_is_better", "load_best_model_at_end"}
    | {"dataloader_num_workers", "dataloader_prefetch_factor", "tf32", "project", "debug", "full_determinism"}
)
_FREE_PREFIXES = ("logging_", "save_", "eval_", "hub_", "trackio_")


def class_of(key: str) -> ChangeClass:
    section, _, name = key.partition(".")
    field = name.partition(".")[0]
    if section == "training":
        if field in _TRAJECTORY_FIELDS:
            return ChangeClass.TRAJECTORY
        if field in _FREE_FIELDS or field.startswith(_FREE_PREFIXES):
            return ChangeClass.FREE
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        found = _CLASS_OF.get(".".join(parts[:length]))
        if found is not None:
            return found
    return ChangeClass.REFUSED


def compare(old: Recipe, new: Recipe) -> list[Change]:
    """Every key of two resolved recipes that differs, sorted by key."""
    before, after = _leaves_of(old), _leaves_of(new)
    differing = [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]
    return [Change(key, before.get(key), after.get(key), _class_here(key, new)) for key in differing]


def check(changes: Sequence[Change]) -> list[Change]:
    """The changes of the trajectory, to be told; FsdpTuneError (exit 2) with one problem for each that is refused."""
    refused = [change for change in changes if change.kind is ChangeClass.REFUSED]
    if refused:
        hint = "a resumed run keeps it; for another one start afresh: `--set output_dir=…`, or `--overwrite`"
        raise FsdpTuneError(*(Problem("resume-refused", f"{change} cannot change on resume", hint=hint) for change in refused))
    return [change for change in changes if change.kind is ChangeClass.TRAJECTORY]


def _class_here(key: str, new: Recipe) -> ChangeClass:
    # An eval set of its own may change; one that is cut from the training rows changes what is trained.
    if key.startswith("data.eval") and isinstance(new.data.eval, list) and not key.startswith("data.eval_packing"):
        return ChangeClass.FREE
    return class_of(key)


def _leaves_of(recipe: Recipe) -> dict[str, Any]:
    raw = recipe.model_dump(mode="json", by_alias=True)
    training = {name: field.default for name, field in TRAINING_FIELDS.fields.items()} | raw["training"]
    raw["training"] = {name: value for name, value in training.items() if name not in _SPLIT_FIELDS}
    return dict(_leaves(raw, "")) | {GLOBAL_BATCH: recipe.global_batch_size}


def _leaves(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _leaves(cast(dict[str, Any], inner), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


def _shown(value: Any) -> str:
    text = json.dumps(value) if value is None or isinstance(value, bool) else str(value)  # as the recipe spells them
    return text if len(text) <= 80 else text[:77] + "…"
