"""Muon and Adafactor compute over full tensors: sharded steps equal those of torch's and transformers' own
classes on one device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import Ranks

SHAPES = {
    "tall": (13, 6),
    "wide": (5, 16),
    "one row": (1, 8),
    "vector": (7,),
    "stack": (3, 5, 4),
    "stack by rows": (3, 5, 4),
}
STEPS = 3


def _parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in SHAPES.items()
    }


def _gradients(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def _groups(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    matrices = [p for p in parameters.values() if p.ndim > 1]
    return [
        {"params": matrices, "weight_decay": 0.1, "orthogonal": True},
        {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0, "orthogonal": False},
    ]


def _optimizer(kind: str, groups: list[dict[str, Any]], muon: dict[str, Any]) -> torch.optim.Optimizer:
    from fsdp_tune.model.optim.adafactor import ShardedAdafactor
    from fsdp_tune.model.optim.muon import Muon
    from fsdp_tune.recipe.schema.optimizers import MUON_DEFAULTS

    if kind == "adafactor":
        return ShardedAdafactor(
            [{key: value for key, value in group.items() if key != "orthogonal"} for group in groups], lr=1e-2
        )
    return Muon(groups, lr=1e-2, fused=True, muon=MUON_DEFAULTS | muon)


def sharded_steps(
    kind: str, replicas: int, dtype: torch.dtype, muon: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """On a rank: the full parameters after some steps on shards, rows of the stacks cut in the second
    dimension too."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(
        "cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("replicate", "shard")
    )

    def shard(name: str, tensor: torch.Tensor) -> Any:
        return distribute_tensor(tensor, mesh, [Replicate(), Shard(1 if name == "stack by rows" else 0)])

    parameters = {
        name: nn.Parameter(shard(name, parameter.detach())) for name, parameter in _parameters(dtype).items()
    }
    optimizer = _optimizer(kind, _groups(parameters), muon)
    for step in range(STEPS):
        for name, gradient in _gradients(step, dtype).items():
            parameters[name].grad = shard(name, gradient)
        optimizer.step()
    return {name: parameter.detach().full_tensor() for name, parameter in parameters.items()}


def reference(kind: str, dtype: torch.dtype, muon: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The same by the optimizers of torch and transformers, with each matrix of a stack as a parameter of its
    own for Muon."""
    parameters = _parameters(dtype)
    if kind == "adafactor":
        from transformers.optimization import Adafactor

        groups = [
            {key: value for key, value in group.items() if key != "orthogonal"}
            for group in _groups(parameters)
        ]
        optimizers: list[torch.optim.Optimizer] = [
            Adafactor(groups, lr=1e-2, scale_parameter=False, relative_step=False)
        ]
        held = {name: [p] for name, p in parameters.items()}
    else:
        held = {
            name: [nn.Parameter(each.clone()) for each in p.detach()] if p.ndim == 3 else [p]
            for name, p in parameters.items()
        }
        every = [p for each in held.values() for p in each]
        options = {"adjust_lr_fn": "match_rms_adamw"} | muon
        optimizers = [
            torch.optim.Muon([p for p in every if p.ndim == 2], lr=1e-2, weight_decay=0.1, **options),
            torch.optim.AdamW([p for p in every if p.ndim == 1], lr=1e-2, weight_decay=0.0, fused=True),
        ]
    for step in range(STEPS):
        for name, gradient in _gradients(step, dtype).items():
            parts = [gradient] if len(held[name]) == 1 else list(gradient)
            for parameter, part in zip(held[name], parts, strict=True):
                parameter.grad = part.clone()
        for optimizer in optimizers:
            optimizer.step()
    return {name: torch.stack([p.detach() for p in each]).view(SHAPES[name]) for name, each in held.items()}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "replicas", "dtype", "muon"),
    [
        (2, 1, torch.float32, {}),
        (4, 2, torch.float32, {"adjust_lr_fn": "original", "ns_steps": 3}),
        (4, 1, torch.bfloat16, {"momentum": 0.8}),
    ],
    ids=["2 ranks", "2 replicas", "4 ranks in bf16"],
)
@pytest.mark.parametrize("kind", ["muon", "adafactor"])
def test_sharded_steps_equal_those_of_one_device(
    kind: str, ranks: int, replicas: int, dtype: torch.dtype, muon: dict[str, Any], on_ranks: Ranks
) -> None:
    found = on_ranks.run(ranks, functools.partial(sharded_steps, kind, replicas, dtype, muon))
    for name, wanted in reference(kind, dtype, muon).items():
        for each in found:
            if kind == "muon" and len(SHAPES[name]) > 1:
                assert torch.equal(each[name], wanted), name
            else:
                torch.testing.assert_close(
                    each[name], wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=2e-5, msg=name
                )
