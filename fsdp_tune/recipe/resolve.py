"""Decide all that a recipe leaves unset (`auto`, null, relative paths), and record the reason of each
decision."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdp_tune.core.devices import Machine
from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem, Where
from fsdp_tune.core.user_cache import default_cache_directory
from fsdp_tune.recipe.continued_adapter import PEFT_DEFAULTS, continue_adapter
from fsdp_tune.recipe.decisions import Decisions
from fsdp_tune.recipe.device_choice import compare_gpu, decide_ranks
from fsdp_tune.recipe.fewer_machines import described_sizes
from fsdp_tune.recipe.references import absolute_paths, output_directory
from fsdp_tune.recipe.rules.adapters import lora_limits
from fsdp_tune.recipe.rules.limits import FP8_MULTIPLE, computes_in_fp8, slow_bf16_cpu
from fsdp_tune.recipe.rules.trackers import missing
from fsdp_tune.recipe.rules.training import is_better_when_smaller
from fsdp_tune.recipe.schema.keys import as_notice, as_problem, given
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value
from fsdp_tune.recipe.world import (
    WORLD_RULES,
    World,
    budget_accumulation,
    data_ranks,
    described_sharing,
    lanes_of,
    mesh_sizes,
    readers_of_rows,
)

MOST_PROCESSES = 16
"""Largest number of tokenising processes, regardless of the number of cores."""


@dataclass(frozen=True, slots=True)
class Resolution:
    recipe: Recipe
    reasons: dict[str, str]
    """Reason of the value, for each key that the recipe left unset."""
    notices: tuple[Notice, ...]


ABSENT = frozenset(
    {
        "not-found",
        "data-not-found",
        "model-not-found",
        "tokenizer-not-found",
        "no-such-template",
        "unknown-extension",
    }
)
"""Codes of problems that are about what this machine lacks, and another one may have."""
NEEDED_THERE = "the machine that trains needs it"


def split_absent(problems: Collection[Problem]) -> tuple[list[Problem], list[Notice]]:
    """Return the other problems, and those about what is missing here as notices, for a run that starts on
    another machine."""
    absent = [
        Notice(each.code, f"{each.message}: {NEEDED_THERE}", each.where)
        for each in problems
        if each.code in ABSENT
    ]
    return [each for each in problems if each.code not in ABSENT], absent


class UnresolvedError(FsdpTuneError):
    """What prevents a recipe from being resolved. `recipe` has the keys that could be decided.

    `suspects`: the keys of the problems, so that checks that depend on them would mislead. Keys that only
    contradict the number of ranks are not among them, since neither model nor rows depend on it.
    """

    def __init__(self, recipe: Recipe, *problems: Problem, suspects: Collection[str] = ()) -> None:
        self.recipe, self.suspects = recipe, frozenset(suspects)
        super().__init__(*problems)


def resolve(
    recipe: Recipe,
    machine: Machine,
    *,
    cwd: Path,
    assume: str | None = None,
    needs_trackers: bool = True,
    positions: Mapping[str, Where] | None = None,
    resume: str | None = None,
    elsewhere: bool = False,
) -> Resolution:
    """Fill every unset key. Raises: UnresolvedError with all problems that depend on the machine or the
    number of ranks.

    `assume` is the device to assume if the machine has none (`cuda` for `validate`, `plan` and `--dry-run`,
    which start no ranks); without it, a recipe that needs a missing device is an error. `positions` (of
    `LoadedRecipe`) gives the lines of problems.
    `resume`: `auto`, or a checkpoint: the model, tokenizer and template that its run has need not be there.
    `elsewhere`: the run starts on another machine, so files and packages that are missing here are notices.
    """
    work = _Resolver(recipe, machine, assume, positions or {})
    decide_ranks(work)
    work.precision()
    compare_gpu(work)
    world = World(work.data["launch"]["num_processes"], recipe.launch.num_machines)
    findings = [finding for rule in WORLD_RULES for finding in rule(work.recipe, world)]
    of_world = [as_problem(finding, work.positions) for finding in findings]
    if not work.problems and not of_world:
        work.mesh(world)
        work.fsdp()
        work.training(world)
        if recipe.data.streaming:
            work.stream(world)
        work.evaluation()
    else:
        work.unsized(world)
    work.model()
    work.rest()
    if needs_trackers:
        work.trackers(elsewhere=elsewhere)
    output, wrong = output_directory(recipe, cwd)
    work.data["output_dir"] = str(output)
    work.adapter(cwd, output)
    source = (
        output if resume == "auto" else Path(cwd, resume).resolve().parent if resume is not None else None
    )
    local_paths, path_problems = absolute_paths(work.data, cwd, source)
    work.reasons.update(local_paths)
    work.problems.extend(as_problem(finding, work.positions) for finding in [*wrong, *path_problems])
    if elsewhere:
        work.problems, absent = split_absent(work.problems)
        work.notices.extend(absent)
    resolved = Recipe.model_validate(work.data)
    if not work.problems and not of_world:
        work.fewer_machines(resolved)
    if work.problems or of_world:
        suspects = [problem.where.key for problem in work.problems if problem.where.key is not None]
        raise UnresolvedError(resolved, *of_world, *work.problems, suspects=suspects)
    return Resolution(resolved, work.reasons, tuple(work.notices))


class _Resolver(Decisions):
    def fewer_machines(self, resolved: Recipe) -> None:
        found, is_wrong = described_sizes(self.recipe, resolved)
        if found is not None and is_wrong:
            self.problems.append(as_problem(found, self.positions))
        elif found is not None:
            self.notices.append(as_notice(found, self.positions, strict=False))

    def adapter(self, cwd: Path, output: Path) -> None:
        """Take unset keys of `lora:` from the adapter that training continues."""
        if self.recipe.lora is None:
            return
        if self.recipe.lora.adapter is None:
            for name, of_peft in PEFT_DEFAULTS.items():
                if not given(self.recipe, f"lora.{name}") and getattr(self.recipe.lora, name) != of_peft:
                    self.reasons[f"lora.{name}"] = f"the default; PEFT's is {of_peft}"
            return
        found = continue_adapter(self.recipe, cwd, output)
        findings = found.findings
        if not findings:
            for key, value in found.values.items():
                if value != self.data["lora"][key]:
                    self.decide(f"lora.{key}", value, found.reason)
            findings = list(
                lora_limits(
                    Recipe.model_validate(
                        {**self.recipe.model_dump(by_alias=True), "lora": self.data["lora"]}
                    )
                )
            )
        self.problems.extend(as_problem(finding, self.positions) for finding in findings)

    def precision(self) -> None:
        """Decide the compute dtype, on which later decisions depend."""
        is_slow = self.data["launch"]["device"] == "cpu" and not self.machine.has_bf16_cpu
        if self.recipe.precision.mixed_precision == "auto":
            chosen, reason = "bf16", "the default of GPUs, and of CPUs with bf16 instructions"
            if is_slow and self.recipe.model.dtype == "fp32":
                chosen, reason = "no", "this CPU has no instructions for bf16 (AMX, AVX512_BF16)"
                message = f"CPU ranks compute in fp32 (`precision.mixed_precision: no`): {reason}"
                self.add_notice("cpu-computes-fp32", ("precision.mixed_precision",), message)
            self.decide("precision.mixed_precision", chosen, reason)
            decided = self.recipe.precision.model_copy(update={"mixed_precision": chosen})
            self.recipe = self.recipe.model_copy(update={"precision": decided})
        if is_slow and (found := slow_bf16_cpu(self.recipe)) is not None:
            self.add_notice(found.code, found.keys, found.message, found.hint)

    def mesh(self, world: World) -> None:
        found = mesh_sizes(self.recipe, world)
        sizes = found.topology
        parallelism = self.recipe.parallelism
        if parallelism.dp_replicate_size == "auto":
            self.decide("parallelism.dp_replicate_size", sizes.replicate, found.reason)
        if parallelism.dp_shard_size == "auto":
            reason = "ranks of a machine" if self.recipe.is_hybrid and world.machines > 1 else found.reason
            self.decide("parallelism.dp_shard_size", sizes.shard, reason)
        both_unset = parallelism.dp_replicate_size == parallelism.dp_shard_size == "auto"
        if self.recipe.is_hybrid and world.machines == 1 and both_unset:
            strategy = self.recipe.fsdp.sharding_strategy
            message = (
                f"`{strategy}` on one machine: two copies of the model, each over {sizes.copy_size} ranks"
            )
            self.add_notice(
                "hybrid-on-one-machine",
                ("fsdp.sharding_strategy",),
                message,
                "FULL_SHARD needs less memory here",
            )
        ep, local = self.recipe.fsdp.ep_size, world.local_size
        if world.machines > 1 and local % ep:
            message = (
                f"`fsdp.ep_size: {ep}` with {local} ranks on a machine exchanges tokens between "
                "machines, in every layer"
            )
            hint = (
                f"`--set fsdp.ep_size={math.gcd(ep, local)}` keeps them on a machine; `fsdp-tune plan` "
                "compares sizes"
            )
            self.add_notice("experts-across-machines", ("fsdp.ep_size",), message, hint)

    def unsized(self, world: World) -> None:
        """Give a recipe that is refused the sizes of one copy, so that its model can still be inspected."""
        self.data["parallelism"] |= {"dp_replicate_size": 1, "dp_shard_size": data_ranks(self.recipe, world)}

    def fsdp(self) -> None:
        fsdp = self.recipe.fsdp
        if fsdp.reshard_after_forward is None:
            self.decide(
                "fsdp.reshard_after_forward", self.recipe.reshards_after_forward, f"{fsdp.sharding_strategy}"
            )
        if fsdp.activation_checkpointing == "auto":
            self.reasons["fsdp.activation_checkpointing"] = "a plan decides it from the memory of the ranks"
        if fsdp.version == 1 and self.data["launch"]["device"] == "cpu" and fsdp.cpu_ram_efficient_loading:
            self.decide(
                "fsdp.cpu_ram_efficient_loading",
                value=False,
                reason="FSDP1 on the CPU cannot send rank 0's weights",
            )

    def trackers(self, *, elsewhere: bool) -> None:
        """Refuse trackers that cannot start. Without this check every rank would fail minutes later.

        A variable may be set where the run starts, as by a TrainJob of Kubeflow: where it does not start that
        is a notice, and a package too if the run starts `elsewhere`.
        """
        for name in self.recipe.training.report_to:
            found = missing(name, {**os.environ, **self.recipe.launch.env})
            if found is None:
                continue
            message, keys = f"`training.report_to` names {name}, and {found.reason}", ("training.report_to",)
            hint = f"{found.hint}, or leave it out"
            if not found.is_set_elsewhere and elsewhere:
                self.add_notice("tracker-not-installed", keys, f"{message}: {NEEDED_THERE}")
            elif not found.is_set_elsewhere:
                self.add_problem("tracker-not-installed", keys, message, hint)
            elif self.assume is None:
                self.add_problem("tracker-not-configured", keys, message, hint)
            else:
                self.add_notice("tracker-not-configured", keys, message, hint)

    def _rows_of_budget(self, world: World) -> None:
        """Set the batch size that a token budget gives if every row is as long as `data.max_length`: memory
        and time are planned for it."""
        training, longest = self.recipe.training, self.recipe.data.max_length
        budget = training.per_device_train_batch_tokens
        assert budget is not None
        reason = (
            f"rows of full length in {budget:,} token slots: {budget:,} / {longest:,}; more rows if they "
            "are shorter"
        )
        self.decide("training.per_device_train_batch_size", budget // longest, reason)
        steps = budget_accumulation(self.recipe, world)
        self.decide(
            "training.gradient_accumulation_steps",
            steps,
            "at most, when all rows are as long as `data.max_length`",
        )

    def training(self, world: World) -> None:
        training = self.recipe.training
        if training.per_device_train_batch_tokens is not None:
            self._rows_of_budget(world)
        elif training.gradient_accumulation_steps is None:
            size = data_ranks(self.recipe, world)
            at_once = training.per_device_train_batch_size * size
            if training.global_batch_size is None:
                self.decide(
                    "training.gradient_accumulation_steps", 1, "no `training.global_batch_size` is given"
                )
            else:
                steps = training.global_batch_size // at_once
                readers = readers_of_rows(self.recipe, size)
                parts = (
                    f"{training.global_batch_size} / ({training.per_device_train_batch_size} sequences × "
                    f"{readers})"
                )
                self.decide("training.gradient_accumulation_steps", steps, f"global batch: {parts}")
        self._resharding()
        if training.per_device_eval_batch_size is None:
            rows = self.data["training"]["per_device_train_batch_size"]
            self.decide("training.per_device_eval_batch_size", rows, "per_device_train_batch_size")
        if training.data_seed is None:
            self.decide("training.data_seed", training.seed, "training.seed")
        if training.save_total_limit == 0:
            self.decide("training.save_total_limit", None, "0 keeps all")

    def _resharding(self) -> None:
        """Decide `fsdp.reshard_after_backward: auto` where false is refused or has no effect; elsewhere a
        plan does."""
        fsdp, key = self.recipe.fsdp, "fsdp.reshard_after_backward"
        if fsdp.reshard_after_backward != "auto":
            return
        if not self.recipe.is_sharded or fsdp.version == 1 or fsdp.offload_params:
            reason = "only FSDP2 without `fsdp.offload_params` can keep gathered parameters"
            self.decide(key, value=True, reason=reason)
        elif self.data["training"]["gradient_accumulation_steps"] == 1:
            self.decide(key, value=True, reason="a step has one micro-batch")
        else:
            self.reasons[key] = "a plan decides it from the memory of the ranks"

    def stream(self, world: World) -> None:
        if self.recipe.data.stream_lanes == "auto":
            reason = f"at least 16, and a multiple of {data_ranks(self.recipe, world)} ranks"
            self.decide("data.stream_lanes", lanes_of(self.recipe, world), reason)
        if "dataloader_num_workers" not in (self.recipe.training.model_extra or {}):
            self.decide("training.dataloader_num_workers", 1, "a stream is read ahead of the steps")

    def evaluation(self) -> None:
        training, save = self.recipe.training, training_value(self.recipe.training, "save_strategy")
        strategy: str = training.eval_strategy
        if strategy == "auto":
            if self.recipe.data.eval is None:
                strategy, reason = "no", "there is no data.eval"
            elif save in {"steps", "best"}:
                strategy, reason = "steps", "with every save"
            elif save == "epoch":
                strategy, reason = "epoch", "with every save"
            else:
                strategy, reason = "epoch", "nothing is saved before the end: once an epoch"
            self.decide("training.eval_strategy", strategy, reason)
        if training.early_stopping is not None and training_value(training, "metric_for_best_model") is None:
            self.decide("training.metric_for_best_model", "loss", "early stopping compares eval_loss")
        metric = training_value(training, "metric_for_best_model")
        if metric is not None and training_value(training, "greater_is_better") is None:
            is_smaller = is_better_when_smaller(metric)
            reason = "a loss or a perplexity" if is_smaller else "neither a loss nor a perplexity"
            self.decide("training.greater_is_better", not is_smaller, f"`{metric}` is {reason}")
        if strategy == "steps" and training_value(training, "eval_steps") is None:
            self.decide("training.eval_steps", training.save_steps, "training.save_steps")

    def model(self) -> None:
        model = self.recipe.model
        if model.tokenizer is None:
            self.decide("model.tokenizer", model.name_or_path, "model.name_or_path")
        if model.tokenizer_revision is None and not str(self.data["model"]["tokenizer"]).startswith(
            "builtin:"
        ):
            same = self.data["model"]["tokenizer"] == model.name_or_path
            revision, reason = (
                (model.revision, "model.revision")
                if same
                else ("main", "another repository than the model's")
            )
            self.decide("model.tokenizer_revision", revision, reason)
        if model.frozen_dtype == "auto":
            if self.recipe.fsdp.version == 1 and self.recipe.is_sharded:
                self.decide(
                    "model.frozen_dtype",
                    model.dtype,
                    "model.dtype: FSDP1 joins a unit's parameters in one flat tensor",
                )
            else:
                self.decide("model.frozen_dtype", self.recipe.compute_dtype, "the compute dtype")

    def rest(self) -> None:
        recipe = self.recipe
        if recipe.data.num_proc == "auto":
            count = min(MOST_PROCESSES, self.machine.cores)
            self.decide("data.num_proc", count, f"min({MOST_PROCESSES}, {self.machine.cores} cores)")
        if recipe.data.eval_packing is None:
            self.decide("data.eval_packing", recipe.data.packing, "data.packing")
        row = recipe.parallelism.of_row
        if computes_in_fp8(recipe) and not given(recipe, "data.pad_to_multiple_of"):
            self.decide(
                "data.pad_to_multiple_of", FP8_MULTIPLE * row.row_parts, "fp8 kernels need a multiple of it"
            )
        padding = recipe.data.pad_to_multiple_of
        if padding % row.row_parts and not given(recipe, "data.pad_to_multiple_of"):
            self.decide(
                "data.pad_to_multiple_of",
                math.lcm(padding, row.row_parts),
                f"{described_sharing(row)} divides each row",
            )
        if recipe.data.cache_dir is None:
            self.decide("data.cache_dir", str(default_cache_directory()), "the user's cache")
        if recipe.merge.dtype == "auto":
            self.decide("merge.dtype", recipe.compute_dtype, "the compute dtype")
