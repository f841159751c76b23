from __future__ import annotations

import pytest

from fsdp_tune.core.flash_kernels import FLASH_ATTENTION, GENERATIONS, flash_version
from fsdp_tune.core.gpus import known_hardware


@pytest.mark.parametrize(
    ("kernel", "version"),
    [
        ("flash_attention_2", 2),
        ("flash_attention_3", 3),
        ("flash_attention_4", 4),
        ("kernels-community/flash-attn2", 2),
        ("kernels-community/vllm-flash-attn3@main", 3),
        ("kernels-community/flash-attn4:flash_attn", 4),
        ("sdpa", None),
        ("torch_varlen", None),
        ("flash_attention_22", None),
        ("kernels-community/metal-flash-sdpa", None),
    ],
)
def test_version_is_read_from_the_name_of_a_kernel(kernel: str, version: int | None) -> None:
    found = flash_version(kernel)
    assert (found.version if found else None) == version


def test_every_known_nvidia_gpu_is_of_a_named_generation() -> None:
    capabilities = {gpu.capability for gpu in known_hardware().values() if gpu.capability is not None}
    assert {major for major, _ in capabilities} <= GENERATIONS.keys()


def test_no_version_runs_on_a_generation_that_nobody_has_named() -> None:
    later = (max(GENERATIONS) + 1, 0)
    assert all(flash.against("a later GPU", later) for flash in FLASH_ATTENTION)
