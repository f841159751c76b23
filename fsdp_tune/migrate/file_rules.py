"""The rules of a file's keys: those of its tool, of the launcher and the variables of its command, and of the
files that it names."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path as FilePath

from fsdp_tune.migrate.general import by_name
from fsdp_tune.migrate.read.command_line import ENVIRONMENT, LAUNCHER, STARTS_EACH_RANK
from fsdp_tune.migrate.read.foreign_file import MANIFEST, SBATCH, ForeignFile
from fsdp_tune.migrate.rules import FileKey, Inside, Outcome, Rule, Rules, each, outcome_of, same, section
from fsdp_tune.migrate.tools import accelerate_config, jobs
from fsdp_tune.migrate.tools.deepspeed import DEEPSPEED_RULES
from fsdp_tune.migrate.tools.table import TOOLS
from fsdp_tune.recipe.outcome import Ask, Drop, Fate, Write
from fsdp_tune.recipe.read.tool_detection import LLAMA_FACTORY, SWIFT, TRL


def rules_of(found: ForeignFile, ignored: Collection[str]) -> Rules:
    """Return the rules of the keys of a file; `ignored` are those that its tool does not read."""
    rules = {
        **TOOLS[found.tool].rules,
        LAUNCHER: section(_LAUNCHER),
        ENVIRONMENT: _environment,
        "config": _named(found.named),
        **_NESTED,
    }
    rules |= {SBATCH: jobs.sbatch, MANIFEST: Inside(jobs.MANIFEST_RULES)}
    rules |= {"env": _environment} if found.tool == TRL else {}  # TrlParser exports them
    return {**rules, **each(ignored, Drop("the tool does not read it"))}


def _file(rules: Rules, otherwise: Rule) -> Rule:
    """Return a rule for the name of a file, in whose place its keys are if it was found."""
    return lambda key: Inside(rules) if isinstance(key.value, dict) else outcome_of(otherwise, key)


def _not_found(key: FileKey) -> Outcome:
    return Ask(f"`{key.value}` was not found here: `fsdp-tune import {key.value}` reads it")


def _named(file: FilePath | None) -> Rule:
    """Return a rule for the name of the file of options, and for its keys that the command gives too."""

    def rule(key: FileKey) -> Outcome:
        if isinstance(key.value, dict):
            return Inside(each(tuple(key.mapping), Drop("the command gives it too, and comes first")))
        return _not_found(key) if file is None else Drop("its keys are read")

    return rule


def _deepspeed(key: FileKey) -> Outcome:
    own = TOOLS[key.tool].rules.get("deepspeed", by_name)
    return Inside(DEEPSPEED_RULES) if isinstance(key.value, dict) else outcome_of(own, key)


def _variable(key: FileKey) -> Outcome:
    """A variable of the environment that ranks get too."""
    return Write({("launch", "env", key.name): str(key.value)}, fate=Fate.KEPT)


def _machines_of_tool(key: FileKey) -> Outcome:
    """The machines of the launchers of ms-swift and LLaMA-Factory; torchrun and Accelerate do not read the
    variable."""
    if key.tool in (SWIFT, LLAMA_FACTORY):
        return Write({"launch.num_machines": key.value})
    return Drop("the option of the launcher counts the machines")


_VARIABLES: Rules = {
    **each(
        ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"), Drop("set it where `fsdp-tune train` starts")
    ),
    "NPROC_PER_NODE": same("launch.num_processes"),
    "NNODES": _machines_of_tool,
    "NODE_RANK": Drop("each machine runs the same command"),
    "MASTER_ADDR": same("launch.main_process_ip"),
    "MASTER_PORT": same("launch.main_process_port"),
    "FORCE_TORCHRUN": Drop("`fsdp-tune train` starts the ranks"),
    "ACCELERATE_LOG_LEVEL": Drop("each rank writes its own log file"),
    "OMP_NUM_THREADS": same("launch.num_cpu_threads_per_process"),
    "TOKENIZERS_PARALLELISM": Drop("rows are tokenised by processes of `data.num_proc`"),
}


def _environment(key: FileKey) -> Outcome:
    """Set each variable without a rule for the ranks: a variable has no other meaning by its name."""
    if not isinstance(key.value, dict):
        return Ask("it is not a mapping of variables")
    return Inside({name: _VARIABLES.get(name, _variable) for name in key.mapping})


_LAUNCHER: Rules = {
    **accelerate_config.LAUNCHER_RULES,
    **each(("nodes", "N"), jobs.nodes),  # of srun
    **each(STARTS_EACH_RANK, Drop("`fsdp-tune train` starts the ranks")),
    "config_file": _file(accelerate_config.ACCELERATE_RULES, _not_found),
    "deepspeed_config_file": _file(DEEPSPEED_RULES, _not_found),
}
_NESTED: Rules = {"deepspeed": _deepspeed}
