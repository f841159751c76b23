"""The lines of metrics.jsonl: what a step was, from sums over all ranks; tokens by expert; shares of the step
time.

Rank 0 writes them, with all digits. Shares are of one step of each line, the last, so that the others do not
pay for them. After a non-finite value, the forward of its step is repeated, and the output of every module is
checked.
"""

from __future__ import annotations

import inspect
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ParamSpec, TypedDict, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fsdp_tune.core.families import EXPERT_INDEX_ARGUMENTS, LAYERS, mean_heads
from fsdp_tune.core.gpus import ModelDimensions, detect, mfu
from fsdp_tune.core.units import GIB, KIB
from fsdp_tune.model.internals.torch_internals import GRAPH_TASK
from fsdp_tune.model.loading.assemble import Loaded
from fsdp_tune.model.sequence_parallel import rows_known
from fsdp_tune.model.shard.gathered import outside_step
from fsdp_tune.model.shard.local import plain_name
from fsdp_tune.model.shard.wrap import fsdp_groups
from fsdp_tune.model.step import compute_context, micro_batch_loss
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.worker.agreement import gather
from fsdp_tune.worker.rows.batches import Batch
from fsdp_tune.worker.rows.training_rows import TrainingRows
from fsdp_tune.worker.step_observer import LoggedStep, RankTimes, StepObserver

P = ParamSpec("P")
R = TypeVar("R")


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
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB / GIB

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
                t.is_floating_point() and not bool(torch.isfinite(t).all()) for t in _tensors(output)
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


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for inner in value for t in _tensors(inner)] if isinstance(value, list | tuple) else []


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
        more = f" (and {len(found) - 1} more micro-batches)" if len(found) > 1 else ""
        return f"rank {found[0][0]}, {found[0][1]}{more}"
    mine = [rows.describe(batch) for batch in batches]
    everything = "; ".join(f"rank {rank}: {', '.join(texts)}" for rank, texts in enumerate(gather(mine)))
    return f"every module's output is finite, so it arose in the backward; the step's rows: {everything}"


_NO_BACKWARD = -1


class ExpertLoads(StepObserver, TrainerCallback):
    """Counts tokens by expert in the steps that are logged. Without layers that it recognises it adds nothing
    to the lines."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._layers: dict[str, torch.Tensor] = {}
        """Tokens of each expert by layer, on this rank, int64 on the device; one more for indices that stand
        for no expert."""
        self._is_counting = self._is_counted = False
        backward: Callable[[], int] | None = GRAPH_TASK.get()
        if backward is None:
            return
        for name, module in model.named_modules():
            parameters = list(inspect.signature(type(module).forward).parameters)[1:]
            argument = next(
                (index for index, each in enumerate(parameters) if each in EXPERT_INDEX_ARGUMENTS), None
            )
            experts = getattr(module, "num_experts", None)
            if argument is not None and isinstance(experts, int):
                self._layers[plain_name(name)] = counts = torch.zeros(
                    experts + 1, dtype=torch.int64, device=device
                )
                self._count_calls(module, argument, parameters[argument], counts, backward)

    def _count_calls(
        self, module: nn.Module, position: int, name: str, counts: torch.Tensor, backward: Callable[[], int]
    ) -> None:
        """Count when `module` is called. Its indices are the argument at `position`, or of this `name`;
        `backward` returns the number of the running one, or `_NO_BACKWARD`."""

        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # A layer that is recomputed runs a second time, inside the backward.
            if not self._is_counting or not module.training or backward() != _NO_BACKWARD:
                return
            indices = (kwargs[name] if name in kwargs else args[position]).detach().reshape(-1)
            counts.scatter_add_(0, indices.long(), torch.ones_like(indices, dtype=torch.int64))

        module.register_forward_pre_hook(count, with_kwargs=True)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        step = state.global_step + 1
        is_first = step == 1 and bool(args.logging_first_step)
        self._is_counting = self._is_counted = (
            is_first or step % max(int(args.logging_steps), 1) == 0 or step == state.max_steps
        )
        if self._is_counting:
            for counts in self._layers.values():
                counts.zero_()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._is_counting = False

    def facts(self, step: LoggedStep) -> dict[str, object]:
        """Return the fields of the line of the step that has ended. Collective: tokens are summed over all
        ranks."""
        if not self._layers or not self._is_counted:
            return {}
        counts = torch.cat(list(self._layers.values()))
        dist.all_reduce(counts)
        parts = counts.cpu().split([each.numel() for each in self._layers.values()])
        by_layer = {name: part[:-1] for name, part in zip(self._layers, parts, strict=True)}
        loads = {
            name: each.double() / each.double().mean().clamp(min=1e-9) for name, each in by_layer.items()
        }
        worst = max(loads, key=lambda name: float(loads[name].max()))
        return {
            "expert_load_max": float(loads[worst].max()),
            "expert_load_min": min(float(each.min()) for each in loads.values()),
            "experts_unused": sum(int((each == 0).sum()) for each in by_layer.values()),
            "expert_tokens": by_layer[worst].tolist(),
            "expert_layer": worst,
        }


STEP, OPTIMIZER, COMMUNICATION = "step", "optimizer", "communication"
# What FSDP2 runs on the compute stream. On CUDA an all-gather runs on another stream, and only the wait for
# it is in these; on a CPU the call itself is.
_COMMUNICATING = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")

Moment = float | torch.cuda.Event


class Stopwatch:
    """Moments of the current stream on CUDA, which cost no synchronisation until they are compared; of the
    host elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def now(self) -> Moment:
        if not self._is_cuda:
            return time.perf_counter()
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment

    def seconds(self, begin: Moment, end: Moment) -> float:
        """Return the measured seconds. The device must have passed `end`."""
        if not isinstance(begin, torch.cuda.Event):
            assert isinstance(end, float)
            return end - begin
        assert isinstance(end, torch.cuda.Event)
        return begin.elapsed_time(end) / 1000


class StepShares(StepObserver, TrainerCallback):
    """Measure the logged steps; `facts` returns and resets. On a CPU, the collectives of all steps are
    counted as waits."""

    _times: RankTimes | None = None

    def __init__(self, wrapped: nn.Module, device: torch.device) -> None:
        self._watch = Stopwatch(device)
        self.has_device_clock = device.type == "cuda"
        self.on_device: tuple[float, float] | None = None
        """Seconds of the last logged step on the device, and of them in communication; None: not measured."""
        self._spans: dict[str, list[tuple[Moment, Moment]]] = defaultdict(list)
        self._is_measuring = False
        self._step_began: Moment | None = None
        self._optimizer_began: Moment | None = None
        groups = fsdp_groups(wrapped)
        self.sees_communication = bool(groups)
        for group in groups:
            for name in _COMMUNICATING:
                setattr(group, name, self._timed(getattr(group, name)))

    def attach(self, trainer: Any) -> None:
        self._times = None if self.has_device_clock else trainer.times

    def _timed(self, call: Callable[P, R]) -> Callable[P, R]:
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._times.waiting() if self._times is not None else nullcontext():
                if not self._is_measuring:
                    return call(*args, **kwargs)
                with self._span(COMMUNICATION):
                    return call(*args, **kwargs)

        return timed

    @contextmanager
    def _span(self, kind: str) -> Iterator[None]:
        begin = self._watch.now()
        yield
        self._spans[kind].append((begin, self._watch.now()))

    def facts(self, step: LoggedStep) -> dict[str, float | None]:
        """Return the seconds of the last measured step; None if not measured. The device must have passed
        it."""
        self._is_measuring = False
        sums = {
            kind: sum(self._watch.seconds(*span) for span in spans) for kind, spans in self._spans.items()
        }
        self._spans.clear()
        step_seconds = sums.get(STEP)
        self.on_device = (
            None
            if step_seconds is None or not self.has_device_clock
            else (step_seconds, sums.get(COMMUNICATION, 0.0))
        )
        return {
            "last_step_seconds": step_seconds,
            "optimizer_seconds": sums.get(OPTIMIZER),
            "exposed_communication_seconds": sums.get(COMMUNICATION) if self.sees_communication else None,
        }

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        step = state.global_step + 1
        self._is_measuring = step % max(int(args.logging_steps), 1) == 0 or step == state.max_steps
        self._step_began = self._watch.now() if self._is_measuring else None

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._optimizer_began = self._watch.now() if self._is_measuring else None

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self._optimizer_began is not None and self._step_began is not None:
            ended = self._watch.now()
            self._spans[OPTIMIZER].append((self._optimizer_began, ended))
            self._spans[STEP].append((self._step_began, ended))
            self._step_began = self._optimizer_began = None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._is_measuring = False  # an evaluation gathers too
