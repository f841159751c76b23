"""Checks after the copy, each of which must be able to fail."""

from __future__ import annotations

import json
import mmap
import os
import signal
from pathlib import Path

import pytest
import torch

from fsdp_tune.core.atomic import Disk
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.merge import load_check, loaded
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.merging import merge_checkpoint
from tests.merge.checkpoints import SHARDS, make_run, merged_tensors, save_dcp
from tests.merge.test_merging_values import model_directory, small_gpt2, small_llama

STATE = {"a": torch.randn(100, 50), "b": torch.randn(700)}


def spoil_writes(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A disk that silently flips a bit of the `number`-th write."""
    original, count = Disk.write, 0

    def write(self: Disk, file, data) -> None:
        nonlocal count
        count += 1
        if count == number:
            spoiled = memoryview(mmap.mmap(-1, len(data)))  # at an address that direct I/O takes
            spoiled[:] = data
            spoiled[len(spoiled) // 2] ^= 1
            data = spoiled
        original(self, file, data)

    monkeypatch.setattr(Disk, "write", write)


@pytest.mark.parametrize("number", [2, 3, 4])
def test_disk_returning_other_bytes_is_detected(number, tmp_path, monkeypatch):
    """The first write probes direct I/O, the second is the header, the others are tensors."""
    save_dcp({"model": STATE}, tmp_path / "c" / SHARDS)
    spoil_writes(monkeypatch, number)
    with pytest.raises(FsdpTuneError) as caught:
        merge_checkpoint(tmp_path / "c", MergeOptions(output=tmp_path / "out"))
    assert caught.value.exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_verify_full_reads_output_again(tmp_path, monkeypatch):
    """A bit that flips after the tensor was read back is found by `full` alone."""
    from fsdp_tune.merge import merging as run

    save_dcp({"model": STATE}, tmp_path / "c" / SHARDS)
    original = run.write_tensors

    def then_spoil(sources, layout, stage, **options):
        written = original(sources, layout, stage, **options)
        with open(stage / "model.safetensors", "r+b") as file:
            file.seek(-1, os.SEEK_END)
            (last,) = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))
        return written

    monkeypatch.setattr(run, "write_tensors", then_spoil)
    merge_checkpoint(tmp_path / "c", MergeOptions(output=tmp_path / "quick"))
    with pytest.raises(FsdpTuneError, match="reads back from the disk otherwise"):
        merge_checkpoint(tmp_path / "c", MergeOptions(output=tmp_path / "full", verify="full"))
    assert not (tmp_path / "full").exists()


def test_merge_json_lists_every_tensor_with_the_digest_of_its_bytes(tmp_path):
    import xxhash

    run = make_run(tmp_path / "run", {7: STATE})
    output = merge_checkpoint(run, MergeOptions(dtype="keep")).output
    record = json.loads((output / "merge.json").read_text())
    assert record["steps"] == [7]
    assert record["source"] == [str(run / "checkpoint-7")]
    assert record["recipe_digest"].startswith("blake2b:")
    for name, value in merged_tensors(output).items():
        assert record["tensors"][name]["digest"] == xxhash.xxh3_128(value.numpy().tobytes()).hexdigest()
        assert record["tensors"][name]["shape"] == list(value.shape)


def test_model_card_names_data_recipe_and_last_values(tmp_path):
    from fsdp_tune.recipe.schema.data_section import Data, DataSource
    from fsdp_tune.recipe.schema.recipe import Recipe
    from fsdp_tune.recipe.schema.sections import Launch, Model

    recipe = Recipe(
        model=Model(name_or_path="org/base-7b"),
        data=Data(train=[DataSource(path="org/data"), DataSource(path="rows.jsonl")], max_length=99),
        launch=Launch(env={"WANDB_NOTES": "of this machine"}),
    )
    run = make_run(tmp_path / "run", {7: STATE}, recipe=recipe)
    (run / "recipe.yaml").write_text("model: {name_or_path: org/base-7b}  # of the owner alone\n")
    lines = [
        {"step": 5, "loss": 3.0, "tokens": 100},
        {"step": 7, "loss": 2.5, "tokens": 1400},
        {"step": 7, "eval_loss": 2.25},
        {"step": 9, "loss": 1.0},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    card = (merge_checkpoint(run, MergeOptions()).output / "README.md").read_text()
    assert card.startswith("---\n")
    for text in (
        'base_model: "org/base-7b"\nbase_model_relation: "finetune"\n',
        'datasets: ["org/data"]',
        "| Training loss | 2.5000 |",
        "| Evaluation loss | 2.2500 |",
        "1,400",
        "max_length: 99",
    ):
        assert text in card, text
    for text in ("of the owner alone", "of this machine"):
        assert text not in card, text


def test_value_of_a_step_before_the_merged_one_says_which_in_the_card(tmp_path):
    run = make_run(tmp_path / "run", {7: STATE})
    lines = [
        {"step": 2, "eval_loss": 2.1},
        {"step": 5, "loss": 3.0, "tokens": 100},
        {"step": 7, "loss": None, "tokens": 140},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    card = (merge_checkpoint(run, MergeOptions()).output / "README.md").read_text()
    for text in (
        "| Training loss (step 5) | 3.0000 |",
        "| Evaluation loss (step 2) | 2.1000 |",
        "| Tokens trained on | 140 |",
    ):
        assert text in card, card


def test_names_in_the_card_are_neither_html_nor_links(tmp_path):
    from fsdp_tune.recipe.schema.data_section import Data, DataSource
    from fsdp_tune.recipe.schema.recipe import Recipe

    names = ("<img src=x onerror=alert(1)>.jsonl", "[free](https://example.org/a|b).jsonl")
    recipe = Recipe(data=Data(train=[DataSource(path=name) for name in names]))
    run = make_run(tmp_path / "run", {7: STATE}, recipe=recipe)
    card = (merge_checkpoint(run, MergeOptions()).output / "README.md").read_text()
    (row,) = [line for line in card.splitlines() if line.startswith("| Data |")]
    assert (
        row
        == r"| Data | &lt;img src=x onerror=alert(1)&gt;.jsonl, \[free\](https://example.org/a\|b).jsonl |"
    )


def test_card_names_files_without_their_folders(tmp_path):
    from fsdp_tune.recipe.schema.data_section import Data, DataSource
    from fsdp_tune.recipe.schema.recipe import Recipe
    from fsdp_tune.recipe.schema.sections import Model

    data = Data(
        train=[
            DataSource(path="/home/alice/secret project/rows.jsonl"),
            DataSource(path="/home/alice", data_files=["/home/alice/b"]),
        ]
    )
    recipe = Recipe(model=Model(name_or_path="/home/alice/models/llama"), data=data)
    run = make_run(tmp_path / "run", {7: STATE}, recipe=recipe)
    card = (merge_checkpoint(run, MergeOptions()).output / "README.md").read_text()
    assert "home" not in card
    for text in (
        "| Base model | llama |",
        "| Data | rows.jsonl, alice |",
        "name_or_path: llama",
        "path: rows.jsonl",
    ):
        assert text in card, text


def test_card_of_streamed_run_does_not_give_the_size_of_its_sample(tmp_path):
    run = make_run(tmp_path / "run", {7: STATE})
    train = {"rows": 991, "examples": 1000, "tokens": 4321}
    for sample, expected in (
        ({}, "991 rows of 1,000 examples, 4,321 tokens an epoch"),
        ({"stream_sample_rows": 1000}, "a stream"),
    ):
        (run / "data.json").write_text(
            json.dumps({"key": "k", "report": {"sets": {"train": train}, **sample}})
        )
        card = (
            merge_checkpoint(run, MergeOptions(output=tmp_path / expected[:5])).output / "README.md"
        ).read_text()
        assert f"| Size of the data | {expected} |" in card


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("kernel", ["flash_attention_2", "someone/kernel"])
def test_kernel_that_a_config_names_is_neither_needed_nor_loaded(key, kernel, tmp_path):
    """flash-attn is not installed here, and transformers would download and run a kernel from the hub."""
    model = small_gpt2()
    model_directory(model, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: kernel}))
    model.save_pretrained(tmp_path / "weights")
    (tmp_path / "weights" / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert "lm_head.weight" in loaded.parameter_list(tmp_path)["parameters"]
    assert loaded.load_and_run(tmp_path)["finite"]


@pytest.fixture(scope="module")
def merged_gpt2(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("gpt2")
    model = small_gpt2()
    run = make_run(root / "run", {1: model.state_dict()}, model=model_directory(model, root / "m"))
    output = merge_checkpoint(run, MergeOptions(dtype="bf16")).output
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (output / name).unlink()
    return output


def test_valid_output_loads_without_warning(merged_gpt2):
    answer = loaded.main("forward", merged_gpt2)
    assert answer == {"where": "weights", "report": {}, "finite": True, "shape": [1, 8, 61]}


def test_model_too_large_for_the_memory_is_checked_by_shapes(merged_gpt2, monkeypatch):
    monkeypatch.setattr(loaded, "available_bytes", lambda: 1000)
    assert loaded.main("forward", merged_gpt2) == {
        "where": "shapes",
        "report": {},
        "finite": None,
        "shape": [1, 8, 61],
    }


def test_parameter_list_comes_from_the_model(merged_gpt2):
    answer = loaded.main("names", merged_gpt2)
    model = small_gpt2()
    assert answer["parameters"] == {name: list(value.shape) for name, value in model.state_dict().items()}
    assert answer["tied"] == {"lm_head.weight": "transformer.wte.weight"}


ANSWERS = {
    "an error": "ValueError: no",
    "missing keys": {"where": "weights", "report": {"missing_keys": ["x.weight"]}, "finite": True},
    "not finite": {"where": "weights", "report": {}, "finite": False},
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_output_that_transformers_refuses_is_not_published(kind, merged_gpt2, monkeypatch):
    monkeypatch.setattr(load_check.Child, "answer", lambda _: ANSWERS[kind])
    with pytest.raises(FsdpTuneError) as caught:
        load_check.load_and_run(merged_gpt2, allow_nonfinite=False)
    assert caught.value.exit_code == 1


def test_killed_check_is_reported_with_its_signal(merged_gpt2, real_child):
    with load_check.Child("forward", merged_gpt2) as child:
        os.kill(child._process.pid, signal.SIGTERM)
        assert child.answer() == "its process was killed by SIGTERM"


def test_child_process_answers_what_its_module_computes(real_child, merged_gpt2):
    with load_check.Child("names", merged_gpt2) as child:
        assert child.answer() == loaded.main("names", merged_gpt2)


@pytest.mark.slow
@pytest.mark.e2e
def test_verify_full_runs_in_child_processes(real_child, tmp_path, monkeypatch):
    """A checkpoint of another tool with a base: the parameter list is compared during the copy, and the
    output loaded after it."""
    model = small_llama()
    save_dcp({"model": model.state_dict()}, tmp_path / "c" / SHARDS)
    base = model_directory(model, tmp_path / "base")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).unlink()
    for name in ("torch.py", "transformers.py", "numpy.py"):
        (tmp_path / "c" / name).write_text("open('sentinel', 'w')")
    monkeypatch.chdir(tmp_path / "c")
    result = merge_checkpoint(
        tmp_path / "c", MergeOptions(output=tmp_path / "out", base=str(base), verify="full")
    )
    assert result.verified == "full"
    assert [notice.code for notice in result.notices] == ["merge-bare"]
    assert not (tmp_path / "c" / "sentinel").exists()


def test_custom_code_is_never_run(merged_gpt2, tmp_path):
    """A config that names Python code next to it: the list is unknown, and a notice reports it."""
    folder = tmp_path / "custom"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
        )
    )
    (folder / "mine.py").write_text("open('sentinel', 'w')")
    with pytest.raises(ValueError, match="trust_remote_code"):
        loaded.main("names", folder)
    assert not Path("sentinel").exists()
