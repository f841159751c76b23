"""`launch.env`: a recipe may set plain settings; variables that load, start or write something need the
command line."""

from __future__ import annotations

import pytest

from fsdp_tune.recipe.rules.launch import is_plain_setting, variables_to_allow
from tests.recipe.loading import load_with, one_problem, problems_with


@pytest.mark.parametrize(
    "name",
    [
        *(
            "PYTHONPATH",
            "PYTHONSTARTUP",
            "PYTHONHOME",
            "PYTHONWARNINGS",
            "PYTHONBREAKPOINT",
            "PYTHONUSERBASE",
            "PYTHONPYCACHEPREFIX",
        ),
        *(
            "LD_PRELOAD",
            "LD_LIBRARY_PATH",
            "LD_AUDIT",
            "DYLD_INSERT_LIBRARIES",
            "GCONV_PATH",
            "BASH_ENV",
            "ENV",
            "PATH",
            "HOME",
        ),
        *(
            "NCCL_NET_PLUGIN",
            "NCCL_TUNER_PLUGIN",
            "NCCL_PROFILER_PLUGIN",
            "NCCL_ENV_PLUGIN",
            "NCCL_CONF_FILE",
            "NCCL_DEBUG_FILE",
        ),
        *(
            "NCCL_TOPO_DUMP_FILE",
            "CUDA_INJECTION64_PATH",
            "CUDA_INJECTION32_PATH",
            "CUDA_HOME",
            "CUDA_PATH",
            "CUDA_CACHE_PATH",
        ),
        *(
            "OMP_TOOL_LIBRARIES",
            "OMP_TOOL",
            "KMP_TOOL_LIBRARIES",
            "MKL_VERBOSE_OUTPUT_FILE",
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
        ),
        *(
            "TORCH_EXTENSIONS_DIR",
            "TORCHINDUCTOR_CACHE_DIR",
            "TRITON_CACHE_DIR",
            "TRITON_PTXAS_PATH",
            "PYTORCH_KERNEL_CACHE_PATH",
        ),
        *(
            "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",
            "TMPDIR",
            "CXX",
            "CC",
            "HF_ENDPOINT",
            "HF_HOME",
            "HF_MODULES_CACHE",
            "XDG_CACHE_HOME",
        ),
        *(
            "HTTPS_PROXY",
            "SSL_CERT_FILE",
            "WANDB_BASE_URL",
            "MLFLOW_TRACKING_URI",
            "FI_PROVIDER_PATH",
            "UCX_MODULE_DIR",
            "ZE_ENABLE_ALT_DRIVERS",
        ),
        *(
            "CCL_CONFIGURATION_PATH",
            "CCL_OFI_LIBRARY_PATH",
            "HSA_TOOLS_LIB",
            "ANYTHING_UNKNOWN",
            "nccl_debug",
        ),
    ],
)
def test_variable_that_may_load_code_needs_the_command_line(name: str) -> None:
    assert variables_to_allow([name]) == [name]


@pytest.mark.parametrize(
    "name",
    [
        *(
            "NCCL_SOCKET_IFNAME",
            "NCCL_IB_HCA",
            "NCCL_DEBUG",
            "NCCL_P2P_DISABLE",
            "NCCL_CALIBRATE",
            "NCCL_TOPO_FILE",
            "GLOO_SOCKET_IFNAME",
        ),
        *(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "CUDA_LAUNCH_BLOCKING",
            "OMP_PROC_BIND",
            "KMP_AFFINITY",
        ),
        *("MKL_NUM_THREADS", "HF_HUB_OFFLINE", "PYTORCH_ALLOC_CONF", "WANDB_PROJECT", "FI_PROVIDER", "TZ"),
    ],
)
def test_plain_setting_needs_nothing_but_the_recipe(name: str) -> None:
    assert is_plain_setting(name)


def test_secret_variable_is_refused_and_the_value_is_not_repeated() -> None:
    problem = one_problem(problems_with("launch: {env: {NCCL_DEBUG: sk-abcdefghijklmnopqrstuvwxyz}}"))
    assert problem.code == "secret-in-recipe"
    assert "sk-abc" not in str(problem)


def test_commits_urls_and_templates_of_ordinary_recipes_are_not_secrets() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    text = "output_dir: runs/{name}-{seed}\nlaunch: {env: {NCCL_IB_PKEY: 1}}\n"
    text += f"training: {{hub_model_id: me/sk-model, hub_revision: {commit}}}"
    assert load_with(text).recipe.launch.env == {"NCCL_IB_PKEY": "1"}


@pytest.mark.parametrize(
    "name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"]
)
def test_variable_that_hides_devices_is_refused_with_the_export_to_type(name: str) -> None:
    """The command counts devices by its own environment."""
    problem = one_problem(problems_with(f"launch:\n  env: {{{name}: '0,1'}}\n"))
    assert (problem.code, problem.where.line is not None) == ("bad-variable", True)
    assert f"`export {name}=0,1` before the command" in str(problem.hint)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("OMP_NUM_THREADS", "`launch.num_cpu_threads_per_process: 7`"),
        ("WORLD_SIZE", "`launch.num_processes: 7`"),
        ("MASTER_PORT", "`launch.main_process_port: 7`"),
        ("NODE_RANK", "--machine-rank 7"),
        ("TORCHINDUCTOR_CACHE_DIR", "`export XDG_CACHE_HOME=DIR`"),
    ],
)
def test_hint_for_a_variable_of_the_launch_names_what_decides_it(name: str, words: str) -> None:
    assert words in str(one_problem(problems_with(f"launch:\n  env: {{{name}: '7'}}\n")).hint)
