"""DDP under fake tensors: its C++ reducer reads values in two places, and uses a single bucket in the first
step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from fsdp_tune.model.internals.torch_internals import VERIFY_SHAPES
from fsdp_tune.model.loading.assemble import Loaded, wrap_whole
from fsdp_tune.planner.trace.fake_gpu import STREAMS, nothing
from fsdp_tune.planner.trace.module_hooks import Names
from fsdp_tune.planner.trace.recorder import Recorder
from fsdp_tune.recipe.schema.recipe import Recipe

COMPUTE, ALL_REDUCE = STREAMS.index("compute"), STREAMS.index("all-reduce")


def wrap_traceable(
    recipe: Recipe, model: PreTrainedModel, where: torch.device, recorder: Recorder, bare: Names
) -> Loaded:
    """Wrap the model in DDP and record the sum of each gradient over the ranks as it becomes ready. Call
    while the recorder records.

    DDP allocates gradients in buckets when it wraps and never frees them. A bucket spans layers, so its
    memory and its sum are recorded for each parameter: the bytes are the same, and
    `planner.predict.collectives` forms the buckets of later steps at any depth.
    """
    with VERIFY_SHAPES.replaced(nothing), recorder.hidden():  # it reads values
        loaded = wrap_whole(recipe, model, None, where)
    wrapped: Any = loaded.wrapped
    wrapped.register_comm_hook(recorder, _all_is_ready)
    wrapped.reducer = _Reducer(wrapped.reducer)

    def ready(parameter: torch.Tensor) -> None:
        if wrapped.require_backward_grad_sync:
            recorder.clock.wait(ALL_REDUCE, COMPUTE, recorder.clock.now)
            with recorder.on_stream(ALL_REDUCE):
                dist.all_reduce(parameter.grad)

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            recorder.hold(parameter.numel() * parameter.element_size(), "gradients", bare.layer_of(name))
            parameter.register_post_accumulate_grad_hook(ready)
    return loaded


class _Reducer:
    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _all_is_ready(recorder: Recorder, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Communication hook in place of the single bucket's sum. As in a run, the optimizer's stream waits for
    all sums."""
    recorder.clock.wait(COMPUTE, ALL_REDUCE, recorder.clock.now)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


# DDP compares the objects, and this module's annotations are strings.
_all_is_ready.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
