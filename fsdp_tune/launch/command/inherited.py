"""The environment variables that ranks inherit: which ones a launch removes as left over from another job,
and which ones it records, with secrets masked."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_tune.core.import_path import named_directories
from fsdp_tune.core.secrets import MASK, has_secret_name, masked
from fsdp_tune.recipe.rules.launch import is_plain_setting

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
    *(
        "CUDA_",
        "NVIDIA_",
        "HIP_",
        "ROCR_",
        "ZE_",
        "ASCEND_",
        "NCCL_",
        "GLOO_",
        "UCX_",
        "FI_",
        "TORCH",
        "PYTORCH_",
        "OMP_",
        "MKL_",
        "KMP_",
    ),
    *(
        "HF_",
        "TRANSFORMERS_",
        "TOKENIZERS_",
        "DATASETS_",
        "XDG_",
        "SLURM_",
        "PYTHON",
        "LD_LIBRARY_PATH",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
    ),
)
# Inherited variables whose values are listed, next to those that a recipe may set (`is_plain_setting`):
# paths, hosts, numbers and switches.
_SHOWN = frozenset(
    {
        *(
            "LD_LIBRARY_PATH",
            "VIRTUAL_ENV",
            "CONDA_PREFIX",
            "PYTHONPATH",
            "PYTHONHOME",
            "PYTHONWARNINGS",
            "PYTHONNOUSERSITE",
            "PYTHONSAFEPATH",
        ),
        *(
            "PYTHONUSERBASE",
            "PYTHONPYCACHEPREFIX",
            "PYTHONIOENCODING",
            "PYTHONUTF8",
            "PYTHONOPTIMIZE",
            "PYTHONMALLOC",
            "PYTHONDEVMODE",
        ),
        *(
            "CUDA_VISIBLE_DEVICES",
            "CUDA_HOME",
            "CUDA_PATH",
            "CUDA_VERSION",
            "CUDA_CACHE_PATH",
            "CUDA_MPS_PIPE_DIRECTORY",
        ),
        *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_PRODUCT_NAME"),
        *(
            "HIP_VISIBLE_DEVICES",
            "ROCR_VISIBLE_DEVICES",
            "ZE_AFFINITY_MASK",
            "ASCEND_RT_VISIBLE_DEVICES",
            "ASCEND_HOME_PATH",
        ),
        *(
            "NCCL_NET_PLUGIN",
            "NCCL_TUNER_PLUGIN",
            "NCCL_CONF_FILE",
            "NCCL_DEBUG_FILE",
            "NCCL_TUNER_CONFIG_PATH",
            "NCCL_HOME",
        ),
        *(
            "OMP_NUM_THREADS",
            "MKL_NUM_THREADS",
            "TOKENIZERS_PARALLELISM",
            "UCX_MEMTYPE_CACHE",
            "UCX_RNDV_THRESH",
            "UCX_MODULE_DIR",
        ),
        *(
            "FI_PROVIDER_PATH",
            "FI_CXI_DISABLE_HOST_REGISTER",
            "FI_MR_CACHE_MONITOR",
            "FI_CXI_ATS",
            "FI_CXI_RX_MATCH_MODE",
        ),
        *(
            "TORCH_HOME",
            "TORCH_LOGS",
            "TORCH_LOGS_OUT",
            "TORCH_TRACE",
            "TORCH_CUDA_ARCH_LIST",
            "TORCH_EXTENSIONS_DIR",
            "TORCH_COMPILE_DISABLE",
        ),
        *(
            "TORCHDYNAMO_DISABLE",
            "TORCHDYNAMO_VERBOSE",
            "TORCHINDUCTOR_CACHE_DIR",
            "TORCHINDUCTOR_FX_GRAPH_CACHE",
            "TORCHINDUCTOR_MAX_AUTOTUNE",
        ),
        *(
            "TORCHINDUCTOR_COMPILE_THREADS",
            "PYTORCH_KERNEL_CACHE_PATH",
            "PYTORCH_JIT",
            "PYTORCH_NVML_BASED_CUDA_CHECK",
            "PYTORCH_VERSION",
        ),
        *(
            "HF_HOME",
            "HF_HUB_CACHE",
            "HF_XET_CACHE",
            "HF_ASSETS_CACHE",
            "HF_DATASETS_CACHE",
            "HF_MODULES_CACHE",
            "HF_ENDPOINT",
            "HF_DEBUG",
        ),
        *(
            "HF_HUB_DISABLE_TELEMETRY",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN",
            "HF_HUB_DISABLE_SYMLINKS_WARNING",
            "HF_HUB_DISABLE_EXPERIMENTAL_WARNING",
        ),
        *("TRANSFORMERS_CACHE", "TRANSFORMERS_NO_TF", "TRANSFORMERS_NO_FLAX", "DATASETS_CACHE"),
        *(
            "XDG_CACHE_HOME",
            "XDG_CONFIG_HOME",
            "XDG_DATA_HOME",
            "XDG_STATE_HOME",
            "XDG_RUNTIME_DIR",
            "XDG_SESSION_TYPE",
            "XDG_DATA_DIRS",
        ),
        *("XDG_CONFIG_DIRS", "XDG_SESSION_ID", "XDG_SESSION_CLASS"),
    }
    | {
        f"SLURM_{name}"
        for name in (
            *(
                "JOB_ID",
                "JOBID",
                "JOB_NAME",
                "JOB_NODELIST",
                "JOB_NUM_NODES",
                "JOB_PARTITION",
                "JOB_QOS",
                "JOB_GPUS",
                "JOB_CPUS_PER_NODE",
            ),
            *(
                "JOB_START_TIME",
                "JOB_END_TIME",
                "ARRAY_JOB_ID",
                "ARRAY_TASK_ID",
                "CLUSTER_NAME",
                "CPUS_ON_NODE",
                "CPUS_PER_TASK",
            ),
            *(
                "GPUS",
                "GPUS_ON_NODE",
                "GPUS_PER_NODE",
                "GPUS_PER_TASK",
                "GTIDS",
                "LOCALID",
                "MEM_PER_CPU",
                "MEM_PER_GPU",
                "MEM_PER_NODE",
            ),
            *(
                "NNODES",
                "NODEID",
                "NODELIST",
                "NPROCS",
                "NTASKS",
                "NTASKS_PER_NODE",
                "PROCID",
                "RESTART_COUNT",
                "STEP_ID",
                "STEPID",
            ),
            *(
                "STEP_GPUS",
                "STEP_NODELIST",
                "STEP_NUM_NODES",
                "STEP_NUM_TASKS",
                "STEP_TASKS_PER_NODE",
                "SUBMIT_DIR",
                "SUBMIT_HOST",
            ),
            *("TASKS_PER_NODE", "TASK_PID", "TOPOLOGY_ADDR", "CPU_BIND", "DISTRIBUTION", "SRUN_COMM_HOST"),
        )
    }
)


def is_stale(name: str, *, in_slurm_step: bool) -> bool:
    if name.startswith(SLURM_PREFIX):
        return not in_slurm_step
    if name.startswith("PMIX_MCA_"):  # a setting, which NVIDIA's images have, and nothing of a job
        return False
    return name in STALE_NAMES or name.startswith(STALE_PREFIXES)


def clean(environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that ranks may inherit, and the sorted names of the removed ones."""
    in_step = SLURM_STEP_MARK in environment
    removed = sorted(name for name in environment if is_stale(name, in_slurm_step=in_step))
    kept = {name: value for name, value in environment.items() if name not in removed}
    if "PYTHONPATH" in kept:  # a script that calls `fsdp_tune.train` may have an empty entry in it
        kept["PYTHONPATH"] = named_directories(kept["PYTHONPATH"])
    return kept, removed


def recorded_variables(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Return the inherited variables that matter to a run, sorted by name, masked, with None for a value that
    is not known to be plain."""
    names = [name for name in sorted(environment) if name.startswith(RECORDED_PREFIXES)]
    return {
        as_text(name): masked(name, as_text(environment[name])) if _is_shown(name) else None for name in names
    }


def as_text(word: str) -> str:
    """Return a word of the environment with bytes that are not UTF-8, as of a path, written as escapes."""
    return word.encode("utf-8", "backslashreplace").decode()


def _is_shown(name: str) -> bool:
    """Return whether the value is listed: nobody knows what a variable with another name contains."""
    # the value of a secret name is the mask
    return name in _SHOWN or is_plain_setting(name) or has_secret_name(name)


def masked_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the names of recorded variables whose values are masked as secrets, sorted."""
    recorded = recorded_variables(environment).items()
    return [
        name
        for name, value in recorded
        if value is not None and MASK in value and value != environment.get(name)
    ]


def relevant_variables(environment: Mapping[str, str]) -> dict[str, object]:
    """Return, for `env`, the variables that ranks would inherit, masked, and those that a launch would
    remove."""
    kept, removed = clean(environment)
    return {"inherited": recorded_variables(kept), "removed_at_launch": removed}
