"""Quantised weights of files: which tensors a rule reads, and that the values are those of transformers' own
dequantisation."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.tensors import quantised_weight
from fsdp_tune.core.tensors.quantised_formats import (
    find_encodings,
    method_of,
    quantisation_of,
    settings_of_files,
)
from fsdp_tune.core.tensors.quantised_weight import Encoded, StoredType

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
W = "model.layers.0.mlp.up_proj."
Tensors = dict[str, torch.Tensor]
NAMES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e8m0fnu: "F8_E8M0",
}


def types_of(tensors: Tensors) -> dict[str, StoredType]:
    return {name: StoredType(NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}


def as_numpy(tensor: torch.Tensor) -> Any:
    special: dict[torch.dtype, Any] = {
        torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
        torch.bfloat16: ml_dtypes.bfloat16,
        torch.float8_e8m0fnu: ml_dtypes.float8_e8m0fnu,
    }
    kind = special.get(tensor.dtype)
    return (
        tensor.numpy()
        if kind is None
        else tensor.contiguous().view(torch.uint8).numpy().view(kind).reshape(tensor.shape)
    )


def read(weight: Encoded, tensors: Tensors, start: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    """Decode a box from the codes that it needs alone, as ranks and merges do."""
    first, shape = weight.box_of_codes(start, sizes)
    codes = as_numpy(tensors[weight.codes])[
        tuple(slice(at, at + size) for at, size in zip(first, shape, strict=True))
    ]
    others = (as_numpy(tensors[part]) if part else None for part in weight.others)
    return torch.from_numpy(
        weight.decode(start, sizes, codes, as_numpy(tensors[weight.scales]), *others).copy()
    )


def whole(tensors: Tensors, settings: dict[str, Any]) -> torch.Tensor:
    (weight,) = find_encodings(types_of(tensors), settings).weights.values()
    value = read(weight, tensors, (0,) * len(weight.shape), weight.shape)
    for _ in range(8):  # any box has the values of the whole
        start = tuple(int(np.random.default_rng(_).integers(size)) for size in weight.shape)
        sizes = tuple(size - at for at, size in zip(start, weight.shape, strict=True))
        box = tuple(slice(at, at + size) for at, size in zip(start, sizes, strict=True))
        assert torch.equal(read(weight, tensors, start, sizes), value[box])
    return value


def fp8(*shape: int) -> torch.Tensor:
    return torch.randn(shape).mul(30).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "scales",
    [torch.rand(2, 3), torch.rand(2, 3).bfloat16(), torch.randint(120, 130, (2, 3), dtype=torch.uint8)],
)
def test_fp8_blocks_are_those_of_transformers(scales: torch.Tensor) -> None:
    tensors = {W + "weight": fp8(256, 384), W + "weight_scale_inv": scales}
    wanted = Fp8Dequantize(None)._dequantize_one(tensors[W + "weight"], scales, torch.float32)
    assert torch.equal(whole(tensors, FP8), wanted)


def test_fp8_block_at_the_end_may_be_shorter() -> None:
    """DeepSeek V3's `kv_a_proj_with_mqa`: 576 rows and 5 scales, which transformers 5.24 refuses."""
    tensors = {W + "weight": fp8(576, 128), W + "weight_scale_inv": torch.rand(5, 1)}
    wanted = tensors[W + "weight"].float() * tensors[W + "weight_scale_inv"].repeat_interleave(128, 0)[:576]
    assert torch.equal(whole(tensors, FP8), wanted)


def test_fp8_scales_of_stacked_experts_and_of_tensors() -> None:
    stack = {
        "mlp.experts.down_proj": fp8(3, 128, 256),
        "mlp.experts.down_proj_scale_inv": torch.rand(3, 1, 2),
    }
    wanted = stack["mlp.experts.down_proj"].float() * stack[
        "mlp.experts.down_proj_scale_inv"
    ].repeat_interleave(128, 2)
    assert torch.equal(whole(stack, FP8), wanted)
    one = {
        W + "weight": fp8(16, 8),
        W + "weight_scale_inv": torch.tensor(0.3),
        W + "activation_scale": torch.tensor(0.1),
    }
    assert torch.equal(whole(one, {"quant_method": "fp8"}), one[W + "weight"].float() * 0.3)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


@pytest.mark.parametrize("scales", [torch.rand(1), torch.rand(16, 1), torch.rand(16, 1).bfloat16()])
@pytest.mark.parametrize("codes", [torch.randint(-128, 128, (16, 32), dtype=torch.int8), fp8(16, 32)])
def test_compressed_tensors_of_8_bits_are_codes_times_scales(
    codes: torch.Tensor, scales: torch.Tensor
) -> None:
    tensors = {W + "weight": codes, W + "weight_scale": scales}
    form = "int-quantized" if codes.dtype == torch.int8 else "float-quantized"
    assert torch.equal(
        whole(tensors, compressed(form, num_bits=8)), (codes.to(scales.dtype) * scales).float()
    )


def test_compressed_tensors_packed_in_words() -> None:
    """`pack_to_int32` of compressed-tensors: the offset 8 is added, and the first of 8 values has the lowest
    bits."""
    values, scales = torch.randint(-8, 8, (16, 64)), torch.rand(16, 2)
    words = sum(((values + 8)[:, at::8] << (4 * at)) for at in range(8)) - (1 << 32) * (
        (values + 8)[:, 7::8] >= 8
    )
    tensors = {
        W + "weight_packed": words.to(torch.int32),
        W + "weight_scale": scales,
        W + "weight_shape": torch.tensor([16, 64]),
    }
    found = whole(tensors, compressed("pack-quantized", num_bits=4, group_size=32, symmetric=True))
    assert torch.equal(found, values.float() * scales.repeat_interleave(32, 1))


def in_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack rows of signed integers as `pack_to_int32` of compressed-tensors does, the last word filled up
    with zero bits."""
    per_word = 32 // bits
    values = torch.nn.functional.pad(codes.long() + (1 << bits - 1), (0, -codes.shape[1] % per_word))
    words = sum(values[:, at::per_word] << (bits * at) for at in range(per_word))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def asymmetric(
    bits: int, rows: int, groups: int, dtype: torch.dtype, index: torch.Tensor
) -> tuple[Tensors, torch.Tensor]:
    """Return a weight [rows, 128] in words with packed zero points, and its values. `index`: group of each
    column."""
    limit = 1 << bits - 1
    codes, zeros = torch.randint(-limit, limit, (rows, 128)), torch.randint(-limit, limit, (rows, groups))
    scales = torch.rand(rows, groups).to(dtype)
    stored = {
        "packed": in_words(codes, bits),
        "scale": scales,
        "zero_point": in_words(zeros.T, bits).T.contiguous(),
    }
    stored["shape"] = torch.tensor(codes.shape)
    return {f"{W}weight_{part}": tensor for part, tensor in stored.items()}, (
        (codes - zeros[:, index]) * scales[:, index]
    ).float()


CONSECUTIVE = torch.arange(128) // 32
BY_ACTIVATION = torch.arange(128) % 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bits", "rows"), [(2, 20), (4, 16), (4, 20), (8, 18)])
@pytest.mark.parametrize("groups", [4, 1])
def test_packed_zero_points_of_compressed_tensors_are_subtracted(
    bits: int, rows: int, groups: int, dtype: torch.dtype
) -> None:
    """`PackedQuantizationCompressor.decompress`: zero points are packed along the rows, which need not fill
    their last word."""
    tensors, wanted = asymmetric(bits, rows, groups, dtype, CONSECUTIVE % groups)
    settings = compressed(
        "pack-quantized", num_bits=bits, group_size=128 // groups if groups > 1 else None, symmetric=False
    )
    assert torch.equal(whole(tensors, settings), wanted)


def test_zero_points_of_older_compressed_tensors_are_not_packed() -> None:
    codes, zeros = torch.randint(-8, 8, (16, 128)), torch.randint(-8, 8, (16, 4), dtype=torch.int8)
    tensors = {
        W + "weight_packed": in_words(codes, 4),
        W + "weight_scale": torch.rand(16, 4),
        W + "weight_zero_point": zeros,
    }
    wanted = (codes - zeros[:, CONSECUTIVE]) * tensors[W + "weight_scale"][:, CONSECUTIVE]
    assert torch.equal(whole(tensors, INT4), wanted)


@pytest.mark.parametrize("index", [BY_ACTIVATION, CONSECUTIVE, torch.full((128,), -1)])
def test_g_idx_of_compressed_tensors_orders_its_groups(index: torch.Tensor) -> None:
    """`actorder: group`; where no column was ordered, -1."""
    tensors, wanted = asymmetric(4, 16, 4, torch.bfloat16, CONSECUTIVE if index[0] < 0 else index)
    assert torch.equal(whole(tensors | {W + "weight_g_idx": index.int()}, INT4), wanted)
    codes = torch.randint(-128, 128, (16, 128), dtype=torch.int8)
    stored = {
        W + "weight": codes,
        W + "weight_scale": tensors[W + "weight_scale"].float(),
        W + "weight_g_idx": index.int(),
    }
    scales = stored[W + "weight_scale"][:, CONSECUTIVE if index[0] < 0 else index]
    assert torch.equal(whole(stored, compressed("int-quantized", num_bits=8)), codes * scales)


def test_g_idx_of_compressed_tensors_with_groups_of_different_sizes_is_refused_by_name() -> None:
    tensors, _ = asymmetric(4, 16, 4, torch.float32, CONSECUTIVE)
    with pytest.raises(FsdpTuneError) as refused:
        whole(tensors | {W + "weight_g_idx": (CONSECUTIVE // 2).int()}, INT4)
    assert refused.value.problems[0].code == "model-quantised"
    assert f"{W}weight_g_idx" in refused.value.problems[0].message


def mixed(*groups: dict[str, Any]) -> dict[str, Any]:
    found = {
        f"group_{at}": {"targets": ["Linear"], "format": None, **group} for at, group in enumerate(groups)
    }
    return {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": found}


FP8_GROUP = {"format": "float-quantized", "weights": {"num_bits": 8, "type": "float"}}


@pytest.mark.parametrize("bits", [4, 8])
def test_bits_of_a_packed_weight_are_those_whose_groups_fit_its_scales(bits: int) -> None:
    """Widths of one model may differ; those of fp8 are not of integers."""
    tensors, wanted = asymmetric(bits, 16, 4, torch.float32, CONSECUTIVE)
    other = {"format": "pack-quantized", "weights": {"num_bits": 12 - bits, "group_size": 128}}
    settings = mixed(
        FP8_GROUP, {"format": "pack-quantized", "weights": {"num_bits": bits, "group_size": 32}}, other
    )
    assert torch.equal(whole(tensors, settings), wanted)


@pytest.mark.parametrize(
    ("bits", "module"), [(4, "model.layers.0.mlp.up_proj"), (8, "model.layers.0.self_attn.q_proj")]
)
@pytest.mark.parametrize("other", ["Linear", "re:.*self_attn.*", "model.layers.0.self_attn.q_proj"])
def test_bits_of_a_packed_weight_whose_scales_fit_several_are_those_of_its_name(
    bits: int, module: str, other: str
) -> None:
    """Rows of both widths have one scale; a name goes before a class (`match_targets` of
    compressed-tensors)."""
    tensors, wanted = asymmetric(bits, 16, 1, torch.float32, CONSECUTIVE * 0)
    groups = ((4, ["re:.*mlp.*"]), (8, [other]))
    settings = mixed(
        *(
            {"targets": targets, "weights": {"num_bits": each, "strategy": "channel"}}
            for each, targets in groups
        )
    )
    assert torch.equal(
        whole({name.replace(W[:-1], module): value for name, value in tensors.items()}, settings), wanted
    )


def test_weights_with_zero_points_are_refused_if_no_file_has_them() -> None:
    """`PackedQuantizationCompressor.decompress` fails; one weight may lack them: old versions left out those
    that are all zero."""
    tensors, _ = asymmetric(4, 16, 4, torch.float32, CONSECUTIVE)
    settings = compressed("pack-quantized", num_bits=4, group_size=32, symmetric=False)
    bare = {name: value for name, value in tensors.items() if "zero_point" not in name}
    assert [
        each.name
        for each in find_encodings(types_of(bare), settings).unread
        if "symmetric: false" in each.why
    ] == [W + "weight_packed"]
    others = {name.replace("up_proj", "down_proj"): value for name, value in tensors.items()}
    assert not find_encodings(types_of(bare | others), settings).unread


def test_zero_points_of_a_box_are_those_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merges decode a few rows at a time: unpacking all zero points for each of these took longer than all
    else."""
    tensors, wanted = asymmetric(4, 512, 4, torch.float32, CONSECUTIVE)
    settings = compressed("pack-quantized", num_bits=4, group_size=32, symmetric=False)
    (weight,) = find_encodings(types_of(tensors), settings).weights.values()
    unpacked: list[int] = []
    real = quantised_weight._as_signed
    monkeypatch.setattr(
        quantised_weight,
        "_as_signed",
        lambda values, bits: unpacked.append(len(values)) or real(values, bits),
    )
    assert torch.equal(read(weight, tensors, (67, 0), (5, 128)), wanted[67:72])
    assert max(unpacked) == 5


def test_mxfp4_is_that_of_transformers() -> None:
    blocks, scales = (
        torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8),
        torch.randint(110, 140, (2, 6, 3), dtype=torch.uint8),
    )
    tensors = {"mlp.experts.down_proj_blocks": blocks, "mlp.experts.down_proj_scales": scales}
    assert torch.equal(
        whole(tensors, {"quant_method": "mxfp4"}),
        convert_moe_packed_tensors(blocks, scales, dtype=torch.float32),
    )


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
NVFP4_PACKED = compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16)


def nvfp4() -> tuple[Tensors, torch.Tensor]:
    """Return the tensors of a weight that torchao quantises, as ModelOpt names them, and the values that
    torchao decodes."""
    made = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    value = torch.randn(16, 64)
    quantised = made.NVFP4Tensor.to_nvfp4(
        value, per_tensor_scale=made.per_tensor_amax_to_scale(value.abs().max())
    )
    parts = {
        "weight": quantised.qdata.view(torch.uint8),
        "weight_scale": quantised.scale,
        "weight_scale_2": quantised.per_tensor_scale,
    }
    parts["input_scale"] = torch.tensor(0.1)
    return {W + part: tensor for part, tensor in parts.items()}, quantised.dequantize(torch.float32)


def test_nvfp4_is_that_of_torchao() -> None:
    tensors, wanted = nvfp4()
    assert torch.equal(whole(tensors, MODELOPT), wanted)
    assert torch.equal(whole(tensors, {"quant_method": "modelopt_fp4"}), wanted)
    assert find_encodings(types_of(tensors), MODELOPT).parts == tensors.keys()


def test_nvfp4_of_compressed_tensors_divides_by_the_scale_of_the_tensor() -> None:
    """`NVFP4PackedCompressor.decompress` of compressed-tensors: the scale of a group over that of the tensor,
    times the value."""
    tensors, _ = nvfp4()
    packed = {W + "weight_packed": tensors[W + "weight"], W + "weight_scale": tensors[W + "weight_scale"]}
    packed |= {
        W + "weight_global_scale": torch.tensor([1000.3]),
        W + "input_global_scale": torch.tensor([3.0]),
    }
    codes = (
        torch.stack([packed[W + "weight_packed"] & 15, packed[W + "weight_packed"] >> 4], -1)
        .reshape(16, 64)
        .int()
    )
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])[codes]
    scales = (packed[W + "weight_scale"].float() / packed[W + "weight_global_scale"]).repeat_interleave(16, 1)
    assert torch.equal(whole(packed, NVFP4_PACKED), values * scales)


@pytest.mark.parametrize("shape", [(), (256,), (256, 1), (2, 3), (2, 1, 3, 1)])
def test_fp8_of_modelopt_has_scales_of_the_tensor_of_rows_or_of_blocks(shape: tuple[int, ...]) -> None:
    codes, scales = fp8(256, 384), torch.rand(shape)
    parts = {
        W + "weight": codes,
        W + "weight_scale": scales,
        W + "k_scale": torch.tensor(0.2),
        W + "input_scale": torch.tensor(0.1),
    }
    by_rows = scales.reshape(2, 3).repeat_interleave(128, 0) if shape[:1] == (2,) else scales.reshape(-1, 1)
    factors = by_rows.repeat_interleave(384 // by_rows.shape[1], 1)
    assert torch.equal(whole(parts, MODELOPT | {"quant_algo": "FP8"}), codes.float() * factors)


@pytest.mark.parametrize(("shape", "settings"), [((960, 192), {}), ((96, 64), {"group_size": 32})])
def test_last_block_of_modelopt_is_shorter(shape: tuple[int, int], settings: dict[str, Any]) -> None:
    """It pads a weight to whole blocks: 960 columns have 8 scales, for 128 columns each."""
    block = settings.get("group_size", 128)
    counts = tuple(-(-size // block) for size in shape)
    types = {
        W + "weight": StoredType("F8_E4M3", shape),
        W + "weight_scale": StoredType("F32", (counts[0], 1, counts[1], 1)),
    }
    found = find_encodings(types, {"quant_method": "modelopt", **settings})
    assert found.weights[W + "weight"].block == (block, block)
    other = types | {W + "weight_scale": StoredType("F32", (counts[0] + 1, 1, counts[1], 1))}
    assert find_encodings(other, {"quant_method": "modelopt", **settings}).weights == {}


def test_settings_of_modelopt_are_found_in_their_own_file() -> None:
    written: dict[str, Any] = {
        "config.json": {},
        "hf_quant_config.json": {"quantization": {"quant_algo": "NVFP4"}},
    }
    assert method_of(settings_of_files(written.get, [W + "weight_scale"])) == "modelopt"
    assert settings_of_files(written.get, [W + "weight"]) == {}
    assert (
        method_of(
            settings_of_files(
                (written | {"config.json": {"quantization_config": FP8}}).get, [W + "weight_scale"]
            )
        )
        == "fp8"
    )


CACHE_ALONE = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float"},
}


@pytest.mark.parametrize("settings", [CACHE_ALONE, MODELOPT, {"quant_method": "quark"}, FP8])
@pytest.mark.parametrize(
    "part",
    [
        "k_scale",
        "k_proj.k_scale",
        "v_zero_point",
        "prob_output_scale",
        "k_proj.input_scale",
        "k_proj.output_zero_point",
    ],
)
def test_tensors_that_quantise_a_cache_beside_plain_weights_are_none_of_a_plain_model(
    settings: dict[str, Any], part: str
) -> None:
    attention = "model.layers.0.self_attn."
    tensors = {f"{attention}k_proj.weight": torch.rand(8, 8), f"{attention}{part}": torch.tensor(0.02)}
    found = find_encodings(types_of(tensors), settings)
    assert found.of_activations == (attention + part,)
    assert found.parts == {attention + part}
    assert found.unread == ()
    assert find_encodings(types_of(tensors), {}).parts == set()  # nothing gives it that meaning


def test_settings_of_modelopt_are_found_if_only_the_cache_is_quantised() -> None:
    written: dict[str, Any] = {
        "config.json": {},
        "hf_quant_config.json": {"quantization": {"kv_cache_quant_algo": "FP8"}},
    }
    assert (
        method_of(settings_of_files(written.get, ["model.layers.0.self_attn.k_proj.k_scale"])) == "modelopt"
    )


def drop(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.endswith(names)}


PACKED = {W + "weight_packed": torch.zeros(16, 8, dtype=torch.int32), W + "weight_scale": torch.rand(16, 2)}
BLOCKS = {
    "e.down_proj_blocks": torch.zeros(2, 6, 3, 16, dtype=torch.uint8),
    "e.down_proj_scales": torch.zeros(2, 6, 3, dtype=torch.uint8),
}
ONE = {W + "weight": fp8(128, 128), W + "weight_scale_inv": torch.rand(1, 1)}
INT4 = compressed("pack-quantized", num_bits=4)
INT8 = {W + "weight": torch.zeros(16, 32, dtype=torch.int8), W + "weight_scale": torch.rand(16, 1)}
W8 = compressed("int-quantized", num_bits=8)
MARLIN_24 = compressed("marlin-24", num_bits=4)
FOUR = {
    W + "weight": torch.zeros(16, 32, dtype=torch.uint8),
    W + "weight_scale": fp8(16, 4),
    W + "weight_scale_2": torch.tensor(0.1),
}


@pytest.mark.parametrize(
    ("tensors", "settings", "named"),
    [
        (ONE, {}, "weight"),  # a config without its quantization_config
        (drop("_inv")(ONE), FP8, "weight"),
        ({**ONE, W + "weight_scale_inv": torch.rand(3, 1)}, FP8, "weight"),
        (ONE, {"quant_method": "modelopt"}, "weight"),
        ({W + "weight": torch.rand(8, 8), W + "weight_scale_inv": torch.rand(1, 1)}, FP8, "weight_scale_inv"),
        (PACKED, FP8, "weight_packed"),
        ({**PACKED, W + "weight_zero_point": torch.zeros(16, 2, dtype=torch.int32)}, INT4, "weight_packed"),
        ({**PACKED, W + "weight_zero_point": torch.zeros(16, 1, dtype=torch.int8)}, INT4, "weight_packed"),
        (
            {
                **PACKED,
                W + "weight_scale": torch.rand(1, 2),
                W + "weight_zero_point": torch.zeros(2, 2, dtype=torch.int32),
            },
            INT4,
            "weight_packed",
        ),
        ({**PACKED, W + "weight_g_idx": torch.zeros(32, dtype=torch.int32)}, INT4, "weight_g_idx"),
        ({**PACKED, W + "weight_g_idx": torch.zeros(64)}, INT4, "weight_g_idx"),
        (
            PACKED,
            mixed(*({"weights": {"num_bits": bits, "strategy": "group"}} for bits in (4, 8))),
            "weight_packed",
        ),
        ({**INT8, W + "weight_zero_point": torch.zeros(2, 1, dtype=torch.int32)}, W8, "weight_zero_point"),
        ({**INT8, W + "weight_zero_point": torch.zeros(8, 1, dtype=torch.int8)}, W8, "weight_zero_point"),
        ({**INT8, W + "weight": torch.rand(16, 32)}, W8, "up_proj.weight"),  # calibrated and not compressed
        (PACKED, compressed("mxfp4-pack-quantized", num_bits=4, type="float"), "weight_scale"),
        (
            {W + part: PACKED[W + "weight_packed"] for part in ("weight_packed", "scale_packed", "meta")},
            MARLIN_24,
            "meta",
        ),
        (PACKED, compressed("pack-quantized", num_bits=3), "weight_packed"),
        (PACKED, compressed("marlin-24", num_bits=4), "weight_scale"),
        (FOUR, {}, "up_proj.weight"),
        (drop("_2")(FOUR), MODELOPT, "up_proj.weight"),
        ({**FOUR, W + "weight_scale": fp8(16, 2)}, MODELOPT, "up_proj.weight"),
        ({**FOUR, W + "weight_scale": torch.rand(16, 4)}, MODELOPT, "up_proj.weight"),
        ({**FOUR, W + "weight_scale_2": torch.rand(16)}, MODELOPT, "up_proj.weight"),
        # AWQ: it scales the input
        (
            {**FOUR, W + "pre_quant_scale": torch.rand(64)},
            MODELOPT,
            "pre_quant_scale",
        ),
        # a layer next to the weight
        (
            {**FOUR, W + "svdquant_lora_a": torch.rand(4, 64)},
            MODELOPT,
            "svdquant_lora_a",
        ),
        (
            {W + "weight": torch.rand(16, 64), W + "pre_quant_scale": torch.rand(64)},
            MODELOPT,
            "pre_quant_scale",
        ),
        (drop("weight")(FOUR), MODELOPT, "weight_scale"),
        # int8: its input is scaled, too
        (
            {**FOUR, W + "weight": torch.zeros(16, 64, dtype=torch.int8)},
            MODELOPT,
            "up_proj.weight",
        ),
        (
            {"e.up_proj": FOUR[W + "weight"], "e.up_proj_weight_scale": FOUR[W + "weight_scale"]},
            MODELOPT,
            "e.up_proj_weight_scale",
        ),
        (BLOCKS, {}, "down_proj_blocks"),
        (drop("_scales")(BLOCKS), {"quant_method": "mxfp4"}, "down_proj_blocks"),
    ],
)
def test_what_no_rule_reads_is_named(tensors: Tensors, settings: dict[str, Any], named: str) -> None:
    assert any(each.name.endswith(named) for each in find_encodings(types_of(tensors), settings).unread)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "C64", "I64", "BOOL"])
def test_types_of_plain_models_need_no_rule(dtype: str) -> None:
    assert find_encodings({W + "weight": StoredType(dtype, (4, 4))}, {}).unread == ()


def test_settings_are_found_where_configs_have_them() -> None:
    assert method_of(quantisation_of({"text_config": {"quantization_config": FP8}})) == "fp8"
    assert (
        method_of(quantisation_of({"compression_config": {"config_groups": {"a": {}}}}))
        == "compressed-tensors"
    )
    nested = {
        "quant_method": "compressed-tensors",
        "quantization_config": INT4 | {"transform_config": {"config_groups": {"a": {}}}},
    }
    assert (
        method_of(quantisation_of({"quantization_config": nested}))
        == "compressed-tensors with transform_config"
    )
    assert quantisation_of({"quantization_config": nested})["config_groups"] == INT4["config_groups"]
    assert method_of({"load_in_4bit": True}) == "bitsandbytes"
    assert method_of(quantisation_of({"text_config": SimpleNamespace()})) is None
