"""Settle a key that has the same meaning in every tool: by its synonym, its old spelling, or its name in a recipe.

Nothing here is known twice: synonyms are in `synonyms.py`, old spellings in `legacy.py`, and names that belong to a section in the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from fsdp_tune.core.errors import Problem
from fsdp_tune.core.units import shown
from fsdp_tune.migrate.ledger import DEFAULT_OF, Fate, Ledger, Path, Weight, flattened, leaves
from fsdp_tune.migrate.tool_keys import tool_keys
from fsdp_tune.recipe.read.legacy import DTYPE_NAMES, settle, take_aliases, translate
from fsdp_tune.recipe.read.tools import LLAMA_FACTORY, SWIFT
from fsdp_tune.recipe.read.yaml_source import MappingNode, compose, plain_value
from fsdp_tune.recipe.schema.keys import all_keys
from fsdp_tune.recipe.schema.kinds import is_jinja
from fsdp_tune.recipe.schema.optimizers import DEFAULT_OPTIMIZER
from fsdp_tune.recipe.schema.training_fields import TRAINING_FIELDS, owner_of
from fsdp_tune.recipe.synonyms import OF_A_SOURCE, SYNONYMS

Rule = Callable[[Ledger, Path, Any], None]
"""Settles the key at a path, given its value."""
Rules = Mapping[str, Rule]

_SAME_IN_LLAMA_FACTORY = ("chatml", "llama3", "phi4", "gemma3")
"""Its other templates have a system message, spaces or a trained empty thought that those of the models' authors do not have."""
_DTYPES = {"true": "bf16", "auto": "bf16", "full": "bf16"}
_OPTIMIZERS = {
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), "adamw_torch_8bit"),
    **dict.fromkeys(("paged_adamw_32bit", "adamw_hf", "adamw", "adamw_torch"), "adamw_torch"),
}
"""Optimizers of the same update. Paging is a property of memory alone."""
_LONGEST_TIMEOUT_SECONDS = 7 * 24 * 3600


def leave(reason: str) -> Rule:
    """Return a rule for a key that has no counterpart and needs none."""
    return lambda ledger, path, _: ledger.drop(path, reason)


def question(words: str, *near: str) -> Rule:
    """Return a rule for a key that a person has to decide; `near` is the path of the recipe's key that it is about."""
    return lambda ledger, path, _: ledger.ask(path, words, near)


def fine_or(fine: Collection[Any], reason: str, words: str, *near: str) -> Rule:
    """Return a rule for a key that is dropped with one of the values `fine`, and a question with any other."""

    def rule(ledger: Ledger, path: Path, value: object) -> None:
        if any(value == each and type(value) is type(each) for each in fine):
            ledger.drop(path, reason)
        else:
            ledger.ask(path, words, near)

    return rule


def off_or(reason: str, words: str, *near: str) -> Rule:
    """Return a rule for a switch: off it is dropped, on it is a question."""
    return fine_or((False, 0, "none", "no", "false", "False", [], {}), reason, words, *near)


def same(key: str) -> Rule:
    """Return a rule for a key with another name and the same value."""
    return lambda ledger, path, value: ledger.write(path, {key: value}, Fate.KEPT if path[-1] == key else Fate.CONVERTED)


def by_synonym(name: str) -> Rule:
    """Return a rule that takes a key for a synonym of another name."""
    return lambda ledger, path, value: _advised(ledger, path, name, value)


UNSUPPORTED_SWITCH = off_or("off", "it has no counterpart")


def named_optimizer(names: Mapping[str, str], decay: str) -> Rule:
    """Return a rule for the class of an optimizer, by the names of classes. `decay`: the key beside it that has the weight decay."""

    def rule(ledger: Ledger, path: Path, value: object) -> None:
        kind = str(value).rpartition(".")[2]
        if kind not in names:
            ledger.ask(path, f"`{value}` is not supported", ("training", "optim"))
        elif kind == "Adam" and ledger.value(*path[:-1], decay):
            ledger.ask(path, "Adam adds the decay to the gradient; `adamw_torch` decays the weights", ("training", "optim"))
        else:
            reason = "without decay, Adam is AdamW" if kind == "Adam" else ""
            ledger.write(path, {"training.optim": names[kind]}, Fate.CONVERTED, reason)

    return rule


def decays_by_default(ledger: Ledger, *, of_the_class: bool) -> bool:
    """Return whether an optimizer has AdamW's default decay, 0.01: that of `--set` before the class of the file."""
    optim: Path = ("training", "optim")
    return str(ledger.get(*optim) or DEFAULT_OPTIMIZER).startswith("adamw") if ledger.has_answer(optim) else of_the_class


def lora_targets(ledger: Ledger, path: Path, value: Any) -> None:
    """Keep the modules that LoRA adapts, or ask what another tool's word for them means."""
    advice = SYNONYMS["lora_target_modules"].advice(value)
    if advice.tree:
        ledger.write(path, {"lora.target_modules": advice.tree["lora"]["target_modules"]}, Fate.KEPT)
    else:
        ledger.ask(path, advice.words, ("lora", "target_modules"))


def implies(lines: Mapping[str, Any], reason: str = "") -> Rule:
    """Return a rule for a switch: on, it is these keys of the recipe; off, it is dropped."""

    def rule(ledger: Ledger, path: Path, value: Any) -> None:
        if is_on(value):
            ledger.write(path, lines, Fate.CONVERTED, reason)
        else:
            ledger.drop(path, "off, as it is here")

    return rule


DFT = "the sum of the weighted losses over the trained tokens of the step, on all ranks; `eval_loss` is cross-entropy"
"""Of dynamic fine-tuning."""


def chat_template(key: str | Path, *more: Path) -> Rule:
    """Return a rule for the name of a chat template, which another tool has in its code: it is written if one of that name is bundled.

    `key`, `more`: where it is written.
    """

    def rule(ledger: Ledger, path: Path, value: object) -> None:
        name = str(value)
        if name == "tokenizer_default" or (name == "default" and ledger.tool not in (LLAMA_FACTORY, SWIFT)):
            ledger.drop(path, "the tokenizer's own is the default here too")
        elif name == "jinja" and ledger.value(*path[:-1], f"{path[-1]}_jinja"):
            ledger.drop(path, f"the template is `{path[-1]}_jinja`")
        elif (same_name := _bundled(ledger, name)) or name.endswith((".jinja", ".jinja2")) or is_jinja(name):
            is_same = path[-1] == "chat_template" and same_name in (None, name)
            ledger.write(path, dict.fromkeys((key, *more), same_name or name), Fate.KEPT if is_same else Fate.CONVERTED)
        else:
            advice = SYNONYMS["template"].advice(name)
            ledger.ask(path, advice.words, tuple(key.split(".")) if isinstance(key, str) else key)

    return rule


def _bundled(ledger: Ledger, name: str) -> str | None:
    """Return the bundled template of a name; other tools write `qwen_25` and `phi_3` for qwen2.5 and phi3."""
    found = {re.sub(r"[^a-z0-9]", "", each): each for each in ledger.templates}.get(re.sub(r"[^a-z0-9]", "", name.lower()))
    return None if ledger.tool == LLAMA_FACTORY and found not in _SAME_IN_LLAMA_FACTORY else found


def is_on(value: object) -> bool:
    return value in (True, 1) or str(value).lower() in ("true", "yes", "1", "on")


def settle_all(ledger: Ledger, prefix: Path, rules: Rules) -> None:
    """Settle every key of the mapping at `prefix`, in the order of the file; those that include another file are the last."""
    for name in sorted(
        ledger.value(*prefix) or {}, key=lambda name: any(each[: len(prefix) + 1] == (*prefix, name) for each in ledger.included)
    ):
        settle_key(ledger, (*prefix, name), rules)


def settle_key(ledger: Ledger, path: Path, rules: Rules) -> None:
    """Settle one key, unless it is settled: by a rule of the tool, else by what its name means in every tool."""
    if not ledger.is_open(path):
        return
    name, value = str(path[-1]), ledger.value(*path)
    if value is None or value == "":
        ledger.drop(path, "no value")
    else:
        try:
            rules.get(name, settle_by_name)(ledger, path, value)
        except (TypeError, AttributeError):
            # A list or mapping where the tool has a number or a name, or the other way round: what a rule does not expect is a question.
            if not ledger.is_open(path):
                raise
            ledger.ask(path, f"not the kind of value that {ledger.tool} has here")
    if ledger.rows and ledger.rows[-1].path == path and ledger.rows[-1].fate is Fate.QUESTION and ledger.is_default(path):
        ledger.rows[-1].fate, ledger.rows[-1].targets, ledger.rows[-1].reason = Fate.DROPPED, (), f"{DEFAULT_OF} {ledger.tool}"


def settle_by_name(ledger: Ledger, path: Path, value: Any) -> None:
    """Settle a key by what its name means in every tool; a name that nothing knows is a question."""
    name = str(path[-1])
    if name in _SHARED:
        _SHARED[name](ledger, path, value)
    elif _settled_by_legacy(ledger, path, value):
        return
    elif (name in SYNONYMS and SYNONYMS[name].tool in (None, ledger.tool)) or (name in SYNONYMS and not _home_of(name)):
        _advised(ledger, path, name, value)
    elif (owner := owner_of(name)) is not None:
        ledger.drop(path, owner)
    elif (home := _home_of(name)) is not None:
        ledger.write(path, {f"{home}.{name}" if home else name: value}, Fate.KEPT)
    else:
        ask_each(ledger, path)


def ask_each(ledger: Ledger, path: Path) -> None:
    """Settle each open value below a path, which nothing knows, as a question; the default of the tool, written out, is none."""
    for leaf in [leaf for leaf in leaves(ledger.value(*path), path) if ledger.is_open(leaf)]:
        if ledger.is_default(leaf):
            ledger.drop(leaf, f"the default of {ledger.tool}")
        else:
            is_of_tool = str(leaf[0]) in tool_keys(ledger.tool)
            words = "has no counterpart: leave it out, or keep what it does" if is_of_tool else "is not known here"
            ledger.ask(leaf, f"`{shown(str(leaf[-1]))}` of {ledger.tool} {words}")


def _home_of(name: str) -> str | None:
    """Return the only section of a recipe that has a key of this name; "" for the top; None if none or several have it."""
    if name in _VAGUE:
        return None
    if name in TRAINING_FIELDS.fields and owner_of(name) is None:
        return "training"
    found = {key.path[:-1] for key in all_keys() if key.path[-1] == name and (len(key.path) == 2 or name in _OF_THE_TOP)}
    return ".".join(found.pop()) if len(found) == 1 else None


_OF_THE_TOP = frozenset({"name", "output_dir"})
_VAGUE = frozenset(("loss", "verify", "probe", "mirror", "adapter", "bias", "base", "freeze", "tokens", "env")) | frozenset(
    ("version", "format", "roles", "debug", "async", "metrics", "callbacks", "r")
)
"""Names that other tools give to something else."""


def _advised(ledger: Ledger, path: Path, name: str, value: Any) -> None:
    """Settle a key by its synonym."""
    synonym = SYNONYMS[name]
    advice = synonym.advice(value)
    if advice.tree is None:
        ledger.ask(path, advice.words, tuple(synonym.key.split(".")))
    elif not advice.tree:
        ledger.drop(path, advice.words.removeprefix("leave it out").lstrip(",: ").replace("which ", "leaving it out "))
    else:
        ledger.write(path, advice.tree, Fate.CONVERTED)


def _settled_by_legacy(ledger: Ledger, path: Path, value: Any) -> bool:
    """Settle a key that the recipe reads as an old spelling, of the top, of `training:` or of `fsdp_config:`; False if it is none."""
    name = str(path[-1])
    of_fsdp = path[-2:-1] == ("fsdp_config",) or name.startswith("fsdp_")
    holders: tuple[tuple[str, ...], ...] = (("fsdp_config",),) if of_fsdp and name != "fsdp_config" else ((), ("training",))
    for holder in holders:
        before: Any = value
        for part in reversed((*holder, name)):
            before = {part: before}
        after, words, problem = _translated(before)
        if problem is not None:
            ledger.drop(path, f"{problem.message}")
        elif after == before and holder != ("fsdp_config",):
            continue
        elif not list(flattened(after)) or not after:
            ledger.drop(path, words)
        elif holder == ("fsdp_config",) and not _is_known(after):
            ledger.ask(path, f"`{shown(name)}` of `fsdp_config` is not known here", ("fsdp",))
        else:
            (target, written), *_ = flattened(after)
            kept = holder == ("fsdp_config",) and written == value
            # Recomputation has two switches in other tools, and is on where one of them is.
            is_weak = target == ("fsdp", "activation_checkpointing") and written == "none"
            ledger.write(path, after, Fate.KEPT if kept else Fate.CONVERTED, weight=Weight.IMPLIED if is_weak else Weight.GIVEN)
        return True
    return False


def _is_known(tree: Mapping[str, Any]) -> bool:
    names = {key.path for key in all_keys()}
    return all(target in names for target, _ in flattened(tree))


def _translated(tree: Mapping[str, Any]) -> tuple[dict[str, Any], str, Problem | None]:
    """Return a part of a recipe with its old spellings replaced, what was said about them, and the first refusal."""
    root, _ = compose(json.dumps(tree), "")
    assert isinstance(root, MappingNode)
    notices, problems = translate(root)
    more, wrong = settle(root)
    take_aliases(root)
    said = [notice.message.partition(": ")[2] or notice.message for notice in (*notices, *more)]
    after = cast("dict[str, Any]", _without_empty(plain_value(root)))
    return after, "; ".join(said), next(iter((*problems, *wrong)), None)


def _without_empty(value: object) -> object:
    """Remove sections from which every key was taken."""
    if not isinstance(value, dict):
        return value
    inner = {name: _without_empty(each) for name, each in cast("dict[str, object]", value).items()}
    return {name: each for name, each in inner.items() if each != {}}


# ---- Fields of TrainingArguments that are keys of their own in a recipe


def _compute_dtype(ledger: Ledger, path: Path, value: Any) -> None:
    name = str(value).lower()
    if path[-1] in ("bf16", "bfloat16") and name in _DTYPES:
        ledger.write(path, {"precision.mixed_precision": "bf16"}, Fate.CONVERTED)
        if name == "full":
            ledger.set(("model", "dtype"), "bf16", str(path[-1]), Weight.IMPLIED)
    elif path[-1] in ("fp16", "float16") and is_on(value):
        ledger.write(path, {"precision.mixed_precision": "fp16"}, Fate.CONVERTED)
    elif is_on(value) or name not in ("false", "no", "0"):
        ledger.ask(path, "write `precision: {mixed_precision: bf16}`, fp16, or no", ("precision", "mixed_precision"))
    elif path == ("bf16",) and not is_on(ledger.value("fp16") or False):
        ledger.write(path, {"precision.mixed_precision": "no"}, Fate.CONVERTED, "computed in the dtype of the weights")
    else:
        ledger.drop(path, "off: the dtype of the computation is `precision.mixed_precision`")


def dtype(key: str) -> Rule:
    """Return a rule for the name of a dtype, with or without `torch.`."""

    def rule(ledger: Ledger, path: Path, value: object) -> None:
        name = str(value).removeprefix("torch.")
        short = DTYPE_NAMES.get(name, name)
        if short == "auto":
            ledger.drop(path, "auto: stored in `model.dtype`, computed in `precision.mixed_precision`")
        else:
            ledger.write(path, {key: short}, Fate.KEPT if short == value else Fate.CONVERTED)

    return rule


def _optimizer(ledger: Ledger, path: Path, value: Any) -> None:
    name = _OPTIMIZERS.get(str(value), value)
    reason = "without pages in host memory" if "paged" in str(value) else ""
    ledger.write(path, {"training.optim": name}, Fate.KEPT if (name, path[-1]) == (value, "optim") else Fate.CONVERTED, reason)


def _timeout(ledger: Ledger, path: Path, value: Any) -> None:
    if isinstance(value, int) and 0 < value <= _LONGEST_TIMEOUT_SECONDS:
        ledger.write(path, {"launch.hang_timeout": f"{value}s"}, Fate.CONVERTED)
    else:
        ledger.drop(path, "more than a week is no limit; a run without progress ends after `launch.hang_timeout`")


def _trackers(ledger: Ledger, path: Path, value: Any) -> None:
    """`none` is an empty list; `all` depends on what is installed."""
    names = cast("list[Any]", value) if isinstance(value, list) else [value]
    if names == ["all"]:
        ledger.ask(path, "name the trackers: `training: {report_to: [tensorboard, wandb]}`", ("training", "report_to"))
    else:
        written = [] if names == ["none"] else names
        ledger.write(path, {"training.report_to": written}, Fate.KEPT if written == value else Fate.CONVERTED)


def _zero_config(ledger: Ledger, path: Path, value: object) -> None:
    """A file of DeepSpeed that was not found: its name often has the stage."""
    stage = next((number for number in "320" if f"z{number}" in str(value).lower() or f"zero{number}" in str(value).lower()), None)
    stage = stage or next(
        (number for number in "320" if f"zero_{number}" in str(value).lower() or f"stage{number}" in str(value).lower()), None
    )
    if stage is None:
        ledger.ask(path, f"{owner_of('deepspeed')}; `fsdp-tune import` reads such a file", ("fsdp", "sharding_strategy"))
        return
    settings = dict(flattened(SYNONYMS["zero_stage"].advice(stage).tree))
    settings |= {("fsdp", "offload_params"): True} if "offload" in str(value).lower() else {}
    ledger.write(path, settings, Fate.CONVERTED, "by the name of the file")


def _accelerator(ledger: Ledger, path: Path, value: object) -> None:
    """What TrainingArguments pass to Accelerate. A file of it is a question; so is what changes the rows of a step."""
    if not isinstance(value, dict):
        ledger.ask(path, "write what it sets under `fsdp:`, `parallelism:` and `data:`", ("training",))
        return
    if not value:
        ledger.drop(path, "no keys")
    others = dict.fromkeys(cast("dict[str, Any]", value), leave(str(owner_of("accelerator_config"))))
    settle_all(ledger, path, {**others, **_ACCELERATOR})


def section(rules: Rules) -> Rule:
    """Return a rule for a mapping, whose keys are settled one by one."""

    def rule(ledger: Ledger, path: Path, value: Any) -> None:
        if isinstance(value, dict) and value:
            settle_all(ledger, path, rules)
        elif not value:
            ledger.drop(path, "no keys")
        else:
            ledger.ask(path, "it is read as keys, not as a file")

    return rule


_FSDP: Rules = dict.fromkeys(
    ("fsdp_final_state_dict_type", "final_state_dict_type"), leave("`merge-checkpoint` makes one model of the shards")
)
_ACCELERATOR: Rules = {
    "split_batches": off_or("off", "the batch is of all ranks there: write `global_batch_size`", "training", "global_batch_size"),
    "even_batches": fine_or((True,), "each rank has as many rows here too", "ranks have as many rows as each other", "data"),
    "gradient_accumulation_kwargs": section(
        {
            "num_steps": question("write `training: {global_batch_size: …}`", "training", "global_batch_size"),
            "adjust_scheduler": fine_or((True,), "as here", "the schedule counts steps of the optimizer", "training"),
            **dict.fromkeys(("sync_with_dataloader", "sync_each_batch"), leave("see `fsdp.sync_each_batch`")),
        }
    ),
}
_SHARED: dict[str, Rule] = {
    "accelerator_config": _accelerator,
    "fsdp_config": section(_FSDP),
    **dict.fromkeys(("bf16", "fp16", "bfloat16", "float16"), _compute_dtype),
    **dict.fromkeys(("optim", "optimizer"), _optimizer),
    "run_name": same("name"),
    "output_dir": same("output_dir"),
    "torch_compile": lambda ledger, path, value: (
        ledger.ask(path, "write `kernels: {compile: true}` or leave it out", ("kernels", "compile"))
        if not isinstance(value, bool)
        else ledger.write(path, {"kernels.compile": value}, Fate.CONVERTED)
    ),
    "use_liger_kernel": same("kernels.liger"),
    "use_cpu": implies({"launch.device": "cpu"}),
    "ddp_timeout": _timeout,
    "report_to": _trackers,
    "deepspeed": _zero_config,
    **dict.fromkeys(("torch_dtype", "dtype"), dtype("model.dtype")),
    "local_rank": leave("the launcher sets it for every rank"),
    **dict.fromkeys(("hf_use_auth_token", "use_auth_token"), leave("the token of `hf auth login` is used where a repository needs it")),
    "low_cpu_mem_usage": leave("`fsdp.cpu_ram_efficient_loading` is on by default"),
    "use_fast_tokenizer": leave("tokenizers are the fast ones"),
    "overwrite_cache": leave("prepared data are named by their content"),
    **dict.fromkeys(("padding_free", "pad_to_sequence_len"), leave("rows are padded to the longest of a batch; packed rows are full")),
    "early_stopping_patience": same("training.early_stopping.patience"),
}
"""Keys with one meaning in the tools that have them."""


# ---- Entries of a list of data sets: `datasets` of axolotl and TRL, and the entries of `dataset_info.json`

SourceRule = Callable[[Ledger, Path, Path, Any], None]
"""Settles the key at a path by the source at a place of the recipe, given its value."""
TRAIN: Path = ("data", "train")
_SAME = frozenset({"path", "name", "split", "data_files", "data_dir", "revision", "columns"})
_COLUMNS = frozenset(name for name, synonym in OF_A_SOURCE.items() if synonym.key == "data.train.rename_columns")


def leave_here(reason: str) -> SourceRule:
    """Return a rule for a key of a source that has no counterpart and needs none."""
    return lambda ledger, path, _place, _value: ledger.drop(path, reason)


def settle_source(ledger: Ledger, path: Path, place: Path, named: Mapping[str, SourceRule] | None = None) -> None:
    """Settle an entry, which is the name of a data set or a mapping, by the source at `place`.

    `named`: rules of the tool, which take the place too.
    """
    entry = ledger.value(*path)
    if not isinstance(entry, dict):
        ledger.write(path, {(*place, "path"): str(entry)}, Fate.CONVERTED)
        return
    for name, value in cast("dict[str, Any]", entry).items():
        inner = (*path, name)
        if not ledger.is_open(inner):
            continue
        if value is None or value == "":
            ledger.drop(inner, "no value")
        elif named is not None and name in named:
            named[name](ledger, inner, place, value)
        elif name in _SAME:
            ledger.write(inner, {(*place, name): value}, Fate.KEPT)
        else:
            _by_synonym(ledger, inner, place, value)


def rename(ledger: Ledger, path: Path, place: Path, column: str, name: str) -> None:
    """Settle a key that says which column holds what: `name` is the one that a format here has for it."""
    if column == name:
        ledger.drop(path, f"`{name}` is the name of that column here too")
    else:
        ledger.write(path, {(*place, "rename_columns", column): name}, Fate.CONVERTED)


def _by_synonym(ledger: Ledger, path: Path, place: Path, value: Any) -> None:
    name = str(path[-1])
    synonym = OF_A_SOURCE.get(name)
    if synonym is None:
        ledger.ask(path, f"`{name}` of a data set is not known here", place)
        return
    advice = synonym.advice(value)
    entry = cast("dict[str, Any]", advice.tree["data"]["train"][0]) if advice.tree else {}
    if name in _COLUMNS:
        rename(ledger, path, place, str(value), entry["rename_columns"][str(value)])
    elif written := {(*place, key): inner for key, inner in entry.items() if key != "path" or synonym.key == "data.train.path"}:
        ledger.write(path, written, Fate.CONVERTED)
    else:
        ledger.ask(path, advice.words, place)
