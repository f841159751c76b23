"""The command and environment of a launch, as pure data."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.secrets import MASK
from fsdp_tune.launch.command.accelerate import (
    FREE,
    LaunchPlan,
    check_extra,
    clean,
    manual_commands,
    relevant_variables,
)
from fsdp_tune.recipe.fsdp_arguments import accelerate_config
from fsdp_tune.run.directory import RunDir
from fsdp_tune.worker import rank
from tests.launch.recipes import plan, resolved


def option(plan: LaunchPlan, name: str) -> str:
    return plan.argv[plan.argv.index(name) + 1]


def test_launcher_runs_with_current_interpreter(tmp_path: Path) -> None:
    argv = plan(tmp_path, inherited={"PATH": "/nowhere"}).argv
    assert argv[:4] == (sys.executable, "-m", "accelerate.commands.launch", "--use_fsdp")
    assert argv[-3:] == ("-m", "fsdp_tune.worker", str(tmp_path / "run"))


def test_launch_command_leaves_nothing_to_defaults(tmp_path: Path) -> None:
    made = plan(tmp_path)
    expected = {
        "--config_file": str(tmp_path / "run" / "accelerate.yaml"),
        "--num_processes": "2",
        "--num_machines": "1",
        "--machine_rank": "0",
        "--main_process_ip": "127.0.0.1",
        "--main_process_port": "0",
        "--mixed_precision": "no",
        "--num_cpu_threads_per_process": "2",
    }
    assert {name: option(made, name) for name in expected} == expected
    assert made.settings["OMP_NUM_THREADS"] == "2"


def test_torchrun_leaves_no_directory_of_logs_unless_it_is_requested(tmp_path: Path) -> None:
    assert option(plan(tmp_path), "--log_dir") == os.devnull
    for extra in (("--log_dir", "mine"), ("--log_dir=mine",), ("--tee", "3"), ("-t", "3")):
        assert os.devnull not in plan(tmp_path, extra=extra).argv


def test_use_fsdp_is_passed_for_every_strategy(tmp_path: Path) -> None:
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        argv = plan(tmp_path, f"fsdp.sharding_strategy={strategy}").argv
        assert "--use_fsdp" in argv
        assert "--cpu" not in argv


def test_one_machine_uses_c10d_on_loopback(tmp_path: Path) -> None:
    made = plan(tmp_path)
    assert option(made, "--rdzv_backend") == "c10d"
    assert made.settings["PET_RDZV_ENDPOINT"] == "127.0.0.1:0"
    given = plan(tmp_path, "launch.main_process_port=29777")
    assert given.settings["PET_RDZV_ENDPOINT"] == "127.0.0.1:29777"


def test_agent_of_one_machine_chooses_and_binds_its_ports_in_one_call(tmp_path: Path) -> None:
    """Otherwise another process may take the port of the ranks meanwhile, and an agent connects to the one that has its own."""
    made = plan(tmp_path, inherited={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    assert made.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "0"
    assert option(made, "--rdzv_conf") == "is_host=1"
    assert made.argv.count("--rdzv_conf") == 1
    assert "is_host=1" not in plan(tmp_path, extra=("--rdzv_conf=timeout=60",)).argv
    assert "is_host=1" not in plan(tmp_path, *MACHINES).argv


@pytest.mark.parametrize(("given", "kept"), [(":/libs", "/libs"), ("/a::/b:", "/a:/b"), ("/a:/b", "/a:/b")])
def test_python_path_of_ranks_does_not_lead_to_the_working_directory(given: str, kept: str, tmp_path: Path) -> None:
    assert plan(tmp_path, inherited={"PYTHONPATH": given}).env["PYTHONPATH"] == kept


MACHINES = ("launch.num_machines=2", "launch.num_processes=8", "launch.main_process_ip=10.0.0.1")


def test_machine_ranks_keep_their_order(tmp_path: Path) -> None:
    made = plan(tmp_path, *MACHINES, machine_rank=1)
    assert option(made, "--rdzv_backend") == "static"
    found = [option(made, name) for name in ("--machine_rank", "--main_process_ip", "--main_process_port")]
    assert found == ["1", "10.0.0.1", "29500"]
    assert made.ranks == range(4, 8)
    assert not made.has_all_ranks
    assert "PET_LOCAL_ADDR" not in made.settings


def test_first_machine_is_found_in_the_scheduler_variables(tmp_path: Path) -> None:
    without = MACHINES[:2]
    assert option(plan(tmp_path, *without, inherited={"MASTER_ADDR": "pod-0"}), "--main_process_ip") == "pod-0"
    assert option(plan(tmp_path, *without, inherited={"SLURM_LAUNCH_NODE_IPADDR": "10.1.1.1"}), "--main_process_ip") == "10.1.1.1"
    with pytest.raises(FsdpTuneError, match="address of the first one"):
        plan(tmp_path, *without)


@pytest.mark.parametrize("machine_rank", [-1, 2])
def test_invalid_machine_rank_is_refused(tmp_path: Path, machine_rank: int) -> None:
    with pytest.raises(FsdpTuneError, match="not one of 0 to 1"):
        plan(tmp_path, *MACHINES, machine_rank=machine_rank)


def test_leftovers_of_another_job_are_removed_and_listed(tmp_path: Path) -> None:
    stale = {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "MASTER_PORT": "1",
        "LOCAL_RANK": "1",
        "FSDP_VERSION": "1",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "PET_NNODES": "4",
        "TORCHELASTIC_RUN_ID": "x",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1",
        "SLURM_JOB_ID": "7",
        "PMI_RANK": "2",
    }
    made = plan(tmp_path, inherited={**stale, "PATH": "/bin", "NCCL_DEBUG": "INFO", "PMIX_MCA_gds": "hash"})
    assert list(made.removed) == sorted(stale)
    assert made.env["PATH"] == "/bin"
    assert made.env["PMIX_MCA_gds"] == "hash", "a setting of NVIDIA's images"
    assert made.env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == str(7 * 86_400)
    assert not {"RANK", "WORLD_SIZE", "PET_NNODES", "SLURM_JOB_ID"} & made.env.keys()
    written = made.to_json()
    assert written["removed"] == sorted(stale)
    assert written["inherited"] == {"NCCL_DEBUG": "INFO"}


def test_slurm_step_keeps_its_variables() -> None:
    kept, removed = clean({"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "RANK": "0"})
    assert removed == ["RANK"]
    assert set(kept) == {"SLURM_STEP_ID", "SLURM_JOB_ID"}


def test_agent_gets_signals_and_shutdown_timeout(tmp_path: Path) -> None:
    settings = plan(tmp_path).settings
    assert "SIGUSR1" in settings["PET_SIGNALS_TO_HANDLE"].split(",")
    assert int(settings["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) > 600


def test_ignored_signal_does_not_stop_the_agent(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        handled = plan(tmp_path).settings["PET_SIGNALS_TO_HANDLE"].split(",")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert handled == ["SIGTERM", "SIGINT", "SIGQUIT", "SIGUSR1"]


def test_recipe_variables_are_set_on_ranks(tmp_path: Path) -> None:
    made = plan(tmp_path, "launch.env={NCCL_SOCKET_IFNAME: ib0}")
    assert made.env["NCCL_SOCKET_IFNAME"] == "ib0"
    assert made.to_json()["environment"]["NCCL_SOCKET_IFNAME"] == "ib0"


def test_variable_that_the_launch_or_a_rank_sets_is_refused_in_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch's value would win, and the recipe's would be ignored."""
    of_rank: dict[str, str] = {}
    settings = plan(tmp_path, "kernels.compile=true").settings
    with monkeypatch.context() as patched:
        patched.setattr(rank.os, "environ", of_rank)
        rank.set_environment(resolved(tmp_path, "kernels.compile=true"), RunDir(tmp_path / "run"))
    for name in {*settings, *of_rank}:
        with pytest.raises(FsdpTuneError) as caught:
            resolved(tmp_path, f"launch.env={{{name}: x}}")
        assert [problem.code for problem in caught.value.problems] == ["bad-variable"], name


def test_compiled_kernel_cache_is_outside_recipe_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """inductor unpickles what it finds there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert plan(tmp_path).settings["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "user" / "fsdp-tune" / "compiled")
    inherited = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    settings = plan(tmp_path, "kernels.compile=true", f"data.cache_dir={tmp_path / 'of the recipe'}", inherited=inherited).env
    assert settings["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "user" / "fsdp-tune" / "compiled")


@pytest.mark.parametrize(("asked", "set_to"), [("true", "true"), ("false", "false")])
def test_cpu_affinity_follows_the_recipe_not_the_shell(tmp_path: Path, asked: str, set_to: str) -> None:
    """Accelerate's PartialState reads the variable; `accelerate launch` sets it by the option in its config file."""
    made = plan(tmp_path, f"launch.enable_cpu_affinity={asked}", inherited={"ACCELERATE_CPU_AFFINITY": "1"})
    assert made.env["ACCELERATE_CPU_AFFINITY"] == set_to
    assert accelerate_config(resolved(tmp_path, f"launch.enable_cpu_affinity={asked}"))["enable_cpu_affinity"] is (asked == "true")


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD", "HF_AUTH", "GITHUB_TOKEN", "KEY", "SLURM_JWT", "HF_CREDS"],
)
def test_secrets_are_not_written(tmp_path: Path, name: str) -> None:
    made = plan(tmp_path, inherited={name: "s3cret", "SLURM_STEP_ID": "0", "HF_ENDPOINT": "https://user:s3cret@hub"})
    assert made.env[name] == "s3cret"
    text = json.dumps(made.to_json()) + " ".join(made.quoted_argv())
    assert "s3cret" not in text


def test_inherited_variable_with_token_is_listed_without_value(tmp_path: Path) -> None:
    token = "hf_" + "a" * 30
    made = plan(tmp_path, inherited={"HF_HUB_USER_AGENT_ORIGIN": token, "HF_HOME": f"/{token}", "NCCL_DEBUG": "INFO"})
    assert made.to_json()["inherited"] == {"HF_HUB_USER_AGENT_ORIGIN": None, "HF_HOME": f"/{MASK}", "NCCL_DEBUG": "INFO"}
    assert made.masked_variables() == ["HF_HOME"]


@pytest.mark.parametrize("name", ["HF_X", "SLURM_SPANK_X", "TORCH_X", "PYTHON_X", "XDG_X", "NVIDIA_X", "CUDA_X", "DATASETS_X"])
def test_value_of_an_unknown_variable_is_not_listed(tmp_path: Path, name: str) -> None:
    """No list of names and shapes recognises every secret."""
    written = plan(tmp_path, inherited={name: "correct horse", "SLURM_STEP_ID": "0", "HF_HOME": "/data/hf"}).to_json()
    assert written["inherited"] == {name: None, "SLURM_STEP_ID": "0", "HF_HOME": "/data/hf"}
    assert "horse" not in json.dumps(relevant_variables({name: "correct horse"}))


def test_variable_that_is_not_utf8_is_recorded_with_escapes(tmp_path: Path) -> None:
    """As the paths of a home directory whose name is in Latin-1."""
    inherited = {"VIRTUAL_ENV": "/home/jos\udce9", "LD_LIBRARY_PATH": "/ä", "PMI_\udcff": "x", "HF_\udcff": "x"}
    made = plan(tmp_path, inherited=inherited)
    assert made.env["VIRTUAL_ENV"] == "/home/jos\udce9", "the ranks get the bytes"
    written = made.to_json()
    json.dumps(written, ensure_ascii=False).encode()
    assert written["inherited"] == {"HF_\\udcff": None, "LD_LIBRARY_PATH": "/ä", "VIRTUAL_ENV": "/home/jos\\udce9"}
    assert written["removed"] == ["PMI_\\udcff"]
    assert made.masked_variables() == []


def test_allowed_variables_are_recorded_in_launch_json(tmp_path: Path) -> None:
    made = plan(tmp_path, "launch.env={NCCL_DEBUG: INFO, PYTHONPATH: lib}")
    assert made.to_json()["allowed_variables"] == ["PYTHONPATH"]


def test_unowned_arguments_are_passed_in_order(tmp_path: Path) -> None:
    extra = ("--monitor-interval", "0.5", "--rdzv_conf=timeout=60", "--tee", "3", "--debug")
    argv = plan(tmp_path, extra=extra).argv
    start = argv.index("--monitor-interval")
    assert argv[start : start + len(extra)] == extra


@pytest.mark.parametrize(
    ("word", "owner"),
    [
        ("--num_processes=4", "launch.num_processes"),
        ("--num-machines", "launch.num_machines"),
        ("--mixed_precision", "precision.mixed_precision"),
        ("--fsdp_offload_params", "section `fsdp:`"),
        ("--fsdp-version=1", "section `fsdp:`"),
        ("--config_file", "writes its own accelerate.yaml"),
        ("--use_deepspeed", "trains with FSDP"),
        ("--gpu_ids", "CUDA_VISIBLE_DEVICES"),
        ("--dynamo_backend", "kernels.compile"),
        ("--cpu", "launch.device"),
        ("--enable_cpu_affinity", "launch.enable_cpu_affinity"),
        ("-m", "the run itself"),
        ("--parallelism_config_tp_size", "section `parallelism:`"),
    ],
)
def test_arguments_that_the_recipe_owns_are_refused_with_its_key(word: str, owner: str) -> None:
    with pytest.raises(FsdpTuneError) as caught:
        check_extra([word])
    (problem,) = caught.value.problems
    assert owner in problem.message
    assert problem.code == "launch-argument-owned"


def test_all_unknown_arguments_are_reported_with_close_matches() -> None:
    with pytest.raises(FsdpTuneError) as caught:
        check_extra(["--monitor_intervall", "1", "stray", "--tee"])
    assert [problem.code for problem in caught.value.problems] == ["launch-argument-unknown"] * 3
    assert caught.value.problems[0].hint == "did you mean `--monitor_interval`?"


def test_accelerate_arguments_are_owned_or_passed() -> None:
    """Fails when accelerate gains an argument that is neither owned nor passed."""
    from accelerate.commands.launch import launch_command_parser

    undecided: list[str] = []
    for action in launch_command_parser()._actions:
        name = action.dest if action.dest not in ("tpu_use_cluster", "training_script", "training_script_args", "help") else None
        if name is None or name in FREE:
            continue
        with pytest.raises(FsdpTuneError) as caught:
            check_extra([f"--{name}"])
        if caught.value.problems[0].code != "launch-argument-owned":
            undecided.append(name)
    assert undecided == []


def test_manual_commands_have_ranks_and_directory(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a run")
    accelerate, torchrun = manual_commands(resolved(tmp_path), run)
    assert "--use_fsdp --num_processes 2 -m fsdp_tune.worker '" in accelerate
    assert torchrun.startswith("torchrun --nproc-per-node 2 -m fsdp_tune.worker '")


@pytest.mark.parametrize(
    ("keys", "variables", "ip", "port"),
    [
        (("launch.main_process_ip=10.0.0.7", "launch.main_process_port=29511"), {}, "10.0.0.7", 29511),
        (("launch.main_process_ip=10.0.0.7",), {"MASTER_ADDR": "10.0.0.9"}, "10.0.0.7", 29500),
        ((), {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.8"}, "10.0.0.8", 29500),
        ((), {}, "IP", 29500),
    ],
)
def test_manual_commands_have_address_of_first_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...], variables: dict[str, str], ip: str, port: int
) -> None:
    for name in ("MASTER_ADDR", "SLURM_LAUNCH_NODE_IPADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    accelerate, torchrun = manual_commands(resolved(tmp_path, "launch.num_machines=2", *keys), RunDir(tmp_path / "run"))
    assert f"--num_machines 2 --machine_rank N --main_process_ip {ip} --main_process_port {port} -m" in accelerate
    assert f"--nnodes 2 --node-rank N --master-addr {ip} --master-port {port} --nproc-per-node" in torchrun
