"""`rehearse` as users run it, and its message for each kind of faulty run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from fsdp_tune.core import processes as children
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.jobs import inspection
from fsdp_tune.jobs.validate import rehearse
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.recipe.read.loader import load_recipe
from fsdp_tune.rehearsal import lifecycle_checks
from fsdp_tune.rehearsal.lifecycle_checks import ChildResult, Rehearsal
from fsdp_tune.run.directory import RunDir
from tests.cli.conftest import cli, document  # noqa: F401  a fixture
from tests.launch.written_runs import checkpoint, write_heartbeat

CHECKS = [
    "train",
    "kill a rank",
    "resume",
    "same curve as uninterrupted",
    "same model as uninterrupted",
    "merge-checkpoint",
    "reload with transformers",
]


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    """A complete rehearsal of the embedded recipe; several tests inspect its files."""
    from fsdp_tune.core.devices import Machine
    from fsdp_tune.recipe.resolve import resolve
    from fsdp_tune.rehearsal.scale_down import scale_down_recipe
    from fsdp_tune.rehearsal.scaled_data import ReadableInputs

    folder = tmp_path_factory.mktemp("rehearsal")
    recipe = resolve(load_recipe("gpt2_smoke").recipe, Machine(None, 0, 2, None), cwd=folder).recipe
    config = recipe.model.from_config
    assert isinstance(config, dict)
    small = scale_down_recipe(
        recipe, config, folder, ranks=2, device="cpu", steps=24, inputs=ReadableInputs()
    )
    rehearsal = Rehearsal(small.write(folder), folder, ranks=2, steps=24)
    checks = list(rehearsal.checks())
    assert [(check.name, check.passed) for check in checks] == [(name, True) for name in CHECKS], checks
    return rehearsal


@pytest.fixture
def copy_of(rehearsed: Rehearsal, tmp_path: Path) -> Rehearsal:
    shutil.copytree(rehearsed.folder, tmp_path / "copy")
    return Rehearsal(rehearsed.recipe, tmp_path / "copy", rehearsed.ranks, rehearsed.steps)


def failure(check: Callable[[], str]) -> str:
    with pytest.raises(Exception, match=r".") as caught:
        check()
    assert type(caught.value).__name__ == "_Failed"
    return str(caught.value)


def edit_line(rehearsal: Rehearsal, step: int, **changes: Any) -> None:
    path = rehearsal.killed.metrics_jsonl
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [line | changes if line.get("step") == step and "loss" in line else line for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.ranks
def test_loss_difference_fails_the_curve_check(copy_of: Rehearsal) -> None:
    edit_line(copy_of, 17, loss=2.5)
    assert failure(copy_of.compare_curves).startswith("step 17: loss is 2.5 in the resumed run, ")


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.ranks
def test_changed_merged_tensor_fails_the_logits_check(copy_of: Rehearsal) -> None:
    file = copy_of.killed.merged / "model.safetensors"
    tensors = load_file(file)
    tensors["transformer.ln_f.weight"][3] += 0.01
    save_file(tensors, file, metadata={"format": "pt"})
    assert "logits of the merged model differ from those of the checkpoint" in failure(copy_of.reload)
    assert "the merged weights differ" in failure(copy_of.compare_models)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.ranks
def test_wrong_eval_loss_fails_the_reload_check(copy_of: Rehearsal) -> None:
    path = copy_of.killed.metrics_jsonl
    path.write_text(path.read_text() + json.dumps({"step": 24, "eval_loss": 2.0}) + "\n")
    assert "instead of the run's 2.000000" in failure(copy_of.reload)


def refusal(monkeypatch: pytest.MonkeyPatch, name: str, *overrides: str) -> set[str]:
    """Return the codes of the errors with which a rehearsal ends before it starts a run."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: F401  two threads would import them at once

    # without the imports of a child
    monkeypatch.setattr(inspection, "_inspect_in_child", lambda recipe, **_: find_facts(recipe))
    monkeypatch.setattr(lifecycle_checks, "start_training", lambda *_: pytest.fail("a run is started"))
    with pytest.raises(FsdpTuneError) as caught:
        rehearse(load_recipe(name, overrides))
    assert caught.value.exit_code == 2
    return {problem.code for problem in caught.value.problems}


def test_recipe_error_is_reported_before_any_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": 3}\n')
    rows = f"data.train=[{{path: {tmp_path}/rows.jsonl}}]"
    assert refusal(monkeypatch, "gpt2_smoke", rows, "data.eval=null") == {"bad-row", "bad-rows"}


def test_unreachable_unpackaged_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(monkeypatch, "llama7b_full_shard", "model.name_or_path=nobody/nothing") == {
        "model-unreachable"
    }


@pytest.mark.cold
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("recipe", "parity"),
    [
        ("gpt2_smoke", False),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("gpt2_smoke", True), ("llama7b_full_shard", False), ("llama7b_full_shard", True))
        ),
    ],
)
def test_rehearsal_passes(recipe: str, parity: bool, cli) -> None:  # noqa: F811
    done = cli("rehearse", "--config", recipe, "--json", *(["--parity"] if parity else []))
    assert done.returncode == 0, done.stderr
    found = document(done)
    assert found["passed"]
    assert len(found["checks"]) >= 7
    assert found["folder"] is None


def test_interrupted_rehearsal_ends_its_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = children.start((sys.executable, "-c", "import time; time.sleep(60)"), os.environ)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lifecycle_checks, "start_training", lambda *_: training)
    monkeypatch.setattr(Rehearsal, "_wait_for_checkpoint", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Rehearsal(tmp_path / "recipe.yaml", tmp_path, ranks=2, steps=4).kill_a_rank()
    assert training.returncode == -signal.SIGKILL


def test_run_that_outlives_its_killed_rank_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps = (sys.executable, "-ISc", "import time; time.sleep(60)")
    training, rank = children.start(sleeps, os.environ), children.start(sleeps, os.environ)
    monkeypatch.setattr(lifecycle_checks, "start_training", lambda *_: training)
    monkeypatch.setattr(lifecycle_checks, "CHILD_SECONDS", 0.1)
    monkeypatch.setattr(Rehearsal, "_wait_for_checkpoint", lambda *_: rank.pid)
    with pytest.raises(lifecycle_checks._Failed, match=r"did not end as one that has lost a rank: .* took"):
        Rehearsal(tmp_path / "recipe.yaml", tmp_path, ranks=2, steps=4).kill_a_rank()
    assert rank.wait(20) == -signal.SIGKILL


def test_run_without_a_checkpoint_in_time_is_said_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = children.start((sys.executable, "-ISc", "import time; time.sleep(60)"), os.environ)
    monkeypatch.setattr(lifecycle_checks, "start_training", lambda *_: training)
    monkeypatch.setattr(lifecycle_checks, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(lifecycle_checks, "CHILD_SECONDS", 5.0)
    with pytest.raises(lifecycle_checks._Failed, match="no checkpoint was complete after"):
        Rehearsal(tmp_path / "recipe.yaml", tmp_path, ranks=2, steps=4).kill_a_rank()
    assert training.returncode == -signal.SIGKILL


def test_killed_rehearsal_ends_its_children(tmp_path: Path) -> None:
    """The child writes its pid and sleeps; the kernel kills it when its parent is killed."""
    child = (
        f"import os, pathlib, time; pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); "
        "time.sleep(60)"
    )
    parent = (
        "import sys; from fsdp_tune.rehearsal.lifecycle_checks import run_child; run_child((sys.executable, "
        f"'-c', {child!r}))"
    )
    rehearsal = subprocess.Popen([sys.executable, "-c", parent])
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert rehearsal.poll() is None
        time.sleep(0.02)
    started = psutil.Process(int((tmp_path / "pid").read_text()))
    rehearsal.kill()
    rehearsal.wait()
    assert psutil.wait_procs([started], timeout=20)[0]


STEPS = 4


@pytest.fixture
def small(tmp_path: Path) -> Rehearsal:
    """A rehearsal of four steps on two ranks, whose children are replaced."""
    made = Rehearsal(
        tmp_path / "recipe.yaml", tmp_path, ranks=2, steps=STEPS, allowed=("--trust-remote-code",)
    )
    for run in (made.uninterrupted, made.killed):
        run.logs.mkdir(parents=True)
    return made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


class Calls:
    """The commands that a rehearsal runs; `result` is what the next ones return."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.words: list[tuple[str, ...]] = []
        self.requests: list[object] = []
        self.result = ChildResult(0, {"steps": STEPS}, "")
        monkeypatch.setattr(lifecycle_checks, "run_fsdp_tune", self._command)
        monkeypatch.setattr(lifecycle_checks, "run_torch_script", self._script)

    def _command(self, *words: str) -> ChildResult:
        self.words.append(words)
        return self.result

    def _script(self, module: str, request: object) -> ChildResult:
        self.requests.append((module, request))
        return self.result


def write_losses(run: RunDir, steps: int, **changes: Any) -> None:
    """Write the lines of so many steps, with the `changes` in the last one."""
    values = {"loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 8}
    lines = [{"step": step + 1, "time": time.time(), **values} for step in range(steps)]
    lines[-1] |= changes
    lines.append({"step": steps, "eval_loss": 2.0})
    run.metrics_jsonl.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.parametrize(
    ("document", "stderr", "words"),
    [
        (
            {"errors": [{"message": "no such file"}, {"message": "more"}]},
            "warned\n",
            "exit code 2: no such file",
        ),
        ({}, "Traceback\n  …\nKeyError: 'a'\n\n", "exit code 2: KeyError: 'a'"),
        ({"errors": []}, "", "exit code 2: no output"),
    ],
)
def test_failed_child_is_described_by_its_first_error_or_its_last_words(
    document: dict[str, Any], stderr: str, words: str
) -> None:
    assert ChildResult(2, document, stderr).error == words


def test_training_that_ends_early_or_logs_too_little_fails(small: Rehearsal, calls: Calls) -> None:
    write_losses(small.uninterrupted, STEPS, loss=1.5)
    assert small.train().startswith("4 steps on 2 ranks, loss 2.000 → 1.500; ")
    (words,) = calls.words
    assert (words[0], words[-1]) == ("train", "--trust-remote-code")
    assert f"output_dir={small.uninterrupted.path}" in words
    write_losses(small.uninterrupted, STEPS - 1)
    assert failure(small.train) == "3 of 4 steps are in metrics.jsonl"
    calls.result = ChildResult(3, {}, "out of memory")
    assert failure(small.train) == "exit code 3: out of memory"


def test_later_checks_need_the_files_of_earlier_ones(small: Rehearsal, calls: Calls) -> None:
    write_losses(small.uninterrupted, STEPS - 1)
    (check,) = small.checks()
    assert (check.name, check.passed, check.detail) == ("train", False, "3 of 4 steps are in metrics.jsonl")
    assert len(calls.words) == 1


LOSES_A_RANK = """
import json, subprocess, sys
rank = subprocess.Popen(["sleep", "60"])
beat = json.load(open(sys.argv[1]))
open(sys.argv[2], "w").write(json.dumps(beat | {"pid": rank.pid}))
print(json.dumps({"errors": [{"message": f"rank 1 ended with {rank.wait()}"}]}))
sys.exit(5)
"""


@pytest.fixture
def trains_by(small: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces the training by a program that is given a heartbeat without a process, and the file for that
    of the last rank."""
    monkeypatch.setattr(lifecycle_checks, "LINGER_SECONDS", 0.05)
    write_heartbeat(small.killed, 1, 0)
    beat = small.killed.rank_heartbeat(1)
    draft = beat.rename(beat.with_suffix(".draft"))

    def choose(program: str) -> None:
        words = (sys.executable, "-I", "-S", "-c", program, str(draft), str(beat))
        monkeypatch.setattr(
            lifecycle_checks, "start_training", lambda *_: lifecycle_checks._start(words, subprocess.DEVNULL)
        )

    return choose


def test_last_rank_is_killed_once_a_checkpoint_is_complete(
    small: Rehearsal, trains_by: Callable[[str], None]
) -> None:
    trains_by(LOSES_A_RANK)
    checkpoint(small.killed, 2)
    assert small.kill_a_rank() == (
        "exit code 5: rank 1 ended with -9; no process left; checkpoint-2 is complete"
    )


def test_run_that_ends_before_a_rank_can_be_killed_fails(
    small: Rehearsal, trains_by: Callable[[str], None]
) -> None:
    """It had no checkpoint, or it did not report the lost rank."""
    trains_by("raise SystemExit('ended')")
    assert failure(small.kill_a_rank) == "the run ended before a rank could be killed; exit code 1: ended"
    checkpoint(small.killed, 2)
    trains_by(LOSES_A_RANK.replace("sys.exit(5)", "sys.exit(0)"))
    assert failure(small.kill_a_rank) == (
        "the run ended before a rank could be killed; exit code 0: rank 1 ended with -9"
    )


def test_damaged_checkpoint_after_a_killed_rank_fails(
    small: Rehearsal, trains_by: Callable[[str], None]
) -> None:
    trains_by(LOSES_A_RANK)
    checkpoint(small.killed, 2, damaged=True)
    assert failure(small.kill_a_rank) == "no complete checkpoint is left"


def test_process_that_outlives_its_run_fails(small: Rehearsal, trains_by: Callable[[str], None]) -> None:
    trains_by(LOSES_A_RANK)
    checkpoint(small.killed, 2)
    sleeps = (sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)", str(small.killed.path))
    left = subprocess.Popen(sleeps)
    try:
        assert failure(small.kill_a_rank) == f"processes of the run are still alive: {left.pid}"
    finally:
        left.kill()
        left.wait()
    assert small._processes_left() == []


def test_resumed_run_is_the_killed_one(small: Rehearsal, calls: Calls) -> None:
    assert small.resume() == "finished at step 4"
    (words,) = calls.words
    assert words[words.index("--resume") + 1] == "auto"
    assert f"output_dir={small.killed.path}" in words
    assert "--trust-remote-code" in words
    calls.result = ChildResult(2, {"errors": [{"message": "`model.dtype` cannot change on resume"}]}, "")
    assert failure(small.resume) == "exit code 2: `model.dtype` cannot change on resume"


@pytest.mark.parametrize(
    ("steps", "changes", "words"),
    [
        (STEPS, {}, None),
        (STEPS, {"loss": 2.5}, "step 4: loss is 2.5 in the resumed run, 2.0 in the uninterrupted one"),
        (STEPS, {"grad_norm": 1.5}, "step 4: grad_norm is 1.5 in the resumed run, 1.0 in"),
        (STEPS, {"tokens": 9}, "step 4: tokens is 9 in the resumed run, 8 in"),
        (STEPS, {"step": 5}, "step 4: step is 5 in the resumed run, 4 in"),
        (STEPS - 1, {}, "metrics.jsonl has 3 steps in the resumed run, 4 without interruption"),
    ],
)
def test_curves_are_equal_in_each_number_of_each_step(
    small: Rehearsal, steps: int, changes: dict[str, Any], words: str | None
) -> None:
    write_losses(small.uninterrupted, STEPS)
    write_losses(small.killed, steps, **changes)
    if words is None:
        assert small.compare_curves().endswith(" of all 4 steps are bitwise equal")
    else:
        assert failure(small.compare_curves).startswith(words)


def test_merged_models_are_equal_in_each_file(small: Rehearsal) -> None:
    assert failure(small.compare_models) == "the merged weights differ: []", "none was written"
    for run in (small.uninterrupted, small.killed):
        run.merged.mkdir()
        for name in ("a.safetensors", "b.safetensors"):
            (run.merged / name).write_bytes(name.encode())
        (run.merged / "config.json").write_text(str(run.path))
    assert small.compare_models() == "the merged weights are bitwise equal"
    (small.killed.merged / "b.safetensors").write_bytes(b"other")
    (small.killed.merged / "c.safetensors").write_bytes(b"more")
    assert failure(small.compare_models) == ("the merged weights differ: ['b.safetensors', 'c.safetensors']")


def test_earliest_checkpoint_is_merged_and_verified(small: Rehearsal, calls: Calls) -> None:
    """The merge at the end of the run has merged the newest."""
    for step in (2, 4):
        checkpoint(small.killed, step)
    assert small.merge() == "checkpoint-2 merged and verified"
    (words,) = calls.words
    assert words[:4] == ("merge-checkpoint", str(small.killed.path), "--step", "2")
    assert words[-2:] == ("--verify", "full")
    calls.result = ChildResult(1, {}, "the tensors differ")
    assert failure(small.merge) == "exit code 1: the tensors differ"


@pytest.mark.parametrize(
    ("found", "passes", "words"),
    [
        ({}, True, "logits on 3 rows equal those of checkpoint-4; eval loss 2.000000, in the run 2.000010"),
        ({"eval_loss": None, "run_eval_loss": None}, True, "logits on 3 rows equal those of checkpoint-4"),
        (
            {"logits_equal": False},
            False,
            "logits of the merged model differ from those of the checkpoint by 2.0e-03",
        ),
        (
            {"tolerance": 1e-6},
            False,
            "logits on 3 rows equal those of checkpoint-4, but the eval loss is 2.0",
        ),
        ({"run_eval_loss": -2.0}, False, "logits on 3 rows equal those of checkpoint-4, but the eval loss"),
    ],
)
def test_reloaded_model_has_the_logits_and_the_eval_loss_of_the_run(
    small: Rehearsal, calls: Calls, found: dict[str, Any], passes: bool, words: str
) -> None:
    document: dict[str, Any] = {
        "rows": 3,
        "logits_equal": True,
        "logits_difference": 2e-3,
        "eval_loss": 2.0,
        "run_eval_loss": 2.00001,
        "tolerance": 1e-5,
    }
    calls.result = ChildResult(0, document | found, "")
    assert (small.reload() if passes else failure(small.reload)).startswith(words)
    assert calls.requests == [("model_directories", {"run": str(small.killed.path), "step": STEPS})]


def test_children_are_offline_and_outside_of_a_slurm_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes of the step are those of the real run."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    started: list[Any] = []
    monkeypatch.setattr(
        children, "start", lambda words, environment, **_: started.append((words, environment))
    )
    lifecycle_checks.start_training(tmp_path / "recipe.yaml", tmp_path / "run", ("--trust-remote-code",))
    ((words, environment),) = started
    assert words[-4:] == ("--set", f"output_dir={tmp_path / 'run'}", "--trust-remote-code", "--json")
    assert (environment["HF_HUB_OFFLINE"], environment.get("SLURM_JOB_ID")) == ("1", None)
    assert environment["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    ("program", "result"),
    [
        ("import sys; print('{\"rows\": ' + sys.stdin.read() + '}')", ChildResult(0, {"rows": 4}, "")),
        ("print([1])", ChildResult(0, {}, "")),
        ("print('a warning')", ChildResult(0, {}, "")),
    ],
)
def test_child_answers_with_one_document(program: str, result: ChildResult) -> None:
    assert lifecycle_checks.run_child((sys.executable, "-I", "-S", "-c", program), "4") == result


def test_child_that_takes_too_long_is_ended_and_described(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []

    class Late:
        def communicate(self, _: object, timeout: float) -> None:
            raise subprocess.TimeoutExpired("fsdp-tune", timeout)

    monkeypatch.setattr(children, "end", ended.append)
    late: Any = Late()
    assert lifecycle_checks.finish(late) == ChildResult(
        lifecycle_checks.TIMED_OUT, {}, "it took more than 900 s"
    )
    assert ended == [late]


def test_process_that_is_gone_has_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: psutil.Process) -> list[str]:
        raise psutil.NoSuchProcess(1)

    monkeypatch.setattr(psutil.Process, "cmdline", gone)
    assert lifecycle_checks._command_line(psutil.Process()) == []
