"""Synchronisations with the device in a step, each of which waits until its queue is empty; micro-batches
must not add any."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from tests.parity import runs
from tests.parity.bench import Bench
from tests.parity.cases import Case

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__")
"""Ways to read a tensor as a number on the host. On an accelerator each waits for the device."""


def count_synchronisations(path: str, plant: Sequence[str]) -> dict[str, Any]:
    """Run the worker on a rank, and add to its outcome how often each step synchronised, in Python (`READS`)
    or in C++ (a local scalar)."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from fsdp_tune.worker.trainer import FsdpTrainer

    counts: Counter[str] = Counter()
    steps: list[Counter[str]] = []

    class Scalars(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (
                torch.ops.aten._local_scalar_dense.default,
                torch.ops.aten.nonzero.default,
                torch.ops.aten.masked_select.default,
            ):
                counts[str(func)] += 1
            return func(*args, **(kwargs or {}))

    def counted(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(self, *args, **kwargs)

        return patch.object(torch.Tensor, name, read)

    get_batch_samples = FsdpTrainer.get_batch_samples

    def at_the_start(self: Any, *arguments: Any) -> Any:
        steps.append(Counter(counts))
        return get_batch_samples(self, *arguments)

    @contextmanager
    def planted() -> Any:
        original = FsdpTrainer._forward_backward

        def forward_backward(self: Any, *arguments: Any) -> Any:
            loss = original(self, *arguments)
            for name in plant:
                getattr(loss, name)()
            return loss

        with patch.object(FsdpTrainer, "_forward_backward", forward_backward):
            yield

    with ExitStack() as stack:
        for each in (
            *map(counted, READS),
            patch.object(FsdpTrainer, "get_batch_samples", at_the_start),
            Scalars(),
        ):
            stack.enter_context(each)
        if plant:
            stack.enter_context(planted())
        outcome = runs.run_worker(path)
    return outcome | {"counts": [dict(after - before) for before, after in itertools.pairwise(steps)]}


def synchronisations(
    bench: Bench, accumulation: int, plant: Sequence[str] = (), *, packed: bool = False
) -> dict[str, int]:
    """Synchronisations of one step between two metrics lines."""
    case = Case(ranks=1, accumulation=accumulation, packed=packed)
    quiet = {
        "max_steps": 5,
        "logging_steps": 1000,
        "eval_strategy": "no",
        "save_strategy": "no",
        "witness": "first",
    }
    recipe = case.recipe(str(bench.model(case.architecture)))
    run = bench.written_run(runs.merged(recipe, {"training": quiet}), packed=packed)
    [outcome] = bench.on_ranks.run(1, count_synchronisations, str(run.path), plant)
    assert outcome["exit_reason"] == "finished", outcome["traceback"]
    every: list[dict[str, int]] = outcome["counts"]
    assert every[2] == every[3], "a step is like the one before, once the first update has been witnessed"
    return every[3]


@pytest.mark.ranks
@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_device_synchronisations_do_not_grow_with_accumulation(bench: Bench, packed: bool) -> None:
    once, four_times = (synchronisations(bench, accumulation, packed=packed) for accumulation in (1, 4))
    assert once == four_times
    assert "__bool__" not in once, "whether the norm is finite is read a step later, from host memory"


@pytest.mark.ranks
def test_synchronisation_in_a_micro_batch_is_detected(bench: Bench) -> None:
    found = synchronisations(bench, 4, ("item", "cpu"))
    assert (found["item"] >= 4, found["cpu"] >= 4) == (True, True)
