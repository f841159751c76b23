"""Arguments of the jobs: each field is declared once, for scripts, for the option of the command and for its
help.

Importing this module is cheap: the command line is made of it before it is known which job runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from fsdp_tune.core.command import Only, Option, ProfiledSteps, declared, parse_profile
from fsdp_tune.core.errors import usage_error

DeviceKind = Literal["auto", "cpu", "cuda"]
LoadedDtype = Literal["auto", "fp32", "bf16", "fp16"]


@dataclass(frozen=True, slots=True)
class Allowed:
    """Code outside this package that a recipe may run. A recipe alone runs none."""

    remote_code: Annotated[
        bool,
        Option(
            "Allow code from the repositories of models (`model.trust_remote_code`) and of kernels "
            "on the hub to run.",
            flags=("--trust-remote-code",),
        ),
    ] = False
    variables: Annotated[
        Sequence[str],
        Option(
            "Allow `launch.env` to set this variable, which may make programs run other code. Repeatable.",
            flags=("--allow-env",),
            metavar="NAME",
        ),
    ] = ()
    extensions: Annotated[
        bool,
        Option(
            "Allow `extensions` and `loader` of the recipe to run code of the installed packages "
            "that they name.",
            flags=("--allow-extensions",),
        ),
    ] = False

    def options(self) -> tuple[str, ...]:
        """Return the options of the command line that allow the same."""
        flags = {name: option.flags[0] for name, option in declared(Allowed)}
        given = [flags[name] for name in ("remote_code", "extensions") if getattr(self, name)]
        return (*given, *(word for name in self.variables for word in (flags["variables"], name)))


AllowedCode = Annotated[Allowed, Only(("remote_code", "extensions"))]
"""Of a job that starts no ranks, for which `launch.env` is nothing."""


VerifyData = Annotated[bool, Option("Hash all data files, even if their size and times have not changed.")]


@dataclass(frozen=True, slots=True)
class ValidateOptions:
    strict: Annotated[bool, Option("Treat keys that have no effect as errors.")] = False
    offline: Annotated[
        bool, Option("Do not contact the hub; checks that need it are listed as not checked.")
    ] = False
    allowed: Allowed = Allowed()


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    machine_rank: Annotated[
        int | None,
        Option("Number of this machine; the first is 0. Inside `srun` it is taken from Slurm.", metavar="N"),
    ] = None
    allowed: Allowed = Allowed()


def _resume(typed: str) -> str | None:
    """Return None for `never`, which is the default."""
    return None if typed == "never" else typed


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """How a run is started; what it trains is the recipe's."""

    resume: Annotated[
        str | None,
        Option(
            "auto: continue from the newest complete checkpoint of the run. PATH: continue from that "
            "checkpoint.",
            metavar="auto|never|PATH",
            read=_resume,
        ),
    ] = None
    overwrite: Annotated[bool, Option("Move a used run directory aside and start over.")] = False
    machine_rank: Annotated[
        int | None,
        Option("Number of this machine; the first is 0. Inside `srun` it is taken from Slurm.", metavar="N"),
    ] = None
    launcher_arguments: Sequence[str] = ()
    """Further arguments of `accelerate launch`."""
    profile: Annotated[
        ProfiledSteps | None,
        Option(
            "Profile these steps: write a Chrome trace of each rank and a breakdown of the steps to "
            "RUN/profile.",
            metavar="steps=FIRST:LAST",
            read=parse_profile,
        ),
    ] = None
    skip_rows: Annotated[
        Path | None,
        Option(
            "Leave out the rows that FILE lists (`PATH:ROW` or a JSON object on each line), from the "
            "step at which this command starts.",
            metavar="FILE",
        ),
    ] = None
    ignore_plan: Annotated[
        bool,
        Option("Start even if the plan does not fit this machine's GPUs, or no checkpoint fits the disk."),
    ] = False
    verify_data: VerifyData = False
    allowed: Allowed = Allowed()
    command: Sequence[str] = ()
    """The command line without `fsdp-tune`, for messages that say how to continue."""
    is_elsewhere: bool = False
    """Whether the run starts on another machine, so that what is missing here is a notice: of a preview
    alone."""
    saves: bool = True
    """False: no checkpoint is written."""


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    show: Annotated[int, Option("Decode N rows, with the trained part marked.", metavar="N", minimum=0)] = 0
    download: Annotated[bool, Option("Also download the model's weights into the local cache.")] = False
    verify_data: VerifyData = False
    allowed: AllowedCode = Allowed()


@dataclass(frozen=True, slots=True)
class RehearseOptions:
    num_processes: Annotated[
        int | None,
        Option(
            "Number of ranks [default: 2; 4 if the recipe shards in groups or its ranks share rows].",
            metavar="N",
            minimum=1,
        ),
    ] = None
    parity: Annotated[
        bool,
        Option("Instead, compare every FSDP switch (strategy, checkpointing, offload …) with one device."),
    ] = False
    allowed: Allowed = Allowed()


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """What is compared, and where B runs."""

    rows: Annotated[int, Option("Read the first N rows of each source.", metavar="N", minimum=1)] = 32
    model: Annotated[
        Literal["small", "full"],
        Option(
            "small: the recipe's architecture, scaled down, with random weights; full: the recipe's "
            "own model."
        ),
    ] = "small"
    python: Annotated[
        Path | None,
        Option(
            "Compute B with this interpreter, which has other versions of torch or transformers "
            "[default: as A].",
            metavar="PYTHON",
        ),
    ] = None
    requirements: Annotated[
        Sequence[str],
        Option(
            "Compute B with this version of a package, in an environment that is created in the "
            "cache. Repeatable.",
            flags=("--with",),
            metavar="REQUIREMENT",
        ),
    ] = ()
    tools: Annotated[
        Literal["run", "import"],
        Option(
            "run: TRL and axolotl compute their configurations, in an environment that is created for them "
            "(`--with trl==X` selects the version); import: compare the imported recipes.",
        ),
    ] = "run"
    tolerance: Annotated[
        float | None,
        Option(
            "Relative difference that counts as equal [default: 1e-6; with --python 1e-4, in half precision "
            "0.02; between lines of two runs 1.5e-5, in half precision 0.001; with a server 0.02, the mean "
            "difference of log-probabilities].",
            metavar="X",
        ),
    ] = None
    num_gpus: Annotated[
        int | None,
        Option(
            "Number of ranks of a side that does not set it, such as a configuration of another tool.",
            metavar="N",
            minimum=1,
        ),
    ] = None
    prompts: Annotated[
        Path | None,
        Option(
            "With a server: rows with `messages`, `prompt` or `text`, or lines of text [default: "
            "rows of the run].",
            metavar="FILE",
        ),
    ] = None
    max_new_tokens: Annotated[int, Option("With a server: longest answer.", metavar="N", minimum=1)] = 32
    served_model: Annotated[
        str | None, Option("With a server of several models: the model to compare.", metavar="NAME")
    ] = None
    api_key_env: Annotated[
        str | None, Option("With a server: the environment variable that holds its key.", metavar="NAME")
    ] = None
    allowed: AllowedCode = Allowed()


@dataclass(frozen=True, slots=True)
class PushOptions:
    to: Annotated[
        str | None,
        Option(
            "The repository [default: training.hub_model_id, else the name of the run].", metavar="OWNER/NAME"
        ),
    ] = None
    public: Annotated[
        bool | None,
        Option(
            "Visibility of a new repository; for an existing public repository, `--public` is required "
            "[default: the recipe's, else private].",
            flags=("--public/--private",),
        ),
    ] = None
    revision: Annotated[
        str | None,
        Option("Branch, created if needed [default: training.hub_revision, else main].", metavar="BRANCH"),
    ] = None
    adapter: Annotated[bool, Option("Upload RUN/adapter instead of the merged model.")] = False


def _renamed(pairs: Sequence[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise usage_error("usage", f"`--rename {pair}` has no `=`", hint="--rename question=prompt")
    return dict(pair.split("=", 1) for pair in pairs)


@dataclass(frozen=True, slots=True)
class SourceKeys:
    """Keys of `data.train` that describe rows to evaluate on."""

    split: Annotated[str | None, Option("Split of `--data` [default: train].")] = None
    name: Annotated[
        str | None, Option("Configuration of a hub data set.", flags=("--data-name",), metavar="NAME")
    ] = None
    format: Annotated[str | None, Option("Format of `--data`, as `data.format` [default: detected].")] = None
    rename_columns: Annotated[
        Mapping[str, str] | None,
        Option(
            "Rename a column of `--data`. Repeatable.",
            flags=("--rename",),
            metavar="OLD=NEW",
            read=_renamed,
            typed=list[str],
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class EvaluateOptions:
    """What is measured, and how the models run."""

    metric: Annotated[
        str,
        Option(
            "exact_match, perplexity, or an entry point of the group `fsdp_tune.metrics`.", metavar="NAME"
        ),
    ] = "perplexity"
    data: Annotated[
        str | None,
        Option(
            "Rows: a file, a directory, a hub id or builtin:NAME [default: the eval sets of RECIPE "
            "or of the run].",
            metavar="PATH",
        ),
    ] = None
    source: Annotated[Mapping[str, object], SourceKeys] = field(default_factory=dict[str, object])
    """Further keys of `data`, as in a recipe's `data.train`: those of `SourceKeys`, loss_on, chat_template
    …"""
    ignore_columns: Annotated[
        tuple[str, ...],
        Option(
            "Ignore a column of `--data` that no format reads. Repeatable.",
            flags=("--ignore-column",),
            metavar="NAME",
        ),
    ] = ()
    max_rows: Annotated[int | None, Option("Evaluate only the first N rows.", metavar="N", minimum=1)] = None
    answer: Annotated[
        str | None,
        Option(
            "exact_match: compare only the first match of this pattern in both texts (its first "
            "group), such as '#### (.*)'.",
            metavar="REGEX",
        ),
    ] = None
    max_new_tokens: Annotated[
        int, Option("exact_match: longest generated answer.", metavar="N", minimum=1)
    ] = 256
    base: Annotated[
        str | None, Option("Also evaluate this model on the same rows, and compare both.", metavar="MODEL")
    ] = None
    num_processes: Annotated[
        int | None,
        Option(
            "Processes that share the rows, each with the model [default: one per GPU; 1 on the CPU].",
            metavar="N",
            minimum=1,
        ),
    ] = None
    batch_size: Annotated[int, Option("Rows in one forward pass.", metavar="N", minimum=1)] = 8
    device: Annotated[DeviceKind, Option("auto = the accelerator of this machine, else cpu.")] = "auto"
    dtype: Annotated[LoadedDtype, Option("Type of the weights; auto = as stored.")] = "auto"
    out: Annotated[
        Path | None, Option("Write prompt, prediction, target and score of each row.", metavar="FILE")
    ] = None
    allowed: AllowedCode = Allowed()


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """How a model answers prompts, one at a time or from a file."""

    max_new_tokens: Annotated[int, Option("Longest answer.", metavar="N", minimum=1)] = 512
    temperature: Annotated[
        float, Option("0: always take the most probable token. Above 0: sample.", metavar="T")
    ] = 0.0
    top_p: Annotated[
        float,
        Option("Sample only from the most probable tokens whose probabilities add up to P.", metavar="P"),
    ] = 1.0
    seed: Annotated[
        int,
        Option(
            "Seed for sampling, combined with each prompt; copies of a prompt get different answers.",
            metavar="N",
            minimum=0,
        ),
    ] = 0
    system: Annotated[str | None, Option("System message of the chat.", metavar="TEXT")] = None
    base: Annotated[
        bool,
        Option(
            "Also answer with the base model. For an adapter, it is the same weights without the adapter; "
            "for a full fine-tuning, it is loaded."
        ),
    ] = False
    checkpoint: Annotated[
        str | None,
        Option(
            "For a run with `lora:`: use the adapter of step N [default: the exported adapter, else "
            "the newest].",
            metavar="N",
        ),
    ] = None
    show_special_tokens: Annotated[bool, Option("Also print the special tokens of answers.")] = False
    device: Annotated[DeviceKind, Option("auto = the accelerator of this machine, else cpu.")] = "auto"
    dtype: Annotated[LoadedDtype, Option("Type of the weights; auto = as stored.")] = "auto"
    allowed: Annotated[Allowed, Only(("remote_code",))] = Allowed()
