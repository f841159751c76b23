"""Whether a recomputed layer computes again what its forward computed, by samples of its matrix products and
attention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from fsdp_tune.model.internals.torch_internals import observing_mode
from fsdp_tune.model.shard.selective_recompute import is_attention, products

_SAMPLED_ALONG_DIMENSION = 16


_ALLOWED = {torch.float32: 1e-3, torch.float64: 1e-3}


_ALLOWED_IN_HALF_PRECISION = 5e-2
"""Relative, of sampled values of a product. The same operands in the same kernel: only one that adds in any
order gives a difference."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """Some values of a product or of attention, in fp32."""

    name: str
    values: torch.Tensor
    allowed: float

    @classmethod
    def of(cls, op: Any, output: torch.Tensor) -> _Sample:
        some = tuple(slice(None, None, max(1, size // _SAMPLED_ALONG_DIMENSION)) for size in output.shape)
        allowed = _ALLOWED.get(output.dtype, _ALLOWED_IN_HALF_PRECISION)
        return cls(op.overloadpacket.__name__, output[some].to(torch.float32, copy=True), allowed)


def _sampling(samples: list[_Sample]) -> contextlib.AbstractContextManager[object]:
    """Take samples of the matrix products and attention that run in the context, or are answered by a mode
    around it."""

    def see(op: object, result: object) -> None:
        if op in products() or is_attention(op):
            output = result[0] if isinstance(result, tuple | list) else result
            if type(output) is torch.Tensor:
                samples.append(_Sample.of(op, output.detach()))

    return observing_mode(see_result=see)


class RecomputationCheck:
    """While it is entered, compares matrix products and attention of recomputed layers with those of their
    forward.

    A difference means that gradients are not those of the loss: a kernel wrote over a value that is kept for
    the backward (autograd counts no writes of Triton), a dropout mask was drawn differently, or an input had
    changed before it came back from the host.
    """

    entered: ClassVar[RecomputationCheck | None] = None

    def __init__(self) -> None:
        self._layers: list[tuple[str, list[_Sample], list[_Sample]]] = []

    def __enter__(self) -> Self:
        RecomputationCheck.entered = self
        return self

    def __exit__(self, *_: object) -> None:
        RecomputationCheck.entered = None

    def contexts(self, layer: str, inner: Callable[[], tuple[object, object]]) -> tuple[object, object]:
        """Return contexts of one forward of a layer and of its recomputation, within those of `inner`."""
        samples: tuple[list[_Sample], list[_Sample]] = [], []
        self._layers.append((layer, *samples))
        return tuple(
            nested(context, _sampling(found)) for context, found in zip(inner(), samples, strict=True)
        )  # type: ignore[return-value]

    def differences(self) -> list[str]:
        """Return a sentence for each product that differs. Waits for the device once."""
        # it may end earlier
        pairs = [
            (layer, *pair) for layer, first, again in self._layers for pair in zip(first, again, strict=False)
        ]
        if not pairs:
            return []
        shares = torch.stack([_distance(one.values, other.values) for _, one, other in pairs]).tolist()
        return [
            f"`{layer}`: `{one.name}` is {share:.1%} off when the layer is recomputed"
            for (layer, one, _), share in zip(pairs, shares, strict=True)
            if share > one.allowed
        ]


@contextlib.contextmanager
def nested(outer: Any, inner: Any) -> Iterator[None]:
    """Enter `inner` within `outer`."""
    with outer, inner:
        yield


def _distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the distance relative to the norm; 1 for other shapes, and if only one of the two has a value
    that is not finite; NaN if both have."""
    if one.shape != other.shape:
        return one.new_ones(())
    distance = (other - one).norm() / one.norm().clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where(one.isfinite().all() == other.isfinite().all(), distance, 1.0)
