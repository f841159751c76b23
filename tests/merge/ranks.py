"""Worlds of several ranks as threads of this process, with torch's own threaded process group: a save of 8
ranks takes 50 ms."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)


def run_ranks(world_size: int, function: Callable[[int], None]) -> None:
    """Calls `function(rank)` on every rank and raises what the first failing one raised."""
    if torch.__version__ < "2.12":
        pytest.skip("before torch 2.12 threads that use DTensors at once crash the process")
    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    ProcessLocalGroup.reset()
    store = dist.HashStore()
    failures: list[str] = []

    def rank_main(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            function(rank)
        except BaseException as error:  # noqa: BLE001  whatever ends one rank must end the others, not hang them
            failures.append(traceback.format_exc())
            ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world_size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        _uninstall_threaded_pg()
    assert not failures, failures[0]
