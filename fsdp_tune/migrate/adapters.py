"""Whether a file trains LoRA adapters, and the keys that it has for them."""

from __future__ import annotations

from fsdp_tune.migrate.ledger import Ledger
from fsdp_tune.migrate.rules import is_on
from fsdp_tune.migrate.tools.table import TOOLS
from fsdp_tune.recipe.outcome import Fate, Weight
from fsdp_tune.recipe.read.tool_detection import AXOLOTL


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


def settle_adapter(ledger: Ledger) -> None:
    """Write `lora:` if the file trains an adapter; else leave out its keys, or ask for them if that is not
    known."""
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
