"""Which rows a step trains on, said for people: the order of the data depends on seed and epoch alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_tune.recipe.schema import Recipe
    from fsdp_tune.run_dir import RunDir

SHOWN = 8


def rows_of_step(run: RunDir, recipe: Recipe, step: int) -> str | None:
    """`12 (train.jsonl:17), 3 (train.jsonl:5) and 6 more` for a step counted from 1; None where the data cannot be read."""
    from fsdp_tune.data.order import order_of
    from fsdp_tune.data.prepare import Prepared
    from fsdp_tune.data.store import RowStore
    from fsdp_tune.errors import FsdpTuneError

    try:
        store = RowStore(Prepared.from_json(run.data_json.read_text(encoding="utf-8")).train)
    except (OSError, ValueError, FsdpTuneError):
        return None
    size = recipe.global_batch_size
    epoch, index = divmod(step - 1, max(math.ceil(len(store) / size), 1))
    order = order_of(recipe, store.lengths, epoch)
    rows = [int(row) for row in order[index * size : (index + 1) * size]]
    named = [f"{row} ({file}:{line})" for row in rows[:SHOWN] for file, line in store.origins(row)[:1]]
    return ", ".join(named) + (f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else "")
