from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.run.directory import TRAINER_STATE, best_so_far


@pytest.mark.parametrize(
    ("state", "best"),
    [
        ('{"best_global_step": 10, "best_metric": 0.5}', (10, 0.5)),
        ('{"best_global_step": 10}', (10, None)),
        ('{"best_global_step": null}', None),
        ("[10]", None),
        ("{", None),
        (None, None),
    ],
)
def test_best_step_is_read_where_a_checkpoint_has_one(
    tmp_path: Path, state: str | None, best: tuple[int, float | None] | None
) -> None:
    if state is not None:
        (tmp_path / TRAINER_STATE).write_text(state)
    assert best_so_far(tmp_path) == best
