"""Weights are read from safetensors: every rank reads its own slices, and holds only these and a buffer."""

from __future__ import annotations

import ctypes
import gc
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from fsdp_tune.core.errors import FailedError, FsdpTuneError
from fsdp_tune.model.loading import weight_slices as slices
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.loading.weight_slices import (
    WeightFiles,
    find_weight_files,
    fits,
    read_slices,
    read_tensors,
)
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.merge.ranks import run_ranks
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of
from tests.model.shards import INDEX, SHARDS, SOUND, index_of, save_two_shards, write_index
from tests.ranks import Ranks

MIB = 1 << 20
STATE = {
    "matrix": torch.arange(7 * 10, dtype=torch.float32).reshape(7, 10),
    "vector": torch.arange(13, dtype=torch.float32),
    "cube": torch.arange(5 * 4 * 6, dtype=torch.float32).reshape(5, 4, 6),
    "long_rows": torch.arange(3 * 500, dtype=torch.float32).reshape(3, 500),
    "brain": torch.randn(9, 4).bfloat16(),
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 4),
}


class Holder(nn.Module):
    """A model of these parameters, which hold nothing yet."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def weights_of(folder: Path, state: dict[str, torch.Tensor] = STATE, *, files: int = 1) -> WeightFiles:
    """The same through a model directory of one file, or of several and an index."""
    names = list(state)
    if files == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        parts = {f"model-{n}.safetensors": names[n::files] for n in range(files)}
        for file, part in parts.items():
            save_file({name: state[name] for name in part}, folder / file, metadata={"format": "pt"})
        index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = find_weight_files(Recipe.model_validate({"model": {"name_or_path": str(folder)}}))
    assert found is not None
    return found


@pytest.mark.parametrize("buffer_bytes", [64, 1 << 20])
@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((3,), [Shard(0)]),
        ((2,), [Shard(1)]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((4,), [Replicate()]),
    ],
    ids=str,
)
def test_each_rank_reads_its_own_slice(mesh_shape, placements, buffer_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(slices, "BUFFER_BYTES", buffer_bytes)
    weights = weights_of(tmp_path, files=3)

    def rank_main(_: int) -> None:
        mesh = init_device_mesh("cpu", mesh_shape)
        wanted: dict[str, torch.Tensor] = {}
        for name, value in STATE.items():
            is_split = all(not isinstance(place, Shard) or place.dim < value.ndim for place in placements)
            wanted[name] = (
                distribute_tensor(value, mesh, placements, src_data_rank=None) if is_split else value
            )
        model = Holder({name: torch.full_like(value, -1) for name, value in wanted.items()})
        assert fits(model, weights)
        read_slices(model, weights)
        for name, value in wanted.items():
            got = getattr(model, name)
            assert isinstance(got, DTensor) == isinstance(value, DTensor)
            one, other = (
                part.to_local() if isinstance(part, DTensor) else part for part in (got.data, value)
            )
            assert torch.equal(one, other), name

    run_ranks(torch.Size(mesh_shape).numel(), rank_main)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_are_cast_to_parameter_dtype(kind, tmp_path):
    weights = weights_of(tmp_path)
    model = Holder({name: torch.empty(value.shape, dtype=kind) for name, value in STATE.items()})
    read_slices(model, weights)
    for name, value in STATE.items():
        assert torch.equal(getattr(model, name).data, value.to(kind)), name


def test_weights_stored_in_another_form_are_loaded_through_rank_0(tmp_path):
    weights = weights_of(tmp_path)
    assert fits(Holder(STATE), weights)
    assert not fits(Holder({**STATE, "more": torch.zeros(2)}), weights)
    assert not fits(Holder({**STATE, "matrix": torch.zeros(10, 7)}), weights)


def in_one_place(data: bytes) -> bytes:
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    first, second, *_ = (name for name in header if name != "__metadata__")
    raw = json.dumps(header | {second: header[first]}).encode()
    return struct.pack("<Q", len(raw)) + raw + data[8 + length :]


DAMAGE = {
    "cut in the values": lambda data: data[:-5],
    "cut in the header": lambda data: data[:40],
    "empty": lambda _: b"",
    "header without end": lambda data: struct.pack("<Q", 2**40) + data[8:],
    "no JSON": lambda data: data[:8] + b"x" * 20 + data[28:],
    "two tensors in one place": in_one_place,
    "longer than its header says": lambda data: data + b"\0" * 8,
    "a shape that does not fit": lambda data: data.replace(b'"shape":[7,10]', b'"shape":[9,10]'),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_files_are_named(kind, tmp_path):
    weights_of(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(DAMAGE[kind](path.read_bytes()))
    with pytest.raises(FailedError) as caught:
        find_weight_files(Recipe.model_validate({"model": {"name_or_path": str(tmp_path)}}))
    problem = caught.value.problems[0]
    assert (problem.code, problem.where.source) == ("model-weights-damaged", str(path))


def test_file_truncated_during_load_is_named(tmp_path):
    weights = weights_of(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(FailedError, match="it ends at byte"):
        read_slices(Holder({name: value.clone() for name, value in STATE.items()}), weights)


@pytest.fixture
def two_shards(tmp_path: Path) -> Path:
    return save_two_shards(tmp_path)


NORM = "model.norm.weight"


@pytest.mark.parametrize("change", SOUND)
def test_files_and_tensors_are_those_that_transformers_reads(change: Any, two_shards: Path) -> None:
    change(two_shards)
    theirs = AutoModelForCausalLM.from_pretrained(two_shards).state_dict()
    recipe = recipe_of({"name_or_path": str(two_shards)})
    assert find_facts(recipe).problems == ()
    found = find_weight_files(recipe)
    assert found is not None
    ours = {name: torch.full_like(value, torch.nan) for name, value in theirs.items()}
    read_tensors(ours, found)
    assert [name for name, value in theirs.items() if not torch.equal(ours[name], value)] == []


@pytest.mark.parametrize("is_listed", [False, True])
def test_tensor_that_two_files_hold_is_refused_by_its_name_if_they_do_not_agree_which(
    is_listed: bool, two_shards: Path
) -> None:
    """transformers takes it from the last file, whatever the index names."""
    for file in SHARDS:
        value = torch.full((FAMILIES["llama"]["hidden_size"],), float(file == SHARDS[0]))
        save_file({**load_file(two_shards / file), NORM: value}, two_shards / file, metadata={"format": "pt"})
    weight_map = {name: file for name, file in index_of(two_shards).items() if name != NORM}
    write_index(two_shards, weight_map | ({NORM: SHARDS[0]} if is_listed else {}))
    recipe = recipe_of({"name_or_path": str(two_shards)})
    (problem,) = find_facts(recipe).problems
    assert (problem.code, problem.where.source) == ("model-weights-twice", str(two_shards / INDEX))
    assert f"`{NORM}` is in both `{SHARDS[0]}` and `{SHARDS[1]}`" in problem.message
    assert problem.hint is not None
    with pytest.raises(FsdpTuneError, match="is in both"):
        find_weight_files(recipe)
    write_index(two_shards, weight_map | {NORM: SHARDS[1]})
    assert find_facts(recipe).problems == ()


def load_here(directory: str) -> dict[str, Any]:
    """On a rank: bytes of its shard, of the largest layer, of the model; by how much loading raised the
    resident set at its peak."""
    from fsdp_tune.model.loading.assemble import load
    from fsdp_tune.model.loading.model_config import model_config

    recipe = recipe_of({"name_or_path": directory})
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = high_water_bytes()
    loaded = load(recipe, model_config(recipe), torch.device("cpu"), vocabulary=None)
    growth = high_water_bytes() - before
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in loaded.model.parameters()]
    layer = sum(p.numel() * p.element_size() for p in loaded.model.model.layers[0].parameters())
    return {
        "way": loaded.way,
        "growth": growth,
        "shard": sum(part.numel() * part.element_size() for part in parts),
        "layer": layer,
        "whole": loaded.size.parameter_bytes,
    }


def high_water_bytes() -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


def test_no_rank_holds_more_than_its_shard_and_a_layer(on_ranks: Ranks, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=8,
        num_attention_heads=12,
        vocab_size=1000,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "m", max_shard_size="10GB")
    for rank in on_ranks.run(2, load_here, str(tmp_path / "m")):
        assert rank["way"] == "slices"
        assert rank["shard"] < 0.51 * rank["whole"]
        # Lower bound: the meter measures. Upper: buffer, and what the interpreter and the wrapping take.
        assert (
            0.5 * rank["shard"]
            < rank["growth"]
            < rank["shard"] + rank["layer"] + 32 * MIB
            < 0.9 * rank["whole"]
        )


def test_file_with_a_second_copy_of_a_tied_weight_is_left_to_transformers(tmp_path: Path) -> None:
    """It compares the two, and does not tie them if they differ. Heads and embeddings have been compared
    before."""
    model = Holder(STATE)
    model.register_parameter("tied", model.matrix)
    assert fits(model, weights_of(tmp_path))
    assert not fits(model, weights_of(tmp_path, STATE | {"tied": STATE["matrix"] + 1}))
