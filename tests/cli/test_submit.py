"""`submit slurm` with Slurm's commands replaced by scripts: one job of a run in the queue, whatever happens
in between."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fsdp_tune.cli.app import app
from fsdp_tune.cluster.submit.slurm import BLOCK_END
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.jobs import following
from fsdp_tune.jobs import submit as jobs
from fsdp_tune.jobs import sweep as sweeps
from fsdp_tune.jobs.submit_options import SlurmOptions, SubmitOptions
from fsdp_tune.launch.command.resume import Start
from tests.cli.conftest import refuse_undeclared

SBATCH = r"""
for script; do :; done
echo "$@" >>"$FAKE/calls"
sleep "${FAKE_SECONDS:-0}"
if [ -e "$FAKE/refuses" ]; then echo "sbatch: error: invalid partition specified: gpuu" >&2; exit 1; fi
id=$(wc -l <"$FAKE/calls")
echo "$id|PENDING|Priority|$(sed -n 's/^#SBATCH --comment=//p' "$script")" >>"$FAKE/queue"
if [ -e "$FAKE/dies" ]; then exit 137; fi
echo "$id"
"""
SQUEUE = r"""
if [ -e "$FAKE/down" ]; then echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1; fi
[ ! -e "$FAKE/queue" ] || cat "$FAKE/queue"
"""


class FakeSlurm:
    def __init__(self, folder: Path) -> None:
        self.folder, self.queue = folder, folder / "queue"
        (folder / "bin").mkdir()
        self.program("sbatch", SBATCH)
        self.program("squeue", SQUEUE)

    def program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}", encoding="utf-8")
        path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    folder = tmp_path / "fake"
    folder.mkdir()
    fake = FakeSlurm(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(folder))
    monkeypatch.setattr(jobs, "checkpoint_bytes", lambda recipe: 10**6)
    monkeypatch.setattr(following, "POLL_SECONDS", 0.02)
    return fake


def submit(*words: str, recipe: str = "gpt2_smoke") -> Result:
    done = CliRunner().invoke(app, ["submit", "slurm", recipe, *words])
    if "--json" in words:
        refuse_undeclared(("submit", "slurm"), done.stdout)
    return done


def error(done: Result) -> dict[str, Any]:
    (found,) = json.loads(done.stdout)["errors"]
    return found


def test_second_submit_is_refused_until_the_job_is_gone(slurm: FakeSlurm, tmp_path: Path) -> None:
    first = submit("--json", "--partition", "gpu")
    assert first.exit_code == 0, first.output
    answer = json.loads(first.stdout)
    assert (answer["job"], answer["state"], answer["lead_seconds"]) == ("1", "submitted", 120)
    assert "--partition=gpu" in Path(answer["script"]).read_text(encoding="utf-8")
    second = submit("--json")
    assert second.exit_code == 2
    assert error(second)["code"] == "job-queued"
    assert "job 1 is PENDING (Priority)" in error(second)["message"]
    assert len(slurm.calls) == 1
    again = submit("--json", "--again")
    assert json.loads(again.stdout)["job"] == "2"
    assert "--dependency=afterany:1" in slurm.calls[-1]
    slurm.queue.unlink()
    assert json.loads(submit("--json").stdout)["job"] == "3"


def test_racing_commands_submit_one_job(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "0.3")
    answers: list[str] = []

    def run() -> None:
        try:
            answers.append(
                str(jobs.submission("gpt2_smoke", (), SubmitOptions(), SlurmOptions()).submit().job)
            )
        except FsdpTuneError as refused:
            answers.append(refused.problems[0].code)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == ["1", "job-queued", "job-queued"]
    assert len(slurm.calls) == 1


def test_job_of_a_command_that_died_after_sbatch_is_found(slurm: FakeSlurm) -> None:
    (slurm.folder / "dies").touch()
    assert submit().exit_code == 1
    assert not list(slurm.folder.parent.glob("runs/*.submit/submitted.jsonl"))
    done = submit("--json")
    assert error(done)["code"] == "job-queued"
    assert len(slurm.calls) == 1


def test_errors_have_the_words_of_the_engine_and_submit_nothing(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    (slurm.folder / "refuses").touch()
    done = submit("--json", "--partition", "gpuu")
    assert done.exit_code == 1
    assert error(done)["code"] == "slurm-failed"
    assert "invalid partition specified: gpuu" in error(done)["message"]
    (slurm.folder / "down").touch()
    done = submit("--json")
    assert error(done)["code"] == "slurm-failed"
    assert "Unable to contact slurm controller" in error(done)["message"]
    assert len(slurm.calls) == 1
    monkeypatch.setenv("PATH", "/nowhere")
    assert error(submit("--json"))["code"] == "no-slurm"


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    ("words", "cores"), [((), 4), (("--cpus-per-node", "16"), 16), (("--set", "launch.device=cuda"), 4)]
)
def test_ranks_get_a_core_each(words: tuple[str, ...], cores: int) -> None:
    done = submit(
        "--print",
        "--nodes",
        "2",
        "--set",
        "launch.num_processes=8",
        "--set",
        "training.global_batch_size=256",
        *words,
    )
    assert done.exit_code == 0, done.output
    found = [line for line in done.stdout.splitlines() if line.startswith("#SBATCH --cpus-per-task")]
    assert found == [f"#SBATCH --cpus-per-task={cores}"]


def test_print_needs_no_slurm_and_writes_nothing(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    done = submit("--print", "--nodes", "2", "--set", "launch.num_processes=4", "--time", "12h")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("#!/bin/bash\n")
    for words in (
        "--nodes=2",
        "--time=0-12:00:00",
        "    train\n    --config gpt2_smoke\n",
        "--set launch.num_machines=2",
        "--resume auto",
    ):
        assert words in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fake"]


def test_own_lines_are_kept_and_a_missing_mark_is_refused(slurm: FakeSlurm, tmp_path: Path) -> None:
    script = Path(json.loads(submit("--json").stdout)["script"])
    slurm.queue.unlink()
    script.write_text(
        script.read_text(encoding="utf-8").replace(BLOCK_END, f"module load cuda\n{BLOCK_END}"),
        encoding="utf-8",
    )
    assert submit("--nodes", "2").exit_code == 0
    text = script.read_text(encoding="utf-8")
    assert f"module load cuda\n{BLOCK_END}" in text
    assert "--nodes=2" in text
    slurm.queue.unlink()
    script.write_text(text.replace(BLOCK_END, ""), encoding="utf-8")
    assert error(submit("--json"))["code"] == "submit-block"


def test_job_trains_the_recipe_as_it_was_submitted(slurm: FakeSlurm, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    text = (Path(__file__).parents[2] / "configs" / "gpt2_smoke.yaml").read_text(encoding="utf-8")
    recipe.write_text(text, encoding="utf-8")
    answer = json.loads(submit("--json", "--set", "name=other", recipe="mine.yaml").stdout)
    recipe.write_text("broken", encoding="utf-8")
    (copy,) = (tmp_path / "runs" / "other.submit" / "recipe").glob("*/mine.yaml")
    assert copy.read_text(encoding="utf-8") == text
    assert f"--config {copy}\n    --name other\n" in answer["text"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--set", "launch.device=cuda", "--set", "launch.num_processes=auto"], "submit-size"),
        (["--time", "3m"], "submit-time"),
        (["--time", "soon"], "usage"),
        (["--nodes", "3"], "indivisible"),
        (["--partition", "a\n#SBATCH --account=b"], "submit-name"),
        (["--name", "$(touch x)"], "submit-name"),
        (["--print", "--follow"], "usage"),
    ],
)
def test_what_cannot_become_a_job_is_refused_before_slurm_is_asked(
    words: list[str], code: str, slurm: FakeSlurm
) -> None:
    done = submit("--json", *words)
    assert done.exit_code == 2, done.output
    assert json.loads(done.stdout)["errors"][0]["code"] == code
    assert slurm.calls == []


def test_follow_shows_the_log_and_ends_with_the_code_of_the_run(slurm: FakeSlurm, tmp_path: Path) -> None:
    """The queue moves on each time it is read: pending, running with a log, ended."""
    answer = json.loads(submit("--json").stdout)
    log, ledger = Path(answer["log"]), Path(answer["log"]).with_name("attempts.jsonl")
    facts = '"job": "1", "start": 0, "time": 1, "step": 0'
    slurm.program(
        "squeue",
        f"""
echo >>"$FAKE/polls"
case $(wc -l <"$FAKE/polls") in
    1 | 2) echo "1|PENDING|Priority|" ;;
    3) echo "1|RUNNING|None|"; echo 'step 1/9' >>{log}; echo '{{"event": "started", {facts}, "stalled": 0}}' >>{ledger} ;;
    *)
        echo 'step 9/9' >>{log}
        echo '{{"event": "ended", {facts}, "exit_code": 3, "then": "stopped"}}' >>{ledger}
        echo "1|FAILED|NonZeroExitCode|"
        ;;
esac
""",  # noqa: E501
    )
    done = submit("--follow")
    assert done.exit_code == 3, done.output
    shown = [line for line in done.stdout.splitlines() if "the run is" not in line]
    assert shown == [
        "job 1 is in the queue already (PENDING); nothing is submitted",
        *(
            "job 1 is PENDING (Priority)",
            "step 1/9",
            "job 1 is RUNNING",
            "step 9/9",
            "job 1 is FAILED (NonZeroExitCode)",
        ),
        "job 1 ended: stopped, exit code 3",
    ]
    assert len(slurm.calls) == 1


def test_controller_that_does_not_answer_at_first_leaves_the_job_followed(slurm: FakeSlurm) -> None:
    """No answer is not the end of the job, also before its state was known."""
    submit("--json")
    slurm.program(
        "squeue",
        """
echo >>"$FAKE/polls"
case $(wc -l <"$FAKE/polls") in
    1) echo "1|PENDING|Priority|" ;;
    2 | 3) echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1 ;;
    4) echo "1|RUNNING|None|" ;;
    5) echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1 ;;
    *) echo "1|COMPLETED|None|" ;;
esac
""",
    )
    done = submit("--follow")
    assert done.stdout.splitlines()[-3:] == [
        "job 1 is RUNNING",
        "job 1 is COMPLETED",
        "job 1 ended: COMPLETED, exit code 0",
    ]
    assert done.exit_code == 0


def test_interrupted_follow_leaves_the_job_alone(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(job: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(following, "job_now", interrupt)
    done = submit("--follow")
    assert done.exit_code == 130
    assert "job 1 goes on without this command" in done.stdout
    assert slurm.queue.read_text(encoding="utf-8").startswith("1|PENDING")


def test_sweep_is_an_array_of_the_runs_that_have_not_finished(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sweep = ("--sweep", "training.learning_rate=1e-5,1e-2", "--set", "output_dir=lrs", "--json")
    done = submit(*sweep)
    assert done.exit_code == 0, done.output
    text = json.loads(done.stdout)["text"]
    assert "#SBATCH --array=0-1\n" in text
    first, second = (line.split("run=")[1] for line in text.splitlines() if "own=(" in line)
    assert first.startswith(f"{tmp_path}/lrs/learning_rate=1e-5 own=(--set training.learning_rate=1e-5 ")
    assert second.startswith(f"{tmp_path}/lrs/learning_rate=1e-2 own=(--set training.learning_rate=1e-2 ")
    assert text.count("output_dir=") == 2
    assert error(submit(*sweep))["code"] == "job-queued"
    slurm.queue.unlink()
    decided = sweeps.preview
    monkeypatch.setattr(
        sweeps,
        "preview",
        lambda loaded, options: replace(
            seen := decided(loaded, options), start=Start(is_finished="1e-5" in str(seen.plan.run.path))
        ),
    )
    text = json.loads(submit(*sweep).stdout)["text"]
    assert "#SBATCH --array=0-0\n" in text
    assert "learning_rate=1e-5" not in text
    assert error(submit("--sweep", "seed=1,2", "--follow", "--json"))["code"] == "usage"


def test_script_that_is_only_printed_has_notices_for_what_the_cluster_needs(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdp_tune.recipe.rules.trackers._is_installed", lambda _module: False)
    recipe = tmp_path / "cluster.yaml"
    recipe.write_text(
        "model: {name_or_path: /cluster/model}\ndata: {train: [{path: /cluster/rows.jsonl}]}\n"
        "training: {report_to: [wandb]}\nlaunch: {num_processes: 8}\n"
    )
    codes = {"not-found", "tracker-not-installed"}  # and `submit-memory`, of every script
    done = CliRunner().invoke(app, ["submit", "slurm", str(recipe), "--print", "--json"])
    answer = json.loads(done.stdout)
    assert (done.exit_code, answer["state"]) == (0, "printed")
    assert {each["code"] for each in answer["notices"]} == codes | {"data-not-found", "submit-memory"}
    done = CliRunner().invoke(app, ["submit", "slurm", str(recipe), "--json"])
    assert (done.exit_code, slurm.calls) == (2, [])
    assert {each["code"] for each in json.loads(done.stdout)["errors"]} == codes


def test_cores_of_a_node_follow_from_ranks_and_loaders_and_memory_is_asked_for(slurm: FakeSlurm) -> None:
    def printed(*words: str) -> dict[str, Any]:
        done = CliRunner().invoke(
            app, ["submit", "slurm", "gpt2_smoke", "--print", "--json", "--set", "launch.device=cuda", *words]
        )
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    size = ("--gpus-per-node", "8", "--set", "training.global_batch_size=256")
    answer = printed(*size)
    assert "#SBATCH --cpus-per-task=8\n" in answer["text"]
    assert "#SBATCH --mem=0" in next(
        each["hint"] for each in answer["notices"] if each["code"] == "submit-memory"
    )
    assert (
        "#SBATCH --cpus-per-task=24\n" in printed(*size, "--set", "training.dataloader_num_workers=2")["text"]
    )
    assert "#SBATCH --cpus-per-task=5\n" in printed(*size, "--cpus-per-node", "5")["text"]
