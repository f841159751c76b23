"""Every unset value is resolved once, with a reason; impossible requests are refused with alternatives;
F011."""

from __future__ import annotations

import glob
from dataclasses import replace
from pathlib import Path

import pytest

import fsdp_tune
from fsdp_tune.core.devices import Machine
from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.recipe.device_choice import ASSUMED_DEVICES
from fsdp_tune.recipe.resolve import Resolution, resolve
from fsdp_tune.recipe.schema.keys import value_of
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value
from tests.recipe.loading import MINIMAL, load, load_with, one_problem

BARE = Machine(None, 0, 6, None)
FOUR_GPUS = Machine("cuda", 4, 64, "H100")


def resolved(
    extra: str,
    machine: Machine = FOUR_GPUS,
    *,
    cwd: Path = Path("/"),
    assume: str | None = None,
    text: str | None = None,
) -> Resolution:
    loaded = load(text) if text is not None else load_with(extra)
    return resolve(loaded.recipe, machine, cwd=cwd, assume=assume, positions=loaded.positions)


def refused(
    extra: str,
    machine: Machine = FOUR_GPUS,
    *,
    cwd: Path = Path("/"),
    assume: str | None = None,
    text: str | None = None,
) -> Problem:
    with pytest.raises(FsdpTuneError) as caught:
        resolved(extra, machine, cwd=cwd, assume=assume, text=text)
    assert caught.value.exit_code == 2
    return one_problem(caught.value.problems)


@pytest.mark.parametrize(
    ("extra", "key", "value", "reason"),
    [
        ("", "launch.device", "cuda", "the accelerator of this machine (H100)"),
        ("", "launch.num_processes", 4, "4 visible devices × 1 machine"),
        ("launch: {num_machines: 3}", "launch.num_processes", 12, "4 visible devices × 3 machines"),
        ("launch: {device: cpu}", "launch.num_processes", 2, "2 CPU ranks a machine: the fewest that shard"),
        ("launch: {num_processes: 2}", "launch.num_cpu_threads_per_process", 32, "64 cores / 2 local ranks"),
        ("", "training.gradient_accumulation_steps", 1, "no `training.global_batch_size` is given"),
        (
            "training: {global_batch_size: 16}",
            "training.gradient_accumulation_steps",
            4,
            "global batch: 16 / (1 sequences × 4 ranks)",
        ),
        (
            "parallelism: {sp_size: 2}\ntraining: {global_batch_size: 16}",
            *(
                "training.gradient_accumulation_steps",
                8,
                "global batch: 16 / (1 sequences × 2 groups of 2 ranks)",
            ),
        ),
        (
            "training: {per_device_train_batch_size: 3}",
            "training.per_device_eval_batch_size",
            3,
            "per_device_train_batch_size",
        ),
        (
            "training: {global_batch_size: 30, per_device_train_batch_tokens: 8192}",
            *("training.per_device_train_batch_size", 4),
            "rows of full length in 8,192 token slots: 8,192 / 2,048; more rows if they are shorter",
        ),
        (
            "training: {global_batch_size: 30, per_device_train_batch_tokens: 8192}",
            *(
                "training.gradient_accumulation_steps",
                2,
                "at most, when all rows are as long as `data.max_length`",
            ),
        ),
        ("training: {seed: 7}", "training.data_seed", 7, "training.seed"),
        ("training: {save_total_limit: 0}", "training.save_total_limit", None, "0 keeps all"),
        ("", "training.eval_strategy", "no", "there is no data.eval"),
        ("", "model.tokenizer", "gpt2", "model.name_or_path"),
        ("", "model.tokenizer_revision", "main", "model.revision"),
        ("", "model.frozen_dtype", "bf16", "the compute dtype"),
        (
            "fsdp: {version: 1}",
            "model.frozen_dtype",
            "fp32",
            "model.dtype: FSDP1 joins a unit's parameters in one flat tensor",
        ),
        ("precision: {mixed_precision: no}", "merge.dtype", "fp32", "the compute dtype"),
        ("fsdp: {sharding_strategy: SHARD_GRAD_OP}", "fsdp.reshard_after_forward", False, "SHARD_GRAD_OP"),
        (
            "fsdp: {reshard_after_backward: auto}",
            "fsdp.reshard_after_backward",
            True,
            "a step has one micro-batch",
        ),
        (
            "fsdp: {reshard_after_backward: auto, offload_params: true}\ntraining: "
            "{gradient_accumulation_steps: 2}",
            *(
                "fsdp.reshard_after_backward",
                True,
                "only FSDP2 without `fsdp.offload_params` can keep gathered parameters",
            ),
        ),
        (
            "fsdp: {reshard_after_backward: auto}\ntraining: {gradient_accumulation_steps: 2}",
            *("fsdp.reshard_after_backward", "auto", "a plan decides it from the memory of the ranks"),
        ),
        ("", "data.num_proc", 16, "min(16, 64 cores)"),
        ("", "data.eval_packing", False, "data.packing"),
    ],
)
def test_auto_value_is_resolved_with_reason(extra: str, key: str, value: object, reason: str) -> None:
    resolution = resolved(extra)
    assert value_of(resolution.recipe, key) == value
    assert resolution.reasons[key] == reason


@pytest.mark.parametrize(
    ("metric", "is_greater"),
    [("eval_code_loss", False), ("text_perplexity", False), ("code_accuracy", True), ("accuracy", True)],
)
def test_direction_of_a_metric_of_a_source_follows_from_its_name(metric: str, is_greater: bool) -> None:
    text = "model: {name_or_path: gpt2}\nextensions: {metrics: [accuracy]}\n"
    text += "data: {train: [{path: org/code}, {path: org/b, label: text}], eval: {rows: 4}}\n"
    found = resolved("", text=f"{text}training: {{metric_for_best_model: {metric}}}")
    assert training_value(found.recipe.training, "greater_is_better") is is_greater


@pytest.mark.parametrize(
    ("save", "eval_strategy", "eval_steps"),
    [
        ("save_steps: 50", "steps", 50),
        ("save_strategy: epoch", "epoch", None),
        ("save_strategy: no", "epoch", None),
        ("save_steps: 50, eval_strategy: steps, eval_steps: 7", "steps", 7),
        ("eval_strategy: no", "no", None),
    ],
)
def test_eval_schedule_follows_save_schedule(save: str, eval_strategy: str, eval_steps: int | None) -> None:
    text = (
        f"model: {{name_or_path: a}}\ndata: {{train: [{{path: b}}], eval: {{rows: 5}}}}\ntraining: "
        f"{{{save}}}\n"
    )
    training = resolved("", text=text).recipe.training
    assert (training.eval_strategy, training_value(training, "eval_steps")) == (eval_strategy, eval_steps)


def test_resolve_leaves_no_auto_value() -> None:
    """What stays auto is decided by those who see the rows, the model or the network."""
    text = "model: {name_or_path: a}\ndata: {train: [{path: b}], eval: {rows: 5}}\n"
    dump = resolved("", text=text).recipe.model_dump(by_alias=True)
    still_auto = [
        f"{section}.{key}"
        for section, keys in dump.items()
        if isinstance(keys, dict)
        for key, value in keys.items()
        if value == "auto"
    ]
    assert still_auto == [
        "model.attn_implementation",
        "data.format",
        "data.loss_on",
        "data.overlong",
        "data.append_eos",
        "data.special_tokens_in_content",
        "data.stream_lanes",
        "fsdp.min_num_params",
        "kernels.loss",
        "kernels.liger",
        "kernels.experts",
        "launch.main_process_port",
    ]


def test_resolved_recipe_loads_unchanged() -> None:
    recipe = resolved(
        "training: {max_steps: 5, save_steps: 0.5}\nfsdp: {modules_to_wrap: [a], auto_wrap_policy: "
        "MODULE_NAMES_WRAP}"
    ).recipe
    again = Recipe.model_validate_json(recipe.model_dump_json(by_alias=True))
    assert again == recipe
    assert (again.world_size, again.local_world_size, again.compute_dtype, again.is_sharded) == (
        4,
        4,
        "bf16",
        True,
    )


def test_resolve_is_idempotent() -> None:
    recipe = resolved("training: {global_batch_size: 16}").recipe
    assert resolve(recipe, FOUR_GPUS, cwd=Path("/elsewhere")).recipe == recipe


def test_cpu_is_never_chosen_silently() -> None:
    problem = refused("", BARE)
    assert problem.code == "no-device"
    assert problem.ways_out == ("--set launch.device=cpu to train on the CPU",)
    assert refused("launch: {device: cuda}", BARE).where.line == 3
    assert (
        refused("launch: {device: xpu}", FOUR_GPUS).message
        == "`launch.device: xpu` is not on this machine: it shows cuda"
    )


@pytest.mark.parametrize(
    ("keys", "cores", "ranks"),
    [
        ("launch: {num_processes: 8}", 2, 2),
        ("launch: {num_processes: 8}", 1, 2),  # the fewest that shard
        ("launch: {num_processes: 8}", 5, 5),
        (
            "launch: {num_processes: 8}\ntraining: {global_batch_size: 64, per_device_train_batch_size: 8}",
            5,
            4,
        ),
        ("launch: {num_processes: 8}\nparallelism: {sp_size: 4}", 6, 4),
        ("launch: {num_processes: 32, num_machines: 4, main_process_ip: a}", 2, 8),
        ("launch: {num_processes: 8}", 64, None),
        ("", 2, None),
    ],
)
def test_way_out_to_the_cpu_has_a_number_of_ranks_for_the_cores(
    keys: str, cores: int, ranks: int | None
) -> None:
    problem = refused(keys, Machine(None, 0, cores, None))
    number = "" if ranks is None else f" --set launch.num_processes={ranks}"
    assert problem.ways_out == (f"--set launch.device=cpu{number} to train on the CPU",)


def test_hidden_and_lost_gpus_are_named_where_devices_are_missing() -> None:
    hidden = Machine(None, 0, 6, None, hidden="CUDA_VISIBLE_DEVICES=7")
    assert (
        "it shows no accelerator (`CUDA_VISIBLE_DEVICES=7` hides its GPUs)"
        in refused("launch: {device: cuda}", hidden).message
    )
    assert "(`CUDA_VISIBLE_DEVICES=7` hides its GPUs)" in refused("", hidden).message
    lost = Machine("cuda", 3, 6, "H100", (9, 0), ("GPU 1 (GPU is lost)",))
    problem = refused("launch: {num_processes: 4}", lost)
    assert (
        problem.code,
        problem.message.endswith("3 are visible (GPU 1 (GPU is lost) does not respond)"),
    ) == ("too-few-devices", True)
    assert (problem.hint or "").endswith("or check CUDA_VISIBLE_DEVICES")
    npus = refused("launch: {num_processes: 4}", Machine("npu", 3, 6, "Ascend"))
    assert (npus.hint or "").endswith("or check ASCEND_RT_VISIBLE_DEVICES")
    (notice,) = resolved("", lost).notices
    assert (notice.code, notice.message) == (
        "gpu-lost",
        "the driver lists GPU 1 (GPU is lost), and the run does without",
    )
    assert resolved("launch: {device: cpu}", lost).notices == ()


T4, L4 = Machine("cuda", 4, 6, "Tesla T4", (7, 5)), Machine("cuda", 4, 6, "NVIDIA L4", (8, 9))


@pytest.mark.parametrize(
    ("keys", "codes", "hint"),
    [
        (
            "precision: {mixed_precision: bf16}",
            ["bf16-gpu-too-old"],
            "write `precision.mixed_precision: fp16`",
        ),
        ("precision: {mixed_precision: fp16}", [], None),
        ("precision: {mixed_precision: no}", [], None),
    ],
)
def test_bf16_on_an_old_gpu_is_a_notice(keys: str, codes: list[str], hint: str | None) -> None:
    found = [notice for notice in resolved(keys, T4).notices if notice.code == "bf16-gpu-too-old"]
    assert ([notice.code for notice in found], found[0].hint if found else None) == (codes, hint)
    assert [notice.code for notice in resolved(keys, L4).notices if notice.code == "bf16-gpu-too-old"] == []


def test_weights_in_bf16_on_an_old_gpu_are_a_notice() -> None:
    text = MINIMAL.replace("model: {", "model: {dtype: bf16, ") + "precision: {mixed_precision: no}\n"
    (notice,) = (
        notice for notice in resolved("", T4, text=text).notices if notice.code == "bf16-gpu-too-old"
    )
    assert notice.hint == "write `model.dtype: fp32` and `precision.mixed_precision: fp16`"


def test_rows_that_ranks_share_are_padded_for_fp8_on_each_rank() -> None:
    keys = "precision: {mixed_precision: fp8}\nparallelism: {sp_size: 2}"
    assert resolved(keys, replace(L4, device_count=4)).recipe.data.pad_to_multiple_of == 32


def test_fp8_on_an_old_gpu_is_refused_before_ranks_start() -> None:
    keys = "precision: {mixed_precision: fp8}"
    problem = refused(keys, T4)
    assert (problem.code, problem.hint) == ("fp8-gpu-too-old", "write `precision.mixed_precision: fp16`")
    assert (
        problem.message
        == "`precision.mixed_precision: fp8` needs compute capability 8.9 (Ada, Hopper, Blackwell); "
        "Tesla T4 has 7.5"
    )
    assert [notice.code for notice in resolved(keys, T4, assume="cuda").notices] == ["fp8-gpu-too-old"], (
        "another machine may train"
    )
    assert resolved(keys, L4).notices == ()


def test_attention_kernel_is_one_that_the_gpu_has() -> None:
    """Models are inspected and traced without a GPU, where a new one is assumed; the ranks would choose
    another kernel."""
    found = resolved("", T4)
    assert found.recipe.model.attn_implementation == "sdpa_or_eager"
    assert (
        found.reasons["model.attn_implementation"]
        == "FlashAttention needs compute capability 8.0; Tesla T4 has 7.5"
    )
    assert resolved("precision: {mixed_precision: no}", T4).recipe.model.attn_implementation == "auto", (
        "fp32 has no flash kernel anywhere"
    )
    assert resolved("", L4).recipe.model.attn_implementation == "auto"
    assert resolved("launch: {device: cpu}", T4).recipe.model.attn_implementation == "auto"


def test_kernel_of_experts_without_code_for_the_gpu_is_refused_before_ranks_start() -> None:
    text = MINIMAL + "\nkernels: {experts: sonicmoe}\n"
    problem = refused("", L4, text=text)
    assert (problem.code, problem.hint) == ("experts-gpu-unsupported", "write `kernels.experts: auto`")
    assert (
        "SonicMoE has kernels for Hopper and Blackwell and RTX Blackwell, and NVIDIA L4 has compute "
        "capability 8.9" in problem.message
    )
    for name, capability in (
        ("NVIDIA H100", (9, 0)),
        ("NVIDIA B200", (10, 0)),
        ("NVIDIA GeForce RTX 5090", (12, 0)),
    ):
        assert resolved("", replace(L4, device_name=name, capability=capability), text=text).notices == ()


@pytest.mark.parametrize("kernel", ["flash_attention_3", "kernels-community/vllm-flash-attn3"])
def test_flash_attention_without_kernels_for_the_gpu_is_refused_before_ranks_start(kernel: str) -> None:
    text = MINIMAL.replace("model: {", f"model: {{attn_implementation: {kernel}, ")
    problem = refused("", replace(L4, device_name="NVIDIA B200", capability=(10, 0)), text=text)
    assert (problem.code, problem.hint) == (
        "flash-gpu-unsupported",
        "write `model.attn_implementation: auto`",
    )
    assert (
        "FlashAttention 3 has kernels for Hopper, and NVIDIA B200 has compute capability 10.0"
        in problem.message
    )
    assert [notice.code for notice in resolved("", L4, text=text, assume="cuda").notices] == [
        "flash-gpu-unsupported"
    ]
    assert resolved("", replace(L4, device_name="NVIDIA H100", capability=(9, 0)), text=text).notices == ()


def test_device_may_be_assumed_without_launch() -> None:
    resolution = resolved("", BARE, assume="cuda")
    assert (resolution.recipe.launch.device, resolution.recipe.launch.num_processes) == (
        "cuda",
        ASSUMED_DEVICES,
    )
    assert [notice.code for notice in resolution.notices] == ["assumed-devices"]
    assert resolved("launch: {num_processes: 8}", BARE, assume="cuda").notices == ()
    assert resolved("launch: {num_processes: 16}", FOUR_GPUS, assume="cuda").recipe.world_size == 16


def test_more_ranks_than_devices_are_refused_with_the_counts() -> None:
    problem = refused("launch: {num_processes: 8}")
    assert (problem.code, problem.where.line) == ("too-few-devices", 3)
    assert "need 8 cuda devices, and 4 are visible" in problem.message
    assert resolved("launch: {num_processes: 8, num_machines: 2}").recipe.local_world_size == 4


def test_contradictions_with_the_number_of_devices_name_their_lines() -> None:
    problem = refused("training: {global_batch_size: 6}")
    assert (problem.code, problem.where.line) == ("indivisible", 3)


def test_tracker_that_is_not_installed_is_reported_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    problem = refused("training: {report_to: [wandb]}")
    assert (problem.code, problem.where.line) == ("tracker-not-installed", 3)
    assert refused("training: {report_to: [wandb]}", assume="cuda").code == "tracker-not-installed"
    assert "`pip install azureml-sdk`" in str(refused("training: {report_to: [azure_ml]}").hint)


def test_tracker_that_needs_a_variable_is_a_notice_where_the_run_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A TrainJob of Kubeflow sets it, and there is no package."""
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)
    problem = refused("training: {report_to: [kubeflow]}")
    assert problem.code == "tracker-not-configured"
    assert "`export KUBEFLOW_TRAINER_SERVER_URL=…`" in str(problem.hint)
    assert [
        notice.code for notice in resolved("training: {report_to: [kubeflow]}", assume="cuda").notices
    ] == ["tracker-not-configured"]
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://x")
    assert resolved("training: {report_to: [kubeflow]}").notices == ()


def test_fsdp_1_on_the_cpu_loads_on_every_rank() -> None:
    resolution = resolved("fsdp: {version: 1}\nlaunch: {device: cpu}")
    assert resolution.recipe.fsdp.cpu_ram_efficient_loading is False
    assert "FSDP1 on the CPU" in resolution.reasons["fsdp.cpu_ram_efficient_loading"]


def test_paths_become_absolute_and_hub_ids_stay(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "train.jsonl").write_text("{}\n")
    text = (
        "model: {name_or_path: model}\noutput_dir: out/{name}-{seed}\n"
        "data: {cache_dir: cache, train: [{path: train.jsonl}, {path: hub/set}, {path: json, "
        "data_files: [a/*.json, https://x/y]},\n"
        "  {path: gone/*.jsonl}, {path: ~/mine.jsonl}]}\n"
    )
    recipe = resolved("", cwd=tmp_path, text=text).recipe
    assert recipe.model.name_or_path == str(tmp_path / "model") == recipe.model.tokenizer
    assert recipe.output_dir == str(tmp_path / "out" / "recipe-42")
    assert recipe.data.cache_dir == str(tmp_path / "cache")
    first, second, third, fourth, fifth = recipe.data.train
    assert (fourth.path, fifth.path) == (str(tmp_path / "gone/*.jsonl"), str(Path.home() / "mine.jsonl"))
    assert (first.path, second.path, third.path) == (str(tmp_path / "train.jsonl"), "hub/set", "json")
    assert third.data_files == [str(tmp_path / "a/*.json"), "https://x/y"]


def test_globs_start_in_the_working_directory_whatever_its_name(tmp_path: Path) -> None:
    """`[1]` in it would match a `1` in the name of another directory."""
    for name in ("trial[1]", "trial1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text("{}\n")
    text = "model: {name_or_path: a}\ndata: {train: [{path: ./*.jsonl}, {path: json, data_files: [a*, b]}]}\n"
    cwd = tmp_path / "trial[1]"
    first, second = resolved("", cwd=cwd, text=text).recipe.data.train
    assert isinstance(second.data_files, list)
    assert glob.glob(first.path) == glob.glob(second.data_files[0]) == [str(cwd / "a.jsonl")]  # noqa: PTH207  absolute
    assert second.data_files[1] == str(cwd / "b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "model: {name_or_path: ./nowhere}\ndata: {train: [{path: b}]}",
            "`model.name_or_path` is `./nowhere`, and `/",
        ),
        ("model: {name_or_path: ~/m}\ndata: {train: [{path: b}]}", "`model.name_or_path` is `~/m`, and `/"),
        (
            "model: {name_or_path: ~no-user/m}\ndata: {train: [{path: b}]}",
            "`model.name_or_path` is `~no-user/m`, and `/",
        ),
        (
            "model: {from_config: no.json, tokenizer: t}\ndata: {train: [{path: b}]}",
            "`model.from_config` is `no.json`, and `",
        ),
        (
            "model: {name_or_path: a}\ndata: {chat_template: t.jinja, train: [{path: b}]}",
            "`data.chat_template` is `t.jinja`",
        ),
    ],
)
def test_value_that_can_only_be_a_path_must_exist(tmp_path: Path, text: str, words: str) -> None:
    problem = refused("", cwd=tmp_path, text=text)
    assert problem.code == "not-found"
    assert words in problem.message
    assert problem.where.line is not None


@pytest.mark.parametrize(
    ("output_dir", "words"),
    [
        ("/", "is the root"),
        ("{home}", "is your home directory"),
        ("{tmp}/file", "which is a file"),
        ("{tmp}/file/below", "leads through"),
        ("{tmp}/set/runs", "is inside the training data"),
        ("{package}/runs", "is inside the installed package"),
        ("{tmp}/parent", "contains the data or model"),
        ("{tmp}/run", "contains the data or model"),
        ("{tmp}/rows", "contains the data or model"),
        ("{home}/own/runs", "is inside the training data"),
        ("{tmp}/globbed", "contains the data or model"),
        ("{tmp}/built", "contains the data or model"),
    ],
)
def test_harmful_output_directory_is_refused(
    tmp_path: Path, output_dir: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder in ("home/own", "globbed", "built"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "file").write_text("")
    (tmp_path / "set").mkdir()
    (tmp_path / "parent" / "set").mkdir(parents=True)
    (tmp_path / "run" / "merged").mkdir(parents=True)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text("")
    package = Path(fsdp_tune.__file__).parent
    place = output_dir.format(tmp=tmp_path, home=Path.home(), package=package)
    train = (
        "[{path: set}, {path: parent/set}, {path: rows/train.jsonl}, {path: ~/own}, {path: "
        "'globbed/*.jsonl'}, "
    )
    train += "{path: json, data_dir: built, data_files: ['*.json']}]"
    extra = f"model: {{name_or_path: run/merged}}\noutput_dir: {place}\ndata: {{train: {train}}}"
    problem = refused("", cwd=tmp_path, text=extra)
    assert (problem.code, problem.where.line) == ("bad-output-dir", 2)
    assert words in problem.message


@pytest.mark.parametrize("cache", ["runs/a", "runs/a/cache"])
def test_cache_inside_the_run_is_refused(tmp_path: Path, cache: str) -> None:
    """The run could not be written, hours later, into a directory that already has the prepared data."""
    text = (
        f"model: {{name_or_path: a}}\noutput_dir: runs/a\ndata: {{train: [{{path: b}}], cache_dir: {cache}}}"
    )
    problem = refused("", cwd=tmp_path, text=text)
    assert problem.message == f"`output_dir` contains `data.cache_dir`, `{tmp_path / cache}`"
    resolved("", cwd=tmp_path, text=text.replace(f"cache_dir: {cache}", "cache_dir: runs/cache"))


def test_user_without_a_home_directory_has_run_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a container that runs as any user: no HOME, and no entry in /etc/passwd."""

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert resolved("output_dir: runs/a", cwd=tmp_path).recipe.output_dir == str(tmp_path / "runs" / "a")


def test_files_of_a_builder_are_in_its_directory(tmp_path: Path) -> None:
    train = (
        "[{path: json, data_dir: rows, data_files: a.jsonl}, {path: csv, data_dir: /rows, data_files: "
        "[b.csv, /c.csv]}]"
    )
    found = resolved(
        "", cwd=tmp_path, text=f"model: {{name_or_path: a}}\ndata: {{train: {train}}}"
    ).recipe.data.train
    assert [source.data_files for source in found] == [
        str(tmp_path / "rows/a.jsonl"),
        ["/rows/b.csv", "/c.csv"],
    ]


def test_cache_follows_the_xdg_standard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert resolved("").recipe.data.cache_dir == str(tmp_path / "fsdp-tune")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert resolved("").recipe.data.cache_dir == str(Path.home() / ".cache" / "fsdp-tune")


def test_stream_is_read_ahead_unless_the_recipe_sets_a_number() -> None:
    text = "model: {name_or_path: a}\ndata: {train: [{path: b}], streaming: true}\ntraining: {max_steps: 4%s}"
    for extra, workers in (("", 1), (", dataloader_num_workers: 0", 0)):
        training = resolved("", text=text % extra).recipe.training
        assert training_value(training, "dataloader_num_workers") == workers


OLD_CPU, NEW_CPU = Machine(None, 0, 6, None, has_bf16_cpu=False), Machine(None, 0, 6, None, has_bf16_cpu=True)
ON_CPU = "launch: {device: cpu}\n"


@pytest.mark.parametrize(
    ("machine", "keys", "computes", "frozen", "codes"),
    [
        (OLD_CPU, "", "no", "fp32", ["cpu-computes-fp32"]),
        (OLD_CPU, "precision: {mixed_precision: auto}", "no", "fp32", ["cpu-computes-fp32"]),
        (OLD_CPU, "precision: {mixed_precision: bf16}", "bf16", "bf16", ["bf16-cpu-slow"]),
        (OLD_CPU, "precision: {mixed_precision: 'no'}", "no", "fp32", []),
        (OLD_CPU, "model: {dtype: bf16}", "bf16", "bf16", ["bf16-cpu-slow"]),
        (NEW_CPU, "", "bf16", "bf16", []),
        (NEW_CPU, "precision: {mixed_precision: bf16}", "bf16", "bf16", []),
    ],
)
def test_compute_dtype_on_cpu_ranks_is_the_fast_one_unless_it_is_written(
    machine: Machine, keys: str, computes: str, frozen: str, codes: list[str]
) -> None:
    text = (
        f"{MINIMAL}{ON_CPU}{keys}"
        if not keys.startswith("model")
        else f"{MINIMAL}{ON_CPU}".replace("gpt2}", "gpt2, dtype: bf16}")
    )
    found = resolved("", machine, text=text)
    assert found.recipe.precision.mixed_precision == computes
    assert (found.recipe.model.frozen_dtype, found.recipe.merge.dtype) == (frozen, frozen)
    assert [each.code for each in found.notices] == codes


def test_old_cpu_does_not_change_a_run_on_gpus() -> None:
    machine = Machine("cuda", 4, 64, "H100", has_bf16_cpu=False)
    found = resolved("", machine)
    assert (found.recipe.precision.mixed_precision, found.notices) == ("bf16", ())


def test_hint_about_slow_bf16_is_followed_by_a_run_without_it() -> None:
    found = resolved(f"{ON_CPU}precision: {{mixed_precision: bf16}}", OLD_CPU)
    option = str(found.notices[0].hint).removeprefix("--set ")
    again = load_with(f"{ON_CPU}precision: {{mixed_precision: bf16}}", option)
    assert resolve(again.recipe, OLD_CPU, cwd=Path("/")).notices == ()
    [way] = refused("precision: {mixed_precision: bf16}", OLD_CPU).ways_out
    assert "--set launch.device=cpu --set precision.mixed_precision=no" in way


def test_more_ranks_than_any_known_machine_has_are_a_notice_with_the_number_of_machines() -> None:
    found = resolved("launch: {num_processes: 32}", BARE, assume="cuda")
    [notice] = [each for each in found.notices if each.code == "ranks-of-a-machine"]
    assert notice.where.line == 3
    option = str(notice.hint).split("`")[1].removeprefix("--set ")
    loaded = load_with("launch: {num_processes: 32, main_process_ip: a}", option)
    assert [each.code for each in resolve(loaded.recipe, BARE, cwd=Path("/"), assume="cuda").notices] == []
    assert resolved("launch: {num_processes: 8}", BARE, assume="cuda").notices == ()


@pytest.mark.parametrize(
    ("ranks", "machines", "ep_size", "size_inside"),
    [(8, 2, 8, 4), (12, 2, 4, 2), (8, 2, 4, None), (8, 2, 2, None), (8, 1, 8, None), (8, 2, 1, None)],
)
def test_exchange_of_tokens_between_machines_is_a_notice(
    ranks: int, machines: int, ep_size: int, size_inside: int | None
) -> None:
    text = f"fsdp: {{ep_size: {ep_size}}}\nlaunch: {{num_processes: {ranks}, num_machines: {machines}}}"
    found = [
        notice for notice in resolved(text, assume="cuda").notices if notice.code == "experts-across-machines"
    ]
    assert [(notice.where and notice.where.line, notice.hint) for notice in found] == (
        []
        if size_inside is None
        else [
            (
                3,
                f"`--set fsdp.ep_size={size_inside}` keeps them on a machine; `fsdp-tune plan` "
                "compares sizes",
            )
        ]
    )
