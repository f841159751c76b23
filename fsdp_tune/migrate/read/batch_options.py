"""Read the options of Slurm that a batch script asks for in its `#SBATCH` lines, and the variables that Slurm
sets from them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from fsdp_tune.core.units import ScalarError, parse_plain

_NAMES = {
    "N": "nodes",
    "n": "ntasks",
    "c": "cpus-per-task",
    "t": "time",
    "p": "partition",
    "A": "account",
    "J": "job-name",
    "G": "gpus",
    "o": "output",
    "e": "error",
    "q": "qos",
    "C": "constraint",
    "w": "nodelist",
    "x": "exclude",
    "d": "dependency",
    "a": "array",
    "D": "chdir",
    "L": "licenses",
}
"""Short options of `sbatch`."""
COMPONENTS = ("hetjob", "packjob")
"""The line after which a heterogeneous job has the options of its next component, which are of other
nodes."""
_GPUS = re.compile(r"(?:gpu:)?(?:[A-Za-z][\w.-]*:)?(\d+)")


class BatchOption(NamedTuple):
    value: str | int | float | bool
    """True for an option without a value."""
    line: int


def batch_options(text: str) -> dict[str, BatchOption]:
    """Return the options of a script by their long names. Slurm reads them up to the first command; the last
    of one name counts.

    Those of a heterogeneous job are of its first component.
    """
    return dict(_options(text))


def _options(text: str) -> Iterator[tuple[str, BatchOption]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            return
        if not line.startswith("#SBATCH"):
            continue
        try:
            words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
        except ValueError:  # a quote that is not closed
            words = line.removeprefix("#SBATCH").split()
        if words and words[0] in COMPONENTS:
            yield words[0], BatchOption(True, number)
            return
        while words:
            word = words.pop(0)
            name, sign, value = (
                word.partition("=") if word.startswith("--") else (word[:2], word[2:], word[2:])
            )
            takes = not sign and bool(words) and not words[0].startswith("-")
            found = words.pop(0) if takes else value
            name = name.lstrip("-")
            yield _NAMES.get(name, name), BatchOption(_plain(found) if takes or sign else True, number)


def _plain(text: str) -> str | int | float | bool:
    try:
        value = parse_plain(text)[0]
    except ScalarError:
        return text
    return text if value is None else value


def variables(options: dict[str, BatchOption]) -> dict[str, str]:
    """Return what Slurm sets for the commands of the script, where the options give one number.

    Of a heterogeneous job, whose components each set their own, it is nothing.
    """
    if any(name in options for name in COMPONENTS):
        return {}
    nodes, gpus = options.get("nodes"), options.get("gpus-per-node") or options.get("gres")
    cores, tasks = options.get("cpus-per-task"), options.get("ntasks-per-node")
    found = {
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), nodes and nodes.value),
        **dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), gpus and _gpus(gpus.value)),
        "SLURM_CPUS_PER_TASK": cores and cores.value,
        "SLURM_NTASKS_PER_NODE": tasks and tasks.value,
    }
    return {
        name: str(value)
        for name, value in found.items()
        if isinstance(value, int) and not isinstance(value, bool)
    }


def _gpus(value: object) -> int | None:
    """Return the number in `8`, `h100:8` or `gpu:h100:8`."""
    match = _GPUS.fullmatch(str(value))
    return int(match[1]) if match else None
