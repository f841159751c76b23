"""What a model's class keeps in fp32 is in fp32 in every way to build it, and in units that FSDP2 does not
cast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.tensors.dtypes import DTYPES
from fsdp_tune.merge.copy.layout import target_dtype
from fsdp_tune.model.loading.construct import build_empty, build_full
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.loading.kept_precision import kinds_in_fp32, with_rounded
from fsdp_tune.model.loading.tensor_account import parameters_of
from fsdp_tune.model.shard.fsdp_units import plan_units
from fsdp_tune.model.shard.local import kept_in_fp32
from fsdp_tune.run.base_model import BaseLayout, BaseRecord, FileTensor, Piece, Rounded
from tests.architectures.tiny import config_of, known, make_model
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of

ROUTER = ("model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.e_score_correction_bias")


def recipe(dtype: str = "bf16", **sections: Any) -> Any:
    config = {key: value for key, value in config_of("deepseek_v3").items() if key != "output_router_logits"}
    return recipe_of(ranks=2, model={"from_config": config, "dtype": dtype}, **sections)


def test_every_way_to_build_a_model_keeps_its_router_in_fp32() -> None:
    for build in (build_empty, build_full):
        model = build(recipe())
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        assert kept_in_fp32(model) == set(ROUTER)
        assert {name for name in model.state_dict() if tensors[name].dtype == torch.float32} == set(ROUTER)


@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe", "kimi_linear"])
def test_dtypes_are_those_in_which_transformers_loads_the_model(family: str, tmp_path: Path) -> None:
    if family not in known(family):
        pytest.skip("not in this transformers")
    config = config_of(family) | (
        {"output_router_logits": False} if "output_router_logits" in config_of(family) else {}
    )
    folder = make_model(config, tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    ours = build_empty(recipe_of(ranks=2, model={"name_or_path": str(folder), "dtype": "bf16"})).state_dict()
    assert torch.float32 in {tensor.dtype for tensor in ours.values()}
    assert {name: tensor.dtype for name, tensor in ours.items()} == {
        name: tensor.dtype for name, tensor in theirs.items()
    }


def test_adapters_and_frozen_weights_leave_the_router_in_fp32() -> None:
    model = build_empty(recipe(lora={"r": 2, "target_modules": ["o_proj"]}, fsdp={"version": 2}))
    kept = [
        tensor.dtype
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if name in kept_in_fp32(model)
    ]
    assert kept == [torch.float32] * 2


def test_kept_parameters_are_in_the_unit_of_the_decoder() -> None:
    for dtype, precision in (("bf16", "bf16"), ("bf16", "no"), ("fp32", "bf16")):
        of_run = recipe(dtype, precision={"mixed_precision": precision}, fsdp={"version": 2})
        plan = plan_units(of_run, build_empty(of_run))
        assert (plan.holder, plan.held) == ("model", {ROUTER[0]})
    in_fp32 = recipe("fp32", precision={"mixed_precision": "no"}, fsdp={"version": 2})
    assert plan_units(in_fp32, build_empty(in_fp32)).holder is None


def test_fsdp1_refuses_bf16_weights_with_kept_ones() -> None:
    of_run = recipe(fsdp={"version": 1})
    with pytest.raises(FsdpTuneError, match=r"keeps model\.layers\.1\.mlp\.gate\.weight in fp32") as caught:
        plan_units(of_run, build_empty(of_run))
    assert caught.value.problems[0].code == "precision-not-kept"


def test_kinds_are_those_of_transformers_by_dtype() -> None:
    fields = config_of("gpt_oss")
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)

    def construct(dtype: torch.dtype) -> Any:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype)

    kinds = kinds_in_fp32(construct)
    assert "bf16" not in kinds
    assert "model.layers.{}.input_layernorm.weight" in kinds["fp16"]


def test_names_of_files_are_kept_as_their_parameters() -> None:
    piece = Piece("model.layers.0.mlp.scales", (0, 0), (1,), (4,), (0,))
    layout = BaseLayout(
        {"model.layers.3.mlp.gate.bias": "backbone.layers.3.router.bias"},
        (FileTensor("backbone.layers.0.experts.{}.scale", (4,), (piece,), 2),),
        kept_in_fp32={"bf16": ("model.layers.{}.mlp.gate.bias", "model.layers.{}.mlp.scales")},
    )
    is_kept = layout.keeps_fp32("bf16")
    assert is_kept("backbone.layers.3.router.bias")
    assert is_kept("backbone.layers.0.experts.1.scale")
    assert not is_kept("backbone.layers.0.experts.1.weight")
    assert not layout.keeps_fp32("fp16")("backbone.layers.3.router.bias")


@pytest.mark.parametrize(
    ("stored", "option", "updated", "wanted"),
    [
        ("float32", "bf16", False, "float32"),
        ("bfloat16", "bf16", False, "bfloat16"),  # with the bytes of the base
        ("bfloat16", "bf16", True, "float32"),  # an adapter's update is not rounded
        ("float64", "fp16", False, "float32"),
        ("bfloat16", "fp32", False, "float32"),
        ("float32", "keep", False, "float32"),
        ("int64", "bf16", False, "int64"),
    ],
)
def test_kept_tensor_is_not_rounded_to_16_bits(
    stored: str, option: str, wanted: str, *, updated: bool
) -> None:
    assert target_dtype(DTYPES[stored], option, keeps_fp32=True, is_updated=updated) == DTYPES[wanted]


def stored_base(
    folder: Path, *wide: str, dtype: torch.dtype = torch.bfloat16, codes: str | None = None
) -> Path:
    """A base in `dtype` with some tensors in fp32, and of `codes` the weight in fp8 with a scale."""
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**FAMILIES["llama"]))
    model.to(dtype).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: tensors[name].float() for name in wide}
    if codes is not None:
        tensors |= {codes: tensors[codes].to(torch.float8_e4m3fn), f"{codes}_scale_inv": torch.ones(1, 1)}
        config = json.loads((folder / "config.json").read_text()) | {
            "quantization_config": {"quant_method": "fp8"}
        }
        (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def kept_names(folder: Path, **sections: Any) -> tuple[set[str], bool]:
    """Return the tensors of a base's file that a merge in bf16 leaves in fp32, and whether the run rounds
    some, which a notice says."""
    found = find_facts(recipe_of({"name_or_path": str(folder), **sections.pop("model", {})}, **sections))
    assert (found.problems, found.facts is None) == ((), False)
    assert found.facts is not None
    is_kept = found.facts.base_layout.keeps_fp32("bf16")
    return {name for name in load_file(folder / "model.safetensors") if is_kept(name)}, any(
        notice.code == "fp32-of-base-rounded" for notice in found.notices
    )


NORMS = tuple(f"model.layers.{layer}.input_layernorm.weight" for layer in (0, 1))
GATE = "model.layers.1.mlp.gate_proj.weight"


def test_what_the_base_has_in_fp32_among_others_in_16_bits_leaves_in_fp32(tmp_path: Path) -> None:
    base = stored_base(tmp_path / "base", *NORMS, GATE, codes="model.layers.0.mlp.up_proj.weight")
    lora = {"r": 2, "target_modules": ["gate_proj"]}
    kept = {*NORMS, GATE}  # of the kind of the gate, that of one layer
    assert kept_names(base) == (kept, False)
    assert kept_names(base, model={"dtype": "bf16"}) == (kept, True)
    assert kept_names(base, lora=lora) == (kept, False)
    assert kept_names(base, model={"dtype": "bf16"}, lora=lora) == (kept, False)


def test_base_in_fp32_as_a_whole_is_merged_in_16_bits(tmp_path: Path) -> None:
    assert kept_names(stored_base(tmp_path / "base", dtype=torch.float32)) == (set(), False)


def rounded(folder: Path, **sections: Any) -> dict[str, Rounded]:
    found = find_facts(recipe_of({"name_or_path": str(folder), **sections.pop("model", {})}, **sections))
    assert (found.problems, found.facts is None) == ((), False)
    assert not [notice for notice in found.notices if notice.code == "fp32-of-base-rounded"]
    assert found.facts is not None
    assert (found.facts.tensors.base is not None) == bool(found.facts.tensors.rounded)
    return found.facts.tensors.rounded


def test_frozen_tensors_that_the_run_rounds_are_read_from_the_base(tmp_path: Path) -> None:
    base, lora = stored_base(tmp_path / "base", *NORMS, GATE), {"r": 2, "target_modules": ["gate_proj"]}
    frozen = {"freeze": ["*norm*", GATE]}
    expected = {name: Rounded(name, "bf16") for name in (*NORMS, GATE)}
    assert rounded(base, model={"dtype": "bf16", **frozen}) == expected
    # vectors keep fp32
    assert rounded(base, model=frozen, precision={"mixed_precision": "bf16"}) == {GATE: Rounded(GATE, "bf16")}
    assert rounded(base, model=frozen) == {}
    assert rounded(base, lora=lora) == {}


def test_run_that_continues_another_one_reads_what_neither_trains(tmp_path: Path) -> None:
    recipe = recipe_of({"from_config": FAMILIES["llama"], "dtype": "bf16", "freeze": [NORMS[0]]})
    record = BaseRecord(rounded={name: Rounded(name, "bf16") for name in (*NORMS, GATE)})
    state = parameters_of(build_empty(recipe))
    assert with_rounded(record, recipe, state, BaseLayout(), None, None).rounded.keys() == {NORMS[0]}
    adapted = recipe_of({"from_config": FAMILIES["llama"]}, lora={"r": 2})
    assert with_rounded(record, adapted, state, BaseLayout(), None, None).rounded == {}


def test_tensors_that_a_merge_rounds_as_the_run_did_are_not_read_from_the_base() -> None:
    record = BaseRecord(rounded={"a": Rounded("x.a", "bf16"), "b": Rounded("x.b", "bf16")})
    assert record.restored("bf16", lambda name: name == "b") == {"b": "x.b"}
    assert record.restored("bf16", lambda _: False) == {}
    for dtype in ("fp32", "fp16", "keep"):
        assert record.restored(dtype, lambda _: False) == {"a": "x.a", "b": "x.b"}
