"""Read the manifest of a container engine as the shell script that its containers run, with the variables that it sets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from fsdp_tune.core.values import as_items, as_list, as_mapping, is_list, is_mapping

_BEGINS = re.compile(r"^(?:apiVersion|services|run|commands)\s*:", re.MULTILINE)
"""Without such a line at the margin, a file is not parsed a second time."""
_KUBERNETES_NAME = re.compile(r"\$\(([A-Za-z_]\w*)\)")
"""A variable as Kubernetes replaces it in a command, also outside of a shell."""
_OF_SKYPILOT = frozenset({"resources", "setup", "num_nodes", "file_mounts", "workdir", "envs"})


@dataclass(frozen=True, slots=True)
class EngineManifest:
    engine: str
    """Its name for people, with the kind of the manifest."""
    way: str
    """The command that writes such a manifest for a recipe; "" if there is none."""
    script: str
    """What its containers run; that of equal ones once."""
    machines: int = 1
    """Containers of the training, each of which is a machine for it."""
    known: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables that the engine sets, where the manifest gives their values."""


def manifest_in(text: str) -> EngineManifest | None:
    """Return the manifest in a YAML file; None for a file that is not one."""
    if _BEGINS.search(text) is None:
        return None
    try:
        documents = [as_mapping(each) for each in yaml.safe_load_all(text)]
    except (yaml.YAMLError, ValueError):
        return None  # the reader of configurations reports it
    if any("apiVersion" in each and "kind" in each for each in documents):
        return _kubernetes(documents)
    values = documents[0] if len(documents) == 1 else {}
    if isinstance(values.get("run"), str) and values.keys() & _OF_SKYPILOT:
        return _skypilot(values)
    if values.get("type") in ("task", "dev-environment", "service") and is_list(values.get("commands")):
        return _dstack(values)
    if is_mapping(values.get("services")):
        scripts = [_of_service(as_mapping(each)) for each in as_mapping(values["services"]).values()]
        return EngineManifest("Docker Compose", "", _joined(scripts))
    return None


def _joined(scripts: list[str]) -> str:
    return "".join(f"(\n{script}\n)\n" for script in dict.fromkeys(scripts) if script)


def _bound(variables: object) -> str:
    """Return lines that export variables: a mapping, a list of `NAME=VALUE`, or a list of `{name: NAME, value: VALUE}`.

    One whose value is elsewhere, as in a secret, is left out.
    """
    pairs: list[tuple[object, object]] = list(as_mapping(variables).items())
    for each in as_list(variables):
        name, _, value = str(each).partition("=")
        pairs.append((each.get("name"), each.get("value")) if is_mapping(each) else (name, value))
    return "".join(
        f"export {name}={shlex.quote(str(value).lower() if isinstance(value, bool) else str(value))}\n"
        for name, value in pairs
        if value not in (None, "") and re.fullmatch(r"[A-Za-z_]\w*", str(name))
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1


# ---- Engines


def _kubernetes(documents: list[dict[str, Any]]) -> EngineManifest:
    found = [(document, *each) for document in documents for each in _containers(document, 1)]
    kinds = dict.fromkeys(str(document.get("kind")) for document, _, _ in found)
    totals: dict[str, int] = {}
    for _, container, machines in found:
        script = _of_container(container)
        totals[script] = totals.get(script, 0) + machines
    name = f"Kubernetes {' and '.join(kinds or [str(documents[0].get('kind'))])}"
    return EngineManifest(name, "fsdp-tune submit kubernetes", _joined(list(totals)), max(totals.values(), default=1))


def _containers(value: object, machines: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the containers below a part of a manifest, each with how many of it run at once."""
    if is_list(value):
        for item in value:
            yield from _containers(item, machines)
    if not is_mapping(value):
        return
    if is_list(value.get("command")) or is_list(value.get("args")):
        yield value, machines * _count(value.get("numNodes"))
        return
    own = next((value[name] for name in ("replicas", "parallelism") if name in value), 1)
    for inner in value.values():
        yield from _containers(inner, machines * _count(own))


def _of_container(container: dict[str, Any]) -> str:
    words = [str(word) for word in (*as_list(container.get("command")), *as_list(container.get("args")))]
    return _bound(container.get("env")) + (_of_words(words) if words else "")


def _of_words(words: list[str]) -> str:
    """Return a command that is executed without a shell, or the script of one that starts a shell."""
    if len(words) > 2 and re.fullmatch(r"(?:.*/)?(?:ba|z|da)?sh", words[0]):
        at = next((index for index, word in enumerate(words[1:-1], 1) if re.fullmatch(r"-[a-z]*c", word)), None)
        if at is not None:
            return _KUBERNETES_NAME.sub(r"${\1}", words[at + 1])
    return " ".join(_word(word) for word in words)


def _word(word: str) -> str:
    """Return one word as the shell reads it, with the variables that Kubernetes replaces."""
    parts = _KUBERNETES_NAME.split(word)
    if len(parts) == 1:
        return shlex.quote(word)
    return "".join(f'"${{{part}}}"' if index % 2 else shlex.quote(part) if part else "" for index, part in enumerate(parts))


def _of_service(service: dict[str, Any]) -> str:
    """Return the command of a service of Docker Compose, in which `$$` is a `$`."""
    words = [each for name in ("entrypoint", "command") for each in as_items(service.get(name)) if each is not None]
    is_text = any(isinstance(service.get(name), str) for name in ("entrypoint", "command"))
    script = " ".join(str(word) for word in words) if is_text else _of_words([str(word) for word in words])
    return _bound(service.get("environment")) + script.replace("$$", "$") if words else ""


def _skypilot(values: dict[str, Any]) -> EngineManifest:
    machines = _count(values.get("num_nodes"))
    gpus = as_mapping(values.get("resources")).get("accelerators")
    known = _known(SKYPILOT_NUM_NODES=machines, SKYPILOT_NUM_GPUS_PER_NODE=_gpus(gpus))
    script = f"{_bound(values.get('envs'))}{values['run']}"
    return EngineManifest("SkyPilot", "fsdp-tune submit skypilot", _joined([script]), machines, known)


def _dstack(values: dict[str, Any]) -> EngineManifest:
    machines = _count(values.get("nodes"))
    gpus = _gpus(as_mapping(values.get("resources")).get("gpu"))
    known = _known(DSTACK_NODES_NUM=machines, DSTACK_GPUS_PER_NODE=gpus, DSTACK_GPUS_NUM=gpus and gpus * machines)
    commands = "\n".join(str(each) for each in as_list(values["commands"]))
    script = f"{_bound(values.get('env'))}{commands}"
    return EngineManifest("dstack", "fsdp-tune submit dstack", _joined([script]), machines, known)


def _known(**values: int | None) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if value is not None}


def _gpus(value: object) -> int | None:
    """Return the GPUs of a machine in `H100:8`, `{H100: 8}`, `{name: H100, count: 8}` or `8`; None for a range."""
    if is_mapping(value):
        found = value.get("count", next(iter(value.values()), None) if len(value) == 1 else None)
        return found if isinstance(found, int) else None
    if isinstance(value, int):
        return value
    match = re.fullmatch(r"(?:[^:]*:)?(?:\d+GB:)?(\d+)", str(value))
    return int(match[1]) if match else 1 if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w-]*", value) else None
