"""Every option of Slurm that a batch script asks for is in the account, and gives the values of Slurm's own
variables."""

from __future__ import annotations

from pathlib import Path

from fsdp_tune.migrate.read.batch_options import batch_options, variables
from tests.migrate.imports import from_text, questions, row, values

SCRIPT = """\
#!/bin/bash
#SBATCH -N 2 --ntasks-per-node=1
#SBATCH --gpus-per-node=h100:8   # all of a node
#SBATCH --cpus-per-task 96
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH -p gpu -t 24:00:00
#SBATCH --output=logs/%j.out
srun torchrun --nnodes $SLURM_NNODES --nproc_per_node ${SLURM_GPUS_ON_NODE} sft.py \\
  --model_name_or_path m --dataset_name d --run_name job$SLURM_JOB_ID
#SBATCH --mem=1G
"""


def test_options_have_their_long_names_and_lines() -> None:
    found = batch_options(SCRIPT)
    assert {name: option.value for name, option in found.items()} == {
        "nodes": 2,
        "ntasks-per-node": 1,
        "gpus-per-node": "h100:8",
        "cpus-per-task": 96,
        "mem": 0,
        "exclusive": True,
        "partition": "gpu",
        "time": "24:00:00",
        "output": "logs/%j.out",
    }
    assert found["mem"].line == 5
    assert variables(found) == {
        "SLURM_NNODES": "2",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_GPUS_PER_NODE": "8",
        "SLURM_CPUS_PER_TASK": "96",
        "SLURM_NTASKS_PER_NODE": "1",
    }
    assert variables(batch_options("#SBATCH --nodes=2-4 --gpus-per-node\n")) == {}


def test_options_are_settled_and_give_the_size_of_the_launch(tmp_path: Path) -> None:
    result = from_text(tmp_path, SCRIPT, "job.sh")

    assert (values(result)["launch.num_machines"], values(result)["launch.num_processes"]) == (2, 16)
    assert row(result, "sbatch.nodes")[0] == "converted"
    assert questions(result) == ["run_name"]
    assert (
        "derived from ranks and their loaders by `fsdp-tune submit slurm`"
        in row(result, "sbatch.cpus-per-task")[1]
    )
    assert [row(result, f"sbatch.{name}")[1] for name in ("mem", "exclusive")] == [
        "a line for your block of the script that `fsdp-tune submit slurm` writes, which keeps it"
    ] * 2
    assert {each.key: each.line for each in result.rows}["sbatch.mem"] == 5


def test_machines_of_a_job_are_those_of_the_run_unless_the_launcher_says_otherwise(tmp_path: Path) -> None:
    job = (
        "#SBATCH --nodes=4\naccelerate launch {}--num_processes 8 sft.py --model_name_or_path m "
        "--dataset_name d\n"
    )
    assert "sbatch.nodes" in questions(from_text(tmp_path, job.format(""), "job.sh"))
    assert values(from_text(tmp_path, job.format("--num_machines 1 "), "job.sh"))["launch.num_machines"] == 1
    assert "sbatch.nodes" in questions(from_text(tmp_path, job.replace("=4", "=2-4").format(""), "job.sh"))


def test_launcher_without_a_number_of_machines_leaves_ranks_and_batch_open(tmp_path: Path) -> None:
    job = (
        "#SBATCH --nodes=2\n{} sft.py --model_name_or_path m --dataset_name d "
        "--per_device_train_batch_size 2\n"
    )
    result = from_text(tmp_path, job.format("srun torchrun --nproc_per_node 8"), "job.sh")
    assert questions(result) == ["launcher.nproc_per_node", "sbatch.nodes"]
    assert "global_batch_size:" not in result.text.replace("training.global_batch_size", "")
    assert values(from_text(tmp_path, job.format("srun python"), "job.sh"))["launch.num_machines"] == 2


def test_components_of_a_heterogeneous_job_are_a_question(tmp_path: Path) -> None:
    job = (
        "#SBATCH -N 2\n#SBATCH hetjob\n#SBATCH -N 1\ntorchrun --nnodes $SLURM_NNODES sft.py "
        "--model_name_or_path m --dataset_name d\n"
    )
    assert questions(from_text(tmp_path, job, "job.sh")) == [
        "launcher.nnodes",
        "sbatch.nodes",
        "sbatch.hetjob",
    ]
