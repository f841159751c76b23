"""Tied weights are written once where transformers restores them, and never where it would not."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.formats.tied_names import tie_setting, tied_candidates
from tests.merge.checkpoints import SHARDS, make_run, merged_tensors, save_dcp
from tests.merge.test_merged_values import model_directory, small_gpt2, small_llama

HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"


def set_config(folder: Path, **fields: object) -> Path:
    path = folder / "config.json"
    config = {key: value for key, value in (json.loads(path.read_text()) | fields).items() if value != "absent"}
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
    result = merge(make_run(tmp_path / "run", {1: state}, model=model_directory(model, tmp_path / "m")), dtype="keep")
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
    merged = merged_tensors(merge(tmp_path / "c", base=str(model_directory(model, tmp_path / "base")), verify="none").output)
    assert HEAD not in merged
    assert torch.equal(merged[EMBEDDING], model.transformer.wte.weight)


def test_tie_setting_falls_back_to_text_config():
    assert tie_setting({"text_config": {"tie_word_embeddings": False}}) is False
    assert tie_setting({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}) is True
    assert tie_setting({}) is None


def tied_names_of_transformers() -> dict[str, dict[str, str]]:
    """{class: `_tied_weights_keys`} of the causal language models, read from the source that is installed."""
    found: dict[str, dict[str, str]] = {}
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        for text in path.read_text(encoding="utf-8").split("\nclass ")[1:]:
            name = text.partition("(")[0]
            keys = re.search(r"\n    _tied_weights_keys = (\{[^}]*\})", text)
            if name.endswith(("ForCausalLM", "LMHeadModel")) and keys is not None:
                found[name] = ast.literal_eval(keys[1])
    return found


def test_heads_and_embeddings_of_all_causal_models_are_known():
    classes = tied_names_of_transformers()
    assert len(classes) > 100
    unknown = set()
    for name, pairs in classes.items():
        for head, embedding in pairs.items():
            if head.endswith(".weight") and tied_candidates(dict.fromkeys((head, embedding), (100, 8))) != {head: embedding}:
                unknown.add(name)
    # ProphetNet ties two embeddings and Blt an embedding to the head: both copies are written, which loads as well.
    assert unknown <= {"ProphetNetForCausalLM", "BltForCausalLM"}


def test_similarly_named_layers_are_not_paired():
    names = ["model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.o_proj.weight"]
    assert tied_candidates(dict.fromkeys(names, (8, 8))) == {"lm_head.weight": "model.embed_tokens.weight"}


def test_untied_model_of_a_run_keeps_its_head(tmp_path, merge):
    model = small_llama()
    run = make_run(tmp_path / "run", {1: model.state_dict()}, model=model_directory(model, tmp_path / "m"))
    assert "lm_head.weight" in merged_tensors(merge(run).output)


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
