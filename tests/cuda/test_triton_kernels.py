"""What `kernels.compile` and 4 bits generate is compiled for GPUs that are not here."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY
from tests.cuda.devices import require
from tests.cuda.environment import GPUS, with_gpus

# CUDA's limit for a thread, and what a block of each target can have of shared memory.
MOST_REGISTERS = 255
SHARED_KIB = {"A100": 163, "H100": 227, "B200": 227}


@pytest.mark.slow
@pytest.mark.parametrize("gpu", SHARED_KIB)
def test_generated_kernels_compile_for_the_gpu_and_spill_nothing(gpu: str) -> None:
    """About 20 s of CPU time for each GPU. With -s, it prints the table."""
    require("cuda")
    if importlib.util.find_spec("triton") is None:
        pytest.skip(
            "no Triton: .venv/bin/python -m pip install --no-deps triton, in the version that this "
            "torch names"
        )
    command = [sys.executable, "-m", "tests.cuda.triton_kernels"]
    done = subprocess.run(
        command,
        env=with_gpus(1, gpu, triton="1"),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    major, minor = GPUS[gpu].capability
    for each in kernels:
        print(
            f"{each['part']:14} {each['target']:7} {each['registers']:3} registers "
            f"{each['shared_bytes']:6} B shared  {each['kernel']}"
        )
        assert each["target"] == f"sm_{major}{minor}"
        assert each["stack_bytes"] == 0, each
        assert each["registers"] <= MOST_REGISTERS
        assert each["shared_bytes"] <= SHARED_KIB[gpu] * 1024, each
    names = {
        part: {each["kernel"] for each in kernels if each["part"] == part}
        for part in ("dequantise", "decoder_layer")
    }
    assert len(names["dequantise"]) == 1, "the bytes are read and the weights are written in one kernel"
    assert len(names["decoder_layer"]) >= 8
