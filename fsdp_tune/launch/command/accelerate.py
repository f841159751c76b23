"""Build the exact command and environment that start the ranks of one machine, without relying on defaults.

Variables left over from another job would change the stack silently (Accelerate reads RANK, PMI_RANK and
FSDP_*; torchrun reads PET_*), so they are removed and named in `launch.json`.

How `accelerate launch` 1.15 reads command and environment (accelerate/commands/launch.py):
- `_validate_launch_command` reads the user's default config file unless `--config_file` is given, and uses a
  given file only for what the command line leaves unset. So both are given and agree.
- `launch_command` reaches `multi_gpu_launcher`, the only one that spawns ranks (through
  torch.distributed.run), for `args.use_fsdp and not args.cpu`, whatever the device: on CPU `--use_fsdp`
  spawns, `--cpu` falls through to `simple_launcher`, which starts one process. NO_SHARD (plain DDP) therefore
  starts with `--use_fsdp` too; the worker sets the variables of the libraries
  (`recipe.fsdp_arguments.environment`) before it imports them.
- `_filter_args` builds torchrun's arguments from torchrun's own parser, whose defaults come from PET_*
  variables. That is the only way to set what accelerate has no option for: PET_SIGNALS_TO_HANDLE (torch's
  launch_agent overwrites TORCHELASTIC_SIGNALS_TO_HANDLE), PET_RDZV_ENDPOINT, PET_RDZV_ID, PET_LOCAL_ADDR.
  torch's LaunchConfig reads TORCH_ELASTIC_SHUTDOWN_TIMEOUT from 2.12 on; 2.11 kills ranks 30 s after a signal
  (`env` reports it).
- One machine uses the c10d rendezvous on 127.0.0.1: port 0 chooses and binds in one call, so that two runs
  never collide. Several machines use the static one, which keeps `--machine-rank` the order of the ranks.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_tune.core.errors import usage_error
from fsdp_tune.core.secrets import mask_text, masked
from fsdp_tune.core.signals import without_ignored
from fsdp_tune.launch.command.extra_arguments import check_extra
from fsdp_tune.launch.command.inherited import as_text, clean, masked_variables, recorded_variables
from fsdp_tune.launch.machines.route import Address, Route, interface_settings, route_to
from fsdp_tune.recipe.fsdp_arguments import environment as library_environment
from fsdp_tune.recipe.rules.launch import variables_to_allow
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.early_start import EarlyStart
from fsdp_tune.run.manifest import digest

LAUNCHER_MODULE = "accelerate.commands.launch"
DEFAULT_MULTI_MACHINE_PORT = 29500
# A save after a signal may take long; the supervisor, not torchrun's agent, ends ranks that hang.
AGENT_SHUTDOWN_SECONDS = 7 * 24 * 3600
SIGNALS_TO_HANDLE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
LOOPBACK = "127.0.0.1"
FIRST_MACHINE = "MASTER_ADDR"
"""Variable with the address of the first machine, which operators of Kubernetes set."""
EARLY = "--early"
"""Argument of the worker module before a directory of `run.launch_files`."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The launch on this machine. `env` is the complete environment of the launcher; `settings` is what this
    tool added to it."""

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
    first_machine: Address | None = None
    """Of a run over several machines."""
    route: Route | None = None
    """To the first machine; its interface is that of gloo and NCCL unless the user has set another. None on a
    single machine."""

    @property
    def has_all_ranks(self) -> bool:
        """Whether all ranks of the run are on this machine."""
        return len(self.ranks) == self.world_size

    @property
    def launcher_log(self) -> Path:
        """The log of the launcher: one for each machine, since machines may share the directory."""
        return (
            self.run.launcher_log
            if self.machine_rank == 0
            else self.run.logs / f"launcher-{self.machine_rank:02d}.log"
        )

    @property
    def screen_log(self) -> Path:
        """The file with the lines that this machine's command prints."""
        return self.run.logs / (
            "train.log" if self.machine_rank == 0 else f"train-{self.machine_rank:02d}.log"
        )

    def early_argv(self, files: EarlyStart) -> list[str]:
        """Return the command of ranks that wait for the run directory, which does not exist yet."""
        *before, module, run = self.argv
        words = [
            str(files.accelerate_yaml) if word == str(self.run.accelerate_yaml) else word for word in before
        ]
        return [*words, module, EARLY, str(files.path), run]

    def to_json(self) -> dict[str, Any]:
        """Return the content of launch.json, with secrets masked."""
        return {
            "argv": [mask_text(word) for word in self.argv],
            "environment": {name: masked(name, value) for name, value in sorted(self.settings.items())},
            "inherited": recorded_variables(
                {name: value for name, value in self.env.items() if name not in self.settings}
            ),
            "removed": list(map(as_text, self.removed)),
            "allowed_variables": list(self.allowed_variables),
            "machine_rank": self.machine_rank,
            "world_size": self.world_size,
            "python": sys.executable,
        }

    def masked_variables(self) -> list[str]:
        """Return the inherited variables whose values launch.json masks as secrets."""
        return masked_variables(
            {name: value for name, value in self.env.items() if name not in self.settings}
        )

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
    """Return the launch of a resolved recipe.

    `inherited` is the environment to start from; None: that of this process. `unknown_address` replaces the
    address of the first machine where nothing is started and it is not known yet. Raises: usage error (exit
    2) if the recipe decides an argument or variable.
    """
    extra = check_extra(extra)
    machines = recipe.launch.num_machines
    check_machine_rank(machine_rank, machines)
    inherited = os.environ if inherited is None else inherited
    kept, removed = clean(inherited)
    address = main_process_address(recipe, inherited, unknown=unknown_address)
    if machines > 1 and inherited.get(FIRST_MACHINE) == address.ip:
        removed.remove(FIRST_MACHINE)  # it is of this job
    route = route_to(address.ip, address.port) if machines > 1 else None
    settings = (
        _allocator_settings(recipe, kept)
        | interface_settings(route, {*recipe.launch.env, *kept})
        | _settings(recipe, run, address)
    )
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
        first_machine=address if machines > 1 else None,
        route=route,
    )


def main_process_address(
    recipe: Recipe, environment: Mapping[str, str], *, unknown: str | None = None
) -> Address:
    """Return where the machine of rank 0 listens: for several machines, from the recipe or variables of
    Kubernetes or Slurm."""
    port = recipe.launch.main_process_port
    if recipe.launch.num_machines == 1:
        return Address(LOOPBACK, 0 if port == "auto" else port)
    ip = (
        recipe.launch.main_process_ip
        or environment.get(FIRST_MACHINE)
        or environment.get("SLURM_LAUNCH_NODE_IPADDR")
        or unknown
    )
    if not ip:
        raise usage_error(
            "no-main-process-ip",
            "several machines (`launch.num_machines`) need the address of the first one, and neither "
            "Kubernetes nor Slurm provides it",
            hint="set `launch.main_process_ip`, the same on every machine",
        )
    return Address(ip, DEFAULT_MULTI_MACHINE_PORT if port == "auto" else port)


def machine_rank_of(recipe: Recipe, given: int | None, environment: Mapping[str, str]) -> int:
    """Return `--machine-rank`, or the number of this node in a Slurm step. Raises: usage error (exit 2) if
    neither is known."""
    if given is not None:
        return given
    if recipe.launch.num_machines == 1:
        return 0
    if "SLURM_STEP_ID" in environment and environment.get("SLURM_NODEID", "").isdigit():
        return int(environment["SLURM_NODEID"])
    raise usage_error(
        "no-machine-rank",
        f"the recipe is for {recipe.launch.num_machines} machines, and the rank of this one is unknown",
        hint="pass `--machine-rank N`, 0 on the machine of `launch.main_process_ip`; inside `srun` it "
        "comes from Slurm",
    )


def check_machine_rank(machine_rank: int, machines: int) -> None:
    """Raises: usage error (exit 2) if no machine of the recipe has this number."""
    if not 0 <= machine_rank < machines:
        raise usage_error(
            "machine-rank-out-of-range",
            f"--machine-rank {machine_rank} is not one of 0 to {machines - 1} (`launch.num_machines: "
            f"{machines}`)",
        )


def _argv(
    recipe: Recipe, run: RunDir, address: Address, worker_module: str, machine_rank: int, extra: Sequence[str]
) -> tuple[str, ...]:
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
        "--max_restarts": 0,  # `launch.supervise.attempts` restarts the complete launch
        "--mixed_precision": "no",
        "--dynamo_backend": "no",
        "--num_cpu_threads_per_process": threads,
    }
    if not any(word.startswith(("--log_dir", "--log-dir", "--tee", "-t")) for word in extra):
        options["--log_dir"] = os.devnull  # otherwise torchrun leaves a directory in TMPDIR for each launch
    if recipe.launch.num_machines == 1 and not any(
        word.startswith(("--rdzv_conf", "--rdzv-conf")) for word in extra
    ):
        options["--rdzv_conf"] = (
            "is_host=1"  # otherwise an agent whose port is taken connects to the process that has it
        )
    words = [str(word) for pair in options.items() for word in pair]
    return (
        sys.executable,
        "-m",
        LAUNCHER_MODULE,
        "--use_fsdp",
        *words,
        *extra,
        "-m",
        worker_module,
        str(run.path),
    )


# Names of torch for the settings of the allocator. A value that is already set is kept.
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

EXPANDABLE_SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""They avoid fragmentation, and `plan` assumes them."""


def _allocator_settings(recipe: Recipe, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the setting of expandable segments for CUDA, unless the user has one."""
    if recipe.launch.device != "cuda" or any(
        name in recipe.launch.env or name in inherited for name in _ALLOCATOR_VARIABLES
    ):
        return {}
    return dict(EXPANDABLE_SEGMENTS)


def _settings(recipe: Recipe, run: RunDir, address: Address) -> dict[str, str]:
    settings = library_environment(recipe) | {
        "OMP_NUM_THREADS": str(recipe.launch.num_cpu_threads_per_process),
        "PET_SIGNALS_TO_HANDLE": ",".join(number.name for number in without_ignored(SIGNALS_TO_HANDLE)),
        # otherwise ranks import a `datasets.py` of the working directory instead of the library
        "PYTHONSAFEPATH": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(AGENT_SHUTDOWN_SECONDS),
        # torch 2.15 makes another implementation of NCCL groups by default, whose flight recorder and
        # time limits no run here has shown.
        "TORCH_DIST_USE_NCCL2": "0",
    }
    if recipe.launch.num_machines == 1:
        settings |= {
            "PET_RDZV_ENDPOINT": f"{address.ip}:{address.port}",
            "PET_RDZV_ID": digest(str(run.path)),
            "PET_LOCAL_ADDR": LOOPBACK,  # otherwise ranks get the host name, which may not resolve
            # otherwise the agent chooses a port for the ranks, which another process may take
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0",
        }
    # recipe.rules refuses variables that this tool sets; ours have precedence
    return recipe.launch.env | settings


def manual_commands(recipe: Recipe, run: RunDir) -> tuple[str, ...]:
    """Return the command lines that start a run directory written by `--no-start`; `N` stands for the
    machine's number."""
    path = shlex.quote(str(run.path))
    machines = nodes = ""
    if recipe.launch.num_machines > 1:
        address = main_process_address(recipe, os.environ, unknown="IP")
        ip, count = shlex.quote(address.ip), recipe.launch.num_machines
        machines = (
            f"--num_machines {count} --machine_rank N --main_process_ip {ip} --main_process_port "
            f"{address.port} "
        )
        nodes = f"--nnodes {count} --node-rank N --master-addr {ip} --master-port {address.port} "
    config = shlex.quote(str(run.accelerate_yaml))
    return (
        f"accelerate launch --config_file {config} --use_fsdp --num_processes {recipe.world_size} "
        f"{machines}-m fsdp_tune.worker {path}",
        f"torchrun {nodes}--nproc-per-node {recipe.local_world_size} -m fsdp_tune.worker {path}",
    )
