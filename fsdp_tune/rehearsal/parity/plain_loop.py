"""The reference for every run: a plain PyTorch loop on one device. The loop uses nothing of the package but
its data order and store.

No Trainer, no Accelerate, no FSDP, no padding and no packing: each example goes through the model alone. The
loss of a step is the sum of its token losses over the number of its supervised tokens, and for a mixture of
experts with `output_router_logits` the mean of its examples' load-balancing losses, weighted by tokens;
gradients of examples add up in fp32 (in float64 if the weights are), whatever the weights are stored in;
AdamW (Loshchilov & Hutter, arXiv:1711.05101) decays matrices only, and no bias of two dimensions; the
gradient is clipped by its global norm; the learning rate warms up linearly and follows one of the schedules
of `SCHEDULES`.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.optimization import Adafactor

from fsdp_tune.core.families import BALANCE_WEIGHTS
from fsdp_tune.core.tensors.peft_names import PREFIX
from fsdp_tune.data.batches import epoch_order
from fsdp_tune.data.store import Row, RowStore
from fsdp_tune.model.loading.kept_precision import patterns_in_fp32

Example = tuple[torch.Tensor, torch.Tensor]
"""input_ids [1, tokens] and labels [tokens] of one example."""


SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "constant_with_warmup": lambda _: 1.0,
}
"""Share of the peak learning rate after `progress` (0 to 1) of the steps that follow the warm-up."""


@dataclass(frozen=True)
class LoopSettings:
    steps: int
    global_batch_size: int
    learning_rate: float
    warmup_steps: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    """0: gradients are not clipped."""
    optimizer: str = "adamw"
    """`adamw`, `sgd`, `adagrad`, `rmsprop` or `muon` (with AdamW for what is no hidden matrix): torch's own;
    `adafactor`: transformers'."""
    groups: tuple[tuple[str, float | None, float | None], ...] = ()
    """(pattern of names, learning rate, weight decay); the first that matches counts, None leaves the common
    value."""
    schedule: str = "cosine"
    label_smoothing: float = 0.0
    dft: bool = False
    """The loss of a token is multiplied by its probability, without a gradient through it."""
    frozen: tuple[str, ...] = ()
    """Patterns of parameter names that are not trained."""
    seed: int = 42
    shuffle: bool = True
    packed: bool = False
    stored_dtype: torch.dtype = torch.float32
    """The dtype of weights between steps."""
    compute_dtype: torch.dtype = torch.float32
    """bf16: each forward multiplies bf16 copies of the fp32 weights, the logits go to the loss in fp32,
    gradients add up in fp32.
    float64, stored so too: shows how far rounding alone carries a run in fp32."""
    adapter: Path | None = None
    """A PEFT adapter that is trained on the frozen model, by PEFT's own model."""
    quantised: tuple[str, int] | None = None
    """`quantization.train` and its group: every linear layer but the head is replaced by torchao's own
    prepare step."""
    skipped: frozenset[int] = frozenset()
    """Steps, from 1, whose update is left out, as fp16's loss scale does when it is too large."""
    schedule_waits: bool = True
    """Whether the schedule does not advance in skipped steps, as under fp16; under `on_nonfinite: skip` it
    does."""

    def position(self, step: int) -> int:
        """Return the position of the schedule in a step, from 0."""
        return step - (sum(each <= step for each in self.skipped) if self.schedule_waits else 0)


@dataclass
class Trajectory:
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    supervised_tokens: list[int] = field(default_factory=list)
    eval_loss: float = math.nan
    first_gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Gradients of the first step, after clipping, in fp32."""
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    final: dict[str, torch.Tensor] = field(default_factory=dict)


def train(
    settings: LoopSettings, model_directory: Path, train_rows: RowStore, *eval_rows: RowStore
) -> Trajectory:
    """Train the model of a Hugging Face directory, and return its trajectory. Deterministic on one thread."""
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=settings.stored_dtype).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatch.fnmatchcase(name, pattern) for pattern in settings.frozen))
    if settings.adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, settings.adapter, is_trainable=True)
    if settings.quantised is not None:
        emulate(model, *settings.quantised)
    result = Trajectory(initial=_copy(model, settings))
    optimizers = _optimizers(settings, model)
    for step, rows in zip(range(settings.steps), _global_batches(settings, train_rows), strict=False):
        loss, tokens, gradients = _accumulate(model, settings, rows)
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        factor = min(1.0, settings.max_grad_norm / (norm + 1e-6)) if settings.max_grad_norm else 1.0
        for name, parameter in model.named_parameters():
            parameter.grad = (gradients[name] * factor).to(parameter.dtype) if name in gradients else None
        if step == 0:
            result.first_gradients = {name: gradient * factor for name, gradient in gradients.items()}
        share = _schedule(settings.position(step), settings)
        for optimizer in optimizers if step + 1 not in settings.skipped else ():
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * share
            optimizer.step()
        model.zero_grad()
        result.losses.append(loss)
        result.grad_norms.append(norm)
        result.learning_rates.append(settings.learning_rate * share)
        result.supervised_tokens.append(tokens)
    result.final = _copy(model, settings)
    if eval_rows:
        result.eval_loss = evaluate(model, settings.compute_dtype, eval_rows)
    return result


def emulate(model: Any, values: str, group_size: int) -> None:
    """Replace every linear layer but the head by torchao's own prepare step. `values`: of
    `quantization.train`."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    int4, prepare = vars(torch)["int4"], cast(Any, "prepare")
    weights = IntxFakeQuantizeConfig(int4, group_size=group_size, is_symmetric=True)
    inputs = (
        IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False) if values == "int8-int4" else None
    )
    head = model.get_output_embeddings()
    step = QATConfig(activation_config=inputs, weight_config=weights, step=prepare)
    quantize_(model, step, filter_fn=lambda module, _: isinstance(module, nn.Linear) and module is not head)


def _optimizers(settings: LoopSettings, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers, with one group per parameter and its peak learning rate as `peak`."""
    groups: list[dict[str, Any]] = []
    hidden: list[dict[str, Any]] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decay = settings.weight_decay if parameter.ndim >= 2 and "bias" not in name else 0.0
        _, rate, own_decay = next(
            (each for each in settings.groups if fnmatch.fnmatchcase(name, each[0])), ("", None, None)
        )
        peak = settings.learning_rate if rate is None else rate
        group = {"lr": peak, "peak": peak, "weight_decay": decay if own_decay is None else own_decay}
        is_hidden = parameter.ndim >= 2 and not any(
            word in name for word in ("bias", "embed", "wte", "wpe", "lm_head")
        )
        (hidden if settings.optimizer == "muon" and is_hidden else groups).append(
            group | {"params": [parameter]}
        )
    options: dict[str, Any] = {"lr": settings.learning_rate, "foreach": False}
    if settings.optimizer == "adafactor":
        return [Adafactor(groups, lr=settings.learning_rate, scale_parameter=False, relative_step=False)]
    if settings.optimizer in ("adamw", "muon"):
        adamw = (
            [torch.optim.AdamW(groups, betas=settings.betas, eps=settings.epsilon, **options)]
            if groups
            else []
        )
        return [*adamw, *([_muon(hidden)] if hidden else [])]
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}
    return [kinds[settings.optimizer](groups, **options)]


def _muon(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return Muon with the matrices of a stack as parameters of their own, which share the stack's memory."""
    stacks: list[tuple[nn.Parameter, list[nn.Parameter]]] = []
    for group in groups:
        [parameter] = group["params"]
        if parameter.ndim == 3:
            group["params"] = [nn.Parameter(matrix) for matrix in parameter.detach()]
            stacks.append((parameter, group["params"]))

    def take_gradients(*_: object) -> None:
        for parameter, matrices in stacks:
            for index, matrix in enumerate(matrices):
                matrix.grad = None if parameter.grad is None else parameter.grad[index]

    optimizer = torch.optim.Muon(groups, adjust_lr_fn="match_rms_adamw")
    optimizer.register_step_pre_hook(take_gradients)
    return optimizer


def _copy(model: nn.Module, settings: LoopSettings) -> dict[str, torch.Tensor]:
    """Return all parameters, or with an adapter those that are trained, by their names in a run."""
    copies = {
        name: p.detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad or settings.adapter is None
    }
    if settings.adapter is None:
        return copies
    return {
        name.removeprefix(PREFIX).replace(".modules_to_save.default", ""): copy
        for name, copy in copies.items()
    }


def _global_batches(settings: LoopSettings, rows: RowStore) -> Iterator[list[Row]]:
    """Yield the rows of each step, epoch after epoch; the last batch of an epoch may be smaller."""
    lengths, size = rows.lengths, settings.global_batch_size
    for epoch in range(settings.steps):
        shuffled = epoch_order(
            lengths,
            seed=settings.seed,
            epoch=epoch,
            shuffle=settings.shuffle,
            group_by_length=not settings.packed,
            global_batch_size=size,
        )
        for start in range(0, len(shuffled), size):
            yield [rows[int(index)] for index in shuffled[start : start + size]]


def _schedule(step: int, settings: LoopSettings) -> float:
    if step < settings.warmup_steps:
        return step / settings.warmup_steps
    return SCHEDULES[settings.schedule](
        (step - settings.warmup_steps) / (settings.steps - settings.warmup_steps)
    )


def _examples(rows: list[Row]) -> Iterator[Example]:
    for row in rows:
        cuts = np.cumsum(row.lengths)[:-1]
        for ids, labels in zip(np.split(row.input_ids, cuts), np.split(row.labels, cuts), strict=True):
            yield torch.from_numpy(ids.astype(np.int64))[None], torch.from_numpy(labels.astype(np.int64))


class StepSums(NamedTuple):
    """Mean loss of a step over its supervised tokens, their number, and the gradient of each trained
    parameter in fp32."""

    loss: float
    tokens: int
    gradients: dict[str, torch.Tensor]


def _accumulate(model: nn.Module, settings: LoopSettings, rows: list[Row]) -> StepSums:
    """Compute the loss and the gradients of a step, one example at a time."""
    examples = list(_examples(rows))
    targets = sum(int((labels[1:] != -100).sum()) for _, labels in examples)
    tokens = sum(ids.shape[1] for ids, _ in examples)
    total, gradients = 0.0, dict[str, torch.Tensor]()
    for ids, labels in examples:
        loss, balance = _losses(
            model, settings.compute_dtype, (ids, labels), settings.label_smoothing, dft=settings.dft
        )
        (loss / targets + balance * ids.shape[1] / tokens).backward()
        total += float(loss.detach())
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradient = _at_least_fp32(parameter.grad)
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
                parameter.grad = None
    return StepSums(total / targets, targets, gradients)


def _at_least_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _losses(
    model: nn.Module,
    compute_dtype: torch.dtype,
    example: Example,
    label_smoothing: float = 0.0,
    *,
    dft: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return the summed token loss of an example, and its load-balancing loss times the coefficient (0 for a
    dense model)."""
    ids, labels = example
    kept = patterns_in_fp32(model, compute_dtype)
    weights = {name: p if name in kept else p.to(compute_dtype) for name, p in model.named_parameters()}
    outputs = torch.func.functional_call(model, weights, kwargs={"input_ids": ids, "use_cache": False})
    log_probabilities = torch.log_softmax(_at_least_fp32(outputs.logits[0]), dim=-1)
    supervised = [at for at, label in enumerate(labels.tolist()) if at > 0 and label != -100]
    balance = getattr(outputs, "aux_loss", None)
    before = [at - 1 for at in supervised]
    of_targets = log_probabilities[before, labels[supervised]]
    loss = -(of_targets * of_targets.detach().exp() if dft else of_targets).sum()
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * log_probabilities[before].mean(dim=-1).sum()
    if balance is None:
        return loss, 0.0
    return loss, balance * next(
        value for name in BALANCE_WEIGHTS if (value := getattr(model, name, None)) is not None
    )


@torch.no_grad()
def evaluate(model: nn.Module, compute_dtype: torch.dtype, stores: Iterable[RowStore]) -> float:
    """Return the mean loss over all supervised tokens of the sets, computed one example at a time."""
    model.eval()
    examples = list(_examples([store[index] for store in stores for index in range(len(store))]))
    losses = [float(_losses(model, compute_dtype, example)[0]) for example in examples]
    return sum(losses) / sum(int((labels[1:] != -100).sum()) for _, labels in examples)
