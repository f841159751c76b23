"""A model may make tensors of its device from lists, numbers and arrays, and index with them, in a plan as in
a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fsdp_tune.planner.predict.depth import full_depth
from fsdp_tune.planner.predict.memory import peak_memory
from fsdp_tune.planner.trace_format import PHASES, Trace
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of
from tests.planner.trace.tracing import trace_of

TOKENS, WIDTH = 16, 32


def copies(trace: Trace) -> int:
    """The copies to the device in the forward of the last step."""
    steady = trace.steady(trace.ops)
    forward = steady[steady["phase"] == PHASES.index("forward")]
    return [trace.op_names[name] for name in forward["name"]].count("copy_to_device")


@pytest.mark.slow
def test_falcon_is_planned_with_the_copies_of_its_two_indices_a_layer() -> None:
    model = {"from_config": FAMILIES["falcon"] | {"num_hidden_layers": 7}}
    recipe = recipe_of(
        model, precision={"mixed_precision": "bf16"}, data={"train": [{"path": "x"}], "max_length": TOKENS}
    )
    shallow, exact = trace_of(recipe), trace_of(recipe, exact=True)
    assert copies(exact) == 2 * 7, "key and value are selected by lists: `fused_qkv[..., [-2], :]`"
    assert shallow.traced_layers < exact.traced_layers
    assert peak_memory(full_depth(shallow)).peak_allocated_bytes == peak_memory(exact).peak_allocated_bytes


def assigned(hidden: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    changed = hidden.clone()
    changed[index] = value
    return changed


EVEN = [index % 2 == 0 for index in range(TOKENS)]
FORMS: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "list": (1, lambda hidden: hidden[:, [0, -1]]),
    "nested list": (1, lambda hidden: hidden[:, [[0, 1], [2, 3]]]),
    "list alone": (1, lambda hidden: hidden[[0]]),
    "range": (1, lambda hidden: hidden[..., range(2)]),
    "array": (1, lambda hidden: hidden[..., np.array([1, 2])]),
    "mask": (1, lambda hidden: hidden[:, EVEN]),
    "array of a mask": (1, lambda hidden: hidden[:, np.array(EVEN)]),
    "mask of two dimensions": (2, lambda hidden: hidden[np.array([EVEN])]),
    "assignment by a list": (1, lambda hidden: assigned(hidden, (0, [1, 2]), 0.0)),
    "assignment by a mask": (1, lambda hidden: assigned(hidden, (slice(None), EVEN), 0.0)),
    "tensor": (1, lambda hidden: hidden * torch.tensor([2.0] * WIDTH, device=hidden.device)),
    "tensor of a dtype": (1, lambda hidden: torch.tensor([1, 2], dtype=torch.float16, device=hidden.device)),
    "number": (1, lambda hidden: hidden * torch.tensor(0.5, device=hidden.device)),
    "as_tensor": (1, lambda hidden: hidden.index_select(1, torch.as_tensor([3, 1], device=hidden.device))),
    "asarray": (1, lambda hidden: torch.asarray([1.0, 2.0], device=hidden.device)),
    "new_tensor": (1, lambda hidden: hidden.new_tensor([1.0, 2.0])),
    "moved": (1, lambda hidden: hidden + torch.tensor([1.0]).to(hidden.device)),
}
"""By form: the small tensors that are copied to the device, and the expression."""


def test_values_of_the_host_reach_the_device_by_copies() -> None:
    expected = {form: expression(torch.zeros(1, TOKENS, WIDTH)) for form, (_, expression) in FORMS.items()}

    def used() -> None:
        from transformers.models.llama.modeling_llama import LlamaMLP

        forward = LlamaMLP.forward

        def with_expressions(mlp: Any, hidden: torch.Tensor) -> torch.Tensor:
            for form, (_, expression) in FORMS.items():
                found, plain = expression(hidden), expected[form]
                assert (found.shape, found.dtype, found.device) == (
                    plain.shape,
                    plain.dtype,
                    hidden.device,
                ), form
            return forward(mlp, hidden)

        LlamaMLP.forward = with_expressions  # type: ignore[method-assign]

    model = {"from_config": FAMILIES["llama"] | {"num_hidden_layers": 1}}
    recipe = recipe_of(
        model,
        data={"train": [{"path": "x"}], "max_length": TOKENS},
        training={"per_device_train_batch_size": 1},
    )
    assert copies(trace_of(recipe, change=used)) == sum(count for count, _ in FORMS.values())
