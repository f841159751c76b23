"""Files of a checkpoint: hashed as they are written, and read without running what is in them."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_tune.core.errors import FailedError
from fsdp_tune.run.manifest import digest_file
from fsdp_tune.worker.checkpoint.storage import (
    BlocksOnHost,
    HashingStream,
    RestrictedReader,
    write_safetensors,
    write_torch,
)
from tests.cuda.devices import require
from tests.parity.bench import Bench
from tests.ranks import shared_ranks
from tests.worker.short_runs import STEPS, short_run


class RunsCode:
    """What a hostile `.metadata` would hold: loading it makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def test_metadata_cannot_run_code(tmp_path: Path) -> None:
    sentinel = tmp_path / "sentinel"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(RunsCode(sentinel)))
    with pytest.raises(FailedError) as caught:
        RestrictedReader(tmp_path).read_metadata()
    assert caught.value.problems[0].code == "checkpoint-metadata-refused"
    assert not sentinel.exists()


@pytest.mark.parametrize(
    "name", ["builtins.eval", "os.system", "torch.load", "builtins.setattr", "torch.serialization.load"]
)
def test_metadata_allows_only_listed_classes(name: str, tmp_path: Path) -> None:
    module, attribute = name.rsplit(".", 1)
    (tmp_path / ".metadata").write_bytes(b"c" + module.encode() + b"\n" + attribute.encode() + b"\n.")
    with pytest.raises(FailedError, match=attribute):
        RestrictedReader(tmp_path).read_metadata()


@pytest.mark.parametrize("raw", [b"", b"\x80", b"not a pickle", pickle.dumps([1, 2])], ids=repr)
def test_damaged_metadata_raises_package_error(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(raw)
    with pytest.raises(FailedError):
        RestrictedReader(tmp_path).read_metadata()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_entry_that_replaces_a_tensor_by_a_pickle_is_refused_unread(tmp_path: Path) -> None:
    """DCP unpickles entries that are not tensors without restriction, also where the live state has a tensor
    of that name."""
    sentinel = tmp_path / "sentinel"
    dcp.save({"optimizer": {"exp_avg": RunsCode(sentinel)}}, checkpoint_id=tmp_path / "shards", no_dist=True)
    reader = RestrictedReader(tmp_path / "shards")
    with pytest.raises(FailedError, match=r"`optimizer.exp_avg` is not a tensor") as caught:
        reader.read_metadata()
    assert caught.value.problems[0].code == "checkpoint-metadata-refused"
    with pytest.raises(CheckpointException):
        dcp.load({"optimizer": {"exp_avg": torch.zeros(2)}}, storage_reader=reader, no_dist=True)
    assert not sentinel.exists()


@pytest.mark.ranks
def test_metadata_of_a_real_checkpoint_is_read(bench: Bench) -> None:
    checkpoint = short_run(bench).checkpoint(STEPS)
    for folder, prefix in (("pytorch_model_fsdp_0", "model."), ("optimizer_0", "optimizer.state.")):
        names = RestrictedReader(checkpoint / folder).read_metadata().state_dict_metadata
        assert names
        assert all(name.startswith(prefix) for name in names)


@given(st.lists(st.binary(max_size=100), max_size=20))
def test_stream_has_the_digest_of_written_bytes(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("stream") / "file"
    stream = HashingStream(path)
    for chunk in chunks:
        assert stream.write(chunk) == len(chunk)
        stream.flush()
    assert stream.tell() == sum(map(len, chunks))
    stream.close()
    stream.close()  # closing twice is no error
    assert stream.entry() == digest_file(path)


def test_written_safetensors_file_loads(tmp_path: Path) -> None:
    names = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
    tensors = {name: torch.arange(-3, 3).to(getattr(torch, name)).view(2, 3) for name in names}
    tensors |= {
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
        "strided": torch.arange(6.0).view(2, 3).t(),
    }
    entry = write_safetensors(tmp_path / "model.safetensors", tensors, {"format": "pt"})
    assert entry == digest_file(tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask()


def umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def test_rank_file_is_hashed_and_loads_as_weights_only(tmp_path: Path) -> None:
    value = {"rng": {"torch": torch.get_rng_state()}, "own": {"sums": [1.0, 2.0]}}
    entry = write_torch(tmp_path / "rng_state_0.pth", value)
    assert entry == digest_file(tmp_path / "rng_state_0.pth")
    assert torch.load(tmp_path / "rng_state_0.pth", weights_only=True)["own"] == value["own"]


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_full_disk_is_an_error_and_leaves_nothing_open() -> None:
    stream = HashingStream(Path("/dev/full"))
    try:
        with pytest.raises(OSError, match="No space left"):  # noqa: PT012  the system may say so at any of the three
            stream.write(b"x" * (1 << 20))
            stream.flush()
            stream.close()
        with contextlib.suppress(OSError):
            stream.close()
        assert stream._file.closed
    finally:
        with contextlib.suppress(OSError):
            stream._file.close()


def _blocks_read(folder: str, device: str) -> dict[str, Any]:
    """On a rank: a moment that was stored without blocks, read into blocks."""
    from torchao.optim.subclass_8bit import OptimState8bit

    dcp.save({"moment": torch.linspace(-1, 2, 256).view(4, 64)}, checkpoint_id=folder)
    blocks = OptimState8bit.zeros((4, 64), block_size=64, device=device)
    dcp.load({"moment": blocks}, storage_reader=RestrictedReader(folder), planner=BlocksOnHost())
    return {
        "device": blocks.codes.device.type,
        "codes": blocks.codes.tolist(),
        "scale": blocks.scale.tolist(),
    }


def test_moments_stored_without_blocks_are_read_into_blocks_on_a_gpu(tmp_path: Path) -> None:
    require("cuda")
    on_ranks = shared_ranks("cuda")
    ((host,), (device,)) = (
        on_ranks.run(1, _blocks_read, str(tmp_path / kind), kind) for kind in ("cpu", "cuda")
    )
    assert (host.pop("device"), device.pop("device")) == ("cpu", "cuda")
    assert device == host
    assert len({code for row in host["codes"] for code in row}) > 50
