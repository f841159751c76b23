"""`train` as users run it: the real command, real ranks over gloo, the embedded recipe made short."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from fsdp_tune.core.errors import ExitCode, ExitReason
from fsdp_tune.recipe.read.catalogue import catalogue
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir, latest_checkpoint
from fsdp_tune.run.manifest import read_manifest
from fsdp_tune.run.rank_files import Verdict
from tests.cli.conftest import Cli, document
from tests.cli.in_process import answer, errors, invoke, settings
from tests.cli.inspection import fake_model  # noqa: F401  a fixture
from tests.cuda.devices import on_devices
from tests.cuda.environment import environment_on


def smoke(steps: int = 6, output_dir: str = "run", device: str = "cpu") -> tuple[str, ...]:
    """The arguments that train the embedded recipe for a few steps, with a line after each second one."""
    keys = (f"training.max_steps={steps}", "training.warmup_steps=0", "training.logging_steps=2")
    keys += (f"output_dir={output_dir}", f"launch.device={device}")
    return ("--config", "gpt2_smoke", *settings(*keys))


SHORT = smoke()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, on a machine without GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def codes(*words: str) -> list[str]:
    """Return the codes of the errors of `train gpt2_smoke WORDS`, which is refused and has written nothing
    new."""
    before = sorted(Path.cwd().rglob("*"))
    found = [error["code"] for error in errors("train", *SHORT, *words)]
    assert sorted(Path.cwd().rglob("*")) == before
    return found


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", sorted(catalogue()))
def test_every_catalogue_recipe_has_a_dry_run_without_gpus(name: str) -> None:
    shown = answer("train", name, "--dry-run")
    assert shown["argv"][shown["argv"].index("--num_processes") + 1] == str(
        shown["recipe"]["launch"]["num_processes"]
    )
    assert list(Path.cwd().iterdir()) == []


def test_dry_run_prints_recipe_command_and_environment(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    done = invoke("train", *SHORT, "--dry-run")
    assert done.exit_code == 0
    recipe = done.stdout[: done.stdout.index("# why")]
    assert "max_steps: 6" in recipe
    assert "sync_each_batch" not in recipe, "a key at its default"
    assert "hang_timeout" not in recipe
    assert "null" not in recipe, "a key of a source at its default"
    resolved = answer("train", *SHORT, "--dry-run")["recipe"]
    assert Recipe.model_validate(yaml.safe_load(recipe)) == Recipe.model_validate(resolved)
    assert (
        f"-m accelerate.commands.launch --use_fsdp --config_file {here}/run/accelerate.yaml --num_processes 2"
        in done.stdout
    )
    assert "FSDP_VERSION=2" in done.stdout
    assert "removed: RANK" in done.stdout


@pytest.mark.usefixtures("here")
def test_full_dry_run_prints_every_key() -> None:
    shown = invoke("train", *SHORT, "--dry-run", "--full").stdout
    assert {"sync_each_batch:", "mixed_precision:", "hang_timeout:"} <= set(shown.split())
    assert "  optim: adamw_torch_fused\n" in shown
    assert "  max_grad_norm: 1.0\n" in shown
    assert "  max_steps: 6\n" in shown, "a field that the recipe sets"
    assert codes("--full") == ["usage"]


def test_dry_run_refuses_what_train_refuses(here: Path) -> None:
    (here / "run").mkdir()
    (here / "run" / "recipe.json").write_text(json.dumps(answer("train", *SHORT, "--dry-run")["recipe"]))
    assert codes("--dry-run") == ["run-directory-used"]
    shown = answer("train", *SHORT, "--resume", "auto", "--dry-run", "--set", "training.learning_rate=1e-4")
    assert shown["begins"] == {"step": 0, "checkpoint": None}
    assert [change["key"] for change in shown["changes"]] == ["training.learning_rate"]
    assert codes("--resume", "auto", "--dry-run", "--set", "data.max_length=16") == ["resume-refused"]


@pytest.mark.usefixtures("here")
def test_arguments_after_two_dashes_reach_accelerate() -> None:
    given = [*SHORT, "--dry-run", "--json", "--"]
    assert (
        "--monitor_interval"
        in json.loads(invoke("train", *given, "--monitor_interval", "0.5").stdout)["argv"]
    )
    refused = json.loads(invoke("train", *given, "--num_processes", "4").stdout)
    assert [error["code"] for error in refused["errors"]] == ["launch-argument-owned"]


@pytest.mark.usefixtures("here")
def test_five_errors_are_reported_and_nothing_is_written() -> None:
    wrong = [
        "training.max_stepz=1",
        "fsdp.sharding=FULL",
        "launch.device=tpu",
        "data.max_length=-1",
        "precision.mixed_precision=int4",
    ]
    assert len(codes(*settings(*wrong))) == 5


def test_missing_gpu_is_exit_2_with_a_hint(cli: Cli, tmp_path: Path) -> None:
    done = cli("train", *smoke(device="cuda"), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "--set launch.device=cpu" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("steps", ["10:13", "steps=0:3", "steps=5:4", "steps=a"])
def test_profile_without_steps_is_exit_2(steps: str) -> None:
    assert codes("--profile", steps) == ["profile-not-understood"]


@pytest.mark.usefixtures("here")
def test_remote_code_needs_the_command_line_option() -> None:
    remote = settings(
        "model.from_config=null", "model.name_or_path=someone/model", "model.trust_remote_code=true"
    )
    assert codes(*remote, "--dry-run") == ["remote-code-not-trusted"]
    assert invoke("train", *SHORT, *remote, "--dry-run", "--trust-remote-code").exit_code == 0
    experts = settings("kernels.experts=sonicmoe", "launch.device=cuda", "precision.mixed_precision=bf16")
    assert [error["code"] for error in errors("train", "--config", "gpt2_smoke", *experts, "--dry-run")] == [
        "remote-code-not-trusted"
    ]


@pytest.mark.usefixtures("fake_model")
def test_disk_without_room_for_one_checkpoint_is_refused_before_a_rank_starts(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = shutil.disk_usage
    monkeypatch.setattr(
        "fsdp_tune.jobs.doctor.shutil.disk_usage", lambda path: plain(path)._replace(free=4096)
    )
    done = invoke("train", *SHORT, *settings("checkpoint.probe=false", f"data.cache_dir={here / 'cache'}"))
    assert done.exit_code == ExitCode.FAILED, done.output
    for words in ("space: 4.00 KiB free in", "one checkpoint needs", "--ignore-plan"):
        assert words in done.stderr
    assert not (here / "run").exists()


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.ranks
def test_run_without_standard_streams_is_complete(tmp_path: Path) -> None:
    """As some service managers start a command. The first files and sockets would get the numbers of stdout
    and stderr."""
    command = [sys.executable, "-m", "fsdp_tune", "train", *smoke(2), "--json"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', *command], check=False, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0
    run = RunDir(tmp_path / "run")
    assert "starting ranks 0 to 1" in (run.logs / "train.log").read_text()
    assert (run.path / "merged" / "model.safetensors").is_file()
    assert "Traceback" not in "".join(path.read_text() for path in run.logs.glob("*.log"))


@pytest.mark.slow
def test_foreign_settings_are_reported_and_ignored(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "huggingface" / "accelerate"
    folder.mkdir(parents=True)
    (folder / "default_config.yaml").write_text("distributed_type: DEEPSPEED\n")
    done = cli(
        "train",
        *SHORT,
        "--no-start",
        "--resume",
        "auto",
        "--json",
        HF_HOME=str(folder.parent),
        RANK="3",
        SLURM_JOB_ID="7",
    )
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path / 'run'}: a new run from step 0\n" in done.stderr
    told = {notice["code"]: notice["message"] for notice in document(done)["notices"]}
    assert str(folder) in told["accelerate-config-ignored"]
    assert "RANK, SLURM_JOB_ID" in told["stale-environment"]
    assert json.loads((tmp_path / "run" / "launch.json").read_text())["removed"] == ["RANK", "SLURM_JOB_ID"]


@pytest.mark.ranks
@pytest.mark.slow
def test_two_machines_run_one_recipe(tmp_path: Path) -> None:
    """Two commands on this machine play two machines that share a directory."""
    machines = (
        "launch.num_machines=2",
        "launch.main_process_ip=127.0.0.1",
        "launch.num_cpu_threads_per_process=1",
    )
    arguments = [*smoke(4), *(word for key in machines for word in ("--set", key))]
    command = [sys.executable, "-m", "fsdp_tune", "train", *arguments, "--json", "--machine-rank"]
    both = [
        subprocess.Popen([*command, str(rank)], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for rank in (1, 0)
    ]
    follower, leader = (json.loads(each.communicate(timeout=300)[0]) for each in both)
    assert [each.returncode for each in both] == [0, 0]
    assert (follower["machine_rank"], follower["exit_reason"]) == (1, "finished")
    assert (leader["steps"], leader["exit_reason"], leader["merged"]) == (
        4,
        "finished",
        str(tmp_path / "run" / "merged"),
    )
    assert (tmp_path / "run" / "logs" / "launcher-01.log").exists()


@pytest.mark.e2e
@pytest.mark.ranks
@pytest.mark.parametrize("start", ["forked", pytest.param("cold", marks=pytest.mark.slow)])
@on_devices
def test_run_ends_with_a_merged_model_and_its_files(
    start: str, cli: Cli, tmp_path: Path, device: str
) -> None:
    """Cold, each process starts Python: 36 s of CPU, which continuous integration spends in
    `scripts/test-newest`."""
    short = smoke(device=device)
    done = cli(
        "train", *short, *settings("training.report_to=[tensorboard]"), "--json", "--profile", "steps=3:4"
    )
    assert done.returncode == 0, done.stderr
    phases = (
        r"(checking .*)?launching .*importing .*loading the model"
        if start == "cold"
        else ".*launching .*loading the model"
    )
    assert re.search(rf"first step [\d.]+ s after the start \({phases}", done.stderr), (
        "what takes no time is not named"
    )
    assert re.search(r"step 6/6 .*\(data \d+%, communication \d+%, optimizer \d+%\)", done.stderr)
    assert re.search(r"forward +[\d.]+ ms", done.stderr)
    assert (tmp_path / "run" / "profile" / "steps-3-4" / "rank-0001.trace.json.gz").exists()
    ended = document(done)
    run = RunDir(tmp_path / "run")
    assert {name: ended[name] for name in ("run_dir", "steps", "exit_reason", "checkpoint", "merged")} == {
        "run_dir": str(run.path),
        "steps": 6,
        "exit_reason": "finished",
        "checkpoint": str(run.checkpoint(6)),
        "merged": str(run.merged),
    }
    assert ended["loss"] > 0
    assert ended["tokens"] > 0
    expected = {
        "recipe.yaml",
        "recipe.json",
        "launch.json",
        "accelerate.yaml",
        "environment.json",
        "data.json",
        "readback.json",
        "metrics.jsonl",
    }
    assert expected | {"logs", "model", "merged", "checkpoint-6", "tensorboard"} <= {
        path.name for path in run.path.iterdir()
    }
    assert json.loads(run.launch_json.read_text())["argv"][1:3] == ["-m", "accelerate.commands.launch"]
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (run.model / name).exists()
        assert (run.merged / name).exists()
    for name in ("config.json", "generation_config.json"):
        assert json.loads((run.merged / name).read_text())["use_cache"] is True
    manifest = read_manifest(run.checkpoint(6))
    assert manifest is not None
    assert (
        manifest.facts["recipe_digest"]
        == run.recipe_digest()
        == json.loads((run.merged / "merge.json").read_text())["recipe_digest"]
    )
    logs = {
        path.name: path.stat().st_mode & 0o077
        for pattern in ("*.log", "*outcome.json")
        for path in run.logs.glob(pattern)
    }
    outcomes = ("outcome.json", "rank-0000.outcome.json", "rank-0001.outcome.json")
    assert logs == dict.fromkeys(
        ("launcher.log", "rank-0000.log", "rank-0001.log", "train.log", *outcomes), 0
    )
    logged = [line.split("  ", 1)[1] for line in (run.logs / "train.log").read_text().splitlines()]
    assert logged == done.stderr.splitlines(), (
        "the log holds what the console said, from the first line to the last"
    )
    card = {
        line[2:15].strip(): line[16:]
        for line in logged[logged.index(f"finished at step 6; the model is in {run.merged}") + 1 :]
    }
    plan = ["plan"] if device == "cuda" else []
    assert [name for name in card if name] == [
        *("time", "tokens", "loss", "rate", "eval loss", "peak memory", *plan, "size on disk", "next")
    ]
    assert all(path.stat().st_size < 100_000 for path in run.logs.glob("*.log")), (
        "nothing floods a log, the profiler neither"
    )
    again = cli("train", *short, "--resume", "never")
    assert again.returncode == 2
    assert "--resume auto" in again.stderr
    finished = cli("train", *short, "--resume", "auto", "--json")
    assert (finished.returncode, document(finished)["steps"], "nothing to do" in finished.stderr) == (
        0,
        6,
        True,
    )
    shorter = cli("train", *smoke(5, device=device), "--resume", "auto")
    assert (
        shorter.returncode,
        "is at step 6, and the recipe ends at step 5" in " ".join(shorter.stderr.split()),
    ) == (2, True), shorter.stderr
    assert json.loads(cli("status", "run", "--json").stdout)["state"] == "finished"


@pytest.mark.ranks
@pytest.mark.slow
@on_devices
@pytest.mark.parametrize(
    "number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name
)
def test_stopped_run_resumes_and_equals_uninterrupted_run(
    number: signal.Signals, cli: Cli, tmp_path: Path, device: str
) -> None:
    whole = document(cli("train", *smoke(40, "whole", device), "--json"))
    saving = ("--set", "training.save_steps=2") if number == signal.SIGKILL else ()
    command = [sys.executable, "-m", "fsdp_tune", "train", *smoke(40, device=device), *saving, "--json"]
    run = RunDir(tmp_path / "run")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, env=environment_on(device), text=True, **pipes) as training:
        begun = run.checkpoint(2) if saving else run.metrics_jsonl
        while training.poll() is None and not (begun.exists() and '"loss"' in run.metrics_jsonl.read_text()):
            time.sleep(0.05)
        below = psutil.Process(training.pid).children(recursive=True)
        training.send_signal(number)
        out, err = training.communicate(timeout=120)
    if number == signal.SIGKILL:
        assert training.returncode == -number, err
        assert psutil.wait_procs(below, timeout=60)[1] == []
    else:
        assert training.returncode == 143, err
        stopped = json.loads(out)
        assert (stopped["exit_reason"], stopped["merged"]) == ("preempted", None)
    newest, _ = latest_checkpoint(run, digests=True)
    assert newest is not None
    assert 0 < newest.step < 40
    assert number == signal.SIGKILL or newest.step == stopped["steps"]
    done = cli("train", *smoke(40, device=device), *saving, "--resume", "auto", "--json")
    assert f"{run.path}: resumed from {newest.path.name}\n" in done.stderr
    resumed = document(done)
    assert (resumed["exit_reason"], resumed["steps"], resumed["loss"]) == ("finished", 40, whole["loss"])
    steps = [
        line["step"] for line in map(json.loads, run.metrics_jsonl.read_text().splitlines()) if "loss" in line
    ]
    assert steps == list(range(2, 41, 2))


BUDGET = ("--set", "training.per_device_train_batch_tokens=1024")
"""32 rows of `max_length`, as many as the recipe says; its rows are shorter, so that a step takes half as
many micro-batches."""


@pytest.mark.ranks
@pytest.mark.slow
def test_token_budget_trains_and_resumes_inside_an_epoch(cli: Cli, tmp_path: Path) -> None:
    by_rows = document(cli("train", *smoke(20, "rows"), "--json"))
    whole = cli(
        "train",
        *smoke(20),
        *BUDGET,
        "--set",
        "training.save_steps=10",
        "--set",
        "training.dataloader_num_workers=1",
        "--json",
    )
    assert re.search(
        r"1,024 token slots at most: 1 micro-batch a step and rank; \d\d\.\d% of the slots are real tokens",
        whole.stderr,
    ), whole.stderr
    assert document(whole)["loss"] == pytest.approx(by_rows["loss"], rel=1e-5)
    shutil.rmtree(RunDir(tmp_path / "run").checkpoint(20))  # step 10 is no end of an epoch, which has 8
    resumed = cli(
        "train", *smoke(20), *BUDGET, "--set", "launch.num_processes=1", "--resume", "auto", "--json"
    )
    assert document(resumed)["loss"] == pytest.approx(by_rows["loss"], rel=1e-5), resumed.stderr


@pytest.mark.ranks
@pytest.mark.slow
def test_printed_command_can_be_pasted(cli: Cli, tmp_path: Path) -> None:
    """In the card of a finished run and in the status of one that a signal stopped, from another
    directory."""
    done = cli("train", *SHORT)
    assert done.returncode == 0, done.stderr
    (longer,) = re.findall(r"fsdp-tune (train .* --resume auto .*)", done.stdout)
    assert shlex.split(longer)[1:3] == ["--config", "gpt2_smoke"]
    assert "training.max_steps=12" in longer
    preview = cli(*shlex.split(longer), "--dry-run")
    assert (preview.returncode, "step 6 in" in preview.stdout) == (0, True), preview.stderr
    Verdict(ExitCode.PREEMPTED, ExitReason.PREEMPTED, 6).write(RunDir(tmp_path / "run").outcome_json)
    shown = subprocess.run(
        [sys.executable, "-m", "fsdp_tune", "status", tmp_path / "run", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    resume = json.loads(shown.stdout)["ways_on"][0].split("`")[1]
    program = f'fsdp-tune() {{ {shlex.quote(sys.executable)} -m fsdp_tune "$@"; }}; {resume}'
    again = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert (again.returncode, "nothing to do" in again.stdout) == (0, True), again.stdout + again.stderr


@pytest.mark.ranks
@pytest.mark.slow
def test_run_directory_can_be_started_manually(cli: Cli, tmp_path: Path) -> None:
    written = document(cli("train", *SHORT, "--no-start", "--json"))
    torchrun = next(line for line in written["commands"] if line.startswith("torchrun"))
    words = [str(Path(sys.executable).with_name("torchrun")), *torchrun.split()[1:]]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert RunDir(tmp_path / "run").checkpoint(6).is_dir()
    assert json.loads(cli("status", "run", "--json").stdout)["state"] == "finished"


WANDB = """
import json, os, types
AT_IMPORT = [os.environ.get(name) for name in ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_DIR")]
run = None
class Config(dict):
    def update(self, *_, **__): pass
config = Config()
def init(**given):
    global run
    run = types.SimpleNamespace(_label=lambda **_: None)
    with open(os.environ["WANDB_DIR"] + "/seen.jsonl", "a") as file:
        file.write(json.dumps([*AT_IMPORT, given.get("name")]) + "\\n")
def log(*_, **__): pass
def finish(): pass
"""


@pytest.mark.slow
@on_devices
def test_resumed_run_continues_its_wandb_run(cli: Cli, tmp_path: Path, device: str) -> None:
    package = tmp_path / "packages" / "wandb"
    (package / "sdk" / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text(WANDB)
    (package / "sdk" / "__init__.py").touch()
    (package / "sdk" / "lib" / "__init__.py").touch()
    (package / "sdk" / "lib" / "config_util.py").write_text("class ConfigError(Exception): pass\n")
    for steps, more in ((2, ()), (3, ("--resume", "auto"))):
        tracked = ("--set", "training.report_to=[wandb]", "--set", "name=smoke")
        done = cli("train", *smoke(steps, device=device), *tracked, *more, PYTHONPATH=str(package.parent))
        assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "run")
    kept = json.loads(run.trackers_json.read_text())["wandb"]
    seen = [json.loads(line) for line in (run.path / "seen.jsonl").read_text().splitlines()]
    assert seen == [[kept, "allow", str(run.path), "smoke"]] * 2
