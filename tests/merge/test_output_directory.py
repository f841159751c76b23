"""Location, ownership and replacement of the output."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.merging import merge_checkpoint
from tests.merge.checkpoints import SHARDS, contents, make_run, merged_tensors, save_dcp

STATE = {"w": torch.randn(100)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = make_run(tmp_path / "a" / "run", {1: STATE, 2: STATE})
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    return run


PLACES = {
    "the run": ".",
    "above the run": "..",
    "far above the run": "../..",
    "the checkpoint": "checkpoint-2",
    "in the checkpoint": "checkpoint-2/merged",
    "the shards": f"checkpoint-2/{SHARDS}",
    "in the shards": f"checkpoint-2/{SHARDS}/deep/merged",
    "the model": "model",
    "in the model": "model/x",
    "roundabout": f"checkpoint-1/../checkpoint-2/{SHARDS}/x",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("overwrite", [False, True])
def test_source_is_not_modified(place, overwrite, run, tmp_path):
    before = contents(tmp_path)
    with pytest.raises(FsdpTuneError) as caught:
        merge_checkpoint(run, MergeOptions(output=run / PLACES[place], overwrite=overwrite))
    assert caught.value.exit_code == 2
    assert contents(tmp_path) == before


def test_output_linking_to_source_is_refused(run, tmp_path):
    (tmp_path / "link").symlink_to(run / "checkpoint-2")
    before = contents(run)
    for output in (tmp_path / "link", tmp_path / "link" / "out"):
        with pytest.raises(FsdpTuneError) as caught:
            merge_checkpoint(run, MergeOptions(output=output, overwrite=True))
        assert caught.value.exit_code == 2
    assert contents(run) == before


def test_output_equal_to_base_is_refused(run, tmp_path):
    """Its weights are not in the output: only config and tokenizer are taken from it."""
    base = tmp_path / "base"
    merge_checkpoint(run, MergeOptions(output=base))
    (base / "config.json").write_text('{"model_type": "gpt2"}')
    before = (base / "model.safetensors").read_bytes()
    with pytest.raises(FsdpTuneError) as caught:
        merge_checkpoint(run, MergeOptions(output=base, base=str(base), overwrite=True))
    assert caught.value.problems[0].code == "merge-output-is-input"
    assert (base / "model.safetensors").read_bytes() == before


def test_file_is_merged_into_a_directory_next_to_it(tmp_path):
    torch.save({"w": torch.ones(2, 3)}, tmp_path / "model.pt")
    merged = merge_checkpoint(tmp_path / "model.pt", MergeOptions(output=tmp_path / "merged"))
    assert torch.equal(merged_tensors(merged.output)["w"], torch.ones(2, 3))
    with pytest.raises(FsdpTuneError) as caught:
        merge_checkpoint(tmp_path / "model.pt", MergeOptions(output=tmp_path, overwrite=True))
    assert caught.value.problems[0].code == "merge-output-is-input"


def test_existing_output_is_refused_with_alternatives(run, tmp_path):
    merge_checkpoint(run, MergeOptions(output=tmp_path / "out"))
    before = contents(tmp_path / "out")
    with pytest.raises(FsdpTuneError) as caught:
        merge_checkpoint(run, MergeOptions(output=tmp_path / "out"))
    assert caught.value.exit_code == 2
    assert "--overwrite" in caught.value.problems[0].ways_out
    assert contents(tmp_path / "out") == before


def test_overwrite_replaces_only_merge_output(run, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years")
    with pytest.raises(FsdpTuneError, match=r"no merge\.json"):
        merge_checkpoint(run, MergeOptions(output=tmp_path / "precious", overwrite=True))
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "years"
    for dtype in ("bf16", "fp32"):
        merge_checkpoint(run, MergeOptions(output=tmp_path / "out", overwrite=True, dtype=dtype))
    assert merged_tensors(tmp_path / "out")["w"].dtype == torch.float32


def test_failed_overwrite_keeps_the_old_output(run, tmp_path):
    merge_checkpoint(run, MergeOptions(output=tmp_path / "out"))
    before = contents(tmp_path / "out")
    shard = next((run / "checkpoint-2" / SHARDS).glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-100] + b"x" * 100)
    for step in (None, 2):
        with pytest.raises(FsdpTuneError):
            merge_checkpoint(run, MergeOptions(output=tmp_path / "out", overwrite=True, step=step))
    assert contents(tmp_path / "out") == before


def test_empty_directory_may_be_filled(run, tmp_path):
    (tmp_path / "out").mkdir()
    assert merged_tensors(merge_checkpoint(run, MergeOptions(output=tmp_path / "out")).output)


def test_file_or_link_at_output_is_refused(run, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file", "dangling"):
        with pytest.raises(FsdpTuneError) as caught:
            merge_checkpoint(run, MergeOptions(output=tmp_path / name, overwrite=True))
        assert caught.value.exit_code == 2


def test_files_follow_the_umask_and_directories_their_parent(run, tmp_path):
    parent = tmp_path / "shared"
    parent.mkdir()
    parent.chmod(0o2775)
    before = os.umask(0o022)
    try:
        output = merge_checkpoint(run, MergeOptions(output=parent / "out")).output
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in output.iterdir()} == {0o644}
    assert stat.S_IMODE(output.stat().st_mode) == 0o2755


def test_relative_output_is_relative_to_the_working_directory(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = merge_checkpoint(run, MergeOptions(output=Path("here")))
    assert result.output == tmp_path / "here"
    assert (tmp_path / "here" / "merge.json").is_file()


def test_nothing_outside_the_output_changes(run, tmp_path):
    before = contents(tmp_path)
    merge_checkpoint(run, MergeOptions(output=tmp_path / "out"))
    after = {name: data for name, data in contents(tmp_path).items() if not name.startswith("out/")}
    assert after == before


def test_output_inside_foreign_checkpoint_is_refused(tmp_path):
    save_dcp({"model": STATE}, tmp_path / "step-500")
    with pytest.raises(FsdpTuneError) as caught:
        merge_checkpoint(tmp_path / "step-500", MergeOptions(output=tmp_path / "step-500" / "merged"))
    assert caught.value.exit_code == 2
    assert merge_checkpoint(tmp_path / "step-500", MergeOptions(output=tmp_path / "merged")).tensors == 1


def test_run_is_exported_alike_with_and_without_base(tmp_path: Path) -> None:
    """RUN/model has what the run changed in the base's files; `--base` gives a run no other config, tokenizer
    or dtype."""
    model, base = tmp_path / "model", tmp_path / "base"
    for folder, factor in ((model, 4.0), (base, 2.0)):
        folder.mkdir()
        (folder / "config.json").write_text(
            f'{{"model_type": "llama", "rope_scaling": {{"rope_type": "linear", "factor": {factor}}}}}'
        )
        (folder / "tokenizer.json").write_text(f'{{"factor": {factor}}}')
    run = make_run(tmp_path / "run", {1: STATE}, model=model)
    merge_checkpoint(run, MergeOptions(verify="none"))
    merge_checkpoint(run, MergeOptions(output=tmp_path / "again", base=str(base), verify="none"))
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (run / "merged" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    config = json.loads((run / "merged" / "config.json").read_text())
    assert (config["rope_scaling"]["factor"], config["dtype"], config["torch_dtype"]) == (
        4.0,
        "bfloat16",
        "bfloat16",
    )


def test_base_of_a_run_that_does_not_exist_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(FsdpTuneError) as caught:
        merge_checkpoint(run, MergeOptions(output=tmp_path / "out", base="./gone"))
    assert caught.value.problems[0].code == "merge-base"
