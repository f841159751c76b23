"""The table of GPUs: complete, with sources, found under any spelling."""

from __future__ import annotations

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.gpus import detect, find_hardware, known_hardware
from fsdp_tune.core.units import GIB
from fsdp_tune.recipe.rules.limits import OLDEST_BF16_GPU, OLDEST_FP8_GPU

NAMES = [
    "V100-16GB",
    "V100-32GB",
    "T4",
    "A10",
    "A100-40GB",
    "A100-80GB",
    "L4",
    "L40S",
    "RTX3090",
    "RTX4090",
    "RTX5090",
    "RTX6000Ada",
    "H100-SXM",
    "H100-PCIe",
    "H200",
    "GH200",
    "B200",
    "B300",
    "MI300X",
]


def test_table_has_every_promised_gpu_and_each_has_its_source() -> None:
    table = known_hardware()
    assert list(table) == NAMES
    assert [name for name, gpu in table.items() if not gpu.source or not gpu.device_names] == []


@pytest.mark.parametrize(
    "spelling", ["a100-40gb", "A100 40GB", "a10040gb", "A100_40gb", "NVIDIA A100-SXM4-40GB"]
)
def test_gpu_names_ignore_case_spaces_and_hyphens(spelling: str) -> None:
    assert find_hardware(spelling).name == "A100-40GB"


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("A100-80", "A100-80GB"),
        ("h100", "H100-SXM or H100-PCIe"),
        ("H100-80GB", "mean H100-SXM or H100-PCIe"),
        ("RTX 4080", "RTX4090"),
        ("", "Known:"),
    ],
)
def test_unknown_gpu_is_refused_with_the_list_and_the_close_name(wrong: str, meant: str) -> None:
    with pytest.raises(FsdpTuneError) as caught:
        find_hardware(wrong)
    problem = caught.value.problems[0]
    assert caught.value.exit_code == 2
    assert (problem.code, problem.hint is not None and meant in problem.hint) == ("unknown-gpu", True)
    assert problem.hint is not None
    assert all(name in problem.hint for name in NAMES)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA A10G", None),  # half an A10
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("", None),
        (None, None),
    ],
)
def test_machines_own_gpu_is_found_by_its_full_name(driver: str | None, name: str | None) -> None:
    found = detect(driver)
    assert (found.name if found else None) == name


def test_compute_capability_is_that_of_torch_and_decides_bf16_and_fp8() -> None:
    assert [find_hardware(name).capability for name in ("T4", "L40S", "B200", "MI300X")] == [
        (7, 5),
        (8, 9),
        (10, 0),
        None,
    ]
    for gpu in known_hardware().values():
        if gpu.capability is not None:
            assert (gpu.capability >= OLDEST_BF16_GPU) == (gpu.bf16_tflops is not None), gpu.name
            assert (gpu.capability >= OLDEST_FP8_GPU) == (gpu.fp8_tflops is not None), gpu.name


def test_peaks_are_dense_and_unsupported_dtypes_unknown() -> None:
    """Vendors' headline figures are with sparsity: twice these."""
    assert find_hardware("H100-SXM").peak_flops("bf16") == pytest.approx(989.4e12)
    assert find_hardware("L4").peak_flops("fp8") == pytest.approx(242.5e12)
    assert find_hardware("V100-16GB").peak_flops("bf16") is None
    assert find_hardware("T4").peak_flops("fp8") is None


def test_no_peak_is_above_its_neighbour_of_half_the_width() -> None:
    """fp8 is twice bf16, bf16 twice tf32: a figure with sparsity in one column would break the ladder."""
    for gpu in known_hardware().values():
        for wide, narrow in (("tf32_tflops", "bf16_tflops"), ("bf16_tflops", "fp8_tflops")):
            low, high = getattr(gpu, wide), getattr(gpu, narrow)
            assert low is None or high is None or high == pytest.approx(2 * low, rel=0.03), (
                f"{gpu.name} {wide} {narrow}"
            )


def test_usable_memory_is_at_most_that_of_the_name() -> None:
    for gpu in known_hardware().values():
        assert 0.9 * gpu.memory_gb * 1e9 <= gpu.usable_bytes <= gpu.memory_gb * GIB * 1.001, gpu.name
    assert find_hardware("RTX6000Ada").usable_bytes == 48e9, "nobody's figure: the least that 48 GB can mean"


def test_measured_multiplication_is_below_the_peak() -> None:
    for gpu in known_hardware().values():
        assert gpu.matmul_tflops is None or gpu.matmul_tflops < (gpu.bf16_tflops or 0), gpu.name


def test_links_are_one_direction() -> None:
    assert find_hardware("H100-SXM").machine_link_bytes_per_second == 450e9
    assert find_hardware("RTX4090").machine_link_bytes_per_second == 32e9, "no NVLink: PCIe"
    assert find_hardware("RTX3090").machine_link_bytes_per_second == 32e9, "a bridge is not taken for granted"
