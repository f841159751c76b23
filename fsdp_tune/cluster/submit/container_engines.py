"""Files by which engines start the containers of a run: Kubernetes manifests, and tasks of SkyPilot and
dstack.

SkyPilot and dstack start machines in clouds and in Kubernetes; the recipe is a here-document in the command.
A Kubernetes manifest is a plain Indexed Job, a JobSet (jobset.x-k8s.io), or a TrainJob of Kubeflow Trainer
with its runtime.

How each kind of manifest starts a run again. A run is all of its machines: they vote on a stop and all end
with 143; if one is lost, the others end with 5.
- Job: each pod that ended is replaced, once it has ended (`podReplacementPolicy: Failed`, which a
  podFailurePolicy needs). With a backoffLimitPerIndex the job would continue without a machine, so the limit
  is that of the job, restarts × machines, since all pods of a lost run fail. A machine that has finished is
  not started again with the others.
- JobSet (a TrainJob makes one): the first failed pod fails its Job (`backoffLimit: 0`), and the JobSet
  removes and creates all pods. It decides by the reason and the message of the Job's failure (Kubernetes,
  pkg/controller/job/pod_failure_policy.go): "Pod NS/NAME has condition DisruptionTarget matching FailJob rule
  at index 0", "Container C for pod NS/NAME failed with exit code 143 matching …".
  A message that is worded otherwise ends the run, instead of restarting a mistake for ever.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fsdp_tune.cluster.submit.container_job import RECIPE_FILE, ContainerJob, SecretReference, as_yaml
from fsdp_tune.core.errors import ExitCode
from fsdp_tune.core.units import GIB

Kind = Literal["job", "jobset", "trainjob"]
RECIPE_DIRECTORY = "/etc/fsdp-tune"
GROUP = "node"
"""Of the pods in a JobSet, and their container: Kubeflow Trainer looks for the container of this name."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
TRAINER_LABEL = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
STATUS_VARIABLE = "KUBEFLOW_TRAINER_SERVER_URL"
"""In the pods of a TrainJob, if the controller collects progress (feature gate TrainJobStatus). transformers'
KubeflowCallback reads it."""
INTERFACE = "eth0"
"""The interface of a pod, by the convention of CNI plugins."""
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_MISTAKES = [ExitCode.USAGE, ExitCode.OUT_OF_MEMORY, ExitCode.NON_FINITE, 126, 127]
"""A restart would end in the same way. 126 and 127: the shell of the image cannot start the command."""


@dataclass(frozen=True, slots=True)
class PodSettings:
    """What a cluster gives a pod, next to the job."""

    image: str
    namespace: str | None = None
    queue: str | None = None
    secrets: tuple[SecretReference, ...] = ()
    resources: Mapping[str, str] | None = None
    """Quantities by name, as requests and as limits."""
    user: int = 1000
    """Id of user and group in the containers."""
    restarts: int = 3
    """After failures that a restart may cure. Preemptions and other disruptions do not count."""
    shared_memory_bytes: int | None = None
    """None: as the job needs."""


def manifest(job: ContainerJob, pod: PodSettings, kind: Kind, file: str = "FILE") -> str:
    """Return the YAML documents of a run, which `kubectl apply -f FILE` submits."""
    makers: dict[Kind, Callable[[ContainerJob, PodSettings], Sequence[Mapping[str, object]]]] = {
        "job": _job,
        "jobset": _jobset,
        "trainjob": _trainjob,
    }
    documents = [_recipe_map(job, pod), *makers[kind](job, pod)]
    return (
        "\n".join(_manifest_header(job, pod, kind, file)) + "\n---\n" + "---\n".join(map(as_yaml, documents))
    )


def _pod_selector(job: ContainerJob, kind: Kind) -> str:
    """Return the selector of the first machine's pod, for `kubectl logs -l`."""
    name = job.name if kind == "job" else f"{job.name}-{GROUP}-0"
    return f"batch.kubernetes.io/job-name={name},batch.kubernetes.io/job-completion-index=0"


def manifest_commands(job: ContainerJob, pod: PodSettings, kind: Kind, file: str = "FILE") -> list[str]:
    """Return the commands that submit, follow and stop the job."""
    where = f" -n {pod.namespace}" if pod.namespace else ""
    quoted = shlex.quote(file)
    return [
        f"kubectl apply -f {quoted}",
        f"kubectl logs -f{where} -l {_pod_selector(job, kind)}",
        f"kubectl delete -f {quoted}",
    ]


def _manifest_header(job: ContainerJob, pod: PodSettings, kind: Kind, file: str) -> list[str]:
    where = f" -n {pod.namespace}" if pod.namespace else ""
    needs = {
        "job": "Kubernetes 1.31",
        "jobset": "JobSet 0.10",
        "trainjob": "Kubeflow Trainer 2.1 (with JobSet 0.10)",
    }[kind]
    lines = [
        f"# {job.name}: {job.size} of fsdp-tune. Needs {needs} or newer.",
        *(f"#   {command}" for command in manifest_commands(job, pod, kind, file)),
        "# The same file again changes nothing. A deleted run saves first, and continues when it is "
        "submitted again.",
        f"# Time to save: {job.cluster.lead.seconds} s ({job.cluster.lead.reason}).",
        "# Claims that must exist, writable from all nodes: "
        f"{', '.join(mount.volume for mount in job.mounts)}.",
    ]
    for name in dict.fromkeys(each.secret for each in pod.secrets):
        keys = " ".join(f"--from-literal={each.key}=…" for each in pod.secrets if each.secret == name)
        lines.append(f"#   kubectl create secret generic {name}{where} {keys}")
    if kind == "trainjob":
        lines.append(
            f"# Progress is in `.status.trainerStatus` if the controller sets {STATUS_VARIABLE} "
            "(feature gate TrainJobStatus)."
        )
    return lines


def _metadata(
    job: ContainerJob, pod: PodSettings, *, name: str | None = None, queued: bool = False
) -> dict[str, object]:
    labels = {"app.kubernetes.io/name": "fsdp-tune", "app.kubernetes.io/instance": job.name}
    if queued and pod.queue is not None:
        labels[QUEUE_LABEL] = pod.queue
    found: dict[str, object] = {"name": name or job.name}
    if pod.namespace is not None:
        found["namespace"] = pod.namespace
    return found | {"labels": labels, "annotations": {"fsdp-tune-recipe-sha256": job.digest}}


def _recipe_name(job: ContainerJob) -> str:
    """Return the name of the recipe's ConfigMap: another recipe is another map, so that no restart reads a
    changed one."""
    return f"{job.name}-recipe-{job.digest[:8]}"


def _recipe_map(job: ContainerJob, pod: PodSettings) -> dict[str, object]:
    metadata = _metadata(job, pod, name=_recipe_name(job))
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "immutable": True,
        "data": {RECIPE_FILE: job.recipe_text},
    }


def _job(job: ContainerJob, pod: PodSettings) -> Sequence[Mapping[str, object]]:
    spec = _job_spec(job, pod, f"{job.name}-0.{job.name}", subdomain=job.name) | {
        "backoffLimit": pod.restarts * job.machines,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": _in(_MISTAKES)},
                {"action": "Ignore", "onExitCodes": _in([ExitCode.PREEMPTED])},
            ]
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, pod),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": job.name},
            "ports": [{"name": "rendezvous", "port": job.port}],
        },
    }
    made = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job, pod, queued=True),
        "spec": spec,
    }
    return [service, made] if job.machines > 1 else [made]


def _jobset(job: ContainerJob, pod: PodSettings) -> Sequence[Mapping[str, object]]:
    metadata = _metadata(job, pod, queued=True)
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": metadata,
            "spec": _jobset_spec(job, pod),
        }
    ]


def _jobset_spec(
    job: ContainerJob, pod: PodSettings, labels: Mapping[str, str] | None = None, more: str = ""
) -> dict[str, object]:
    spec = _job_spec(job, pod, f"{job.name}-{GROUP}-0-0.{job.name}", more=more) | {
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": _in([ExitCode.PREEMPTED])},
                {"action": "FailJob", "onExitCodes": _in(_MISTAKES)},
            ]
        },
    }
    template: dict[str, object] = {"metadata": {"labels": dict(labels)}} if labels else {}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": job.name},
        "failurePolicy": {
            "maxRestarts": pod.restarts,
            "restartStrategy": "BlockingRecreate",  # two lives of a run never overlap
            "rules": [
                {
                    "name": "preempted",
                    "action": "RestartJobSetAndIgnoreMaxRestarts",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                    "onJobFailureMessagePatterns": [
                        "has condition DisruptionTarget ",
                        f"failed with exit code {ExitCode.PREEMPTED:d} ",
                    ],
                },
                {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
            ],
        },
        "replicatedJobs": [{"name": GROUP, "replicas": 1, "template": template | {"spec": spec}}],
    }


def _trainjob(job: ContainerJob, pod: PodSettings) -> Sequence[Mapping[str, object]]:
    """Return a runtime for this run and its TrainJob: only a runtime has volumes, a failure policy and a
    security context."""
    trackers = ",".join(dict.fromkeys([*job.reported_to, "kubeflow"]))
    more = f'${{{STATUS_VARIABLE}:+--set "training.report_to=[{trackers}]"}}'
    spec = _jobset_spec(job, pod, TRAINER_LABEL, more)
    version, name = "trainer.kubeflow.org/v1alpha1", _recipe_name(job).replace("-recipe-", "-runtime-")
    runtime = {
        "apiVersion": version,
        "kind": "TrainingRuntime",
        "metadata": _metadata(job, pod, name=name),
        "spec": {"mlPolicy": {"numNodes": job.machines}, "template": {"spec": spec}},
    }
    made = {
        "apiVersion": version,
        "kind": "TrainJob",
        "metadata": _metadata(job, pod, queued=True),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
            "trainer": {"numNodes": job.machines},
        },
    }
    return [runtime, made]


def _in(codes: list[int]) -> dict[str, object]:
    return {"containerName": GROUP, "operator": "In", "values": [int(code) for code in codes]}


def _job_spec(
    job: ContainerJob, pod: PodSettings, first: str, *, subdomain: str | None = None, more: str = ""
) -> dict[str, object]:
    spec = _pod_spec(job, pod, first, more)
    if subdomain is not None and job.machines > 1:
        spec = {"subdomain": subdomain} | spec
    return {
        "completionMode": "Indexed",
        "completions": job.machines,
        "parallelism": job.machines,
        "template": {
            "metadata": {
                "labels": {"app.kubernetes.io/name": "fsdp-tune", "app.kubernetes.io/instance": job.name}
            },
            "spec": spec,
        },
    }


def _pod_spec(job: ContainerJob, pod: PodSettings, first: str, more: str) -> dict[str, object]:
    shared = pod.shared_memory_bytes or job.shared_memory_bytes
    claims = dict.fromkeys(mount.volume for mount in job.mounts)
    volumes: list[dict[str, object]] = [
        {"name": "recipe", "configMap": {"name": _recipe_name(job)}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{-(-shared // GIB)}Gi"}},
        *(
            {"name": f"claim-{index}", "persistentVolumeClaim": {"claimName": claim}}
            for index, claim in enumerate(claims)
        ),
    ]
    names = {claim: f"claim-{index}" for index, claim in enumerate(claims)}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.cluster.lead.seconds,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "shareProcessNamespace": True,  # the pause container collects what exits, as an init would
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": pod.user,
            "runAsGroup": pod.user,
            "fsGroup": pod.user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(job, pod, first, more, names)],
        "volumes": volumes,
    }


def _container(
    job: ContainerJob, pod: PodSettings, first: str, more: str, volumes: Mapping[str, str]
) -> dict[str, object]:
    command = job.shell_command('"$JOB_COMPLETION_INDEX"', more)
    variables = dict(job.cluster.environment)
    if job.machines > 1:
        network = {name: INTERFACE for name in INTERFACE_VARIABLES if name not in job.recipe_variables}
        variables = {"MASTER_ADDR": first} | network | variables
    resources = {"requests": dict(pod.resources), "limits": dict(pod.resources)} if pod.resources else {}
    return {
        "name": GROUP,
        "image": pod.image,
        # Kubernetes replaces `$(NAME)`, and each `$$` is `$`.
        "command": ["sh", "-c", command.replace("$", "$$")],
        "env": [
            *({"name": name, "value": value} for name, value in variables.items()),
            *(
                {"name": each.variable, "valueFrom": {"secretKeyRef": {"name": each.secret, "key": each.key}}}
                for each in pod.secrets
            ),
        ],
        **({"resources": resources} if resources else {}),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "recipe", "mountPath": RECIPE_DIRECTORY, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            *({"name": volumes[mount.volume], "mountPath": str(mount.path)} for mount in job.mounts),
        ],
    }


Engine = Literal["skypilot", "dstack"]
TASK_RECIPE_DIRECTORY = "/tmp/fsdp-tune"
_SKY_FIRST = 'export MASTER_ADDR="$(printf %s "$SKYPILOT_NODE_IPS" | head -n 1)"'
_DSTACK_FIRST = 'export MASTER_ADDR="$DSTACK_MASTER_NODE_IP"'


@dataclass(frozen=True, slots=True)
class CloudSettings:
    """What an engine gives the machines of a job."""

    image: str | None = None
    gpu: str | None = None
    """Name of the GPUs, as the engine writes it: H100, A100-80GB."""
    spot: bool = False
    secrets: tuple[SecretReference, ...] = ()
    restarts: int = 0
    """After errors, mistakes included, which the engines cannot tell from others. Preempted machines do not
    count."""


def task(job: ContainerJob, settings: CloudSettings, engine: Engine, file: str = "FILE") -> str:
    """Return the YAML of a task, which `sky jobs launch FILE` or `dstack apply -f FILE` starts."""
    made = _skypilot(job, settings) if engine == "skypilot" else _dstack(job, settings)
    return "\n".join(_task_header(job, settings, engine, file)) + "\n" + as_yaml(made)


def task_commands(
    job: ContainerJob, settings: CloudSettings, engine: Engine, file: str = "FILE"
) -> list[str]:
    """Return the commands that submit, follow and stop the job."""
    quoted = shlex.quote(file)
    if engine == "dstack":
        return [f"dstack apply -f {quoted}", f"dstack logs {job.name}", f"dstack stop {job.name}"]
    secrets = "".join(f" --secret {each.variable}" for each in settings.secrets)
    return [
        f"sky jobs launch{secrets} {quoted}",
        f"sky jobs logs -n {job.name}",
        f"sky jobs cancel -n {job.name}",
    ]


def _task_header(job: ContainerJob, settings: CloudSettings, engine: Engine, file: str) -> list[str]:
    lines = [
        f"# {job.name}: {job.size} of fsdp-tune. Recipe: sha256 {job.digest}.",
        *(f"#   {command}" for command in task_commands(job, settings, engine, file)),
        f"# Volumes that must exist: {', '.join(mount.volume for mount in job.mounts)}. No mounted "
        "bucket: checkpoints are renamed.",
    ]
    if engine == "dstack":
        lines.extend(f"#   dstack secret set {each.secret} …" for each in settings.secrets)
    return lines


def _task_script(job: ContainerJob, first: str, rank: str) -> str:
    """Return a shell script that writes the recipe and runs the command of one machine."""
    mark = f"RECIPE_{job.digest[:8]}"
    text = job.recipe_text if job.recipe_text.endswith("\n") else f"{job.recipe_text}\n"
    write = f"cat > {TASK_RECIPE_DIRECTORY}/{RECIPE_FILE} <<'{mark}'\n{text}{mark}"
    lines = [f"mkdir -p {TASK_RECIPE_DIRECTORY}", write, *([first] if job.machines > 1 else [])]
    return "\n".join([*lines, job.shell_command(rank)])


def _skypilot(job: ContainerJob, settings: CloudSettings) -> dict[str, object]:
    resources: dict[str, object] = {}
    if job.cluster.gpus_per_machine:
        resources["accelerators"] = f"{settings.gpu}:{job.cluster.gpus_per_machine}"
    if settings.image is not None:
        resources["image_id"] = f"docker:{settings.image}"
    if settings.spot:
        resources["use_spot"] = True
    resources["job_recovery"] = {
        "max_restarts_on_errors": settings.restarts,
        "recover_on_exit_codes": [int(ExitCode.PREEMPTED)],
    }
    made: dict[str, object] = {
        "name": job.name,
        "num_nodes": job.machines,
        "resources": resources,
        "volumes": {str(mount.path): mount.volume for mount in job.mounts},
        "envs": dict(job.cluster.environment),
        "secrets": {each.variable: None for each in settings.secrets},
        "run": _task_script(job, _SKY_FIRST, '"$SKYPILOT_NODE_RANK"'),
    }
    return {key: value for key, value in made.items() if value != {}}


def _dstack(job: ContainerJob, settings: CloudSettings) -> dict[str, object]:
    resources: dict[str, object] = {"shm_size": f"{job.shared_memory_bytes // GIB}GB"}
    if job.cluster.gpus_per_machine:
        resources["gpu"] = f"{settings.gpu}:{job.cluster.gpus_per_machine}"
    variables = [f"{name}={value}" for name, value in job.cluster.environment.items()]
    secrets = [f"{each.variable}=${{{{ secrets.{each.secret} }}}}" for each in settings.secrets]
    made: dict[str, object] = {
        "type": "task",
        "name": job.name,
        "nodes": job.machines if job.machines > 1 else None,
        "image": settings.image,
        "env": variables + secrets,
        "commands": [_task_script(job, _DSTACK_FIRST, '"$DSTACK_NODE_RANK"')],
        "volumes": [f"{mount.volume}:{mount.path}" for mount in job.mounts],
        "resources": resources,
        "spot_policy": "spot" if settings.spot else "on-demand",
        "retry": {
            "on_events": ["interruption", "no-capacity", *(["error"] if settings.restarts else [])],
            "duration": "1d",
        },
        "stop_duration": f"{job.cluster.lead.seconds}s",
    }
    return {key: value for key, value in made.items() if value is not None}
