"""`doctor`: check the machines of a recipe before its run."""

from __future__ import annotations

from fsdp_tune.cli.output import Screen
from fsdp_tune.cli.verbs import NamedRecipe, verb
from fsdp_tune.jobs.options import DoctorOptions


@verb
def doctor(screen: Screen, recipe: NamedRecipe, options: DoctorOptions) -> None:
    """Start the ranks of a recipe for some seconds and check their machines: disk, inputs, limits, clocks, devices, links.

    Trains nothing and leaves nothing on disk. With several machines, start it on each of them, as `train`. Ends with exit code 1 if a
    check fails, not for warnings.

    \b
    Examples:
        fsdp-tune doctor --config my.yaml
        fsdp-tune doctor --config my.yaml --machine-rank 1
    """
    from fsdp_tune.jobs.doctor import doctor as check
    from fsdp_tune.jobs.doctor import refuse_failed

    screen.phase("reading the recipe")
    answer = check(recipe.load(), options, observer=screen)
    screen.end_phase()
    screen.document(answer)
    for each in answer.checks:
        if each.state != "fail":  # failures follow as errors, with their hints
            screen.message(f"{each.state:4}  {each.name}: {each.finding}" + (f"\n      hint: {each.fix}" if each.fix else ""))
    refuse_failed(answer)
