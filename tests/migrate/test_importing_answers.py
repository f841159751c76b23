"""`import --set`: what a person says comes before what the file has or leaves open, also where a value is
computed from it."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.migrate.importing import import_file
from fsdp_tune.recipe.key_paths import dotted
from fsdp_tune.recipe.outcome import Fate
from fsdp_tune.recipe.read.loader import DECIDE, parse_recipe
from fsdp_tune.recipe.schema.keys import all_keys, values_by_key
from tests.migrate.foreign_files import FILES, TORCHTUNE, TRL
from tests.migrate.imports import (
    AUTOMODEL_STEP,
    TORCHTUNE_STEP,
    from_text,
    imported,
    questions,
    row,
    values,
    write,
)


def test_override_answers_what_the_file_leaves_open(tmp_path: Path) -> None:
    source = "data.train=[{path: chats.jsonl}]"
    found = imported(tmp_path, "accelerate", overrides=["model.name_or_path=gpt2", source])
    assert found.decisions == ()
    assert DECIDE not in found.text
    assert "  name_or_path: gpt2  # --set\n" in found.text
    assert parse_recipe(found.text, tmp_path / "r.yaml").recipe.data.train[0].path == "chats.jsonl"


def test_override_comes_before_the_file_and_is_in_the_account(tmp_path: Path) -> None:
    found = imported(
        tmp_path, "axolotl", overrides=["training.learning_rate=3e-5", "data.packing=null", "training.seed=7"]
    )
    assert (found.recipe.training.learning_rate, found.recipe.data.packing) == (3e-5, False)
    rows = {row.key: row for row in found.rows}
    for key, target in (("learning_rate", "training.learning_rate"), ("sample_packing", "data.packing")):
        assert (rows[key].fate, rows[key].reason) == (Fate.DROPPED, f"`--set {target}` decides")
    assert found.recipe.training.seed == 7


def test_question_of_a_key_is_answered_by_an_override_of_it(tmp_path: Path) -> None:
    path = write(tmp_path, "axolotl")
    path.write_text(path.read_text().replace("lr_scheduler: cosine", "lr_scheduler: rex"))
    asked = {row.key: row for row in import_file(path).rows}["lr_scheduler"]
    assert asked.fate is Fate.QUESTION
    answered = import_file(path, overrides=["training.lr_scheduler_type=linear"])
    row = {row.key: row for row in answered.rows}["lr_scheduler"]
    assert (row.fate, row.reason) == (Fate.DROPPED, "`--set training.lr_scheduler_type` decides")
    assert values_by_key(answered.recipe)["training.lr_scheduler_type"] == "linear"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.max_steps=abc", "`training.max_steps` is `abc`"),
        ("trainin.max_steps=3", "unknown key `trainin`"),
        ("training.max_steps", "is not `KEY=VALUE`"),
        ("data.train.path=x", "`data.train` is a mapping"),
        ("data.train=null", "the recipe names no training data"),
    ],
)
def test_wrong_override_is_an_error_at_its_place(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(FsdpTuneError) as caught:
        imported(tmp_path, "llama-factory", overrides=[override])
    problem = caught.value.problems[0]
    assert words in problem.message
    assert str(problem.where.source).startswith("--set")


@pytest.mark.parametrize(
    "overrides",
    [["lora.r=4", "lora={r: 8}"], ["lora={r: 8}", "lora.r=4"], ["training.seed=1", "training.seed=2"]],
)
def test_key_that_is_set_twice_is_an_error(tmp_path: Path, overrides: list[str]) -> None:
    with pytest.raises(FsdpTuneError, match="is set twice"):
        imported(tmp_path, "trl", overrides=overrides)


def test_answered_batch_leaves_the_number_of_ranks_open(tmp_path: Path) -> None:
    found = imported(tmp_path, "axolotl", overrides=["training.global_batch_size=64"])
    assert found.recipe.training.global_batch_size == 64
    assert "gradient_accumulation_steps:" not in found.text
    assert (
        imported(
            tmp_path, "axolotl", num_gpus=8, overrides=["training.global_batch_size=128"]
        ).recipe.launch.num_processes
        == 8
    )


def test_text_of_a_variable_is_kept_and_null_removes_nothing_else(tmp_path: Path) -> None:
    assert imported(tmp_path, "trl", overrides=["launch.env.A=1.50"]).recipe.launch.env["A"] == "1.50"
    with pytest.raises(FsdpTuneError, match="leads into a list"):
        imported(tmp_path, "trl", overrides=["data.eval.fraction=null"])


def test_override_of_any_key_and_kind_is_written_or_refused(tmp_path: Path) -> None:
    """A random sample; 4,700 were tried once. What is written loads as what was answered."""
    values = (
        "null",
        "3",
        "x",
        "[1]",
        "[{a: 1}]",
        "{b: 2}",
        "true",
        "[{path: a.jsonl}]",
        "{path: a.jsonl}",
        "0.5",
    )
    cases = [
        (name, f"{dotted(key.path)}={value}") for name in FILES for key in all_keys() for value in values
    ]
    for name, override in [*random.Random(0).sample(cases, 40), *OTHER_OVERRIDES]:
        with contextlib.suppress(FsdpTuneError):
            found = imported(tmp_path, name, overrides=[override])
            assert (
                parse_recipe(found.text, tmp_path / "again.yaml", name=found.recipe.name).recipe
                == found.recipe
            ), override


OTHER_OVERRIDES = (
    ("ms-swift", "model.frozen_dtype=[{a: 1}]"),
    ("trl", "model.frozen_dtype={b: 2}"),
    ("fms-command", "parallelism.tp_size=x"),
    ("trl-command", "training.global_batch_size={b: 2}"),
    ("llama-factory-json", "lora.loraplus_lr_ratio=null"),
)
"""Those that ended with a traceback, or wrote another recipe than they loaded."""


AXOLOTL_ADAPTER = """\
base_model: m
datasets: [{path: rows.jsonl, type: completion}]
adapter: lora
lora_r: 8
bf16: true
num_epochs: 2
evals_per_epoch: 4
val_set_size: 0.1
micro_batch_size: 2
gradient_accumulation_steps: 4
"""


AXOLOTL_FULL = AXOLOTL_ADAPTER.replace("adapter: lora\nlora_r: 8\n", "")
AXOLOTL_BOTH = (
    "base_model: m\nmicro_batch_size: 1\ndatasets: [{path: a.jsonl, type: completion}, {path: b.jsonl, "
    "type: chat_template}]\n"
)
FACTORY = "model_name_or_path: m\nstage: sft\ndataset: a\ntemplate: default\nlora_rank: 8\n"
OF_TRL = "model_name_or_path: m\ndataset_name: d\nassistant_only_loss: true\n"
RUN_CLM = "torchrun --nproc_per_node 4 run_clm.py --model_name_or_path m --train_file a.txt\n"


def dtypes(trained: str, frozen: str) -> dict[str, Any]:
    return {"model.dtype": trained, "model.frozen_dtype": frozen}


@pytest.mark.parametrize(
    ("text", "override", "computed"),
    [
        (AXOLOTL_ADAPTER, "training.num_train_epochs=4", {"training.eval_steps": 0.0625}),
        (AXOLOTL_ADAPTER, "training.num_train_epochs=null", {"training.eval_steps": 0.083333}),
        (TORCHTUNE, "training.num_train_epochs=3", {"training.max_steps": 1500}),
        (TORCHTUNE, "training.num_train_epochs=null", {"training.max_steps": 1500}),
        (TORCHTUNE, "training.num_train_epochs=2.0", {"training.max_steps": 1000}),
        (TRL, "model.frozen_dtype=fp16", dtypes("fp32", "fp16")),
        (TRL, "model.dtype=fp32", dtypes("fp32", "bf16")),
        (TRL, "model.dtype=bf16", dtypes("bf16", "bf16")),
        (TRL, "lora=null", {"lora": None, **dtypes("bf16", "auto")}),
        (OF_TRL + "dtype: bfloat16\n", "lora={r: 8}", dtypes("fp32", "bf16")),
        (AXOLOTL_ADAPTER, "lora=null", {"model.dtype": "bf16"}),
        (AXOLOTL_FULL, "training.seed=1", {"model.dtype": "bf16"}),
        (AXOLOTL_FULL, "lora.r=8", {"model.dtype": "fp32"}),
        (AXOLOTL_BOTH, "data.overlong=drop", {"data.overlong": "drop"}),
        (FACTORY, "lora.r=null", {"lora.lora_alpha": 32.0}),
        (FACTORY, "lora.r=4", {"lora.lora_alpha": 8.0}),
        (RUN_CLM, "launch.num_machines=2", {"launch.num_processes": 8}),
    ],
)
def test_values_are_computed_from_the_answer(
    tmp_path: Path, text: str, override: str, computed: dict[str, Any]
) -> None:
    found = values(
        from_text(tmp_path, text, "run.sh" if text == RUN_CLM else "config.yaml", overrides=[override])
    )
    assert {key: found.get(key) for key in computed} == computed


@pytest.mark.parametrize(
    ("key", "lines", "override"),
    [
        ("max_length", "max_length: null\n", "data.max_length=null"),
        (
            "accelerator_config.split_batches",
            "accelerator_config: {split_batches: true}\n",
            "training.global_batch_size=8",
        ),
    ],
)
def test_question_that_is_answered_is_gone(tmp_path: Path, key: str, lines: str, override: str) -> None:
    assert row(from_text(tmp_path, OF_TRL + lines), key)[0] == "question"
    assert row(from_text(tmp_path, OF_TRL + lines, overrides=[override]), key)[0] == "dropped"


def test_answered_default_of_the_batch_is_part_of_the_question(tmp_path: Path) -> None:
    found = from_text(tmp_path, AXOLOTL_ADAPTER, overrides=["training.per_device_train_batch_size=null"])
    assert dict(found.decisions)["training.global_batch_size"].startswith("1 × 4 = 4 sequences")


@pytest.mark.parametrize("override", ["training.max_steps.x=null", "data.max_length.x=null", "trainin=null"])
def test_null_for_a_key_that_no_recipe_has_is_an_error(tmp_path: Path, override: str) -> None:
    with pytest.raises(FsdpTuneError) as caught:
        imported(tmp_path, "trl", overrides=[override])
    assert caught.value.problems[0].where.source == "--set #1"


def test_null_is_a_value_where_a_mapping_has_any(tmp_path: Path) -> None:
    found = imported(
        tmp_path, "trl", overrides=["model.config_overrides.sliding_window=null", "launch.env.A=null"]
    )
    assert found.recipe.model.config_overrides == {"sliding_window": None}
    loaded = parse_recipe(
        found.text, tmp_path / "r.yaml", ["model.config_overrides.rope_scaling=null"]
    ).recipe
    assert loaded.model.config_overrides == {"sliding_window": None, "rope_scaling": None}
    assert "A" not in loaded.launch.env


def test_ranks_are_given_once(tmp_path: Path) -> None:
    with pytest.raises(FsdpTuneError, match=r"`--num-gpus 8` sets `launch\.num_processes` too") as caught:
        imported(tmp_path, "trl", num_gpus=8, overrides=["training.seed=1", "launch.num_processes=4"])
    assert caught.value.problems[0].where.source == "--set #2"


def test_error_never_has_the_line_of_a_text_that_nobody_has(tmp_path: Path) -> None:
    with pytest.raises(FsdpTuneError) as caught:
        imported(tmp_path, "llama-factory", overrides=["training.seed=1", "data.train=null"])
    assert [problem.where.source for problem in caught.value.problems] == ["--set #2"]
    with pytest.raises(FsdpTuneError) as caught:
        imported(tmp_path, "ms-swift", overrides=["data.streaming=true"])
    (problem,) = caught.value.problems
    assert (problem.where.source, problem.where.line) == ("--set #1", None)
    assert problem.message.endswith("and `training.max_steps` is missing")


def test_answer_of_rows_in_a_stream_settles_their_weights(tmp_path: Path) -> None:
    text = "base_model: m\npretraining_dataset: [{path: a}, {path: b}]\nmax_steps: 10\nmicro_batch_size: 1\n"
    found = from_text(tmp_path, text)
    assert [source.weight for source in found.recipe.data.train] == [1, 1]
    assert [words for key, words in found.decisions if key == "data.train"] == [
        "the share of each source: axolotl gives none, and a stream here needs a `weight` for each"
    ]
    said = from_text(tmp_path, text, overrides=["data.train=[{path: a, weight: 2}, {path: b, weight: 1}]"])
    assert ([source.weight for source in said.recipe.data.train], said.decisions) == ([2, 1], ())


def test_answers_in_a_mapping_replace_a_scalar_of_the_file(tmp_path: Path) -> None:
    text = "model_name_or_path: m\ndataset_name: d\nassistant_only_loss: true\nlr_scheduler_kwargs: foo\n"
    overrides = [
        "training.lr_scheduler_kwargs.a=null",
        "training.lr_scheduler_kwargs.num_cycles=1.5",
        "training.lr_scheduler_type=cosine",
    ]
    found = from_text(tmp_path, text, overrides=overrides)
    assert (found.recipe.training.model_extra or {})["lr_scheduler_kwargs"] == {"num_cycles": 1.5}


@pytest.mark.parametrize(
    ("component", "optim", "decay"),
    [
        ("torchao.optim.CPUOffloadOptimizer", "adamw_torch", 0.01),
        ("torch.optim.AdamW", "sgd", 0.0),
        ("torch.optim.SGD", "adamw_torch", 0.01),
        ("torch.optim.SGD", "null", 0.01),
    ],
)
def test_decay_is_that_of_the_answered_optimizer(
    tmp_path: Path, component: str, optim: str, decay: float
) -> None:
    for text in (TORCHTUNE_STEP, AUTOMODEL_STEP):
        found = values_by_key(
            from_text(tmp_path, text.format(component, ""), overrides=[f"training.optim={optim}"]).recipe
        )
        assert (found.get("training.weight_decay") or 0.0) == decay


_AXOLOTL_EXPERTS = """\
base_model: m
datasets: [{path: a.jsonl, type: alpaca}]
plugins: [axolotl.integrations.expert_parallel.ExpertParallelPlugin]
expert_parallel_size: 4
expert_parallel_backend: torch
"""


@pytest.mark.parametrize(
    "text", [AUTOMODEL_STEP.format("torch.optim.AdamW", "") + "distributed: {ep_size: 4}\n", _AXOLOTL_EXPERTS]
)
def test_ranks_that_divide_experts_are_imported(tmp_path: Path, text: str) -> None:
    result = from_text(tmp_path, text, overrides=["training.optim=adamw_torch_fused"])
    assert values_by_key(result.recipe)["fsdp.ep_size"] == 4
    assert not {"plugins", "expert_parallel_backend", "optimizer._target_"} & {*questions(result)}


def test_capacity_of_experts_is_a_question(tmp_path: Path) -> None:
    result = from_text(tmp_path, f"{_AXOLOTL_EXPERTS}expert_parallel_token_capacity: 1024\n")
    assert "expert_parallel_token_capacity" in questions(result)


@pytest.mark.parametrize(
    "override", ["launch={num_processes: 8}", "launch=null", "launch.num_processes=null"]
)
def test_ranks_are_never_given_twice(tmp_path: Path, override: str) -> None:
    with pytest.raises(FsdpTuneError, match="`--num-gpus 4` sets"):
        imported(tmp_path, "trl", num_gpus=4, overrides=[override])


@pytest.mark.parametrize("override", ["data.packing=false", "data.packing=null"])
def test_strategy_of_packing_goes_with_it(tmp_path: Path, override: str) -> None:
    for text, file in (
        ("model_name_or_path: m\nstage: pt\ndataset: a\n", "a.yaml"),
        ("python run_clm.py --train_file a.txt\n", "a.sh"),
    ):
        assert "packing_strategy" not in from_text(tmp_path, text, file, overrides=[override]).text


def test_lines_of_the_tried_text_are_in_no_error(tmp_path: Path) -> None:
    text = (
        "base_model: m\ndatasets: [{path: a, type: completion}]\nmicro_batch_size: "
        "2\ngradient_accumulation_steps: 4\n"
    )
    with pytest.raises(FsdpTuneError) as caught:
        from_text(tmp_path, text, overrides=["training.global_batch_size=12", "launch.num_processes=8"])
    assert [problem.message for problem in caught.value.problems] == [
        "`training.global_batch_size: 12` is not divisible by 2 sequences × 8 ranks = 16"
    ]


def test_option_that_nothing_reads_is_dropped(tmp_path: Path) -> None:
    """`constant` has no warm-up there either, and SGD no second moment."""
    text = (
        "model_name_or_path: m\ndataset_name: d\nlr_scheduler_type: constant\nwarmup_ratio: 0.03\noptim: "
        "sgd\nadam_beta2: 0.95\n"
    )
    found = from_text(tmp_path, text)
    rows = {row.key: row for row in found.rows}
    assert {name: rows[name].fate.value for name in ("warmup_ratio", "adam_beta2")} == dict.fromkeys(
        ("warmup_ratio", "adam_beta2"), "dropped"
    )
    assert "has no warm-up" in rows["warmup_ratio"].reason
    assert found.recipe.training.warmup_steps == 0
