"""axolotl computes its own side, in an environment that is made for it. Fast tests have a stand-in for
axolotl and for pip."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from fsdp_tune.comparison import axolotl_trainers, environments
from fsdp_tune.comparison.environments import python_with
from fsdp_tune.comparison.side_processes import ObservingChild, ToolChild
from fsdp_tune.comparison.stages import Observation, stages_until
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.processes import JsonChild
from fsdp_tune.core.user_cache import default_cache_directory
from tests.comparison import tool_files
from tests.comparison.tool_files import compared, files, first, here, keys, one_thread

__all__ = ["files", "one_thread"]

AXOLOTL: dict[str, Any] = {
    "base_model": "base",
    "datasets": [{"path": "chat.jsonl", "ds_type": "json", "type": "chat_template"}],
    "sequence_len": 256,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "num_epochs": 1,
    "max_steps": 30,
    "learning_rate": 1e-3,
    "lr_scheduler": "linear",
    "warmup_steps": 3,
    "optimizer": "adamw_torch",
    "bf16": False,
}
FSDP = {
    "fsdp_version": 2,
    "fsdp_config": {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "reshard_after_forward": True},
}
LORA = {
    "adapter": "lora",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "lora_target_modules": ["q_proj", "v_proj"],
}
written = partial(tool_files.written, options=AXOLOTL)
recipe_of = partial(tool_files.recipe_of, options=AXOLOTL)


REQUIRES = [
    "torch<1",
    "transformers==1.0",
    "fire",
    "python-dotenv==1.0",
    "axolotl-contribs-mit",
    "wandb; extra == 'all'",
    "gradio",
]


def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: Sequence[str]) -> list[list[str]]:
    """Return what was installed, where the imports lack the `missing` modules one after the other."""
    installed: list[list[str]] = []
    left = list(missing)

    def output(command: Sequence[str]) -> tuple[int, str]:
        if "-c" in command:
            if "requires(" in command[-1]:
                return 0, f"a warning\n{json.dumps(REQUIRES)}"
            return (1, f"a warning\nno module: {left.pop(0)}\n") if left else (0, "")
        installed.append(list(command[command.index("--upgrade") + 1 :]) if "--upgrade" in command else [])
        if "venv" in command:
            site = Path(command[-1], "lib", "python3", "site-packages")
            site.mkdir(parents=True)
            (Path(command[-1]) / "bin").mkdir()
            (Path(command[-1]) / "bin" / "python").symlink_to(sys.executable)
        return 0, ""

    monkeypatch.setattr(environments, "_output", output)
    monkeypatch.setattr(environments.shutil, "which", lambda _: None)
    python_with(["axolotl==0.19.0"], tmp_path)
    return installed


def test_environment_gets_what_computes_and_what_imports_lack(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = made(monkeypatch, tmp_path, ["fire", "dotenv", "axolotl.contribs"])
    assert installed[:2] == [[], ["--no-deps", "axolotl==0.19.0"]]
    held = installed[2][1]
    assert Path(held).read_text() == f"torch=={torch.__version__}\n"
    assert [words[2:] for words in installed[2:]] == [
        ["transformers==1.0"],
        ["fire"],
        ["python-dotenv==1.0"],
        ["axolotl-contribs-mit"],
    ]


@pytest.mark.parametrize("missing", [["unheard_of"], ["fire", "fire"]])
def test_module_that_no_requirement_brings_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: list[str]
) -> None:
    with pytest.raises(FsdpTuneError) as raised:
        made(monkeypatch, tmp_path, missing)
    problem = raised.value.problems[0]
    assert (problem.code, missing[-1] in problem.message) == ("compare-environment", True)
    assert "--tools import" in str(problem.hint)
    assert not list(tmp_path.glob("environments/*/complete.json"))


def test_requirement_is_of_another_version_only_if_it_is_installed() -> None:
    assert environments._is_other_version(Requirement("torch<1"))
    assert not environments._is_other_version(Requirement("torch>1"))
    assert not environments._is_other_version(Requirement("a-package-that-no-index-has==1"))


class Options(dict[str, Any]):
    __getattr__ = dict.get

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """Return the configurations that axolotl's loader gets."""
    read: list[Options] = []

    def load_cfg(cfg: Options) -> Options:
        read.append(cfg)
        return Options(
            {name: value for name, value in cfg.items() if name not in ("learning_rat", "bfloat16")}
        )

    config, anything = SimpleNamespace(load_cfg=load_cfg), SimpleNamespace(DictDefault=Options)
    fields = SimpleNamespace(AxolotlInputConfig=SimpleNamespace(model_fields={"bfloat16": None}))
    real = axolotl_trainers.importlib.import_module
    modules = {"axolotl.cli.config": config, "axolotl.utils.schemas.config": fields}
    monkeypatch.setattr(
        axolotl_trainers.importlib,
        "import_module",
        lambda name: modules.get(name) or (anything if "axolotl" in name else real(name)),
    )
    monkeypatch.setattr(axolotl_trainers.tempfile, "tempdir", None)
    monkeypatch.setattr(axolotl_trainers.os, "environ", dict(axolotl_trainers.os.environ))
    return read


def trainers(
    tmp_path: Path, left_out: list[str] | None = None, **values: Any
) -> axolotl_trainers.AxolotlTrainers:
    values = {**AXOLOTL, **values}
    given: dict[str, Any] = {
        "values": values,
        "settings": {"val_set_size": 0},
        "model": "small",
        "tokenizer": "own",
    }
    request = SimpleNamespace(**given, revision=None, trust_remote_code=False, ranks=1, epoch_steps=None)
    rows = [{"a": 1}, {"b": 2}, {"a": 3}]
    return axolotl_trainers.AxolotlTrainers(
        request, rows, [0, 1, 0], str(tmp_path), (left_out if left_out is not None else []).append
    )


def test_axolotl_gets_the_rows_of_each_source_and_the_small_model(
    calls: list[Options], tmp_path: Path
) -> None:
    kind = {"type": "chat_template", "roles_to_train": ["user"]}
    sources = [{"path": "acme/chats", "name": "en", "split": "train[:5]", **kind}, {"path": "x"}]
    trainers(tmp_path, datasets=sources, trust_remote_code="yes", base_model_config="other").batch()
    (cfg,) = calls
    assert [Path(entry["path"]).read_text() for entry in cfg["datasets"]] == [
        '{"a": 1}\n{"a": 3}\n',
        '{"b": 2}\n',
    ]
    own = {name: value for name, value in cfg["datasets"][0].items() if name != "path"}
    assert own == {"ds_type": "json", "split": "train", **kind}
    assert (cfg.base_model, cfg.tokenizer_config, cfg.trust_remote_code, cfg.val_set_size) == (
        "small",
        "own",
        False,
        0,
    )
    assert "base_model_config" not in cfg


def test_what_needs_a_gpu_is_left_out_and_listed(calls: list[Options], tmp_path: Path) -> None:
    left_out: list[str] = []
    trainers(
        tmp_path, left_out, adapter="qlora", load_in_4bit=True, flash_attention=True, fsdp_config={"x": 1}
    ).batch()
    assert calls[0]["adapter"] == "lora"
    assert not {"load_in_4bit", "flash_attention", "fsdp_config"} & set(calls[0])
    assert left_out == ["what needs a GPU in axolotl: `load_in_4bit`"]


@pytest.mark.usefixtures("calls")
def test_option_that_axolotl_neither_declares_nor_keeps_is_one_that_it_ignores(tmp_path: Path) -> None:
    left_out: list[str] = []
    found = trainers(tmp_path, left_out, learning_rat=1e-3, bfloat16=True, weight_decay=None)
    found.batch()
    assert (found.ignored, left_out) == (["learning_rat"], ["`learning_rat`, which this axolotl ignores"])


@pytest.mark.usefixtures("calls")
def test_rows_of_a_micro_batch_are_one_where_attention_isolates_examples(tmp_path: Path) -> None:
    packed = {"sample_packing": True, "micro_batch_size": 4}
    assert trainers(tmp_path, **packed).batch().micro_batch == 4
    assert trainers(tmp_path, **packed, flash_attention=True).batch().micro_batch == 1
    assert (
        trainers(tmp_path, **packed, flash_attention=True, multipack_real_batches=True).batch().micro_batch
        == 4
    )


@pytest.mark.usefixtures("calls")
def test_order_is_the_one_of_the_file_though_the_rows_are_read_in_order(tmp_path: Path) -> None:
    trainer = SimpleNamespace(args=SimpleNamespace(sample_packing=False, curriculum_sampling=True))
    assert trainers(tmp_path, shuffle_merged_datasets=False).own_order(trainer) is None
    assert not trainer.args.curriculum_sampling
    trainer.args.sample_packing = True
    assert "at random" in str(trainers(tmp_path).own_order(trainer))
    assert trainers(tmp_path, curriculum_sampling=True).own_order(trainer) is None
    assert trainer.args.curriculum_sampling


@pytest.mark.usefixtures("calls")
def test_streams_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`pretraining_dataset`"):
        trainers(tmp_path, pretraining_dataset="acme/text")


class Axolotl:
    """Stands for the loaders and the trainer's builder of axolotl: notes how they are called."""

    def __init__(self) -> None:
        self.loaded: list[Options] = []
        """The configuration with which a model is loaded."""
        self.given: dict[str, Any] = {}
        """Arguments of the builder."""
        self.model = SimpleNamespace(config=SimpleNamespace(use_cache=True))

    def load_datasets(self, cfg: Options) -> SimpleNamespace:
        return SimpleNamespace(train_dataset=["a row"], total_num_steps=21)

    def setup_model_and_tokenizer(self, cfg: Options) -> tuple[Any, str, None, None]:
        self.loaded.append(Options(cfg))
        return self.model, "a tokenizer", None, None

    def setup_trainer(self, **given: Any) -> str:
        self.given = given
        return "a trainer"


@pytest.fixture
def axolotl_of_test(calls: list[Options], monkeypatch: pytest.MonkeyPatch) -> Axolotl:
    found, imported = Axolotl(), axolotl_trainers.importlib.import_module
    modules = ("axolotl.train", "axolotl.common.datasets", "axolotl.utils.trainer")
    monkeypatch.setattr(
        axolotl_trainers.importlib, "import_module", lambda name: found if name in modules else imported(name)
    )
    return found


def test_model_is_loaded_with_the_dtypes_of_the_file_and_trained_in_fp32(
    axolotl_of_test: Axolotl, calls: list[Options], tmp_path: Path
) -> None:
    made = trainers(tmp_path, bf16=True, **FSDP, fsdp=["full_shard"])
    assert made.small(3, 4) == "a trainer"
    [read], [loaded] = calls, axolotl_of_test.loaded
    assert (read["bf16"], "fsdp_config" in read) == (True, False), "as its loader gets it"
    assert (loaded.bf16, loaded.fsdp_config, loaded.fsdp) == (False, FSDP["fsdp_config"], ["full_shard"])
    cfg = axolotl_of_test.given["cfg"]
    assert (cfg.bf16, cfg.fp16, cfg.fsdp, cfg.fsdp_config) == (False, False, None, None)
    assert axolotl_trainers.os.environ["ACCELERATE_MIXED_PRECISION"] == "no"
    assert (read.micro_batch_size, read.gradient_accumulation_steps, read.batch_size) == (3, 4, None)
    assert not axolotl_of_test.model.config.use_cache
    given = axolotl_of_test.given
    assert (given["train_dataset"], given["tokenizer"], given["eval_dataset"]) == (
        ["a row"],
        "a tokenizer",
        None,
    )


@pytest.mark.parametrize(
    ("values", "request_changes", "steps"),
    [
        ({"max_steps": None}, {"ranks": 2}, 11),
        ({"max_steps": 5}, {}, 5),
        ({"max_steps": 500}, {}, 21),
        ({"max_steps": None, "num_epochs": 1.5}, {"epoch_steps": 7}, 11),
    ],
)
def test_steps_of_the_run_are_those_of_all_ranks(
    axolotl_of_test: Axolotl,
    tmp_path: Path,
    values: dict[str, Any],
    request_changes: dict[str, Any],
    steps: int,
) -> None:
    made = trainers(tmp_path, **values)
    vars(made.request).update(request_changes)
    made.complete()
    assert axolotl_of_test.given["total_num_steps"] == steps


def test_examples_are_neither_cut_nor_packed_and_packed_micro_batches_keep_their_size(
    axolotl_of_test: Axolotl, calls: list[Options], tmp_path: Path
) -> None:
    packed = {"sample_packing": True, "flash_attention": True, "micro_batch_size": 4}
    made = trainers(tmp_path, **packed)
    made.complete()
    made.small(1, 2)
    assert [(cfg.sequence_len, cfg.sample_packing, cfg.micro_batch_size) for cfg in calls] == [
        (1 << 20, False, 4),
        (AXOLOTL["sequence_len"], True, 4),
    ]
    assert axolotl_of_test.given["model"] is axolotl_of_test.model


class Collated:
    """A trainer over three examples that packs the last two into a row, or none."""

    def __init__(self, *, packs: bool) -> None:
        self.args = SimpleNamespace(sample_packing=packs)
        self.train_dataset = [
            {
                "input_ids": [number] * number,
                "labels": [number] * number,
                "length": number,
                "position_ids": None,
            }
            for number in (1, 2, 3)
        ]

    def get_train_dataloader(self) -> Any:
        return SimpleNamespace(batch_sampler=[[[0]], [[1, 2]]])

    def data_collator(self, rows: Any) -> dict[str, Any]:
        return {"given": rows, "attention_mask": "of all"}


@pytest.mark.usefixtures("calls")
def test_packed_rows_are_those_of_the_sampler_and_collated_from_their_examples(tmp_path: Path) -> None:
    one, two, three = ({"input_ids": [n] * n, "labels": [n] * n} for n in (1, 2, 3))
    joined = {"input_ids": [2, 2, 3, 3, 3], "labels": [2, 2, 3, 3, 3], "seq_lengths": [2, 3]}
    plain: Any = Collated(packs=False)
    made = trainers(tmp_path)
    assert made.rows(plain) == [one, two, three]
    assert made.collated(plain, [one])["given"] == [one]
    packs: Any = Collated(packs=True)
    assert made.rows(packs) == [{**one, "seq_lengths": [1]}, joined]
    found = trainers(tmp_path, sample_packing=True).collated(packs, [joined])
    assert found == {"given": [[two, three]], "attention_mask": "of all"}
    isolated = trainers(tmp_path, sample_packing=True, flash_attention=True)
    assert isolated.collated(packs, [joined]) == {"given": [[two, three]]}, "`position_ids` separate them"


@pytest.mark.usefixtures("calls")
def test_files_are_read_as_on_a_gpu_with_bf16(tmp_path: Path) -> None:
    made = trainers(tmp_path)
    gpu, facts = made._config.gpu_capabilities()
    assert (gpu["bf16"], gpu["n_gpu"]) == (True, 1)
    assert facts == {"torch_version": torch.__version__.partition("+")[0]}


def test_packed_row_is_taken_apart_as_it_was_joined() -> None:
    examples = [{"input_ids": [1, 2], "labels": [-100, 2]}, {"input_ids": [3], "labels": [3]}]
    row = axolotl_trainers._joined(examples)
    assert row == {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "seq_lengths": [2, 1]}
    assert axolotl_trainers._apart(row) == examples


PLANTED: list[tuple[dict[str, Any], str, list[str] | None]] = [
    ({"datasets": [{**AXOLOTL["datasets"][0], "roles_to_train": ["user"]}]}, "labels", None),
    ({"sequence_len": 90}, "rows", ["data.max_length"]),
    ({"sample_packing": True, "flash_attention": True}, "rows", None),
    ({"special_tokens": {"eos_token": "<|stop|>"}}, "labels", None),
    ({"bf16": True, **FSDP}, "dtypes", None),
    ({"gradient_accumulation_steps": 2}, "batch", None),
    ({"max_grad_norm": 0.25}, "clipping", ["training.max_grad_norm"]),
    ({"lr_scheduler": "cosine"}, "rate", ["training.lr_scheduler_type"]),
    ({"warmup_steps": 5}, "rate", ["training.warmup_steps"]),
    ({"learning_rate": 2e-3}, "rate", ["training.learning_rate"]),
    ({"weight_decay": 0.1}, "update", ["training.weight_decay"]),
    ({"neftune_noise_alpha": 5}, "loss", None),
    (LORA, "model", ["lora"]),
]
EQUAL: list[dict[str, Any]] = [
    {},
    {"bf16": True, **FSDP},
    {"sequence_len": 90},
    {"sequence_len": 90, "excess_length_strategy": "truncate"},
    {"warmup_steps": 1},
    {"lr_scheduler": "cosine", "cosine_min_lr_ratio": 0.1},
    {"datasets": [{"path": "alpaca.jsonl", "ds_type": "json", "type": "alpaca"}], "sequence_len": 400},
    LORA,
]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JsonChild]:
    """One process for all tests: axolotl's imports take half a minute, and its environment minutes unless
    AXOLOTL_PYTHON names one."""
    python = os.environ.get("AXOLOTL_PYTHON") or python_with(["axolotl"], default_cache_directory())
    child = ToolChild(str(python), "axolotl", {"rows": tmp_path_factory.mktemp("axolotl") / "rows"})
    yield child.started()
    child.close()


@pytest.fixture
def axolotl(monkeypatch: pytest.MonkeyPatch, process: JsonChild) -> None:
    monkeypatch.setattr(ObservingChild, "computed", here)

    def computed(child: Any, values: Mapping[str, Any], until: str) -> Observation:
        request = {"tool": "axolotl", "values": values, "until": list(stages_until(until)), **child._inputs}
        process.send(json.dumps(request, default=str))
        found = process.receive()
        assert found is not None, process.failure()
        return Observation.from_json(found)

    monkeypatch.setattr(ToolChild, "_computed", computed)


@pytest.mark.slow
@pytest.mark.usefixtures("axolotl")
@pytest.mark.parametrize("changes", EQUAL, ids=[" ".join(changes) or "plain" for changes in EQUAL])
def test_axolotl_computes_what_the_imported_recipe_computes(files: Path, changes: dict[str, Any]) -> None:
    found = compared(written(files, "axolotl", **changes), recipe_of(files, **changes))
    assert [stage.name for stage in found.stages if stage.status == "different"] == []
    assert [stage.name for stage in found.stages if stage.status == "not_compared"] == ["order"]
    assert found.a.tool_version is not None


@pytest.mark.slow
@pytest.mark.usefixtures("axolotl")
@pytest.mark.parametrize(
    ("changes", "stage", "named"), PLANTED, ids=[" ".join(changes) for changes, _, _ in PLANTED]
)
def test_planted_option_of_axolotl_is_found_at_the_first_stage_that_shows_it(
    files: Path, changes: dict[str, Any], stage: str, named: list[str] | None
) -> None:
    found = compared(written(files, "axolotl", **changes), recipe_of(files))
    assert first(found) == stage
    assert named is None or keys(found) == named


@pytest.mark.slow
@pytest.mark.usefixtures("axolotl")
def test_axolotl_divides_by_the_tokens_of_a_micro_batch(files: Path) -> None:
    """Its Trainer overrides `model_accepts_loss_kwargs`, so that the loss of a step is a mean of means."""
    found = compared(
        written(files, "axolotl", gradient_accumulation_steps=2),
        recipe_of(files, gradient_accumulation_steps=2),
    )
    assert first(found) == "items"
