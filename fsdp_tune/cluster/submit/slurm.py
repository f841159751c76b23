"""Slurm: the batch script of a run, and whether the allocation of a step is that of the recipe.

The script is bash alone, so that the ledger and the decision to start again also work where the tool is
inside a container. Slurm signals the tasks of the step; the script survives the signal, writes down the end,
and requeues the job.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from fsdp_tune.cluster.submit.cluster_job import ClusterJob
from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem
from fsdp_tune.recipe.schema.recipe import Recipe

BLOCK_BEGIN = (
    "# >>> yours: kept when this file is written again. First more #SBATCH lines, then commands of the "
    "first node."
)
BLOCK_END = "# <<< yours"
EMPTY_BLOCK = """\
#   module load cuda
#   srun_options=(--container-image=image.sqsh --container-mounts=/shared)    # of the `srun` below
#   program=(fsdp-tune)                                                       # in the container, in place of that of the host
#   train_options=(--ignore-plan)                                             # of `fsdp-tune train`
"""  # noqa: E501
LONGEST_LEAD_SECONDS = 65_535
"""Of `--signal`."""
FIRST_PORT, PORTS = 20_000, 12_000
"""Below the ports that Linux gives to clients. Jobs that share a node differ in their ids."""
_FIELD = re.compile(r"@([A-Z]+)@")
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_BARE = re.compile(r"[A-Za-z0-9._/@:+,=~^-]+")
_QUOTABLE = re.compile(r"[A-Za-z0-9._/@:+,=~^ ()\[\]{}&;-]+")


def render(job: ClusterJob, site: Mapping[str, str], block: str | None = None) -> str:
    """Return the batch script. `site`: further options of `sbatch` by name, such as partition. `block` is the
    user's, from `user_block`;
    None: one with comments alone.

    Raises: usage error (exit 2) for each value that cannot be written in a line of `#SBATCH`.
    """
    head = "".join(f"#SBATCH {line}\n" for line in _directives(job, site))
    lead = f"# Signalled {job.lead.seconds} s before the time limit: {job.lead.reason}.\n"
    values = _body_values(job)
    # in one pass: a name may contain what looks like a field
    body = _FIELD.sub(lambda found: values[found[1]], _BODY)
    own = EMPTY_BLOCK if block is None else block
    return f"#!/bin/bash\n{_ABOUT}{head}{lead}\n{BLOCK_BEGIN}\n{own}{BLOCK_END}\n\n{body}"


def parse_time(text: str) -> int:
    """Return the seconds of a time limit of Slurm: `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M` or `D-H:M:S`. Raises:
    ValueError."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError(f"`{text}` is not a time limit of Slurm")
    days, *rest = found.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def user_block(script: str) -> str | None:
    """Return the lines between the marks of an earlier script, with their line ends. Raises: ValueError if a
    mark is missing."""
    lines = script.splitlines(keepends=True)
    plain = [line.rstrip() for line in lines]
    if (
        plain.count(BLOCK_BEGIN) != 1
        or plain.count(BLOCK_END) != 1
        or plain.index(BLOCK_END) < plain.index(BLOCK_BEGIN)
    ):
        raise ValueError(f"it does not have the lines `{BLOCK_BEGIN}` and `{BLOCK_END}` once")
    own = "".join(lines[plain.index(BLOCK_BEGIN) + 1 : plain.index(BLOCK_END)])
    return None if own == EMPTY_BLOCK else own


def _directives(job: ClusterJob, site: Mapping[str, str]) -> list[str]:
    values: dict[str, str | int | None] = {
        "job-name": job.name,
        **site,
        "nodes": job.machines,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus_per_machine or None,
        "cpus-per-task": job.cpus_per_machine,
        "time": job.time_limit,
        "signal": f"TERM@{min(job.lead.seconds, LONGEST_LEAD_SECONDS)}",
        "chdir": str(job.working_directory),
        "output": f"{job.files.folder}/slurm-%j.out",
        "array": f"0-{len(job.tasks) - 1}" if job.tasks else None,
        "open-mode": "append",
        "comment": job.files.mark,
    }
    problems = [
        problem
        for name, value in values.items()
        if (problem := _unwritable(name, str(value or "-"))) is not None
    ]
    if problems:
        raise FsdpTuneError(*problems)
    return [
        "--requeue",
        *(f"--{name}={_quoted(str(value))}" for name, value in values.items() if value is not None),
    ]


def _unwritable(name: str, value: str) -> Problem | None:
    plain = value.removesuffix("/slurm-%j.out") if name == "output" else value
    if (
        _QUOTABLE.fullmatch(re.sub(r"[|*!]", "&", plain) if name == "constraint" else plain)
        and len(value) <= 1000
    ):
        return None
    what = {"output": "the run directory", "chdir": "the working directory"}.get(name, f"`--{name}`")
    way = {"output": "`--set output_dir=DIR`", "chdir": "another directory"}.get(name, f"`--{name} NAME`")
    message = f"{what} is {shlex.quote(plain)}, which cannot be written in a line of #SBATCH"
    return Problem("submit-name", message, hint=f"{way}, of letters, digits, spaces and `._/-` alone")


def _quoted(value: str) -> str:
    """Return a value for a line of #SBATCH, which Slurm splits by its own rules."""
    return value if _BARE.fullmatch(value.replace("%j", "")) else f'"{value}"'


def _body_values(job: ClusterJob) -> dict[str, str]:
    words = [shlex.quote(word) for word in job.arguments]
    words += ['"${own[@]}"'] if job.tasks else []
    if job.chooses_port:
        words += ["--set", f"launch.main_process_port=$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))"]
    variables = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in job.environment.items())
    return {
        "RUN": _run(job),
        "LEAD": str(job.lead.seconds),
        "STALLED": str(job.max_stalled_starts),
        "VARIABLES": variables,
        "PROGRAM": shlex.join(job.program),
        "ARGUMENTS": _wrapped(words),
    }


def _run(job: ClusterJob) -> str:
    """Return the lines that set `run`, and `own` for the arguments of one run of a sweep."""
    if not job.tasks:
        return f"run={shlex.quote(str(job.output_dir))}"
    cases = [
        f"    {number}) run={shlex.quote(str(task.output_dir))} own=({shlex.join(task.arguments)}) ;;"
        for number, task in enumerate(job.tasks)
    ]
    return "\n".join(["case $SLURM_ARRAY_TASK_ID in", *cases, "esac"])


def _wrapped(words: Sequence[str]) -> str:
    """Return the words of an array, an option with its value on each line."""
    lines: list[str] = []
    for word in words:
        if lines and not word.startswith("--"):
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return "\n    ".join(lines)


_ABOUT = """\
# Written by `fsdp-tune submit slurm`, which writes it again at each call. `sbatch` on this file submits the same job.
"""  # noqa: E501

_BODY = """\
@RUN@
# Slurm's name of this job: of an element of an array, not of all of it.
id=$SLURM_JOB_ID
[[ ${SLURM_ARRAY_JOB_ID:-} ]] && id=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
ledger=$run.submit/attempts.jsonl
mkdir -p "$run.submit"
# Variables of this name that the submitting shell exported are not the block's.
for name in program srun_options train_options; do
    [[ $(declare -p "$name" 2>/dev/null) != "declare -x"* ]] || unset "$name"
done
@VARIABLES@[[ ${program[0]} ]] || program=(@PROGRAM@)
arguments=(
    @ARGUMENTS@
)

newest_step() {  # of a complete checkpoint; 0 without one
    local newest=0 file
    for file in "$run"/checkpoint-*/manifest.json; do
        file=${file%/manifest.json} file=${file##*-}
        [[ $file =~ ^[0-9]+$ ]] && ((file > newest)) && newest=$file
    done
    echo "$newest"
}

record() {  # EVENT STEP FIELDS: a line of the ledger
    printf '{"event": "%s", "job": "%s", "start": %d, "time": %d, "step": %d, %s}\\n' \\
        "$1" "$SLURM_JOB_ID" "$start" "$(date +%s)" "$2" "$3" >>"$ledger"
}

fact() {  # NAME: a field of the job as Slurm shows it
    scontrol show job --oneliner "$id" | sed -n "s/.* $1=\\([^ ]*\\).*/\\1/p"
}

# A limit that the signal uses up, such as a short one of the cluster, would start the job for a few steps each time.
IFS=:- read -r -a limit <<<"$(fact TimeLimit)"  # D-HH:MM:SS, HH:MM:SS or UNLIMITED
((${#limit[@]} != 3)) || limit=(0 "${limit[@]}")
if ((${#limit[@]} == 4)) && ((((10#${limit[0]} * 24 + 10#${limit[1]}) * 60 + 10#${limit[2]}) * 60 + 10#${limit[3]} < 2 * @LEAD@)); then
    echo "stopped: the time limit is less than twice the @LEAD@ s that are kept for saving; submit with a longer --time" >&2
    start=${SLURM_RESTART_COUNT:-0}
    record ended "$(newest_step)" '"exit_code": 2, "then": "stopped"'
    exit 2
fi

# Count the starts of this job without a new checkpoint, and stop after @STALLED@ of them.
start=${SLURM_RESTART_COUNT:-0}
first=$(newest_step)
last=$(grep -s "\\"event\\": \\"started\\", \\"job\\": \\"$SLURM_JOB_ID\\"" "$ledger" | tail -n 1)
stalled=0
if [[ $last =~ \\"step\\":\\ ([0-9]+),\\ \\"stalled\\":\\ ([0-9]+) ]] && ((first <= BASH_REMATCH[1])); then
    stalled=$((BASH_REMATCH[2] + 1))
fi
record started "$first" "\\"stalled\\": $stalled, \\"nodes\\": \\"$SLURM_JOB_NODELIST\\""
if ((stalled >= @STALLED@)); then
    echo "stopped: $stalled starts in a row saved no checkpoint after step $first" >&2
    record ended "$first" '"exit_code": 1, "then": "stopped"'
    exit 1
fi

# A start that was lost with its node leaves a lock, which counts as dead after five minutes.
for _ in {1..36}; do
    ((start > 0)) && [[ -s $run/run.lock ]] && ! grep -q "\\"host\\": \\"$(hostname)\\"" "$run/run.lock" || break
    [[ $(find "$run/run.lock" -mmin -6 2>/dev/null) ]] || break
    sleep 10
done

requeue() {
    next="not requeued"
    scontrol requeue "$id" && next=requeued
}

# The tasks get signals from Slurm, and save; this script waits for them. At the time limit itself it has seconds left.
next=
trap '[[ $next || $(fact Reason) != TimeLimit ]] || requeue' TERM
trap : CONT
srun --kill-on-bad-exit=0 --wait=0 ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} \\
    "${srun_options[@]}" "${program[@]}" "${arguments[@]}" "${train_options[@]}" &
task=$!
while kill -0 "$task" 2>/dev/null; do wait "$task"; done
wait "$task"
code=$?

# 143: saved and stopped before the end. 5: a rank or a machine was lost. 137: killed, with its node or for its memory.
# A job that is not running any more was cancelled, or Slurm itself starts it again: that is not undone.
if ((code == 0)); then
    next=finished
elif [[ $(fact JobState) != RUNNING ]]; then
    next=${next:-ended by Slurm}
elif ((code == 143 || code == 5 || code == 137)); then
    requeue
else
    next=stopped
fi
record ended "$(newest_step)" "\\"exit_code\\": $code, \\"then\\": \\"$next\\""
exit "$code"
"""  # noqa: E501


def check_allocation(recipe: Recipe, environment: Mapping[str, str]) -> list[Notice]:
    """Compare a resolved recipe with the Slurm step that this process is a task of; [] outside of one.

    Returns notices about GPUs that stay idle. Raises: FsdpTuneError (exit 2) if nodes, tasks or GPUs are not
    those of the recipe.
    """
    if "SLURM_STEP_ID" not in environment:
        return []
    machines, local = recipe.launch.num_machines, recipe.local_world_size
    nodes = _number(environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES"))
    tasks = _most_tasks(
        environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_NTASKS_PER_NODE") or ""
    )
    gpus = _number(environment.get("SLURM_GPUS_ON_NODE")) if recipe.launch.device != "cpu" else None
    own = "or pass `--machine-rank 0` if each task trains a run of its own"
    problems: list[Problem] = []
    if tasks is not None and tasks > 1:
        message = f"srun started {tasks} tasks on a node, and one command starts all ranks of its node"
        problems.append(Problem("allocation-mismatch", message, hint=f"`srun --ntasks-per-node=1`, {own}"))
    if nodes is not None and nodes != machines:
        message = (
            f"srun started this step on {nodes} nodes, and the recipe is for {machines} "
            "(`launch.num_machines`)"
        )
        hint = f"`srun --nodes={machines}`, or `--set launch.num_machines={nodes}`, {own}"
        problems.append(Problem("allocation-mismatch", message, hint=hint))
    if gpus is not None and gpus < local:
        message = (
            f"Slurm gave this node {gpus} GPUs, and the recipe has {local} ranks on it "
            "(`launch.num_processes`)"
        )
        hint = f"`--gpus-per-node={local}`, or `--set launch.num_processes={gpus * machines}`"
        problems.append(Problem("allocation-mismatch", message, hint=hint))
    if problems:
        raise FsdpTuneError(*problems)
    if gpus is not None and gpus > local:
        message = (
            f"Slurm gave this node {gpus} GPUs, of which {local} are used (`launch.num_processes: "
            f"{recipe.world_size}`)"
        )
        return [
            Notice(
                "gpus-idle", message, hint=f"`--set launch.num_processes={gpus * machines}` uses all of them"
            )
        ]
    return []


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _most_tasks(text: str) -> int | None:
    """Return the largest number of `2(x3),1`, in which 3 nodes have 2 tasks and one has 1."""
    return max((int(found) for found in re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", text)), default=None)
