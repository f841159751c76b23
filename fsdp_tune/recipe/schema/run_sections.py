"""The sections `kernels:`, `checkpoint:`, `launch:` and `merge:` of a recipe."""

# ruff: noqa: RUF012  pydantic copies a default for each instance, and ours are frozen

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from fsdp_tune.core.option import BaseWeights, MergeCheck, MergedDtype
from fsdp_tune.recipe.schema.effects import FREE, MEMORY, NOTHING, NUMBERS, TIME, TRAJECTORY, Effect
from fsdp_tune.recipe.schema.kinds import Auto, Device, Duration, Port, Section, Size, Text, Whole, WholeOrZero


class Kernels(Section):
    default_effect = Effect(MEMORY | TIME, FREE)

    loss: Literal["auto", "full", "chunked", "liger"] = "auto"
    """full holds the logits, tokens × vocabulary; chunked and liger do not; auto = chunked where they exceed 512 MiB in fp32."""
    liger: bool | Auto = "auto"
    """Liger's kernels for norms, rotary embeddings and gated MLPs; auto = on CUDA, where liger-kernel is installed."""
    compile: bool = False
    """Compile each decoder layer separately with torch.compile; FSDP2 and DDP."""
    mlp_slice_tokens: Whole | None = None
    """Tokens of each row for which a decoder layer's MLP is computed at a time, so that its inner activations are small; null = all."""


class Extensions(Section):
    callbacks: Annotated[list[Text], Effect(NUMBERS, TRAJECTORY)] = []
    """Entry points of the group `fsdp_tune.callbacks`, called by the Trainer on every rank. Only together with `--allow-extensions`."""
    metrics: Annotated[list[Text], Effect(MEMORY, FREE)] = []
    """Entry points of the group `fsdp_tune.metrics`, computed with each evaluation. Only together with `--allow-extensions`."""


class CheckpointSection(Section):
    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    async_: Annotated[bool, Effect(MEMORY | TIME, FREE)] = Field(default=True, alias="async")
    """Continue training while the checkpoint is written."""
    verify: Annotated[Literal["digest", "size"], Effect(NOTHING, FREE)] = "digest"
    """How a checkpoint's files are checked before they are used: by digest, or by size alone."""
    probe: Annotated[bool, Effect(MEMORY, FREE)] = True
    """Save a complete checkpoint after step 1, read it back and remove it."""
    save_failure: Annotated[Literal["warn", "stop"], Effect(NOTHING, FREE)] = "warn"
    """Effect of a failed save: the run warns and continues, or stops."""
    mirror: Annotated[Text | None, Effect(NOTHING, FREE)] = None
    """Second directory that checkpoints are copied to."""


class Launch(Section):
    num_machines: Annotated[Whole, Effect(MEMORY | TIME, FREE)] = 1
    """Machines (nodes)."""
    num_processes: Annotated[Whole | Auto, Effect(MEMORY | TIME, FREE)] = "auto"
    """TOTAL over machines, as in accelerate; auto = visible devices × num_machines."""
    device: Annotated[Device, Effect(MEMORY | TIME, FREE)] = "auto"
    """cuda | xpu | npu | mps | cpu; auto never selects cpu, which must be written. xpu and npu are tested with simulated devices only."""
    num_cpu_threads_per_process: Annotated[Whole | Auto, Effect(TIME, FREE)] = "auto"
    """auto = cores / local ranks."""
    enable_cpu_affinity: Annotated[bool, Effect(TIME, FREE)] = False
    """Bind each rank to the cores nearest to its GPU (NUMA), as in accelerate; CUDA, with nvidia-ml-py installed."""
    main_process_ip: Annotated[Text | None, Effect(NOTHING, FREE)] = None
    """Address of machine 0; null = the address from Slurm or Kubernetes."""
    main_process_port: Annotated[Port | Auto, Effect(NOTHING, FREE)] = "auto"
    """auto = a free port; 29500 for several machines, which must agree on one."""
    env: Annotated[dict[str, str], Effect(MEMORY | TIME, FREE)] = {}
    """Extra variables for ranks (NCCL_SOCKET_IFNAME: ib0); those that can run code need `--allow-env NAME`; secrets are refused."""
    max_restarts: Annotated[WholeOrZero, Effect(NOTHING, FREE)] = 0
    """Restarts after a failure."""
    max_runtime: Annotated[Duration | None, Effect(NOTHING, FREE)] = None
    """Time limit from the start of the launcher, saving included (11h30m)."""
    hang_timeout: Annotated[Duration, Effect(NOTHING, FREE)] = "30m"
    """Time without progress after which the run ends."""


class Merge(Section):
    default_effect = Effect(NOTHING, FREE)

    at_end: bool = True
    """Merge the last checkpoint (the best with training.load_best_model_at_end) into RUN/merged when the run has finished."""
    dtype: Auto | MergedDtype = "auto"
    """dtype of the merged weights; auto = the compute dtype (bf16 by default, also from fp32 master weights); keep = as stored."""
    max_shard_size: Size = "5GB"
    """Largest safetensors file."""
    adapter: Literal["merged", "adapter", "both"] = "both"
    """Output of a LoRA run: merged weights, the adapter, or both."""
    base: BaseWeights = "trained"
    """Weights under a merged QLoRA adapter: as they were trained, from 4 bits, or the original ones, which are another model."""
    verify: MergeCheck = "quick"
    """How the merged directory is checked."""
