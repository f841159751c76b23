"""Task files of SkyPilot and dstack, which start machines in clouds and in Kubernetes. The recipe is a here-document in the command."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any, Literal

from fsdp_tune.core.errors import ExitCode
from fsdp_tune.core.units import GIB
from fsdp_tune.launch.submit.container_job import RECIPE_FILE, ContainerJob, SecretReference, as_yaml

Engine = Literal["skypilot", "dstack"]
RECIPE_DIRECTORY = "/tmp/fsdp-tune"
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
    """After errors, mistakes included, which the engines cannot tell from others. Preempted machines do not count."""


def task(job: ContainerJob, settings: CloudSettings, engine: Engine, file: str = "FILE") -> str:
    """Return the YAML of a task, which `sky jobs launch FILE` or `dstack apply -f FILE` starts."""
    made = _skypilot(job, settings) if engine == "skypilot" else _dstack(job, settings)
    return "\n".join(_header(job, settings, engine, file)) + "\n" + as_yaml(made)


def commands(job: ContainerJob, settings: CloudSettings, engine: Engine, file: str = "FILE") -> list[str]:
    """Return the commands that submit, follow and stop the job."""
    quoted = shlex.quote(file)
    if engine == "dstack":
        return [f"dstack apply -f {quoted}", f"dstack logs {job.name}", f"dstack stop {job.name}"]
    secrets = "".join(f" --secret {each.variable}" for each in settings.secrets)
    return [f"sky jobs launch{secrets} {quoted}", f"sky jobs logs -n {job.name}", f"sky jobs cancel -n {job.name}"]


def _header(job: ContainerJob, settings: CloudSettings, engine: Engine, file: str) -> list[str]:
    lines = [
        f"# {job.name}: {job.size} of fsdp-tune. Recipe: sha256 {job.digest}.",
        *(f"#   {command}" for command in commands(job, settings, engine, file)),
        f"# Volumes that must exist: {', '.join(mount.volume for mount in job.mounts)}. No mounted bucket: checkpoints are renamed.",
    ]
    if engine == "dstack":
        lines.extend(f"#   dstack secret set {each.secret} …" for each in settings.secrets)
    return lines


def _script(job: ContainerJob, first: str, rank: str) -> str:
    """Return a shell script that writes the recipe and runs the command of one machine."""
    mark = f"RECIPE_{job.digest[:8]}"
    text = job.recipe_text if job.recipe_text.endswith("\n") else f"{job.recipe_text}\n"
    write = f"cat > {RECIPE_DIRECTORY}/{RECIPE_FILE} <<'{mark}'\n{text}{mark}"
    lines = [f"mkdir -p {RECIPE_DIRECTORY}", write, *([first] if job.machines > 1 else [])]
    return "\n".join([*lines, job.shell_command(rank)])


def _skypilot(job: ContainerJob, settings: CloudSettings) -> dict[str, Any]:
    resources: dict[str, Any] = {}
    if job.cluster.gpus_per_machine:
        resources["accelerators"] = f"{settings.gpu}:{job.cluster.gpus_per_machine}"
    if settings.image is not None:
        resources["image_id"] = f"docker:{settings.image}"
    if settings.spot:
        resources["use_spot"] = True
    resources["job_recovery"] = {"max_restarts_on_errors": settings.restarts, "recover_on_exit_codes": [int(ExitCode.PREEMPTED)]}
    made: dict[str, Any] = {
        "name": job.name,
        "num_nodes": job.machines,
        "resources": resources,
        "volumes": {str(mount.path): mount.volume for mount in job.mounts},
        "envs": dict(job.cluster.environment),
        "secrets": {each.variable: None for each in settings.secrets},
        "run": _script(job, _SKY_FIRST, '"$SKYPILOT_NODE_RANK"'),
    }
    return {key: value for key, value in made.items() if value != {}}


def _dstack(job: ContainerJob, settings: CloudSettings) -> dict[str, Any]:
    resources: dict[str, Any] = {"shm_size": f"{job.shared_memory_bytes // GIB}GB"}
    if job.cluster.gpus_per_machine:
        resources["gpu"] = f"{settings.gpu}:{job.cluster.gpus_per_machine}"
    variables = [f"{name}={value}" for name, value in job.cluster.environment.items()]
    secrets = [f"{each.variable}=${{{{ secrets.{each.secret} }}}}" for each in settings.secrets]
    made: dict[str, Any] = {
        "type": "task",
        "name": job.name,
        "nodes": job.machines if job.machines > 1 else None,
        "image": settings.image,
        "env": variables + secrets,
        "commands": [_script(job, _DSTACK_FIRST, '"$DSTACK_NODE_RANK"')],
        "volumes": [f"{mount.volume}:{mount.path}" for mount in job.mounts],
        "resources": resources,
        "spot_policy": "spot" if settings.spot else "on-demand",
        "retry": {"on_events": ["interruption", "no-capacity", *(["error"] if settings.restarts else [])], "duration": "1d"},
        "stop_duration": f"{job.cluster.lead.seconds}s",
    }
    return {key: value for key, value in made.items() if value is not None}
