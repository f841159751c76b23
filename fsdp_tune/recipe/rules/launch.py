"""`launch.env`: which variables a recipe may set for the ranks without further permission.

A variable can run code: `PYTHONPATH` imports a `sitecustomize.py`, `LD_PRELOAD` and NCCL's plugin variables load libraries,
`CUDA_HOME` names the compiler that Triton starts, `HF_ENDPOINT` the host that receives the token. So a recipe may set only variables
that are known to be plain settings; any other needs `--allow-env NAME` on the command line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from fsdp_tune.core.secrets import has_secret_shape, is_secret
from fsdp_tune.core.units import shown
from fsdp_tune.core.values import texts_below
from fsdp_tune.recipe.schema.keys import Finding, Rule
from fsdp_tune.recipe.schema.recipe import Recipe

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


_OURS = ("FSDP_", "ACCELERATE_", "PET_", "TORCHELASTIC_", "PARALLELISM_CONFIG_", "FSDP_TUNE_")


_OUR_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("OMP_NUM_THREADS", "MIXED_PRECISION", "PYTHONSAFEPATH", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
    *("TOKENIZERS_PARALLELISM", "HF_HUB_DISABLE_TELEMETRY", "TORCHINDUCTOR_CACHE_DIR", "TENSORBOARD_LOGGING_DIR"),
    *("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"),
    *("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_DIST_USE_NCCL2"),
}


_VISIBILITY = frozenset(
    {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"}
    | {"ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL"}
)
"""Variables that hide devices. In `launch.env` they would reach the ranks, after the command has counted the devices without them."""


_KEYS_OF_NAMES = {
    "OMP_NUM_THREADS": "write `launch.num_cpu_threads_per_process: {value}`",
    "MIXED_PRECISION": "write `precision.mixed_precision`",
    "WORLD_SIZE": "write `launch.num_processes: {value}`",
    "LOCAL_WORLD_SIZE": "write `launch.num_processes`, which counts the ranks of all machines",
    "NODE_RANK": "pass `--machine-rank {value}` to the command of that machine",
    "GROUP_RANK": "pass `--machine-rank {value}` to the command of that machine",
    "MASTER_ADDR": "write `launch.main_process_ip: {value}`",
    "MASTER_PORT": "write `launch.main_process_port: {value}`",
    "TORCHINDUCTOR_CACHE_DIR": "leave it out; `export XDG_CACHE_HOME=DIR` before the command moves the cache",
    "TENSORBOARD_LOGGING_DIR": "leave it out: the event files are in `tensorboard/` of the run",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "leave it out: ranks have the time that a save needs",
    "TORCH_FR_BUFFER_SIZE": "leave it out: the flight recorder is on, and its files are in `logs/` of the run",
    "TORCH_FR_DUMP_TEMP_FILE": "leave it out: the flight recorder is on, and its files are in `logs/` of the run",
}
"""Variables that the launch sets, with what decides their value."""


_PREFIXES = (
    *("NCCL_", "RCCL_", "TORCH_NCCL_", "OFI_NCCL_", "GLOO_", "CCL_", "HCCL_"),
    *("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_"),
)


# Words in names under these prefixes that load a library, start a tool, read other settings, or write to a path.
_LOADS = re.compile(r"PLUGIN|(^|_)LIB|LIBRAR|TOOL|INJECT|EXEC|CONF|FILE|PATH|(^|_)DIR|HOME|DUMP|MODULE")


_NAMES = frozenset(
    {
        *("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE"),  # XML that is read
        *("CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING", "CUDA_CACHE_DISABLE"),
        *("CUDA_CACHE_MAXSIZE", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE"),
        *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
        *("TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_BLAS_PREFER_CUBLASLT"),
        *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",),
        *("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS"),
        *("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT", "HF_HUB_DISABLE_XET", "HF_XET_HIGH_PERFORMANCE", "HF_HUB_VERBOSITY"),
        *("HF_HUB_ENABLE_HF_TRANSFER", "HF_DATASETS_IN_MEMORY_MAX_SIZE", "TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY"),
        *("TRANSFORMERS_NO_ADVISORY_WARNINGS", "RAYON_NUM_THREADS"),
        *("WANDB_PROJECT", "WANDB_ENTITY", "WANDB_NAME", "WANDB_NOTES", "WANDB_TAGS", "WANDB_RUN_GROUP", "WANDB_JOB_TYPE", "WANDB_MODE"),
        *("WANDB_DISABLED", "WANDB_SILENT", "WANDB_WATCH", "WANDB_LOG_MODEL", "MLFLOW_EXPERIMENT_NAME", "COMET_PROJECT_NAME"),
        *("FI_PROVIDER", "FI_LOG_LEVEL", "FI_EFA_USE_DEVICE_RDMA", "FI_EFA_FORK_SAFE", "FI_EFA_USE_HUGE_PAGE", "RDMAV_FORK_SAFE"),
        *("IBV_FORK_SAFE", "UCX_TLS", "UCX_NET_DEVICES", "UCX_LOG_LEVEL", "UCX_IB_GID_INDEX"),
        *("HSA_FORCE_FINE_GRAIN_PCIE", "HSA_NO_SCRATCH_RECLAIM", "HSA_ENABLE_SDMA", "GPU_MAX_HW_QUEUES", "ZE_FLAT_DEVICE_HIERARCHY"),
        *("MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"),
        *("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE"),
        *("TZ", "LANG", "LC_ALL"),
    }
)


def is_plain_setting(name: str) -> bool:
    """Return whether a recipe may set this variable without `--allow-env`: it loads nothing and starts nothing."""
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
    return name in _NAMES or (prefix is not None and _LOADS.search(name[len(prefix) :]) is None)


def variables_to_allow(names: Iterable[str]) -> list[str]:
    """Return the names that need `--allow-env`, sorted."""
    return sorted(name for name in names if not is_plain_setting(name))


def environment_variables(recipe: Recipe) -> Iterator[Finding]:
    for name, value in recipe.launch.env.items():
        keys = (f"launch.env.{name}",)
        if not _VARIABLE.fullmatch(name):
            message = f"`{shown(name)}` is not a name of an environment variable"
            yield Finding("bad-variable", keys, message, "letters, digits and `_`, not beginning with a digit")
        if "\0" in value:  # the operating system starts no process with one
            hint = "in double quotes `\\0` is one character: use single quotes"
            yield Finding("bad-variable", keys, f"the value of `launch.env.{name}` contains the character `\\x00`", hint)
        if name in _VISIBILITY:
            message = f"`launch.env.{name}` would hide devices from the ranks only, after the command has counted them"
            hint = f"leave it out, and `export {name}={shlex.quote(value)}` before the command: ranks inherit it"
            yield Finding("bad-variable", keys, message, hint)
        elif name in _OUR_NAMES or name.startswith(_OURS):  # set after `launch.env`, so the recipe's value would be ignored
            hint = _KEYS_OF_NAMES.get(name, "leave it out; where a key of the recipe decides it, change that key")
            yield Finding("bad-variable", keys, f"`launch.env.{name}` is set by the launcher itself", hint.format(value=shown(value)))
        if is_secret(name, value):
            hint = "set it in the environment of the command: ranks inherit it, and it is not written to any file"
            yield Finding("secret-in-recipe", keys, f"`launch.env.{name}` looks like a secret, and a recipe is copied and published", hint)


def values_without_secrets(recipe: Recipe) -> Iterator[Finding]:
    """Find secrets in any other key, such as a password in the URL of a data file or a token in a free mapping."""
    for key, text in texts_below(recipe.model_dump(mode="json", by_alias=True, exclude={"launch": {"env"}})):
        if has_secret_shape(text):
            message = f"`{key}` contains what looks like a token, a password or a signature, and a recipe is copied and published"
            hint = "log in outside of the recipe (`hf auth login`, HF_TOKEN), or download the file and name its path"
            yield Finding("secret-in-recipe", (key,), message, hint)


MIRROR_URL = re.compile(r"(s3|gs|gcs|az|abfs|abfss)://[^/?#:]+(/[^?#]*)?|file:///[^?#]+")
"""Protocols of `fsspec` that keep files, without `memory`, chains (`filecache::s3://…`) and options in the URL."""


def mirror_url(recipe: Recipe) -> Iterator[Finding]:
    url, keys = recipe.checkpoint.mirror, ("checkpoint.mirror",)
    if url is None or has_secret_shape(url):  # `values_without_secrets` refuses it, without its text
        return
    if not MIRROR_URL.fullmatch(url) or ".." in url.split("/"):
        message = f"`checkpoint.mirror: {shown(url)}` is not a URL of a directory at s3, gs, az or file"
        hint = "for example `s3://bucket/runs`, or `file:///mnt/backup/runs` for a directory"
        yield Finding("bad-mirror", keys, message, hint)
    elif url.startswith("file://"):
        mirror, run = Path(url.removeprefix("file://")).absolute(), Path(recipe.output_dir).absolute()
        if mirror.is_relative_to(run) or mirror / run.name == run:
            message = f"`checkpoint.mirror: {url}` is in the run directory that it is to outlive"
            yield Finding("bad-mirror", keys, message, "name a directory on another disk")


def at_most_all_machines(recipe: Recipe) -> Iterator[Finding]:
    fewest, machines = recipe.launch.min_machines, recipe.launch.num_machines
    if fewest is not None and fewest > machines:
        message = f"`launch.min_machines: {fewest}` is more than `launch.num_machines: {machines}`"
        yield Finding("contradiction", ("launch.min_machines", "launch.num_machines"), message, f"write at most {machines}")


def parts_of_lost_machines(recipe: Recipe) -> Iterator[Finding]:
    launch = recipe.launch
    is_smaller = launch.min_machines is not None and launch.min_machines < launch.num_machines and launch.max_restarts > 0
    if is_smaller and recipe.has_own_directories and recipe.checkpoint.mirror is None:
        message = "with `launch.shared_directory: false` a lost machine has a part of every checkpoint, so no run continues without it"
        hint = "set `checkpoint.mirror`, which keeps all parts, or leave `launch.min_machines` out"
        yield Finding("contradiction", ("launch.min_machines", "launch.shared_directory"), message, hint)


ENVIRONMENT_RULES: tuple[Rule, ...] = (
    *(environment_variables, values_without_secrets, mirror_url, at_most_all_machines),
    parts_of_lost_machines,
)
