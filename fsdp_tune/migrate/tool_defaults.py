"""What another tool does where its file says nothing: its defaults, and decisions in their place."""

from __future__ import annotations

from typing import Any

from fsdp_tune.migrate.adapters import adapter_switch, has_adapter
from fsdp_tune.migrate.ledger import DEFAULT_OF, Ledger
from fsdp_tune.migrate.open_keys import is_asked, leave_open
from fsdp_tune.migrate.read import python_script
from fsdp_tune.migrate.rules import TRAIN, Rules, is_on
from fsdp_tune.migrate.tool import TRAINER_DEFAULTS, Defaults
from fsdp_tune.migrate.tools import automodel, axolotl, torchtune
from fsdp_tune.migrate.tools.long_rows import settle_long_rows
from fsdp_tune.migrate.tools.run_clm import pack_texts
from fsdp_tune.migrate.tools.table import TOOLS
from fsdp_tune.migrate.weight_dtype import keeps_fp32
from fsdp_tune.recipe.key_paths import dotted
from fsdp_tune.recipe.outcome import Weight
from fsdp_tune.recipe.read.tool_detection import (
    AUTOMODEL,
    AXOLOTL,
    EXAMPLES,
    LLAMA_FACTORY,
    SOUP,
    SWIFT,
    TORCHTUNE,
    TRL,
    UNSLOTH,
)
from fsdp_tune.recipe.schema.keys import default_at, has_default


def _is_plain(ledger: Ledger) -> bool:
    """Return whether a script of unsloth passes TrainingArguments, whose defaults are those of
    transformers."""
    return ledger.tool == UNSLOTH and ledger.value(python_script.PLAIN_ARGUMENTS) is not None


def _defaults_of_tool(ledger: Ledger) -> dict[str, object]:
    found = TOOLS[ledger.tool].defaults
    if _is_plain(ledger):
        return {key: value for key, value in found.items() if not key.startswith("training.")} | {
            **TRAINER_DEFAULTS
        }
    return dict(found)


def _defaults_by_adapter(ledger: Ledger) -> Defaults:
    """Return the defaults that depend on whether an adapter is trained. Where that is not known, they are to
    be decided."""
    tool, switch = TOOLS[ledger.tool], adapter_switch(ledger)
    if switch is not None:
        return tool.adapter_defaults if switch else tool.full_defaults
    for target in (
        tuple(key.split("."))
        for key in {**tool.adapter_defaults, **tool.full_defaults}
        if not key.startswith("lora.")
    ):
        if ledger.get(*target) is None:
            ledger.decide(target, f"the default of {ledger.tool} depends on whether an adapter is trained")
    return {}


def _set_adapter_of_llama_factory(ledger: Ledger, defaults: dict[str, Any]) -> None:
    """The scale is twice the rank."""
    rank = ledger.decided(("lora", "r"), ledger.get("lora", "r"))
    if is_asked(ledger, ("lora", "r")) and not ledger.has_answer(("lora", "r")):
        if ledger.get("lora", "lora_alpha") is None:
            ledger.decide(("lora", "lora_alpha"), "it is twice the rank there, which is not known")
    else:
        defaults["lora.lora_alpha"] = 2.0 * (rank if isinstance(rank, int) and rank else defaults["lora.r"])
    if is_on(ledger.value("resize_vocab") or False):
        defaults["lora.modules_to_save"] = ["embed_tokens", "lm_head"]


def set_defaults(ledger: Ledger, rules: Rules) -> None:
    """Write the defaults of the tool into the recipe. `rules`: of the whole file."""
    is_adapted = has_adapter(ledger)
    tool, found = TOOLS[ledger.tool], _defaults_of_tool(ledger)
    found |= _defaults_by_adapter(ledger)
    if is_adapted and ledger.tool == LLAMA_FACTORY:
        _set_adapter_of_llama_factory(ledger, found)
    if is_adapted and ledger.tool == TRL and ledger.get("lora", "target_modules") is None:
        words = (
            "PEFT adapts a selection of its own for each architecture (Llama: q_proj and v_proj); here "
            "it is every linear layer"
        )
        ledger.decide(("lora", "target_modules"), words)
    is_upcast = keeps_fp32(ledger)
    if is_upcast:
        found.pop("model.dtype", None)
    if tool.loads_as_stored and not is_adapted and not is_upcast and ledger.get("model", "dtype") is None:
        words = (
            f"{ledger.tool} trains weights in the dtype of their files, mostly bf16; here they are fp32: "
            "`dtype: bf16`?"
        )
        ledger.decide(("model", "dtype"), words)
    if "quantization.load" in found and _is_unquantised(ledger):
        del found["quantization.load"]
    if ledger.tool == AUTOMODEL:
        found |= automodel.defaults(ledger)
    _decide_about_rows(ledger)
    if ledger.tool == TORCHTUNE and not torchtune.has_decay(ledger):
        del found["training.weight_decay"]
    if ledger.tool == EXAMPLES:
        pack_texts(ledger)
    settle_long_rows(ledger, tool.long_rows, found)
    if ledger.tool == AXOLOTL:
        axolotl.settle_defaults(ledger, found, is_loaded_in_half=not is_adapted and not is_upcast)
    found |= _defaults_of_other_keys(ledger)
    leave_open(ledger, rules, found, null_is_default=tool.null_is_default)
    _leave_out_defaults(ledger, found)
    for key, value in found.items():
        owner = (
            python_script.PLAIN_ARGUMENTS
            if _is_plain(ledger) and key.startswith("training.")
            else ledger.tool
        )
        ledger.set(tuple(key.split(".")), value, f"default of {owner}", Weight.DEFAULT)


def _defaults_of_other_keys(ledger: Ledger) -> dict[str, object]:
    """Return the defaults that have an effect with another key alone: of mixtures, of streams and of
    quantised weights."""
    found: dict[str, object] = {}
    is_stream = is_on(ledger.get("data", "streaming") or False)
    is_weighted = any(target[:2] == TRAIN and target[-1] == "weight" for target in ledger.settings)
    if ledger.tool == SWIFT and is_weighted and not is_stream:
        found["data.mixture.stopping_strategy"] = "first_exhausted"
    if is_stream and (buffer := TOOLS[ledger.tool].stream_buffer) is not None:
        found["data.shuffle_buffer_size"] = buffer
    is_quantised = ledger.settings.get(("quantization", "load"))
    if (
        ledger.tool in (SWIFT, LLAMA_FACTORY)
        and is_quantised is not None
        and is_quantised.weight is not Weight.DEFAULT
    ):
        found["quantization.scales"] = "bf16"
    return found


def _leave_out_defaults(ledger: Ledger, defaults: dict[str, object]) -> None:
    """Remove values that are the defaults of the tool, written out, unless a recipe has the same default.

    A file that leaves such a key out gets `defaults` and the recipe's own: so does one that has it.
    """
    for target, setting in list(ledger.settings.items()):
        is_written = (
            setting.weight is Weight.DEFAULT
            and setting.rows
            and all(ledger.is_default(row.path) for row in setting.rows)
        )
        if not is_written or any(isinstance(part, int) for part in target):
            continue
        is_alone = target[0] in ("lora", "quantization") and not any(
            other[0] == target[0] and (each.weight is not Weight.DEFAULT or not each.rows)
            for other, each in ledger.settings.items()
        )
        key = dotted(target)
        if (
            is_alone
            or (defaults[key] if key in defaults else default_at(target) if has_default(target) else None)
            != setting.value
        ):
            ledger.discard(target, f"{DEFAULT_OF} {ledger.tool}")


def _decide_about_rows(ledger: Ledger) -> None:
    _decide_about_weights(ledger)
    if ledger.tool in (SWIFT, TORCHTUNE) and ledger.get("data", "max_length") is None:
        ledger.decide(
            ("data", "max_length"),
            f"{ledger.tool} cuts at the model's own length, or not at all; the default here is 2048",
        )
    if ledger.tool == TRL and not any(target[-1] == "loss_on" for target in ledger.settings):
        words = (
            "TRL trains every token of a chat unless `assistant_only_loss` is on; here it is the "
            "assistant's turns: `loss_on: all`?"
        )
        ledger.decide(("data", "loss_on"), words)


def _decide_about_weights(ledger: Ledger) -> None:
    """Sources of a stream need weights, since their sizes are unknown; the files of other tools seldom have
    any."""
    places = sorted(
        {target[:3] for target in ledger.settings if target[:2] == TRAIN and len(target) > 3}, key=str
    )
    missing = [place for place in places if ledger.get(*place, "weight") is None]
    if not is_on(ledger.get("data", "streaming")) or len(places) < 2 or not missing:
        return
    for place in missing:
        ledger.set((*place, "weight"), 1, "to be decided", Weight.DEFAULT)
    ledger.decide(
        TRAIN,
        f"the share of each source: {ledger.tool} gives none, and a stream here needs a `weight` for each",
    )


def _is_unquantised(ledger: Ledger) -> bool:
    """Return whether a file says that the frozen weights are not quantised, which they are by default."""
    if ledger.tool == SOUP:
        return ledger.value("training", "quantization") is not None
    names = ("load_in_4bit", "load_in_8bit", "load_in_16bit")
    return any(ledger.value(python_script.MODEL, name) is not None for name in names)
