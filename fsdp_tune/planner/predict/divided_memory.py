"""The memory of a traced step if `ep_size` neighbouring ranks divide the experts of each layer. Pure.

The part of a unit that experts are (`predict.mixture`) is gathered with 1 / ep of its bytes. Parameters,
gradients and optimizer state take as much memory as without the division.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fsdp_tune.core.expert_names import are_stacked_experts, is_in_experts
from fsdp_tune.planner.predict.mixture import (
    COPY_OUT,
    TracedExperts,
    divided_mixture,
    imbalance,
    is_named,
    second_copies,
)
from fsdp_tune.planner.trace_format import EVENT, KINDS, PHASES, Records, Trace

_GATHERED = ("gathered units", "all-gather buffers", "reduce buffers", "unsharded gradients")


def divided_memory(trace: Trace) -> Trace:
    """Return a trace at full depth with the memory of its `ep_size`: 1 / ep of the experts in gathered units
    and their buffers, the temporaries of gathers, and the rows of the fullest rank. Raises: usage error (exit
    2) as `divided_mixture`."""
    mixture = divided_mixture(trace)
    if mixture is None:
        return trace
    ep, events = trace.shapes.ep_size, trace.events.copy()
    sizes = np.abs(events["bytes"])
    activations = (events["kind"] == KINDS.index("activations")) & np.isin(events["layer"], mixture.layers)
    gathered = np.isin(events["kind"], [KINDS.index(kind) for kind in _GATHERED])
    if trace.facts.experts_inside:  # what is gathered into has no kind of its own then
        gathered |= activations & np.isin(
            sizes, [stack * item for stack in mixture.stacks for item in (2, 4)]
        )
    factors: dict[int, float] = {}
    for size in np.unique(sizes[gathered]).tolist():
        share = max(mixture.share(size / item) for item in (1, 2, 4))
        factors[size] = 1 - share * (1 - 1 / ep)
    scale = np.ones(len(events))
    scale[gathered] = [factors[size] for size in sizes[gathered].tolist()]
    scale[_of_rows_of_experts(trace, mixture, activations & ~gathered)] = imbalance(ep, mixture.experts)
    events["bytes"] = np.sign(events["bytes"]) * np.maximum(1, np.rint(sizes * scale)).astype(np.int64)
    return replace(trace, events=_with_temporaries(trace, mixture, events))


def _of_rows_of_experts(
    trace: Trace, mixture: TracedExperts, activations: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Select activations with a row for each token and chosen expert: those that modules of experts make in a
    forward, and those of the same sizes in a backward, where the innermost module is the layer, or the one in
    which a recomputation ended. A size alone tells nothing: one with a row for each token may divide by their
    number as well."""
    events = trace.events
    sizes, backward = np.abs(events["bytes"]), events["phase"] == PHASES.index("backward")
    wide = activations & (sizes % mixture.rows == 0) & (sizes > mixture.rows * 64)
    of_experts = np.array([is_in_experts(name) or are_stacked_experts(name) for name in trace.modules], bool)
    own = wide & ~backward & of_experts[events["module"]]
    made = wide & backward & np.isin(sizes, sizes[own])
    return wide & np.isin(events["block"], events["block"][(own | made) & (events["bytes"] > 0)])


def _with_temporaries(trace: Trace, mixture: TracedExperts, events: Records) -> Records:
    """Insert the temporaries of gathers. The copy of a gradient replaces it before the buffer of the
    reduction exists, at no peak."""
    sizes = second_copies(trace, mixture, trace.ops)
    rows = np.flatnonzero((sizes > 0) & is_named(trace, trace.ops, COPY_OUT))
    made = np.zeros(2 * len(rows), EVENT)
    for name in ("at", "step", "micro", "phase", "layer", "module", "stream"):
        made[name] = np.repeat(trace.ops[name][rows], 2)
    made["bytes"] = np.stack([sizes[rows], -sizes[rows]], axis=1).reshape(-1)
    made["block"] = int(events["block"].max(initial=0)) + 1 + np.repeat(np.arange(len(rows)), 2)
    made["kind"] = KINDS.index("all-gather buffers")
    return np.insert(events, np.searchsorted(events["at"], made["at"]), made)
