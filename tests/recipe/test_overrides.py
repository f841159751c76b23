"""F009: `--set` follows the recipe's own rules, and an error names which one."""

from __future__ import annotations

import pytest

from fsdp_tune.recipe.read.overrides import OptionOverride
from tests.recipe.loading import load_with, one_problem, problems_with


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("training.learning_rate=1e-4", "training.learning_rate", 1e-4),
        ("fsdp.offload_params=true", "fsdp.offload_params", True),
        (
            "fsdp.modules_to_wrap=[model.layers.*, lm_head]",
            "fsdp.modules_to_wrap",
            ["model.layers.*", "lm_head"],
        ),
        ("data.separator=' '", "data.separator", " "),
        ('data.separator=""', "data.separator", ""),
        ("data.eval={rows: 5}", "data.eval.rows", 5),
        ("model.config_overrides.n_layer=3", "model.config_overrides", {"n_layer": 3}),
        ("launch.env.A=a=b: c #d", "launch.env", {"A": "a=b: c #d"}),
        ("output_dir=/tmp/x y", "output_dir", "/tmp/x y"),
        (" training.seed = 7 ", "training.seed", 7),
    ],
)
def test_override_value_is_parsed_like_the_file(override: str, key: str, value: object) -> None:
    found: object = load_with("", override).recipe
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


def test_override_replaces_what_the_file_says() -> None:
    extra = "training: {seed: 1, learning_rate: 1e-5}\n"
    recipe = load_with(extra, "training.seed=2").recipe
    assert (recipe.training.seed, recipe.training.learning_rate) == (2, 1e-5)


def test_mapping_is_replaced_completely_and_a_path_sets_one_key_of_it() -> None:
    text = "lora: null\ntraining: {early_stopping: {patience: 5, threshold: 0.5}}\n"
    whole = load_with(text, "training.early_stopping={patience: 2}", "data.eval={rows: 9}").recipe
    assert whole.training.early_stopping is not None
    assert (whole.training.early_stopping.patience, whole.training.early_stopping.threshold) == (2, 0.0)
    part = load_with(text, "training.early_stopping.patience=2", "data.eval={rows: 9}").recipe
    assert part.training.early_stopping is not None
    assert (part.training.early_stopping.patience, part.training.early_stopping.threshold) == (2, 0.5)


def test_null_resets_to_the_default() -> None:
    extra = "training: {save_total_limit: 9, seed: 3, max_steps: 5}\n"
    recipe = load_with(
        extra, "training.save_total_limit=null", "training.seed=null", "training.max_steps=null"
    ).recipe
    assert (recipe.training.save_total_limit, recipe.training.seed, recipe.training.model_extra) == (
        2,
        42,
        {},
    )


@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        ("fsdp.offload_parms=true", "unknown-key", "unknown key `fsdp.offload_parms`"),
        ("fsdp.version=3", "wrong-value", "`fsdp.version` is `3`"),
        ("fsdp.offload_params=yes", "wrong-value", "`fsdp.offload_params` is `yes`"),
        ("training.learning_rate=.nan", "not-a-number", ".nan"),
        ("training.learning_rate=", "no-value", "`training.learning_rate` has no value"),
        ("learning_rate", "bad-override", "`learning_rate` is not `KEY=VALUE`"),
        ("=5", "bad-override", "is not `KEY=VALUE`"),
        ("a..b=5", "bad-override", "is not `KEY=VALUE`"),
        ("data.train.0.path=x", "bad-override", "leads into a list"),
        ("fsdp.modules_to_wrap=[a", "yaml-syntax", "not closed"),
        ("data.eval={rows: 5, rows: 6}", "duplicate-key", "`rows` is written twice"),
        ("fsdp.modules_to_wrap=[!!str a]", "yaml-tag", "tag"),
        ("fsdp.fsdp_state_dict_type=LOCAL_STATE_DICT", "no-counterpart", "LOCAL_STATE_DICT"),
    ],
)
def test_mistake_names_the_override(override: str, code: str, words: str) -> None:
    problem = one_problem(problems_with("", "training.seed=1", override))
    assert (problem.code, problem.where.source, problem.where.line) == (code, "--set #2", None)
    assert words in problem.message


@pytest.mark.parametrize(
    "overrides",
    [
        ("training.seed=1", "training.seed=2"),
        ("training.seed=1", "training.seed=1"),
        ("data.mixture={temperature: 2.0}", "data.mixture.temperature=3.0"),
        ("fsdp.offload_params=true", "fsdp.cpu_offload=false"),
    ],
)
def test_duplicate_override_is_refused(overrides: tuple[str, str]) -> None:
    problem = one_problem(problems_with("", *overrides))
    assert (problem.code, problem.where.source) == ("duplicate-key", "--set #2")
    assert "--set #1" in problem.message


def test_errors_of_file_and_overrides_are_reported_together_the_file_first() -> None:
    found = problems_with("fsdp: {versoin: 2}\n", "training.seed=x", "zzz=1")
    assert [str(problem.where) for problem in found] == ["recipe.yaml:3:8", "--set #1", "--set #2"]


def test_option_is_named_as_typed() -> None:
    said = OptionOverride("--num-gpus 3", "launch.num_processes=3")
    text = "parallelism: {dp_replicate_size: 2}\nfsdp: {sharding_strategy: HYBRID_SHARD}\n"
    found = problems_with(text, "training.seed=x", options=[said])
    assert {str(problem.where) for problem in found} == {"--set #1", "recipe.yaml:3:15"}
    assert any("on --num-gpus 3" in problem.message for problem in found)
    twice = one_problem(problems_with("", "launch.num_processes=2", options=[said]))
    assert (twice.code, twice.where.source) == ("duplicate-key", "--num-gpus 3")
    assert "--num-gpus 3 and --set #1" in twice.message


def test_null_makes_no_section() -> None:
    """`lora: {}` trains an adapter: taking back one of its keys must not."""
    assert load_with("", "lora.loraplus_lr_ratio=null").recipe.lora is None
    assert load_with("lora: null\n", "lora.r=null").recipe.lora is None
    assert load_with("quantization: null\n", "quantization.load=null").recipe.quantization is None
    assert load_with("launch: {env: {A: b}}\n", "launch.env.A=null").recipe.launch.env == {}


@pytest.mark.parametrize("key", ["lora.none", "none.of_it", "none"])
def test_null_for_an_unknown_key_is_an_error(key: str) -> None:
    assert one_problem(problems_with("", f"{key}=null")).code == "unknown-key"
