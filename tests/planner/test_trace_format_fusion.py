"""Fused kernels of compiled layers: what they move, what they store, and what they compute again."""

from __future__ import annotations

import numpy as np

from fsdp_tune.planner.trace_format import OP, PHASES, Call, Records, fuse

FORWARD, BACKWARD = PHASES.index("forward"), PHASES.index("backward")


class Layer:
    """Calls of one layer; blocks are named, and each has 1,000 bytes unless given."""

    def __init__(self, **sizes: int) -> None:
        self.names: list[str] = []
        self.given = sizes
        self.calls: list[Call] = []

    def _blocks(self, names: str) -> tuple[tuple[int, int], ...]:
        for name in names.split():
            if name not in self.names:
                self.names.append(name)
        return tuple((self.names.index(name), self.given.get(name, 1000)) for name in names.split())

    def call(
        self,
        reads: str,
        writes: str,
        *,
        fuses: bool = True,
        phase: int = FORWARD,
        is_separate: bool = False,
        is_inside: bool = True,
    ) -> Layer:
        graph = (1, 0, 0) if is_inside else None
        self.calls.append(
            Call(len(self.calls), graph, phase, fuses, is_separate, self._blocks(reads), self._blocks(writes))
        )
        return self

    def product(self, reads: str, writes: str, phase: int = FORWARD) -> Layer:
        return self.call(reads, writes, fuses=False, phase=phase)

    def fused(self) -> Records:
        ops = np.zeros(len(self.calls), OP)
        ops["moved_bytes"], ops["kernels"] = 999_999, 1
        sizes = {index: self.given.get(name, 1000) for index, name in enumerate(self.names)}
        return fuse(ops, self.calls, sizes, 500, 0)


def moved(layer: Layer) -> list[int]:
    return layer.fused()["moved_bytes"].tolist()


def test_chain_between_products_moves_its_inputs_and_outputs_alone() -> None:
    layer = Layer().product("x w", "a").call("a", "b").call("b", "c").call("c a", "d").product("d v", "y")
    ops = layer.fused()
    assert ops["moved_bytes"].tolist() == [999_999, 2000, 0, 0, 999_999], "reads a once, writes d"
    assert ops["kernels"].tolist() == [1, 1, 0, 0, 1]
    assert ops["batch_bytes"].tolist()[1] == 2000, "both are multiples of the micro-batch"


def test_product_separates_kernels() -> None:
    layer = Layer().product("x", "a").call("a", "b").product("b", "c").call("c", "d").product("d", "e")
    assert moved(layer) == [999_999, 2000, 999_999, 2000, 999_999]


def test_tensor_read_outside_of_the_layer_is_stored() -> None:
    layer = (
        Layer()
        .product("x", "a")
        .call("a", "b")
        .call("b", "c")
        .product("c", "y")
        .call("b", "z", fuses=False, is_inside=False)
    )
    assert moved(layer)[1:3] == [3000, 0], "reads a, writes b and c"


def test_backward_computes_upcast_tensor_again_from_its_source() -> None:
    """An eager layer saves the fp32 copy; a compiled one reads the tensor in bf16 again."""
    layer = Layer(wide=2000).product("x", "a").call("a", "wide").call("wide", "b").product("b", "y")
    layer.product("dy", "db", BACKWARD).call("db wide", "da", phase=BACKWARD).product("da", "dx", BACKWARD)
    assert moved(layer) == [999_999, 2000, 0, 999_999, 999_999, 3000, 999_999]


def test_sum_that_three_kernels_read_is_stored() -> None:
    layer = (
        Layer()
        .product("x", "a")
        .call("x a", "sum")
        .call("sum", "b")
        .product("b", "c")
        .call("sum c", "out")
        .product("out", "d")
    )
    layer.product("dd", "e", BACKWARD).call("e sum", "f", phase=BACKWARD).product("f", "g", BACKWARD)
    assert moved(layer)[1] == 4000, "reads x and a, writes sum and b"
    assert moved(layer)[4] == 3000, "reads sum and c, writes out"


def test_separate_reduction_reads_its_inputs_again() -> None:
    layer = (
        Layer(scale=4)
        .product("x", "a")
        .call("a", "scale", is_separate=True)
        .call("a scale", "b")
        .product("b", "y")
    )
    assert moved(layer) == [999_999, 1004, 2004, 999_999]


def test_overlapping_views_count_each_byte_once() -> None:
    layer = Layer().product("x", "a").call("a a", "b").call("a b", "c").product("c", "y")
    assert moved(layer)[1:3] == [2000, 0]
