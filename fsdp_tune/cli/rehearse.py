"""`rehearse`: the user's recipe with the model shrunk, through everything that a real run goes through, on CPU ranks."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsdp_tune.cli.options import (
    Allowed,
    AllowEnvOption,
    ConfigArg,
    ConfigOption,
    JsonOption,
    SetOption,
    TrustOption,
    asked_recipe,
    chosen_recipe,
)
from fsdp_tune.cli.output import Screen, command, stopping_cleanly
from fsdp_tune.core.errors import FsdpTuneError, failed_error, usage_error

if TYPE_CHECKING:
    from fsdp_tune.recipe.schema import Recipe
    from fsdp_tune.verify.rehearsal.scenes import Check
    from fsdp_tune.verify.rehearsal.shrink import Small

STEPS = 24
HYBRID_RANKS = 4
RANKS = 2

RanksOption = Annotated[
    int | None,
    typer.Option("--num-processes", metavar="N", min=1, help="Ranks; 2, or 4 where the recipe shards in groups.", show_default=False),
]
ParityOption = Annotated[
    bool, typer.Option("--parity", help="Hold every switch (strategy, checkpointing, offload …) against one device instead.")
]


def rehearse(
    recipe: ConfigArg = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    num_processes: RanksOption = None,
    parity: ParityOption = False,
    trust_remote_code: TrustOption = False,
    allow_env: AllowEnvOption = None,
    json_output: JsonOption = False,
) -> None:
    """Play a recipe through on CPU ranks with the model shrunk: train, kill a rank, resume, merge, reload, compare.

    The same code path as the real run. `--parity` trains once for each switch and prints how far loss and gradient norm are
    from a plain PyTorch loop on one device. `--set launch.device=cuda` takes the GPUs of this machine. Exit 1: a check failed.

    \b
    Examples:
        fsdp-tune rehearse --config llama7b_full_shard
        fsdp-tune rehearse --config my.yaml --parity
    """
    with command(json_output) as screen, stopping_cleanly():
        from fsdp_tune.verify.rehearsal.scenes import Rehearsal
        from fsdp_tune.verify.rehearsal.switches import comparable, parity_checks

        found = asked_recipe(screen, chosen_recipe(recipe, config), overrides, allowed=Allowed(trust_remote_code, allow_env or ()))
        allowed = (
            *(["--trust-remote-code"] if trust_remote_code else []),
            *(word for each in allow_env or () for word in ("--allow-env", each)),
        )
        screen.notices(found.resolution.notices)
        asked = found.recipe
        folder = Path(tempfile.mkdtemp(prefix="fsdp-tune-rehearsal-"))
        ranks = num_processes or (HYBRID_RANKS if asked.is_hybrid else RANKS)
        named = found.loaded.positions.get("launch.device")
        device = asked.launch.device if named is not None and str(named.source).startswith("--set") else "cpu"
        checks: list[Check] = []
        screen.log_directory = folder
        try:
            small = _shrink(screen, asked, folder, ranks, device)
            if parity:
                small = comparable(small)
            for line in small.changes:
                screen.say(f"  {line}")
            played = (
                parity_checks(small, folder, allowed) if parity else Rehearsal(small.write(folder), folder, ranks, STEPS, allowed).checks()
            )
            for check in played:
                checks.append(check)
                screen.say(f"{'ok  ' if check.passed else 'FAIL'}  {check.name}: {check.detail}  ({check.seconds:.0f} s)")
        finally:
            failed = next((check for check in checks if not check.passed), None)
            if failed is None:
                shutil.rmtree(folder, ignore_errors=True)
        screen.document(_document(small, checks, folder if failed else None))
        if failed is not None:
            raise failed_error("rehearsal-failed", f"{failed.name}: {failed.detail}", hint=f"everything that was written is in {folder}")
        screen.say(f"all {len(checks)} checks passed in {sum(check.seconds for check in checks):.0f} s")


def _shrink(screen: Screen, recipe: Recipe, folder: Path, ranks: int, device: str) -> Small:
    """Looks at the model and the data as `validate` does; what is wrong there is exit 2, what is out of reach is replaced."""
    from fsdp_tune.cli.data_checks import FIRST_ROWS, data_facts
    from fsdp_tune.cli.model_checks import model_facts
    from fsdp_tune.core.processes import threads
    from fsdp_tune.data.preparation import length_with_targets
    from fsdp_tune.data.tokenise.tokenizer import load_encoder
    from fsdp_tune.verify.rehearsal.shrink import Reach, small_recipe

    with threads(1) as pool:
        looking = pool.submit(model_facts, recipe)
        data = data_facts(recipe)
        model = looking.result()
    screen.notices([*model.notices, *data.notices])
    if model.problems or data.problems:
        raise FsdpTuneError(*model.problems, *data.problems)
    if model.unchecked:
        raise usage_error(
            "model-unreachable",
            f"{model.unchecked[0]}, and the package does not carry its shape",
            hint="its config.json is enough: `--set model.name_or_path=null --set model.from_config=PATH`",
        )
    reach = Reach(tokenizer=data.vocabulary_size is not None, data=not data.unchecked)
    if reach.tokenizer and reach.data:
        reach = replace(reach, tokens=length_with_targets(recipe, load_encoder(recipe), rows=FIRST_ROWS))
    return small_recipe(recipe, model.facts["config"], folder, ranks=ranks, device=device, steps=STEPS, reach=reach)


def _document(small: Small, checks: list[Check], folder: Path | None) -> dict[str, Any]:
    return {
        "passed": folder is None,
        "changes": small.changes,
        "checks": [{"name": c.name, "passed": c.passed, "detail": c.detail, "seconds": round(c.seconds, 1)} for c in checks],
        "folder": str(folder) if folder else None,
    }
