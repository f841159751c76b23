"""Compute the loss inside the model's own head, so that the logits never leave it.

The head's `forward` is replaced by one that computes the loss from hidden states. It runs where the model
calls it: inside FSDP's hooks, with the weight gathered, whether the head is its own unit, in the last unit
with a tied embedding, or in the root. FSDP's backward hooks are on the head's output, so the loss itself is
passed through the model's outputs.

This is correct only if the model transforms logits in a way that the kernel repeats, which `logits_of`
measures by running the model's forward with body and head replaced.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from fsdp_tune.model.internals.torch_internals import DISABLE_MODES
from fsdp_tune.model.kernels.head import Logits, LossOptions
from fsdp_tune.model.shard.local import bare_model

Kernel = Callable[
    [torch.Tensor, torch.Tensor, "torch.Tensor | None", torch.Tensor, LossOptions], torch.Tensor
]
"""As `summed_linear_loss`."""


_SMALL = 2.0**-20


_PROBE = (1, 5, 7)
"""Rows, tokens and vocabulary of the logits in the measurement."""


class OpaqueHead(Exception):
    """The loss of a model cannot be computed in its head; the message is the reason."""


@dataclass
class _BodyOutput(BaseModelOutputWithPast):
    """Hidden states; every other output of a body is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


def logits_of(model: PreTrainedModel) -> Logits:
    """Measure the transformation that `model` applies to its logits by running its forward with given logits.
    Raises: OpaqueHead if it is not a scale and a soft-cap, or if the model is not a body with a plain linear
    head."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise OpaqueHead(f"the output embedding of {type(model).__name__} is not a plain linear layer")
    if model.base_model is model:
        raise OpaqueHead(f"{type(model).__name__} has no body separate from its head")
    disabled_modes = DISABLE_MODES.get()()
    try:
        # The planner builds the model under a mode in which tensors have no values.
        with disabled_modes, torch.no_grad(), torch.device("cpu"):
            return _measured(model)
    except OpaqueHead:
        raise
    except (
        Exception
    ) as error:  # the model's own code runs here, and may need outputs that only its real body has
        raise OpaqueHead(_why_opaque(model)) from error


def _why_opaque(model: PreTrainedModel) -> str:
    """Describe why the forward of `model` cannot be run without its body and its head."""
    known = (model.base_model, model.get_output_embeddings())
    others = [
        name
        for name, child in model.named_children()
        if child not in known and any(True for _ in child.parameters())
    ]
    if others:
        return (
            f"{type(model).__name__} computes its logits with `{others[0]}`, in addition to its body and "
            "its output embedding"
        )
    return f"the forward of {type(model).__name__} does not run without its body"


def _measured(model: PreTrainedModel) -> Logits:
    def after(logits: torch.Tensor) -> torch.Tensor:
        return _forward_with(model, logits).double()

    ones = torch.ones(_PROBE, dtype=torch.float64)
    highest, higher = float(after(ones * 1e9)[0, 0, 0]), float(after(ones * 1e10)[0, 0, 0])
    slope = float(after(ones * _SMALL)[0, 0, 0]) / _SMALL
    # Equal to the factor in the config up to tanh's cubic term, so rounding to fp32 gives the exact value.
    found = Logits(
        scale=float(torch.tensor(slope, dtype=torch.float32)), softcap=highest if highest == higher else None
    )
    some = torch.randn(_PROBE, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 8
    expected = some * found.scale
    if found.softcap is not None:
        expected = torch.tanh(expected / found.softcap) * found.softcap
    if not torch.allclose(after(some), expected, rtol=1e-5, atol=1e-9):
        raise OpaqueHead(f"{type(model).__name__} does more to its logits than scaling and soft-capping")
    return found


def _forward_with(model: PreTrainedModel, logits: torch.Tensor) -> torch.Tensor:
    """Return the model's output logits for `logits` as the output of its head."""
    rows, tokens, _ = logits.shape
    head, body = model.get_output_embeddings(), model.base_model
    assert isinstance(head, nn.Linear)
    hidden = torch.zeros(rows, tokens, head.in_features, dtype=logits.dtype)
    seen: list[tuple[int, ...]] = []

    def of_head(states: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(states.shape))
        return logits.clone()

    with (
        _forward_is(body, lambda *_, **__: _BodyOutput(last_hidden_state=hidden)),
        _forward_is(head, of_head),
    ):  # type: ignore[arg-type]
        output: torch.Tensor = model.forward(
            input_ids=torch.zeros(rows, tokens, dtype=torch.int64), use_cache=False
        ).logits
    if seen != [(rows, tokens, head.in_features)]:
        raise OpaqueHead(f"{type(model).__name__} does not call its head once, for every token")
    return output


@contextlib.contextmanager
def _forward_is(module: nn.Module, forward: Callable[..., object]) -> Iterator[None]:
    before = vars(module).get("forward")
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def install_loss_in_head(model: PreTrainedModel, logits: Logits, kernel: Kernel, name: str) -> None:
    """Make `model(…, targets=…)` return (summed loss, auxiliary loss or None, token losses or None) without
    creating logits; without `targets` the model is unchanged. Call it before wrapping. `name` is the name of
    the kernel for the read-back."""
    head: Any = model.get_output_embeddings()
    state = _State()
    plain_head, plain_model = head.forward, model.forward

    @functools.wraps(plain_head)
    def head_forward(hidden: torch.Tensor) -> torch.Tensor:
        if state.targets is None:
            return plain_head(hidden)  # type: ignore[no-any-return]
        assert hidden.shape[:-1] == state.targets.shape, "a target for every position that the head sees"
        if state.keeps_token_losses:
            state.token_losses = torch.zeros(state.targets.numel(), dtype=torch.float32, device=hidden.device)
        options = LossOptions(
            logits, state.label_smoothing, state.dft, state.gradient_scale, state.token_losses
        )
        weight, bias = head.weight, head.bias
        # the kernels compute gradients in the forward for all inputs that require them
        if not torch.is_grad_enabled():
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        loss = kernel(hidden.reshape(-1, hidden.shape[-1]), weight, bias, state.targets.reshape(-1), options)
        # In the shape of logits, so that the model's operations on logits apply to one number and are
        # discarded. A copy, since FSDP's hooks do not work on a view.
        state.loss = loss.reshape(1, 1, 1).clone()
        return state.loss

    @functools.wraps(plain_model)
    def model_forward(
        *args: object,
        targets: torch.Tensor | None = None,
        label_smoothing: float = 0.0,
        dft: bool = False,
        gradient_scale: float = 1.0,
        keeps_token_losses: bool = False,
        **kwargs: object,
    ) -> object:
        if targets is None:
            return plain_model(*args, **kwargs)
        state.targets, state.label_smoothing, state.gradient_scale = targets, label_smoothing, gradient_scale
        state.dft, state.keeps_token_losses = dft, keeps_token_losses
        try:
            outputs = plain_model(*args, **kwargs)
            assert state.loss is not None, "the model called its head"
            return state.loss.sum(), getattr(outputs, "aux_loss", None), state.token_losses
        finally:
            state.targets = state.loss = state.token_losses = None

    head.forward, model.forward = head_forward, model_forward
    model.loss_kernel = name  # type: ignore[assignment]  # for the step and for the read-back


class _State:
    """Values passed between the model's forward and its head."""

    targets: torch.Tensor | None = None
    loss: torch.Tensor | None = None
    label_smoothing: float = 0.0
    dft: bool = False
    gradient_scale: float = 1.0
    keeps_token_losses: bool = False
    token_losses: torch.Tensor | None = None


def loss_kernel_of(wrapped: nn.Module) -> str:
    """Return the loss kernel in the head of a (wrapped) model; `full` if the head returns logits."""
    return str(vars(bare_model(wrapped)).get("loss_kernel", "full"))
