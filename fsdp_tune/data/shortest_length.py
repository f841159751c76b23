"""The shortest usable `max_length` of a rehearsal: after a long prompt, the first trained token comes
late."""

from __future__ import annotations

from itertools import islice

import numpy as np

from fsdp_tune.data.inputs import Input, open_inputs, raw_rows
from fsdp_tune.data.tokenise.encoder_protocol import Encoder
from fsdp_tune.data.tokenise.rows import RawRow, Tokeniser
from fsdp_tune.recipe.schema.recipe import Recipe

FEW_ROWS = 16
"""With fewer rows than this, every row must keep a trained token."""


def length_with_targets(recipe: Recipe, encoder: Encoder, *, rows: int) -> int:
    """Return the length at which half of the first `rows` rows of each source have a trained token; all of
    them if there are few."""
    return max(_of_source(opened, encoder, rows) for opened in open_inputs(recipe, encoder))


def _of_source(opened: Input, encoder: Encoder, rows: int) -> int:
    usable = [row for row in islice(raw_rows([opened]), rows) if isinstance(row, RawRow)]
    done = Tokeniser(encoder, (opened.settings,)).chunk(usable)
    ends = np.cumsum(done.lengths)
    trained = [done.trained[end - length : end] for end, length in zip(ends, done.lengths, strict=True)]
    # the first token of a row is never a target
    needed = sorted(2 + int(np.argmax(flags[1:])) for flags in trained)
    if not needed:
        return 0
    kept = len(needed) if len(needed) < FEW_ROWS else (len(needed) + 1) // 2
    return needed[kept - 1]
