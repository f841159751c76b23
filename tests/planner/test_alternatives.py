"""Numbers of ranks that can share a row."""

from __future__ import annotations

import pytest

from fsdp_tune.planner.search.alternatives import sequence_sizes
from tests.model.recipes import recipe_of


@pytest.mark.parametrize(
    ("global_batch", "heads", "sizes"),
    [(8, 8, [1, 2, 4, 8]), (2, 8, [4, 8]), (8, 6, [1, 2]), (1, 8, [8])],
    ids=["every divisor", "a row for every group", "that divides the heads", "all ranks read one row"],
)
def test_ranks_that_share_a_row_divide_heads_and_leave_each_group_a_row(
    global_batch: int, heads: int, sizes: list[int]
) -> None:
    recipe = recipe_of(ranks=8, parallelism={"sp_size": 8}, training={"global_batch_size": global_batch})
    assert sequence_sizes(recipe, heads, 8) == sizes
