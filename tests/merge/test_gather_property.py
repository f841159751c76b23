"""Random models on random meshes, written by real DCP from up to eight ranks, merge bit for bit."""

from __future__ import annotations

import copy
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_tune.core.tensors.dtypes import DTYPES
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.merging import merge_checkpoint
from tests.merge.checkpoints import merged_tensors, same_bits, save_on_ranks
from tests.merge.test_merging_values import small_gpt2, small_llama

MESHES = [(n,) for n in range(1, 9)] + [(2, 2), (2, 3), (3, 2), (2, 4), (4, 2)]


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int, *, non_contiguous: bool) -> torch.Tensor:
    """Finite values of any type; `non_contiguous` gives the same shape over reversed memory."""
    generator = torch.Generator().manual_seed(seed)
    made = shape[::-1] if non_contiguous else shape
    kind = getattr(torch, dtype)
    if kind == torch.complex64:
        value = torch.randn(made, generator=generator, dtype=kind)
    elif kind.is_floating_point:
        value = torch.randn(made, generator=generator).to(kind)
    else:
        value = torch.randint(0, 2 if kind == torch.bool else 100, made, generator=generator).to(kind)
    return value.permute(*reversed(range(value.ndim))) if non_contiguous else value


@st.composite
def models(draw):
    mesh = draw(st.sampled_from(MESHES))
    tensors = {}
    for index in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        placements = None
        if shape and draw(st.booleans()):
            choices = st.sampled_from([Replicate(), *(Shard(dimension) for dimension in range(len(shape)))])
            placements = [draw(choices) for _ in mesh]
        tensors[f"layer.{index}.weight"] = (dtype, shape, placements, draw(st.booleans()) and len(shape) > 1)
    return mesh, tensors


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(models(), st.sampled_from([1, 40, 200, 10**9]), st.integers(0, 2**20))
def test_any_mesh_merges_to_the_full_tensors(model, max_shard_bytes, seed):
    mesh_shape, tensors = model
    whole = {
        name: random_tensor(dtype, shape, seed + number, non_contiguous=strided)
        for number, (name, (dtype, shape, _, strided)) in enumerate(tensors.items())
    }

    def state_of(rank: int):
        mesh = init_device_mesh("cpu", mesh_shape)
        sharded = {
            name: value
            if tensors[name][2] is None
            else distribute_tensor(value, mesh, tensors[name][2], src_data_rank=None)
            for name, value in whole.items()
        }
        return {"model": sharded}

    folder = Path(tempfile.mkdtemp())
    try:
        world_size = torch.Size(mesh_shape).numel()
        save_on_ranks(world_size, folder / "source", state_of)
        merge_checkpoint(
            folder / "source", MergeOptions(output=folder / "out", max_shard_bytes=max_shard_bytes)
        )
        merged = merged_tensors(folder / "out")
        assert merged.keys() == whole.keys()
        for name, value in whole.items():
            assert same_bits(merged[name], value), (name, tensors[name], mesh_shape)
        for file in (folder / "out").glob("*.safetensors"):
            held = [name for name in merged if merged[name].numel()]
            assert file.stat().st_size < max_shard_bytes + 100_000 or len(held) == 1
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("make", "mesh_shape"), [(small_gpt2, (1,)), (small_gpt2, (2, 2)), (small_llama, (3,))]
)
def test_fsdp2_models_merge_to_their_full_state_dict(make, mesh_shape, tmp_path):
    """FSDP2 on one mesh, HSDP on a mesh of two: compared with what torch gathers."""
    gathered: dict[str, torch.Tensor] = {}
    original = make()

    def state_of(rank: int):
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
        model = copy.deepcopy(original)
        for layer in model.base_model.h if hasattr(model.base_model, "h") else model.base_model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if rank == 0:
            gathered.update({name: value.clone() for name, value in full.items()})
        return {"model": get_model_state_dict(model)}

    save_on_ranks(torch.Size(mesh_shape).numel(), tmp_path / "pytorch_model_fsdp_0", state_of)
    merge_checkpoint(
        tmp_path / "pytorch_model_fsdp_0",
        MergeOptions(output=tmp_path / "out", dtype="keep", max_shard_bytes=9000),
    )
    merged = merged_tensors(tmp_path / "out")
    assert merged.keys() == gathered.keys()
    assert all(same_bits(merged[name], gathered[name]) for name in gathered)
