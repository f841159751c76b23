"""A trace has the bytes of a live run: parameters, gradients and optimizer state of the worker."""

from __future__ import annotations

import functools
import json
from collections import Counter
from typing import Any

import pytest

from fsdp_tune.model.shard.local import parts_of
from fsdp_tune.planner.trace_format import PHASES
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.parity import runs
from tests.parity.bench import shared_bench
from tests.parity.cases import Case
from tests.planner.trace.tracing import alive, before, trace_of

CASES = {
    "gpt2": Case(architecture="gpt2"),
    "llama, recomputed and accumulated": Case(recomputation="full", accumulation=2),
    "llama": Case(),
    "llama, bf16 weights, accumulated": Case(stored="bf16", accumulation=2),
    "llama, offloaded": Case(offload=True),
    "llama, four ranks in two copies": Case(ranks=4, strategy="HYBRID_SHARD"),
    "llama, bf16": Case(precision="bf16"),
    "llama, 8-bit state": Case(
        "llama-64", training=(("optim", "adamw_torch_8bit"), ("optim_args", "block_size=64"))
    ),
    "llama, fp8": Case("llama-16", precision="fp8 rowwise"),
    "llama, gathered in fp8": Case("llama-16", precision="fp8 tensorwise"),
    "llama, MLP in slices": Case(recomputation="full", kernels=(("mlp_slice_tokens", 5),)),
    "llama, bf16 state": Case(training=(("optim_args", "state_dtype=bf16"),)),
    "mixtral": Case("mixtral"),
}
FAST = [list(CASES)[1]]


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def run_watched(path: str) -> dict[str, Any]:
    """On a rank: the worker, and what its tensors weigh: the storages of gradients before clipping, of the
    rest after a step."""
    from fsdp_tune.worker.trainer import FsdpTrainer

    seen: dict[str, Any] = {}
    clip, log = FsdpTrainer._clip_grad_norm, FsdpTrainer._maybe_log_save_evaluate

    def storages(tensors: Any) -> list[int]:
        parts = [part.untyped_storage() for t in tensors for part in parts_of(t) if part.numel()]
        unique = {part.data_ptr(): part.nbytes() for part in parts}
        return list(unique.values())

    def watched_clip(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = [p.grad for p in trainer.wrapped.parameters() if p.grad is not None]
        seen.setdefault("gradients", storages(gradients))
        seen.setdefault("gradient_bytes", sum(_local(g).numel() * g.element_size() for g in gradients))
        return clip(trainer, *args, **kwargs)

    def watched_log(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        states = [value for state in trainer.optimizer.state.values() for value in state.values()]
        seen.setdefault("optimizer state", storages(states))
        seen.setdefault(
            "named",
            {name: _local(p).numel() * p.element_size() for name, p in trainer.wrapped.named_parameters()},
        )
        seen.setdefault("parameters", storages([*trainer.wrapped.parameters(), *trainer.wrapped.buffers()]))
        return log(trainer, *args, **kwargs)

    FsdpTrainer._clip_grad_norm, FsdpTrainer._maybe_log_save_evaluate = watched_clip, watched_log  # type: ignore[method-assign]
    try:
        return runs.run_worker(path) | {"seen": seen}
    finally:
        FsdpTrainer._clip_grad_norm, FsdpTrainer._maybe_log_save_evaluate = clip, log  # type: ignore[method-assign]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_trace_memory_equals_live_worker(name: str) -> None:
    case, bench = CASES[name], shared_bench()
    changes = runs.merged(
        case.recipe(str(bench.model(case.architecture))),
        {"training": {"max_steps": 2, "save_steps": 2}, "data": {"max_length": 128}},
    )
    run = bench.written_run(changes)
    live: dict[str, Any] = bench.on_ranks.run(case.ranks, functools.partial(run_watched, str(run.path)))[0][
        "seen"
    ]

    trace = trace_of(Recipe.model_validate(json.loads(run.recipe_json.read_text())))
    after_load = trace.events[trace.events["phase"] == PHASES.index("load")]
    traced_names = {trace.modules[event["module"]]: int(event["bytes"]) for event in after_load}
    assert {name: traced_names.get(name) for name in live["named"]} == live["named"]
    assert alive(trace, "parameters", until=before(trace, "forward")) == Counter(live["parameters"])
    gradients = alive(trace, "gradients", until=before(trace, "clip"))
    # from a GPU each gradient is copied to a tensor of its own; on CPU ranks there is nothing to copy
    if case.offload:
        assert gradients.total()
        assert sum(gradients.elements()) == live["gradient_bytes"]
    else:
        assert gradients == Counter(live["gradients"])
    assert alive(trace, "optimizer state", until=before(trace, "zero_grad")) == Counter(
        live["optimizer state"]
    )
