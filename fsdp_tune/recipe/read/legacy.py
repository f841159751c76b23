"""Translate old spellings on the tree of a recipe, with one notice each: TrainingArguments 4.x, Accelerate's
`fsdp_config` files, the `fsdp: "full_shard auto_wrap offload"` strings.

It is an error if an old and a new spelling have different values. A spelling without an equivalent is
refused, with the reason and the replacement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_tune.core.errors import Notice, Problem
from fsdp_tune.core.units import Value, shown
from fsdp_tune.recipe.key_paths import NamePath, dotted
from fsdp_tune.recipe.read.translation import Change, Translation, at, changed, node_text, text_node
from fsdp_tune.recipe.read.yaml_source import (
    ListNode,
    MappingEntry,
    MappingNode,
    ScalarNode,
    entries_of,
    plain_value,
)
from fsdp_tune.recipe.schema.strategies import STRATEGIES

STRATEGY_NUMBERS: dict[int, str] = {row.number: name for name, row in STRATEGIES.items()}
PREFETCH_NUMBERS = {1: "BACKWARD_PRE", 2: "BACKWARD_POST", 3: "NO_PREFETCH"}
DTYPE_NAMES: dict[Value, Value] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def _recompute(value: Value) -> Value:
    return {True: "full", False: "none"}.get(value, value) if isinstance(value, bool) else value


def _upper(value: Value) -> Value:
    return value.upper() if isinstance(value, str) else value


def _strategy(value: Value) -> Value:
    if isinstance(value, str) and value.isdecimal():
        return STRATEGY_NUMBERS.get(int(value), value)
    return (
        STRATEGY_NUMBERS.get(value, value)
        if isinstance(value, int) and not isinstance(value, bool)
        else _upper(value)
    )


RENAMED: tuple[tuple[NamePath, NamePath, Change | None], ...] = (
    (("training", "gradient_checkpointing"), ("fsdp", "activation_checkpointing"), _recompute),
    (("training", "activation_checkpointing"), ("fsdp", "activation_checkpointing"), _recompute),
    (("fsdp", "gradient_checkpointing"), ("fsdp", "activation_checkpointing"), _recompute),
    (("model", "gradient_checkpointing"), ("fsdp", "activation_checkpointing"), _recompute),
    (("gradient_checkpointing",), ("fsdp", "activation_checkpointing"), _recompute),
    (("fsdp", "cpu_offload"), ("fsdp", "offload_params"), None),
    (("fsdp", "transformer_cls_names_to_wrap"), ("fsdp", "transformer_layer_cls_to_wrap"), None),
    (("fsdp", "backward_prefetch_policy"), ("fsdp", "backward_prefetch"), _upper),
    (("training", "evaluation_strategy"), ("training", "eval_strategy"), None),
    (("training", "warmup_ratio"), ("training", "warmup_steps"), None),
    (("training", "max_seq_length"), ("data", "max_length"), None),
    (("data", "max_seq_length"), ("data", "max_length"), None),
    (("model", "max_seq_length"), ("data", "max_length"), None),
    (("model", "torch_dtype"), ("model", "dtype"), None),
    (("training", "torch_dtype"), ("model", "dtype"), None),
    (("model", "rope_scaling", "type"), ("model", "rope_scaling", "rope_type"), None),
    (("model", "rope_parameters"), ("model", "rope_scaling"), None),
    (("lora", "lr_ratio"), ("lora", "loraplus_lr_ratio"), None),  # up to version 0.1
)
UPPERCASED = ("auto_wrap_policy", "backward_prefetch", "state_dict_type")


@dataclass(frozen=True, slots=True)
class Dropped:
    """A removed key. `fine` is the value that the package always uses; any other value is refused."""

    path: NamePath
    fine: Value | Mapping[str, Value]
    """None: any value is accepted and has no effect."""
    reason: str


DROPPED = (
    Dropped(
        ("training", "group_by_length"),
        None,
        "rows of similar length are always put together when not packing",
    ),
    Dropped(("training", "logging_dir"), None, "TensorBoard files are in tensorboard/ of the run directory"),
    Dropped(
        ("training", "save_safetensors"),
        fine=True,
        reason="weights are always written as safetensors or sharded, never as pickles",
    ),
    Dropped(
        ("training", "overwrite_output_dir"), None, "it is an option of the command: `train --overwrite`"
    ),
    Dropped(("overwrite_output_dir",), None, "it is an option of the command: `train --overwrite`"),
    *(
        Dropped(
            ("training", name),
            fine={"use_reentrant": False},
            reason="activation checkpointing is always non-reentrant and keeps the random state",
        )
        for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
    ),
    Dropped(("fsdp", "use_orig_params"), fine=True, reason="the model always keeps its original parameters"),
    Dropped(
        ("fsdp", "limit_all_gathers"), fine=True, reason="the number of gathers in flight is always limited"
    ),
    Dropped(
        ("quantization", "double_quant"),
        fine=False,
        reason="blocks of scales would span rows of several ranks; `quantization.scales: bf16` saves 0.25 "
        "bits a weight, not 0.37",
    ),
    Dropped(("fsdp", "xla"), fine=False, reason="there is no XLA path"),
    Dropped(("fsdp", "xla_fsdp_v2"), fine=False, reason="there is no XLA path"),
    Dropped(("fsdp", "xla_fsdp_grad_ckpt"), fine=False, reason="there is no XLA path"),
    Dropped(
        ("load_in_8bit",),
        fine=False,
        reason="weights are held in 16 bits, or in 4 with `quantization: {load: nf4}`",
    ),
    Dropped(
        ("bnb_4bit_quant_storage",),
        fine="uint8",
        reason="weights in 4 bits are stored as bytes, which FSDP2 shards",
    ),
    Dropped(("qlora_sharded_model_loading",), None, "each rank always reads its part of the weights"),
    Dropped(("lora_fan_in_fan_out",), None, "it follows from the kind of each layer"),
    Dropped(("lora_task_type",), fine="CAUSAL_LM", reason="the models are causal language models"),
    Dropped(("lora", "fan_in_fan_out"), None, "it follows from the kind of each layer"),
    Dropped(("lora", "task_type"), fine="CAUSAL_LM", reason="the models are causal language models"),
)


def translate(tree: MappingNode) -> tuple[list[Notice], list[Problem]]:
    """Rewrite every old spelling in `tree`. `settle` handles those that depend on the complete recipe."""
    work = Translation(tree)
    for place in (("fsdp",), ("training", "fsdp")):
        _option_string(work, place)
    for place in (("fsdp_config",), ("training", "fsdp_config")):
        _config_section(work, place)
    _prefixes(work)
    _share_of_steps(work)
    for old, new, change in RENAMED:
        if (entry := work.take(old)) is not None:
            if change is not None:
                entry.node = changed(entry.node, change)
            work.put(new, entry, dotted(old))
            work.add_notice(
                entry.where, dotted(new), f"`{dotted(old)}` is now `{dotted(new)}: {node_text(entry.node)}`"
            )
    for short in ("alpha", "dropout"):  # both spellings are current: no notice
        if (entry := work.take(("lora", short))) is not None:
            work.put(("lora", f"lora_{short}"), entry, f"lora.{short}")
    for row in DROPPED:
        _drop(work, row)
    _values(work)
    return work.notices, work.problems


def settle(tree: MappingNode) -> tuple[list[Notice], list[Problem]]:
    """Translate spellings that depend on the recipe with every `--set` applied: an old key may stand for
    another only if that is absent."""
    work = Translation(tree)
    reshard = work.find(("fsdp", "reshard_after_forward"))
    if (
        reshard is not None
        and work.find(("fsdp", "sharding_strategy")) is None
        and plain_value(reshard.node) is False
    ):
        work.put(
            ("fsdp", "sharding_strategy"),
            MappingEntry(reshard.where, text_node("SHARD_GRAD_OP", reshard.node.where)),
            "fsdp.reshard_after_forward",
        )
        message = "`fsdp.reshard_after_forward: false` is `fsdp.sharding_strategy: SHARD_GRAD_OP`"
        work.add_notice(reshard.where, "fsdp.sharding_strategy", message)
    if (sync := work.take(("fsdp", "sync_module_states"))) is not None:
        loading = work.find(("fsdp", "cpu_ram_efficient_loading"))
        if plain_value(sync.node) is False and (loading is None or plain_value(loading.node) is not True):
            work.put(
                ("fsdp", "cpu_ram_efficient_loading"),
                MappingEntry(sync.where, sync.node),
                "fsdp.sync_module_states",
            )
            message = "`fsdp.sync_module_states: false` is now `fsdp.cpu_ram_efficient_loading: false`"
            work.add_notice(sync.where, "fsdp.cpu_ram_efficient_loading", message)
        elif plain_value(sync.node) is False:
            message = (
                "`fsdp.sync_module_states: false` contradicts `fsdp.cpu_ram_efficient_loading: true`, "
                "which sends rank 0's weights; leave one of the two out"
            )
            work.add_problem(sync.where, "fsdp.sync_module_states", message)
        else:
            message = "`fsdp.sync_module_states` is removed: it follows from `fsdp.cpu_ram_efficient_loading`"
            work.add_notice(sync.where, "fsdp.sync_module_states", message)
    return work.notices, work.problems


def take_aliases(tree: MappingNode) -> None:
    """Normalise equivalent spellings of values, without a notice."""
    work = Translation(tree)
    for path in (
        ("model", "dtype"),
        ("model", "frozen_dtype"),
        ("merge", "dtype"),
        ("precision", "reduce_dtype"),
        ("precision", "mixed_precision"),
    ):
        work.replace(path, lambda value: DTYPE_NAMES.get(value, value))
    work.replace(
        ("precision", "mixed_precision"), lambda value: "no" if value is False or value == "fp32" else value
    )
    work.replace(("fsdp", "activation_checkpointing"), _recompute)
    report = work.find(("training", "report_to"))
    if report is not None and isinstance(report.node, ScalarNode) and isinstance(report.node.value, str):
        report.node = ListNode([] if report.node.value == "none" else [report.node], report.node.where)
    env = work.find(("launch", "env"))
    for entry in entries_of(env.node if env is not None else None).values():
        if (
            isinstance(entry.node, ScalarNode)
            and isinstance(entry.node.value, int | float)
            and not isinstance(entry.node.value, bool)
        ):
            # a variable is text, and this is the text as written in the file
            entry.node.value = entry.node.text


def _option_string(work: Translation, place: NamePath) -> None:
    """Translate `full_shard auto_wrap offload`, a list of such words, or `true`."""
    entry = work.find(place)
    if entry is None or isinstance(entry.node, MappingNode):
        return
    value = plain_value(entry.node)
    if value is None and place == ("fsdp",):
        return
    work.take(place)
    items = entry.node.items if isinstance(entry.node, ListNode) else []
    words = value.split() if isinstance(value, str) else [str(plain_value(item)) for item in items]
    if value is True:
        work.add_notice(
            entry.where,
            "fsdp",
            f"`{dotted(place)}: true` is not needed: sharding is on unless `fsdp.sharding_strategy` "
            "is NO_SHARD",
        )
    elif not words:
        hint = "without sharding (plain DDP) write `fsdp: {sharding_strategy: NO_SHARD}`"
        work.add_problem(
            entry.where,
            "fsdp",
            f"`{dotted(place)}` takes keys, such as `sharding_strategy: FULL_SHARD`",
            hint,
        )
    for word in words:
        _option_word(work, entry, place, word)


def _option_word(work: Translation, entry: MappingEntry, place: NamePath, word: str) -> None:
    name = word.upper()
    if name in STRATEGIES:
        work.put(
            ("fsdp", "sharding_strategy"),
            MappingEntry(entry.where, text_node(name, entry.node.where)),
            dotted(place),
        )
        work.add_notice(
            entry.where,
            "fsdp.sharding_strategy",
            f"`{word}` in `{dotted(place)}` is now `fsdp.sharding_strategy: {name}`",
        )
    elif name == "OFFLOAD":
        offload = ScalarNode(value=True, text="true", plain=True, where=entry.node.where)
        work.put(("fsdp", "offload_params"), MappingEntry(entry.where, offload), dotted(place))
        work.add_notice(
            entry.where,
            "fsdp.offload_params",
            f"`offload` in `{dotted(place)}` is now `fsdp.offload_params: true`",
        )
    elif name == "AUTO_WRAP":
        work.add_notice(
            entry.where,
            "fsdp.auto_wrap_policy",
            f"`auto_wrap` in `{dotted(place)}` is not needed: decoder layers are wrapped by default",
        )
    else:
        known = ", ".join([*(name.lower() for name in STRATEGIES), "auto_wrap", "offload"])
        work.add_problem(
            entry.where,
            "fsdp",
            f"`{shown(word)}` is not an option of `{dotted(place)}`",
            f"options are {known}",
        )


def _config_section(work: Translation, place: NamePath) -> None:
    """Move the keys of Accelerate's and transformers' `fsdp_config` to `fsdp:`, where `_prefixes` removes
    their prefix."""
    entry = work.find(place)
    if entry is None:
        return
    if not isinstance(entry.node, MappingNode):
        work.take(place)
        work.add_problem(
            entry.where,
            dotted(place),
            f"`{dotted(place)}` is read as keys, not as a file",
            "copy its keys into `fsdp:`",
        )
        return
    work.take(place)
    for name, inner in entry.node.entries.items():
        work.put(("fsdp", name), inner, f"{dotted(place)}.{name}")
        if not name.startswith("fsdp_"):
            work.add_notice(
                inner.where, f"fsdp.{name}", f"`{dotted(place)}.{shown(name)}` is now `fsdp.{shown(name)}`"
            )


def _prefixes(work: Translation) -> None:
    section = work.find(("fsdp",))
    if section is None or not isinstance(section.node, MappingNode):
        return
    for name in [name for name in section.node.entries if name.startswith("fsdp_")]:
        entry = work.take(("fsdp", name))
        assert entry is not None
        short = name.removeprefix("fsdp_")
        if short.startswith("backward_prefetch"):
            # Accelerate numbers its choices; in a recipe a number is units ahead.
            entry.node = changed(
                entry.node, lambda value: PREFETCH_NUMBERS.get(value, value) if type(value) is int else value
            )
        work.put(("fsdp", short), entry, f"fsdp.{name}")
        work.add_notice(entry.where, f"fsdp.{short}", f"`fsdp.{shown(name)}` is now `fsdp.{shown(short)}`")


def _values(work: Translation) -> None:
    """Translate old values of keys that kept their names."""
    work.change_with_notice(("fsdp", "sharding_strategy"), _strategy)
    for name in UPPERCASED:
        work.change_with_notice(("fsdp", name), _upper)
    state = work.find(("fsdp", "state_dict_type"))
    if state is not None and plain_value(state.node) == "LOCAL_STATE_DICT":
        work.take(("fsdp", "state_dict_type"))
        message = (
            "`LOCAL_STATE_DICT` is removed: it held each rank's flat buffer, which no other tool can read"
        )
        work.add_problem(
            state.where,
            "fsdp.state_dict_type",
            message,
            "write `state_dict_type: SHARDED_STATE_DICT`, saved by every rank too",
        )
    smallest = work.find(("fsdp", "min_num_params"))
    if smallest is not None and plain_value(smallest.node) == 0:
        work.take(("fsdp", "min_num_params"))
        work.add_notice(smallest.where, "fsdp.min_num_params", "`fsdp.min_num_params: 0` is now `auto`")
    reshard = work.find(("fsdp", "reshard_after_forward"))
    if reshard is not None and isinstance(plain_value(reshard.node), str):
        work.take(("fsdp", "reshard_after_forward"))
        reshard.node = changed(
            reshard.node, lambda value: "SHARD_GRAD_OP" if value == "NO_RESHARD" else _strategy(value)
        )
        work.put(("fsdp", "sharding_strategy"), reshard, "fsdp.reshard_after_forward")
        message = (
            "the strategy in `fsdp.reshard_after_forward` is now `fsdp.sharding_strategy: "
            f"{node_text(reshard.node)}`"
        )
        work.add_notice(reshard.where, "fsdp.sharding_strategy", message)


def _share_of_steps(work: Translation) -> None:
    """Refuse a `warmup_ratio` of 1 or more, which `warmup_steps` would read as a number of steps."""
    entry = work.find(("training", "warmup_ratio"))
    value = plain_value(entry.node) if entry is not None else None
    if entry is not None and isinstance(value, int | float) and not 0 <= value < 1:
        work.take(("training", "warmup_ratio"))
        message = (
            f"`training.warmup_ratio` is `{node_text(entry.node)}`; a share of all steps is a number "
            "from 0, below 1"
        )
        work.problems.append(Problem("wrong-value", message, at(entry.where, "training.warmup_ratio")))


def _drop(work: Translation, row: Dropped) -> None:
    entry = work.take(row.path)
    if entry is None:
        return
    key, value = dotted(row.path), plain_value(entry.node)
    if row.fine is None or (value == row.fine and type(value) is type(row.fine)) or value is None:
        work.add_notice(entry.where, key, f"`{key}` is removed: {row.reason}")
    else:
        work.add_problem(
            entry.where,
            key,
            f"`{key}: {node_text(entry.node)}` has no equivalent: {row.reason}",
            "remove the line",
        )
