"""What the ranks of a case do: a tiny sharded model whose every tensor tells the step it was saved at, and the real checkpoints."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_tune.run_dir import RunDir, latest_checkpoint
from fsdp_tune.worker import resume, state
from fsdp_tune.worker.agree import from_rank0
from fsdp_tune.worker.checkpoint import Checkpointer, Saved, trainer_state_facts
from fsdp_tune.worker.rotation import remove_leftovers
from fsdp_tune.worker.state import Live
from tests.faults.disk import Fault, injected, short_writes
from tests.parity import runs

FIRST, SECOND, THIRD = 10, 20, 30


def _live(*, full: bool = False) -> Live:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return Live(model, optimizer, full=full)


def _tensors(live: Live) -> dict[str, torch.Tensor]:
    """Every tensor that a checkpoint holds, as this rank's part."""
    assert live.optimizer is not None
    found: dict[str, Any] = dict(live.wrapped.named_parameters())
    for name, parameter in live.wrapped.named_parameters():
        state_of: dict[str, Any] = live.optimizer.state[parameter]
        found |= {f"{name}.{kind}": state_of[kind] for kind in sorted(state_of)}
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in found.items()}


def _set_step(live: Live, step: int) -> None:
    """Makes every number a function of the step, of its tensor and of its place."""
    with torch.no_grad():
        for index, tensor in enumerate(_tensors(live).values()):
            tensor.copy_((torch.arange(tensor.numel(), dtype=torch.float32) / 7 + index + step).view(tensor.shape))


def _is_at(live: Live, step: int) -> bool:
    wanted = _live()
    _set_step(wanted, step)
    return all(torch.equal(one, other) for one, other in zip(_tensors(live).values(), _tensors(wanted).values(), strict=True))


def _checkpointer(path: Path, live: Live, *, keep: int | None, asynchronous: bool, saved: list[Saved]) -> Checkpointer:
    facts = trainer_state_facts(dist.get_world_size(), [dist.get_world_size()], "0" * 64)
    return Checkpointer(RunDir(path), live, "cpu", asynchronous, keep, facts, saved.append)


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
    live = live or _live(full=full)
    _set_step(live, step)
    saved: list[Saved] = []
    checkpointer = _checkpointer(path, live, keep=keep, asynchronous=asynchronous, saved=saved)
    torch.manual_seed(step)
    with around or contextlib.nullcontext():
        checkpointer.save(step, json.dumps({"global_step": step}), {"sums": [float(step), 1.0, 2.0], "loss_scale": None})
        checkpointer.wait()
    return saved[-1]


def save(path: Path, step: int, full: bool = False, keep: int | None = 1) -> None:
    error = _save(path, step, full=full, keep=keep).error
    if error is not None:
        raise error


def save_counting(path: Path, step: int, asynchronous: bool = False, full: bool = False) -> list[tuple[str, str]]:
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


def save_killed(path: Path, step: int, rank: int, fault: Fault, asynchronous: bool = False, full: bool = False) -> None:
    """A save in which one rank dies at one operation."""
    with injected(fault) if dist.get_rank() == rank else contextlib.nullcontext():
        error = _save(path, step, asynchronous=asynchronous, full=full).error
    if error is not None:
        raise error


def save_on_broken_disks(cases: list[tuple[Path, int, Fault]], step: int) -> list[str | None]:
    """A save for each (run, rank, fault): the message of its failure, None where it was saved; then a good one of the next step."""
    live, told = _live(), []
    for path, rank, fault in cases:
        with injected(fault) if dist.get_rank() == rank else contextlib.nullcontext():
            error = _save(path, step, live=live).error
        told.append(None if error is None else error.problems[0].message)
        dist.barrier()
        again = _save(path, step + 10, live=live, keep=None).error
        if again is not None:
            raise again
    return told


def save_with_short_writes(path: Path, step: int) -> None:
    with short_writes():
        save(path, step)


def save_limited(path: Path, step: int, rank: int, limit_bytes: int) -> str | None:
    """A save where one rank may write no file larger than `limit_bytes`, a limit that no Python hook can pass by."""
    mine = dist.get_rank() == rank
    error = _save(path, step, around=_file_size_limit(limit_bytes) if mine else None).error
    return None if error is None else error.problems[0].message


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
    """As a restarted run does, for each directory: step of the checkpoint that all ranks loaded, and whether every tensor and
    generator is that of the step; then the leftovers go and a further save must be good."""
    found: list[tuple[int | None, bool]] = []
    for path in paths:
        run = RunDir(path)
        newest = from_rank0(lambda run=run: latest_checkpoint(run, digests=True)[0], "choosing")
        live = _live()
        _set_step(live, 99)
        if dist.get_rank() == 0:
            remove_leftovers(run)
        if newest is None:
            found.append((None, True))
        else:
            chosen = resume.agreed_checkpoint(str(newest.path), digests=True)
            assert chosen is not None
            state.load_model(live, chosen.path)
            state.load_optimizer(live, chosen.path)
            resume.restore_rng(str(chosen.path), 0, chosen.step, "cpu")
            drawn = torch.rand(1)
            torch.manual_seed(chosen.step)
            same = torch.equal(drawn, torch.rand(1)) and _is_at(live, chosen.step)
            own = resume.restore_own(str(chosen.path))
            found.append((chosen.step, same and own["sums"][0] == float(chosen.step)))
        save(path, THIRD, keep=None)
    return found


# --------------------------------------------------------------------------------------------------- the whole worker


def train(path: str, faults: dict[int, Fault] | None = None) -> dict[str, Any]:
    """The real worker on this rank; `faults` by rank count the operations on checkpoints alone."""
    fault = (faults or {}).get(dist.get_rank())
    with injected(fault) if fault is not None else contextlib.nullcontext():
        return runs.run_worker(path)


def train_killed_at(path: str, kills: dict[int, tuple[str, int]]) -> dict[str, Any]:
    """The real worker; rank r is killed by SIGKILL in a phase of a step: `kills[r] = (phase, step)`."""
    import os

    from fsdp_tune.worker.trainer import FsdpTrainer

    mine = kills.get(dist.get_rank())
    methods = {
        "fetch": "get_batch_samples",
        "forward": "training_step",
        "clip": "_clip_grad_norm",
        "log": "_log_line",
        "evaluate": "evaluate",
        "save": "_save_checkpoint",
    }
    if mine is not None:
        name = methods[mine[0]]
        original = getattr(FsdpTrainer, name)

        def dying(self: Any, *arguments: Any, **options: Any) -> Any:
            if self.state.global_step >= mine[1]:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
            return original(self, *arguments, **options)

        setattr(FsdpTrainer, name, dying)
    return runs.run_worker(path)
