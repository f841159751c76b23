"""A run in containers: the recipe travels inside the job's file, everything else is on volumes, in the image
or on the hub.

A path of the recipe means a file in the container. So a relative one is refused, and the run directory must
be on a volume, or each restart would begin without checkpoints.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import yaml

from fsdp_tune.cluster.submit.cluster_job import ClusterJob, Lead
from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem, Where, usage_error
from fsdp_tune.core.files import expanded
from fsdp_tune.core.secrets import MASK, has_secret_shape, mask_text
from fsdp_tune.core.units import GIB, MIB
from fsdp_tune.launch.command.accelerate import DEFAULT_MULTI_MACHINE_PORT
from fsdp_tune.recipe.read.loader import LoadedRecipe
from fsdp_tune.recipe.references import can_only_be_a_path
from fsdp_tune.recipe.rules.paths import OUTPUT_FIELDS
from fsdp_tune.recipe.schema.data_section import BUILDERS
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value

RECIPE_FILE = "recipe.yaml"
"""In the containers, whatever its name is here."""
LONGEST_NAME = 40
"""Of a job. A JobSet makes `NAME-node-0-1234-abcde` of it, which is a label of DNS: 63 characters at most."""
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEY = re.compile(r"[-._a-zA-Z0-9]+")
_NCCL_SHARED_BYTES = 512 * MIB
"""Of one rank without peer access: two neighbours × 32 channels × 8 MiB of buffers (NCCL_BUFFSIZE and those
of LL and LL128)."""
_BYTES_OF_TOKEN = 4 * 8
"""Ids, labels, positions and rows of a batch, 64 bits each."""
_PREFETCHED_BATCHES = 2
"""Of each process of torch's data loader."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A volume by its name in the cluster, and the directory where containers find it."""

    volume: str
    path: PurePosixPath

    def holds(self, path: PurePosixPath) -> bool:
        return path.is_relative_to(self.path)


@dataclass(frozen=True, slots=True)
class SecretReference:
    """A variable whose value is in the cluster's store of secrets, never in a file of this tool."""

    variable: str
    secret: str
    key: str


@dataclass(frozen=True, slots=True)
class ContainerJob:
    """A run in containers of any engine. Paths of `cluster` are those in the containers; its name is a label
    of DNS."""

    cluster: ClusterJob
    recipe_text: str
    ranks: int
    """Of each machine."""
    mounts: tuple[Mount, ...]
    port: int
    """On which the first machine listens, if there are several."""
    recipe_variables: frozenset[str]
    """Names of `launch.env`, which the ranks get from the recipe."""
    shared_memory_bytes: int
    """Size of /dev/shm that the ranks of a machine may fill."""
    reported_to: tuple[str, ...]
    """Trackers of the recipe."""

    @property
    def name(self) -> str:
        return self.cluster.name

    @property
    def machines(self) -> int:
        return self.cluster.machines

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.recipe_text.encode()).hexdigest()

    @property
    def size(self) -> str:
        return f"{self.machines} × {self.ranks} rank{'s'[: self.ranks > 1]}"

    def shell_command(self, machine_rank: str, more: str = "") -> str:
        """Return the command line of one machine. `machine_rank` and `more` are shell words with variables of
        the engine."""
        rank = f" --machine-rank {machine_rank}" if self.machines > 1 else ""
        return (
            f"exec {shlex.join((*self.cluster.program, *self.cluster.arguments))}{rank}{more and f' {more}'}"
        )


_NO_TEXT_ELSEWHERE = re.compile(
    r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?0[oObBxX][0-9a-fA-F_]+|[yYnN]"
)
"""What the parsers of engines read as a number or truth value where PyYAML's, of YAML 1.1 without `y` and
`1e3`, reads a text."""


class _Dumper(yaml.SafeDumper):
    """Writes a text of several lines line by line, and as a text for YAML 1.1, 1.2 and Go's mixture of
    both."""


def _represent_text(_dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else "'" if _NO_TEXT_ELSEWHERE.fullmatch(text) else None
    return yaml.ScalarNode("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def as_yaml(document: Mapping[str, object]) -> str:
    """Return a document as YAML, with its keys in their order."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def parse_mount(text: str, option: str) -> Mount:
    """Parse `NAME:/path`. Raises: usage error."""
    volume, _, path = text.partition(":")
    if (
        not is_subdomain(volume)
        or not path.startswith("/")
        or PurePosixPath(path) == PurePosixPath("/")
        or ".." in path.split("/")
    ):
        raise usage_error(
            "usage",
            f"`{option} {text}` does not name a volume and its directory",
            hint=f"`{option} NAME:/checkpoints`",
        )
    return Mount(volume, PurePosixPath(path))


def parse_secret(text: str) -> SecretReference:
    """Parse `VARIABLE=SECRET[:KEY]`. Raises: usage error, which does not repeat what may be the value of a
    secret."""
    variable, _, rest = text.partition("=")
    secret, _, key = rest.partition(":")
    key = key or variable
    if (
        not _VARIABLE.fullmatch(variable)
        or not is_subdomain(secret)
        or has_secret_shape(secret)
        or not _KEY.fullmatch(key)
    ):
        message = (
            "`--secret` takes a variable and the name of the cluster's secret that has its value, and "
            "never the value"
        )
        raise usage_error(
            "usage", message, hint="`--secret HF_TOKEN=my-secret` or `--secret HF_TOKEN=my-secret:KEY`"
        )
    return SecretReference(variable, secret, key)


def parse_variable(text: str) -> SecretReference:
    """Parse the name of a variable whose secret has the same name. Raises: usage error, which does not repeat
    what may be its value."""
    if not _VARIABLE.fullmatch(text) or has_secret_shape(text):
        raise usage_error(
            "usage",
            "`--secret` takes the name of a variable, and never its value",
            hint="`--secret HF_TOKEN`",
        )
    return SecretReference(text, text, text)


def is_subdomain(text: str) -> bool:
    """Return whether `text` is a name of an object in Kubernetes: labels of DNS (RFC 1123) with dots between
    them."""
    return len(text) <= 253 and all(_LABEL.fullmatch(each) for each in text.split("."))


def job_name(name: str) -> str:
    """Return a label of DNS that begins with a letter, for the name of a run; a long one is cut and gets a
    digest."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    label = label if label[:1].isalpha() else f"run-{label}".rstrip("-")
    if len(label) > LONGEST_NAME:
        label = f"{label[: LONGEST_NAME - 7].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
    return label


def container_job(
    loaded: LoadedRecipe,
    mounts: Sequence[Mount],
    directory: str,
    lead: Lead,
    *,
    name: str | None = None,
    options: Sequence[str] = (),
    volume_option: str = "--volume",
) -> ContainerJob:
    """Return the job of a recipe.

    `directory`: of the recipe in the containers. `name`: of the job, if it is not the run's. `options`:
    further ones of `train`.
    `volume_option`: the one of the engine's command that mounts a volume.
    Raises: FsdpTuneError with every reason why the recipe cannot run in containers.
    """
    recipe = loaded.recipe
    output = output_in_container(recipe)
    ranks, machines = recipe.launch.num_processes, recipe.launch.num_machines
    problems = [
        *_output(output, mounts, volume_option),
        *_path_problems(recipe, mounts),
        *_address(recipe),
        *_size(recipe),
    ]
    if problems or ranks == "auto":
        raise FsdpTuneError(*problems)
    overrides = [word for override in loaded.overrides for word in ("--set", override)]
    train = ("train", "--config", f"{directory}/{RECIPE_FILE}")
    home = next(mount for mount in mounts if mount.holds(output)).path / "cache"
    port = recipe.launch.main_process_port
    cluster = ClusterJob(
        name=job_name(name or str(recipe.name)),
        program=("fsdp-tune",),
        arguments=(*train, "--name", str(recipe.name), "--resume", "auto", *overrides, *options),
        output_dir=Path(output),
        working_directory=Path("/"),
        machines=machines,
        gpus_per_machine=0 if recipe.launch.device == "cpu" else ranks // machines,
        lead=lead,
        environment={"HF_HOME": str(home / "huggingface"), "XDG_CACHE_HOME": str(home)},
    )
    return ContainerJob(
        cluster=cluster,
        recipe_text=mask_text(loaded.text),
        ranks=ranks // machines,
        mounts=tuple(mounts),
        port=DEFAULT_MULTI_MACHINE_PORT if port == "auto" else port,
        recipe_variables=frozenset(recipe.launch.env),
        shared_memory_bytes=shared_memory(recipe, ranks // machines),
        reported_to=tuple(recipe.training.report_to),
    )


def notices_of(loaded: LoadedRecipe, mounts: Sequence[Mount]) -> Iterator[Notice]:
    """Yield what a user should know about a recipe in containers that does not stop the job."""
    if mask_text(loaded.text) != loaded.text:
        message = (
            f"{loaded.path} has a comment with what looks like a secret; the job's file gets `{MASK}` instead"
        )
        yield Notice("secret-not-written", message)
    for key, value in _named_files(loaded.recipe):
        if value.startswith("/") and not any(mount.holds(PurePosixPath(value)) for mount in mounts):
            yield Notice(
                "not-on-a-volume", f"`{key}: {value}` is on no volume: the image must have it", Where(key=key)
            )
    if loaded.recipe.launch.max_runtime is not None:
        message = (
            "a run that `launch.max_runtime` ends has exit code 143, and the engine starts it again at once"
        )
        yield Notice(
            "runtime-restarts",
            message,
            Where(key="launch.max_runtime"),
            "leave it out, or give the engine a time limit",
        )


def shared_memory(recipe: Recipe, ranks: int) -> int:
    """Return the bytes of /dev/shm that NCCL and the data loaders of `ranks` ranks may fill, rounded up to
    GiB."""
    training = recipe.training
    processes = training_value(training, "dataloader_num_workers")
    loaders = processes if isinstance(processes, int) else 0
    batch = training.per_device_train_batch_size * recipe.data.max_length * _BYTES_OF_TOKEN
    return -(-ranks * (_NCCL_SHARED_BYTES + loaders * _PREFETCHED_BATCHES * batch) // GIB) * GIB


def output_in_container(recipe: Recipe) -> PurePosixPath:
    """Return the run directory."""
    values = {"name": recipe.name or "run", "seed": str(recipe.training.seed)}
    return PurePosixPath(OUTPUT_FIELDS.sub(lambda found: values[found[1]], recipe.output_dir))


def _output(output: PurePosixPath, mounts: Sequence[Mount], volume_option: str) -> Iterator[Problem]:
    if ".." in output.parts or not any(mount.holds(output) for mount in mounts):
        message = (
            f"`output_dir` is `{output}`, which is on no volume: every restart would begin without "
            "checkpoints"
        )
        where = f"{mounts[0].path}/runs/{{name}}" if mounts else "/checkpoints/runs/{name}"
        hint = (
            f"`--set output_dir='{where}'`"
            if mounts
            else f"name a volume that all machines share (`{volume_option} NAME:/checkpoints`), and "
            f"`--set output_dir='{where}'`"
        )
        yield Problem("not-on-a-volume", message, Where(key="output_dir"), hint)


def _path_problems(recipe: Recipe, mounts: Sequence[Mount]) -> Iterator[Problem]:
    """Yield what is wrong with paths that containers do not see, or that are on no volume."""
    for key, value in _named_files(recipe):
        if value.startswith("/") or "://" in value:
            continue
        if expanded(value).exists() or can_only_be_a_path(value):
            message = f"`{key}: {value}` is a path of this machine, and containers do not see it"
            hint = "put it on a volume and write its path there, or a URL or a hub id"
            yield Problem("path-not-in-container", message, Where(key=key), hint)
    cache = recipe.data.cache_dir
    if (
        cache is not None
        and recipe.launch.num_machines > 1
        and not any(mount.holds(PurePosixPath(cache)) for mount in mounts)
    ):
        message = (
            f"`data.cache_dir: {cache}` is on no volume, and every machine reads the rows that the first "
            "one prepares"
        )
        yield Problem(
            "not-on-a-volume",
            message,
            Where(key="data.cache_dir"),
            "leave it out: the volume of `output_dir` is taken",
        )


def _named_files(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield key and value where a recipe names a file, a directory, or what may be one."""
    model = recipe.model
    found: list[tuple[str, object]] = [
        ("model.name_or_path", model.name_or_path),
        ("model.tokenizer", model.tokenizer),
        ("model.from_config", model.from_config),
        ("data.chat_template", recipe.data.chat_template),
        ("checkpoint.mirror", recipe.checkpoint.mirror),
        ("lora.adapter", recipe.lora.adapter if recipe.lora is not None else None),
    ]
    for key, source in (*recipe.data.sources, *recipe.evaluation.sources):
        found.append((f"{key}.chat_template", source.chat_template))
        if source.path not in BUILDERS:
            found.append((f"{key}.path", source.path))
        else:
            files = source.data_files
            found.extend(
                (f"{key}.data_files", name) for name in (files if isinstance(files, list) else [files])
            )
    yield from (
        (key, value) for key, value in found if isinstance(value, str) and not value.startswith("builtin:")
    )


def _address(recipe: Recipe) -> Iterator[Problem]:
    if recipe.launch.num_machines > 1 and recipe.launch.main_process_ip is not None:
        message = (
            f"`launch.main_process_ip: {recipe.launch.main_process_ip}` is fixed, and the engine gives "
            "the first machine its address"
        )
        yield Problem("address-of-engine", message, Where(key="launch.main_process_ip"), "leave it out")


def _size(recipe: Recipe) -> Iterator[Problem]:
    if recipe.launch.num_processes == "auto":
        message = (
            "the recipe starts a rank for each GPU of a node (`launch.num_processes: auto`), and how "
            "many it has is unknown here"
        )
        yield Problem(
            "submit-size",
            message,
            Where(key="launch.num_processes"),
            "`--gpus-per-node N`, or write `launch.num_processes`",
        )
