"""`on_nonfinite: skip` leaves out one update and nothing else, and no step starts with gathered units."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fsdp_tune.run.directory import RunDir
from tests.cuda.devices import on_devices
from tests.parity import runs
from tests.parity.bench import Bench
from tests.parity.cases import Case

BAD_STEP = 3
STEPS = 4
CASES = [
    Case("gpt2-dropout"),
    pytest.param(Case("gpt2-dropout", strategy="SHARD_GRAD_OP"), marks=pytest.mark.slow),
    pytest.param(Case("gpt2-dropout", strategy="NO_SHARD"), marks=pytest.mark.slow),
    pytest.param(Case("gpt2-dropout", strategy="HYBRID_SHARD", ranks=4), marks=pytest.mark.slow),
    pytest.param(Case("gpt2-dropout", strategy="HYBRID_SHARD_ZERO2", ranks=4), marks=pytest.mark.slow),
    pytest.param(Case("gpt2-dropout", ranks=4, fsdp=(("reshard_after_forward", 2),)), marks=pytest.mark.slow),
    pytest.param(
        Case("gpt2-dropout", training=(("optim_args", "state_dtype=bf16"),)), marks=pytest.mark.slow
    ),
]


def train(path: str, *, nonfinite: bool) -> dict[str, Any]:
    """On a rank: the worker. At `BAD_STEP` odd ranks have a NaN gradient, or all ranks leave out
    `optimizer.step`."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from fsdp_tune.model.shard.gathered import gathered_units, units_of
    from fsdp_tune.worker.step_checks import GradientGate
    from fsdp_tune.worker.trainer import FsdpTrainer

    get_batch_samples, pass_or_skip = FsdpTrainer.get_batch_samples, GradientGate.pass_or_skip
    gathered: list[list[str]] = []

    def at_step_begin(self: Any, *arguments: Any) -> Any:
        gathered.append(gathered_units(units_of(self.wrapped)))
        return get_batch_samples(self, *arguments)

    def before_update(self: Any, step: int, max_norm: Any, optimizer: Any, batches: Any) -> Any:
        # Gradients are reduced already: replicas (all ranks under DDP, ranks 1 and 3 of a 2x2 mesh) have the
        # same ones.
        if (
            step == BAD_STEP
            and nonfinite
            and (dist.get_rank() % 2 == 1 or isinstance(self.wrapped, DistributedDataParallel))
        ):
            local = max((p.grad for p in self._trained), key=lambda grad: grad.numel())
            (local.to_local() if hasattr(local, "to_local") else local).view(-1)[0] = torch.nan
        if step == BAD_STEP and not nonfinite:
            optimizer.step = lambda *_: optimizer.__dict__.pop("step")
        return pass_or_skip(self, step, max_norm, optimizer, batches)

    with ExitStack() as stack:
        stack.enter_context(patch.object(FsdpTrainer, "get_batch_samples", at_step_begin))
        stack.enter_context(patch.object(GradientGate, "pass_or_skip", before_update))
        outcome = runs.run_worker(path)
    return outcome | {"gathered": gathered}


def trained(bench: Bench, case: Case, *, nonfinite: bool) -> RunDir:
    # A line at the bad step would report it before the next backward, which is the easier case.
    short = {
        "logging_steps": 2,
        "warmup_steps": 0,
        "max_steps": STEPS,
        "save_steps": STEPS,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "on_nonfinite": "skip",
        "witness": "first",  # a later one would stop the run whose update is left out
    }
    recipe = runs.merged(case.recipe(str(bench.model(case.architecture))), {"training": short})
    run = bench.written_run(recipe)
    for outcome in bench.on_ranks.run(
        case.ranks, train_with_nan if nonfinite else train_without_update, str(run.path)
    ):
        assert outcome["exit_reason"] == "finished", outcome["traceback"]
        assert outcome["gathered"] == [[]] * STEPS, "units gathered when a step begins"
    return run


def train_with_nan(path: str) -> dict[str, Any]:
    return train(path, nonfinite=True)


def train_without_update(path: str) -> dict[str, Any]:
    return train(path, nonfinite=False)


@on_devices
@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES, ids=str)
def test_run_with_skipped_step_equals_run_without_that_update(case: Case, bench: Bench) -> None:
    skipped, left_out = (trained(bench, case, nonfinite=each) for each in (True, False))
    assert [line["step"] for line in runs.lines(skipped) if line.get("event") == "step_skipped"] == [BAD_STEP]
    keys = ("step", "epoch", "loss", "learning_rate", "tokens")
    curves = [[[line[key] for key in keys] for line in runs.loss_lines(run)] for run in (skipped, left_out)]
    assert curves[0] == curves[1]
    assert len({row[2] for row in curves[0]}) == STEPS / 2
    norms = [[line["grad_norm"] for line in runs.loss_lines(run)] for run in (skipped, left_out)]
    assert norms[0] == norms[1]
    one, other = (runs.saved_parameters(run, STEPS) for run in (skipped, left_out))
    assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())
    assert all(after > before for before, after in itertools.pairwise(row[1] for row in curves[0]))


def train_with_nan_at_first(path: str) -> dict[str, Any]:
    with patch(f"{__name__}.BAD_STEP", 1):
        return train(path, nonfinite=True)


@on_devices
@pytest.mark.ranks
@pytest.mark.parametrize(
    "optimizer",
    [
        {"optim_args": "state_dtype=bf16"},
        pytest.param({"optim": "sgd", "optim_args": "momentum=0.9"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_save_before_first_update_keeps_optimizer_state(optimizer: dict[str, str], bench: Bench) -> None:
    """torch makes state for a checkpoint by a step without gradients, which would count."""

    def new_run(*, save_steps: int, probes: bool) -> RunDir:
        training = {
            "warmup_steps": 0,
            "max_steps": 3,
            "eval_strategy": "no",
            "on_nonfinite": "skip",
            "save_steps": save_steps,
        }
        changes: dict[str, Any] = {"training": training | optimizer, "checkpoint": {"probe": probes}}
        return bench.written_run(runs.merged(Case().recipe(str(bench.model("llama"))), changes))

    never, early, resumed = (
        new_run(save_steps=3, probes=False),
        new_run(save_steps=1, probes=True),
        new_run(save_steps=3, probes=False),
    )
    for run in (never, early):
        runs.train(bench.on_ranks, run, 2, train_with_nan_at_first)
    runs.resume_from(resumed, early, 1)
    runs.train(bench.on_ranks, resumed, 2)
    expected = runs.saved_parameters(never, 3)
    for run in (early, resumed):
        found = runs.saved_parameters(run, 3)
        assert all(torch.equal(expected[name], found[name]) for name in expected)
