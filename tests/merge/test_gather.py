"""What reading a tensor holds in memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from fsdp_tune.merge.copy.gather import BUFFER_BYTES, read_factor
from fsdp_tune.merge.read.reader import SourceFiles
from fsdp_tune.merge.read.safetensors_files import read_safetensors

MIB = 1 << 20


def test_factor_is_converted_without_a_stored_copy(tmp_path: Path) -> None:
    """16 MiB of bf16 are 32 MiB of fp32, which `held_bytes` counts."""
    stored = torch.arange(8 * MIB, dtype=torch.int32).remainder(251).to(torch.bfloat16).reshape(2048, 4096)
    save_file({"a": stored}, tmp_path / "model.safetensors")
    with SourceFiles(tmp_path) as files:
        (factor,) = read_safetensors(files)
        tracemalloc.start()
        try:
            found = read_factor(factor, np.dtype(np.float32))
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            read_factor.cache_clear()
    assert np.array_equal(found, stored.float().numpy())
    assert peak_bytes < 32 * MIB + 2 * BUFFER_BYTES + MIB
