"""Which Linears compute in fp8, the reasons for the others, and that weights are unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.kernels import linear_layers
from fsdp_tune.model.kernels.linear_layers import (
    choose_fp8,
    convert_to_fp8,
    fp8_notices,
    plan_fp8,
    require_gpu,
)
from fsdp_tune.model.loading.construct import build_empty, build_full
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.shard.fsdp_units import plan_units
from fsdp_tune.model.shard.local import gathered_in_fp8, is_fp8, refresh_scales
from fsdp_tune.model.shard.wrap import wrap
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.merge.ranks import run_ranks
from tests.model.recipes import recipe_of

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def fp8(model: str = "llama", ranks: int = 2, *, scaling: str = "rowwise", **sections: Any) -> Recipe:
    return recipe_of(model, ranks, precision={"mixed_precision": "fp8", "fp8_recipe": scaling}, **sections)


def last_names(names: Any) -> set[str]:
    return {name.rsplit(".", 1)[-1] for name in names}


@pytest.mark.parametrize(
    ("family", "converted", "left"),
    [
        ("llama", set(ALL), {}),
        ("mistral", set(ALL), {}),
        ("mixtral", set(ALL[:4]), {}),  # its experts and its router hold parameters, and are not Linears
        ("qwen2_moe", set(ALL), {"shared_expert_gate": "its sizes are not multiples of 16"}),
        ("opt", {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"}, {}),
        ("phi", {"q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"}, {}),
    ],
)
def test_only_layer_linears_are_converted_to_fp8(
    family: str, converted: set[str], left: dict[str, str]
) -> None:
    recipe = fp8(family)
    model = build_empty(recipe)
    plan = plan_fp8(recipe, model)
    assert last_names(plan.converted) == converted
    assert {name.rsplit(".", 1)[-1]: why for name, why in plan.left.items()} == left
    names = [name for name, _ in model.named_parameters()]
    convert_to_fp8(recipe, model, "cpu")
    assert {name for name, module in model.named_modules() if is_fp8(module)} == set(plan.converted)
    assert [name for name, _ in model.named_parameters()] == names
    assert plan_fp8(recipe, model) == plan, "it is asked again of what is converted"


def test_small_linears_are_kept_and_counted() -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 257,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 10,
    }
    recipe = fp8({"from_config": config | {"num_key_value_heads": 1, "intermediate_size": 48}})  # type: ignore[arg-type]
    reason = choose_fp8(recipe, build_empty(recipe))["precision.mixed_precision"].reason
    assert (
        reason
        == "rowwise: 6 Linears of 2 layers; 8 left, its sizes are not multiples of 16; gathered in bf16"
    )


@pytest.mark.parametrize(
    ("ranks", "words"),
    [(2, "gathered in fp8"), (3, "4 gathered in fp8, 10 in bf16, whose rows are not divisible by 3 ranks")],
)
def test_weights_whose_rows_do_not_divide_are_gathered_in_bf16(ranks: int, words: str) -> None:
    recipe = fp8(ranks=ranks, scaling="tensorwise")  # 48 rows divide by three, 32 and 16 do not
    assert choose_fp8(recipe, build_empty(recipe))["precision.mixed_precision"].reason.endswith(words)


def test_model_without_linears_is_refused_before_a_rank_starts() -> None:
    found = find_facts(fp8("gpt2", data={"train": [{"path": "hand-made"}], "max_length": 64})).problems
    assert [problem.code for problem in found] == ["fp8-nothing-to-convert"]
    assert "Conv1D" in found[0].message


def test_without_torchao_the_recipe_is_refused_before_a_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_tune.model.shard.local.PACKAGE", "no_such_package")
    (problem,) = find_facts(fp8()).problems
    assert problem.code == "torchao-not-installed"
    assert "precision.mixed_precision: fp8" in problem.message


def test_share_of_stacked_experts_is_reported() -> None:
    recipe = fp8("mixtral")
    model = build_empty(recipe)
    (emulated, experts) = fp8_notices(recipe, model, "cpu")
    assert emulated.code == "fp8-emulated"
    stacked = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    of_layers = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name)
    linears = sum(p.numel() for name, p in model.named_parameters() if "_proj.weight" in name and p.ndim == 2)
    assert experts.code == "fp8-without-experts"
    assert f"{linears / of_layers:.0%}" in experts.message
    assert f"{stacked:,}" in experts.message


@pytest.mark.parametrize(("compiled", "codes"), [(False, ["fp8-not-compiled"]), (True, [])])
def test_eager_fp8_on_a_gpu_is_a_notice(compiled: bool, codes: list[str]) -> None:
    recipe = fp8(kernels={"compile": compiled})
    assert [notice.code for notice in fp8_notices(recipe, build_empty(recipe), "cuda")] == codes


@pytest.mark.parametrize(
    ("capability", "instead"),
    [((8, 0), "bf16"), ((7, 5), "fp16"), ((8, 9), None), ((9, 0), None), ((12, 0), None)],
)
def test_fp8_error_on_older_gpus_has_a_hint(
    capability: tuple[int, int], instead: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some card")
    if instead is None:
        require_gpu(fp8(), torch.device("cuda", 0))
        return
    with pytest.raises(FsdpTuneError, match=r"needs compute capability 8\.9") as caught:
        require_gpu(fp8(), torch.device("cuda", 0))
    assert caught.value.exit_code == 2
    assert caught.value.problems[0].hint == f"write `precision.mixed_precision: {instead}`"
    require_gpu(recipe_of(precision={"mixed_precision": "bf16"}), torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("multiple", "longest", "padded"), [(8, 64, True), (16, 64, False), (16, 60, True), (32, 64, False)]
)
def test_operands_are_padded_only_if_tokens_are_not_multiples(
    multiple: int, longest: int, padded: bool
) -> None:
    recipe = fp8(
        data={"train": [{"path": "hand-made"}], "pad_to_multiple_of": multiple, "max_length": longest}
    )
    assert (
        "operands are padded" in choose_fp8(recipe, build_empty(recipe))["precision.mixed_precision"].reason
    ) is padded
    assert linear_layers._config(recipe, gathered=False, emulate=True).pad_inner_dim is padded


def test_reason_for_padding_names_the_multiple_of_ranks_that_share_a_row() -> None:
    data = {"train": [{"path": "hand-made"}], "pad_to_multiple_of": 16, "max_length": 64}
    recipe = fp8(data=data, parallelism={"sp_size": 2})
    assert (
        "is not a multiple of 32"
        in choose_fp8(recipe, build_empty(recipe))["precision.mixed_precision"].reason
    )


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_converted_linear_multiplies_in_fp8(scaling: str) -> None:
    """By hand: each operand times its scale, rounded to e4m3, divided by it, and multiplied in fp32."""
    recipe = fp8(scaling=scaling, fsdp={"sharding_strategy": "NO_SHARD"})
    model = build_full(recipe)
    layer = model.model.layers[0].mlp
    weight = layer.gate_proj.weight.detach().clone()
    convert_to_fp8(recipe, model, "cpu")
    tokens = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))

    def rounded(values: torch.Tensor) -> torch.Tensor:
        largest = values.abs().amax(dim=1, keepdim=True) if scaling == "rowwise" else values.abs().max()
        scale = (448.0 / largest.double()).float()
        if scaling == "rowwise":
            scale = torch.exp2(torch.floor(torch.log2(scale)))
        return (values * scale).to(torch.float8_e4m3fn).float() / scale

    found = layer.gate_proj(tokens)
    assert torch.equal(layer.gate_proj.weight, weight), "the weight itself stays"
    torch.testing.assert_close(found, rounded(tokens) @ rounded(weight).t(), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(found, tokens @ weight.t(), rtol=1e-4)


def scales_of_both(_: int) -> None:
    """What `refresh_scales` and torchao's own function leave on a rank: of small weights, of large ones, and
    of one that is all zeros."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    recipe = fp8(scaling="tensorwise")
    model = build_full(recipe)
    convert_to_fp8(recipe, model, "cpu")
    with torch.no_grad():
        model.get_submodule("model.layers.0.self_attn.q_proj").weight.zero_()
        model.get_submodule("model.layers.0.mlp.up_proj").weight.mul_(1e4)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    wrap(recipe, model, plan_units(recipe, model), mesh, torch.device("cpu"))
    found: list[list[torch.Tensor]] = []
    for refresh in (refresh_scales, precompute_float8_dynamic_scale_for_fsdp):
        refresh(model)
        found.append(
            [module.weight._local_tensor._precomputed_scale.clone() for module in gathered_in_fp8(model)]
        )
    ours, theirs = map(torch.stack, found)
    assert ours.numel() > 10
    assert ours.unique().numel() > 10
    assert ours.dtype == theirs.dtype == torch.float32
    assert torch.equal(ours, theirs)


def test_scales_equal_torchao_bitwise() -> None:
    run_ranks(2, scales_of_both)
