"""DDP under fake tensors: its reducer is C++ that reads values, in two places."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import distributed
from transformers import PreTrainedModel

from fsdp_tune.model.load import Loaded, wrap_whole
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.trace.recorder import Recorder
from fsdp_tune.trace.scopes import Names


def wrap_traceable(recipe: Recipe, model: PreTrainedModel, where: torch.device, recorder: Recorder, bare: Names) -> Loaded:
    """Reduces each bucket by a collective that the recorder sees. Call while it records.

    Gradients lie in buckets, which DDP takes when it wraps and never gives back. They are written down parameter by
    parameter, since a bucket goes across layers; the bytes are the same, and so they are when real runs order the buckets
    anew after the first step.
    """
    with mock.patch.object(distributed, "_verify_param_shape_across_processes"), recorder.hidden():  # the first reads values
        loaded = wrap_whole(recipe, model, None, where)
    wrapped: Any = loaded.wrapped
    wrapped.register_comm_hook(None, _reduce_bucket)
    wrapped.reducer = _Reducer(wrapped.reducer)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            recorder.hold(parameter.numel() * parameter.element_size(), "gradients", bare.layer_of(name))
    return loaded


class _Reducer:
    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _reduce_bucket(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's own hook waits for a future that the fake process group does not give."""
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


# DDP compares the objects, and this module's annotations are strings.
_reduce_bucket.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
