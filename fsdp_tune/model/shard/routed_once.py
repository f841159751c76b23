"""A recomputed layer with divided experts routes once: it chooses the experts that its forward chose, and
sends tokens the same way.

A recomputed router may round otherwise than in the forward (kernels whose order of sums varies), and two
experts of nearly equal score would change places: tokens would be sent elsewhere, and gradients would not be
those of the loss. So the result of the `topk` that chose the experts is kept with the route of the tokens.
The recomputed router takes its scores at the kept indices. Some routers choose groups of experts first and
set the scores of others to 0 (DeepSeek-V2): these results are kept too, or a kept index could have a weight
of 0. So is the result of a router that looks experts up in a table of integers (DeepSeek V4's first layers,
by token id).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fsdp_tune.core.errors import failed_error

_Route = TypeVar("_Route")


class RoutedOnce:
    """One forward of a layer and its recomputation."""

    entered: ClassVar[RoutedOnce | None] = None
    """That of the recomputed layer which is running, if any."""

    def __init__(self, layer: str) -> None:
        self._layer = layer
        self.chosen: list[torch.Tensor] = []
        """In the forward: the indices of each `topk`, and the integers of each lookup, so far."""
        self._kept: dict[int, torch.Tensor] = {}
        """Those that chose experts, or could have chosen their groups, by the number of their call."""
        self._routes: list[Any] = []
        self._calls = self._used = 0
        self._is_repeating = False

    def contexts(self) -> tuple[TorchFunctionMode, TorchFunctionMode]:
        """Return the contexts of the forward and of the recomputation (`context_fn` of torch's
        `checkpoint`)."""
        return _Choosing(self, repeats=False), _Choosing(self, repeats=True)

    def route(
        self, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, make: Callable[[], _Route]
    ) -> _Route:
        """Return the route of the chosen experts, as `make` returns it: in a recomputation that of the
        forward, without communication.

        Raises: failed error if no `topk` or lookup of the layer has returned these experts. One of weight 0
        may stand in for an index that is none of them: ZAYA's router has a class without an expert. Waits for
        the device in the forward.
        """
        if self._is_repeating:
            self._used += 1
            kept: _Route = self._routes[self._used - 1]
            return kept
        if not any(_are_equal(indices, top_k_index, top_k_weights) for indices in self.chosen):
            message = (
                f"`{self._layer}` chooses experts without `torch.topk`, and its recomputation could "
                "choose others"
            )
            raise failed_error(
                "experts-not-chosen-by-topk", message, hint="--set fsdp.activation_checkpointing=none"
            )
        # A token has at least as many experts as groups. Larger results are of something else, such as the
        # keys of sparse attention.
        self._kept |= {
            call: indices
            for call, indices in enumerate(self.chosen)
            if indices.numel() <= top_k_index.numel()
        }
        self._routes.append(made := make())
        return made

    def start(self, *, repeats: bool) -> None:
        self._is_repeating, self._calls, self._used = repeats, 0, 0

    def end(self) -> None:
        self.chosen.clear()  # those that are not kept may be large

    def choose(self, find: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the indices of the next `topk` or lookup of the layer, which `find` computes."""
        call, self._calls = self._calls, self._calls + 1
        if self._is_repeating and call in self._kept:
            return self._kept[call].clone()
        indices = find()
        if not self._is_repeating:
            self.chosen.append(indices.clone())  # the caller may write to its own
        return indices


def _are_equal(indices: torch.Tensor, others: torch.Tensor, weights: torch.Tensor) -> bool:
    """Return whether indices are those of others, where these have a weight."""
    if indices.numel() != others.numel():
        return False
    return bool(((indices.flatten() == others.flatten()) | (weights.flatten() == 0)).all())


class _Choosing(TorchFunctionMode):
    """Let `RoutedOnce` choose the indices of each `topk`, and gather the values at these, so that autograd
    saves the same tensors twice.

    It also chooses what a lookup of integers by integers returns.
    """

    def __init__(self, owner: RoutedOnce, *, repeats: bool) -> None:
        super().__init__()
        self._owner, self._repeats = owner, repeats
        self._outer: RoutedOnce | None = None

    def __enter__(self) -> Self:
        self._outer, RoutedOnce.entered = RoutedOnce.entered, self._owner
        self._owner.start(repeats=self._repeats)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._owner.end()
        RoutedOnce.entered = self._outer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__getitem__ and all(map(_is_integers, args)):
            return self._owner.choose(lambda: func(*args))
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **kwargs)
        arguments = _TOPK.bind(*args, **kwargs).arguments
        with torch.no_grad():
            indices = self._owner.choose(lambda: torch.topk(**arguments).indices)
        return torch.return_types.topk(
            (arguments["input"].gather(arguments.get("dim", -1), indices), indices)
        )


def _is_integers(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)


def _topk(input: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> None:  # noqa: FBT001, FBT002
    """The arguments of `torch.topk`, which has no signature."""


_TOPK = inspect.signature(_topk)


class _Reached(Exception):
    """Ends the forward of a block at its experts."""


def is_known_to_choose_otherwise(block: nn.Module, experts: nn.Module, width: int) -> bool:
    """Return whether a block on the meta device passes indices to its experts that have the shape of no
    `topk`.

    False also if the block takes other arguments than hidden states [1, tokens, width]; the first recomputed
    layer then decides.
    """
    found: list[bool] = []
    once = RoutedOnce("")

    def reached(_: torch.Tensor, indices: torch.Tensor, *__: object) -> None:
        found.append(any(each.shape == indices.shape for each in once.chosen))
        raise _Reached

    hidden = torch.empty(1, 3, width, device="meta", dtype=next(experts.parameters()).dtype)
    experts.forward = reached  # type: ignore[method-assign]
    try:
        with once.contexts()[0]:
            block(hidden)
    except Exception:  # noqa: BLE001  `_Reached`, or a block that does not run alone
        return found == [False]
    finally:
        del experts.forward
    return False
