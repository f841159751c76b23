"""Rank functions: a tiny sharded model whose tensors encode the step at which they were saved, and real
checkpoints."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_tune.run.directory import RunDir, latest_checkpoint
from fsdp_tune.run.rotation import remove_leftovers
from fsdp_tune.worker.agreement import from_rank0
from fsdp_tune.worker.checkpoint import restore, state
from fsdp_tune.worker.checkpoint.save import Checkpointer, Saved, trainer_state_facts
from fsdp_tune.worker.checkpoint.state import Live
from fsdp_tune.worker.observe.heartbeat import HeartbeatWriter
from tests.faults.disk import Fault, die, injected, short_writes, shown_late
from tests.faults.sabotage import SABOTAGE
from tests.parity import runs
from tests.ranks import rank_device

FIRST, SECOND, THIRD = 10, 20, 30


def make_live(*, full: bool = False) -> Live:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
    model.to(rank_device())
    mesh = init_device_mesh(rank_device(), (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return Live(model, optimizer, full=full)


def _values(live: Live) -> dict[str, Any]:
    """Every tensor that a checkpoint holds."""
    assert live.optimizer is not None
    found: dict[str, Any] = dict(live.wrapped.named_parameters())
    for name, parameter in live.wrapped.named_parameters():
        state_of: dict[str, Any] = live.optimizer.state[parameter]
        found |= {f"{name}.{kind}": state_of[kind] for kind in sorted(state_of)}
    return found


def _local(value: Any) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def set_step(live: Live, step: int) -> None:
    """Makes every number a function of the step, of its tensor and of its place in the whole tensor."""
    with torch.no_grad():
        for index, value in enumerate(_values(live).values()):
            whole = (
                torch.arange(value.numel(), dtype=torch.float32, device=value.device) / 7 + index + step
            ).view(value.shape)
            if isinstance(value, DTensor):
                whole = distribute_tensor(
                    whole, value.device_mesh, value.placements, src_data_rank=None
                ).to_local()
            _local(value).copy_(whole)


def is_at(live: Live, step: int) -> bool:
    wanted = make_live()
    set_step(wanted, step)
    pairs = zip(_values(live).values(), _values(wanted).values(), strict=True)
    return all(torch.equal(_local(one), _local(other)) for one, other in pairs)


def _checkpointer(
    path: Path, live: Live, *, keep: int | None, asynchronous: bool, saved: list[Saved]
) -> Checkpointer:
    facts = trainer_state_facts(dist.get_world_size(), [dist.get_world_size()], "0" * 64)
    return Checkpointer(
        RunDir(path),
        live,
        rank_device(),
        asynchronous,
        keep,
        facts,
        saved.append,
        HeartbeatWriter(RunDir(path), 0),
    )


def _save(
    path: Path,
    step: int,
    *,
    keep: int | None = 1,
    asynchronous: bool = False,
    full: bool = False,
    live: Live | None = None,
    around: contextlib.AbstractContextManager[None] | None = None,
) -> Saved:
    live = live or make_live(full=full)
    set_step(live, step)
    saved: list[Saved] = []
    checkpointer = _checkpointer(path, live, keep=keep, asynchronous=asynchronous, saved=saved)
    torch.manual_seed(step)
    with around or contextlib.nullcontext():
        checkpointer.save(
            step,
            json.dumps({"global_step": step}),
            {"sums": [float(step), 1.0, 2.0], "loss_scale": None},
            best_step=None,
        )
        checkpointer.wait()
    return saved[-1]


def save(path: Path, step: int, full: bool = False, keep: int | None = 1) -> None:
    error = _save(path, step, full=full, keep=keep).error
    if error is not None:
        raise error


def save_counting(
    path: Path, step: int, asynchronous: bool = False, full: bool = False
) -> list[tuple[str, str]]:
    """One good save; this rank's operations in order, as (operation, file)."""
    with injected(None) as log:
        error = _save(path, step, asynchronous=asynchronous, full=full).error
    assert error is None, error
    return [(operation.name, operation.path.name) for operation in log]


def save_logged(path: Path, step: int) -> list[Any]:
    with injected(None) as log:
        error = _save(path, step).error
    assert error is None, error
    return log


def save_killed(
    path: Path, step: int, rank: int, fault: Fault, asynchronous: bool = False, full: bool = False
) -> None:
    """A save in which one rank dies at one operation."""
    with injected(fault) if dist.get_rank() == rank else contextlib.nullcontext():
        error = _save(path, step, asynchronous=asynchronous, full=full).error
    if error is not None:
        raise error


def save_on_broken_disks(cases: list[tuple[Path, int, Fault]], step: int) -> list[str | None]:
    """A save for each (run, rank, fault): the message of its failure, None where it was saved; then a good
    one of the next step."""
    live, told = make_live(), []
    for path, rank, fault in cases:
        with injected(fault) if dist.get_rank() == rank else contextlib.nullcontext():
            error = _save(path, step, live=live).error
        if error is not None:
            told.append(error.problems[0].message)
        else:
            told.append(None if loads(path, step) else "saved, but not what was to be saved")
        dist.barrier()
        again = _save(path, step + 10, live=live, keep=2).error
        if again is not None:
            raise again
    return told


def save_with_short_writes(path: Path, step: int) -> None:
    with short_writes():
        save(path, step)


def save_limited(cases: list[tuple[Path, int]], step: int, rank: int) -> list[str | None]:
    """A save for each (run, limit), where `rank` may write no larger file: a limit that no Python hook can
    pass by."""
    live, told = make_live(), list[str | None]()
    for path, limit_bytes in cases:
        around = _file_size_limit(limit_bytes) if dist.get_rank() == rank else None
        error = _save(path, step, live=live, around=around).error
        told.append(None if error is None else error.problems[0].message)
        dist.barrier()
    return told


@contextlib.contextmanager
def _file_size_limit(limit_bytes: int) -> Iterator[None]:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def come_back(paths: list[Path]) -> list[tuple[int | None, bool]]:
    """As a restarted run does, for each directory: step of the checkpoint that all ranks loaded, and whether
    every tensor and generator is that of the step; then the leftovers go and a further save must be good."""
    found: list[tuple[int | None, bool]] = []
    for path in paths:
        run = RunDir(path)
        newest = from_rank0(lambda run=run: latest_checkpoint(run, digests=True)[0], "choosing")
        live = make_live()
        set_step(live, 99)
        if dist.get_rank() == 0:
            remove_leftovers(run)
        if newest is None:
            found.append((None, True))
        else:
            chosen = restore.agreed_checkpoint(str(newest.path), digests=True)
            assert chosen is not None
            state.load_model(live, chosen.path)
            state.load_optimizer(live, chosen.path)
            restore.restore_rng(str(chosen.path), 0, chosen.step, rank_device())
            drawn = torch.rand(1, device=rank_device())
            torch.manual_seed(chosen.step)
            same = torch.equal(drawn, torch.rand(1, device=rank_device())) and is_at(live, chosen.step)
            own = restore.restore_own(str(chosen.path))
            found.append((chosen.step, same and own["sums"][0] == float(chosen.step)))
        save(path, THIRD, keep=None)
    return found


def come_back_late(checkpoint: Path, late: int, seconds: float, by_name: bool, wait_seconds: float) -> str:
    """As `come_back`, to a checkpoint that rank `late` sees so much later; or the code of its error."""
    from fsdp_tune.core.errors import FsdpTuneError

    live = make_live()
    set_step(live, 99)
    hiding = (
        shown_late(checkpoint, seconds, by_name=by_name)
        if dist.get_rank() == late
        else contextlib.nullcontext()
    )
    with hiding:
        try:
            chosen = restore.agreed_checkpoint(str(checkpoint), digests=True, wait_seconds=wait_seconds)
        except FsdpTuneError as error:
            return error.problems[0].code
        assert chosen is not None
        state.load_model(live, chosen.path)
        state.load_optimizer(live, chosen.path)
        restore.restore_rng(str(chosen.path), 0, chosen.step, rank_device())
        drawn, own = torch.rand(1, device=rank_device()), restore.restore_own(str(chosen.path))
    torch.manual_seed(chosen.step)
    same = (
        torch.equal(drawn, torch.rand(1, device=rank_device()))
        and is_at(live, chosen.step)
        and own["sums"][0] == float(chosen.step)
    )
    return "the same" if same else "something else"


def come_back_half_blind(checkpoint: Path, blind: int) -> str:
    """Code of the error on this rank, where only rank `blind` cannot read what is there."""
    from fsdp_tune.core.errors import FsdpTuneError
    from fsdp_tune.run.manifest import Damage

    unreadable = patch(
        "fsdp_tune.worker.checkpoint.restore.damage",
        lambda *arguments, **options: [Damage("weights", "cannot be read")],
    )
    try:
        with unreadable if dist.get_rank() == blind else contextlib.nullcontext():
            restore.agreed_checkpoint(str(checkpoint), digests=True)
    except FsdpTuneError as error:
        return error.problems[0].code
    return "accepted"


def loads(path: Path, step: int) -> bool:
    """Whether every tensor of a checkpoint comes into this world as it was."""
    live = make_live()
    set_step(live, 99)
    checkpoint = RunDir(path).checkpoint(step)
    state.load_model(live, checkpoint)
    state.load_optimizer(live, checkpoint)
    return is_at(live, step)


def many_saves(path: Path, saves: int) -> list[tuple[int, int, int]]:
    """(open files, threads, resident KiB) of this rank after the first tenth of many saves, and after the
    last."""
    live, seen = make_live(), []
    saved: list[Saved] = []
    checkpointer = _checkpointer(path, live, keep=2, asynchronous=True, saved=saved)
    for number in range(1, saves + 1):
        checkpointer.save(number, "{}", {"sums": [0.0, 0.0, 0.0], "loss_scale": None}, best_step=None)
        if number in (saves // 10, saves):
            checkpointer.wait()
            with open("/proc/self/statm") as file:
                resident = int(file.read().split()[1]) * 4
            seen.append((len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), resident))
    assert all(one.error is None for one in saved)
    return seen


def drawn_after_coming_back(path: Path) -> float:
    """The first random number of this rank after it came back to a checkpoint of another number of ranks."""
    restore.restore_rng(str(path), 7, ranks_step(path), rank_device())
    return float(torch.rand(1, device=rank_device()))


def ranks_step(path: Path) -> int:
    return int(path.name.rsplit("-", 1)[1])


PHASES = {
    "fetch": "get_batch_samples",
    "forward": "training_step",
    "reduce": "_clip_grad_norm",
    "log": "_log_line",
    "evaluate": "evaluate",
    "save": "_save_checkpoint",
}
SAMPLE = "sample"
"""The phase in which the ranks generate together."""


@dataclass(frozen=True)
class Happening:
    """A signal that a rank sends to itself: in a phase, when so many steps have been taken, `times` times,
    `apart` seconds apart."""

    rank: int
    phase: str
    step: int
    number: int = signal.SIGKILL
    times: int = 1
    apart: float = 0.005

    def __str__(self) -> str:
        return (
            f"{signal.Signals(self.number).name} of rank {self.rank} in {self.phase} after step {self.step}"
        )


def train(
    path: str,
    happenings: Sequence[Happening] = (),
    faults: Sequence[tuple[int, Fault]] = (),
    sabotage: Sequence[tuple[str, int, int]] = (),
) -> dict[str, Any]:
    """The real worker on this rank, with what is to happen to it: signals, faults of the disk by rank,
    (sabotage, rank, step)."""
    me = dist.get_rank()
    fault = next((fault for rank, fault in faults if rank == me), None)
    with contextlib.ExitStack() as stack:
        for happening in happenings:
            if happening.rank == me:
                stack.enter_context(_happening(happening))
        for name, rank, step in sabotage:
            if rank == me:
                stack.enter_context(SABOTAGE[name](step))
        if fault is not None:
            kill = die if fault.signal is None else functools.partial(os.kill, os.getpid(), fault.signal)
            stack.enter_context(injected(fault, kill))
        return runs.run_worker(path)


@contextlib.contextmanager
def _happening(happening: Happening) -> Iterator[None]:
    from fsdp_tune.worker.samples import Samples
    from fsdp_tune.worker.trainer import FsdpTrainer

    owner, name = (
        (Samples, "_generate") if happening.phase == SAMPLE else (FsdpTrainer, PHASES[happening.phase])
    )
    original, armed = getattr(owner, name), [True]

    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        trainer = self.trainer if owner is Samples else self
        if armed and trainer.state.global_step >= happening.step:
            armed.clear()
            for time_ in range(happening.times):
                time.sleep(happening.apart if time_ else 0.0)
                os.kill(os.getpid(), happening.number)
        return original(self, *arguments, **options)

    with patch.object(owner, name, method):
        yield
