"""Tied weights are written once where transformers restores them, and never where it would not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdp_tune.core.errors import FsdpTuneError
from tests.merge.checkpoints import SHARDS, make_run, merged_tensors, save_dcp
from tests.merge.test_merging_values import model_directory, small_gpt2, small_llama

HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"


def set_config(folder: Path, **fields: object) -> Path:
    path = folder / "config.json"
    config = {
        key: value for key, value in (json.loads(path.read_text()) | fields).items() if value != "absent"
    }
    path.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("stated", [True, "absent"])
def test_tied_head_is_written_once_and_restored(stated, tmp_path, merge):
    model = small_gpt2()
    base = set_config(model_directory(model, tmp_path / "base"), tie_word_embeddings=stated)
    output = merge(make_run(tmp_path / "run", {1: model.state_dict()}, model=base), dtype="keep").output
    assert HEAD not in merged_tensors(output)
    assert json.loads((output / "config.json").read_text())["tie_word_embeddings"] is True
    assert json.loads((output / "merge.json").read_text())["tied"] == {HEAD: EMBEDDING}
    loaded, report = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_head_that_is_equal_but_not_tied_is_kept(tmp_path, merge):
    model = small_gpt2(tied=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.transformer.wte.weight)
    run = make_run(tmp_path / "run", {1: model.state_dict()}, model=model_directory(model, tmp_path / "m"))
    output = merge(run).output
    assert {HEAD, EMBEDDING} <= merged_tensors(output).keys()


def test_lost_tie_is_reported_and_both_tensors_are_kept(tmp_path, merge):
    model = small_gpt2()
    state = dict(model.state_dict())
    state[HEAD] = state[HEAD] + 1
    result = merge(
        make_run(tmp_path / "run", {1: state}, model=model_directory(model, tmp_path / "m")), dtype="keep"
    )
    assert any("differ" in notice.message for notice in result.notices)
    loaded, report = AutoModelForCausalLM.from_pretrained(result.output, output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(loaded.lm_head.weight, state[HEAD])
    assert torch.equal(loaded.transformer.wte.weight, state[EMBEDDING])


def test_tied_pair_with_one_saved_tensor_loads(tmp_path, merge):
    model = small_gpt2()
    for number, gone in enumerate((HEAD, EMBEDDING)):
        state = {name: value for name, value in model.state_dict().items() if name != gone}
        run = make_run(tmp_path / f"run{number}", {1: state}, model=model_directory(model, tmp_path / "m"))
        output = merge(run, output=None, dtype="keep").output
        loaded, report = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
        assert not any(report.values())
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_missing_config_keeps_all_tensors(tmp_path, merge):
    save_dcp({"model": small_gpt2().state_dict()}, tmp_path / "c" / SHARDS)
    assert {HEAD, EMBEDDING} <= merged_tensors(merge(tmp_path / "c").output).keys()


def test_tied_weights_of_a_pickle_share_their_storage_and_are_written_once(tmp_path, merge):
    model = small_gpt2()
    (tmp_path / "c").mkdir()
    torch.save(model.state_dict(), tmp_path / "c" / "pytorch_model_fsdp.bin")
    merged = merged_tensors(
        merge(tmp_path / "c", base=str(model_directory(model, tmp_path / "base")), verify="none").output
    )
    assert HEAD not in merged
    assert torch.equal(merged[EMBEDDING], model.transformer.wte.weight)


def test_another_model_as_base_is_refused(tmp_path, merge):
    save_dcp({"model": small_gpt2().state_dict()}, tmp_path / "c" / SHARDS)
    with pytest.raises(FsdpTuneError, match="does not hold the parameters of this model") as caught:
        merge(tmp_path / "c", base=str(model_directory(small_llama(), tmp_path / "base")))
    assert caught.value.exit_code == 1
    assert not (tmp_path / "out").exists()


def test_parameter_names_with_extra_prefix_are_explained(tmp_path, merge):
    model = small_gpt2()
    save_dcp({"net": model.state_dict()}, tmp_path / "c" / SHARDS)
    with pytest.raises(FsdpTuneError, match="does not hold the parameters of this model") as caught:
        merge(tmp_path / "c", base=str(model_directory(model, tmp_path / "base")))
    assert "this model's with `net.` before them" in str(caught.value.problems[0].hint)
