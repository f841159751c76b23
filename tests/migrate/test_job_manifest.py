"""Manifests of container engines are read as what their containers start, or refused with the engine's
name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.migrate.read.job_manifest import manifest_in
from tests.migrate.imports import from_text, questions, refusal, row, values

OPTIONS = (
    "--model_name_or_path acme/base --dataset_name acme/chats --per_device_train_batch_size 2 "
    "--learning_rate 2e-5"
)
PYTORCH_JOB = f"""\
apiVersion: v1
kind: ConfigMap
metadata: {{name: other}}
---
apiVersion: kubeflow.org/v1
kind: PyTorchJob
spec:
  pytorchReplicaSpecs:
    Master: &replica
      replicas: 1
      template:
        spec:
          containers:
            - name: pytorch
              image: trainer:1
              command: [torchrun, --nproc_per_node=8]
              args: [-m, trl.scripts.sft, sft, {", ".join(OPTIONS.split())}, --output_dir, runs/$(JOB)]
              env: [{{name: JOB, value: chats}}, {{name: HF_TOKEN, valueFrom: {{secretKeyRef: {{name: hf, key: token}}}}}}]
    Worker:
      <<: *replica
      replicas: 3
"""  # noqa: E501
JOB = f"""\
apiVersion: batch/v1
kind: Job
spec:
  template:
    spec:
      containers:
        - image: trainer:1
          command: ["/bin/bash", "-c"]
          args:
            - |
              set -e
              pip install trl
              accelerate launch --num_processes 4 sft.py {OPTIONS} --seed $(SEED)
          env: [{{name: SEED, value: "3"}}]
"""
JOB_SET = f"""\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
spec:
  replicatedJobs:
    - name: node
      replicas: 1
      template: {{spec: {{parallelism: 2, template: {{spec: {{containers: [
        {{image: x, command: [bash, -c, "torchrun --nnodes 2 --nproc_per_node 8 sft.py {OPTIONS}"]}}
      ]}}}}}}}}
"""
COMPOSE = f"""\
services:
  train:
    image: trainer
    command: accelerate launch --num_processes 2 sft.py {OPTIONS} --run_name a$$b
    environment: [NCCL_DEBUG=INFO]
  database: {{image: postgres}}
"""
SKYPILOT = f"""\
num_nodes: 2
resources: {{accelerators: H100:8}}
envs: {{MODEL_LENGTH: 512}}
setup: pip install trl
run: |
  torchrun --nnodes $SKYPILOT_NUM_NODES --nproc_per_node $SKYPILOT_NUM_GPUS_PER_NODE sft.py \\
    {OPTIONS} --max_length $MODEL_LENGTH
"""
DSTACK = f"""\
type: task
nodes: 2
resources: {{gpu: {{name: H100, count: 8}}}}
env: [HF_HUB_OFFLINE=1]
commands:
  - pip install trl
  - accelerate launch --num_machines $DSTACK_NODES_NUM --num_processes $DSTACK_GPUS_NUM sft.py {OPTIONS}
"""
MANIFESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "PyTorchJob": (
        PYTORCH_JOB,
        {
            "launch.num_machines": 4,
            "launch.num_processes": 32,
            "launch.env.JOB": "chats",
            "output_dir": "runs/chats",
        },
    ),
    "Job": (JOB, {"launch.num_processes": 4, "training.seed": 3}),
    "JobSet": (JOB_SET, {"launch.num_machines": 2, "launch.num_processes": 16}),
    "compose": (COMPOSE, {"launch.num_processes": 2, "launch.env.NCCL_DEBUG": "INFO"}),
    "SkyPilot": (SKYPILOT, {"launch.num_machines": 2, "launch.num_processes": 16, "data.max_length": 512}),
    "dstack": (
        DSTACK,
        {"launch.num_machines": 2, "launch.num_processes": 16, "launch.env.HF_HUB_OFFLINE": "1"},
    ),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_is_read_as_what_it_launches(name: str, tmp_path: Path) -> None:
    text, expected = MANIFESTS[name]

    result = from_text(tmp_path, text, "job.yaml")

    assert result.tool == "TRL"
    found = values(result)
    common = {
        "model.name_or_path": "acme/base",
        "training.per_device_train_batch_size": 2,
        "training.learning_rate": 2e-5,
    }
    assert {key: found[key] for key in (*common, *expected)} == common | expected
    assert questions(result) == (["run_name"] if name == "compose" else [])  # a$b of the environment


TRAIN_JOB = f"""\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
spec:
  runtimeRef: {{name: torch-distributed}}
  trainer:
    command: [torchrun]
    args: [-m, trl.scripts.sft, sft, {", ".join(OPTIONS.split())}]
    numNodes: 2
    numProcPerNode: 4
    resourcesPerNode: {{limits: {{nvidia.com/gpu: 8}}}}
"""


def of_the_operator(lines: str, others: str = "4") -> str:
    """A PyTorchJob of four pods with four GPUs each, the last three of them with `others`; `lines` are of its
    `spec`."""
    text = PYTORCH_JOB.replace(", --nproc_per_node=8", "").replace(
        "spec:\n  pytorch", f"spec:\n{lines}  pytorch"
    )
    pod = text[text.index("    Master:") :].partition("    Worker:")[0].replace("Master: &replica", "{name}:")
    image = "image: trainer:1\n"
    gpus = f"{image}              resources: {{limits: {{nvidia.com/gpu: {{gpus}}}}}}\n"
    kinds = [("Master", 1, "4"), ("Worker", 3, others)]
    replicas = [
        pod.replace("{name}", name)
        .replace("replicas: 1", f"replicas: {count}")
        .replace(image, gpus.replace("{gpus}", number))
        for name, count, number in kinds
    ]
    return text[: text.index("    Master:")] + "".join(replicas)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        (TRAIN_JOB, 8),
        (TRAIN_JOB.replace("numProcPerNode: 4", 'numProcPerNode: "4"'), 8),
        (TRAIN_JOB.replace("numProcPerNode: 4", "numProcPerNode: auto"), 16),
        (TRAIN_JOB.replace("numNodes: 2", "numNodes: 1"), 4),
        # an option comes before PET_NPROC_PER_NODE
        (
            TRAIN_JOB.replace("[torchrun]", "[torchrun, --nproc_per_node=3]"),
            6,
        ),
        (TRAIN_JOB.replace("    numProcPerNode: 4\n", ""), "auto"),  # that of the runtime
        (
            PYTORCH_JOB.replace(", --nproc_per_node=8", "").replace(
                "spec:\n  pytorch", 'spec:\n  nprocPerNode: "2"\n  pytorch'
            ),
            8,
        ),
        (of_the_operator(""), 16),
        (of_the_operator('  nprocPerNode: ""\n'), 16),
        (of_the_operator("  elasticPolicy: {nProcPerNode: 2}\n"), 8),
        (of_the_operator("", others="2"), "auto"),  # pods that differ have no number
    ],
)
def test_ranks_that_kubeflow_gives_torchrun_are_those_of_a_machine(
    text: str, ranks: int | str, tmp_path: Path
) -> None:
    result = from_text(tmp_path, text, "job.yaml")
    assert values(result)["launch.num_processes"] == ranks
    assert questions(result) == []


def test_machines_of_a_manifest_are_in_the_account(tmp_path: Path) -> None:
    assert row(from_text(tmp_path, PYTORCH_JOB, "job.yaml"), "manifest.machines")[0] == "converted"


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        (JOB.replace("accelerate launch", "echo"), "Kubernetes Job"),
        (COMPOSE.replace("accelerate launch", "echo"), "Docker Compose"),
        (SKYPILOT.replace("torchrun", "echo"), "SkyPilot"),
        (DSTACK.replace("accelerate launch", "echo"), "dstack"),
        ("apiVersion: v1\nkind: Service\nspec: {}\n", "Kubernetes Service"),
    ],
)
def test_manifest_that_starts_no_trainer_is_refused_by_name(text: str, engine: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, text, "job.yaml")
    assert f"this is a manifest for {engine}, and none of its commands starts a trainer" in message
    assert "import the script or the configuration that its command names" in message


def test_configuration_is_no_manifest() -> None:
    assert manifest_in("base_model: m\ndatasets: [{path: a}]\nrun_name: x\n") is None
    assert manifest_in("run: 3\nmodel: m\n") is None


SERVICE = "services:\n  train:\n    environment: {LR: '2e-4'}\n"
WORDS = "--model_name_or_path, m, --dataset_name, d"


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        (
            f"{SERVICE}    entrypoint: trl\n    command: [sft, {WORDS}, --run_name, 'my run (1)']\n",
            "name",
            "my run (1)",
        ),
        (
            f"{SERVICE}    command: |\n      trl sft\n        {WORDS.replace(',', '')}\n        --seed 7\n",
            "training.seed",
            7,
        ),
        (
            f"{SERVICE}    command: [bash, -c, --, 'trl sft {WORDS.replace(',', '')} --seed 7']\n",
            "training.seed",
            7,
        ),
        (
            PYTORCH_JOB.replace(
                "{name: JOB, value: chats}", "{name: A, value: b}, {name: JOB, value: $(A)/c}"
            ),
            "output_dir",
            "runs/b/c",
        ),
        (
            PYTORCH_JOB + "---\napiVersion: v1\nkind: Pod\nspec: {replicas: 9, x: {command: [tensorboard, "
            "--logdir, x]}}\n",
            "launch.num_machines",
            4,
        ),
    ],
)
def test_words_and_counts_are_those_of_the_container_that_trains(
    text: str, key: str, value: object, tmp_path: Path
) -> None:
    if "tensorboard" in text:
        manifest = manifest_in(text)
        assert manifest is not None
        assert [each.machines for each in manifest.containers] == [4, 9]
        assert [manifest.containers_at(line).machines for line in (2, manifest.script.count("\n"))] == [4, 9]
    else:
        assert values(from_text(tmp_path, text, "job.yaml"))[key] == value


def test_compose_replaces_from_the_host_and_a_shell_from_the_environment(tmp_path: Path) -> None:
    service = f"{SERVICE}    command: [bash, -c, 'trl sft {WORDS.replace(',', '')} --learning_rate %sLR']\n"
    assert questions(from_text(tmp_path, service % "$", "job.yaml")) == ["learning_rate"]
    assert values(from_text(tmp_path, service % "$$", "job.yaml"))["training.learning_rate"] == 2e-4


def test_aliases_of_a_manifest_are_limited(tmp_path: Path) -> None:
    nested = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]\n" for n in range(1, 9))
    assert "yaml-too-large" in refusal(
        tmp_path, f"apiVersion: v1\nkind: Job\na0: &a0 [x, x]\n{nested}", "job.yaml"
    )
    assert "yaml-alias" in refusal(tmp_path, "apiVersion: v1\nkind: Job\nspec: &a {x: *a}\n", "job.yaml")
