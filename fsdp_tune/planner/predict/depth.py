"""Extend a trace of a few decoder layers to the full model by repeating the middle layers.

Layers of one kind do the same work, so the records of the middle layer in every pass over the layers
(forward, backward, clipping, optimizer) are copied once for each missing layer. References are shifted with
the records: a block that the previous layer allocated becomes, in a copy, a block of the previous copy. The
result is an ordinary trace, equal to that of a run with all layers (tests compare the two), so later code
does not extrapolate.

Layers are counted in stretches of one period. Stretch 0 is repeated as stretches 0 … `copies`, and later ones
move up. The first and the last traced stretch may be incomplete: they are margins, of as many layers as one
layer affects, with a layer of each kind.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fsdp_tune.planner.trace_format import Records, Trace

Int64 = npt.NDArray[np.int64]


OUTSIDE = -(1 << 14)  # the stretch of records outside of decoder layers


# The first and last layers differ from the middle (nothing to prefetch), and blocks may outlive their layer.
# In layers, at both ends.
_MARGIN = 2


class DepthError(ValueError):
    """The traced layers do not repeat, so the missing ones cannot be derived: trace the full depth."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """The decoder layers that a trace omits because they equal the layers before them."""

    period: int
    """Number of layers after which the pattern repeats."""
    first: int
    """Index of the first layer of the stretch that `full_depth` repeats."""
    missing: int
    """Number of layers that are omitted after that stretch: a multiple of the period."""

    @property
    def dropped(self) -> range:
        return range(self.first + self.period, self.first + self.period + self.missing)


def repeated_layers(signatures: Sequence[Hashable], *, reach: int = 1) -> Repeated | None:
    """Return the layers that need not be traced, as many as possible; None if every layer must be traced.

    Layers with equal signatures do the same work. `reach` is the number of layers ahead that a layer affects
    (prefetch depth).
    """
    margin = max(_MARGIN, reach + 1)
    numbers: dict[Hashable, int] = {}
    kinds = [numbers.setdefault(each, len(numbers)) for each in signatures]
    best: Repeated | None = None
    for period in range(1, (len(kinds) - 2 * margin) // 2 + 1):
        for begin, end in _periodic_runs(kinds, period):
            repeated, first, last = set(kinds[begin : begin + period]), begin + margin, end - margin
            # The first and the last layer of a kind allocate and free what all of that kind share, so neither
            # may be repeated.
            while not repeated <= set(kinds[:first]):
                first += 1
            while not repeated <= set(kinds[last:]):
                last -= 1
            missing = (last - first - period) // period * period
            if missing > (best.missing if best else 0):
                best = Repeated(period, first, missing)
    return best


def _periodic_runs(signatures: Sequence[Hashable], period: int) -> Iterator[tuple[int, int]]:
    """Yield the longest ranges in which each signature equals the one `period` before it."""
    begin = 0
    for index in range(period, len(signatures) + 1):
        if index == len(signatures) or signatures[index] != signatures[index - period]:
            yield begin, index
            begin = index - period + 1


def full_depth(trace: Trace) -> Trace:
    """Return the trace with all layers. Raises: DepthError if the middle of the traced layers is not
    regular."""
    missing = trace.layers - trace.traced_layers
    if missing == 0:
        return trace
    if missing < 0 or missing % trace.period:
        raise DepthError(
            f"{trace.traced_layers} layers were traced of {trace.layers}, which repeat after {trace.period}"
        )
    return _Splice(trace, missing).result()


@dataclass(frozen=True, slots=True)
class _Sweep:
    """One pass over the layers: the range of its stretch 0 in the common order."""

    begin: int
    end: int
    downward: bool


class _Splice:
    def __init__(self, trace: Trace, missing: int) -> None:
        self.trace, self.missing, self.period = trace, missing, trace.period
        self.copies = missing // trace.period
        self.first = trace.first_repeated
        self.places, self.stretches = self._runs()
        self.sweeps = self._sweeps()
        self.shifts = np.cumsum([0, *(self.copies * (sweep.end - sweep.begin) for sweep in self.sweeps)])

    def result(self) -> Trace:
        trace = self.trace
        events = self._pasted(trace.events)
        events = _Blocks(self, trace.events).named(events)
        waits = self._pasted(trace.waits)
        waits["until"] = self._until(waits)
        tables = {
            "events": events,
            "waits": waits,
            "ops": self._pasted(trace.ops),
            "collectives": self._pasted(trace.collectives),
        }
        for name, table in tables.items():
            self._relabel(table)
            tables[name] = _narrow(table, getattr(trace, name))
        tables["collectives"]["unit"] = -1  # indices of traced units do not apply to the full model
        return replace(trace, **tables, traced_layers=trace.layers)

    def stretch_of(self, layers: npt.NDArray[np.integer]) -> Int64:
        layers = layers.astype(np.int64)
        return np.where(layers < 0, OUTSIDE, (layers - self.first) // self.period)

    def _runs(self) -> tuple[Int64, Int64]:
        """Divide the common order into runs of one stretch: return the start of each run (and, last, the end
        of all), and its stretch."""
        trace = self.trace
        tables = [trace.events, trace.ops, trace.collectives]
        at = np.concatenate([table["at"] for table in tables]).astype(np.int64)
        order = np.argsort(at, kind="stable")
        stretch = self.stretch_of(np.concatenate([table["layer"] for table in tables])[order])
        begins = np.flatnonzero(np.concatenate([[True], stretch[1:] != stretch[:-1]]))
        return np.concatenate([at[order][begins], [int(at.max(initial=0)) + 1]]), stretch[begins]

    def _sweeps(self) -> list[_Sweep]:
        sweeps: list[_Sweep] = []
        for index in np.flatnonzero(self.stretches == 0):
            around = [
                int(self.stretches[place]) if 0 <= place < len(self.stretches) else OUTSIDE
                for place in (index - 1, index + 1)
            ]
            if around not in ([-1, 1], [1, -1]):
                raise DepthError(
                    f"layer {self.first} is not between its neighbours in every pass over the layers"
                )
            sweeps.append(
                _Sweep(int(self.places[index]), int(self.places[index + 1]), downward=around == [1, -1])
            )
        if not sweeps:
            raise DepthError("no pass over the layers was found")
        return sweeps

    def _pasted(self, table: Records) -> Records:
        """Return the records with stretch 0 repeated and `at` renumbered; `copy` is the repetition, `old` the
        original position."""
        turns = np.arange(self.copies + 1)
        parts: list[tuple[Int64, Int64, Int64]] = []  # rows of the table, their shifts, their copies
        position = 0
        bounds = np.searchsorted(table["at"], [(sweep.begin, sweep.end) for sweep in self.sweeps]).tolist()
        for sweep, shift, (begin, end) in zip(self.sweeps, self.shifts.tolist(), bounds, strict=False):
            parts.append(_alone(position, begin, shift))
            shifts = np.repeat(shift + turns * (sweep.end - sweep.begin), end - begin)
            copies = np.repeat(turns[::-1] if sweep.downward else turns, end - begin)
            parts.append((np.tile(np.arange(begin, end, dtype=np.int64), len(turns)), shifts, copies))
            position = end
        parts.append(_alone(position, len(table), int(self.shifts[-1])))
        rows, shifts, copies = (np.concatenate(column) for column in zip(*parts, strict=True))
        pasted = np.zeros(len(rows), [*table.dtype.descr, ("copy", "i4"), ("old", "i4")])
        for name in table.dtype.names or ():
            pasted[name] = table[name][rows]
        pasted["old"] = pasted["at"]
        pasted["at"] += shifts.astype(pasted["at"].dtype)
        pasted["copy"] = copies
        return pasted

    def _relabel(self, table: Records) -> None:
        """Set layer numbers of the full model."""
        stretch = self.stretch_of(table["layer"])
        moved = np.where(stretch > 0, self.missing, np.where(stretch == 0, table["copy"] * self.period, 0))
        table["layer"] += np.where(stretch == OUTSIDE, 0, moved).astype(table["layer"].dtype)

    def _until(self, waits: Records) -> Int64:
        """Return the new position that each wait refers to: shifted with a near wait; in an earlier pass,
        that of the same layer."""
        begins = np.array([sweep.begin for sweep in self.sweeps], np.int64)
        ends = np.array([sweep.end for sweep in self.sweeps], np.int64)
        until, old = waits["until"].astype(np.int64), waits["old"].astype(np.int64)
        passes = np.searchsorted(begins, old, side="right") - np.searchsorted(ends, until, side="right")
        near = waits["at"] - (old - until)
        sweep = np.clip(np.searchsorted(begins, until, side="right") - 1, 0, None)
        inside = (until >= begins[sweep]) & (until < ends[sweep])
        downward = np.array([s.downward for s in self.sweeps])[sweep]
        turn = np.where(downward, self.copies - waits["copy"], waits["copy"])
        far = (
            until
            + self.shifts[np.searchsorted(ends, until, side="right")]
            + np.where(inside, turn * (ends - begins)[sweep], 0)
        )
        return np.minimum(np.where(passes <= 1, near, far), waits["at"])


class _Blocks:
    """The blocks that pasted records refer to."""

    def __init__(self, splice: _Splice, events: Records) -> None:
        self.splice, self.copies = splice, splice.copies
        allocated = events[events["bytes"] > 0]
        run = np.searchsorted(splice.places, allocated["at"], side="right") - 1
        self.stretch: dict[int, int] = dict(
            zip(allocated["block"].tolist(), splice.stretch_of(allocated["layer"]).tolist(), strict=True)
        )
        self.run: dict[int, int] = dict(zip(allocated["block"].tolist(), run.tolist(), strict=True))
        self.members: dict[tuple[int, int], list[int]] = {}
        """Blocks by run and layer of the period, in order."""
        self.ordinal: dict[int, tuple[int, int]] = {}
        """Layer of the period of each block, and its index among the members."""
        layers = (allocated["layer"].astype(np.int64) - splice.first) % splice.period
        for block, layer in zip(allocated["block"].tolist(), layers.tolist(), strict=True):
            members = self.members.setdefault((self.run[block], layer), [])
            self.ordinal[block] = layer, len(members)
            members.append(block)
        self.size: dict[int, int] = dict(
            zip(allocated["block"].tolist(), allocated["bytes"].tolist(), strict=True)
        )

    def named(self, events: Records) -> Records:
        """Return the events with new block numbers. A free outside of the layers of a block of stretch 0
        becomes one free per copy."""
        stretches = self.splice.stretch_of(events["layer"]).tolist()
        blocks, sizes, copies = events["block"].tolist(), events["bytes"].tolist(), events["copy"].tolist()
        numbers: dict[tuple[int, int], int] = {}
        rows: list[int] = []
        names: list[int] = []
        for row, (block, size, copy, stretch) in enumerate(
            zip(blocks, sizes, copies, stretches, strict=True)
        ):
            if size > 0:
                meant = [(block, copy)]
                numbers[meant[0]] = number = len(rows)
                rows.append(row)
                names.append(number)
                continue
            meant = self._meant(block, copy, stretch)
            for key in meant:
                if key not in numbers:
                    raise DepthError("a layer frees a block that no equal layer allocated, or frees it twice")
                rows.append(row)
                names.append(numbers.pop(key))
        freed = {block for block, size in zip(blocks, sizes, strict=True) if size < 0}
        if any(block in freed for block, _ in numbers):
            raise DepthError("a layer frees a block, and an equal layer keeps it")
        named = events[rows]
        named["block"] = names
        return named

    def _meant(self, block: int, copy: int, stretch: int) -> list[tuple[int, int]]:
        """Return the allocations (block of the trace, copy) that are freed by a free of `block` in copy
        `copy` of `stretch`."""
        home = self.stretch[block]
        if home == OUTSIDE or (home != 0 and (stretch == OUTSIDE or home * stretch < 0)):
            return [(block, 0)]
        if stretch == OUTSIDE:
            return [(block, turn) for turn in range(self.copies + 1)]
        place = stretch if stretch < 0 else copy if stretch == 0 else stretch + self.copies
        target = place + home - stretch
        if 0 <= target <= self.copies:
            return [(self._alike(block, home, 0), target)]
        return [(self._alike(block, home, target if target < 0 else target - self.copies), 0)]

    def _alike(self, block: int, home: int, wanted: int) -> int:
        """Return the block of stretch `wanted` that corresponds to `block`, which `home` allocated in the
        same pass."""
        if wanted == home:
            return block
        run, stretches = self.run[block], self.splice.stretches
        step = 1 if run + 1 < len(stretches) and stretches[run + 1] == home + np.sign(wanted - home) else -1
        run += step * abs(wanted - home)
        layer, index = self.ordinal[block]
        members = self.members.get((run, layer), [])
        if not (0 <= run < len(stretches)) or stretches[run] != wanted or len(members) <= index:
            raise DepthError(f"stretches {home} and {wanted} of the layers are not alike")
        found = members[index]
        if self.size[found] != self.size[block]:
            raise DepthError(f"stretches {home} and {wanted} of the layers are not alike")
        return found


def _alone(begin: int, end: int, shift: int) -> tuple[Int64, Int64, Int64]:
    """Return rows that are not repeated."""
    return np.arange(begin, end), np.full(end - begin, shift), np.zeros(end - begin, np.int64)


def _narrow(wide: Records, like: Records) -> Records:
    table = np.zeros(len(wide), like.dtype)
    for name in like.dtype.names or ():
        table[name] = wide[name]
    return table
