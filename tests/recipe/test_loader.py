"""Keys and values: every mistake is reported at once, with position, value, accepted values and a
suggestion."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.recipe.read.loader import load_recipe, parse_recipe
from tests.recipe.loading import MINIMAL, load, load_with, one_problem, problems, problems_with


@pytest.mark.parametrize(
    ("extra", "place", "message", "hint"),
    [
        (
            "fsdp: {offload_parms: true}",
            "3:8",
            "unknown key `fsdp.offload_parms`",
            "did you mean `fsdp.offload_params`?",
        ),
        (
            "training: {learning_rat: 1}",
            "3:12",
            "unknown key `training.learning_rat`",
            "did you mean `training.learning_rate`?",
        ),
        (
            "training: {max_stps: 1}",
            "3:12",
            "unknown key `training.max_stps`",
            "did you mean `training.max_steps`?",
        ),
        (
            "training: {per_device_batch_size: 4}",
            "3:12",
            "unknown key `training.per_device_batch_size`",
            "did you mean `training.per_device_eval_batch_size` or `training.per_device_train_batch_size`?",
        ),
        (
            "training: {sharding_strategy: FULL_SHARD}",
            "3:12",
            "unknown key `training.sharding_strategy`",
            "belongs under `fsdp:`",
        ),
        ("offload_params: true", "3:1", "unknown key `offload_params`", "belongs under `fsdp:`"),
        ("max_steps: 5", "3:1", "unknown key `max_steps`", "belongs under `training:`"),
        ("fsdp: {output_dir: x}", "3:8", "unknown key `fsdp.output_dir`", "belongs at the top of the recipe"),
        (
            "hf_token: abc",
            "3:1",
            "unknown key `hf_token`",
            "a recipe never contains a token: set HF_TOKEN, or log in with `hf auth login`",
        ),
        (
            "precision: {zzz: 1}",
            "3:13",
            "unknown key `precision.zzz`",
            "`precision` takes `mixed_precision`, `reduce_dtype` and `fp8_recipe`",
        ),
        ("bf16: true", "3:1", "unknown key `bf16`", "write `precision.mixed_precision: bf16`"),
        (
            "kernels: {mlp: 1}",
            "3:11",
            "unknown key `kernels.mlp`",
            "did you mean `kernels.mlp_slice_tokens`?",
        ),
        ("model_: {}", "3:1", "unknown key `model_`", "did you mean `model`?"),
    ],
)
def test_unknown_key_is_reported_with_its_section(extra: str, place: str, message: str, hint: str) -> None:
    problem = one_problem(problems_with(extra))
    assert (str(problem.where), problem.code, problem.message, problem.hint) == (
        f"recipe.yaml:{place}",
        "unknown-key",
        message,
        hint,
    )


@pytest.mark.parametrize(
    ("extra", "message", "hint"),
    [
        ("fsdp: {version: 3}", "`fsdp.version` is `3`; it takes `1` or `2`", None),
        (
            "precision: bf16",
            "`precision` is `bf16`; it takes a mapping with `mixed_precision`, `reduce_dtype` and "
            "`fp8_recipe`",
            "write `precision: {mixed_precision: bf16}`",
        ),
        ("fsdp: {version: true}", "`fsdp.version` is `true`; it takes `1` or `2`", None),
        ("fsdp: {version: 2.0}", "`fsdp.version` is `2.0`; it takes `1` or `2`", None),
        (
            "fsdp: {offload_params: yes}",
            "`fsdp.offload_params` is `yes`; it takes true or false",
            "`yes` is text: write true",
        ),
        (
            'fsdp: {offload_params: "true"}',
            '`fsdp.offload_params` is the text "true"; it takes true or false',
            "write it without quotes",
        ),
        (
            "training: {per_device_train_batch_size: 8.0}",
            "`training.per_device_train_batch_size` is `8.0`; it takes a whole number above 0",
            "write `8`",
        ),
        (
            'training: {per_device_train_batch_size: "8"}',
            '`training.per_device_train_batch_size` is the text "8"; it takes a whole number above 0',
            "write it without quotes",
        ),
        (
            "data: {train: [{path: a}], max_length: 0123}",
            "`data.max_length` is `0123`; it takes a whole number above 0",
            "some programs read `0123` as an octal number: write 123",
        ),
        (
            "data: {train: [{path: a}], max_length: 1_000}",
            "`data.max_length` is `1_000`; it takes a whole number above 0",
            "`1_000` is text: write 1000",
        ),
        (
            "training: {learning_rate: fast}",
            "`training.learning_rate` is `fast`; it takes a number, 0 or more",
            None,
        ),
        (
            'training: {learning_rate: "fast"}',
            '`training.learning_rate` is the text "fast"; it takes a number, 0 or more',
            None,
        ),
        (
            "training: {learning_rate: -1}",
            "`training.learning_rate` is `-1`; it takes a number, 0 or more",
            None,
        ),
        (
            "training: {save_steps: 0}",
            "`training.save_steps` is `0`; it takes a whole number above 0 or a number between 0 and 1",
            None,
        ),
        (
            "fsdp: {sharding_strategy: FULL_SHRAD}",
            "`fsdp.sharding_strategy` is `FULL_SHRAD`; it takes `FULL_SHARD`, `SHARD_GRAD_OP`, "
            "`HYBRID_SHARD`, `HYBRID_SHARD_ZERO2` or `NO_SHARD`",
            "did you mean `FULL_SHARD`?",
        ),
        (
            "name: 2024",
            "`name` is `2024`; it takes a name or null",
            'write "2024" in quotes if it is meant as text',
        ),
        (
            "name: a/b",
            "`name`: a name becomes a directory name: no `/`, nothing unprintable, at most 200 bytes",
            None,
        ),
        (
            "launch: {hang_timeout: 30}",
            "`launch.hang_timeout` is `30`; it takes a duration with units, such as 11h30m or 45m",
            "give the unit: `30s`, `30m` or `30h`",
        ),
        (
            'launch: {max_runtime: "30"}',
            "`launch.max_runtime`: `30` is not a duration: write it with units, such as 11h30m, 45m or 30s",
            None,
        ),
        (
            "merge: {max_shard_size: 5}",
            "`merge.max_shard_size` is `5`; it takes a size with its unit, such as 5GB or 512MiB",
            "give the unit: `5GB`",
        ),
        (
            "fsdp: {ignored_modules: '('}",
            "`fsdp.ignored_modules`: `(` is not a valid regular expression: missing ), unterminated "
            "subpattern",
            None,
        ),
        ("fsdp: 5", "`fsdp` takes keys, such as `sharding_strategy: FULL_SHARD`", "without sharding"),
        (
            "data: {train: a.jsonl}",
            "`data.train` is `a.jsonl`; it takes a list (each entry a mapping of its keys)",
            "write `[{path: a.jsonl}]`",
        ),
        (
            "data: {train: [a.jsonl]}",
            "`data.train[0]` is `a.jsonl`; it takes a mapping of its keys",
            "write `{path: a.jsonl}`",
        ),
        ("training: 5", "`training` is `5`; it takes a mapping of its keys", None),
        (
            "training: {num_train_epochs: three}",
            "`training.num_train_epochs` is `three`; it takes a number",
            None,
        ),
        (
            "training: {num_train_epochs: 0}",
            "`training.num_train_epochs` is `0`; it takes a number above 0",
            None,
        ),
        ("training: {adam_beta2: 1.5}", "`training.adam_beta2` is `1.5`; it takes a number below 1", None),
        ("training: {weight_decay: true}", "`training.weight_decay` is `true`; it takes a number", None),
        (
            "training: {optim: adamw}",
            "`training.optim` is `adamw`; it takes one of",
            "did you mean `adamw_torch_fused`?",
        ),
        (
            "training: {learning_rate:}",
            "`training.learning_rate` has no value; it takes a number, 0 or more",
            "write the value, or remove",
        ),
    ],
)
def test_wrong_value_is_reported_with_the_accepted_values(extra: str, message: str, hint: str | None) -> None:
    text = extra if extra.startswith("data:") else f"data: {{train: [{{path: a}}]}}\n{extra}"
    problem = one_problem(problems(f"model: {{name_or_path: gpt2}}\n{text}\n"))
    assert problem.message.startswith(message)
    assert (problem.hint or "").startswith(hint or "")
    assert problem.where.line is not None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("FULL_SHARD", ("zero3", "ZeRO-3", "zero_stage_3", "fsdp", "fsdp2", "full", "full-shard")),
        ("SHARD_GRAD_OP", ("zero2", "zero-2", "stage 2", "zero1", "shard grad op")),
        ("HYBRID_SHARD", ("hybrid", "HSDP", "hybrid shard")),
        ("HYBRID_SHARD_ZERO2", ("hybrid-zero2", "hsdp zero2")),
        ("NO_SHARD", ("ddp", "DDP", "no shard", "no-shard", "DistributedDataParallel", "none")),
    ],
)
def test_name_of_a_strategy_in_another_tool_has_the_own_name_as_hint(
    name: str, words: tuple[str, ...]
) -> None:
    for word in words:
        with pytest.raises(FsdpTuneError) as caught:
            load(f"{MINIMAL}fsdp: {{sharding_strategy: {word}}}\n")
        (problem,) = caught.value.problems
        assert (problem.code, problem.hint) == ("wrong-value", f"did you mean `{name}`?")


@pytest.mark.parametrize(
    ("extra", "key", "value"),
    [
        ("training: {learning_rate: 2e-5}", "learning_rate", 2e-5),
        ("training: {learning_rate: 1}", "learning_rate", 1.0),
        ("training: {warmup_steps: 0.03}", "warmup_steps", 0.03),
        ("training: {save_total_limit: null}", "save_total_limit", None),
        ("training: {report_to: none}", "report_to", []),
        ("training: {report_to: wandb}", "report_to", ["wandb"]),
        ("training: {eval_strategy: no}", "eval_strategy", "no"),
    ],
)
def test_yaml_values_keep_their_types(extra: str, key: str, value: object) -> None:
    assert getattr(load_with(extra).recipe.training, key) == value


@pytest.mark.parametrize("spelling", ["no", "false", '"no"', "fp32"])
def test_no_mixed_precision_has_several_spellings(spelling: str) -> None:
    assert load_with(f"precision: {{mixed_precision: {spelling}}}").recipe.precision.mixed_precision == "no"


def test_torch_dtype_names_are_accepted() -> None:
    recipe = load_with("merge: {dtype: bfloat16}\nprecision: {reduce_dtype: float32}").recipe
    assert (recipe.merge.dtype, recipe.precision.reduce_dtype) == ("bf16", "fp32")


@pytest.mark.parametrize(
    ("spelling", "value"), [("true", "full"), ("false", "none"), ("selective", "selective")]
)
def test_activation_checkpointing_takes_a_boolean(spelling: str, value: str) -> None:
    loaded = load_with(f"fsdp: {{activation_checkpointing: {spelling}}}")
    assert loaded.recipe.fsdp.activation_checkpointing == value
    assert loaded.notices == ()


def test_environment_values_keep_their_text() -> None:
    assert load_with("launch: {env: {A: 1, B: 0x10, C: 1.50, D: x}}").recipe.launch.env == {
        "A": "1",
        "B": "0x10",
        "C": "1.50",
        "D": "x",
    }


def test_empty_section_means_defaults() -> None:
    assert load_with("fsdp:\n# offload_params: true\nmerge:\n").recipe.fsdp.offload_params is False


def test_number_for_text_key_keeps_its_text() -> None:
    text = "model: {name_or_path: gpt2, revision: 0123456}\ndata: {train: [{path: a}]}\n"
    assert load(text).recipe.model.revision == "0123456"


def test_ambiguous_scalar_in_free_mapping_is_an_error() -> None:
    text = (
        "model: {from_config: {model_type: gpt2, n_embd: 0123, x: no}, tokenizer: t}\ndata: {train: "
        "[{path: a}]}\n"
    )
    found = problems(text)
    assert [(p.code, p.where.key) for p in found] == [
        ("doubtful-value", "model.from_config.n_embd"),
        ("doubtful-value", "model.from_config.x"),
    ]


TWELVE = """\
model: {name_or_path: gpt2, torch_dtype: float8}
data:
  train: [{split: train}]
  max_lenght: 5
  max_length: 1_000
  max_length: 2
fsdp: {sharding_strategy: NO_SHARD, offload_params: true, forward_prefetch: !yes 1}
parallelism: {tp_size: 2}
training:
  bf16: true
  sharding_strategy: FULL_SHARD
  learning_rate: 1e400
  save_safetensors: false
launch: {hang_timeout: 30, env: {HF_TOKEN: x}}
"""


def test_twelve_kinds_of_mistakes_are_reported_together_with_their_lines() -> None:
    found = problems(TWELVE)
    assert [(p.where.line, p.code) for p in found] == [
        (1, "wrong-value"),
        (3, "missing-key"),
        (4, "unknown-key"),
        (5, "wrong-value"),
        (6, "duplicate-key"),
        (7, "contradiction"),
        (7, "yaml-tag"),
        (8, "not-yet"),
        (10, "owned-field"),
        (11, "unknown-key"),
        (12, "not-a-number"),
        (13, "no-counterpart"),
        (14, "wrong-value"),
        (14, "secret-in-recipe"),
    ]


def test_wrong_value_does_not_affect_other_rules() -> None:
    found = problems_with(
        "fsdp: {sharding_strategy: NO_SHARD, offload_params: maybe}\ntraining: {max_steps: 5, "
        "warmup_steps: 5}\n"
    )
    assert [p.code for p in found] == ["wrong-value", "contradiction"]
    assert found[1].where.key == "training.warmup_steps"


def test_missing_tensors_are_reported_with_their_file() -> None:
    found = problems("# a comment\nfsdp: {version: 2}\n")
    assert [(problem.code, str(problem.where), problem.where.key) for problem in found] == [
        ("no-data", "recipe.yaml:2:1", "data.train"),
        ("no-model", "recipe.yaml:2:1", "model.name_or_path"),
    ]


def test_long_values_are_escaped_and_shortened_in_errors() -> None:
    problem = one_problem(problems_with('fsdp: {offload_params: "\\e[31m' + "x" * 500 + '"}'))
    assert "\x1b" not in problem.message
    assert len(problem.message) < 200


def test_run_name_is_file_stem_key_or_option(tmp_path: Path) -> None:
    path = tmp_path / "my_run.yaml"
    path.write_text(MINIMAL)
    assert load_recipe(str(path)).recipe.name == "my_run"
    path.write_text(MINIMAL + "name: other\n")
    assert load_recipe(str(path)).recipe.name == "other"
    assert load_recipe(str(path), name="third").recipe.name == "third"
    with pytest.raises(FsdpTuneError) as caught:
        load_recipe(str(path), name="a/b")
    assert str(caught.value.problems[0].where) == "--name"


def test_every_written_key_has_a_position() -> None:
    loaded = load(
        "model:\n  name_or_path: gpt2\ndata:\n  train:\n    - path: a\n    - {path: b, label: x}\n",
        "fsdp.offload_params=true",
    )
    places = {key: str(where) for key, where in loaded.positions.items()}
    assert places["model.name_or_path"] == "recipe.yaml:2:3"
    assert places["data.train[1].label"] == "recipe.yaml:6:17"
    assert places["fsdp.offload_params"] == "--set #1"


def test_text_and_the_overrides_are_kept_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(MINIMAL + "# comment\n")
    loaded = load_recipe(str(path), ["training.seed=7"])
    assert (loaded.text, loaded.overrides, loaded.recipe.training.seed) == (
        MINIMAL + "# comment\n",
        ("training.seed=7",),
        7,
    )


def test_json_recipe_loads_too() -> None:
    assert (
        parse_recipe(
            '{"model": {"name_or_path": "gpt2"}, "data": {"train": [{"path": "a"}]}}', Path("r.json")
        ).recipe.name
        == "r"
    )
