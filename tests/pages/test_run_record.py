from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_tune.core.atomic import stage_path
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.pages.run_record import RunReader, differing_values, labels_of, read_run
from fsdp_tune.run import metrics_file
from fsdp_tune.run.find_runs import existing_run
from tests.pages.written import training_line, written


def test_run_being_written_is_read_to_its_last_complete_line(tmp_path: Path) -> None:
    run = written(
        tmp_path / "one", [training_line(10), training_line(20, "nan"), {"step": 20, "eval_loss": 2.0}]
    )
    with open(run.metrics_jsonl, "a") as file:
        file.write('{"step": 30, "loss": NaN, "grad_norm": 1.0}\n{"step": 40, "lo')
    summary = read_run(run, "one").summary()
    assert summary["loss"] == {"first": 0.5, "last": None, "best": 0.5, "best_step": 10, "not_finite": 2}
    assert summary["eval_loss"]["last"] == 2.0
    assert (summary["state"], summary["steps"], summary["mfu"]) == ("not started", 30, None)


def test_run_without_metrics_has_no_figures(tmp_path: Path) -> None:
    run = written(tmp_path / "one")
    run.metrics_jsonl.unlink()
    summary = read_run(run, "one").summary()
    assert (summary["loss"], summary["steps"], summary["tokens"], summary["events"]) == (None, 0, None, {})


def test_files_that_are_gone_leave_their_part_out(tmp_path: Path) -> None:
    run = written(tmp_path / "one", [training_line(10)])
    for path in (run.environment_json, run.data_json, run.launch_json, run.recipe_yaml):
        path.unlink()
    record = read_run(run, "one")
    assert (record.environment, record.data, record.command, record.written) == ({}, None, "", "")


def test_damaged_file_is_an_error_with_its_name(tmp_path: Path) -> None:
    run = written(tmp_path / "one")
    run.data_json.write_text("{")
    with pytest.raises(FsdpTuneError, match=r"damaged") as caught:
        read_run(run, "one")
    assert (caught.value.problems[0].code, caught.value.problems[0].where.source) == (
        "run-unreadable",
        str(run.data_json),
    )


def test_secrets_are_masked(tmp_path: Path) -> None:
    run = written(tmp_path / "one", text="model: https://me:hunter22@host/model\n")
    record = read_run(run, "one")
    assert "hunter22" not in record.written
    assert record.written.startswith("model: https://***@host")
    assert "aaaa" not in record.command


def test_environment_is_text_without_what_is_unknown(tmp_path: Path) -> None:
    record = read_run(written(tmp_path / "one"), "one")
    assert record.environment == {"torch": "2.13", "devices": "none", "name": "node", "memory": "64.0 GiB"}


def test_seconds_are_of_all_steps(tmp_path: Path) -> None:
    record = read_run(
        written(tmp_path / "one", [training_line(10), training_line(30, step_seconds=1.0)]), "one"
    )
    assert (
        record.metrics.seconds_in_steps()
        == metrics_file.seconds_in_steps(record.lines.losses)
        == 10 * 0.5 + 20 * 1.0
    )


def test_labels_have_as_many_parents_as_they_need() -> None:
    assert labels_of([Path("/a/one"), Path("/a/two")]) == ["one", "two"]
    assert labels_of([Path("/a/x/run"), Path("/b/x/run")]) == ["a", "b"]


def test_labels_are_shortened_to_the_words_that_differ() -> None:
    def labels(*names: str) -> list[str]:
        return labels_of([Path("/runs", name) for name in names])

    assert labels("llama-lr1e-5-long", "llama-lr2e-5-long") == ["lr1e-5", "lr2e-5"]
    assert labels("run-1", "run-2") == ["run-1", "run-2"]  # a number alone names nothing
    assert labels("base", "base-lora") == ["base", "base-lora"]
    assert labels("seed_1_a", "seed_2_a", "seed_2_b") == ["1_a", "2_a", "2_b"]
    assert labels("x-0.1", "x-0.2") == ["x-0.1", "x-0.2"]
    assert labels("only-one") == ["only-one"]
    assert labels("a-b", "a-b") == ["a-b", "a-b"]


def test_differences_have_every_run_and_none_for_a_missing_key() -> None:
    maps = [{"a": "1", "b": "2", "name": "x"}, {"a": "1", "b": "3", "c": "4", "name": "y"}]
    assert differing_values(maps, ignored=("name",)) == {"b": ["2", "3"], "c": [None, "4"]}
    assert differing_values(maps[:1]) == {}


def test_directory_that_is_no_run_names_the_runs_in_it(tmp_path: Path) -> None:
    run = written(tmp_path / "runs" / "one")
    shutil.copytree(run.path, stage_path(tmp_path / "runs" / "two"))  # a run that is being created
    for path, hint in (
        (tmp_path / "runs", "the runs in it are one"),
        (run.path / "checkpoint-3", "give the run that contains it"),
    ):
        with pytest.raises(FsdpTuneError) as caught:
            existing_run(path)
        assert caught.value.problems[0].code == "not-a-run"
        assert hint in (caught.value.problems[0].hint or "")


def test_page_that_follows_a_run_parses_each_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = written(tmp_path / "one", [training_line(step) for step in range(1, 101)])
    reader, parsed = RunReader(run, "one"), list[bytes]()
    assert len(reader.read().metrics.losses) == 100
    parse = metrics_file.from_json
    monkeypatch.setattr(metrics_file, "from_json", lambda line: parsed.append(line) or parse(line))
    # which reads the end of the file
    monkeypatch.setattr("fsdp_tune.pages.run_record.run_status", lambda _: None)
    with open(run.metrics_jsonl, "a") as file:
        file.write(f"{json.dumps(training_line(101))}\n")
    assert reader.read().metrics.losses.newest_step == 101
    assert len(parsed) == 1
    run.metrics_jsonl.write_text(f"{json.dumps(training_line(5))}\n")
    assert reader.read().metrics.curve("loss").steps.tolist() == [5]


@pytest.mark.slow
def test_hundred_thousand_lines_fit_into_150_mb(tmp_path: Path) -> None:
    run = written(
        tmp_path / "one", (training_line(step, mfu=0.4, peak_reserved_gib=30.0) for step in range(1, 100_001))
    )
    words = [sys.executable, "-c", REPORT_AND_MEMORY, str(run.path), str(tmp_path / "page.html")]
    megabytes, seconds = map(
        float, subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    )
    assert megabytes < 150
    assert seconds < 5  # of CPU; 2.3 s alone on a machine


REPORT_AND_MEMORY = """
import sys, time, fsdp_tune
fsdp_tune.report([sys.argv[1]], output=sys.argv[2])
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))  # ru_maxrss includes the parent's
print(int(peak) / 1000, time.process_time())
"""  # noqa: E501
