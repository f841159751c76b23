"""Conversions against torch, element by element; NaN and infinity are always found."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fsdp_tune.core.tensors.dtypes import DTYPES, OF_SAFETENSORS
from fsdp_tune.merge.copy.values import NonFinite, all_finite, convert, count_non_finite, is_checked

FLOATS = ("float64", "float32", "float16", "bfloat16")


def every_pattern(name: str) -> np.ndarray:
    """All values of a 16-bit type; of the wider ones all exponents, both signs, and mantissas around every
    tie of bf16 and fp16."""
    if name in ("float16", "bfloat16"):
        return np.arange(1 << 16, dtype=np.uint16).view(DTYPES[name].numpy)
    tops = np.arange(1 << 16, dtype=np.uint32) << 16
    lows = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x0FFF, 0x1000, 0x1001, 0x3000], dtype=np.uint32)
    values = (tops[:, None] | lows).reshape(-1).view(np.float32)
    return values if name == "float32" else values.astype(np.float64)


def as_torch(values: np.ndarray, name: str) -> torch.Tensor:
    raw = np.ascontiguousarray(values).view(np.uint8)
    return torch.from_numpy(raw.copy()).view(getattr(torch, name))


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_conversion_rounds_as_torch_does(source, target):
    values = every_pattern(source)
    out = np.empty(values.shape, DTYPES[target].numpy)
    convert(values, out)
    ours, theirs = as_torch(out, target), as_torch(values, source).to(getattr(torch, target))
    nan = torch.isnan(theirs)
    assert torch.equal(torch.isnan(ours), nan)
    assert torch.equal(ours[~nan], theirs[~nan])
    assert torch.equal(torch.signbit(ours[~nan]), torch.signbit(theirs[~nan]))


@pytest.mark.parametrize(
    "name", [name for name, dtype in DTYPES.items() if is_checked(dtype) and name != "complex64"]
)
def test_non_finite_values_are_found_anywhere(name):
    dtype = DTYPES[name]
    tensor = torch.ones(4099).to(getattr(torch, name))
    for bad in (float("nan"), float("inf"), float("-inf")):
        for position in (0, 17, 4098):
            spoiled = tensor.clone()
            spoiled[position] = torch.tensor(bad).to(spoiled.dtype)
            values = spoiled.view(torch.uint8).numpy().view(dtype.numpy)
            scratch = np.empty(values.nbytes, np.uint8)
            expected = bool(torch.isfinite(spoiled.float()).all())
            assert all_finite(values, scratch) is expected
            counts = NonFinite()
            count_non_finite(values, counts)
            assert (counts.nan, counts.inf) == (
                int(torch.isnan(spoiled.float()).sum()),
                int(torch.isinf(spoiled.float()).sum()),
            )


@pytest.mark.parametrize("name", FLOATS)
def test_largest_finite_value_is_finite(name):
    info = torch.finfo(getattr(torch, name))
    values = (
        torch.tensor([info.max, info.min, info.tiny, 0.0], dtype=getattr(torch, name))
        .view(torch.uint8)
        .numpy()
        .view(DTYPES[name].numpy)
    )
    assert all_finite(values, np.empty(values.nbytes, np.uint8))


def test_element_types_have_the_names_and_sizes_of_torch_and_safetensors():
    from safetensors.torch import _TYPES

    for dtype in DTYPES.values():
        assert getattr(torch, dtype.name).itemsize == dtype.item_bytes
        # in the format, and not in the table of safetensors' Python package
        if dtype.name != "float8_e8m0fnu":
            assert _TYPES[dtype.safetensors] == getattr(torch, dtype.name)
    assert len(OF_SAFETENSORS) == len(DTYPES)
