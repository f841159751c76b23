"""Write what a tool does with rows that are longer than its limit, by the format of the rows and by packing.

A recipe cuts rows before it packs them: `split` keeps every token, as packing that joins texts and cuts the
result does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_tune.migrate.general import by_name
from fsdp_tune.migrate.ledger import Ledger
from fsdp_tune.migrate.rules import TRAIN, FileKey, Outcome, is_on
from fsdp_tune.recipe.key_paths import KeyPath
from fsdp_tune.recipe.outcome import Fate, Write
from fsdp_tune.recipe.read.tool_detection import AUTOMODEL, AXOLOTL

_OVERLONG: KeyPath = ("data", "overlong")
_DROP, _CUT, _SPLIT = "drop", "truncate", "split"
LongRows = Mapping[bool | str, str]
"""`data.overlong` by False without packing, or the strategy of packing."""
CUT_BY_TRL: LongRows = {False: _CUT, "bfd": _CUT, "wrapped": _SPLIT}
"""What TRL's SFTTrainer does."""
CUT: LongRows = {False: _CUT, "bfd": _CUT, "wrapped": _CUT}
DROPPED: LongRows = {False: _DROP, "bfd": _DROP, "wrapped": _DROP}
SPLIT: LongRows = {False: _SPLIT, "bfd": _SPLIT, "wrapped": _SPLIT}


def settle_long_rows(ledger: Ledger, behaviour: LongRows, defaults: dict[str, Any]) -> None:
    """Add `data.overlong` to the defaults of a tool, unless its file has it. `behaviour`:
    `Tool.long_rows`."""
    if ledger.is_answered(_OVERLONG) or ledger.settings.get(_OVERLONG) is not None:
        return
    is_asked = any(row.fate is Fate.QUESTION and _OVERLONG in row.targets for row in ledger.rows)
    if ledger.tool == AUTOMODEL and ledger.value("dataset") is not None and not is_asked:
        ledger.decide(
            _OVERLONG,
            "NeMo Automodel cuts rows only with `truncation`; here longer ones are cut: `truncate`, "
            "`drop` or `error`",
        )
    if not behaviour:
        return
    is_packed = _value(ledger, defaults, "packing") is True
    if ledger.tool == AXOLOTL and _is_stream_of_texts(ledger):
        defaults["data.overlong"] = _CUT
    else:
        defaults["data.overlong"] = behaviour[
            str(_value(ledger, defaults, "packing_strategy") or "bfd") if is_packed else False
        ]


def _value(ledger: Ledger, defaults: dict[str, object], name: str) -> object:
    found = ledger.get("data", name)
    return defaults.get(f"data.{name}") if found is None else found


def _is_stream_of_texts(ledger: Ledger) -> bool:
    """Return whether the rows are those of axolotl's `pretraining_dataset`: the tokenizer cuts each text."""
    return ledger.value("pretraining_dataset") is not None and any(
        target[:2] == TRAIN for target in ledger.settings
    )


def packing_strategy(key: FileKey) -> Outcome:
    """Convert TRL's key. `ffd` is an older name of `bfd`; `bfd_split` packs the pieces of long rows too."""
    if key.value == "ffd":
        return Write({"data.packing_strategy": "bfd"})
    if key.value == "bfd_split":
        split = {"data.overlong": _SPLIT} if is_on(key.beside("packing") or False) else {}
        return Write({"data.packing_strategy": "bfd", **split})
    return by_name(key)
