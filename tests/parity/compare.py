"""Relative deviations of a run from the reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_tune.rehearsal.parity.plain_loop import Trajectory
from fsdp_tune.run.directory import RunDir
from tests.parity import runs

# What issue and documentation promise; fp32 runs are measured at about a hundredth of it.
LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-5
PARAMETER_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Deviation:
    """Largest relative deviations of a run from the reference."""

    loss: float
    drift: float
    """Mean signed relative deviation of the loss: a bug pulls to one side, rounding does not."""
    grad_norm: float
    parameters: float
    """Norm of the difference over the norm of the reference's update, all parameters together."""
    worst_parameter: float
    """The same for the worst single tensor."""
    worst_name: str
    eval_loss: float

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.1e} (mean {self.drift:+.0e})  grad norm {self.grad_norm:.1e}  "
            f"parameters {self.parameters:.1e} (worst {self.worst_parameter:.1e})  eval loss "
            f"{self.eval_loss:.1e}"
        )

    def row(self, section: str, name: object) -> dict[str, str]:
        """A line of the report."""
        return {
            "section": section,
            "case": str(name),
            "loss": f"{self.loss:.1e}",
            "mean": f"{self.drift:+.0e}",
            "grad norm": f"{self.grad_norm:.1e}",
            "parameters": f"{self.parameters:.1e}",
            "worst tensor": f"{self.worst_parameter:.1e}",
            "eval loss": f"{self.eval_loss:.1e}",
        }

    @property
    def is_within_fp32(self) -> bool:
        return (
            max(self.loss, self.eval_loss) <= LOSS_TOLERANCE
            and self.grad_norm <= NORM_TOLERANCE
            and max(self.parameters, self.worst_parameter) <= PARAMETER_TOLERANCE
        )


def relative(value: float, reference: float) -> float:
    return (value - reference) / abs(reference) if math.isfinite(value) else math.inf


def deviation(run: RunDir, reference: Trajectory) -> Deviation:
    """Reads metrics.jsonl and the last checkpoint of a finished run; AssertionError where steps are missing
    or double."""
    lines = runs.loss_lines(run)
    assert [line["step"] for line in lines] == list(range(1, len(reference.losses) + 1))
    assert [line["supervised_tokens"] for line in lines] == reference.supervised_tokens, (
        "supervised tokens of the steps"
    )
    for line, rate in zip(lines, reference.learning_rates, strict=True):
        assert math.isclose(line["learning_rate"], rate, rel_tol=1e-12, abs_tol=1e-18), (
            line["step"],
            line["learning_rate"],
            rate,
        )
    losses = [relative(float(line["loss"]), true) for line, true in zip(lines, reference.losses, strict=True)]
    norms = [
        relative(float(line["grad_norm"]), true)
        for line, true in zip(lines, reference.grad_norms, strict=True)
    ]
    evals = [line["eval_loss"] for line in runs.lines(run) if "eval_loss" in line]
    return Deviation(
        loss=max(map(abs, losses)),
        drift=sum(losses) / len(losses),
        grad_norm=max(map(abs, norms)),
        eval_loss=abs(relative(evals[-1], reference.eval_loss)),
        **_of_parameters(runs.saved_parameters(run, len(lines)), reference),
    )


@dataclass(frozen=True)
class Spread:
    """Root mean square of the relative deviations over the steps; of the parameters as in Deviation."""

    loss: float
    grad_norm: float
    parameters: float

    def row(self, section: str, name: object, one_device: Spread) -> dict[str, str]:
        return {
            "section": section,
            "case": str(name),
            "loss": f"{self.loss:.1e}",
            "loss of one device": f"{one_device.loss:.1e}",
            "grad norm": f"{self.grad_norm:.1e}",
            "grad norm of one device": f"{one_device.grad_norm:.1e}",
            "parameters": f"{self.parameters:.1e}",
            "parameters of one device": f"{one_device.parameters:.1e}",
        }


def spread(run: Trajectory, true: Trajectory, *, skipped: frozenset[int] = frozenset()) -> Spread:
    """How far `run` scatters around `true`; a skipped step has no gradient norm."""
    assert run.supervised_tokens == true.supervised_tokens

    def rms(values: list[float], others: list[float]) -> float:
        return math.sqrt(
            sum(relative(value, other) ** 2 for value, other in zip(values, others, strict=True))
            / len(values)
        )

    parameters = _of_parameters(run.final, true)["parameters"]
    norms, true_norms = (
        [n for step, n in enumerate(some.grad_norms, start=1) if step not in skipped] for some in (run, true)
    )
    return Spread(rms(run.losses, true.losses), rms(norms, true_norms), parameters)


def _of_parameters(saved: dict[str, torch.Tensor], reference: Trajectory) -> dict[str, Any]:
    """Deviations of the parameters from the reference's, relative to how far the reference moved them."""
    assert saved.keys() == reference.final.keys()
    for name, true in reference.final.items():
        assert saved[name].shape == true.shape, (
            f"{name} is saved as {list(saved[name].shape)}, of {list(true.shape)}"
        )
    squares: dict[str, tuple[float, float]] = {}
    for name, true in reference.final.items():
        difference, update = (
            saved[name].double() - true.double(),
            true.double() - reference.initial[name].double(),
        )
        squares[name] = (float(difference.square().sum()), float(update.square().sum()))
        if name.replace(".base_layer", "").endswith("c_attn.bias"):
            squares[name] = _without_keys(difference, update)
    ratios = {name: math.sqrt(off / moved) for name, (off, moved) in squares.items()}
    worst = max(ratios, key=lambda name: ratios[name])
    total = math.sqrt(sum(off for off, _ in squares.values()) / sum(moved for _, moved in squares.values()))
    return {"parameters": total, "worst_parameter": ratios[worst], "worst_name": worst}


def _without_keys(difference: torch.Tensor, update: torch.Tensor) -> tuple[float, float]:
    """GPT-2 keeps query, key and value biases in one tensor. A key's bias shifts all scores of a query alike,
    so its gradient is zero but for rounding, and Adam divides the rounding by its own size: what becomes of
    it is noise on any device."""
    third = len(update) // 3
    kept = [index for index in range(len(update)) if not third <= index < 2 * third]
    return float(difference[kept].square().sum()), float(update[kept].square().sum())
