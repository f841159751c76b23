"""The live memory that a report names when an allocation failed: what this rank stores."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_tune.core.units import GIB, MIB
from fsdp_tune.model.optim.adamw_in_blocks import torchao_class, with_plain_rates
from fsdp_tune.worker.observe.out_of_memory import (
    device_moment,
    host_out_of_memory,
    live_components,
    running_module,
)
from tests.model.recipes import recipe_of
from tests.ranks import Ranks


def test_moments_in_blocks_are_counted_as_stored() -> None:
    """A tensor of torchao has no storage of its own: it consists of codes, scales and a table."""
    pytest.importorskip("torchao")
    weight = nn.Parameter(torch.randn(64, 64))
    optimizer = with_plain_rates(torchao_class(8))([weight], lr=1e-2)
    weight.grad = torch.randn(64, 64)
    optimizer.step()
    found = live_components(stand_in(nn.ParameterList([weight]), optimizer))
    blocks, table = 64 * 64 // 256, 256
    moment = 64 * 64 + 4 * blocks + 4 * table
    assert found["optimizer state"] - 2 * moment <= 4, "and the number of the step"
    assert (found["parameters"], found["gradients"]) == (4 * 64 * 64, 4 * 64 * 64)


def stand_in(wrapped: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """What `live_components` reads of a trainer."""
    return SimpleNamespace(
        wrapped=wrapped, args=SimpleNamespace(device=torch.device("cpu")), live_optimizer=optimizer
    )


def components_around_a_forward(version: int) -> list[dict[str, int]]:
    """On a rank: the components before a step, and while a layer is gathered in its forward and backward."""
    from fsdp_tune.model.loading.assemble import wrap_whole
    from fsdp_tune.model.loading.construct import build_full
    from fsdp_tune.model.shard.process_groups import make_mesh
    from fsdp_tune.model.step import forward_backward

    recipe = recipe_of("llama", dist.get_world_size(), fsdp={"version": version})
    mesh = make_mesh(recipe, "cpu")
    wrapped: Any = wrap_whole(recipe, build_full(recipe), mesh, torch.device("cpu")).wrapped.train()
    trainer = stand_in(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.0))
    found = [live_components(trainer)]
    wrapped.model.layers[1].mlp.register_forward_hook(lambda *_: found.append(live_components(trainer)))
    ids = torch.randint(0, 60, (1, 12))
    forward_backward(recipe, wrapped, {"input_ids": ids, "labels": ids}, 1 / 11)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("version", [1, 2])
def test_gathered_parameters_are_not_counted_as_those_of_the_rank(version: int, on_ranks: Ranks) -> None:
    before, inside, *_ = on_ranks.run(2, components_around_a_forward, version)[0]
    assert before["parameters"] > 0
    assert inside == before


FULL = (
    "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 4.00 GiB of which "
    "1.00 MiB is free. Of the allocated memory 3.00 GiB is allocated by PyTorch"
)
HEARTBEAT: Any = SimpleNamespace(phase="forward", step=7)


class Fails(nn.Module):
    """A module whose code has no memory left, in a function of its own."""

    def forward(self, _x: torch.Tensor) -> torch.Tensor:
        return self._allocate()

    def _allocate(self) -> torch.Tensor:
        raise torch.OutOfMemoryError(FULL)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity(), nn.Sequential(nn.Linear(2, 2), Fails())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_moment_of_an_error_has_the_innermost_module_and_what_the_rank_stores() -> None:
    model = Outer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(torch.ones(1, 2))
    found = device_moment(caught.value, HEARTBEAT, stand_in(model, optimizer))
    assert (found.phase, found.step, found.module) == ("forward", 7, "layers.1.1")
    assert found.sizes == {"requested": 2 * MIB, "capacity": 4 * GIB, "free": MIB, "allocated": 3 * GIB}
    assert found.components == {"parameters": 4 * 6, "gradients": 0, "optimizer state": 0}
    assert running_module(caught.value, nn.Linear(2, 2)) is None, "the code of another model"


def test_moment_before_there_is_a_trainer_has_only_the_sizes_of_the_message() -> None:
    found = device_moment(torch.OutOfMemoryError(FULL), HEARTBEAT, None)
    assert (found.components, found.module, found.sizes["capacity"]) == ({}, None, 4 * GIB)


def test_module_that_calls_the_failing_code_of_a_library_is_named() -> None:
    """An optimizer's error names none: its frames belong to no part of the model."""
    model = Outer()
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(1, 3))
    assert running_module(caught.value, model) == "layers.1.0"
    assert running_module(torch.OutOfMemoryError(FULL), model) is None


@pytest.mark.parametrize(
    ("memory", "left"),
    [
        (
            "MemTotal:       4194304 kB\nMemAvailable:    1048576 kB\n",
            ", 1.00 GiB of the machine's 4.00 GiB are left",
        ),
        (None, ""),
    ],
    ids=["Linux", "another system"],
)
@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (MemoryError(), ""),
        (
            RuntimeError("CUDA error: out of memory"),
            "page-locked memory for copies to the device was refused, ",
        ),
    ],
)
def test_host_memory_is_what_the_system_reports(
    memory: str | None, left: str, error: BaseException, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_text(path: Path, **_: object) -> str:
        assert str(path) == "/proc/meminfo"
        if memory is None:
            raise FileNotFoundError(path)
        return memory

    usage = SimpleNamespace(ru_maxrss=3 * 1024 * 1024)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", read_text)
        patched.setattr(resource, "getrusage", lambda _: usage)
        found = host_out_of_memory(recipe_of("llama"), HEARTBEAT, error)
    assert found.message == (
        f"out of host memory in `forward`: {refused}this rank has held up to 3.00 GiB{left}"
    )
