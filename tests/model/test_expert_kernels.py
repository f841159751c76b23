"""The kernel of stacked experts that `kernels.experts` chooses, its numbers, and what is refused before ranks
start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.expert_kernels import EXPERTS_KERNELS
from fsdp_tune.model.internals.transformers_internals import EXPERTS, attention_of
from fsdp_tune.model.kernels.expert_kernels import choose_experts, live_experts
from fsdp_tune.model.loading.construct import build_empty, build_full
from fsdp_tune.model.loading.model_config import model_config
from fsdp_tune.model.model_files import WRITTEN
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of

PLAIN = ("grouped_mm", "batched_mm", "eager")


def recipe(family: str, experts: str, **fields: Any) -> Recipe:
    return recipe_of({"from_config": FAMILIES[family] | fields}, kernels={"experts": experts})


def refused(of: Recipe, device_type: str = "cuda") -> str:
    with pytest.raises(FsdpTuneError) as caught:
        choose_experts(of, build_empty(of), device_type)
    (problem,) = caught.value.problems
    assert (problem.code, problem.where.key, caught.value.exit_code) == (
        "experts-kernel-refused",
        "kernels.experts",
        2,
    )
    return problem.message


def test_table_has_every_kernel_of_transformers() -> None:
    """A new one must be read before `auto` or a recipe can choose it."""
    assert {*ALL_EXPERTS_FUNCTIONS.valid_keys(), "eager"} == set(EXPERTS_KERNELS)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_written_kernel_runs_and_has_the_numbers_of_the_others(family: str) -> None:
    ids = torch.arange(24).reshape(2, 12)
    found: dict[str, list[torch.Tensor]] = {}
    for kernel in PLAIN:
        model = build_full(recipe(family, kernel))
        assert list(live_experts(model)) == [kernel]
        assert choose_experts(recipe(family, kernel), model, "cpu")["kernels.experts"].reason == WRITTEN
        functions = {name: ALL_EXPERTS_FUNCTIONS[name] for name in ("grouped_mm", "batched_mm")}
        called: list[str] = []

        def counted(name: str, of: Any = functions, called: list[str] = called) -> Any:
            return lambda *given: called.append(name) or of[name](*given)

        with patch.dict(ALL_EXPERTS_FUNCTIONS._global_mapping, {name: counted(name) for name in functions}):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        assert set(called) == {kernel} - {"eager"}
        found[kernel] = [
            p.grad for name, p in model.named_parameters() if ".experts." in name and p.grad is not None
        ]
        assert len(found[kernel]) >= 4
    for kernel in PLAIN[1:]:
        for one, other in zip(found["grouped_mm"], found[kernel], strict=True):
            assert float((one - other).norm()) <= 1e-5 * float(one.norm())


def test_auto_leaves_the_choice_of_transformers_and_a_dense_model_has_none() -> None:
    of = recipe("mixtral", "auto")
    chosen = choose_experts(of, build_empty(of), "cpu")["kernels.experts"]
    assert (chosen.value, chosen.reason) == (
        "grouped_mm",
        "transformers' choice for MixtralExperts, whatever config.json names",
    )
    dense = recipe("llama", "auto")
    assert choose_experts(dense, build_empty(dense), "cpu") == {}
    for written in PLAIN:
        assert "has no experts whose kernel can be chosen" in refused(recipe("llama", written))


@pytest.mark.parametrize("key", ["experts_implementation", "_experts_implementation"])
def test_auto_does_not_take_a_kernel_that_the_files_of_a_model_name(key: str, tmp_path: Path) -> None:
    """SonicMoE is code of the hub, which only a recipe with `--trust-remote-code` may run; attention kernels
    are the same kind."""
    named = {key: "sonicmoe", key.replace("experts", "attn"): "kernels-community/flash-attn2"}
    (tmp_path / "config.json").write_text(
        json.dumps(FAMILIES["mixtral"] | named | {"transformers_version": "5.24.0"})
    )
    of = recipe_of({"from_config": str(tmp_path)})
    config = model_config(of)
    assert (EXPERTS.of(config), attention_of(config)) == (None, "None")
    model = build_empty(of)
    assert (live_experts(model), attention_of(model.config)) == ({"grouped_mm": "MixtralExperts"}, "sdpa")
    assert choose_experts(of, model, "cuda")["kernels.experts"].value == "grouped_mm"
    with patch("fsdp_tune.model.kernels.expert_kernels._missing", lambda _: None):
        EXPERTS.set(model.config, "sonicmoe")  # as a nested configuration that is not declared would
        with pytest.raises(FsdpTuneError, match="the model's files name it, and it runs code from the hub"):
            choose_experts(of, model, "cuda")


def test_class_with_another_kernel_than_the_written_one_is_refused() -> None:
    of = recipe("mixtral", "grouped_mm")
    model = build_empty(of)
    EXPERTS.set(model.config, "eager")  # what transformers falls back to
    with pytest.raises(
        FsdpTuneError, match="MixtralExperts has no such kernel, and would be computed by `eager`"
    ):
        choose_experts(of, model, "cpu")


def test_kernels_that_cannot_train_the_model_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sonic = recipe("mixtral", "sonicmoe")
    assert "it has kernels for CUDA, and the device is cpu" in refused(sonic, "cpu")
    module = "fsdp_tune.model.kernels.expert_kernels"
    needs = replace(
        EXPERTS_KERNELS["sonicmoe"], distributions=("kernels", "torch", "packaging", "absent-package")
    )
    with (
        patch(f"{module}.EXPERTS_KERNELS", {"sonicmoe": needs}),
        patch(f"{module}.SONICMOE_NEEDS") as versions,
    ):
        versions.get.return_value = {"torch": "99", "packaging": "1"}
        message = refused(sonic)
    assert "it needs transformers[kernels] and torch>=99 and absent-package" in message
    assert "(`pip install 'transformers[kernels]' 'torch>=99' absent-package`)" in message
    assert "it computes silu(gate) × up" in refused(recipe("mixtral", "sonicmoe", hidden_act="tanh"))
    assert "GptOssExperts has experts that differ" in refused(recipe("gpt_oss", "sonicmoe")), (
        "its gate is clamped, whatever `hidden_act` is"
    )
    monkeypatch.setattr(f"{module}._missing", lambda _: None)
    monkeypatch.setattr(f"{module}.hub_is_reachable", lambda: False)
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path))
    assert (
        "`kernels-community/sonic-moe`, is not in the cache of the hub, which cannot be reached"
        in refused(sonic)
    )
    (tmp_path / "models--kernels-community--sonic-moe" / "snapshots" / "revision").mkdir(parents=True)
    assert choose_experts(sonic, build_empty(sonic), "cuda")["kernels.experts"].value == "sonicmoe"


def test_kernel_without_gradients_in_the_files_of_a_model_is_refused() -> None:
    """A config.json may name any kernel; transformers' DeepGEMM would train everything but the experts."""
    of = recipe("mixtral", "auto")
    model = build_empty(of)
    EXPERTS.set(model.config, "deepgemm")
    with pytest.raises(FsdpTuneError, match="compute no gradients"):
        choose_experts(of, model, "cuda")
