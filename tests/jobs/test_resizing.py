"""Runs on fewer machines, and the directories of machines that have their own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fsdp_tune.core.devices import Machine
from fsdp_tune.core.errors import FsdpTuneError, Notice
from fsdp_tune.core.host import host
from fsdp_tune.data.preparation import Prepared, prepare
from fsdp_tune.data.row_order import Attempt
from fsdp_tune.jobs import resizing as jobs
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import TrainOptions
from fsdp_tune.jobs.resizing import OwnRun, Resizing
from fsdp_tune.launch.command.accelerate import launch_plan
from fsdp_tune.launch.command.resume import Start, read_resolved
from fsdp_tune.launch.command.run_files import write_run
from fsdp_tune.recipe.read.loader import LoadedRecipe, load_recipe
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.claim import locked
from fsdp_tune.run.directory import CHECKPOINT_KIND, Checkpoint, Held, RunDir
from fsdp_tune.run.launch_files import LaunchRecord, ResumeRequest
from fsdp_tune.run.manifest import Manifest
from fsdp_tune.run.records import Environment
from tests.data.support import ByteEncoder, write_jsonl
from tests.launch.recipes import resolved
from tests.launch.written_runs import checkpoint, files_of, finish

TWO_MACHINES = """
model: {name_or_path: gpt2}
data: {train: [{path: rows.jsonl}]}
evaluation: {sets: [{path: rows.jsonl}], when: between_steps}
training: {global_batch_size: 16, per_device_train_batch_size: 1, max_steps: 4}
precision: {mixed_precision: bf16}
launch: {device: cuda, num_machines: 2, num_processes: 8, min_machines: 1, max_restarts: 1, main_process_ip: 127.0.0.1}
"""  # noqa: E501
SHARDS = {"parameters": 15.0, "optimizer state": 30.0}
"""GiB of a rank when two machines share a copy."""


@pytest.mark.parametrize(("ignore_plan", "when"), [(False, "at_end"), (True, "between_steps")])
def test_run_on_fewer_machines_without_room_between_steps_scores_after_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignore_plan: bool, when: str
) -> None:
    """Shards of twice the size take the memory in which two machines scored. A larger number of machines
    scores between steps again."""
    (tmp_path / "recipe.yaml").write_text(TWO_MACHINES)
    loaded = load_recipe(tmp_path / "recipe.yaml")
    written: list[Recipe] = []
    said: list[Notice] = []

    def resolved(sized: Any, *_: Any, **__: Any) -> Any:
        return resolve(sized.recipe, Machine("cuda", 4, 8, "H100"), cwd=tmp_path, assume="cuda")

    def planned(recipe: Recipe) -> Any:
        components = {name: gib * 2 / recipe.launch.num_machines for name, gib in SHARDS.items()}
        plan = SimpleNamespace(
            components=components, usable_gib=79.0, device_gib=80.9, peak_reserved_gib=80.0, fits="tight"
        )
        return SimpleNamespace(recipe=recipe, reasons={}), plan, []

    monkeypatch.setattr(jobs, "resolve_recipe", resolved)
    monkeypatch.setattr(jobs, "plan_here", planned)

    def write(_run: RunDir, recipe: Recipe, *_: object) -> None:
        written.append(recipe)

    monkeypatch.setattr(jobs, "write_resized", write)
    monkeypatch.setattr(jobs, "keep_prediction", print)
    observer: Any = Observer()
    monkeypatch.setattr(observer, "notices", said.extend)
    model: Any = SimpleNamespace(parameters=10 * 10**9)
    options = TrainOptions(ignore_plan=ignore_plan)
    sizes = Resizing.of(
        loaded, resolved(loaded).recipe, RunDir(tmp_path / "run"), 0, options, observer, model
    )
    assert sizes is not None
    sizes.resize([0])
    sizes.resize([0, 1])
    assert [each.evaluation.when for each in written] == [when, "between_steps"]
    assert [each.code for each in said] == (["evaluation-at-end"] if when == "at_end" else [])


def own_resolved(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> tuple[LoadedRecipe, Recipe]:
    """Return a recipe as its file has it and as it is resolved on machines with H100s, where resolving
    continues to be."""

    def resolve_here(sized: Any, *_: Any, **__: Any) -> Any:
        return resolve(sized.recipe, Machine("cuda", 4, 8, "H100"), cwd=folder, assume="cuda")

    (folder / "recipe.yaml").write_text(text)
    loaded = load_recipe(folder / "recipe.yaml")
    monkeypatch.setattr(jobs, "resolve_recipe", resolve_here)
    return loaded, resolve_here(loaded).recipe


FOUR_MACHINES = """
model: {name_or_path: gpt2}
data: {train: [{path: rows.jsonl}]}
training: {global_batch_size: 8, per_device_train_batch_size: 1, max_steps: 4}
launch: {device: cuda, num_machines: 4, num_processes: 4, max_restarts: 1, main_process_ip: 127.0.0.1%s}
"""


def test_run_continues_on_numbers_of_machines_that_divide_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, recipe = own_resolved(monkeypatch, tmp_path, FOUR_MACHINES % ", min_machines: 1")
    options, observer = TrainOptions(), Observer()
    sizes = Resizing.of(loaded, recipe, RunDir(tmp_path / "run"), 0, options, observer)
    assert sizes is not None
    assert [machines for machines in range(6) if sizes.allows(machines)] == [1, 2, 4]
    loaded, recipe = own_resolved(monkeypatch, tmp_path, FOUR_MACHINES % "")
    assert Resizing.of(loaded, recipe, RunDir(tmp_path / "run"), 0, options, observer) is None


def test_launch_on_fewer_machines_numbers_ranks_again_and_keeps_the_logs_of_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, recipe = own_resolved(monkeypatch, tmp_path, FOUR_MACHINES % ", min_machines: 1")
    sizes = Resizing(loaded, recipe, RunDir(tmp_path / "run"), 2, TrainOptions(), Observer())
    plan = sizes.plan([0, 2])
    assert (plan.world_size, plan.ranks, plan.machine_rank) == (2, range(1, 2), 2)
    assert plan.argv[plan.argv.index("--machine_rank") + 1] == "1"
    assert plan.screen_log.name == "train-02.log"


def test_resized_run_starts_where_the_first_machine_has_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, recipe = own_resolved(monkeypatch, tmp_path, FOUR_MACHINES % ", min_machines: 1")
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    sizes = Resizing(loaded, recipe, run, 0, TrainOptions(), Observer())
    steps = [sizes._start_step()]
    for resume_from in (None, str(run.checkpoint(12)), "/elsewhere/best"):
        ResumeRequest(resume_from).write(run.resume_json)
        steps.append(sizes._start_step())
    assert steps == [0, 0, 12, 0]


OWN_DIRECTORIES = """
model: {from_config: {model_type: llama, hidden_size: 64}, tokenizer: "builtin:words"}
data: {max_length: 64, num_proc: 1}
training: {max_steps: 100}
launch: {device: cpu, num_machines: 2, num_processes: 2, main_process_ip: 127.0.0.1, shared_directory: false}
"""
ROWS = [{"text": f"{number} and {number}"} for number in range(9)]


class TwoMachines:
    """The second of two machines with a run directory each, and what it receives of the first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.stack = ExitStack()
        write_jsonl(folder / "rows.jsonl", ROWS)

    def recipe(self, name: str) -> Recipe:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        own = (
            f"output_dir={folder / 'run'}",
            f"data.cache_dir={folder / 'cache'}",
            f"data.train=[{{path: {self._folder / 'rows.jsonl'}}}]",
        )
        return resolved(self._folder, *own, text=OWN_DIRECTORIES)

    def first(self, step: int | None = None) -> RunDir:
        """Return the directory that the first machine writes for a start at a step."""
        recipe = self.recipe("first")
        run = RunDir(Path(recipe.output_dir))
        manifest = Manifest(CHECKPOINT_KIND, {})
        found = None if step is None else Checkpoint(run.checkpoint(step), step, manifest)
        files = replace(
            files_of(run, recipe, Start(found, is_new=not run.is_used), text="name: of the first\n"),
            data=replace(prepare(recipe, ByteEncoder()), attempts=(Attempt(0, 2),)),
            environment=Environment(host={"name": "node-0"}, base="weights of the base"),
        )
        write_run(run, files)
        run.plan_json.write_text('{"planned": "there"}')
        return run

    def second(self, **options: Any) -> OwnRun:
        recipe = self.recipe("second")
        plan = launch_plan(recipe, RunDir(Path(recipe.output_dir)), machine_rank=1)
        started = TrainOptions(command=("train", "r.yaml"), **options)
        return OwnRun(cast(Any, None), recipe, plan, (), started, Observer(), self.stack)


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoMachines]:
    monkeypatch.setattr(jobs, "load_encoder", lambda _: ByteEncoder())
    made = TwoMachines(tmp_path)
    with made.stack:
        yield made


def is_locked(run: RunDir) -> bool:
    try:
        with locked(run):
            return False
    except FsdpTuneError as error:
        return error.problems[0].code == "run-in-use"


def test_machine_writes_its_own_directory_from_the_files_of_the_first(machines: TwoMachines) -> None:
    first, own, counted = machines.first(step=8), machines.second(), list[int]()
    run = own.plan.run
    own.prepare(counted.append)
    assert sum(counted) == len(ROWS), "the first machine sees the progress"
    assert not run.path.exists()
    assert own.install(first) is None
    assert is_locked(run)
    recipe, data = read_resolved(run), Prepared.read(run.data_json)
    assert (recipe.output_dir, recipe.data.cache_dir) == (own.recipe.output_dir, own.recipe.data.cache_dir)
    assert recipe.on_all_machines == read_resolved(first).on_all_machines
    assert data is not None
    assert data.train.startswith(str(recipe.data.cache_dir))
    assert data.attempts == (Attempt(0, 2),), "as the first has decided"
    record = LaunchRecord.read(run.launch_json)
    assert record is not None
    assert (record.facts["machine_rank"], record.command) == (1, ["train", "r.yaml"])
    assert record.facts["first_machine"] == {"host": "node-0", "directory": str(first.path)}
    assert ResumeRequest.read(run.resume_json) == ResumeRequest(str(run.checkpoint(8)))
    environment = Environment.read(run.environment_json)
    assert environment is not None
    assert (environment.base, environment.host["name"]) == ("weights of the base", host()["name"])
    for path in ("recipe.yaml", "plan.json", "model/config.json"):
        assert (run.path / path).read_bytes() == (first.path / path).read_bytes()
    assert not run.history.exists()
    assert own.install(machines.first()) is None, "of the next launch"
    assert ResumeRequest.read(run.resume_json) == ResumeRequest()
    assert ResumeRequest.read(run.history / "001" / "resume.json") == ResumeRequest(str(run.checkpoint(8)))


@pytest.mark.parametrize("missing", ["data.json", "launch.json"])
def test_first_machine_that_has_sent_too_little_is_reported(machines: TwoMachines, missing: str) -> None:
    first, own = machines.first(), machines.second()
    (first.path / missing).unlink()
    own.prepare(lambda _: None)
    problem = own.install(first)
    assert problem is not None
    assert problem.code == "run-files-missing"
    assert not own.plan.run.path.exists()


def test_machine_with_other_rows_takes_no_part_and_writes_nothing(
    machines: TwoMachines, tmp_path: Path
) -> None:
    first = machines.first()
    write_jsonl(tmp_path / "rows.jsonl", [*ROWS, {"text": "one more"}])
    own = machines.second()
    own.prepare(lambda _: None)
    problem = own.install(first)
    assert problem is not None
    assert problem.code == "machines-differ"
    assert problem.message.startswith("machine 1 (")
    assert not own.plan.run.path.exists()


def test_directory_that_both_machines_see_is_refused_with_the_key_for_it(machines: TwoMachines) -> None:
    """It did not exist when this machine has checked it; the first has written it since."""
    first, own = machines.first(), machines.second()
    own.prepare(lambda _: None)
    shutil.copytree(first.path, own.plan.run.path)
    with locked(own.plan.run):
        problem = own.install(first)
    assert problem is not None
    assert problem.code == "run-in-use"
    assert (problem.hint, problem.ways_out) == (
        "if all machines see this directory, set `launch.shared_directory: true`",
        (),
    )


def test_resumed_directory_is_locked_while_the_data_are_prepared(machines: TwoMachines) -> None:
    own = machines.second()
    own.prepare(lambda _: None)
    own.install(machines.first())
    machines.stack.close()
    again = machines.second(resume="auto")
    assert not is_locked(again.plan.run)
    again.prepare(lambda _: None)
    assert is_locked(again.plan.run)


def test_old_run_that_is_in_use_is_not_moved_aside(machines: TwoMachines) -> None:
    own = machines.second()
    own.prepare(lambda _: None)
    own.install(machines.first())
    machines.stack.close()
    again = machines.second(overwrite=True)
    again.prepare(lambda _: None)
    assert not is_locked(again.plan.run), "the first machine has not accepted the start yet"
    with locked(again.plan.run):
        problem = again.install(machines.first())
    assert problem is not None
    assert problem.code == "run-in-use"
    assert again.install(machines.first()) is None
    assert len(list(again.plan.run.path.parent.glob("run.old-*/recipe.json"))) == 1
    assert not again.plan.run.history.exists(), "it is a new run"


def test_files_of_other_machines_are_asked_for_only_where_a_run_continues(machines: TwoMachines) -> None:
    own = machines.second()
    own.prepare(lambda _: None)
    own.install(machines.first())
    machines.stack.close()
    run, asked = own.plan.run, list[str]()
    held = [Held(8, "identity", ["weights"])]
    others: Any = SimpleNamespace(held_elsewhere=lambda: asked.append("all") or held)
    shared = own.recipe.model_copy(
        update={"launch": own.recipe.launch.model_copy(update={"shared_directory": True})}
    )
    resumes = TrainOptions(resume="auto")
    assert jobs.held_elsewhere(None, run, own.recipe, resumes) == ()
    assert jobs.held_elsewhere(others, run, shared, resumes) == ()
    assert jobs.held_elsewhere(others, run, own.recipe, TrainOptions()) == ()
    assert asked == []
    checkpoint(run, 8)
    assert jobs.held_elsewhere(others, run, own.recipe, resumes) == held
    finish(run, 8)
    assert jobs.held_elsewhere(others, run, own.recipe, resumes) is None, "they need not be there"
    assert asked == ["all"]


def test_stream_of_another_version_on_a_machine_is_reported() -> None:
    """The ETag of an object has no time that `touch` could set, also if it is a number."""
    one, other = (
        cast(Prepared, SimpleNamespace(stamps={"s3://bucket/rows.jsonl": stamp}, key="a"))
        for stamp in ("600:1700000000000000000", "600:1700000000000000001")
    )
    problem = jobs.other_data("here", one, other)
    assert problem is not None
    assert problem.message == (
        "s3://bucket/rows.jsonl is another version on here than on machine 0 (its ETag differs)"
    )


def test_run_of_own_directories_is_not_only_written(machines: TwoMachines) -> None:
    recipe = machines.recipe("first")
    with pytest.raises(FsdpTuneError, match=r"`launch\.shared_directory: false`") as caught:
        jobs.refuse_manual_start(recipe)
    assert "without `--no-start`" in str(caught.value.problems[0].hint)
    alone = recipe.model_copy(
        update={"launch": recipe.launch.model_copy(update={"num_machines": 1, "num_processes": 1})}
    )
    jobs.refuse_manual_start(alone)
