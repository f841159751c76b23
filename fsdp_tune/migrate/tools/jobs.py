"""Rules of what a job around a training asks of its cluster: the `#SBATCH` lines of a script, and the
machines of a manifest."""

from __future__ import annotations

from fsdp_tune.migrate.read.batch_options import COMPONENTS
from fsdp_tune.migrate.read.command_line import ENVIRONMENT, LAUNCHER, STARTS_EACH_RANK
from fsdp_tune.migrate.rules import FileKey, Inside, Outcome, Rules, each
from fsdp_tune.recipe.outcome import Ask, Drop, Weight, Write

_YOURS = Drop("a line for your block of the script that `fsdp-tune submit slurm` writes, which keeps it")
_OPTION = Drop("an option of `fsdp-tune submit slurm`, with the same name")
_OWN = Drop("`fsdp-tune submit slurm` writes its own")
_BY_COMMAND = Drop(
    "the command decides the ranks; GPUs of a node are `fsdp-tune submit slurm --gpus-per-node N`"
)


def _machines(key: FileKey) -> Outcome:
    if not isinstance(key.value, int):
        return Ask("a run has a fixed number of machines: write one", "launch.num_machines")
    return (
        Drop("one machine, as it is here")
        if key.value == 1
        else Write({"launch.num_machines": key.value}, weight=Weight.IMPLIED)
    )


_COUNTS = (
    *((LAUNCHER, "nnodes"), (LAUNCHER, "num_machines"), (LAUNCHER, "config_file", "num_machines")),
    *(("nnodes",), (ENVIRONMENT, "NNODES")),
)
"""Where a command, the file that it names, or a variable of ms-swift and LLaMA-Factory has the number of
machines."""


def _joined(key: FileKey) -> Outcome:
    """Write the machines of a job that joins them to one training, unless the launcher has another number."""
    outcome = _machines(key)
    counts: list[object] = [found for path in _COUNTS if (found := key.of_file(*path))]
    given = counts[0] if counts else None
    if not isinstance(outcome, Write) or given in (None, key.value):
        return outcome
    return Drop(f"the launcher's own number of machines, {given}, decides")


def nodes(key: FileKey) -> Outcome:
    """Write the machines that a job occupies if its command trains on all of them.

    torchrun and Accelerate use one machine unless their options have the number: each node would run a
    training of its own.
    """
    outcome = _machines(key)
    if any(key.beside(name) for name in COMPONENTS) and not isinstance(outcome, Ask):
        return Ask("of the first component of the job: a run has equal machines", "launch.num_machines")
    is_counted = any(key.of_file(*path) is not None for path in _COUNTS)
    if (
        not isinstance(outcome, Write)
        or is_counted
        or any(key.of_file(LAUNCHER, name) for name in STARTS_EACH_RANK)
    ):
        return _joined(key)
    words = (
        f"the job has {key.value} nodes, and its launcher no `--nnodes` or `--num_machines`, without "
        "which it uses one machine"
    )
    return Ask(f"{words}: write `launch: {{num_machines: N}}`", "launch.num_machines")


_SBATCH: Rules = {
    "nodes": nodes,
    **each(
        COMPONENTS,
        Ask(
            "the components of the job have nodes of their own, and a run has equal machines",
            "launch.num_machines",
        ),
    ),
    **each(("job-name", "time", "partition", "account", "qos", "constraint"), _OPTION),
    "cpus-per-task": Drop(
        "derived from ranks and their loaders by `fsdp-tune submit slurm`; `--cpus-per-node N` for "
        "the cores of a node"
    ),
    **each(("gpus-per-node", "gpus", "gres", "gpus-per-task", "ntasks", "ntasks-per-node"), _BY_COMMAND),
    **each(("output", "error", "open-mode", "signal", "requeue", "no-requeue", "chdir"), _OWN),
}


def sbatch(key: FileKey) -> Outcome:
    """Settle each option of Slurm; one without a rule, as `--mem` and `--exclusive`, is kept by the person's
    block of a script."""
    return Inside({name: _SBATCH.get(name, _YOURS) for name in key.mapping})


def _processes(key: FileKey) -> Outcome:
    if (own := key.of_file(LAUNCHER, "nproc_per_node")) is not None:
        return Drop(f"the launcher's own number of ranks, {own}, decides")
    return Ask("it counts the ranks of one machine, and a recipe those of all", "launch.num_processes")


MANIFEST_RULES: Rules = {"machines": _joined, "nodes": nodes, "processes": _processes}
"""Machines of a manifest: `machines` if its engine joins them to one training, else `nodes`; `processes` are
the ranks of each."""
