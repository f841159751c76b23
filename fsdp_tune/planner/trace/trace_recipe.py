"""Trace a recipe: choose the layers to run, run the step in a fake process group, and count the full model.

Trace recipes for another process: torch is imported once, and each core has a worker whose torch caches stay warm.

    python -m fsdp_tune.planner.trace.trace_recipe

A job is a line on stdin: {"job": 0, "recipe": …, "exact": false, "vocabulary": null, "output": "/cache/KEY.npz"}. Its result is a line
on stdout: {"job": 0, "problems": []}. A job that cannot be traced lists its problems and writes no file. Jobs are accepted until stdin
ends; unfinished ones are then abandoned.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import sys
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fsdp_tune.core.devices import available_cores
from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.core.families import HIDDEN_SIZE, mean_heads
from fsdp_tune.model.experts import active_parameters
from fsdp_tune.model.internals.torch_internals import CHUNKS, FAKE_STORE
from fsdp_tune.model.kernels.linear_layers import plan_fp8
from fsdp_tune.model.loading.construct import attention, config_or_facts
from fsdp_tune.model.loading.positions import positions_of_run
from fsdp_tune.model.shard.fsdp_units import UnitPlan, decoder_layers, plan_units
from fsdp_tune.model.shard.local import TORCH_DTYPE, count_elements, kept_in_fp32
from fsdp_tune.model.shard.wrap import shard_dim
from fsdp_tune.planner.predict.depth import DepthError, Repeated, full_depth, repeated_layers
from fsdp_tune.planner.trace import cuda_kernels, fake_gpu
from fsdp_tune.planner.trace.fake_gpu import (
    STREAMS,
    build_traced,
    container_of,
    has_unit_of_several_layers,
    layer_signatures,
    replaced,
    shallow_recipe,
    without_dropped,
)
from fsdp_tune.planner.trace.recorder import Recorder
from fsdp_tune.planner.trace.traced_step import STEPS, Run, most_tokens, run_step
from fsdp_tune.planner.trace_format import COLLECTIVE, EVENT, OP, WAIT, Counts, Shapes, Trace, TraceFacts, Unit, fuse
from fsdp_tune.recipe.references import without_adapter
from fsdp_tune.recipe.rules.limits import gathers_in_fp8
from fsdp_tune.recipe.schema.recipe import Recipe


def trace_recipe(recipe: Recipe, *, exact: bool = False, vocabulary: int | None = None) -> Trace:
    """Return the trace of a resolved recipe's step on rank 0 of its world.

    `exact` runs every decoder layer. Otherwise equal layers in the middle are left out, as many as `planner.predict.depth.full_depth` can
    restore; all are run if they turn out not to repeat. Raises: FsdpTuneError (exit 2) for a model that is not found or that
    transformers rejects.
    """
    config, _ = config_or_facts(recipe)
    if not exact:
        try:
            trace = _trace(recipe, config, vocabulary, exact=False)
            full_depth(trace)
            return trace
        except DepthError:
            pass  # FSDP1 processes units in another order; a model may have other layers at its ends
    return _trace(recipe, config, vocabulary, exact=True)


def _trace(recipe: Recipe, config: PreTrainedConfig, vocabulary: int | None, *, exact: bool) -> Trace:
    flash_version = 3 if recipe.model.attn_implementation == "flash_attention_3" else 2
    kernel = attention(recipe, config)
    recipe, model = build_traced(recipe, config, vocabulary)
    plan = plan_units(recipe, model) if recipe.is_sharded else UnitPlan((), frozenset())
    groups = plan.groups
    counts, units = count(recipe, config, model), unit_list(recipe, model, plan)
    repeated: Repeated | None = None
    container = None if exact else container_of(recipe, model)
    # The unit of the holder grows with the number of layers.
    if container is not None and plan.holder is None and not has_unit_of_several_layers(recipe, model, groups):
        repeated = repeated_layers(layer_signatures(recipe, model, groups), reach=_reach(recipe))
        if repeated is not None:
            recipe = shallow_recipe(recipe, container, repeated, model, groups)
            model = without_dropped(model, container, repeated)
    with fake_world(recipe.world_size):
        run = run_step(recipe, model, kernel=kernel)
        trace = assemble(recipe, config, run, counts, units, repeated)
    return replace(trace, facts=replace(trace.facts, flash_version=flash_version))


def _reach(recipe: Recipe) -> int:
    """Return how many layers ahead units are gathered."""
    backward = recipe.fsdp.backward_prefetch
    return max(1, int(recipe.fsdp.forward_prefetch), backward if isinstance(backward, int) else 1)


# ---- A fake process group of any size in one process, which is its rank 0.


@contextlib.contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Initialise the default process group; its collectives return immediately and leave their buffers unchanged."""
    assert not dist.is_initialized(), "a trace needs a separate process"
    fake_gpu.install()
    fake_gpu.install_autocast()
    cuda_kernels.install()
    dist.init_process_group(f"cpu:fake,{fake_gpu.DEVICE}:fake", store=FAKE_STORE.get()(), rank=0, world_size=size)
    try:
        # FSDP2 waits on this stream for units that were gathered but not used, such as frozen ones below the last gradient.
        on_accelerator = replaced(torch.accelerator, "current_stream", fake_gpu.current_stream)
        with on_accelerator, CHUNKS.replaced(_Chunks):
            yield
    finally:
        dist.destroy_process_group()


class _Chunks(Sequence[torch.Tensor]):
    """The result of `torch.chunk`, padded with empty chunks, created lazily: FSDP2 uses only two of the chunks of all ranks."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self.tensor, self.chunks, self.dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self.chunks

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        length = self.tensor.shape[self.dim]
        size = -(-length // self.chunks)
        begin = index * size
        return self.tensor.narrow(self.dim, begin, min(size, length - begin)) if begin < length else self.tensor.new_empty(0)


# ---- A recorded run as a trace of the planner


def assemble(
    recipe: Recipe, config: PreTrainedConfig, run: Run, counts: Counts, units: tuple[Unit, ...], repeated: Repeated | None
) -> Trace:
    """Return the trace of a run. `config`, `counts` and `units` are those of the full model."""
    recorder = run.recorder
    events = np.array(recorder.events, EVENT)
    events["kind"] = np.array(recorder.kinds, np.int8)[events["block"]]
    topology = recipe.topology
    clock = recorder.clock
    return Trace(
        events=events,
        ops=_ops(recorder, events),
        collectives=np.array(recorder.collectives, COLLECTIVE),
        waits=_waits(clock.waits, events),
        streams=STREAMS,
        modules=tuple(recorder.modules),
        op_names=tuple(recorder.op_names),
        units=units,
        counts=counts,
        shapes=Shapes(
            micro_batch=recipe.training.per_device_train_batch_size,
            tokens=recipe.data.max_length,
            accumulation=recipe.training.gradient_accumulation_steps or 1,
            traced_micro_batches=run.micro_batches,
            traced_steps=STEPS,
            topology=topology,
            is_sharded=recipe.is_sharded,
        ),
        traced_layers=run.layers,
        period=repeated.period if repeated else 1,
        first_repeated=repeated.first if repeated else 0,
        facts=TraceFacts(
            attention=sorted(run.attention),
            slice_tokens=most_tokens(counts.vocabulary) if run.loaded.kernels["kernels.loss"].value == "chunked" else None,
            torch=metadata.version("torch"),
            transformers=metadata.version("transformers"),
            python=platform.python_version(),
            config=config.to_diff_dict(),
            max_positions=positions_of_run(recipe, config),
            experts_inside=recipe.is_sharded
            and any(shard_dim(recipe, each.shape, topology.copy_size) for each in run.loaded.model.parameters()),
        ),
    )


def _ops(recorder: Recorder, events: Any) -> Any:
    """Return the table of operations, with those of compiled layers fused."""
    ops = np.array(recorder.ops, OP)
    if not recorder.compiles:
        return ops
    allocated = events[events["bytes"] > 0]
    sizes = dict(zip(allocated["block"].tolist(), allocated["bytes"].tolist(), strict=True))
    return fuse(ops, recorder.calls, sizes, recorder.micro_batch, recorder.slice_tokens)


def _waits(waits: list[tuple[int, int, int, int]], events: Any) -> Any:
    """Return the table of waits; each has step, phase and layer of the last allocation before it."""
    table = np.zeros(len(waits), WAIT)
    if waits:
        for column, values in zip(("at", "stream", "source", "until"), zip(*waits, strict=True), strict=True):
            table[column] = values
        before = np.maximum(np.searchsorted(events["at"], table["at"]) - 1, 0)
        for column in ("step", "micro", "phase", "layer", "module"):
            table[column] = events[column][before]
    return table


def count(recipe: Recipe, config: PreTrainedConfig, model: PreTrainedModel) -> Counts:
    """Return the counts of the full model, which is on the meta device."""
    parameters = list(model.parameters())
    heads, width = mean_heads(config)
    head = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    return Counts(
        parameters=count_elements(model.named_parameters()),
        active_parameters=active_parameters(config, model.named_parameters()),
        trained_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        layers=len(decoder_layers(model, recipe.layer_classes)),
        hidden_size=HIDDEN_SIZE.of(config) or 0,
        attention_heads=heads,
        head_dim=width,
        vocabulary=int(embedding.weight.shape[0]),
        tied_embeddings=head is not None and head.weight is embedding.weight,
    )


def unit_list(recipe: Recipe, model: PreTrainedModel, plan: UnitPlan) -> tuple[Unit, ...]:
    """Return the units of the full model in the order of wrapping, the root last; one 'unit' for plain DDP."""
    layer_of = {name: index for index, (name, _) in enumerate(decoder_layers(model, recipe.layer_classes))}
    in_fp8 = _ids_gathered_in_fp8(recipe, model)
    held = {name: model.get_parameter(name) for name in plan.held}
    taken = {id(parameter) for parameter in held.values()}
    units = [_unit(recipe, model, group, layer_of.get(group[0], -1), taken, in_fp8) for group in plan.groups]
    if plan.holder is not None:
        size_bytes = sum(p.numel() * p.element_size() for p in held.values())
        units.append(Unit(plan.holder, -1, count_elements(held.items()), size_bytes, size_bytes))
    return (*units, _unit(recipe, model, ("",), -1, taken, in_fp8))


def _ids_gathered_in_fp8(recipe: Recipe, model: PreTrainedModel) -> set[int]:
    """Return the ids of the weights that are gathered in fp8."""
    names = plan_fp8(recipe, model).gathered if gathers_in_fp8(recipe) else ()
    return {id(model.get_submodule(name).weight) for name in names}


def _unit(recipe: Recipe, model: nn.Module, group: tuple[str, ...], layer: int, taken: set[int], in_fp8: set[int]) -> Unit:
    named: dict[str, nn.Parameter] = {}
    for name in group:
        for own_name, parameter in model.get_submodule(name).named_parameters(prefix=name):
            if id(parameter) not in taken:
                taken.add(id(parameter))
                named[own_name] = parameter
    own = named.values()
    width = TORCH_DTYPE[recipe.compute_dtype].itemsize
    kept = kept_in_fp32(model)
    sizes = {own_name: 1 if id(p) in in_fp8 or p.dtype == torch.uint8 else width for own_name, p in named.items()}
    gathered = sum(p.numel() * (p.element_size() if own_name in kept else sizes[own_name]) for own_name, p in named.items())
    stored = sum(p.numel() * p.element_size() for p in own)
    return Unit(
        name=", ".join(group) or "(root)",
        layer=layer,
        parameters=count_elements(named.items()),
        parameter_bytes=stored,
        gathered_bytes=gathered,
    )


# ---- Traces for another process: torch is imported once, and each core has a worker whose caches of torch stay warm

MOST_WORKERS = 8
STDIN, STDOUT, STDERR = 0, 1, 2


def trace_one(job: dict[str, Any]) -> list[Problem]:
    """Write the trace of one job. Return its problems, [] on success."""

    recipe = without_adapter(Recipe.model_validate(job["recipe"]))
    try:
        trace = trace_recipe(recipe, exact=job["exact"], vocabulary=job["vocabulary"])
    except FsdpTuneError as error:
        return list(error.problems)
    except Exception as error:  # noqa: BLE001  a failure of torch or the model's code must not end the search
        traceback.print_exc()
        return [Problem("trace-failed", f"the step could not be traced: {type(error).__name__}: {str(error).splitlines()[0]}")]
    trace.save(Path(job["output"]))
    return []


class Worker:
    """A forked process that traces jobs one by one."""

    def __init__(self, others: list[Worker]) -> None:
        self.connection: Connection
        self.connection, theirs = Pipe()  # pyright: ignore[reportAttributeAccessIssue]  POSIX only
        self.job: int | None = None
        self.process = os.fork()
        if self.process == 0:
            for other in (*others, self):  # otherwise a worker would keep the connection of another one open
                other.connection.close()
            _work(theirs)  # pyright: ignore[reportArgumentType]
        theirs.close()

    def start(self, job: dict[str, Any]) -> None:
        self.job = job["job"]
        self.connection.send(job)

    def result(self) -> dict[str, Any]:
        """Return the result of the finished job. Raises: EOFError if the worker died."""
        job, self.job = self.job, None
        return {"job": job, "problems": self.connection.recv()}


def _work(connection: Connection) -> None:
    """Trace jobs until the connection closes; never returns."""
    os.dup2(STDERR, STDOUT)  # output of a model must not mix with results
    try:
        while True:
            connection.send([problem.as_dict() for problem in trace_one(connection.recv())])
    except (EOFError, KeyboardInterrupt):
        pass
    finally:
        sys.stderr.flush()
        os._exit(0)


class Server:
    """Distributes jobs to workers; a worker is created only when a job waits for one."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.waiting: deque[dict[str, Any]] = deque()
        self.workers: list[Worker] = []
        self._text = b""

    def run(self) -> None:
        while True:
            ready = wait([STDIN, *(worker.connection for worker in self.workers if worker.job is not None)])
            for worker in [worker for worker in self.workers if worker.connection in ready]:
                self._answer(worker)
            if STDIN in ready and not self._read():
                break
            self._start()
        for worker in self.workers:
            worker.connection.close()

    def _read(self) -> bool:
        """Read jobs from stdin. Return False at its end."""
        part = os.read(STDIN, 1 << 16)
        *lines, self._text = (self._text + part).split(b"\n")
        self.waiting += map(json.loads, lines)
        return bool(part)

    def _start(self) -> None:
        while self.waiting:
            idle = next((worker for worker in self.workers if worker.job is None), None)
            if idle is None and len(self.workers) >= self.most:
                return
            if idle is None:
                idle = Worker(self.workers)
                self.workers.append(idle)
            idle.start(self.waiting.popleft())

    def _answer(self, worker: Worker) -> None:
        job = worker.job
        try:
            answer = worker.result()
        except EOFError:
            self.workers.remove(worker)
            status = os.waitstatus_to_exitcode(os.waitpid(worker.process, 0)[1])
            crashed = Problem("trace-failed", f"the process that traced ended with status {status}")
            answer = {"job": job, "problems": [crashed.as_dict()]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def main() -> None:
    importlib.import_module("fsdp_tune.planner.trace.trace_recipe")  # before the forks: the import is the long part
    Server(min(MOST_WORKERS, available_cores())).run()
    sys.stderr.flush()
    os._exit(0)  # skips torch's exit handlers, which take half a second


if __name__ == "__main__":
    main()
