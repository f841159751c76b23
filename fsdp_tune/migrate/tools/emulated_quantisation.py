"""Rules for quantisation-aware training of other tools: axolotl's `qat:` and torchtune's `quantizer:`, as
`quantization.train`."""

from __future__ import annotations

from fsdp_tune.migrate.rules import FileKey, Inside, Outcome, Rule, Rules, each, fine_or, section
from fsdp_tune.recipe.outcome import Ask, Drop, Write

_TRAIN, _GROUP = "quantization.train", "quantization.group_size"
_FROM_THE_START = fine_or(
    (None, 0), "from the first step, as here", "weights are rounded from the first step here", _TRAIN
)


def _weights(key: FileKey) -> Outcome:
    """axolotl converts int8-int4 to symmetric groups, as here. Its int4 has an offset for each group."""
    inputs = key.beside("activation_dtype")
    if (key.value, inputs) == ("int4", "int8"):
        words = (
            "axolotl emulates groups with an offset, and converts to symmetric ones; here both are symmetric"
        )
        return Write({_TRAIN: "int8-int4", _GROUP: key.beside("group_size") or 32}, words)
    if key.value == "int4" and inputs is None:
        return Ask("groups have an offset there; symmetric ones are `quantization: {train: int4}`", _TRAIN)
    return Ask(
        f"{key.value} with inputs in {inputs} is not supported: `quantization: {{train: int4}}` or int8-int4",
        _TRAIN,
    )


_AXOLOTL_KEYS: Rules = {
    "weight_dtype": _weights,
    **each(("activation_dtype", "group_size"), Drop("it belongs to `weight_dtype`")),
    "quantize_embedding": fine_or(
        (None, False), "off, as it is here", "embeddings are not quantised here", _TRAIN
    ),
    "fake_quant_after_n_steps": _FROM_THE_START,
}


def _qat(key: FileKey) -> Outcome:
    """Settle the keys of axolotl's section, which switches emulation on even if it is empty
    (`QATConfig.weight_dtype` is int8)."""
    if key.value is None:
        return Drop("no keys")
    if key.below("weight_dtype") is None:
        return Ask(
            "without `weight_dtype` axolotl emulates weights in int8: here `quantization: {train: "
            "int4}` or int8-int4",
            _TRAIN,
        )
    return Inside(_AXOLOTL_KEYS)


AXOLOTL_QAT: Rule = _qat


def _quantizer(key: FileKey) -> Outcome:
    if str(key.value).rpartition(".")[2] != "Int8DynActInt4WeightQATQuantizer":
        return Ask(f"`{key.value}` is not supported: `quantization: {{train: int4}}` or int8-int4", _TRAIN)
    words = "the output head stays as it is here, and is quantised there"
    return Write({_TRAIN: "int8-int4", _GROUP: key.beside("groupsize") or 256}, words)


TORCHTUNE_QAT: Rules = {
    "quantizer": section(
        {
            "_component_": _quantizer,
            "groupsize": Drop("it belongs to the class"),
            **each(("precision", "scales_precision"), Drop("weights are rounded in the compute dtype")),
        }
    ),
    "fake_quant_after_n_steps": _FROM_THE_START,
}
"""Of the top of a recipe."""
