"""Complete an import: what follows from several keys, and what the other tool does where its file says
nothing."""

from __future__ import annotations

from typing import Any

from fsdp_tune.migrate.ledger import DEFAULT_OF, Ledger
from fsdp_tune.migrate.open_keys import is_asked, leave_open
from fsdp_tune.migrate.ranks_and_batch import settle_batch, settle_ranks
from fsdp_tune.migrate.read import python_script
from fsdp_tune.migrate.rules import TRAIN, Rules, is_on
from fsdp_tune.migrate.tool import TRAINER_DEFAULTS, Defaults
from fsdp_tune.migrate.tools import automodel, axolotl, torchtune
from fsdp_tune.migrate.tools.flat_options import is_mixed, pack_texts
from fsdp_tune.migrate.tools.long_rows import settle_long_rows
from fsdp_tune.migrate.tools.table import TOOLS
from fsdp_tune.recipe.key_paths import dotted
from fsdp_tune.recipe.outcome import Fate, Weight
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

MODEL_PLACEHOLDER, DATA_PLACEHOLDER = "MODEL", "NAME"


def complete(ledger: Ledger, num_gpus: int | None, rules: Rules) -> None:
    """Add what no single key decides. `num_gpus`: ranks that the file was made for, if it does not say it;
    `rules`: of the whole file."""
    _settle_adapter(ledger)
    _settle_dtype(ledger)
    settle_ranks(ledger)
    ledger.write_answers()
    _settle_evaluation(ledger)
    _settle_state_format(ledger)
    _set_defaults(ledger, rules)
    if ledger.is_answered(("data", "packing")) and not ledger.get("data", "packing"):
        ledger.discard(("data", "packing_strategy"), "nothing is packed")
    settle_batch(ledger, num_gpus)
    name_model_and_data(ledger)


# ---- Adapters


def adapter_switch(ledger: Ledger) -> bool | None:
    """Return whether the file trains LoRA adapters; None if it has keys of adapters, and not the one that
    switches them on.

    LLaMA-Factory and ms-swift train adapters unless their files say otherwise.
    """
    values = ledger.values
    answers = {target: value for target, value in ledger.answers.items() if target[0] == "lora"}
    if ("lora",) in answers or any(value is not None for value in answers.values()):
        return any(value is not None for value in answers.values())
    tool = TOOLS[ledger.tool]
    if any(row.fate is Fate.QUESTION and row.path[-1] in tool.adapter_switches for row in ledger.rows):
        return None
    given = next((values[name] for name in tool.adapter_switches if name in values), _MISSING)
    if tool.trains_adapters:
        return given in (_MISSING, "lora")
    if tool.has_adapter is not None:
        return tool.has_adapter(values)
    has_keys = any(
        target[0] == "lora" and each.value not in (False, 0, None, "none")
        for target, each in ledger.settings.items()
    )
    if not tool.adapter_switches:
        return has_keys
    if given is _MISSING:
        return None if has_keys else False
    return given in ("lora", "qlora") if ledger.tool == AXOLOTL else is_on(given)


_MISSING = object()


def has_adapter(ledger: Ledger) -> bool:
    return adapter_switch(ledger) is True


_OF_FROZEN_WEIGHTS = {("quantization",), ("quantization", "load"), ("quantization", "scales")}


def _settle_adapter(ledger: Ledger) -> None:
    switch = adapter_switch(ledger)
    if switch:
        ledger.set(
            ("lora",), {}, f"{ledger.tool} trains adapters unless its file says otherwise", Weight.DEFAULT
        )
        return
    for target in [
        target for target in ledger.settings if target[0] == "lora" or target[:2] in _OF_FROZEN_WEIGHTS
    ]:
        if switch is None:
            name = TOOLS[ledger.tool].adapter_switches[0]
            words = f"{ledger.tool} trains an adapter if `{name}` says so, which is not known here"
            ledger.withdraw(target, f"{words}: write it under `{target[0]}:` to train one, or leave it out")
        else:
            ledger.discard(target, "no effect: the file trains no adapter")


def _settle_dtype(ledger: Ledger) -> None:
    """The dtype in which a model is loaded is, under adapters, that of the frozen weights: PEFT keeps
    adapters in fp32."""
    source = ledger.settings.get(("model", "dtype"))
    if _keeps_fp32(ledger) and not has_adapter(ledger):
        ledger.discard(("model", "dtype"), _UPCAST)
    if source is None or not has_adapter(ledger) or ledger.tool == TORCHTUNE:
        return
    del ledger.settings[("model", "dtype")]
    # frozen matrices are stored in the dtype of the computation here too
    if source.weight is not Weight.GIVEN:
        return
    ledger.settings[("model", "frozen_dtype")] = source
    for row in source.rows:
        row.targets = tuple(
            ("model", "frozen_dtype") if each == ("model", "dtype") else each for each in row.targets
        )
        row.fate, row.reason = Fate.CONVERTED, "of the frozen weights; adapters are kept in fp32"


_UPCAST = "with sharding, trained weights are kept in fp32 there, as here"
_SHARDING = frozenset(
    {
        "deepspeed",
        "deepspeed_config",
        "zero_stage",
        "fsdp",
        "fsdp_config",
        "use_fsdp",
        "use_deepspeed",
        "deepspeed_config_file",
    }
)


def _keeps_fp32(ledger: Ledger) -> bool:
    """Return whether the dtype of loading is not that of the trained weights.

    Below mixed precision Accelerate upcasts those of FSDP (accelerate/utils/fsdp_utils.py), and DeepSpeed
    keeps its own copies in fp32. axolotl replaces that code under FSDP2.
    """
    is_sharded = any(
        (_SHARDING.intersection(row.path) and row.value not in (None, False, "", [], {}))
        or (row.path[-1] == "distributed_type" and row.value in ("FSDP", "DEEPSPEED"))
        for row in ledger.rows
    )
    is_patched = ledger.tool == AXOLOTL and ledger.get("fsdp", "version") == 2
    computed = ledger.get("precision", "mixed_precision") or TOOLS[ledger.tool].defaults.get(
        "precision.mixed_precision", "bf16"
    )
    return TOOLS[ledger.tool].upcasts and is_sharded and not is_patched and computed != "no"


_EVALUATIONS = ("eval_steps", "eval_strategy", "per_device_eval_batch_size", "eval_on_start", "eval_delay")


def _settle_evaluation(ledger: Ledger) -> None:
    """Leave out keys of evaluations that nothing evaluates. TRL evaluates the split `test`."""
    name = ledger.value("dataset_name")
    if (
        ledger.tool == TRL
        and name
        and not is_mixed(ledger)
        and ledger.value("eval_strategy") not in (None, "no")
    ):
        found = {"path": name, "split": "test"} | (
            {"name": config} if (config := ledger.value("dataset_config")) else {}
        )
        for key, value in found.items() if ledger.value("dataset_test_split") is None else ():
            ledger.set(("data", "eval", 0, key), value, "default of TRL", Weight.DEFAULT)
    if not any(target[:2] == ("data", "eval") for target in ledger.settings):
        for target in (*(("training", name) for name in _EVALUATIONS), ("data", "eval_packing")):
            ledger.discard(target, "there are no rows to evaluate")


def _settle_state_format(ledger: Ledger) -> None:
    """Leave out the format of the state for optimizers whose moments have few bits: those are saved in shards
    alone."""
    if ledger.get("training", "optim") in ("adamw_torch_8bit", "adamw_torch_4bit"):
        ledger.discard(
            ("fsdp", "state_dict_type"),
            "moments of 8 bits are saved in shards; `merge-checkpoint` makes one model",
        )


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


def _set_defaults(ledger: Ledger, rules: Rules) -> None:
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
    is_upcast = _keeps_fp32(ledger)
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
    if ledger.tool == SWIFT and any(
        target[:2] == TRAIN and target[-1] == "weight" for target in ledger.settings
    ):
        found["data.mixture.stopping_strategy"] = "first_exhausted"
    if (buffer := TOOLS[ledger.tool].stream_buffer) is not None and is_on(
        ledger.get("data", "streaming") or False
    ):
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


# ---- What a recipe cannot do without


def name_model_and_data(ledger: Ledger) -> None:
    """Write placeholders for a model and rows that are missing, and ask for them."""
    if ledger.get("model", "name_or_path") is None and not any(
        target[:2] == ("model", "from_config") for target in ledger.settings
    ):
        ledger.set(("model", "name_or_path"), MODEL_PLACEHOLDER, "to be written", Weight.DEFAULT)
        ledger.decide(
            ("model", "name_or_path"),
            "the file names no model that can be read here: a hub id or a directory",
        )
    if any(ledger.is_answered(target) for target in ledger.settings if target[:2] == TRAIN):
        return
    indexes = {target[2] for target in ledger.settings if target[:2] == ("data", "train")}
    missing = [
        index
        for index in sorted(indexes or {0}, key=int)
        if ledger.get("data", "train", index, "path") is None
    ]
    for index in missing:
        ledger.set(("data", "train", index, "path"), DATA_PLACEHOLDER, "to be written", Weight.DEFAULT)
    if missing:
        ledger.decide(TRAIN, "the file names no rows that can be read here: files or a hub id")
