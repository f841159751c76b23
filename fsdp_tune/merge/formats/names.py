"""Select the model's entries of a checkpoint and map them to its parameter names. docs/guide/merging.md has the table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from fsdp_tune.core.tensors.pickles import Refused

# Inserted into names by FSDP1, activation checkpointing and torch.compile; models never use them.
WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
_OF_PEFT = re.compile(r"\.(lora_|modules_to_save\.|token_adapter\.)")
MODEL_ROOTS = ("model", "state_dict", "module")
OPTIMIZER_ROOTS = frozenset(
    {f"{name}{end}" for name in ("optimizer", "optim", "opt") for end in ("", "s", "_state", "_states", "_state_dict")} - {"opt", "opts"}
)
_OPTIMIZER_VALUES = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_diff", "exp_inf", "momentum_buffer"),
        *("square_avg", "grad_avg", "acc_delta", "master_param", "param_groups"),
    }
)
"""The last parts of names in the state of torch's and common optimizers; no model has them."""
# torchtitan, torchtune and most loops save these next to a model at the top level.
OTHER_ROOTS = OPTIMIZER_ROOTS | frozenset(
    {
        "lr_scheduler",
        "scheduler",
        "dataloader",
        "train_state",
        "extra_state",
        "rng",
        "rng_state",
        "step",
    }
)


def optimizer_state(names: Sequence[str]) -> frozenset[str]:
    """Return the names that are an optimizer's: under its key, or values of its state with what is next to them (`step`)."""
    parts = {name: name.split(".") for name in names}
    parents = {tuple(split[:-1]) for split in parts.values() if split[-1] in _OPTIMIZER_VALUES}
    return frozenset(
        name
        for name, split in parts.items()
        if OPTIMIZER_ROOTS.intersection(split[:-1]) or "param_groups" in split or (len(split) > 1 and tuple(split[:-1]) in parents)
    )


def model_names(keys: Sequence[str], planner_data: Any, directory: str) -> dict[str, str]:
    """{key of the checkpoint: the model's name}, in the order of the keys. Refused when two keys get one name.

    `planner_data` is what DCP's default planner leaves: {key: path through the nested dictionaries that were saved}.
    """
    paths = _paths(keys, planner_data, directory)
    roots = {root for path in paths.values() if (root := _model_root(path))}
    if len(roots) > 1:
        raise Refused(f"it holds several models: {', '.join(sorted('.'.join(root) for root in roots))}")
    if roots:
        (root,) = roots
        chosen = {key: path[len(root) :] for key, path in paths.items() if path[: len(root)] == root}
    else:
        chosen = {key: path for key, path in paths.items() if path[0] not in OTHER_ROOTS}
    names = {key: _unwrapped(".".join(path)) for key, path in chosen.items()}
    if names and all(name.startswith("module.") for name in names.values()):  # DistributedDataParallel
        names = {key: name.removeprefix("module.") for key, name in names.items()}
    if len(set(names.values())) < len(names):
        raise Refused("two of its entries have the same name once wrappers are left out")
    return names


def _paths(keys: Sequence[str], planner_data: Any, directory: str) -> dict[str, tuple[str, ...]]:
    known = planner_data if isinstance(planner_data, dict) else {}
    paths: dict[str, tuple[str, ...]] = {}
    for key in keys:
        path = known.get(key)
        parts = [key, *(str(part) for part in path)] if isinstance(path, tuple) else [key]
        if not key or not all(part.isprintable() for part in parts):
            raise Refused(f"an entry has no name that can be printed: {key!r}")
        if isinstance(path, tuple) and path:
            paths[key] = tuple(str(part) for part in path)
        elif directory.startswith("pytorch_model_fsdp") and key.startswith("model."):
            paths[key] = ("model", key.removeprefix("model."))  # Accelerate saves {"model": …}, whichever planner wrote it
        else:
            paths[key] = (key,)
    return paths


def _model_root(path: tuple[str, ...]) -> tuple[str, ...] | None:
    """`("app", "model", "norm.weight")` → `("app", "model")`; None for what lies flat or belongs to something else."""
    if path[0] in OTHER_ROOTS:
        return None
    for index, part in enumerate(path[:-1]):
        if part in OPTIMIZER_ROOTS:
            return None
        if part in MODEL_ROOTS:
            return path[: index + 1]
    return None


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def is_peft(names: Iterable[str]) -> bool:
    """Return whether names of tensors are those of a PEFT model."""
    return any(_OF_PEFT.search(name) for name in names)
