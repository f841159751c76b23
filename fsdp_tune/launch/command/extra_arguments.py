"""The arguments after `--` that a user may pass on to `accelerate launch`, and what decides each of the
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from fsdp_tune.core.errors import FsdpTuneError, Problem

# name → whether a value follows. These change neither the training nor the processes.
FREE: dict[str, bool] = {
    "debug": False,
    "log_dir": True,
    "monitor_interval": True,
    "rdzv_conf": True,
    "role": True,
    "tee": True,
}
SHORT = {"-t": "tee", "-m": "module", "-q": "quiet"}

# Arguments that the recipe or the command decides. A key with `*` matches all names with that prefix.
OWNER: dict[str, str] = {
    "num_processes": "`launch.num_processes`",
    "num_machines": "`launch.num_machines`",
    "machine_rank": "`fsdp-tune train --machine-rank`",
    "main_process_ip": "`launch.main_process_ip`",
    "main_process_port": "`launch.main_process_port`",
    "same_network": "`launch.main_process_ip`",
    "num_cpu_threads_per_process": "`launch.num_cpu_threads_per_process`",
    "enable_cpu_affinity": "`launch.enable_cpu_affinity`",
    "max_restarts": "`launch.max_restarts`",
    "mixed_precision": "`precision.mixed_precision`",
    "fp8_*": "`precision.fp8_recipe`",
    "dynamo_*": "`kernels.compile`",
    "cpu": "`launch.device`",
    "multi_gpu": "`launch.device`",
    "tpu*": "`launch.device`",
    "gpu_ids": "the variable CUDA_VISIBLE_DEVICES",
    "fsdp_*": "the section `fsdp:`",
    "use_fsdp": "`fsdp.sharding_strategy`",
    "parallelism_config_*": "the section `parallelism:`",
    "use_parallelism_config": "the section `parallelism:`",
    "gradient_accumulation_steps": "`training.gradient_accumulation_steps`",
    "gradient_clipping": "`training.max_grad_norm`",
    "config_file": "the run itself, which writes its own accelerate.yaml",
    "rdzv_backend": "the run itself",
    "module": "the run itself",
    "no_python": "the run itself",
    "main_training_function": "the run itself",
    "env": "`launch.env`",
    "quiet": "the run itself: all output is in its logs/",
    "use_deepspeed": "nothing: this tool trains with FSDP",
    "deepspeed_*": "nothing: this tool trains with FSDP",
    "zero*": "nothing: this tool trains with FSDP",
    "offload_*": "`fsdp.offload_params`",
    "downcast_bf16": "`precision.mixed_precision`",
    "mpirun_hostfile": "nothing: torchrun starts the ranks",
    "vm": "nothing: torchrun starts the ranks",
    "aws_*": "nothing: torchrun starts the ranks",
    "help": "`fsdp-tune train --help`",
    "use_megatron_lm": "nothing: this tool trains with FSDP",
    "megatron_lm_*": "nothing: this tool trains with FSDP",
}


def check_extra(extra: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments unchanged. Raises: FsdpTuneError with one problem for each argument that the
    recipe sets."""
    problems: list[Problem] = []
    words = list(extra)
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        if not name.startswith("--") and name not in SHORT:
            problems.append(
                Problem(
                    "launch-argument-unknown",
                    f"`{word}` after `--` is not an argument of `accelerate launch`",
                )
            )
            continue
        name = SHORT.get(name, name[2:].replace("-", "_"))
        has_value = bool(equals) or (bool(words) and not words[0].startswith("--"))
        if name not in FREE:
            problems.append(_refusal(word, name))
        elif FREE[name] and not has_value:
            problems.append(Problem("launch-argument-unknown", f"`{word}` after `--` needs a value"))
        if has_value and not equals and FREE.get(name, True):
            words.pop(0)
    if problems:
        raise FsdpTuneError(*problems)
    return tuple(extra)


def _refusal(word: str, name: str) -> Problem:
    for pattern, owner in OWNER.items():
        if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])):
            return Problem(
                "launch-argument-owned",
                f"`{word}` after `--` is decided by {owner}",
                hint="set it there, so that the recipe describes what runs",
            )
    close = get_close_matches(name, FREE, n=1)
    hint = (
        f"did you mean `--{close[0]}`?"
        if close
        else "may be given: " + ", ".join(f"--{free}" for free in FREE)
    )
    return Problem(
        "launch-argument-unknown", f"`{word}` after `--` is not passed to accelerate launch", hint=hint
    )
