"""Constant memory, and no torch: measured in a process of its own, on tensors larger than the bound."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.merge.checkpoints import SHARDS, merged_tensors, save_dcp
from tests.merge.peft import write_config
from tests.merge.sparse import write_sparse_checkpoint

BOUND_MIB = 128
MANY_RANKS_BOUND_MIB = 200
"""The table of contents of many ranks takes memory too."""
CODE = """
import json, sys
from pathlib import Path
from fsdp_tune.merge.merging import merge_checkpoint
from fsdp_tune.merge.merge_options import MergeOptions
options = json.loads(sys.argv[2])
result = merge_checkpoint(Path(sys.argv[1]), MergeOptions(**{**options, "output": Path(options["output"])}))
# ru_maxrss would count the process that forked this one; the high-water mark of the memory map does not.
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
heavy = sorted(set(sys.modules) & {"torch", "transformers", "accelerate", "safetensors", "datasets", "pandas"})
print(json.dumps({"peak_mib": peak / 1024, "heavy": heavy, "bytes": result.size_bytes}))
"""  # noqa: E501


def merge_in_child(source: Path, **options: object) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(source), json.dumps(options)],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


# What is converted passes through every buffer that what is copied passes through, and one more.
@pytest.mark.parametrize("dtype", [pytest.param("keep", marks=pytest.mark.slow), "bf16"])
def test_tensors_larger_than_the_bound_are_merged_within_it(dtype, tmp_path):
    """The wide tensor exceeds it, and so do two copies of the one over transposed memory."""
    state = {"wide": torch.zeros(9216, 4096), "transposed": torch.ones(4096, 4608).t()}
    save_dcp({"model": state}, tmp_path / "c" / SHARDS, sync_files=False)
    report = merge_in_child(tmp_path / "c", output=str(tmp_path / "out"), dtype=dtype)
    shutil.rmtree(tmp_path)  # pytest keeps what is there for days
    assert report["heavy"] == []
    assert float(report["peak_mib"]) < BOUND_MIB


@pytest.mark.parametrize("dtype", [pytest.param("keep", marks=pytest.mark.slow), "fp32"])
def test_adapter_is_added_within_the_bound(dtype, tmp_path):
    """A weight of 56 MiB, 112 MiB in fp32, and the long factor of a rank that needs 28 MiB."""
    rows, columns, rank = 1024, 28_672, 256
    state = {
        "base_model.model.down.base_layer.weight": torch.ones(rows, columns, dtype=torch.bfloat16),
        "base_model.model.down.lora_A.default.weight": torch.ones(rank, columns, dtype=torch.bfloat16),
        "base_model.model.down.lora_B.default.weight": torch.ones(rows, rank, dtype=torch.bfloat16),
        "base_model.model.norm.weight": torch.ones(8),
    }
    save_dcp({"model": state}, write_config(tmp_path / "c", r=rank, lora_alpha=2) / SHARDS, sync_files=False)
    report = merge_in_child(tmp_path / "c", output=str(tmp_path / "out"), dtype=dtype)
    merged = merged_tensors(tmp_path / "out")["down.weight"]
    shutil.rmtree(tmp_path)
    assert bool((merged == 3).all())  # 1 + 2/256 · 256
    assert report["heavy"] == []
    assert float(report["peak_mib"]) < BOUND_MIB


@pytest.mark.slow
def test_sparse_checkpoint_of_twelve_gigabytes_is_merged_within_the_bound(tmp_path):
    """Every tensor larger than a shard, and the chunks of 64 ranks in the table of contents."""
    write_sparse_checkpoint(tmp_path / "c" / SHARDS, tensors=24, chunks=64, size_bytes=12 << 30)
    report = merge_in_child(
        tmp_path / "c", output=str(tmp_path / "out"), dtype="bf16", verify="none", max_shard_bytes=10**8
    )
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    shutil.rmtree(tmp_path / "out")
    assert files == [f"model-{number:05d}-of-00024.safetensors" for number in range(1, 25)]
    assert float(report["peak_mib"]) < BOUND_MIB


@pytest.mark.slow
def test_metadata_of_many_ranks_stays_within_memory_bound(tmp_path):
    """150 tensors × 256 ranks: what grows are the objects of the table, about 1.1 KiB a slice, not the
    buffers."""
    write_sparse_checkpoint(
        tmp_path / "c" / SHARDS, tensors=150, chunks=256, size_bytes=150 * 256 * 16 * 4, columns=16
    )
    report = merge_in_child(tmp_path / "c", output=str(tmp_path / "out"), dtype="keep")
    assert float(report["peak_mib"]) < MANY_RANKS_BOUND_MIB
