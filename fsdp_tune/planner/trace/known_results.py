"""Results of operations under fake tensors, known from the sizes of their inputs.

The layers of a model, its micro-batches and the layouts of a ranking repeat the same operations on tensors of
the same sizes. torch computes each result again, and a lookup in its own cache takes almost as long. Here
torch computes an operation once for each description of its inputs. Afterwards its result is rebuilt: a new
tensor, a view of an input, or an input that was written in place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from fsdp_tune.model.internals import torch_internals as internals

_PLAIN = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
_LISTS = frozenset((list, tuple, torch.Size))
_NOT_FROM_SIZES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)


class _Tensor(NamedTuple):
    """A tensor that an operation returns."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int
    source: int = -1
    """Index of the input whose storage it shares; -1 for a storage of its own."""
    is_input: bool = False
    """Whether it is that input itself."""


class _Results(NamedTuple):
    kind: type | None
    """list or tuple; None for a single result."""
    each: tuple[_Tensor | int | None, ...]


class KnownResults:
    """Run operations inside a FakeTensorMode. Call it from a dispatch mode, where operations reach the fake
    mode next."""

    def __init__(self) -> None:
        self.computed = 0
        """Number of operations that torch computed."""
        self._known: dict[tuple[object, ...], _Results | None] = {}
        self._fake_tensor: Any = internals.FAKE_TENSOR.get()
        self._no_dispatch: Any = internals.NO_DISPATCH.get()

    def run(self, mode: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation, given the FakeTensorMode."""
        if func.namespace == "profiler":
            with self._no_dispatch():
                return func(*args, **kwargs)  # the start or end of a named range, without tensors
        inputs: list[Any] = []
        key = self._key(mode, func, args, kwargs, inputs)
        if key is None:
            return self._compute(func, args, kwargs)
        if key not in self._known:
            storages = [each.untyped_storage() for each in inputs]
            out = self._compute(func, args, kwargs)
            is_resized = self._key(mode, func, args, kwargs, []) != key  # a given `out` of another size
            self._known[key] = None if is_resized else self._results(mode, func, out, inputs, storages)
            return out
        known = self._known[key]
        if known is None:
            return self._compute(func, args, kwargs)
        made = [self._make(mode, each, inputs) if isinstance(each, _Tensor) else each for each in known.each]
        return made[0] if known.kind is None else known.kind(made)

    def _compute(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self.computed += 1
        return func(*args, **kwargs)

    def _key(
        self, mode: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any], inputs: list[Any]
    ) -> tuple[object, ...] | None:
        """Return what the results of an operation depend on, None if it has no description. Append its
        tensors to `inputs`."""
        parts: list[object] = [func, torch.get_default_dtype()]
        is_described = self._describe(mode, args, parts, inputs) and self._describe(
            mode, kwargs.items(), parts, inputs
        )
        return tuple(parts) if is_described else None

    def _describe(self, mode: Any, values: Iterable[Any], parts: list[object], inputs: list[Any]) -> bool:
        """Append to `parts` what a result depends on, and to `inputs` the tensors. Return False if a value
        has no description."""
        for value in values:
            kind = type(value)
            if kind is self._fake_tensor:
                if (
                    value.constant is not None
                    or value.fake_mode is not mode
                    or value.is_conj()
                    or value.is_neg()
                ):
                    return False
                parts += (
                    value.shape,
                    value.stride(),
                    value.dtype,
                    value.fake_device,
                    value.storage_offset(),
                    value.requires_grad,
                )
                inputs.append(value)
            elif kind in _PLAIN:
                parts += (kind, value)  # 1, 1.0 and True are equal
            elif kind in _LISTS:
                parts += (kind, len(value))
                if not self._describe(mode, value, parts, inputs):
                    return False
            else:
                return False
        return True

    def _results(
        self, mode: Any, func: Any, out: Any, inputs: list[Any], storages: list[Any]
    ) -> _Results | None:
        """Return what to rebuild; None if it depends on values, or would differ from `out`."""
        if func.namespace != "aten" or any(tag in func.tags for tag in _NOT_FROM_SIZES):
            return None
        kind = type(out) if type(out) in (list, tuple) else None
        outputs: list[Any] = [out] if kind is None else list(out)
        tensors = [each for each in outputs if type(each) is self._fake_tensor]
        if any(type(each) not in (self._fake_tensor, int, type(None)) for each in outputs):
            return None
        own = [each.untyped_storage() for each in tensors]
        new = {id(each) for each in own} - {id(each) for each in storages}
        if len(new) < sum(id(each) in new for each in own):
            return None  # two results share a new storage
        if any(_is_ambiguous(each, inputs, storages) for each in tensors):
            return None
        results = [
            _described(each, inputs, storages) if type(each) is self._fake_tensor else each
            for each in outputs
        ]
        for tensor, result in zip(outputs, results, strict=True):
            if isinstance(result, _Tensor) and not _is_equal(tensor, self._make(mode, result, inputs)):
                return None
        return _Results(kind, tuple(results))

    def _make(self, mode: Any, result: _Tensor, inputs: list[Any]) -> Any:
        if result.is_input:
            return inputs[result.source]
        with self._no_dispatch():
            if result.source < 0:
                made = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
            else:
                made = torch.empty(0, dtype=result.dtype, device="meta")
                made.set_(inputs[result.source].untyped_storage(), result.offset, result.shape, result.stride)
        return self._fake_tensor(mode, made, result.device)


@functools.cache
def known_results() -> KnownResults:
    """Return the results of this process, whose traces share them."""
    return KnownResults()


def _described(tensor: Any, inputs: list[Any], storages: list[Any]) -> _Tensor:
    facts = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.fake_device, tensor.storage_offset())
    itself = next((index for index, each in enumerate(inputs) if each is tensor), None)
    if itself is not None:
        return _Tensor(*facts, source=itself, is_input=True)
    storage = tensor.untyped_storage()
    return _Tensor(*facts, source=next((index for index, each in enumerate(storages) if each is storage), -1))


def _is_ambiguous(tensor: Any, inputs: list[Any], storages: list[Any]) -> bool:
    """Return whether a result may be one of several inputs, or a view of one of several, which are different
    tensors another time."""
    if any(each is tensor for each in inputs):
        return sum(each is tensor for each in inputs) > 1
    storage = tensor.untyped_storage()
    return sum(each is storage for each in storages) > 1


def _is_equal(tensor: Any, made: Any) -> bool:
    """Return whether a rebuilt tensor is the one that torch made, of which a storage may be larger than its
    shape."""

    def facts(each: Any) -> tuple[object, ...]:
        strided = each.layout == torch.strided and not each.is_conj() and not each.is_neg()
        where = (each.fake_device, each.storage_offset(), each.untyped_storage().nbytes())
        return strided, each.shape, each.stride(), each.dtype, each.requires_grad, *where, each.constant

    return facts(tensor) == facts(made) and facts(made)[0] is True
