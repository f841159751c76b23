"""A model whose files store embedding and head with different values is trained untied, whatever its config.json states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.loading import untie
from fsdp_tune.model.loading.construct import build_empty, build_full, is_tied, model_config
from fsdp_tune.model.loading.inspect import find_facts
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of

HEAD = "lm_head.weight"
EMBEDDINGS = {"llama": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight"}


def save_base(folder: Path, family: str, *, change: float, kind: str = "single") -> Path:
    """Write a model of `family` whose config ties, and whose files hold the head as the embedding plus `change` in its last element."""
    config = AutoConfig.for_model(**(FAMILIES[family] | {"tie_word_embeddings": False}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.get_input_embeddings().weight)
        model.lm_head.weight[-1, -1] += change
    model.save_pretrained(folder, max_shard_size="20kB" if kind == "sharded" else "1GB")
    if "pickle" in kind:
        state, is_old = load_file(folder / "model.safetensors"), kind == "old pickle"
        torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not is_old)
        (folder / "model.safetensors").unlink()
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    return folder


def trained(base: Path, **model: Any) -> Any:
    return recipe_of({"name_or_path": str(base), **model}, data={"train": [{"path": "x"}], "max_length": 64})


@pytest.mark.parametrize("kind", ["single", "sharded", "pickle", "old pickle"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_stored_head_is_kept_and_reported(family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untie, "BLOCK_ELEMENTS", 1000)
    base = save_base(tmp_path, family, change=0.5, kind=kind)
    recipe = trained(base)
    full, empty = build_full(recipe), build_empty(recipe)
    difference = full.lm_head.weight - full.get_input_embeddings().weight
    assert difference.count_nonzero() == 1
    assert difference[-1, -1].item() == pytest.approx(0.5)
    assert not is_tied(empty)
    document = find_facts(recipe)
    assert document.facts is not None
    [notice] = [each for each in document.notices if each.code == "weights-untied"]
    assert f"`{HEAD}` and `{EMBEDDINGS[family]}`" in notice.message
    assert document.facts.parameters == sum(parameter.numel() for parameter in full.parameters())
    assert (document.facts.config["tie_word_embeddings"], document.facts.tied_embeddings) == (False, False)


@pytest.mark.parametrize("kind", ["single", "sharded", "pickle", "old pickle"])
def test_equal_copies_stay_tied(kind: str, tmp_path: Path) -> None:
    recipe = trained(save_base(tmp_path, "llama", change=0.0, kind=kind))
    document = find_facts(recipe)
    assert document.facts is not None
    assert document.facts.tied_embeddings is True
    assert not [each for each in document.notices if each.code == "weights-untied"]
    assert is_tied(build_full(recipe))


def test_copies_of_two_dtypes_are_compared_by_value(tmp_path: Path) -> None:
    save_base(tmp_path, "llama", change=0.0)
    path = tmp_path / "model.safetensors"
    state = {name: value.bfloat16() for name, value in load_file(path).items()}
    save_file(state | {HEAD: state[HEAD].float()}, path)
    assert model_config(trained(tmp_path)).tie_word_embeddings is True
    save_file(state | {HEAD: state[HEAD].float() + 1e-5}, path)
    assert model_config(trained(tmp_path)).tie_word_embeddings is False


def test_nested_setting_is_read(tmp_path: Path) -> None:
    """Configurations of models that also take images hold that of the language model."""
    save_base(tmp_path, "llama", change=0.5)
    config = AutoConfig.for_model("gemma3", text_config={"tie_word_embeddings": True}, tie_word_embeddings=True)
    assert untie.untie(trained(tmp_path), config) is not None
    assert (config.tie_word_embeddings, config.get_text_config().tie_word_embeddings) == (False, False)


def test_recipe_that_unties_gets_no_notice(tmp_path: Path) -> None:
    recipe = trained(save_base(tmp_path, "llama", change=0.5), config_overrides={"tie_word_embeddings": False})
    assert not [each for each in find_facts(recipe).notices if each.code == "weights-untied"]
    assert build_full(recipe).lm_head.weight[-1, -1] != build_full(recipe).model.embed_tokens.weight[-1, -1]


def test_recipe_that_ties_different_weights_is_refused(tmp_path: Path) -> None:
    recipe = trained(save_base(tmp_path, "llama", change=0.5), config_overrides={"tie_word_embeddings": True})
    with pytest.raises(FsdpTuneError) as caught:
        model_config(recipe)
    assert [problem.code for problem in caught.value.problems] == ["tie-contradicts-weights"]
    allowed = trained(save_base(tmp_path / "equal", "llama", change=0.0), config_overrides={"tie_word_embeddings": True})
    assert model_config(allowed).tie_word_embeddings is True


def test_head_of_the_files_that_are_read_decides(tmp_path: Path) -> None:
    """Not that of an index beside the single file, and also one that the index does not list."""
    base = save_base(tmp_path, "llama", change=0.5)
    other = save_base(tmp_path / "other", "llama", change=0.0) / "model.safetensors"
    stale = other.rename(base / "stale.safetensors")
    index = base / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(load_file(stale), stale.name)}))
    assert not is_tied(build_empty(trained(base)))
    (base / "model.safetensors").rename(stale)
    index.write_text(json.dumps({"weight_map": {EMBEDDINGS["llama"]: stale.name}}))
    assert not is_tied(build_empty(trained(base)))
