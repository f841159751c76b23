"""The batch script: what sbatch reads in it, what bash makes of it, and what it does at its end, with Slurm's
commands replaced."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_tune.cluster.submit.cluster_job import ArrayTask, ClusterJob, Lead, estimated_lead, measured_lead
from fsdp_tune.cluster.submit.slurm import (
    BLOCK_BEGIN,
    BLOCK_END,
    check_allocation,
    parse_time,
    render,
    user_block,
)
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.recipe.read.loader import load_recipe
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.job_files import JobFiles, read_attempts

JOB = ClusterJob(
    name="mine",
    program=("/opt/fsdp-tune",),
    arguments=("train", "--config", "my.yaml", "--resume", "auto"),
    output_dir=Path("/shared/runs/mine"),
    working_directory=Path("/home/me"),
    machines=2,
    gpus_per_machine=8,
    lead=Lead(300, "measured"),
    cpus_per_machine=64,
    time_limit="12:00:00",
)
HOSTILE = [
    "a; rm -rf ~",
    "$(touch x)",
    "`touch x`",
    "two\nlines",
    "it's",
    "\n#SBATCH --account=other",
    "{{ name }}",
    "!!",
    "x" * 300,
    '"',
    "@RUN@",
    "é",
    "*",
]


def directives(script: str) -> list[str]:
    """What sbatch reads: lines before the first command."""
    found: list[str] = []
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            found.append(line.removeprefix("#SBATCH "))
        elif line and not line.startswith("#"):
            break
    return found


def own_program(script: str) -> str:
    """The lines that decide the program, and its first word."""
    return "\n".join(line for line in script.splitlines() if "|| program=" in line) + '\necho "${program[0]}"'


def test_directives_are_size_limits_and_files_of_the_job() -> None:
    assert directives(render(JOB, {"partition": "gpu"})) == [
        *(
            "--requeue",
            "--job-name=mine",
            "--partition=gpu",
            "--nodes=2",
            "--ntasks-per-node=1",
            "--gpus-per-node=8",
            "--cpus-per-task=64",
        ),
        *(
            "--time=12:00:00",
            "--signal=TERM@300",
            "--chdir=/home/me",
            "--output=/shared/runs/mine.submit/slurm-%j.out",
        ),
        *("--open-mode=append", f"--comment={JobFiles(JOB.output_dir).mark}"),
    ]
    without = replace(JOB, gpus_per_machine=0, cpus_per_machine=None, time_limit=None, machines=1)
    assert not [
        line
        for line in directives(render(without, {}))
        if line.split("=")[0] in ("--gpus-per-node", "--cpus-per-task", "--time")
    ]


def test_own_block_survives_another_rendering_and_may_have_directives() -> None:
    first = render(JOB, {})
    assert user_block(first) is None
    own = "#SBATCH --mem=0\nmodule load cuda\n"
    begin, _, end = first.partition(BLOCK_BEGIN + "\n")[2].partition(BLOCK_END)
    edited = first.replace(begin, own)
    assert directives(edited)[-1] == "--mem=0"
    assert (
        subprocess.run(
            ["bash", "-c", "program=(inside)\n" + own_program(edited)], capture_output=True, text=True
        ).stdout
        == "inside\n"
    )
    again = render(replace(JOB, machines=4), {}, user_block(edited))
    assert user_block(again) == own
    assert "--nodes=4" in directives(again)
    assert end


def test_script_without_both_marks_has_no_block_to_keep() -> None:
    for broken in (render(JOB, {}).replace(BLOCK_END, ""), "#!/bin/bash\n", render(JOB, {}) + BLOCK_BEGIN):
        with pytest.raises(ValueError, match="once"):
            user_block(broken)


@pytest.mark.parametrize("word", HOSTILE)
def test_any_word_reaches_the_command_unchanged(word: str, tmp_path: Path) -> None:
    job = replace(
        JOB,
        program=(f"/opt/{word}",),
        arguments=(f"--set=name={word}", word),
        output_dir=tmp_path / "run",
        environment={"NOTE": word},
        machines=1,
    )
    script = render(job, {})
    assert "--account=other" not in directives(script)
    program = (
        script.partition("newest_step() {")[0]
        + 'printf "%s\\0" "${program[@]}" "${arguments[@]}" "$NOTE" "$run"\n'
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split("\0")[:-1] == [*job.program, *job.arguments, word, str(job.output_dir)]
    assert (
        subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False).stderr == ""
    )
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("word", [word for word in HOSTILE if word not in ("x" * 300,)])
def test_names_that_sbatch_would_split_are_refused(word: str) -> None:
    for job, site in (
        (replace(JOB, name=f"a{word}"), {}),
        (JOB, {"partition": f"a{word}"}),
        (replace(JOB, output_dir=Path(f"/a{word}")), {}),
    ):
        if word in ("a; rm -rf ~", "{{ name }}", "@RUN@"):  # taken literally, in quotes if there are spaces
            assert any(
                word in line and ('"' in line) == (" " in word) for line in directives(render(job, site))
            )
            continue
        with pytest.raises(FsdpTuneError) as caught:
            render(job, site)
        assert [problem.code for problem in caught.value.problems] == ["submit-name"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:10", 1810),
        ("1:30:10", 5410),
        ("1-2", 93_600),
        ("1-2:3", 93_780),
        ("1-02:03:04", 93_784),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert parse_time(text) == seconds


def test_lead_is_measured_or_estimated_and_has_a_floor() -> None:
    saves = [
        {"event": "checkpoint_saved", "step": 1, "seconds": each, "stall_seconds": 0.0, "size_bytes": 1}
        for each in (100.0, 200.0)
    ]
    assert measured_lead(
        [*saves, {"loss": 1.0, "step_seconds": 10.0}, {"eval_loss": 1.0, "eval_seconds": 60.0}]
    ) == Lead(490, "2 × 3m20s (slowest of 2 saves) + 3 steps of 10.0s + an evaluation of 1m00s")
    # by a version that did not count the stall
    stalled = [{**saves[0], "seconds": 0.6, "stall_seconds": 300.0}]
    assert measured_lead(stalled).seconds == 600  # type: ignore[union-attr]
    assert measured_lead([{"loss": 1.0, "step_seconds": 10.0}]) is None
    assert estimated_lead(1e6).seconds == 120
    assert estimated_lead(100e9).seconds == 2000
    assert estimated_lead(None).seconds == 600


class Node:
    """Runs the script as Slurm would, with commands that tests decide."""

    def __init__(self, folder: Path, max_stalled: int = 3) -> None:
        self.folder, self.run = folder, folder / "run"
        self.script = folder / "job.sbatch"
        self.script.write_text(
            render(replace(JOB, output_dir=self.run, machines=1, max_stalled_starts=max_stalled), {}),
            encoding="utf-8",
        )
        self.before_end = ""
        (folder / "bin").mkdir()
        self.called = folder / "scontrol.log"
        answer = 'echo "JobId=7 JobState=$STATE Reason=$REASON Requeue=1 TimeLimit=${LIMIT:-UNLIMITED} x"'
        self.program(
            "scontrol", f'echo "$@" >>{shlex.quote(str(self.called))}; [ "$1" = requeue ] || {answer}'
        )

    def program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        path.chmod(0o755)

    def start(
        self,
        code: int,
        *,
        number: int = 0,
        step: int | None = None,
        state: str = "RUNNING",
        reason: str = "None",
        job: str = "7",
    ) -> int:
        save = (
            ""
            if step is None
            else f"mkdir -p {self.run}/checkpoint-{step}; touch {self.run}/checkpoint-{step}/manifest.json; "
        )
        self.program("srun", f"{save}{self.before_end}exit {code}")
        variables = {
            "SLURM_JOB_ID": job,
            "SLURM_RESTART_COUNT": str(number),
            "SLURM_JOB_NODELIST": "n[1-2]",
            "STATE": state,
            "REASON": reason,
        }
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", self.script], env={**os.environ, **variables, "PATH": path}, check=False, timeout=30
        ).returncode

    @property
    def requeues(self) -> int:
        return self.called.read_text(encoding="utf-8").count("requeue") if self.called.exists() else 0


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize(
    ("code", "state", "then"),
    [
        (0, "RUNNING", "finished"),
        (0, "COMPLETING", "finished"),
        (143, "RUNNING", "requeued"),
        (5, "RUNNING", "requeued"),
        (137, "RUNNING", "requeued"),
        (143, "COMPLETING", "ended by Slurm"),
        (2, "RUNNING", "stopped"),
        (3, "RUNNING", "stopped"),
    ],
)
def test_end_decides_whether_the_job_starts_again(node: Node, code: int, state: str, then: str) -> None:
    assert node.start(code, step=10, state=state) == code
    (start,) = read_attempts(node.run)
    assert (start.exit_code, start.then, start.first_step, start.last_step, start.nodes) == (
        code,
        then,
        0,
        10,
        "n[1-2]",
    )
    assert node.requeues == (then == "requeued")


def test_time_limit_itself_requeues_and_a_cancellation_does_not(node: Node) -> None:
    node.before_end = "kill -TERM $PPID; sleep 0.3; "
    node.start(1, state="COMPLETING", reason="TimeLimit")
    assert ([start.then for start in read_attempts(node.run)], node.requeues) == (["requeued"], 1)
    node.start(143, number=1, state="COMPLETING")
    assert ([start.then for start in read_attempts(node.run)], node.requeues) == (
        ["requeued", "ended by Slurm"],
        1,
    )


@pytest.mark.parametrize(
    ("limit", "code"), [("00:09:59", 2), ("00:10:00", 0), ("1-00:00:08", 0), ("UNLIMITED", 0)]
)
def test_limit_of_the_cluster_that_leaves_no_time_stops_the_job(
    node: Node, limit: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIMIT", limit)
    assert node.start(0) == code
    assert bool(read_attempts(node.run)) == (code == 0)


def test_starts_without_a_new_checkpoint_are_counted_by_job(tmp_path: Path) -> None:
    node = Node(tmp_path, max_stalled=2)
    assert node.start(143, number=0, step=10) == 143
    assert node.start(143, number=1) == 143  # the first start saved a checkpoint
    assert node.start(143, number=2, step=20) == 143  # one without; saves now
    assert node.start(5, number=3) == 5
    assert node.start(5, number=4) == 5
    assert node.start(0, number=5) == 1  # two without
    assert [start.then for start in read_attempts(node.run)] == ["requeued"] * 5 + ["stopped"]
    assert node.start(0, job="8") == 0  # submitted again
    json_lines = (node.folder / "run.submit" / "attempts.jsonl").read_text(encoding="utf-8").splitlines()
    assert all(json.loads(line) for line in json_lines)


def test_start_that_was_killed_has_no_end(node: Node) -> None:
    node.program("scontrol", "exit 1")
    node.start(143, number=0)
    text = (node.folder / "run.submit" / "attempts.jsonl").read_text(encoding="utf-8").splitlines()
    (node.folder / "run.submit" / "attempts.jsonl").write_text(
        text[0] + '\n{"event": "ended", "jo', encoding="utf-8"
    )
    (start,) = read_attempts(node.run)
    assert (start.then, start.exit_code, start.last_step) == (None, None, None)


STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_GPUS_ON_NODE": "2",
}


def resolved(machines: int, ranks: int, device: str = "cuda") -> Recipe:
    size = [f"launch.num_machines={machines}", f"launch.num_processes={ranks}", f"launch.device={device}"]
    return load_recipe("gpt2_smoke", size).recipe


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"SLURM_STEP_NUM_NODES": "4"}, "on 4 nodes"),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, "8 tasks"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1,3"}, "3 tasks"),
        ({"SLURM_GPUS_ON_NODE": "1"}, "1 GPUs"),
    ],
)
def test_step_that_does_not_fit_the_recipe_is_refused(changes: dict[str, str], words: str | None) -> None:
    if words is None:
        assert check_allocation(resolved(2, 4), STEP) == []
        return
    with pytest.raises(FsdpTuneError) as caught:
        check_allocation(resolved(2, 4), STEP | changes)
    assert [problem.code for problem in caught.value.problems] == ["allocation-mismatch"]
    assert words in caught.value.problems[0].message


def test_idle_gpus_are_a_notice_and_a_shell_outside_of_a_step_is_not_compared() -> None:
    assert [notice.code for notice in check_allocation(resolved(2, 2), STEP)] == ["gpus-idle"]
    assert check_allocation(resolved(2, 4, "cpu"), STEP | {"SLURM_GPUS_ON_NODE": "0"}) == []
    assert check_allocation(resolved(1, 4), {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}) == []


def test_element_of_an_array_has_the_run_and_arguments_of_its_number(tmp_path: Path) -> None:
    tasks = tuple(
        ArrayTask(tmp_path / f"a b={number}", ("--set", f"training.seed={number}", "it's"))
        for number in range(3)
    )
    script = render(replace(JOB, tasks=tasks, machines=1), {})
    assert "--array=0-2" in directives(script)
    program = script.partition("newest_step() {")[0] + 'printf "%s\\0" "$run" "$ledger" "${arguments[@]}"\n'
    done = subprocess.run(
        ["bash", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "SLURM_ARRAY_TASK_ID": "2"},
        cwd=tmp_path,
    )
    run = f"{tmp_path}/a b=2"
    assert done.stdout.split("\0")[:-1] == [
        run,
        f"{run}.submit/attempts.jsonl",
        *JOB.arguments,
        "--set",
        "training.seed=2",
        "it's",
    ]
