"""`rehearse`: a full run on CPU ranks with a scaled-down model."""

from __future__ import annotations

import fsdp_tune
from fsdp_tune.cli.output import Screen
from fsdp_tune.cli.verbs import RecipeArgument, given, verb
from fsdp_tune.core.errors import failed_error
from fsdp_tune.jobs.options import RehearseOptions


@verb
def rehearse(screen: Screen, recipe: RecipeArgument, options: RehearseOptions) -> None:
    """Rehearse a full run on CPU ranks with a scaled-down model: train, kill a rank, resume, merge, reload, compare.

    The code path is that of the real run. `--parity` trains once for each switch and prints how far loss and gradient norm are
    from a plain PyTorch loop on one device. `--set launch.device=cuda` uses the GPUs of this machine. Exit 1: a check failed.

    \b
    Examples:
        fsdp-tune rehearse --config llama7b_full_shard
        fsdp-tune rehearse --config my.yaml --parity
    """
    done = fsdp_tune.rehearse(recipe.load(), **given(options), observer=screen)
    screen.document(done.as_dict())
    if done.failed is not None:
        message = f"{done.failed.name}: {done.failed.detail}"
        raise failed_error("rehearsal-failed", message, hint=f"everything that was written is in {done.folder}")
    screen.message(f"all {len(done.checks)} checks passed in {sum(check.seconds for check in done.checks):.0f} s")
