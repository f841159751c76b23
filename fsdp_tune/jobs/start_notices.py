"""What a user should know before ranks start: what is not used here, hidden secrets, changed extensions."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fsdp_tune.core.errors import Notice
from fsdp_tune.core.secrets import MASK, mask_text
from fsdp_tune.launch.command.accelerate import LaunchPlan
from fsdp_tune.launch.command.default_config import accelerate_default_config
from fsdp_tune.launch.command.resume import Start
from fsdp_tune.recipe.extensions import Extension
from fsdp_tune.recipe.read.loader import LoadedRecipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.records import Environment


def launch_notices(loaded: LoadedRecipe, plan: LaunchPlan) -> list[Notice]:
    """Report what would have steered a bare `accelerate launch` on this machine and does not steer this one,
    and hidden secrets."""
    notices: list[Notice] = []
    if (default := accelerate_default_config(os.environ)) is not None:
        notices.append(
            Notice("accelerate-config-ignored", f"{default['path']} is not used: the recipe decides")
        )
    if plan.removed:
        notices.append(
            Notice(
                "stale-environment",
                f"variables of another job are kept from the ranks: {', '.join(plan.removed)}",
            )
        )
    if hidden := plan.masked_variables():
        notices.append(
            Notice(
                "secret-not-written",
                f"launch.json lists {', '.join(hidden)} without values, which look like secrets",
            )
        )
    if mask_text(loaded.text) != loaded.text:
        message = (
            f"{loaded.path} has a comment with what looks like a secret; the run's recipe.yaml "
            f"gets `{MASK}` instead"
        )
        notices.append(Notice("secret-not-written", message))
    return notices


def changed_extensions(extensions: Sequence[Extension], start: Start) -> list[Notice]:
    """Compare the extensions with those that the resumed run recorded."""
    if start.checkpoint is None:
        return []
    earlier = Environment.read(RunDir(start.checkpoint.path.parent).environment_json) or Environment()
    recorded = {(raw["kind"], raw["name"]): Extension.from_dict(raw) for raw in earlier.extensions}
    changed = [(recorded.get((each.kind, each.name)), each) for each in extensions]
    return [
        Notice("extension-changed", f"the steps so far used {before}; from step {start.step} on {now}")
        for before, now in changed
        if before is not None and before != now
    ]
