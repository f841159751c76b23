"""Start step, files and status of a run: real directories, no rank processes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdp_tune.core.errors import ExitCode, ExitReason, FsdpTuneError, Problem
from fsdp_tune.launch.command.next_commands import commands_of_finished
from fsdp_tune.launch.command.resume import (
    Start,
    check_data,
    decide_start,
    move_aside,
    refuse_beyond_end,
    refuse_when_continued,
)
from fsdp_tune.launch.command.run_files import RunFiles, write_run
from fsdp_tune.launch.run_status import run_status
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.claim import locked
from fsdp_tune.run.directory import CHECKPOINT_KIND, Checkpoint, Held, Rejected, RunDir, latest_checkpoint
from fsdp_tune.run.launch_files import LaunchRecord
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest, digest_file
from fsdp_tune.run.rank_files import Verdict
from fsdp_tune.run.records import read_object
from tests.launch.recipes import BASE, resolved
from tests.launch.written_runs import checkpoint, files_of, finish, used, write_heartbeat


@pytest.mark.parametrize("resume", ["auto", None])
def test_run_that_has_lost_its_recipe_is_told_from_a_directory_of_others(
    fresh: RunDir, resume: str | None
) -> None:
    fresh.path.mkdir(parents=True)
    for step in (3, 6):
        checkpoint(fresh, step)
    with pytest.raises(FsdpTuneError) as caught:
        decide_start(fresh, resolved(fresh.path.parent), resume, overwrite=False)
    (problem,) = caught.value.problems
    assert problem.message == f"{fresh.path} has checkpoints of a run, and its recipe.json is missing"
    assert problem.ways_out[1].startswith(f"--resume {fresh.checkpoint(6)} --set output_dir=… ")


def test_next_commands_are_known_where_the_working_directory_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDir(tmp_path / "run")
    assert "`fsdp-tune report run` draws its curves" in commands_of_finished(run, resolved(tmp_path))
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert f"`fsdp-tune report {run.path}` draws its curves" in commands_of_finished(run, resolved(tmp_path))


@pytest.fixture
def fresh(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "runs" / "one")


@pytest.fixture
def recipe(fresh: RunDir, tmp_path: Path) -> Recipe:
    """That of a run which has been written, but has no checkpoint."""
    return used(fresh, tmp_path)


def refused(
    run: RunDir, recipe: Recipe, resume: str | None = None, *, overwrite: bool = False
) -> FsdpTuneError:
    """The error of a start."""
    with pytest.raises(FsdpTuneError) as caught:
        decide_start(run, recipe, resume, overwrite=overwrite)
    return caught.value


def test_new_run_has_all_files_for_ranks(fresh: RunDir, recipe: Recipe) -> None:
    assert fresh.recipe_yaml.read_text() == BASE
    assert Recipe.model_validate_json(fresh.recipe_json.read_bytes()) == recipe
    launch = json.loads(fresh.launch_json.read_text())
    assert launch["argv"][-1] == str(fresh.path)
    assert launch["started_at"] > 0
    assert json.loads((fresh.path / "resume.json").read_text())["resume_from"] is None
    assert (fresh.model / "config.json").exists()
    assert {"accelerate.yaml", "environment.json", "data.json", "logs"} <= {
        path.name for path in fresh.path.iterdir()
    }


def test_overrides_are_kept_with_the_recipe(fresh: RunDir, tmp_path: Path) -> None:
    write_run(
        fresh, files_of(fresh, resolved(tmp_path), overrides=("training.max_steps=7", "name=a\nevil: true"))
    )
    text = fresh.recipe_yaml.read_text()
    assert "#   --set training.max_steps=7\n" in text
    assert "\nevil" not in text


def test_run_whose_model_cannot_be_saved_leaves_nothing(fresh: RunDir, tmp_path: Path) -> None:
    def fail(_: Path) -> None:
        raise OSError(28, "No space left on device")

    files = files_of(fresh, resolved(tmp_path))
    with pytest.raises(OSError, match="No space"):
        write_run(
            fresh,
            RunFiles(
                **{name: getattr(files, name) for name in files.__dataclass_fields__} | {"save_model": fail}
            ),
        )
    assert list(fresh.path.parent.iterdir()) == []


def test_two_new_runs_of_one_name_do_not_mix(fresh: RunDir, recipe: Recipe) -> None:
    with pytest.raises(FsdpTuneError, match="created by another command") as caught:
        write_run(fresh, files_of(fresh, recipe, text="other"))
    assert caught.value.exit_code == 2
    assert fresh.recipe_yaml.read_text() == BASE


def test_used_directory_is_refused_with_alternatives(fresh: RunDir, recipe: Recipe) -> None:
    error = refused(fresh, recipe)
    assert error.exit_code == 2
    assert [way.split()[0] for way in error.problems[0].ways_out] == ["--resume", "--set", "--overwrite"]


def test_run_in_a_checkpoint_of_another_run_is_refused(fresh: RunDir, tmp_path: Path) -> None:
    """Rotation would remove it together with the checkpoint."""
    fresh.path.mkdir(parents=True)
    error = refused(RunDir(checkpoint(fresh, 4) / "new"), resolved(tmp_path))
    assert error.problems[0].code == "output-in-checkpoint"


def test_foreign_directory_is_neither_filled_nor_moved(fresh: RunDir, tmp_path: Path) -> None:
    fresh.path.mkdir(parents=True)
    (fresh.path / "thesis.tex").write_text("x")
    for resume, overwrite in ((None, False), (None, True), ("auto", False)):
        assert "not empty (thesis.tex)" in str(
            refused(fresh, resolved(tmp_path), resume, overwrite=overwrite)
        )


def test_checkpoint_beyond_the_end_of_the_recipe_is_refused_with_alternatives(
    fresh: RunDir, tmp_path: Path
) -> None:
    used(fresh, tmp_path, "training.max_steps=36")
    for step in (18, 36):
        checkpoint(fresh, step)
    finish(fresh, 36)
    error = refused(fresh, resolved(tmp_path, "training.max_steps=35"), "auto")
    assert "is at step 36, and the recipe ends at step 35" in str(error)
    assert error.exit_code == 2
    assert "training.max_steps=36" in error.problems[0].ways_out[0]
    assert f"--resume {fresh.checkpoint(18)}" in error.problems[0].ways_out[1]
    assert (
        decide_start(fresh, resolved(tmp_path, "training.max_steps=37"), "auto", overwrite=False).step == 36
    )


def test_checkpoint_at_the_end_of_the_recipe_is_resumed(fresh: RunDir, tmp_path: Path) -> None:
    used(fresh, tmp_path, "training.max_steps=40")
    checkpoint(fresh, 36)
    assert (
        decide_start(fresh, resolved(tmp_path, "training.max_steps=36"), "auto", overwrite=False).step == 36
    )


def test_epochs_that_end_before_the_checkpoint_are_refused(fresh: RunDir, tmp_path: Path) -> None:
    used(fresh, tmp_path, "training.num_train_epochs=3")
    checkpoint(fresh, 30)
    start = decide_start(fresh, resolved(tmp_path, "training.num_train_epochs=2"), "auto", overwrite=False)
    refuse_beyond_end(start, 30)
    with pytest.raises(FsdpTuneError, match="is at step 30, and the recipe ends at step 20"):
        refuse_beyond_end(start, 20)


def test_empty_directory_is_used(fresh: RunDir, tmp_path: Path) -> None:
    fresh.path.mkdir(parents=True)
    assert decide_start(fresh, resolved(tmp_path), "auto", overwrite=False).is_new
    used(fresh, tmp_path)
    assert fresh.is_used


def test_live_run_is_refused(fresh: RunDir, recipe: Recipe) -> None:
    with locked(fresh):
        for resume, overwrite in ((None, False), ("auto", False), (None, True)):
            assert f"in use by pid {os.getpid()}" in str(refused(fresh, recipe, resume, overwrite=overwrite))


def test_new_run_is_not_world_accessible(fresh: RunDir, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        used(fresh, tmp_path)
    finally:
        os.umask(before)
    assert fresh.path.stat().st_mode & 0o002 == 0


def test_recipe_and_environment_are_readable_by_their_owner_alone(fresh: RunDir, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        recipe = used(fresh, tmp_path)
        checkpoint(fresh, 3)
        write_run(fresh, files_of(fresh, recipe, decide_start(fresh, recipe, "auto", overwrite=False)))
    finally:
        os.umask(before)
    private = [fresh.recipe_yaml, fresh.recipe_json, fresh.launch_json, fresh.environment_json]
    private += [fresh.history / "001" / path.name for path in private]
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in private} == {
        path.name: 0o600 for path in private
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in (fresh.path, fresh.logs, fresh.model)} == {0o755}
    assert stat.S_IMODE(fresh.data_json.stat().st_mode) == 0o644


def test_token_in_a_comment_or_an_override_is_not_copied_into_the_run(fresh: RunDir, tmp_path: Path) -> None:
    token = "hf_" + "a" * 30
    recipe = resolved(tmp_path)
    write_run(
        fresh,
        files_of(
            fresh,
            recipe,
            text=f"{BASE}# log in with {token}\n",
            overrides=(f"training.hub_model_id={token}",),
        ),
    )
    text = fresh.recipe_yaml.read_text()
    assert token not in text
    assert "# log in with ***" in text


def test_world_writable_run_is_refused(fresh: RunDir, recipe: Recipe) -> None:
    fresh.path.chmod(0o777)
    error = refused(fresh, recipe, "auto")
    assert "is writable by every user" in str(error)
    assert (error.exit_code, error.problems[0].hint) == (2, f"`chmod o-w {fresh.path}`")


def test_overwrite_keeps_the_old_run_under_another_name(fresh: RunDir, recipe: Recipe) -> None:
    assert decide_start(fresh, recipe, None, overwrite=True).is_new
    aside = move_aside(fresh)
    assert not fresh.path.exists()
    assert (aside / "recipe.json").exists()
    assert aside.name.startswith("one.old-")


def test_resume_decision_expires_when_another_command_resumes(fresh: RunDir, recipe: Recipe) -> None:
    path = checkpoint(fresh, 10)
    starts = [decide_start(fresh, recipe, resume, overwrite=False) for resume in ("auto", str(path))]
    for start in starts:
        refuse_when_continued(fresh, start)
    write_run(fresh, files_of(fresh, recipe, starts[0]))
    for start in starts:
        with pytest.raises(FsdpTuneError, match="another command continued"):
            refuse_when_continued(fresh, start)


@pytest.mark.parametrize("use", ["command", "ranks started manually"])
def test_run_finished_during_checkpoint_hashing_is_detected(
    fresh: RunDir, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    checkpoint(fresh, 10)
    latest = latest_checkpoint

    def used_meanwhile(run: RunDir, **options: Any) -> tuple[Checkpoint | None, list[Rejected]]:
        found = latest(run, **options)
        if use == "command":
            write_run(fresh, files_of(fresh, recipe, Start(is_new=False)))
        else:
            checkpoint(fresh, 20)
        return found

    monkeypatch.setattr("fsdp_tune.launch.command.resume.latest_checkpoint", used_meanwhile)
    start = decide_start(fresh, recipe, "auto", overwrite=False)
    with locked(fresh), pytest.raises(FsdpTuneError, match="another command continued") as caught:
        refuse_when_continued(fresh, start)
    assert caught.value.exit_code == 2


def test_run_started_meanwhile_is_not_moved_aside(fresh: RunDir, tmp_path: Path) -> None:
    used(fresh, tmp_path)
    with locked(fresh), pytest.raises(FsdpTuneError, match=f"in use by pid {os.getpid()}"):
        move_aside(fresh)
    assert fresh.is_used


@pytest.fixture
def manual_commands(fresh: RunDir, recipe: Recipe) -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like rank 0 of the run, started manually under a relative path."""
    command = [sys.executable, "-c", "import time; time.sleep(60)", fresh.name]
    rank = subprocess.Popen(command, cwd=fresh.path.parent, env={**os.environ, "RANK": "0"})
    while psutil.Process(rank.pid).cmdline()[-1:] != [fresh.name]:  # the child has not reached its exec yet
        time.sleep(0.01)
    write_heartbeat(fresh, 0, rank.pid)
    yield rank
    rank.kill()
    rank.wait()


def test_manually_started_ranks_lock_their_run(
    fresh: RunDir, tmp_path: Path, manual_commands: subprocess.Popen[bytes]
) -> None:
    for resume, overwrite in (("auto", False), (None, True)):
        with pytest.raises(FsdpTuneError, match=rf"ranks that still run \(pid {manual_commands.pid}\)"):
            decide_start(fresh, resolved(tmp_path), resume, overwrite=overwrite)
    manual_commands.kill()
    manual_commands.wait()
    assert not decide_start(fresh, resolved(tmp_path), "auto", overwrite=False).is_new


@pytest.mark.usefixtures("manual_commands")
def test_status_finds_live_rank_through_a_link(fresh: RunDir, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(fresh.path)
    for path in (tmp_path / "link", fresh.path):
        facts = run_status(RunDir(path))
        assert (facts.state, facts.ranks[0].state) == ("running", "live")


def test_status_trusts_heartbeats_of_other_machines(fresh: RunDir, tmp_path: Path) -> None:
    used(fresh, tmp_path, "launch.num_machines=2", "launch.main_process_ip=10.0.0.1")
    fresh.machines_json.write_text(json.dumps({"0": socket.gethostname(), "1": "elsewhere"}))
    for rank in range(2):
        write_heartbeat(fresh, rank, os.getpid())
    with locked(fresh):
        assert [rank.state for rank in run_status(fresh).ranks] == ["gone", "live elsewhere"]


def test_resume_auto_uses_newest_complete_checkpoint_and_names_damaged_ones(
    fresh: RunDir, recipe: Recipe
) -> None:
    checkpoint(fresh, 9)
    good = checkpoint(fresh, 10)
    checkpoint(fresh, 20, damaged=True)
    (fresh.path / "checkpoint-30").mkdir()
    start = decide_start(fresh, recipe, "auto", overwrite=False)
    assert start.checkpoint is not None
    assert start.checkpoint.path == good
    assert not start.is_new
    told = " ".join(notice.message for notice in start.notices)
    assert "checkpoint-20" in told
    assert "checkpoint-30" in told


def test_hashed_bytes_are_counted(run: RunDir) -> None:
    folder = checkpoint(run, 3)
    (folder / "weights").write_bytes(b"x" * (5 << 20))
    manifest = Manifest(CHECKPOINT_KIND, {"weights": digest_file(folder / "weights")}, {"step": 3})
    (folder / MANIFEST_NAME).write_text(manifest.to_json())
    counted: list[int] = []
    found, _ = latest_checkpoint(run, digests=True, progress=counted.append)
    assert found is not None
    assert (len(counted), sum(counted)) == (2, 5 << 20)


def test_resume_auto_without_checkpoint_starts_at_step_0(fresh: RunDir, recipe: Recipe) -> None:
    start = decide_start(fresh, recipe, "auto", overwrite=False)
    assert (start.checkpoint, start.is_new, start.is_finished) == (None, False, False)


def test_finished_run_has_nothing_to_do_unless_more_steps_are_requested(
    fresh: RunDir, recipe: Recipe, tmp_path: Path
) -> None:
    checkpoint(fresh, 100)
    finish(fresh, 100)
    assert decide_start(fresh, recipe, "auto", overwrite=False).is_finished
    assert decide_start(
        fresh, resolved(tmp_path, "training.logging_steps=3"), "auto", overwrite=False
    ).is_finished
    longer = decide_start(fresh, resolved(tmp_path, "training.max_steps=200"), "auto", overwrite=False)
    assert not longer.is_finished
    assert [change.key for change in longer.trajectory_changes] == ["training.max_steps"]


def test_finished_run_is_launched_to_bring_weights_of_another_machine(
    fresh: RunDir, recipe: Recipe, tmp_path: Path
) -> None:
    path, shard = checkpoint(fresh, 100), "pytorch_model_fsdp_0/__1_0.distcp"
    entry = digest_file(path / "weights")
    facts = {"step": 100, "machines": [{"host": "host-1", "directory": "/runs/one", "files": [shard]}]}
    manifest = Manifest(CHECKPOINT_KIND, {"weights": entry, shard: entry}, facts)
    (path / MANIFEST_NAME).write_text(manifest.to_json())
    finish(fresh, 100)
    held = [Held(100, manifest.identity, [shard])]
    starts = [decide_start(fresh, recipe, "auto", overwrite=False, elsewhere=each) for each in (None, held)]
    assert [(each.step, each.is_finished, each.ends_here) for each in starts] == [(100, False, True)] * 2
    write_run(fresh, files_of(fresh, recipe, starts[1]))
    # that launch was killed
    assert decide_start(fresh, recipe, "auto", overwrite=False, elsewhere=held).ends_here
    longer = decide_start(
        fresh, resolved(tmp_path, "training.max_steps=200"), "auto", overwrite=False, elsewhere=held
    )
    assert (longer.is_finished, longer.ends_here) == (False, False)
    (path / shard).parent.mkdir()
    (path / shard).write_bytes((path / "weights").read_bytes())
    finish(fresh, 100)
    start = decide_start(fresh, recipe, "auto", overwrite=False)
    assert (start.is_finished, start.ends_here) == (True, False)


def test_continued_run_killed_before_start_is_not_finished(
    fresh: RunDir, recipe: Recipe, tmp_path: Path
) -> None:
    checkpoint(fresh, 100)
    finish(fresh, 100)
    longer = resolved(tmp_path, "training.max_steps=200")
    write_run(fresh, files_of(fresh, longer, decide_start(fresh, longer, "auto", overwrite=False)))
    assert not decide_start(fresh, longer, "auto", overwrite=False).is_finished
    assert recipe.training != longer.training


def test_finished_run_with_damaged_last_checkpoint_resumes_from_previous(
    fresh: RunDir, recipe: Recipe
) -> None:
    checkpoint(fresh, 90)
    checkpoint(fresh, 100, damaged=True)
    finish(fresh, 100)
    start = decide_start(fresh, recipe, "auto", overwrite=False)
    assert (start.step, start.is_finished) == (90, False)


def test_read_only_run_is_refused_unless_finished(
    fresh: RunDir, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append(path))  # root may write everywhere
    for run, resume in ((fresh, "auto"), (RunDir(tmp_path / "new" / "one"), None)):
        with pytest.raises(FsdpTuneError, match="is not writable"):
            decide_start(run, recipe, resume, overwrite=False)
    assert asked == [fresh.path, tmp_path]
    checkpoint(fresh, 100)
    finish(fresh, 100)
    assert decide_start(fresh, recipe, "auto", overwrite=False).is_finished


@pytest.mark.usefixtures("recipe")
def test_refused_change_writes_nothing(fresh: RunDir, tmp_path: Path) -> None:
    before = sorted((path.name, path.stat().st_mtime_ns) for path in fresh.path.iterdir())
    assert "training.seed" in str(
        refused(fresh, resolved(tmp_path, "training.seed=1", "training.data_seed=42"), "auto")
    )
    assert sorted((path.name, path.stat().st_mtime_ns) for path in fresh.path.iterdir()) == before


def test_explicit_checkpoint_resumes_its_run_or_starts_a_new_one(
    fresh: RunDir, recipe: Recipe, tmp_path: Path
) -> None:
    path = checkpoint(fresh, 10)
    assert not decide_start(fresh, recipe, str(path), overwrite=False).is_new
    elsewhere = decide_start(RunDir(tmp_path / "runs" / "two"), recipe, str(path), overwrite=False)
    assert elsewhere.is_new
    assert elsewhere.checkpoint is not None
    other = RunDir(tmp_path / "runs" / "three")
    used(other, tmp_path)
    with pytest.raises(FsdpTuneError, match="belongs to another"):
        decide_start(other, recipe, str(path), overwrite=False)


def test_explicit_checkpoint_before_later_ones_is_refused_with_alternatives(
    fresh: RunDir, recipe: Recipe
) -> None:
    path = checkpoint(fresh, 10)
    checkpoint(fresh, 20)
    with pytest.raises(FsdpTuneError, match="checkpoint-20"):
        decide_start(fresh, recipe, str(path), overwrite=False)


@pytest.mark.parametrize("what", ["missing", "run"])
def test_path_that_is_not_a_checkpoint_is_refused_naming_the_newest(
    fresh: RunDir, recipe: Recipe, what: str
) -> None:
    checkpoint(fresh, 10)
    problem = refused(fresh, recipe, str(fresh.path if what == "run" else fresh.checkpoint(11))).problems[0]
    assert str(fresh.checkpoint(10)) in (problem.hint or "")
    assert ("there is no such directory" in problem.message) == (what == "missing")


def test_overwrite_and_resume_are_exclusive(fresh: RunDir, tmp_path: Path) -> None:
    assert "pass only one" in str(refused(fresh, resolved(tmp_path), "auto", overwrite=True))


def test_on_resume_the_earlier_files_go_into_history_and_the_changes_into_the_metrics(
    fresh: RunDir, tmp_path: Path
) -> None:
    used(fresh, tmp_path)
    path = checkpoint(fresh, 10)
    torn = '{"step": 11, "lo'  # by a rank that was killed
    fresh.metrics_jsonl.write_text('{"step": 10, "loss": 1.0}\n' + torn)
    recipe = resolved(tmp_path, "training.learning_rate=1e-3")
    start = decide_start(fresh, recipe, "auto", overwrite=False)
    write_run(fresh, files_of(fresh, recipe, start, text="# second\n" + BASE))
    assert (fresh.history / "001" / "recipe.yaml").read_text() == BASE
    assert fresh.recipe_yaml.read_text().startswith("# second")
    request = {
        "version": 1,
        "resume_from": str(path),
        "digests_checked": True,
        "from_run": [],
        "ends_at": None,
        "saves": True,
    }
    assert read_object(fresh.path / "resume.json") == request
    *_, last, line = fresh.metrics_jsonl.read_text().splitlines()
    event = json.loads(line)
    assert last == torn
    assert (event["event"], event["step"], event["changes"][0]["key"]) == (
        "recipe_changed",
        10,
        "training.learning_rate",
    )
    write_run(fresh, files_of(fresh, recipe, decide_start(fresh, recipe, "auto", overwrite=False)))
    assert (fresh.history / "002" / "recipe.yaml").read_text().startswith("# second")


def test_changed_data_are_refused_on_resume(fresh: RunDir, recipe: Recipe) -> None:
    start = decide_start(fresh, recipe, "auto", overwrite=False)
    check_data(start, "k1")
    with pytest.raises(FsdpTuneError, match="not those that the run started with"):
        check_data(start, "k2")


def test_run_directory_of_another_version_is_named(fresh: RunDir, recipe: Recipe) -> None:
    fresh.recipe_json.write_text('{"recipe_version": 9}')
    assert "cannot be read as a recipe of this version" in str(refused(fresh, recipe, "auto"))


@pytest.mark.usefixtures("recipe")
def test_status_of_a_finished_run(fresh: RunDir) -> None:
    path = checkpoint(fresh, 100)
    finish(fresh, 100)
    fresh.metrics_jsonl.write_text(
        '{"event": "train_started", "step": 0, "total_steps": 100}\n{"step": 100, "loss": 1.25}\n{"torn'
    )
    facts = run_status(fresh)
    assert (facts.state, facts.step, facts.total_steps, facts.loss) == ("finished", 100, 100, 1.25)
    assert facts.checkpoint == str(path)
    assert [rank.state for rank in facts.ranks] == ["finished", "finished"]
    assert facts.ways_on[0] == f"`fsdp-tune merge-checkpoint {fresh.path}` makes a model of it"
    fresh.merged.mkdir()
    assert run_status(fresh).ways_on[0] == f"`fsdp-tune chat {fresh.path}` talks to it"


def test_typed_arguments_are_kept_without_secrets(fresh: RunDir, tmp_path: Path) -> None:
    command = (
        "train",
        "my.yaml",
        "--",
        "--log_dir",
        "s3://me:password@bucket/logs",
        "--token",
        "hf_" + "a" * 30,
    )
    recipe = resolved(tmp_path)
    write_run(fresh, replace(files_of(fresh, recipe), command=command))
    recorded = LaunchRecord.read(fresh.launch_json)
    assert recorded is not None
    assert recorded.command == [
        "train",
        "my.yaml",
        "--",
        "--log_dir",
        "s3://***@bucket/logs",
        "--token",
        "***",
    ]
    assert recorded.cwd == str(Path.cwd())
    assert "password" not in fresh.launch_json.read_text()


@pytest.mark.usefixtures("recipe")
def test_status_of_a_run_that_was_never_started(fresh: RunDir) -> None:
    facts = run_status(fresh)
    assert (facts.state, facts.checkpoint, facts.step) == ("not started", None, None)


@pytest.mark.usefixtures("recipe")
@pytest.mark.parametrize("trace", ["metrics", "checkpoint", "incomplete checkpoint"])
def test_run_with_traces_of_training_is_not_reported_as_never_started(fresh: RunDir, trace: str) -> None:
    """A copy, or a mirror, may lack the heartbeats and outcomes of the ranks. With logs/, the run was
    prepared to be continued."""
    if trace == "metrics":
        fresh.metrics_jsonl.write_text('{"step": 3, "loss": 2.0, "time": 1.0}\n')
    else:
        checkpoint(fresh, 3)
    if trace == "incomplete checkpoint":
        next((fresh.path / "checkpoint-3").glob("manifest.json")).unlink()
    fresh.logs.mkdir(exist_ok=True)
    assert run_status(fresh).state == "not started"
    shutil.rmtree(fresh.logs)
    facts = run_status(fresh)
    assert facts.state == "outcome unknown"
    assert facts.has_ended
    assert any("--resume auto" in way for way in facts.ways_on)


@pytest.mark.usefixtures("recipe")
def test_status_reports_how_killed_ranks_ended(fresh: RunDir) -> None:
    killed = Problem("rank-killed", "rank 1 was killed by SIGKILL")
    Verdict(ExitCode.LOST_RANK, ExitReason.LOST_RANK, 7, killed).write(fresh.outcome_json)
    assert ["starts again at step 0" in way for way in run_status(fresh).ways_on] == [True]
    checkpoint(fresh, 6)
    facts = run_status(fresh)
    assert (facts.state, facts.problem) == ("lost_rank", "rank 1 was killed by SIGKILL")
    assert ["--resume auto` continues from checkpoint-6" in way for way in facts.ways_on] == [True, False]
    fresh.merged.mkdir()  # of an earlier, shorter end: only `--overwrite` replaces it
    assert f"merge-checkpoint {fresh.path} --overwrite" in run_status(fresh).ways_on[1]
    renamed = RunDir(fresh.path.rename(fresh.path.with_name("a b")))
    assert f"merge-checkpoint '{renamed.path}' --overwrite" in run_status(renamed).ways_on[1]


@pytest.mark.usefixtures("recipe")
def test_status_ignores_reused_pid(fresh: RunDir) -> None:
    write_heartbeat(fresh, 0, os.getpid())
    facts = run_status(fresh)
    assert (facts.state, facts.ranks[0].state) == ("died without an outcome", "gone")


@pytest.mark.usefixtures("manual_commands")
def test_status_estimates_time_left_and_compares_memory_with_the_plan(fresh: RunDir) -> None:
    lines: list[dict[str, object]] = [
        {"step": 5, "loss": 9.0, "time": 0.0},
        {"event": "train_started", "step": 10, "total_steps": 100, "time": 1000.0},
        {
            "step": 20,
            "loss": 2.0,
            "time": 1020.0,
            "step_seconds": 1.0,
            "tokens_per_second_per_device": 50.0,
            "peak_reserved_gib": 8.0,
        },
        {"step": 25, "eval_loss": 1.0, "time": 1025.0},
        {
            "step": 40,
            "loss": "nan",
            "time": 1060.0,
            "step_seconds": 1.0,
            "tokens_per_second_per_device": 40.0,
            "peak_reserved_gib": 9.0,
        },
    ]
    fresh.metrics_jsonl.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    fresh.plan_json.write_text(json.dumps({"peak_reserved_gib": 10.0}))
    facts = run_status(fresh)
    # of 60 steps of a second, the last line is old
    assert (facts.state, facts.seconds_left) == (
        "running",
        59.0,
    )
    assert (facts.loss, facts.recent_losses) == (None, [9.0, 2.0, None])
    assert (facts.tokens_per_second_per_device, facts.peak_reserved_gib, facts.planned_reserved_gib) == (
        40.0,
        9.0,
        10.0,
    )
