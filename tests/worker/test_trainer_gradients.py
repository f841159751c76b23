"""A step with non-finite gradients changes nothing, and is reported with its number and rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.optim.adamw import AdamW
from fsdp_tune.model.step import LossScale
from fsdp_tune.worker.step_checks import GradientGate
from fsdp_tune.worker.step_observer import LoggedStep


class Bench:
    """A linear layer, its optimizer, and a gate; `step` is what the Trainer does between two batches."""

    def __init__(
        self, kind: type[torch.optim.Optimizer] = AdamW, *, skip: bool = True, scale: LossScale | None = None
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)
        fused = {"fused": True} if kind is AdamW else {}
        self.optimizer = kind(self.model.parameters(), lr=0.1, weight_decay=0.1, **fused)  # type: ignore[call-arg]
        self.events: list[tuple[str, int]] = []
        metrics: Any = SimpleNamespace(event=lambda event: self.events.append((event.name, event.step)))
        self.gate = GradientGate(self.model, scale, skip, metrics, lambda batches: f"looked at {batches}")
        self.count = 0

    def step(self, worst: float = 0.0) -> torch.Tensor:
        self.count += 1
        torch.manual_seed(self.count)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.model.bias.grad[1] += worst  # type: ignore[index]
        norm = self.gate.pass_or_skip(self.count, 1.0, self.optimizer, [f"batch {self.count}"])  # type: ignore[list-item]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def everything(self) -> list[torch.Tensor]:
        states = [self.optimizer.state[parameter] for parameter in self.model.parameters()]
        return [
            tensor.clone()
            for tensor in (*self.model.parameters(), *(value for state in states for value in state.values()))
        ]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [AdamW, torch.optim.AdamW], ids=["decided on the device", "asked at once"])
def test_nonfinite_step_leaves_state_unchanged(worst: float, kind: type[torch.optim.Optimizer]) -> None:
    bench, spared = Bench(kind), Bench(kind)
    for each in (bench, spared):
        each.step()
    before = bench.everything()
    assert not torch.isfinite(bench.step(worst))
    assert same(bench.everything(), before), "parameters, moments and step counts"
    spared.count += 1
    for each in (bench, spared):
        each.step()
        each.gate.check_pending()
    assert same(bench.everything(), spared.everything())
    assert not same(bench.everything(), before)
    assert bench.events == [("step_skipped", 2)]
    assert (bench.gate.facts(LoggedStep(1)), spared.gate.facts(LoggedStep(1))) == ({"skipped_steps": 1}, {})


def test_nonfinite_first_step_is_handled() -> None:
    bench = Bench()
    weights = [parameter.clone() for parameter in bench.model.parameters()]
    bench.step(float("nan"))
    assert all(map(torch.equal, bench.model.parameters(), weights))
    bench.step()
    assert all(bool(torch.isfinite(tensor).all()) for tensor in bench.everything())


def test_nonfinite_error_names_step_and_rows_before_next_update() -> None:
    bench = Bench(skip=False)
    bench.step()
    before = bench.everything()
    bench.step(float("nan"))
    with pytest.raises(
        FsdpTuneError, match=r"step 2: the gradient norm is nan; looked at \['batch 2'\]"
    ) as caught:
        bench.step()
    assert int(caught.value.exit_code) == 4
    assert same(bench.everything(), before)


def test_gradient_check_completes_before_log_eval_or_save() -> None:
    bench = Bench(skip=False)
    bench.step(float("inf"))
    with pytest.raises(FsdpTuneError, match="step 1: the gradient norm is inf"):
        bench.gate.check_pending()
    bench.gate.check_pending()  # told once


def test_fp16_reads_the_norm_at_once_for_its_scale() -> None:
    bench = Bench(scale=LossScale(1024.0))
    bench.step()
    bench.step(float("inf"))
    assert bench.events == [("loss_scale_backed_off", 2)]
    assert bench.gate.facts(LoggedStep(1)) == {"loss_scale": 512.0, "skipped_steps": 1}
