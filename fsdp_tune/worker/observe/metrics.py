"""The lines of metrics.jsonl: what a step was, from sums over all ranks.

Rank 0 writes them, with all digits. After a non-finite value, the forward of its step is repeated, and the
output of every module is checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import nn

from fsdp_tune.core.families import LAYERS, mean_heads
from fsdp_tune.core.gpus import ModelDimensions, detect, mfu
from fsdp_tune.core.host import peak_resident_bytes
from fsdp_tune.core.units import GIB, counted
from fsdp_tune.model.loading.assemble import Loaded
from fsdp_tune.model.nested_tensors import tensors_in
from fsdp_tune.model.sequence_parallel import rows_known
from fsdp_tune.model.shard.gathered import outside_step
from fsdp_tune.model.step import compute_context, micro_batch_loss
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.worker.agreement import gather
from fsdp_tune.worker.rows.batches import Batch
from fsdp_tune.worker.rows.training_rows import TrainingRows
from fsdp_tune.worker.step_observer import LoggedStep, StepObserver


class Totals(TypedDict):
    """The sums of all ranks since the last line."""

    attended_length: float
    """Tokens that a token attends to, on average."""
    loss_sum: float
    tokens: float
    supervised_tokens: float
    data_wait_seconds: float
    """Of this rank."""
    grad_norm: float
    """Of rank 0."""
    source_losses: list[float | None]
    """Mean token loss of each source; None for one without supervised tokens."""


class Sums:
    """Running totals of this rank since the last line. Losses stay on the device until a line is written."""

    def __init__(self, device: torch.device, sources: int = 0) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self.source_losses = torch.zeros(sources, dtype=torch.float64, device=device) if sources else None
        """Sums of the token losses of each source, to which `micro_batch_loss` adds."""
        self._source_supervised = [0] * sources
        self._tokens = 0
        self._supervised = 0
        self._data_wait_seconds = 0.0
        self._attended = self._attending = 0
        self.reset()

    def reset(self) -> None:
        self._loss.zero_()
        if self.source_losses is not None:
            self.source_losses.zero_()
        self._source_supervised = [0] * len(self._source_supervised)
        self._tokens = self._supervised = 0
        self._attended = self._attending = 0
        self._data_wait_seconds = 0.0

    def add(self, loss_sum: torch.Tensor) -> None:
        self._loss += loss_sum

    def add_batch(self, tokens: int, supervised: int, data_wait_seconds: float, attended: int = 0) -> None:
        """`tokens` and `supervised` of this rank; summed over ranks when a line is written.

        `attended`: Σ length² over the examples, packed ones each by itself. It is in no checkpoint: a line
        after a resume has the mean length of what came since.
        """
        self._tokens += tokens
        self._attended, self._attending = self._attended + attended, self._attending + tokens
        self._supervised += supervised
        self._data_wait_seconds += data_wait_seconds

    def add_sources(self, supervised: Iterable[Sequence[int]]) -> None:
        """Supervised tokens of each source in each batch of this rank; none for batches without
        `source_ids`."""
        self._source_supervised = [
            sum(counts) for counts in zip(self._source_supervised, *filter(None, supervised), strict=True)
        ]

    def state(self) -> list[float]:
        """For a checkpoint: a line that a resumed run writes must be the line of the uninterrupted run."""
        return [float(self._loss.item()), float(self._tokens), float(self._supervised), *self._of_sources()]

    def load(self, state: list[float]) -> None:
        """Continue from `state`. If it was saved without losses of sources, the next line has those of the
        steps from here on."""
        self._loss.fill_(state[0])
        self._tokens, self._supervised = int(state[1]), int(state[2])
        losses, counts = (
            state[3 : 3 + len(self._source_supervised)],
            state[3 + len(self._source_supervised) :],
        )
        if self.source_losses is not None and len(counts) == len(losses) == len(self._source_supervised):
            self.source_losses.copy_(torch.tensor(losses, dtype=torch.float64))
            self._source_supervised = [int(count) for count in counts]

    def _of_sources(self) -> list[float]:
        """Return the loss sum of each source, then the supervised tokens of each."""
        return (
            []
            if self.source_losses is None
            else [*self.source_losses.tolist(), *map(float, self._source_supervised)]
        )

    def reduced(self, grad_norm: float = 0.0) -> Totals:
        """One all-reduce: loss sum, tokens and supervised tokens of all ranks, also by source; the wait of
        this rank.

        `grad_norm` of rank 0 is returned on all ranks, so that they compare the same number.
        """
        norm = grad_norm if dist.get_rank() == 0 else 0.0
        own = [
            float(self._loss.item()),
            self._tokens,
            self._supervised,
            self._attended,
            self._attending,
            norm,
            *self._of_sources(),
        ]
        totals = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(totals)
        attending = totals[4].item()
        return {
            "attended_length": totals[3].item() / attending if attending else 0.0,
            "loss_sum": totals[0].item(),
            "tokens": totals[1].item(),
            "supervised_tokens": totals[2].item(),
            "data_wait_seconds": self._data_wait_seconds,
            "grad_norm": totals[5].item(),
            "source_losses": [
                None if count == 0 else loss / count
                for loss, count in zip(*totals[6:].view(2, -1).tolist(), strict=True)
            ],
        }


def peak_memory_gib(device: torch.device) -> dict[str, float | None]:
    """Return peaks of this rank in GiB since the start: the resident memory of the process, and what its
    device's allocator counted.

    None for what the device's module in torch does not count: on a CPU, on an Apple GPU.
    """
    host = peak_resident_bytes() / GIB

    def peak(kind: str) -> float | None:
        count = getattr(getattr(torch, device.type, None), f"max_memory_{kind}", None)
        return None if count is None else count(device) / GIB

    return {
        "peak_allocated_gib": peak("allocated"),
        "peak_reserved_gib": peak("reserved"),
        "peak_host_gib": host,
    }


def device_peak_flops(device: torch.device) -> float | None:
    """Return the dense bf16 peak of the device by the name of its driver; None on a CPU and for a GPU missing
    in the table."""
    known = detect(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return known.peak_flops("bf16") if known is not None else None


def model_size(loaded: Loaded) -> ModelDimensions | None:
    """Return the model's numbers for the MFU formula; None if its config lacks them."""
    config = loaded.model.config.get_text_config()
    layers, active = LAYERS.of(config), loaded.size.active_parameters
    heads, width = mean_heads(config)
    if not layers or not heads or not width or active is None:
        return None
    return ModelDimensions(active, loaded.size.trained_parameters, layers, heads, width)


class Lines(StepObserver):
    """Write the lines of metrics.jsonl: the sums since the last line, and their time."""

    def __init__(
        self,
        device: torch.device,
        model: ModelDimensions | None = None,
        peak_flops: float | None = None,
        *,
        devices: int = 1,
        sources: Sequence[str] = (),
    ) -> None:
        """`model` and the device's dense bf16 peak are for the MFU, which is null without them. `devices`: of
        all ranks. `sources`: names of the training sources, if each has its loss in a line."""
        self._device, self._devices = device, devices
        self._model, self._peak_flops, self._sources = model, peak_flops, sources
        self.sums = Sums(device, len(sources))
        self.tokens = 0
        """Non-padding tokens of all ranks since the start of the run."""
        self.last_loss: float | None = None
        self.last_grad_norm: float | None = None
        """Of rank 0; None for a step without one."""
        self.checkpoint_stall_seconds = 0.0
        """For which saves that ended since the last line have held up the training."""
        self._time = time.monotonic()
        self._step = 0

    def start(self, step: int) -> None:
        """Start the clock at `step`; time outside training since the last line does not count."""
        self._time, self._step = time.monotonic(), step

    def leave_out(self, seconds: float) -> None:
        """Takes time that was no part of a step (evaluation, a save) out of the next line."""
        self._time += seconds

    def facts(self, step: LoggedStep) -> dict[str, object]:
        """All ranks take part; the numbers are the same on each, but for memory and waiting, which are this
        rank's."""
        seconds = time.monotonic() - self._time
        steps = max(1, step.step - self._step)
        totals = self.sums.reduced(step.grad_norm or 0.0)
        self.tokens += int(totals["tokens"])
        self.last_loss = totals["loss_sum"] / totals["supervised_tokens"]
        self.last_grad_norm = None if step.grad_norm is None else totals["grad_norm"]
        self.sums.reset()
        self.start(step.step)
        stall_seconds, self.checkpoint_stall_seconds = self.checkpoint_stall_seconds, 0.0
        speed = totals["tokens"] / seconds / self._devices
        return {
            "loss": self.last_loss,
            "grad_norm": self.last_grad_norm,
            "learning_rate": step.learning_rate,
            "tokens": self.tokens,
            "supervised_tokens": int(totals["supervised_tokens"]),
            "tokens_per_second_per_device": speed,
            "step_seconds": seconds / steps,
            "data_wait_seconds": totals["data_wait_seconds"] / steps,
            "checkpoint_stall_seconds": stall_seconds,
            "mfu": mfu(self._model, totals["attended_length"], speed, self._peak_flops)
            if self._model
            else None,
            **peak_memory_gib(self._device),
            **{
                f"source_{name}_loss": loss
                for name, loss in zip(self._sources, totals["source_losses"], strict=True)
            },
        }


def first_bad_module(recipe: Recipe, loaded: Loaded, batch: Batch, device: torch.device) -> str | None:
    """Name of the first module, in the order of the forward, whose output has a NaN or an infinity;
    collective under FSDP."""
    bad: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(_module: nn.Module, _args: object, output: object) -> None:
            if not bad and any(
                t.is_floating_point() and not bool(torch.isfinite(t).all()) for t in tensors_in(output)
            ):
                bad.append(name)

        return hook

    # Leaves before their parents: report the innermost module.
    handles = [
        module.register_forward_hook(watch(name)) for name, module in loaded.model.named_modules() if name
    ]
    try:
        tensors = {name: tensor.to(device) for name, tensor in batch.tensors.items()}
        with (
            outside_step(loaded.wrapped, device),
            rows_known(loaded.wrapped, tensors),
            compute_context(recipe, device.type),
        ):
            micro_batch_loss(loaded.wrapped, tensors)  # as in the step: full logits may not fit
    finally:
        for handle in handles:
            handle.remove()
    return bad[0] if bad else None


def describe(
    recipe: Recipe, loaded: Loaded, batches: list[Batch], rows: TrainingRows, device: torch.device
) -> str:
    """Return one sentence for all ranks: module, rank and rows, or that only the backward pass is not
    finite."""
    mine: list[str] = []
    for number, batch in enumerate(batches):
        module = first_bad_module(recipe, loaded, batch, device)
        if module is not None:
            mine.append(
                f"micro-batch {number + 1}, {rows.describe(batch)}: the output of `{module}` is the "
                "first that is not finite"
            )
    found = [(rank, text) for rank, texts in enumerate(gather(mine)) for text in texts]
    if found:
        others = len(found) - 1
        more = f" (and {counted(others, 'more micro-batch', 'es')})" if others else ""
        return f"rank {found[0][0]}, {found[0][1]}{more}"
    mine = [rows.describe(batch) for batch in batches]
    everything = "; ".join(f"rank {rank}: {', '.join(texts)}" for rank, texts in enumerate(gather(mine)))
    return f"every module's output is finite, so it arose in the backward; the step's rows: {everything}"
