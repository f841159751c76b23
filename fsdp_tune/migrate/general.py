"""The rules of keys that have the same meaning in every tool: by a synonym, an old spelling, or the name of a
key of a recipe.

Nothing here is known twice: synonyms are in `synonyms.py`, old spellings in `legacy.py`, and names that
belong to a section in the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from fsdp_tune.core.errors import Problem
from fsdp_tune.core.units import shown
from fsdp_tune.core.values import is_mapping
from fsdp_tune.migrate.ledger import LedgerView
from fsdp_tune.migrate.rules import (
    Also,
    AskEach,
    FileKey,
    Inside,
    Outcome,
    Rule,
    Rules,
    each,
    fine_or,
    implies,
    is_on,
    off_or,
    outcome_of,
    renamed,
    same,
    section,
)
from fsdp_tune.recipe.key_paths import KeyPath, flattened
from fsdp_tune.recipe.outcome import Ask, Drop, Fate, Weight, Write, by_path
from fsdp_tune.recipe.read.legacy import DTYPE_NAMES, settle, take_aliases, translate
from fsdp_tune.recipe.read.tool_detection import LLAMA_FACTORY, SWIFT
from fsdp_tune.recipe.read.yaml_source import MappingNode, compose, plain_value
from fsdp_tune.recipe.schema.keys import all_keys
from fsdp_tune.recipe.schema.kinds import is_jinja
from fsdp_tune.recipe.schema.optimizers import DEFAULT_OPTIMIZER
from fsdp_tune.recipe.schema.training_fields import TRAINING_FIELDS, owner_of
from fsdp_tune.recipe.synonyms import OF_A_SOURCE, SYNONYMS

_SAME_IN_LLAMA_FACTORY = ("chatml", "llama3", "phi4", "gemma3")
"""Its other templates have a system message, spaces or a trained empty thought that those of the models'
authors do not have."""
_DTYPES = {"true": "bf16", "auto": "bf16", "full": "bf16"}
_OPTIMIZERS = {
    **dict.fromkeys(
        ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), "adamw_torch_8bit"
    ),
    **dict.fromkeys(("paged_adamw_32bit", "adamw_hf", "adamw", "adamw_torch"), "adamw_torch"),
}
"""Optimizers of the same update. Paging is a property of memory alone."""
_LONGEST_TIMEOUT_SECONDS = 7 * 24 * 3600


def named_optimizer(names: Mapping[str, str], decay: str) -> Rule:
    """Return a rule for the class of an optimizer, by the names of classes. `decay`: the key beside it that
    has the weight decay."""

    def rule(key: FileKey) -> Outcome:
        kind = str(key.value).rpartition(".")[2]
        if kind not in names:
            return Ask(f"`{key.value}` is not supported", "training.optim")
        if kind == "Adam" and key.beside(decay):
            return Ask(
                "Adam adds the decay to the gradient; `adamw_torch` decays the weights", "training.optim"
            )
        return Write(
            {"training.optim": names[kind]}, "without decay, Adam is AdamW" if kind == "Adam" else ""
        )

    return rule


def decays_by_default(ledger: LedgerView, *, of_the_class: bool) -> bool:
    """Return whether an optimizer has AdamW's default decay, 0.01: that of `--set` before the class of the
    file."""
    optim: KeyPath = ("training", "optim")
    return (
        str(ledger.get(*optim) or DEFAULT_OPTIMIZER).startswith("adamw")
        if ledger.has_answer(optim)
        else of_the_class
    )


DFT = (
    "the sum of the weighted losses over the trained tokens of the step, on all ranks; `eval_loss` is "
    "cross-entropy"
)
"""Of dynamic fine-tuning."""


def chat_template(key: FileKey) -> Write | Ask | Drop:
    """Write a chat template, which another tool has in its code, if one of its name is bundled. In a data
    set: for its source."""
    name = str(key.value)
    if name == "tokenizer_default" or (name == "default" and key.tool not in (LLAMA_FACTORY, SWIFT)):
        return Drop("the tokenizer's own is the default here too")
    if name == "jinja" and key.beside(f"{key.name}_jinja"):
        return Drop(f"the template is `{key.name}_jinja`")
    target: KeyPath = (*(key.place or ("data",)), "chat_template")
    if (same_name := _bundled(key.ledger, name)) or name.endswith((".jinja", ".jinja2")) or is_jinja(name):
        is_same = key.name == "chat_template" and same_name in (None, name)
        return Write({target: same_name or name}, fate=Fate.KEPT if is_same else Fate.CONVERTED)
    asked = SYNONYMS["template"].outcome(name)
    return Ask(asked.words, target) if isinstance(asked, Ask) else asked


def _bundled(ledger: LedgerView, name: str) -> str | None:
    """Return the bundled template of a name; other tools write `qwen_25` and `phi_3` for qwen2.5 and phi3."""
    found = {re.sub(r"[^a-z0-9]", "", each): each for each in ledger.templates}.get(
        re.sub(r"[^a-z0-9]", "", name.lower())
    )
    return None if ledger.tool == LLAMA_FACTORY and found not in _SAME_IN_LLAMA_FACTORY else found


def by_name(key: FileKey) -> Outcome:
    """Return what becomes of a key by what its name means in every tool; a name that nothing knows is a
    question."""
    name = key.name
    if name in _SHARED:
        return outcome_of(_SHARED[name], key)
    if (found := _by_legacy(key)) is not None:
        return found
    home = _home_of(name)
    if name in SYNONYMS and (SYNONYMS[name].tool in (None, key.tool) or not home):
        return SYNONYMS[name].outcome(key.value)
    if (owner := owner_of(name)) is not None:
        return Drop(owner)
    return (
        AskEach() if home is None else Write({f"{home}.{name}" if home else name: key.value}, fate=Fate.KEPT)
    )


def _home_of(name: str) -> str | None:
    """Return the only section of a recipe that has a key of this name; "" for the top; None if none or
    several have it."""
    if name in _VAGUE:
        return None
    if name in TRAINING_FIELDS.fields and owner_of(name) is None:
        return "training"
    found = {
        key.path[:-1]
        for key in all_keys()
        if key.path[-1] == name and (len(key.path) == 2 or name in _OF_THE_TOP)
    }
    return ".".join(found.pop()) if len(found) == 1 else None


_OF_THE_TOP = frozenset({"name", "output_dir"})
_VAGUE = frozenset(
    ("loss", "verify", "probe", "mirror", "adapter", "bias", "base", "freeze", "tokens", "env")
) | frozenset(("version", "format", "roles", "debug", "async", "metrics", "callbacks", "r"))
"""Names that other tools give to something else."""


def _by_legacy(key: FileKey) -> Outcome | None:
    """Return the outcome of a key that the recipe reads as an old spelling, of the top, of `training:` or of
    `fsdp_config:`; else None."""
    name = key.name
    of_fsdp = key.path[-2:-1] == ("fsdp_config",) or name.startswith("fsdp_")
    holders: tuple[tuple[str, ...], ...] = (
        (("fsdp_config",),) if of_fsdp and name != "fsdp_config" else ((), ("training",))
    )
    for holder in holders:
        before: Any = key.value
        for part in reversed((*holder, name)):
            before = {part: before}
        after, words, problem = _translated(before)
        if problem is not None:
            return Drop(problem.message)
        if after == before and holder != ("fsdp_config",):
            continue
        if not after:
            return Drop(words)
        if holder == ("fsdp_config",) and not _is_known(after):
            return Ask(f"`{shown(name)}` of `fsdp_config` is not known here", "fsdp")
        (target, written), *_ = flattened(after)
        kept = holder == ("fsdp_config",) and written == key.value
        # Recomputation has two switches in other tools, and is on where one of them is.
        is_weak = target == ("fsdp", "activation_checkpointing") and written == "none"
        return Write(
            after,
            fate=Fate.KEPT if kept else Fate.CONVERTED,
            weight=Weight.IMPLIED if is_weak else Weight.GIVEN,
        )
    return None


def _is_known(tree: Mapping[str, object]) -> bool:
    names = {key.path for key in all_keys()}
    return all(target in names for target, _ in flattened(tree))


class _Translated(NamedTuple):
    tree: dict[str, object]
    words: str
    """Of the notices about old spellings."""
    problem: Problem | None
    """The first refusal."""


def _translated(tree: Mapping[str, object]) -> _Translated:
    """Return a part of a recipe with its old spellings replaced."""
    root, _ = compose(json.dumps(tree), "")
    assert isinstance(root, MappingNode)
    notices, problems = translate(root)
    more, wrong = settle(root)
    take_aliases(root)
    said = [notice.message.partition(": ")[2] or notice.message for notice in (*notices, *more)]
    after = cast("dict[str, object]", _without_empty(plain_value(root)))
    return _Translated(after, "; ".join(said), next(iter((*problems, *wrong)), None))


def _without_empty(value: object) -> object:
    """Remove sections from which every key was taken."""
    if not is_mapping(value):
        return value
    inner = {name: _without_empty(item) for name, item in value.items()}
    return {name: item for name, item in inner.items() if item != {}}


# ---- Fields of TrainingArguments that are keys of their own in a recipe


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
_SHARED: Rules = {
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


# ---- Entries of a list of data sets: `datasets` of axolotl and TRL, and the entries of `dataset_info.json`

_SAME = ("path", "name", "split", "data_files", "data_dir", "revision", "columns")
_COLUMNS = frozenset(
    name for name, synonym in OF_A_SOURCE.items() if synonym.key == "data.train.rename_columns"
)


def source(place: KeyPath, named: Rules) -> Rule:
    """Return a rule for an entry, the name of a data set or a mapping: the source at `place`. `named`: rules
    of the tool."""
    rules = {**each(_SAME, lambda key: Write({(*key.place, key.name): key.value}, fate=Fate.KEPT)), **named}

    def rule(key: FileKey) -> Outcome:
        if not isinstance(key.value, dict):
            return Write({(*place, "path"): str(key.value)})
        return Inside({name: rules.get(name, _by_synonym) for name in key.mapping}, place)

    return rule


def sources(place: KeyPath, named: Rules, *, hint: str = "") -> Rule:
    """Return a rule for a list of entries from `place` on; one that is not a list is an entry, or a question
    if there is a `hint`."""

    def rule(key: FileKey) -> Outcome:
        if isinstance(key.value, list):
            return Inside({index: source((*place, index), named) for index in range(len(key.items))})
        return Ask(hint, place) if hint else outcome_of(source((*place, 0), named), key)

    return rule


def _by_synonym(key: FileKey) -> Outcome:
    synonym = OF_A_SOURCE.get(key.name)
    if synonym is None:
        return Ask(f"`{key.name}` of a data set is not known here", key.place)
    outcome = synonym.outcome(key.value)
    if not isinstance(outcome, Write):
        return Ask(outcome.words, key.place) if isinstance(outcome, Ask) else outcome
    found = in_entry(outcome)
    if key.name in _COLUMNS:
        (name,) = (str(value) for target, value in found.items() if target[0] == "rename_columns")
        return renamed(str(key.value), name, key.place)
    is_place = synonym.key == "data.train.path"  # else the path is a placeholder
    return Write(
        {(*key.place, *target): value for target, value in found.items() if is_place or target != ("path",)}
    )


def in_entry(outcome: Write) -> dict[KeyPath, object]:
    """Return what a synonym writes into an entry of `data.train`, by the keys of the entry."""
    return {target[3:]: value for target, value in by_path(outcome.settings)}
