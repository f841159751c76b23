"""The quantised model next to a merged one: refused, or written with the logits of the training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_tune.answer.find_model import ModelToEvaluate, run_of_model
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.version import __version__
from fsdp_tune.jobs.results import merge_checkpoint, missing_outputs
from fsdp_tune.merge import merging, quantised
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.publish import CardResult, _listed, add_results
from fsdp_tune.merge.quantised import (
    RECORD_KIND,
    check_quantised,
    check_quantised_target,
    quantise_merged,
    quantised_directory,
    rounding_notices,
)
from fsdp_tune.model.loading.quantised_files import patterns_of
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import MERGE_RECORD, RunDir
from fsdp_tune.run.written_files import require_unchanged_output
from tests.merge.checkpoints import make_run

TRAINED = {"quantization": {"train": "int4", "group_size": 16}, "precision": {"mixed_precision": "bf16"}}


def recipe(**sections: Any) -> Recipe:
    return Recipe.model_validate(TRAINED | sections)


@pytest.mark.parametrize(
    ("trained", "dtype", "words"),
    [
        (None, "bf16", "the run has no such key"),
        (recipe(quantization=None), "bf16", "the run has no such key"),
        (recipe(), "fp16", "the run rounded weights of bf16 to int4, and merged weights would be in fp16"),
    ],
)
def test_option_without_emulated_quantisation_is_refused(
    trained: Recipe | None, dtype: str, words: str
) -> None:
    with pytest.raises(FsdpTuneError, match=words) as caught:
        check_quantised(trained, dtype)
    assert caught.value.exit_code == 2
    assert caught.value.problems[0].hint


def test_only_an_earlier_quantised_model_is_replaced(tmp_path: Path) -> None:
    folder = quantised_directory(tmp_path / "merged")
    folder.mkdir()
    check_quantised_target(tmp_path / "merged", overwrite=False)
    (folder / MERGE_RECORD).write_text('{"kind": "fsdp-tune merged model"}')
    for overwrite in (False, True):
        with pytest.raises(FsdpTuneError, match="the output exists"):
            check_quantised_target(tmp_path / "merged", overwrite=overwrite)
    (folder / MERGE_RECORD).write_text(json.dumps({"kind": RECORD_KIND}))
    check_quantised_target(tmp_path / "merged", overwrite=True)


class Conversion:
    """Stands for the child that converts: writes a file, or fails."""

    fails = False
    difference = 0.0
    left: tuple[str, ...] = ("lm_head",)

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.fails:
            raise quantised._failed("no memory")
        (Path(request["output"]) / "model.safetensors").write_bytes(b"codes")
        return {
            "layers": 2,
            "left": list(self.left),
            "difference": self.difference,
            "size_bytes": 5,
            "torchao": "0.18.0",
        }


@pytest.fixture
def conversion(monkeypatch: pytest.MonkeyPatch) -> Conversion:
    found = Conversion()
    monkeypatch.setattr(quantised, "_converted", found)
    return found


@pytest.fixture
def run(tmp_path: Path, conversion: Conversion) -> RunDir:
    states = {step: {"w": torch.full((2, 3), float(step))} for step in (10, 20)}
    return RunDir(
        make_run(tmp_path / "run", states, recipe=recipe(merge={"quantise": True, "dtype": "fp32"}))
    )


def codes(run: RunDir, folder: Path) -> list[str]:
    return [
        notice.code
        for notice in rounding_notices(Recipe.model_validate_json(run.recipe_json.read_bytes()), folder, run)
    ]


def test_quantised_model_has_the_record_of_a_merge(run: RunDir) -> None:
    """So a push, a mirror, `evaluate` and the check for changed files take it as the output of a merge."""
    run.model.mkdir(exist_ok=True)
    merge_checkpoint(run.path, MergeOptions(step=10))
    folder = run.merged_quantised
    record = json.loads((folder / MERGE_RECORD).read_text())
    assert (record["kind"], record["steps"], record["layers"]) == (RECORD_KIND, [10], 2)
    assert {path.name for path in _listed(folder)} == {path.name for path in folder.iterdir()}
    assert run_of_model(ModelToEvaluate("any", str(folder))) == run
    require_unchanged_output(folder)
    (folder / "model.safetensors").write_bytes(b"other")
    with pytest.raises(FsdpTuneError, match="digest differs"):
        require_unchanged_output(folder)


def test_merge_that_is_there_is_only_quantised_if_its_step_was_not_trained_again(
    run: RunDir, tmp_path: Path
) -> None:
    merge_checkpoint(run.path, MergeOptions(step=10, quantise=False, verify="none"))
    found = merging.merge_checkpoint(run.path, MergeOptions(step=10))
    assert (found.is_new, found.verified) == (False, "none"), "no file was checked"
    again = RunDir(make_run(tmp_path / "again", {10: {"w": torch.zeros(2, 3)}}))
    shutil.rmtree(run.checkpoint(10))
    again.checkpoint(10).rename(run.checkpoint(10))
    with pytest.raises(FsdpTuneError, match="the output exists"):
        merging.merge_checkpoint(run.path, MergeOptions(step=10))


def test_weights_that_are_not_rounded_and_outdated_models_are_reported(run: RunDir) -> None:
    merge_checkpoint(run.path, MergeOptions(step=10))
    assert (codes(run, run.merged), codes(run, run.merged_quantised)) == (["merge-not-rounded"], [])
    found = merge_checkpoint(run.path, MergeOptions(overwrite=True, quantise=False))
    expected = ["merge-not-rounded", "merge-quantised-outdated"]
    assert [
        notice.code for notice in found.notices if "round" in notice.code or "quantised" in notice.code
    ] == expected
    assert codes(run, run.merged_quantised) == ["merge-quantised-outdated"]
    for name, words in (
        ("merged", "these are not rounded"),
        ("merged-quantised", "int4, and bf16 where it is not quantised"),
    ):
        assert words in (run.path / name / "README.md").read_text(), name
    assert "not rounded" not in (run.merged_quantised / "README.md").read_text()


def test_card_has_no_results_of_other_weights(run: RunDir) -> None:
    merge_checkpoint(run.path, MergeOptions(quantise=False))
    card = run.merged / "README.md"
    add_results(
        card, [CardResult("arithmetic", "builtin:arithmetic", "test", "accuracy", 0.987, (0.9, 1.0), 10)]
    )
    merge_checkpoint(run.path, MergeOptions(quantise=True))
    assert "0.987" in card.read_text()
    found = (run.merged_quantised / "README.md").read_text()
    assert "0.987" not in found
    assert "## Recipe" in found


def test_card_says_what_was_quantised_and_names_nothing_where_nothing_was_left(
    run: RunDir, conversion: Conversion
) -> None:
    conversion.left = ()
    merge_checkpoint(run.path, MergeOptions())
    lines = (run.merged_quantised / "README.md").read_text().splitlines()
    sentence = (
        f"Quantised by torchao 0.18.0 and fsdp-tune {__version__} to int4, in groups of 16: 2 linear layers."
    )
    assert [
        line
        for line in lines
        if "torchao" in line or line.startswith(("Merged", "| dtype", "| Quantisation"))
    ] == [
        "| dtype | int4, and bf16 where it is not quantised |",
        "| Quantisation emulated in training | int4 |",
        sentence,
    ]


def test_card_that_was_rewritten_by_hand_says_what_was_quantised(run: RunDir) -> None:
    merge_checkpoint(run.path, MergeOptions(quantise=False))
    (run.merged / "README.md").write_text("# Our model\n")
    merge_checkpoint(run.path, MergeOptions(quantise=True))
    lines = (run.merged_quantised / "README.md").read_text().splitlines()
    assert lines[:2] == ["# Our model", ""]
    assert lines[2].startswith("Quantised by torchao 0.18.0 ")
    assert lines[2].endswith(" In bf16: `lm_head`.")


def test_failed_conversion_is_repeated_without_a_new_merge(run: RunDir, conversion: Conversion) -> None:
    conversion.fails = True
    with pytest.raises(FsdpTuneError, match="no memory"):
        merge_checkpoint(run.path, MergeOptions(overwrite=True))
    saved = Recipe.model_validate_json(run.recipe_json.read_bytes())
    assert missing_outputs(run, saved) == [run.merged], "a second `train` converts"
    written = (run.merged / "model.safetensors").stat().st_mtime_ns
    conversion.fails = False
    found = merge_checkpoint(run.path, MergeOptions(quantise=True))
    assert (found.quantised is not None, found.step, found.tensors, found.parameters, found.dtype) == (
        True,
        20,
        1,
        6,
        "float32",
    )
    assert (run.merged / "model.safetensors").stat().st_mtime_ns == written
    assert not found.is_new, "the command prints no speed of it"
    assert missing_outputs(run, saved) == []
    with pytest.raises(FsdpTuneError, match="the output exists"):
        merge_checkpoint(run.path, MergeOptions(quantise=True, step=10))


def test_changed_merge_is_not_converted(run: RunDir) -> None:
    merge_checkpoint(run.path, MergeOptions(quantise=False))
    data = bytearray((run.merged / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (run.merged / "model.safetensors").write_bytes(data)
    with pytest.raises(FsdpTuneError, match="is not what was written"):
        merge_checkpoint(run.path, MergeOptions(quantise=True))
    assert not run.merged_quantised.exists()


def test_directory_in_the_way_stops_only_the_conversion(run: RunDir) -> None:
    run.merged_quantised.mkdir()
    (run.merged_quantised / "notes.txt").write_text("mine")
    with pytest.raises(FsdpTuneError, match="is not an earlier quantised model"):
        merge_checkpoint(run.path, MergeOptions())
    assert (run.merged / MERGE_RECORD).is_file()
    assert [path.name for path in run.merged_quantised.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("difference", [0.5, float("nan")])
def test_other_logits_are_not_published(difference: float, run: RunDir, conversion: Conversion) -> None:
    conversion.difference = difference
    with pytest.raises(FsdpTuneError, match="the logits of the quantised model differ"):
        merge_checkpoint(run.path, MergeOptions())
    assert not run.merged_quantised.exists()


def test_patterns_match_only_the_layers_that_are_left() -> None:
    """transformers 5.17 matches a pattern from the start of a weight's name, without a boundary at its
    end."""
    left, layers = ["mlp.gate", "lm_head"], ["mlp.gate_proj", "mlp.up_proj"]
    found = patterns_of(left, layers)
    assert found == ["mlp.gate.weight", "lm_head"]


@pytest.mark.slow
@pytest.mark.parametrize("train", ["int4", "int8-int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_converted_model_has_the_logits_of_training(train: str, tied: bool, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 61,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
    }
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path / "merged", max_shard_size="100KB")
    (tmp_path / "merged" / "chat_template.jinja").write_text("{{ messages }}")
    trained = recipe(quantization={"train": train, "group_size": 16, "modules_to_not_convert": ["v_proj"]})
    found = quantise_merged(tmp_path / "merged", trained, 40_000)
    assert (found.layers, found.difference) == (12, 0.0)
    assert len([*found.path.glob("*.safetensors")]) > 1
    assert (found.path / "chat_template.jinja").read_text() == "{{ messages }}"
    quantised: Any = AutoModelForCausalLM.from_pretrained(found.path, dtype="auto")
    assert quantised.model.layers[0].self_attn.v_proj.weight.dtype == torch.bfloat16
    assert quantised.config.quantization_config.quant_type.weight_dtype == torch.int4


@pytest.mark.slow
def test_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config

    model: Any = AutoModelForCausalLM.from_config(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50))
    model.save_pretrained(tmp_path / "merged")
    with pytest.raises(FsdpTuneError, match="finds nothing to quantise") as caught:
        quantise_merged(tmp_path / "merged", recipe(), 10**9)
    assert caught.value.exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]
