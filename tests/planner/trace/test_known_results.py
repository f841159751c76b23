"""Rebuilt results of operations equal those that torch computes, and nothing is computed twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_tune.model.internals import torch_internals as internals
from fsdp_tune.planner.trace.known_results import KnownResults

aten = torch.ops.aten


class Run:
    """Operations inside a fake mode, run through `known`."""

    def __init__(self) -> None:
        self.known = KnownResults()
        self.mode: Any = internals.FAKE_TENSOR_MODE.get()()

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with self.mode:
            return torch.empty(shape, dtype=dtype)

    def __call__(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        with self.mode:
            return self.known.run(self.mode, func, args, kwargs)


def facts(each: Any) -> Any:
    if not isinstance(each, torch.Tensor):
        return [facts(one) for one in each]
    return (
        each.shape,
        each.stride(),
        each.dtype,
        each.device,
        each.storage_offset(),
        each.untyped_storage().nbytes(),
    )


@pytest.mark.parametrize(
    ("func", "shapes", "rest"),
    [
        pytest.param(aten.mm.default, [(4, 8), (8, 3)], (), id="a product"),
        pytest.param(aten.t.default, [(4, 8)], (), id="a view"),
        pytest.param(aten.slice.Tensor, [(4, 8)], (0, 1, 3), id="a view with an offset"),
        pytest.param(aten.split.Tensor, [(4, 8)], (2,), id="several views"),
        pytest.param(aten._unsafe_view.default, [(4, 8)], ([8, 4],), id="a view that is not declared as one"),
        pytest.param(aten.native_layer_norm.default, [(4, 8)], ([8], None, None, 1e-5), id="several results"),
        pytest.param(aten.mul.Tensor, [(4, 8)], (2,), id="a number"),
    ],
)
def test_result_that_is_rebuilt_equals_the_first(
    func: Any, shapes: list[tuple[int, ...]], rest: tuple[Any, ...]
) -> None:
    run = Run()
    inputs = [[run.tensor(*shape) for shape in shapes] for _ in range(2)]
    first, again = (run(func, *each, *rest) for each in inputs)
    assert run.known.computed == 1
    assert facts(again) == facts(first)
    assert type(again) is type(first)
    for one, other in zip(
        *([each] if isinstance(each, torch.Tensor) else each for each in (first, again)), strict=True
    ):
        assert (one.untyped_storage() is inputs[0][0].untyped_storage()) == (
            other.untyped_storage() is inputs[1][0].untyped_storage()
        )
        assert one.untyped_storage() is not other.untyped_storage()


def test_input_written_in_place_is_returned_itself() -> None:
    run = Run()
    for each in (run.tensor(4), run.tensor(4)):
        assert run(aten.mul_.Tensor, each, 2.0) is each
    assert run.known.computed == 1


@pytest.mark.parametrize(("one", "other"), [((2.0,), (2,)), ((True,), (1,))])
def test_numbers_that_are_equal_but_of_other_types_have_results_of_their_own(
    one: tuple[Any, ...], other: tuple[Any, ...]
) -> None:
    run = Run()
    each = run.tensor(4, dtype=torch.int64)
    found = [run(aten.mul.Tensor, each, *rest) for rest in (one, other, one, other)]
    assert run.known.computed == 2
    assert [result.dtype for result in found[2:]] == [result.dtype for result in found[:2]]


@pytest.mark.parametrize("change", ["shape", "stride", "dtype", "offset"])
def test_other_input_is_computed(change: str) -> None:
    run = Run()
    base = run.tensor(8, 8)
    others = {"shape": run.tensor(8, 4), "stride": base.t(), "dtype": run.tensor(8, 8, dtype=torch.bfloat16)}
    with run.mode:
        others["offset"] = run.tensor(9, 8)[1:]
    run(aten.clone.default, base)
    out = run(aten.clone.default, others[change])
    assert run.known.computed == 2
    assert (out.shape, out.dtype) == (others[change].shape, others[change].dtype)


def test_result_that_depends_on_values_is_not_remembered() -> None:
    run = Run()
    for _ in range(2):
        with pytest.raises(Exception, match="_local_scalar_dense"):
            run(aten._local_scalar_dense.default, run.tensor())
    assert run.known.computed == 2


def test_given_output_is_returned_although_the_first_time_it_was_an_input() -> None:
    run = Run()
    one, other, given = (run.tensor(4) for _ in range(3))
    assert run(aten.add.out, one, other, out=one) is one
    assert run(aten.add.out, one, other, out=given) is given


def test_given_output_of_another_size_is_resized_each_time() -> None:
    run = Run()
    for _ in range(2):
        given = run.tensor(0)
        assert run(aten.mul.out, run.tensor(4), run.tensor(4), out=given) is given
        assert given.shape == (4,)


def test_view_of_a_conjugate_is_one() -> None:
    run = Run()
    plain, conjugate = (run.tensor(4, 2, dtype=torch.complex64) for _ in range(2))
    with run.mode:
        conjugate = conjugate.conj()
    assert [run(aten.view.default, each, [8]).is_conj() for each in (plain, conjugate)] == [False, True]
