"""Weights are found in trees of folders by the names of what the folders hold; the state of an optimizer is never merged."""

from __future__ import annotations

import pytest
import torch

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.merge.read import contents
from fsdp_tune.merge.read.contents import weights_below
from fsdp_tune.run.directory import CHECKPOINT_KIND, RunDir
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest
from tests.merge.checkpoints import save_dcp
from tests.merge.test_reader import WEIGHTS, assert_weights


def adam(state):
    """The state of an optimizer by the names of the model, as torch's `get_state_dict` returns it."""
    values = {name: {"exp_avg": value * 0, "exp_avg_sq": value * 0, "step": torch.tensor(1.0)} for name, value in state.items()}
    return {"state": values, "param_groups": [{"lr": 1e-3, "params": list(WEIGHTS)}]}


OPTIMIZERS = {
    "optimizer": lambda state: {"optimizer": adam(state)},
    "optim_state": lambda state: {"optim_state": {"optim": adam(state)}},
    "in app": lambda state: {"app": {"optimizers": [adam(state)]}},
    "model in optimizer": lambda state: {"app": {"optimizer": {"model": adam(state)["state"]}}},
    "bare": lambda state: adam(state)["state"],
    "flat": lambda state: {f"{name}.{key}": value for name, values in adam(state)["state"].items() for key, value in values.items()},
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_state_is_never_merged(kind, tmp_path, merge):
    save_dcp(OPTIMIZERS[kind](WEIGHTS), tmp_path / "optimizer")
    with pytest.raises(FsdpTuneError) as caught:
        merge(tmp_path / "optimizer", output=tmp_path / "out")
    assert caught.value.problems[0].code == "merge-optimizer-state"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["optim_state", "bare", "flat"])
@pytest.mark.parametrize("levels", [(), ("iter_0000004",), ("checkpoints", "step_4")])
def test_weights_of_a_tree_are_found_by_their_keys(kind, levels, tmp_path, merge):
    folder = tmp_path.joinpath("c", *levels)
    save_dcp({"model_state": {"model": WEIGHTS}}, folder / "model")
    save_dcp(OPTIMIZERS[kind](WEIGHTS), folder / "optimizer")
    assert_weights(merge(tmp_path / "c").output)


def test_optimizer_next_to_weights_is_left_out(tmp_path, merge):
    save_dcp(WEIGHTS | OPTIMIZERS["flat"](WEIGHTS), tmp_path / "c")
    assert_weights(merge(tmp_path / "c").output)


def test_run_that_has_lost_its_recipe_is_refused_with_the_name_of_the_file(tmp_path):
    run = RunDir(tmp_path)
    for step in (9, 10):
        save_dcp({"model": WEIGHTS}, run.checkpoint(step))
        (run.checkpoint(step) / MANIFEST_NAME).write_text(Manifest(CHECKPOINT_KIND, {}, {"step": step}).to_json())
    with pytest.raises(FsdpTuneError) as caught:
        weights_below(tmp_path)
    [problem] = caught.value.problems
    assert problem.message == f"{tmp_path} has checkpoints of a run, and its recipe.json is missing"
    assert problem.code == "recipe-missing"


def test_tree_with_several_models_is_refused_by_name(tmp_path, merge):
    for step in (9, 10):
        save_dcp({"model": WEIGHTS}, tmp_path / "c" / f"step_{step}" / "trainer")
    with pytest.raises(FsdpTuneError) as caught:
        merge(tmp_path / "c")
    [problem] = caught.value.problems
    assert (problem.code, problem.hint) == ("merge-several-weights", f"give one of them: `{tmp_path / 'c' / 'step_10' / 'trainer'}`")


def test_model_after_many_folders_is_seen_next_to_the_first(tmp_path):
    for name in ("checkpoint_a", "final"):
        save_dcp({"model": WEIGHTS}, tmp_path / name)
    for number in range(199):
        (tmp_path / f"data-{number:03}").mkdir()
    with pytest.raises(FsdpTuneError, match="2 folders hold weights: checkpoint_a, final"):
        weights_below(tmp_path)


def test_tree_of_more_folders_than_are_searched_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(contents, "_MOST_FOLDERS", 2)
    save_dcp({"model": WEIGHTS}, tmp_path / "a")
    (tmp_path / "b").mkdir()
    assert weights_below(tmp_path) == tmp_path / "a"
    (tmp_path / "b" / "c").mkdir()
    with pytest.raises(FsdpTuneError, match="more than 2 folders"):
        weights_below(tmp_path)
