from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.core import devices
from fsdp_tune.core.devices import Device, only_visible, select, this_machine, torch_facts, visible_devices
from fsdp_tune.core.gpus import detect

FOUR = [Device("cuda", "H100", f"GPU-{index}{index}ab", 80 << 30) for index in range(4)]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        (" 1 , 3", [1, 3]),
        ("7", []),
        ("0,7,1", [0]),
        ("0,-1,1", [0]),
        ("1,1", []),
        ("GPU-22ab", [2]),
        ("GPU-33,GPU-0", [3, 0]),
        ("GPU-", []),
        ("none", []),
    ],
)
def test_visible_devices_follow_cuda_semantics(visible: str | None, expected: list[int]) -> None:
    assert select(FOUR, visible) == [FOUR[index] for index in expected]


def test_mig_slice_counts_as_device() -> None:
    assert len(select(FOUR, "MIG-abc,MIG-def")) == 2
    assert select(FOUR, "MIG-abc,MIG-abc") == []


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "nvidia_devices", lambda: FOUR)


@pytest.mark.usefixtures("four_gpus")
def test_machine_counts_only_visible_devices() -> None:
    machine = this_machine("auto", {"CUDA_VISIBLE_DEVICES": "0,2"})
    assert (machine.device, machine.device_count, machine.device_name) == ("cuda", 2, "H100")


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("visible", "hidden"), [("", True), ("7", True), ("1,1", True), ("3,9", False), (None, False)]
)
def test_variable_that_hides_all_gpus_is_named(visible: str | None, hidden: bool) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert this_machine("auto", environment).hidden == (f"CUDA_VISIBLE_DEVICES={visible}" if hidden else None)


@pytest.fixture
def amd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CPU and three GPUs as AMD's driver lists them: a server GPU, one that the container may not use, and
    a partition."""
    monkeypatch.setattr(devices, "nvidia_devices", list)
    monkeypatch.setattr(devices, "AMD_NODES", tmp_path / "nodes")
    monkeypatch.setattr(devices, "DRM", tmp_path / "drm")
    for node, gpu_id in enumerate((0, 21947, 7041, 33190)):
        folder = tmp_path / "nodes" / str(node)
        for name, heap, size in (("0", 1, 191 << 30), ("1", 4, 1 << 16)):
            (folder / "mem_banks" / name).mkdir(parents=True)
            (folder / "mem_banks" / name / "properties").write_text(
                f"heap_type {heap}\nsize_in_bytes {size}\nflags 0\n"
            )
        (folder / "gpu_id").write_text(f"{gpu_id}\n")
        unique_id = 0xC0FFEE if node == 1 else 0
        (folder / "properties").write_text(
            f"simd_count 1216\ndrm_render_minor {127 + node}\nunique_id {unique_id}\n"
        )
    (tmp_path / "drm" / "renderD128" / "device").mkdir(parents=True)
    (tmp_path / "drm" / "renderD128" / "device" / "product_name").write_text("AMD Instinct MI300X OAM\n")
    refused = tmp_path / "nodes" / "2" / "gpu_id"
    read = Path.read_text

    def read_text(path: Path, *arguments: str, **options: str) -> str:
        if path == refused:
            raise PermissionError(1, "Operation not permitted")
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    return tmp_path


def test_amd_gpus_have_the_names_and_memory_of_the_driver(amd: Path) -> None:
    named = Device("cuda", "AMD Instinct MI300X OAM", "GPU-0000000000c0ffee", 191 << 30)
    partition = Device("cuda", "AMD GPU", memory_bytes=191 << 30)
    assert visible_devices({}) == [named, partition]
    assert visible_devices({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}) == [partition]
    assert visible_devices({"HIP_VISIBLE_DEVICES": "GPU-0000000000c0ffee"}) == [named]
    assert only_visible({"HIP_VISIBLE_DEVICES": "1,0", "CUDA_VISIBLE_DEVICES": "0"}, slice(1, None)) == {
        "HIP_VISIBLE_DEVICES": "0"
    }
    assert this_machine("auto", {"HIP_VISIBLE_DEVICES": "7"}).hidden == "HIP_VISIBLE_DEVICES=7"
    machine = this_machine("auto", {})
    assert (machine.device, machine.device_count, machine.device_name) == (
        "cuda",
        2,
        "AMD Instinct MI300X OAM",
    )
    hardware = detect(named.name)
    assert hardware is not None
    assert hardware.name == "MI300X"
    (amd / "nodes" / "1" / "properties").write_text("of another version\n")
    assert visible_devices({}) == [Device("cuda", "AMD GPU"), partition]


def test_equal_gpus_without_uuid_are_selected_by_index() -> None:
    """Such as the partitions of an AMD GPU."""
    equal = [Device("cuda", "AMD GPU", memory_bytes=24 << 30) for _ in range(4)]
    assert len(select(equal, "0,2,3")) == 3
    assert select(equal, "0,2,0") == []


@pytest.mark.usefixtures("four_gpus")
def test_cpu_recipe_detects_no_accelerator() -> None:
    assert this_machine("cpu", {}).device is None


def test_training_on_macos_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "visible_devices", lambda _: [Device("mps", "Apple GPU")])
    assert this_machine("auto", {}).device is None


def test_torch_confirms_detected_devices() -> None:
    facts = torch_facts()
    cheap = visible_devices({})
    assert facts["device"] == (cheap[0].kind if cheap else None)
    assert facts["device_count"] == len(cheap)
    assert "gloo" in facts["backends"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # oneDNN takes bf16 here, and is slow
        (
            "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512bw avx512vl avx512dq\n",
            False,
        ),
        ("flags\t\t: fpu avx512f avx512_bf16\n", True),
        ("flags\t\t: fpu amx_tile amx_bf16\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("Features\t: fp asimd\n", False),
        (None, False),
    ],
)
def test_instructions_for_bf16_are_read_from_the_system(
    text: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "CPU_INFO", tmp_path / "cpuinfo")
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert this_machine("cpu").has_bf16_cpu is expected


def nvml_function(code: int, **outputs: object) -> Callable[..., int]:
    """A function of NVML that writes `text` into its buffer, or `number` into its last argument."""

    def call(*arguments: Any) -> int:
        if "text" in outputs:
            arguments[-2].value = str(outputs["text"]).encode()
        elif "number" in outputs:
            arguments[-1]._obj.value = outputs["number"]
        return code

    return call


NVML: dict[str, Any] = {
    "nvmlInit_v2": nvml_function(0),
    "nvmlShutdown": nvml_function(0),
    "nvmlDeviceGetCount_v2": nvml_function(0, number=1),
    "nvmlDeviceGetHandleByIndex_v2": nvml_function(0),
    "nvmlDeviceGetHandleByUUID": nvml_function(0),
    "nvmlDeviceGetName": nvml_function(0, text="H100"),
    "nvmlDeviceGetUUID": nvml_function(0, text="GPU-1"),
    "nvmlDeviceGetMemoryInfo": nvml_function(0),
    "nvmlDeviceGetCudaComputeCapability": nvml_function(0, number=9),
    "nvmlErrorString": lambda code: b"it is lost",
    "nvmlSystemGetDriverVersion": nvml_function(0, text="1.2"),
}


@pytest.mark.parametrize("lacking", [*NVML, None])
def test_driver_may_lack_any_function(lacking: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(**{name: function for name, function in NVML.items() if name != lacking})
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: library)
    found = this_machine("cuda" if lacking is None else "auto", {})
    devices.gpu_states({})
    assert devices.nvidia_driver() == (
        None if lacking in ("nvmlInit_v2", "nvmlSystemGetDriverVersion") else "1.2"
    )
    if lacking == "nvmlDeviceGetCudaComputeCapability":
        assert (found.device_name, found.capability) == ("H100", None)
    if lacking == "nvmlDeviceGetHandleByIndex_v2":
        assert devices.lost_devices()


def test_every_call_of_the_driver_is_made_by_one_class() -> None:
    """A name of NVML as an attribute would be a call that a missing function breaks."""
    package = Path(devices.__file__).parents[1]
    direct = [
        str(path)
        for path in package.rglob("*.py")
        if re.search(r"\.nvml[A-Z]", path.read_text(encoding="utf-8"))
    ]
    assert direct == []
