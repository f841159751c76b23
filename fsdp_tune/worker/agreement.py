"""Collective decisions: results, failures and stop requests of any rank reach all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

import torch
import torch.distributed as dist

from fsdp_tune.core.errors import FailedError, FsdpTuneError, Problem
from fsdp_tune.core.library_errors import as_os_error
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.records import ReadBack

T = TypeVar("T")


class RemoteError(FailedError):
    """Another rank failed in a collective action; its message is passed to every rank."""


def all_or_none(act: Callable[[], T], what: str, group: dist.ProcessGroup | None = None) -> T:
    """Run `act` on every rank and return its result. If it fails on any, every rank raises: a rank on which
    it failed its own error, the others a RemoteError with the first failed rank and its message."""
    result: T | None = None
    failure: BaseException | None = None
    try:
        result = act()
    except Exception as error:  # noqa: BLE001  every rank must learn of any error
        failure = error
    described = None if failure is None else _problem(failure)
    for rank, problem in enumerate(gather(described, group)):
        if problem is not None:
            if failure is not None:
                raise failure
            message = f"{what} failed on rank {rank}: {problem.message}"
            raise RemoteError(Problem(problem.code, message, problem.where, problem.hint, problem.ways_out))
    return result  # type: ignore[return-value]


def _problem(error: BaseException) -> Problem:
    if isinstance(error, FsdpTuneError):
        return error.problems[0]
    error = as_os_error(error)
    return Problem("failed", f"{type(error).__name__}: {error}")


def from_rank0(act: Callable[[], T], what: str, group: dist.ProcessGroup | None = None) -> T:
    """Run `act` on rank 0 and broadcast its result; a failure is raised on every rank."""
    value = all_or_none(lambda: act() if dist.get_rank() == 0 else None, what, group)
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]  # type: ignore[return-value]


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's value, by rank."""
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values  # type: ignore[return-value]


def stop_on(
    found: list[str], step: int, run: RunDir, report: Mapping[str, object] = MappingProxyType({})
) -> None:
    """Stop every rank if there is a difference; all of them give the same list. Rank 0 writes it to
    readback.json. Raises: FailedError."""
    if not found:
        return
    if dist.get_rank() == 0:
        ReadBack.complete(run.readback_json, witness={**report, "differences": found})
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    hint = "readback.json lists every difference; `--set training.witness=off` trains without these checks"
    raise FailedError(Problem("invariant-broken", f"step {step + 1}: {found[0]}{more}", hint=hint))


class StopVote:
    """A vote once a step, without waiting, on whether any rank should stop; all ranks read the result at the
    same step.

    The all-reduce of one integer (gloo, CPU) that a step posts is read at the end of the next one, so it
    costs no stall.
    """

    def __init__(self) -> None:
        self._tensor = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def exchange(self, mine: int) -> int:
        """Post this rank's code (0: continue) and return the largest code of any rank in the previous
        call."""
        answer = 0
        if self._work is not None:
            self._work.wait()
            answer = int(self._tensor.item())
        self._tensor = torch.full((1,), mine, dtype=torch.int32)
        self._work = dist.all_reduce(self._tensor, op=dist.ReduceOp.MAX, async_op=True)
        return answer

    def finish(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
