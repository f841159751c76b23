"""`rehearse`: a full run on CPU ranks with a scaled-down model."""

from __future__ import annotations

from typing import Annotated

import typer

from fsdp_tune.cli.options import (
    AllowEnvOption,
    AllowExtensionsOption,
    ConfigArg,
    ConfigOption,
    JsonOption,
    SetOption,
    TrustOption,
    chosen_recipe,
)
from fsdp_tune.cli.output import command
from fsdp_tune.core.errors import failed_error

RanksOption = Annotated[
    int | None,
    typer.Option(
        "--num-processes",
        metavar="N",
        min=1,
        help="Ranks; 2, or 4 if the recipe shards in groups or its ranks share rows.",
        show_default=False,
    ),
]
ParityOption = Annotated[
    bool, typer.Option("--parity", help="Compare every switch (strategy, checkpointing, offload …) with one device instead.")
]


def rehearse(
    recipe: ConfigArg = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    num_processes: RanksOption = None,
    parity: ParityOption = False,
    trust_remote_code: TrustOption = False,
    allow_env: AllowEnvOption = None,
    allow_extensions: AllowExtensionsOption = False,
    json_output: JsonOption = False,
) -> None:
    """Rehearse a full run on CPU ranks with a scaled-down model: train, kill a rank, resume, merge, reload, compare.

    The code path is that of the real run. `--parity` trains once for each switch and prints how far loss and gradient norm are
    from a plain PyTorch loop on one device. `--set launch.device=cuda` uses the GPUs of this machine. Exit 1: a check failed.

    \b
    Examples:
        fsdp-tune rehearse --config llama7b_full_shard
        fsdp-tune rehearse --config my.yaml --parity
    """
    with command(json_output) as screen:
        import fsdp_tune

        loaded = fsdp_tune.load_recipe(chosen_recipe(recipe, config), overrides or ())
        allowed = fsdp_tune.Allowed(trust_remote_code, allow_env or (), allow_extensions)
        done = fsdp_tune.rehearse(loaded, num_processes=num_processes, parity=parity, allowed=allowed, observer=screen)
        screen.document(done.as_dict())
        if done.failed is not None:
            message = f"{done.failed.name}: {done.failed.detail}"
            raise failed_error("rehearsal-failed", message, hint=f"everything that was written is in {done.folder}")
        screen.message(f"all {len(done.checks)} checks passed in {sum(check.seconds for check in done.checks):.0f} s")
