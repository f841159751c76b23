"""Devices of loaded tensors, and that all ranks load in the same way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.loading import assemble as load
from fsdp_tune.model.loading.construct import build_empty, build_full
from fsdp_tune.model.loading.stored_tensors import Stored
from fsdp_tune.model.loading.weight_slices import WeightFiles
from tests.merge.ranks import run_ranks
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of


def test_offload_keeps_unsharded_tensors_on_device() -> None:
    frozen = {"from_config": FAMILIES["llama"], "freeze": ["model.norm.*"]}
    recipe = recipe_of(frozen, fsdp={"offload_params": True, "ignored_modules": r"model\.norm"})
    model = build_full(recipe)
    load._place_what_fsdp_leaves(recipe, model, torch.device("meta"))
    assert {name for name, parameter in model.named_parameters() if parameter.device.type != "cpu"} == {"model.norm.weight"}
    buffers = dict(model.named_buffers())
    assert "model.rotary_emb.inv_freq" in buffers
    assert {buffer.device.type for buffer in buffers.values()} == {"meta"}


@pytest.mark.parametrize(("ranks_with_files", "way"), [({0, 1}, "slices"), ({0}, "rank 0"), (set(), "rank 0")])
def test_all_ranks_read_slices_or_none(ranks_with_files: set[int], way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    recipe = recipe_of({"name_or_path": str(tmp_path)})
    model = build_empty(recipe_of("llama"))
    stored = {name: Stored(tmp_path, p.dtype, tuple(p.shape), 0) for name, p in model.named_parameters()}
    monkeypatch.setattr(load, "find_weight_files", lambda _: WeightFiles(stored) if dist.get_rank() in ranks_with_files else None)
    found: dict[int, str] = {}

    def rank_main(rank: int) -> None:
        found[rank], files = load._choose(recipe, model, load._find_files(recipe, rank, dist.group.WORLD))
        assert (files is not None) == (way == "slices")

    run_ranks(2, rank_main)
    assert found == {0: way, 1: way}


def test_parameter_that_the_model_ties_is_not_lost_if_the_files_have_it_apart() -> None:
    tied, apart = (build_full(recipe_of({"from_config": FAMILIES["gpt2"] | {"tie_word_embeddings": tie}})) for tie in (True, False))
    load._refuse_untied(tied, tied)
    load._refuse_untied(apart, apart)
    with pytest.raises(FsdpTuneError, match=r"`lm_head\.weight` with other values"):
        load._refuse_untied(tied, apart)
