"""This process: its rank, its environment, its log file, its process group and device."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from fsdp_tune.core.atomic import PRIVATE_MODE
from fsdp_tune.core.devices import lost_devices, this_machine
from fsdp_tune.core.errors import usage_error
from fsdp_tune.core.parent_death import LAUNCHER_PID
from fsdp_tune.core.units import parse_seconds
from fsdp_tune.launch.command.accelerate import manual_commands
from fsdp_tune.recipe.device_choice import cpu_way_out
from fsdp_tune.recipe.fsdp_arguments import OWNED_PREFIXES, environment
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.launch_files import train_command

COLLECTIVE_MARGIN_SECONDS = 300
"""Beyond `launch.hang_timeout`, for ranks that were started manually."""


SUPERVISED_DAYS = 7
"""torch's own limit runs on while a job is suspended. Where there is a supervisor, which does not count that
time, it alone judges."""


LAZY_GLOO_RANKS = 128
"""From here on gloo connects two ranks when they first exchange something (ProcessGroupGloo.hpp, torch 2.11).

Else each process group connects each rank with all others: 16 million connections of 4,096 ranks, of which
collectives use ten a rank."""


@dataclass(frozen=True, slots=True)
class Rank:
    index: int
    local_index: int
    world_size: int

    @property
    def is_first(self) -> bool:
        return self.index == 0


def read_rank(recipe: Recipe, run: RunDir) -> Rank:
    """Read rank and world size from the launcher. Raises: FsdpTuneError (exit 2) with the right command if
    they do not fit the recipe."""
    try:
        rank = Rank(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]))
    except (KeyError, ValueError) as error:
        raise usage_error(
            "not-launched",
            "the worker must be started by a launcher, one process a device",
            ways_out=manual_commands(recipe, run),
        ) from error
    if rank.world_size != recipe.world_size:
        raise usage_error(
            "world-size-mismatch",
            f"the run in {run.path} is for {recipe.world_size} processes (launch.num_processes), and "
            f"{rank.world_size} were started",
            ways_out=manual_commands(recipe, run),
        )
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        raise usage_error(
            "restarted-by-torchrun",
            "torchrun restarted the ranks (`--max-restarts`), and they would start where this launch "
            "started, not where it failed",
            ways_out=(
                f"`{train_command(run, '--resume', 'auto')}` continues from the newest checkpoint",
                "`launch.max_restarts` does that automatically",
            ),
        )
    return rank


def set_library_environment(recipe: Recipe) -> None:
    """Remove variables that a launcher or shell left for the libraries, and set those of the recipe, before
    they are imported.

    `accelerate launch --use_fsdp` exports `FSDP_CPU_RAM_EFFICIENT_LOADING=true` and other variables by
    default.
    """
    for name in [name for name in os.environ if name.startswith(OWNED_PREFIXES)]:
        del os.environ[name]
    os.environ.update(environment(recipe))


def set_environment(recipe: Recipe, run: RunDir) -> None:
    """Set the variables of the libraries and those that name a directory of the run, which must exist."""
    set_library_environment(recipe)
    os.environ.update(flight_recorder_variables(run))
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(run.tensorboard)  # TrainingArguments 5 has no logging_dir


FLIGHT_ENTRIES = 2000


FLIGHT_FILE_PREFIX = "rank_"  # torchfrtrace reads the rank after the underscore


def flight_recorder_variables(run: RunDir) -> dict[str, str]:
    """Return what torch reads when the first process group is made. Makes the directory, since torch's writer
    does not."""
    run.flight_recorder.mkdir(parents=True, exist_ok=True)
    return {
        "TORCH_FR_BUFFER_SIZE": str(FLIGHT_ENTRIES),
        "TORCH_FR_DUMP_TEMP_FILE": str(run.flight_recorder / FLIGHT_FILE_PREFIX),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


class LogStream(io.TextIOWrapper):
    """Lines of a log. Those that the disk refuses are lost, or written once it takes them: none may end a
    training."""

    def __init__(self, descriptor: int, *, closefd: bool) -> None:
        file = io.BufferedWriter(io.FileIO(descriptor, "wb", closefd=closefd))
        super().__init__(file, encoding="utf-8", errors="backslashreplace", line_buffering=True)

    def write(self, text: str, /) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def redirect_output(run: RunDir, rank: int) -> IO[str]:
    """Redirect stdout and stderr of this process, C++ included, to its log. Returns the launcher's stdout."""
    run.logs.mkdir(parents=True, exist_ok=True)
    log = _open_log(run.rank_log(rank))
    screen = LogStream(os.dup(1), closefd=True)
    _write_to(log)
    return screen


def append_output(path: Path) -> None:
    """Append what this process writes to stdout and stderr from now on to a private file in an existing
    directory."""
    _write_to(_open_log(path))


def _open_log(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, PRIVATE_MODE)


def _write_to(log: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout, sys.stderr = (LogStream(number, closefd=False) for number in (1, 2))


def raise_open_file_limit(wanted: int) -> None:
    """Raise the limit of open files to `wanted` if it may: gloo connects each rank with all others for each
    group, and hundreds of ranks exceed the usual 1,024."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def connect_lazily(world_size: int) -> None:
    """Let gloo connect ranks on use if they are many, unless the environment has its variable already."""
    if world_size >= LAZY_GLOO_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def start_process_group(recipe: Recipe, rank: Rank) -> str:
    """Join the process group, with gloo for CPU tensors in addition to the backend of the device. Returns the
    device type.

    The group exists before Accelerate's PartialState, which would choose its backend from `FSDP_*` variables.
    """
    import torch
    import torch.distributed as dist

    raise_open_file_limit(recipe.open_files_needed)
    connect_lazily(recipe.world_size)
    device_type = recipe.launch.device
    timeout = _collective_limit(recipe)
    if device_type == "cpu":
        dist.init_process_group("gloo", timeout=timeout)
        return device_type
    module = getattr(torch, device_type)
    count = module.device_count() if module.is_available() else 0
    if rank.local_index >= count:
        reports = f"; the driver reports {', '.join(lost)}" if (lost := lost_devices()) else ""
        raise usage_error(
            "device-missing",
            f"rank {rank.index} needs {device_type}:{rank.local_index}, and torch sees {count} of "
            f"them{reports}",
            ways_out=(
                cpu_way_out(recipe, this_machine("cpu")),
                # the number of all machines; without a device on this one, none helps
                *([f"--set launch.num_processes={count * recipe.launch.num_machines}"] if count else []),
            ),
        )
    module.set_device(rank.local_index)
    backend = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl"}[device_type]
    dist.init_process_group(
        f"cpu:gloo,{device_type}:{backend}",
        timeout=timeout,
        device_id=torch.device(device_type, rank.local_index),
    )
    return device_type


def _collective_limit(recipe: Recipe) -> timedelta:
    """Return how long a collective may take. A rank in one cannot tell for which rank it waits; the
    supervisor can, so it reports first."""
    if os.environ.get(LAUNCHER_PID):
        return timedelta(days=SUPERVISED_DAYS)
    return timedelta(seconds=parse_seconds(recipe.launch.hang_timeout) + COLLECTIVE_MARGIN_SECONDS)


def time_limits_seconds(group: object) -> list[float]:
    """Return how long a collective of the group may take, by backend."""
    from fsdp_tune.model.internals import torch_internals as internals

    return [internals.BACKEND_TIMEOUT.of(backend.options).total_seconds() for backend in _backends(group)]


def share_time_limit(groups: Iterable[object]) -> None:
    """Give process groups the time limit of the default group; torch gives groups of a mesh 10 or 30 minutes
    regardless of it."""
    import torch.distributed as dist

    from fsdp_tune.model.internals import torch_internals as internals

    limit = timedelta(seconds=max(time_limits_seconds(dist.group.WORLD)))
    for group in groups:
        for backend in _backends(group):
            internals.SET_TIMEOUT.of(backend)(limit)


def _backends(group: object) -> list[Any]:
    """Those whose limit torch lets us read and set."""
    from fsdp_tune.model.internals import torch_internals as internals

    of_device = internals.BACKEND.of(group)
    backends = {
        id(backend): backend for device in internals.DEVICE_TYPES.of(group) if (backend := of_device(device))
    }
    return [backend for backend in backends.values() if backend.name() in ("gloo", "nccl")]


def configure_accelerate(recipe: Recipe) -> None:
    """Prepare Accelerate's state for FSDP on any device.

    Accelerate takes its FSDP branch only for the `MULTI_<accelerator>` types; on CPU ranks it would silently
    train with DDP. Creating a PartialState first is the documented way to override this.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    on_cpu = recipe.launch.device == "cpu"
    state = PartialState(cpu=on_cpu)
    if on_cpu and recipe.is_sharded:
        state.distributed_type = DistributedType.MULTI_GPU
