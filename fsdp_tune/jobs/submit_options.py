"""Arguments of `submit`: what a cluster's engine gives to a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from fsdp_tune.core.command import Option
from fsdp_tune.jobs.options import Allowed

Nodes = Annotated[
    int | None,
    Option(
        "Machines; overrides `launch.num_machines` of the recipe.",
        flags=("--nodes", "-N"),
        metavar="N",
        minimum=1,
    ),
]
GpusPerNode = Annotated[
    int | None,
    Option(
        "Ranks on each node; overrides `launch.num_processes`, which is for all nodes.",
        metavar="N",
        minimum=1,
    ),
]


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """What a cluster's engine gives to a run."""

    nodes: Nodes = None
    gpus_per_node: GpusPerNode = None
    cpus_per_node: Annotated[
        int | None,
        Option(
            "Cores on each node [default: the cluster's; without GPUs one for each rank].",
            metavar="N",
            minimum=1,
        ),
    ] = None
    time: Annotated[
        str | None,
        Option(
            "Time limit of each start: 11h30m, or in Slurm's format. The run saves before the limit "
            "and is requeued.",
            metavar="TIME",
        ),
    ] = None
    job_name: Annotated[str | None, Option("Name of the job [default: the run's].", metavar="NAME")] = None
    max_stalled_starts: Annotated[
        int,
        Option(
            "Stop the job after this many starts in a row without a new checkpoint.", metavar="N", minimum=1
        ),
    ] = 3
    again: Annotated[bool, Option("Submit a job that starts after the one that is queued or running.")] = (
        False
    )
    allowed: Allowed = Allowed()


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """What only Slurm needs."""

    partition: Annotated[
        str | None, Option("Partition [default: the cluster's].", flags=("--partition", "-p"), metavar="NAME")
    ] = None
    account: Annotated[
        str | None, Option("Account to charge.", flags=("--account", "-A"), metavar="NAME")
    ] = None
    qos: Annotated[str | None, Option("Quality of service.", metavar="NAME")] = None
    constraint: Annotated[str | None, Option("Features that the nodes must have.", metavar="LIST")] = None


Mounts = Annotated[
    Sequence[str],
    Option(
        "Mount a volume that all machines share; the run directory must be on one. Repeatable.",
        flags=("--volume",),
        metavar="NAME:/PATH",
    ),
]
RenderedFile = Annotated[
    Path | None, Option("The file to write [default: stdout].", flags=("--output", "-o"), metavar="FILE")
]
JobName = Annotated[
    str | None, Option("Name of the job [default: that of the run].", flags=("--job-name",), metavar="NAME")
]


@dataclass(frozen=True, slots=True)
class KubernetesOptions:
    """What a cluster of Kubernetes gives a run."""

    image: Annotated[
        str | None, Option("Image with fsdp-tune, preferably by digest. Required.", metavar="IMAGE")
    ] = None
    kind: Annotated[
        Literal["job", "jobset", "trainjob"],
        Option(
            "job: a plain Indexed Job; jobset: restarts all machines together; trainjob: of Kubeflow "
            "Trainer, reports progress."
        ),
    ] = "job"
    claims: Annotated[
        Sequence[str],
        Option(
            "Mount a PersistentVolumeClaim that all machines share; the run directory must be on "
            "one. Repeatable.",
            flags=("--pvc",),
            metavar="NAME:/PATH",
        ),
    ] = ()
    secrets: Annotated[
        Sequence[str],
        Option(
            "Set a variable from a Secret of the cluster, such as HF_TOKEN=my-secret; KEY is "
            "VARIABLE by default. Repeatable.",
            flags=("--secret",),
            metavar="VARIABLE=SECRET[:KEY]",
        ),
    ] = ()
    nodes: Nodes = None
    gpus_per_node: GpusPerNode = None
    cpus_per_node: Annotated[
        int | None, Option("Cores on each node [default: 4 for each rank].", metavar="N", minimum=1)
    ] = None
    gpu_resource: Annotated[str, Option("Resource of the GPUs, such as amd.com/gpu.", metavar="NAME")] = (
        "nvidia.com/gpu"
    )
    memory: Annotated[
        str | None,
        Option(
            "Memory of each node, /dev/shm included [default: neither requested nor limited].", metavar="SIZE"
        ),
    ] = None
    resources: Annotated[
        Sequence[str],
        Option(
            "Request another resource, such as rdma/hca=1. Repeatable.",
            flags=("--resource",),
            metavar="NAME=N",
        ),
    ] = ()
    shared_memory: Annotated[
        str | None,
        Option("Size of /dev/shm [default: for NCCL and the data loaders of the recipe].", metavar="SIZE"),
    ] = None
    namespace: Annotated[str | None, Option("Namespace [default: that of the context].", metavar="NAME")] = (
        None
    )
    queue: Annotated[str | None, Option("Local queue of Kueue.", metavar="NAME")] = None
    restarts: Annotated[
        int,
        Option(
            "Restarts after failures; preemptions do not count, and mistakes end the job.",
            metavar="N",
            minimum=0,
        ),
    ] = 3
    grace: Annotated[
        str | None,
        Option(
            "Time to save between the signal and the end of a pod [default: from measured saves, or "
            "from the model's size].",
            metavar="TIME",
        ),
    ] = None
    user: Annotated[int, Option("User and group id in the containers; not 0.", metavar="ID", minimum=1)] = (
        1000
    )
    job_name: JobName = None
    output: RenderedFile = None
    allowed: Allowed = Allowed()


@dataclass(frozen=True, slots=True)
class CloudOptions:
    """What SkyPilot or dstack gives a run."""

    gpu: Annotated[
        str | None, Option("Name of the GPUs as the engine writes it, such as H100.", metavar="NAME")
    ] = None
    nodes: Nodes = None
    gpus_per_node: GpusPerNode = None
    image: Annotated[
        str | None, Option("Image with fsdp-tune [default: the machines have the command].", metavar="IMAGE")
    ] = None
    volumes: Mounts = ()
    secrets: Annotated[
        Sequence[str],
        Option(
            "Set a variable from the engine's secret of this name. Repeatable.",
            flags=("--secret",),
            metavar="VARIABLE",
        ),
    ] = ()
    spot: Annotated[bool, Option("Use spot machines.")] = False
    restarts: Annotated[
        int,
        Option(
            "Restarts after errors, mistakes included; dstack: for a day. Preemptions do not count.",
            metavar="N",
            minimum=0,
        ),
    ] = 0
    job_name: JobName = None
    output: RenderedFile = None
    allowed: Allowed = Allowed()
