"""Read the manifest of a container engine as the shell script that its containers run, with the variables
that it sets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from fsdp_tune.core.values import as_list, as_mapping, is_list, is_mapping
from fsdp_tune.migrate.read.shell_syntax import NAME, script_of_shell
from fsdp_tune.recipe.read.yaml_source import compose_all, plain_value

_BEGINS = re.compile(r"^(?:apiVersion|services|run|commands)\s*:", re.MULTILINE)
"""Without such a line at the margin, a file is not parsed a second time."""
_KUBERNETES = re.compile(rf"\$(?:\$|\((?P<name>{NAME})\))")
"""A `$$`, or a variable as Kubernetes replaces it in a command and in values of variables, also outside of a
shell."""
_COMPOSE = re.compile(rf"\$(?:\$|\{{(?P<inner>(?P<name>{NAME})[^{{}}]*)\}}|(?P<bare>{NAME}))")
"""A `$$`, or a variable of the host or of `.env` that Docker Compose replaces anywhere in its file."""
_OF_SKYPILOT = frozenset({"resources", "setup", "num_nodes", "file_mounts", "workdir", "envs"})
_JOINED = {
    "PyTorchJob": frozenset({"torchrun", "python"}),
    "TrainJob": frozenset({"torchrun", "python"}),
    "MPIJob": frozenset({"python"}),
}
"""Kinds that give torchrun the number of machines (`PET_NNODES`) or start each rank of a program, by what
starts ranks."""


@dataclass(frozen=True, slots=True)
class Containers:
    """Containers that run the same commands, each of which is a machine for a training."""

    script: str
    machines: int = 1
    processes: int | None = None
    """Ranks of each that the engine gives torchrun (`PET_NPROC_PER_NODE`); None if the manifest does not have
    them."""


@dataclass(frozen=True, slots=True)
class JobManifest:
    engine: str
    """Its name for people, with the kind of the manifest."""
    way: str
    """The command that writes such a manifest for a recipe; "" if there is none."""
    containers: tuple[Containers, ...]
    known: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables that the engine sets, where the manifest gives their values."""
    joined: frozenset[str] = frozenset()
    """What starts ranks (`command_line.starter`) as one training on all machines without an option; others
    need the number."""

    @property
    def script(self) -> str:
        """What the containers run, each set of them in a subshell."""
        return "".join(f"(\n{each.script}\n)\n" for each in self.containers)

    def containers_at(self, line: int) -> Containers:
        """Return the containers that run a line of `script`, which counts from 1."""
        for each in self.containers:
            line -= each.script.count("\n") + 3
            if line <= 0:
                return each
        return Containers("")


def manifest_in(text: str, source: str = "") -> JobManifest | None:
    """Return the manifest in a YAML file; None for a file that is not one. Raises: FsdpTuneError for text
    that has no tree."""
    if _BEGINS.search(text) is None:
        return None
    documents = [as_mapping(plain_value(node)) for node in compose_all(text, source)]
    if any("apiVersion" in each and "kind" in each for each in documents):
        return _kubernetes(documents)
    values = documents[0] if len(documents) == 1 else {}
    if isinstance(values.get("run"), str) and values.keys() & _OF_SKYPILOT:
        return _skypilot(values)
    if values.get("type") in ("task", "dev-environment", "service") and is_list(values.get("commands")):
        return _dstack(values)
    if is_mapping(values.get("services")):
        scripts = [_of_service(as_mapping(each)) for each in as_mapping(values["services"]).values()]
        return JobManifest(
            "Docker Compose", "", tuple(Containers(script) for script in dict.fromkeys(scripts) if script)
        )
    return None


def _variables(variables: object) -> dict[str, str | None]:
    """Return variables of a mapping, a list of `NAME=VALUE`, or a list of `{name: NAME, value: VALUE}`.

    One whose value is elsewhere, as in a secret, is None.
    """
    pairs: list[tuple[object, object]] = list(as_mapping(variables).items())
    for each in as_list(variables):
        name, _, value = str(each).partition("=")
        pairs.append((each.get("name"), each.get("value")) if is_mapping(each) else (name, value))
    return {
        str(name): None
        if value in (None, "")
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
        for name, value in pairs
        if re.fullmatch(NAME, str(name))
    }


def _exported(variables: Mapping[str, str | None], quote: Callable[[str], str] = shlex.quote) -> str:
    """Return lines that export the variables that have a value."""
    return "".join(
        f"export {name}={quote(value)}\n" for name, value in variables.items() if value is not None
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1


@dataclass(frozen=True, slots=True)
class _Replaced:
    """How an engine replaces variables in its manifest: a `$$` is a `$`, and a match is what `expansion`
    returns, in the shell's words."""

    pattern: re.Pattern[str]
    expansion: Callable[[re.Match[str]], str]

    def script(self, text: str) -> str:
        """Return a text that a shell executes."""
        return self.pattern.sub(lambda match: "$" if match[0] == "$$" else self.expansion(match), text)

    def word(self, text: str) -> str:
        """Return a word that no shell reads as the shell would read it: its own text in quotes, with the
        variables expanded."""
        parts, literal, at = "", "", 0
        for match in self.pattern.finditer(text):
            literal += text[at : match.start()]
            at = match.end()
            if match[0] == "$$":
                literal += "$"
            else:
                parts += (shlex.quote(literal) if literal else "") + f'"{self.expansion(match)}"'
                literal = ""
        literal += text[at:]
        return parts + (shlex.quote(literal) if literal or not parts else "")

    def command(self, words: list[str]) -> str:
        """Return a command that is executed without a shell, or the script of one that starts a shell."""
        text = script_of_shell(words)
        return " ".join(map(self.word, words)) if text is None else self.script(text)


def _kubernetes(documents: list[dict[str, object]]) -> JobManifest:
    found = [(document, *each) for document in documents for each in _containers(document, 1)]
    kinds = dict.fromkeys(str(document.get("kind")) for document, _, _ in found)
    groups: dict[str, list[tuple[dict[str, str | None], int]]] = {}
    processes: dict[str, set[int | None]] = {}
    for document, container, machines in found:
        words = [str(word) for word in (*as_list(container.get("command")), *as_list(container.get("args")))]
        variables = _variables(container.get("env"))
        script = _of_kubernetes(variables).command(words) if words else ""
        groups.setdefault(script, []).append((variables, machines))
        processes.setdefault(script, set()).add(_processes(container, document))
    totals = [sum(machines for _, machines in group) for group in groups.values()]
    # the launcher starts ranks on the workers
    totals = [max(totals)] * len(totals) if "MPIJob" in kinds else totals
    containers = [
        Containers(
            _common_variables([variables for variables, _ in group]) + script, total, _only(processes[script])
        )
        for (script, group), total in zip(groups.items(), totals, strict=True)
    ]
    name = f"Kubernetes {' and '.join(kinds or [str(documents[0].get('kind'))])}"
    sizes = {
        size
        for document in documents
        if (size := as_mapping(as_mapping(document.get("spec")).get(_GROUP)).get("size"))
    }
    known = _known(LWS_GROUP_SIZE=_count(sizes.pop())) if len(sizes) == 1 else {}
    joined = _JOINED.get(next(iter(kinds)), frozenset[str]()) if len(kinds) == 1 else frozenset[str]()
    return JobManifest(name, "fsdp-tune submit kubernetes", tuple(containers), known, joined)


def _only(values: set[int | None]) -> int | None:
    """Return the ranks of containers with the same commands; None if they differ, since the import asks for
    them then."""
    return next(iter(values)) if len(values) == 1 else None


def _processes(container: Mapping[str, object], document: Mapping[str, object]) -> int | None:
    """Return the ranks of a pod that Kubeflow gives torchrun: `numProcPerNode` of a TrainJob, `nprocPerNode`
    of a PyTorchJob.

    Either may be `auto` or `gpu`, which torchrun takes for the GPUs of the pod. Without either, the operator
    of a PyTorchJob writes that of its `elasticPolicy` or `auto` (`SetDefaults_PyTorchJob` of Kubeflow's
    training-operator), and a TrainJob has that of its runtime.
    """
    spec = as_mapping(document.get("spec"))
    written = container.get("numProcPerNode", spec.get("nprocPerNode"))
    if document.get("kind") == "PyTorchJob":
        written = written or as_mapping(spec.get("elasticPolicy")).get("nProcPerNode") or "auto"
    if str(written).isdecimal():
        return int(str(written))
    resources = as_mapping(container.get("resourcesPerNode") or container.get("resources"))
    gpus = next(
        (
            amounts[name]
            for amounts in map(as_mapping, resources.values())
            for name in amounts
            if str(name).endswith("/gpu")
        ),
        None,
    )
    return int(str(gpus)) if written in ("auto", "gpu") and str(gpus).isdecimal() else None


def _of_kubernetes(variables: Mapping[str, object]) -> _Replaced:
    """Variables that a container does not have stay as they are: `$(hostname)` is of the shell."""
    return _Replaced(
        _KUBERNETES, lambda match: f"${{{match['name']}}}" if match["name"] in variables else match[0]
    )


def _common_variables(of_each: list[dict[str, str | None]]) -> str:
    """Return lines that export the variables of containers with the same commands; one whose values differ
    has none."""
    lines = ""
    for name in dict.fromkeys(name for variables in of_each for name in variables):
        values = {variables.get(name) for variables in of_each}
        if len(values) > 1:
            lines += f"export {name}\n"
        else:
            lines += _exported({name: values.pop()}, _of_kubernetes(of_each[0]).word)
    return lines


_GROUP = "leaderWorkerTemplate"


def _containers(value: object, machines: int) -> Iterator[tuple[dict[str, object], int]]:
    """Yield the containers below a part of a manifest, each with how many of it run at once in one
    training."""
    if is_list(value):
        for item in value:
            yield from _containers(item, machines)
    if not is_mapping(value):
        return
    if is_list(value.get("command")) or is_list(value.get("args")):
        yield value, machines * _count(value.get("numNodes"))
        return
    if _GROUP in value:  # its `replicas` are groups, each of which is a training of its own
        group = as_mapping(value[_GROUP])
        leaders = 1 if "leaderTemplate" in group else 0
        yield from _containers(group.get("leaderTemplate"), machines)
        yield from _containers(group.get("workerTemplate"), machines * (_count(group.get("size")) - leaders))
        return
    own = next((value[name] for name in ("replicas", "parallelism") if name in value), 1)
    for inner in value.values():
        yield from _containers(inner, machines * _count(own))


def _of_service(service: dict[str, object]) -> str:
    """Return the command of a service of Docker Compose. A text is split into words, and only `$$` is a `$`
    of the container."""
    words: list[str] = []
    for each in (service.get(name) for name in ("entrypoint", "command")):
        words += (
            _split(each)
            if isinstance(each, str)
            else [str(word) for word in as_list(each) if word is not None]
        )
    variables = _variables(service.get("environment"))

    def of_the_host(match: re.Match[str]) -> str:
        name = match["name"] or match["bare"]
        is_bound = name in variables or any(re.search(rf"\b{name}=", word) for word in words)
        # the container's value is another one
        return f"${{{name}?}}" if is_bound else f"${{{match['inner'] or name}}}"

    replaced = _Replaced(_COMPOSE, of_the_host)
    return _exported(variables, replaced.word) + replaced.command(words) if words else ""


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # a quote that is not closed
        return text.split()


def _skypilot(values: dict[str, object]) -> JobManifest:
    machines = _count(values.get("num_nodes"))
    gpus = as_mapping(values.get("resources")).get("accelerators")
    known = _known(SKYPILOT_NUM_NODES=machines, SKYPILOT_NUM_GPUS_PER_NODE=_gpus(gpus))
    script = f"{_exported(_variables(values.get('envs')))}{values['run']}"
    return JobManifest("SkyPilot", "fsdp-tune submit skypilot", (Containers(script, machines),), known)


def _dstack(values: dict[str, object]) -> JobManifest:
    machines = _count(values.get("nodes"))
    gpus = _gpus(as_mapping(values.get("resources")).get("gpu"))
    known = _known(
        DSTACK_NODES_NUM=machines, DSTACK_GPUS_PER_NODE=gpus, DSTACK_GPUS_NUM=gpus and gpus * machines
    )
    commands = "\n".join(str(each) for each in as_list(values["commands"]))
    script = f"{_exported(_variables(values.get('env')))}{commands}"
    return JobManifest("dstack", "fsdp-tune submit dstack", (Containers(script, machines),), known)


def _known(**values: int | None) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if value is not None}


def _gpus(value: object) -> int | None:
    """Return the GPUs of a machine in `H100:8`, `{H100: 8}`, `{name: H100, count: 8}` or `8`; None for a
    range."""
    if is_mapping(value):
        found = value.get("count", next(iter(value.values()), None) if len(value) == 1 else None)
        return found if isinstance(found, int) else None
    if isinstance(value, int):
        return value
    match = re.fullmatch(r"(?:[^:]*:)?(?:\d+GB:)?(\d+)", str(value))
    return (
        int(match[1])
        if match
        else 1
        if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w-]*", value)
        else None
    )
