"""What becomes of the value of a key of another trainer in a recipe.

Each conversion is a function of a value, which states how unit or sense differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fsdp_tune.core.units import printable
from fsdp_tune.core.values import is_list, is_mapping
from fsdp_tune.recipe.outcome import Ask, Drop, Write, nested, written

Converted = Write | Ask | Drop
Convert = Callable[[Any], Converted]
"""From a value in the other tool."""
Row = tuple[str, str | None] | tuple[str, str | None, Convert | Drop]
"""Fields of a `Synonym` from the key on."""


def write(key: str, value: object) -> Write:
    return Write(nested(key, value))


def changed(key: str, change: Callable[[Any], object]) -> Convert:
    """Return a converter that writes the changed value."""
    return lambda value: write(key, change(value))


def ask(words: str) -> Convert:
    """Return a converter for a value in another unit that needs a number which is not here: `words` have the
    formula."""
    return lambda value: Ask(words.format(value=printable(str(value))))


THE_SAME = Drop("without the key it is the same")


def cases(key: str, cases: Mapping[str, object], other: str | Drop) -> Convert:
    """Return a converter for values by name: a value here, keys of a recipe, or an outcome. `other`: the
    words for the rest."""

    def convert(value: object) -> Converted:
        name = printable(str(value)).lower()
        if name not in cases:
            return other if isinstance(other, Drop) else Ask(other.format(value=name))
        found = cases[name]
        return found if isinstance(found, Write | Drop) else write(key, found)

    return convert


def switch(key: str, on: object, off: object = THE_SAME) -> Convert:
    return cases(
        key,
        {"true": on, "false": off, "1": on, "0": off, "yes": on, "no": off},
        "`{value}` is neither true nor false",
    )


def listed(value: object) -> list[Any]:
    """Return a list from one, or from names with commas between them."""
    return list(value) if is_list(value) else [part.strip() for part in str(value).split(",")]


def first_adapter(value: object) -> Converted:
    """Take the first of a list of adapters: a run continues one. An option without a value is true, and names
    none."""
    names = [value] if isinstance(value, bool) else listed(value)
    if not names:
        return Drop("it names no adapter")
    return (
        write("lora.adapter", names[0])
        if isinstance(names[0], str)
        else Ask("write the directory of the adapter")
    )


def held_out(value: object) -> Converted:
    """Convert a size of a held-out part: below 1 a share of the rows, else a number of rows; 0 is none."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value == 0:
            return Drop("without the key nothing is evaluated")
        return write("data.eval", {"fraction": value} if value < 1 else {"rows": int(value)})
    return Ask(f"write `{HELD_OUT}`")


def per_epoch(key: str) -> Convert:
    """Convert a number of events in an epoch: here, below 1, the interval is a share of all steps."""
    strategy = key.replace("_steps", "_strategy")
    # axolotl skips 0 as if the key were absent: no evaluations, but a checkpoint after each epoch
    # (`_configure_save_and_eval_strategy`).
    none = (
        write(strategy, "no")
        if key == "training.eval_steps"
        else Drop("0 is as without the key there: it saves after each epoch")
    )

    def convert(value: object) -> Converted:
        if value == 0 and not isinstance(value, bool):
            return none
        if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
            return Ask(f"write `{written(key, 0.5)}` for two in all: below 1 it is a share of all steps")
        if value <= 1:
            return write(strategy, "epoch")
        share = round(1 / value, 4)
        return Ask(
            f"write `{written(key, share)}` for one epoch; with more, {share} / epochs: below 1 it "
            "is a share of all steps"
        )

    return convert


def sources(value: object) -> list[Any]:
    """Return sources from entries of other tools: their paths, with names of configurations and splits."""
    kept = ("path", "name", "split", "data_files")
    entries = [each if is_mapping(each) else {"path": str(each)} for each in listed(value)]
    return [{key: entry[key] for key in kept if key in entry} or {"path": "NAME"} for entry in entries]


def source(name: str) -> Convert:
    """Return a converter to a key of the entries of `data.train`."""
    return lambda value: write("data.train", ({} if name == "path" else {"path": "NAME"}) | {name: value})


def column(name: str) -> Convert:
    return lambda value: write("data.train", {"path": "NAME", "rename_columns": {str(value): name}})


TRAIN = "data: {train: [{path: NAME}]}"
HELD_OUT = "data: {eval: {fraction: 0.05}}"
MICRO_BATCH = "training.per_device_train_batch_size"
SMALL_SCALES = "quantization: {load: nf4, scales: bf16}"
NF4 = "quantization: {load: nf4}"
LINEAR = "lora: {target_modules: all-linear}"
TO_NF4 = Write({"quantization": {"load": "nf4"}})
TO_SMALL_SCALES = Write({"quantization": {"load": "nf4", "scales": "bf16"}})
NO_8_BIT = "{value} is not supported: 4 bits are `quantization: {{load: nf4}}`"
DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16", "true"), "bf16"),
    **dict.fromkeys(("float16", "fp16"), "fp16"),
    **dict.fromkeys(("float32", "fp32", "false", "no"), "no"),
}
_ATTENTION = {
    **dict.fromkeys(("fa2", "flash_attention_2", "flash_attn", "true"), "flash_attention_2"),
    **dict.fromkeys(("disabled", "eager"), "eager"),
    **dict.fromkeys(("auto", "false"), THE_SAME),
    "fa3": "flash_attention_3",
    "sdpa": "sdpa",
}
_KERNEL = "write the kernel as `model: {{attn_implementation: …}}`: auto, sdpa, flash_attention_2, eager"
NOT_PISSA = Drop("adapters that change the base (PiSSA, OLoRA, CorDA) are not supported")
QLORA = Write({"lora": {"r": 16}, "quantization": {"load": "nf4"}})
NO_ADAPTER = (
    "`{value}` is not one of lora and qlora, which are `lora: {{r: 16}}` and `quantization: {{load: nf4}}`"
)
NO_DTYPE = "`{value}` is not one of no, bf16, fp16 and fp8"
MIXES = {
    "concat": THE_SAME,
    "interleave_under": {"stopping_strategy": "first_exhausted"},
    "interleave_over": {"stopping_strategy": "all_exhausted"},
}
NO_MIX = "write `data: {{mixture: {{stopping_strategy: all_exhausted}}}}`, and a `weight` for each source"
STAGES = {
    "0": "NO_SHARD",
    "2": "SHARD_GRAD_OP",
    "3": "FULL_SHARD",
    "full": "FULL_SHARD",
    "hybrid": "HYBRID_SHARD",
    "ddp": "NO_SHARD",
}
NO_STAGE = "it is one of FULL_SHARD (ZeRO 3), SHARD_GRAD_OP (ZeRO 2), HYBRID_SHARD and NO_SHARD (DDP)"
attention = cases("model.attn_implementation", _ATTENTION, _KERNEL)


def roles(value: object) -> Converted:
    names = listed(value)
    if names == ["assistant"] or names == ["gpt"]:
        return write("data.loss_on", "assistant")
    return Ask(
        "write `data: {loss_on: all}` for all roles; single ones other than the assistant by a "
        "`train` in their messages"
    )


def targets(value: object) -> Converted:
    if not isinstance(value, str) and not is_list(value):
        return Ask(f"write `{LINEAR}`")
    if isinstance(value, str) and any(character in value for character in r"\[](|*^$+?"):
        return write("lora.target_modules", value)  # a regular expression for full names, in PEFT too
    names = listed(value)
    return write("lora.target_modules", "all-linear" if names in (["all"], ["all-linear"]) else names)


def tracker(name: str) -> Convert:
    return lambda value: write(f"launch.env.WANDB_{name.upper()}", str(value))


STRATEGIES_ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "FULL_SHARD": (
        "zero3",
        "zerostage3",
        "stage3",
        "deepspeedzero3",
        "fsdp",
        "fsdp1",
        "fsdp2",
        "full",
        "sharded",
    ),
    "SHARD_GRAD_OP": (
        "zero2",
        "zerostage2",
        "stage2",
        "deepspeedzero2",
        "zero1",
        "zerostage1",
        "stage1",
        "deepspeedzero1",
    ),
    "HYBRID_SHARD": ("hybrid", "hsdp", "hybridzero3", "hybridfsdp"),
    "HYBRID_SHARD_ZERO2": ("hybridzero2", "hsdpzero2"),
    "NO_SHARD": (
        "ddp",
        "dp",
        "dataparallel",
        "distributeddataparallel",
        "multigpu",
        "zero0",
        "stage0",
        "none",
        "replicated",
    ),
}
"""What other tools call a sharding strategy, for hints: in lower case, letters and digits alone."""

_FORMATS = {
    **dict.fromkeys(("completion", "pretrain"), "text"),
    "chat_template": "messages",
    "sharegpt": "sharegpt",
    "alpaca": "alpaca",
    "input_output": "segments",
}


def formats(value: object) -> Converted:
    if (name := str(value)) in _FORMATS:  # a variant, `alpaca:chat` or `alpaca.chat`, has other prompts
        settings = nested("data.train", {"path": "NAME", "format": _FORMATS[name]})
        return Write(settings, "or leave it out: the columns decide")
    return Ask(
        "leave it out, since the columns decide, and rename the columns with `rename_columns: {OLD: NEW}`"
    )


def as_builder(value: object) -> Converted:
    return Ask(
        f"write `data: {{train: [{{path: {printable(str(value))}, data_files: FILE}}]}}`, or the "
        "file itself as `path`"
    )
