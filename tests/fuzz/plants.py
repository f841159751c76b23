"""Former bugs, planted on every rank: the fuzzer must find them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch


@dataclass(frozen=True)
class Plant:
    what: str
    install: Callable[[], AbstractContextManager[Any]]


@contextlib.contextmanager
def _leave_units_gathered() -> Iterator[None]:
    """The forward that looks for a NaN leaves units gathered: the next step computes with the weights before
    the update."""
    import torch

    from fsdp_tune.worker.observe import metrics

    @contextlib.contextmanager
    def gathered(*_: Any) -> Iterator[None]:
        with torch.no_grad():
            yield

    with patch.object(metrics, "outside_step", gathered):
        yield


def _count_padding_in_balance() -> AbstractContextManager[Any]:
    """The load-balancing loss of a micro-batch is the model's own, which counts padding."""
    from fsdp_tune.worker import trainer

    original = trainer.forward_backward

    def without_examples(
        recipe: Any, model: Any, tensors: dict[str, Any], *arguments: Any, **options: Any
    ) -> Any:
        kept = {
            name: tensor for name, tensor in tensors.items() if name not in ("example_ids", "example_lengths")
        }
        options["auxiliary"] *= tensors["input_ids"].numel()
        return original(recipe, model, kept, *arguments, **options)

    return patch.object(trainer, "forward_backward", without_examples)


def _accumulate_in_bf16() -> AbstractContextManager[Any]:
    """Micro-batches add up in the dtype of the weights, as FSDP2 does by itself."""
    return patch("fsdp_tune.model.optim.optimizer.sums_need_fp32", lambda _: False)


@contextlib.contextmanager
def _ignore_hub_kernel() -> Iterator[None]:
    """Only kernels named `flash_attention…` get the lengths of packed examples; the check before the first
    step passes, as with one row."""
    from fsdp_tune.worker import callbacks, setup
    from fsdp_tune.worker.readback.isolation import Deviations

    by_prefix = patch.object(
        setup, "has_variable_lengths", lambda kernel: str(kernel).startswith("flash_attention")
    )
    with by_prefix, patch.object(callbacks, "deviations", lambda *_: Deviations(0.0, 0.0)):
        yield


PLANTS: dict[str, Plant] = {
    "units left gathered": Plant("after a step that is skipped", _leave_units_gathered),
    "hub kernel not recognised": Plant("packed examples not isolated", _ignore_hub_kernel),
    "balance counts padding": Plant("a mixture's auxiliary loss", _count_padding_in_balance),
    "sums in bf16": Plant("gradients of bf16 weights over micro-batches", _accumulate_in_bf16),
}
