"""One machine of a run: its route to the first one, what must be equal on all of them, and the document that it publishes.

gloo takes the interface that the host's own name resolves to, which is loopback on Debian (127.0.1.1), and NCCL the first that it finds.
Both may be a network that the machines do not share. The route to the first machine is one that they do.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import socket
import time
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from fsdp_tune.core.atomic import DISK, write_file
from fsdp_tune.core.devices import installed_versions, interconnect, versions, visible_devices
from fsdp_tune.core.errors import ExitCode, ExitReason, FsdpTuneError, Problem
from fsdp_tune.core.secrets import masked
from fsdp_tune.core.units import format_seconds
from fsdp_tune.launch.machines.store import ARCHIVE, ARCHIVE_BYTES, LARGEST_ARCHIVE_BYTES
from fsdp_tune.recipe.rules.launch import is_plain_setting
from fsdp_tune.recipe.schema.keys import effect_of, values_by_key
from fsdp_tune.recipe.schema.kinds import OnResume
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import Held, RunDir, held_checkpoints
from fsdp_tune.run.launch_files import ECHO_CODES, RankState, Verdict
from fsdp_tune.run.manifest import MANIFEST_NAME, digest, is_inside, list_files
from fsdp_tune.run.records import Document

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class Address:
    ip: str
    port: int
    """0: any free port, chosen when it is bound."""

    @property
    def control_port(self) -> int:
        """The port of the control channel between the machines: the next one."""
        return self.port + 1 if self.port < LAST_PORT else self.port - 1


@dataclass(frozen=True, slots=True)
class Route:
    """How this machine reaches the first one, or is reached by the others if it is the first."""

    interface: str
    address: str
    """Of this machine, on that interface."""
    first: str
    """Address of the first machine, as the recipe or a scheduler names it."""

    def __str__(self) -> str:
        where = "has the address" if self.is_first else "is on the route to the first machine,"
        return f"`{self.interface}`, which {where} {self.first}"

    @property
    def is_first(self) -> bool:
        """Whether the first machine's address is one of this interface."""
        return self.address == _numeric(self.first)


def route_to(first: str, port: int) -> Route | None:
    """Return the route to the first machine; None if its name cannot be resolved, or no interface has the address of the route."""
    try:
        family, _, _, _, there = socket.getaddrinfo(first, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)  # sends nothing: the kernel only looks up the route
            address = str(probe.getsockname()[0])
    except OSError:
        return None
    name = _owner_of(address)
    return Route(name, address, first) if name is not None else None


def _owner_of(address: str) -> str | None:
    """Return the interface that has an address. All of 127.0.0.0/8 is on loopback, which lists one address."""
    interfaces = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    loopback = [name for name, addresses in interfaces.items() if any(each.address == "127.0.0.1" for each in addresses)]
    return loopback[0] if loopback and address.startswith("127.") else None


def _numeric(host: str) -> str | None:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError:
        return None


def interface_settings(route: Route | None, given: Collection[str]) -> dict[str, str]:
    """Return the variables that name the interface of the route to the first machine, except those that the user has given."""
    if route is None:
        return {}
    # NCCL takes a name as the beginning of others: with `=` it is exact.
    values = dict(zip(INTERFACE_VARIABLES, (route.interface, f"={route.interface}"), strict=True))
    return {name: value for name, value in values.items() if name not in given}


CLOCK_SECONDS = 60.0
"""Largest difference of two clocks: `launch.max_runtime` and the times in the logs are wall-clock times."""
_PACKAGES = ("python", "fsdp-tune", "torch", "transformers", "accelerate", "safetensors", "tokenizers", "numpy", "triton")
_COMMUNICATION = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
_VARIABLES = ("NCCL_", "GLOO_", "TORCH_NCCL_")
# Variables that may differ: names of devices, and what is printed.
_OWN_VARIABLES = (*INTERFACE_VARIABLES, "NCCL_IB_HCA", "NCCL_DEBUG", "NCCL_HOSTID")
_TRANSPORTS = ("NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET")
"""Variables that choose what NCCL uses. Where one is set, the ports that are there need not be equal."""
_KEYS_OF_LAUNCH = (
    *("launch.num_machines", "launch.num_processes", "launch.device", "launch.hang_timeout", "launch.max_runtime"),
    "launch.shared_directory",
)
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Identity(Document):
    """What one machine is, as it publishes it. Values of the recipe are digests: any process that reaches the port can read them."""

    host: str
    versions: dict[str, str | None]
    code: str
    """Digest of this package's source."""
    recipe: dict[str, str]
    """By key that must be equal, a digest of the value."""
    device: str
    devices: list[str]
    """Names of the visible accelerators."""
    variables: dict[str, str] = field(default_factory=dict[str, str])
    """Of NCCL and gloo; digests of those that are not known to be plain settings."""
    ports: list[str] = field(default_factory=list[str])
    """Active ports of InfiniBand and RoCE, by layer and rate."""


def identity_of(recipe: Recipe, environment: Mapping[str, str], extensions: Sequence[str] = ()) -> Identity:
    """Return the identity of this machine. `environment`: that of the ranks; `extensions`: those of the recipe, with their versions."""
    device = str(recipe.launch.device)
    found = versions() | installed_versions(_COMMUNICATION)
    keys = {key: value for key, value in values_by_key(recipe).items() if key in _KEYS_OF_LAUNCH or _is_equal_everywhere(key)}
    names = [name for name in sorted(environment) if name.startswith(_VARIABLES) and not name.startswith(_OWN_VARIABLES)]
    names += [name for name in _TRANSPORTS if name in environment and name not in names]
    ports: list[dict[str, str | None]] = [*interconnect()["infiniband"].values()] if device == "cuda" else []
    return Identity(
        host=socket.gethostname(),
        versions={name: found[name] for name in (*_PACKAGES, *_COMMUNICATION) if name in found} | dict.fromkeys(extensions, "used"),
        code=_code_digest(),
        recipe={key: _digest(json.dumps(value, sort_keys=True)) for key, value in keys.items()},
        device=device,
        devices=[each.name for each in visible_devices(environment)] if device != "cpu" else [],
        variables={name: _shown(name, environment[name]) for name in names},
        ports=sorted(f"{port['layer']} {port['rate']}" for port in ports if "ACTIVE" in str(port["state"])),
    )


def _is_equal_everywhere(key: str) -> bool:
    return effect_of(key).on_resume is not OnResume.FREE


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _shown(name: str, value: str) -> str:
    return masked(name, value) if is_plain_setting(name) else f"(digest {_digest(value)})"


def _code_digest() -> str:
    """Return a digest of the source of this package: two checkouts of one version may differ."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def difference(machine: int, mine: Identity, first: Identity, clock_seconds: float) -> Problem | None:
    """Return how this machine differs from the first, with every difference; None if it does not.

    `clock_seconds`: how far the clock of the first machine is ahead.
    """
    found = [*_of_software(mine, first), *_of_devices(mine, first), *_of_recipe(mine, first), *_of_network(mine, first)]
    if abs(clock_seconds) > CLOCK_SECONDS:
        way = "behind" if clock_seconds > 0 else "ahead of"
        found.append(("a clock that is", f"{format_seconds(abs(clock_seconds))} {way} the other", "", "set both by NTP"))
    if not found:
        return None
    listed = [f"{what} {here}" + (f" instead of {there}" if there else "") for what, here, there, _ in found[:_SHOWN]]
    more = f" (and {len(found) - _SHOWN} more differences)" if len(found) > _SHOWN else ""
    message = f"machine {machine} ({mine.host}) differs from machine 0 ({first.host}): {'; '.join(listed)}{more}"
    return Problem("machines-differ", message, hint="; ".join(dict.fromkeys(hint for *_, hint in found)))


_Difference = tuple[str, str, str, str]
"""What differs, here, on the first machine, and the hint."""


def _of_software(mine: Identity, first: Identity) -> Iterator[_Difference]:
    for name in sorted(mine.versions.keys() | first.versions.keys()):
        here, there = mine.versions.get(name), first.versions.get(name)
        if here != there:
            yield f"{name}", here or "(not installed)", there or "(not installed)", "install the same packages on all machines"
    if mine.code != first.code and mine.versions.get("fsdp-tune") == first.versions.get("fsdp-tune"):
        yield "fsdp-tune's source", mine.code, first.code, "install the same fsdp-tune on all machines"


def _of_devices(mine: Identity, first: Identity) -> Iterator[_Difference]:
    if len(mine.devices) != len(first.devices):
        hint = "let CUDA_VISIBLE_DEVICES show as many GPUs on each machine"
        yield "visible devices:", str(len(mine.devices)), str(len(first.devices)), hint


def _of_recipe(mine: Identity, first: Identity) -> Iterator[_Difference]:
    differing = [key for key in sorted(mine.recipe.keys() | first.recipe.keys()) if mine.recipe.get(key) != first.recipe.get(key)]
    if differing:
        names = ", ".join(f"`{key}`" for key in differing[:_SHOWN]) + (" …" if len(differing) > _SHOWN else "")
        yield "another value of", names, "", "pass the same recipe and `--set` on all machines"


def _of_network(mine: Identity, first: Identity) -> Iterator[_Difference]:
    for name in sorted(mine.variables.keys() | first.variables.keys()):
        here, there = mine.variables.get(name), first.variables.get(name)
        if here != there:
            hint = "set the variable in `launch.env`, so that it is equal on all machines"
            yield name, here or "(unset)", there or "(unset)", hint
    is_chosen = any(name in each.variables for name in _TRANSPORTS for each in (mine, first))
    if mine.ports != first.ports and not is_chosen:
        hint = "check the ports (`fsdp-tune env`), or choose what NCCL uses by NCCL_IB_HCA or NCCL_IB_DISABLE in `launch.env`"
        yield "active InfiniBand ports:", _counted(mine.ports), _counted(first.ports), hint


def _counted(ports: Sequence[str]) -> str:
    return ", ".join(f"{ports.count(port)} × {port}" for port in dict.fromkeys(ports)) or "none"


NOT_STARTED = -1
"""The launch number of a machine that has confirmed none."""

State = Literal["waiting", "gathering", "ready", "running", "ended", "final"]


@dataclass(frozen=True, slots=True)
class Relayed(Document):
    """What the first machine repeats for the others."""

    failed_machine: int | None = None
    failure: dict[str, Any] | None = None
    """The problem of the first other machine that failed."""
    stop_reason: ExitReason | None = None
    """Why the ranks of another machine were stopped."""
    silent_seconds: float | None = None
    """Of another machine that has detected a hang."""
    rank_states: tuple[RankState, ...] = ()
    """Where the ranks of other machines are, in a hang."""
    is_complete: bool = False
    """Whether these are all of them."""
    are_quiet: bool = False
    """Whether all other machines are quiet."""


@dataclass(frozen=True, slots=True)
class MachineReport(Document):
    """The document of a machine."""

    token: str = ""
    """Of its command."""
    life: str | None = None
    """Of the first machine's command that it follows, or of itself."""
    identity: Identity | None = None
    work: int = 0
    """Only a change of it matters."""
    launch: int = NOT_STARTED
    """0 for the first launch of the command, then one more for each restart."""
    members: tuple[int, ...] = ()
    """On the first machine: those that take part in its launch. Ranks are numbered in this order."""
    state: State = "waiting"
    """waiting: to join. ready: for this launch. running. ended: this launch, on this machine. On the first machine only: gathering (waits
    for the others), and final (there is no other launch)."""
    ended: dict[str, Any] | None = None
    """The verdict on its launch."""
    rank_states: tuple[RankState, ...] = ()
    """Where its ranks are, in a hang."""
    silent_seconds: float = 0.0
    is_quiet: bool = False
    """Whether its ranks have made no progress for a while."""
    files: dict[str, str] | None = None
    """On the first machine: digests of the files that ranks read, or the archive with them (`OwnDirectory.offer`)."""
    held: tuple[Held, ...] | None = None
    """What this machine has of each checkpoint, if each has its own run directory; None until it is known, and while ranks run."""
    relayed: Relayed = field(default_factory=Relayed)

    @property
    def makes_no_progress(self) -> bool:
        return self.is_quiet or self.ended is not None

    @property
    def verdict(self) -> Verdict | None:
        """How the launch ended there; None if it has not, or if the document is not of this program."""
        with suppress(ValueError, KeyError, TypeError):
            return Verdict.from_dict(self.ended) if self.ended is not None else None
        return None

    @property
    def problem(self) -> Problem | None:
        return self.verdict.problem if self.verdict is not None else None


@dataclass(frozen=True, slots=True)
class Fewer:
    """A launch that did not start, since not all of its machines confirmed it in time."""

    present: tuple[int, ...]
    """Those that did, the first included."""


@dataclass(frozen=True, slots=True)
class Standby:
    """This machine takes part in no launch yet. It joins the next one."""

    members: tuple[int, ...]
    """The machines of the present launch."""


def relay(reports: Mapping[int, MachineReport], machines: int, *, are_quiet: bool) -> Relayed:
    """Return what the first machine repeats of its `machines` others, by those that have reported."""
    failed = next(((machine, problem) for machine, report in sorted(reports.items()) if (problem := report.problem) is not None), None)
    named = None if failed is None else replace(failed[1], code="machine-failed", message=f"machine {failed[0]}: {failed[1].message}")
    verdicts = [verdict for report in reports.values() if (verdict := report.verdict) is not None]
    return Relayed(
        failed_machine=None if failed is None else failed[0],
        failure=None if named is None else named.as_dict(),
        stop_reason=next((verdict.reason for verdict in verdicts if verdict.is_stop), None),
        silent_seconds=max((report.silent_seconds for report in reports.values() if report.rank_states), default=None),
        rank_states=tuple(each for report in reports.values() for each in report.rank_states),
        is_complete=len(reports) == machines and all(report.rank_states for report in reports.values()),
        are_quiet=are_quiet,
    )


READ_SECONDS = 0.2
"""Time between two looks at the documents, which are in memory."""
VISIBLE_SECONDS = 90.0
"""Limit for files of the first machine to appear in a shared directory: NFS caches the absence of a name for up to a minute."""
ARCHIVE_SECONDS = 600.0
"""Limit for the archive with them to arrive on a machine with a directory of its own."""
Offered = Callable[[], "dict[str, str] | None"]
"""Returns what the first machine offers at present."""


class SharedDirectory:
    """The run directory of machines that see the same one."""

    def __init__(self, run: RunDir) -> None:
        self._run = run

    def offer(self) -> dict[str, str]:
        """Return digests of the files of a run that its ranks read at the start, of those that are there."""
        found: dict[str, str] = {}
        for path in (self._run.recipe_json, self._run.data_json, self._run.launch_json, self._run.resume_json):
            with suppress(OSError):
                found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        return found

    def take(self, machine: int, offered: Offered) -> Problem | None:
        """Wait until the files that ranks read are those of the first machine."""
        deadline = time.monotonic() + VISIBLE_SECONDS
        while True:
            theirs, mine = offered(), self.offer()
            if theirs is None or theirs == mine:
                return None
            if time.monotonic() > deadline:
                break
            time.sleep(READ_SECONDS)
        name = next(name for name in (*theirs, *mine) if theirs.get(name) != mine.get(name))
        how = "is not there" if name not in mine else "is another one"
        message = f"machine {machine} does not see the run directory of machine 0: {self._run.path / name} {how}"
        hint = "`output_dir` must be one directory that all machines see; `launch.shared_directory: false` gives each machine its own"
        return Problem("run-directory-not-shared", message, hint=hint)

    def held(self, progress: Callable[[int], object], *, compares: bool = True) -> tuple[Held, ...] | None:  # noqa: ARG002
        """Return None: what is here is not of this machine alone. The arguments are those of `OwnDirectory`."""
        return None


class OwnDirectory:
    """The run directory of this machine, if each has its own (`launch.shared_directory: false`).

    The first machine sends the small files that decide the run through the channel, as an archive.
    """

    def __init__(self, run: RunDir, folder: Path, *, digests: bool, install: Callable[[RunDir], Problem | None] | None = None) -> None:
        """`folder`: where the channel finds or leaves archives. `digests`: compare those of checkpoints. `install`: write this machine's
        files from those of the first, on a machine other than that."""
        self._run, self._folder, self._digests, self._install = run, folder, digests, install
        self._installed: str | None = None
        """Name of the archive from which the files here are."""

    def offer(self) -> dict[str, str]:
        """Make an archive of the files of the run for the other machines. Returns how the channel names it."""
        names = ["recipe.yaml", "recipe.json", "data.json", "launch.json", "resume.json", "plan.json", "environment.json"]
        names += [f"model/{name}" for name in [*list_files(self._run.model), MANIFEST_NAME]]
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in names:
                if (self._run.path / name).exists():
                    archive.writestr(zipfile.ZipInfo(name), (self._run.path / name).read_bytes(), zipfile.ZIP_DEFLATED)
        raw = buffer.getvalue()
        name = digest(raw, size=16)
        write_file(self._folder / name, raw, private=True)
        return {ARCHIVE: name, ARCHIVE_BYTES: str(len(raw))}

    def take(self, machine: int, offered: Offered) -> Problem | None:
        """Wait for the archive of the first machine, and write this machine's files from it."""
        deadline = time.monotonic() + ARCHIVE_SECONDS
        while time.monotonic() < deadline:
            theirs = offered()
            if theirs is None:
                return None
            name = str(theirs.get(ARCHIVE))
            if name == self._installed:
                return None
            if ARCHIVE in theirs and (self._folder / name).exists():
                problem = self._unpack(self._folder / name)
                self._installed = name if problem is None else None
                return problem
            time.sleep(READ_SECONDS)
        message = f"machine {machine} has not received the files of the run within {format_seconds(ARCHIVE_SECONDS)}"
        return Problem("run-files-missing", message, hint="see the network between the machines")

    def _unpack(self, path: Path) -> Problem | None:
        assert self._install is not None, "only the first machine installs nothing"
        raw = path.read_bytes()
        received = RunDir(self._folder / "received")
        shutil.rmtree(received.path, ignore_errors=True)
        try:
            if digest(raw, size=16) != path.name:
                raise ValueError("its digest differs")
            with zipfile.ZipFile(io.BytesIO(raw)) as archive:
                if sum(sizes := [info.file_size for info in archive.infolist()]) > LARGEST_ARCHIVE_BYTES:
                    raise ValueError(f"its {len(sizes):,} files have {sum(sizes):,} bytes")
                for name in archive.namelist():
                    if not is_inside(name) or not name.removeprefix("model/"):
                        raise ValueError(f"it has a file {name[:80]!r}")
                    target = received.path / name
                    DISK.mkdir(target.parent)
                    with archive.open(name) as file:  # `archive.read` unpacks a whole file before it compares sizes
                        write_file(target, file.read(LARGEST_ARCHIVE_BYTES), private=True)
        except (ValueError, zipfile.BadZipFile) as error:
            return Problem("run-files-missing", f"the files of the run that machine 0 has sent are damaged: {error}")
        return self._install(received)

    def held(self, progress: Callable[[int], object], *, compares: bool = True) -> tuple[Held, ...] | None:
        """Return what this machine has of each checkpoint. `compares`: digests, if the recipe wants that."""
        return tuple(held_checkpoints(self._run, digests=self._digests and compares, progress=progress))


def combined(ended: Verdict, elsewhere: Sequence[Verdict]) -> Verdict:
    """Return `ended` with the cause of the end on any machine, and the largest step."""
    every = [ended, *elsewhere]
    failure = next((each for each in every if each.problem is not None and each.problem.code not in ECHO_CODES), None)
    cause = failure or next((each for each in every if each.is_stop), ended)
    step = max(each.step for each in every)
    return replace(ended, exit_code=cause.exit_code, reason=cause.reason, step=step, problem=cause.problem)


def verdict_of(error: BaseException) -> Verdict:
    """Return how a command ends that raised before or between launches."""
    if isinstance(error, KeyboardInterrupt):
        return Verdict(ExitCode.INTERRUPTED, ExitReason.INTERRUPTED, 0)
    if not isinstance(error, FsdpTuneError):
        return Verdict(ExitCode.FAILED, ExitReason.FAILED, 0, Problem("machine-failed", f"{type(error).__name__}: {error}"))
    if error.exit_code is ExitCode.PREEMPTED:  # a scheduler's signal
        return Verdict(ExitCode.PREEMPTED, ExitReason.PREEMPTED, 0)
    return Verdict(error.exit_code, ExitReason.FAILED, 0, error.problems[0])


def before_launch(ended: Verdict | None) -> Verdict | None:
    """Return how the first machine ended the run before any rank started, as another machine reports it."""
    if ended is None or ended.problem is None:
        return ended
    return replace(ended, problem=replace(ended.problem, code="machine-failed", message=f"machine 0: {ended.problem.message}"))


def started_again(first: MachineReport) -> Problem:
    host = f" ({first.identity.host})" if first.identity is not None else ""
    hint = "start this machine's command again, too; it then joins the new one"
    return Problem("machine-lost", f"machine 0{host} is lost: its command was started again", hint=hint)
