"""GPTQ and AWQ: values are those of the libraries' own formulas, and layouts that mean others are refused."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.tensors.quantised_formats import find_encodings, method_of
from tests.core.test_quantised_formats import Tensors, types_of, whole

W = "model.layers.0.mlp.up_proj."
OUT, IN, SIZE = 32, 96, 32
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": SIZE, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": SIZE, "zero_point": True, "version": "gemm"}


def packed(values: torch.Tensor, bits: int, order: tuple[int, ...] = tuple(range(16))) -> torch.Tensor:
    """Pack rows of integers into words, one value after the other: value i of a word in the bits from bits *
    order[i] on."""
    rows: list[list[int]] = []
    for row in values.tolist():
        words = [row[at : at + 32 // bits] for at in range(0, len(row), 32 // bits)]
        sums = [sum(value << (bits * order[i]) for i, value in enumerate(word)) for word in words]
        rows.append([word - (1 << 32) if word >= 1 << 31 else word for word in sums])
    return torch.tensor(rows, dtype=torch.int32)


def made(
    bits: int, dtype: torch.dtype, zeros_from: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Return codes [in, out], zero points and scales [groups, out], and the number of groups."""
    groups = IN // SIZE
    codes = torch.randint(0, 1 << bits, (IN, OUT))
    return (
        codes,
        torch.randint(zeros_from, 1 << bits, (groups, OUT)),
        torch.rand(groups, OUT).to(dtype),
        groups,
    )


def gptq(
    codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, index: torch.Tensor | None, bits: int
) -> Tensors:
    parts = {"qweight": packed(codes.T, bits).T.contiguous(), "qzeros": packed(zeros, bits), "scales": scales}
    parts |= {} if index is None else {"g_idx": index.int()}
    return {W + part: value for part, value in parts.items()}


@pytest.mark.parametrize("order", ["consecutive", "without g_idx", "by activation"])
@pytest.mark.parametrize(
    ("bits", "form", "dtype"),
    [(4, "gptq", torch.float16), (8, "gptq", torch.bfloat16), (2, "gptq_v2", torch.float16)],
)
def test_gptq_is_that_of_gptqmodel(bits: int, form: str, dtype: torch.dtype, order: str) -> None:
    """`TorchQuantLinear.dequantize_weight`: scales[g_idx] * (weight - zeros[g_idx]), in the type of the
    scales; [in, out]."""
    codes, zeros, scales, groups = made(bits, dtype, zeros_from=1 if form == "gptq" else 0)
    index = torch.randperm(IN) % groups if order == "by activation" else torch.arange(IN) // SIZE
    stored = zeros - 1 if form == "gptq" else zeros
    tensors = gptq(codes, stored, scales, None if order == "without g_idx" else index, bits)
    wanted = (scales[index] * (codes - zeros[index])).T
    assert wanted.dtype == dtype
    assert torch.equal(
        whole(
            tensors, GPTQ | {"bits": bits, "checkpoint_format": form, "desc_act": order == "by activation"}
        ),
        wanted.float(),
    )


def test_gptq_restores_zero_points_that_gptqmodel_borrowed_between_values() -> None:
    """Its first format subtracts 0x11111111 from each word, and a zero point of 0 borrows from the value next
    to it."""
    codes, zeros, scales, _ = made(4, torch.float16, zeros_from=0)
    zeros[0, :3] = 0
    tensors = gptq(codes, zeros, scales, torch.arange(IN) // SIZE, 4)
    tensors[W + "qzeros"] -= 0x11111111
    index = torch.arange(IN) // SIZE
    assert torch.equal(whole(tensors, GPTQ), (scales[index] * (codes - zeros[index])).T.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_awq_is_that_of_autoawq(dtype: torch.dtype) -> None:
    """`WQLinear_GEMM` packs outputs 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on; `dequantize_gemm`:
    (weight - zeros) * scales."""
    codes, zeros, scales, _ = made(4, dtype, zeros_from=0)
    positions = (0, 4, 1, 5, 2, 6, 3, 7)
    parts = {"qweight": packed(codes, 4, positions), "qzeros": packed(zeros, 4, positions), "scales": scales}
    wanted = ((codes - zeros.repeat_interleave(SIZE, 0)) * scales.repeat_interleave(SIZE, 0)).T
    assert torch.equal(whole({W + part: value for part, value in parts.items()}, AWQ), wanted.float())


def layer(method: str, **changed: torch.Tensor | None) -> Tensors:
    codes, zeros, scales, _ = made(4, torch.float16, 1)
    tensors = gptq(codes, zeros - 1, scales, torch.arange(IN) // SIZE, 4)
    if method == "awq":
        tensors = {W + "qweight": packed(codes, 4), W + "qzeros": packed(zeros, 4), W + "scales": scales}
    tensors |= {W + name: value for name, value in changed.items() if value is not None}
    return {
        name: value for name, value in tensors.items() if changed.get(name.removeprefix(W), value) is not None
    }


I32 = torch.int32


@pytest.mark.parametrize(
    ("method", "changed", "named"),
    [
        ("gptq", {"qzeros": None}, "qweight"),
        ("gptq", {"scales": None}, "qweight"),
        # 3 bits
        (
            "gptq",
            {"qweight": torch.zeros(9, 32, dtype=I32), "qzeros": torch.zeros(3, 3, dtype=I32)},
            "qweight",
        ),
        ("gptq", {"g_idx": torch.zeros(95, dtype=I32)}, "qweight"),
        ("gptq", {"qweight": torch.zeros(12, 40, dtype=I32)}, "qweight"),
        ("gptq", {"qzeros": torch.zeros(2, 4, dtype=I32)}, "qweight"),
        ("gptq", {"qweight": torch.zeros(12, 32, dtype=torch.int64)}, "qweight"),
        ("awq", {"qweight": torch.zeros(96, 6, dtype=I32)}, "qweight"),
        ("awq", {"qzeros": torch.zeros(3, 8, dtype=I32)}, "qweight"),  # 8 bits
        ("awq", {"act.scales": torch.zeros(32)}, "act.scales"),
    ],
)
def test_layers_that_no_rule_reads_are_named(
    method: str, changed: dict[str, torch.Tensor | None], named: str
) -> None:
    found = find_encodings(types_of(layer(method)), GPTQ if method == "gptq" else AWQ)
    assert (found.weights.keys(), found.unread) == ({W + "weight"}, ())
    assert found.weights[W + "weight"].shape == (OUT, IN)
    damaged = find_encodings(types_of(layer(method, **changed)), GPTQ if method == "gptq" else AWQ)
    assert any(each.name == W + named for each in damaged.unread)


def test_g_idx_of_zeros_means_consecutive_groups() -> None:
    """A quantiser without `desc_act` may leave it unfilled; with one group, zeros are its index."""
    codes, zeros, scales, _ = made(4, torch.float16, zeros_from=1)
    consecutive = whole(gptq(codes, zeros - 1, scales, torch.arange(IN) // SIZE, 4), GPTQ)
    assert torch.equal(whole(gptq(codes, zeros - 1, scales, torch.zeros(IN), 4), GPTQ), consecutive)
    of_one = gptq(codes, zeros[:1] - 1, scales[:1], torch.zeros(IN), 4)
    assert torch.equal(whole(of_one, GPTQ), (scales[:1] * (codes - zeros[:1])).T.float())


@pytest.mark.parametrize("wrong", [-1, IN // SIZE])
def test_g_idx_without_scales_for_its_groups_is_refused_by_name(wrong: int) -> None:
    codes, zeros, scales, groups = made(4, torch.float16, zeros_from=1)
    index = torch.arange(IN) // SIZE
    index[5] = wrong
    with pytest.raises(FsdpTuneError, match=rf"`{W}g_idx` .* scales for {groups}") as caught:
        whole(gptq(codes, zeros - 1, scales, index, 4), GPTQ)
    assert caught.value.exit_code == 2


def test_time_to_find_layers_is_proportional_to_their_number() -> None:
    """A mixture of experts has 36,000 layers and more; a search in a list of them took 10 s."""
    types = types_of(layer("awq"))
    many = {
        name.replace("layers.0", f"layers.{number}"): stored
        for number in range(20_000)
        for name, stored in types.items()
    }
    started = time.process_time()
    assert len(find_encodings(many, AWQ).weights) == 20_000
    assert time.process_time() - started < 2


def test_groups_without_g_idx_end_where_the_settings_say() -> None:
    codes, zeros, scales = (
        torch.randint(0, 16, (80, 8)),
        torch.randint(1, 16, (3, 8)),
        torch.rand(3, 8).half(),
    )
    index = torch.arange(80) // 32
    tensors = gptq(codes, zeros - 1, scales, None, 4)
    assert torch.equal(whole(tensors, GPTQ), (scales[index] * (codes - zeros[index])).T.float())
    assert find_encodings(types_of(tensors), GPTQ | {"group_size": -1}).weights == {}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (GPTQ | {"checkpoint_format": "marlin"}, "gptq, marlin"),
        (GPTQ | {"is_marlin_format": True}, "gptq, marlin"),
        (GPTQ | {"format": "gptq_p"}, "gptq, gptq_p"),
        (AWQ | {"version": "gemv_fast"}, "awq, gemv_fast"),
        (AWQ | {"backend": "llm-awq"}, "awq, llm-awq"),
        (AWQ | {"version": "GEMM"}, "awq"),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, "gptq"),
    ],
)
def test_formats_of_one_kernel_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    assert method_of(settings) == named
