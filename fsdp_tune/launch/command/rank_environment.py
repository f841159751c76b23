"""The environment of the ranks: which variables are removed, and which are recorded.

Variables left over from another job would change the stack silently (Accelerate reads RANK, PMI_RANK and FSDP_*; torchrun reads PET_*),
so they are removed and named in `launch.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_tune.core.secrets import MASK, masked

# Set by launchers for their own children, or read by accelerate and torchrun as defaults of options.
STALE_NAMES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_NAME",
        "ROLE_WORLD_SIZE",
        "NODE_RANK",
    }
    | {"MASTER_ADDR", "MASTER_PORT", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", "PYTHON_EXEC"}
)
STALE_PREFIXES = (
    *("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "DEEPSPEED_", "MEGATRON_LM_"),
    *("PET_", "TORCHELASTIC_", "TORCH_ELASTIC_", "PMI_", "PMIX_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_"),
)
# Variables of a shell inside an allocation; the tasks of a running step keep theirs.
SLURM_PREFIX = "SLURM_"
SLURM_STEP_MARK = "SLURM_STEP_ID"

# Variables that change how ranks run, and are recorded. No other variable of the user is.
RECORDED_PREFIXES = (
    *("CUDA_", "NVIDIA_", "HIP_", "ROCR_", "ZE_", "ASCEND_", "NCCL_", "GLOO_", "UCX_", "FI_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "KMP_"),
    *("HF_", "TRANSFORMERS_", "TOKENIZERS_", "DATASETS_", "XDG_", "SLURM_", "PYTHON", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"),
)


def is_stale(name: str, *, in_slurm_step: bool) -> bool:
    if name.startswith(SLURM_PREFIX):
        return not in_slurm_step
    return name in STALE_NAMES or name.startswith(STALE_PREFIXES)


def clean(environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that ranks may inherit, and the sorted names of the removed ones."""
    in_step = SLURM_STEP_MARK in environment
    removed = sorted(name for name in environment if is_stale(name, in_slurm_step=in_step))
    return {name: value for name, value in environment.items() if name not in removed}, removed


def recorded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the inherited variables that matter to a run, masked, sorted by name."""
    return {name: masked(name, environment[name]) for name in sorted(environment) if name.startswith(RECORDED_PREFIXES)}


def masked_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the names of recorded variables whose values are masked as secrets, sorted."""
    return [name for name, value in recorded_variables(environment).items() if MASK in value and value != environment[name]]


def relevant_variables(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return, for `env`, the variables that ranks would inherit, masked, and those that a launch would remove."""
    kept, removed = clean(environment)
    return {"inherited": recorded_variables(kept), "removed_at_launch": removed}
