"""The exact command and environment that start the ranks of one machine: everything explicit, nothing taken from defaults.

What `accelerate launch` 1.15 does with them (accelerate/commands/launch.py), and hence what is passed:
- `_validate_launch_command` reads the user's default config file unless `--config_file` is given, and takes from a given
  one only what the command line leaves open. So both are given and agree.
- `launch_command` reaches `multi_gpu_launcher`, the only one that spawns ranks (through torch.distributed.run), for
  `args.use_fsdp and not args.cpu`, whatever the device: on CPU `--use_fsdp` spawns, `--cpu` falls through to
  `simple_launcher`, which starts one process. NO_SHARD (plain DDP) therefore starts with `--use_fsdp` too; the worker
  sets what the libraries read (`fsdp.environment`) before it imports them.
- `_filter_args` builds torchrun's arguments from torchrun's own parser, whose defaults come from PET_* variables. That is
  the one way to what accelerate has no option for: PET_SIGNALS_TO_HANDLE (torch's launch_agent overwrites
  TORCHELASTIC_SIGNALS_TO_HANDLE), PET_RDZV_ENDPOINT, PET_RDZV_ID, PET_LOCAL_ADDR. torch's LaunchConfig reads
  TORCH_ELASTIC_SHUTDOWN_TIMEOUT from 2.12 on; 2.11 kills ranks 30 s after a signal (`env` says so).
- One machine uses the c10d rendezvous on 127.0.0.1: port 0 binds and picks in one act, so that two runs never meet.
  Several machines use the static one, which keeps `--machine-rank` the order of the ranks.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_tune.core.errors import failed_error, usage_error
from fsdp_tune.core.processes import heeded
from fsdp_tune.core.secrets import mask_text, masked
from fsdp_tune.launch.command.accelerate_arguments import check_extra
from fsdp_tune.launch.command.rank_environment import clean, telling, unwritten
from fsdp_tune.recipe.fsdp_arguments import environment as library_environment
from fsdp_tune.recipe.rules.launch import variables_to_allow
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.run.directory import RunDir

LAUNCHER_MODULE = "accelerate.commands.launch"
DEFAULT_MULTI_MACHINE_PORT = 29500
# A save after a signal takes as long as it moves bytes; the supervisor, not torchrun's agent, ends ranks that stand still.
AGENT_SHUTDOWN_SECONDS = 7 * 24 * 3600
SIGNALS_TO_HANDLE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What is started on this machine. `env` is the whole environment of the launcher; `settings` what we added to it."""

    argv: tuple[str, ...]
    env: dict[str, str]
    settings: dict[str, str]
    removed: tuple[str, ...]
    run: RunDir
    ranks: range
    """Global ranks of this machine."""
    machine_rank: int
    world_size: int
    allowed_variables: tuple[str, ...] = ()
    """Names in `launch.env` that the command line had to allow (`--allow-env`)."""

    @property
    def is_whole(self) -> bool:
        """Whether all ranks of the run are on this machine."""
        return len(self.ranks) == self.world_size

    @property
    def launcher_log(self) -> Path:
        """Machines may share the directory, and each has a launcher of its own."""
        return self.run.launcher_log if self.machine_rank == 0 else self.run.logs / f"launcher-{self.machine_rank:02d}.log"

    @property
    def screen_log(self) -> Path:
        """The file with the lines that this machine's command prints."""
        return self.run.logs / ("train.log" if self.machine_rank == 0 else f"train-{self.machine_rank:02d}.log")

    def to_json(self) -> dict[str, Any]:
        """The content of launch.json; no secret is in it."""
        return {
            "argv": [mask_text(word) for word in self.argv],
            "environment": {name: masked(name, value) for name, value in sorted(self.settings.items())},
            "inherited": telling({name: value for name, value in self.env.items() if name not in self.settings}),
            "removed": list(self.removed),
            "allowed_variables": list(self.allowed_variables),
            "machine_rank": self.machine_rank,
            "world_size": self.world_size,
            "python": sys.executable,
        }

    def unwritten_variables(self) -> list[str]:
        """Inherited variables that launch.json lists without their values, since these look like secrets."""
        return unwritten({name: value for name, value in self.env.items() if name not in self.settings})

    def quoted_argv(self) -> list[str]:
        return [shlex.quote(mask_text(word)) for word in self.argv]


def launch_plan(
    recipe: Recipe,
    run: RunDir,
    *,
    worker_module: str = "fsdp_tune.worker",
    machine_rank: int = 0,
    extra: Sequence[str] = (),
    inherited: Mapping[str, str] | None = None,
    unknown_address: str | None = None,
) -> LaunchPlan:
    """The launch of a resolved recipe. FsdpTuneError (exit 2) where an argument or variable is owned by the recipe.

    `inherited` is the environment to start from; None: this process's own. `unknown_address` stands in for the first
    machine's where nothing is started here and nobody knows it yet.
    """
    extra = check_extra(extra)
    machines = recipe.launch.num_machines
    if not 0 <= machine_rank < machines:
        raise usage_error(
            "machine-rank-out-of-range",
            f"--machine-rank {machine_rank} is not one of 0 to {machines - 1} (`launch.num_machines: {machines}`)",
        )
    inherited = os.environ if inherited is None else inherited
    kept, removed = clean(inherited)
    address = main_process_address(recipe, inherited, unknown=unknown_address)
    settings = _allocator_settings(recipe, kept) | _settings(recipe, run, address)
    return LaunchPlan(
        argv=_argv(recipe, run, address, worker_module, machine_rank, extra),
        env=kept | settings,
        settings=settings,
        removed=tuple(removed),
        run=run,
        ranks=range(machine_rank * recipe.local_world_size, (machine_rank + 1) * recipe.local_world_size),
        machine_rank=machine_rank,
        world_size=recipe.world_size,
        allowed_variables=tuple(variables_to_allow(recipe.launch.env)),
    )


@dataclass(frozen=True, slots=True)
class Address:
    ip: str
    port: int
    """0: whichever is free, chosen when it is bound."""


def main_process_address(recipe: Recipe, environment: Mapping[str, str], *, unknown: str | None = None) -> Address:
    """Where rank 0's machine listens. Over several machines the recipe says it, or Kubernetes' or Slurm's own variables."""
    port = recipe.launch.main_process_port
    if recipe.launch.num_machines == 1:
        return Address(LOOPBACK, 0 if port == "auto" else port)
    ip = recipe.launch.main_process_ip or environment.get("MASTER_ADDR") or environment.get("SLURM_LAUNCH_NODE_IPADDR") or unknown
    if not ip:
        raise usage_error(
            "no-main-process-ip",
            "several machines (`launch.num_machines`) need the address of the first one, and neither Kubernetes nor Slurm gives it",
            hint="set `launch.main_process_ip`, the same on every machine",
        )
    return Address(ip, DEFAULT_MULTI_MACHINE_PORT if port == "auto" else port)


def machine_rank_of(recipe: Recipe, given: int | None, environment: Mapping[str, str]) -> int:
    """`--machine-rank`, or Slurm's number of this node inside a step. Several machines and no number: exit 2."""
    if given is not None:
        return given
    if recipe.launch.num_machines == 1:
        return 0
    if "SLURM_STEP_ID" in environment and environment.get("SLURM_NODEID", "").isdigit():
        return int(environment["SLURM_NODEID"])
    raise usage_error(
        "no-machine-rank",
        f"the recipe is for {recipe.launch.num_machines} machines, and nothing says which of them this is",
        hint="give `--machine-rank N`, 0 on the machine of `launch.main_process_ip`; inside `srun` it is Slurm's own",
    )


def _argv(recipe: Recipe, run: RunDir, address: Address, worker_module: str, machine_rank: int, extra: Sequence[str]) -> tuple[str, ...]:
    threads = recipe.launch.num_cpu_threads_per_process
    assert threads != "auto", "the recipe is not resolved"
    options = {
        "--config_file": run.accelerate_yaml,
        "--num_processes": recipe.world_size,
        "--num_machines": recipe.launch.num_machines,
        "--machine_rank": machine_rank,
        "--main_process_ip": address.ip,
        "--main_process_port": address.port,
        "--rdzv_backend": "c10d" if recipe.launch.num_machines == 1 else "static",
        "--max_restarts": 0,  # `launch.supervise.attempts` restarts the whole launch; its reasons are in `launch.supervise.restart`
        "--mixed_precision": "no",
        "--dynamo_backend": "no",
        "--num_cpu_threads_per_process": threads,
    }
    words = [str(word) for pair in options.items() for word in pair]
    return (sys.executable, "-m", LAUNCHER_MODULE, "--use_fsdp", *words, *extra, "-m", worker_module, str(run.path))


# Names that torch has had for the allocator's settings; who sets one of them decides.
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def _allocator_settings(recipe: Recipe, inherited: Mapping[str, str]) -> dict[str, str]:
    """Memory in pages that can be mapped anew hardly fragments; `plan` counts with it. Costs nothing on CUDA, unknown elsewhere."""
    if recipe.launch.device != "cuda" or any(name in recipe.launch.env or name in inherited for name in _ALLOCATOR_VARIABLES):
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def _settings(recipe: Recipe, run: RunDir, address: Address) -> dict[str, str]:
    settings = library_environment(recipe) | {
        "OMP_NUM_THREADS": str(recipe.launch.num_cpu_threads_per_process),
        "PET_SIGNALS_TO_HANDLE": ",".join(number.name for number in heeded(SIGNALS_TO_HANDLE)),
        "PYTHONSAFEPATH": "1",  # else a `datasets.py` in the user's directory is imported by ranks instead of the library
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(AGENT_SHUTDOWN_SECONDS),
    }
    if recipe.launch.num_machines == 1:
        settings |= {
            "PET_RDZV_ENDPOINT": f"{address.ip}:{address.port}",
            "PET_RDZV_ID": hashlib.blake2b(str(run.path).encode(), digest_size=8).hexdigest(),
            "PET_LOCAL_ADDR": LOOPBACK,  # else ranks are told the host's name, which need not resolve
        }
    return recipe.launch.env | settings  # recipe.rules refuses variables that are ours; should one slip through, ours stands


def check_port(recipe: Recipe, machine_rank: int = 0) -> None:
    """A port that the recipe names must be free on the machine that is to listen; else exit 1 at once, not after a time-out."""
    port = recipe.launch.main_process_port
    if port == "auto" or machine_rank != 0:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise failed_error(
                "port-taken",
                f"port {port} (`launch.main_process_port`) cannot be used: {error.strerror}",
                hint="name another, or `auto`, which takes a free one",
            ) from None


def by_hand(recipe: Recipe, run: RunDir) -> tuple[str, ...]:
    """Return the command lines that start a run directory written by `--no-start`; `N` stands for the machine's number."""
    path = shlex.quote(str(run.path))
    machines = nodes = ""
    if recipe.launch.num_machines > 1:
        address = main_process_address(recipe, os.environ, unknown="IP")
        ip, count = shlex.quote(address.ip), recipe.launch.num_machines
        machines = f"--num_machines {count} --machine_rank N --main_process_ip {ip} --main_process_port {address.port} "
        nodes = f"--nnodes {count} --node-rank N --master-addr {ip} --master-port {address.port} "
    config = shlex.quote(str(run.accelerate_yaml))
    return (
        f"accelerate launch --config_file {config} --use_fsdp --num_processes {recipe.world_size} {machines}-m fsdp_tune.worker {path}",
        f"torchrun {nodes}--nproc-per-node {recipe.local_world_size} -m fsdp_tune.worker {path}",
    )
