"""A run on several prepared sources as users start it: what its lines say of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.cli.in_process import settings
from tests.cli.small_runs import lines_of, training_lines, write_stream

pytestmark = [pytest.mark.e2e, pytest.mark.ranks, pytest.mark.slow]


def values(run: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in line.items() if key.startswith("source_")}
        for line in training_lines(run)
    ]


def test_lines_have_counts_and_losses_of_each_source_across_a_resume_on_one_rank(
    cli: Cli, tmp_path: Path
) -> None:
    train = [
        {"path": "rows.jsonl", "label": "sums", "weight": 0.75},
        {"path": "others.jsonl", "weight": 0.25},
    ]
    write_stream(
        tmp_path, lines_of(40), streaming=False, train=train, packing=False, shuffle_buffer_size=10000
    )
    (tmp_path / "others.jsonl").write_text("\n".join(lines_of(400)[60:]) + "\n")
    for run, steps, ranks in (("whole", 14, 2), ("part", 6, 2), ("part", 14, 1)):
        keys = (f"output_dir={run}", f"training.max_steps={steps}", f"launch.num_processes={ranks}")
        done = cli("train", "--config", "recipe.yaml", "--resume", "auto", *settings(*keys))
        assert done.returncode == 0, done.stderr
    for part, whole in zip(values(tmp_path / "part"), values(tmp_path / "whole"), strict=True):
        # Ranks round the sums of their losses; a source without a trained token in a step has null.
        assert part == {
            key: value if value is None else pytest.approx(value, rel=1e-5) for key, value in whole.items()
        }
    last, line = values(tmp_path / "whole")[-1], training_lines(tmp_path / "whole")[-1]
    assert last["source_sums_tokens"] + last["source_1_tokens"] == line["tokens"]
    # 14 steps of 8 rows, three quarters of them of a source of 40 rows.
    assert last["source_sums_passes"] == pytest.approx(14 * 8 * 0.75 / 40, rel=0.15)
    counts = ["source_sums_tokens", "source_sums_passes", "source_1_tokens", "source_1_passes"]
    assert list(last) == ["source_sums_loss", "source_1_loss", *counts]
    for found in training_lines(tmp_path / "whole"):
        of_sources = [found[key] for key in ("source_sums_loss", "source_1_loss") if found[key] is not None]
        assert min(of_sources) * (1 - 1e-6) <= found["loss"] <= max(of_sources) * (1 + 1e-6), (
            "a mean of the losses of the sources"
        )


def test_lines_of_a_stream_have_losses_of_each_source_across_a_resume(cli: Cli, tmp_path: Path) -> None:
    train = [{"path": "rows.jsonl", "label": "sums", "weight": 0.5}, {"path": "others.jsonl", "weight": 0.5}]
    write_stream(tmp_path, lines_of(400), train=train)
    (tmp_path / "others.jsonl").write_text(
        "\n".join(line.replace("plus", "and") for line in lines_of(400)) + "\n"
    )
    for run, most in (("whole", 6), ("part", 2), ("part", 6)):
        keys = (f"output_dir={run}", f"training.max_steps={most}", "training.logging_steps=2")
        done = cli("train", "--config", "recipe.yaml", "--resume", "auto", *settings(*keys))
        assert done.returncode == 0, done.stderr
    assert len({found["source_1_loss"] for found in values(tmp_path / "whole")}) == 3
    assert values(tmp_path / "part") == values(tmp_path / "whole")
