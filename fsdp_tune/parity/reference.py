"""The trajectory that every run must follow: a plain PyTorch loop on one device, with nothing of the package but its data.

No Trainer, no Accelerate, no FSDP, no padding and no packing: each example goes through the model alone. The loss of a
step is the sum of its token losses over the number of its supervised tokens, and for a mixture of experts with
`output_router_logits` the mean of its examples' load-balancing losses, weighted by tokens; AdamW (Loshchilov & Hutter,
arXiv:1711.05101) decays matrices only; the gradient is clipped by its global norm; the learning rate warms up linearly
and falls as a cosine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from fsdp_tune.data.order import epoch_order
from fsdp_tune.data.store import Row, RowStore

Example = tuple[torch.Tensor, torch.Tensor]
"""input_ids [1, tokens] and labels [tokens] of one example."""


@dataclass(frozen=True)
class Settings:
    steps: int
    global_batch_size: int
    learning_rate: float
    warmup_steps: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    seed: int = 42
    packed: bool = False
    compute_dtype: torch.dtype = torch.float32
    """bf16: each forward multiplies bf16 copies of the fp32 weights, the logits go to the loss in fp32, gradients add up in fp32."""
    skipped: frozenset[int] = frozenset()
    """Steps, from 1, whose update is left out, as fp16's loss scale does when it is too large."""


@dataclass
class Trajectory:
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    supervised_tokens: list[int] = field(default_factory=list)
    eval_loss: float = math.nan
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    final: dict[str, torch.Tensor] = field(default_factory=dict)


def train(settings: Settings, model_directory: Path, train_rows: RowStore, *eval_rows: RowStore) -> Trajectory:
    """Trains the model of a Hugging Face directory in fp32 on one thread."""
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32).train()
    result = Trajectory(initial=_copy(model))
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        foreach=False,
    )
    for step, rows in zip(range(settings.steps), _global_batches(settings, train_rows), strict=False):
        optimizer.zero_grad()
        loss, tokens = _accumulate(model, settings, rows)
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= min(1.0, settings.max_grad_norm / (norm + 1e-6))
        rate = settings.learning_rate * _schedule(step, settings)
        for group in optimizer.param_groups:
            group["lr"] = rate
        if step + 1 not in settings.skipped:
            optimizer.step()
        result.losses.append(loss)
        result.grad_norms.append(norm)
        result.learning_rates.append(rate)
        result.supervised_tokens.append(tokens)
    result.final = _copy(model)
    if eval_rows:
        result.eval_loss = evaluate(model, settings.compute_dtype, eval_rows)
    return result


def _copy(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _global_batches(settings: Settings, rows: RowStore) -> Iterator[list[Row]]:
    """The rows of each step, epoch after epoch; the last batch of an epoch has what is left."""
    lengths, size = rows.lengths, settings.global_batch_size
    for epoch in range(settings.steps):
        shuffled = epoch_order(
            lengths, seed=settings.seed, epoch=epoch, shuffle=True, group_by_length=not settings.packed, global_batch_size=size
        )
        for start in range(0, len(shuffled), size):
            yield [rows[int(index)] for index in shuffled[start : start + size]]


def _schedule(step: int, settings: Settings) -> float:
    if step < settings.warmup_steps:
        return step / settings.warmup_steps
    return 0.5 * (1 + math.cos(math.pi * (step - settings.warmup_steps) / (settings.steps - settings.warmup_steps)))


def _examples(rows: list[Row]) -> Iterator[Example]:
    for row in rows:
        cuts = np.cumsum(row.lengths)[:-1]
        for ids, labels in zip(np.split(row.input_ids, cuts), np.split(row.labels, cuts), strict=True):
            yield torch.from_numpy(ids.astype(np.int64))[None], torch.from_numpy(labels.astype(np.int64))


def _accumulate(model: nn.Module, settings: Settings, rows: list[Row]) -> tuple[float, int]:
    """Adds the gradient of the step's loss to `.grad`; returns the loss and the number of supervised tokens."""
    examples = list(_examples(rows))
    targets = sum(int((labels[1:] != -100).sum()) for _, labels in examples)
    tokens = sum(ids.shape[1] for ids, _ in examples)
    total = 0.0
    for ids, labels in examples:
        loss, balance = _losses(model, settings.compute_dtype, (ids, labels))
        (loss / targets + balance * ids.shape[1] / tokens).backward()
        total += float(loss.detach())
    return total / targets, targets


def _losses(model: nn.Module, compute_dtype: torch.dtype, example: Example) -> tuple[torch.Tensor, torch.Tensor | float]:
    """The summed token loss of an example, and a mixture's load-balancing loss of it times the coefficient."""
    ids, labels = example
    weights = {name: p.to(compute_dtype) for name, p in model.named_parameters()}
    outputs = torch.func.functional_call(model, weights, kwargs={"input_ids": ids, "use_cache": False})
    log_probabilities = torch.log_softmax(outputs.logits[0].float(), dim=-1)
    supervised = [at for at, label in enumerate(labels.tolist()) if at > 0 and label != -100]
    balance = getattr(outputs, "aux_loss", None)
    loss = -log_probabilities[[at - 1 for at in supervised], labels[supervised]].sum()
    return loss, 0.0 if balance is None else balance * model.router_aux_loss_coef


@torch.no_grad()
def evaluate(model: nn.Module, compute_dtype: torch.dtype, stores: Iterable[RowStore]) -> float:
    """Mean loss of all supervised tokens of some sets, each example alone."""
    model.eval()
    examples = list(_examples([store[index] for store in stores for index in range(len(store))]))
    losses = [float(_losses(model, compute_dtype, example)[0]) for example in examples]
    return sum(losses) / sum(int((labels[1:] != -100).sum()) for _, labels in examples)
