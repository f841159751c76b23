"""A base in pickled files has the account that it would have in safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_tune.core import hub
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.jobs import inspection
from fsdp_tune.jobs.inspection import Inspection
from fsdp_tune.merge.config_and_tokenizer import fetch_model
from fsdp_tune.merge.lora.adapt import merge_problems
from fsdp_tune.merge.read.base import carried_problems, read_base
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.loading.pickled_files import read_pickled, read_state
from fsdp_tune.model.loading.weight_slices import find_weight_files
from fsdp_tune.model.model_files import ModelInspection
from tests.model.families import FAMILIES
from tests.model.recipes import model_facts, recipe_of

State = dict[str, torch.Tensor]
UP = "model.layers.0.mlp.up_proj.weight"
LORA = {"r": 2, "target_modules": ["up_proj"]}
COMMIT = "a" * 40


@pytest.fixture
def state(tmp_path: Path) -> State:
    """The tensors of a model whose configuration is in the directory."""
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**FAMILIES["llama"]))
    model.config.save_pretrained(tmp_path)
    return {**model.state_dict(), "mtp.norm.weight": torch.ones(8)}


def as_one_file(folder: Path, state: State) -> None:
    torch.save(state, folder / "pytorch_model.bin")


def as_old_file(folder: Path, state: State) -> None:
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def as_shards(folder: Path, state: State) -> None:
    names = sorted(state)
    weight_map = {name: f"pytorch_model-{1 + (at % 2):05d}-of-00002.bin" for at, name in enumerate(names)}
    for file in set(weight_map.values()):
        torch.save({name: state[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


FORMS = {"one file": as_one_file, "old file": as_old_file, "shards": as_shards}
Form = Callable[[Path, State], None]


def inspected(folder: Path, **sections: Any) -> ModelInspection:
    return find_facts(recipe_of({"name_or_path": str(folder)}, **sections))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_tensors_are_counted_and_those_that_the_class_lacks_are_carried(
    form: Form, tmp_path: Path, state: State
) -> None:
    form(tmp_path, state)
    found = inspected(tmp_path)
    assert found.problems == ()
    assert found.facts is not None
    assert found.facts.tensors.counts == {"trained": len(state) - 1, "carried": 1}
    assert found.facts.tensors.carried == ("mtp.norm.weight",)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_missing_tensors_other_shapes_and_codes_are_refused_by_name(
    form: Form, tmp_path: Path, state: State
) -> None:
    for changed in ({UP: torch.ones(2, 2)}, {UP: state[UP].to(torch.int8)}, {}):
        form(tmp_path, {name: value for name, value in state.items() if name != UP} | changed)
        assert [problem for problem in inspected(tmp_path).problems if UP in problem.message]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_base_that_a_merge_cannot_read_is_refused_before_the_run(
    form: Form, tmp_path: Path, state: State
) -> None:
    form(tmp_path, state)
    refused = ["merge-damaged-pickle"] if form is as_old_file else []
    checks: list[tuple[Any, dict[str, Any], list[str]]] = [
        (merge_problems, {"lora": LORA}, refused),
        (carried_problems, {}, refused),
        (carried_problems, {"merge": {"at_end": False}}, []),
    ]
    for problems, sections, expected in checks:
        recipe, found = (
            recipe_of({"name_or_path": str(tmp_path)}, **sections),
            inspected(tmp_path, **sections),
        )
        assert [each.code for each in problems(recipe, found.facts)] == expected


def test_file_that_torch_does_not_read_is_refused_by_its_path(tmp_path: Path, state: State) -> None:
    as_one_file(tmp_path, state)
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(FsdpTuneError) as caught:
        read_pickled([file])
    (problem,) = caught.value.problems
    assert (problem.code, problem.where and problem.where.source) == ("model-weights-damaged", str(file))
    assert problem in inspected(tmp_path).problems


@pytest.fixture
def on_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: State) -> Path:
    """The snapshot of `org/base` in the hub's cache, without its weights. There is no network."""
    store = tmp_path / "hub" / "models--org--base"
    snapshot = store / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (store / "refs").mkdir()
    (store / "refs" / "main").write_text(COMMIT)
    (tmp_path / "config.json").rename(snapshot / "config.json")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return snapshot


def move_to_blobs(snapshot: Path) -> None:
    """Store the files of a snapshot as the hub's cache does: links to their contents."""
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_base_of_the_hub_has_its_account_once_its_files_are_on_this_machine(
    form: Form, on_hub: Path, state: State
) -> None:
    recipe = recipe_of({"name_or_path": "org/base"})
    before = find_facts(recipe).facts
    assert before is not None
    assert (before.tensors.counts, before.has_unread_tensors) == ({}, True)
    form(on_hub, state)
    move_to_blobs(on_hub)
    found = find_facts(recipe)
    assert found.problems == ()
    assert found.facts is not None
    assert (found.facts.tensors.carried, found.facts.has_unread_tensors) == (("mtp.norm.weight",), False)
    assert found.facts.tensors.base is not None
    files = find_weight_files(recipe)  # as each rank does
    assert files is not None
    assert files.base is not None
    assert files.base.types.keys() == state.keys()
    if form is not as_old_file:
        with ExitStack() as stack:
            assert "mtp.norm.weight" in read_base(stack, fetch_model("org/base", revision=COMMIT)).tensors


def test_codes_in_pickled_files_of_the_hub_are_refused_by_the_ranks(on_hub: Path, state: State) -> None:
    as_one_file(on_hub, state | {UP: state[UP].to(torch.int8), f"{UP}_scale": torch.ones(len(state[UP]), 1)})
    with pytest.raises(FsdpTuneError, match=UP):
        find_weight_files(recipe_of({"name_or_path": "org/base"}))


@pytest.mark.parametrize(("counts", "downloads"), [({}, 1), ({"trained": 1}, 0)])
def test_train_downloads_a_base_whose_tensors_are_unknown(
    counts: Any, downloads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of({"name_or_path": "org/base"})
    first, then = (Inspection(model_facts(has_unread_tensors=each)) for each in (not counts, False))
    fetched: list[str] = []
    monkeypatch.setattr(inspection, "download_model", lambda name, _: fetched.append(name))
    monkeypatch.setattr(inspection, "inspect_model", lambda _: then)
    assert inspection.with_tensors(recipe, first, lambda _: None) is (then if downloads else first)
    assert fetched == ["org/base"] * downloads


def test_pickled_weights_of_the_hub_are_downloaded_if_it_has_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[tuple[str, ...]] = []

    def snapshot(_: Any, files: tuple[str, ...], *, revision: str) -> Path:
        fetched.append(
            tuple(file for file in files if "json" not in file and file.startswith(("*.safe", "pytorch")))
        )
        return tmp_path

    monkeypatch.setattr(hub, "snapshot", snapshot)
    for file, expected in (("pytorch_model.bin.index.json", 2), ("model.safetensors", 1)):
        (tmp_path / file).write_text('{"weight_map": {"x": "pytorch_model-1.bin"}}')
        fetched.clear()
        hub.download_model("org/base", "main")
        assert fetched == [("*.safetensors",), ("pytorch_model*.bin",)][:expected]


def test_elements_of_an_old_file_are_not_read_for_its_account(
    tmp_path: Path, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    tied = state | {"lm_head.weight": state["model.embed_tokens.weight"]}
    as_old_file(tmp_path, tied)
    file = tmp_path / "pytorch_model.bin"
    monkeypatch.setattr(torch.UntypedStorage, "_set_from_file", None)  # reads the elements of one storage
    found = read_state(file, values=False)
    assert {name: value.shape for name, value in found.items()} == {
        name: value.shape for name, value in tied.items()
    }
    assert found["lm_head.weight"].data_ptr() == found["model.embed_tokens.weight"].data_ptr()
    file.write_bytes(file.read_bytes()[:-10_000])
    with pytest.raises(FsdpTuneError, match="bytes long"):
        read_state(file, values=False)
