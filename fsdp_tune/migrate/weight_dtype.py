"""The dtype in which a tool loads a model: of the trained weights, of the frozen ones, or of neither."""

from __future__ import annotations

from fsdp_tune.migrate.adapters import has_adapter
from fsdp_tune.migrate.ledger import Ledger
from fsdp_tune.migrate.tools.table import TOOLS
from fsdp_tune.recipe.outcome import Fate, Weight
from fsdp_tune.recipe.read.tool_detection import AXOLOTL, TORCHTUNE


def settle_dtype(ledger: Ledger) -> None:
    """The dtype in which a model is loaded is, under adapters, that of the frozen weights: PEFT keeps
    adapters in fp32."""
    source = ledger.settings.get(("model", "dtype"))
    if keeps_fp32(ledger) and not has_adapter(ledger):
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


def keeps_fp32(ledger: Ledger) -> bool:
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
