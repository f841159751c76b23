"""The device of a run and its number of ranks on this machine, and what its GPUs cannot compute."""

from __future__ import annotations

from fsdp_tune.core.devices import Machine
from fsdp_tune.core.gpus import known_hardware
from fsdp_tune.core.units import counted
from fsdp_tune.recipe.decisions import Decisions
from fsdp_tune.recipe.rules.limits import (
    OLDEST_BF16_GPU,
    computes_in_fp8,
    experts_gpu_problem,
    flash_gpu_problem,
    fp8_gpu_problem,
    slow_bf16,
)
from fsdp_tune.recipe.schema.attention_kernels import SDPA_OR_EAGER
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.world import WORLD_RULES, World

ASSUMED_DEVICES = 8
"""Devices per machine if none is visible and the recipe gives no number (`validate`, `plan`, `--dry-run`)."""
CPU_RANKS = 2


def cpu_way_out(recipe: Recipe, machine: Machine) -> str:
    """Return the options that train a recipe on the CPU, with a number of ranks that suits the cores where
    the recipe has more, and in fp32 where the CPU computes bf16 slowly."""
    launch, options = recipe.launch, "--set launch.device=cpu"
    if not machine.has_bf16_cpu and recipe.precision.mixed_precision == "bf16":
        options += " --set precision.mixed_precision=no"
    most = max(machine.cores, CPU_RANKS) * launch.num_machines
    if launch.num_processes != "auto" and launch.num_processes > most:
        sizes = range(most, 0, -launch.num_machines)
        fitting = (
            size
            for size in sizes
            if not any(True for rule in WORLD_RULES for _ in rule(recipe, World(size, launch.num_machines)))
        )
        options += f" --set launch.num_processes={next(fitting, CPU_RANKS * launch.num_machines)}"
    return f"{options} to train on the CPU"


def decide_ranks(work: Decisions) -> None:
    device = _decide_device(work)
    _decide_processes(work, device)
    launch, local_ranks = (
        work.recipe.launch,
        max(1, work.data["launch"]["num_processes"] // work.recipe.launch.num_machines),
    )
    if launch.num_cpu_threads_per_process == "auto":
        threads = max(1, work.machine.cores // local_ranks)
        work.decide(
            "launch.num_cpu_threads_per_process",
            threads,
            f"{work.machine.cores} cores / {local_ranks} local ranks",
        )


def _decide_device(work: Decisions) -> str:
    wanted, there = work.recipe.launch.device, work.machine.device
    if wanted == "auto":
        if there is not None:
            named = f" ({work.machine.device_name})" if work.machine.device_name else ""
            work.decide("launch.device", there, f"the accelerator of this machine{named}")
            return there
        if work.assume is None:
            message = (
                f"no accelerator was found on this machine{_unseen(work.machine)}, and the CPU is never "
                "chosen silently"
            )
            work.add_problem(
                "no-device", ("launch.device",), message, None, (cpu_way_out(work.recipe, work.machine),)
            )
        device = work.assume or "cuda"
        work.decide("launch.device", device, "assumed: no accelerator was found on this machine")
        return device
    if wanted not in {"cpu", there} and work.assume is None:
        shows = f"it shows {there}" if there else f"it shows no accelerator{_unseen(work.machine)}"
        ways_out = (cpu_way_out(work.recipe, work.machine),)
        work.add_problem(
            "no-device",
            ("launch.device",),
            f"`launch.device: {wanted}` is not on this machine: {shows}",
            None,
            ways_out,
        )
    return wanted


def _unseen(machine: Machine) -> str:
    """Return, in parentheses, why this machine's GPUs do not count; "" if it has none that do not."""
    hidden = [f"`{machine.hidden}` hides its GPUs"] if machine.hidden else []
    lost = [f"{each} does not respond" for each in machine.lost]
    return f" ({', '.join([*hidden, *lost])})" if hidden or lost else ""


def compare_gpu(work: Decisions) -> None:
    """Compare the recipe with the GPU: whether it responds, its precisions, its attention kernels."""
    name = work.machine.device_name or "this GPU"
    capability = work.machine.capability
    if work.data["launch"]["device"] != "cuda":
        return
    if work.machine.lost and work.machine.device == "cuda":
        message = f"the driver lists {', '.join(work.machine.lost)}, and the run does without"
        work.add_notice(
            "gpu-lost",
            (),
            message,
            "`dmesg` has its XID error; a reset (`nvidia-smi --gpu-reset`) or a reboot may recover it",
        )
    if capability is None:
        return
    if computes_in_fp8(work.recipe) and (found := fp8_gpu_problem(name, capability)) is not None:
        add = work.add_problem if work.assume is None else work.add_notice
        add(found.code, found.keys, found.message, found.hint)
    if (found := slow_bf16(work.recipe, name, capability)) is not None:
        work.add_notice(found.code, found.keys, found.message, found.hint)
    for problem_of in (flash_gpu_problem, experts_gpu_problem):
        if (found := problem_of(work.recipe, name, capability)) is not None:
            add = work.add_problem if work.assume is None else work.add_notice
            add(found.code, found.keys, found.message, found.hint)
    if (
        work.recipe.model.attn_implementation == "auto"
        and work.recipe.compute_dtype != "fp32"
        and capability < OLDEST_BF16_GPU
    ):
        wanted, has = (".".join(map(str, version)) for version in (OLDEST_BF16_GPU, capability))
        reason = f"FlashAttention needs compute capability {wanted}; {name} has {has}"
        work.decide("model.attn_implementation", SDPA_OR_EAGER, reason)


_SELECTED_BY = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
}
"""The variable that selects among the devices of a machine; AMD's GPUs obey that of CUDA too."""


def _decide_processes(work: Decisions, device: str) -> None:
    launch, machine = work.recipe.launch, work.machine
    machines = counted(launch.num_machines, "machine")
    if launch.num_processes == "auto":
        if device == "cpu":
            count, reason = (
                CPU_RANKS * launch.num_machines,
                f"{CPU_RANKS} CPU ranks a machine: the fewest that shard",
            )
        elif machine.device == device and machine.device_count:
            count = machine.device_count * launch.num_machines
            reason = f"{counted(machine.device_count, 'visible device')} × {machines}"
        else:
            count = ASSUMED_DEVICES * launch.num_machines
            reason = f"assumed: {ASSUMED_DEVICES} devices × {machines}"
            message = f"this machine shows no {device} device: {ASSUMED_DEVICES} per machine are assumed"
            work.add_notice(
                "assumed-devices", ("launch.num_processes",), message, "write `launch.num_processes`"
            )
        work.decide("launch.num_processes", count, reason)
        return
    local = launch.num_processes // launch.num_machines
    if device == "cuda" and work.assume is not None:
        _note_unknown_machine(work, local)
    if device != "cpu" and work.assume is None and machine.device == device and local > machine.device_count:
        message = (
            f"{local} ranks on this machine need {local} {device} devices, and {machine.device_count} are "
            f"visible{_unseen(work.machine)}"
        )
        hint = f"write `launch.num_processes: {machine.device_count * launch.num_machines}`" + (
            f", or check {_SELECTED_BY[device]}" if device in _SELECTED_BY else ""
        )
        work.add_problem("too-few-devices", ("launch.num_processes",), message, hint)


def _note_unknown_machine(work: Decisions, local: int) -> None:
    """Report more ranks on a machine than any machine of the table of GPUs has: mostly
    `launch.num_machines` is missing."""
    launch, most = (
        work.recipe.launch,
        max(gpu.devices_per_machine or 0 for gpu in known_hardware().values()),
    )
    if launch.num_processes == "auto" or local <= most:
        return
    message = (
        f"`launch.num_machines: {launch.num_machines}` puts {local} ranks on a machine, and none "
        f"known has more than {most} GPUs"
    )
    hint = (
        f"`--set launch.num_machines={-(-launch.num_processes // most)}`; `submit slurm` takes "
        "`--nodes` and `--gpus-per-node`"
    )
    work.add_notice("ranks-of-a-machine", ("launch.num_processes",), message, hint)
