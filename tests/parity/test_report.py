"""The page of parity: the largest deviations of each comparison, from the rows that the tests record."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import evidence
from tests.evidence import Evidence, Results
from tests.parity.report import DRAWN, PLANTED, coverage, page

ROWS = [
    {"section": "fp32", "case": "llama, 2 ranks, FULL_SHARD", "loss": "1.0e-07", "mean": "-3e-08"},
    {"section": "fp32", "case": "gpt2, 4 ranks, NO_SHARD, packed True", "loss": "2.0e-08", "mean": "+1e-08"},
    {
        "section": "bf16",
        "case": "llama, 2 ranks, FULL_SHARD, precision bf16",
        "loss": "4.0e-05",
        "loss of one device": "3.0e-05",
    },
    {"section": PLANTED, "case": "no clipping", "loss": "4.4e-03"},
    {"section": PLANTED, "case": "schedule not restored", "seen as": "words"},
]
RESULTS = Results({"torch": "2", "transformers": "5", "accelerate": "1"}, ROWS)


def test_page_has_the_largest_deviations_and_keeps_the_drawn_recipes() -> None:
    text = page(RESULTS, f"an older page\n{DRAWN}\n\nseeds\n")
    assert "| fp32 | 2 | 1.0e-07 | -3e-08 |\n" in text
    assert "## Low precision" in text.partition("| bf16 | 1 | 4.0e-05 | 3.0e-05 |\n")[0]
    assert "The comparison detects all 2 (" in text
    assert text.endswith(f"{DRAWN}\n\nseeds\n")
    assert "an older page" not in text


def test_coverage_counts_models_ranks_and_strategies_and_names_switches() -> None:
    assert coverage(ROWS[:2]).splitlines() == [
        "- Models: llama (1), gpt2 (1)",
        "- Ranks: 2 (1), 4 (1)",
        "- Strategies: FULL_SHARD (1), NO_SHARD (1)",
        "- Switches, in pairs: packed",
    ]


def test_page_is_written_with_its_data_and_differs_once_these_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evidence").mkdir()
    monkeypatch.setattr(evidence, "DOCS", tmp_path)
    one = Evidence(Path("evidence/parity.md"), page)
    one.write(RESULTS)
    assert one.read() == RESULTS
    assert one.text() == (tmp_path / one.page).read_text(encoding="utf-8")
    one.data.write_text(one.data.read_text(encoding="utf-8").replace("1.0e-07", "9.9e-07"), encoding="utf-8")
    assert one.text() != (tmp_path / one.page).read_text(encoding="utf-8")
