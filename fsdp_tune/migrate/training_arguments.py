"""Fields of TrainingArguments that are keys of their own in a recipe, and options with one meaning in the
tools that have them."""

from __future__ import annotations

from fsdp_tune.migrate.rules import (
    Also,
    FileKey,
    Inside,
    Outcome,
    Rules,
    each,
    fine_or,
    implies,
    is_on,
    off_or,
    same,
    section,
)
from fsdp_tune.recipe.key_paths import KeyPath
from fsdp_tune.recipe.outcome import Ask, Drop, Fate, Write, by_path
from fsdp_tune.recipe.read.legacy import DTYPE_NAMES
from fsdp_tune.recipe.schema.training_fields import owner_of
from fsdp_tune.recipe.synonyms import SYNONYMS

_DTYPES = {"true": "bf16", "auto": "bf16", "full": "bf16"}
_OPTIMIZERS = {
    **dict.fromkeys(
        ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), "adamw_torch_8bit"
    ),
    **dict.fromkeys(("paged_adamw_32bit", "adamw_hf", "adamw", "adamw_torch"), "adamw_torch"),
}
"""Optimizers of the same update. Paging is a property of memory alone."""
_LONGEST_TIMEOUT_SECONDS = 7 * 24 * 3600


def _compute_dtype(key: FileKey) -> Outcome:
    name = str(key.value).lower()
    if key.name in ("bf16", "bfloat16") and name in _DTYPES:
        write = Write({"precision.mixed_precision": "bf16"})
        return [write, Also("model.dtype", "bf16", key.name)] if name == "full" else write
    if key.name in ("fp16", "float16") and is_on(key.value):
        return Write({"precision.mixed_precision": "fp16"})
    if is_on(key.value) or name not in ("false", "no", "0"):
        return Ask("write `precision: {mixed_precision: bf16}`, fp16, or no", "precision.mixed_precision")
    if key.path == ("bf16",) and not is_on(key.of_file("fp16") or False):
        return Write({"precision.mixed_precision": "no"}, "computed in the dtype of the weights")
    return Drop("off: the dtype of the computation is `precision.mixed_precision`")


def dtype(key: FileKey) -> Outcome:
    """Write the dtype of the weights by its name, with or without `torch.`."""
    name = str(key.value).removeprefix("torch.")
    short = DTYPE_NAMES.get(name, name)
    if short == "auto":
        return Drop("auto: stored in `model.dtype`, computed in `precision.mixed_precision`")
    return Write({"model.dtype": short}, fate=Fate.KEPT if short == key.value else Fate.CONVERTED)


def _optimizer(key: FileKey) -> Outcome:
    name = _OPTIMIZERS.get(str(key.value), key.value)
    fate = Fate.KEPT if (name, key.name) == (key.value, "optim") else Fate.CONVERTED
    return Write(
        {"training.optim": name}, "without pages in host memory" if "paged" in str(key.value) else "", fate
    )


def _timeout(key: FileKey) -> Outcome:
    if isinstance(key.value, int) and 0 < key.value <= _LONGEST_TIMEOUT_SECONDS:
        return Write({"launch.hang_timeout": f"{key.value}s"})
    return Drop("more than a week is no limit; a run without progress ends after `launch.hang_timeout`")


def _trackers(key: FileKey) -> Outcome:
    """`none` is an empty list; `all` depends on what is installed."""
    if key.items == ["all"]:
        return Ask("name the trackers: `training: {report_to: [tensorboard, wandb]}`", "training.report_to")
    written = [] if key.items == ["none"] else key.items
    return Write({"training.report_to": written}, fate=Fate.KEPT if written == key.value else Fate.CONVERTED)


def _zero_config(key: FileKey) -> Outcome:
    """A file of DeepSpeed that was not found: its name often has the stage."""
    name = str(key.value).lower()
    forms = (("z{}", "zero{}"), ("zero_{}", "stage{}"))
    stages = (
        number for form in forms for number in "320" if any(each.format(number) in name for each in form)
    )
    if (stage := next(stages, None)) is None:
        return Ask(f"{owner_of('deepspeed')}; `fsdp-tune import` reads such a file", "fsdp.sharding_strategy")
    strategy = SYNONYMS["zero_stage"].outcome(stage)
    assert isinstance(strategy, Write)
    offload: dict[KeyPath, object] = {("fsdp", "offload_params"): True} if "offload" in name else {}
    return Write(dict(by_path(strategy.settings)) | offload, "by the name of the file")


def _accelerator(key: FileKey) -> Outcome:
    """What TrainingArguments pass to Accelerate. A file of it is a question; so is what changes the rows of a
    step."""
    if not isinstance(key.value, dict):
        return Ask("write what it sets under `fsdp:`, `parallelism:` and `data:`", "training")
    others = each(tuple(key.mapping), Drop(str(owner_of("accelerator_config"))))
    return Inside({**others, **_ACCELERATOR}) if key.mapping else Drop("no keys")


_FSDP = each(
    ("fsdp_final_state_dict_type", "final_state_dict_type"),
    Drop("`merge-checkpoint` makes one model of the shards"),
)
_ACCELERATOR: Rules = {
    "split_batches": off_or(
        "off", "the batch is of all ranks there: write `global_batch_size`", "training.global_batch_size"
    ),
    "even_batches": fine_or(
        (True,), "each rank has as many rows here too", "ranks have as many rows as each other", "data"
    ),
    "gradient_accumulation_kwargs": section(
        {
            "num_steps": Ask("write `training: {global_batch_size: …}`", "training.global_batch_size"),
            "adjust_scheduler": fine_or(
                (True,), "as here", "the schedule counts steps of the optimizer", "training"
            ),
            **each(("sync_with_dataloader", "sync_each_batch"), Drop("see `fsdp.sync_each_batch`")),
        }
    ),
}
SHARED: Rules = {
    "accelerator_config": _accelerator,
    "fsdp_config": section(_FSDP),
    **each(("bf16", "fp16", "bfloat16", "float16"), _compute_dtype),
    **each(("optim", "optimizer"), _optimizer),
    "run_name": same("name"),
    "output_dir": same("output_dir"),
    "torch_compile": lambda key: (
        Write({"kernels.compile": key.value})
        if isinstance(key.value, bool)
        else Ask("write `kernels: {compile: true}` or leave it out", "kernels.compile")
    ),
    "use_liger_kernel": same("kernels.liger"),
    "use_cpu": implies({"launch.device": "cpu"}),
    "ddp_timeout": _timeout,
    "report_to": _trackers,
    "deepspeed": _zero_config,
    **each(("torch_dtype", "dtype"), dtype),
    "local_rank": Drop("the launcher sets it for every rank"),
    **each(
        ("hf_use_auth_token", "use_auth_token"),
        Drop("the token of `hf auth login` is used where a repository needs it"),
    ),
    "low_cpu_mem_usage": Drop("`fsdp.cpu_ram_efficient_loading` is on by default"),
    "use_fast_tokenizer": Drop("tokenizers are the fast ones"),
    "overwrite_cache": Drop("prepared data are named by their content"),
    **each(
        ("padding_free", "pad_to_sequence_len"),
        Drop("rows are padded to the longest of a batch; packed rows are full"),
    ),
    "early_stopping_patience": same("training.early_stopping.patience"),
}
"""Keys with one meaning in the tools that have them."""
