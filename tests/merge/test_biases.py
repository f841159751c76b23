"""Biases of zeros that old AutoGPTQ wrote next to the codes of layers without one are left out of a base."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.merge.lora import biases
from fsdp_tune.merge.lora.biases import without_foreign_biases

OWNERS = ("layers.0.q_proj.", "layers.0.o_proj.", "layers.0.mlp.experts.1.up_proj.", "norm.")
"""Of the base: the first three have codes, the last a weight as it is."""


class StandIn:
    """In place of the child that lists the parameters of the class."""

    started = 0

    def __init__(self, answer: dict[str, Any] | str) -> None:
        self._answer = answer

    def __call__(self, mode: str, _folder: Path) -> StandIn:
        assert mode == "names"
        self.started += 1
        return self

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None: ...

    def answer(self) -> dict[str, Any] | str:
        return self._answer


@pytest.fixture
def values(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The value of the elements of each bias, 0 unless a test sets it."""
    found: dict[str, float] = {}
    monkeypatch.setattr(
        biases, "read_in_full", lambda tensor, _scratch: np.full(4, found.get(tensor.name, 0.0), np.float16)
    )
    return found


def base(*, with_biases: bool = True) -> Any:
    ends = ("weight", "bias") if with_biases else ("weight",)
    return {
        f"{owner}{end}": SimpleNamespace(
            name=f"{owner}{end}", encoded=object() if end == "weight" and owner != "norm." else None
        )
        for owner in OWNERS
        for end in ends
    }


def kept(monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any] | str) -> list[str]:
    """Return the biases that are left in the base."""
    monkeypatch.setattr(biases, "Child", StandIn(answer))
    return [name for name in without_foreign_biases(base(), Path("base")) if name.endswith("bias")]


def parameters(*names: str) -> dict[str, Any]:
    return {"parameters": {name: [4] for name in names}}


OWN = ("layers.0.q_proj.weight", "layers.0.q_proj.bias", "layers.0.o_proj.weight", "norm.weight")


@pytest.mark.usefixtures("values")
def test_bias_that_the_class_lacks_is_dropped_and_its_own_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias of the norm, which has no codes, is not AutoGPTQ's: the comparison of a merge reports it."""
    experts = "layers.0.mlp.experts.1.up_proj.bias"
    assert kept(monkeypatch, parameters(*OWN)) == ["layers.0.q_proj.bias", experts, "norm.bias"]


@pytest.mark.usefixtures("values")
def test_biases_of_experts_are_dropped_if_their_stack_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers stacks experts: their own names are none of its parameters."""
    stack, experts = "layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.1.up_proj.bias"
    assert experts not in kept(monkeypatch, parameters(*OWN, stack))
    assert experts in kept(monkeypatch, parameters(*OWN, stack, f"{stack}_bias"))


def test_bias_with_values_is_refused_and_named(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, float]
) -> None:
    values["layers.0.q_proj.bias"] = 1.0
    assert "layers.0.q_proj.bias" in kept(monkeypatch, parameters(*OWN)), "the class has it"
    values["layers.0.o_proj.bias"] = 0.25
    with pytest.raises(
        FsdpTuneError, match=r"`layers\.0\.o_proj\.bias` is a bias of a quantised layer"
    ) as caught:
        kept(monkeypatch, parameters(*OWN))
    assert (caught.value.problems[0].code, caught.value.problems[0].where.source) == (
        "merge-adapter-base",
        "base",
    )
    assert "--base MODEL" in str(caught.value.problems[0].hint)


@pytest.mark.usefixtures("values")
def test_nothing_is_dropped_from_a_base_whose_class_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(kept(monkeypatch, "ValueError: no such class")) == len(OWNERS)


def test_class_is_not_asked_for_without_such_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    child = StandIn(parameters(*OWN))
    monkeypatch.setattr(biases, "Child", child)
    given = base(with_biases=False)
    assert without_foreign_biases(given, Path("base")) == given
    assert child.started == 0
