"""Rules of what a job around a training asks of its cluster: the `#SBATCH` lines of a script, and the machines of a manifest."""

from __future__ import annotations

from fsdp_tune.migrate.rules import FileKey, Inside, Outcome, Rules, each
from fsdp_tune.recipe.outcome import Ask, Drop, Weight, Write

_YOURS = Drop("a line for your block of the script that `fsdp-tune submit slurm` writes, which keeps it")
_OPTION = Drop("an option of `fsdp-tune submit slurm`, with the same name")
_OWN = Drop("`fsdp-tune submit slurm` writes its own")
_BY_COMMAND = Drop("the command decides the ranks; GPUs of a node are `fsdp-tune submit slurm --gpus-per-node N`")


def _machines(key: FileKey) -> Outcome:
    if not isinstance(key.value, int):
        return Ask("a run has a fixed number of machines: write one", "launch.num_machines")
    return Drop("one machine, as it is here") if key.value == 1 else Write({"launch.num_machines": key.value}, weight=Weight.IMPLIED)


_SBATCH: Rules = {
    "nodes": _machines,
    **each(("job-name", "time", "partition", "account", "qos", "constraint"), _OPTION),
    "cpus-per-task": Drop("derived from ranks and their loaders by `fsdp-tune submit slurm`; `--cpus-per-node N` for the cores of a node"),
    **each(("gpus-per-node", "gpus", "gres", "gpus-per-task", "ntasks", "ntasks-per-node"), _BY_COMMAND),
    **each(("output", "error", "open-mode", "signal", "requeue", "no-requeue", "chdir"), _OWN),
}


def sbatch(key: FileKey) -> Outcome:
    """Settle each option of Slurm; one without a rule, as `--mem` and `--exclusive`, is kept by the person's block of a script."""
    return Inside({name: _SBATCH.get(name, _YOURS) for name in key.mapping})


def manifest(key: FileKey) -> Outcome:
    return Inside(each(tuple(key.mapping), _machines))
