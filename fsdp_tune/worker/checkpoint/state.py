"""Convert the state of live objects to checkpoint contents and back, for any sharding at save and load."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from fsdp_tune.core.errors import failed_error
from fsdp_tune.core.library_errors import BLOCKS_CUT
from fsdp_tune.model.shard.local import copy_part, plain, plain_name, refresh_scales
from fsdp_tune.run.directory import FULL_MODEL_FILE, SHARD_FOLDER
from fsdp_tune.worker.agreement import gather
from fsdp_tune.worker.checkpoint.exchange import ScatteredFiles
from fsdp_tune.worker.checkpoint.storage import BlocksOnHost, RestrictedReader
from fsdp_tune.worker.stop_request import StoppedEarly

OPTIMIZER_DIRECTORY = "optimizer_0"  # Accelerate's name, as SHARD_FOLDER is


FULL_OPTIMIZER_FILE = "optimizer.safetensors"


@dataclass(frozen=True, slots=True)
class Live:
    """The objects that a checkpoint describes. `wrapped` is the module to call."""

    wrapped: nn.Module
    optimizer: torch.optim.Optimizer | None
    """None if only the model is used."""
    full: bool
    """FULL_STATE_DICT: rank 0 writes full tensors."""
    scattered: ScatteredFiles | None = None
    """Where the files of the checkpoint to load are, if each machine has a part of them."""
    trained_only: bool = False
    """Whether frozen parameters and buffers are left out: those of an adapter's base, which is loaded from
    its own files."""


class PythonGenerator(TypedDict):
    """`random.getstate()`."""

    version: int
    words: torch.Tensor
    """int64 [625]"""
    gauss: float | None


class NumpyGenerator(TypedDict):
    """`numpy.random.get_state()`."""

    kind: str
    keys: torch.Tensor
    """int64 [624]"""
    position: int
    has_gauss: int
    cached: float


class Generators(TypedDict):
    """The state of the generators of a rank; `torch` and `device` are bytes (uint8)."""

    python: PythonGenerator
    numpy: NumpyGenerator
    device: NotRequired[torch.Tensor]
    """A rank on the CPU has none."""
    torch: torch.Tensor


class OwnState(TypedDict):
    """The state of a rank that no other rank has. Files of earlier versions lack some of it."""

    sums: list[float]
    """Totals since the last line of metrics.jsonl."""
    loss_scale: dict[str, float] | None
    """Of fp16."""
    skipped_steps: NotRequired[int]
    unwritten: list[str]
    """Lines of metrics.jsonl that could not be written."""
    rows: NotRequired[object]
    """What the training rows need beyond the step."""
    evaluated: NotRequired[bool]
    """Whether the step was evaluated before its checkpoint was saved."""
    best_by: NotRequired[str | None]
    """By what the best of trainer_state.json was chosen: `worker.best.chosen_by`."""


class RankFile(TypedDict):
    """A rank's own file in a checkpoint."""

    rng: Generators
    own: OwnState


def model_state(live: Live) -> dict[str, torch.Tensor]:
    """Return tensors by name (DTensors if sharded), each parameter once, so that tied weights are not written
    twice."""
    state = {name: plain(value) for name, value in get_model_state_dict(live.wrapped).items()}
    tied = _tied_names(live.wrapped)
    unique = {name: value for name, value in state.items() if name not in tied}
    if live.trained_only:
        trained = {
            plain_name(name) for name, parameter in live.wrapped.named_parameters() if parameter.requires_grad
        }
        unique = {name: value for name, value in unique.items() if name in trained}
    return gathered(unique) if live.full else unique


def gathered(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return full tensors in rank 0's host memory, {} on other ranks; one at a time, so that no device holds
    two of them."""
    whole: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        tensor = value.full_tensor() if isinstance(value, DTensor) else value
        if dist.get_rank() == 0:
            whole[name] = tensor.detach().to("cpu", copy=True)
    return whole


def _tied_names(model: nn.Module) -> set[str]:
    """Return the additional names of tied parameters. Compares names, since empty shards have no address."""
    first = {name for name, _ in model.named_parameters(remove_duplicate=True)}
    return {
        plain_name(name) for name, _ in model.named_parameters(remove_duplicate=False) if name not in first
    }


def optimizer_state(live: Live) -> dict[str, dict[str, torch.Tensor]]:
    """Return the optimizer's tensors, as parameter → kind → tensor; collective. Learning rates and decay come
    from the recipe.

    {} before the first update, and without parameters that were never updated: for an optimizer without
    state, `get_optimizer_state_dict` would create it by a step without gradients, so that the first update
    would count as the second.
    """
    assert live.optimizer is not None
    if not any(gather(bool(live.optimizer.state))):
        return {}
    state: Any = get_optimizer_state_dict(live.wrapped, live.optimizer)
    values: dict[str, dict[str, object]] = state["state"]
    tensors: dict[str, dict[str, torch.Tensor]] = {parameter: {} for parameter in values}
    for parameter, kinds in values.items():
        for kind, value in kinds.items():
            if not isinstance(value, torch.Tensor):
                raise failed_error(
                    "optimizer-state-not-tensor",
                    f"the optimizer keeps `{kind}` of {parameter} as {type(value).__name__}, not as a tensor",
                )
            tensors[parameter][kind] = value
    return {parameter: gathered(kinds) for parameter, kinds in tensors.items()} if live.full else tensors


def flat(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return optimizer state with one level of keys, for a safetensors file."""
    return {
        f"{parameter}::{kind}": value for parameter, kinds in state.items() for kind, value in kinds.items()
    }


def load_model(live: Live, directory: Path) -> None:
    """Load the model's tensors of a checkpoint into the live model, resharding them."""
    _read_model(live, directory)
    refresh_scales(live.wrapped)


def _read_model(live: Live, directory: Path) -> None:
    state = model_state(replace(live, full=False))
    frozen = {
        plain_name(name) for name, parameter in live.wrapped.named_parameters() if not parameter.requires_grad
    }
    if (directory / FULL_MODEL_FILE).exists():
        _read_whole(state, directory, frozen)
    else:
        _check_names(state, directory / SHARD_FOLDER, frozen)
        with _stops_unwrapped():
            dcp.load(
                {"model": state}, storage_reader=RestrictedReader(directory / SHARD_FOLDER, live.scattered)
            )
    set_model_state_dict(live.wrapped, {**state}, options=StateDictOptions(strict=False))


@contextmanager
def _stops_unwrapped() -> Iterator[None]:
    """Raise the stop that a signal requests of any rank during `dcp.load`, which wraps whatever is raised on
    a rank in a CheckpointException of all ranks."""
    try:
        yield
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, StoppedEarly):
                raise cause from error
        raise


def _read_whole(state: dict[str, torch.Tensor], directory: Path, frozen: set[str]) -> None:
    """Read a full file. Raises: FailedError for that of another model, as `_check_names`."""
    with safe_open(directory / FULL_MODEL_FILE, framework="pt") as file:
        stored = set(file.keys())
        if lost := sorted(state.keys() - stored):
            raise failed_error(
                "checkpoint-lacks-tensors",
                f"{directory}: {len(lost)} tensors of the model are missing, the first is `{lost[0]}`",
            )
        if others := sorted(stored - state.keys()):
            more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
            raise failed_error(
                "checkpoint-of-another-model", f"{directory}: `{others[0]}` is not in the model{more}"
            )
        for name, target in state.items():
            tensor = file.get_tensor(name)  # one at a time: a host cannot hold a full model for each rank
            if difference := _difference(tuple(tensor.shape), tensor.dtype, target, is_frozen=name in frozen):
                raise failed_error("checkpoint-of-another-model", f"{directory}: `{name}` {difference}")
            copy_part(target, tensor)


def _check_names(state: dict[str, torch.Tensor], directory: Path, frozen: set[str]) -> None:
    """Check names, shapes and dtypes: DCP ignores unknown tensors and casts silently, so it would load
    another model's checkpoint."""
    listed = RestrictedReader(directory).read_metadata().state_dict_metadata
    stored = {
        name.removeprefix("model."): each
        for name, each in listed.items()
        if isinstance(each, TensorStorageMetadata)
    }
    problems = [f"`model.{name}` is missing" for name in sorted(state.keys() - stored.keys())]
    problems += [f"`model.{name}` is not in the model" for name in sorted(stored.keys() - state.keys())]
    for name in sorted(state.keys() & stored.keys()):
        shape, dtype = tuple(stored[name].size), stored[name].properties.dtype
        if difference := _difference(shape, dtype, state[name], is_frozen=name in frozen):
            problems.append(f"`model.{name}` {difference}")
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise failed_error("checkpoint-of-another-model", f"{directory}: {problems[0]}{more}")


def _difference(
    shape: tuple[int, ...], dtype: torch.dtype, wanted: torch.Tensor, *, is_frozen: bool
) -> str | None:
    """Return how a stored tensor differs from that of the model, if it is not to be loaded.

    Only frozen parameters may be stored in another dtype: FSDP1 holds a unit in one dtype, FSDP2 its frozen
    part in the compute dtype. A cast then gives what loading the base gives.
    """
    is_dtype_right = dtype == wanted.dtype or (
        is_frozen and dtype.is_floating_point and wanted.dtype.is_floating_point
    )
    if shape == tuple(wanted.shape) and is_dtype_right:
        return None
    return f"is {shape} {dtype}, the model has {tuple(wanted.shape)} {wanted.dtype}"


def load_optimizer(live: Live, directory: Path) -> None:
    """Load the optimizer's tensors; the hyperparameters of its groups stay those of the current recipe.

    A parameter without state in the checkpoint was never updated, and has none afterwards.
    """
    assert live.optimizer is not None
    hyper = [
        {key: value for key, value in group.items() if key != "params"}
        for group in live.optimizer.param_groups
    ]
    state: Any = get_optimizer_state_dict(live.wrapped, live.optimizer)
    if (directory / FULL_OPTIMIZER_FILE).exists():
        with safe_open(directory / FULL_OPTIMIZER_FILE, framework="pt") as file:
            stored = {name: name.rsplit("::", 1) for name in file.keys()}  # noqa: SIM118
            state["state"] = _of_parameters(state["state"], {parameter for parameter, _ in stored.values()})
            for name, (parameter, kind) in stored.items():
                copy_part(state["state"][parameter][kind], file.get_tensor(name))
    else:
        state["state"] = _of_parameters(state["state"], _parameters_with_state(state["state"], directory))
        _load_sharded(state["state"], directory, live.scattered)
    set_optimizer_state_dict(live.wrapped, live.optimizer, state, options=StateDictOptions(strict=False))
    for group, values in zip(live.optimizer.param_groups, hyper, strict=True):
        group.update(values)


def _of_parameters(
    state: dict[str, dict[str, torch.Tensor]], names: set[str]
) -> dict[str, dict[str, torch.Tensor]]:
    return {parameter: kinds for parameter, kinds in state.items() if parameter in names}


def _parameters_with_state(state: dict[str, dict[str, torch.Tensor]], directory: Path) -> set[str]:
    """Return the parameters of `state` that have sharded optimizer state, stored as
    `optimizer.state.PARAMETER.KIND`."""
    found: set[str] = set()
    # Read before `dcp.load`, which would wrap an error of the reader in a CheckpointException.
    for key in RestrictedReader(directory / OPTIMIZER_DIRECTORY).read_metadata().state_dict_metadata:
        name = key.removeprefix("optimizer.state.")
        while name and name not in state:
            name = name.rpartition(".")[0]
        found.add(name)
    return found


def _load_sharded(
    state: dict[str, dict[str, torch.Tensor]], directory: Path, scattered: ScatteredFiles | None
) -> None:
    if not state:
        return
    try:
        reader = RestrictedReader(directory / OPTIMIZER_DIRECTORY, scattered)
        with _stops_unwrapped():
            dcp.load({"optimizer": {"state": state}}, storage_reader=reader, planner=BlocksOnHost())
    except CheckpointException as error:  # a BaseException, and the same on every rank
        if not any(BLOCKS_CUT in str(cause) for cause, _ in error.failures.values()):
            raise
        raise failed_error(
            "optimizer-blocks-cut",
            f"{directory}: the optimizer's state is in blocks with a scale each, and "
            f"{dist.get_world_size()} ranks would cut them",
            ways_out=(
                "resume on the original number of ranks",
                "in a new run, set a `block_size` that divides a row, for any number of ranks",
            ),
        ) from error


def rng_state(device_type: str) -> Generators:
    """Return the state of every generator that a step uses, as tensors and numbers (loadable without running
    code)."""
    version, words, gauss = random.getstate()
    of_numpy = np.random.get_state(legacy=False)
    state: Generators = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "kind": of_numpy["bit_generator"],
            "keys": torch.from_numpy(np.asarray(of_numpy["state"]["key"], dtype=np.int64)),
            "position": of_numpy["state"]["pos"],
            "has_gauss": of_numpy["has_gauss"],
            "cached": of_numpy["gauss"],
        },
        "torch": torch.get_rng_state(),
    }
    if device_type != "cpu":
        state["device"] = getattr(torch, device_type).get_rng_state()
    return state


def set_rng_state(state: Generators, device_type: str) -> None:
    """Restore the generators from `rng_state`. A device whose state is missing keeps its own: the run was on
    the CPU before."""
    python, numpy_state = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(
        (
            numpy_state["kind"],
            numpy_state["keys"].numpy().astype(np.uint32),
            numpy_state["position"],
            numpy_state["has_gauss"],
            numpy_state["cached"],
        )
    )
    torch.set_rng_state(state["torch"])
    if device_type != "cpu" and "device" in state:
        getattr(torch, device_type).set_rng_state(state["device"])


def seed_for_rank(seed: int, step: int) -> int:
    """Return the seed of this rank's dropout stream for a run that starts, or resumes on another number of
    ranks, at `step`."""
    return (seed * 1_000_003 + step * 8191 + dist.get_rank()) % (1 << 63)
