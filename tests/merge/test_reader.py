"""Checkpoints of every writer: the entries of the model, and their names."""

from __future__ import annotations

import os
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.merge.read import contents
from fsdp_tune.merge.read.contents import read_tensors
from fsdp_tune.merge.read.pickled_files import read_pickled
from fsdp_tune.merge.read.reader import SourceFiles, SourceTensor
from fsdp_tune.merge.weight_formats import Format
from fsdp_tune.run.manifest import MANIFEST_NAME
from tests.merge.checkpoints import (
    SHARDS,
    finish_checkpoint,
    make_run,
    merged_tensors,
    same_bits,
    save_dcp,
    save_on_ranks,
)
from tests.ranks import shared_ranks
from tests.time_limit import limited

WEIGHTS = {
    "layers.0.weight": torch.randn(6, 4),
    "layers.0.bias": torch.randn(6),
    "norm.weight": torch.randn(4),
}
OPTIMIZER = {
    "state": {"layers.0.weight": {"exp_avg": torch.randn(6, 4), "step": torch.tensor(3.0)}},
    "param_groups": [{"lr": 0.1}],
}


def assert_weights(folder: Path, weights: dict[str, torch.Tensor] = WEIGHTS) -> None:
    merged = merged_tensors(folder)
    assert merged.keys() == weights.keys()
    assert all(same_bits(merged[name], weights[name]) for name in weights)


LAYOUTS = {
    "bare dcp": WEIGHTS,
    "accelerate": {"model": WEIGHTS},
    "torchtitan": {
        **WEIGHTS,
        "optimizer": OPTIMIZER,
        "lr_scheduler": {"last_epoch": 3},
        "train_state": {"step": torch.tensor(3)},
        "dataloader": {"a": b"x"},
    },
    "torchtune": {"model": WEIGHTS, "optimizer": OPTIMIZER, "epochs_run": 1, "seed": 7},
    "pytorch tutorial": {"app": {"model": WEIGHTS, "optim": OPTIMIZER}},
    "lightning": {"state_dict": WEIGHTS, "optimizer": OPTIMIZER},
    "pytorch's loops": {"model_state_dict": WEIGHTS, "optimizer_state_dict": OPTIMIZER},
    "ddp": {"model": {f"module.{name}": value for name, value in WEIGHTS.items()}},
    "compiled": {"model": {f"_orig_mod.{name}": value for name, value in WEIGHTS.items()}},
    "fsdp1 and checkpointing wrappers": {
        "model": {
            "_fsdp_wrapped_module.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.weight": WEIGHTS[
                "layers.0.weight"
            ],
            "_fsdp_wrapped_module.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.bias": WEIGHTS[
                "layers.0.bias"
            ],
            "_fsdp_wrapped_module.norm.weight": WEIGHTS["norm.weight"],
        }
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_model_tensors_are_found_in_full_checkpoint(layout, tmp_path, merge):
    save_dcp(LAYOUTS[layout], tmp_path / "checkpoint")
    assert_weights(merge(tmp_path / "checkpoint").output)


def test_names_that_begin_with_model_are_kept(tmp_path, merge):
    weights = {f"model.{name}": value for name, value in WEIGHTS.items()}
    save_dcp(weights, tmp_path / "flat")
    assert_weights(merge(tmp_path / "flat").output, weights)
    save_dcp({"model": weights}, tmp_path / "nested")
    assert_weights(merge(tmp_path / "nested", output=tmp_path / "out2").output, weights)


def edit_metadata(folder: Path, edit) -> None:
    value = pickle.loads((folder / ".metadata").read_bytes())
    edit(value)
    (folder / ".metadata").write_bytes(pickle.dumps(value))


def test_accelerates_prefix_is_known_without_planner_data(tmp_path, merge):
    folder = save_dcp({"model": WEIGHTS}, tmp_path / SHARDS)
    edit_metadata(folder, lambda value: setattr(value, "planner_data", None))
    assert_weights(merge(folder).output)


def test_properties_of_older_torch_are_read(tmp_path, merge):
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    def older(value) -> None:
        for entry in value.state_dict_metadata.values():
            entry.properties = TensorProperties(dtype=entry.properties.dtype)

    folder = save_dcp({"model": WEIGHTS}, tmp_path / SHARDS)
    edit_metadata(folder, older)
    assert_weights(merge(folder).output)


def test_non_tensor_entries_are_skipped_and_named(tmp_path, merge):
    save_dcp({"model": {**WEIGHTS, "layers.0._extra_state": {"amax": 3}}}, tmp_path / SHARDS)
    result = merge(tmp_path / SHARDS)
    assert_weights(result.output)
    assert any("layers.0._extra_state" in notice.message for notice in result.notices)


def test_archives_without_checksums_are_merged(tmp_path, merge):
    torch.serialization.set_crc32_options(False)
    try:
        save_dcp({"model": WEIGHTS}, tmp_path / SHARDS)
    finally:
        torch.serialization.set_crc32_options(True)
    assert_weights(merge(tmp_path / SHARDS).output)


def fsdp1_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"0.weight": (7, 5), "0.bias": (7,), "1.weight": (2, 7), "1.bias": (2,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def fsdp1_state(mesh: DeviceMesh | None) -> dict[str, Any]:
    """What `accelerate` saves under FSDP1: ShardedTensor without a mesh, DTensor with one."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 2))
    model.load_state_dict(fsdp1_weights())
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
        device_id=torch.device("cpu"),
        device_mesh=mesh,
        use_orig_params=True,
    )
    config = ShardedStateDictConfig(offload_to_cpu=False)
    with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT, config):
        return {"model": wrapped.state_dict()}


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_fsdp1_shards_on_a_mesh_merge_to_the_model(world_size, tmp_path, merge):
    save_on_ranks(
        world_size, tmp_path / SHARDS, lambda _: fsdp1_state(init_device_mesh("cpu", (world_size,)))
    )
    assert_weights(merge(tmp_path / SHARDS).output, fsdp1_weights())


@pytest.mark.parametrize("sharded", [False, True])
def test_full_checkpoint_of_ours_is_merged(sharded, tmp_path, merge):
    run = make_run(tmp_path / "run", {})
    checkpoint = run / "checkpoint-5"
    checkpoint.mkdir()
    if sharded:
        names = sorted(WEIGHTS)
        save_file(
            {name: WEIGHTS[name] for name in names[:1]}, checkpoint / "model-00001-of-00002.safetensors"
        )
        save_file(
            {name: WEIGHTS[name] for name in names[1:]}, checkpoint / "model-00002-of-00002.safetensors"
        )
        index = {name: f"model-0000{1 if name == names[0] else 2}-of-00002.safetensors" for name in names}
        (checkpoint / "model.safetensors.index.json").write_text(
            f'{{"weight_map": {index!s}}}'.replace("'", '"')
        )
    else:
        save_file(WEIGHTS, checkpoint / "model.safetensors")
    finish_checkpoint(checkpoint, 5)
    assert_weights(merge(run, dtype="keep").output)
    file = sorted(checkpoint.glob("*.safetensors"))[-1]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(FsdpTuneError, match="digest") as caught:
        merge(run, output=tmp_path / "other")
    assert caught.value.problems[0].where.source == str(file)
    assert (checkpoint / MANIFEST_NAME).is_file()


def test_accelerates_pickle_of_the_full_model_is_merged(tmp_path, merge):
    """As `accelerator.save_state` writes it: an OrderedDict with `_metadata`, tensors and parameters of every
    kind."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7))
    state = model.state_dict()
    assert isinstance(state, OrderedDict)
    assert hasattr(state, "_metadata")
    storage = torch.randn(100)
    extra = {
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "transposed": torch.randn(4, 6).t(),
        "every other": torch.randn(20)[::2],
        "expanded": torch.randn(1, 5).expand(4, 5),
        "slice": storage[10:20],
        "another slice": storage[15:25].reshape(2, 5),
        "fp8": torch.randn(8).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "nothing": torch.zeros(0, 3),
        "big": torch.randn(300, 700).t(),
    }
    state.update(extra)
    state["not a tensor"] = 7
    (tmp_path / "full").mkdir()
    torch.save(state, tmp_path / "full" / "pytorch_model_fsdp.bin")
    result = merge(tmp_path / "full" / "pytorch_model_fsdp.bin")
    del state["not a tensor"]
    assert_weights(result.output, {name: value.detach() for name, value in state.items()})
    assert any("not a tensor" in notice.message for notice in result.notices)


@pytest.mark.parametrize("wrapper", [None, "model", "state_dict"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "last.ckpt", "ckpt-100.pt"])
def test_files_of_torch_save_are_merged_by_any_name(name, wrapper, tmp_path, merge):
    """Files of other trainers next to it are not read."""
    (tmp_path / "other").mkdir()
    path = tmp_path / "other" / name
    torch.save({wrapper: WEIGHTS, "epoch": 3, "optimizer": {"state": {}}} if wrapper else WEIGHTS, path)
    torch.save(
        {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": []}, tmp_path / "other" / "optimizer.pt"
    )
    assert_weights(merge(path).output, WEIGHTS)
    with pytest.raises(FsdpTuneError, match="state of an optimizer"):
        merge(tmp_path / "other" / "optimizer.pt", output=tmp_path / "no")


WRAPPED = {
    "model in state_dict": {"state_dict": {"model": WEIGHTS}, "epoch": 3},
    "state_dict in model": {"model": {"state_dict": WEIGHTS, "config": {}}},
    "module": {"module": WEIGHTS},
    "pytorch's tutorial": {
        "epoch": 1,
        "model_state_dict": WEIGHTS,
        "optimizer_state_dict": {"state": {}, "param_groups": []},
    },
}


def read_saved(state: object, folder: Path) -> list[SourceTensor]:
    torch.save(state, folder / "a.pt")
    with SourceFiles(folder) as files:
        return read_pickled(files, "a.pt")[0]


@pytest.mark.parametrize("kind", WRAPPED)
def test_model_is_found_in_the_mappings_around_it(kind, tmp_path):
    assert [tensor.name for tensor in read_saved(WRAPPED[kind], tmp_path)] == list(WEIGHTS)


def recursive() -> dict[str, Any]:
    state: dict[str, Any] = {"epoch": 3}
    state["model"] = state
    return state


@pytest.mark.parametrize(
    ("state", "code", "message"),
    [
        (
            {"model": WEIGHTS, "module": WEIGHTS},
            "merge-several-weights",
            "it holds several models: `model`, `module`",
        ),
        (
            {"epoch": 3, "net": WEIGHTS},
            "merge-nothing-found",
            "it holds no tensor of a model, only `epoch`, `net`",
        ),
        (recursive(), "merge-nothing-found", "it holds no tensor of a model, only `epoch`, `model`"),
        ({}, "merge-nothing-found", "it is an empty mapping"),
    ],
    ids=["several", "unknown key", "recursive", "empty"],
)
def test_intact_file_without_one_model_is_not_reported_as_damaged(state, code, message, tmp_path):
    with pytest.raises(FsdpTuneError) as caught:
        read_saved(state, tmp_path)
    [problem] = caught.value.problems
    assert (problem.code, problem.message) == (code, message)
    assert "copy it again" not in str(problem.hint)


def test_strides_of_every_kind_are_merged(tmp_path, merge):
    """DCP saves dense tensors with their own strides: transposed, channels last, permuted."""
    state = {
        "transposed": torch.randn(333, 517).t(),
        "channels last": torch.randn(3, 8, 5, 7).to(memory_format=torch.channels_last),
        "permuted": torch.randn(5, 6, 7).permute(2, 0, 1),
        "large": torch.randn(1100, 1300).t(),
    }
    save_dcp({"model": state}, tmp_path / SHARDS)
    assert_weights(merge(tmp_path / SHARDS).output, state)


def test_replicas_are_read_once(tmp_path, merge, monkeypatch):
    """HSDP with deduplication switched off in the table of contents: the same box listed by two ranks."""
    from fsdp_tune.merge.read.reader import SourceFiles

    folder = save_dcp({"model": WEIGHTS}, tmp_path / SHARDS)

    def twice(value) -> None:
        entry = value.state_dict_metadata["model.layers.0.weight"]
        entry.chunks = entry.chunks * 2

    edit_metadata(folder, twice)
    read_bytes = 0
    original = SourceFiles.read_into

    def counted(self, name, offset, buffer):
        nonlocal read_bytes
        read_bytes += len(buffer)
        original(self, name, offset, buffer)

    monkeypatch.setattr(SourceFiles, "read_into", counted)
    assert_weights(merge(folder).output)
    assert read_bytes < 20_000


def save_fsdp1(folder: Path) -> None:
    """On a rank."""
    warnings.simplefilter("ignore")
    dcp.save(fsdp1_state(None), storage_writer=dcp.FileSystemWriter(folder))


@pytest.mark.ranks
def test_sharded_tensors_of_fsdp1_are_merged(tmp_path, merge):
    """Three ranks, so that shards are uneven."""
    shared_ranks().run(3, save_fsdp1, tmp_path / SHARDS)
    assert_weights(merge(tmp_path / SHARDS).output, fsdp1_weights())


@pytest.mark.parametrize("is_run", [False, True])
def test_no_fifo_in_a_source_delays_a_merge(is_run, tmp_path, merge):
    """Each file in turn, also one that is replaced after the source was looked at: the merge fails with a
    name, or does without it."""
    source = tmp_path / "source"
    if is_run:
        make_run(source, {1: WEIGHTS})
    else:
        save_dcp(WEIGHTS, source)
    for path in [each for each in source.rglob("*") if each.is_file()]:
        path.rename(kept := tmp_path / "kept")
        os.mkfifo(path)
        with limited(path), suppress(FsdpTuneError):
            merge(source, overwrite=True)
        path.unlink()
        kept.rename(path)
    with SourceFiles(source) as files:
        os.mkfifo(source / "shard")
        with pytest.raises(FsdpTuneError, match="is a FIFO, not a regular file"):
            files.size_bytes("shard")


def test_other_entries_are_compared_with_the_names_of_an_optimizer_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each of them, of which a checkpoint has one for each layer."""
    others = [f"layers.{number}._extra_state" for number in range(100)]
    torch.save(WEIGHTS | dict.fromkeys(others) | {"param_groups.0.lr": 0.1}, tmp_path / "pytorch_model.bin")
    calls: list[int] = []

    def counted(names: Sequence[str]) -> frozenset[str]:
        calls.append(len(names))
        return found(names)

    found = contents.optimizer_state
    monkeypatch.setattr(contents, "optimizer_state", counted)
    with SourceFiles(tmp_path) as files:
        tensors, left = read_tensors(files, Format.PICKLE, "pytorch_model.bin")
    assert ([tensor.name for tensor in tensors], left) == (list(WEIGHTS), others)
    assert calls == [len(WEIGHTS), len(others) + 1]
