"""What a recipe leaves to a plan (`fsdp.activation_checkpointing: auto`), decided for the machine that the command runs on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_tune.core.errors import FsdpTuneError

if TYPE_CHECKING:
    from fsdp_tune.core.devices import Device
    from fsdp_tune.planner.search.recomputation import Budget, Decided
    from fsdp_tune.planner.trace_format import Trace
    from fsdp_tune.planner.tracing import Tracing
    from fsdp_tune.recipe.schema import Recipe


def card_of(recipe: Recipe) -> Device | None:
    """This machine's first accelerator, where the recipe is for its kind."""
    if recipe.launch.device == "cpu":
        return None
    from fsdp_tune.core.devices import visible_devices

    devices = visible_devices(os.environ)
    return devices[0] if devices and devices[0].kind == recipe.launch.device else None


def budget_of(recipe: Recipe, card: Device | None) -> Budget | None:
    """The memory of a rank: its card's as the table or the driver says it; on a CPU its share of the host's. None where nobody says it."""
    from fsdp_tune.planner.hardware.gpus import detect
    from fsdp_tune.planner.search.recomputation import Budget

    if recipe.launch.device == "cpu":
        from fsdp_tune.diagnose.environment import host

        facts, ranks = host(), recipe.local_world_size
        known = [size for size in (facts["memory_bytes"], facts["memory_limit_bytes"]) if size is not None]
        return Budget(f"the host's memory, shared by {ranks} ranks", min(known) // ranks) if known else None
    if card is None:
        return None
    if (hardware := detect(card.name)) is not None:
        return Budget.of(hardware)
    return Budget(card.name, card.memory_bytes) if card.memory_bytes is not None else None


def decided(recipe: Recipe, budget: Budget | None, *, offline: bool = False) -> Decided:
    """The recipe with nothing left open; its step is traced in a child process, or was before. Notices say what was decided blindly."""
    from fsdp_tune.planner.search.recomputation import decide
    from fsdp_tune.planner.tracing import Tracing

    assert recipe.data.cache_dir is not None, "the recipe is resolved"
    with Tracing(Path(recipe.data.cache_dir) / "traces", offline=offline) as tracing:
        return decide(recipe, budget, one_trace(tracing))


def one_trace(tracing: Tracing) -> Callable[[Recipe], Trace]:
    def traced(recipe: Recipe) -> Trace:
        (found,) = tracing([recipe])
        if isinstance(found, FsdpTuneError):
            raise found
        return found

    return traced


def in_words(found: Decided) -> dict[str, str]:
    """Key → the value that was decided, and why."""
    from fsdp_tune.recipe.schema.not_yet import value_of

    return {key: f"{value_of(found.recipe, key)} ({reason})" for key, reason in found.reasons.items()}
