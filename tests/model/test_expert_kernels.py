"""The kernel of stacked experts that `kernels.experts` chooses, its numbers, and what is refused before ranks start."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.expert_kernels import EXPERTS_KERNELS
from fsdp_tune.model.internals.transformers_internals import EXPERTS
from fsdp_tune.model.kernels.expert_kernels import choose_experts, live_experts
from fsdp_tune.model.loading.construct import build_empty, build_full
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
    assert (problem.code, problem.where.key, caught.value.exit_code) == ("experts-kernel-refused", "kernels.experts", 2)
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
        found[kernel] = [p.grad for name, p in model.named_parameters() if ".experts." in name and p.grad is not None]
        assert len(found[kernel]) >= 4
    for kernel in PLAIN[1:]:
        for one, other in zip(found["grouped_mm"], found[kernel], strict=True):
            assert float((one - other).norm()) <= 1e-5 * float(one.norm())


def test_auto_leaves_the_choice_of_transformers_and_a_dense_model_has_none() -> None:
    of = recipe("mixtral", "auto")
    chosen = choose_experts(of, build_empty(of), "cpu")["kernels.experts"]
    assert (chosen.value, chosen.reason) == ("grouped_mm", "transformers' choice for MixtralExperts")
    dense = recipe("llama", "auto")
    assert choose_experts(dense, build_empty(dense), "cpu") == {}
    assert "has no experts whose kernel can be chosen" in refused(recipe("llama", "eager"))


def test_kernels_that_cannot_train_the_model_are_refused() -> None:
    sonic = recipe("mixtral", "sonicmoe")
    assert "it has kernels for CUDA, and the device is cpu" in refused(sonic, "cpu")
    assert "it needs kernels and nvidia-cutlass-dsl and apache-tvm-ffi (`pip install " in refused(sonic)
    assert "it computes silu(gate) × up" in refused(recipe("mixtral", "sonicmoe", hidden_act="tanh"))
    assert "GptOssExperts has experts that differ" in refused(recipe("gpt_oss", "sonicmoe")), (
        "its gate is clamped, whatever `hidden_act` is"
    )
    with patch("fsdp_tune.model.kernels.expert_kernels._is_installed", lambda _: True):
        assert choose_experts(sonic, build_empty(sonic), "cuda")["kernels.experts"].value == "sonicmoe"


def test_kernel_without_gradients_in_the_files_of_a_model_is_refused() -> None:
    """A config.json may name any kernel; transformers' DeepGEMM would train everything but the experts."""
    of = recipe("mixtral", "auto")
    model = build_empty(of)
    EXPERTS.set(model.config, "deepgemm")
    with pytest.raises(FsdpTuneError, match="compute no gradients"):
        choose_experts(of, model, "cuda")
