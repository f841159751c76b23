"""Rules for quantisation-aware training of other tools: axolotl's `qat:` and torchtune's `quantizer:`, as `quantization.train`."""

from __future__ import annotations

from typing import Any

from fsdp_tune.migrate.general import Rules, fine_or, leave, section
from fsdp_tune.migrate.ledger import Fate, Ledger, Path

_TRAIN, _GROUP = "quantization.train", "quantization.group_size"
_KEY: Path = ("quantization", "train")
_FROM_THE_START = fine_or((None, 0), "from the first step, as here", "weights are rounded from the first step here", *_KEY)


def _weights(ledger: Ledger, path: Path, value: object) -> None:
    """axolotl converts int8-int4 to symmetric groups, as here. Its int4 has an offset for each group."""
    inputs = ledger.value(*path[:-1], "activation_dtype")
    if (value, inputs) == ("int4", "int8"):
        words = "axolotl emulates groups with an offset, and converts to symmetric ones; here both are symmetric"
        ledger.write(path, {_TRAIN: "int8-int4", _GROUP: ledger.value(*path[:-1], "group_size") or 32}, Fate.CONVERTED, words)
    elif value == "int4" and inputs is None:
        ledger.ask(path, "groups have an offset there; symmetric ones are `quantization: {train: int4}`", _KEY)
    else:
        ledger.ask(path, f"{value} with inputs in {inputs} is not supported: `quantization: {{train: int4}}` or int8-int4", _KEY)


AXOLOTL_QAT = section(
    {
        "weight_dtype": _weights,
        **dict.fromkeys(("activation_dtype", "group_size"), leave("it belongs to `weight_dtype`")),
        "quantize_embedding": fine_or((None, False), "off, as it is here", "embeddings are not quantised here", *_KEY),
        "fake_quant_after_n_steps": _FROM_THE_START,
    }
)


def _quantizer(ledger: Ledger, path: Path, value: object) -> None:
    if str(value).rpartition(".")[2] == "Int8DynActInt4WeightQATQuantizer":
        group: Any = ledger.value(*path[:-1], "groupsize") or 256
        words = "the output head stays as it is here, and is quantised there"
        ledger.write(path, {_TRAIN: "int8-int4", _GROUP: group}, Fate.CONVERTED, words)
    else:
        ledger.ask(path, f"`{value}` is not supported: `quantization: {{train: int4}}` or int8-int4", _KEY)


TORCHTUNE_QAT: Rules = {
    "quantizer": section(
        {
            "_component_": _quantizer,
            "groupsize": leave("it belongs to the class"),
            **dict.fromkeys(("precision", "scales_precision"), leave("weights are rounded in the compute dtype")),
        }
    ),
    "fake_quant_after_n_steps": _FROM_THE_START,
}
"""Of the top of a recipe."""
