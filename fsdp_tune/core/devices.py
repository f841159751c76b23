"""Detect the accelerators and cores of this machine without importing torch.

By NVML for NVIDIA, by device files for others. Importing torch takes two seconds and may initialise CUDA, and
the command line only needs a count and a name. `torch_facts` queries torch in a child process, for `env`, and
if no accelerator is detected but the recipe needs one.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_tune.core.cgroups import core_limit
from fsdp_tune.core.nvml import NVML_SUCCESS, Nvml, open_nvml
from fsdp_tune.core.refused_variables import find_refusal

TORCH_FACTS_SECONDS = 120.0
AMD_NODES, DRM = Path("/sys/class/kfd/kfd/topology/nodes"), Path("/sys/class/drm")
"""The nodes of AMD's driver, which are CPUs and GPUs, and the kernel's graphics devices, by the number of
their render node."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that the command runs on. `device` is the kind of its accelerators; None if it has none."""

    device: str | None
    device_count: int
    cores: int
    device_name: str | None
    capability: tuple[int, int] | None = None
    """Compute capability of its first NVIDIA GPU."""
    lost: tuple[str, ...] = ()
    """The NVIDIA GPUs that do not respond, each with the driver's reason."""
    hidden: str | None = None
    """The variable that hides all of its GPUs, with its value."""
    has_bf16_cpu: bool = True
    """Whether its CPU has instructions for bf16 products."""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. `memory_bytes` is the total; None if only the vendor's library could report it."""

    kind: str
    name: str
    uuid: str = ""
    memory_bytes: int | None = None
    capability: tuple[int, int] | None = None


def available_cores() -> int:
    """Return the number of cores that this process may use, limited by `taskset` and the CPU time of a
    container; on macOS, all cores."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = core_limit()
    return allowed if limit is None else min(allowed, limit.value)


CPU_INFO = Path("/proc/cpuinfo")
_BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""x86 (Sapphire Rapids; Cooper Lake, Zen 4 and later) and Arm. oneDNN, and with it
`torch.ops.mkldnn._is_mkldnn_bf16_supported`, also accepts AVX-512 without them, where each product converts
its operands to fp32 and back."""


def has_bf16_instructions() -> bool:
    """Return whether the CPU multiplies bf16 in hardware; False where the system does not tell."""
    try:
        text = CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return found is not None and not _BF16_FLAGS.isdisjoint(found[1].split())


def this_machine(wanted: str, environment: Mapping[str, str] | None = None) -> Machine:
    """Return the machine for `recipe.resolve`. `wanted` is `launch.device`; nothing is detected if it is
    `cpu`."""
    environment = os.environ if environment is None else environment
    cores, has_bf16_cpu = available_cores(), has_bf16_instructions()
    if wanted == "cpu":
        return Machine(None, 0, cores, None, has_bf16_cpu=has_bf16_cpu)
    # torch.distributed has no collectives on a Mac's device, so recipes are checked and planned there for
    # another machine.
    devices, lost = (
        [device for device in visible_devices(environment) if device.kind != "mps"],
        tuple(lost_devices()),
    )
    if not devices and (wanted != "auto" or _has_intel_graphics()):
        facts = torch_facts()
        if facts.get("device") is not None:
            return Machine(
                str(facts["device"]),
                int(facts["device_count"]),
                cores,
                facts.get("device_name"),
                has_bf16_cpu=has_bf16_cpu,
            )
    if not devices:
        return Machine(
            None, 0, cores, None, lost=lost, hidden=hidden_by(environment), has_bf16_cpu=has_bf16_cpu
        )
    first = devices[0]
    return Machine(
        first.kind, len(devices), cores, first.name, first.capability, lost, has_bf16_cpu=has_bf16_cpu
    )


def visible_devices(environment: Mapping[str, str]) -> list[Device]:
    """Return the accelerators visible to a rank, all of one kind and in its order; [] if there are none."""
    if found := _devices(environment):
        devices, variable = found
        return select(devices, environment.get(variable))
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return [Device("mps", "Apple GPU")]
    return []


def only_visible(environment: Mapping[str, str], chosen: slice) -> dict[str, str]:
    """Return the variable that shows a process only these of the visible devices; {} if no variable can."""
    if (found := _devices(environment)) is None:
        return {}
    devices, variable = found
    count, given = len(select(devices, environment.get(variable))), environment.get(variable)
    names = given.split(",") if given is not None else list(map(str, range(count)))
    return {variable: ",".join(names[:count][chosen])}


def _devices(environment: Mapping[str, str]) -> tuple[list[Device], str] | None:
    """Return the accelerators of this machine, and the variable that selects among them; None if there are
    none, or there is none."""
    if nvidia := nvidia_devices():
        return nvidia, "CUDA_VISIBLE_DEVICES"
    if amd := amd_devices():
        return amd, "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in environment else "CUDA_VISIBLE_DEVICES"
    if npu := _files("npu", "Ascend NPU", Path("/dev"), "davinci[0-9]*"):
        return npu, "ASCEND_RT_VISIBLE_DEVICES"
    return None


def hidden_by(environment: Mapping[str, str]) -> str | None:
    """Return the variable that hides every accelerator of this machine, as `NAME=value`; None if one is
    visible or there is none."""
    if (found := _devices(environment)) is None:
        return None
    devices, variable = found
    visible = environment.get(variable)
    return None if visible is None or select(devices, visible) else f"{variable}={visible}"


def select(devices: list[Device], visible: str | None) -> list[Device]:
    """Apply CUDA_VISIBLE_DEVICES as CUDA does: indices or beginnings of UUIDs, up to the first that matches
    no device.

    https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables
    """
    if visible is None:
        return devices
    chosen: list[Device] = []
    for word in visible.split(","):
        device = _named(devices, word.strip())
        if device is None:
            break
        # By identity, as AMD GPUs without a UUID are equal; a MIG slice is a new object each time.
        if any(device is other or (device == other and device.uuid.startswith("MIG-")) for other in chosen):
            return []  # CUDA shows no device if one is listed twice
        chosen.append(device)
    return chosen


def _named(devices: list[Device], word: str) -> Device | None:
    if word.isdigit():
        return devices[int(word)] if int(word) < len(devices) else None
    if word.startswith("MIG-"):
        return Device("cuda", "NVIDIA MIG slice", word)
    matching = [device for device in devices if word and device.uuid.startswith(word)]
    return matching[0] if len(matching) == 1 else None


def _has_intel_graphics() -> bool:
    """Return whether there is Intel graphics, most of which torch cannot use, so that torch must be
    queried."""
    vendors = Path("/sys/class/drm").glob("renderD*/device/vendor")
    return any(vendor.read_text().strip() == "0x8086" for vendor in vendors)


class _NvmlMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def nvidia_devices() -> list[Device]:
    """Return all NVIDIA devices by NVML, in PCI order, regardless of CUDA_VISIBLE_DEVICES; [] if there is no
    driver."""
    with open_nvml() as nvml:
        if nvml is None:
            return []
        return [
            device
            for index in range(nvml.device_count())
            if (device := _nvidia_device(nvml, index)) is not None
        ]


def lost_devices() -> list[str]:
    """Return the NVIDIA GPUs that the driver lists and that do not respond, each with the driver's reason:
    `GPU 1 (GPU is lost)`."""
    with open_nvml() as nvml:
        if nvml is None:
            return []
        count = nvml.device_count()
        codes = [
            nvml.call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(ctypes.c_void_p()))
            for index in range(count)
        ]
        return [
            f"GPU {index} ({nvml.describe(code)})" for index, code in enumerate(codes) if code != NVML_SUCCESS
        ]


@dataclass(frozen=True, slots=True)
class GpuState:
    """What NVML reports of a GPU at a moment; None for what the driver does not report."""

    used_bytes: int | None
    """By all processes, with the driver's own."""
    busy_percent: int | None
    clock_mhz: int | None
    uncorrected_errors: int | None
    """Of the memory, since the driver was loaded."""
    power_limit_watts: float | None
    default_power_watts: float | None
    slowed_by: tuple[str, ...]
    """Why the clock is lower than requested: heat, power supply."""


_SLOWED = {
    0x08: "hardware slowdown",
    0x20: "heat",
    0x40: "heat, by the hardware",
    0x80: "power brake of the machine",
}
"""nvmlClocksThrottleReason…, those that a healthy GPU does not have. The power cap (0x04) is reached by any
large matrix product."""
_SM_CLOCK, _UNCORRECTED, _VOLATILE = 1, 1, 0


def gpu_states(environment: Mapping[str, str]) -> list[GpuState]:
    """Return the state of each NVIDIA GPU visible to a rank, in its order; [] if there are none."""
    with open_nvml() as nvml:
        return (
            []
            if nvml is None
            else [_gpu_state(nvml, each.uuid) for each in visible_devices(environment) if each.uuid]
        )


def _gpu_state(nvml: Nvml, uuid: str) -> GpuState:
    handle, memory, busy = ctypes.c_void_p(), _NvmlMemory(), (ctypes.c_uint * 2)()
    found = nvml.succeeds("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))

    def number(function: str, *arguments: int, kind: Any = ctypes.c_uint) -> int | None:
        value = kind()
        return (
            value.value
            if found and nvml.succeeds(function, handle, *arguments, ctypes.byref(value))
            else None
        )

    has_memory = found and nvml.succeeds("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    has_use = found and nvml.succeeds("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(busy))
    limit, default = (
        number("nvmlDeviceGetPowerManagementLimit"),
        number("nvmlDeviceGetPowerManagementDefaultLimit"),
    )
    reasons = number("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong) or 0
    return GpuState(
        used_bytes=memory.used if has_memory else None,
        busy_percent=busy[0] if has_use else None,
        clock_mhz=number("nvmlDeviceGetClockInfo", _SM_CLOCK),
        uncorrected_errors=number(
            "nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE, kind=ctypes.c_ulonglong
        ),
        power_limit_watts=None if limit is None else limit / 1000,
        default_power_watts=None if default is None else default / 1000,
        slowed_by=tuple(word for bit, word in _SLOWED.items() if reasons & bit),
    )


def nvidia_driver() -> str | None:
    """Return the version of the NVIDIA driver, such as 550.54.15; None if there is none."""
    with open_nvml() as nvml:
        return None if nvml is None else nvml.text("nvmlSystemGetDriverVersion")


def _nvidia_device(nvml: Nvml, index: int) -> Device | None:
    handle, memory = ctypes.c_void_p(), _NvmlMemory()
    if not nvml.succeeds("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle)):
        return None  # it no longer responds: see `lost_devices`
    name, uuid = nvml.text("nvmlDeviceGetName", handle), nvml.text("nvmlDeviceGetUUID", handle)
    knows_memory = nvml.succeeds("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    major, minor = ctypes.c_int(), ctypes.c_int()
    has_capability = nvml.succeeds(
        "nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor)
    )
    capability = (major.value, minor.value) if has_capability else None
    return Device(
        "cuda", name or "NVIDIA GPU", uuid or "", memory.total if knows_memory else None, capability
    )


def amd_devices() -> list[Device]:
    """Return the AMD GPUs that this process may use, regardless of HIP_VISIBLE_DEVICES; [] if there is no
    driver."""
    nodes = (
        sorted(AMD_NODES.iterdir(), key=lambda node: (len(node.name), node.name))
        if AMD_NODES.is_dir()
        else []
    )
    return [device for node in nodes if (device := _amd_device(node)) is not None]


def _amd_device(node: Path) -> Device | None:
    """Return the GPU of a node; None for a CPU, whose `gpu_id` is 0, and for a GPU that the container may not
    use: the driver refuses to show its files (`node_show` in kfd_topology.c of Linux)."""
    try:
        if (node / "gpu_id").read_text(encoding="ascii").strip() in ("", "0"):
            return None
        node_properties = _kfd_properties(node)
        minor, unique_id = node_properties["drm_render_minor"], node_properties.get("unique_id", 0)
        banks = [_kfd_properties(bank) for bank in (node / "mem_banks").glob("*")]
        memory = sum(bank["size_in_bytes"] for bank in banks if bank["heap_type"] in _KFD_DEVICE_HEAPS)
    except OSError:
        return None
    except (KeyError, ValueError):
        return Device("cuda", "AMD GPU")
    try:  # only server GPUs have a product name, and a partition of one has none
        name = (DRM / f"renderD{minor}" / "device" / "product_name").read_text(encoding="utf-8").strip()
    except OSError:
        name = ""
    # The UUID that HIP_VISIBLE_DEVICES accepts (amd_gpu_agent.cpp of ROCR).
    return Device("cuda", name or "AMD GPU", f"GPU-{unique_id:016x}" if unique_id else "", memory or None)


_KFD_DEVICE_HEAPS = (1, 2)
"""HSA_MEM_HEAP_TYPE_FB_PUBLIC and _FB_PRIVATE of kfd_sysfs.h: memory of the GPU that the host can address,
and that it cannot."""


def _kfd_properties(folder: Path) -> dict[str, int]:
    lines = (folder / "properties").read_text(encoding="ascii").splitlines()
    return {name: int(value) for name, value in (line.split() for line in lines if line.strip())}


def _files(kind: str, name: str, folder: Path, pattern: str) -> list[Device]:
    """Return a device for each file."""
    return [Device(kind, name) for _ in sorted(folder.glob(pattern))] if folder.is_dir() else []


_ASK_TORCH = """
import json, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
device = torch.accelerator.current_accelerator(check_available=True)
kind = device.type if device else None
facts = {"device": kind, "device_count": torch.accelerator.device_count() if kind else 0, "device_name": None, "nccl": None}
facts |= {"cuda": torch.version.cuda, "hip": torch.version.hip, "cudnn": torch.backends.cudnn.version()}
facts["backends"] = [name for name in ("gloo", "nccl", "xccl", "hccl", "mpi") if dist.is_available() and dist.is_backend_available(name)]
if kind == "cuda":
    others = range(1, torch.cuda.device_count())
    facts |= {"device_name": torch.cuda.get_device_name(0), "capability": list(torch.cuda.get_device_capability(0))}
    facts["bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
    facts["peer_access"] = all(torch.cuda.can_device_access_peer(0, other) for other in others)
    facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if "nccl" in facts["backends"] else None
print(json.dumps(facts))
"""  # noqa: E501


def torch_facts() -> dict[str, Any]:
    """Return the accelerators visible to torch, queried in a child process; {"error": …} if torch cannot be
    imported."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _ASK_TORCH],
            capture_output=True,
            text=True,
            check=False,
            timeout=TORCH_FACTS_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"torch did not answer within {TORCH_FACTS_SECONDS:.0f} s"}
    if done.returncode != 0:
        if (refused := find_refusal(done.stderr)) is not None:
            return {"error": refused.message}
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"torch ended with exit code {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])
