"""Make the files with which a cluster or a cloud starts a recipe. Nothing is submitted: the engine's own command does that."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from fsdp_tune.core.atomic import refuse_existing, write_file
from fsdp_tune.core.errors import Notice, usage_error
from fsdp_tune.core.units import GIB, parse_bytes, parse_seconds
from fsdp_tune.jobs.answers import ManifestAnswer
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import CloudOptions, KubernetesOptions
from fsdp_tune.jobs.session import refuse_code, session
from fsdp_tune.launch.submit import clouds, kubernetes
from fsdp_tune.launch.submit.container_job import (
    ContainerJob,
    Mount,
    SecretReference,
    container_job,
    is_subdomain,
    notices_of,
    parse_mount,
    parse_secret,
    parse_variable,
)
from fsdp_tune.recipe.read.loader import LoadedRecipe

_CORES_OF_RANK = 4
_RESOURCE = re.compile(r"([A-Za-z0-9./_-]+)=(\d+)")


def submit_kubernetes(recipe: LoadedRecipe, options: KubernetesOptions, *, observer: Observer = Observer()) -> ManifestAnswer:
    """Make the manifest of a recipe for Kubernetes, and write it if `options.output` is given.

    Raises: FsdpTuneError with every reason why the recipe cannot run in containers.
    """
    with session(recipe):
        mounts = tuple(parse_mount(each, "--pvc") for each in options.claims)
        secrets = tuple(parse_secret(each) for each in options.secrets)
        _check_names(options)
        job = _job(recipe, options, mounts, observer)
        pod = kubernetes.PodSettings(
            image=options.image,
            namespace=options.namespace,
            queue=options.queue,
            secrets=_unique(secrets),
            resources=_resources(job, options),
            user=options.user,
            grace_seconds=_parsed(options.grace, "--grace", parse_seconds),
            restarts=options.restarts,
            shared_memory_bytes=None if options.shared_memory is None else _parsed(options.shared_memory, "--shared-memory", parse_bytes),
        )
        _check_image(options.image, observer)
        return _finish(
            "kubernetes",
            job,
            options.output,
            lambda file: kubernetes.manifest(job, pod, options.kind, file),
            lambda file: kubernetes.commands(job, pod, options.kind, file),
        )


def submit_cloud(recipe: LoadedRecipe, options: CloudOptions, engine: clouds.Engine, *, observer: Observer = Observer()) -> ManifestAnswer:
    """Make the task file of a recipe for SkyPilot or dstack, and write it if `options.output` is given.

    Raises: FsdpTuneError with every reason why the recipe cannot run in containers.
    """
    with session(recipe):
        mounts = tuple(parse_mount(each, "--volume") for each in options.volumes)
        secrets = tuple(parse_variable(each) for each in options.secrets)
        job = _job(recipe, options, mounts, observer)
        if job.on_gpus and options.gpu is None:
            raise usage_error("gpus-unknown", f"{engine} needs the name of the GPUs", hint="`--gpu H100`")
        settings = clouds.CloudSettings(options.image, options.gpu, options.spot, _unique(secrets), options.restarts)
        if options.image is not None:
            _check_image(options.image, observer)
        return _finish(
            engine,
            job,
            options.output,
            lambda file: clouds.task(job, settings, engine, file),
            lambda file: clouds.commands(job, settings, engine, file),
        )


def _job(recipe: LoadedRecipe, options: KubernetesOptions | CloudOptions, mounts: tuple[Mount, ...], observer: Observer) -> ContainerJob:
    if options.output is not None:
        refuse_existing(options.output)
    refuse_code(recipe.recipe, options.allowed, starts_ranks=True)
    job = container_job(recipe, mounts, gpus=options.gpus, name=options.job_name, options=options.allowed.options())
    observer.notices([*recipe.notices, *notices_of(recipe, mounts)])
    return job


def _finish(
    engine: str, job: ContainerJob, output: Path | None, text: Callable[[str], str], commands: Callable[[str], list[str]]
) -> ManifestAnswer:
    file = "FILE" if output is None else str(output)
    made = text(file)
    if output is not None:
        write_file(output, made)
    return ManifestAnswer(engine, job.name, None if output is None else str(output), made, job.digest, commands(file))


def _resources(job: ContainerJob, options: KubernetesOptions) -> dict[str, str]:
    """Return the resources of a pod: what is requested is the limit too, so that no other pod can take it away."""
    found = {"cpu": str(options.cpus or _CORES_OF_RANK * job.ranks)}
    if options.memory is not None:
        memory = _parsed(options.memory, "--memory", parse_bytes)
        if memory <= job.shared_memory_bytes:
            message = f"`--memory {options.memory}` has no room besides {job.shared_memory_bytes // GIB} GiB of /dev/shm"
            raise usage_error(
                "usage", message, hint="a pod's shared memory counts as its memory: give more, or a smaller `--shared-memory`"
            )
        found["memory"] = str(memory)
    if job.on_gpus:
        found[options.gpu_resource] = str(job.ranks)
    for each in options.resources:
        match = _RESOURCE.fullmatch(each)
        if match is None:
            raise usage_error("usage", f"`--resource {each}` does not name a resource and its number", hint="`--resource rdma/hca=1`")
        found[match[1]] = match[2]
    return found


def _unique(secrets: tuple[SecretReference, ...]) -> tuple[SecretReference, ...]:
    names = [each.variable for each in secrets]
    if len(set(names)) < len(names):
        raise usage_error("usage", "`--secret` sets a variable twice", hint="give each variable once")
    return secrets


def _check_names(options: KubernetesOptions) -> None:
    for flag, name in (("--namespace", options.namespace), ("--queue", options.queue)):
        if name is not None and not is_subdomain(name):
            message = f"`{flag} {name}` is not a name in Kubernetes"
            raise usage_error("usage", message, hint="lower-case letters, digits and `-`, beginning and ending with a letter or digit")


def _check_image(image: str, observer: Observer) -> None:
    if "@sha256:" not in image:
        message = f"`{image}` names a tag: a restart may get another image than the run started with"
        observer.notices([Notice("image-not-pinned", message, hint="`IMAGE@sha256:DIGEST` is always the same")])


def _parsed(text: str, flag: str, parse: Callable[[str], int]) -> int:
    try:
        return parse(text)
    except ValueError as error:
        raise usage_error("usage", f"`{flag}`: {error}") from None
