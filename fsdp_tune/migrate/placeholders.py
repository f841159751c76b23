"""What a recipe cannot do without: a model and rows, with placeholders where a file names none."""

from __future__ import annotations

from fsdp_tune.migrate.ledger import Ledger
from fsdp_tune.migrate.rules import TRAIN
from fsdp_tune.recipe.outcome import Weight

MODEL_PLACEHOLDER, DATA_PLACEHOLDER = "MODEL", "NAME"


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
