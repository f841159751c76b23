"""A scaled-down recipe differs from the user's only in size, and lists every change."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.devices import Machine
from fsdp_tune.core.errors import FailedError
from fsdp_tune.data.account import source_lines
from fsdp_tune.data.preparation import prepare
from fsdp_tune.data.shortest_length import length_with_targets
from fsdp_tune.data.tokenise.tokenizer import load_encoder
from fsdp_tune.recipe.read.catalogue import catalogue
from fsdp_tune.recipe.read.loader import load_recipe
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.rehearsal import scale_down
from fsdp_tune.rehearsal.layer_patterns import map_layer_patterns, map_layer_regex
from fsdp_tune.rehearsal.lifecycle_checks import ChildResult
from fsdp_tune.rehearsal.parity_checks import make_comparable
from fsdp_tune.rehearsal.scale_down import scale_down_recipe
from fsdp_tune.rehearsal.scaled_data import MAX_LENGTH_TOKENS, ReadableInputs
from fsdp_tune.rehearsal.scaled_recipe import ScaledRecipe

MACHINE = Machine(None, 0, 2, None)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
CARRIED: dict[str, dict[str, Any]] = json.loads(
    resources.files("fsdp_tune.recipe").joinpath("model_configs.json").read_bytes()
)


def resolved(text: dict[str, Any]) -> Recipe:
    base = {
        "model": {"from_config": LLAMA, "tokenizer": "builtin:arithmetic"},
        "data": {"train": [{"path": "builtin:arithmetic"}]},
    }
    return resolve(Recipe.model_validate(base | text), MACHINE, cwd=Path("/tmp"), assume="cuda").recipe


def shrunk(
    recipe: Recipe,
    tmp_path: Path,
    *,
    ranks: int = 2,
    inputs: ReadableInputs | None = None,
    device: str = "cpu",
) -> ScaledRecipe:
    return scale_down_recipe(
        recipe, LLAMA, tmp_path, ranks=ranks, device=device, steps=24, inputs=inputs or ReadableInputs()
    )


def test_token_budget_is_kept(tmp_path: Path) -> None:
    recipe = resolved({"training": {"global_batch_size": 64, "per_device_train_batch_tokens": 8192}})
    training = shrunk(recipe, tmp_path).document["training"]
    assert (training["per_device_train_batch_tokens"], training["global_batch_size"]) == (
        2 * MAX_LENGTH_TOKENS,
        2 * 2 * 2,
    )
    small = load_recipe(str(shrunk(recipe, tmp_path).write(tmp_path))).recipe
    assert (
        resolve(small, MACHINE, cwd=tmp_path, assume="cuda").recipe.training.gradient_accumulation_steps == 2
    )


def test_ranks_that_share_rows_are_two_at_most(tmp_path: Path) -> None:
    recipe = resolved({"parallelism": {"sp_size": 8}, "launch": {"num_processes": 16}})
    small = shrunk(recipe, tmp_path, ranks=4)
    assert small.document["parallelism"]["sp_size"] == 2
    assert "parallelism.sp_size: 2 instead of 8" in small.changes
    assert any("2 sequences (1 × 2 groups of 2 ranks × 1 accumulation)" in line for line in small.changes)
    assert "parallelism" not in shrunk(recipe, tmp_path, ranks=1).document


def test_experts_are_divided_over_the_ranks_that_there_are(tmp_path: Path) -> None:
    recipe = resolved({"fsdp": {"ep_size": 8}, "launch": {"num_processes": 16}})
    small = shrunk(recipe, tmp_path, ranks=2)
    assert small.document["fsdp"]["ep_size"] == 2
    assert "fsdp.ep_size: 2 instead of 8" in small.changes
    alone = shrunk(recipe, tmp_path, ranks=1)
    assert "ep_size" not in alone.document.get("fsdp", {})
    assert "fsdp.ep_size: 1 instead of 8; the exchange of tokens is NOT rehearsed" in alone.changes


def test_stream_is_rehearsed_as_a_stream_and_compared_as_prepared_rows(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"{number}+1=", "completion": str(number + 1)}) + "\n"
            for number in range(900)
        )
    )
    sources = [{"path": str(rows), "weight": 1.0, "repeats": 9}, {"path": str(rows), "weight": 2.0}]
    data = {
        "train": sources,
        "streaming": True,
        "curriculum": [{"until_step": 9, "weights": [1.0, 0.0]}],
        "stream_lanes": 512,
    }
    recipe = resolved({"data": data, "training": {"max_steps": 90, "global_batch_size": 64}})
    small = shrunk(recipe, tmp_path)
    compared = make_comparable(small)
    prepared: list[int] = []
    for document in (small, compared):
        assert document.document["data"].get("streaming") is (document is small)
        recipe = resolve(
            load_recipe(str(document.write(tmp_path))).recipe, MACHINE, cwd=tmp_path, assume="cuda"
        ).recipe
        report = prepare(recipe, load_encoder(recipe)).report
        prepared.append(report.rows_read)
        assert ("a stream" in " ".join(source_lines(report))) is (document is small)
    assert prepared == [1800, 800]


@pytest.mark.parametrize(
    ("merge", "changes"),
    [
        ({}, []),
        ({"at_end": False}, ["merge.at_end: true instead of false"]),
        ({"adapter": "adapter"}, ['merge.adapter: "both" instead of "adapter"']),
        ({"adapter": "merged"}, []),
    ],
    ids=str,
)
def test_rehearsal_merges_what_the_recipe_does_not(
    merge: dict[str, Any], changes: list[str], tmp_path: Path
) -> None:
    small = shrunk(resolved({"merge": merge}), tmp_path)
    assert [line for line in small.changes if line.startswith("merge.")] == changes
    assert small.document.get("merge", {}).get("at_end", True)
    assert small.document.get("merge", {}).get("adapter", "both") == merge.get("adapter", "both").replace(
        "adapter", "both"
    )


def test_mlp_of_shorter_rows_is_still_computed_in_slices(tmp_path: Path) -> None:
    """The slice length of long rows would exceed a row of the rehearsal, and nothing would be sliced."""
    sliced = {
        "kernels": {"mlp_slice_tokens": 16384},
        "parallelism": {"sp_size": 2},
        "launch": {"num_processes": 4},
    }
    small = shrunk(resolved(sliced), tmp_path, ranks=4)
    assert small.document["kernels"]["mlp_slice_tokens"] == MAX_LENGTH_TOKENS // 2 // 4
    assert "kernels.mlp_slice_tokens: 16 instead of 16384, since rows are shorter" in small.changes
    assert (
        shrunk(resolved(sliced | {"kernels": {"mlp_slice_tokens": 5}}), tmp_path).document["kernels"][
            "mlp_slice_tokens"
        ]
        == 5
    )
    unchanged = shrunk(resolved({"kernels": {"mlp_slice_tokens": 64}}), tmp_path)
    assert unchanged.document["kernels"]["mlp_slice_tokens"] == 64, "shorter than a row of the rehearsal too"
    assert not any("mlp_slice_tokens" in line for line in unchanged.changes)


def test_rows_that_three_ranks_share_are_cut_for_two(tmp_path: Path) -> None:
    data = {"train": [{"path": "builtin:arithmetic"}], "max_length": 99}
    recipe = resolved({"parallelism": {"sp_size": 3}, "launch": {"num_processes": 6}, "data": data})
    small = shrunk(recipe, tmp_path, ranks=4)
    assert "data.max_length: 98, which 2 ranks can share" in small.changes
    assert load_recipe(str(small.write(tmp_path))).recipe.data.max_length == 98


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(catalogue()))
def test_catalogue_recipes_scale_down_to_valid_recipes(name: str, tmp_path: Path) -> None:
    recipe = resolve(load_recipe(name).recipe, MACHINE, cwd=tmp_path, assume="cuda").recipe
    facts = CARRIED.get(str(recipe.model.name_or_path)) or recipe.model.from_config
    assert isinstance(facts, dict)
    ranks = 4 if recipe.is_hybrid else 2
    small = scale_down_recipe(
        recipe,
        facts,
        tmp_path,
        ranks=ranks,
        device="cpu",
        steps=24,
        inputs=ReadableInputs(tokenizer=False, data=False),
    )
    loaded = load_recipe(str(small.write(tmp_path)))
    again = resolve(loaded.recipe, MACHINE, cwd=tmp_path).recipe
    assert again.fsdp.model_dump(exclude={"reshard_after_forward"}) == recipe.fsdp.model_dump(
        exclude={"reshard_after_forward"}
    )
    assert again.precision == recipe.precision
    assert again.merge.dtype == recipe.merge.dtype
    assert (again.world_size, again.launch.device, again.launch.num_machines) == (ranks, "cpu", 1)


def test_gpu_kernels_are_replaced_on_cpu(tmp_path: Path) -> None:
    recipe = resolved({"kernels": {"liger": True, "loss": "liger", "compile": True}})
    small = shrunk(recipe, tmp_path)
    assert small.document["kernels"] == {"loss": "chunked"}, "the others are at their defaults again"
    assert sum(change.startswith("kernels.") for change in small.changes) == 3
    assert not any(change.startswith("kernels.") for change in shrunk(resolved({}), tmp_path).changes)
    assert shrunk(recipe, tmp_path, device="cuda").document["kernels"]["compile"] is True


def test_reachable_hardware_is_used(tmp_path: Path) -> None:
    recipe = resolved(
        {
            "data": {
                "train": [{"path": "a.jsonl"}, {"path": "b.jsonl", "max_rows": 7}],
                "eval": {"fraction": 0.01},
            }
        }
    )
    data = shrunk(recipe, tmp_path).document["data"]
    assert [(Path(source["path"]).name, source["max_rows"]) for source in data["train"]] == [
        ("a.jsonl", 400),
        ("b.jsonl", 7),
    ]
    assert data["eval"] == {"fraction": 0.04}, "about 16 of 400 rows"
    without_tokenizer = shrunk(recipe, tmp_path, inputs=ReadableInputs(tokenizer=False))
    assert "data: builtin:arithmetic, since that tokenizer encodes nothing else" in without_tokenizer.changes


@pytest.mark.parametrize(
    ("written", "small", "line"),
    [
        ({"rows": 4}, {"rows": 4}, None),
        ({"rows": 64}, {"rows": 16}, "data.eval.rows: 16 instead of 64"),
        ({"fraction": 0.2}, {"fraction": 0.2}, None),
        ({"fraction": 0.001}, {"fraction": 0.04}, "data.eval.fraction: 0.04 instead of 0.001"),
        (
            [{"path": "b.jsonl"}],
            [{"path": "b.jsonl", "max_rows": 16}],
            "data.eval: at most the first 16 rows of each set",
        ),
    ],
    ids=str,
)
def test_few_rows_are_held_out_where_the_recipe_holds_out_many(
    written: Any, small: Any, line: str | None, tmp_path: Path
) -> None:
    """Of a file of 12 rows that holds out 4, 16 would be all. A small fraction of the first 400 rows might be
    none."""
    found = shrunk(resolved({"data": {"train": [{"path": "a.jsonl"}], "eval": written}}), tmp_path)
    kept = found.document["data"]["eval"]
    if isinstance(kept, list):
        kept = [{"path": Path(each["path"]).name, "max_rows": each["max_rows"]} for each in kept]
    assert kept == small
    assert [each for each in found.changes if each.startswith("data.eval")] == ([line] if line else [])


def test_keys_of_data_that_the_builtin_rows_lack_are_listed(tmp_path: Path) -> None:
    recipe = resolved(
        {
            "data": {
                "train": [{"path": "a.jsonl"}],
                "drop_duplicates": True,
                "overlong": "drop",
                "max_length": 512,
            }
        }
    )
    found = shrunk(recipe, tmp_path, inputs=ReadableInputs(data=False))
    assert "data.overlong, data.drop_duplicates: the default; NOT rehearsed" in found.changes
    assert "drop_duplicates" not in found.document["data"]


def test_rows_that_fit_the_real_length_are_not_dropped(tmp_path: Path) -> None:
    recipe = resolved({"data": {"train": [{"path": "a.jsonl"}], "max_length": 4096, "overlong": "drop"}})
    small = shrunk(recipe, tmp_path)
    assert (small.document["data"]["max_length"], small.document["data"]["overlong"]) == (128, "truncate")
    assert "data.max_length: 128 instead of 4096" in small.changes


def test_offload_that_cannot_be_rehearsed_is_reported(tmp_path: Path) -> None:
    recipe = resolved({"fsdp": {"version": 1, "offload_params": True}})
    small = shrunk(recipe, tmp_path)
    assert "offload_params" not in small.document["fsdp"]
    assert any("NOT rehearsed" in line for line in small.changes)


@pytest.mark.parametrize(
    ("patterns", "mapped"),
    [
        (["model.embed_tokens.*"], ["model.embed_tokens.*"]),
        (["model.layers.*"], ["model.layers.*"]),
        (["model.layers.20.*"], ["model.layers.1.*"]),
        ([f"model.layers.{index}.mlp.*" for index in range(10)], ["model.layers.0.mlp.*"]),
        ([f"model.layers.{index}.*" for index in range(31)], ["model.layers.0.*"]),
        (
            ["model.layers.?.*", "model.layers.[12]?.*", "model.layers.3?.*"],
            ["model.layers.0.*", "model.layers.1.*"],
        ),
    ],
)
def test_layer_patterns_match_layers_of_the_small_model(patterns: list[str], mapped: list[str]) -> None:
    assert map_layer_patterns(patterns, 32, 2) == mapped


def test_ignored_layers_match_frozen_layers() -> None:
    assert map_layer_regex(r"model\.layers\.(9|10|20)\.mlp", 32, 2) == r"model\.layers\.(0|0|0)\.mlp"
    assert map_layer_regex(r".*\.layers\.\d{1,2}\.[a-z0-9]+", 32, 2) == r".*\.layers\.\d{1,2}\.[a-z0-9]+"


def test_mapped_layer_patterns_are_listed(tmp_path: Path) -> None:
    small = shrunk(
        resolved(
            {
                "model": {
                    "from_config": LLAMA,
                    "tokenizer": "builtin:arithmetic",
                    "freeze": ["model.layers.31.*"],
                }
            }
        ),
        tmp_path,
    )
    assert small.document["model"]["freeze"] == ["model.layers.1.*"]
    assert any(line.startswith("model.freeze:") for line in small.changes)


def test_every_changed_key_of_training_and_overlong_is_listed(tmp_path: Path) -> None:
    training = {
        "per_device_eval_batch_size": 16,
        "early_stopping": {"patience": 3},
        "load_best_model_at_end": True,
        "save_total_limit": 3,
    }
    training |= {"report_to": ["tensorboard"]}
    data = {
        "train": [{"path": "builtin:arithmetic"}],
        "eval": {"rows": 64},
        "max_length": 512,
        "overlong": "drop",
    }
    small = shrunk(resolved({"training": training, "data": data}), tmp_path)
    listed = {line.partition(":")[0] for line in small.changes}
    keys = {
        "per_device_eval_batch_size",
        "report_to",
        "load_best_model_at_end",
        "early_stopping",
        "save_total_limit",
    }
    assert {"data.overlong", *(f"training.{key}" for key in keys)} <= listed


def test_rows_with_long_prompts_keep_trained_tokens(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = [
        {"prompt": f"{number}+{number}=" * (5 if number % 3 else 60), "completion": str(number)}
        for number in range(10, 70)
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {
        "train": [{"path": str(rows)}],
        "eval": [{"path": str(rows), "max_rows": 3}],
        "max_length": 1024,
        "overlong": "drop",
    }
    recipe = resolved({"data": data})
    encoder = load_encoder(recipe)
    tokens = length_with_targets(recipe, encoder, rows=200)
    assert MAX_LENGTH_TOKENS < tokens < 1024, "of three rows in the evaluation set none is given up"
    small = shrunk(recipe, tmp_path, inputs=ReadableInputs(tokens=tokens))
    length = small.document["data"]["max_length"]
    assert length % MAX_LENGTH_TOKENS == 0
    assert (
        f"data.max_length: {length} instead of 1024, since prompts are longer than 128 tokens"
        in small.changes
    )
    sets = prepare(
        resolve(load_recipe(str(small.write(tmp_path))).recipe, MACHINE, cwd=tmp_path, assume="cuda").recipe,
        encoder,
    ).report.sets
    assert min(account.supervised_tokens_per_example.min for account in sets.values()) >= 1


def test_single_long_prompt_does_not_raise_max_length(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": "1+1=" * (500 if number == 7 else 1), "completion": "2"}) + "\n"
            for number in range(40)
        )
    )
    recipe = resolved({"data": {"train": [{"path": str(rows)}], "max_length": 4096}})
    assert length_with_targets(recipe, load_encoder(recipe), rows=200) < MAX_LENGTH_TOKENS


def test_patterns_of_parameter_groups_are_mapped_to_small_layers(tmp_path: Path) -> None:
    groups = [{"match": ["lm_head.*", "model.layers.31.*"], "learning_rate": 1e-4}]
    document = {
        "model": {"from_config": LLAMA, "tokenizer": "builtin:arithmetic"},
        "training": {"parameter_groups": groups},
    }
    small = shrunk(resolved(document), tmp_path)
    assert small.document["training"]["parameter_groups"][0]["match"] == ["lm_head.*", "model.layers.1.*"]
    assert any(line.startswith("training.parameter_groups[0].match:") for line in small.changes)


def test_layers_of_several_groups_belong_to_the_first_in_the_small_model(tmp_path: Path) -> None:
    """A later group would have no effect there, which is an error in a recipe."""
    groups = [{"match": [f"model.layers.{layer}.*"], "learning_rate": 1e-4} for layer in range(3)]
    document = {
        "model": {"from_config": LLAMA, "tokenizer": "builtin:arithmetic"},
        "training": {"parameter_groups": groups},
    }
    small = shrunk(resolved(document), tmp_path)
    matches = [entry["match"] for entry in small.document["training"]["parameter_groups"]]
    assert matches == [["model.layers.0.*"]]
    assert "training.parameter_groups[2].match: [], the layers of the small model" in small.changes


@pytest.fixture
def bases(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The requests for the base of an adapter."""
    found: list[dict[str, Any]] = []

    def run_torch_script(module: str, request: dict[str, Any]) -> ChildResult:
        assert module == "model_directories"
        found.append(request)
        return ChildResult(0, {}, "")

    monkeypatch.setattr(scale_down, "run_torch_script", run_torch_script)
    return found


def test_adapter_is_rehearsed_on_a_base_of_the_small_shape(
    tmp_path: Path, bases: list[dict[str, Any]]
) -> None:
    lora = {"r": 64, "lora_alpha": 16, "rank_pattern": {"q_proj": 8}, "layers_to_transform": [0, 31]}
    small = shrunk(resolved({"model": {"name_or_path": "gpt2"}, "lora": lora}), tmp_path)
    ((request),) = bases
    assert request["folder"] == small.document["model"]["name_or_path"] == str(tmp_path / "base")
    assert (request["config"]["hidden_size"] < 4096, "from_config" in small.document["model"]) == (
        True,
        False,
    )
    assert {name: small.document["lora"].get(name) for name in ("r", "lora_alpha", "rank_pattern")} == {
        "r": 4,
        "lora_alpha": 16,
        "rank_pattern": None,
    }
    listed = [line for line in small.changes if line.startswith("lora.")]
    assert listed[-3:] == ["lora.r: 4", "lora.rank_pattern: {}", "lora.layers_to_transform: null"]
    loaded = load_recipe(str(small.write(tmp_path))).recipe
    assert loaded.lora is not None


def test_small_adapter_is_rehearsed_as_it_is(tmp_path: Path, bases: list[dict[str, Any]]) -> None:
    small = shrunk(resolved({"model": {"name_or_path": "gpt2"}, "lora": {"r": 2}}), tmp_path)
    assert small.document["lora"]["r"] == 2
    assert not any(line.startswith("lora.") for line in small.changes)
    assert len(bases) == 1


def test_base_that_cannot_be_written_ends_the_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_down, "run_torch_script", lambda *_: ChildResult(1, {}, "No space left"))
    recipe = resolved({"model": {"name_or_path": "gpt2"}, "lora": {"r": 2}})
    with pytest.raises(FailedError, match="the small model cannot be written: exit code 1: No space left"):
        shrunk(recipe, tmp_path)


EVALUATED = {"evaluation": {"sets": [{"path": "builtin:arithmetic"}]}}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (EVALUATED, "evaluation: none; NOT rehearsed"),
        (
            {
                "model": {
                    "from_config": LLAMA,
                    "tokenizer": "builtin:arithmetic",
                    "attn_implementation": "flash_attention_2",
                }
            },
            "attention: transformers' default, since flash_attention_2 needs a GPU",
        ),
        (
            {"fsdp": {"ignored_modules": r"model\.layers\.31\.mlp"}},
            r'fsdp.ignored_modules: "model\\.layers\\.1\\.mlp", the layers of the small model',
        ),
        (
            {"fsdp": {"activation_checkpointing": "auto"}},
            "fsdp.activation_checkpointing: auto is resolved for the small model, which usually "
            "recomputes nothing",
        ),
        (
            {"fsdp": {"reshard_after_backward": "auto"}, "training": {"gradient_accumulation_steps": 2}},
            "fsdp.reshard_after_backward: auto is resolved for the small model, which usually stays gathered",
        ),
        (
            {"fsdp": {"reshard_after_forward": 2}, "launch": {"num_processes": 4}},
            "fsdp.reshard_after_forward: the strategy's default, since the number of ranks differs",
        ),
        (
            {"fsdp": {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000000}},
            "fsdp.min_num_params: auto, since the layers are smaller",
        ),
        (
            {
                "data": {
                    "train": [{"path": "builtin:arithmetic"}],
                    "on_bad_row": "skip",
                    "max_bad_share": 0.01,
                }
            },
            "data.max_bad_share: 1 instead of 0.01, which is a share of all rows",
        ),
    ],
    ids=lambda each: each.partition(":")[0] if isinstance(each, str) else "",
)
def test_setting_that_the_small_model_cannot_have_is_replaced_and_listed(
    tmp_path: Path, text: dict[str, Any], line: str
) -> None:
    """Without the setting there is no such line, and the result is a recipe."""
    small = shrunk(resolved(text), tmp_path)
    assert line in small.changes
    assert line not in shrunk(resolved({}), tmp_path).changes
    again = load_recipe(str(small.write(tmp_path))).recipe
    assert not again.evaluation.is_on
    resolve(again, MACHINE, cwd=tmp_path, assume="cuda")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"num_decay_steps": 5000, "num_stable_steps": 90000}, {"num_decay_steps": 12}),
        ({"num_decay_steps": 7, "min_lr_ratio": 0.1}, {"num_decay_steps": 7, "min_lr_ratio": 0.1}),
    ],
)
def test_phases_of_a_schedule_fit_the_steps_of_a_rehearsal(
    tmp_path: Path, given: dict[str, Any], kept: dict[str, Any]
) -> None:
    training = {
        "max_steps": 100_000,
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": given,
        "warmup_steps": 0.05,
    }
    small = shrunk(resolved({"training": training}), tmp_path).document["training"]
    assert small["lr_scheduler_kwargs"] == kept
    assert small["warmup_steps"] == 0.05, "a share of the steps stays one"
