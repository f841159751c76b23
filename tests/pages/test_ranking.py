from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fsdp_tune.core.errors import ExitCode, ExitReason, Problem
from fsdp_tune.pages.ranking import RunRanking, ranking_of
from fsdp_tune.pages.report_page import differences_of, report_page
from fsdp_tune.pages.run_record import RunRecord, read_run
from fsdp_tune.run.rank_files import Verdict
from tests.pages.written import training_line, written


def record(folder: Path, evals: list[float | str], loss: float | str = 2.0, **training: Any) -> RunRecord:
    lines = [
        training_line(10, 3.0),
        training_line(20, loss),
        *({"step": 10 * at, "eval_loss": each} for at, each in enumerate(evals, 1)),
    ]
    return read_run(written(folder, lines, **training), folder.name)


def ranking(*runs: RunRecord) -> RunRanking:
    return ranking_of(runs, differences_of(runs).recipe)


def column(found: RunRanking, title: str) -> dict[str, str]:
    at = [each.title for each in found.columns].index(title)
    return {run.label: f"{run.cells[at].text}{'*' if run.cells[at].is_best else ''}" for run in found.runs}


def test_runs_are_ranked_by_their_best_evaluation_loss(tmp_path: Path) -> None:
    runs = [
        record(tmp_path / "a", [2.5, 2.6]),
        record(tmp_path / "b", [2.1, 2.9], loss=1.5),
        record(tmp_path / "c", ["nan"]),
        record(tmp_path / "d", []),
    ]
    found = ranking(*runs)
    assert [run.label for run in found.runs] == ["b", "a", "c", "d"]
    assert found.columns[found.sorted_by].title == "best evaluation loss"
    assert column(found, "best evaluation loss") == {
        "b": "2.1000*",
        "a": "2.5000",
        "c": "not finite",
        "d": "–",
    }
    assert column(found, "last evaluation loss") == {
        "b": "2.9000",
        "a": "2.6000*",
        "c": "not finite",
        "d": "–",
    }
    assert column(found, "loss") == {"b": "1.5000*", "a": "2.0000", "c": "2.0000", "d": "2.0000"}
    assert column(found, "memory (GiB)")["a"] == "0.50"


def test_without_evaluations_the_loss_ranks(tmp_path: Path) -> None:
    found = ranking(
        record(tmp_path / "a", [], loss=2.0),
        record(tmp_path / "b", [], loss="nan"),
        record(tmp_path / "c", [], loss=1.0),
    )
    assert [run.label for run in found.runs] == ["c", "a", "b"]
    assert "best evaluation loss" not in [each.title for each in found.columns]


def test_equal_values_have_no_best(tmp_path: Path) -> None:
    found = ranking(record(tmp_path / "a", [2.0]), record(tmp_path / "b", [2.0]))
    assert column(found, "best evaluation loss") == {"a": "2.0000", "b": "2.0000"}


def test_figures_that_show_the_same_and_speeds_within_noise_are_all_best(tmp_path: Path) -> None:
    speeds = {"a": (2.00001, 900.0), "b": (2.00002, 905.0), "c": (2.5, 600.0)}
    runs = [
        read_run(
            written(tmp_path / name, [training_line(10, loss, tokens_per_second_per_device=speed)]), name
        )
        for name, (loss, speed) in speeds.items()
    ]
    found = ranking(*runs)
    assert column(found, "loss") == {"a": "2.0000*", "b": "2.0000*", "c": "2.5000"}
    assert column(found, "tokens/s/device") == {"a": "900*", "b": "905*", "c": "600"}
    assert column(ranking(*runs[:2]), "tokens/s/device") == {"a": "900", "b": "905"}


def test_keys_that_follow_from_others_have_no_column(tmp_path: Path) -> None:
    runs = [record(tmp_path / str(batch), [], global_batch_size=batch, seed=batch) for batch in (8, 16)]
    found = ranking(*runs)
    assert [each.title for each in found.columns if each.full] == ["global_batch_size", "seed"]
    assert found.hidden_keys == 2  # gradient_accumulation_steps and data_seed
    derived = ranking_of(runs, {"training.data_seed": ["8", "16"]})
    assert [each.title for each in derived.columns if each.full] == ["data_seed"]


def test_states_in_which_a_run_failed_are_marked(tmp_path: Path) -> None:
    runs = [written(tmp_path / name, [training_line(10)]) for name in ("fails", "stops")]
    problem = Problem("device-out-of-memory", "rank 5 ran out of GPU memory")
    Verdict(ExitCode.OUT_OF_MEMORY, ExitReason.OUT_OF_MEMORY, 10, problem).write(runs[0].outcome_json)
    Verdict(ExitCode.PREEMPTED, ExitReason.MAX_RUNTIME, 10).write(runs[1].outcome_json)
    records = [read_run(run, run.name) for run in runs]
    cells = {run.label: run.cells[-1] for run in ranking(*records).runs}
    assert (cells["fails"].text, cells["fails"].full, cells["fails"].is_bad) == (
        "out of memory",
        "rank 5 ran out of GPU memory",
        True,
    )
    assert (cells["stops"].text, cells["stops"].is_bad) == ("max runtime", False)
    page = report_page(records, "2026-11-28 10:00")
    assert re.search(r'title="rank 5 ran out of GPU memory" class="[^"]*\bno">out of memory</td>', page)


def test_keys_that_differ_are_columns_by_their_short_names(tmp_path: Path) -> None:
    found = ranking(
        record(tmp_path / "a", [], learning_rate=1e-4, seed=1),
        record(tmp_path / "b", [], learning_rate=2e-4, seed=1),
    )
    (key,) = [each for each in found.columns if each.full]
    assert (key.title, key.full, key.is_number) == ("learning_rate", "training.learning_rate", True)
    assert column(found, "learning_rate") == {"a": "1e-4", "b": "2e-4"}


def test_many_keys_leave_those_out_that_change_nothing_of_what_is_learned(tmp_path: Path) -> None:
    run = record(tmp_path / "a", [])
    found = ranking_of(
        [run, run],
        {"launch.device": ['"cpu"', '"cuda"'], **{f"training.k{at}": ["1", None] for at in range(6)}},
    )
    assert [each.full for each in found.columns if each.full] == [f"training.k{at}" for at in range(6)]
    assert found.hidden_keys == 1
    same = ranking_of([run, run], {"optim.seed": ["1", "2"], "data.seed": ["1", "x" * 99]})
    titles = [each.title for each in same.columns if each.full]
    assert titles == ["optim.seed", "data.seed"]
    assert column(same, "data.seed")["a"] == "x" * 28 + "…"


def test_runs_that_have_not_trained_are_listed(tmp_path: Path) -> None:
    runs = [read_run(written(tmp_path / name), name) for name in ("a", "b")]
    found = ranking(*runs)
    assert ([run.label for run in found.runs], found.sorted_by) == (["a", "b"], -1)
    page = report_page(runs, "2026-11-28 10:00")
    assert "No training line yet: a, b." in page
    assert 'id="events"' not in page  # no empty sections
    assert "None yet" not in page
