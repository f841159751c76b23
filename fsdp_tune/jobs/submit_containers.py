"""Make the files with which Kubernetes and clouds start a recipe. Nothing is submitted: the engine's own
command does that."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_tune.cluster.submit import container_engines
from fsdp_tune.cluster.submit.cluster_job import Lead, estimated_lead, measured_lead
from fsdp_tune.cluster.submit.container_job import (
    ContainerJob,
    Mount,
    SecretReference,
    container_job,
    is_subdomain,
    notices_of,
    output_in_container,
    parse_mount,
    parse_secret,
    parse_variable,
)
from fsdp_tune.core.atomic import check_output_file, write_file
from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem, usage_error
from fsdp_tune.core.units import format_bytes, parse_bytes, parse_seconds
from fsdp_tune.jobs.machine_plan import checkpoint_bytes
from fsdp_tune.jobs.observer import Observer, session
from fsdp_tune.jobs.options import Allowed
from fsdp_tune.jobs.recipes import code_not_allowed, resolve_recipe, sized_recipe
from fsdp_tune.jobs.submit_options import CloudOptions, KubernetesOptions
from fsdp_tune.recipe.read.loader import LoadedRecipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.metrics_file import read_metrics

_CORES_OF_RANK = 4
_RESOURCE = re.compile(r"([A-Za-z0-9./_-]+)=(\d+)")


@dataclass(frozen=True, slots=True)
class ManifestAnswer(JsonAnswer):
    """The file of a job."""

    engine: str
    """kubernetes, skypilot or dstack."""
    name: str
    """Of the job."""
    output: str | None
    """The file that was written."""
    manifest: str
    """The text."""
    recipe_sha256: str
    commands: list[str]
    """Submit, follow, stop. `FILE` stands for the file if none was written."""


def kubernetes_manifest(
    source: str,
    overrides: Sequence[str],
    options: KubernetesOptions,
    *,
    name: str | None = None,
    observer: Observer = Observer(),
) -> ManifestAnswer:
    """Make the manifest of a recipe for Kubernetes, and write it if `options.output` is given.

    Raises: FsdpTuneError with every reason why the recipe cannot run in containers.
    """
    mounts = tuple(parse_mount(each, "--pvc") for each in options.claims)
    secrets = _unique(tuple(parse_secret(each) for each in options.secrets))
    _check_names(options)
    recipe = _load(source, overrides, options, name)
    with session(recipe):
        grace = None if options.grace is None else _parsed(options.grace, "--grace", parse_seconds)
        shared = (
            None
            if options.shared_memory is None
            else _parsed(options.shared_memory, "--shared-memory", parse_bytes)
        )
        missing = (
            []
            if options.image
            else [Problem("usage", "Kubernetes needs an image with fsdp-tune", hint="`--image IMAGE`")]
        )
        job = _job(recipe, options, mounts, container_engines.RECIPE_DIRECTORY, observer, missing)
        assert options.image is not None, "a missing image is refused"
        resources = _resources(job, options, shared or job.shared_memory_bytes)  # `_lead` traces
        job = _with_lead(
            job, Lead(grace, "`--grace`") if grace is not None else _lead(recipe, options.allowed, observer)
        )
        pod = container_engines.PodSettings(
            image=options.image,
            namespace=options.namespace,
            queue=options.queue,
            secrets=secrets,
            resources=resources,
            user=options.user,
            restarts=options.restarts,
            shared_memory_bytes=shared,
        )
        _report_tag(options.image, observer)
        return _finish(
            "kubernetes",
            job,
            options.output,
            lambda file: container_engines.manifest(job, pod, options.kind, file),
            lambda file: container_engines.manifest_commands(job, pod, options.kind, file),
        )


def cloud_task(
    source: str,
    overrides: Sequence[str],
    options: CloudOptions,
    engine: container_engines.Engine,
    *,
    name: str | None = None,
    observer: Observer = Observer(),
) -> ManifestAnswer:
    """Make the task file of a recipe for SkyPilot or dstack, and write it if `options.output` is given.

    Raises: FsdpTuneError with every reason why the recipe cannot run in containers.
    """
    mounts = tuple(parse_mount(each, "--volume") for each in options.volumes)
    secrets = _unique(tuple(parse_variable(each) for each in options.secrets))
    recipe = _load(source, overrides, options, name)
    with session(recipe):
        needs_gpu = recipe.recipe.launch.device != "cpu" and options.gpu is None
        missing = (
            [Problem("usage", f"{engine} needs the name of the GPUs", hint="`--gpu H100`")]
            if needs_gpu
            else []
        )
        job = _job(recipe, options, mounts, container_engines.TASK_RECIPE_DIRECTORY, observer, missing)
        if engine == "dstack":  # SkyPilot has no such time
            job = _with_lead(job, _lead(recipe, options.allowed, observer))
        settings = container_engines.CloudSettings(
            options.image, options.gpu, options.spot, secrets, options.restarts
        )
        if options.image is not None:
            _report_tag(options.image, observer)
        return _finish(
            engine,
            job,
            options.output,
            lambda file: container_engines.task(job, settings, engine, file),
            lambda file: container_engines.task_commands(job, settings, engine, file),
        )


def _load(
    source: str, overrides: Sequence[str], options: KubernetesOptions | CloudOptions, name: str | None
) -> LoadedRecipe:
    if options.output is not None:
        check_output_file(options.output)
    return sized_recipe(source, overrides, options.nodes, options.gpus_per_node, name=name)


def _job(
    recipe: LoadedRecipe,
    options: KubernetesOptions | CloudOptions,
    mounts: tuple[Mount, ...],
    directory: str,
    observer: Observer,
    missing: Sequence[Problem],
) -> ContainerJob:
    """Return the job. Raises: FsdpTuneError with the options that are `missing`, and every reason why the
    recipe cannot run there."""
    refused = code_not_allowed(recipe.recipe, options.allowed, starts_ranks=True)
    names: dict[str, Any] = {"name": options.job_name, "options": options.allowed.options()}
    names["volume_option"] = "--pvc" if isinstance(options, KubernetesOptions) else "--volume"
    try:
        job = container_job(recipe, mounts, directory, estimated_lead(None), **names)
    except FsdpTuneError as error:
        raise FsdpTuneError(*missing, *refused, *error.problems) from error
    if missing or refused:
        raise FsdpTuneError(*missing, *refused)
    observer.notices([*recipe.notices, *notices_of(recipe, mounts)])
    return job


def _with_lead(job: ContainerJob, lead: Lead) -> ContainerJob:
    return replace(job, cluster=replace(job.cluster, lead=lead))


def _lead(loaded: LoadedRecipe, allowed: Allowed, observer: Observer) -> Lead:
    """Return the lead from the run directory, if this machine sees it too, else from the size of a
    checkpoint, if a step can be traced."""
    measured = measured_lead(read_metrics(RunDir(Path(output_in_container(loaded.recipe)))))
    if measured is not None:
        return measured
    observer.phase("tracing a step for the size of a checkpoint")
    try:
        recipe = resolve_recipe(loaded, allowed, Observer()).recipe
    except FsdpTuneError:  # such as a model that only the containers have
        return estimated_lead(None)
    return estimated_lead(checkpoint_bytes(recipe))


def _finish(
    engine: str,
    job: ContainerJob,
    output: Path | None,
    text: Callable[[str], str],
    commands: Callable[[str], list[str]],
) -> ManifestAnswer:
    file = "FILE" if output is None else str(output)
    made = text(file)
    if output is not None:
        write_file(output, made)
    return ManifestAnswer(
        engine=engine,
        name=job.name,
        output=None if output is None else str(output),
        manifest=made,
        recipe_sha256=job.digest,
        commands=commands(file),
    )


def _resources(job: ContainerJob, options: KubernetesOptions, shared_bytes: int) -> dict[str, str]:
    """Return the resources of a pod: what is requested is the limit too, so that no other pod can take it
    away."""
    found = {"cpu": str(options.cpus_per_node or _CORES_OF_RANK * job.ranks)}
    if options.memory is not None:
        memory = _parsed(options.memory, "--memory", parse_bytes)
        if memory <= shared_bytes:
            message = (
                f"`--memory {options.memory}` has no room besides {format_bytes(shared_bytes)} of /dev/shm"
            )
            raise usage_error(
                "usage",
                message,
                hint="a pod's shared memory counts as its memory: give more, or a smaller `--shared-memory`",
            )
        found["memory"] = str(memory)
    if job.cluster.gpus_per_machine:
        found[options.gpu_resource] = str(job.cluster.gpus_per_machine)
    for each in options.resources:
        match = _RESOURCE.fullmatch(each)
        if match is None:
            raise usage_error(
                "usage",
                f"`--resource {each}` does not name a resource and its number",
                hint="`--resource rdma/hca=1`",
            )
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
            raise usage_error(
                "usage",
                message,
                hint="lower-case letters, digits and `-`, beginning and ending with a letter or digit",
            )


def _report_tag(image: str, observer: Observer) -> None:
    if "@sha256:" not in image:
        message = f"`{image}` names a tag: a restart may get another image than the run started with"
        observer.notices(
            [Notice("image-not-pinned", message, hint="`IMAGE@sha256:DIGEST` is always the same")]
        )


def _parsed(text: str, flag: str, parse: Callable[[str], int]) -> int:
    try:
        return parse(text)
    except ValueError as error:
        raise usage_error("usage", f"`{flag}`: {error}") from None
